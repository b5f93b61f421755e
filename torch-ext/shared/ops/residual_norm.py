"""A residual stream to which a normalised branch is added, alone (OLMo) and with the norm that follows (Gemma, GLM-4).

    total = residual + RMSNorm(branch; weight)        y = RMSNorm(total; next_weight)

Both norms have one offset and one order of rounding (`rms_norm`). residual + multiplier * branch is `add_rms_norm_forward`'s.
"""

from typing import Optional

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel, ships
from .arrays import Four, Pair, new_like
from .autograd import Function, apply_function, needs_formula
from .operators import traceable
from .rms_norm import (
    add_rms_norm_backward,
    check,
    result_dtype_of_sum,
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_reference,
)
from .rms_norm_kernels import SEGMENTS, NormCall
from .rows import as_segments, one_block_a_row, per_row, rows_of, slabs

__all__ = ["norm_add_forward", "norm_add_norm_forward"]


_add_kernel = Kernel("norm_add_forward", grid=one_block_a_row, views=as_segments(4))
_add_norm_kernel = Kernel("norm_add_norm_forward", grid=one_block_a_row, views=as_segments(6, 7))


def norm_add_reference(branch, residual, weight, eps: float, offset: float = 0.0, rounds: str = "first") -> torch.Tensor:
    """Returns total in PyTorch, which can differentiate it."""
    return residual + rms_norm_reference(branch, weight, eps, branch.dtype, offset, rounds)[0]


def _fits(branch, residual, *weights) -> bool:
    """Whether kernels take this: rows that fit into the registers, all of one dtype."""
    dtype, length = branch.dtype, branch.shape[-1]
    if any(tensor.dtype != dtype for tensor in (residual, *weights)) or dtype not in SEGMENTS.WHOLE:
        return False
    if not SEGMENTS.reads_once(NormCall(dtype, dtype, dtype, length)) or not kernels_run_on(branch, residual, *weights):
        return False
    return branch.numel() > 0 and ships("residual_norm")


def _add(
    branch: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, rounds: str = "first"
) -> Pair:
    """Returns (total, rstd [rows] of the branch). total has residual's shape, in which the branch may be flat, and is no view."""
    if not _fits(branch, residual, weight):
        y, rstd = rms_norm_forward(branch, weight, eps, branch.dtype, offset, rounds)
        return residual + y.view(residual.shape), rstd
    n = branch.shape[-1]
    rows, stream, weight = rows_of(branch, n), rows_of(residual, n), rows_of(weight, n)[0]
    total, rstd = new_like(residual), per_row(branch, rows.shape[0])
    sums = total.view(-1, n)
    for part in slabs(rows, stream):
        _add_kernel(rows[part], stream[part], weight, sums[part], rstd[part], eps, offset, int(rounds == "first"))
    return total, rstd


def _add_norm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    next_weight: torch.Tensor,
    eps: float,
    dtype: Optional[torch.dtype] = None,
    offset: float = 0.0,
    rounds: str = "first",
) -> Four:
    """Returns (total, y, rstd of the branch, rstd of total), [rows] each. dtype: of y, as of `add_rms_norm_forward`."""
    dtype = dtype or result_dtype_of_sum(branch, residual, next_weight, rounds)
    if dtype != branch.dtype or not _fits(branch, residual, weight, next_weight):
        total, rstd = _add(branch, residual, weight, eps, offset, rounds)
        y, next_rstd = rms_norm_forward(total, next_weight, eps, dtype, offset, rounds)
        return total, y, rstd, next_rstd
    n = branch.shape[-1]
    rows, stream = rows_of(branch, n), rows_of(residual, n)
    weights = [rows_of(w, n)[0] for w in (weight, next_weight)]
    total, y, rstd, next_rstd = new_like(stream), new_like(rows), per_row(branch, rows.shape[0]), per_row(branch, rows.shape[0])
    for part in slabs(rows, stream):
        given = rows[part], stream[part], *weights
        _add_norm_kernel(*given, total[part], y[part], rstd[part], next_rstd[part], eps, offset, int(rounds == "first"))
    return total.view(residual.shape), y.view(branch.shape), rstd, next_rstd


norm_add_forward = traceable("norm_add_forward", _add)
norm_add_norm_forward = traceable("norm_add_norm_forward", _add_norm)


class NormAddFunction(Function):
    """(branch, residual, weight, eps, offset, rounds) -> total."""

    def forward(ctx, branch, residual, weight, eps, offset, rounds):
        total, rstd = norm_add_forward(branch, residual, weight, eps, offset, rounds)
        ctx.save_for_backward(branch, weight, rstd)
        ctx.offset = offset
        return total

    def backward(ctx, dtotal):
        need = ctx.needs_input_grad[2]
        dbranch, dweight = rms_norm_backward(dtotal, *ctx.saved_tensors, need, ctx.offset)
        return dbranch, dtotal, dweight if need else None, None, None, None


class NormAddNormFunction(Function):
    """(branch, residual, weight, next_weight, eps, dtype, offset, rounds) -> (y, total)."""

    def forward(ctx, branch, residual, weight, next_weight, eps, dtype, offset, rounds):
        total, y, rstd, next_rstd = norm_add_norm_forward(branch, residual, weight, next_weight, eps, dtype, offset, rounds)
        ctx.save_for_backward(branch, weight, rstd, total, next_weight, next_rstd)
        ctx.offset = offset
        return y, total

    def backward(ctx, dy, dtotal):
        branch, weight, rstd, total, next_weight, next_rstd = ctx.saved_tensors
        need, need_next = ctx.needs_input_grad[2:4]
        dstream, dnext = add_rms_norm_backward(dy, dtotal, total, next_weight, next_rstd, need_next, ctx.offset)
        dbranch, dweight = rms_norm_backward(dstream, branch, weight, rstd, need, ctx.offset)
        return dbranch, dstream, dweight if need else None, dnext if need_next else None, None, None, None, None


def norm_add(
    branch: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, offset: float = 0.0, rounds: str = "last"
) -> torch.Tensor:
    """Normalises a branch and adds it to the residual stream.

    Args:
        branch, residual: [..., n], of one dtype.
        weight: [n], of the branch's norm.
        eps, offset, rounds: as of `rms_norm`.

    Returns:
        residual + RMSNorm(branch), [..., n]; differentiable in branch, residual and weight.

    Raises:
        ValueError: if shapes, dtypes, devices or `rounds` do not fit.
    """
    weight, eps, offset, rounds = check(branch, weight, eps, offset, rounds, residual, ("branch", "weight"))
    if needs_formula(branch, residual, weight):
        return norm_add_reference(branch, residual, weight, eps, offset, rounds)
    return apply_function(NormAddFunction, branch, residual, weight, eps, offset, rounds)


def norm_add_norm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    next_weight: torch.Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    rounds: str = "last",
    dtype: Optional[torch.dtype] = None,
) -> Pair:
    """Normalises a branch, adds it to the residual stream, and normalises the sum.

    Args:
        branch, residual: [..., n], of one dtype.
        weight, next_weight: [n], of the branch's norm and of the sum's.
        eps, offset, rounds: as of `rms_norm`, for both norms; dtype: of the first result.

    Returns:
        (RMSNorm(total), total = residual + RMSNorm(branch)); differentiable in all tensors.

    Raises:
        ValueError: if shapes, dtypes, devices or `rounds` do not fit.
    """
    weight, eps, offset, rounds = check(branch, weight, eps, offset, rounds, residual, ("branch", "weight"))
    next_weight, *_ = check(branch, next_weight, eps, offset, rounds, None, ("branch", "next_weight"))
    if needs_formula(branch, residual, weight, next_weight):
        total = norm_add_reference(branch, residual, weight, eps, offset, rounds)
        return rms_norm_reference(total, next_weight, eps, dtype, offset, rounds)[0], total
    return apply_function(NormAddNormFunction, branch, residual, weight, next_weight, eps, dtype, offset, rounds)


SELF_CHECKS = {
    "norm_add": lambda i: i.call(norm_add, *i.rows(2), i.leaf(i.hidden)),
    "norm_add_norm": lambda i: i.call(norm_add_norm, *i.rows(2), i.leaf(i.hidden), i.leaf(i.hidden)),
}
