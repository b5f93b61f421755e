"""torch.compile, torch.export and torch.library's own checks, on any device."""

import importlib
import types

import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from tests import op_cases as cases
from tests.models import Step, random_tokens, tiny_model
from tests.ops.common import randn
from tests.tolerances import assert_close


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
    vectors = new(40, seed=17), new(40, dtype=torch.float32, seed=18).abs()
    return {
        "attention_plan": [(documents, 70, 70, 0), (documents, 70, 2, 2)],
        "attention_forward": [(*heads, each, *plan, 0.125) for each in (None, sinks)],
        "attention_backward": [(attended, *heads, each, 2 * attended, lse, *plan, 0.125) for each in (None, sinks)],
        "linear_cross_entropy_run": [
            (hidden, head, None, target, None, None, [False] * 3, *of_loss),
            (hidden, head, None, target, None, scale, [True, False, False], *of_loss),
            (hidden, head, vectors[0], target, vectors[1], scale.expand(5).contiguous(), [True] * 3, *every_option),
        ],
        "rms_norm_forward": [(x, weight, 1e-6), (x[:, 1:], weight[1:], 1e-6)],
        "rms_norm_backward": [(dy, x, weight, rstd, need) for need in both],
        "rms_norm_recompute": [(x, weight, rstd)],
        "add_rms_norm_forward": [(x, other, weight, 1e-6)],
        "add_rms_norm_backward": [(dy, other, x, weight, rstd, need) for need in both],
        "rotary_forward": [(q.transpose(1, 2), k.transpose(1, 2), *tables, 1), (q, k, *tables, 2)],
        "rotary_backward": [(dq, dk, *tables, 1), (q, k, *tables, 2)],
        "qk_norm_rotary_forward": [(q, k, *weights, *tables, 1e-6)],
        "qk_norm_rotary_backward": [(dq, dk, q, k, *weights, *tables, 1e-6, need, not need) for need in both],
        "swiglu_forward": [(x, other)],
        "swiglu_backward": [(dy, x, other)],
        "swiglu_backward_recompute": [(dy, x, other)],
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


def check_compiled_operation(ops, operation, device, backend, dtype=torch.float32):
    """fullgraph, forward and backward, and one more graph at most for all other numbers of tokens."""
    torch._dynamo.reset()
    counters.clear()
    ops = types.SimpleNamespace(**{operation: getattr(ops, operation)})  # found outside of the trace, which imports nothing
    compiled = torch.compile(lambda found: cases.run(ops, operation, found), backend=backend, fullgraph=True)
    tokens = (3, 4, 6, 9, 13, 21)
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
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

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
    rotary = "qk_norm_rotary_forward" if strict else "rotary_forward"  # strict, the decoder layer is traced as it is compiled: fused
    assert called == {"rms_norm_forward", rotary, "swiglu_forward"}
