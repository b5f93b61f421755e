"""Which layer stands in for what of transformers' Qwen3; patching.py puts them there."""

from . import layers

MODEL = "Qwen3"
MODELING = "transformers.models.qwen3.modeling_qwen3"
ATTENTION = "Qwen3Attention"  # whose forward calls the rotary embedding
CLASSES = {
    "rms_norm": ("Qwen3RMSNorm", layers.RMSNorm),
    "swiglu": ("Qwen3MLP", layers.MLP),
    "fused_linear_cross_entropy": ("Qwen3ForCausalLM", layers.CausalLM),
    "decoder_layer": ("Qwen3DecoderLayer", layers.DecoderLayer),
}
OPERATIONS = ("rms_norm", "swiglu", "rope", "fused_linear_cross_entropy", "decoder_layer")  # in the order of `apply`
HUB_NAMES = {  # of the layers; the last three belong to Qwen3-MoE and to transformers, whose Qwen3 does not use them yet
    "RMSNorm": layers.RMSNorm,
    "rotary_pos_emb": layers.RotaryPosEmb,
    "Qwen3MLP": layers.MLP,
    "Qwen3DecoderLayer": layers.DecoderLayer,
    "Qwen3ForCausalLM": layers.CausalLM,
    "Qwen3MoeExperts": layers.Experts,
    "SwiGLUMLP": layers.SwiGLUMLP,
    "ForCausalLMLoss": layers.ForCausalLMLoss,
}


def apply(rms_norm=True, swiglu=True, rope=True, fused_linear_cross_entropy=True, decoder_layer=True):
    """Puts the layers on transformers' Qwen3 classes: models that exist and models made later use them.

    After the call exactly the operations given as True are active. With `fused_linear_cross_entropy` a model in training mode
    that gets labels returns the loss and no logits. `decoder_layer` fuses across the others, so it takes effect where `rms_norm`,
    `swiglu` and `rope` are all on. Not thread-safe against a running forward pass.

    Raises ImportError when transformers is absent or its version does not fit.
    """
    from .patching import put

    put(
        {
            "rms_norm": rms_norm,
            "swiglu": swiglu,
            "rope": rope,
            "fused_linear_cross_entropy": fused_linear_cross_entropy,
            "decoder_layer": decoder_layer and rms_norm and swiglu and rope,
        }
    )
