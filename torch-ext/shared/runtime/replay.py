"""Runs an operator again by what it did the last time: the tensors that it makes and the kernels that it launches.

An operator of this package is a function of its arguments: what it allocates, how it views and cuts its tensors and which variants it
launches on which grid follow from the arguments' dtypes, shapes, strides, alignment and numbers, and from nothing else. Working that out
costs the host several times what the launches themselves do. So a call whose arguments agree in all of that with an earlier one makes the
same tensors and the same launches, at the addresses of its own.

What an operator does is recorded, never guessed. A call is recorded at its second time; every operation of PyTorch in it is seen by a
dispatch mode, and one that is neither a view nor an allocation (a copy, a product, a number read back from the device) means that the call
is made in full each time, as are those on arguments that are more than ordinary tensors and numbers.
"""

import threading
from operator import itemgetter
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from . import launch

KEPT = 4096  # combinations of arguments that one operator remembers
RECORDED = 1  # calls with a combination before the one that is recorded: of lengths that never come again nothing is recorded
ATTEMPTS = 4  # calls with a combination after which nobody tries any more to record it
PLAIN_VALUES = frozenset((int, bool, type(None), str, torch.dtype))
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
HARMLESS = frozenset((_aten.promote_types.default,))  # what follows from dtypes and numbers
_new, _like = torch.Tensor.new_empty_strided, torch.empty_like
_recording = threading.Lock()  # one call of the process is recorded at a time


class Made(NamedTuple):
    """A tensor that a call allocates. like: the argument, by its place, of the same dtype, shape and strides, or None: it costs a third
    less to make a tensor like another one."""

    shape: tuple
    stride: tuple
    dtype: torch.dtype
    like: Optional[int] = None


class Part(NamedTuple):
    """A result that is not the whole of a tensor that is made, but a view of it. place: which."""

    place: int
    shape: tuple
    stride: tuple
    offset: int

    def of(self, made: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.as_strided(made[self.place], self.shape, self.stride, self.offset)


class Step(NamedTuple):
    """One launch. places: for each array, which of the call's addresses (its arguments', then those that it makes) and how many bytes
    behind it."""

    launch: Callable
    places: List[Tuple[int, int]]
    floats: List[float]


class Plan:
    """What a call does. results: the tensor that it returns, by its place among those that are made, or a tuple of them or of their parts.
    distances: (i, j, bytes) of arguments that lay in one piece of memory, which arrays may be found from either. constants: see `constant`.
    """

    def __init__(
        self,
        made: Sequence[Made],
        steps: Sequence[Step],
        results: Union[int, Part, Tuple[Union[int, Part], ...]],
        distances: Sequence[Tuple[int, int, int]],
        constants: Sequence[torch.Tensor],
    ):
        self.made, self.steps, self.distances = tuple(made), tuple(steps), tuple(distances)
        self.constants = [tensor.data_ptr() for tensor in constants]
        self.results: Callable = _taker(results)

    def run(self, args: tuple, addresses: List[int]):
        """Makes the tensors, launches, and returns the results; None where this call is another one after all."""
        for i, j, distance in self.distances:
            if addresses[j] - addresses[i] != distance:
                return None
        low_bits, made = 0, []
        for shape, stride, dtype, like in self.made:
            tensor = _new(args[0], shape, stride, dtype=dtype) if like is None else _like(args[like])
            made.append(tensor)
            address = tensor.data_ptr()
            low_bits |= address
            addresses.append(address)
        if low_bits & 15:
            return None
        addresses += self.constants
        for start, places, floats in self.steps:
            start([addresses[i] + behind for i, behind in places], floats)
        return self.results(made)


def _taker(results) -> Callable:
    """A function that takes results out of the list of the tensors that were made."""
    if isinstance(results, int):
        return itemgetter(results)
    if isinstance(results, Part):
        return results.of
    if len(results) > 1 and all(isinstance(result, int) for result in results):
        return itemgetter(*results)  # one call in C
    takers = [_taker(result) for result in results]
    return lambda made: tuple([taker(made) for taker in takers])


class _Recorder(TorchDispatchMode):
    """Follows one call. failed: it did something that cannot be done again by a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = self.launching = False
        self.thread = threading.get_ident()
        self.kept: list = []  # no memory is given back meanwhile, so an address belongs to one tensor
        self.made: Dict[int, int] = {}  # by storage: which of `tensors` it is of
        self.tensors: List[torch.Tensor] = []
        self.launches: list = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if self.launching:
            return found
        self.kept.append(found)
        if function in ALLOCATIONS:
            self.made[_storage(found)] = len(self.tensors)
            self.tensors.append(found)
        elif function not in HARMLESS and not _is_view(function):
            self.failed = True
        return found

    def launch(self, start: Callable, addresses: List[int], floats: List[float], arguments: Sequence) -> None:
        """Starts a kernel on the arrays among the arguments, at these addresses, and takes note of it. What a stand-in for the driver does
        with PyTorch meanwhile does not count."""
        if threading.get_ident() != self.thread:
            start(addresses, floats)
            return
        self.launching = True
        try:
            start(addresses, floats)
        finally:
            self.launching = False
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        self.kept += tensors
        self.launches.append((start, tensors, floats))

    def give_up(self) -> None:
        """Is told of a launch that is not remembered."""
        if threading.get_ident() == self.thread:
            self.failed = True

    def plan(self, args: tuple, result) -> Optional[Plan]:
        """What was recorded of a call with these arguments, or None."""
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        if self.failed or not all(isinstance(found, torch.Tensor) for found in results) or any(t.is_complex() for t in tensors):
            return None
        device, distances, constants = tensors[0].device, [], []
        roots: Dict[int, int] = {}  # by storage: the first argument in it
        for i, tensor in enumerate(tensors):
            owner = roots.setdefault(_storage(tensor), i)
            if owner != i:
                distances.append((owner, i, tensor.data_ptr() - tensors[owner].data_ptr()))
        made, of_results = self._made(results)
        if of_results is None or any(tensor.device != device for tensor in (*tensors, *self.tensors)):
            return None
        bases = [*tensors, *self.tensors]  # what addresses are counted from
        steps = []
        for start, arrays, floats in self.launches:
            found = []
            for array in arrays:
                storage = _storage(array)
                place = len(tensors) + self.made[storage] if storage in self.made else roots.get(storage)
                if place is None and storage in _constants:
                    place = roots[storage] = len(bases)
                    constants.append(_constants[storage])
                    bases.append(_constants[storage])
                if place is None or (array.data_ptr() == 0) != (bases[place].data_ptr() == 0):
                    return None
                found.append((place, array.data_ptr() - bases[place].data_ptr()))
            steps.append(Step(start, found, floats))
        places = of_results[0] if isinstance(result, torch.Tensor) else tuple(of_results)
        layouts: dict = {}  # of the arguments, as torch.empty_like keeps them
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and torch.empty_like(arg).stride() == arg.stride():
                layouts.setdefault((tuple(arg.shape), arg.stride(), arg.dtype), i)
        made = [each._replace(like=layouts.get(each[:3])) for each in made]
        return Plan(made, steps, places, distances, constants)

    def _made(self, results: Sequence[torch.Tensor]) -> Tuple[List[Made], Optional[list]]:
        """What is allocated, results in the form in which they are returned, and which of it the results are; None where one of them was
        not made here."""
        made = [Made(tuple(t.shape), t.stride(), t.dtype) for t in self.tensors]
        numbers = [self.made.get(_storage(result)) for result in results]
        places: list = []
        for number, result in zip(numbers, results):
            if number is None or result.dtype != self.tensors[number].dtype:
                return made, None
            whole = _is_dense(result) and result.untyped_storage().nbytes() == result.nbytes
            if whole and numbers.count(number) == 1:
                made[number] = Made(tuple(result.shape), result.stride(), result.dtype)
                places.append(number)
            else:
                places.append(Part(number, tuple(result.shape), result.stride(), int(result.storage_offset())))
        return made, places


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory without a gap."""
    return 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride())) == tensor.numel() or not tensor.numel()


def _is_view(function) -> bool:
    """Whether an operation of PyTorch only looks at its first argument in another way."""
    returns, arguments = function._schema.returns, function._schema.arguments
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments):
        return False
    return bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def record(function: Callable, args: tuple) -> Tuple[Any, Optional[Plan]]:
    """Returns what a call gives, and what it did; None for that where it cannot be replayed."""
    recorder = _Recorder()
    launch.recorder = recorder
    try:
        with recorder:
            result = function(*args)
    finally:
        launch.recorder = None
    return result, recorder.plan(args, result)


def replayed(function: Callable) -> Callable:
    """`function`, an operator on tensors and numbers that begins with a tensor, which is replayed where it was recorded."""
    plans: dict = {}

    def first_calls(key: tuple, args: tuple):
        calls = plans.get(key, 0)
        if len(plans) >= KEPT:
            plans.clear()
        plans[key] = calls + 1
        if not RECORDED <= calls < ATTEMPTS or not _recording.acquire(blocking=False):
            return function(*args)
        try:
            result, plan = record(function, args)
        finally:
            _recording.release()
        if plan is not None:
            plans[key] = plan
        return result

    def call(*args):
        backend, first = launch.backend, args[0]
        if not (first.is_cuda or backend.runs_on_cpu) or _is_watched():
            return function(*args)
        parts: list = [backend, launch.generation]
        addresses, low_bits = [], 0
        for arg in args:
            kind = type(arg)
            if kind is torch.Tensor or kind is nn.Parameter:
                if arg.is_neg():
                    return function(*args)
                address = arg.data_ptr()
                addresses.append(address)
                low_bits |= address
                parts += (arg.dtype, arg.get_device(), arg.shape, arg.stride())
            elif kind in PLAIN_VALUES:
                parts.append(arg)
            elif kind is float:
                parts.append(arg or str(arg))  # 0.0 and -0.0 are equal
            else:
                return function(*args)
        if low_bits & 15:
            parts.append(tuple([address & 15 for address in addresses]))
        key = tuple(parts)
        plan = plans.get(key)
        if plan.__class__ is Plan:
            found = plan.run(args, addresses)
            return function(*args) if found is None else found
        return first_calls(key, args)

    return call


def _is_watched() -> bool:
    """True while a transform, a level of forward-mode AD or a mode wants to see the operations of PyTorch."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack() > 0


_constants: Dict[int, torch.Tensor] = {}  # by storage


def constant(tensor: torch.Tensor) -> torch.Tensor:
    """Marks a tensor that an operator launches on as one that never changes and lives as long as the process, and returns it."""
    _constants[_storage(tensor)] = tensor
    return tensor
