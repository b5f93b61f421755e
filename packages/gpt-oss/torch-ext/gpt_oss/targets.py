"""Which layer stands in for what of transformers' GPT-OSS."""

from . import layers
from .decoder_layer import explain_layer
from .shared.hf.patching import Targets

TARGETS = Targets(
    model="GPT-OSS",
    modeling="transformers.models.gpt_oss.modeling_gpt_oss",
    attention="GptOssAttention",
    classes={
        "rms_norm": ("GptOssRMSNorm", layers.RMSNorm),
        "experts": ("GptOssExperts", layers.Experts),
        "fused_linear_cross_entropy": ("GptOssForCausalLM", layers.CausalLM),
        "decoder_layer": ("GptOssDecoderLayer", layers.DecoderLayer),
        "attention": ("GptOssModel", layers.Model),
    },
    rotary=layers.RotaryPosEmb,
    operations=("rms_norm", "experts", "rope", "fused_linear_cross_entropy", "decoder_layer", "attention"),
    hub_names={  # of the layers
        "RMSNorm": layers.RMSNorm,
        "rotary_pos_emb": layers.RotaryPosEmb,
        "GptOssExperts": layers.Experts,
        "GptOssDecoderLayer": layers.DecoderLayer,
        "GptOssModel": layers.Model,
        "GptOssForCausalLM": layers.CausalLM,
    },
    explain_layer=explain_layer,
)
FAMILIES = (TARGETS,)
