"""Runs the package's operations on CPU tensors with the interpreter instead of the CUDA driver.

So the whole path of an operation is tested without a GPU: its autograd, what it saves, how it chooses a variant by the
promises in the manifest, its grid, and the kernel itself.
"""

import contextlib
import ctypes
import functools
import importlib
import types
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from interpreter import interpret
from kernel_src.prebuild import UNMEASURED

ARCHITECTURES = ("sm_90", *UNMEASURED)
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int32": torch.int32,
    "int64": torch.int64,
}


def tensor_at(address: int, dtype: torch.dtype, shape, stride) -> torch.Tensor:
    """A tensor over the caller's memory: exactly the elements that shape and stride reach, so that the interpreter notices any
    other."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    assert address, f"an array {list(shape)} of {dtype} starts at address 0"
    extent = 1 + sum((length - 1) * step for length, step in zip(shape, stride))
    memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


@functools.lru_cache(maxsize=256)
def described(module: types.ModuleType) -> tuple[dict[str, list], dict]:
    """Lists what a module of kernel_src prebuilds: kernel -> [(variant, its entry in the manifest)], and variants by their names. Many
    packages are loaded in one process, and their kernels are the same."""
    by_kernel: dict[str, list] = {}
    for source in module.variants():
        by_kernel.setdefault(source.kernel_name, []).append((source, source.describe()))
    return by_kernel, {entry["name"]: source for found in by_kernel.values() for source, entry in found}


class InterpretedArtifacts:
    """The manifest's entries, straight from kernel_src. replace: replace.get(name, kernel) is run instead of a kernel (mutants)."""

    def __init__(self, runtime, operations, replace=None):
        self.runtime = runtime
        self.sources = {}
        self.replace = replace or {}
        self._entries: dict[str, list] = {}  # by kernel
        self._variants: dict[str, list] = {}
        for operation in operations:
            by_kernel, by_name = described(importlib.import_module(f"kernel_src.{operation}"))
            for kernel, entries in by_kernel.items():
                self._entries.setdefault(kernel, []).append((operation, entries))
            self.sources.update(by_name)

    def operations(self):
        return {operation for found in self._entries.values() for operation, _ in found}

    def kernels(self):
        return self._entries.keys()

    def variants(self, kernel: str):
        if kernel not in self._variants:
            if kernel not in self._entries:
                raise self.runtime.artifacts.KernelMissing(f"no module of kernel_src that is interpreted has a kernel {kernel!r}")
            found = self._entries[kernel]
            self._variants[kernel] = [self._variant(operation, *entry) for operation, entries in found for entry in entries]
        return self._variants[kernel]

    def _variant(self, operation, source, entry):
        artifacts = self.runtime.artifacts
        parameters = tuple(
            artifacts.Parameter(**{k: tuple(v) if isinstance(v, list) else v for k, v in p.items()}) for p in entry["parameters"]
        )
        images = dict.fromkeys(source.targets or ARCHITECTURES)
        waits = entry.get("waits", False)
        return artifacts.BuiltVariant(entry["name"], operation, entry["symbol"], parameters, entry["constants"], images, waits)

    def kernel(self, source):
        return self.replace.get(source.kernel_name, source.kernel)


# Kernels that add to numbers that they wrote: each is read with the tile that it was written with, and behind a sum over the whole block,
# for which all threads meet. Their results were right on an H200.
READ_BACK = {"rms_norm_any_backward"}


class InterpreterBackend:
    """Has the methods of the runtime's Driver. launched: the names of the variants that ran. clock: seconds of a launch of a
    variant, by its name, where kernels are timed. gpu: the architecture to be."""

    runs_on_cpu = True

    def __init__(self, runtime, operations, replace=None, multiprocessors=2, order="forward", gpu="sm_90", clock=None):
        self.artifacts = InterpretedArtifacts(runtime, operations, replace)
        self.gpu = gpu
        self.clock = clock
        self._multiprocessors = multiprocessors
        self.order = order
        self.launched: list[str] = []

    def architecture(self, device: int) -> str:
        return self.gpu

    def machine(self, device: int) -> str:
        return f"interpreter of {self.gpu}"

    def elapsed(self, device: int, work) -> float:
        before = len(self.launched)
        work()
        return sum(map(self.clock, self.launched[before:]))

    def multiprocessors(self, device: int) -> int:
        return self._multiprocessors

    def prepare(self, variant, device, grid, arrays, integers):
        source = self.artifacts.sources[variant.name]
        signature = source.signature()

        def launch(addresses, floats):
            self.launched.append(variant.name)
            waiting = (iter(addresses), iter(arrays), iter(floats), iter(integers))
            arguments = [self._argument(p, *waiting) for p in source.params.values()]
            with _disable_current_modes():  # which would look at every PyTorch operation of the interpreter's, as they do of a package's
                back = source.kernel_name in READ_BACK
                interpret(self.artifacts.kernel(source), grid, tuple(arguments), signature=signature, order=self.order, read_back=back)

        return launch

    @staticmethod
    def _argument(parameter, addresses, arrays, floats, integers):
        if isinstance(parameter, (bool, int)):
            return parameter
        if parameter.describe()["kind"] == "array":
            return tensor_at(next(addresses), DTYPES[parameter.dtype], *next(arrays))
        return next(floats) if parameter.dtype == "float32" else next(integers)


@contextlib.contextmanager
def interpreting(runtime, operations, replace=None) -> Iterator[InterpreterBackend]:
    """Has the interpreter run a package's kernels, and puts back what ran them before. Kernels remember launches of the backend that
    prepared them, so these are forgotten in between."""
    before = runtime.launch.backend
    try:
        runtime.launch.backend = InterpreterBackend(runtime, operations, replace)
        forget_launches(runtime)
        yield runtime.launch.backend
    finally:
        runtime.launch.backend = before
        forget_launches(runtime)


def forget_launches(runtime) -> None:
    """Has every kernel of a package prepare its launches anew."""
    for kernel in list(runtime.launch.tuner.kernels):
        kernel.forget()
