"""Decoder layers that are put together in another way than those of a row: norms that are called, branches side by side, what is done to
the residual stream behind them, other arguments and results, layers of several kinds in one decoder. What is read runs with the same
results; what is not understood is left alone, with the line."""

import importlib

import pytest

from tests.cpu.test_recognised import FACTOR, LAYER, all_of, assert_same, fused, rows_of, said, step_of
from tests.own_file import source_of_other

NORMS = "self.first, self.second, self.third, self.fourth = (OtterScale(config.hidden_size, config.rms_norm_eps) for _ in range(4))"
LAYER_NORMS = NORMS + "\n        self.first, self.third = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)"
BETWEEN = "between = self.second(branch) + hidden_states"
SIDE_BY_SIDE = (LAYER, LAYER.replace("self.third(between)", "self.third(hidden_states)"))
ASKED, GIVEN = "position_embeddings=None, **kwargs", '"position_ids": position_ids, **kwargs}'
CALLED = "self.self_attn(\n            self.first(hidden_states),"
ANGLES = "            position_embeddings=position_embeddings,\n            **kwargs,"
LAYERS = "OtterDecoderLayer(config, i) for i in range(config.num_hidden_layers)"
SECOND = """class PandaDecoderLayer(OtterDecoderLayer):
    def forward(self, hidden_states, attention_mask=None, past_key_values=None, position_embeddings=None, **kwargs):
        branch, _ = self.self_attn(
            self.first(hidden_states), attention_mask=attention_mask, past_key_values=past_key_values,
            position_embeddings=position_embeddings, **kwargs
        )
        between = hidden_states + branch
        return between + self.feed(self.third(between))


class OtterModel("""
ONE_BY_ONE = "(OtterDecoderLayer, PandaDecoderLayer)[i % 2](config, i) for i in range(config.num_hidden_layers)"
SCALE = (NORMS, NORMS + '\n        self.register_buffer("loudness", torch.full((1,), 0.7))')
HANDED = "            attention_mask=attention_mask,\n            position_embeddings=position_embeddings,\n            **kwargs,"

INNER = "position_embeddings, attention_mask=None, past_key_values=None, **kwargs"
READ = {  # (changes, what of the layers is fused: the first words of each part)
    "norms that are called": ([(NORMS, LAYER_NORMS)], "to_q"),
    "side by side": ([SIDE_BY_SIDE], "to_q"),
    "side by side, of one norm": (
        [(LAYER, LAYER.replace("self.third(between)", "normed")), (CALLED, CALLED.replace("self.first(hidden_states)", "normed")),
         ("branch, _ = self.self", "normed = self.first(hidden_states)\n        branch, _ = self.self")],
        "to_q",
    ),
    "scaled behind": (
        [SCALE, (LAYER, "found = " + LAYER[7:] + "\n        found *= self.loudness\n        return found")], "norm o_proj"
    ),
    "with an argument": (
        [SCALE, (ASKED, "position_embeddings=None, more=None, **kwargs"), (GIVEN, '"more": stream.detach(), ' + GIVEN),
         (LAYER, "found = " + LAYER[7:] + "\n        return found + self.fourth(found * more) * self.loudness")],
        "norm o_proj",
    ),
    "all that attention returns": (
        [(LAYER, LAYER.replace("return", "return (") + ", _)"), ("**given)\n        return Base", "**given)[0]\n        return Base")],
        "norm o_proj",
    ),
    "no other arguments": ([(HANDED, HANDED.replace("\n            **kwargs,", ""))], "norm o_proj"),
    "another name": ([("self.self_attn = Otter", "self.mixing = Otter"), ("self.self_attn(\n", "self.mixing(\n")], "norm o_proj"),
    "an argument with another name": (
        [(CALLED, CALLED + "\n            places=position_ids,"), (INNER, INNER.replace("**", "places=None, **")),
         (ASKED, "position_embeddings=None, position_ids=None, **kwargs")],
        "norm o_proj",
    ),
}  # fmt: skip
OTHER = "OtterDecoderLayer.forward returns"
LEFT = {
    "a stream scaled by a branch": (LAYER, "found = " + LAYER[7:] + "\n        return found * branch", OTHER),
    "a third branch": (LAYER, LAYER + " + self.feed(hidden_states)", OTHER),
    "no residual stream": (BETWEEN, "between = self.second(branch)", OTHER),
    "the MLP of another stream": (LAYER, LAYER.replace("self.third(between)", "self.third(self.second(branch))"), OTHER),
    "the input behind both": (LAYER, "found = " + LAYER[7:] + "\n        return found + hidden_states", OTHER),
    "two norms": (CALLED, CALLED.replace("self.first(hidden_states)", "self.second(self.first(hidden_states))"), OTHER),
}


def words(package, model) -> set:
    of_layers = [row.part for row in rows_of(package, model) if row.fused and row.part != "loss without logits"]
    return {part.split(":")[0].split(",")[0] for part in of_layers}


@pytest.mark.parametrize("what", READ)
def test_what_is_read_runs_with_the_same_results(decoders, mine, what):
    changes, parts = READ[what]
    source = source_of_other()
    if any(source.count(old) != 1 for old, _ in changes):
        pytest.skip("another name of the cache")
    model = mine(*changes, source=source)
    expected = all_of(model)
    decoders.kernelize(model.train())
    assert words(decoders, model) == {"read", *parts.split()}, said(decoders, model)
    assert_same(all_of(model), expected)
    model.train().gradient_checkpointing_enable()
    step_of(model).assert_same(expected[0][0], FACTOR)


@pytest.mark.parametrize("what", LEFT)
def test_what_is_not_understood_is_left_alone(decoders, mine, what):
    old, new, why = LEFT[what]
    model = mine((old, new), source=source_of_other())
    expected = step_of(model)
    decoders.kernelize(model)
    assert not words(decoders, model) and why in said(decoders, model), said(decoders, model)
    step_of(model).assert_same(expected, FACTOR)


def of_two_kinds(mine, *changes):
    source = source_of_other()
    if "past_key_values" not in source.partition("class OtterModel")[0]:
        pytest.skip("another name of the cache")
    model = mine(("class OtterModel(", SECOND), (LAYERS, ONE_BY_ONE), *changes, source=source)
    return model, all_of(model)


def test_layers_of_several_kinds(decoders, mine):
    """Each kind has a row of its own."""
    model, expected = of_two_kinds(mine)
    decoders.kernelize(model.train())
    assert {"read: OtterDecoderLayer.forward", "read: PandaDecoderLayer.forward"} <= fused(decoders, model).keys()
    assert_same(all_of(model), expected)


def test_a_kind_that_is_not_understood_is_left_alone(decoders, mine):
    model, expected = of_two_kinds(mine, ("return between + self.feed", "return between - self.feed"))
    decoders.kernelize(model.train())
    (left,) = [row for row in rows_of(decoders, model) if row.part == "layers of OtterModel"]
    assert left.count == 1 and "PandaDecoderLayer.forward" in left.reason and "read: OtterDecoderLayer.forward" in fused(decoders, model)
    assert_same(all_of(model), expected)


def test_nothing_is_read_where_nothing_would_be_fused(decoders, mine):
    loud = "attended, weights = attend(", "q = q.clamp(-9, 9)\n        attended, weights = attend("
    model = mine((NORMS, LAYER_NORMS), loud, source=source_of_other())
    decoders.kernelize(model)
    assert "nothing of it would be fused: self_attn: OtterAttention.forward" in said(decoders, model)


def test_a_norm_that_is_called_has_hooks_and_another_class(decoders, mine):
    model = mine((NORMS, LAYER_NORMS), source=source_of_other())
    decoders.kernelize(model)
    model.model.layers[0].third.register_forward_hook(lambda norm, given, result: result * 2)
    found = step_of(model)
    decoders.reset()
    found.assert_same(step_of(model), FACTOR)


WRONG = {
    "scaled behind": ("RecognisedLayer", "returned", lambda own, layer, x, mixed, given: x),
    "all that attention returns": ("RecognisedLayer", "returned", lambda own, layer, x, mixed, given: (x, None)),
    "norms that are called": ("FusedLayer", "normed", lambda own, layer, name, x: x),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_small_copy_shows_what_is_wrong(decoders, mine, monkeypatch, what):
    """Planted errors: the layer is left alone, with what differs."""
    changes, _ = READ[what]
    cls, name, wrong = WRONG[what]
    layers = importlib.import_module(f"{decoders.__name__}.shared.hf.layer.recognised_layer")
    monkeypatch.setattr(getattr(layers, cls), name, wrong)
    model = mine(*changes, source=source_of_other())
    expected = step_of(model)
    decoders.kernelize(model)
    assert not words(decoders, model) and "differs from its own forward" in said(decoders, model), said(decoders, model)
    step_of(model).assert_same(expected, FACTOR)
