"""What a decoder layer computes, as data. Two branches stand on one residual stream x [tokens, hidden]:

    x += m * after(o(attention(turn(heads(q)), turn(heads(k)), v)))    of  q, k, v = projections of norm(x)
    x += m * behind(down(act(gate) * up))                              of  gate, up = projections of before(x)

Each of the norms may be absent: its weight is None then. A description is hashable, compares by value, and holds no tensor.
"""

import functools
import json
from typing import NamedTuple, Optional, Tuple

from ..ops.common import constant, constant_when_traced


class Norm(NamedTuple):
    """How an RMSNorm computes. offset: added to its weight. rounds: "first", normalise, round, multiply; or "last", multiply and
    round."""

    eps: float = 1e-6
    offset: float = 0.0
    rounds: str = "first"


class Inputs(NamedTuple):
    """Describes the part of a decoder layer that precedes attention.

    norm: of the residual stream. heads: the norm of q and k, of each head or, with `whole`, of the whole projection. rotary: "halves", an
    element is turned with the one half a head further; "pairs", with its neighbour; or "none". turned: elements of a head that are
    turned, 0 for all. rows: of q, k and v, where one packed projection makes them.
    """

    head_dim: int
    norm: Norm = Norm()
    heads: Norm = Norm()
    whole: bool = False
    rotary: str = "halves"
    turned: int = 0
    rows: Optional[Tuple[int, int, int]] = None


class Outputs(NamedTuple):
    """Describes the part of a decoder layer that follows attention.

    after: the norm of attention's branch. before: the norm of what the MLP or the experts read. behind: the norm of their branch.
    activation: "silu" or "gelu_tanh". multiplier: of both branches.
    """

    after: Norm = Norm()
    before: Norm = Norm()
    behind: Norm = Norm()
    activation: str = "silu"
    multiplier: float = 1.0


_text = constant_when_traced(lambda *values: json.dumps(values))


def encoded(spec: tuple) -> str:
    """A description as text, for an operator of a graph, which takes numbers and text only and may be stored."""
    # A tracer knows no named tuple as a constant.
    return _text(*[tuple([constant(part) for part in value]) if isinstance(value, tuple) else constant(value) for value in spec])


def _decoded(value):
    return Norm(*value) if isinstance(value, list) and len(value) == 3 and isinstance(value[2], str) else value


@functools.lru_cache(maxsize=None)
def inputs_of(text: str) -> Inputs:
    """The description that `encoded` wrote."""
    found = Inputs(*map(_decoded, json.loads(text)))
    if found.rows is None:
        return found
    q, k, v = found.rows  # a list in the text
    return found._replace(rows=(q, k, v))


@functools.lru_cache(maxsize=None)
def outputs_of(text: str) -> Outputs:
    """The description that `encoded` wrote."""
    return Outputs(*map(_decoded, json.loads(text)))
