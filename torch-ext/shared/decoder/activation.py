"""act(gate) * up between the MLP's projections, forward and backward, for the activations that a description may name.

Without a gate it is act(gate), and up is None. There is no kernel of ours for that: PyTorch's pointwise functions compute it.
"""

from typing import Optional, Tuple

import torch

from ..ops import gated_activation as gated
from ..ops.quantised import Quantised, quantise_rows, swiglu_backward_quantised, swiglu_quantised
from ..ops.swiglu import backward_in_place, swiglu_forward, swiglu_reference

__all__ = ["gated_backward_in_place", "gated_backward_quantised", "gated_forward", "gated_quantised", "gated_reference"]

Triple = Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]
Up = Optional[torch.Tensor]
ONE = (1.0, 1.0)  # multipliers of the gate and of the result


def activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) in PyTorch, which can differentiate it."""
    if activation == "relu2":  # arXiv 2109.08668
        positive = torch.relu(gate)
        return positive * positive
    return gated.activation_reference(gate, activation)


def activated_backward(dout: torch.Tensor, gate: torch.Tensor, activation: str) -> Tuple[torch.Tensor, torch.Tensor]:
    """(dgate, act(gate))"""
    if activation == "relu2":
        positive = torch.relu(gate)
        return (positive * dout).mul_(2), positive.mul_(positive)
    if activation == "silu":
        dgate = torch.ops.aten.silu_backward(dout, gate)
    else:
        dgate = torch.ops.aten.gelu_backward(dout, gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return dgate, activated(gate, activation)


def gated_reference(gate: torch.Tensor, up: Up, activation: str) -> torch.Tensor:
    """act(gate) * up in PyTorch, which can differentiate it."""
    if up is None:
        return activated(gate, activation)
    return swiglu_reference(gate, up) if activation == "silu" else gated.activation_reference(gate, activation) * up


def gated_forward(gate: torch.Tensor, up: Up, activation: str) -> torch.Tensor:
    """act(gate) * up; gate, up: [tokens, columns] of any row stride."""
    if up is None:
        return activated(gate, activation)
    if activation == "silu":
        return swiglu_forward(gate, up)
    return gated.forward(gate, up, activation, *ONE)


def gated_backward_in_place(dout: torch.Tensor, gate: torch.Tensor, up: Up, activation: str) -> Triple:
    """([dgate | dup], dgate, dup), and act(gate) * up over dout, which is contiguous and the caller's own. Without up, dgate is all."""
    if up is None:
        dgate, hidden = activated_backward(dout, gate, activation)
        dout.copy_(hidden)
        return dgate, dgate, None
    if activation == "silu":
        return backward_in_place(dout, gate, up)
    both = torch.empty((gate.shape[0], 2 * gate.shape[1]), dtype=gate.dtype, device=gate.device)
    dgate, dup = both.chunk(2, 1)
    for target, value in zip((dgate, dup), gated.backward(dout, gate, up, activation, *ONE)):
        target.copy_(value)
    dout.copy_(gated_forward(gate, up, activation))
    return both, dgate, dup


def gated_quantised(gate: torch.Tensor, up: Up, activation: str, keep: bool) -> Tuple[Quantised, Optional[torch.Tensor]]:
    """`gated_forward` in codes, for a product in eight bits, and with `keep` itself, else None."""
    if up is not None and activation == "silu":
        return swiglu_quantised(gate, up, keep)
    hidden = gated_forward(gate, up, activation)
    return quantise_rows(hidden), hidden if keep else None


def gated_backward_quantised(
    dout: torch.Tensor, gate: torch.Tensor, up: Up, activation: str, keep: bool
) -> Tuple[Quantised, Optional[torch.Tensor]]:
    """The [dgate | dup] of `gated_backward_in_place` in codes, and with `keep` itself, else None; act(gate) * up goes over dout."""
    if up is not None and activation == "silu":
        return swiglu_backward_quantised(dout, gate, up, keep)
    both = gated_backward_in_place(dout, gate, up, activation)[0]
    return quantise_rows(both), both if keep else None
