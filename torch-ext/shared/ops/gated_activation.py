"""Gated linear units beside plain SwiGLU (arXiv 2002.05202): GeGLU, multipliers, and gate and up in one tensor."""

import math
from typing import Tuple

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel, ships
from .arguments import describe, fail, need_alike, need_floats
from .arrays import SLAB, Pair, accumulation_dtype, new_like
from .autograd import Function, apply_function, needs_formula
from .operators import traceable
from .rows import blocks_of_pieces
from .swiglu import swiglu as plain_swiglu

__all__ = [
    "APPROXIMATE", "activation_reference", "backward", "backward_in_place", "forward", "forward_into", "forward_reference", "geglu",
    "geglu_packed", "swiglu", "swiglu_packed",
]  # fmt: skip

TILE = 1024  # elements of one block; rows of a multiple of it need no checks
GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
# act(a) = a * sigmoid(a * (linear + cubic * a^2)), or with the kernels' own polynomial for the exact GELU
POLYNOMIALS = {"silu": (1.0, 0.0), "gelu_tanh": (GELU_SLOPE, 0.044715 * GELU_SLOPE), "gelu": (0.0, 0.0)}
APPROXIMATE = {"tanh": "gelu_tanh", "none": "gelu"}


def _in_tiles(*tensors: torch.Tensor):
    """The tensors, all of one shape, as [rows, columns]: flat where all are contiguous, whatever their columns are."""
    if all(tensor.is_contiguous() for tensor in tensors):
        whole = tensors[0].numel() % TILE == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        return [tensor.view(-1, TILE) if whole else tensor.view(1, -1) for tensor in tensors]
    return tensors


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, columns], a view where the strides allow it."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def _kernels(name: str, reads: Tuple[str, ...]):
    """The kernel for a sigmoid with a polynomial from the caller, and for the exact GELU."""
    options: dict = {"grid": blocks_of_pieces, "views": _in_tiles, "reads": reads}
    return tuple(Kernel(f"gated_activation_{name}", where={"ERF": erf}, **options) for erf in (0, 1))


_forward_kernels = _kernels("forward", ("gate", "up"))
_backward_kernels = _kernels("backward", ("dout", "gate", "up"))
_in_place_kernels = _kernels("backward_in_place", ())


def _launch(kernels, tensors, activation: str, gate_multiplier: float, down_multiplier: float) -> None:
    kernel, numbers = kernels[activation == "gelu"], (*POLYNOMIALS[activation], gate_multiplier, down_multiplier)
    if tensors[0].numel() == 0:
        return
    if not all(tensor.is_contiguous() for tensor in tensors):
        tensors = [_matrix(tensor) for tensor in tensors]  # of a result it is a view
        step = max(1, SLAB // max(tensor.stride(0) for tensor in tensors))
    else:
        step = SLAB
        if tensors[0].numel() > step:
            tensors = [tensor.view(-1) for tensor in tensors]
    if tensors[0].dim() == 0 or tensors[0].numel() <= SLAB and tensors[0].shape[0] <= step:
        kernel(*tensors, *numbers)
        return
    for start in range(0, tensors[0].shape[0], step):
        kernel(*[tensor[start : start + step] for tensor in tensors], *numbers)


# ---------------------------------------------------------------- in PyTorch
def activation_reference(a: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(a)
    return torch.nn.functional.gelu(a, approximate="tanh" if activation == "gelu_tanh" else "none")


def forward_reference(gate, up, activation, gate_multiplier, down_multiplier):
    """down_multiplier * act(gate_multiplier * gate) * up in PyTorch; the activation is rounded as a model rounds it."""
    precise = accumulation_dtype(gate.dtype)
    act = activation_reference(gate.to(precise) * gate_multiplier, activation).to(gate.dtype)
    return (act.to(precise) * up.to(precise) * down_multiplier).to(gate.dtype)


def backward_reference(dout, gate, up, activation, gate_multiplier, down_multiplier) -> Pair:
    """(dgate, dup) in PyTorch."""
    d, a, u = (t.to(accumulation_dtype(gate.dtype)) for t in (dout, gate, up))
    d, a = d * down_multiplier, a * gate_multiplier
    if activation == "gelu":
        s = 0.5 * torch.erfc(-a / math.sqrt(2))
        slope = s + a * torch.exp(-a.square() / 2) / math.sqrt(2 * math.pi)
    else:
        linear, cubic = POLYNOMIALS[activation]
        square = a.square().clamp_max(4096)  # beyond it the sigmoid is 0 or 1, and infinity times 0 would be NaN
        s = torch.sigmoid(a * (linear + cubic * square))
        slope = s + a * s * (1 - s) * (linear + 3 * cubic * square)
    return (d * u * slope * gate_multiplier).to(gate.dtype), (d * a * s).to(up.dtype)


# ---------------------------------------------------------------- with the kernels
def _fits(gate, *others):
    """Tells whether kernels run: only packages for models that need them ship these."""
    return gate.dtype != torch.float64 and kernels_run_on(gate, *others) and ships("gated_activation")


def _forward(gate: torch.Tensor, up: torch.Tensor, activation: str, gate_multiplier: float, down_multiplier: float) -> torch.Tensor:
    if not _fits(gate, up):
        return forward_reference(gate, up, activation, gate_multiplier, down_multiplier)
    out = new_like(gate)
    _launch(_forward_kernels, (gate, up, out), activation, gate_multiplier, down_multiplier)
    return out


def _backward(
    dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, gate_multiplier: float, down_multiplier: float
) -> Pair:
    """(dgate, dup)"""
    if not _fits(gate, up, dout):
        return backward_reference(dout, gate, up, activation, gate_multiplier, down_multiplier)
    dgate, dup = new_like(gate), new_like(up)
    _launch(_backward_kernels, (dout, gate, up, dgate, dup), activation, gate_multiplier, down_multiplier)
    return dgate, dup


def backward_in_place(dout, gate, up, activation: str) -> None:
    """Writes dgate over gate, dup over up, and act(gate) * up over dout; all three contiguous and the caller's own."""
    if _fits(gate, up):
        _launch(_in_place_kernels, (dout, gate, up), activation, 1.0, 1.0)
        return
    results = (*backward_reference(dout, gate, up, activation, 1.0, 1.0), forward_reference(gate, up, activation, 1.0, 1.0))
    for target, value in zip((gate, up, dout), results):
        target.copy_(value)


def forward_into(gate, up, out, activation: str) -> None:
    """Writes act(gate) * up to out."""
    if _fits(gate, up):
        _launch(_forward_kernels, (gate, up, out), activation, 1.0, 1.0)
    else:
        out.copy_(forward_reference(gate, up, activation, 1.0, 1.0))


def _packed_forward(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return _forward(gate, up, activation, 1.0, 1.0)


def _packed_backward(dout: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    dgate_up = new_like(gate_up)
    dgate, dup = dgate_up.chunk(2, -1)
    if _fits(gate, up, dout):
        _launch(_backward_kernels, (dout, gate, up, dgate, dup), activation, 1.0, 1.0)
    else:
        for target, value in zip((dgate, dup), backward_reference(dout, gate, up, activation, 1.0, 1.0)):
            target.copy_(value)
    return dgate_up


forward = traceable("gated_activation_forward", _forward)
backward = traceable("gated_activation_backward", _backward)
packed_forward = traceable("gated_activation_packed_forward", _packed_forward)
packed_backward = traceable("gated_activation_packed_backward", _packed_backward)


class _GatedActivation(Function):
    def forward(ctx, gate, up, activation, gate_multiplier, down_multiplier):
        ctx.save_for_backward(gate, up)
        ctx.options = activation, gate_multiplier, down_multiplier
        return forward(gate, up, *ctx.options)

    def backward(ctx, dout):
        return (*backward(dout, *ctx.saved_tensors, *ctx.options), None, None, None)


class _PackedGatedActivation(Function):
    def forward(ctx, gate_up, activation):
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return packed_forward(gate_up, activation)

    def backward(ctx, dout):
        return packed_backward(dout, *ctx.saved_tensors, ctx.activation), None


def _check(gate, up):
    need_alike("up", up, "gate", gate)
    need_floats(gate=gate)


def _gelu(approximate: str) -> str:
    if approximate not in APPROXIMATE:
        fail("approximate", repr(approximate), "'tanh' or 'none'")
    return APPROXIMATE[approximate]


def _halves(gate_up):
    need_floats(gate_up=gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        fail("gate_up", describe(gate_up), "[..., 2 * intermediate]")


def _apply(gate, up, *options):
    if needs_formula(gate, up):
        return forward_reference(gate, up, *options)
    return apply_function(_GatedActivation, gate, up, *options)


def _apply_packed(gate_up, activation):
    if needs_formula(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return forward_reference(gate, up, activation, 1.0, 1.0)
    return apply_function(_PackedGatedActivation, gate_up, activation)


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """Computes gelu(gate) * up; the backward recomputes gelu instead of storing it.

    gate, up: one shape, dtype (bf16, fp16 or fp32; float64 runs in PyTorch) and device, any strides. approximate: "tanh", or "none" for
    the GELU with erf. Differentiable in both. Raises ValueError when they differ, or for another approximation.
    """
    _check(gate, up)
    return _apply(gate, up, _gelu(approximate), 1.0, 1.0)


def swiglu(gate: torch.Tensor, up: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> torch.Tensor:
    """Computes down_multiplier * silu(gate_multiplier * gate) * up; the backward recomputes silu instead of storing it.

    gate, up: one shape, dtype (bf16, fp16 or fp32; float64 runs in PyTorch) and device, any strides. The multipliers are numbers
    (Falcon-H1 has them). Differentiable in both tensors. Raises ValueError when they differ.
    """
    if gate_multiplier == 1 and down_multiplier == 1:
        return plain_swiglu(gate, up)
    _check(gate, up)
    return _apply(gate, up, "silu", float(gate_multiplier), float(down_multiplier))


def swiglu_packed(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up of [..., 2 * intermediate], whose first half is gate, without copies of the halves.

    Returns [..., intermediate]. Dtypes as in `swiglu`. Raises ValueError where the last dimension is odd.
    """
    _halves(gate_up)
    return _apply_packed(gate_up, "silu")


def geglu_packed(gate_up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """Computes gelu(gate) * up of [..., 2 * intermediate], as `swiglu_packed`."""
    _halves(gate_up)
    return _apply_packed(gate_up, _gelu(approximate))


SELF_CHECKS = {
    "swiglu (Liger's)": lambda i: i.call(swiglu, *i.rows(2)),
    "geglu": lambda i: i.call(geglu, *i.rows(2)),
}
