"""The gated delta rule token by token, for the few tokens of a step of generate(); kernel_src/gated_delta.py has the formula."""

from typing import Optional, Tuple

import torch

from ..runtime.launch import Kernel
from .arrays import accumulation_dtype, aligned, new_like
from .autograd import needs_formula
from .delta_chunks import check_arguments
from .gated_delta_rule import EPS, WIDTH, fits, normalised
from .operators import traceable

__all__ = ["gated_delta_step"]

_kernel = {
    norm: Kernel("delta_step", grid=lambda c, *a: (a[5].shape[0] * a[2].shape[1], WIDTH // c["BV"]), where={"NORM": norm})
    for norm in (0, 1)
}


def gated_delta_step_reference(q, k, v, g, beta, state, scale: float, norm: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """Computes `gated_delta_step` with PyTorch's operations."""
    dtype, group = state.dtype, v.shape[2] // k.shape[2]
    q, k = (normalised(x.to(dtype), norm).repeat_interleave(group, 2) for x in (q, k))
    out = []
    for t in range(v.shape[1]):
        state = state * g[:, t].to(dtype).exp()[..., None, None]
        found = (k[:, t, :, :, None] * state).sum(-2)
        delta = beta[:, t, :, None].to(dtype) * (v[:, t].to(dtype) - found)
        state = state + k[:, t, :, :, None] * delta[..., None, :]
        out.append((q[:, t, :, :, None] * state).sum(-2) * scale)
    return (torch.stack(out, 1) if out else v.to(dtype)).to(v.dtype), state


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor, scale: float, norm: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    flat = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    if not fits(*flat, state):
        return gated_delta_step_reference(q, k, v, g, beta, state, scale, norm)
    q, k, values = map(aligned, flat[:3])
    g, beta = (x.to(torch.float32).contiguous() for x in flat[3:])
    out, final, state = new_like(values), new_like(state), state.contiguous()
    _kernel[norm](q, k, values, g, beta, state, out, final, v.shape[1], scale, EPS)
    return out.view(v.shape), final


_step = traceable("gated_delta_step", _run)


def gated_delta_step(q, k, v, g, beta, *, initial_state=None, scale: Optional[float] = None, l2_norm: bool = False):
    """Computes the gated delta rule token by token; arguments and results as of `gated_delta_rule`, with a final state always. Not
    differentiable: raises RuntimeError where a gradient is asked for."""
    check_arguments(q, k, v, g, beta, None, initial_state)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g, beta)):
        raise RuntimeError("gated_delta_step has no backward pass, expected a call under torch.no_grad(). Use gated_delta_rule to train")
    scale, dtype = q.shape[-1] ** -0.5 if scale is None else float(scale), accumulation_dtype(q.dtype)
    shape = v.shape[0], v.shape[2], q.shape[-1], v.shape[3]
    state = v.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    whole = gated_delta_step_reference if not v.numel() or needs_formula(q, k, v, g, beta, state) else _step
    return whole(q, k, v, g, beta, state, scale, bool(l2_norm))
