"""What the checks of several operations share."""

import torch

from tests.tolerances import RELATIVE_ERROR, assert_close

# A row is fewer numbers than a tensor, so its error strays further from the expected one.
ROW_FACTOR = 4.0


def randn(*shape, dtype, device, seed=0, scale=1.0):
    """Normal random numbers that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(device=device, dtype=dtype)


def assert_rows_close(found, exact, dtype, what="result", factor=1.0):
    """As `assert_close`, of the whole and of every row by its own norm."""
    assert_close(found, exact, dtype, what, factor)
    if exact.dim() == 0 or exact.numel() == 0:
        return
    found, exact = (t.detach().double().cpu().reshape(-1, t.shape[-1]) for t in (found, exact))
    norms = exact.norm(dim=1)
    # A row that is nearly 0 among others is measured by a tenth of theirs.
    errors = (found - exact).norm(dim=1) / norms.clamp(min=float(norms.mean()) / 10 or 1.0)
    bound, worst = RELATIVE_ERROR[dtype] * factor * ROW_FACTOR, int(errors.argmax())
    assert errors[worst] <= bound, f"{what} in {dtype}: row {worst} has a relative error of {errors[worst]:.2e}, expected at most {bound:.1e}"


def leaf(tensor):
    return tensor.detach().requires_grad_()


def exact(tensor):
    """The same numbers in float64, to differentiate."""
    return tensor.detach().double().cpu().requires_grad_()


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
