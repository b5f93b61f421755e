"""Checkpoints in the host's memory: the input of each checkpointed decoder layer leaves the device while the layer runs, and comes back
while the layer behind it runs backward; with `keep_attention`, what attention returned goes with it.

torch's checkpoint saves a layer's input as any node saves a tensor, so hooks for saved tensors send it away and fetch it
(`torch.autograd.graph.saved_tensors_hooks`), whichever checkpoint it is. transformers' own `offload=True` does the same with
`save_on_cpu`, whose copies run between the layers and not beside them.
"""

import functools
import sys
import threading
import weakref
from typing import Any, Dict, List, Optional, Tuple, Union

import torch
from torch.utils.checkpoint import checkpoint

from ...runtime.device import is_ordinary
from ...runtime.host_memory import Away
from ..parts.explanation import Reason, warn_once
from ..parts.modules import SAVED
from ..parts.wrapped import WRAPPING
from .checkpointing import kept_on, move_to, place_of, was_told

__all__ = ["FUNCTION", "OFFLOADS", "explain_offload", "switch", "take_back"]

OFFLOADS = SAVED + "offloads"  # on a decoder layer or its class: what apply() or kernelize() was told
FUNCTION = "_gradient_checkpointing_func"  # on a layer: what transformers checkpoints it with
OF_TRANSFORMERS = "gradient_checkpointing_enable.<locals>.checkpoint_func"  # that of its own `offload=True`
PART = "checkpoints in host memory"  # as `explain` names it
_last = threading.local()  # by device: the checkpoint that left it last; both refer to it weakly
_next: Dict[torch.device, Any] = {}  # by device: the checkpoint that was asked back ahead of its turn


def _nobody() -> None:
    return None


class Gone:
    """The tensors that one run of a checkpointed layer keeps in the host's memory, its input first.

    previous: refers weakly to the one that left before, which the backward pass will ask for next.
    """

    def __init__(self, x: torch.Tensor, limit: Optional[int]):
        self.limit, self.device, self.place = limit, x.device, place_of(x)
        last: Dict[torch.device, Any] = vars(_last)  # type: ignore[assignment]
        self.previous = last.get(x.device, _nobody)
        before = self.previous()
        if before is not None:
            before.settle()
        self.away: List[Away] = [Away(x, limit)]
        self.kept = kept_on(x)
        self.kept.sent_with = last[x.device] = weakref.ref(self)

    def send(self, tensor: torch.Tensor) -> Away:
        """Sends a tensor after the input, and returns what has it."""
        self.away.append(Away(tensor, self.limit))
        return self.away[-1]

    def settle(self) -> None:
        """Lets what has left go from the device."""
        for each in self.away:
            each.settle()

    def ask(self) -> None:
        """Begins to copy all of it back."""
        for each in self.away:
            each.ask()

    def forget(self) -> None:
        """Lets go of what comes back."""
        for each in self.away:
            each.forget()

    def take(self) -> torch.Tensor:
        """The layer's input, on its device. The rest follows, and the checkpoint of the layer before. No other that came ahead of its turn
        stays there, such as that of a pass whose turn is later."""
        other = _next.get(self.device, _nobody)()
        if other is not None and other is not self:
            other.forget()
        self.ask()
        x = self.away[0].take()
        move_to(x, self.kept, self.place)
        before = self.previous()
        if before is not None:
            before.ask()
        _next[self.device] = self.previous
        return x


class _Leaving(torch.autograd.graph.saved_tensors_hooks):
    """A context in which one tensor is saved for the backward pass in the host's memory, and all others where they are."""

    def __init__(self, x: torch.Tensor, limit: Optional[int]):
        self.gone: Optional[Gone] = Gone(x, limit)
        self.key = _key(x)
        super().__init__(functools.partial(_pack, weakref.ref(self)), _unpack)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.gone = None


def _key(x: torch.Tensor) -> Tuple[Any, ...]:
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def _pack(leaving: Any, tensor: torch.Tensor) -> Any:
    context = leaving()
    return context.gone if context is not None and context.gone is not None and _key(tensor) == context.key else tensor


def _unpack(packed: Any) -> torch.Tensor:
    return packed.take() if isinstance(packed, Gone) else packed


def _run(told: Union[bool, float], function, run, *args, **kwargs):
    """function(run, *args, **kwargs), a layer's checkpoint, whose input goes to the host's memory. told: the option."""
    x = args[0] if args else None
    if not torch.is_grad_enabled():
        return function(run, *args, **kwargs)
    if not isinstance(x, torch.Tensor) or not is_ordinary(x) or x.is_inference():
        warn_once("offload: the input of a decoder layer is not an ordinary tensor given by position, and stays on its device", 4)
        return function(run, *args, **kwargs)
    if getattr(getattr(function, "func", None), "__qualname__", "").endswith(OF_TRANSFORMERS):  # it would copy once more
        function = functools.partial(checkpoint, *function.args, **function.keywords)
    with _Leaving(x, None if told is True else int(told * 2**30)):
        return function(run, *args, **kwargs)


class Checkpoints:
    """The attribute of transformers' layers that holds their checkpoint: of those that were told so, one whose input leaves the device. It
    is the one thing that every release asks of a layer, wherever its checkpoint stands and whenever it is switched on."""

    def __init__(self) -> None:
        self.packages: set = set()  # that want it

    def __get__(self, layer, owner=None):
        if layer is None:
            return self
        function = layer.__dict__.get(FUNCTION)
        if function is None:
            raise AttributeError(f"{type(layer).__name__!r} object has no attribute {FUNCTION!r}")
        told = was_told(layer, OFFLOADS)
        return functools.partial(_run, told, function) if told and not torch.compiler.is_compiling() else function

    def __set__(self, layer, function) -> None:
        layer.__dict__[FUNCTION] = function

    def __delete__(self, layer) -> None:
        if layer.__dict__.pop(FUNCTION, None) is None:
            raise AttributeError(FUNCTION)


def _base():
    """transformers' class of layers that checkpoint themselves."""
    return sys.modules[WRAPPING].GradientCheckpointingLayer


def switch(on: Any) -> None:
    """Makes the checkpoints of transformers' layers ask whether they were told to offload."""
    if on:
        found: Any = vars(_base()).get(FUNCTION)
        if not hasattr(found, "packages"):
            found = Checkpoints()
            setattr(_base(), FUNCTION, found)
        found.packages.add(__name__)


def take_back() -> None:
    """Undoes `switch`, unless another package wants it still."""
    found: Any = vars(_base()).get(FUNCTION) if WRAPPING in sys.modules else None
    if hasattr(found, "packages"):
        found.packages.discard(__name__)
        if not found.packages:
            delattr(_base(), FUNCTION)


def explain_offload(layer) -> List[Tuple[str, Optional[Reason]]]:
    """[(part, None or why not)] of a layer whose checkpoints were asked to be in the host's memory; nothing where they were not."""
    if not was_told(layer, OFFLOADS):
        return []
    reason = None
    if not isinstance(layer, _base()):
        reason = Reason("offload", "the layer does not checkpoint itself as transformers' layers do")
    elif not layer.__dict__.get("gradient_checkpointing"):
        reason = Reason("offload", "gradient checkpointing is off")
    return [(PART, reason)]
