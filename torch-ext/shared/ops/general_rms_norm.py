"""RMSNorm with every option: y = (weight + offset) * x / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467)."""

from typing import Optional, Tuple

import torch

from ..runtime.device import multiprocessors
from ..runtime.launch import Kernel
from .common import (
    accumulation_dtype,
    apply_function,
    column_sum,
    describe,
    fail,
    need_floats,
    needs_formula,
    new_like,
    once_differentiable,
    sum_of_rows,
    traceable,
)
from .rows import kernels_take, per_row, rows_of, segments, slabs

Pair = Tuple[torch.Tensor, torch.Tensor]
Triple = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# What is rounded to x's dtype before the weight multiplies: n where 1. "none" is Liger's third mode, all in x's dtype: its errors are
# larger than those of "gemma" and it promises nothing that "gemma" does not, so it runs as that.
CASTING = {"llama": 1, "gemma": 0, "none": 0}
# Blocks that an SM holds in the backward pass of rows in registers, by the longest row (kernel_src/general_rms_norm.py).
BLOCKS_PER_SM = {
    torch.bfloat16: ((1024, 6), (2048, 3), (4096, 2), (8192, 1)),
    torch.float16: ((4096, 2),),
    torch.float32: ((2048, 2),),
}
WHOLE = {torch.bfloat16: 8192, torch.float16: 4096, torch.float32: 4096}  # the longest row in registers, forward
SHORT = 128  # rows of this length are several a block
GROUPS_PER_SM = 8  # blocks that walk over the rows of some columns


def _grid(c, x, *_):
    return (-(-x.shape[0] // c.get("ROWS", 1)),)


def _forward_views(x, weight, y, rstd):
    n = weight.shape[0]
    return segments(n, x), segments(n, weight), segments(n, y), rstd


def _add_forward_views(x, residual, weight, total, y, rstd):
    n = weight.shape[0]
    return (*[segments(n, t) for t in (x, residual, weight, total, y)], rstd)


def _row_means_views(dy, x, weight, rstd, means):
    n = weight.shape[0]
    return segments(n, dy), segments(n, x), segments(n, weight), rstd, means


def _columns_views(*tensors):
    *arrays, rstd, means, partial = tensors
    n = partial.shape[-1]
    return (*[segments(n, t) for t in arrays], rstd, means, segments(n, partial))


def _groups_of_columns(c, *tensors):
    return (-(-tensors[-1].shape[1] // c["PIECE"]) * tensors[-1].shape[0],)


def _one_partial_a_block(c, *tensors):
    return (tensors[-1].shape[0],)


_forward_kernel = Kernel("general_rms_norm_forward", "general_rms_norm_long_forward", grid=_grid, views=_forward_views)
_rows_forward_kernel = Kernel("general_rms_norm_rows_forward", grid=_grid)
_add_forward_kernel = Kernel("general_add_rms_norm_forward", grid=_grid, views=_add_forward_views)
_backward_kernel = Kernel("general_rms_norm_backward", grid=_one_partial_a_block)
_rows_backward_kernel = Kernel("general_rms_norm_rows_backward", grid=_one_partial_a_block)
_add_backward_kernel = Kernel("general_add_rms_norm_backward", grid=_one_partial_a_block)
_row_means_kernel = Kernel("general_rms_norm_row_means", grid=_grid, views=_row_means_views)
_columns_kernel = Kernel("general_rms_norm_columns_backward", grid=_groups_of_columns, views=_columns_views)
_add_columns_kernel = Kernel("general_add_rms_norm_columns_backward", grid=_groups_of_columns, views=_columns_views)


def general_rms_norm_reference(x, weight, eps, offset, rounded) -> Pair:
    """(y, rstd) in PyTorch."""
    acc = accumulation_dtype(x.dtype)
    xf = x.to(acc)
    rstd = torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    n = xf * rstd
    n = n.to(x.dtype).to(acc) if rounded else n
    return (n * (weight.to(acc) + offset)).to(x.dtype), rstd.flatten()


def general_rms_norm_backward_reference(dy, x, weight, rstd, offset) -> Pair:
    """(dx in the dtype of the arithmetic, dweight) in PyTorch."""
    acc = accumulation_dtype(x.dtype)
    rstd = rstd.reshape(x.shape[:-1] + (1,))
    n, d = x.to(acc) * rstd, dy.to(acc)
    g = d * (weight.to(acc) + offset)
    dx = (g - n * (g * n).mean(-1, keepdim=True)) * rstd
    return dx, sum_of_rows(d * n).to(weight.dtype)


def _forward(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, rounded: int) -> Pair:
    if not kernels_take(x, weight):
        return general_rms_norm_reference(x, weight, eps, offset, rounded)
    n = x.shape[-1]
    rows, weight = rows_of(x, n), rows_of(weight, n)[0]
    y, rstd = new_like(rows), per_row(x, rows.shape[0])
    kernel = _rows_forward_kernel if n == SHORT and weight.dtype == x.dtype else _forward_kernel
    for part in slabs(rows):
        kernel(rows[part], weight, y[part], rstd[part], eps, offset, rounded)
    return y.view(x.shape), rstd


def _add_forward(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, rounded: int) -> Triple:
    """(total, y, rstd)"""
    n = x.shape[-1]
    if n % 64 or n > WHOLE.get(x.dtype, 0) or weight.dtype != x.dtype or not kernels_take(x, weight):
        total = x + residual
        return (total, *_forward(total, weight, eps, offset, rounded))
    rows, residual, weight = rows_of(x, n), rows_of(residual, n), rows_of(weight, n)[0]
    total, y, rstd = new_like(rows), new_like(rows), per_row(x, rows.shape[0])
    for part in slabs(rows, residual):
        _add_forward_kernel(rows[part], residual[part], weight, total[part], y[part], rstd[part], eps, offset, rounded)
    return total.view(x.shape), y.view(x.shape), rstd


def _blocks_per_sm(x_dtype, weight_dtype, length: int) -> int:
    """Of the kernel for rows in registers, 0 where none takes such rows."""
    if x_dtype != weight_dtype or length % 64:
        return 0
    return next((blocks for longest, blocks in BLOCKS_PER_SM[x_dtype] if length <= longest), 0)


def _backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, offset: float, need_dweight: bool) -> Pair:
    return _gradients((dy,), x, weight, rstd, offset, need_dweight)


def _add_backward(
    dy: torch.Tensor, dtotal: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, offset: float, need_dweight: bool
) -> Pair:
    """(dx + dtotal, dweight), x: what was normalised."""
    return _gradients((dy, dtotal), x, weight, rstd, offset, need_dweight)


def _gradients(gradients, x, weight, rstd, offset, need_dweight) -> Pair:
    """(dx, dweight); dweight is empty where nobody needs it. gradients: dy, and dtotal where there is one."""
    nothing = weight.new_empty(0)
    if not kernels_take(x, weight):
        dx, dweight = general_rms_norm_backward_reference(gradients[0], x, weight, rstd, offset)
        dx = dx + gradients[1].to(dx.dtype) if len(gradients) > 1 else dx
        return dx.to(x.dtype), dweight if need_dweight else nothing
    n, alone = x.shape[-1], len(gradients) == 1
    gradients, rows, weight = [rows_of(g, n) for g in gradients], rows_of(x, n), rows_of(weight, n)[0]
    dx, partials, processors = new_like(rows), [], multiprocessors(x)
    blocks = _blocks_per_sm(x.dtype, weight.dtype, n)
    for part in slabs(rows, *gradients):
        count = part.stop - part.start
        given = [g[part] for g in gradients]
        if blocks:
            short = n == SHORT and alone
            kernel = _rows_backward_kernel if short else _backward_kernel if alone else _add_backward_kernel
            partial = per_row(x, min(count, 8 * processors if short else blocks * processors), n)
            kernel(dx[part], *given, rows[part], weight, rstd[part], partial, offset)
        else:
            partial = per_row(x, min(count, max(1, GROUPS_PER_SM * processors * 1024 // n)), n)
            means = per_row(x, count)
            _row_means_kernel(given[0], rows[part], weight, rstd[part], means, offset)
            kernel = _columns_kernel if alone else _add_columns_kernel
            kernel(dx[part], *given, rows[part], weight, rstd[part], means, partial, offset)
        partials.append(partial)
    if not need_dweight:
        return dx.view(x.shape), nothing
    partial = partials[0] if len(partials) == 1 else torch.cat(partials)
    return dx.view(x.shape), column_sum(partial, weight.dtype)


def _fake_forward(x, weight, *options):
    return x.new_empty(x.shape), x.new_empty((x.numel() // x.shape[-1],), dtype=accumulation_dtype(x.dtype))


def _fake_backward(dy, x, weight, rstd, offset, need_dweight):
    return x.new_empty(x.shape), torch.empty_like(weight) if need_dweight else weight.new_empty(0)


general_rms_norm_forward = traceable("general_rms_norm_forward", _forward, _fake_forward)
general_rms_norm_backward = traceable("general_rms_norm_backward", _backward, _fake_backward)
general_add_rms_norm_forward = traceable(
    "general_add_rms_norm_forward", _add_forward, lambda x, residual, *rest: (x.new_empty(x.shape), *_fake_forward(x, *rest))
)
general_add_rms_norm_backward = traceable(
    "general_add_rms_norm_backward", _add_backward, lambda dy, dtotal, *rest: _fake_backward(dy, *rest)
)


class GeneralRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, rounded):
        y, rstd = general_rms_norm_forward(x, weight, eps, offset, rounded)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need = ctx.needs_input_grad[1]
        dx, dweight = general_rms_norm_backward(dy, *ctx.saved_tensors, ctx.offset, need)
        return dx, dweight if need else None, None, None, None


class GeneralAddRMSNormFunction(torch.autograd.Function):
    """The same behind a residual connection."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, rounded):
        total, y, rstd = general_add_rms_norm_forward(x, residual, weight, eps, offset, rounded)
        ctx.save_for_backward(total, weight, rstd)
        ctx.offset = offset
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal):
        total, weight, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad[2]
        if dy is None:
            return dtotal, dtotal, None, None, None, None
        arguments = total, weight, rstd, ctx.offset, need
        if dtotal is None:  # nobody used the sum: no zeros to read
            dx, dweight = general_rms_norm_backward(dy, *arguments)
        else:
            dx, dweight = general_add_rms_norm_backward(dy, dtotal, *arguments)
        return dx, dx, dweight if need else None, None, None, None


def _checked(x, weight, casting, residual=None) -> torch.Tensor:
    """The weight, 1 where there is none. Raises ValueError when the arguments do not fit."""
    if casting not in CASTING:
        fail("casting", repr(casting), f"one of {', '.join(CASTING)}")
    need_floats(x=x)
    if x.dim() == 0:
        fail("x", describe(x), "a tensor with a last dimension")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device):
        fail("residual", describe(residual), f"like x, which is {describe(x)}")
    if weight is None:
        return x.new_ones(x.shape[-1])
    need_floats(weight=weight)
    if weight.shape != x.shape[-1:] or weight.device != x.device:
        fail("weight", describe(weight), f"one value for each of the last dimension of x, which is {describe(x)}")
    return weight


def general_rms_norm(
    x: torch.Tensor, weight: Optional[torch.Tensor] = None, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama"
) -> torch.Tensor:
    """RMSNorm over the last dimension, in fp32.

    x: [..., n], bf16, fp16 or fp32 (float64 runs in PyTorch). weight: [n], of x's dtype or fp32; None for 1 (the offset is then left out).
    casting: "llama" rounds the normalised x to its dtype before it is multiplied by weight + offset; "gemma" rounds the product alone,
    and so
    does "none". Returns [..., n] in x's dtype. Differentiable in x and weight. Raises ValueError when arguments do not fit.
    """
    offset = 0.0 if weight is None else float(offset)
    weight = _checked(x, weight, casting)
    if needs_formula(x, weight):
        return general_rms_norm_reference(x, weight, float(eps), offset, CASTING[casting])[0]
    return apply_function(GeneralRMSNormFunction, x, weight, float(eps), offset, CASTING[casting])


def general_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> Pair:
    """(RMSNorm(x + residual), x + residual), the sum rounded to x's dtype as the residual stream holds it.

    x, residual: [..., n], one dtype. The rest: as in `general_rms_norm`.
    """
    offset = 0.0 if weight is None else float(offset)
    weight = _checked(x, weight, casting, residual)
    if needs_formula(x, residual, weight):
        total = x + residual
        return general_rms_norm_reference(total, weight, float(eps), offset, CASTING[casting])[0], total
    return apply_function(GeneralAddRMSNormFunction, x, residual, weight, float(eps), offset, CASTING[casting])
