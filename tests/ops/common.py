"""What the checks of operations share: random tensors, float64 leaves, and the bounds of a whole tensor and of each of its rows."""

import torch

from tests.op_checks import exact, leaf, randn
from tests.tolerances import RELATIVE_ERROR, assert_close

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BF16, FP16, FP32 = FLOATS
# An element's rounding error is bounded, not only the norm's: in a short row one badly rounded element may be the largest.
ROW_FACTOR = 2.0


def assert_rows_close(found, wanted, dtype, what="result", factor=1.0, floor=1e-2, row_factor=ROW_FACTOR):
    """As `assert_close`, and for each row of the last dimension with a bound of row_factor times the table's. floor: of a typical row's size:
    smaller ones (zeros, or terms of a gradient that cancel) are judged by that."""
    assert found.dtype == dtype, f"{what} is {found.dtype}, expected {dtype}"
    assert_close(found, wanted, dtype, what, factor)
    if found.dim() < 2 or found.numel() == 0:
        return
    found, wanted = found.detach().double().cpu(), wanted.detach().double()
    scale = wanted.norm(dim=-1)
    scale = torch.maximum(scale, floor * scale.square().mean().sqrt()).clamp_min(1e-30)
    worst = ((found - wanted).norm(dim=-1) / scale).max().item()
    bound = RELATIVE_ERROR[dtype] * factor * row_factor
    assert worst <= bound, f"{what} in {dtype}: a row's relative error is {worst:.2e}, expected at most {bound:.1e}"


def unchanged(*tensors):
    """A function that fails when one of the tensors has other bits than now."""
    before = [(t, t.detach().clone()) for t in tensors if t is not None]

    def check():
        for tensor, copy in before:
            assert torch.equal(tensor.detach(), copy), "an argument was overwritten"

    return check


def check_kept(tensors, before, what):
    """The caller's tensors hold what they held."""
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach(), old), f"{what} writes into a tensor of the caller's"


def gradient_twice(loss, leaf, upstream=None):
    """The gradient, and that of a second backward pass, which must be the same numbers; upstream: of loss."""
    (first,) = torch.autograd.grad(loss, leaf, upstream, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, leaf, upstream)
    assert torch.equal(first, kept), "the second backward pass writes into what the first one gave"
    return first, second


def backward_twice(result, dy, leaves):
    """The gradients, which a second backward pass must give again, bit for bit."""
    first = torch.autograd.grad(result, leaves, dy, retain_graph=True, allow_unused=False)
    second = torch.autograd.grad(result, leaves, dy)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b), "the second backward pass gives something else"
    return first


__all__ = [
    "BF16",
    "FLOATS",
    "FP16",
    "FP32",
    "assert_close",
    "assert_rows_close",
    "backward_twice",
    "check_kept",
    "exact",
    "gradient_twice",
    "leaf",
    "randn",
    "unchanged",
]
