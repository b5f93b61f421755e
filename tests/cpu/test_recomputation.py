"""Gradient checkpointing of transformers: layers run again as often as in plain transformers, and the hooks on them do not."""

import functools
import sys
import warnings

import kernels
import pytest
import torch
from kernels import Mode

from tests.models import random_tokens, tiny_gpt_oss, tiny_model, tiny_qwen3_moe
from tests.modes import Operators
from tests.versions import WRAPS_FORWARDS, forward_of, set_checkpointing

IDS = random_tokens(2, 9)
LAYERS = 3
FAMILIES = {
    "qwen3": ("qwen3", tiny_model),
    "qwen3_moe": ("qwen3", tiny_qwen3_moe),
    "gpt_oss": ("gpt_oss", tiny_gpt_oss),
}


def is_attention(operator, args):
    """Of the softmax of attention, one for each run of a layer. A router's is of two dimensions."""
    return operator is torch.ops.aten._softmax.default and args[0].dim() == 4


def put_on(package, model, how):
    if how in ("apply", "both"):
        package.apply()
    if how in ("kernelize", "both"):
        package.kernelize(model)
    if how == "hub":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # where transformers and `kernels` do not fit
            mapping = package.mapping()
        with kernels.use_kernel_mapping(mapping):
            kernels.kernelize(model, mode=Mode.TRAINING)
    return model


def model_of(make):
    return make(num_hidden_layers=LAYERS, attn_implementation="eager") if make is tiny_gpt_oss else eager(make(num_hidden_layers=LAYERS))


def eager(model):
    model.set_attn_implementation("eager")
    return model


def runs(model):
    """(how often layers ran in the forward pass, how often in all, the gradients)."""
    model.zero_grad()
    model.enable_input_require_grads()
    with Operators(is_attention) as attentions:
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        forward = attentions.count
        loss.backward()
    return forward, attentions.count, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
@pytest.mark.parametrize("how", ["nothing", "apply", "kernelize", "both", "hub", "apply, reset", "kernelize, reset"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_runs_twice(request, family, how, reentrant):
    fixture, make = FAMILIES[family]
    package, model = request.getfixturevalue(fixture), model_of(make)
    put_on(package, model, how.partition(",")[0])
    if how.endswith("reset"):
        package.reset()
    *counts, expected = runs(model)
    assert counts == [LAYERS, LAYERS]
    set_checkpointing(model, use_reentrant=reentrant)
    *counts, found = runs(model)
    assert counts == [LAYERS, 2 * LAYERS]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    set_checkpointing(model, False)
    assert runs(model)[:2] == (LAYERS, LAYERS)
    set_checkpointing(model, use_reentrant=reentrant)
    model.eval()
    assert runs(model)[:2] == (LAYERS, LAYERS)


def subclass(layer):
    """Gives a layer a class made of its own, as FSDP2 does."""
    layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), {})


@pytest.mark.parametrize("how", ["apply", "kernelize", "both"])
@pytest.mark.parametrize("first", [True, False], ids=["sharded first", "sharded afterwards"])
def test_layers_of_a_class_made_of_theirs(qwen3, how, first):
    """A class that is made of another one gets a wrapper of its own, around what that one has at this moment."""
    fused = functools.partial(_fused, qwen3)
    model = model_of(tiny_model)
    for step in (subclass, None) if first else (None, subclass):
        if step is None:
            put_on(qwen3, model, how)
        else:
            for layer in model.model.layers:
                step(layer)
    set_checkpointing(model)
    assert runs(model)[:2] == (LAYERS, 2 * LAYERS) and fused(model) == LAYERS
    qwen3.reset()
    assert runs(model)[:2] == (LAYERS, 2 * LAYERS) and fused(model) == 0
    qwen3.apply()
    assert runs(model)[:2] == (LAYERS, 2 * LAYERS) and fused(model) == LAYERS
    assert not [row for row in qwen3.explain(model).rows if row.reason == "transformers' own forward"]


def _fused(qwen3, model):
    """How many decoder layers run fused."""
    decoder, found = sys.modules[f"{qwen3.__name__}.shared.hf.layer.decoder_layer"], []
    original = decoder.norm_attention_inputs
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(decoder, "norm_attention_inputs", lambda *args: found.append(1) or original(*args))
        model(input_ids=IDS, use_cache=False)
    return len(found)


@pytest.mark.parametrize("how", ["nothing", "apply", "kernelize"])
def test_hooks_run_as_often_as_without_us(qwen3, how):
    """From transformers 5.23 on, hooks on a layer are outside of the recomputation."""
    model, calls = put_on(qwen3, model_of(tiny_model), how), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append("before"))
        layer.register_forward_hook(lambda *_: calls.append("after"))
    set_checkpointing(model)
    runs(model)
    # Before 5.23 they are inside; the second run ends where all that it is for has been computed.
    assert [calls.count(name) for name in ("before", "after")] == [(1 if WRAPS_FORWARDS else 2) * LAYERS, LAYERS]


@pytest.mark.parametrize("how", ["nothing", "apply", "kernelize"])
def test_a_cache_is_left_out_with_transformers_own_warning(qwen3, how, caplog):
    from transformers import DynamicCache
    from transformers.utils import logging

    logging.get_logger("transformers").propagate = True
    model = put_on(qwen3, model_of(tiny_model), how)
    set_checkpointing(model)
    type(logging.get_logger()).warning_once.cache_clear()
    cache = DynamicCache(config=model.config)
    model(input_ids=IDS, labels=IDS, past_key_values=cache, use_cache=True).loss.backward()
    logging.get_logger("transformers").propagate = False
    assert cache.get_seq_length() == 0
    text = "Caching is incompatible with gradient checkpointing in Qwen3DecoderLayer. Setting"
    assert [r.getMessage() for r in caplog.records if text in r.getMessage()]


def test_reset_puts_the_forward_back_that_was_inside(qwen3):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    class Made(Qwen3DecoderLayer):
        pass

    classes = Qwen3DecoderLayer, Made
    before = [(vars(cls).get("forward"), cls.forward, forward_of(Qwen3DecoderLayer)) for cls in classes]
    qwen3.apply()
    assert forward_of(Qwen3DecoderLayer) is not before[0][2]
    qwen3.reset()
    assert [(vars(cls).get("forward"), cls.forward, forward_of(Qwen3DecoderLayer)) for cls in classes] == before


def test_no_future_warning_is_ours(qwen3):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        qwen3.apply(keep_attention=True, recompute_mlp=True)
        model = qwen3.kernelize(model_of(tiny_model), keep_attention=True)
        set_checkpointing(model)
        runs(model)
        qwen3.explain(model)
        qwen3.report()
        qwen3.reset()
