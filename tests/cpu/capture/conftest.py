"""The families whose passes are captured, with graphs on the CPU."""

import importlib
import warnings

import pytest

from tests.capturing import QWEN3, Pool, Rerun, id_of
from tests.decoder_families import TRAINED


@pytest.fixture(params=(*QWEN3, ("llama", 2), ("qwen2", 1)), ids=id_of)
def family(request):
    """The name of a family, and how many layers share a graph."""
    return request.param


@pytest.fixture
def tiny_model(family):
    """A function that makes a small model of the family."""
    return TRAINED[family[0]].tiny


@pytest.fixture
def package(family, monkeypatch, request):
    """The package that serves the family, with graphs on the CPU."""
    name, together = family
    loaded = request.getfixturevalue(TRAINED[name].package)
    module = importlib.import_module(f"{loaded.__name__}.shared.hf.capture")
    monkeypatch.setattr(module, "TOGETHER", together)
    monkeypatch.setattr(Rerun, "together", together)
    monkeypatch.setattr(module, "GraphPool", Pool)
    monkeypatch.setattr(module, "can_record", lambda device: True)
    Rerun.replays = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield loaded
