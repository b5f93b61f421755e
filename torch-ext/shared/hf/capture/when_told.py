"""The option `capture` of `apply` and `kernelize`: a decoder's layers are captured in its first training pass, when adapters, wrappers and
weights are those that are trained. Whoever has no line between the creation of the trained model and its training, such as a user of
TRL's command line or of a configuration file, has `capture` so too.
"""

import threading
import warnings
from typing import Any, Callable, List, Optional

import torch
from torch import nn

from ..family.ownership import runs_ours
from ..layer.checkpointing import was_told
from ..parts.explanation import Reason
from ..parts.modules import SAVED
from ..parts.tree import NotCopied
from .capture import AS_TOLD, CapturedModel, capture, model_of, release
from .graphed_layers import GRAPHS

__all__ = ["CAPTURES", "LEFT", "SIZES", "capture_as_told", "let_go", "why_not_captured"]

CAPTURES = SAVED + "captures"  # on a decoder layer or its class: what apply() or kernelize() was told
LEFT = SAVED + "not_captured"  # on a decoder's first layer: `Left`
SIZES = 32  # lengths with graphs at a time, by default
_LOCK = threading.Lock()  # two threads' first passes


class Left(NotCopied):
    """Says why a decoder whose weights are on a device was not captured."""

    def __init__(self, device: torch.device, reason: Reason):
        self.device, self.reason = device, reason


def capture_as_told(decoder: Any, check: Callable[[nn.Module], Any] = lambda decoder: None) -> None:
    """Captures the layers of a decoder that is about to be trained where they were told so, and anew where they are others by now. Where
    they cannot be captured, warns once. check: raises TypeError for a decoder whose layers a graph might not repeat."""
    layers: List[nn.Module] = [*decoder.layers]
    told = was_told(layers[0], CAPTURES) if layers else False
    if not told or not decoder.training or not torch.is_grad_enabled():
        return
    with _LOCK:
        if _is_captured(decoder, layers):
            return
        first, state = layers[0], layers[0].__dict__
        device = next((parameter.device for parameter in first.parameters()), torch.device("meta"))
        left = state.get(LEFT)
        if left is not None and left.device == device:
            return
        try:
            check(decoder)
            others = [type(layer).__name__ for layer in layers if not runs_ours(layer)]
            if others:  # what those of another's do in Python would run no more
                raise TypeError(f"{others[0]} is no decoder layer that runs fused, and a graph might not repeat all that it does")
            capture(layers, [decoder], None, None, SIZES, None if told is True else told)
            state.pop(LEFT, None)
            decoder.__dict__[AS_TOLD] = captured = state[GRAPHS].model
            captured.as_told = True
        except (RuntimeError, TypeError, ValueError) as error:
            state[LEFT] = Left(device, Reason("uncaptured", str(error)))
            if device.type == "cuda":
                warnings.warn(f"capture: {error}", RuntimeWarning, stacklevel=2)


def _is_captured(decoder: nn.Module, layers: List[nn.Module]) -> bool:
    """Tells whether the layers of a decoder have graphs. Takes those of the option off where they were of other layers."""
    for captured in {decoder.__dict__.get(AS_TOLD), model_of(layers[0])}:
        if captured is not None and captured.as_told and captured.layers != layers:
            decoder.__dict__.pop(AS_TOLD, None)
            _release_all(decoder, captured)
    return model_of(layers[0]) is not None


def let_go(module: nn.Module) -> None:
    """Takes the graphs that the option put on a layer or a decoder off it, before it is told anew, or forgets why it has none."""
    state = module.__dict__
    state.pop(LEFT, None)
    captured = state.pop(AS_TOLD, None) or getattr(state.get(GRAPHS), "model", None)
    if captured is not None and captured.as_told:
        _release_all(module, captured)


def _release_all(module: nn.Module, captured: CapturedModel) -> None:
    """Takes the graphs off a module and all captured layers, including those that are no longer in the model. Those that another `capture`
    has taken over keep theirs."""
    for each in (module, *filter(None, captured.layers)):
        if getattr(vars(each).get(GRAPHS), "model", captured) is captured:
            release(each)


def why_not_captured(layer: nn.Module) -> Optional[Reason]:
    """Says why the decoder of a first layer is not captured, where it was told so; None where it is, or was not."""
    if not was_told(layer, CAPTURES) or model_of(layer) is not None:
        return None
    left = layer.__dict__.get(LEFT)
    return Reason("unrecorded", "no training pass has gone through Bastile's forward of the decoder") if left is None else left.reason
