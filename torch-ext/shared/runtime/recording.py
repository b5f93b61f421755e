"""Records what one call of an operator does, as steps that can be done again.

A dispatch mode sees every operation of PyTorch in the call, and the launcher reports every launch. What a call may do:

| step             | what the call did                                                                   | done again as                |
|------------------|-------------------------------------------------------------------------------------|------------------------------|
| `Allocate`       | made an empty tensor (`ALLOCATIONS`)                                                | an empty tensor              |
| `View`           | made a view of an argument or of a tensor that it made                              | the same view                |
| `Compute`        | ran one of `COMPUTATIONS`, where the operator is marked to compute                  | the same function            |
| `RecordedLaunch` | launched a kernel on arguments, tensors that it made, or tensors marked `constant`  | a launch at the new addresses |

Anything else (a number read back from the device, random numbers, a write to an argument) raises `NotReplayable` once the call has ended.
The call itself always runs to its end and returns what it returns.

Every tensor of a call has a slot: a number, the arguments first. The recorder holds no tensor, so memory is freed as it is without it.
"""

import threading
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence, Tuple, Union

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .layouts import Layout

__all__ = [
    "NO_SLOT", "Allocate", "Compute", "NotReplayable", "RecordedLaunch", "Recorder", "Recording", "Slot", "SlotList", "Step", "View",
    "constant",
]  # fmt: skip

NO_SLOT = -1  # of an absent result
_aten = torch.ops.aten
ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)
HARMLESS = frozenset((_aten.promote_types.default,))  # their results follow from dtypes and numbers


def _cast_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype, copy=True)


def _widened_product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.mm(left, right, out_dtype=dtype)


def _copy_all(targets: List[torch.Tensor], sources: List[torch.Tensor]) -> None:
    torch._foreach_copy_(targets, sources)


# Operations whose result follows from their tensors and numbers alone, with the function that calls each at the least cost. Those are
# torch's own functions, which take the same arguments: calling an operator directly costs the host 4 us more.
COMPUTATIONS: Dict[Any, Callable] = {
    _aten.mm.default: torch.mm,
    _aten.mm.out: torch.mm,
    _aten.linear.default: torch.nn.functional.linear,  # below autograd it is one operation
    _aten.addmm.default: torch.addmm,
    _aten.addmm.out: torch.addmm,
    _aten.addmm_.default: torch.Tensor.addmm_,
    _aten.add.Tensor: torch.add,
    _aten.add.out: torch.add,
    _aten.add_.Tensor: torch.Tensor.add_,
    _aten.mul.Tensor: torch.mul,
    _aten.mul_.Tensor: torch.Tensor.mul_,
    _aten.relu.default: torch.relu,
    _aten.silu.default: torch.nn.functional.silu,
    _aten.silu_backward.default: _aten.silu_backward.default,
    _aten.gelu.default: torch.nn.functional.gelu,
    _aten.gelu_backward.default: _aten.gelu_backward.default,
    _aten.sum.dim_IntList: torch.sum,
    _aten.amax.default: torch.amax,
    _aten._scaled_mm.default: torch._scaled_mm,
    _aten._scaled_mm.out: torch._scaled_mm,
    _aten.copy_.default: torch.Tensor.copy_,
    _aten._foreach_copy_.default: _copy_all,
    _aten._to_copy.default: _cast_copy,
    _aten.clone.default: torch.clone,
    _aten.zeros_like.default: torch.zeros_like,
    _aten.cat.out: torch.cat,
    # These return a view where they can, and otherwise a copy, which is a computation (`_returns_views`).
    _aten.contiguous.default: torch.Tensor.contiguous,
    _aten.reshape.default: torch.reshape,
    _aten.to.dtype: torch.Tensor.to,
}
if "dtype" in _aten.mm.overloads():
    COMPUTATIONS[_aten.mm.dtype] = _widened_product


class NotReplayable(Exception):
    """A call did something that cannot be done again. The message says what."""


class Slot(int):
    """Stands for a tensor among the arguments of a computation."""


class SlotList(list):
    """Stands for a list of tensors among them."""


class Allocate(NamedTuple):
    result: int
    reads: Tuple[int, ...] = ()


class View(NamedTuple):
    """reads: its base."""

    result: int
    reads: Tuple[int, ...]


class Compute(NamedTuple):
    """target: slot of what it returns, NO_SLOT if it returns no tensor; result: the same, or None where that tensor existed before."""

    result: Optional[int]
    reads: Tuple[int, ...]
    function: Callable
    args: tuple
    kwargs: dict
    target: int


class RecordedLaunch(NamedTuple):
    """reads: the bases of its arrays, which it may also write; arrays: (base, bytes from its start) of each."""

    reads: Tuple[int, ...]
    start: Callable
    arrays: List[Tuple[int, int]]
    floats: List[float]
    result: None = None


Step = Union[Allocate, View, Compute, RecordedLaunch]


class Recording(NamedTuple):
    """What a call did.

    arguments: number of tensors that it got; layouts: of every slot; constants: tensors marked `constant`, by slot; results: the slot of
    each, NO_SLOT for None; single: whether it returned a tensor instead of a sequence; distances: (i, j, bytes) between arguments that
    share a storage; computes: whether its operator may compute with PyTorch.
    """

    arguments: int
    layouts: List[Layout]
    constants: Dict[int, torch.Tensor]
    steps: List[Step]
    results: List[int]
    single: bool
    distances: Tuple[Tuple[int, int, int], ...]
    device: torch.device
    computes: bool

    def base(self, slot: int) -> int:
        return self.layouts[slot].base


class Recorder(TorchDispatchMode):
    """Follows one call with these arguments on the current thread, as a context.

    computes: whether it may run `COMPUTATIONS`. obstacle: the first thing that cannot be done again, "" so far.
    """

    def __init__(self, args: tuple, computes: bool) -> None:
        super().__init__()
        self.computes = computes
        self.obstacle = ""
        self._launching = False
        self._thread = threading.get_ident()
        self._living: Dict[int, Tuple[Any, int]] = {}  # by the id of a tensor: a weak reference to it, and its slot
        self._layouts: List[Layout] = []
        self._slots: Dict[Layout, int] = {}
        self._constants: Dict[int, torch.Tensor] = {}
        self._steps: List[Step] = []
        self._arguments = [arg for arg in args if isinstance(arg, torch.Tensor)]
        for argument in self._arguments:
            self._add(argument)

    def give_up(self, reason: str) -> None:
        """Stops recording the call. Ignored on another thread, whose operations are not part of this call."""
        if threading.get_ident() == self._thread and not self.obstacle:
            self.obstacle = reason
            self._living.clear()
            self._steps.clear()

    def _add(self, tensor: torch.Tensor, base: Optional[int] = None) -> int:
        """Gives a tensor a slot. base: the slot whose memory it is in, its own by default."""
        slot, start = len(self._layouts), int(tensor.storage_offset())
        offset = 0 if base is None else start - self._layouts[base].storage_offset
        base = slot if base is None else base
        self._layouts.append(Layout(base, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype, start))
        if base == slot:
            self._slots[self._layouts[slot]] = slot
        if self._living_slot(tensor) is None:  # an argument that is given twice keeps its first slot
            self._living[id(tensor)] = weakref.ref(tensor), slot
        return slot

    def _living_slot(self, tensor: torch.Tensor) -> Optional[int]:
        found = self._living.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _slot(self, tensor: torch.Tensor) -> Optional[int]:
        """The slot of a tensor that the call got or made, or that is a constant; None for any other."""
        found = self._living_slot(tensor)
        if found is not None:
            return found
        constant_ = _constants.get(_storage(tensor))
        if constant_ is None or constant_.data_ptr() != tensor.data_ptr():
            return None
        slot = self._add(tensor)
        self._constants[slot] = constant_
        return slot

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = function(*args, **kwargs)
        if self._launching or self.obstacle:
            return found
        if function in ALLOCATIONS:
            self._steps.append(Allocate(self._add(found)))
        elif _returns_views(function, args, found):
            self._view(function, args[0], found)
        elif self.computes and function in COMPUTATIONS:
            self._compute(function, args, kwargs, found)
        elif function not in HARMLESS:
            self.give_up(f"it calls {function}")
        return found

    def _view(self, function, source, found) -> None:
        slot = self._slot(source)
        if slot is None:
            return self.give_up(f"{function} views a tensor from outside of the call")
        for view in found if isinstance(found, (list, tuple)) else (found,):
            if view.dtype != self._layouts[slot].dtype:
                return self.give_up(f"{function} views a tensor as {view.dtype}")
            base, added = self._layouts[slot].base, len(self._layouts)
            layout = self._layouts[self._add(view, base)]
            same = self._slots.setdefault(layout, added)
            if same == added:
                self._steps.append(View(added, (base,)))
            else:  # the base itself, or a view that there is already
                self._layouts.pop()
                self._living[id(view)] = weakref.ref(view), same

    def _compute(self, function, args, kwargs, found) -> None:
        """Records a computation that writes to no argument of the call: a plan that finds an odd address has to begin again."""
        if function is _aten._to_copy.default:
            args, kwargs = (*args, kwargs.get("dtype")), {name: v for name, v in kwargs.items() if name != "dtype" and v is not None}
            if kwargs or args[1] is None:
                return self.give_up(f"it calls {function} with {', '.join(kwargs) or 'no dtype'}")
        reads: List[int] = []
        given = tuple([self._given(arg, reads) for arg in args])
        named = {name: self._given(value, reads) for name, value in kwargs.items()}
        for written in _written(function, args, kwargs):
            slot = self._slot(written)
            if slot is None or self._layouts[slot].base < len(self._arguments):
                self.give_up(f"{function} writes to an argument")
        if self.obstacle:
            return
        known = self._slot(found) if isinstance(found, torch.Tensor) else NO_SLOT
        target = self._add(found) if known is None else known
        self._steps.append(Compute(target if known is None else None, tuple(reads), COMPUTATIONS[function], given, named, target))

    def _given(self, arg, reads: List[int]):
        """An argument of a computation, with slots for its tensors, which are added to `reads`.

        A method and no function inside `_compute`: one that calls itself is a reference cycle, and would keep the call's tensors alive.
        """
        if isinstance(arg, torch.Tensor):
            slot = self._slot(arg)
            if slot is None or (slot >= len(self._arguments) and slot in self._constants):
                return self.give_up("a computation reads a tensor from outside of the call")
            reads.append(slot)
            return Slot(slot)
        if isinstance(arg, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in arg):
            return SlotList([self._given(part, reads) for part in arg])
        return arg

    def launch(self, start: Callable, addresses: List[int], floats: List[float], arguments: Sequence) -> None:
        """Starts a kernel on the arrays among the arguments, at these addresses, and records it.

        What a stand-in for the driver does with PyTorch meanwhile is not recorded.
        """
        if threading.get_ident() != self._thread:
            start(addresses, floats)
            return
        self._launching = True
        try:
            start(addresses, floats)
        finally:
            self._launching = False
        if self.obstacle:
            return
        arrays: List[Tuple[int, int]] = []
        for array in arguments:
            if not isinstance(array, torch.Tensor):
                continue
            slot = self._slot(array)
            if slot is None:
                return self.give_up("a kernel runs on a tensor from outside of the call")
            layout = self._layouts[slot]
            if array.numel() == 0 and 0 not in self._layouts[layout.base].shape:
                return self.give_up("a kernel runs on an empty part of a tensor, which has no address")
            arrays.append((layout.base, layout.offset * array.element_size()))
        self._steps.append(RecordedLaunch(tuple(base for base, _ in arrays), start, arrays, floats))

    def recording(self, result) -> Recording:
        """What the call did that returned `result`. Raises NotReplayable."""
        tensors, single = self._arguments, isinstance(result, torch.Tensor)
        results = [result] if single else list(result)
        device = tensors[0].device
        if self.obstacle:
            refuse(self.obstacle)
        if not all(found is None or isinstance(found, torch.Tensor) for found in results):
            refuse("it returns something that is neither a tensor nor None")
        if any(tensor.is_complex() or tensor.device != device for tensor in tensors):
            refuse("its tensors are complex or on several devices")
        slots = []
        for found in results:
            slot = NO_SLOT if found is None else self._slot(found)
            if slot is None or (found is not None and (self._layouts[slot].base < len(tensors) or found.device != device)):
                refuse("it returns an argument, a view of one, or a tensor from outside of the call")
            slots.append(slot)
        computes, layouts, constants = self.computes, self._layouts, self._constants
        return Recording(len(tensors), layouts, constants, self._steps, slots, single, _distances(tensors), device, computes)


def refuse(reason: str) -> NoReturn:
    raise NotReplayable(reason)


def _distances(tensors: Sequence[torch.Tensor]) -> Tuple[Tuple[int, int, int], ...]:
    """(i, j, bytes) of tensors that share a storage: a function may ask how they lie to each other."""
    distances = []
    owners: Dict[int, int] = {}  # by storage: the first tensor in it
    for i, tensor in enumerate(tensors):
        owner = owners.setdefault(_storage(tensor), i)
        if owner != i:
            distances.append((owner, i, tensor.data_ptr() - tensors[owner].data_ptr()))
    return tuple(distances)


def _written(function, args, kwargs) -> List[torch.Tensor]:
    """The tensors among an operation's arguments that it writes to."""
    found = []
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if argument.kwarg_only or i >= len(args) else args[i]
        found += [part for part in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(part, torch.Tensor)]
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _returns_views(function, args, found) -> bool:
    """Whether an operation has only returned views of its first argument. One that may need not: `contiguous` copies what is strided."""
    if not (_may_return_views(function) or function is _aten._unsafe_view.default):  # the second: of a copy that `reshape` made
        return False
    results = found if isinstance(found, (list, tuple)) else (found,)
    return all(_storage(result) == _storage(args[0]) for result in results)


def _may_return_views(function) -> bool:
    returns, arguments = function._schema.returns, function._schema.arguments
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments):
        return False
    return bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)


_constants: Dict[int, torch.Tensor] = {}  # by storage


def constant(tensor: torch.Tensor) -> torch.Tensor:
    """Marks a tensor that an operator launches on as one that never changes and lives as long as the process, and returns it."""
    _constants[_storage(tensor)] = tensor
    return tensor
