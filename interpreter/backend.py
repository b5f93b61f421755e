"""Runs the package's operations on CPU tensors with the interpreter in the place of the CUDA driver.

So the whole path of an operation is tested without a GPU: its autograd, what it saves, how it chooses a variant by the
promises in the manifest, its grid, and the kernel itself.
"""

import ctypes
import importlib

import torch

from interpreter import interpret
from kernel_src.prebuild import UNMEASURED

ARCHITECTURES = ("sm_90", *UNMEASURED)
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
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


class InterpretedArtifacts:
    """The manifest's entries, straight from kernel_src. replace: kernel functions to run instead, by name (mutants)."""

    def __init__(self, runtime, operations, replace=None):
        self.by_kernel: dict[str, list] = {}
        self.sources = {}
        for operation in operations:
            for source in importlib.import_module(f"kernel_src.{operation}").variants():
                entry = source.describe()
                parameters = tuple(
                    runtime.artifacts.Parameter(**{k: tuple(v) if isinstance(v, list) else v for k, v in p.items()})
                    for p in entry["parameters"]
                )
                images = dict.fromkeys(source.targets or ARCHITECTURES)
                variant = runtime.artifacts.Variant(entry["name"], operation, entry["symbol"], parameters, entry["constants"], images)
                self.by_kernel.setdefault(source.kernel_name, []).append(variant)
                self.sources[source.name] = source
        self.replace = replace or {}

    def operations(self):
        return {variant.operation for variants in self.by_kernel.values() for variant in variants}

    def variants(self, kernel: str):
        return self.by_kernel[kernel]

    def kernel(self, source):
        return self.replace.get(source.kernel_name, source.kernel)


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
            interpret(self.artifacts.kernel(source), grid, tuple(arguments), signature=signature, order=self.order)

        return launch

    @staticmethod
    def _argument(parameter, addresses, arrays, floats, integers):
        if isinstance(parameter, (bool, int)):
            return parameter
        if parameter.describe()["kind"] == "array":
            return tensor_at(next(addresses), DTYPES[parameter.dtype], *next(arrays))
        return next(floats) if parameter.dtype == "float32" else next(integers)
