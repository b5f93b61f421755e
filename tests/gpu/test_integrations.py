"""The libraries that people train and run Qwen3 with, on a GPU."""

import pytest

from tests.integrations.adapters import *  # noqa: F403
from tests.integrations.device_maps import *  # noqa: F403
from tests.integrations.inference import *  # noqa: F403
from tests.integrations.trainers import *  # noqa: F403


@pytest.fixture
def qwen3(ops):
    yield ops
    ops.reset()


@pytest.fixture
def device():
    return "cuda"
