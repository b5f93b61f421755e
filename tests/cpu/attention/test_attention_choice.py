"""Which models get our attention, which keep theirs, and what is given back."""

import copy
import pickle

import pytest
import torch
import transformers
import transformers.modeling_utils  # its table is what register_attention looks for
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from tests.attention_batches import (
    assert_same,
    documents,
    module_of,
    packed,
    padded,
    step,
)
from tests.integrations.common import clear_choices
from tests.integrations.inference import batched
from tests.models import tiny_model


def half(**changes):
    return tiny_model(torch.bfloat16, head_dim=64, num_attention_heads=2, num_key_value_heads=1, **changes)


@pytest.mark.parametrize("how", ("apply", "kernelize"))
def test_a_model_whose_kernels_run_gets_it(kernels, how):
    model, plain = half(), half()
    expected = step(plain.float(), packed())
    kernels.apply() if how == "apply" else kernels.kernelize(model)
    for _ in range(2):
        found = step(model, packed())
    assert "attention_forward" in " ".join(kernels.launched) and "attention_backward_dkv" in " ".join(kernels.launched)
    assert sum("attention_plan" in name for name in kernels.launched) == 2, "one plan a batch"
    assert model.model.config._attn_implementation == "bastile" and model.config._attn_implementation == "sdpa"
    for name, gradient in found[1].items():
        error = (gradient.float() - expected[1][name]).norm() / expected[1][name].norm()
        assert error < 0.05, f"{name}: {error:.1e}"
    kernels.reset()
    assert model.model.config is model.config and "bastile" not in ALL_MASK_ATTENTION_FUNCTIONS


@pytest.mark.parametrize("kept", ("eager", "off", "off for one", "head_dim"))
def test_a_model_that_keeps_its_attention(kernels, kept):
    model = tiny_model(torch.bfloat16) if kept == "head_dim" else half()
    if kept == "eager":
        model.set_attn_implementation("eager")
    if kept == "off for one":
        kernels.kernelize(model, attention=False)
    else:
        kernels.apply(attention=kept != "off")
    before = model.config._attn_implementation
    step(model, packed())
    assert model.model.config._attn_implementation == before
    assert not any("attention" in name for name in kernels.launched)


@pytest.mark.parametrize("family", ("qwen3", "sliding", "gpt_oss", "gemma3_text", "gemma2", "phi3", "olmo3"))
def test_a_model_has_it_again_after_continuous_batching(chosen, family):
    """Which sets another one for families without SDPA, and afterwards what the configuration said before."""
    package, build = chosen(family)
    model = clear_choices(build())
    expected, before = batched(model, prompts=(20, 3, 5)), model.config._attn_implementation
    package.kernelize(model)
    for _ in range(2):
        model(input_ids=packed()["input_ids"])
        assert model.model.config._attn_implementation == "bastile"
        assert batched(model, prompts=(20, 3, 5)) == expected and model.config._attn_implementation == before
    model.set_attn_implementation("eager")  # a choice of the user's, which continuous batching gives back, too
    assert batched(model, prompts=(20, 3, 5)) == expected
    model(input_ids=packed()["input_ids"])
    assert model.model.config._attn_implementation == "eager"


def test_switching_it_off_gives_models_their_attention_back(kernels):
    model = half()
    kernels.apply()
    step(model, packed())
    assert model.model.config._attn_implementation == "bastile"
    kernels.apply(attention=False)
    assert model.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("batch", (packed(), padded("right"), padded("left")), ids=("packed", "right", "left"))
def test_a_model_that_caps_its_scores_keeps_them_where_ours_was_asked_for_by_name(chosen, batch):
    package, make = chosen("gemma2")
    model = make()
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    expected = step(model, batch, seen)
    package.apply()
    model.set_attn_implementation("bastile")
    assert_same(step(model, batch, seen), expected)
    labels = {"labels": batch["input_ids"].masked_fill(~seen, -100)}
    loss = model(**batch, **labels, use_cache=False).loss
    package.reset()
    torch.testing.assert_close(loss, model(**batch, **labels, use_cache=False).loss)


def test_the_choice_leaves_the_users_configuration_alone(chosen):
    package, make = chosen("qwen3")
    package.apply()
    model, ids = make(), torch.stack(documents(lengths=(5, 5)))
    model(ids)
    ours = model.model.config
    assert ours._attn_implementation == model.model.layers[0].self_attn.config._attn_implementation == "bastile"
    assert model.config._attn_implementation == "sdpa" and isinstance(ours, type(model.config)) and ours == model.config
    model.config.use_cache = False
    assert ours.use_cache is False and ours.to_dict() == model.config.to_dict() and repr(ours) == repr(model.config)
    for copied in (copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), type(ours).from_dict(ours.to_dict())):
        assert copied._attn_implementation in ("sdpa", None) and copied.to_dict() == model.config.to_dict()
        assert type(copy.deepcopy(copied)) is type(model.config)
    twin = copy.deepcopy(model)
    assert twin.config is twin.model.config is twin.model.layers[0].self_attn.config
    later, made = copy.deepcopy(ours), type(model)(ours)
    package.reset()
    for each in (model, twin, made, type(model)(later)):
        each(ids)
        assert each.config._attn_implementation == "sdpa" and type(each.model.config) is type(model.config)


def test_a_model_that_asks_for_it_by_name_survives_reset(qwen3):
    model, batch = tiny_model(), packed()
    qwen3.apply()
    model.set_attn_implementation("bastile")
    expected = step(model, batch)
    qwen3.reset()
    assert_same(step(model, batch), expected, bound=1e-5)
    model.set_attn_implementation("sdpa")
    qwen3.apply()
    qwen3.reset()
    assert "bastile" not in ALL_MASK_ATTENTION_FUNCTIONS


@pytest.mark.parametrize("name", ("sdpa", "eager"))
@pytest.mark.parametrize("when", ("loading", "after apply", "made before apply", "after kernelize", "after a step"))
@pytest.mark.parametrize("family", ("qwen3", "gpt_oss"))
def test_an_implementation_that_was_asked_for_by_name_is_kept(chosen, family, when, name, tmp_path):
    if (family, name) == ("gpt_oss", "sdpa"):
        pytest.skip("GPT-OSS has no SDPA in transformers")
    package, make = chosen(family)
    make().save_pretrained(tmp_path)
    cls, ids = type(make()), torch.stack(documents(lengths=(5, 5)))
    package.apply() if when not in ("made before apply", "after kernelize") else None
    model = cls.from_pretrained(tmp_path, **({"attn_implementation": name} if when == "loading" else {}))
    package.apply() if when == "made before apply" else None
    if when == "after kernelize":
        package.kernelize(model)
    if when == "after a step":
        model(ids)
    if when != "loading":
        model.set_attn_implementation(name)
    for _ in range(2):
        model(ids)
        assert model.model.config._attn_implementation == name
    package.kernelize(model)
    model(ids)
    assert model.model.config._attn_implementation == name
    other = cls.from_pretrained(tmp_path)
    package.apply()
    other(ids)
    assert other.model.config._attn_implementation == "bastile"


@pytest.mark.parametrize("named", (False, True))
@pytest.mark.parametrize("made", ("of the configuration", "of a copy", "copied"))
@pytest.mark.parametrize("family", ("qwen3", "gpt_oss"))
def test_what_is_made_of_a_model_was_asked_for_by_name_where_that_was(chosen, family, made, named):
    """The name that a configuration has by then is equal to the one that transformers chooses."""
    package, make = chosen(family)
    package.apply()
    model, ids = make(attn_implementation=None), torch.stack(documents(lengths=(5, 5)))
    default = {"qwen3": "sdpa", "gpt_oss": "eager"}[family]
    if named:
        model.set_attn_implementation(default)
    ways = {
        "of the configuration": lambda: type(model)(model.config),
        "of a copy": lambda: type(model)(copy.deepcopy(model.config)),
        "copied": lambda: copy.deepcopy(model),
    }
    other = ways[made]()
    for each in (other, model):
        each(ids)
        assert each.model.config._attn_implementation == (default if named else "bastile")
        assert each.config._attn_implementation == default


def test_packages_agree_on_what_nobody_asked_for(chosen, other_build, monkeypatch):
    package, make = chosen("qwen3")
    for name in ("kernels_run_on", "takes_heads"):
        monkeypatch.setattr(module_of(other_build, "attention_choice"), name, lambda *tensors, **options: True)
    package.apply()
    model, ids = make(), torch.stack(documents(lengths=(5, 5)))
    other_build.apply()
    between = type(model)(copy.deepcopy(model.config))
    package.reset()
    other_build.apply()
    for each in (model, between, type(model)(copy.deepcopy(between.config))):
        each(ids)
        assert each.model.config._attn_implementation == "bastile"


@pytest.mark.parametrize("changed", ("query", "key", "value"))
def test_an_attention_function_that_changes_its_inputs_is_right_or_refused(qwen3, changed, monkeypatch):
    """q, k and v of a fused layer are views of what it has made, and PyTorch refuses to change these in place."""
    def custom(module, query, key, value, mask, **kwargs):
        {"query": query, "key": key, "value": value}[changed].mul_(1.5)
        return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    for interface, function in ((transformers.AttentionInterface, custom), (AttentionMaskInterface, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])):
        monkeypatch.setitem(interface._global_mapping, "custom", function)
    model, ids = tiny_model(attn_implementation="custom"), torch.stack(documents(lengths=(9, 9)))
    expected = step(model, {"input_ids": ids})
    qwen3.apply()
    try:
        found = step(model, {"input_ids": ids})
    except RuntimeError as error:
        assert "modified inplace" in str(error)
    else:
        assert_same(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected[0], rtol=1e-5, atol=1e-5)


def test_a_model_that_was_given_it_compiles(chosen):
    package, make = chosen("qwen3")
    package.apply()
    model = make()
    expected = step(model, packed())
    assert model.model.config._attn_implementation == "bastile"
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    assert_same(step(model, packed()), expected)


def test_older_transformers_may_note_that_they_set_it(chosen):
    """Up to 5.20 they leave an attribute on a configuration that they have set, and set it no second time."""
    package, make = chosen("qwen3")
    package.apply()
    model = make()
    model.model.config._attn_was_changed = True
    assert not hasattr(model.model.config, "_attn_was_changed") and "_attn_was_changed" not in model.config.to_dict()


def test_a_layer_that_was_copied_or_exchanged_is_told(chosen):
    package, make = chosen("qwen3")
    package.apply()
    model = make()
    step(model, packed())
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    model.config.num_hidden_layers += 1
    model.config.layer_types.append("full_attention")
    step(model, packed())
    assert all(layer.self_attn.config is model.model.config for layer in model.model.layers)
    model.model.layers[1].self_attn.config = type(model.config)(**{**model.config.to_dict(), "attn_implementation": "eager"})
    step(model, packed())
    assert model.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("last", (0, 1))
def test_two_packages_take_the_choice_back_in_any_order(qwen3, other_build, last):
    tables = [interface._global_mapping for interface in (AttentionInterface, AttentionMaskInterface)]
    packages = [qwen3, other_build]
    for package in packages:
        package.apply()
    packages.pop(last).reset()
    (left,) = packages
    assert {table["bastile"].__module__.partition(".")[0] for table in tables} == {left.__name__}
    left.reset()
    assert not any("bastile" in table for table in tables)
