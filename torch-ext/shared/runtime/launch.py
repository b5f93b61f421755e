"""Kernels by name: picks the variant whose promises the arguments keep, and launches it.

Nothing in the driver checks what a variant was promised about its arrays (aligned addresses, divisible strides, fixed
lengths): a broken promise corrupts memory in silence. So every promise in the manifest is checked here, once for each
combination of dtypes, shapes, strides and alignment; the outcome is kept and costs one dictionary look-up from then on.
That an array's memory holds its numbers, and not those with the other sign, follows from none of these: each call checks it.
"""

from typing import Any, Callable, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch

from .artifacts import Artifacts, BuiltVariant, Parameter, folder_of_package
from .driver import Driver, Launch, Together
from .tuning import measure, tuner

__all__ = [
    "DTYPES", "GRID_MAX", "INT32_MAX", "Batch", "Kernel", "PromiseError", "backend", "contiguous_copy", "generation", "overlaps",
    "recorder", "ships",
]  # fmt: skip

DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.int32: "int32",
    torch.int64: "int64",
}
INT32_MAX = 2**31 - 1
GRID_MAX = (2**24 - 1, 65535, 65535)  # blocks in each dimension: cuTile's limit of the first, CUDA's of the others
KEPT = 4096  # prepared launches that one kernel keeps: sequence lengths vary from step to step

# What launches; tests put an interpreter in its place.
backend = Driver(Artifacts(folder_of_package(__name__)))
recorder: Any = None  # launches instead of a kernel, and records it (recording.py)
generation = 0  # goes up when launches are prepared anew


class PromiseError(ValueError):
    """No variant of a kernel takes these arguments. The message names the argument and the promise that it breaks."""


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True when two elements of an array may have one address: a dimension steps over less than those inside of it reach."""
    reach = 1
    for step, length in sorted(zip(stride, shape)):
        if length > 1 and step < reach:
            return True
        reach += (length - 1) * step
    return False


def broken_promise(parameter: Parameter, dtype: str, shape: Sequence[int], stride: Sequence[int], misalignment: int) -> str:
    """What keeps an array out of a parameter, or '' when it keeps every promise.

    shape, stride: in elements. misalignment: the address modulo 16, in bytes.
    """
    if dtype != parameter.dtype:
        return f"has dtype {dtype}, expected {parameter.dtype}"
    if len(shape) != len(parameter.shape):
        return f"has {len(shape)} dimensions, expected {len(parameter.shape)}"
    if misalignment % parameter.align:
        return f"starts {misalignment} bytes past a multiple of 16, expected a multiple of {parameter.align}"
    for i, (length, step) in enumerate(zip(shape, stride)):
        if parameter.shape[i] not in (None, length):
            return f"has length {length} in dimension {i}, expected {parameter.shape[i]}"
        if length % parameter.shape_divisible[i]:
            return f"has length {length} in dimension {i}, expected a multiple of {parameter.shape_divisible[i]}"
        if length < parameter.shape_min[i]:
            return f"has length {length} in dimension {i}, expected at least {parameter.shape_min[i]}"
        most = parameter.shape_max[i] if parameter.shape_max else None
        if most is not None and length > most:
            return f"has length {length} in dimension {i}, expected at most {most}"
        # Where there is one element or none, its stride is never used.
        if parameter.stride[i] not in (None, step) and length > 1:
            return f"has stride {step} in dimension {i}, expected {parameter.stride[i]}"
        if step == 0 and length > 1:
            return f"is expanded in dimension {i} (stride 0), expected elements of its own"
        if step % parameter.stride_divisible[i] and length > 1:
            return f"has stride {step} in dimension {i}, expected a multiple of {parameter.stride_divisible[i]}"
        if not (0 <= length <= INT32_MAX and 0 <= step <= INT32_MAX):
            return f"has length {length} and stride {step} in dimension {i}, expected both within 0 and 2^31 - 1"
    if 0 not in shape and overlaps(shape, stride):
        return f"has shape {list(shape)} with strides {list(stride)}, in which elements overlap, expected an address for each"
    return ""


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor at an aligned address whose memory holds its numbers: the tensor itself where it is one, else a copy."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 and not tensor.is_neg():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def ships(operation: str) -> bool:
    """Tells whether this package has the kernels of an operation of kernel_src."""
    return operation in backend.artifacts.operations()


class Kernel:
    """One or more kernels of the manifest that do the same thing with the same parameters; a call launches the one that fits.

    names: their names there, the preferred one first. grid: called with a variant's constants and the arrays, returns the numbers of
    blocks. views: called with the tensors of a call, returns the arrays as the kernel takes them, all elements in the same memory
    (rows, flattened); it runs only when the combination of dtypes, shapes, strides and alignment is new. reads: the parameters that
    are only read, of which the launcher makes contiguous copies where no variant takes them as they lie. split: called with the arrays
    of a new combination, returns None, or the arrays of several launches where one cannot reach all elements. where: constants that a
    variant must have, for what the arguments do not tell.

    Calling it with tensors, ints and floats in the order of the kernel's parameters, constants left out, launches the first variant
    that takes them, on the current stream of the first tensor's device. Everything that the choice of the variant, the lengths and
    the strides of a launch follow from is in the key under which it is remembered, so no operation keeps one of its own. Raises
    PromiseError when no variant takes the arguments or a tensor holds its numbers with the sign turned, DriverError when the launch
    fails.
    """

    def __init__(
        self,
        *names: str,
        grid: Callable[..., tuple],
        views: Optional[Callable[..., Sequence[torch.Tensor]]] = None,
        reads: Sequence[str] = (),
        split: Optional[Callable[..., Optional[Iterable[Sequence[torch.Tensor]]]]] = None,
        where: Optional[Mapping[str, int]] = None,
    ):
        self.names = names
        self.grid = grid
        self.views = views
        self.reads = frozenset(reads)
        self.split = split
        self.where = dict(where or {})
        self._prepared: dict = {}
        self._constants: dict = {}
        self._taken: dict = {}
        tuner.kernels.add(self)

    def forget(self) -> None:
        """Prepares every launch anew, by the choices that hold now."""
        global generation
        self._prepared.clear()
        self._taken.clear()
        generation += 1

    def __call__(self, *arguments):
        """Launches. Returns what launches on arguments of this kind (see `Batch`), or None where that takes more than one launch or a
        copy."""
        parts: list = [arguments[0].get_device()]
        addresses, floats, low_bits = [], [], 0
        for argument in arguments:
            kind = type(argument)
            if kind is float:
                floats.append(argument)
            elif kind is int:
                parts.append(argument)
            else:
                address = argument.data_ptr()
                addresses.append(address)
                low_bits |= address
                if argument.is_neg():
                    raise self._turned(arguments, argument)
                parts += (argument.dtype, argument.shape, argument.stride())
        if low_bits & 15:
            parts += [address & 15 for address in addresses]
        key = tuple(parts)
        launch = self._prepared.get(key)
        if launch is None:
            return self._first(key, arguments, addresses, floats)
        watching = recorder
        if watching is None:
            launch(addresses, floats)
        else:
            watching.launch(launch, addresses, floats, arguments)
        return launch

    def _first(self, key: tuple, arguments: tuple, addresses: List[int], floats: List[float]):
        """Launches on a new combination, and remembers and returns the launch unless something had to be cut or copied for it."""
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        arrays, candidates = self._arrays(tensors, arguments)
        parts = self.split(*arrays) if self.split else None
        if parts is not None:
            for part in parts:
                self(*_with_arrays(part, arguments))
            return None
        watching = recorder
        if watching is not None:
            watching.give_up(f"{self.names[0]} is launched for the first time on such arguments, or on copies of them")
        launch = self._prepare(arrays, arguments, floats, candidates)
        places = [array.data_ptr() for array in arrays]
        launch(places, floats)
        if places != addresses:
            return None
        if len(self._prepared) >= KEPT:
            self._prepared.clear()
        self._prepared[key] = launch
        return launch

    def _turned(self, arguments: tuple, tensor: torch.Tensor) -> PromiseError:
        """The error of a tensor whose memory holds its numbers with the other sign, as a kernel, which gets an address, cannot know."""
        name = self._array_names()[[id(a) for a in arguments if isinstance(a, torch.Tensor)].index(id(tensor))]
        return PromiseError(f"{name} of {self.names[0]} has its sign turned in memory (is_neg), expected the numbers themselves")

    def _arrays(self, tensors: List[torch.Tensor], arguments: tuple) -> Tuple[List[torch.Tensor], Optional[List[BuiltVariant]]]:
        """The tensors as the kernel takes them, with contiguous copies of those that it only reads where it needs them; and the
        variants that take them, or None before the first look."""
        arrays, candidates = list(self.views(*tensors)) if self.views else tensors, None
        if self.reads:
            candidates = self._found(_with_arrays(arrays, arguments))
        if self.reads and not candidates:
            arrays = [contiguous_copy(a) if name in self.reads else a for name, a in zip(self._array_names(), arrays)]
        moved = [name for name, t, a in zip(self._array_names(), tensors, arrays) if a.data_ptr() != t.data_ptr() and a.numel()]
        if not self.reads.issuperset(moved):
            raise PromiseError(f"{self.names[0]} would write {', '.join(sorted(set(moved) - self.reads))} into a copy")
        return arrays, candidates

    def was_launched(self) -> bool:
        """Tells whether some call launched one of these kernels and is remembered."""
        return bool(self._prepared)

    def _array_names(self) -> List[str]:
        return [p.name for p in self.variants()[0].parameters if p.kind == "array"]

    def variants(self, kernel: Optional[str] = None) -> List[BuiltVariant]:
        """Lists the variants that a call chooses from, the preferred one first. kernel: those of this one of `names` alone.

        Raises ArtifactError when a kernel is not in the manifest.
        """
        found = [variant for name in ([kernel] if kernel else self.names) for variant in backend.artifacts.variants(name)]
        return [v for v in found if all(v.constants.get(name) == value for name, value in self.where.items())]

    def constants(self, name: str, kernel: Optional[str] = None, device: Optional[int] = None) -> tuple:
        """Lists the values that a constant has, in the order of the variants.

        kernel: of this one of `names` alone. device: its index, of the variants alone that are built for it.
        """
        key = (backend, name, kernel, device)
        if key not in self._constants:
            found = [v for v in self.variants(kernel) if name in v.constants]
            if device is not None:
                found = [v for v in found if backend.architecture(device) in v.images]
            self._constants[key] = tuple(dict.fromkeys(v.constants[name] for v in found))
        return self._constants[key]

    def constant(self, name: str) -> int:
        """Returns the value of a constant that all variants have in common, so that no tile size is written down twice."""
        values = self.constants(name)
        if len(values) != 1:
            raise PromiseError(f"the constant {name} of {self.names[0]} is {values or 'missing'}, expected one value for all variants")
        return values[0]

    def lengths(self, parameter: str, dimension: int) -> frozenset:
        """Returns the lengths of one dimension of an array that variants promise, so that no list of them is written down twice."""
        key = (backend, parameter, dimension)
        if key not in self._constants:
            found = [p for v in self.variants() for p in v.parameters if p.name == parameter]
            self._constants[key] = frozenset(p.shape[dimension] for p in found) - {None}
        return self._constants[key]

    def select(self, *arguments) -> BuiltVariant:
        """Returns the variant that a call with these arrays and numbers launches by default. Raises PromiseError, naming what each
        lacks."""
        return self.candidates(*arguments)[0]

    def candidates(self, *arguments) -> List[BuiltVariant]:
        """Lists the variant that `select` names, and after it those of the same kernel with the very same promises.

        Raises PromiseError when no variant takes these arguments, naming what each one lacks.
        """
        found: List[BuiltVariant] = []
        broken = []
        architecture = backend.architecture(arguments[0].get_device())
        for variant in self.variants():
            if found and (variant.symbol, variant.parameters) != (found[0].symbol, found[0].parameters):
                continue
            if architecture in variant.images:
                reason = self._unfit(variant, arguments)
            else:
                reason = f"is not built for {architecture or 'this GPU'}"
            if reason:
                broken.append(f"{variant.name}: {reason}")
            else:
                found.append(variant)
        if not found:
            raise PromiseError(f"no variant of {self.names[0]} takes these arguments. " + "; ".join(broken))
        return found

    def takes(self, *arguments) -> bool:
        """Tells whether a variant takes these tensors, or their `views`, and numbers without a copy. The answer is remembered."""
        return bool(self._found(arguments, self.views))

    def _found(self, arguments: Sequence, views: Optional[Callable] = None) -> List[BuiltVariant]:
        """The `candidates` for arguments, none where there are none. The answer is remembered. views: of the tensors among them."""
        key = (backend, *(_described(a) if isinstance(a, torch.Tensor) else a for a in arguments))
        found = self._taken.get(key)
        if found is None:
            if len(self._taken) >= KEPT:
                self._taken.clear()
            if views:
                arguments = _with_arrays(views(*[a for a in arguments if isinstance(a, torch.Tensor)]), arguments)
            try:
                found = self._taken[key] = self.candidates(*arguments)
            except PromiseError:
                found = self._taken[key] = []
        return found

    def _unfit(self, variant: BuiltVariant, arguments) -> str:
        if len(arguments) != len(variant.parameters):
            return f"{len(arguments)} arguments, expected {len(variant.parameters)}"
        for parameter, argument in zip(variant.parameters, arguments):
            if parameter.kind == "array":
                if not isinstance(argument, torch.Tensor):
                    return f"{parameter.name} is {argument!r}, expected a tensor"
                dtype = DTYPES.get(argument.dtype, str(argument.dtype))
                reason = broken_promise(parameter, dtype, argument.shape, argument.stride(), argument.data_ptr() & 15)
                if reason:
                    return f"{parameter.name} {reason}"
            elif type(argument) is not (float if parameter.dtype == "float32" else int):
                return f"{parameter.name} is {argument!r}, expected a number of {parameter.dtype}"
            elif parameter.dtype == "int32" and abs(argument) > INT32_MAX:
                return f"{parameter.name} is {argument}, expected 32 bits"
        return ""

    def _prepare(self, arrays: Sequence[torch.Tensor], arguments: tuple, floats: List[float], candidates: Optional[List[BuiltVariant]]):
        candidates = candidates or self.candidates(*_with_arrays(arrays, arguments))
        devices = {array.device for array in arrays}
        if len(devices) > 1:
            raise PromiseError(f"{self.names[0]} got tensors on {', '.join(map(str, devices))}, expected one device")
        device = arrays[0].get_device()
        layouts = [(tuple(array.shape), array.stride()) for array in arrays]
        integers = [number for number in arguments if type(number) is int]

        def launch_of(variant: BuiltVariant):
            return backend.prepare(variant, device, self._blocks(variant, arrays), layouts, integers)

        def times() -> List[float]:
            launches = [launch_of(variant) for variant in candidates]
            return measure(launches, arrays, floats, lambda work: backend.elapsed(device, work))

        if len(candidates) == 1:
            return launch_of(candidates[0])
        return launch_of(tuner.choose(candidates, lambda: backend.machine(device), times))

    def _blocks(self, variant: BuiltVariant, arrays) -> tuple:
        grid = tuple(self.grid(variant.constants, *arrays))
        grid += (1,) * (3 - len(grid))
        if not all(1 <= blocks <= most for blocks, most in zip(grid, GRID_MAX)):
            raise PromiseError(f"{self.names[0]} needs a grid of {grid}, expected 1 to {GRID_MAX} blocks")
        return grid


class Batch:
    """Launches on one device that are made together, over and over, with floats that all of them share.

    calls: what calls of kernels returned, with the addresses of their arrays. Later arrays must have the dtypes, shapes and strides that
    those had (see layouts.py).
    """

    def __init__(self, calls: Sequence[Tuple[Any, Sequence[int]]]):
        launches, counts = [launch for launch, _ in calls], [len(places) for _, places in calls]
        self._addresses = [address for _, places in calls for address in places]
        self._misalignments = [address & 15 for address in self._addresses]
        self._made_for = backend, generation
        self._start = Together(launches) if isinstance(launches[0], Launch) else _one_by_one(launches, counts)

    def __call__(self, addresses: List[int], floats: Sequence[float]) -> bool:
        """Launches at the addresses of all arrays, those of the first launch in front. Returns False, and does nothing, where one is
        aligned in another way, or kernels were chosen anew."""
        if self._made_for != (backend, generation):
            return False
        if addresses != self._addresses:
            if [address & 15 for address in addresses] != self._misalignments:
                return False
            self._addresses = addresses
        self._start(addresses, floats)
        return True


def _one_by_one(launches: Sequence[Callable], counts: Sequence[int]) -> Callable:
    """What `Together` does, with launches that are not the driver's. counts: of the arrays of each."""

    def start(addresses: List[int], floats: Sequence[float]) -> None:
        begin = 0
        for launch, count in zip(launches, counts):
            launch(addresses[begin : begin + count], floats)
            begin += count

    return start


def _described(array: torch.Tensor) -> tuple:
    """All of an array that a promise can be about."""
    return array.dtype, array.shape, array.stride(), array.get_device(), array.data_ptr() & 15


def _with_arrays(arrays: Sequence[torch.Tensor], arguments: Sequence) -> list:
    """The arguments with arrays in the places of the tensors."""
    waiting = iter(arrays)
    return [next(waiting) if isinstance(a, torch.Tensor) else a for a in arguments]
