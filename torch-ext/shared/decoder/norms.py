"""RMSNorm and LayerNorm as a description has them: the steps and operations of `ops.rms_norm` and `ops.layer_norm` with a `Norm` instead of
numbers. weight: None of a LayerNorm without one. bias: of a LayerNorm, or None. rstd: of a LayerNorm, its mean and rstd, [2, rows]."""

from typing import Any, Optional, Tuple

import torch

from ..ops import layer_norm, residual_norm
from ..ops import rms_norm as norms
from ..ops.arrays import Four, Pair, Triple
from .spec import Norm

__all__ = [
    "add_norm_backward", "add_norm_forward", "add_rms_norm", "any_norm", "is_plain", "norm_add_forward", "norm_add_norm_forward",
    "norm_backward", "norm_forward", "norm_reference", "normed_again", "rms_norm",
]  # fmt: skip

Weight = Any  # a tensor, or None of a LayerNorm


def is_plain(norm: Norm) -> bool:
    """Tells whether a norm has no offset and rounds first, as Llama's and Qwen's do."""
    return norm.rounds == "first" and not norm.offset


def _scale(norm: Norm, weight: Weight) -> Weight:
    """The factor of a LayerNorm. Nemotron adds 1 to the weight in the weight's own dtype."""
    return weight + norm.offset if norm.offset else weight


def norm_reference(norm: Norm, x: torch.Tensor, weight: Weight, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """A norm in PyTorch, which can differentiate it."""
    if norm.centred:
        return layer_norm.layer_norm_reference(x, _scale(norm, weight), bias, norm.eps)[0]
    return norms.rms_norm_reference(x, weight, norm.eps, None, norm.offset, norm.rounds)[0]


def norm_forward(
    norm: Norm, x: torch.Tensor, weight: Weight, dtype: Optional[torch.dtype] = None, bias: Optional[torch.Tensor] = None
) -> Pair:
    """(y, rstd). dtype: of y."""
    if norm.centred:
        y, statistics = layer_norm.layer_norm_forward(x, _scale(norm, weight), bias, norm.eps)
        return y.to(dtype or y.dtype), statistics
    return norms.rms_norm_forward(x, weight, norm.eps, dtype, norm.offset, norm.rounds)


def normed_again(
    norm: Norm, x: torch.Tensor, weight: Weight, rstd: Optional[torch.Tensor], dtype: torch.dtype,
    bias: Optional[torch.Tensor] = None,
) -> torch.Tensor:  # fmt: skip
    """The normalised input of projections that `norm_forward` gave of x, bit for bit; x in a dtype where there is no norm.

    A LayerNorm runs again, though its mean and rstd are known: only its kernel rounds as its kernel did, once, with a multiplication and
    an addition in one operation, and it reads x and writes y, where PyTorch's operations would also write and read fp32 in between.
    """
    if rstd is None:
        return x.to(dtype)
    if norm.centred:
        return norm_forward(norm, x, weight, dtype, bias)[0]
    return norms.rms_norm_recompute(x, weight, rstd, dtype, norm.offset, norm.rounds)


def norm_backward(norm: Norm, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, need_dweight: bool) -> Pair:
    """(dx, dweight), the second one empty where it is not needed."""
    return norms.rms_norm_backward(dy, x, weight, rstd, need_dweight, norm.offset)


def add_norm_forward(
    norm: Norm, x: torch.Tensor, residual: torch.Tensor, weight: Weight, multiplier: float = 1.0, bias: Optional[torch.Tensor] = None
) -> Triple:
    """(total, y, rstd) of total = residual + multiplier * x; y is of x's dtype, total of residual's."""
    if norm.centred:
        total = torch.add(residual, x, alpha=multiplier)
        return (total, *norm_forward(norm, total, weight, x.dtype, bias))
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
    norm: Norm, dy: torch.Tensor, dtotal: torch.Tensor, x: torch.Tensor, weight: Weight, rstd: torch.Tensor, need: bool
) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(dx + dtotal, dweight, dbias), the last one None of an RMSNorm; x: what was normalised; need: whether of weight or bias."""
    if norm.centred:
        dx, dweight, dbias = layer_norm.layer_norm_backward(dy.to(x.dtype), x, _scale(norm, weight), rstd, need)
        return dx.add_(dtotal), dweight, dbias
    return (*norms.add_rms_norm_backward(dy, dtotal, x, weight, rstd, need, norm.offset), None)


def add_rms_norm(norm: Norm, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
    """(y, total) as a differentiable operation; x and residual of one dtype."""
    return norms.add_rms_norm(x, residual, weight, norm.eps, norm.offset, norm.rounds)


def any_norm(norm: Norm, x: torch.Tensor, weight: Weight, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """y of either kind as a differentiable operation."""
    if norm.centred:
        return layer_norm.layer_norm(x, _scale(norm, weight), bias, norm.eps)
    return rms_norm(norm, x, weight)


def rms_norm(norm: Norm, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y as a differentiable operation."""
    return norms.rms_norm(x, weight, norm.eps, norm.offset, norm.rounds)
