"""Each operation with the real cubins against float64."""

import pytest
import torch

from tests import op_checks as checks

DEVICE = "cuda"
dtypes = pytest.mark.parametrize("dtype", checks.FLOATS, ids=str)


@dtypes
@pytest.mark.parametrize("shape", (*checks.RMS_NORM_SHAPES, (8192, 4096), (2048, 32, 128), (4099, 5120)), ids=str)
def test_rms_norm(ops, dtype, shape):
    checks.check_rms_norm(ops, DEVICE, dtype, shape)


@pytest.mark.parametrize("dtype", checks.FLOATS[:2], ids=str)
@pytest.mark.parametrize("shape", ((3, 5, 128), (4, 1000), (4, 4096)), ids=str)
def test_rms_norm_with_an_fp32_weight(ops, dtype, shape):
    checks.check_rms_norm(ops, DEVICE, dtype, shape, weight_dtype=torch.float32)


@dtypes
@pytest.mark.parametrize(
    "view",
    (lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[1:, 1:], lambda x: x[..., :-8], lambda x: x[..., 1:], lambda x: x[..., ::2]),
)
def test_rms_norm_of_views(ops, dtype, view):
    checks.check_rms_norm(ops, DEVICE, dtype, (6, 4, 1032), view=view)


@dtypes
@pytest.mark.parametrize("case", (*checks.ROTARY_CASES, dict(batch=2, tokens=1025, heads=32, kv_heads=8, head_dim=128)), ids=str)
def test_rotary(ops, dtype, case):
    checks.check_rotary(ops, DEVICE, dtype, **case)


@dtypes
@pytest.mark.parametrize("shape", (*checks.ADD_RMS_NORM_SHAPES, (4099, 4096)), ids=str)
def test_add_rms_norm(ops, dtype, shape):
    checks.check_add_rms_norm(ops, DEVICE, dtype, shape)


@dtypes
@pytest.mark.parametrize("case", (*checks.QK_NORM_ROTARY_CASES, dict(batch=2, tokens=1025, heads=32, kv_heads=8, head_dim=128)), ids=str)
def test_qk_norm_rotary(ops, dtype, case):
    checks.check_qk_norm_rotary(ops, DEVICE, dtype, **case)


@dtypes
@pytest.mark.parametrize("shape", (*checks.SWIGLU_SHAPES, (1025, 12288), (333, 9728)), ids=str)
def test_swiglu(ops, dtype, shape):
    checks.check_swiglu(ops, DEVICE, dtype, shape)


@dtypes
def test_mlp(ops, dtype):
    checks.check_mlp(ops, DEVICE, dtype, 65, 128, 384)


EXPERTS_LARGE = (
    dict(tokens=515, hidden=2880, width=2880, experts=4, top_k=2, skew=1.0),
    dict(tokens=300, hidden=256, width=128, experts=128, top_k=4),
    dict(tokens=515, hidden=2048, width=768, experts=16, top_k=8, gpt_oss=False),
    dict(tokens=300, hidden=256, width=128, experts=32, top_k=4, skew=2.0, absent=0.4),
)


@dtypes
@pytest.mark.parametrize("case", (*checks.EXPERTS_CASES, *EXPERTS_LARGE), ids=str)
def test_experts(ops, dtype, case):
    checks.check_experts(ops, DEVICE, dtype, **case)


@pytest.mark.parametrize("frozen", checks.EXPERTS_FROZEN, ids="-".join)
def test_experts_with_frozen_parts(ops, frozen):
    checks.check_experts(ops, DEVICE, torch.bfloat16, 190, 64, 128, 4, 2, frozen=frozen)


@pytest.mark.parametrize("gpt_oss", (True, False))
def test_experts_that_are_not_here(ops, gpt_oss):
    checks.check_experts(ops, DEVICE, torch.bfloat16, 70, 64, 128, 4, 2, absent=1.1, gpt_oss=gpt_oss)


@pytest.mark.parametrize("gpt_oss", (True, False))
def test_nan_reaches_the_result_of_the_experts(ops, gpt_oss):
    checks.check_nan_in_experts(ops, DEVICE, gpt_oss)


def test_a_second_backward_pass_of_the_experts_gives_the_same(ops):
    checks.check_second_backward_of_experts(ops, DEVICE)


def test_the_host_does_not_wait_for_the_routing(ops):
    """On compute capability 9.0 and above, where PyTorch has grouped GEMMs in bf16."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("PyTorch's grouped GEMM reads the offsets on the host here")
    leaves, run = checks.experts_run(ops, DEVICE, torch.bfloat16, 300, 256, 128, 8, 4)
    run().backward(leaves["hidden"].detach())
    torch.cuda.set_sync_debug_mode("error")
    try:
        run().backward(leaves["hidden"].detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_runs_of_the_experts_give_the_same_bits(ops):
    leaves, run = checks.experts_run(ops, DEVICE, torch.bfloat16, 3000, 256, 128, 8, 4)
    results = []
    for _ in range(2):
        out = run()
        results.append([out, *torch.autograd.grad(out, leaves.values(), leaves["hidden"].detach())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@dtypes
@pytest.mark.parametrize("case", checks.LOSS_CASES, ids=str)
def test_linear_cross_entropy_options(ops, dtype, case):
    checks.check_linear_cross_entropy(ops, DEVICE, dtype, 300, 64, 9001, **case)


@dtypes
@pytest.mark.parametrize("shape", (*checks.LOSS_SHAPES, (2500, 256, 32000), (64, 128, 151936)), ids=str)
def test_linear_cross_entropy_sizes(ops, dtype, shape):
    # Without a loss scale the gradients of fp16 would be below its smallest normal number, as they are in every model.
    upstream = 1024.0 if dtype == torch.float16 else 0.5
    checks.check_linear_cross_entropy(ops, DEVICE, dtype, *shape, upstream=upstream)
