"""The expert that every token goes to, with a gate of its own or with none, beside those that a router chooses:

    s = sigmoid(n @ gate.T), or 1      y += s * down(silu(gate_proj(n)) * up_proj(n))

As with the others, the score multiplies the gated row in front of the last GEMM. That GEMM then adds to what the others made, and the
gradient of the score needs no result of it.
"""

from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn.functional import linear

from ..ops.arguments import describe, fail
from ..ops.arrays import accumulation_dtype
from ..ops.autograd import always
from ..ops.expert_gate import Gate, gate_backward, gate_forward
from ..ops.swiglu import are_few
from .activation import gated_backward_in_place, gated_forward, gated_reference
from .checks import check_like
from .projection import PartNeeds, Parts, Projection, check_projection, projection_reference
from .projections import Projections
from .steps import needs_any

__all__ = [
    "SharedExpert", "SharedGradients", "SharedNeeds", "check_shared", "gate_and_up", "shared_backward", "shared_reference", "shared_start",
]  # fmt: skip

SILU = Gate(interleaved=False, alpha=0.0, limit=float("inf"))


class SharedExpert(NamedTuple):
    """gate: [1, hidden], of the score, or None for no score. projections: to gate, up and down, or to both and down, with a score the last
    one without biases."""

    gate: Optional[torch.Tensor]
    projections: Sequence[Projection]


class SharedNeeds(NamedTuple):
    """Says what needs a gradient. y: the input; gate: the weight of the score's gate; inner, down: the projections' tensors, those of gate
    and up and those of down."""

    y: bool
    gate: bool
    inner: Sequence[PartNeeds]
    down: Sequence[PartNeeds]

    def reads_input(self) -> bool:
        """Whether a gradient is computed with the input."""
        return self.gate or any(each.weight or each.a for each in self.inner)


class SharedGradients(NamedTuple):
    """y: [tokens, hidden]; None for what is not needed."""

    y: Optional[torch.Tensor]
    gate: Optional[torch.Tensor]
    inner: List[Parts]
    down: List[Parts]


def shared_reference(y: torch.Tensor, shared: SharedExpert) -> torch.Tensor:
    """Returns the expert's output for y [tokens, hidden], multiplied by its score; in PyTorch, which can differentiate it."""
    *inner, down = shared.projections
    gate, up = torch.cat([projection_reference(y, each) for each in inner], -1).chunk(2, -1)
    result = projection_reference(gated_reference(gate, up, "silu"), down)
    return result if shared.gate is None else torch.sigmoid(linear(y, shared.gate)) * result


def gate_and_up(y: torch.Tensor, inner: Projections, again: bool = False) -> torch.Tensor:
    """The products of gate and up side by side [tokens, 2 * width]. again: in a backward pass, bit for bit."""
    both = y.new_empty((y.shape[0], sum(inner.group.rows)))
    (inner.again if again else inner.forward)(y, are_few(y.shape[0]), out=both)
    return both


def score_of(y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Each token's score [tokens], in the dtype of the arithmetic."""
    return torch.sigmoid(linear(y, gate).view(-1).to(accumulation_dtype(y.dtype)))


def _scored(both: torch.Tensor, score: Optional[torch.Tensor]) -> torch.Tensor:
    """The gated rows times their scores, where they have some. both: the products of gate and up."""
    gate, up = both.chunk(2, 1)
    return gated_forward(gate, up, "silu") if score is None else gate_forward(both, None, score, None, SILU)


def shared_start(y: torch.Tensor, gate: Optional[torch.Tensor], inner: Projections, down: Projections):
    """(score [tokens] or None, gate and up side by side, the gated rows times their scores, which `down` begins with)"""
    score, both = None if gate is None else score_of(y, gate), gate_and_up(y, inner)
    scored = _scored(both, score)
    down.begin(scored)
    return score, both, scored


def _gate_backward(dscored: torch.Tensor, both: torch.Tensor, score: Optional[torch.Tensor], weights: bool) -> Tuple:
    """(gradient of both, `_scored` again, gradient of the scores or None), written over dscored and both, or one of them. weights: False
    where the second is not needed."""
    if score is None:
        gate, up = both.chunk(2, 1)
        return gated_backward_in_place(dscored, gate, up, "silu")[0], dscored, None
    return gate_backward(dscored, both, None, score, None, SILU, weights)[:3]


def shared_backward(dout: torch.Tensor, y: Callable[[], torch.Tensor], gate: Optional[torch.Tensor], score: Optional[torch.Tensor],
                    both: torch.Tensor, inner: Projections, down: Projections, need: SharedNeeds) -> SharedGradients:
    """Writes over both, the products of gate and up. y: a function that gives the input; called only where a weight needs it."""
    need_inner, ddown = needs_any(need.inner), [Parts()]
    dlow = down.low_gradient((dout,))
    if not (need.y or need.gate or need_inner):
        if needs_any(need.down):
            ddown = down.gradients((dout,), dlow, always(_scored(both, score)), need.down)
        return SharedGradients(None, None, [Parts()] * len(need.inner), ddown)
    dscored = down.input_gradient((dout,), dlow)
    weights = any(each.weight or each.a for each in need.down)
    both, scored, dscore = _gate_backward(dscored, both, score, weights)
    ddown = down.gradients((dout,), dlow, always(scored), need.down)
    del scored, dscored
    grads = both.split(inner.group.rows, 1)
    dlow = inner.low_gradient(grads)
    dinner = inner.gradients(grads, dlow, y, need.inner) if need_inner else [Parts()] * len(need.inner)
    dy = inner.input_gradient(grads, dlow, both) if need.y else None
    if gate is None or score is None:
        return SharedGradients(dy, None, dinner, ddown)
    dlogit = (dscore * score * (1 - score)).to(gate.dtype)[:, None]
    dgate = torch.mm(dlogit.t(), y()) if need.gate else None
    return SharedGradients(dy if dy is None else dy.addmm_(dlogit, gate), dgate, dinner, ddown)


def check_shared(x: torch.Tensor, shared: SharedExpert) -> None:
    """Raises ValueError when shapes, dtypes or devices do not fit, or the last projection has a bias, which a score would not reach."""
    hidden = x.shape[-1]
    check_like(x, "shared.gate", shared.gate, (1, hidden))
    if len(shared.projections) not in (2, 3):
        fail("shared.projections", f"{len(shared.projections)} of them", "gate, up and down, or both packed and down")
    *inner, down = shared.projections
    rows = sum(inner[0].weight.shape[:1])
    width = rows if len(inner) == 2 else rows // 2
    for i, projection in enumerate(inner):
        check_projection(f"shared.projections[{i}]", projection, 2 * width // len(inner), hidden, x.dtype, x.device)
    check_projection(f"shared.projections[{len(inner)}]", down, hidden, width, x.dtype, x.device)
    for name, bias in (("bias", down.bias), ("adapter_bias", down.adapter_bias)):
        if bias is not None and shared.gate is not None:
            fail(f"shared.projections[{len(inner)}].{name}", describe(bias), "None")
