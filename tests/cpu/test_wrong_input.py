"""What wrong input gets: the right result, or an error that names the argument, what was found and what was expected."""

import importlib
import re
import types

import pytest
import torch
from torch.nn.functional import linear, silu

from tests import op_checks as checks
from tests.cpu.conftest import assemble_cpu, load
from tests.interpreter.backend import InterpreterBackend, runtime_of
from tests.mutants import OPERATIONS
from tests.op_checks import randn
from tests.tolerances import RELATIVE_ERROR, relative_error

BF16, FP32 = torch.bfloat16, torch.float32
INTEGERS = torch.int64


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    package = load(assemble_cpu(tmp_path_factory.mktemp("wrong_input"), "\n# wrong input for the kernels\n"))
    runtime = runtime_of(package)
    runtime.launch.backend = InterpreterBackend(runtime, OPERATIONS)
    return package


@pytest.fixture(params=("pytorch", "kernels"))
def ops(request, loaded):
    """Every operation by its name, in PyTorch and in the interpreted kernels."""
    package = loaded if request.param == "pytorch" else request.getfixturevalue("interpreted")
    decoder = importlib.import_module(f"{package.__name__}.ops.decoder")
    public = {name: getattr(package, name) for name in CASES if hasattr(package, name)}
    return types.SimpleNamespace(**public, norm_attention_inputs=decoder.norm_attention_inputs, norm_mlp=decoder.norm_mlp)


# ---------------------------------------------------------------- each operation, its arguments, and what it computes
def norm(x, weight, eps=1e-6):
    """Normalised in float32 or wider, as the model does it."""
    wide = x.to(torch.promote_types(x.dtype, FP32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def plain_rms_norm(x, weight):
    return norm(x, weight)


def plain_add_rms_norm(x, residual, weight):
    return norm(x + residual, weight), x + residual


def plain_rotary(q, k, cos, sin):
    return checks.rotary_exact(q, k, cos, sin, 1)


def plain_qk_norm_rotary(q, k, q_weight, k_weight, cos, sin):
    return checks.rotary_exact(norm(q, q_weight).transpose(1, 2), norm(k, k_weight).transpose(1, 2), cos, sin, 1)


def plain_swiglu(gate, up):
    return silu(gate) * up


def plain_mlp(x, gate_weight, up_weight, down_weight):
    return linear(silu(linear(x, gate_weight)) * linear(x, up_weight), down_weight)


def plain_linear_cross_entropy(hidden, weight, target, bias, class_weight):
    return checks.cross_entropy_exact(hidden.flatten(0, -2), weight, target.flatten(), bias, class_weight=class_weight)


def plain_norm_attention_inputs(x, norm_weight, q_rows, k_rows, v_rows, q_norm, k_norm, cos, sin):
    n = norm(x, norm_weight)
    q, k, v = (linear(n, rows).view(1, x.shape[0], rows.shape[0] // WIDTH, WIDTH) for rows in (q_rows, k_rows, v_rows))
    return (*plain_qk_norm_rotary(q, k, q_norm, k_norm, cos, sin), v.transpose(1, 2), x)


def plain_norm_mlp(x, norm_weight, gate_weight, up_weight, down_weight):
    return x + plain_mlp(norm(x, norm_weight), gate_weight, up_weight, down_weight)


PLAIN = {name.removeprefix("plain_"): function for name, function in list(globals().items()) if name.startswith("plain_")}
TOKENS, HIDDEN, INNER, CLASSES, WIDTH = 3, 1024, 96, 40, 128
CASES = {
    "rms_norm": {"x": (TOKENS, HIDDEN), "weight": (HIDDEN,)},
    "add_rms_norm": {"x": (TOKENS, HIDDEN), "residual": (TOKENS, HIDDEN), "weight": (HIDDEN,)},
    "rotary": {"q": (2, 8, TOKENS, WIDTH), "k": (2, 8, TOKENS, WIDTH), "cos": (1, TOKENS, WIDTH), "sin": (1, TOKENS, WIDTH)},
    "qk_norm_rotary": {
        **{"q": (2, TOKENS, 8, WIDTH), "k": (2, TOKENS, 8, WIDTH), "q_weight": (WIDTH,), "k_weight": (WIDTH,)},
        **{"cos": (1, TOKENS, WIDTH), "sin": (1, TOKENS, WIDTH)},
    },
    "swiglu": {"gate": (TOKENS, HIDDEN), "up": (TOKENS, HIDDEN)},
    "mlp": {"x": (TOKENS, HIDDEN), "gate_weight": (INNER, HIDDEN), "up_weight": (INNER, HIDDEN), "down_weight": (HIDDEN, INNER)},
    "linear_cross_entropy": {
        **{"hidden": (TOKENS, HIDDEN), "weight": (CLASSES, HIDDEN), "target": (TOKENS,)},
        **{"bias": (CLASSES,), "class_weight": (CLASSES,)},
    },
    "norm_attention_inputs": {
        **{"x": (TOKENS, HIDDEN), "norm_weight": (HIDDEN,)},
        **{f"weights[{i}]": (4 * WIDTH, HIDDEN) for i in range(3)},
        **{"q_norm": (WIDTH,), "k_norm": (WIDTH,), "cos": (1, TOKENS, WIDTH), "sin": (1, TOKENS, WIDTH)},
    },
    "norm_mlp": {
        **{"x": (TOKENS, HIDDEN), "norm_weight": (HIDDEN,), "gate_weight": (INNER, HIDDEN), "up_weight": (INNER, HIDDEN)},
        **{"down_weight": (HIDDEN, INNER)},
    },
}
ARGUMENTS = [(operation, argument) for operation, shapes in CASES.items() for argument in shapes]
each_argument = pytest.mark.parametrize(("operation", "argument"), ARGUMENTS, ids=["-".join(pair) for pair in ARGUMENTS])
NOT_DIFFERENTIABLE = {("rotary", "cos"), ("rotary", "sin"), ("qk_norm_rotary", "cos"), ("qk_norm_rotary", "sin")}
NOT_DIFFERENTIABLE |= {("norm_attention_inputs", "cos"), ("norm_attention_inputs", "sin")}
NOT_DIFFERENTIABLE |= {("linear_cross_entropy", "target"), ("linear_cross_entropy", "class_weight")}


def arguments(operation, dtype=BF16, tokens=TOKENS):
    """Tensors for every argument, of order 1, products of order 1."""
    found = {}
    for i, (name, shape) in enumerate(CASES[operation].items()):
        shape = tuple(tokens if n == TOKENS else n for n in shape)
        scale = shape[-1] ** -0.5 if len(shape) == 2 and "weight" in name else 1.0
        found[name] = randn(*shape, dtype=dtype, device="cpu", seed=i, scale=scale)
    if operation == "linear_cross_entropy":
        found["target"] = torch.arange(tokens) % CLASSES
        found["class_weight"] = found["class_weight"].float().abs() + 0.5
    return found


def run(ops, operation, found):
    function = getattr(ops, operation)
    if operation == "norm_attention_inputs":
        weights = [tensor for name, tensor in found.items() if name.startswith("weights")]
        rest = [found[name] for name in ("q_norm", "k_norm", "cos", "sin")]
        results = function(found["x"], found["norm_weight"], weights, *rest, (1, found["cos"].shape[1] if found["cos"].dim() == 3 else TOKENS))
    elif operation == "linear_cross_entropy":
        options = {name: found[name] for name in ("bias", "class_weight") if name in found}
        results = function(found["hidden"], found["weight"], found["target"], **options)
    else:
        results = function(**found)
    return results if isinstance(results, tuple) else (results,)


def plain(operation, found):
    results = PLAIN[operation](*found.values())
    return results if isinstance(results, tuple) else (results,)


def assert_right(results, expected, dtype, what, factor=3):
    """factor: how many roundings more than one the operations have."""
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert result.shape == wanted.shape, what
        assert relative_error(result, wanted) <= factor * RELATIVE_ERROR[dtype], what


def assert_names(error, operation, argument=None):
    """The message has the form `argument is what was found, expected what is right`."""
    names = [argument] if argument else CASES[operation]
    assert re.match(rf"({'|'.join(map(re.escape, names))}) is .+, expected .+", str(error), re.DOTALL), f"{operation}: {error}"


def exact_arguments(found):
    return {name: t.double() if t.is_floating_point() else t for name, t in found.items()}


# ---------------------------------------------------------------- shapes, dtypes, devices
DAMAGES = {
    "one more in the last dimension": lambda t: torch.cat((t, t[..., :1]), -1),
    "one less in the first dimension": lambda t: t[1:],
    "one dimension more": lambda t: t[None],
    "one dimension less": lambda t: t[0],
    "no dimension": lambda t: t.flatten()[0],
    "float16": lambda t: t.half(),
    "float32": lambda t: t.float(),
    "float64": lambda t: t.double(),
    "integers": lambda t: (t * 4).to(INTEGERS),
    "int32": lambda t: (t * 4).to(torch.int32),
    "booleans": lambda t: t > 0,
}


@pytest.mark.parametrize("damage", DAMAGES)
@each_argument
def test_an_argument_of_another_shape_or_dtype_is_named_or_taken_as_pytorch_takes_it(loaded_ops, operation, argument, damage):
    found = arguments(operation)
    found[argument] = DAMAGES[damage](found[argument])
    try:
        results = run(loaded_ops, operation, found)
    except ValueError as error:
        assert_names(error, operation)
        return
    assert_right(results, plain(operation, exact_arguments(found)), BF16, f"{operation}: {argument} with {damage}")


@pytest.fixture
def loaded_ops(loaded):
    decoder = importlib.import_module(f"{loaded.__name__}.ops.decoder")
    public = {name: getattr(loaded, name) for name in CASES if hasattr(loaded, name)}
    return types.SimpleNamespace(**public, norm_attention_inputs=decoder.norm_attention_inputs, norm_mlp=decoder.norm_mlp)


@pytest.mark.parametrize(
    ("operation", "argument", "shape"),
    (
        ("rms_norm", "weight", (HIDDEN + 1,)),
        ("rms_norm", "weight", (1,)),
        ("rms_norm", "weight", (1, HIDDEN)),
        ("add_rms_norm", "weight", (HIDDEN - 1,)),
        ("add_rms_norm", "residual", (1, HIDDEN)),
        ("rotary", "k", (2, 8, TOKENS + 1, WIDTH)),
        ("rotary", "k", (1, 8, TOKENS, WIDTH)),
        ("rotary", "k", (2, 8, TOKENS, WIDTH // 2)),
        ("rotary", "cos", (TOKENS, WIDTH)),
        ("rotary", "cos", (3, TOKENS, WIDTH)),
        ("rotary", "cos", (1, TOKENS - 1, WIDTH)),
        ("rotary", "cos", (1, TOKENS, WIDTH + 2)),
        ("rotary", "sin", (1, TOKENS, WIDTH // 2)),
        ("qk_norm_rotary", "q_weight", (WIDTH // 2,)),
        ("qk_norm_rotary", "k_weight", (8 * WIDTH,)),
        ("swiglu", "up", (TOKENS, 1)),
        ("swiglu", "up", (1, HIDDEN)),
        ("mlp", "gate_weight", (INNER, HIDDEN + 1)),
        ("mlp", "up_weight", (INNER + 1, HIDDEN)),
        ("mlp", "down_weight", (INNER, HIDDEN)),
        ("linear_cross_entropy", "weight", (CLASSES, HIDDEN - 1)),
        ("linear_cross_entropy", "bias", (1,)),
        ("linear_cross_entropy", "class_weight", (CLASSES + 1,)),
        ("norm_attention_inputs", "norm_weight", (1,)),
        ("norm_attention_inputs", "weights[1]", (4 * WIDTH, HIDDEN + 1)),
        ("norm_attention_inputs", "weights[2]", (4 * WIDTH + 1, HIDDEN)),
        ("norm_attention_inputs", "k_norm", (2 * WIDTH,)),
        ("norm_attention_inputs", "sin", (1, TOKENS, 2 * WIDTH)),
        ("norm_mlp", "up_weight", (1, HIDDEN)),
        ("norm_mlp", "down_weight", (HIDDEN, INNER + 1)),
    ),
)
def test_a_weight_or_operand_of_another_size_is_named(ops, operation, argument, shape):
    """Also where PyTorch would broadcast it."""
    found = {**arguments(operation), argument: torch.ones(shape, dtype=BF16)}
    with pytest.raises(ValueError) as error:
        run(ops, operation, found)
    assert_names(error.value, operation, argument)
    assert str(list(shape)) in str(error.value)


@pytest.mark.parametrize("operation", CASES)
def test_integers_everywhere_are_refused_by_name(ops, operation):
    found = {name: torch.ones_like(tensor, dtype=INTEGERS) for name, tensor in arguments(operation).items()}
    with pytest.raises(ValueError) as error:
        run(ops, operation, found)
    assert_names(error.value, operation)


@each_argument
def test_an_argument_on_another_device_is_named(ops, operation, argument):
    found = arguments(operation)
    found[argument] = found[argument].to("meta")
    with pytest.raises(ValueError) as error:
        run(ops, operation, found)
    assert_names(error.value, operation)
    assert "meta" in str(error.value) and "cpu" in str(error.value)


@pytest.mark.parametrize("operation", CASES)
def test_tensors_without_data_give_results_without_data(loaded_ops, operation):
    found = arguments(operation)
    expected = run(loaded_ops, operation, found)
    results = run(loaded_ops, operation, {name: tensor.to("meta") for name, tensor in found.items()})
    assert [(r.shape, r.dtype, r.device.type) for r in results] == [(e.shape, e.dtype, "meta") for e in expected]


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16, FP32), ids=str)
@pytest.mark.parametrize("operation", CASES)
def test_every_floating_dtype_is_taken(ops, operation, dtype):
    found = arguments(operation, dtype)
    assert_right(run(ops, operation, found), plain(operation, exact_arguments(found)), min(dtype, FP32, key=bits), operation)


def bits(dtype):
    return dtype.itemsize


def test_an_odd_head_dim_is_refused(ops):
    q = torch.zeros(1, 2, 3, 7)
    with pytest.raises(ValueError, match="^q is .* expected four dimensions with an even head_dim"):
        ops.rotary(q, q, q[:, 0], q[:, 0])


@pytest.mark.parametrize("unsqueeze_dim", (0, 3, -1, -4))
def test_an_unsqueeze_dim_that_holds_no_heads_is_refused(ops, unsqueeze_dim):
    with pytest.raises(ValueError, match=f"^unsqueeze_dim is {unsqueeze_dim}, expected 1 .* or 2"):
        ops.rotary(**arguments("rotary"), unsqueeze_dim=unsqueeze_dim)


def test_an_unknown_reduction_is_refused(ops):
    with pytest.raises(ValueError, match="^reduction is 'average', expected 'mean', 'sum' or 'none'"):
        ops.linear_cross_entropy(**arguments("linear_cross_entropy"), reduction="average")


# ---------------------------------------------------------------- labels
@pytest.mark.parametrize("label", (-1, CLASSES, -2, 2**40))
@pytest.mark.parametrize("ignore_index", (-100, 0))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_a_label_out_of_range_is_named_with_the_range(ops, label, ignore_index, reduction):
    found = arguments("linear_cross_entropy")
    found["target"][1] = label
    expected = rf"^target is {label} at one of its places, expected labels from 0 to {CLASSES - 1}, or {ignore_index}"
    with pytest.raises(ValueError, match=expected):
        ops.linear_cross_entropy(**found, ignore_index=ignore_index, reduction=reduction)


@pytest.mark.parametrize("options", ({}, {"label_smoothing": 0.1, "softcap": 5.0, "lse_square_scale": 0.01}), ids=("plain", "options"))
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_on_a_gpu_a_label_out_of_range_counts_like_an_ignored_one(ops, monkeypatch, options, reduction):
    """Looking at the labels would wait for the GPU, so the check is left out there. Nothing outside the arrays is touched."""
    module = importlib.import_module(ops.linear_cross_entropy.__module__)
    check = module._check
    results = []
    for labels in ([1, -7, CLASSES, 2**40, -(2**63), CLASSES - 1], [1, -100, -100, -100, -100, CLASSES - 1]):
        monkeypatch.setattr(module, "_check", check if -7 not in labels else lambda *_: None)
        hidden = randn(6, 16, dtype=FP32, device="cpu").requires_grad_()
        weight = randn(CLASSES, 16, dtype=FP32, device="cpu", seed=1).requires_grad_()
        loss = ops.linear_cross_entropy(hidden, weight, torch.tensor(labels), reduction=reduction, **options)
        loss.sum().backward()
        results.append((loss, hidden.grad, weight.grad))
    for found, expected in zip(*results, strict=True):
        assert torch.isfinite(found).all() and torch.equal(found, expected)


def test_when_no_label_counts_the_loss_and_its_gradients_are_zero(ops):
    found = {
        name: tensor.requires_grad_(name in ("hidden", "weight", "bias")) for name, tensor in arguments("linear_cross_entropy").items()
    }
    found["target"].fill_(-100)
    loss = ops.linear_cross_entropy(**found)
    loss.backward()
    assert loss == 0
    assert all(found[name].grad.count_nonzero() == 0 for name in ("hidden", "weight", "bias"))


# ---------------------------------------------------------------- numbers that fp16 cannot hold on their way
@pytest.mark.parametrize(
    ("tokens", "upstream", "options"), ((1000, 1, {"reduction": "sum"}), (9000, 1, {"num_items": 100}), (40000, 1024, {})), ids=str
)
def test_fp16_gradients_of_the_loss_are_right_where_fp16_can_hold_them(loaded_ops, tokens, upstream, options):
    """Half of the labels are one class, whose row of the weight's gradient is the sum of as many tokens. upstream: a loss scale."""
    hidden = (randn(tokens, 16, dtype=torch.float16, device="cpu", scale=1.5) + 1).requires_grad_()
    weight = randn(CLASSES, 16, dtype=torch.float16, device="cpu", seed=1, scale=0.25).requires_grad_()
    target = torch.arange(tokens) % CLASSES
    target[::2] = 3
    (loaded_ops.linear_cross_entropy(hidden, weight, target, **options) * upstream).backward()
    leaves = [checks.exact(hidden), checks.exact(weight)]
    (checks.cross_entropy_exact(*leaves, target, **options) * upstream).backward()
    for found, wanted in zip((hidden, weight), leaves, strict=True):
        assert wanted.grad.abs().max() < torch.finfo(torch.float16).max
        assert relative_error(found.grad, wanted.grad) <= 3 * RELATIVE_ERROR[torch.float16]


# ---------------------------------------------------------------- no tokens
@pytest.mark.parametrize("options", ({}, {"reduction": "none"}, {"reduction": "sum"}, {"num_items": 5}), ids=str)
def test_the_loss_of_no_tokens_is_zero_with_zero_gradients(ops, options):
    found = {
        name: t.requires_grad_(name in ("hidden", "weight", "bias")) for name, t in arguments("linear_cross_entropy", tokens=0).items()
    }
    loss = ops.linear_cross_entropy(**found, **options)
    assert loss.shape == ((0,) if options.get("reduction") == "none" else ()) and loss.sum() == 0
    loss.sum().backward()
    for name in ("hidden", "weight", "bias"):
        assert found[name].grad.shape == found[name].shape and found[name].grad.count_nonzero() == 0


@pytest.mark.parametrize("operation", [name for name in CASES if name != "linear_cross_entropy"])
def test_no_tokens_give_empty_results_and_zero_weight_gradients(ops, operation):
    found = arguments(operation, tokens=0)
    found = {name: t.requires_grad_((operation, name) not in NOT_DIFFERENTIABLE) for name, t in found.items()}
    results = run(ops, operation, found)
    expected = plain(operation, found)
    assert [r.shape for r in results] == [e.shape for e in expected]
    torch.autograd.backward(results, [torch.ones_like(r) for r in results])
    for name, tensor in found.items():
        if tensor.requires_grad:
            assert tensor.grad is not None and tensor.grad.shape == tensor.shape, name
            assert tensor.grad.count_nonzero() == 0, name


# ---------------------------------------------------------------- layouts
def strided(tensor):
    """Every second element of the last dimension."""
    return torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2]


def sliced(tensor):
    """A part of longer rows, whose length no vector load divides."""
    return torch.cat((tensor, tensor[..., :3]), -1)[..., : tensor.shape[-1]]


def transposed(tensor):
    """In memory, the dimensions are the other way round."""
    return tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))


def misaligned(tensor):
    """One element behind a multiple of 16 bytes."""
    memory = torch.empty(tensor.numel() + 16, dtype=tensor.dtype)
    start = 1 + (-memory.data_ptr() % 16) // tensor.itemsize
    return memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def expanded(tensor):
    """The same numbers in all of the first dimension, stored once."""
    return tensor[:1].clone().expand(tensor.shape)


LAYOUTS = (strided, sliced, transposed, misaligned, expanded)


def gradients(ops, operation, found, change=lambda name, tensor: tensor):
    """Results, and the gradient of every argument, of tensors that `change` has laid out otherwise."""
    passed = {name: change(name, tensor) for name, tensor in found.items()}
    passed = {name: t.detach().requires_grad_((operation, name) not in NOT_DIFFERENTIABLE) for name, t in passed.items()}
    results = run(ops, operation, passed)
    upstream = [randn(*r.shape, dtype=r.dtype, device="cpu", seed=20 + i) for i, r in enumerate(results)]
    torch.autograd.backward(results, [change("upstream", g) for g in upstream])
    return [*results, *[tensor.grad for tensor in passed.values() if tensor.requires_grad]]


def laid_out_values(operation, layout, argument):
    """`expanded` changes the numbers; the others do not."""
    found = arguments(operation)
    if layout is expanded and argument in found:
        found[argument] = expanded(found[argument]).contiguous()
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@each_argument
def test_an_argument_of_any_layout_gives_the_right_result(ops, operation, argument, layout):
    found = laid_out_values(operation, layout, argument)
    before = {name: tensor.clone() for name, tensor in found.items()}
    results = gradients(ops, operation, found, lambda name, tensor: layout(tensor) if name == argument else tensor)
    assert_right(results, gradients(ops, operation, found), BF16, f"{operation}: {layout.__name__} {argument}")
    assert all(torch.equal(found[name], before[name]) for name in found)


@pytest.mark.parametrize("layout", LAYOUTS[:-1], ids=lambda f: f.__name__)
@pytest.mark.parametrize("operation", [name for name in CASES if name != "linear_cross_entropy"])
def test_an_upstream_gradient_of_any_layout_gives_the_right_gradients(ops, operation, layout):
    found = arguments(operation)
    results = gradients(ops, operation, found, lambda name, tensor: layout(tensor) if name == "upstream" else tensor)
    assert_right(results, gradients(ops, operation, found), BF16, f"{operation}: {layout.__name__} upstream gradient")


@pytest.mark.parametrize("operation", CASES)
def test_the_gradient_of_a_sum_which_is_one_number_expanded_gives_the_right_gradients(ops, operation):
    found, results = arguments(operation), []
    for total in (lambda r: r.sum(), lambda r: (r * torch.ones_like(r)).sum()):
        leaves = {n: t.clone().requires_grad_((operation, n) not in NOT_DIFFERENTIABLE) for n, t in found.items()}
        sum(total(r) for r in run(ops, operation, leaves)).backward()
        results.append([leaf.grad for leaf in leaves.values() if leaf.requires_grad])
    assert_right(*results, BF16, f"{operation}: expanded upstream gradient")
