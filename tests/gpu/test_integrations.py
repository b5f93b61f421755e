"""The libraries that people train and run Qwen3 with, on a GPU."""

import pytest
import torch

from tests.integrations.adapters import *  # noqa: F403
from tests.integrations.decoders import *  # noqa: F403
from tests.integrations.device_maps import *  # noqa: F403
from tests.integrations.eight_bit_weights import *  # noqa: F403
from tests.integrations.inference import *  # noqa: F403
from tests.integrations.lora import *  # noqa: F403
from tests.integrations.preference import *  # noqa: F403
from tests.integrations.qwen3_moe import *  # noqa: F403
from tests.integrations.trainers import *  # noqa: F403


@pytest.fixture
def decoders(decoders):
    yield decoders
    decoders.reset()


@pytest.mark.integration("generate: static cache, compiled as transformers does it by default", on="cuda")
def test_compiled_static_cache(qwen3):
    expected, _ = generated(model_for_inference("cuda"), "cuda")  # noqa: F405
    model = install(qwen3, model_for_inference("cuda"))  # noqa: F405
    tokens, _ = generated(model, "cuda", cache_implementation="static", disable_compile=False)  # noqa: F405
    assert torch.equal(tokens, expected)
