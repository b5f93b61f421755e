"""tests/multigpu run the built CUDA variant (build/torch-cuda) on two GPUs, and are skipped where there are fewer."""

import os
from pathlib import Path

import pytest
import torch

from tests.integrations.ranks import WORLD, Ranks

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items):
    if torch.cuda.device_count() < WORLD:
        for item in items:
            if item.path.is_relative_to(ROOT / "tests/multigpu"):
                item.add_marker(pytest.mark.skip(reason=f"fewer than {WORLD} GPUs"))


@pytest.fixture
def qwen3():
    """The package; anything that keeps its kernels from running is an error. What a test patches is put back."""
    from kernels import get_local_kernel

    os.environ["BASTILE_STRICT"] = "1"
    loaded = get_local_kernel(ROOT, backend="cuda")
    yield loaded
    loaded.reset()


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture(scope="session")
def device_type():
    return "cuda"


@pytest.fixture(scope="session")
def package_folder():
    return ROOT


@pytest.fixture(scope="session")
def decoders_folder():
    return ROOT / "packages/decoders"


@pytest.fixture(scope="session")
def gpt_oss_folder():
    return ROOT / "packages/gpt-oss"


@pytest.fixture(scope="session")
def moe_folder():
    return ROOT / "packages/moe"


@pytest.fixture(scope="session")
def qwen3_5_folder():
    return ROOT / "packages/qwen3_5"


@pytest.fixture(scope="session")
def ranks():
    found = Ranks("cuda", ROOT)
    yield found
    found.close()
