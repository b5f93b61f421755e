"""Whether the kernels run on a device, and what is said where they do not."""

import contextlib
import ctypes
import importlib
import platform
import threading
import warnings

import pytest
import torch

from tests.fake_driver import (
    CURE,
    FakeCuda,
    driver_with,
    first_variant,
    flip_a_bit,
    in_threads,
    no_library,
    number,
)


class OnTheGPU:
    """Has as much of a CUDA tensor as is asked for."""

    is_cuda, is_meta = True, False

    def is_neg(self):
        return False

    def __init__(self, index=0):
        self.index = index

    def get_device(self):
        return self.index


class AddingCuda(FakeCuda):
    """Runs the one kernel of the first launch: out[j] = partial[0, j] + partial[1, j]."""

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        code = super().cuLaunchKernelEx(config, function, parameters, extra)
        words = [number(word) for word in self.launches[-1][2]]
        columns = words[2]
        partial = (ctypes.c_float * (2 * columns)).from_address(words[0])
        out = (ctypes.c_float * columns).from_address(words[5])
        out[:] = [partial[j] + partial[columns + j] for j in range(columns)]
        return code


@pytest.fixture
def device(runtime, cubins, gpu, monkeypatch):
    """The module, on a machine where all is well. Its tensors live on the CPU."""
    for name in ("ones", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, device=None, **k: make(*a, **k))
    gpu.current = -1
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: f"the stream of {index}")
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", int)
    driver = driver_with(runtime, cubins)
    driver._cuda = AddingCuda()
    monkeypatch.setattr(runtime.launch, "backend", driver)
    monkeypatch.setattr(runtime.device, "PLAIN", (*runtime.device.PLAIN, OnTheGPU))
    monkeypatch.delenv("BASTILE_STRICT", raising=False)
    runtime.device.forget()
    runtime.device._column_sum._prepared.clear()
    yield runtime.device
    join_the_thread_of(runtime.device)
    runtime.device.forget()
    runtime.device._column_sum._prepared.clear()


def join_the_thread_of(device):
    """Waits for what prepares a backward pass."""
    for thread in threading.enumerate():
        if thread.name == device.BACKWARD_THREAD:
            thread.join()


def answers(device, *tensors):
    """(what kernels_run_on says of each tensor, the warnings)"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [device.kernels_run_on(tensor) for tensor in tensors]
    return found, caught


def test_where_all_is_well_the_kernels_run_and_the_first_launch_is_made_once(device, runtime):
    assert answers(device, OnTheGPU(), OnTheGPU(), OnTheGPU()) == ([True] * 3, [])
    assert len(runtime.launch.backend.cuda.launches) == 1


def test_a_cpu_tensor_goes_to_pytorch_without_a_look_at_the_driver(device, runtime):
    assert answers(device, torch.zeros(2)) == ([False], [])
    assert not runtime.launch.backend.cuda.calls


def test_in_a_capture_nothing_is_launched_for_a_try(device, runtime, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert answers(device, OnTheGPU()) == ([True], [])
    assert not runtime.launch.backend.cuda.launches


@pytest.fixture
def handles(device, monkeypatch):
    """Called with a mode of autograd: what asks for handles of cuBLAS by itself at the first use of a device, as (thread, stream)."""
    found, streams = [], []

    @contextlib.contextmanager
    def stream(which):
        streams.append(which)
        yield
        streams.pop()

    def ask():
        found.append((threading.current_thread().name, *streams))

    def calls(mode):
        with mode:
            assert answers(device, OnTheGPU(), OnTheGPU()) == ([True, True], [])
        join_the_thread_of(device)
        return found

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", ask)
    return calls


def test_what_the_first_backward_pass_needs_of_pytorch_is_made_aside_once(device, handles):
    assert handles(torch.enable_grad()) == [(device.BACKWARD_THREAD, "the stream of 0")]


def test_it_is_made_where_a_device_is_first_seen_inside_of_an_autograd_function(device, handles, monkeypatch):
    """There gradients are switched off, as in inference."""
    autograd = importlib.import_module(device.__name__.replace("runtime.device", "ops.autograd"))
    made = handles(torch.no_grad())

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, number):
            return 2 * x

    class Elsewhere(torch.nn.Parameter):
        is_cuda = True

        def get_device(self):
            return 0

    monkeypatch.setattr(autograd, "PLAIN", (*autograd.PLAIN, Elsewhere))
    leaf = torch.nn.Parameter(torch.ones(2))
    for mode, tensor, expected in (
        (torch.no_grad, Elsewhere(leaf), 0),
        (torch.enable_grad, leaf, 0),
        (torch.enable_grad, Elsewhere(leaf), 1),
        (torch.enable_grad, Elsewhere(leaf), 1),
    ):
        with mode():
            autograd.apply_function(Double, tensor, 3)
        join_the_thread_of(device)
        assert len(made) == expected


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_nothing_is_made_for_a_backward_pass_that_does_not_come(handles, mode):
    assert handles(mode()) == []


def test_no_other_thread_begins_while_a_graph_is_captured(handles, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert handles(torch.enable_grad()) == []


def test_a_device_without_memory_for_the_backward_pass_says_so_when_it_is_used(handles, monkeypatch):
    def fails():
        raise torch.OutOfMemoryError("no memory for a workspace")

    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", fails)
    assert handles(torch.enable_grad()) == [] and failed == []


class World:
    """What `spoil` functions may change."""

    def __init__(self, monkeypatch, runtime, cubins, gpu):
        self.monkeypatch, self.runtime, self.cubins, self.gpu = monkeypatch, runtime, cubins, gpu

    @property
    def cuda(self):
        return self.runtime.launch.backend.cuda


def no_driver(world):
    world.runtime.launch.backend._cuda = None
    world.monkeypatch.setattr(ctypes, "CDLL", no_library)


def old_driver(world):
    world.cuda.driver_version = 12080


def torch_without_cuda(world):
    world.monkeypatch.setattr(torch.version, "cuda", None)


def old_gpu(world):
    world.gpu.capability = (7, 5)


def unknown_host(world):
    world.monkeypatch.setattr(platform, "machine", lambda: "riscv64")


def no_manifest(world):
    (world.cubins / "manifest.json").unlink()


def damaged_file(world):
    flip_a_bit(world.cubins / "swiglu.cubins")


def first_launch_fails(world):
    world.cuda.codes["cuLaunchKernelEx"] = [209] * 9


def image_does_not_load(world):
    world.cuda.codes["cuLibraryLoadData"] = [221] * 9


def wrong_result(world):
    world.runtime.launch.backend._cuda = FakeCuda()


SPOILT = (
    (no_driver, "driver cannot be loaded", "Install an NVIDIA driver, R580 or newer"),
    (old_driver, "supports CUDA 12.8, expected 13.0", "Install driver R580 or newer"),
    (torch_without_cuda, "torch is not for CUDA", "Install one that is"),
    (old_gpu, "NVIDIA H200 has compute capability 7.5, and there are kernels for sm_80, sm_90", "newer version of this package"),
    (unknown_host, "no kernels for riscv64 hosts", "riscv64"),
    (no_manifest, "manifest.json is missing", "built without GPU kernels"),
    (damaged_file, "swiglu.cubins is damaged", CURE),
    (first_launch_fails, "launching column_sum", "CUDA_ERROR_NO_BINARY_FOR_GPU"),
    (image_does_not_load, "loading column_sum", "CUDA error 221"),
    (wrong_result, "wrong result", "first launch"),
)

spoilt = pytest.mark.parametrize(("spoil", "cause", "cure"), SPOILT, ids=[spoil.__name__ for spoil, *_ in SPOILT])


@spoilt
def test_what_keeps_the_kernels_from_running_is_said_once_with_its_cure(device, runtime, cubins, gpu, monkeypatch, spoil, cause, cure):
    spoil(World(monkeypatch, runtime, cubins, gpu))
    found, caught = answers(device, OnTheGPU(), OnTheGPU(), OnTheGPU())
    assert found == [False] * 3
    assert [warning.category for warning in caught] == [RuntimeWarning]
    text = str(caught[0].message)
    assert "do not run on cuda:0 and PyTorch's operations take their place" in text
    assert cause in text and cure in text


@spoilt
def test_strict_makes_it_an_error_at_every_call(device, runtime, cubins, gpu, monkeypatch, spoil, cause, cure):
    monkeypatch.setenv("BASTILE_STRICT", "1")
    spoil(World(monkeypatch, runtime, cubins, gpu))
    for _ in range(2):
        with pytest.raises(device.KernelsUnavailable) as error:
            device.kernels_run_on(OnTheGPU())
        assert cause in str(error.value) and cure in str(error.value) and "BASTILE_STRICT=1" in str(error.value)


def test_no_memory_for_the_first_launch_is_an_error_and_the_device_is_asked_again(device, runtime, gpu, emptied):
    """It says nothing about whether the kernels run there."""
    runtime.launch.backend.cuda.codes["cuLibraryLoadData"] = [2, 2]
    with pytest.raises(torch.OutOfMemoryError):
        device.kernels_run_on(OnTheGPU())
    assert answers(device, OnTheGPU()) == ([True], [])


@pytest.mark.parametrize("spoil", (no_manifest, damaged_file))
def test_the_driver_sees_no_image_before_every_file_has_the_right_digest(device, runtime, cubins, gpu, monkeypatch, spoil):
    spoil(World(monkeypatch, runtime, cubins, gpu))
    assert answers(device, OnTheGPU())[0] == [False]
    assert not runtime.launch.backend.cuda.loaded and not runtime.launch.backend.cuda.launches


def test_what_was_hashed_is_what_the_driver_gets(device, runtime, cubins, gpu):
    """A file that changes after it was verified is not read again, for a second GPU neither."""
    assert answers(device, OnTheGPU()) == ([True], [])
    for path in cubins.iterdir():
        path.write_bytes(b"something else")
    driver = runtime.launch.backend
    driver.function(first_variant(driver.artifacts, "rms_norm_forward"), "sm_90")
    device.forget()
    assert answers(device, OnTheGPU()) == ([True], [])
    assert [image[64:].split(b"-")[0] for image in driver.cuda.loaded] == [b"column_sum", b"rms_norm_forward"]


@pytest.mark.parametrize("value", ("", "0"))
def test_only_1_is_strict(device, runtime, cubins, gpu, monkeypatch, value):
    monkeypatch.setenv("BASTILE_STRICT", value)
    old_driver(World(monkeypatch, runtime, cubins, gpu))
    assert answers(device, OnTheGPU())[0] == [False]


def test_threads_that_ask_at_once_get_one_answer_and_one_warning(device, runtime, cubins, gpu, monkeypatch):
    wrong_result(World(monkeypatch, runtime, cubins, gpu))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert in_threads(6, lambda _: device.kernels_run_on(OnTheGPU())) == [False] * 6
    assert len(caught) == 1 and len(runtime.launch.backend.cuda.launches) == 1


def test_a_repaired_driver_is_seen_after_forget(device, runtime, cubins, gpu, monkeypatch):
    old_driver(World(monkeypatch, runtime, cubins, gpu))
    assert answers(device, OnTheGPU())[0] == [False]
    runtime.launch.backend.cuda.driver_version = 13000
    assert answers(device, OnTheGPU())[0] == [False]
    device.forget()
    assert answers(device, OnTheGPU()) == ([True], [])
