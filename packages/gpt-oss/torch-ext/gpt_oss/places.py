"""Which layer stands in for what of transformers' GPT-OSS; patching.py puts them there."""

from . import layers
from .decoder import FLEX

MODEL = "GPT-OSS"
MODELING = "transformers.models.gpt_oss.modeling_gpt_oss"
ATTENTION = "GptOssAttention"  # whose forward calls the rotary embedding
CLASSES = {
    "rms_norm": ("GptOssRMSNorm", layers.RMSNorm),
    "experts": ("GptOssExperts", layers.Experts),
    "fused_linear_cross_entropy": ("GptOssForCausalLM", layers.CausalLM),
    "decoder_layer": ("GptOssDecoderLayer", layers.DecoderLayer),
}
OPERATIONS = ("rms_norm", "experts", "rope", "fused_linear_cross_entropy", "decoder_layer")  # in the order of `apply`
HUB_NAMES = {  # of the layers
    "RMSNorm": layers.RMSNorm,
    "rotary_pos_emb": layers.RotaryPosEmb,
    "GptOssExperts": layers.Experts,
    "GptOssDecoderLayer": layers.DecoderLayer,
    "GptOssForCausalLM": layers.CausalLM,
}


def apply(rms_norm=True, experts=True, rope=True, fused_linear_cross_entropy=True, decoder_layer=True, attention=False):
    """Puts the layers on transformers' GPT-OSS classes: models that exist and models made later use them.

    After the call exactly the operations given as True are active. With `fused_linear_cross_entropy` a model in training mode
    that gets labels returns the loss and no logits. `decoder_layer` joins the first residual addition with the norm behind it, so
    it takes effect where `rms_norm` is on. `attention`: models that train on a GPU with eager attention change to flex_attention, at
    their next step; it needs `fused_linear_cross_entropy`. Not thread-safe against a running forward pass.

    Raises ImportError when transformers is absent or its version does not fit, ValueError for `attention` without
    `fused_linear_cross_entropy`.
    """
    from .patching import modeling_of_transformers, put

    if attention and not fused_linear_cross_entropy:
        raise ValueError("attention is True and fused_linear_cross_entropy is False, expected both: the layer of the causal LM changes it")
    put(
        {
            "rms_norm": rms_norm,
            "experts": experts,
            "rope": rope,
            "fused_linear_cross_entropy": fused_linear_cross_entropy,
            "decoder_layer": decoder_layer and rms_norm,
        }
    )
    setattr(modeling_of_transformers().GptOssForCausalLM, FLEX, bool(attention))
