"""The package of all dense families, and which of its nodes a model runs in."""

import importlib

import pytest

from tests.cpu.conftest import kernels_of

KERNELS = {"rms_norm_any_forward", "rotary_any"}  # what every test of a layer launches
BLOCKS = {"swiglu_any_forward", "expert_order"}  # and one of these


@pytest.fixture
def package(decoders, interpret, request):
    """The package of all these families, in PyTorch or, where a test asks for it, in interpreted kernels."""
    if not getattr(request, "param", False):
        return (yield decoders)
    backend = interpret(decoders, kernels_of("packages/decoders"))
    yield decoders
    launched = {variant.split("-")[0] for variant in backend.launched}
    assert launched >= KERNELS and launched & BLOCKS, launched


@pytest.fixture
def calls(package, monkeypatch):
    """The names of the decoder layer's nodes, as they are called."""
    found, layer = [], importlib.import_module(f"{package.__name__}.shared.hf.layer.decoder_layer")
    for name in ("norm_attention_inputs", "norm_mlp", "norm_experts"):
        original = getattr(layer, name)
        monkeypatch.setattr(layer, name, lambda *a, name=name, original=original: found.append(name) or original(*a))
    return found
