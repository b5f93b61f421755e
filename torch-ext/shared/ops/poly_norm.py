"""PolyNorm: y = w0 * n_3 + w1 * n_2 + w2 * n_1 + bias, n_p = x^p / sqrt(mean(x^2p) + eps), over the last dimension (arXiv 2411.03884)."""

from typing import Tuple

import torch

from ..runtime.device import multiprocessors
from ..runtime.launch import Kernel
from .arguments import describe, fail, need_floats, need_rows
from .arrays import accumulation_dtype, column_sum_of, new_like
from .autograd import Function, apply_function, needs_formula
from .operators import traceable
from .rows import SEGMENT, as_segments, kernels_take, one_block_a_row, one_block_a_sum, per_row, rows_of, slabs

__all__ = ["poly_norm"]

BLOCKS_PER_SM = 3  # that fit in the backward pass (kernel_src/poly_norm.py): with more, the last would start when the first have ended
# The shortest and the longest row that a block of the backward pass holds in registers.
WHOLE = {torch.bfloat16: (33 * SEGMENT, 64 * SEGMENT)}


_forward_kernel = Kernel("poly_norm_forward", "poly_norm_long_forward", grid=one_block_a_row, views=as_segments(1, 2, 4))
_backward_kernel = Kernel("poly_norm_backward", grid=one_block_a_sum)
_long_backward_kernel = Kernel("poly_norm_long_backward", grid=one_block_a_sum, views=as_segments(3, 4, 5))


def poly_norm_reference(x, weight, bias, eps) -> Tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd [rows, 3]) in PyTorch."""
    acc = accumulation_dtype(x.dtype)
    xf, w = x.to(acc), weight.to(acc)
    powers = (xf, xf * xf, xf * xf * xf)
    rstd = torch.stack([torch.rsqrt(p.square().mean(-1) + eps) for p in powers], -1)
    y = sum(w[2 - i] * powers[i] * rstd[..., i, None] for i in range(3)) + bias.to(acc)
    return y.to(x.dtype), rstd.reshape(-1, 3)


def poly_norm_backward_reference(dy, x, weight, rstd) -> Tuple[torch.Tensor, torch.Tensor]:
    """(dx, [dw0, dw1, dw2, dbias]) in PyTorch."""
    acc = accumulation_dtype(x.dtype)
    xf, d, w = x.to(acc), dy.to(acc), weight.to(acc)
    rstd = rstd.view(*x.shape[:-1], 3)
    dx, gradients = torch.zeros_like(xf), []
    for power in (1, 2, 3):
        r = rstd[..., power - 1, None]
        n = xf**power * r
        m = (d * n).mean(-1, keepdim=True)
        dx = dx + w[3 - power] * power * xf ** (power - 1) * r * (d - n * m)
        gradients.append(m.sum() * x.shape[-1])
    return dx.to(x.dtype), torch.stack((*gradients[::-1], d.sum())).to(weight.dtype)


def _whole(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a block of the backward pass holds such rows in registers."""
    shortest, longest = WHOLE.get(rows.dtype, (1, 0))
    return weight.dtype == rows.dtype and shortest <= rows.shape[1] <= longest and rows.shape[1] % SEGMENT == 0


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Tuple[torch.Tensor, torch.Tensor]:
    if not kernels_take(x, weight, bias):
        return poly_norm_reference(x, weight, bias, eps)
    rows, weight = rows_of(x, x.shape[-1]), weight.contiguous()
    y, rstd = new_like(rows), per_row(x, rows.shape[0], 3)
    for part in slabs(rows):
        _forward_kernel(rows[part], weight, bias, y[part], rstd[part], eps)
    return y.view(x.shape), rstd


def _backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, need_parameters: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    """(dx, [dw0, dw1, dw2, dbias]); the second is empty unless it is needed."""
    if not kernels_take(x, weight, others=(dy,)):
        dx, parameters = poly_norm_backward_reference(dy, x, weight, rstd)
        return dx, parameters if need_parameters else weight.new_empty(0)
    dy, rows, weight = rows_of(dy, x.shape[-1]), rows_of(x, x.shape[-1]), weight.contiguous()
    dx = new_like(rows)
    kernel = _backward_kernel if _whole(rows, weight) else _long_backward_kernel
    partials = []
    for part in slabs(dy, rows):
        partials.append(per_row(x, min(part.stop - part.start, BLOCKS_PER_SM * multiprocessors(x)), 4))
        kernel(dx[part], dy[part], rows[part], weight, rstd[part], partials[-1])
    if not need_parameters:
        return dx.view(x.shape), weight.new_empty(0)
    return dx.view(x.shape), column_sum_of(partials, weight.dtype)


poly_norm_forward = traceable("poly_norm_forward", _forward)
poly_norm_backward = traceable("poly_norm_backward", _backward, then=lambda dx, parameters: (dx, parameters[:3], parameters[3:]))


class PolyNormFunction(Function):
    def forward(ctx, x, weight, bias, eps):
        y, rstd = poly_norm_forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    def backward(ctx, dy):
        _, need_weight, need_bias, _ = ctx.needs_input_grad
        dx, dweight, dbias = poly_norm_backward(dy, *ctx.saved_tensors, need_weight or need_bias)
        return dx, dweight if need_weight else None, dbias if need_bias else None, None


def poly_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """PolyNorm over the last dimension, in fp32, rounded once.

    x: [..., n], bf16, fp16 or fp32 (float64 runs in PyTorch); |x| up to 2.6e6, whose sixth power fp32 can hold. weight: [3], first the
    cube's; bias: one element in any shape; both of x's dtype or fp32. Returns [..., n] in x's dtype. Differentiable in x, weight and bias.
    Raises ValueError when shapes, dtypes or devices do not fit.
    """
    need_floats(x=x, weight=weight, bias=bias)
    need_rows("x", x)
    for name, parameter, count in (("weight", weight, 3), ("bias", bias, 1)):
        if parameter.numel() != count or (name == "weight" and parameter.dim() != 1) or parameter.device != x.device:
            fail(name, describe(parameter), f"{count} element{'s' * (count > 1)} on {x.device}")
    if bias.dtype != weight.dtype:
        fail("bias", describe(bias), f"of the dtype of weight, {weight.dtype}")
    if needs_formula(x, weight, bias):
        return poly_norm_reference(x, weight, bias.reshape(1), float(eps))[0]
    return apply_function(PolyNormFunction, x, weight, bias if bias.dim() == 1 else bias.reshape(1), float(eps))


SELF_CHECKS = {"poly_norm": lambda i: i.call(poly_norm, *i.rows(1), i.leaf(3), i.leaf(1))}
