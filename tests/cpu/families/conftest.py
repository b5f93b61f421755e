"""The packages of all these families, and which of their nodes a model runs in."""

import importlib

import pytest

from tests.cpu.conftest import kernels_of
from tests.decoder_families import SPARSE

KERNELS = "rms_norm", "rotary", "swiglu"  # what every test of a layer launches some of
# Norms of heads of 12, or 6 elements of a head that are turned, for which there is no kernel; MLPs without a gate; LayerNorms.
WITHOUT = {"mellum": {"rotary"}, "arcee": {"swiglu"}, "starcoder2": {"swiglu", "rms_norm"}, "nemotron": {*KERNELS}}
INSTEAD = dict.fromkeys(("starcoder2", "nemotron"), {"layer_norm"})


@pytest.fixture
def package(interpret, request):
    """The package of a test's family, in PyTorch or, where a test asks for it, in interpreted kernels."""
    sparse = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name") in SPARSE
    folder = "packages/moe" if sparse else "packages/decoders"
    found = request.getfixturevalue(folder.rpartition("/")[2])
    if not getattr(request, "param", False):
        return (yield found)
    backend = interpret(found, kernels_of(folder))
    yield found
    launched = {variant.split("-")[0] for variant in backend.launched}
    name = request.node.callspec.params["name"]
    expected = {*KERNELS, *INSTEAD.get(name, ())} - WITHOUT.get(name, set())
    assert all(any(kind in name for name in launched) for kind in expected), sorted(launched)


@pytest.fixture
def calls(package, monkeypatch):
    """The names of the decoder layer's nodes, as they are called."""
    found, layer = [], importlib.import_module(f"{package.__name__}.shared.hf.layer.decoder_layer")
    for name in ("norm_attention_inputs", "norm_mlp", "norm_experts"):
        original = getattr(layer, name)
        monkeypatch.setattr(layer, name, lambda *a, name=name, original=original: found.append(name) or original(*a))
    return found
