"""The operators of a graph of torch.compile or torch.export that a decoder layer makes: few arguments, and replayed where they can be.

Each argument of an operator costs the host some time in each call, and twenty of a layer's thirty are None. So an operator takes the
tensors that there are as one list, the sizes as another, and all else as text, its form (`Form`), which is read once.
"""

import functools
import inspect
import json
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ..ops.common import constant_when_traced, operator_of, side_by_side
from ..runtime.replay import IDENTITIES, replayed_with_products
from .projection import SIZE

TENSOR, TENSORS, SIZES, OTHER = "tlso"  # kinds of arguments
KINDS = {torch.Tensor: TENSOR, Optional[torch.Tensor]: TENSOR, List[torch.Tensor]: TENSORS, List[Optional[torch.Tensor]]: TENSORS,
         List[int]: SIZES}  # by annotation  # fmt: skip


class Packed(NamedTuple):
    """What an operator takes. tensors: those that there are. form: `Form`'s text. sizes: those of the argument that is a list of integers,
    which may vary in a graph."""

    tensors: List[torch.Tensor]
    form: str
    sizes: List[int]


class Parameter(NamedTuple):
    name: str
    kind: str


class Form:
    """All arguments of a call but its tensors and sizes. There is one object for each text and operator.

    weights: the places in `Packed.tensors` of the weights of q, k and v, or of gate and up.
    """

    __slots__ = ("_told", "weights")

    def __init__(self, parameters: Sequence[Parameter], text: str):
        self._told: List[Tuple[str, Any]] = []
        place, starts = 0, {}
        for (name, kind), told in zip(parameters, json.loads(text)):
            starts[name] = place
            if kind in (TENSOR, TENSORS):
                places = []
                for there in told if kind == TENSORS else (told,):
                    places.append(place if there else None)
                    place += there
                told = places
            elif kind == OTHER and isinstance(told, str) and told.startswith("torch."):
                told = getattr(torch, told[len("torch.") :])
            self._told.append((kind, told))
        by_name = {name: told for (name, _), (_, told) in zip(parameters, self._told)}
        weights = by_name["parts"][::SIZE]
        if "attended" in by_name:
            weights = weights[by_name["attended"] != [None] : -1]
        self.weights = tuple(weights) if len(weights) > 1 else ()

    def arguments(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list:
        """Returns the function's arguments."""
        found: list = []
        for kind, told in self._told:
            if kind in (TENSOR, TENSORS):
                listed = [None if place is None else tensors[place] for place in told]
                found.append(listed if kind == TENSORS else listed[0])
            else:
                found.append(list(sizes) if kind == SIZES else list(told) if isinstance(told, list) else told)
        return found


IDENTITIES.add(Form)


@constant_when_traced
def _text(*values) -> str:
    return json.dumps([str(value) if isinstance(value, torch.dtype) else value for value in values])


class PackedOperator(NamedTuple):
    """An operator of a graph.

    name: without its name space. call: takes the arguments of its function, calls the operator. pack: makes `Packed` of these arguments.
    run: what the operator does.
    """

    name: str
    call: Callable[..., List[torch.Tensor]]
    pack: Callable[..., Packed]
    run: Callable[[List[torch.Tensor], str, List[int]], List[torch.Tensor]]


def packed_operator(name: str, function: Callable, fake: Callable) -> PackedOperator:
    """Registers an operator.

    Args:
        name: the operator's.
        function: returns a list of tensors. Its arguments have annotations, `parts` among them, the projections' tensors; the last one is
            `whole`, what `side_by_side` finds of the weights of q, k and v, or of gate and up.
        fake: the same function on tensors without data, without `whole`.
    """
    *annotated, _ = inspect.signature(function).parameters.values()
    parameters = tuple(Parameter(each.name, KINDS.get(each.annotation, OTHER)) for each in annotated)
    kinds = "".join(parameter.kind for parameter in parameters)  # a graph has one guard for a text, and one for each item of a tuple
    form_of = functools.lru_cache(maxsize=None)(functools.partial(Form, parameters))

    def pack(*args):
        tensors: List[torch.Tensor] = []
        told: List[Any] = []
        sizes: List[int] = []
        for kind, arg in zip(kinds, args):
            if kind == TENSOR:
                told.append(arg is not None)
                if arg is not None:
                    tensors.append(arg)
            elif kind == TENSORS:
                told.append(tuple([one is not None for one in arg]))
                tensors += [one for one in arg if one is not None]
            elif kind == SIZES:
                told.append(None)
                sizes += arg
            else:
                told.append(tuple(arg) if isinstance(arg, (list, tuple)) else arg)
        return tensors, _text(*told), sizes

    def from_packed(*parts):
        *tensors, whole, sizes, form = parts
        return function(*form.arguments(tensors, sizes), whole)

    from_packed.__name__ = function.__name__
    again = replayed_with_products(from_packed)

    def run(tensors: List[torch.Tensor], form: str, sizes: List[int]) -> List[torch.Tensor]:
        if torch.is_grad_enabled():  # never in a graph of torch.compile
            with torch.no_grad():
                return run(tensors, form, sizes)
        known = form_of(form)
        whole = side_by_side([tensors[place] for place in known.weights]) if known.weights else None
        return list(again(*tensors, whole, tuple(sizes), known))

    def run_fake(tensors, form, sizes):
        return fake(*form_of(form).arguments(tensors, sizes))

    run.__name__ = function.__name__
    operator = operator_of(name, run, run_fake)
    return PackedOperator(name, lambda *args: operator(*pack(*args)), lambda *args: Packed(*pack(*args)), run)
