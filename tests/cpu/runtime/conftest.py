"""The runtime of a build, its files of kernels, and a driver that answers as a test wants."""

import importlib
import platform
import shutil
import types

import pytest
import torch

from interpreter.backend import InterpreterBackend
from tests.cpu.conftest import REPOSITORY, assemble_cpu, load
from tests.fake_driver import OPERATIONS, TARGETS, Recorder, image_text
from tools import compiler, pack, targets
from tools.kernel_package import read_package


@pytest.fixture(scope="session")
def runtime(tmp_path_factory):
    """The modules of the runtime, of a build that no other test loads."""
    package = load(assemble_cpu(tmp_path_factory.mktemp("runtime"), "\n# without a driver\n"))
    names = ("artifacts", "driver", "launch", "device")
    return types.SimpleNamespace(**{name: importlib.import_module(f"{package.__name__}.shared.runtime.{name}") for name in names})


@pytest.fixture(autouse=True)
def an_x86_64_host(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture(scope="session")
def intact(tmp_path_factory):
    """A folder of cubins as the build writes it, each image the text of its own name."""
    folder = tmp_path_factory.mktemp("intact") / "cubins"
    variants = targets.read_variants(OPERATIONS)
    jobs = [
        compiler.Job(operation, variant, b"", host, architecture)
        for operation, variant in variants
        for host, architectures in TARGETS.items()
        for architecture in architectures
    ]
    images = {job: image_text(job.variant, job.host, job.architecture) for job in jobs}
    pack.write_folder(folder, pack.pack(read_package(REPOSITORY), variants, TARGETS, images))
    return folder


@pytest.fixture
def cubins(intact, tmp_path):
    """A copy to damage."""
    return shutil.copytree(intact, tmp_path / "cubins")


@pytest.fixture
def backend(runtime, monkeypatch):
    # The manifest's entries straight from kernel_src.
    artifacts = InterpreterBackend(runtime, OPERATIONS).artifacts
    monkeypatch.setattr(runtime.launch, "backend", Recorder(artifacts))
    return runtime.launch.backend


@pytest.fixture
def gpu(runtime, monkeypatch):
    """torch.cuda of a machine with H200s. switched: the devices that were made current."""
    found = types.SimpleNamespace(capability=(9, 0), current=0, switched=[], synchronized=[])

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            found.switched.append(self.index)
            self.before, found.current = found.current, self.index

        def __exit__(self, *_):
            found.current = self.before

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: found.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronized.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(runtime.driver, "current_device", lambda: found.current)
    monkeypatch.setattr(runtime.driver, "raw_stream", lambda device: 7000 + device)
    return found


@pytest.fixture
def emptied(monkeypatch):
    """Counts how often torch gives back memory that it does not use."""
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    return calls
