"""RMSNorm as a description has it: `ops.rms_norm`'s steps and operations with a `Norm` instead of numbers."""

from typing import Optional, Tuple

import torch

from ..ops import residual_norm
from ..ops import rms_norm as norms
from .spec import Norm

__all__ = [
    "add_norm_backward", "add_norm_forward", "add_rms_norm", "is_plain", "norm_add_forward", "norm_add_norm_forward", "norm_backward",
    "norm_forward", "norm_reference", "normed_again", "rms_norm",
]  # fmt: skip

Pair = Tuple[torch.Tensor, torch.Tensor]
Triple = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Four = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def is_plain(norm: Norm) -> bool:
    """Tells whether a norm has no offset and rounds first, as Llama's and Qwen's do."""
    return norm.rounds == "first" and not norm.offset


def norm_reference(norm: Norm, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A norm in PyTorch, which can differentiate it."""
    return norms.rms_norm_reference(x, weight, norm.eps, None, norm.offset, norm.rounds)[0]


def norm_forward(norm: Norm, x: torch.Tensor, weight: torch.Tensor, dtype: Optional[torch.dtype] = None) -> Pair:
    """(y, rstd). dtype: of y."""
    return norms.rms_norm_forward(x, weight, norm.eps, dtype, norm.offset, norm.rounds)


def norm_again(norm: Norm, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """The y that `norm_forward` gave of x, bit for bit."""
    return norms.rms_norm_recompute(x, weight, rstd, dtype, norm.offset, norm.rounds)


def normed_again(
    norm: Norm, x: torch.Tensor, weight: Optional[torch.Tensor], rstd: Optional[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The normalised input of projections, bit for bit; x in a dtype where there is no norm."""
    return x.to(dtype) if weight is None or rstd is None else norm_again(norm, x, weight, rstd, dtype)


def norm_backward(norm: Norm, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, need_dweight: bool) -> Pair:
    """(dx, dweight), the second one empty where it is not needed."""
    return norms.rms_norm_backward(dy, x, weight, rstd, need_dweight, norm.offset)


def add_norm_forward(norm: Norm, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, multiplier: float = 1.0) -> Triple:
    """(total, y, rstd) of total = residual + multiplier * x; y is of x's dtype, total of residual's."""
    return norms.add_rms_norm_forward(x, residual, weight, norm.eps, None, norm.offset, norm.rounds, multiplier)


def norm_add_forward(norm: Norm, branch: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
    """(total = residual + RMSNorm(branch), rstd of the branch)."""
    return residual_norm.norm_add_forward(branch, residual, weight, norm.eps, norm.offset, norm.rounds)


def norm_add_norm_forward(
    norm: Norm, branch: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, next_weight: torch.Tensor
) -> Four:
    """(total, y, rstd of the branch, rstd of total), as `norm_add_forward` and the norm of total, y of the branch's dtype."""
    return residual_norm.norm_add_norm_forward(branch, residual, weight, next_weight, norm.eps, None, norm.offset, norm.rounds)


def add_norm_backward(
    norm: Norm, dy: torch.Tensor, dtotal: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, need_dweight: bool
) -> Pair:
    """(dx + dtotal, dweight); x: what was normalised."""
    return norms.add_rms_norm_backward(dy, dtotal, x, weight, rstd, need_dweight, norm.offset)


def add_rms_norm(norm: Norm, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
    """(y, total) as a differentiable operation; x and residual of one dtype."""
    return norms.add_rms_norm(x, residual, weight, norm.eps, norm.offset, norm.rounds)


def rms_norm(norm: Norm, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y as a differentiable operation."""
    return norms.rms_norm(x, weight, norm.eps, norm.offset, norm.rounds)
