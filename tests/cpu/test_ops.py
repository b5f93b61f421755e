"""Each operation in plain PyTorch, as it runs on a CPU, against float64."""

import pytest
import torch

from tests.ops import adamw, common, experts, linear_cross_entropy, rms_norm, rotary, swiglu
from tests.ops.common import FLOATS, randn

DEVICE = "cpu"
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@dtypes
@pytest.mark.parametrize("shape", rms_norm.RMS_NORM_SHAPES, ids=str)
def test_rms_norm(qwen3, dtype, shape):
    rms_norm.check_rms_norm(qwen3, DEVICE, dtype, shape)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_rms_norm_with_an_fp32_weight(qwen3, dtype):
    rms_norm.check_rms_norm(qwen3, DEVICE, dtype, (3, 5, 128), weight_dtype=torch.float32)


@dtypes
@pytest.mark.parametrize("case", rotary.ROTARY_CASES, ids=str)
def test_rotary(qwen3, dtype, case):
    rotary.check_rotary(qwen3, DEVICE, dtype, **case)


@dtypes
@pytest.mark.parametrize("shape", rms_norm.ADD_RMS_NORM_SHAPES, ids=str)
def test_add_rms_norm(qwen3, dtype, shape):
    rms_norm.check_add_rms_norm(qwen3, DEVICE, dtype, shape)


@dtypes
@pytest.mark.parametrize("case", rotary.QK_NORM_ROTARY_CASES, ids=str)
def test_qk_norm_rotary(qwen3, dtype, case):
    rotary.check_qk_norm_rotary(qwen3, DEVICE, dtype, **case)


@dtypes
@pytest.mark.parametrize("shape", swiglu.SWIGLU_SHAPES, ids=str)
def test_swiglu(qwen3, dtype, shape):
    swiglu.check_swiglu(qwen3, DEVICE, dtype, shape)


@pytest.mark.parametrize("dtype", (*FLOATS, torch.float64), ids=str)
@pytest.mark.parametrize("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_adamw(qwen3, dtype, capturable):
    adamw.check_adamw(qwen3, DEVICE, dtype, capturable=capturable)


@dtypes
def test_mlp(qwen3, dtype):
    swiglu.check_mlp(qwen3, DEVICE, dtype, 33, 64, 160)


@dtypes
@pytest.mark.parametrize("case", linear_cross_entropy.LOSS_CASES, ids=str)
def test_linear_cross_entropy_options(qwen3, dtype, case):
    linear_cross_entropy.check_linear_cross_entropy(qwen3, DEVICE, dtype, 60, 32, 1001, **case)


@dtypes
@pytest.mark.parametrize("case", linear_cross_entropy.EVALUATION_CASES, ids=str)
def test_evaluation(qwen3, dtype, case):
    linear_cross_entropy.check_evaluation(qwen3, DEVICE, dtype, 60, 32, 1001, bound=dtype, **case)


@dtypes
@pytest.mark.parametrize("case", experts.EXPERTS_CASES, ids=str)
def test_experts(qwen3, dtype, case):
    experts.check_experts(qwen3, DEVICE, dtype, **case)


@pytest.mark.parametrize("frozen", experts.EXPERTS_FROZEN, ids="-".join)
def test_experts_with_frozen_parts(qwen3, frozen):
    experts.check_experts(qwen3, DEVICE, torch.float32, 19, 24, 64, 4, 2, frozen=frozen)


def test_experts_of_no_tokens(qwen3):
    experts.check_experts(qwen3, DEVICE, torch.float32, 0, 24, 64, 4, 2)


def test_no_expert_is_here(qwen3):
    """All ids belong to other processes: nothing is added, and everything has a gradient of zero."""
    experts.check_experts(qwen3, DEVICE, torch.float32, 7, 24, 64, 4, 2, absent=1.1)


def test_a_second_derivative_is_refused(qwen3):
    x = common.leaf(randn(3, 8, dtype=torch.float64, device=DEVICE))
    (gradient,) = torch.autograd.grad(qwen3.rms_norm(x, torch.ones(8, dtype=torch.float64)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice: rms_norm.RMSNorm has no second derivative. Leave this operation"):
        gradient.sum().backward()


def test_gradients_in_float64(qwen3):
    """The analytic gradients against finite differences."""

    def leaf(*shape, seed=0):
        return common.leaf(randn(*shape, dtype=torch.float64, device=DEVICE, seed=seed))

    check = torch.autograd.gradcheck
    assert check(lambda x, w: qwen3.rms_norm(x, w), (leaf(2, 3, 8), leaf(8, seed=1)))
    assert check(lambda x, r, w: qwen3.add_rms_norm(x, r, w), (leaf(3, 8), leaf(3, 8, seed=1), leaf(8, seed=2)))
    assert check(qwen3.swiglu, (leaf(3, 5), leaf(3, 5, seed=1)))
    assert check(qwen3.mlp, (leaf(3, 4), leaf(6, 4, seed=1), leaf(6, 4, seed=2), leaf(4, 6, seed=3)))
    cos, sin = (randn(1, 3, 8, dtype=torch.float64, device=DEVICE, seed=i) for i in (7, 8))
    assert check(lambda q, k: qwen3.rotary(q, k, cos, sin), (leaf(2, 4, 3, 8), leaf(2, 2, 3, 8, seed=1)))
    weights = leaf(8, seed=3), leaf(8, seed=4)
    assert check(lambda q, k, a, b: qwen3.qk_norm_rotary(q, k, a, b, cos, sin), (leaf(2, 3, 4, 8), leaf(2, 3, 2, 8, seed=1), *weights))
    expert, scores = torch.tensor([[0, 2], [2, 1], [3, 0]]), leaf(3, 2, seed=5)
    assert check(lambda x, s, a, b: qwen3.experts(x, expert, s, a, b), (leaf(3, 4), scores, leaf(3, 6, 4, seed=1), leaf(3, 4, 3, seed=2)))
    gpt_oss = {"transposed": True, "interleaved": True, "alpha": 1.702, "limit": 0.7}
    leaves = leaf(3, 4), scores, leaf(3, 4, 6, seed=1), leaf(3, 3, 4, seed=2), leaf(3, 6, seed=3), leaf(3, 4, seed=4)
    assert check(lambda x, s, *weights: qwen3.experts(x, expert, s, *weights, **gpt_oss), leaves)
    target = torch.tensor([1, -100, 4, 0])
    for options in (
        {},
        {"reduction": "none"},
        {"label_smoothing": 0.1, "softcap": 2.0, "lse_square_scale": 0.1},
        {"return_z_loss": True, "return_token_accuracy": True, "lse_square_scale": 0.1},
    ):
        assert check(
            lambda h, w, b: (lambda found: getattr(found, "loss", found))(qwen3.linear_cross_entropy(h, w, target, b, **options)),  # noqa: B023
            (leaf(4, 3), leaf(5, 3, seed=1), leaf(5, seed=2)),
        )


def test_a_second_backward_pass_gives_the_same(qwen3):
    """retain_graph: the loss gives its gradients away and computes them anew."""
    hidden, weight = (common.leaf(randn(n, 8, dtype=torch.float32, device=DEVICE, seed=n)) for n in (6, 11))
    loss = qwen3.linear_cross_entropy(hidden, weight, torch.arange(6))
    first = torch.autograd.grad(loss, (hidden, weight), torch.tensor(0.5), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (hidden, weight), torch.tensor(0.5))
    assert all(torch.equal(a, b) for a, b in zip(kept, second)) and all(torch.equal(a, b) for a, b in zip(kept, first))


def test_a_second_backward_pass_of_the_experts_gives_the_same(qwen3):
    experts.check_second_backward_of_experts(qwen3, DEVICE)
