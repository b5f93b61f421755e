"""SwiGLU, silu(gate) * up, and the whole MLP around it (arXiv 2002.05202)."""

from typing import Tuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel
from .common import describe, fail, need_floats, traceable, wide

SLAB = 2**30  # elements of one launch: offsets into a flat array are 32-bit

Triple = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _grid(c, first, *_):
    return (-(-first.shape[0] // c["TILE"]),)


_forward_kernel = Kernel("swiglu_forward", "swiglu_any_forward", grid=_grid)
_backward_kernel = Kernel("swiglu_backward", "swiglu_any_backward", grid=_grid)
_recompute_kernel = Kernel("swiglu_backward_recompute", "swiglu_any_backward_recompute", grid=_grid)


def _launch(kernel: Kernel, *tensors: torch.Tensor) -> None:
    """All tensors contiguous, of one shape and dtype."""
    first = tensors[0]
    count = first.numel()
    key = (first.get_device(), first.dtype, count)
    if count == 0 or kernel.again(key, [tensor.data_ptr() for tensor in tensors]):
        return
    flat = [tensor.view(-1) for tensor in tensors]
    if count <= SLAB:
        kernel.first(key, tensors, flat)
        return
    for start in range(0, count, SLAB):
        kernel([tensor[start : start + SLAB] for tensor in flat])


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in PyTorch."""
    return torch.nn.functional.silu(gate) * up


def swiglu_backward_reference(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Triple:
    """(dgate, dup, silu(gate) * up) in PyTorch."""
    g, u, d = (t.to(wide(t.dtype)) for t in (gate, up, dout))
    s = torch.sigmoid(g)
    silu = g * s
    return (d * u * (s + silu * (1 - s))).to(gate.dtype), (d * silu).to(up.dtype), swiglu_reference(gate, up)


def _fits(gate):
    return gate.dtype != torch.float64 and kernels_run_on(gate)


def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if not _fits(gate):
        return swiglu_reference(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _launch(_forward_kernel, gate, up, out)
    return out


def _backward(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    if not _fits(gate):
        return swiglu_backward_reference(dout, gate, up)[:2]
    dout, gate, up = dout.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    _launch(_backward_kernel, dout, gate, up, dgate, dup)
    return dgate, dup


def _backward_recompute(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Triple:
    if not _fits(gate):
        return swiglu_backward_reference(dout, gate, up)
    dout, gate, up = dout.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup, out = torch.empty_like(gate), torch.empty_like(up), torch.empty_like(gate)
    _launch(_recompute_kernel, dout, gate, up, dgate, dup, out)
    return dgate, dup, out


def _empty(tensor):
    return tensor.new_empty(tensor.shape)


swiglu_forward = traceable("swiglu_forward", _forward, lambda gate, up: _empty(gate))
swiglu_backward = traceable("swiglu_backward", _backward, lambda dout, gate, up: (_empty(gate), _empty(up)))
swiglu_backward_recompute = traceable(
    "swiglu_backward_recompute", _backward_recompute, lambda dout, gate, up: (_empty(gate), _empty(up), _empty(gate))
)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return swiglu_backward(dout, *ctx.saved_tensors)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; the backward recomputes silu instead of storing it.

    gate, up: one shape, dtype (bf16, fp16 or fp32; float64 runs in PyTorch) and device. Differentiable in both.
    Raises ValueError when they differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        fail("up", describe(up), f"like gate, which is {describe(gate)}")
    need_floats(gate=gate)
    return _SwiGLU.apply(gate, up)


class _MLP(torch.autograd.Function):
    """Saves x, gate and up. silu(gate) * up, as large as each of them, is computed again in the backward pass; the two input
    gradients of gate and up are added by the second GEMM."""

    @staticmethod
    def forward(ctx, x, gate_weight, up_weight, down_weight):
        gate, up = linear(x, gate_weight), linear(x, up_weight)
        ctx.save_for_backward(x, gate, up, gate_weight, up_weight, down_weight)
        return linear(swiglu_forward(gate, up), down_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        dx = dgate_weight = dup_weight = ddown_weight = None
        dgate, dup, hidden = swiglu_backward_recompute(torch.mm(dy, down_weight), gate, up)
        if ctx.needs_input_grad[3]:
            ddown_weight = torch.mm(dy.t(), hidden)
        if ctx.needs_input_grad[1]:
            dgate_weight = torch.mm(dgate.t(), x)
        if ctx.needs_input_grad[2]:
            dup_weight = torch.mm(dup.t(), x)
        if ctx.needs_input_grad[0]:
            dx = torch.addmm(torch.mm(dgate, gate_weight), dup, up_weight)
        return dx, dgate_weight, dup_weight, ddown_weight


def mlp(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) without biases, storing only x, gate(x) and up(x) for the backward pass.

    x: [..., hidden]; gate_weight, up_weight: [intermediate, hidden]; down_weight: [hidden, intermediate], all of one dtype and
    device. Returns [..., hidden]. Differentiable in all four. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    need_floats(x=x)
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
    return _MLP.apply(x.reshape(-1, x.shape[-1]), gate_weight, up_weight, down_weight).view(x.shape)
