"""The models whose steps are measured, but for GPT-OSS: one row for each family."""

from dataclasses import dataclass, field
from typing import Any

import torch

from . import models


@dataclass(frozen=True)
class Published:
    """Describes what models.py leaves out about a family.

    model_type: transformers' name of it. liger: what Liger-Kernel's function that patches it ends in. options: of the configuration. tiny:
    those that a model for a CPU has beside them.
    """

    model_type: str
    liger: str
    options: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)


def rotary(theta: float, **more) -> dict[str, Any]:
    """Return the options of a rotary embedding."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
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
}
SMALL_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
HYBRID = {"qwen3.5": Published("qwen3_5_text", "qwen3_5", rotary(1e7, partial_rotary_factor=0.25), SMALL_HEADS)}
ROWS = QWEN3 | DENSE | HYBRID


def new_model(name: str, layers: int | None, device: str, dtype: torch.dtype = torch.bfloat16, attention: str | None = None):
    """Return the causal LM of a row in training mode, to be filled. layers: None for all; attention: transformers' name of it, None
    for its choice."""
    from transformers import AutoConfig, AutoModelForCausalLM

    s, row = models.size(name), ROWS[models.family(name)]
    experts = {"moe_intermediate_size": s.intermediate, "num_experts": s.experts, "num_experts_per_tok": s.top_k} if s.experts else {}
    config = AutoConfig.for_model(
        row.model_type,
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_hidden_layers=layers or s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        tie_word_embeddings=s.tied,
        use_cache=False,
        **{"max_position_embeddings": 131072, **experts, **row.options, **(row.tiny if name in models.TINY else {})},
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()
