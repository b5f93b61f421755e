"""Runs an operator again by what it did the last time: the tensors that it makes, the kernels that it launches, the products of PyTorch.

An operator of this package is a function of its arguments: what it allocates, how it views and cuts its tensors and which variants it
launches on which grid follow from the arguments' dtypes, shapes, strides, alignment and numbers, and from nothing else. Working that out
costs the host several times what the launches themselves do. So a call whose arguments agree in all of that with an earlier one makes the
same tensors and the same launches, at the addresses of its own.

What an operator does is recorded, never guessed. A call is recorded at its second time; every operation of PyTorch in it is seen by a
dispatch mode, and one that is neither a view nor an allocation (a copy, a product, a number read back from the device) means that the call
is made in full each time, as are those on arguments that are more than ordinary tensors and numbers. Of an operator that is marked to
compute, those of `COMPUTATIONS` are done again too.
"""

import threading
import weakref
from math import copysign
from operator import itemgetter
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from . import driver, launch
from .layouts import guards, of_compiled_graphs

KEPT = 4096  # combinations of arguments that one operator remembers
RECORDED = 1  # calls with a combination before the one that is recorded: of lengths that never come again nothing is recorded
ATTEMPTS = 4  # calls with a combination after which nobody tries any more to record it
LIKELY = 3  # calls that are expected: a forward and a backward pass may be one operator
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
_recording = threading.Lock()  # one call of the process is recorded at a time
_any_autocasts = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def _cast_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype, copy=True)


def _widened_product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.mm(left, right, out_dtype=dtype)


def _copy_all(targets: List[torch.Tensor], sources: List[torch.Tensor]) -> None:
    torch._foreach_copy_(targets, sources)


# Operations whose result follows from the tensors and numbers that they get, by what calls them at the least cost: the functions of
# torch, which take the same arguments; calling an operator itself costs the host 4 us more.
COMPUTATIONS: Dict[Any, Callable] = {
    _aten.mm.default: torch.mm,
    _aten.mm.out: torch.mm,
    _aten.linear.default: torch.nn.functional.linear,  # one operation where autograd is not there to take it apart
    _aten.addmm.default: torch.addmm,
    _aten.addmm.out: torch.addmm,
    _aten.addmm_.default: torch.Tensor.addmm_,
    _aten.add.Tensor: torch.add,
    _aten.add.out: torch.add,
    _aten.add_.Tensor: torch.Tensor.add_,
    _aten.mul.Tensor: torch.mul,
    _aten.sum.dim_IntList: torch.sum,
    _aten.copy_.default: torch.Tensor.copy_,
    _aten._foreach_copy_.default: _copy_all,
    _aten._to_copy.default: _cast_copy,
    _aten.clone.default: torch.clone,
    _aten.cat.out: torch.cat,
    # These look at their first argument another way where that can be done, and are computations where not (`_shares_memory`).
    _aten.contiguous.default: torch.Tensor.contiguous,
    _aten.reshape.default: torch.reshape,
    _aten.to.dtype: torch.Tensor.to,
}
if "dtype" in _aten.mm.overloads():
    COMPUTATIONS[_aten.mm.dtype] = _widened_product


NOWHERE = -1  # the place of what is not there, behind all others


class _Origin(NamedTuple):
    """Where a tensor of a recorded call lies. root: the argument, or what was made, whose memory it is in, by its place; offset: elements
    behind the root's first one."""

    root: int
    offset: int
    shape: tuple
    stride: tuple
    dtype: torch.dtype
    storage_offset: int


class _Note(NamedTuple):
    """Something that a recorded call did. kind: "make", "view", "compute" or "launch"; place: of the tensor that it gave, or None; needs:
    the places that it reads or writes; what: see `_Recorder.plan`."""

    kind: str
    place: Optional[int]
    needs: Tuple[int, ...]
    what: Any


class Plan:
    """What a call does. body: called with its tensors and their addresses, returns the results; None where a tensor that was made starts
    at an address that is no multiple of 16, where those of the recorded call did not. distances: (i, j, bytes) of arguments that lay in
    one piece of memory, which a function may look at. device: of all tensors.
    """

    def __init__(self, body: Callable, distances: Sequence[Tuple[int, int, int]], device: torch.device):
        self.body, self.distances = body, tuple(distances)
        self.gpu = device.index if device.type == "cuda" else None

    def run(self, tensors: Sequence[torch.Tensor], addresses: List[int]):
        """Does it with other tensors, and returns the results; None where this call is another one after all."""
        if self.gpu is not None and driver.current_device() != self.gpu:  # where the allocator would make tensors
            with torch.cuda.device(self.gpu):
                return self.run(tensors, addresses)
        for i, j, distance in self.distances:
            if addresses[j] - addresses[i] != distance:
                return None
        return self.body(tensors, addresses)


def _taker(places: Tuple[int, ...]) -> Callable:
    """A function that takes some out of a tuple."""
    if len(places) > 1:
        return itemgetter(*places)  # one call in C
    return lambda values: tuple([values[i] for i in places])


# ---------------------------------------------------------------- what a plan does
class _Body:
    """What a plan does, written down as a function: a list of steps that are called one by one takes 0.3 to 1 us longer for each.

    A tensor is a variable by its place, t3, and the address of one that kernels run on another, a3. Everything else is a number or has a
    name of its own, v3: no text from elsewhere gets into the function. constants: by place, see `constant`.
    """

    def __init__(self, arguments: int, constants: Dict[int, torch.Tensor], device: torch.device):
        self.names: Dict[str, Any] = {}
        self.constants = {place: self.named(tensor) for place, tensor in constants.items()}
        self.addresses = {place: str(tensor.data_ptr()) for place, tensor in constants.items()}
        self.device, self.make = device, _ALLOCATORS.get(device.type)
        numbers = range(arguments)
        self.lines = ["def body(tensors, addresses):"]
        self.add(f"{''.join(f't{i}, ' for i in numbers)} = tensors")
        self.add(f"{''.join(f'a{i}, ' for i in numbers)} = addresses")

    def add(self, line: str) -> None:
        self.lines.append("    " + line)

    def named(self, value) -> str:
        """A name for a value."""
        name = f"v{len(self.names)}"
        self.names[name] = value
        return name

    def tensor(self, place: int) -> str:
        return "None" if place == NOWHERE else self.constants.get(place) or f"t{place}"

    def made(self, place: int, origin: _Origin, launched: bool) -> None:
        """place, origin: of what is made, or of a view that is all that anybody sees of it. launched: whether kernels run on it."""
        layout, dtype = f"{tuple(origin.shape)}, {tuple(origin.stride)}", self.named(origin.dtype)
        if self.make is None:
            new = f"{self.named(torch.empty_strided)}({layout}, dtype={dtype}, device={self.named(self.device)})"
        else:
            new = f"{self.named(self.make)}({layout}, {dtype})"
        self.add(f"t{place} = {new}")
        if launched:
            self.aligned(place, origin.root)

    def aligned(self, place: int, root: int) -> None:
        self.add(f"a{root} = t{place}.data_ptr()")
        self.add(f"if a{root} & 15: return None")

    def view(self, place: int, origin: _Origin, shared: bool) -> None:
        """shared: whether the call returns it with others of its elements, so that autograd has to know that they are the same."""
        source, layout = self.tensor(origin.root), f"{tuple(origin.shape)}, {tuple(origin.stride)}"
        if shared or _reinterpreted is None:
            self.add(f"t{place} = {self.named(torch.as_strided)}({source}, {layout}, {source}.storage_offset() + {origin.offset})")
        else:
            self.add(f"t{place} = {self.named(_reinterpreted)}({source}, {layout}, {origin.offset})")

    def compute(self, function: Callable, args: tuple, kwargs: dict, place: int, launched: bool) -> None:
        """place: of the result, which for an operation in place is the tensor that it writes to. launched: whether kernels run on a new
        one."""
        given = [self.given(arg) for arg in args] + [f"{name}={self.given(value)}" for name, value in kwargs.items()]
        call = f"{self.named(function)}({', '.join(given)})"
        self.add(call if place == NOWHERE else f"t{place} = {call}")
        if launched:
            self.aligned(place, place)

    def given(self, arg) -> str:
        if isinstance(arg, _Places):
            return f"[{', '.join(map(self.given, arg))}]"
        return self.tensor(arg) if isinstance(arg, _Place) else self.named(arg)

    def launch(self, start: Callable, arrays: Sequence[Tuple[int, int]], floats: List[float]) -> None:
        """arrays: of each the place of its root, and how many bytes behind that it starts."""
        found = [self.addresses.get(root, f"a{root}") + (f" + {behind}" if behind else "") for root, behind in arrays]
        self.add(f"{self.named(start)}([{', '.join(found)}], {self.named(floats)})")

    def drop(self, places: Sequence[int]) -> None:
        """Lets memory go as the function itself does: its tensors are as large as what the whole layer keeps."""
        self.add("".join(f"t{place} = " for place in places) + "None")

    def returning(self, results: Sequence[int], single: bool) -> Callable:
        """The function. results: the places of what is returned, of the only one itself if `single`."""
        self.add(f"return ({' '.join(self.tensor(place) + ',' * (not single) for place in results)})")
        exec(compile("\n".join(self.lines), "<a replayed call>", "exec"), self.names)
        return self.names.pop("body")


def _allocates(make: Callable) -> bool:
    found = make((2, 3), (4, 1), torch.bfloat16)
    return (found.shape, found.stride(), found.dtype) == ((2, 3), (4, 1), torch.bfloat16) and not found.requires_grad


def _reinterprets(view: Callable) -> bool:
    source = torch.arange(12.0)[2:]
    return torch.equal(view(source, (2, 2), (3, 1), 1), torch.tensor([[3.0, 4.0], [6.0, 7.0]]))


_ALLOCATORS = {  # by the type of a device. That of a GPU is not tried out: it would begin to use one before anybody asks for it
    "cpu": of_compiled_graphs("_empty_strided_cpu", _allocates),
    "cuda": of_compiled_graphs("_empty_strided_cuda", callable),
}
_reinterpreted = of_compiled_graphs("_reinterpret_tensor", _reinterprets)


class _Place(int):
    """Stands for a tensor among the arguments of a computation."""


class _Places(list):
    """Stands for several, in a list."""


class _Recorder(TorchDispatchMode):
    """Follows one call. computes: whether it may do `COMPUTATIONS`. failed: it did something that cannot be done again by a plan.

    Holds no tensor: what one is called by goes when it goes.
    """

    def __init__(self, args: tuple, computes: bool) -> None:
        super().__init__()
        self.computes = computes
        self.failed = self.launching = False
        self.thread = threading.get_ident()
        self.living: Dict[int, Tuple[Any, int]] = {}  # by the id of a tensor: a weak reference to it, and its place
        self.origins: List[_Origin] = []  # by place
        self.views: Dict[_Origin, int] = {}  # the places of what has been looked at
        self.constants: Dict[int, torch.Tensor] = {}
        self.notes: List[_Note] = []
        self.arguments = [arg for arg in args if isinstance(arg, torch.Tensor)]
        for argument in self.arguments:
            self._see(argument)

    def _see(self, tensor: torch.Tensor, root: Optional[int] = None) -> int:
        """Gives a tensor a place. root: of the memory that it is in, its own by default."""
        place, start = len(self.origins), int(tensor.storage_offset())
        offset = 0 if root is None else start - self.origins[root].storage_offset
        root = place if root is None else root
        self.origins.append(_Origin(root, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype, start))
        if root == place:
            self.views[self.origins[place]] = place
        if self._known(tensor) is None:  # an argument that is given twice has its first place
            self.living[id(tensor)] = weakref.ref(tensor), place
        return place

    def _known(self, tensor: torch.Tensor) -> Optional[int]:
        found = self.living.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _place(self, tensor: torch.Tensor) -> Optional[int]:
        """Of a tensor that the call got or made, None for any other."""
        found = self._known(tensor)
        if found is not None:
            return found
        constant = _constants.get(_storage(tensor))
        if constant is None or constant.data_ptr() != tensor.data_ptr():
            return None
        place = self._see(tensor)
        self.constants[place] = constant
        return place

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = function(*args, **kwargs)
        if self.launching or self.failed:
            return found
        if function in ALLOCATIONS:
            place = self._see(found)
            self.notes.append(_Note("make", place, (), None))
        elif _shares_memory(function, args, found):
            self._view(args[0], found)
        elif self.computes and function in COMPUTATIONS:
            self._compute(function, args, kwargs, found)
        elif function not in HARMLESS:
            self.give_up()
        return found

    def _view(self, source, found) -> None:
        place = self._place(source)
        for view in found if isinstance(found, (list, tuple)) else (found,):
            if place is None or view.dtype != self.origins[place].dtype:
                self.give_up()
                return
            root, before = self.origins[place].root, len(self.origins)
            origin = self.origins[self._see(view, root)]
            same = self.views.setdefault(origin, before)
            if same != before:  # the root itself, or as somebody has looked at it already
                self.origins.pop()
                self.living[id(view)] = weakref.ref(view), same
            else:
                self.notes.append(_Note("view", before, (root,), None))

    def _compute(self, function, args, kwargs, found) -> None:
        """Takes note of a computation, unless it writes to an argument of the call: a plan might have to begin again."""
        if function is _aten._to_copy.default:
            args, kwargs = (*args, kwargs.get("dtype")), {name: v for name, v in kwargs.items() if name != "dtype" and v is not None}
            if kwargs or args[1] is None:
                self.give_up()
                return
        needs: List[int] = []
        given = tuple([self._given(arg, needs) for arg in args])
        named = {name: self._given(value, needs) for name, value in kwargs.items()}
        for written in _written(function, args, kwargs):
            place = self._place(written)
            if place is None or self.origins[place].root < len(self.arguments):
                self.give_up()
        if self.failed:
            return
        place = self._place(found) if isinstance(found, torch.Tensor) else NOWHERE
        new = None if place is not None else self._see(found)
        self.notes.append(_Note("compute", new, tuple(needs), (COMPUTATIONS[function], given, named, place if new is None else new)))

    def _given(self, arg, needs: List[int]):
        """An argument of a computation, with places for its tensors, which are added to `needs`. No function inside of `_compute`: one that
        calls itself is a cycle, and would keep the call's tensors until Python looks for those."""
        if isinstance(arg, torch.Tensor):
            place = self._place(arg)
            if place is None or (place >= len(self.arguments) and place in self.constants):
                self.give_up()
                return None
            needs.append(place)
            return _Place(place)
        if isinstance(arg, (list, tuple)) and any(_are_tensors(arg)):
            return _Places([self._given(part, needs) for part in arg])
        return arg

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
        if self.failed:
            return
        arrays: List[Tuple[int, int]] = []
        for array in arguments:
            if not isinstance(array, torch.Tensor):
                continue
            place = self._place(array)
            if place is None:
                self.give_up()
                return
            origin = self.origins[place]
            if array.numel() == 0 and 0 not in self.origins[origin.root].shape:  # such a one has no address
                self.give_up()
                return
            arrays.append((origin.root, origin.offset * array.element_size()))
        self.notes.append(_Note("launch", None, tuple(root for root, _ in arrays), (start, arrays, floats)))

    def give_up(self) -> None:
        """Follows the call no further."""
        if threading.get_ident() == self.thread:
            self.failed = True
            self.living.clear()
            self.notes.clear()

    def plan(self, args: tuple, result) -> Optional[Plan]:
        """What was recorded of a call with these arguments, or None."""
        tensors, single = self.arguments, isinstance(result, torch.Tensor)
        results = [result] if single else list(result)
        if self.failed or not all(found is None or isinstance(found, torch.Tensor) for found in results):
            return None
        if any(tensor.is_complex() or tensor.device != tensors[0].device for tensor in tensors):
            return None
        returned: List[Optional[int]] = [None if found is None else self._place(found) for found in results]
        for found, place in zip(results, returned):
            if found is not None and (place is None or self.origins[place].root < len(tensors) or found.device != tensors[0].device):
                return None
        distances = []
        owners: Dict[int, int] = {}  # by storage: the first argument in it
        for i, tensor in enumerate(tensors):
            owner = owners.setdefault(_storage(tensor), i)
            if owner != i:
                distances.append((owner, i, tensor.data_ptr() - tensors[owner].data_ptr()))
        places = [NOWHERE if place is None else place for place in returned]
        body = self._body({place for place in returned if place is not None})
        return Plan(body.returning(places, single), distances, tensors[0].device)

    def _root(self, place: int) -> int:
        return self.origins[place].root

    def _roots(self, note: _Note) -> set:
        """Of all tensors that a note is about."""
        return {self._root(place) for place in (*note.needs, note.place) if place is not None}

    def _seen_as(self, root: int, used: set) -> int:
        """The place of what was made there, or of its view where no other is `used` and it reaches over the same memory."""
        views = [place for place in used if self._root(place) == root]
        if len(views) == 1 and _memory(self.origins[views[0]]) == _memory(self.origins[root]):
            return views[0]
        return root

    def _body(self, returned: set) -> _Body:
        """What the notes say, with views only where PyTorch needs them, and memory let go behind its last use."""
        origins, arguments = self.origins, len(self.arguments)
        used = returned.union(*(note.needs for note in self.notes if note.kind == "compute"))
        shared = {place for place in returned if any(_overlap(origins[place], origins[other]) for other in returned - {place})}
        launched = {place for note in self.notes if note.kind == "launch" for place in note.needs}
        # Where nothing is computed all is made first: a plan that has to begin again has launched nothing by then.
        notes = self.notes if self.computes else sorted(self.notes, key=lambda note: note.kind != "make")
        seen = {note.place: self._seen_as(note.place, used) for note in notes if note.kind == "make" and note.place is not None}
        notes = [note for note in notes if note.kind != "view" or (note.place in used and note.place not in seen.values())]
        needed = {self._root(place) for place in returned}.union(*(self._roots(note) for note in notes if note.kind != "make"))
        notes = [note for note in notes if note.kind != "make" or note.place in needed]  # not what is given where there is nothing to give
        last = {root: number for number, note in enumerate(notes) for root in self._roots(note)}
        staying = {self._root(place) for place in returned} | set(self.constants) | set(range(arguments))
        held: Dict[int, List[int]] = {}  # by root: the places whose tensors keep its memory
        body = _Body(arguments, self.constants, self.arguments[0].device)
        for number, note in enumerate(notes):
            place = note.place
            if place is not None:
                held.setdefault(self._root(place), []).append(seen.get(place, place))
            if note.kind == "make" and place is not None:
                body.made(seen[place], origins[seen[place]], place in launched)
            elif note.kind == "view" and place is not None:
                body.view(place, origins[place], place in shared)
            elif note.kind == "compute":
                function, args, kwargs, at = note.what
                body.compute(function, args, kwargs, at, place in launched)
            else:
                body.launch(*note.what)
            dead = [root for root in self._roots(note) if last[root] == number and root not in staying]
            if dead and self.computes:
                body.drop([place for root in dead for place in held[root]])
        return body


def _memory(origin: _Origin) -> range:
    """From the first to the last element, counted from the root's first."""
    reach = 0 if 0 in origin.shape else 1 + sum((length - 1) * step for length, step in zip(origin.shape, origin.stride))
    return range(origin.offset, origin.offset + reach)


def _overlap(one: _Origin, other: _Origin) -> bool:
    a, b = _memory(one), _memory(other)
    return one.root == other.root and a.start < b.stop and b.start < a.stop


def _are_tensors(values) -> List[bool]:
    return [isinstance(value, torch.Tensor) for value in values]


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


def _shares_memory(function, args, found) -> bool:
    """Whether an operation of PyTorch only looked at its first argument in another way. One that may do so need not: `contiguous` copies
    what is not."""
    if not (_is_view(function) or function is _aten._unsafe_view.default):  # the second of a copy that `reshape` made
        return False
    results = found if isinstance(found, (list, tuple)) else (found,)
    return all(_storage(result) == _storage(args[0]) for result in results)


def _is_view(function) -> bool:
    """Whether the results of an operation may be its first argument, looked at in another way."""
    returns, arguments = function._schema.returns, function._schema.arguments
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments):
        return False
    return bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def record(function: Callable, args: tuple, computes: bool = False) -> Tuple[Any, Optional[Plan]]:
    """Returns what a call gives, and what it did; None for that where it cannot be replayed."""
    recorder = _Recorder(args, computes)
    launch.recorder = recorder
    try:
        with recorder:
            result = function(*args)
    finally:
        launch.recorder = None
    return result, recorder.plan(args, result)


def replayed(function: Callable) -> Callable:
    """`function`, an operator on tensors and numbers that begins with a tensor, which is replayed where it was recorded."""
    return _replayed(function, False)


def replayed_with_products(function: Callable) -> Callable:
    """As `replayed`, of a function that computes with PyTorch too, under any autocast, writes to none of its arguments, and returns tensors
    that it made and None. Its arguments may be tuples of `PLAIN_VALUES` and objects of `IDENTITIES` too."""
    return _replayed(function, True)


def _replayed(function: Callable, computes: bool) -> Callable:
    plans: dict = {}
    likely: List[_Likely] = []  # the newest first
    before: List[Plan] = []  # of the last calls that were looked up
    unseen = 0  # how often a call that was looked up was a likely one

    def follow(plan: Plan, args: tuple, state: tuple) -> None:
        """Expects the calls of a plan that was looked up a few calls ago too."""
        nonlocal likely, before, unseen
        unseen += any(one.plan is plan for one in likely)
        if plan in before and unseen < ATTEMPTS and not any(map(_is_minus_zero, args)):
            one = _Likely(args, state, plan)
            likely = [one, *likely[: LIKELY - 1]] if one.guard is not None else likely
        before = [plan, *before[: LIKELY - 1]]

    def first_calls(key: tuple, args: tuple):
        calls = plans.get(key, 0)
        if len(plans) >= KEPT:
            plans.clear()
        plans[key] = calls + 1
        if not RECORDED <= calls < ATTEMPTS or not _recording.acquire(blocking=False):
            return function(*args)
        try:
            result, plan = record(function, args, computes)
        finally:
            _recording.release()
        if plan is not None:
            plans[key] = plan
        return result

    def call(*args):
        backend, first = launch.backend, args[0]
        if not (first.is_cuda or backend.runs_on_cpu) or _is_watched():
            return function(*args)
        state = backend, launch.generation, _autocast_of(first) if computes else None
        for one in likely:
            found = one.run(args, state)
            if found is not None:
                return found
        parts: list = [*state]
        tensors, addresses, low_bits = [], [], 0
        for arg in args:
            kind = type(arg)
            if kind is torch.Tensor or kind is nn.Parameter:
                if arg.is_neg():
                    return function(*args)
                address = arg.data_ptr()
                tensors.append(arg)
                addresses.append(address)
                low_bits |= address
                parts += (arg.dtype, arg.device, arg.shape, arg.stride())
            elif kind in PLAIN_VALUES or kind in IDENTITIES or (computes and kind is tuple):
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
            if not low_bits & 15:
                follow(plan, args, state)
            found = plan.run(tensors, addresses)
            return function(*args) if found is None else found
        return first_calls(key, args)

    return call


def _autocast_of(tensor: torch.Tensor) -> Optional[torch.dtype]:
    """The dtype of autocast where it is on."""
    if not _any_autocasts():
        return None
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _is_minus_zero(arg: Any) -> bool:
    """0.0 and -0.0 are equal."""
    return type(arg) is float and not arg and copysign(1.0, arg) < 0


class _Likely:
    """A call that was replayed before, and likely comes again: whether arguments are like its own is asked of torch in one call, at a third
    of what a look at each costs. None of its numbers is -0.0."""

    def __init__(self, args: tuple, state: tuple, plan: Plan):
        places = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        others = [i for i in range(len(args)) if i not in places]
        self.count, self.state, self.plan = len(args), state, plan
        self.tensors, self.values = _taker(tuple(places)), _taker(tuple(others))
        self.expected = self.values(args)
        self.guard: Any = guards(self.tensors(args))
        self.zeros = [i for i in others if type(args[i]) is float and not args[i]]

    def run(self, args: tuple, state: tuple):
        """What the plan gives; None where this call is another one."""
        if len(args) != self.count or state != self.state:
            return None
        tensors = self.tensors(args)
        if not self.guard(*tensors) or self.values(args) != self.expected:
            return None
        for i in self.zeros:
            if _is_minus_zero(args[i]):
                return None
        addresses, low_bits = [tensor.data_ptr() for tensor in tensors], 0
        for address in addresses:
            low_bits |= address
        return None if low_bits & 15 else self.plan.run(tensors, addresses)


IDENTITIES: set = set()  # types of arguments of which each is only equal to itself, and never changes


def _is_watched() -> bool:
    """True while a transform, a level of forward-mode AD or a mode wants to see the operations of PyTorch."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack() > 0


_constants: Dict[int, torch.Tensor] = {}  # by storage


def constant(tensor: torch.Tensor) -> torch.Tensor:
    """Marks a tensor that an operator launches on as one that never changes and lives as long as the process, and returns it."""
    _constants[_storage(tensor)] = tensor
    return tensor
