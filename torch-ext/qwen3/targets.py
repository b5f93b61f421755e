"""Which layer stands in for what of transformers' Qwen3 and Qwen3-MoE."""

import functools

from . import layers
from .decoder_layer import QWEN3, QWEN3_MOE, explain_layer
from .shared.hf.patching import Targets

DENSE = Targets(
    model="Qwen3",
    modeling=QWEN3.modeling,
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
    hub_names={  # of the layers; the last two are transformers', whose Qwen3 does not use them yet
        "RMSNorm": layers.RMSNorm,
        "rotary_pos_emb": layers.RotaryPosEmb,
        "Qwen3MLP": layers.MLP,
        "Qwen3DecoderLayer": layers.DecoderLayer,
        "Qwen3Model": layers.Model,
        "Qwen3ForCausalLM": layers.CausalLM,
        "SwiGLUMLP": layers.SwiGLUMLP,
        "ForCausalLMLoss": layers.ForCausalLMLoss,
    },
    explain_layer=functools.partial(explain_layer, QWEN3),
    fused=("Qwen3Attention",),
)
MOE = Targets(
    model="Qwen3-MoE",
    modeling=QWEN3_MOE.modeling,
    attention="Qwen3MoeAttention",
    classes={
        "rms_norm": ("Qwen3MoeRMSNorm", layers.RMSNorm),
        "swiglu": ("Qwen3MoeMLP", layers.MLP),
        "fused_linear_cross_entropy": ("Qwen3MoeForCausalLM", layers.MoeCausalLM),
        "decoder_layer": ("Qwen3MoeDecoderLayer", layers.MoeDecoderLayer),
        "attention": ("Qwen3MoeModel", layers.MoeModel),
        "experts": ("Qwen3MoeExperts", layers.Experts),
    },
    rotary=layers.RotaryPosEmb,
    operations=(*DENSE.operations, "experts"),
    hub_names={
        "RMSNorm": layers.RMSNorm,
        "rotary_pos_emb": layers.RotaryPosEmb,
        "Qwen3MoeMLP": layers.MLP,
        "Qwen3MoeExperts": layers.Experts,
        "Qwen3MoeDecoderLayer": layers.MoeDecoderLayer,
        "Qwen3MoeModel": layers.MoeModel,
        "Qwen3MoeForCausalLM": layers.MoeCausalLM,
    },
    explain_layer=functools.partial(explain_layer, QWEN3_MOE),
    fused=("Qwen3MoeAttention", "Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter"),
    optional=("swiglu", "experts"),  # a model has dense layers only where its configuration asks for them, and may have no others
)
FAMILIES = (DENSE, MOE)
