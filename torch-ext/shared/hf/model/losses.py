"""Finds the causal LMs of a model whose loss can do without logits by what their forwards say (logits_flow.py), of any family and in any
file, with towers or without, and gives them a forward that computes it so."""

import functools
from typing import Callable, Dict, Union

from torch import nn

from ..family.calls import argument_names
from ..family.ownership import bind, forward_for
from ..family.versions import changed_texts
from ..parts.explanation import Reason
from ..parts.facts import NotServed
from ..parts.modules import is_called_as_usual, original_forward
from .causal_lm import OPTIONS, SHAPE, causal_lm_forward, output_with_metrics
from .logits_flow import ComputedInside, Flow, flow_of

__all__ = ["INSIDE", "Read", "put_losses_on", "read_losses"]

INSIDE = "inside"  # the code of the reason where a causal LM that is held by another one computes its loss
OURS = {*OPTIONS, "skip_logits", "num_items"}  # arguments that a forward cannot have for itself
Read = Dict[nn.Module, Union[Flow, Reason]]  # by causal LM: what its forward does with its logits, or why its loss needs them


def read_losses(model: nn.Module, but: tuple = ()) -> Read:
    """Reads the forwards of the causal LMs in a model. but: classes whose loss is known from a row."""
    return {module: _read(module) for module in model.modules() if not isinstance(module, but) and _is_causal_lm(module)}


def _is_causal_lm(module) -> bool:
    """Tells whether a module is one of transformers' models with a head and a loss of its labels."""
    cls = type(module)
    if not isinstance(getattr(cls, "loss_function", None), property) or "labels" not in argument_names(original_forward(module)):
        return False
    try:
        return isinstance(module.get_output_embeddings(), nn.Module)
    except (AttributeError, NotImplementedError):
        return False


def _read(module) -> Union[Flow, Reason]:
    changed, own = changed_texts("transformers.loss.loss_utils"), OURS & {*argument_names(original_forward(module))}
    if changed:
        return Reason("texts", f"this release of transformers has an unknown text of {', '.join(changed)}")
    if own:
        return Reason("forward", f"{type(module).__name__}.forward has arguments of its own named {', '.join(sorted(own))}")
    if not is_called_as_usual(type(module)):
        return Reason("forward", f"{type(module).__name__} has a __call__ of its own")
    try:
        return flow_of(module)
    except ComputedInside as reason:
        return Reason("inside", str(reason))  # spelled out as every code is where its reason is made
    except NotServed as reason:
        return Reason("forward", str(reason))
    except Exception as error:  # of the user's classes, whose attributes are read
        return Reason("forward", f"{type(module).__name__}.forward could not be read: {type(error).__name__}: {error}")


@functools.lru_cache(maxsize=None)
def _forward_like(original) -> Callable:
    """The forward that computes the loss without logits, with the arguments of another one."""
    return forward_for(original, lambda module, given: causal_lm_forward(module, None, **given))


def put_losses_on(read: Read) -> int:
    """Gives each causal LM whose loss needs no logits a forward of ours, unless it has one of its own. Returns how many got one."""
    served = {module: flow for module, flow in read.items() if isinstance(flow, Flow) and "forward" not in vars(module)}
    for module, flow in served.items():
        output_with_metrics(flow.output)  # torch.compile traces through no making of classes
        bind(module, _forward_like(original_forward(module)))
        vars(module)[SHAPE] = flow.head, flow.vocabulary, flow.takes_return_dict
    return len(served)
