"""Which layer stands in for what of transformers' Qwen3."""

from . import layers
from .shared.hf.patching import Targets

TARGETS = Targets(
    model="Qwen3",
    modeling="transformers.models.qwen3.modeling_qwen3",
    attention="Qwen3Attention",
    classes={
        "rms_norm": ("Qwen3RMSNorm", layers.RMSNorm),
        "swiglu": ("Qwen3MLP", layers.MLP),
        "fused_linear_cross_entropy": ("Qwen3ForCausalLM", layers.CausalLM),
        "decoder_layer": ("Qwen3DecoderLayer", layers.DecoderLayer),
        "attention": ("Qwen3Model", layers.Model),
    },
    rotary=layers.RotaryPosEmb,
    operations=("rms_norm", "swiglu", "rope", "fused_linear_cross_entropy", "decoder_layer", "attention"),
    hub_names={  # of the layers; the last three belong to Qwen3-MoE and to transformers, whose Qwen3 does not use them yet
        "RMSNorm": layers.RMSNorm,
        "rotary_pos_emb": layers.RotaryPosEmb,
        "Qwen3MLP": layers.MLP,
        "Qwen3DecoderLayer": layers.DecoderLayer,
        "Qwen3Model": layers.Model,
        "Qwen3ForCausalLM": layers.CausalLM,
        "Qwen3MoeExperts": layers.Experts,
        "SwiGLUMLP": layers.SwiGLUMLP,
        "ForCausalLMLoss": layers.ForCausalLMLoss,
    },
    fused=("Qwen3Attention",),
)
