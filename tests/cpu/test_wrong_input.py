"""What wrong input gets: the right result, or an error that names the argument, what was found and what was expected."""

import importlib
import re

import pytest
import torch
from torch import nn

from tests.op_cases import BF16, CASES, FP32, arguments, assert_right, differentiable, exact_arguments, gradients, plain, run
from tests.ops import linear_cross_entropy as checks
from tests.ops.adamw import small_parameters_too
from tests.ops.common import exact, randn
from tests.ops.layouts import LAYOUTS, expanded
from tests.ops.signature import CLASSES, HIDDEN, INNER, TOKENS, WIDTH
from tests.tolerances import RELATIVE_ERROR, relative_error

INTEGERS = torch.int64
ARGUMENTS = [(operation, argument) for operation, shapes in CASES.items() for argument in shapes]
each_argument = pytest.mark.parametrize(("operation", "argument"), ARGUMENTS, ids=["-".join(pair) for pair in ARGUMENTS])


def assert_names(error, operation, argument=None):
    """The message has the form `argument is what was found, expected what is right`."""
    names = [argument] if argument else CASES[operation]
    assert re.match(rf"({'|'.join(map(re.escape, names))}) is .+, expected .+", str(error), re.DOTALL), f"{operation}: {error}"


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


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    (
        ("label_smoothing", 1.5, "a number from 0 to 1"),
        ("label_smoothing", -0.1, "a number from 0 to 1"),
        ("softcap", -3.0, "a positive number, or None for no cap"),
        ("softcap", 0.0, "a positive number, or None for no cap"),
        ("accum_dtype", torch.float64, "None, the weight's dtype torch.bfloat16, or torch.float32"),
        ("accum_dtype", torch.float16, "None, the weight's dtype torch.bfloat16, or torch.float32"),
    ),
)
def test_an_option_of_the_loss_that_makes_no_sense_is_named(ops, option, value, expected):
    with pytest.raises(ValueError, match=f"^{option} is {value}, expected {expected}"):
        ops.linear_cross_entropy(**arguments("linear_cross_entropy"), **{option: value})


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
    leaves = [exact(hidden), exact(weight)]
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
    found = {name: t.requires_grad_(name in differentiable(operation, found)) for name, t in found.items()}
    results = run(ops, operation, found)
    expected = plain(operation, found)
    assert [r.shape for r in results] == [e.shape for e in expected]
    torch.autograd.backward(results, [torch.ones_like(r) for r in results])
    for name, tensor in found.items():
        if tensor.requires_grad:
            assert tensor.grad is not None and tensor.grad.shape == tensor.shape, name
            assert tensor.grad.count_nonzero() == 0, name


# ---------------------------------------------------------------- layouts
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
        leaves = {n: t.clone().requires_grad_(n in differentiable(operation, found)) for n, t in found.items()}
        sum(total(r) for r in run(ops, operation, leaves)).backward()
        results.append([leaf.grad for leaf in leaves.values() if leaf.requires_grad])
    assert_right(*results, BF16, f"{operation}: expanded upstream gradient")


@pytest.mark.parametrize(
    ("operation", "argument", "value"),
    [(name, "rounds", "never") for name in ("rms_norm", "add_rms_norm", "norm_add", "norm_add_norm", "qk_norm_rotary")]
    + [("qk_norm_rotary", "rotary_dim", value) for value in (3, -2, WIDTH + 2)],
)
def test_a_wrong_option_of_the_norms_is_named(ops, operation, argument, value):
    with pytest.raises(ValueError, match=f"^{argument} is '?{value}'?, expected "):
        run(ops, operation, arguments(operation), **{argument: value})


# ---------------------------------------------------------------- AdamW
WRONG = {"gradient": "grad", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@pytest.mark.parametrize("rows", (8, 32))
@pytest.mark.parametrize("wrong", WRONG)
def test_adamw_refuses_a_state_or_a_gradient_of_another_shape(interpreted, wrong, rows):
    """Before anything is changed, and after a launch of the right shapes has been remembered."""
    param = nn.Parameter(randn(16, 512, dtype=FP32, device="cpu"))
    param.grad = torch.ones_like(param)
    optimizer = interpreted.AdamW([param], lr=0.1)
    with small_parameters_too(interpreted):
        optimizer.step()
        state = optimizer.state[param]
        if wrong == "gradient":
            param.grad.data = torch.ones(rows, 512)
        else:
            state[wrong] = torch.zeros(rows, 512)
        before, number = param.detach().clone(), state["step"].item()
        with pytest.raises(ValueError,
                           match=rf"the {wrong} of a parameter is of shape \[{rows}, 512\], expected the parameter's shape \[16, 512\]"):
            optimizer.step()
    assert torch.equal(param, before) and state["step"].item() == number


def test_an_elementwise_launch_refuses_another_shape_or_dtype(interpreted):
    """Also where the first tensor is like that of a launch which is remembered."""
    adamw = importlib.import_module(f"{interpreted.__name__}.shared.ops.adamw")
    numbers = adamw.numbers(1.0, 1e-3, 0.9, 0.999, 1e-8, 0.0)
    right = [torch.ones(4, 512) for _ in range(4)]
    for i in range(1, 4):
        for other in (torch.ones(2, 512), torch.ones(4, 512, dtype=BF16)):
            adamw._kernel(*right, *numbers)
            with pytest.raises(ValueError, match=rf"tensor {i} of adamw is .+, expected like the first"):
                adamw._kernel(*right[:i], other, *right[i + 1 :], *numbers)
