"""tests/gpu run the built CUDA variant (build/torch-cuda) on whatever GPU is there, and are skipped where there is none."""

import importlib
import os
from pathlib import Path

import pytest
import torch

from tests.modes import new_memory_is_nan
from tests.ops.suite import in_order, suite

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "ops", "qwen3_5", "liger", "gpt_oss", "decoders", "moe"  # the fixtures of all

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # What is expected is computed on the CPU: 15 processes with a thread for each of 16 cores took five times as long as with one each.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // int(workers), 1)))  # of the processes that tests start
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


def load(folder: Path):
    """A package from its build/torch-cuda; anything that keeps its kernels from running is an error."""
    from kernels import get_local_kernel

    os.environ["BASTILE_STRICT"] = "1"
    return get_local_kernel(folder, backend="cuda")


def launch_of(package):
    return importlib.import_module(f"{package.__name__}.shared.runtime.launch")


def loaded_once(name: str, folder: str):
    """The fixture of a package of this repository. folder: of its build.toml."""
    return pytest.fixture(scope="session", name=name)(lambda: load(ROOT / folder))


loaded_ops = loaded_once("ops", ".")
loaded_liger = loaded_once("liger", "packages/liger")
loaded_decoders = loaded_once("decoders", "packages/decoders")
loaded_moe = loaded_once("moe", "packages/moe")
loaded_qwen3_5 = loaded_once("qwen3_5", "packages/qwen3_5")


@pytest.fixture
def qwen3(ops):
    """Qwen3's package. Whatever a test patches is put back."""
    yield ops
    ops.reset()


@pytest.fixture
def suite_ops(request, liger, ops):
    """Its operations by name, and those of a head, whose kernels have no room in it."""
    name = request.node.callspec.params.get("name", "") if hasattr(request.node, "callspec") else ""
    return suite(*in_order(name, [liger, ops], lambda package, kernel: launch_of(package).ships(kernel)))


@pytest.fixture
def device():
    """Where the tests that run elsewhere too put their tensors and models."""
    return "cuda"


@pytest.fixture
def gpu():
    """The interpreter's tests choose one."""


@pytest.fixture
def launched():
    """What the interpreter's tests are told of the kernels that ran (tests.numerics)."""
    return lambda names, among=None: []


@pytest.fixture
def poisoned():
    with new_memory_is_nan():
        yield


@pytest.fixture
def gpt_oss():
    """The package for GPT-OSS. Whatever a test patches is put back."""
    package = load(ROOT / "packages" / "gpt-oss")
    yield package
    package.reset()
