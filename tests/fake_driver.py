"""A driver that answers as a test wants, and what the tests of the runtime without a GPU share."""

import ctypes
import json
import struct
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

OPERATIONS = ("column_sum", "rms_norm", "swiglu", "cross_entropy")

TARGETS = {"x86_64": ("sm_80", "sm_90"), "aarch64": ("sm_90",)}

CURE = "download it again"


def image_text(variant, host, architecture, times=1) -> bytes:
    """An ELF file of one section, a text: its own name."""
    text = times * f"{variant.name} {host} {architecture}".encode()
    header = struct.pack("<4s28xQQ8xH2xH2x", b"\x7fELF", 0, 64 + len(text), 0, 1)
    return header + text + struct.pack("<4xI16xQQ24x", 1, len(header), len(text))


def first_variant(artifacts, kernel="column_sum"):
    return artifacts.variants(kernel)[0]


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_manifest(cubins, change) -> None:
    """Writes the manifest of a folder again, as a function changes it."""
    path = cubins / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def manifest_error(runtime, cubins) -> str:
    """What is said, first to last, of a manifest that is refused; it names the file."""
    artifacts = runtime.artifacts.Artifacts(cubins)
    with pytest.raises(runtime.artifacts.ArtifactError) as error:
        artifacts.architectures()
        artifacts.verify()
        artifacts.image(first_variant(artifacts), "sm_90")
    assert str(cubins / "manifest.json") in str(error.value)
    return str(error.value)


class Recorder:
    """A backend that launches nothing. prepared: (variant, grid, arrays, integers); launched: (variant, addresses, floats)."""

    runs_on_cpu = True

    def __init__(self, artifacts):
        self.artifacts = artifacts
        self.prepared, self.launched = [], []
        self.gpu = "sm_90"

    def architecture(self, device):
        return self.gpu

    def prepare(self, variant, device, grid, arrays, integers):
        self.prepared.append((variant.name, grid, arrays, integers))
        return lambda addresses, floats=(): self.launched.append((variant.name, list(addresses), list(floats)))


def norm_kernel(runtime):
    names = ("rms_norm_forward", "rms_norm_rows_forward", "rms_norm_any_forward")
    return runtime.launch.Kernel(*names, grid=lambda c, x, *_: (x.shape[0],))


def norm_arguments(rows=3, length=1024, dtype=torch.bfloat16, weight_dtype=None, x=None):
    x = torch.zeros(rows, length, dtype=dtype) if x is None else x
    weight = torch.zeros(length, dtype=weight_dtype or dtype)
    return (x, weight, torch.zeros(rows, length, dtype=weight.dtype), torch.zeros(rows)), 1e-6


def misaligned(tensor):
    """Stores the numbers one element after a multiple of 16 bytes."""
    moved = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype)
    start = 1 + (-moved.data_ptr() % 16) // tensor.itemsize
    return moved[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def combine_arguments(tokens=2, classes=20):
    tensors = [torch.zeros(tokens, classes), torch.zeros(tokens, dtype=torch.int64)]
    tensors += [torch.zeros(tokens, 1), torch.zeros(tokens, 1), torch.zeros(tokens, 2), torch.zeros(tokens)]
    return tensors


NAMES = {200: "CUDA_ERROR_INVALID_IMAGE", 201: "CUDA_ERROR_INVALID_CONTEXT", 209: "CUDA_ERROR_NO_BINARY_FOR_GPU"}


class FakeCuda:
    """libcuda. codes: for each entry point what its next calls return, 0 afterwards; calls: how often each was called.
    loaded: the images; launches: (kernel, fields of the configuration, words as 8 bytes each)."""

    def __init__(self, version=13000, **codes):
        self.driver_version = version
        self.codes = {name: list(found) for name, found in codes.items()}
        self.calls = Counter()
        self.loaded, self.launches = [], []
        self.on_launch = None

    def _code(self, name):
        self.calls[name] += 1
        waiting = self.codes.get(name)
        return waiting.pop(0) if waiting else 0

    def cuDriverGetVersion(self, version):
        version._obj.value = self.driver_version
        return self._code("cuDriverGetVersion")

    def cuGetErrorName(self, code, name):
        name._obj.value = NAMES.get(code, "CUDA_ERROR_UNKNOWN").encode()
        return 0

    def cuGetErrorString(self, code, text):
        text._obj.value = b"what the driver says"
        return 0

    def cuLibraryLoadData(self, library, image, *options):
        assert options == (None, None, 0, None, None, 0)
        time.sleep(0.001)  # another thread comes now
        self.loaded.append(image)
        library._obj.value = 1000 + len(self.loaded)
        return self._code("cuLibraryLoadData")

    def cuLibraryGetKernel(self, kernel, library, name):
        kernel._obj.value = 1000 + library.value
        self.symbol = name
        return self._code("cuLibraryGetKernel")

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = 40 + ordinal
        return self._code("cuDeviceGet")

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 1000 + device.value
        return self._code("cuDevicePrimaryCtxRetain")

    def cuCtxSetCurrent(self, context):
        self.context = context.value
        return self._code("cuCtxSetCurrent")

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        assert extra is None
        config = {name: getattr(config._obj, name) for name, _ in config._obj._fields_}
        words = []
        for address in parameters:
            words.append(ctypes.string_at(address, 8))
            if self.on_launch:
                self.on_launch()
        self.launches.append((function.value, config, words))
        return self._code("cuLaunchKernelEx")


def number(word: bytes) -> int:
    return struct.unpack("<q", word)[0]


def real(word: bytes) -> float:
    return struct.unpack("<f", word[:4])[0]


def driver_with(runtime, cubins, **options):
    driver = runtime.driver.Driver(runtime.artifacts.Artifacts(cubins))
    driver._cuda = FakeCuda(**options)
    return driver


def in_threads(count, work):
    """Runs work(i) in `count` threads that start together; returns the results, raises the first error."""
    barrier = threading.Barrier(count)

    def run(i):
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(run, i) for i in range(count)]]


def no_library(name):
    raise OSError(f"{name}: cannot open shared object file")
