"""The experts of a decoder layer's node: how their weights are laid out, and what they compute in tiles of tokens.

What has a row for each token and expert exists for one tile at a time then, in both passes, so that no array grows with a long row. Each
tile is routed by itself, and experts' weights in codes are made for it. The backward pass makes the first products again, and adds the
gradients of weights and adapters up in fp32.
"""

from typing import Any, List, NamedTuple, Optional, Sequence

import torch

from ..ops.expert_adapters import ExpertFactors, Factors
from ..ops.expert_gate import Gate
from ..ops.experts import ExpertGradients, experts_backward, experts_finish, experts_start
from .mlp_steps import Sums, tiles_of
from .projection import Parts

__all__ = ["DEFAULT", "ExpertOptions", "ExpertTensors", "tiled_experts", "tiled_experts_backward"]


class ExpertOptions(NamedTuple):
    """How the experts' weights are laid out and what lies between them; as the options of `experts`."""

    transposed: bool = False
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = float("inf")

    @property
    def between(self) -> Gate:
        return Gate(self.interleaved, self.alpha, self.limit)


DEFAULT = ExpertOptions()


class ExpertTensors(NamedTuple):
    """gate_up: [experts, 2 * width, hidden], down: [experts, hidden, width], each the other way with `ExpertOptions.transposed`, tensors or
    `CodedExperts`; their biases [experts, rows] or None."""

    gate_up: Any
    down: Any
    gate_up_bias: Optional[torch.Tensor] = None
    down_bias: Optional[torch.Tensor] = None


def tiled_experts(
    y: torch.Tensor, expert: torch.Tensor, scores: torch.Tensor, weights: ExpertTensors, gate: ExpertOptions,
    factors: ExpertFactors, tile: int,
) -> torch.Tensor:  # fmt: skip
    """What `experts_start` and `experts_finish` make of y [tokens, hidden], `tile` tokens at a time. factors: of the adapters."""
    out, options = torch.empty_like(y), (gate.transposed, gate.between)
    for rows in tiles_of(y.shape[0], tile):
        gate_up, routing, groups = experts_start(y[rows], expert[rows], weights[0], options[0], factors.gate_up)
        out[rows] = experts_finish(gate_up, expert[rows], scores[rows], *weights[1:], routing, groups, *options, factors.down)
    return out


def tiled_experts_backward(
    dout: torch.Tensor, inputs: Sequence, gate: ExpertOptions, needs: List[bool], factors: ExpertFactors, need_factors: ExpertFactors,
    tile: int,
) -> ExpertGradients:  # fmt: skip
    """`experts_backward` of what `tiled_experts` computed, with its arguments but for the output of the first GEMM and the routing."""
    y, expert, scores, *weights = inputs
    dy, dscores, sums = torch.empty_like(y), torch.empty_like(scores), Sums()
    for rows in tiles_of(y.shape[0], tile):
        mine = y[rows], expert[rows], scores[rows]
        gate_up, routing, _ = experts_start(*mine[:2], weights[0], gate[0], factors.gate_up)
        found = experts_backward(dout[rows], (*mine, *weights), gate_up, routing, tuple(gate), needs, factors, need_factors)
        del gate_up
        for needed, whole, part in zip(needs, (dy, dscores), found):
            if needed:
                whole[rows] = part
        of_gate_up, of_down = (each or Factors(None, None) for each in found.factors)
        sums.add([Parts(found.gate_up, found.gate_up_bias, *of_gate_up), Parts(found.down, found.down_bias, *of_down)])
    total_gate_up: Any
    total_down: Any
    total_gate_up, total_down = sums.found()
    of_factors = [None if each.a is None and each.b is None else Factors(each.a, each.b) for each in (total_gate_up, total_down)]
    dweights = total_gate_up.weight, total_down.weight, total_gate_up.bias, total_down.bias
    return ExpertGradients(dy, dscores, *dweights, ExpertFactors(*of_factors))
