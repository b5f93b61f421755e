"""The layers that take the place of Qwen3's and Qwen3-MoE's. They have no state: `self` is the module whose forward they become."""

from .shared.hf.install import layers
from .shared.hf.model.causal_lm import causal_lm_loss, causal_lm_loss_of_logits
from .shared.hf.parts.modules import Layer
from .shared.rows.qwen3 import QWEN3, QWEN3_MOE


class RMSNorm(Layer):
    """For Qwen3RMSNorm and Qwen3MoeRMSNorm: hidden_states [..., n] -> [..., n]."""

    forward = layers.rms_norm_of(QWEN3.family).forward


class RotaryPosEmb(Layer):
    """For `apply_rotary_pos_emb`: q, k [batch, heads, tokens, head_dim] and cos, sin [batch, tokens, head_dim] -> q, k."""

    forward = layers.rotary_layer_of(QWEN3.family).forward


class MLP(Layer):
    """For Qwen3MLP and Qwen3MoeMLP: x [..., hidden] -> [..., hidden]. Recomputes its activations in the backward pass."""

    forward = layers.mlp_of(QWEN3.family).forward


class Experts(Layer):
    """For Qwen3MoeExperts: hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, top-k] -> [tokens, hidden]."""

    forward = layers.experts_of(QWEN3_MOE.family).forward


class SwiGLUMLP(Layer):
    """For the layer name that transformers reserves for MLPs such as Qwen3's."""

    forward = layers.mlp_of(QWEN3.family).forward


class DecoderLayer(Layer):
    """For Qwen3DecoderLayer: hidden_states [batch, tokens, hidden] -> the same, in three autograd nodes."""

    forward = layers.decoder_layer_of(QWEN3).forward


class Model(Layer):
    """For Qwen3Model: the same, with attention of ours where it has the one that transformers chooses by default."""

    forward = layers.model(QWEN3.family).forward


class CausalLM(Layer):
    """For Qwen3ForCausalLM. With labels in training mode the logits are never all in memory, and `logits` is None.

    kwargs: transformers' own, the options of `linear_cross_entropy`, and `skip_logits`: True for no logits in eval mode either,
    False for logits in training mode too.
    """

    forward = layers.causal_lm_of(QWEN3.family).forward


class MoeDecoderLayer(Layer):
    """For Qwen3MoeDecoderLayer: hidden_states [batch, tokens, hidden] -> the same, in three autograd nodes."""

    forward = layers.decoder_layer_of(QWEN3_MOE).forward


class MoeModel(Layer):
    """For Qwen3MoeModel: the same, with attention of ours where it has the one that transformers chooses by default."""

    forward = layers.model(QWEN3_MOE.family).forward


class MoeCausalLM(Layer):
    """For Qwen3MoeForCausalLM: as `CausalLM`, with the router's auxiliary loss and its logits where they are asked for."""

    forward = layers.causal_lm_of(QWEN3_MOE.family).forward


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
