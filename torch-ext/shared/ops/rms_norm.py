"""RMSNorm: y = weight * round(x / sqrt(mean(x^2) + eps)), over the last dimension (arXiv 1910.07467, in Qwen3's order).

Alone, and with the residual stream: total = x + residual, y = RMSNorm(total).
"""

import functools
import math
from typing import Callable, Optional, Tuple

import torch

from ..runtime.device import kernels_run_on, multiprocessors
from ..runtime.launch import Kernel
from .common import (
    HALF,
    accumulation_dtype,
    apply_function,
    as_rows,
    column_sum,
    describe,
    fail,
    need_floats,
    needs_formula,
    new_like,
    once_differentiable,
    split_rows,
    sum_of_rows,
    traceable,
)

Pair = Tuple[torch.Tensor, torch.Tensor]
Triple = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _one_block_a_row(c, x, *_):
    return (-(-x.shape[0] // c.get("ROWS", 1)),)


def one_partial_sum_a_block(c, *tensors):
    return (tensors[-1].shape[0],)


_forward_kernel = Kernel(
    "rms_norm_forward", "rms_norm_rows_forward", "rms_norm_any_forward",
    grid=_one_block_a_row, views=as_rows(1, 3), reads=("x", "weight"), split=split_rows,
)  # fmt: skip
_backward_kernel = Kernel(
    "rms_norm_backward", "rms_norm_rows_backward", "rms_norm_any_backward",
    grid=one_partial_sum_a_block, views=as_rows(3, 4), reads=("dy", "x", "weight", "rstd"),
)  # fmt: skip
_apply_kernel = Kernel("rms_norm_apply", grid=_one_block_a_row, views=as_rows(1, 3), reads=("x", "weight"), split=split_rows)
_add_forward_kernel = Kernel(
    "add_rms_norm_forward", grid=_one_block_a_row, views=as_rows(2, 5), reads=("x", "residual", "weight"), split=split_rows
)
_add_backward_kernel = Kernel(
    "add_rms_norm_backward", grid=one_partial_sum_a_block, views=as_rows(4, 5), reads=("dy", "dtotal", "x", "weight", "rstd")
)

# Blocks that an SM holds in the backward pass, by row length (kernel_src/rms_norm.py, swept on an H200).
BLOCKS_PER_SM = ((256, 8), (1024, 6), (2560, 3))


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    """(y, rstd [..., 1]) in PyTorch, which can differentiate it."""
    rstd = torch.rsqrt(x.to(accumulation_dtype(x.dtype)).square().mean(-1, keepdim=True) + eps)
    return _scaled(x, weight, rstd), rstd


def _scaled(x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """y in PyTorch; rstd: [..., 1]."""
    return weight * (x.to(accumulation_dtype(x.dtype)) * rstd).to(x.dtype)


def rms_norm_backward_reference(dy, x, weight, rstd, need_dweight=True) -> Pair:
    """(dx, dweight) in PyTorch; dx still in the accumulation dtype, dweight empty where it is not needed."""
    acc = accumulation_dtype(x.dtype)
    rstd = rstd.reshape(x.shape[:-1] + (1,))
    n = x.to(acc) * rstd
    d = dy.to(acc)
    g = d * weight.to(acc)
    dx = (g - n * (g * n).mean(-1, keepdim=True)) * rstd
    return dx, sum_of_rows(d * n).to(weight.dtype) if need_dweight else weight.new_empty(0)


def _fits(x, weight, *others):
    """Kernels exist for x and weight of one dtype, and for an fp32 weight with x in half precision. others: what else a kernel reads."""
    same = x.dtype == weight.dtype and x.dtype != torch.float64
    mixed = weight.dtype == torch.float32 and x.dtype in HALF
    return (same or mixed) and x.shape[-1] > 0 and kernels_run_on(x, weight, *others)


def _fused(x, weight, *others):
    half = x.dtype == weight.dtype and x.dtype in HALF
    return half and kernels_run_on(x, weight, *others) and x.shape[-1] in _add_forward_kernel.lengths("x", 1)


def _narrows(x, weight, dtype, *others):
    """Kernels exist for x and weight in fp32 with a y in half precision, as autocast makes it of fp32 models."""
    return x.dtype == weight.dtype == torch.float32 and dtype in HALF and x.shape[-1] > 0 and kernels_run_on(x, weight, *others)


def _narrows_fused(x, weight, dtype, *others):
    return dtype == torch.bfloat16 and _narrows(x, weight, dtype, *others) and x.shape[-1] in _add_forward_kernel.lengths("x", 1)


def _forward(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: Optional[torch.dtype] = None) -> Pair:
    """dtype: of y, the wider one of x and weight where it is None."""
    if not _fits(x, weight):
        y, rstd = rms_norm_reference(x, weight, eps)
        return y if dtype is None else y.to(dtype), rstd.flatten()
    if dtype is not None and dtype != torch.promote_types(x.dtype, weight.dtype) and not _narrows(x, weight, dtype):
        y, rstd = _forward(x, weight, eps)
        return y.to(dtype), rstd
    dtype = dtype or weight.dtype
    y = new_like(x) if x.dtype == dtype else torch.empty(x.shape, dtype=dtype, device=x.device)
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    _forward_kernel(x, weight, y, rstd, eps)
    return y, rstd


@functools.lru_cache(maxsize=None)
def _blocks(rows: int, length: int, processors: int) -> int:
    """As many blocks as the GPU holds at once: each walks over its share of the rows."""
    return min(rows, processors * next((blocks for most, blocks in BLOCKS_PER_SM if length <= most), 2))


def _partial(x: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """One row of partial sums of the weight's gradient for each block."""
    return torch.empty((_blocks(rows, length, multiprocessors(x)), length), dtype=torch.float32, device=x.device)


def _backward_launch(kernel, grads, x, weight, rstd, need_dweight) -> Pair:
    """grads: the gradients that the kernel reads, in its order."""
    length = x.shape[-1]
    dx, partial = new_like(x), _partial(x, x.numel() // length, length)
    kernel(dx, *grads, x, weight, rstd, partial)
    return dx, column_sum(partial, weight.dtype) if need_dweight else weight.new_empty(0)


def _backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, need_dweight: bool) -> Pair:
    if not _fits(x, weight, dy, rstd):
        dx, dweight = rms_norm_backward_reference(dy, x, weight, rstd, need_dweight)
        return dx.to(x.dtype), dweight
    if x.numel() == 0:
        return torch.empty_like(x), torch.zeros_like(weight) if need_dweight else weight.new_empty(0)
    if dy.dtype != torch.promote_types(x.dtype, weight.dtype) and not _narrows(x, weight, dy.dtype):
        dy = dy.to(torch.promote_types(x.dtype, weight.dtype))
    return _backward_launch(_backward_kernel, (dy,), x, weight, rstd, need_dweight)


def _recompute(x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """The y of [rows, length] that the forward pass gave, from what it saved, bit for bit."""
    if dtype == x.dtype == weight.dtype:
        dtype = None
    if not (_fused(x, weight, rstd) if dtype is None else _narrows_fused(x, weight, dtype, rstd)):
        y = _scaled(x, weight, rstd[:, None])
        return y if dtype is None else y.to(dtype)
    y = new_like(x) if dtype is None else torch.empty(x.shape, dtype=dtype, device=x.device)
    _apply_kernel(x, weight, y, rstd)
    return y


def _add_forward(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Triple:
    """(total, y, rstd); an fp32 residual with x in half precision gives an fp32 total and a y of x's dtype."""
    fused = _fused(x, weight, residual) if x.dtype == residual.dtype else _narrows_fused(residual, weight, x.dtype, x)
    if not fused or x.numel() == 0:
        total = x + residual
        return (total, *_forward(total, weight, eps, x.dtype if x.dtype != residual.dtype else None))
    total, y = new_like(residual), new_like(x)
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    _add_forward_kernel(x, residual, weight, total, y, rstd, eps)
    return total, y, rstd


def _add_backward(
    dy: torch.Tensor, dtotal: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, need_dweight: bool
) -> Pair:
    """(dx + dtotal, dweight), x: what was normalised."""
    fused = _fused(x, weight, dy, dtotal, rstd) if dy.dtype == x.dtype else _narrows_fused(x, weight, dy.dtype, dy, dtotal, rstd)
    if not fused or x.numel() == 0:
        dx, dweight = _backward(dy, x, weight, rstd, need_dweight)
        return dx + dtotal, dweight
    return _backward_launch(_add_backward_kernel, (dy, dtotal), x, weight, rstd, need_dweight)


def _empty(x, dtype=None):
    return x.new_empty(x.shape, dtype=dtype)


def _fake_forward(x, weight, eps, dtype=None):
    y = _empty(x, dtype or torch.promote_types(x.dtype, weight.dtype))
    return y, x.new_empty((math.prod(x.shape[:-1]),), dtype=accumulation_dtype(x.dtype))


def register(order: str, forward: Callable, backward: Callable, add_forward: Callable, add_backward: Callable, fake_forward: Callable):
    """Registers the operators of one order of multiplying and rounding (`traceable`), and returns them: (rms_norm's forward and backward,
    add_rms_norm's forward and backward). order: what their names begin with. fake_forward: `forward` on tensors without data."""

    def fake_backward(dy, x, weight, rstd, need_dweight):
        return _empty(x), torch.empty_like(weight) if need_dweight else weight.new_empty(0)

    def fake_add_forward(x, residual, *rest):
        narrowed = () if x.dtype == residual.dtype else (x.dtype,)
        return (_empty(residual), *fake_forward(residual, *rest, *narrowed))

    def fake_add_backward(dy, dtotal, *rest):
        return fake_backward(dy, *rest)

    return (
        traceable(f"{order}rms_norm_forward", forward, fake_forward),
        traceable(f"{order}rms_norm_backward", backward, fake_backward),
        traceable(f"{order}add_rms_norm_forward", add_forward, fake_add_forward),
        traceable(f"{order}add_rms_norm_backward", add_backward, fake_add_backward),
    )


rms_norm_forward, rms_norm_backward, add_rms_norm_forward, add_rms_norm_backward = register(
    "", _forward, _backward, _add_forward, _add_backward, _fake_forward
)
rms_norm_recompute = traceable("rms_norm_recompute", _recompute, lambda x, weight, rstd, dtype=None: torch.empty_like(x, dtype=dtype))


class RMSNormFunction(torch.autograd.Function):
    """Of any order of multiplying and rounding. forward, backward: its operators."""

    @staticmethod
    def forward(ctx, x, weight, eps, forward, backward):
        y, rstd = forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.gradients = backward
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad[1]
        dx, dweight = ctx.gradients(dy, x, weight, rstd, need)
        return dx, dweight if need else None, None, None, None


class AddRMSNormFunction(torch.autograd.Function):
    """The same behind a residual connection."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, forward, backward):
        total, y, rstd = forward(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.gradients = backward
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal):
        total, weight, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad[2]
        dx, dweight = ctx.gradients(dy, dtotal, total, weight, rstd, need)
        return dx, dx, dweight if need else None, None, None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm over the last dimension, normalised in fp32, rounded to x's dtype, then multiplied by the weight.

    x: [..., n], bf16, fp16 or fp32 (float64 runs in PyTorch). weight: [n], of x's dtype or fp32. Returns [..., n] in the wider
    of the two dtypes. Differentiable in x and weight. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    check(x, weight)
    if needs_formula(x, weight):
        return rms_norm_reference(x, weight, eps)[0]
    return apply_function(RMSNormFunction, x, weight, float(eps), rms_norm_forward, rms_norm_backward)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Pair:
    """(RMSNorm(x + residual), x + residual), the sum rounded to x's dtype as the residual stream holds it.

    x, residual: [..., n], one dtype. weight and the rest: as in `rms_norm`.
    """
    check(x, weight, residual)
    if needs_formula(x, residual, weight):
        total = x + residual
        return rms_norm_reference(total, weight, eps)[0], total
    return apply_function(AddRMSNormFunction, x, residual, weight, float(eps), add_rms_norm_forward, add_rms_norm_backward)


def check(x: torch.Tensor, weight: torch.Tensor, residual: Optional[torch.Tensor] = None) -> None:
    """Raises ValueError when the shapes, dtypes or devices of a norm's arguments do not fit."""
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        fail("weight", describe(weight), f"one value for each of the last dimension of x, which is {describe(x)}")
    if x.device != weight.device:
        fail("weight", describe(weight), f"on the device of x, {x.device}")
    need_floats(x=x, weight=weight)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device):
        fail("residual", describe(residual), f"like x, which is {describe(x)}")
