"""What a decoder layer computes, as data. Two branches stand on one residual stream x [tokens, hidden]:

    x += m * after(o(attention(turn(heads(q)), turn(heads(k)), v)))    of  q, k, v = projections of norm(x)
    x += m * behind(down(act(gate) * up))                              of  gate, up = projections of before(x)

or behind(down(act(gate))), an MLP without a gate, whose only inner projection is called gate here and, in most models, up_proj.

Each of the norms may be absent: its weight is None then (`is_there`). A description is hashable, compares by value, and holds no tensor.
"""

from typing import Any, NamedTuple, Optional, Sequence, Tuple, get_type_hints

from ..ops.operators import constant

__all__ = ["Inputs", "Norm", "Outputs", "constants_of", "is_there", "spec_of"]


class Norm(NamedTuple):
    """How a norm computes. offset: added to its weight. rounds: of an RMSNorm, "first", normalise, round, multiply; or "last", multiply and
    round. centred: whether it is a LayerNorm, which takes the mean off first, may have a bias, and rounds last. Only the norms in front of
    the projections may be LayerNorms, `Inputs.norm` and `Outputs.before`. weighted: whether it has a weight; a LayerNorm may have none."""

    eps: float = 1e-6
    offset: float = 0.0
    rounds: str = "first"
    centred: bool = False
    weighted: bool = True


class Inputs(NamedTuple):
    """Describes the part of a decoder layer that precedes attention.

    norm: of the residual stream. heads: the norm of q and k, of each head or, with `whole`, of the whole projection. rotary: "halves", an
    element is turned with the one half a head further; "pairs", with its neighbour; or "none". turned: elements of a head that are
    turned, 0 for all. rows: of q, k and v, where one packed projection makes them. turned_first: whether heads are turned before their
    norms.
    """

    head_dim: int
    norm: Norm = Norm()
    heads: Norm = Norm()
    whole: bool = False
    rotary: str = "halves"
    turned: int = 0
    rows: Optional[Tuple[int, int, int]] = None
    turned_first: bool = False


class Outputs(NamedTuple):
    """Describes the part of a decoder layer that follows attention.

    after: the norm of attention's branch. before: the norm of what the MLP or the experts read. behind: the norm of their branch.
    activation: "silu" or "gelu_tanh", or, where the MLP is not gated, "gelu" or "relu2" as well. multiplier: of both branches. gated:
    whether the activation is multiplied by up. parallel: whether the MLP reads before(x) of the x in front of attention's branch.
    """

    after: Norm = Norm()
    before: Norm = Norm()
    behind: Norm = Norm()
    activation: str = "silu"
    multiplier: float = 1.0
    gated: bool = True
    parallel: bool = False


def is_there(norm: Norm, weight: Any) -> bool:
    """Tells whether a norm is not absent. weight: its weight, or None."""
    return weight is not None or not norm.weighted


def constants_of(spec):
    """A description as plain tuples of constants, as a tracer knows them."""
    return tuple([constants_of(part) for part in spec]) if isinstance(spec, tuple) else constant(spec)


def spec_of(kind: type, told: Sequence) -> Any:
    """The description of a class that was told as lists and numbers."""
    parts = [spec_of(hint, part) if hasattr(hint, "_fields") else part for hint, part in zip(get_type_hints(kind).values(), told)]
    return kind(*[tuple(part) if isinstance(part, list) else part for part in parts])
