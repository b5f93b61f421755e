"""What autograd relies on: nothing is overwritten, a second pass gives the same, what is frozen costs nothing, the derivatives
are right, and every run gives the same bits. In PyTorch and in the interpreted kernels."""

import contextlib
import types
from collections import Counter

import pytest
import torch

from tests import op_cases as cases
from tests.models import Step, are_equal, random_tokens, tiny_model
from tests.modes import Operators, is_product
from tests.ops.common import leaf, randn, runtime_of

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CPU = "cpu"


@pytest.mark.parametrize("check", cases.AUTOGRAD_CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("operation", cases.CASES)
def test_autograd(ops, operation, dtype, check):
    check(ops, operation, dtype, CPU)


# ---------------------------------------------------------------- what is frozen costs nothing
@pytest.fixture
def launches(interpreted):
    """What a block of code launches: `with launches() as found` fills (a Counter of kernels, the number of matrix products)."""
    backend = runtime_of(interpreted).launch.backend
    names = {variant.name: kernel for kernel in backend.artifacts.kernels() for variant in backend.artifacts.variants(kernel)}

    @contextlib.contextmanager
    def counted():
        backend.launched.clear()
        found = []
        with Operators(is_product) as products:
            yield found
        found[:] = [Counter(names[name].replace("_any", "") for name in backend.launched), products.count]

    return counted


# operation, what requires a gradient, the kernels of the backward pass, its matrix products
COSTS = (
    ("rms_norm", "x weight", "rms_norm_backward column_sum", 0),
    ("rms_norm", "x", "rms_norm_backward", 0),
    ("add_rms_norm", "x residual weight", "add_rms_norm_backward column_sum", 0),
    ("add_rms_norm", "residual", "add_rms_norm_backward", 0),
    ("qk_norm_rotary", "q k q_weight k_weight", "qk_norm_rotary_backward column_sum_pair", 0),
    ("qk_norm_rotary", "q k", "qk_norm_rotary_backward", 0),
    ("qk_norm_rotary", "k_weight", "qk_norm_rotary_backward column_sum", 0),
    ("mlp", "x gate_weight up_weight down_weight", "swiglu_backward_recompute", 6),
    ("mlp", "x", "swiglu_backward_recompute", 3),
    ("mlp", "gate_weight", "swiglu_backward_recompute", 2),
    ("mlp", "down_weight", "swiglu_forward", 1),
    ("norm_attention_inputs", "x norm_weight weights[0] weights[1] weights[2] q_norm k_norm",
     "qk_norm_rotary_backward column_sum_pair rms_norm_apply add_rms_norm_backward column_sum", 6),
    ("norm_attention_inputs", "x", "qk_norm_rotary_backward add_rms_norm_backward", 3),
    ("norm_attention_inputs", "weights[1]", "qk_norm_rotary_backward rms_norm_apply", 1),
    ("norm_attention_inputs", "q_norm", "qk_norm_rotary_backward column_sum", 0),
    ("norm_mlp", "x norm_weight gate_weight up_weight down_weight",
     "swiglu_backward_recompute rms_norm_apply add_rms_norm_backward column_sum", 6),
    ("norm_mlp", "x", "swiglu_backward_recompute add_rms_norm_backward", 3),
    ("norm_mlp", "up_weight", "swiglu_backward_recompute rms_norm_apply", 2),
    ("norm_mlp", "down_weight", "swiglu_forward", 1),
)  # fmt: skip


@pytest.mark.parametrize(("operation", "needed", "kernels", "products"), COSTS, ids=[f"{o}: {n}" for o, n, *_ in COSTS])
def test_the_backward_pass_does_what_is_needed_and_no_more(interpreted, launches, operation, needed, kernels, products):
    ops, found = cases.operations(interpreted), cases.arguments(operation)
    leaves = {name: tensor.requires_grad_(name in needed.split()) for name, tensor in found.items()}
    results = cases.run(ops, operation, leaves)
    with launches() as spent:
        torch.autograd.backward(results, [torch.ones_like(r) for r in results], inputs=[leaves[name] for name in needed.split()])
    assert spent == [Counter(kernels.split()), products]


@pytest.mark.parametrize(("needed", "products"), (("", 1), ("hidden", 2), ("weight", 2), ("bias", 1), ("hidden weight bias", 3)))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_the_loss_multiplies_no_more_than_is_needed(interpreted, launches, needed, products, reduction):
    """One product for the logits, and one for each gradient. A loss that is not reduced makes the logits again."""
    ops, found = cases.operations(interpreted), cases.arguments("linear_cross_entropy")
    leaves = {name: tensor.requires_grad_(True) if name in needed.split() else tensor for name, tensor in found.items()}
    with launches() as spent:
        (loss,) = cases.run(ops, "linear_cross_entropy", leaves, reduction=reduction)
        if needed:
            loss.sum().backward()
    kernels, found_products = spent
    assert found_products == products + (reduction == "none" and bool(needed))
    assert sum(kernels[name] for name in kernels if "gradient" in name) == bool(needed)


@pytest.mark.parametrize("operation", cases.CASES)
def test_without_gradients_nothing_of_a_backward_pass_runs(interpreted, launches, operation):
    ops, found = cases.operations(interpreted), cases.arguments(operation)
    with launches() as spent, torch.no_grad():
        cases.run(ops, operation, found)
    assert not [name for name in spent[0] if "backward" in name or "gradient" in name or "scale" in name]


@pytest.mark.parametrize("operation", cases.CASES)
def test_without_gradients_autograd_is_left_out_and_the_bits_are_the_same(interpreted, monkeypatch, operation):
    """Its bookkeeping is half of what a small operation costs the host."""
    ops, found = cases.operations(interpreted), cases.arguments(operation)
    expected = cases.run(ops, operation, found)
    if operation != "linear_cross_entropy":  # a call that makes its logits once in all
        monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(lambda function, *args: pytest.fail(f"{function} is applied")))
    with torch.no_grad():
        results = cases.run(ops, operation, found)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted) and not result.requires_grad


# ---------------------------------------------------------------- derivatives
def double(*shape, seed=0):
    return leaf(randn(*shape, dtype=FP64, device=CPU, seed=seed))


def single(*shape, seed=0):
    return leaf(randn(*shape, dtype=FP32, device=CPU, seed=seed))


def derivative_cases(ops, new):
    """(function, its arguments) of every operation at sizes that finite differences can bear."""
    tables = [randn(1, 3, width, dtype=new(1).dtype, device=CPU, seed=seed) for width in (8, 4) for seed in (7, 8)]
    heads = new(2, 4, 3, 8), new(2, 2, 3, 8, seed=1)
    target = torch.tensor([1, -100, 4, 0])
    head = new(4, 3), new(5, 3, seed=1), new(5, seed=2)
    class_weight = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5], dtype=new(1).dtype)
    expert, scores = torch.tensor([[0, 2], [2, 1], [3, 0]]), new(3, 2, seed=5)
    gpt_oss = {"transposed": True, "interleaved": True, "alpha": 1.702, "limit": 0.7}
    of_gpt_oss = new(3, 4), scores, new(3, 4, 6, seed=1), new(3, 3, 4, seed=2), new(3, 6, seed=3), new(3, 4, seed=4)

    def loss(**options):
        return lambda h, w, b: ops.linear_cross_entropy(h, w, target, b, **options)

    return {
        "rms_norm": (ops.rms_norm, (new(2, 3, 8), new(8, seed=1))),
        "rms_norm of one": (lambda x, w: ops.rms_norm(x, w, 0.5), (new(3, 1), new(1, seed=1))),
        "add_rms_norm": (ops.add_rms_norm, (new(3, 8), new(3, 8, seed=1), new(8, seed=2))),
        "rotary": (lambda q, k: ops.rotary(q, k, *tables[:2]), heads),
        "rotary, half tables": (lambda q, k: ops.rotary(q, k, *tables[2:]), heads),
        "rotary, heads last": (lambda q, k: ops.rotary(q, k, *tables[:2], 2), [leaf(x.detach().transpose(1, 2)) for x in heads]),
        "qk_norm_rotary": (
            lambda q, k, a, b: ops.qk_norm_rotary(q, k, a, b, *tables[:2]),
            (new(2, 3, 4, 8), new(2, 3, 2, 8, seed=1), new(8, seed=3), new(8, seed=4)),
        ),
        "swiglu": (ops.swiglu, (new(3, 5), new(3, 5, seed=1))),
        "mlp": (ops.mlp, (new(3, 4), new(6, 4, seed=1), new(6, 4, seed=2), new(4, 6, seed=3))),
        "norm_attention_inputs": (
            lambda x, n, a, b, c, q, k: ops.norm_attention_inputs(x, n, (a, b, c), q, k, *tables[:2], (1, 3)),
            (new(3, 4), new(4, seed=1), new(16, 4, seed=2), new(8, 4, seed=3), new(8, 4, seed=4), new(8, seed=5), new(8, seed=6)),
        ),
        "norm_mlp": (ops.norm_mlp, (new(3, 4), new(4, seed=1), new(6, 4, seed=2), new(6, 4, seed=3), new(4, 6, seed=4))),
        "experts": (lambda x, s, a, b: ops.experts(x, expert, s, a, b), (new(3, 4), scores, new(3, 6, 4, seed=1), new(3, 4, 3, seed=2))),
        "experts of GPT-OSS": (lambda x, s, *weights: ops.experts(x, expert, s, *weights, **gpt_oss), of_gpt_oss),
        "loss": (loss(), head),
        "loss, not reduced": (loss(reduction="none", class_weight=class_weight), head),
        "loss, all options": (
            loss(label_smoothing=0.1, softcap=2.0, lse_square_scale=0.1, class_weight=class_weight, reduction="sum"),
            head,
        ),
    }


NAMES = list(derivative_cases(types.SimpleNamespace(**dict.fromkeys(cases.CASES)), double))


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_are_those_of_finite_differences(loaded_ops, name):
    function, leaves = derivative_cases(loaded_ops, double)[name]
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.filterwarnings("ignore:Input #.* requires gradient and is not a double")
@pytest.mark.parametrize("name", NAMES)
def test_derivatives_of_the_kernels_are_those_of_finite_differences(interpreted, launches, name):
    """They agree as exactly as float32 allows: the differences of order 1e-2 have errors of 1e-4, relative to numbers of order 1."""
    function, leaves = derivative_cases(cases.operations(interpreted), single)[name]
    with launches() as spent:
        assert torch.autograd.gradcheck(function, leaves, eps=1e-2, atol=3e-3, rtol=3e-3, nondet_tol=0.0, fast_mode=True)
    assert spent[0] or name == "qk_norm_rotary", "the operation ran in PyTorch, not in a kernel"


# ---------------------------------------------------------------- a whole model
def test_a_model_gives_the_same_bits_on_every_run_with_deterministic_algorithms(qwen3):
    tokens = random_tokens(2, 17)
    torch.use_deterministic_algorithms(True)
    try:
        model = qwen3.kernelize(tiny_model())
        runs = [Step(model, input_ids=tokens, labels=tokens) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert are_equal(other, runs[0])


def test_a_second_backward_pass_through_a_model_gives_the_same(qwen3):
    tokens, model = random_tokens(2, 17), qwen3.kernelize(tiny_model())
    loss = model(input_ids=tokens, labels=tokens).loss
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
