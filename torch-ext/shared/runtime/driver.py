"""The few calls of the CUDA driver that a launch needs, through ctypes.

A cubin made by cuTile is launched with blocks of (1, 1, 1) and no dynamic shared memory: the image says how many threads it
wants, and the driver expands the block. Libraries and kernels of the driver do not belong to a context, so an image is loaded
once in a process and launched on every device of its architecture.
"""

import ctypes
import struct
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch

from .artifacts import Artifacts, BuiltVariant

__all__ = ["MIN_DRIVER", "Driver", "DriverError", "Launch", "Together", "current_device"]

MIN_DRIVER = 13000  # CUDA 13.0 (R580), the first driver that knows the images of cuTile
OUT_OF_MEMORY = 2
INVALID_CONTEXT = 201
HEAD_START = 1_000_000  # cycles that the device waits before it is timed, 0.5 ms, while the host submits the launches


class DriverError(RuntimeError):
    """A call of the CUDA driver failed. code: the CUresult."""

    def __init__(self, message: str, code: int = 0):
        super().__init__(message)
        self.code = code


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, with a value that is a number."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


# Lets a launch begin before the one in front of it has ended (CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION): its kernel waits by
# itself. Between two short kernels that saves 1 to 2 us on an H200.
EARLY = LaunchAttribute(6, b"", 1, b"")
EARLY_FROM = 90  # sm_90 is the first architecture that has it


# 0.1 us instead of torch.cuda.current_stream's 4 us. Both are None in a torch without CUDA, where nothing is launched.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


class Driver:
    """Loads images and prepares launches on NVIDIA GPUs. One object a process; thread-safe."""

    runs_on_cpu = False

    def __init__(self, artifacts: Artifacts):
        self.artifacts = artifacts
        self._lock = threading.Lock()
        self._cuda: Optional[ctypes.CDLL] = None
        self._functions: Dict[Tuple[str, str], ctypes.c_void_p] = {}
        self._images: list = []  # the driver reads an image lazily: keep it as long as the process lives

    @property
    def cuda(self):
        if self._cuda is None:
            try:
                self._cuda = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise DriverError(f"the CUDA driver cannot be loaded ({error}). Install an NVIDIA driver, R580 or newer") from None
        return self._cuda

    def check(self, code: int, what: str) -> None:
        if code:
            name, text = ctypes.c_char_p(), ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(name))
            self.cuda.cuGetErrorString(code, ctypes.byref(text))
            describe = " ".join(part.value.decode() for part in (name, text) if part.value)
            message = f"{what}: CUDA error {code} {describe}"
            # What torch raises when its own memory runs out: whoever catches that and makes the batch smaller catches this too.
            raise torch.OutOfMemoryError(message) if code == OUT_OF_MEMORY else DriverError(message, code)

    def version(self) -> int:
        """Returns the driver's version, 13000 for CUDA 13.0."""
        version = ctypes.c_int()
        self.check(self.cuda.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
        return version.value

    def architecture(self, device: int) -> str:
        """The architecture whose images this device runs; '' when there is none.

        From compute capability 9.0 on an image runs on its own architecture only; an image for 8.0 runs on every 8.x.
        """
        major, minor = torch.cuda.get_device_capability(device)
        built = self.artifacts.architectures()
        names = (f"sm_{major}{minor}", "sm_80") if major == 8 else (f"sm_{major}{minor}",)
        return next((name for name in names if name in built), "")

    def machine(self, device: int) -> str:
        """What a measurement holds for: the GPU's name, its driver, and this build of the package."""
        version = self.version()
        driver = f"CUDA {version // 1000}.{version % 1000 // 10}"
        return f"{torch.cuda.get_device_name(device)}, {driver}, {self.artifacts.digest}"

    def elapsed(self, device: int, work: Callable[[], object]) -> float:
        """Seconds that the device takes for the launches of `work`."""
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START)
            start.record()
            work()
            end.record()
            end.synchronize()
            return 1e-3 * start.elapsed_time(end)

    def make_current(self, device: int) -> None:
        """Gives this thread the context that PyTorch uses on a device, without waiting."""
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self.cuda.cuDeviceGet(ctypes.byref(number), device), "cuDeviceGet")
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "cuDevicePrimaryCtxRetain")
        self.check(self.cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    def multiprocessors(self, device: int) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def function(self, variant: BuiltVariant, architecture: str) -> ctypes.c_void_p:
        """The loaded kernel of a variant. Raises DriverError, torch.OutOfMemoryError or ArtifactError."""
        key = (variant.name, architecture)
        with self._lock:
            if key not in self._functions:
                image = self.artifacts.image(variant, architecture)
                library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
                load = ctypes.byref(library), image, None, None, 0, None, None, 0
                code = self.cuda.cuLibraryLoadData(*load)
                if code == OUT_OF_MEMORY:  # torch may hold memory that it does not use
                    torch.cuda.empty_cache()
                    code = self.cuda.cuLibraryLoadData(*load)
                self.check(code, f"loading {variant.name} for {architecture}")
                code = self.cuda.cuLibraryGetKernel(ctypes.byref(kernel), library, variant.symbol.encode())
                self.check(code, f"finding {variant.symbol} in the image of {variant.name} for {architecture}")
                self._images.append(image)
                self._functions[key] = kernel
            return self._functions[key]

    def prepare(self, variant: BuiltVariant, device: int, grid: tuple, arrays: list, integers: list) -> "Launch":
        """A launch of one variant whose shapes, strides, integers and grid are fixed; see `Launch`."""
        return Launch(self, variant, device, grid, arrays, integers)


def _words(addresses: int, floats: int) -> Tuple[ctypes.Array, Callable]:
    """(room for addresses, then floats in words of 8 bytes; the function that writes them)."""
    return (ctypes.c_uint64 * (addresses + floats))(), struct.Struct("<" + "Q" * addresses + "f4x" * floats).pack_into


def _rounded(floats: Sequence[float]) -> List[float]:
    """Rounds numbers to float32: infinite beyond the largest one, which `struct` refuses."""
    return [ctypes.c_float(number).value for number in floats]


class Launch:
    """A launch of which only the addresses, the floats and the stream change.

    Parameters in the kernel's order: for an array its address, then its lengths, then its strides, each a word of its own; a
    scalar as one word; constants do not appear.
    """

    def __init__(self, driver: Driver, variant: BuiltVariant, device: int, grid: tuple, arrays: list, integers: list):
        self.driver = driver
        self.device = device
        self.name = variant.name
        architecture = driver.architecture(device)
        self.function = driver.function(variant, architecture)
        early = variant.waits and int(architecture.removeprefix("sm_")) >= EARLY_FROM
        self.config = LaunchConfig(*grid, 1, 1, 1, 0, None, ctypes.addressof(EARLY) if early else None, int(early))
        self.config_ref = ctypes.byref(self.config)
        self.lock = threading.Lock()
        self.arrays = len(arrays)
        self.floats = sum(parameter.kind != "array" and parameter.dtype == "float32" for parameter in variant.parameters)
        # What changes from call to call, one after the other, so that a single call writes it: addresses, then floats in words of 8 bytes.
        self.changing, self.pack = _words(self.arrays, self.floats)
        # Each parameter's word: where it lies among those that change, or one that stays.
        self.words: List[Union[int, ctypes.c_int64]] = []
        changing, shapes, fixed = iter(range(self.arrays)), iter(arrays), iter(integers)
        numbers = iter(range(self.arrays, self.arrays + self.floats))
        for parameter in variant.parameters:
            if parameter.kind == "array":
                shape, stride = next(shapes)
                self.words += [next(changing), *map(ctypes.c_int64, shape), *map(ctypes.c_int64, stride)]
            else:
                self.words.append(next(numbers) if parameter.dtype == "float32" else ctypes.c_int64(next(fixed)))
        self.parameters = self.pointers(self.changing, 0, self.arrays)
        self.launch = driver.cuda.cuLaunchKernelEx

    def pointers(self, changing: ctypes.Array, addresses: int, floats: int) -> ctypes.Array:
        """What the driver finds the parameters by, where the launch's addresses and its floats begin at these places of an array."""
        start = ctypes.addressof(changing)
        found = []
        for word in self.words:
            if isinstance(word, int):
                place = addresses + word if word < self.arrays else floats + word - self.arrays
                found.append(start + 8 * place)
            else:
                found.append(ctypes.addressof(word))
        return (ctypes.c_void_p * len(found))(*found)

    def __call__(self, addresses: Sequence[int], floats: Sequence[float] = ()) -> None:
        device = self.device
        if current_device() != device:
            with torch.cuda.device(device):
                return self(addresses, floats)
        with self.lock:  # another thread must not change the words between here and the call
            try:
                self.pack(self.changing, 0, *addresses, *floats)
            except OverflowError:
                self.pack(self.changing, 0, *addresses, *_rounded(floats))
            self.config.stream = raw_stream(device)
            code = self.launch(self.config_ref, self.function, self.parameters, None)
            if code == INVALID_CONTEXT:  # a thread that has not used CUDA yet, as autograd's in the first backward pass
                self.driver.make_current(device)
                code = self.launch(self.config_ref, self.function, self.parameters, None)
        if code:
            self.driver.check(code, f"launching {self.name}")


class Together:
    """Launches on one device, one after the other, that share their floats: 200 of them take the host a fifth of what 200 calls take."""

    def __init__(self, launches: Sequence[Launch]):
        first = launches[0]
        self.device, self.driver, self.launch = first.device, first.driver, first.launch
        count = sum(launch.arrays for launch in launches)
        self.changing, self.pack = _words(count, first.floats)
        self.prepared = launches  # which own the words that stay
        self.stream, self.configs, self.steps = 0, [], []
        begin = 0
        for launch in launches:
            config = LaunchConfig.from_buffer_copy(launch.config)
            config.stream = None
            self.configs.append(config)
            self.steps.append((ctypes.byref(config), launch.function, launch.pointers(self.changing, begin, count)))
            begin += launch.arrays

    def __call__(self, addresses: Sequence[int], floats: Sequence[float]) -> None:
        """addresses: of the arrays of all launches, those of the first one in front. One thread at a time."""
        device = self.device
        if current_device() != device:
            with torch.cuda.device(device):
                return self(addresses, floats)
        try:
            self.pack(self.changing, 0, *addresses, *floats)
        except OverflowError:
            self.pack(self.changing, 0, *addresses, *_rounded(floats))
        stream, start = raw_stream(device), self.launch
        if stream != self.stream:
            for config in self.configs:
                config.stream = stream
            self.stream = stream
        for number, (pointer, function, parameters) in enumerate(self.steps):
            code = start(pointer, function, parameters, None)
            if code == INVALID_CONTEXT:  # a thread that has not used CUDA yet
                self.driver.make_current(device)
                code = start(pointer, function, parameters, None)
            if code:
                self.driver.check(code, f"launching {self.prepared[number].name}")
