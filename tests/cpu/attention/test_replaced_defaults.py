"""What a user or a library puts in the place of a function that transformers' attention or its masks look up is called, and obeyed."""

import functools
import sys
import types

import pytest
import torch
from transformers import AttentionInterface, masking_utils
from transformers.integrations import sdpa_attention
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.attention_batches import assert_same, packed, padded, step
from tests.cpu.test_lookups import FunctionMode

EAGER = ("gpt_oss", "gemma2")  # whose default is not SDPA
SWEPT = ("qwen3", "sliding", "phi3", *EAGER)
BATCHES = {"packed": packed(), "padded": padded("right"), "rows": {"input_ids": packed()["input_ids"].view(2, 20)}}


def seen_of(batch):
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def halved(original):
    """An attention function that gives half of what another one gives."""

    def function(*args, **kwargs):
        output, weights = original(*args, **kwargs)
        return output * 0.5, weights

    return function


def narrowed(original):
    """A mask function by which each query sees at most itself and the token before it."""

    def function(*args, **kwargs):
        made = original(*args, **{**kwargs, "allow_is_causal_skip": False})
        near = torch.ones(made.shape[-2:], dtype=torch.bool).triu(-1)
        return made & near if made.dtype == torch.bool else made.masked_fill(~near, torch.finfo(made.dtype).min)

    return function


def in_table(table, change, model, default, patch):
    """Replaces an entry as DeepSpeed does: that of the table which all models share."""
    original = table.get(default) or sys.modules[type(model.model).__module__].eager_attention_forward
    patch.setitem(table._local_mapping, default, change(original))


def registered(interface, table, change, model, default, patch):
    original = table.get(default) or sys.modules[type(model.model).__module__].eager_attention_forward
    patch.setitem(interface._global_mapping, default, change(original))


def own_table(model, default, patch):
    modeling, table = sys.modules[type(model.model).__module__], AttentionInterface()
    table[default] = halved(ALL_ATTENTION_FUNCTIONS.get(default) or modeling.eager_attention_forward)
    patch.setattr(modeling, "ALL_ATTENTION_FUNCTIONS", table)


def under_the_table(model, default, patch):
    """Replaces the function that is called, as SageAttention's users do, or that of the model's module."""
    if default == "sdpa":
        original = torch.nn.functional.scaled_dot_product_attention
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: original(*args, **kwargs) * 0.5)
    else:
        modeling = sys.modules[type(model.model).__module__]
        patch.setattr(modeling, "eager_attention_forward", halved(modeling.eager_attention_forward))


def same_name(model, default, patch):
    """Replaces it by a function that looks like it."""
    if default == "sdpa":
        original = torch.nn.functional.scaled_dot_product_attention
        alike = functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs) * 0.5)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", alike)
    else:
        modeling = sys.modules[type(model.model).__module__]
        original = modeling.eager_attention_forward
        patch.setattr(modeling, "eager_attention_forward", functools.wraps(original)(halved(original)))


def causal(model, default, patch):
    """Replaces the rule of all causal masks: the first keys are seen by nobody but themselves."""
    patch.setattr(masking_utils, "causal_mask_function", lambda b, h, q, k: (k <= q) & ((k > 1) | (k == q)))


MASKS = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
WAYS = {
    "attention entry": functools.partial(in_table, ALL_ATTENTION_FUNCTIONS, halved),
    "attention registered": functools.partial(registered, AttentionInterface, ALL_ATTENTION_FUNCTIONS, halved),
    "mask entry": functools.partial(in_table, MASKS, narrowed),
    "mask registered": functools.partial(registered, AttentionMaskInterface, MASKS, narrowed),
    "the module's table": own_table,
    "below": under_the_table,
    "of the same name": same_name,
    "causal rule": causal,
}


def default_of(family):
    return "eager" if family in EAGER else "sdpa"


@pytest.mark.parametrize(("way", "batch"), (*((way, batch) for way in WAYS for batch in ("packed", "padded")), ("below", "rows")))
@pytest.mark.parametrize("family", SWEPT)
def test_a_function_in_the_place_of_the_default_is_obeyed(chosen, monkeypatch, family, way, batch):
    """It comes and goes while ours is in force."""
    (package, make), batch = chosen(family), BATCHES[batch]
    plain, model = make(), make()
    package.kernelize(model)
    before = step(model, batch, seen_of(batch))
    assert model.model.config._attn_implementation == "bastile"
    with monkeypatch.context() as patch:
        WAYS[way](model, default_of(family), patch)
        expected, found = step(plain, batch, seen_of(batch)), step(model, batch, seen_of(batch))
        assert model.model.config._attn_implementation == default_of(family)
        assert_same(found, expected, bound=1e-4)
        assert not torch.allclose(found[0], before[0], rtol=1e-2), "the function changes nothing"
    step(model, batch)
    assert model.model.config._attn_implementation == "bastile"


@pytest.mark.parametrize("batch", ("packed", "padded"))
@pytest.mark.parametrize("family", ("qwen3", "gemma2"))
def test_a_mode_that_changes_what_the_default_calls_is_obeyed(chosen, family, batch):
    (package, make), batch, default = chosen(family), BATCHES[batch], default_of(family)
    function = torch.nn.functional.softmax if default == "eager" else torch.nn.functional.scaled_dot_product_attention
    plain, model = make(), package.kernelize(make())
    with FunctionMode(function, []):
        expected, found = step(plain, batch, seen_of(batch)), step(model, batch, seen_of(batch))
        assert any("is in force, which attention" in row.reason for row in package.explain(model).rows)
    assert model.model.config._attn_implementation == default
    assert_same(found, expected, bound=1e-4)
    step(model, batch)
    assert model.model.config._attn_implementation == "bastile"


def labelled(batch):
    return {**batch, "labels": batch["input_ids"].masked_fill(~seen_of(batch), -100)}


def functions_of(module, *more):
    """The functions that a module of transformers defines, and more names there, by (module, name), but for rotary embeddings."""
    own = [name for name, value in vars(module).items() if type(value) is types.FunctionType and value.__module__ == module.__name__]
    return [(module, name) for name in (*own, *more) if "rota" not in name]


def called_by(model, batch, places):
    """Those of some functions that a training step's forward pass looks up and calls."""
    calls = set()
    with pytest.MonkeyPatch.context() as patch:
        for module, name in places:
            original = getattr(module, name)

            def spy(*args, original=original, place=(module.__name__, name), **kwargs):
                calls.add(place)
                return original(*args, **kwargs)

            patch.setattr(module, name, spy)
        model(**labelled(batch), use_cache=False)
    return calls


@pytest.mark.parametrize("batch", ("packed", "padded"))
@pytest.mark.parametrize("family", SWEPT)
def test_every_function_that_transformers_looks_up_for_attention_keeps_ours_away(chosen, family, batch):
    """One at a time: whatever transformers calls for its attention and its masks is called where a user has put another in its place."""
    (package, make), batch = chosen(family), BATCHES[batch]
    modeling, functional = sys.modules[type(make().model).__module__], torch.nn.functional
    below = functions_of(modeling, "create_causal_mask") if default_of(family) == "eager" else functions_of(sdpa_attention)
    of_torch = ("softmax", "dropout") if default_of(family) == "eager" else ("scaled_dot_product_attention",)
    places = [*functions_of(masking_utils), *below, *((functional, name) for name in of_torch)]
    called = called_by(make(), batch, places)
    model, bypassed = package.kernelize(make()), set()
    model(**labelled(batch), use_cache=False)
    assert model.model.config._attn_implementation == "bastile"
    for place in [(module, name) for module, name in places if (module.__name__, name) in called]:
        if not called_by(model, batch, [place]):
            bypassed.add(place[1])
    assert called and not bypassed


@pytest.mark.parametrize("family", SWEPT)
def test_a_configuration_of_a_user_s_class_is_asked_as_its_own_is(chosen, monkeypatch, family):
    (package, make), batch = chosen(family), BATCHES["packed"]
    plain, model = make(), make()
    for each in (plain, model):
        own = type(each.config)
        for module in each.modules():
            if type(vars(module).get("config")) is own:
                module.config.__class__ = type("OfAUser", (own,), {})
    package.kernelize(model)
    step(model, batch)
    assert model.model.config._attn_implementation == "bastile"
    under_the_table(model, default_of(family), monkeypatch)
    assert_same(step(model, batch, seen_of(batch)), step(plain, batch, seen_of(batch)), bound=1e-4)
    assert model.model.config._attn_implementation == default_of(family)


@pytest.mark.parametrize("family", SWEPT)
def test_a_mask_for_one_query_a_row_comes_from_the_function_that_was_replaced(chosen, monkeypatch, family):
    """As generate() asks for it, where the kind of a layer has no mask otherwise."""
    package, make = chosen(family)
    plain, model = make().eval(), make().eval()
    package.kernelize(model)
    ids = torch.arange(2, 22)[None]
    causal(model, default_of(family), monkeypatch)
    found = []
    for each in (plain, model):
        with torch.no_grad():
            first = each(input_ids=ids, use_cache=True)
            found.append(each(input_ids=ids[:, :1], past_key_values=first.past_key_values, use_cache=True).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
