"""The loss without logits of models whose forwards scale or cap their logits, or do something that no family's row says."""

import importlib
import math

import pytest
import torch
import transformers

from tests.models import Step, random_tokens, tiny_model
from tests.tolerances import assert_close

TOKENS = random_tokens(2, 9)
SIZES = {"vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {  # (scale, softcap) of the head by a model's name in transformers
    "Gemma2": ({"final_logit_softcapping": 0.5}, lambda model: (1.0, model.config.final_logit_softcapping)),
    "Granite": ({"logits_scaling": 0.3}, lambda model: (1 / model.config.logits_scaling, None)),
    "Cohere": ({"logit_scale": 3.7}, lambda model: (model.logit_scale, None)),
    "Llama": ({}, lambda model: (1.0, None)),
}


def hf(package, name):
    return importlib.import_module(f"{package.__name__}.shared.hf.{name}")


def model_of(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family][0]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    torch.nn.init.normal_(model.lm_head.weight, 0.0, 0.5)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_without_logits_scales_and_caps_as_the_forward_does(loaded, family):
    model = model_of(family)
    expected = Step(model, input_ids=TOKENS, labels=TOKENS)
    Head, forward = hf(loaded, "family.head").Head, hf(loaded, "model.causal_lm").causal_lm_forward
    head = Head(*FAMILIES[family][1](model))

    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.named_parameters = model.named_parameters

        def forward(self, **inputs):
            return forward(model, head, **inputs)

    found = Step(Fused(), input_ids=TOKENS, labels=TOKENS)
    assert found.output.logits is None
    found.assert_same(expected, 5)
    kept = forward(model, head, input_ids=TOKENS, labels=TOKENS, skip_logits=False)
    assert_close(kept.loss, expected.loss, torch.float32, "loss")
    assert kept.logits.shape == (2, 9, 199)
    if head.softcap is not None:
        with pytest.raises(ValueError, match="softcap is 7.0, expected none: this model caps its logits itself, at 0.5"):
            forward(model, head, input_ids=TOKENS, labels=TOKENS, softcap=7.0)


@pytest.mark.parametrize("family", ("Gemma2", "Granite", "Cohere"))
def test_a_forward_that_does_what_no_row_says_is_refused(loaded, family):
    model, Head = model_of(family), hf(loaded, "family.head").Head
    scale, softcap = FAMILIES[family][1](model)
    for wrong in (Head(), Head(scale, 31.0), Head(scale * 1.01, softcap)):
        with pytest.raises(RuntimeError, match="the model's forward makes Head.* of its logits, expected Head.*skip_logits=False"):
            hf(loaded, "model.causal_lm").causal_lm_forward(model, wrong, input_ids=TOKENS, labels=TOKENS)


@pytest.mark.parametrize("what", (
    lambda logits: logits.to(torch.bfloat16), lambda logits: logits + 1, lambda logits: 1 / logits, lambda logits: logits[..., :5],
    lambda logits: torch.relu(logits), lambda logits: logits.tanh().tanh(), lambda logits: logits * torch.tensor(2.0),
    lambda logits: torch.mul(logits, 2, out=None), lambda logits: logits.shape, lambda logits: torch.zeros(2, 9, 64),
))
def test_nothing_else_happens_to_logits_that_are_not_made(qwen3, monkeypatch, what):
    model = tiny_model()
    qwen3.apply()
    head = hf(qwen3, "model.causal_lm")._OnTheWay
    call = head.__call__
    monkeypatch.setattr(head, "__call__", lambda self, hidden: what(call(self, hidden)))
    with pytest.raises((RuntimeError, TypeError)):
        model(input_ids=TOKENS, labels=TOKENS)


def test_a_forward_that_computes_its_loss_elsewhere_is_refused(qwen3, monkeypatch):
    model = tiny_model()
    qwen3.apply()
    headless = hf(qwen3, "model.causal_lm")._Headless
    monkeypatch.setattr(headless, "loss_function", lambda self, **kwargs: torch.zeros(()))
    with pytest.raises(RuntimeError, match="Qwen3ForCausalLM.forward calls no self.loss_function"):
        model(input_ids=TOKENS, labels=TOKENS)


def test_what_was_done_is_read_in_every_form(loaded):
    unmade = hf(loaded, "family.head").Unmade(torch.zeros(1))
    for made, scale, softcap in (
        (unmade, 1, None),
        (2 * unmade / 3, 2 / 3, None),
        (torch.tanh(unmade / 30.0) * 30.0, 1, 30),
        (torch.mul(torch.tanh(torch.div(unmade * 2, 30.0)), 30.0), 2, 30),
        ((unmade * 0.5).tanh() * 4, 2, 4),
        ((unmade.float() / 49.0).to(torch.float32).tanh().contiguous() * 49.0, 1, 49),
    ):
        assert math.isclose(made.done.scale, scale) and made.done.softcap == softcap
        assert scale != 1 or made.done.scale == 1
