"""The families whose passes are captured, with graphs on the CPU."""

import functools
import importlib
import warnings

import pytest

from tests.capturing import QWEN3, Rerun, id_of, stand_in
from tests.decoder_families import TRAINED, Trained, tiny
from tests.models import tiny_gpt_oss, tiny_qwen3_5

# Families whose layers read more than the others' do: the positions of tokens, and the bounds of documents.
CAPTURED = {
    **TRAINED,
    "ministral3": Trained("decoders", "packages/decoders", functools.partial(tiny, "ministral3")),
    "gpt_oss": Trained("gpt_oss", "packages/gpt-oss", tiny_gpt_oss),
    "qwen3_5": Trained("qwen3_5", "packages/qwen3_5", tiny_qwen3_5),
}


@pytest.fixture(params=(*QWEN3, ("llama", 2), ("qwen2", 1)), ids=id_of)
def family(request):
    """The name of a family, and how many layers share a graph."""
    return request.param


@pytest.fixture
def tiny_model(family):
    """A function that makes a small model of the family."""
    return CAPTURED[family[0]].tiny


@pytest.fixture
def package(family, monkeypatch, request):
    """The package that serves the family, with graphs on the CPU."""
    name, together = family
    loaded = request.getfixturevalue(CAPTURED[name].package)
    module = stand_in(loaded, monkeypatch)
    monkeypatch.setattr(importlib.import_module(f"{loaded.__name__}.shared.hf.capture.captured_passes"), "TOGETHER", together)
    monkeypatch.setattr(module, "memory_of", lambda device: 4)
    monkeypatch.setattr(Rerun, "together", together)
    Rerun.replays = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield loaded


@pytest.fixture
def adapted(package, tiny_model):
    """A captured model with adapters, and the causal LM in it."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(package.kernelize(tiny_model()), peft.LoraConfig(r=2, target_modules="all-linear")).train()
    package.capture(model)
    return model, model.get_base_model()
