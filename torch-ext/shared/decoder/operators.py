"""Replays the operators of a graph of torch.compile or torch.export that take lists of tensors."""

import inspect
from typing import Callable, List, Optional

import torch

from ..ops.common import side_by_side
from ..runtime.replay import replayed_with_products
from .projection import SIZE

LISTS_OF_TENSORS = (List[torch.Tensor], List[Optional[torch.Tensor]])
ALONE, OF_NUMBERS = -1, -2


def replayed_operator(function: Callable) -> Callable:
    """Makes the function of an operator of one that has `whole` after the operator's arguments: what `side_by_side` finds of the weights
    of q, k and v, or of gate and up. It is replayed where it can be; the replay gets the tensors of a list one by one, numbers as a tuple.
    """
    *parameters, _ = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters]
    lists = [parameter.annotation in LISTS_OF_TENSORS for parameter in parameters]
    place, attended = names.index("parts"), names.index("attended") if "attended" in names else None

    def from_parts(*parts):
        left, arguments = iter(parts), []
        for form in parts[-1]:
            if form == ALONE:
                arguments.append(next(left))
            else:
                arguments.append(list(next(left)) if form == OF_NUMBERS else [next(left) for _ in range(form)])
        return function(*arguments)

    from_parts.__name__ = function.__name__
    again = replayed_with_products(from_parts)

    def call(*args):
        if torch.is_grad_enabled():  # never in a graph of torch.compile
            with torch.no_grad():
                return call(*args)
        parts, forms = [], []
        for arg, of_tensors in zip(args, lists):
            if of_tensors:
                parts += arg
                forms.append(len(arg))
            elif type(arg) is list:
                parts.append(tuple(arg))
                forms.append(OF_NUMBERS)
            else:
                parts.append(arg)
                forms.append(ALONE)
        weights = args[place][::SIZE]
        if attended is not None:
            weights = weights[args[attended] is not None : -1]
        whole = side_by_side(weights) if len(weights) > 1 else None
        return list(again(*parts, whole, (*forms, ALONE)))

    call.__signature__ = inspect.signature(function).replace(parameters=parameters)  # type: ignore[attr-defined]
    return call
