"""SwiGLU, silu(gate) * up, and the whole MLP around it (arXiv 2002.05202)."""

import functools
from typing import Optional, Sequence, Tuple

import torch
from torch.nn.functional import linear

from ..runtime.device import kernels_run_on
from ..runtime.replay import replayed
from .arguments import describe, fail, need_alike, need_floats
from .arrays import ElementwiseKernel, Triple, accumulation_dtype, aligned, new_like
from .autocast import as_autocast, outside_autocast, without_autocast
from .autograd import Function, apply_function, autocasts, needs_formula
from .neighbours import side_by_side
from .operators import traceable
from .second_run import Rest, apply_in_parts, unfinished

__all__ = ["are_few", "backward_in_place", "check_mlp", "mlp", "swiglu", "swiglu_forward", "swiglu_reference"]


_forward_kernel = ElementwiseKernel("swiglu_forward", "swiglu_any_forward")
_backward_kernel = ElementwiseKernel("swiglu_backward", "swiglu_any_backward")
_recompute_kernel = ElementwiseKernel("swiglu_backward_recompute", "swiglu_any_backward_recompute")


def _inputs(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors as the kernels take them; copies only of those that lie oddly in memory."""
    for tensor in tensors:  # a loop: all() over a generator costs the host three times as much
        if not tensor.is_contiguous():
            break
    else:
        return tensors
    if tensors[0].dim() == 2 and _forward_kernel.takes_rows_of(tensors[0].shape[1]):
        return [aligned(tensor) for tensor in tensors]
    return [tensor.contiguous() for tensor in tensors]


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in PyTorch."""
    return torch.nn.functional.silu(gate) * up


def swiglu_backward_reference(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Triple:
    """(dgate, dup, silu(gate) * up) in PyTorch."""
    g, u, d = (t.to(accumulation_dtype(t.dtype)) for t in (gate, up, dout))
    s = torch.sigmoid(g)
    silu = g * s
    return (d * u * (s + silu * (1 - s))).to(gate.dtype), (d * silu).to(up.dtype), swiglu_reference(gate, up)


def mlp_reference(x, gate_weight, up_weight, down_weight) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) in PyTorch."""
    return linear(swiglu_reference(linear(x, gate_weight), linear(x, up_weight)), down_weight)


def _fits(*tensors):
    return tensors[0].dtype != torch.float64 and kernels_run_on(*tensors)


def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if not _fits(gate, up):
        return swiglu_reference(gate, up)
    gate, up = _inputs(gate, up)
    out = new_like(gate)
    _forward_kernel(gate, up, out)
    return out


def _backward(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    if not _fits(gate, up, dout):
        return swiglu_backward_reference(dout, gate, up)[:2]
    dout, gate, up = _inputs(dout, gate, up)
    dgate, dup = new_like(gate), new_like(gate)
    _backward_kernel(dout, gate, up, dgate, dup)
    return dgate, dup


@replayed
def backward_in_place(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Triple:
    """([dgate | dup], dgate, dup), and silu(gate) * up over dout.

    dout: contiguous [rows, columns], the caller's own; gate, up: like it, of any row stride. The first result holds the other two
    side by side, [rows, 2 * columns].
    """
    columns = gate.shape[1]
    both = torch.empty((gate.shape[0], 2 * columns), dtype=gate.dtype, device=gate.device)
    dgate, dup = both[:, :columns], both[:, columns:]
    fits = _fits(gate, up, dout)
    if fits and _recompute_kernel.takes_rows_of(columns):
        gate, up = _inputs(gate, up)
        _recompute_kernel(dout, gate, up, dgate, dup)
    elif fits:
        apart = torch.empty_like(dout), torch.empty_like(dout)
        _recompute_kernel(dout, gate.contiguous(), up.contiguous(), *apart)
        dgate.copy_(apart[0])
        dup.copy_(apart[1])
    else:
        for target, value in zip((dgate, dup, dout), swiglu_backward_reference(dout, gate, up)):
            target.copy_(value)
    return both, dgate, dup


def _backward_recompute(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Triple:
    """(dgate, dup, silu(gate) * up)"""
    rows = (-1, gate.shape[-1])
    out = dout.clone(memory_format=torch.contiguous_format)
    _, dgate, dup = backward_in_place(out.view(rows), gate.reshape(rows), up.reshape(rows))
    return dgate.reshape(gate.shape), dup.reshape(up.shape), out


swiglu_forward = traceable("swiglu_forward", _forward)
swiglu_backward = traceable("swiglu_backward", _backward)
swiglu_backward_recompute = traceable("swiglu_backward_recompute", _backward_recompute)


class _SwiGLU(Function):
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    def backward(ctx, dout):
        return swiglu_backward(dout, *ctx.saved_tensors)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; the backward recomputes silu instead of storing it.

    gate, up: one shape, dtype (bf16, fp16 or fp32; float64 runs in PyTorch) and device. Differentiable in both.
    Raises ValueError when they differ.
    """
    need_alike("up", up, "gate", gate)
    need_floats(gate=gate)
    if needs_formula(gate, up):
        return swiglu_reference(gate, up)
    return apply_function(_SwiGLU, gate, up)


# Up to so many tokens one GEMM over gate's and up's weights side by side beats two in the forward pass (H200, [12288, 4096] each: 1 % to
# 7 %; with more tokens it loses as much). For the input's gradient it always does: nothing is added up. The weights' gradients are two:
# as parts of one result they would share its storage, of which accelerate saves one tensor, and be freed only together.
ONE_GEMM_FORWARD = 512


def are_few(tokens) -> bool:
    """Tells whether one GEMM takes the weights of gate and up. False for a symbol, on which a graph would then depend."""
    return type(tokens) is int and tokens <= ONE_GEMM_FORWARD


def gate_and_up(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, whole: Optional[torch.Tensor]
) -> Tuple[torch.Tensor, torch.Tensor]:
    """x @ gate_weight.T and x @ up_weight.T; x: [tokens, hidden]; whole: what `side_by_side` finds of the weights."""
    if whole is None or not are_few(x.shape[0]):
        return linear(x, gate_weight), linear(x, up_weight)
    both = linear(x, whole)
    return both[:, : gate_weight.shape[0]], both[:, gate_weight.shape[0] :]


def mlp_backward(dy, x, gate, up, gate_weight, up_weight, down_weight, whole, needs) -> Tuple[Optional[torch.Tensor], ...]:
    """(dx, dgate_weight, dup_weight, ddown_weight), None where `needs` (four booleans) says so.

    dy: [tokens, hidden]; x: a function that gives the MLP's input [tokens, hidden], called once and only if a weight needs it; whole: what
    `side_by_side` finds of gate's and up's weights.
    """
    need_x, need_gate, need_up, need_down = needs
    dgate_weight = dup_weight = ddown_weight = None
    if not (need_x or need_gate or need_up):
        return None, None, None, torch.mm(dy.t(), swiglu_forward(gate, up)) if need_down else None
    hidden = torch.mm(dy, down_weight)  # its gradient, and after the next line hidden itself
    if torch.compiler.is_compiling():
        both, (dgate, dup, hidden) = None, swiglu_backward_recompute(hidden, gate, up)
    else:
        both, dgate, dup = backward_in_place(hidden, gate, up)
    if need_down:
        ddown_weight = torch.mm(dy.t(), hidden)
    del hidden
    if need_gate or need_up:
        normed = x()
        dgate_weight = torch.mm(dgate.t(), normed) if need_gate else None
        dup_weight = torch.mm(dup.t(), normed) if need_up else None
        del normed
    dx = None
    if need_x:
        dx = torch.mm(both, whole) if both is not None and whole is not None else torch.mm(dgate, gate_weight).addmm_(dup, up_weight)
    return dx, dgate_weight, dup_weight, ddown_weight


def _down(gate: torch.Tensor, up: torch.Tensor, down_weight: torch.Tensor) -> torch.Tensor:
    return linear(swiglu_forward(gate, up), down_weight)


class _MLP(Function):
    """Saves x, gate and up. silu(gate) * up, as large as each of them, is computed again in the backward pass; the two input
    gradients of gate and up are added by a GEMM."""

    def forward(ctx, rest: Rest, x, gate_weight, up_weight, down_weight):
        gate, up = gate_and_up(x, gate_weight, up_weight, side_by_side((gate_weight, up_weight)))
        ctx.save_for_backward(x, gate, up, gate_weight, up_weight, down_weight)
        if rest is None:
            return _down(gate, up, down_weight)
        return unfinished(rest, functools.partial(_down, gate, up, down_weight), (x.shape[0], down_weight.shape[0]), x)

    @outside_autocast
    def backward(ctx, dy):
        x, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        whole = side_by_side((gate_weight, up_weight))
        return None, *mlp_backward(dy, lambda: x, gate, up, gate_weight, up_weight, down_weight, whole, ctx.needs_input_grad[1:])


def check_mlp(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor) -> None:
    """Raises ValueError where weights do not fit x: [..., hidden], as `mlp` takes them."""
    if x.dim() == 0 or gate_weight.dim() != 2:
        fail("gate_weight", describe(gate_weight), f"[intermediate, hidden] for x, which is {describe(x)}")
    expected = (gate_weight.shape[0], x.shape[-1])
    for name, weight, shape in (
        ("gate_weight", gate_weight, expected),
        ("up_weight", up_weight, expected),
        ("down_weight", down_weight, expected[::-1]),
    ):
        if weight.shape != shape or weight.dtype != x.dtype or weight.device != x.device:
            fail(name, describe(weight), f"{x.dtype} {list(shape)} on {x.device}")


def mlp(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) without biases, storing only x, gate(x) and up(x) for the backward pass.

    x: [..., hidden]; gate_weight, up_weight: [intermediate, hidden]; down_weight: [hidden, intermediate], all of one dtype and
    device. Returns [..., hidden]; under autocast all four are cast to its dtype, as torch.nn.functional.linear casts them. Differentiable
    in all four. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    need_floats(x=x)
    if autocasts(x.device):
        with without_autocast(x.device):
            return mlp(*as_autocast(x.device, x, gate_weight, up_weight, down_weight))
    check_mlp(x, gate_weight, up_weight, down_weight)
    if needs_formula(x, gate_weight, up_weight, down_weight):
        return mlp_reference(x, gate_weight, up_weight, down_weight)
    return apply_in_parts(_MLP, x.reshape(-1, x.shape[-1]), gate_weight, up_weight, down_weight).view(x.shape)


SELF_CHECKS = {
    "swiglu": lambda i: i.call(swiglu, *i.rows(2)),
    "mlp": lambda i: i.call(mlp, *i.mlp()),
}
