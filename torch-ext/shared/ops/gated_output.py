"""Attention's output times the sigmoid of a gate (Qwen3-Next, Qwen3.5): y = out * sigmoid(gate)."""

import torch

from ..runtime.launch import Kernel, ships
from .arguments import need_alike, need_floats, need_rows
from .arrays import HALF, Pair, accumulation_dtype, aligned, kernels_compute
from .autograd import Function, apply_function, needs_formula
from .operators import traceable
from .rows import blocks_of_rows, slabs

__all__ = ["gated_output"]


_forward_kernel = Kernel("gated_output_forward", grid=blocks_of_rows)
_backward_kernel = Kernel("gated_output_backward", grid=blocks_of_rows)


def gated_output_reference(out, gate) -> torch.Tensor:
    """Returns y in PyTorch, which can differentiate it."""
    acc = accumulation_dtype(out.dtype)
    return (out.to(acc) * torch.sigmoid(gate.to(acc))).to(out.dtype)


def gated_output_backward_reference(dy, out, gate) -> Pair:
    """Returns (dout, dgate) in PyTorch."""
    acc = accumulation_dtype(out.dtype)
    d, s = dy.to(acc), torch.sigmoid(gate.to(acc))
    return (d * s).to(out.dtype), (d * out.to(acc) * s * (1 - s)).to(gate.dtype)


def _fits(out, *others) -> bool:
    """Whether kernels take these rows."""
    if out.dtype not in (*HALF, torch.float32) or any(t.dtype != out.dtype for t in others):
        return False
    return kernels_compute(out, *others) and ships("gated_output") and out.shape[-1] in _forward_kernel.lengths("out", 1)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as aligned [rows, n] of any row stride: a slice of every head needs no copy."""
    return aligned(x.reshape(-1, x.shape[-1]))


def _forward(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    if not _fits(out, gate):
        return gated_output_reference(out, gate).contiguous()
    attended, gates = _rows(out), _rows(gate)
    y = attended.new_empty(attended.shape)
    for part in slabs(attended, gates):
        _forward_kernel(attended[part], gates[part], y[part])
    return y.view(out.shape)


def _backward(dy: torch.Tensor, out: torch.Tensor, gate: torch.Tensor) -> Pair:
    """Returns (dout, dgate), contiguous."""
    dout, dgate = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (out, gate))
    gated_output_backward_into(dout, dgate, dy, out, gate)
    return dout, dgate


def gated_output_backward_into(dout, dgate, dy, out, gate) -> None:
    """Computes `gated_output_backward`, with the gradients written to tensors of these shapes: dgate may be the gate's part of a larger
    projection's gradient."""
    if not _fits(out, gate, dy, dout, dgate) or not _are_rows(dout, dgate):
        found = gated_output_backward_reference(dy, out, gate)
        dout.copy_(found[0])
        dgate.copy_(found[1])
        return
    n = out.shape[-1]
    results = [t.view(-1, n) for t in (dout, dgate)]
    given = [_rows(t) for t in (dy, out, gate)]
    for part in slabs(*results, *given):
        _backward_kernel(*[t[part] for t in (*given, *results)])


def _are_rows(*tensors: torch.Tensor) -> bool:
    """Whether each is seen as aligned rows without a copy."""
    for tensor in tensors:
        rows = tensor.reshape(-1, tensor.shape[-1])
        if rows.data_ptr() != tensor.data_ptr() or aligned(rows) is not rows:
            return False
    return True


gated_output_forward = traceable("gated_output_forward", _forward)
gated_output_backward = traceable("gated_output_backward", _backward)


class GatedOutputFunction(Function):
    """(out, gate) -> y."""

    def forward(ctx, out, gate):
        ctx.save_for_backward(out, gate)
        return gated_output_forward(out, gate)

    def backward(ctx, dy):
        return gated_output_backward(dy, *ctx.saved_tensors)


def gated_output(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiplies attention's output by the sigmoid of a gate, in fp32, and rounds once.

    Args:
        out: [..., n], bf16, fp16 or fp32. The kernels take n = 128 and 256; the rest runs in PyTorch.
        gate: like out, any strides: a slice of every head of a projection is read where it lies.

    Returns:
        [..., n] in out's dtype; differentiable in both.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit.
    """
    need_floats(out=out, gate=gate)
    need_rows("out", out)
    need_alike("gate", gate, "out", out)
    if needs_formula(out, gate):
        return gated_output_reference(out, gate)
    return apply_function(GatedOutputFunction, out, gate)


SELF_CHECKS = {"gated_output": lambda i: i.call(gated_output, *(i.leaf(i.tokens, 4, i.width) for _ in range(2)))}
