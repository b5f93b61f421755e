"""The layers that take the place of Qwen3's and Qwen3-MoE's, by the names under which the Hub finds them. They have no state: `self` is the
module whose forward they become. What makes one of a row says what goes in and what comes out."""

from .shared.hf.install import layers
from .shared.hf.model.causal_lm import causal_lm_loss, causal_lm_loss_of_logits
from .shared.hf.parts.modules import Layer
from .shared.rows.qwen3 import QWEN3, QWEN3_MOE

RMSNorm = layers.rms_norm_of(QWEN3.family)  # Qwen3RMSNorm, Qwen3MoeRMSNorm
RotaryPosEmb = layers.rotary_layer_of(QWEN3.family)
MLP = layers.mlp_of(QWEN3.family)  # Qwen3MLP, Qwen3MoeMLP
SwiGLUMLP = MLP  # the name that transformers reserves for MLPs such as Qwen3's
Experts = layers.experts_of(QWEN3_MOE.family)
DecoderLayer = layers.decoder_layer_of(QWEN3)
Model = layers.model(QWEN3.family)
CausalLM = layers.causal_lm_of(QWEN3.family)
MoeDecoderLayer = layers.decoder_layer_of(QWEN3_MOE)
MoeModel = layers.model(QWEN3_MOE.family)
MoeCausalLM = layers.causal_lm_of(QWEN3_MOE.family)


class ForCausalLMLoss(Layer):
    """For the layer name that transformers reserves for the loss of a causal LM.

    With hidden_states [..., features] and lm_head_weight [vocab_size, features] the logits may be None and are never made;
    with logits [..., vocab_size] alone it is PyTorch's cross entropy of them in float32. kwargs: the options of
    `linear_cross_entropy`; others are ignored, as in transformers.
    """

    def forward(
        self,
        logits,
        labels,
        vocab_size,
        num_items_in_batch=None,
        ignore_index=-100,
        shift_labels=None,
        hidden_states=None,
        lm_head_weight=None,
        lm_head_bias=None,
        **kwargs,
    ):
        options = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, "shift_labels": shift_labels}
        if hidden_states is None or lm_head_weight is None:
            return causal_lm_loss_of_logits(logits, labels, vocab_size, **options, **kwargs)
        return causal_lm_loss(hidden_states, lm_head_weight, lm_head_bias, labels, **options, **kwargs)
