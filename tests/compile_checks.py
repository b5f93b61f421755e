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
from tests.ops.common import randn
from tests.tolerances import assert_close

NORM = '[1e-06, 0.0, "first"]'  # Qwen3's descriptions, as `encoded` writes them
INPUTS, OUTPUTS = f'[128, {NORM}, {NORM}, false, "halves", 0, null]', f'[{NORM}, {NORM}, {NORM}, "silu", 1.0]'


def custom_operators(package) -> dict:
    """Every operator that a loaded package has registered, by name."""
    namespace = importlib.import_module(f"{package.__name__}._ops").NAMESPACE
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(namespace + "::")]
    return {name.split("::")[1]: getattr(getattr(torch.ops, namespace), name.split("::")[1]) for name in names}


def _plan_of_70_tokens(device) -> tuple:
    """(limits, walks) of one causal document."""
    t = torch.arange(128)
    limits = torch.where(t < 70, torch.stack((0 * t, t + 1, t, 0 * t + 70)), 0)
    queries, keys = [[1, 0], [0, 0], [0, 0], [65, 1], [70, 64]], [[0, 1], [0, 64], [63, 69], [70, 70], [70, 70]]
    return limits.to(device, torch.int32), torch.tensor(queries + keys, dtype=torch.int32, device=device)


def _projection_tensors(new, shapes, dtype, of_weights, adapters) -> tuple:
    """(the tensors of each projection, what the backward pass finds made): of every second one with adapters, of all dtypes."""
    tensors, made, tokens, rows_of_a = [], [], 6, []
    for i, (rows, columns) in enumerate(shapes):
        weight = new(rows, columns, seed=20 + i, dtype=of_weights)
        if adapters and i % 2 == 0:
            kind = (torch.float32, dtype)[i % 4 // 2]
            a, b = new(4 + i, columns, seed=30 + i, dtype=kind), new(rows, 4 + i, seed=40 + i, dtype=kind)
            tensors += [weight, None, a, b, None if i else new(rows, seed=50, dtype=kind)]
            rows_of_a.append(a)
            made += [b.to(dtype)] if kind != dtype else []
        else:
            tensors += [weight, None, None, None, None]
    before = []
    if rows_of_a:
        rank = sum(a.shape[0] for a in rows_of_a)
        before.append(new(tokens, rank, seed=60))
        if len(rows_of_a) > 1 or rows_of_a[0].dtype != dtype:
            before.append(torch.cat([a.to(dtype) for a in rows_of_a]))
    if of_weights != dtype:
        before.append(torch.cat([weight.to(dtype) for weight in tensors[::5]]))
    return tensors, before + made


def _decoder_arguments(new, dtype) -> dict:
    """Of the operators of a decoder layer: plain, with adapters beside frozen weights, and over fp32 as under autocast."""
    forward, backward, mlp, mlp_backward = [], [], [], []
    for kind, adapters, frozen in ((dtype, False, False), (dtype, True, True), (torch.float32, True, False)):
        x, norm = new(6, 1024, dtype=kind), new(1024, seed=1, dtype=kind)
        heads, tables = ([new(*shape, 128, seed=2 + i, dtype=kind) for i in range(2)] for shape in ((), (1, 3)))
        inputs, of_inputs = _projection_tensors(new, [(512, 1024)] * 3, dtype, kind, adapters)
        grads = [new(2, 3, 4, 128, seed=70 + i).transpose(1, 2) for i in range(3)]
        rstd = new(6, dtype=torch.float32, seed=75).abs()
        forward.append((x, norm, *heads, *tables, INPUTS, [2, 3], dtype, inputs, [2.0, 1.0, 0.5]))
        needs = [tensor is not None and not (frozen and i % 5 == 0) for i, tensor in enumerate(inputs)]
        backward.append((*grads, new(6, 1024, seed=73, dtype=kind), x, norm, *heads, *tables, INPUTS, dtype, inputs,
                         [2.0, 1.0, 0.5], new(6, 1536, seed=74), [rstd, *of_inputs],
                         [True, not frozen, not frozen, True, False, False, *needs]))  # fmt: skip
        for attended in (None, new(6, 256, seed=76)):
            groups = [[(1024, 256)]] * (attended is not None) + [[(96, 1024)] * 2, [(1024, 96)]]
            found = [_projection_tensors(new, group, dtype, kind, adapters) for group in groups]
            tensors, made = ([tensor for pair in found for tensor in pair[i]] for i in range(2))
            scalings = [0.5] * (len(tensors) // 5)
            mlp.append((x.view(2, 3, 1024), attended, None, norm, None, OUTPUTS, dtype, tensors, scalings))
            stream, kept = (x.view(2, 3, 1024), [rstd]) if attended is None else (None, [x, rstd])
            needs = [tensor is not None and not (frozen and i % 5 == 0) for i, tensor in enumerate(tensors)]
            # Where gate and up are made again, of a norm so small that fp16 holds what follows of them.
            needs = [True, attended is not None, False, not frozen, False, *needs]
            for both, weight in ((new(6, 192, seed=78), norm), (None, norm / 64)):
                mlp_backward.append((new(2, 3, 1024, seed=77, dtype=kind), stream, attended, None, weight, None, OUTPUTS, dtype, tensors,
                                     scalings, both, [*kept, *made], needs))  # fmt: skip
    inputs = {"norm_attention_inputs": forward, "norm_attention_inputs_backward": backward}
    return {**inputs, "norm_mlp": mlp, "norm_mlp_backward": mlp_backward}


def operator_arguments(device, dtype) -> dict:
    """name -> calls of each operator, in the layouts and with the switches that the operations use."""

    def new(*shape, seed=0, dtype=dtype):
        return randn(*shape, dtype=dtype, device=device, seed=seed)

    x, other, dy = (new(3, 1024, seed=i) for i in range(3))
    weight, rstd = new(1024, seed=3), new(3, dtype=torch.float32).abs()
    q, k = new(2, 3, 8, 128), new(2, 3, 4, 128, seed=1)
    dq, dk = (t.transpose(1, 2) for t in (new(2, 3, 8, 128, seed=2), new(2, 3, 4, 128, seed=3)))
    weights, tables = (new(128, seed=4), new(128, seed=5)), (new(1, 3, 128, seed=6), new(1, 3, 128, seed=7))
    both = (True, False)
    # Five tokens, two of four experts each. Routed: rows by expert, where each went, and where each expert's end.
    expert = torch.tensor([[0, 1], [3, 0], [1, 3], [2, 0], [0, 3]], device=device)
    order = torch.tensor([0, 3, 7, 8, 1, 4, 6, 2, 5, 9], device=device)
    position = torch.tensor([[0, 4], [7, 1], [5, 8], [6, 2], [3, 9]], dtype=torch.int32, device=device)
    ends = torch.tensor([4, 6, 7, 10], dtype=torch.int32, device=device)
    routed = new(5, 64, seed=8), expert, new(5, 2, seed=9), new(4, 256, 64, seed=10), new(4, 64, 128, seed=11), None, None
    silu = False, False, 1.0, float("inf")
    # One document of 70 tokens, causal, as attention's plan describes it.
    heads, attended = (new(70, 4, 64), new(70, 2, 64, seed=1), new(70, 2, 64, seed=2)), new(70, 4, 64, seed=3)
    sinks = new(4, dtype=torch.float32)
    documents, plan = torch.tensor([[0], [70]], dtype=torch.int32, device=device), _plan_of_70_tokens(device)
    lse = 9 + new(4, 128, dtype=torch.float32).abs()
    hidden, head, target = new(5, 64, seed=14), new(40, 64, seed=15), torch.tensor([3, 39, -100, 0, 7], device=device)
    scale, of_loss = new(1, dtype=torch.float32, seed=16).abs(), (-100, [0.0, 0.0, 0.0], [False] * 4, None)
    every_option = (-100, [0.1, 20.0, 0.01], [False, True, True, True], torch.float32)
    of_rows = new(5, dtype=torch.float32, seed=20)
    vectors = new(40, seed=17), new(40, dtype=torch.float32, seed=18).abs()
    return {
        "attention_plan": [(documents, 70, 70, 0), (documents, 70, 2, 2)],
        "attention_forward": [(*heads, each, *plan, 0.125, *cap) for each, *cap in ((None,), (sinks,), (None, 2.0))],
        "attention_backward": [
            (attended, *heads, each, 2 * attended, lse, *plan, 0.125, *cap) for each, *cap in ((None,), (sinks,), (None, 2.0))
        ],
        **_decoder_arguments(new, dtype),
        "embedding_backward": [(new(2, 3, 64, seed=19), expert[:2, [0, 1, 0]], 10, 3, by_frequency) for by_frequency in both],
        "linear_cross_entropy_run": [
            (hidden, head, None, target, None, None, [False] * 3, *of_loss),
            (hidden, head, None, target, None, scale, [True, False, False], *of_loss),
            (hidden, head, vectors[0], target, vectors[1], scale.expand(5).contiguous(), [True] * 3, *every_option),
        ],
        "linear_log_probs_run": [
            (hidden, head, None, target, *[None] * 3, [False] * 3, [1.0, 0.0, 1.0], [True] + [False] * 4, -100, None, False),
            (hidden, head, None, target, of_rows, None, None, [True, False, False], [0.7, 20.0, 1.3], [True] * 5, -100, None, True),
            (hidden, head.float(), vectors[0].float(), target, *[of_rows] * 3, [True] * 3, [1.0, 0.0, 1.0], [True] * 5, -100, None, False),
        ],
        "rms_norm_forward": [(x, weight, 1e-6), (x[:, 1:], weight[1:], 1e-6), (x, weight, 1e-6, dtype, 1.0, "last")],
        "rms_norm_backward": [(dy, x, weight, rstd, need) for need in both],
        "rms_norm_recompute": [(x, weight, rstd)],
        "add_rms_norm_forward": [(x, other, weight, 1e-6), (x, other, weight, 1e-6, dtype, 1.0, "last", 0.5)],
        "add_rms_norm_backward": [(dy, other, x, weight, rstd, need) for need in both],
        "norm_add_forward": [(x, other, weight, 1e-6), (x, other, weight, 1e-6, 1.0, "last")],
        "norm_add_norm_forward": [(x, other, weight, -weight, 1e-6), (x, other, weight, -weight, 1e-6, dtype, 1.0, "last")],
        "rotary_forward": [(q.transpose(1, 2), k.transpose(1, 2), *tables, 1), (q, k, *tables, 2)],
        "rotary_backward": [(dq, dk, *tables, 1), (q, k, *tables, 2)],
        "qk_norm_rotary_forward": [(q, k, *weights, *tables, 1e-6)],
        "qk_norm_rotary_backward": [(dq, dk, q, k, *weights, *tables, 1e-6, need, not need) for need in both],
        "swiglu_forward": [(x, other)],
        "swiglu_backward": [(dy, x, other)],
        "swiglu_backward_recompute": [(dy, x, other)],
        "gated_activation_forward": [(x, other, "gelu_tanh", 1.0, 1.0)],
        "gated_activation_backward": [(dy, x, other, "gelu_tanh", 1.0, 1.0)],
        "gated_activation_packed_forward": [(x, "gelu_tanh")],
        "gated_activation_packed_backward": [(dy[:, :512], x, "gelu_tanh")],
        "experts_forward": [(*routed, *silu)],
        "experts_backward": [
            (new(5, 64, seed=12), *routed, new(10, 256, seed=13), order, position, ends, *silu, [need] * 4 + [False] * 2) for need in both
        ],
    }


OPERATORS = tuple(operator_arguments("meta", torch.float32))


def check_operator(package, name, device, dtype):
    """opcheck: its schema tells the truth, nothing is overwritten or aliased, the fake tensors are like the real ones, and it
    traces with dynamic shapes."""
    operator = custom_operators(package)[name]
    for call in operator_arguments(device, dtype)[name]:
        torch.library.opcheck(operator, call)


def check_compiled_operation(ops, operation, device, backend, dtype=torch.float32, tokens=(3, 4, 6, 9, 13, 21), **options):
    """fullgraph, forward and backward, and one more graph at most for all other numbers of tokens. options: of torch.compile."""
    torch._dynamo.reset()
    counters.clear()
    ops = types.SimpleNamespace(**{operation: getattr(ops, operation)})  # found outside of the trace, which imports nothing
    compiled = torch.compile(lambda found: cases.run(ops, operation, found), backend=backend, fullgraph=True, **options)
    for count in tokens:
        found = cases.arguments(operation, dtype, count, device)
        leaves = {name: t.requires_grad_((operation, name) not in cases.NOT_DIFFERENTIABLE) for name, t in found.items()}
        eager, _, expected = cases.step(ops, operation, found)
        results = compiled(leaves)
        upstream = [randn(*r.shape, dtype=r.dtype, device=device, seed=20 + i) for i, r in enumerate(results)]
        torch.autograd.backward(results, upstream)
        for a, b in zip(results, eager, strict=True):
            assert_close(a, b, dtype, f"{operation}, {count} tokens", 2)
        for name in cases.differentiable(operation, found):
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
