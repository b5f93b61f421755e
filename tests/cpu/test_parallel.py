"""Two processes on the CPU, with gloo."""

import pytest

from tests.integrations.parallel import *  # noqa: F403
from tests.integrations.parallel_qwen3_moe import *  # noqa: F403
from tests.integrations.ranks import Ranks


@pytest.fixture(scope="session")
def device_type():
    return "cpu"


@pytest.fixture(scope="session")
def ranks(package_folder):
    found = Ranks("cpu", package_folder)
    yield found
    found.close()
