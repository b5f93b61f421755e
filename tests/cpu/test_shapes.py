"""Models of no family of the table, in a user's own file or in remote code: their layers are read, and parts known by their text."""

import pytest
import torch

from tests.models import Step, random_tokens
from tests.own_file import FROM_A_FILE, source_of_mine

NORM = "return self.weight * hidden_states.to(input_dtype)"
LOADED = FROM_A_FILE, "transformers_modules.someone.mine.0a1b2c.modeling_mine"
ATTENTION = {"norm, q_proj, k_proj, v_proj, rotary": 2, "o_proj": 2}


def whole(layer="MineDecoderLayer") -> dict:
    """What is fused of a model whose layers are read."""
    return {f"read: {layer}.forward": 2, **ATTENTION, "norm, gate_proj, up_proj, down_proj": 2, "loss without logits": 1}


def step_of(model) -> Step:
    tokens = random_tokens(2, 13)
    return Step(model, input_ids=tokens, labels=tokens, use_cache=False)


def fused(package, model) -> dict:
    of_model = (row for row in package.explain(model).rows if row.fused and "TRL" not in row.part)
    return {row.part: row.count for row in of_model}


@pytest.mark.parametrize("name", LOADED)
def test_a_llama_under_other_names(decoders, mine, name):
    model = mine(name=name)
    expected = step_of(model)
    assert fused(decoders, model) == {}
    decoders.kernelize(model)
    found = step_of(model)
    found.assert_same(expected, 3)
    assert found.output.logits is None and fused(decoders, model) == whole()
    decoders.reset()
    again = step_of(model)
    assert again.output.logits is not None and not any("forward" in vars(module) for module in model.modules())
    again.assert_same(expected)


def test_a_model_of_transformers_without_a_row(decoders):
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    text = {
        "vocab_size": 199, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
    }  # fmt: skip
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 48}
    audio = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32, "output_dim": 48}
    config = Qwen2_5OmniThinkerConfig(text_config=text, vision_config=tower, audio_config=audio, pad_token_id=0)
    model = Qwen2_5OmniThinkerForConditionalGeneration(config).train()
    expected = step_of(model)
    decoders.kernelize(model)
    found = step_of(model)
    found.assert_same(expected, 3)
    assert fused(decoders, model) == whole("Qwen2_5OmniDecoderLayer") and found.output.logits is None


CHANGED = {
    "1 + weight": ((NORM, "return (1 + self.weight) * hidden_states.to(input_dtype)"),),
    "an extra multiplication": ((NORM, NORM + " * 2"),),
    "a weight that the class computes": (
        ("self.weight = nn.Parameter(torch.ones(hidden_size))", "self.gain = nn.Parameter(torch.ones(hidden_size))"),
        ("    def extra_repr(self):", "    weight = property(lambda self: 2 * self.gain)\n\n    def extra_repr(self):"),
    ),
    "another torch": (("import torch\nfrom torch import nn", "import types\nimport torch as real\nfrom torch import nn\n"
                       "torch = types.SimpleNamespace(**vars(real))\ntorch.rsqrt = lambda x: real.rsqrt(x + 1)"),),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGED)
def test_a_norm_that_computes_something_else_is_left_alone(decoders, mine, change):
    model = mine(*CHANGED[change])
    expected = step_of(model)
    decoders.kernelize(model)
    step_of(model).assert_same(expected, 3)
    found = fused(decoders, model)
    assert "RMSNorm" not in found and found["q_proj, k_proj, v_proj, rotary"] == 2
    assert all("forward" in vars(layer.mlp) for layer in model.model.layers)
    assert all(type(module).__name__ != "MineRMSNorm" or "forward" not in vars(module) for module in model.modules())


def test_a_rotary_embedding_that_computes_something_else_is_left_alone(decoders, mine):
    model = mine(("return torch.cat((-x2, x1), dim=-1)", "return torch.cat((x2, -x1), dim=-1)"))
    expected = step_of(model)
    decoders.kernelize(model)
    step_of(model).assert_same(expected, 3)
    ends = {"norm, q_proj, k_proj, v_proj": 2, "o_proj": 2}  # of attention that is called
    assert fused(decoders, model) == {**{part: count for part, count in whole().items() if part not in ATTENTION}, **ends}
    assert "self_attn" in {row.part for row in decoders.explain(model).rows if row.code == "called"}


def test_what_runs_counts_and_not_what_the_file_says_by_now(decoders, mine, tmp_path):
    model = mine((NORM, NORM + " * 2"))
    expected = step_of(model)
    (tmp_path / f"{LOADED[0]}.py").write_text(source_of_mine(), encoding="utf-8")
    decoders.kernelize(model)
    step_of(model).assert_same(expected, 3)
    assert "RMSNorm" not in fused(decoders, model)


def test_a_model_of_which_nothing_is_known(decoders):
    with pytest.raises(TypeError, match="Sequential without any of"):
        decoders.kernelize(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)))
    with pytest.raises(TypeError, match="Linear"):
        decoders.explain(torch.nn.Linear(2, 2))
