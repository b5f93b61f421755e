"""Kernels by name: picks the variant whose promises the arguments keep, and launches it.

Nothing in the driver checks what a variant was promised about its arrays (aligned addresses, divisible strides, fixed
lengths): a broken promise corrupts memory in silence. So every promise in the manifest is checked here, once for each
combination of dtypes, shapes, strides and alignment; the outcome is kept and costs one dictionary look-up from then on.
"""

from typing import Callable, List, Sequence

import torch

from .artifacts import Artifacts, Parameter, Variant, folder_of_package
from .driver import Driver
from .tuning import measure, tuner

DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.int32: "int32",
    torch.int64: "int64",
}
INT32_MAX = 2**31 - 1
GRID_MAX = (2**24 - 1, 65535, 65535)  # blocks in each dimension: cuTile's limit of the first, CUDA's of the others
KEPT = 4096  # prepared launches that one kernel keeps: sequence lengths vary from step to step

# What launches; tests put an interpreter in its place.
backend = Driver(Artifacts(folder_of_package(__name__)))


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


class Kernel:
    """One or more kernels of the manifest that do the same thing with the same parameters, the preferred one first.

    names: their names there. grid: called with a variant's constants and the arguments, returns the numbers of blocks.

    Calling it with the tensors and behind them the numbers in the order of the kernel's parameters, constants left out, launches
    the first variant that takes them, on the current stream of the first tensor's device. Raises PromiseError when none does,
    DriverError when the launch fails.
    """

    def __init__(self, *names: str, grid: Callable[..., tuple]):
        self.names = names
        self.grid = grid
        self._prepared: dict = {}
        tuner.kernels.add(self)

    def forget(self) -> None:
        """Prepares every launch anew, by the choices that hold now."""
        self._prepared.clear()

    def __call__(self, tensors: Sequence[torch.Tensor], *numbers) -> None:
        key, addresses, low_bits = [tensors[0].get_device(), *[n for n in numbers if type(n) is int]], [], 0
        for tensor in tensors:
            key += (tensor.dtype, tensor.shape, tensor.stride())
            address = tensor.data_ptr()
            addresses.append(address)
            low_bits |= address
        if low_bits & 15:
            key += [address & 15 for address in addresses]
        key = tuple(key)
        launch = self._prepared.get(key)
        if launch is None:
            launch = self._remember(key, tensors, numbers)
        launch(addresses, [n for n in numbers if type(n) is float])

    def again(self, key: tuple, addresses: Sequence[int], floats: Sequence[float] = ()) -> bool:
        """Launches what `first` prepared under this key, on other addresses. False when there is nothing or an address is not
        aligned to 16 bytes: then call `first`.

        An operation whose launch needs views of its tensors makes them once, for `first`, and not for every call. key: all that
        the shapes, strides, dtypes, device and integers of the launch follow from.
        """
        launch = self._prepared.get(key)
        if launch is None:
            return False
        low_bits = 0
        for address in addresses:
            low_bits |= address
        if low_bits & 15:
            return False
        launch(addresses, floats)
        return True

    def first(self, key: tuple, originals: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], *numbers) -> None:
        """Launches on the tensors, and remembers under `key` how.

        originals: the tensors whose addresses `again` will get. Nothing is remembered where one of them was copied to make it fit,
        or is not aligned to 16 bytes.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        if any(o.data_ptr() != address or address & 15 for o, address in zip(originals, addresses)):
            self(tensors, *numbers)
            return
        launch = self._remember(key, tensors, numbers)
        launch(addresses, [n for n in numbers if type(n) is float])

    def _remember(self, key: tuple, tensors, numbers):
        launch = self._prepare(tensors, numbers)
        if len(self._prepared) >= KEPT:
            self._prepared.clear()
        self._prepared[key] = launch
        return launch

    def select(self, tensors: Sequence[torch.Tensor], *numbers) -> Variant:
        """The variant that a call with these arguments launches by default. Raises PromiseError, naming what each variant lacks."""
        return self.candidates(tensors, *numbers)[0]

    def candidates(self, tensors: Sequence[torch.Tensor], *numbers) -> List[Variant]:
        """The variant that `select` names, and behind it those of the same kernel with the very same promises.

        Raises PromiseError when no variant takes these arguments, naming what each one lacks.
        """
        found: List[Variant] = []
        broken = []
        architecture = backend.architecture(tensors[0].get_device())
        for variant in (v for name in self.names for v in backend.artifacts.variants(name)):
            if found and (variant.symbol, variant.parameters) != (found[0].symbol, found[0].parameters):
                continue
            if architecture in variant.images:
                reason = self._unfit(variant, tensors, numbers)
            else:
                reason = f"is not built for {architecture or 'this GPU'}"
            if reason:
                broken.append(f"{variant.name}: {reason}")
            else:
                found.append(variant)
        if not found:
            raise PromiseError(f"no variant of {self.names[0]} takes these arguments. " + "; ".join(broken))
        return found

    def takes(self, tensors: Sequence[torch.Tensor], *numbers) -> bool:
        """True when a variant takes these arguments."""
        try:
            return bool(self.candidates(tensors, *numbers))
        except PromiseError:
            return False

    def _unfit(self, variant: Variant, tensors, numbers) -> str:
        arguments = (*tensors, *numbers)
        if len(arguments) != len(variant.parameters):
            return f"{len(arguments)} arguments, expected {len(variant.parameters)}"
        for parameter, argument in zip(variant.parameters, arguments):
            if parameter.kind == "array":
                dtype = DTYPES.get(argument.dtype, str(argument.dtype))
                reason = broken_promise(parameter, dtype, argument.shape, argument.stride(), argument.data_ptr() & 15)
                if reason:
                    return f"{parameter.name} {reason}"
            elif type(argument) is not (float if parameter.dtype == "float32" else int):
                return f"{parameter.name} is {argument!r}, expected a number of {parameter.dtype}"
            elif parameter.dtype == "int32" and abs(argument) > INT32_MAX:
                return f"{parameter.name} is {argument}, expected 32 bits"
        return ""

    def _prepare(self, tensors, numbers):
        candidates = self.candidates(tensors, *numbers)
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise PromiseError(f"{self.names[0]} got tensors on {', '.join(map(str, devices))}, expected one device")
        device = tensors[0].get_device()
        arrays = [(tuple(tensor.shape), tensor.stride()) for tensor in tensors]
        integers = [number for number in numbers if type(number) is int]

        def launch_of(variant: Variant):
            return backend.prepare(variant, device, self._blocks(variant, tensors), arrays, integers)

        def times() -> List[float]:
            floats = [number for number in numbers if type(number) is float]
            launches = [launch_of(variant) for variant in candidates]
            return measure(launches, tensors, floats, lambda work: backend.elapsed(device, work))

        if len(candidates) == 1:
            return launch_of(candidates[0])
        return launch_of(tuner.choose(candidates, lambda: backend.machine(device), times))

    def _blocks(self, variant: Variant, tensors) -> tuple:
        grid = tuple(self.grid(variant.constants, *tensors))
        grid += (1,) * (3 - len(grid))
        if not all(1 <= blocks <= most for blocks, most in zip(grid, GRID_MAX)):
            raise PromiseError(f"{self.names[0]} needs a grid of {grid}, expected 1 to {GRID_MAX} blocks")
        return grid
