"""RMSNorm: y = weight * round(x / sqrt(mean(x^2) + eps)), over the last dimension (arXiv 1910.07467, in Qwen3's order)."""

from typing import Tuple

import torch

from ..runtime.device import kernels_run_on, multiprocessors
from ..runtime.launch import GRID_MAX, Kernel
from .common import column_sum, describe, fail, traceable, unit_stride, wide


def _forward_grid(c, x, *_):
    return (-(-x.shape[0] // c.get("ROWS", 1)),)


_forward_kernel = Kernel("rms_norm_forward", "rms_norm_rows_forward", "rms_norm_any_forward", grid=_forward_grid)
_backward_kernel = Kernel(
    "rms_norm_backward",
    "rms_norm_rows_backward",
    "rms_norm_any_backward",
    grid=lambda c, dx, dy, x, weight, rstd, dweight: (dweight.shape[0],),
)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd) in PyTorch."""
    xf = x.to(wide(x.dtype))
    rstd = torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    return weight * (xf * rstd).to(x.dtype), rstd.flatten()


def rms_norm_backward_reference(dy, x, weight, rstd) -> Tuple[torch.Tensor, torch.Tensor]:
    """(dx, dweight) in PyTorch."""
    acc = wide(x.dtype)
    rstd = rstd.reshape(x.shape[:-1] + (1,))
    n = x.to(acc) * rstd
    d = dy.to(acc)
    g = d * weight.to(acc)
    dx = (g - n * (g * n).mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype), (d * n).flatten(0, -2).sum(0).to(weight.dtype)


def _forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Tuple[torch.Tensor, torch.Tensor]:
    if not _fits(x, weight):
        return rms_norm_reference(x, weight, eps)
    rows = unit_stride(x.reshape(-1, x.shape[-1]))
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    rstd = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    y_rows = y.view(rows.shape)
    for start in range(0, rows.shape[0], GRID_MAX):
        part = slice(start, start + GRID_MAX) if rows.shape[0] > GRID_MAX else slice(None)
        _forward_kernel(rows[part], weight, y_rows[part], rstd[part], float(eps))
    return y, rstd


def _backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, need_dweight: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    if not _fits(x, weight):
        return rms_norm_backward_reference(dy, x, weight, rstd)
    length = x.shape[-1]
    rows, dy = unit_stride(x.reshape(-1, length)), unit_stride(dy.reshape(-1, length))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # As many blocks as the GPU holds at once: each walks over its share of the rows.
    blocks = min(rows.shape[0], multiprocessors(x) * (4 if length <= 256 else 3 if length <= 4096 else 2))
    partial = torch.empty((blocks, length), dtype=torch.float32, device=x.device)
    if rows.shape[0] == 0:
        return dx, torch.zeros_like(weight)
    _backward_kernel(dx.view(rows.shape), dy, rows, weight, rstd, partial)
    return dx, column_sum(partial, weight.dtype) if need_dweight else torch.empty_like(weight)


def _fits(x, weight):
    """Kernels exist for x and weight of one dtype, and for an fp32 weight with x in half precision."""
    half_with_float = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == torch.float32
    same = x.dtype == weight.dtype and x.dtype != torch.float64
    return (same or half_with_float) and kernels_run_on(x)


def _fake_forward(x, weight, eps):
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    return y, x.new_empty((x.numel() // x.shape[-1],), dtype=wide(x.dtype))


def _fake_backward(dy, x, weight, rstd, need_dweight):
    return x.new_empty(x.shape), torch.empty_like(weight)


rms_norm_forward = traceable("rms_norm_forward", _forward, _fake_forward)
rms_norm_backward = traceable("rms_norm_backward", _backward, _fake_backward)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, rstd = rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = rms_norm_backward(dy, x, weight, rstd, ctx.needs_input_grad[1])
        return dx, dweight if ctx.needs_input_grad[1] else None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm over the last dimension, normalised in fp32, rounded to x's dtype, then multiplied by the weight.

    x: [..., n], bf16, fp16 or fp32 (float64 runs in PyTorch). weight: [n], of x's dtype or fp32. Returns [..., n] in the wider
    of the two dtypes. Differentiable in x and weight. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        fail("weight", describe(weight), f"one value for each of the last dimension of x, which is {describe(x)}")
    if x.device != weight.device:
        fail("weight", describe(weight), f"on the device of x, {x.device}")
    if not (x.is_floating_point() and weight.is_floating_point()):
        fail("x" if not x.is_floating_point() else "weight", describe(x), "a floating point tensor")
    return _RMSNorm.apply(x, weight, eps)
