"""The option `capture` of `apply` and `kernelize`: a decoder's layers are captured in its first training pass, when adapters, wrappers and
weights are those that are trained. Whoever has no line between the creation of the trained model and its training, such as a user of
TRL's command line or of a configuration file, has `capture` so too.
"""

import warnings
from typing import Any, Callable, List, NamedTuple, Optional

import torch
from torch import nn

from ..layer.checkpointing import was_told
from ..parts.explanation import Reason
from ..parts.modules import SAVED
from .capture import capture, model_of, release

__all__ = ["CAPTURES", "LEFT", "SIZES", "capture_as_told", "why_not_captured"]

CAPTURES = SAVED + "captures"  # on a decoder layer or its class: what apply() or kernelize() was told
LEFT = SAVED + "not_captured"  # on a decoder's first layer: `Left`
SIZES = 32  # lengths with graphs at a time, by default


class Left(NamedTuple):
    """Says why a decoder whose weights are on a device was not captured."""

    device: torch.device
    reason: Reason


def capture_as_told(decoder: Any, check: Callable[[nn.Module], Any] = lambda decoder: None) -> None:
    """Captures the layers of a decoder that is about to be trained where they were told so, and releases those that are told so no more.
    Where they cannot be captured, warns once. check: raises TypeError for a decoder whose layers a graph might not repeat."""
    layers: List[nn.Module] = [*decoder.layers]
    if not layers:
        return
    first, model = layers[0], model_of(layers[0])
    told, state = was_told(first, CAPTURES), first.__dict__
    if model is not None:
        if model.as_told and not told:
            for module in (decoder, *layers):
                release(module)
        return
    if not told or not decoder.training or not torch.is_grad_enabled():
        return
    device = next((parameter.device for parameter in first.parameters()), torch.device("meta"))
    if LEFT in state and state[LEFT].device == device:
        return
    try:
        check(decoder)
        capture(layers, [decoder], None, None, SIZES, None if told is True else told).as_told = True
        state.pop(LEFT, None)
    except (RuntimeError, TypeError, ValueError) as error:
        state[LEFT] = Left(device, Reason("uncaptured", str(error)))
        if device.type == "cuda":
            warnings.warn(f"capture: {error}", RuntimeWarning, stacklevel=2)


def why_not_captured(layer: nn.Module) -> Optional[Reason]:
    """Says why the decoder of a first layer is not captured, where it was told so; None where it is, or was not."""
    if not was_told(layer, CAPTURES) or model_of(layer) is not None:
        return None
    left = layer.__dict__.get(LEFT)
    return Reason("unrecorded", "no training pass has gone through Bastile's forward of the decoder") if left is None else left.reason
