"""RMSNorm over the last dimension (arXiv 1910.07467), alone and with the residual stream, of every family of models.

    n = x / sqrt(mean(x^2) + eps)        y = round((weight + offset) * n)        total = residual + multiplier * x, y = RMSNorm(total)

`rounds` says when n is rounded to x's dtype: "first", before it is multiplied (Llama, Qwen), or "last", as part of the product alone
(GPT-OSS, OLMo, and Gemma, whose offset is 1). The gradients are the same for both.
"""

from typing import Optional, Tuple

import torch

from .arguments import describe, fail, need_alike, need_floats
from .arrays import Pair, Triple, accumulation_dtype, sum_of_rows
from .autograd import Function, apply_function, needs_formula
from .operators import traceable
from .rms_norm_kernels import NormCall, family_of

__all__ = [
    "ROUNDS", "add_rms_norm", "add_rms_norm_backward", "add_rms_norm_forward", "check", "result_dtype_of_sum", "rms_norm",
    "rms_norm_backward", "rms_norm_backward_reference", "rms_norm_forward", "rms_norm_recompute", "rms_norm_reference",
]  # fmt: skip

ROUNDS = ("first", "last")


# ---------------------------------------------------------------- in PyTorch
def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: Optional[torch.dtype] = None,
    offset: float = 0.0,
    rounds: str = "first",
) -> Pair:
    """Returns (y, rstd [..., 1]) in PyTorch, which can differentiate it. Arguments: as of `rms_norm`."""
    rstd = torch.rsqrt(x.to(accumulation_dtype(x.dtype)).square().mean(-1, keepdim=True) + eps)
    return _scaled(x, weight, rstd, dtype or result_dtype(x, weight, rounds), offset, rounds), rstd


def result_dtype(x: torch.Tensor, weight: torch.Tensor, rounds: str) -> torch.dtype:
    """The dtype of y where none is given: what the model's own product has, or what it is rounded to."""
    return torch.promote_types(x.dtype, weight.dtype) if rounds == "first" else x.dtype


def result_dtype_of_sum(x, residual, weight, rounds: str) -> torch.dtype:
    """The dtype of the normalised sum of x and the residual where none is given."""
    return x.dtype if x.dtype != residual.dtype else result_dtype(x, weight, rounds)


def _scaled(x, weight, rstd, dtype: torch.dtype, offset: float, rounds: str) -> torch.Tensor:
    """y in PyTorch; rstd: [..., 1]."""
    acc = accumulation_dtype(x.dtype)
    n = x.to(acc) * rstd
    if rounds == "first":
        n = n.to(x.dtype)
    return (n * (weight.to(acc) + offset if offset else weight)).to(dtype)


def rms_norm_backward_reference(dy, x, weight, rstd, need_dweight=True, offset=0.0, dtotal=None) -> Pair:
    """Returns (dx in the accumulation dtype, dweight) in PyTorch; dweight is empty where it is not needed. dtotal: is added to dx."""
    acc = accumulation_dtype(x.dtype)
    n, d = x.to(acc) * rstd.reshape(x.shape[:-1] + (1,)), dy.to(acc)
    g = d * (weight.to(acc) + offset)
    dx = (g - n * (g * n).mean(-1, keepdim=True)) * rstd.reshape(x.shape[:-1] + (1,))
    dx = dx if dtotal is None else dx + dtotal
    return dx, sum_of_rows(d * n).to(weight.dtype) if need_dweight else weight.new_empty(0)


# ---------------------------------------------------------------- the steps that decoder layers call, and their operators
def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: Optional[torch.dtype] = None,
    offset: float = 0.0,
    rounds: str = "first",
) -> Pair:
    """Returns (y, rstd [rows]). dtype: of y, None for `result_dtype`."""
    natural = result_dtype(x, weight, rounds)
    for y_dtype in dict.fromkeys((dtype or natural, natural)):
        norm = NormCall(x.dtype, weight.dtype, y_dtype, x.shape[-1], offset, rounds)
        family = family_of(norm, "forward", x, weight)
        if family is not None:
            y, rstd = family.forward(x, weight, eps, norm)
            return y.to(dtype or natural), rstd
    y, rstd = rms_norm_reference(x, weight, eps, dtype, offset, rounds)
    return y, rstd.flatten()


def _recompute(
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dtype: Optional[torch.dtype] = None,
    offset: float = 0.0,
    rounds: str = "first",
) -> torch.Tensor:
    """Returns the y that `_forward` gave for x [..., n], from what it saved, bit for bit."""
    dtype = dtype or result_dtype(x, weight, rounds)
    norm = NormCall(x.dtype, weight.dtype, dtype, x.shape[-1], offset, rounds)
    family = family_of(norm, "recompute", x, weight, rstd)
    if family is not None:
        return family.recompute(x, weight, rstd, norm)
    return _scaled(x, weight, rstd.view(*x.shape[:-1], 1), dtype, offset, rounds)


def _add_forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: Optional[torch.dtype] = None,
    offset: float = 0.0,
    rounds: str = "first",
    multiplier: float = 1.0,
) -> Triple:
    """Returns (total = residual + multiplier * x, y, rstd [rows]). dtype: of y, None for `result_dtype`; an fp32 residual with x in half
    precision gives an fp32 total, and a y of x's dtype."""
    dtype = dtype or result_dtype_of_sum(x, residual, weight, rounds)
    norm = NormCall(residual.dtype, weight.dtype, dtype, x.shape[-1], offset, rounds)
    family = family_of(norm, "add_forward" if multiplier == 1.0 else "scaled_add_forward", x, residual, weight)
    if family is not None and dtype == x.dtype:
        return family.add_forward(x, residual, weight, eps, norm, multiplier)
    total = torch.add(residual, x, alpha=multiplier)
    return (total, *_forward(total, weight, eps, dtype, offset, rounds))


def _backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, need_dweight: bool, offset: float = 0.0) -> Pair:
    """Returns (dx, dweight); dweight is empty where it is not needed."""
    for dtype in dict.fromkeys((dy.dtype, torch.promote_types(x.dtype, weight.dtype))):
        norm = NormCall(x.dtype, weight.dtype, dtype, x.shape[-1], offset)
        family = family_of(norm, "backward", x, weight, dy, rstd)
        if family is not None:
            return family.backward((dy.to(dtype),), x, weight, rstd, need_dweight, norm)
    dx, dweight = rms_norm_backward_reference(dy, x, weight, rstd, need_dweight, offset)
    return dx.to(x.dtype), dweight


def _add_backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    need_dweight: bool,
    offset: float = 0.0,
) -> Pair:
    """Returns (dx + dtotal, dweight) as of `_backward`. x: what was normalised; dtotal: the gradient that reaches it past the norm.

    The first result is the gradient of the residual stream; that of the branch is `multiplier` times as much.
    """
    norm = NormCall(x.dtype, weight.dtype, dy.dtype, x.shape[-1], offset)
    family = family_of(norm, "add_backward", x, weight, dy, dtotal, rstd)
    if family is not None:
        return family.backward((dy, dtotal), x, weight, rstd, need_dweight, norm)
    if family_of(norm, "backward", x, weight, dy, rstd) is not None:
        dx, dweight = _backward(dy, x, weight, rstd, need_dweight, offset)
        return dx + dtotal, dweight
    dx, dweight = rms_norm_backward_reference(dy, x, weight, rstd, need_dweight, offset, dtotal)
    return dx.to(x.dtype), dweight


rms_norm_forward = traceable("rms_norm_forward", _forward)
rms_norm_backward = traceable("rms_norm_backward", _backward)
rms_norm_recompute = traceable("rms_norm_recompute", _recompute)
add_rms_norm_forward = traceable("add_rms_norm_forward", _add_forward)
add_rms_norm_backward = traceable("add_rms_norm_backward", _add_backward)


# ---------------------------------------------------------------- autograd
class RMSNormFunction(Function):
    """(x, weight, eps, dtype, offset, rounds) -> y."""

    def forward(ctx, x, weight, eps, dtype, offset, rounds):
        y, rstd = rms_norm_forward(x, weight, eps, dtype, offset, rounds)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad[1]
        dx, dweight = rms_norm_backward(dy, x, weight, rstd, need, ctx.offset)
        return dx, dweight if need else None, None, None, None, None


class AddRMSNormFunction(Function):
    """(x, residual, weight, eps, dtype, offset, rounds) -> (y, total)."""

    def forward(ctx, x, residual, weight, eps, dtype, offset, rounds):
        total, y, rstd = add_rms_norm_forward(x, residual, weight, eps, dtype, offset, rounds)
        ctx.save_for_backward(total, weight, rstd)
        ctx.offset = offset
        ctx.set_materialize_grads(False)
        return y, total

    def backward(ctx, dy, dtotal):
        total, weight, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad[2]
        if dy is None:
            return dtotal, dtotal, None, None, None, None, None
        if dtotal is None:  # the sum was not used: there are no zeros to read
            dx, dweight = rms_norm_backward(dy, total, weight, rstd, need, ctx.offset)
        else:
            dx, dweight = add_rms_norm_backward(dy, dtotal, total, weight, rstd, need, ctx.offset)
        return dx, dx, dweight if need else None, None, None, None, None


# ---------------------------------------------------------------- what users call
def check(x, weight, eps, offset, rounds, residual=None, names=("x", "weight")) -> Tuple[torch.Tensor, float, float, str]:
    """Returns (weight, eps, offset, rounds) of a norm, with a weight of ones where there is none. names: what errors call x and weight.

    Raises ValueError when the arguments do not fit.
    """
    of_x, of_weight = names
    if rounds not in ROUNDS:
        fail("rounds", repr(rounds), f"one of {', '.join(ROUNDS)}")
    if x.dim() == 0:
        fail(of_x, describe(x), "a tensor with a last dimension")
    if not x.is_floating_point():
        need_floats(**{of_x: x})
    if weight is None:
        weight, offset = x.new_ones(x.shape[-1]), 0.0
    if weight.shape != x.shape[-1:]:
        fail(of_weight, describe(weight), f"one value for each of the last dimension of {of_x}, which is {describe(x)}")
    if x.device != weight.device:
        fail(of_weight, describe(weight), f"on the device of {of_x}, {x.device}")
    if not weight.is_floating_point():
        need_floats(**{of_weight: weight})
    if residual is not None:
        need_alike("residual", residual, of_x, x)
    return weight, float(eps), float(offset), rounds


def rms_norm(
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    eps: float = 1e-6,
    offset: float = 0.0,
    rounds: str = "first",
    dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """Normalises the last dimension by its root mean square, in fp32, and multiplies it by a weight.

    Args:
        x: [..., n], bf16, fp16 or fp32 (float64 runs in PyTorch).
        weight: [n], of x's dtype or fp32; None for 1, without the offset.
        eps: added to the mean square.
        offset: added to the weight; 1 for Gemma.
        rounds: "first" rounds the normalised x to its dtype before it is multiplied, as Llama and Qwen do; "last" rounds the product alone,
            as Gemma, OLMo and GPT-OSS do.
        dtype: of the result; by default the wider one of x and weight with "first", and x's with "last".

    Returns:
        [..., n]; differentiable in x and weight.

    Raises:
        ValueError: if shapes, dtypes, devices or `rounds` do not fit.
    """
    weight, eps, offset, rounds = check(x, weight, eps, offset, rounds)
    if needs_formula(x, weight):
        return rms_norm_reference(x, weight, eps, dtype, offset, rounds)[0]
    return apply_function(RMSNormFunction, x, weight, eps, dtype, offset, rounds)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor],
    eps: float = 1e-6,
    offset: float = 0.0,
    rounds: str = "first",
    dtype: Optional[torch.dtype] = None,
) -> Pair:
    """Adds x to the residual stream and normalises the sum.

    Args:
        x, residual: [..., n], of one dtype.
        weight, eps, offset, rounds, dtype: as of `rms_norm`.

    Returns:
        (RMSNorm(x + residual), x + residual), the sum rounded to x's dtype as the residual stream holds it; differentiable in x, residual
        and weight.

    Raises:
        ValueError: if shapes, dtypes, devices or `rounds` do not fit.
    """
    weight, eps, offset, rounds = check(x, weight, eps, offset, rounds, residual)
    if needs_formula(x, residual, weight):
        total = x + residual
        return rms_norm_reference(total, weight, eps, dtype, offset, rounds)[0], total
    return apply_function(AddRMSNormFunction, x, residual, weight, eps, dtype, offset, rounds)


SELF_CHECKS = {
    "rms_norm": lambda i: i.call(rms_norm, *i.rows(1), i.leaf(i.hidden)),
    "rms_norm (offset, odd width)": lambda i: i.call(rms_norm, *i.rows(1, 777), i.leaf(777), offset=1.0, rounds="last"),
    "add_rms_norm": lambda i: i.call(add_rms_norm, *i.rows(2), i.leaf(i.hidden)),
    "add_rms_norm (rounded last)": lambda i: i.call(add_rms_norm, *i.rows(2, 2880), i.leaf(2880), rounds="last"),
}
