"""Dynamic tanh: y = tanh(alpha * x) * gamma + beta (arXiv 2503.10622)."""

from typing import Optional, Tuple

import torch

from ..runtime.device import multiprocessors
from ..runtime.launch import Kernel
from .arguments import describe, fail, need_floats
from .arrays import accumulation_dtype, new_like, sum_of_rows
from .autograd import Function, apply_function, needs_formula
from .operators import halves, traceable
from .rows import SEGMENT, as_segments, kernels_take, per_row, rows_of, slabs

__all__ = ["dyt"]

# Blocks that an SM holds in the backward pass (kernel_src/dyt.py); bf16 throughout, in whole segments, takes more rows at once.
BLOCKS_PER_SM, BLOCKS_PER_SM_SHORT = 4, 5


def _columns_by_rows(c, x, *_):
    return (-(-x.shape[1] // c["PIECE"]) * -(-x.shape[0] // c["ROWS"]),)


_forward_kernel = Kernel("dyt_forward", grid=_columns_by_rows, views=as_segments(1))
_backward_kernel = Kernel("dyt_backward", grid=lambda c, *tensors: (tensors[-1].numel(),), views=as_segments(3, 6))
_sums_kernel = Kernel("dyt_parameter_sums", grid=lambda c, partial, *_: (-(-partial.shape[1] // c["COLS"]),))
COLUMNS = {True: 1024, False: 512}  # of a block, by whether a row consists of segments (kernel_src/dyt.py)


def dyt_reference(x, alpha, gamma, beta):
    """y in PyTorch."""
    acc = accumulation_dtype(x.dtype)
    return (torch.tanh(alpha.to(acc) * x.to(acc)) * gamma + beta).to(x.dtype)


def dyt_backward_reference(dy, x, alpha, gamma):
    """(dx, [dgamma, dbeta] side by side, dalpha) in PyTorch."""
    acc = accumulation_dtype(x.dtype)
    a, xf, d = alpha.to(acc), x.to(acc), dy.to(acc)
    t = torch.tanh(a * xf)
    dz = (1 - t.square()) * d * gamma.to(acc)
    parameters = torch.cat([sum_of_rows(v) for v in (d * t, d)])
    return (a * dz).to(x.dtype), parameters.to(gamma.dtype), (xf * dz).sum().reshape(1).to(alpha.dtype)


def _forward(x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    if not kernels_take(x, alpha, gamma, beta):
        return dyt_reference(x, alpha, gamma, beta)
    n = x.shape[-1]
    rows, gamma, beta = rows_of(x, n), rows_of(gamma, n)[0], rows_of(beta, n)[0]
    y = new_like(rows)
    for part in slabs(rows):
        _forward_kernel(rows[part], alpha, gamma, beta, y[part])
    return y.view(x.shape)


def _backward(
    dy: torch.Tensor, x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, need_parameters: bool
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, [dgamma, dbeta] side by side, dalpha); the last two are empty unless they are needed."""
    if not kernels_take(x, alpha, gamma, others=(dy,)):
        dx, parameters, dalpha = dyt_backward_reference(dy, x, alpha, gamma)
        return (dx, parameters, dalpha) if need_parameters else (dx, gamma.new_empty(0), alpha.new_empty(0))
    n = x.shape[-1]
    dy, rows, gamma = rows_of(dy, n), rows_of(x, n), rows_of(gamma, n)[0]
    dx = new_like(rows)
    pieces = -(-n // COLUMNS[n % SEGMENT == 0])
    short = x.dtype == gamma.dtype == torch.bfloat16 and n % SEGMENT == 0
    most = max(1, (BLOCKS_PER_SM_SHORT if short else BLOCKS_PER_SM) * multiprocessors(x) // pieces)
    parts = list(slabs(dy, rows))
    groups = [min(part.stop - part.start, most) for part in parts]
    partial, partial_alpha = per_row(x, sum(groups), 2, n), per_row(x, sum(groups), pieces)
    start = 0
    for part, number in zip(parts, groups):
        sums = slice(start, start + number)
        _backward_kernel(dx[part], dy[part], rows[part], alpha, gamma, partial[sums], partial_alpha[sums])
        start += number
    if not need_parameters:
        return dx.view(x.shape), gamma.new_empty(0), alpha.new_empty(0)
    parameters, dalpha = gamma.new_empty(2 * n), alpha.new_empty(1)
    _sums_kernel(partial.view(-1, 2 * n), partial_alpha.view(-1), parameters, dalpha)
    return dx.view(x.shape), parameters, dalpha


dyt_forward = traceable("dyt_forward", _forward)
dyt_backward = traceable("dyt_backward", _backward, then=lambda dx, parameters, dalpha: (*halves(dx, parameters), dalpha))


class DyTFunction(Function):
    def forward(ctx, x, alpha, gamma, beta):
        ctx.save_for_backward(x, alpha, gamma)
        return dyt_forward(x, alpha, gamma, beta)

    def backward(ctx, dy):
        need = ctx.needs_input_grad
        dx, dgamma, dbeta, dalpha = dyt_backward(dy, *ctx.saved_tensors, any(need[1:]))
        return dx, dalpha if need[1] else None, dgamma if need[2] else None, dbeta if need[3] else None


def dyt(x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: Optional[torch.Tensor] = None) -> torch.Tensor:
    """tanh(alpha * x) * gamma + beta over the last dimension, in fp32, rounded once.

    x: [..., n], bf16, fp16 or fp32 (float64 runs in PyTorch). alpha: one element; gamma, beta: [n], of x's dtype or fp32, all of one;
    beta None for 0. Returns [..., n] in x's dtype. Differentiable in all. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    given = {"alpha": alpha, "gamma": gamma, **({} if beta is None else {"beta": beta})}
    need_floats(x=x, **given)
    for name, parameter in given.items():
        fits = parameter.numel() == 1 if name == "alpha" else parameter.shape == x.shape[-1:] and x.dim() > 0
        if not fits or parameter.device != x.device:
            expected = "one element" if name == "alpha" else f"one value for each of the last dimension of x, which is {describe(x)}"
            fail(name, describe(parameter), f"{expected}, on {x.device}")
        if parameter.dtype != gamma.dtype:
            fail(name, describe(parameter), f"of the dtype of gamma, {gamma.dtype}")
    beta = torch.zeros_like(gamma) if beta is None else beta
    if needs_formula(x, alpha, gamma, beta):
        return dyt_reference(x, alpha, gamma, beta)
    return apply_function(DyTFunction, x, alpha if alpha.dim() == 1 else alpha.reshape(1), gamma, beta)


SELF_CHECKS = {"dyt": lambda i: i.call(dyt, *i.rows(1), i.leaf(1, shift=1.0), i.leaf(i.hidden), i.leaf(i.hidden))}
