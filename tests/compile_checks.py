"""torch.compile, torch.export and torch.library's own checks, on any device."""

import importlib
import types

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from tests import op_cases as cases
from tests.models import Step, random_tokens, tiny_model
from tests.modes import Operators, new_memory_is_nan
from tests.ops import collected
from tests.ops.common import BF16, FLOATS, check_each_operation, randn, self_check_of
from tests.ops.signature import New
from tests.tolerances import assert_close


def custom_operators(package) -> dict:
    """Every operator that a loaded package has registered, by name."""
    namespace = importlib.import_module(f"{package.__name__}._ops").NAMESPACE
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(namespace + "::")]
    return {name.split("::")[1]: getattr(getattr(torch.ops, namespace), name.split("::")[1]) for name in names}


OPERATORS = tuple(collected("OPERATORS"))
BY_AUTOGRAD = {"gated_delta_rule_backward": (BF16,), "short_conv_backward": FLOATS}  # the dtypes that their kernels take


def operators_in(dtypes, kernels: bool) -> list:
    """(operator, dtype) of all that opcheck can call. It calls where there is no autograd, which PyTorch's backward pass of some needs."""
    pairs = ((name, dtype) for name in OPERATORS for dtype in dtypes)
    return [(name, dtype) for name, dtype in pairs if name not in BY_AUTOGRAD or (kernels and dtype in BY_AUTOGRAD[name])]


def calls_of(package, name, device, dtype) -> list:
    """The calls of an operator that its operation's file has, as the operator takes them."""
    calls = collected("OPERATORS")[name](New(device, dtype))
    return calls(package) if callable(calls) else calls


def check_operator(package, name, device, dtype):
    """opcheck: its schema tells the truth, nothing is overwritten or aliased, the fake tensors are like the real ones, and it
    traces with dynamic shapes. And its results are written whole, or they differ from run to run."""
    operator = custom_operators(package)[name]
    for call in calls_of(package, name, device, dtype):
        with new_memory_is_nan(), Operators():  # under a mode it is not replayed: a plan's memory comes from another allocator
            unwritten = [number for number, each in enumerate(tree_leaves(operator(*call))) if each.isnan().any()]
        assert not unwritten, f"results {unwritten} of {name} have memory that nobody writes"
        torch.library.opcheck(operator, tuple(call))


def check_rows_nobody_counted(package, name, device):
    """A graph takes an operator of rows that a mask chose, whose number is known when it runs."""
    operator = custom_operators(package)[name]
    for call in calls_of(package, name, device, torch.float32):
        if isinstance(call[0], list):  # of a decoder layer's nodes, which divide tokens into batches
            continue
        rows = next(len(value) for value in call if isinstance(value, torch.Tensor) and value.dim())

        def chosen(mask, *found, rows=rows):
            return operator(*[x[mask] if isinstance(x, torch.Tensor) and x.shape[:1] == (rows,) else x for x in found])

        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            torch.compile(chosen, fullgraph=True, backend="aot_eager")(torch.ones(rows, dtype=torch.bool, device=device), *call)


def check_compiled_self_checks(package, device, dtype, **options):
    """What `python -m bastile --check` calls gives the same when it is compiled whole, forward and backward. options: class attributes of
    its `Inputs`, such as how many tokens it draws."""
    self_check = self_check_of(package)
    eager = type("Inputs", (self_check.CheckInputs,), options)

    class Compiled(eager):
        def call(self, function, *arguments, **switches):
            torch._dynamo.reset()
            return torch.compile(lambda *given: function(*given, **switches), backend="aot_eager", fullgraph=True)(*arguments)

    def check(call):
        wanted, found = (self_check.results_of(call, kind(torch.device(device), dtype, False)) for kind in (eager, Compiled))
        errors = [self_check.relative_error(a, b) for a, b in zip(found, wanted, strict=True)]
        assert max(errors) <= self_check.BOUNDS[dtype], f"results and gradients are off by {errors}"

    check_each_operation(package, check)


def check_compiled_operation(ops, operation, device, backend, dtype=torch.float32, tokens=(3, 4, 6, 9, 13, 21), **options):
    """fullgraph, forward and backward, and one more graph at most for all other numbers of tokens. options: of torch.compile."""
    torch._dynamo.reset()
    counters.clear()
    ops = types.SimpleNamespace(**{operation: getattr(ops, operation)})  # found outside of the trace, which imports nothing
    compiled = torch.compile(lambda found: cases.run(ops, operation, found), backend=backend, fullgraph=True, **options)
    for count in tokens:
        found = cases.arguments(operation, dtype, count, device)
        needed = cases.differentiable(operation, found)
        leaves = {name: t.requires_grad_(name in needed) for name, t in found.items()}
        eager, _, expected = cases.step(ops, operation, found)
        results = compiled(leaves)
        upstream = [randn(*r.shape, dtype=r.dtype, device=device, seed=20 + i) for i, r in enumerate(results)]
        torch.autograd.backward(results, upstream)
        for a, b in zip(results, eager, strict=True):
            assert_close(a, b, dtype, f"{operation}, {count} tokens", 2)
        for name in needed:
            assert_close(leaves[name].grad, expected[name], dtype, f"{operation}, {count} tokens, {name}", 2)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 2, f"{graphs} graphs for {len(tokens)} numbers of tokens"


LOSSES = {
    "the mean": {},
    "the sum": {"reduction": "sum"},
    "every token": {"reduction": "none"},
    "a counted number of items": {"num_items": torch.tensor(3)},
    "a number of items that is no whole one": {"num_items": torch.tensor(2.5)},
    "every option": {"label_smoothing": 0.1, "softcap": 20.0, "lse_square_scale": 0.01, "return_z_loss": True,
                     "return_predicted_tokens": True},
    "token scaling": {"use_token_scaling": True},
}


def check_compiled_loss(ops, options, device, backend, dtype):
    """The loss and the gradients are those of eager mode, whatever the gradient from above and whoever needs one, in one graph more than
    one for all lengths."""
    torch._dynamo.reset()
    counters.clear()
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    compiled = torch.compile(ops.linear_cross_entropy, backend=backend, fullgraph=True)
    for seed, tokens in enumerate((5, 8, 13, 21)):
        target = torch.arange(tokens, device=device) * 7 % 40
        target[1] = -100
        results = []
        for function in (ops.linear_cross_entropy, compiled):
            hidden, weight = (randn(*shape, dtype=dtype, device=device, seed=seed).requires_grad_() for shape in ((tokens, 64), (40, 64)))
            found = function(hidden, weight, target, **options)
            loss = found if isinstance(found, torch.Tensor) else found.loss
            loss.backward(torch.linspace(0.3, 0.7, loss.numel(), device=device).view(loss.shape))
            others = [] if loss is found else [value.float() for value in found[1:] if value is not None]
            results.append((loss, hidden.grad, weight.grad, *others))
        for number, (mine, expected) in enumerate(zip(*reversed(results), strict=True)):
            assert_close(mine, expected, dtype, f"result {number} of {tokens} tokens", 2)
    assert counters["stats"]["unique_graphs"] <= 2


def largest_tensors(function, *args) -> list:
    """The largest number of elements of a tensor in each graph, forward and backward, that torch.compile makes of a function."""
    found = []

    def look(graph, examples):
        values = [value for node in graph.graph.nodes for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
        found.append(max(value.numel() for value in values))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look))(*args).backward()
    return found


def made_of_shape(shape, function, *args) -> list:
    """The names of the operations whose result has a shape, in each graph, forward and backward, that torch.compile makes of a function."""
    found = []

    def look(graph, examples):
        made = [node for node in graph.graph.nodes if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)]
        found.append([node.target.__name__.split(".")[0] for node in made if node.meta["val"].shape == shape])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look))(*args).backward()
    return found


def compiled_with_masks(model):
    """(the compiled model, a list that gets for each attention of its graphs, as they are made, whether it has a mask)."""
    masked = []

    def look(graph, examples):
        attends = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target) and "backward" not in str(node.target)]
        masked.extend(node.kwargs.get("attn_mask") is not None for node in attends)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    return torch.compile(model, backend=aot_autograd(fw_compiler=look, bw_compiler=look), fullgraph=True), masked


def graphs_of(model, inputs, **options):
    """How many graphs torch.compile makes of a model's training steps."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, **options)
    for ids in inputs:
        model.zero_grad()  # gradients of the last step lie in memory that a CUDA graph writes again
        torch.compiler.cudagraph_mark_step_begin()
        compiled(input_ids=ids, labels=ids).loss.backward()
    return counters["stats"]["unique_graphs"]


def check_compiled_model(package, device, dtype=torch.float32, lengths=(17, 18, 33, 40, 300), model=None, recompiles=False, **options):
    """A kernelized model in training, fullgraph, one graph for all lengths; losses and gradients are those of eager mode."""
    torch._dynamo.reset()
    counters.clear()
    model = package.kernelize((model or tiny_model(num_hidden_layers=1)).to(device, dtype))
    compiled = torch.compile(model, fullgraph=True, **options)
    inputs = [random_tokens(2, length).to(device) for length in lengths]
    expected = [Step(model, input_ids=ids, labels=ids) for ids in inputs]
    with torch._dynamo.config.patch(error_on_recompile=options.get("dynamic") is True and not recompiles):
        for ids, wanted in zip(inputs, expected, strict=True):
            for _ in range(3 if options.get("mode") else 1):  # graphs are recorded at the second call and replayed at the third
                model.zero_grad()
                torch.compiler.cudagraph_mark_step_begin()
                loss = compiled(input_ids=ids, labels=ids).loss
                loss.backward()
            assert_close(loss, wanted.loss, dtype, f"loss of {ids.shape[1]} tokens")
            for name, parameter in model.named_parameters():
                assert_close(parameter.grad, wanted.gradients[name], dtype, f"{name}, {ids.shape[1]} tokens", 10)
    return counters["stats"]["unique_graphs"]


def with_adapters(model, **options):
    """A model with PEFT's LoRA on every linear layer, whose B is not zero."""
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(model, LoraConfig(**options))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.05)
    return model


# What people train: (the model's dtype, whether under autocast, options of LoRA or None)
FORMS = {
    "plain": (torch.bfloat16, False, None),
    "LoRA": (torch.bfloat16, False, {}),
    "rsLoRA on attention": (torch.bfloat16, False, {"use_rslora": True, "target_modules": ["q_proj", "v_proj", "o_proj"]}),
    "autocast": (torch.bfloat16, True, None),
    "autocast over float32": (torch.float32, True, None),
    "autocast over float32 with LoRA": (torch.float32, True, {}),
}


def operators_of(package, model, **options):
    """(names, the compiled model): the names of the package's operators in its graphs, in a list that grows as they are made."""
    called, namespace = [], importlib.import_module(f"{package.__name__}._ops").NAMESPACE

    def look(graph, examples):
        called.extend(str(node.target).split(".")[1] for node in graph.graph.nodes if str(node.target).startswith(namespace + "."))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    return called, torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look), **options)


def check_compiled_form(package, form, device, backend, lengths, sizes=None, **options):
    """A training step of what people train, fullgraph: losses and gradients are eager mode's, in two graphs for all lengths. options: of
    `kernelize`.

    Returns the names of the package's operators in the graphs.
    """
    dtype, autocast, lora = FORMS[form]
    model = tiny_model(dtype, num_hidden_layers=2, **(sizes or {})).to(device)
    model = package.kernelize(model if lora is None else with_adapters(model, **lora), **options)
    called, compiled = operators_of(package, model)
    if backend != "look":
        compiled = torch.compile(model, fullgraph=True, backend=backend)
    counters.clear()
    for length in lengths:
        ids, found = random_tokens(2, length).to(device), []
        for run in (model, compiled):
            model.zero_grad()
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
                loss = run(input_ids=ids, labels=ids).loss
            loss.backward()
            found.append((loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        (expected, wanted), (loss, gradients) = found
        assert_close(loss, expected, torch.bfloat16, f"loss of {length} tokens")
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            assert gradient.dtype == wanted[name].dtype
            assert_close(gradient, wanted[name], torch.bfloat16, f"{form}: {name}, {length} tokens", 5)
    assert counters["stats"]["unique_graphs"] <= 2
    return called


def check_exported_model(package, device, strict, step=1):
    """torch.export of the model as it generates, with a dynamic length: our operators are in the graph, and give the same.

    step: lengths are multiples of it. On a GPU torch's attention pads its mask to 8 and exports no others, ours or not.
    """
    model = package.kernelize(tiny_model().to(device)).eval()
    length = step * torch.export.Dim("length", min=2, max=128) if step > 1 else torch.export.Dim("length", min=2, max=128)
    with torch.no_grad():
        program = torch.export.export(
            model,
            (random_tokens(2, 17 if step == 1 else 3 * step).to(device),),
            {"use_cache": False},
            dynamic_shapes={"input_ids": {1: length}, "use_cache": None},
            strict=strict,
        )
        for tokens in (5, 17, 40) if step == 1 else (2 * step, 5 * step):
            ids = random_tokens(2, tokens).to(device)
            expected = model(input_ids=ids, use_cache=False).logits
            assert_close(program.module()(ids, use_cache=False).logits, expected, torch.float32, f"{tokens} tokens")
    namespace = importlib.import_module(f"{package.__name__}._ops").NAMESPACE
    called = {str(node.target).split(".")[1] for node in program.graph.nodes if str(node.target).startswith(namespace + ".")}
    fused = {"norm_attention_inputs", "norm_mlp"}  # strict, the decoder layer is traced as it is compiled
    assert called == {"rms_norm_forward", *(fused if strict else {"rotary_forward", "swiglu_forward"})}
