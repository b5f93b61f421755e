"""Gives the layers of a decoder the configuration that announces our attention, and finds those that cannot have it."""

from typing import Any

import torch

from ..family.ownership import all_are_seen, hands_on, is_wrapper
from .defaults import ATTENTION, STORED

__all__ = ["said_of", "untold"]


def untold(model, state) -> Any:
    """Gives every attention layer of a decoder the configuration that announces our implementation.

    Returns the first module that cannot have it, or None if all do. A module cannot if other code reads the arguments of its calls, since
    that code expects transformers' masks, or if it asks for another implementation. state: of the decoder (attention_choice.py).
    """
    ours, layers = vars(model)["config"], getattr(model, "layers", ())
    if state.layers != len(layers):
        state.layers = len(layers)
        for module in model.modules():
            if vars(module).get("config") is state.config:
                vars(module)["config"] = ours
    for layer in layers:
        attention = layer.__dict__["_modules"].get("self_attn")
        if attention is not None and attention.__dict__.get("config") is ours and hands_on(layer) and hands_on(attention):
            continue  # nearly always
        untold = _untold_in(layer, ours, state)
        if untold is not None:
            return untold
    return None if len(layers) and not all_are_seen() else model


def _untold_in(part, ours, state) -> Any:
    """Does what `_untold` does for one part: a layer, its attention, or a library's wrapper around either."""
    if not hands_on(part):
        return part
    described = part.__dict__
    attention = described["_modules"].get("self_attn")
    if attention is not None:
        return _untold_in(attention, ours, state)
    held = described.get("config")
    if held is ours:
        return None
    if is_wrapper(part):
        found = (_untold_in(each, ours, state) for each in _wrapped_by(part))
        return next((each for each in found if each is not None), None)
    if held is None:  # a layer that mixes its tokens otherwise, and is handed no such mask
        return None
    if not isinstance(held, type(state.config)) or held.__dict__.get(STORED) not in (state.default, ATTENTION):
        return part
    described["config"] = ours  # of a layer or an attention that was copied or exchanged
    return None


def _wrapped_by(wrapper):
    """The modules in a library's wrapper: PEFT's has the original and a copy for each adapter."""
    for part in wrapper.__dict__["_modules"].values():
        yield from part.values() if isinstance(part, torch.nn.ModuleDict) else (part,)


def said_of(untold) -> str:
    """Says why a module was not told; "" for None."""
    if untold is None:
        return ""
    name = type(untold).__name__
    if hands_on(untold):
        return f"{name} asks for another implementation"
    return f"{name} is not transformers' own, or has hooks that see its arguments, and may need masks of transformers'"
