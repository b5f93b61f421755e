"""`python -m tools.family_row` makes the rows that are there, and says of what it cannot make which line stands in the way."""

import pytest

from tools import family_row
from tools.family_row import FIELDS, NOT_DERIVED, derive, families
from tools.transformers_texts import installed_source

ROWS = {family.model: family for family in families() if not family.mixers}
# What no row but its own says, by the family: of these a row is made by hand. Of all others it comes out whole.
ALONE = {
    "Qwen3-VL": {"attention"}, "Ministral 3": {"attention"}, "SmolLM3": {"attention"}, "Granite 4": {"attention", "mlp", "layer"},
    "Phi-3": {"attention", "layer", "rotary"}, "OLMo 3": {"attention"}, "Gemma 3": {"attention"},
    "ERNIE 4.5": {"rotary"}, "Helium": {"norm", "rotary"}, "Apertus": {"attention"}, "Granite-SWA": {"attention"},
    "Mixtral": {"experts' block", "router"}, "Qwen2-MoE": {"experts' block"}, "OLMoE": {"attention"},
    "Granite-MoE": {"experts' block", "router"}, "GPT-OSS": {"attention", "layer", "experts' block", "router", "rotary"},
}  # fmt: skip
CALLED = {"self_attn": "attention", "mlp": "mlp"}
NO_CAUSAL_LM = {"Qwen3-VL", "Qwen2.5-VL", "Qwen2-VL"}
# Fields that a family has by choice: its layers with experts are left as they are, or its decoder's class is known from its model.
BY_CHOICE = {"Granite 4": {"sparse"}, **dict.fromkeys(NO_CAUSAL_LM, {"decoder"})}


def parts_called(own):
    return {CALLED[name] for name in own.called} | ({"causal_lm"} if own.model in NO_CAUSAL_LM else set())


@pytest.mark.parametrize("model", ROWS)
def test_every_row_comes_out_field_by_field(model):
    own = ROWS[model]
    derived = derive(own.modeling, list(ROWS.values()), own.prefix)
    assert derived.unknown.keys() == parts_called(own) and not derived.left
    left = {*NOT_DERIVED, *BY_CHOICE.get(model, ()), *(field for part in derived.unknown for field in FIELDS[part])}
    assert {name: value for name, value in own._asdict().items() if name not in left} == {
        name: value for name, value in derived.family._asdict().items() if name not in left
    }


@pytest.mark.parametrize("model", ROWS)
def test_of_a_row_that_is_not_there_the_rest_is_right(model):
    """Each row made of all others: what is taken for known is what the row says."""
    own = ROWS[model]
    derived = derive(own.modeling, [family for family in ROWS.values() if family is not own], own.prefix)
    assert derived.unknown.keys() == ALONE.get(model, set()) | parts_called(own)
    left = {*NOT_DERIVED, *BY_CHOICE.get(model, ()), *(field for part in derived.unknown for field in FIELDS.get(part, ()))}
    left |= {"absent", "called", "mlp", "mlp_argument", "sparse"} if derived.unknown else set()
    assert {name: value for name, value in derived.family._asdict().items() if name not in left} == {
        name: value for name, value in own._asdict().items() if name not in left
    }


CHANGES = {
    "a dropout": ("self.o_proj(attn_output)", "nn.functional.dropout(self.o_proj(attn_output), 0.1)", "attention"),
    "another residual": ("hidden_states = residual + hidden_states\n", "hidden_states = residual - hidden_states\n", "layer"),
    "a factor of the gate": ("self.act_fn(self.gate_proj(x))", "2 * self.act_fn(self.gate_proj(x))", "mlp"),
    "another mean": (".mean(-1, keepdim=True)", ".mean(-2, keepdim=True)", "norm"),
    "another half": ("torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)", "rotary"),
    "scaled logits": ("self.lm_head(hidden_states)", "self.lm_head(hidden_states) * 0.5", "causal_lm"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_part_that_computes_something_else_is_unknown(monkeypatch, what):
    before, after, part = CHANGES[what]
    modeling = ROWS["Llama"].modeling
    source = installed_source(modeling)
    assert before in source
    changed = source.replace(before, after)
    monkeypatch.setattr("tools.family_text.installed_source", lambda name: changed if name == "changed" else installed_source(name))
    derived = derive("changed", list(ROWS.values()), "Llama")
    assert set(derived.unknown) == {part} and any(line.startswith("+") for line in derived.unknown[part])


def test_other_names_are_no_other_text(monkeypatch):
    """Of classes, local variables, and attributes that a field names."""
    source = installed_source(ROWS["Llama"].modeling)
    for before, after in (("Llama", "Alpaca"), ("residual", "stream"), ("input_layernorm", "first_norm"), ("gate_proj", "w1")):
        source = source.replace(before, after)
    monkeypatch.setattr("tools.family_text.installed_source", lambda name: source if name == "changed" else installed_source(name))
    derived = derive("changed", list(ROWS.values()))
    assert not derived.unknown and not derived.left
    assert (derived.family.prefix, derived.family.norms.inputs, derived.family.gate_up) == ("Alpaca", "first_norm", ("w1", "up_proj"))


def test_the_command(capsys):
    assert family_row.main(["transformers.models.mellum.modeling_mellum"]) == 0
    assert capsys.readouterr().out.startswith('row("Mellum", "Mellum", "mellum", qk_norm=\'head\'')
    assert family_row.main(["transformers.models.phi3.modeling_phi3"]) == 1
    said = capsys.readouterr().out
    assert "no row has this rotary" in said and "no field accounts for resid_attn_dropout, resid_mlp_dropout of Phi3DecoderLayer" in said
