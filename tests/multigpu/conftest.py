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


def folder_fixture(name: str, folder: str):
    """The fixture of the folder of a package's build.toml in this repository."""
    return pytest.fixture(scope="session", name=name)(lambda: ROOT / folder)


package_folder = folder_fixture("package_folder", ".")
decoders_folder = folder_fixture("decoders_folder", "packages/decoders")
gpt_oss_folder = folder_fixture("gpt_oss_folder", "packages/gpt-oss")
moe_folder = folder_fixture("moe_folder", "packages/moe")
qwen3_5_folder = folder_fixture("qwen3_5_folder", "packages/qwen3_5")


@pytest.fixture(scope="session")
def ranks():
    found = Ranks("cuda", ROOT)
    yield found
    found.close()
