"""The models whose steps are measured: one row for each family."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import models


@dataclass(frozen=True)
class Published:
    """Describes what models.py leaves out about a family.

    model_type: transformers' name of it. liger: what Liger-Kernel's function that patches it ends in. options: of the configuration. tiny:
    those that a model for a CPU has beside them. tower: those of the configuration around the text's, by the text's size; None for a model
    of text alone. of_layers: those that follow from how many layers it has.
    """

    model_type: str
    liger: str
    options: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)
    tower: Callable[[models.Size], dict[str, Any]] | None = None
    of_layers: Callable[[int], dict[str, Any]] = lambda layers: {}


def rotary(theta: float, **more) -> dict[str, Any]:
    """Return the options of a rotary embedding."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def qwen3_vision(text: models.Size) -> dict[str, Any]:
    """Return the tower of a Qwen3-VL, which ends as wide as its text; two layers of it for a small text."""
    small = {"depth": 2, "deepstack_visual_indexes": [1], "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    return {"vision_config": {"out_hidden_size": text.hidden, **(small if text.hidden < 1024 else {})}}


# By what models.family calls them.
QWEN3 = {
    "qwen3": Published("qwen3", "qwen3", {"max_position_embeddings": 40960, **rotary(1e6)}),
    "qwen3_moe": Published("qwen3_moe", "qwen3_moe", {"max_position_embeddings": 40960, "norm_topk_prob": True, **rotary(1e6)}),
}
DENSE = {
    "llama": Published("llama", "llama", rotary(500000.0, **LLAMA3)),
    "qwen2.5": Published("qwen2", "qwen2", rotary(1e6)),
    "mistral": Published("mistral", "mistral", {"sliding_window": None, **rotary(1e6)}),
    "phi": Published("phi3", "phi3", {"pad_token_id": 0, "original_max_position_embeddings": 131072,
                                      **rotary(250000.0, partial_rotary_factor=1.0)}),
    "gemma": Published("gemma3_text", "gemma3_text", {"sliding_window": 1024}),
    "smollm3": Published("smollm3", "smollm3", {"pad_token_id": 0, **rotary(5e6)}),
    "olmo": Published("olmo2", "olmo2", {"pad_token_id": 0, **rotary(500000.0)}),
    "qwen3_vl": Published("qwen3_vl", "qwen3_vl", rotary(5e6, mrope_interleaved=True, mrope_section=[24, 20, 20]),
                          rotary(5e6, mrope_interleaved=True, mrope_section=[4, 2, 2]), qwen3_vision),
}
SMALL_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
HYBRID = {"qwen3.5": Published("qwen3_5_text", "qwen3_5", rotary(1e7, partial_rotary_factor=0.25), SMALL_HEADS)}
SPARSE = {
    "gpt_oss": Published("gpt_oss", "gpt_oss"),
    "mixtral": Published("mixtral", "mixtral", {"sliding_window": None, **rotary(1e6)}),
    "glm": Published("glm4_moe", "", {"intermediate_size": 10944, "n_routed_experts": 128, "attention_bias": True,
                                      **rotary(1e6, partial_rotary_factor=0.5)}, {"intermediate_size": 96, "n_routed_experts": 6}),
}  # fmt: skip


def of_gemma_4(layers: int) -> dict[str, Any]:
    """Return which layers see all tokens, each fifth, and how many take the keys of layers before: 20 of 35."""
    types = ["full_attention" if i % 5 == 4 else "sliding_attention" for i in range(layers)]
    return {"layer_types": types, "num_kv_shared_layers": layers * 4 // 7 if layers >= 10 else 0}


SMALL_INPUTS = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512, "global_head_dim": 32}
GEMMA_4 = {"gemma_4": Published("gemma4_text", "gemma4_text", {"use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
                                SMALL_INPUTS, of_layers=of_gemma_4)}  # fmt: skip
ROWS = QWEN3 | DENSE | HYBRID | SPARSE | GEMMA_4


def new_model(name: str, layers: int | None, device: str, dtype: torch.dtype = torch.bfloat16, attention: str | None = None):
    """Return the causal LM of a row in training mode, to be filled. layers: None for all; attention: transformers' name of it, None
    for its choice."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    s, row = models.size(name), ROWS[models.family(name)]
    experts = {"moe_intermediate_size": s.intermediate, "num_experts": s.experts, "num_experts_per_tok": s.top_k} if s.experts else {}
    text = dict(
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_hidden_layers=layers or s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        tie_word_embeddings=s.tied,
        use_cache=False,
        max_position_embeddings=131072,
    )
    text |= experts | row.options | row.of_layers(layers or s.layers) | (row.tiny if name in models.TINY else {})
    whole = text if row.tower is None else {"text_config": text, "tie_word_embeddings": s.tied, **row.tower(s)}
    made = AutoModelForCausalLM if row.tower is None else AutoModelForImageTextToText
    with torch.device(device):
        return made.from_config(AutoConfig.for_model(row.model_type, **whole), dtype=dtype, attn_implementation=attention).train()
