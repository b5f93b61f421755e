"""Two packages that have layers for the same family, Qwen3: neither takes away what the other was told, nor takes its layers off."""

import warnings

import pytest
import torch

from tests.decoder_families import tiny
from tests.models import Step, random_tokens, tiny_model

TOKENS = random_tokens(2, 16)
OPTIONS = {"fused_linear_cross_entropy": {"label_smoothing": 0.3}, "keep_attention": True, "rope": False}


def loss(model):
    return model(input_ids=TOKENS, labels=TOKENS).loss.item()


def test_a_family_that_another_package_serves_is_left_alone_with_a_warning(qwen3, decoders):
    model, llama = tiny_model(), tiny("llama")
    plain, expected = loss(model), Step(llama, input_ids=TOKENS, labels=TOKENS)
    qwen3.apply(**OPTIONS)
    told, on = loss(model), qwen3.get_patched_ops()
    with pytest.warns(RuntimeWarning, match=f"Qwen3 is served by the package {qwen3.__name__} already.*call reset") as caught:
        decoders.apply()
    assert len([each for each in caught if "is served by" in str(each.message)]) == 1
    assert loss(model) == told != plain and qwen3.get_patched_ops() == on
    Step(llama, input_ids=TOKENS, labels=TOKENS).assert_same(expected)
    assert llama(input_ids=TOKENS, labels=TOKENS).logits is None
    decoders.reset()
    assert loss(model) == told and qwen3.get_patched_ops() == on
    assert llama(input_ids=TOKENS, labels=TOKENS).logits is not None
    qwen3.reset()
    assert loss(model) == plain
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoders.apply()
    assert model(input_ids=TOKENS, labels=TOKENS).logits is None


@pytest.mark.parametrize("call", ("apply", "reset", "apply and reset"))
def test_what_another_package_gave_one_model_stays_there(qwen3, decoders, call):
    model = tiny_model()
    expected = Step(model, input_ids=TOKENS, labels=TOKENS)
    qwen3.kernelize(model, keep_attention=True, recompute_mlp=True)
    layer = model.model.layers[0]
    before = {name: value for module in model.modules() for name, value in vars(module).items() if "_bastile_" in name or name == "forward"}
    forwards = [vars(module).get("forward") for module in model.modules()]
    if "apply" in call:
        decoders.apply()
    if "reset" in call:
        decoders.reset()
    assert [vars(module).get("forward") for module in model.modules()] == forwards and before.keys() <= {
        name for module in model.modules() for name in vars(module)
    }
    assert vars(layer)["_bastile_keeps_attention"] is True
    found = Step(model, input_ids=TOKENS, labels=TOKENS)
    found.assert_same(expected)
    qwen3.reset()
    decoders.reset()
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(Step(model, input_ids=TOKENS, labels=TOKENS).loss, expected.loss)


def test_kernelize_of_the_other_package_takes_a_model_over_and_gives_it_back(qwen3, decoders):
    """It was asked for by name."""
    model, other = tiny_model(), tiny_model()
    plain = loss(model)
    qwen3.apply(**OPTIONS)
    told = loss(other)
    decoders.kernelize(model)
    assert loss(other) == told
    decoders.reset()
    assert loss(model) == loss(other) == told
    qwen3.reset()
    assert loss(model) == loss(other) == plain
