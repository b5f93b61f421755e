"""The package for every dense family: what its rows make, and what the Hub finds of it."""

import importlib

import kernels
import pytest
import torch
from kernels import Mode

from tests.decoder_families import NAMES, SPARSE, tiny
from tests.models import random_tokens

TOKENS = random_tokens(2, 21)


def test_models_of_several_families_at_once(decoders):
    models = {name: tiny(name, attn_implementation="eager") for name in ("llama", "gemma3_text", "olmo2")}
    expected = {name: model(input_ids=TOKENS, labels=TOKENS).loss for name, model in models.items()}
    decoders.apply()
    for name, model in models.items():
        out = model(input_ids=TOKENS, labels=TOKENS)
        assert out.logits is None and torch.allclose(out.loss, expected[name], rtol=1e-5)
    decoders.reset()
    assert decoders.get_patched_ops() == []
    assert all(torch.equal(model(input_ids=TOKENS, labels=TOKENS).loss, expected[name]) for name, model in models.items())


@pytest.mark.parametrize("name", (*NAMES, *SPARSE))
def test_a_layer_that_the_hub_puts_in_place_rounds_as_the_family_does(request, name):
    """transformers gives OLMo's norms and Llama's one name on the Hub, though they round in another order."""
    model = tiny(name, torch.bfloat16, attn_implementation="eager").eval()
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    given = [torch.randn(3, norm.weight.shape[0], dtype=torch.bfloat16) * 3 for norm in norms]
    expected = [norm(x) for norm, x in zip(norms, given, strict=True)]
    package = request.getfixturevalue("moe" if name in SPARSE else "decoders")
    with kernels.use_kernel_mapping(package.mapping()):
        kernels.kernelize(model, mode=Mode.INFERENCE, device="cpu")
    ours = importlib.import_module(f"{package.__name__}.shared.hf.parts.modules").is_marked
    assert all(ours(getattr(norm.forward, "__func__", norm.forward)) for norm in norms)
    assert all(torch.equal(norm(x), y) for norm, x, y in zip(norms, given, expected, strict=True))


PAIRS = [(package, name) for package, names in (("decoders", NAMES), ("moe", SPARSE), ("liger", NAMES)) for name in names]


@pytest.mark.parametrize(("package", "name"), PAIRS)
def test_heads_that_the_hub_turns_keep_their_dtype(request, package, name):
    """The rotary function has one name on the Hub too, and OLMo's keeps the dtype of q and k where angles are fp32."""
    model = tiny(name, torch.bfloat16, attn_implementation="eager")
    expected = model(input_ids=TOKENS, labels=TOKENS).loss
    layers = request.getfixturevalue(package).mapping()
    rotary = {"rotary_pos_emb": layers["rotary_pos_emb"]}
    with kernels.use_kernel_mapping(rotary):
        kernels.kernelize(model, mode=Mode.TRAINING, device="cpu")
    assert torch.allclose(model(input_ids=TOKENS, labels=TOKENS).loss, expected, rtol=2e-2)
