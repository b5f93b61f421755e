"""The memory that the graphs of a model share: their inputs, and those of their results that outlive a replay.

A replay is over before the next one begins, of whatever size either is, so all graphs record in one pool of memory, in which each finds
free what the ones before it needed only while they ran. What has to stay where it is lies here, once for all sizes: the arguments of layers
(`InputBuffer`), and what layers return, its gradients and those of weights (`Memory.settled`).
"""

import itertools
import operator
import weakref
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ...runtime.device import version_of

__all__ = ["InputBuffer", "Memory", "move_gradients"]

_GRADIENT = operator.attrgetter("grad")

class Memory:
    """The memory that the graphs of a model share."""

    def __init__(self):
        self._buffers: Dict[tuple, torch.Tensor] = {}  # what graphs read
        self._homes: Dict[tuple, torch.Tensor] = {}  # what graphs wrote first, in their pool, to which others copy
        self._gradients: Dict[tuple, Tuple[Any, torch.Tensor]] = {}  # (weakly, a parameter; its gradient's home)
        self.gradients_stay = False  # whether a pass began with gradients of the one before, as they accumulate
        self._moved: Any = None  # one of the parameters whose gradients the last backward pass moved, weakly

    def buffer(self, name: Any, like: torch.Tensor) -> torch.Tensor:
        """Memory to read a tensor from, like `like`, the same for every size that has room in it. Made outside of recordings."""
        numel, key = like.numel(), (name, like.dtype, like.device)
        if not torch.empty_like(like, device="meta").is_contiguous():
            return torch.empty_like(like)
        kept = self._buffers.get(key)
        if kept is None or kept.numel() < numel:
            kept = self._buffers[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return kept[:numel].view(like.shape)

    def settled(self, names: Sequence[Any], tensors: Sequence[Optional[torch.Tensor]]) -> List[Optional[torch.Tensor]]:
        """The tensors where they may stay, while they are recorded: the first one of a name where it is, others where that one has room for
        them. All graphs write there; each name stands for a tensor that one pass has once."""
        found, homes, moved = [], [], []
        for name, tensor in zip(names, tensors):
            if tensor is None or not tensor.is_contiguous():
                found.append(tensor)
                continue
            key = name, tensor.dtype
            home = self._homes.get(key)
            if home is None or home.numel() < tensor.numel():
                home = self._homes[key] = tensor
            else:
                home = home.view(-1)[: tensor.numel()].view(tensor.shape)
                homes.append(home)
                moved.append(tensor)
            found.append(home)
        if moved:
            torch._foreach_copy_(homes, moved)
        return found

    def settled_gradients(self, first: int, parameters: Sequence[nn.Parameter], tensors) -> List[Optional[torch.Tensor]]:
        """`settled`, of the gradients of parameters. first: number of the first layer of those whose backward pass computes them."""
        found = self.settled([("gradient", first, id(parameter)) for parameter in parameters], tensors)
        for parameter, home in zip(parameters, found):
            if home is not None:
                self._gradients[first, id(parameter), home.data_ptr()] = weakref.ref(parameter), home
        return found

    def release_gradients(self) -> None:
        """Moves the gradients that parameters still have from earlier passes out of the memory that graphs write."""
        moved, last, self._moved = self._move(), self._moved, None
        if moved:
            self.gradients_stay = True
        elif last is not None and getattr(last(), "grad", None) is None:
            self.gradients_stay = False

    def end_backward(self) -> None:
        """Does the same where the next pass would most likely have to: now the device still works on this one, while then it would wait."""
        if self.gradients_stay:
            self._moved = self._move() or self._moved

    def _move(self) -> Optional[weakref.ref]:
        """Moves them, and returns one of the parameters, weakly; None where there was nothing to move."""
        references, homes = zip(*self._gradients.values()) if self._gradients else ((), ())
        parameters = list(map(weakref.ref.__call__, references))
        if any(map(operator.is_, parameters, itertools.repeat(None))):
            gone = [key for key, parameter in zip(self._gradients, parameters) if parameter is None]
            forgotten = {id(self._gradients.pop(key)[1]) for key in gone}
            self._homes = {name: tensor for name, tensor in self._homes.items() if id(tensor) not in forgotten}
            return self._move()
        moved = move_gradients(parameters, homes)
        return None if moved is None else weakref.ref(moved)

    def forget_pool(self) -> None:
        """Lets go what lies in a pool that no graph uses any more."""
        self._homes.clear()
        self._gradients.clear()


def move_gradients(parameters: Sequence[Any], homes: Sequence[Optional[torch.Tensor]]) -> Optional[nn.Parameter]:
    """Moves the gradients that lie where graphs write into other memory, in few launches. homes: what the graphs write for each parameter.
    Returns one of the parameters whose gradient was moved."""
    gradients = list(map(_GRADIENT, parameters))
    each = itertools.compress(zip(parameters, gradients, homes), map(operator.is_not, gradients, itertools.repeat(None)))
    moved = [(parameter, grad) for parameter, grad, home in each if home is not None and grad.data_ptr() == home.data_ptr()]
    if not moved:
        return None
    for (parameter, _), gradient in zip(moved, torch._foreach_mul([gradient for _, gradient in moved], 1)):
        parameter.grad = gradient
    return moved[0][0]


class InputBuffer:
    """The memory from which graphs read an argument that many layers get. It is filled once a pass, and again where the tensor changes
    between layers."""

    def __init__(self, memory: Memory, number: int, like: torch.Tensor):
        """number: of the tensor among all that the layers get."""
        self.buffer = memory.buffer(("argument", number), like)
        self.buffer.copy_(like)
        self.version: Optional[int] = None
        self.begin_pass()

    def begin_pass(self) -> None:
        """Forgets which tensor filled it: between two passes it may have been written to uncounted (`version_of`), and other sizes fill it,
        too."""
        self.source: Any = lambda: None

    def load(self, tensor: torch.Tensor) -> None:
        version = version_of(tensor)
        if self.source() is tensor and self.version == version:
            return
        self.buffer.copy_(tensor)
        self.source, self.version = weakref.ref(tensor), version
