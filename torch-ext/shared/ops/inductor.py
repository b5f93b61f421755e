"""What Inductor is told about an operator before it meets it in a graph."""

import functools
import sys
from typing import Any, Callable

__all__ = ["with_fallback"]


def with_fallback(fake: Callable, operator: Any) -> Callable:
    """Makes a fake function also register the operator with Inductor, as one that a graph calls as it is.

    Inductor does so by itself, but up to torch 2.12 it first prints the arguments for its log, and each with all that it was computed
    from: the text triples with every decoder layer in front, so that a model of 12 layers was never compiled. It traces a graph with
    fake tensors before it lowers it, so an operator is known by then; where Inductor is not imported, nothing is.
    """

    @functools.wraps(fake)
    def call(*args):
        lowering = sys.modules.get("torch._inductor.lowering")
        make_fallback = getattr(lowering, "make_fallback", None)
        if lowering is not None and make_fallback is not None and operator not in lowering.lowerings:
            make_fallback(operator, warn=False)
        return fake(*args)

    return call
