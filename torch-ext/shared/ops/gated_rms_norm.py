"""RMSNorm times a gate (Qwen3-Next, Qwen3.5): y = round(weight * round(x / sqrt(mean(x^2) + eps))) * silu(gate)."""

import torch
from torch.nn.functional import silu

from ..runtime.device import multiprocessors
from ..runtime.launch import Kernel, ships
from .arguments import describe, fail, need_alike, need_floats, need_rows
from .arrays import Triple, accumulation_dtype, column_sum_of, sum_of_rows
from .autograd import Function, apply_function, needs_formula
from .operators import traceable
from .rows import blocks_of_rows, kernels_take, one_block_a_sum, per_row, rows_of, slabs

__all__ = ["gated_rms_norm"]

BLOCKS_PER_SM = 6  # in the backward pass


_forward_kernel = Kernel("gated_rms_norm_forward", grid=blocks_of_rows)
_backward_kernel = Kernel("gated_rms_norm_backward", grid=one_block_a_sum)


def gated_rms_norm_reference(x, gate, weight, eps: float) -> torch.Tensor:
    """Returns y in PyTorch, which can differentiate it."""
    acc = accumulation_dtype(x.dtype)
    xf = x.to(acc)
    u = weight * (xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (u.to(acc) * silu(gate.to(acc))).to(x.dtype)


def gated_rms_norm_backward_reference(dy, x, gate, weight, eps: float, need_dweight: bool = True) -> Triple:
    """Returns (dx, dgate, dweight) in PyTorch; dweight is empty where it is not needed."""
    acc = accumulation_dtype(x.dtype)
    xf, z, d, w = x.to(acc), gate.to(acc), dy.to(acc), weight.to(acc)
    rstd = torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    n, s = xf * rstd, torch.sigmoid(z)
    dgate = d * w * n * s * (1 + z * (1 - s))
    d = d * z * s
    g = d * w
    dx = (g - n * (g * n).mean(-1, keepdim=True)) * rstd
    dweight = sum_of_rows(d * n).to(weight.dtype) if need_dweight else weight.new_empty(0)
    return dx.to(x.dtype), dgate.to(gate.dtype), dweight


def _fits(x, weight, *others) -> bool:
    """Whether kernels take these rows: of 128 in every dtype, of other lengths in bf16. others: what else a kernel reads."""
    if any(t.dtype != x.dtype for t in others) or not kernels_take(x, weight, others=others) or not ships("gated_rms_norm"):
        return False
    n = x.shape[-1]
    return n == 128 or (x.dtype == weight.dtype == torch.bfloat16 and n in _forward_kernel.lengths("x", 1))


def _forward(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not _fits(x, weight, gate):
        return gated_rms_norm_reference(x, gate, weight, eps)
    n = x.shape[-1]
    rows, gates, weight = rows_of(x, n), rows_of(gate, n), rows_of(weight, n)[0]
    y = rows.new_empty(rows.shape)
    for part in slabs(rows, gates):
        _forward_kernel(rows[part], gates[part], weight, y[part], eps)
    return y.view(x.shape)


def _backward(dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, need_dweight: bool) -> Triple:
    """Returns (dx, dgate, dweight); dweight is empty where it is not needed."""
    if not _fits(x, weight, gate, dy):
        return gated_rms_norm_backward_reference(dy, x, gate, weight, eps, need_dweight)
    n = x.shape[-1]
    grads, rows, gates, parameter = rows_of(dy, n), rows_of(x, n), rows_of(gate, n), rows_of(weight, n)[0]
    dx, dgate, partials = rows.new_empty(rows.shape), rows.new_empty(rows.shape), []
    for part in slabs(rows, gates, grads):
        partial = per_row(x, min(part.stop - part.start, BLOCKS_PER_SM * multiprocessors(x)), n)
        _backward_kernel(grads[part], rows[part], gates[part], parameter, dx[part], dgate[part], partial, eps)
        partials.append(partial)
    if not need_dweight:
        return dx.view(x.shape), dgate.view(x.shape), weight.new_empty(0)
    return dx.view(x.shape), dgate.view(x.shape), column_sum_of(partials, weight.dtype)


gated_rms_norm_forward = traceable("gated_rms_norm_forward", _forward)
gated_rms_norm_backward = traceable("gated_rms_norm_backward", _backward)


class GatedRMSNormFunction(Function):
    """(x, gate, weight, eps) -> y."""

    def forward(ctx, x, gate, weight, eps):
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return gated_rms_norm_forward(x, gate, weight, eps)

    def backward(ctx, dy):
        need = ctx.needs_input_grad[2]
        dx, dgate, dweight = gated_rms_norm_backward(dy, *ctx.saved_tensors, ctx.eps, need)
        return dx, dgate, dweight if need else None, None


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Normalises the last dimension by its root mean square, multiplies it by a weight, and by SiLU of a gate.

    Args:
        x: [..., n], bf16, fp16 or fp32. The kernels take n = 128, and 64 and 256 in bf16; the rest runs in PyTorch.
        gate: like x.
        weight: [n], of x's dtype or fp32.
        eps: added to the mean square.

    Returns:
        [..., n] in x's dtype, rounded after the normalisation, after the weight and after the gate, as transformers does it; differentiable
        in x, gate and weight.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit.
    """
    need_floats(x=x, gate=gate, weight=weight)
    need_rows("x", x)
    need_alike("gate", gate, "x", x)
    if weight.shape != x.shape[-1:] or weight.device != x.device:
        fail("weight", describe(weight), f"one value for each of the last dimension of x, which is {describe(x)}")
    if needs_formula(x, gate, weight):
        return gated_rms_norm_reference(x, gate, weight, eps)
    return apply_function(GatedRMSNormFunction, x, gate, weight, float(eps))


SELF_CHECKS = {"gated_rms_norm": lambda i: i.call(gated_rms_norm, *(i.leaf(i.tokens, 4, i.width) for _ in range(2)), i.leaf(i.width))}
