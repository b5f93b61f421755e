"""Norms and activations of finite values whose square is none of fp32: as near float64 as PyTorch's own operations are."""

import pytest
import torch

from tests.ops.common import BF16, FP32, exact, leaf, randn

COLUMNS = 64
F = torch.nn.functional


def ones(x, *shape):
    return torch.ones(shape, dtype=x.dtype)


# Ours, and PyTorch's of the same.
OPERATIONS = {
    "general_rms_norm": (lambda ops, x: ops.general_rms_norm(x, ones(x, COLUMNS)), lambda x: F.rms_norm(x, (COLUMNS,), eps=1e-6)),
    "general_add_rms_norm": (
        lambda ops, x: ops.general_add_rms_norm(x, torch.zeros_like(x), ones(x, COLUMNS))[0], lambda x: F.rms_norm(x, (COLUMNS,), eps=1e-6)
    ),
    "layer_norm": (lambda ops, x: ops.layer_norm(x, ones(x, COLUMNS), 0 * ones(x, COLUMNS)), lambda x: F.layer_norm(x, (COLUMNS,))),
    "group_norm": (
        lambda ops, x: ops.group_norm(x[:, None], 1, ones(x, 1), 0 * ones(x, 1))[:, 0], lambda x: F.group_norm(x[:, None], 1)[:, 0]
    ),
    "softmax": (lambda ops, x: ops.softmax(x), lambda x: x.softmax(-1)),
    "dyt": (lambda ops, x: ops.dyt(x, ones(x, 1), ones(x, COLUMNS), 0 * ones(x, COLUMNS)), torch.tanh),
    "swiglu": (lambda ops, x: ops.swiglu(x, ones(x, *x.shape)), F.silu),
    "geglu": (lambda ops, x: ops.geglu(x, ones(x, *x.shape)), lambda x: F.gelu(x, approximate="tanh")),
}


@pytest.mark.parametrize("largest", (1e15, 1e19, 3e38))
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_large_values(suite_ops, name, dtype, largest):
    ours, theirs = OPERATIONS[name]
    x = leaf((randn(3, COLUMNS, dtype=FP32, device="cpu").clamp(-1, 1) * largest).to(dtype))
    x64 = exact(x)
    found, same, wanted = ours(suite_ops, x), theirs(x), theirs(x64)
    upstream = randn(*x.shape, dtype=dtype, device="cpu", seed=1)
    results = [(y, torch.autograd.grad(y, of, upstream.to(y.dtype))[0]) for y, of in ((found, x), (same, x), (wanted, x64))]
    for what, mine, other, right in zip(("y", "dx"), *results, strict=True):
        errors = [(t.double() - right).abs().nan_to_num(nan=1e300, posinf=1e300).max() for t in (mine, other)]
        # A gradient of 1 is of the size 1 / x after a norm.
        floor = 1e-2 if dtype == BF16 else 1e-5
        size = max(float(right.detach().abs().max()), 0.0 if what == "y" else 1 / largest)
        assert errors[0] <= 2 * errors[1] + floor * size, f"{what} is {errors[0]:.1e} from float64, PyTorch's {errors[1]:.1e}"


@pytest.mark.parametrize("largest", (1e15, 3e38))
def test_large_values_of_sparsemax(suite_ops, largest):
    x = randn(3, COLUMNS, dtype=FP32, device="cpu")
    x = x / x.abs().max() * largest
    y = suite_ops.sparsemax(x)
    assert torch.equal(y, F.one_hot(x.argmax(-1), COLUMNS).float())
