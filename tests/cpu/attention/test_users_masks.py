"""A function of the user's that makes a model's masks, in the place of transformers' own, is asked for them, and obeyed."""

import functools
import sys

import pytest
import torch
from transformers import masking_utils

from tests.attention_batches import DECODERS, FAMILIES, assert_same, documents, padded, step
from tests.decoder_families import WINDOW, tiny
from tests.models import tiny_qwen3_5

NAMES = "create_causal_mask", "create_sliding_window_causal_mask"
OTHERS = {"llama": functools.partial(tiny, "llama", head_dim=64), "mistral": functools.partial(tiny, "mistral", head_dim=64, **WINDOW)}


def both_ways(own, config, inputs_embeds, attention_mask=None, **kwargs):
    """As LLM2Vec and models of diffusion have it: padding aside, every token sees every other one."""
    batch, tokens = inputs_embeds.shape[:2]
    seen = torch.ones(batch, 1, tokens, tokens, dtype=torch.bool)
    return seen if attention_mask is None else seen & attention_mask.bool()[:, None, None, :]


def as_numbers(own, config, inputs_embeds, **kwargs):
    return (~both_ways(own, config, inputs_embeds, **kwargs)).float() * -1e9


def with_prefix(own, config, inputs_embeds, attention_mask=None, **kwargs):
    """Changes the mask that transformers' function returns: the first tokens are seen by all."""
    made = own(config, inputs_embeds, attention_mask, **{**kwargs, "allow_is_causal_skip": False}).clone()
    made[..., :3] = True if made.dtype == torch.bool else 0
    return made


def with_rule(own, config, inputs_embeds, attention_mask=None, **kwargs):
    """Gives transformers' function another rule to begin with."""
    return own(config, inputs_embeds, attention_mask, **{**kwargs, "or_mask_function": lambda batch, head, query, key: key < 3})


USERS = {"both ways": both_ways, "numbers": as_numbers, "prefix": with_prefix, "rule": with_rule}


def put(monkeypatch, model, function, names=NAMES):
    """Puts a user's function into the module of transformers that has the model's decoder. Returns what it was called with."""
    modeling, calls = sys.modules[type(model.model).__module__], []
    for name in names:
        if hasattr(modeling, name):
            own = getattr(masking_utils, name)
            use = lambda *args, own=own, **kwargs: calls.append(kwargs) or function(own, *args, **kwargs)  # noqa: E731
            monkeypatch.setattr(modeling, name, use)
    return calls


def model_of(chosen, family):
    """(package, model): of a family that the fixture knows, or of another one."""
    if family not in OTHERS:
        package, make = chosen(family)
        return package, make()
    package, _ = chosen(DECODERS[0])
    return package, OTHERS[family](attn_implementation=None)


def loss_and_gradients(model, batch):
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


BATCHES = {"rows": {"input_ids": torch.stack(documents(lengths=(17, 17)))}, "padded": padded("right")}


@pytest.mark.parametrize("family", (*FAMILIES, "gemma2", "gemma3_text", *OTHERS))
@pytest.mark.parametrize(("user", "batch"), (*((user, "rows") for user in USERS), ("both ways", "padded"), ("prefix", "padded")))
@pytest.mark.parametrize("how", ("chosen", "named", "put later"))
def test_the_users_masks_are_obeyed(chosen, monkeypatch, family, user, batch, how):
    package, model = model_of(chosen, family)
    eager = how == "named" and family in ("gpt_oss", "gemma2")  # the one that has sinks or caps scores
    if eager and user == "both ways":
        pytest.skip("transformers' eager attention takes a mask of numbers alone")
    batch = BATCHES[batch]
    batch = {**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)}
    causal = loss_and_gradients(model, batch)
    with monkeypatch.context() as patched:
        put(patched, model, USERS[user])
        if eager:
            model.set_attn_implementation("eager")
        expected = loss_and_gradients(model, batch)
    if how == "put later":
        package.kernelize(model)
        loss_and_gradients(model, batch)
        assert model.model.config._attn_implementation == "bastile"
    with monkeypatch.context() as patched:
        calls = put(patched, model, USERS[user])
        package.kernelize(model)
        if how == "named":
            model.set_attn_implementation("bastile")
        found = loss_and_gradients(model, batch)
    assert calls and not torch.allclose(expected[0], causal[0], rtol=1e-5)
    assert_same(found, expected, bound=1e-4)


@pytest.mark.parametrize("family", (*FAMILIES, "gemma3_text", "llama"))
@pytest.mark.parametrize("user", ("both ways", "rule"))
@pytest.mark.parametrize("how", ("sdpa", "bastile"))
def test_the_users_masks_are_obeyed_in_a_graph(chosen, monkeypatch, family, user, how):
    if family == "gpt_oss" and (how == "sdpa" or user == "both ways"):
        pytest.skip("it has no SDPA, and its eager attention takes a mask of numbers alone")
    package, model = model_of(chosen, family)
    put(monkeypatch, model, USERS[user])
    expected = step(model, BATCHES["rows"])
    package.kernelize(model, attention=False)
    model.set_attn_implementation(how)
    torch._dynamo.reset()
    model.compile(backend="eager")
    assert_same(step(model, BATCHES["rows"]), expected, bound=1e-4)


def test_one_mask_of_two_is_the_users(chosen, monkeypatch):
    package, make = chosen("gemma3_text")
    model = make(layer_types=["sliding_attention", "full_attention"], sliding_window=5)
    put(monkeypatch, model, both_ways, NAMES[1:])
    expected = step(model, BATCHES["rows"])
    package.kernelize(model)
    assert_same(step(model, BATCHES["rows"]), expected)


@pytest.mark.parametrize("user", USERS)
def test_beside_delta_nets(qwen3_5, monkeypatch, user):
    model = tiny_qwen3_5()
    put(monkeypatch, model, USERS[user])
    expected = step(model, BATCHES["rows"])
    qwen3_5.kernelize(model)
    model.set_attn_implementation("bastile")
    assert_same(step(model, BATCHES["rows"]), expected)


def test_attention_is_chosen_again_when_the_masks_are_transformers_own(chosen, monkeypatch):
    package, make = chosen("qwen3")
    model = package.kernelize(make())
    for users in (False, True, False):
        with monkeypatch.context() as patched:
            if users:
                put(patched, model, both_ways)
            step(model, BATCHES["rows"])
        assert model.model.config._attn_implementation == ("sdpa" if users else "bastile")


def test_explain_says_whose_masks_there_are(kernels, monkeypatch):
    model = kernels.kernelize(FAMILIES["qwen3"](head_dim=64))
    reasons = lambda: [row.reason for row in kernels.explain(model).rows if row.part == "attention"]  # noqa: E731
    assert not reasons()
    put(monkeypatch, model, both_ways)
    assert [("modeling_qwen3" in reason) for reason in reasons()] == [True]
