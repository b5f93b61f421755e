"""The two halves of a decoder layer around attention, each one autograd node: RMSNorm and the projections behind it, and RMSNorm
and the MLP with the residual.

What is saved is small: the residual stream, one number a row, and the projections' outputs. The normalised input and
silu(gate) * up are computed again in the backward pass, bit for bit. Input gradients of several projections are added by the
GEMMs, and the residual's gradient by the RMSNorm's backward kernel, so no separate addition is left.
"""

from typing import Optional, Sequence, Tuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from .common import describe, fail, need_floats
from .rms_norm import add_rms_norm_backward, rms_norm_again, rms_norm_forward
from .swiglu import swiglu_backward_recompute, swiglu_forward


def _input_gradient(grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """sum of grad @ weight: the first GEMM writes, the others add."""
    total = torch.mm(grads[0], weights[0])
    for grad, weight in zip(grads[1:], weights[1:]):
        total.addmm_(grad, weight)
    return total


class _NormLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, eps, *weights):
        y, rstd = rms_norm_forward(x, norm_weight, eps)
        ctx.save_for_backward(x, norm_weight, rstd, *weights)
        return (*[linear(y, weight) for weight in weights], x.view_as(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, norm_weight, rstd, *weights = ctx.saved_tensors
        grads, dresidual = grads[:-1], grads[-1]
        needs = ctx.needs_input_grad
        dweights = [None] * len(weights)
        if any(needs[3:]):
            y = rms_norm_again(x, norm_weight, rstd)
            dweights = [torch.mm(grad.t(), y) if need else None for grad, need in zip(grads, needs[3:])]
            del y
        dy = _input_gradient(grads, weights)
        dx, dnorm = add_rms_norm_backward(dy, dresidual, x, norm_weight, rstd, needs[1])
        return (dx, dnorm if needs[1] else None, None, *dweights)


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, eps, gate_weight, up_weight, down_weight):
        ctx.shape, x = x.shape, x.reshape(-1, x.shape[-1])
        y, rstd = rms_norm_forward(x, norm_weight, eps)
        gate, up = linear(y, gate_weight), linear(y, up_weight)
        del y
        ctx.save_for_backward(x, norm_weight, rstd, gate, up, gate_weight, up_weight, down_weight)
        # Not a view of the flat result: FSDP's hooks warn of a module that returns a view.
        out = torch.empty(ctx.shape, dtype=x.dtype, device=x.device)
        torch.addmm(x, swiglu_forward(gate, up), down_weight.t(), out=out.view(x.shape))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, norm_weight, rstd, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        dout = dout.reshape(x.shape)
        _, need_norm, _, need_gate, need_up, need_down = ctx.needs_input_grad
        dgate, dup, hidden = swiglu_backward_recompute(torch.mm(dout, down_weight), gate, up)
        dgate_weight = dup_weight = None
        ddown_weight = torch.mm(dout.t(), hidden) if need_down else None
        del hidden
        if need_gate or need_up:
            y = rms_norm_again(x, norm_weight, rstd)
            dgate_weight = torch.mm(dgate.t(), y) if need_gate else None
            dup_weight = torch.mm(dup.t(), y) if need_up else None
            del y
        dy = _input_gradient((dgate, dup), (gate_weight, up_weight))
        del dgate, dup
        dx, dnorm = add_rms_norm_backward(dy, dout, x, norm_weight, rstd, need_norm)
        return dx.view(ctx.shape), dnorm if need_norm else None, None, dgate_weight, dup_weight, ddown_weight


def norm_linears(
    x: torch.Tensor, norm_weight: torch.Tensor, weights: Sequence[torch.Tensor], eps: float = 1e-6
) -> Tuple[torch.Tensor, ...]:
    """RMSNorm(x) @ w.T for each weight, and x itself for the residual connection.

    x: [tokens, hidden]; norm_weight: [hidden]; weights: [features, hidden] each; all of one dtype and device. Returns
    ([tokens, features], ..., x). Use the x that is returned behind the projections: its gradient is then added for nothing.
    Differentiable in all of them. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    if x.dim() != 2:
        fail("x", describe(x), "[tokens, hidden]")
    _check(x, norm_weight, {f"weights[{i}]": (w, (None, x.shape[-1])) for i, w in enumerate(weights)})
    return _NormLinears.apply(x, norm_weight, float(eps), *weights)


def norm_mlp(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:
    """x + down(silu(gate(n)) * up(n)) with n = RMSNorm(x).

    x: [..., hidden]; norm_weight: [hidden]; gate_weight, up_weight: [intermediate, hidden]; down_weight: [hidden,
    intermediate]; all of one dtype and device. Returns [..., hidden]. Differentiable in all of them.
    Raises ValueError when shapes, dtypes or devices do not fit.
    """
    if x.dim() == 0 or gate_weight.dim() != 2:
        fail("gate_weight", describe(gate_weight), f"[intermediate, hidden] for x, which is {describe(x)}")
    hidden, intermediate = x.shape[-1], gate_weight.shape[0]
    shapes = {
        "gate_weight": (gate_weight, (intermediate, hidden)),
        "up_weight": (up_weight, (intermediate, hidden)),
        "down_weight": (down_weight, (hidden, intermediate)),
    }
    _check(x, norm_weight, shapes)
    return _NormMLP.apply(x, norm_weight, float(eps), gate_weight, up_weight, down_weight)


def _check(x: torch.Tensor, norm_weight: torch.Tensor, weights: dict) -> None:
    need_floats(x=x)
    expected: Tuple[Optional[int], ...]
    for name, (weight, expected) in {"norm_weight": (norm_weight, x.shape[-1:]), **weights}.items():
        fits = weight.dim() == len(expected) and all(e in (None, n) for e, n in zip(expected, weight.shape))
        if not fits or weight.dtype != x.dtype or weight.device != x.device:
            fail(name, describe(weight), f"{x.dtype} {[n or 'any' for n in expected]} on {x.device}")
