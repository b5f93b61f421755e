"""RMSNorm that rounds last, as GPT-OSS does: y = round(weight * x / sqrt(mean(x^2) + eps)), the product in fp32 (arXiv 1910.07467).

Alone, and with the residual stream: total = x + residual, y = RMSNorm(total). The one of rms_norm.py rounds before it multiplies.
"""

import math
from typing import Tuple

import torch

from ..runtime.device import kernels_run_on, multiprocessors
from ..runtime.launch import GRID_MAX, Kernel
from .common import accumulation_dtype, apply_function, as_rows, column_sum, needs_formula, new_like
from .rms_norm import AddRMSNormFunction, RMSNormFunction, check, one_partial_sum_a_block, register, rms_norm_backward_reference

Pair = Tuple[torch.Tensor, torch.Tensor]
Triple = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]

BLOCKS_PER_SM = 2  # in the backward pass: what 8 warps of 120 registers leave room for


def _one_block_a_row(c, x, *_):
    return (x.shape[0],)


_forward_kernel = Kernel("round_last_rms_norm_forward", grid=_one_block_a_row, views=as_rows(1, 3), reads=("x", "weight"))
_backward_kernel = Kernel(
    "round_last_rms_norm_backward", grid=one_partial_sum_a_block, views=as_rows(3, 4), reads=("dy", "x", "weight", "rstd")
)
_add_forward_kernel = Kernel(
    "round_last_add_rms_norm_forward", grid=_one_block_a_row, views=as_rows(2, 5), reads=("x", "residual", "weight")
)
_add_backward_kernel = Kernel(
    "round_last_add_rms_norm_backward", grid=one_partial_sum_a_block, views=as_rows(4, 5), reads=("dy", "dtotal", "x", "weight", "rstd")
)


def _fits(x, weight, *others):
    """Kernels exist for x and weight of one dtype, and for an fp32 weight with x in half precision. others: what else a kernel reads."""
    same = x.dtype == weight.dtype and x.dtype != torch.float64
    mixed = weight.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    if not (same or mixed) or not 0 < x.numel() <= x.shape[-1] * GRID_MAX[0] or not kernels_run_on(x, weight, *others):
        return False
    return x.shape[-1] <= _forward_kernel.constant("TILE")


def round_last_rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    """(y, rstd [..., 1]) in PyTorch, which can differentiate it."""
    xf = x.to(accumulation_dtype(x.dtype))
    rstd = torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    return (weight * (xf * rstd)).to(x.dtype), rstd


def _forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    if not _fits(x, weight):
        y, rstd = round_last_rms_norm_reference(x, weight, eps)
        return y, rstd.flatten()
    y, rstd = new_like(x), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    _forward_kernel(x, weight, y, rstd, eps)
    return y, rstd


def _add_forward(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Triple:
    """(total, y, rstd)"""
    if not _fits(x, weight, residual):
        total = x + residual
        return (total, *_forward(total, weight, eps))
    total, y = new_like(x), new_like(x)
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    _add_forward_kernel(x, residual, weight, total, y, rstd, eps)
    return total, y, rstd


def _backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, need_dweight: bool) -> Pair:
    return _gradients((dy,), x, weight, rstd, need_dweight)


def _add_backward(
    dy: torch.Tensor, dtotal: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, need_dweight: bool
) -> Pair:
    """(dx + dtotal, dweight), x: what was normalised."""
    return _gradients((dy, dtotal), x, weight, rstd, need_dweight)


def _gradients(grads, x, weight, rstd, need_dweight: bool) -> Pair:
    """(dx, dweight); dweight is empty where nobody needs it. grads: dy, and dtotal where there is one."""
    if not _fits(x, weight, rstd, *grads):
        dx, dweight = rms_norm_backward_reference(grads[0], x, weight, rstd, need_dweight)
        dx = dx.to(x.dtype)
        return dx + grads[1] if len(grads) > 1 else dx, dweight
    dx, length = new_like(x), x.shape[-1]
    blocks = min(x.numel() // length, BLOCKS_PER_SM * multiprocessors(x))
    partial = torch.empty((blocks, length), dtype=torch.float32, device=x.device)
    kernel = _backward_kernel if len(grads) == 1 else _add_backward_kernel
    kernel(dx, *grads, x, weight, rstd, partial)
    return dx, column_sum(partial, weight.dtype) if need_dweight else weight.new_empty(0)


def _fake_forward(x, weight, eps):
    return x.new_empty(x.shape), x.new_empty((math.prod(x.shape[:-1]),), dtype=accumulation_dtype(x.dtype))


forward, backward, add_forward, add_backward = register(
    "round_last_", _forward, _backward, _add_forward, _add_backward, _fake_forward
)


def round_last_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """RMSNorm over the last dimension, multiplied by the weight in fp32 and then rounded to x's dtype.

    x: [..., n], bf16, fp16 or fp32 (float64, and rows longer than 4096, run in PyTorch). weight: [n], of x's dtype or fp32.
    Returns [..., n] in x's dtype. Differentiable in x and weight. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    check(x, weight)
    if needs_formula(x, weight):
        return round_last_rms_norm_reference(x, weight, eps)[0]
    return apply_function(RMSNormFunction, x, weight, float(eps), forward, backward)


def round_last_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> Pair:
    """(RMSNorm(x + residual), x + residual), the sum rounded to x's dtype as the residual stream holds it.

    x, residual: [..., n], one dtype. weight and the rest: as in `round_last_rms_norm`.
    """
    check(x, weight, residual)
    if needs_formula(x, residual, weight):
        total = x + residual
        return round_last_rms_norm_reference(total, weight, eps)[0], total
    return apply_function(AddRMSNormFunction, x, residual, weight, float(eps), add_forward, add_backward)
