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

    fused_linear_cross_entropy: True, False, or a mapping of options of the loss, which stands for True: `ignore_index`,
    `class_weight`, `reduction`, `label_smoothing`, `softcap`, `lse_square_scale`, `use_token_scaling`, `accum_dtype`,
    `return_z_loss`, `return_token_accuracy` and `return_predicted_tokens` of `linear_cross_entropy`, and `skip_logits`: whether a
    loss comes without logits, in training mode by default. They hold for every call with labels, in eval mode too, unless the
    call itself has an argument of that name: model(input_ids=..., labels=..., label_smoothing=0.1). What the return_ options
    ask for is in the model's output, under the names z_loss, token_accuracy and predicted_tokens.

    Raises TypeError for an option that does not exist, ImportError when transformers is absent or its version does not fit.
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
