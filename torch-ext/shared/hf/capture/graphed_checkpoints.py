"""Checkpointed layers in graphs: the forward graph keeps each layer's input alone, and the backward graph runs each layer again, as
torch.utils.checkpoint does it, whose second run is part of what is recorded."""

import contextlib
import functools
from typing import Iterable, Optional

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...ops.second_run import are_a_checkpoints, saving_hooks
from ..layer.checkpointing import is_checkpointed, was_told
from ..layer.offload import FUNCTION, OFFLOADS
from ..parts.explanation import Reason

__all__ = ["checkpointed", "why_not_graphed", "why_packed", "without_hooks", "without_their_own"]

OPTIONS = ("preserve_rng_state", "determinism_check", "early_stop")  # of torch's checkpoint: what a graph does in any case, or need not ask
PACKED = Reason("hooks", "saved tensors are packed by hooks (offloading)")


def why_not_graphed(layer: nn.Module) -> Optional[Reason]:
    """Why a checkpointed layer cannot be in a graph; None where it can."""
    if was_told(layer, OFFLOADS):
        return Reason("checkpointing", "checkpoints go to the host's memory (offload)")
    function = layer.__dict__.get(FUNCTION)
    told = dict(function.keywords) if type(function) is functools.partial and function.func is checkpoint and not function.args else None
    if told is None:
        return Reason("checkpointing", "gradient checkpointing is not PyTorch's alone (offloading)")
    if told.pop("use_reentrant", True) is not False:
        return Reason("checkpointing", "gradient checkpointing is reentrant")
    others = sorted(told.keys() - set(OPTIONS))
    return Reason("checkpointing", f"gradient checkpointing has the option {others[0]}") if others else None


@contextlib.contextmanager
def without_hooks():
    """Leaves the hooks that pack saved tensors out, as a context; of several, the innermost ones."""
    found = saving_hooks()
    if found is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        if found is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*found)


def why_packed(layer: nn.Module) -> Optional[Reason]:
    """Why tensors that are saved now would not be kept as they are; None where they are, or where nothing but the layer's own checkpoint
    is around its forward: a replay saves nothing, so that it asks for no second run."""
    found = saving_hooks()
    if found is None:
        return None
    if not is_checkpointed(layer) or type(layer).__call__ is nn.Module.__call__ or not are_a_checkpoints(found):
        return PACKED
    with without_hooks():
        return None if saving_hooks() is None else PACKED


@contextlib.contextmanager
def without_their_own(layers: Iterable[nn.Module]):
    """Has layers that checkpoint themselves run once, as a context, in which `checkpointed` is around them."""
    held = [(layer.__dict__, layer.__dict__[FUNCTION]) for layer in layers if FUNCTION in layer.__dict__]
    for state, _ in held:
        state[FUNCTION] = lambda function, *args, **kwargs: function(*args, **kwargs)
    try:
        yield
    finally:
        for state, function in held:
            state[FUNCTION] = function


def checkpointed(layer: nn.Module, function, x: torch.Tensor) -> torch.Tensor:
    """function(x), a layer's call that draws no random numbers. It runs again in the backward pass where the layer is checkpointed."""
    if not is_checkpointed(layer):
        return function(x)
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
