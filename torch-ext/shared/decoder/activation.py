"""act(gate) * up between the MLP's projections, forward and backward, for the activations that a description may name."""

from typing import Tuple

import torch

from ..ops import gated_activation as gated
from ..ops.quantised import Quantised, quantise_rows, swiglu_backward_quantised, swiglu_quantised
from ..ops.swiglu import backward_in_place, swiglu_forward, swiglu_reference

__all__ = ["gated_backward_in_place", "gated_backward_quantised", "gated_forward", "gated_quantised", "gated_reference"]

Triple = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ONE = (1.0, 1.0)  # multipliers of the gate and of the result


def gated_reference(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up in PyTorch, which can differentiate it."""
    return swiglu_reference(gate, up) if activation == "silu" else gated.activation_reference(gate, activation) * up


def gated_forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up; gate, up: [tokens, columns] of any row stride."""
    if activation == "silu":
        return swiglu_forward(gate, up)
    return gated.forward(gate, up, activation, *ONE)


def gated_backward_in_place(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> Triple:
    """([dgate | dup], dgate, dup), and act(gate) * up over dout, which is contiguous and the caller's own."""
    if activation == "silu":
        return backward_in_place(dout, gate, up)
    both = torch.empty((gate.shape[0], 2 * gate.shape[1]), dtype=gate.dtype, device=gate.device)
    dgate, dup = both.chunk(2, 1)
    for target, value in zip((dgate, dup), gated.backward(dout, gate, up, activation, *ONE)):
        target.copy_(value)
    dout.copy_(gated_forward(gate, up, activation))
    return both, dgate, dup


def gated_quantised(gate: torch.Tensor, up: torch.Tensor, activation: str) -> Quantised:
    """`gated_forward` in codes, for a product in eight bits."""
    return swiglu_quantised(gate, up) if activation == "silu" else quantise_rows(gated_forward(gate, up, activation))


def gated_backward_quantised(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> Quantised:
    """The [dgate | dup] of `gated_backward_in_place` in codes, and act(gate) * up over dout, as of it."""
    if activation == "silu":
        return swiglu_backward_quantised(dout, gate, up)
    return quantise_rows(gated_backward_in_place(dout, gate, up, activation)[0])
