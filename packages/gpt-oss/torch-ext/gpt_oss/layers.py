"""The layers that take the place of GPT-OSS's. They have no state: `self` is the module whose forward they become."""

from .shared.hf.install import layers
from .shared.hf.parts.modules import Layer
from .shared.rows.gpt_oss import GPT_OSS


class RMSNorm(Layer):
    """For GptOssRMSNorm: hidden_states [..., n] -> [..., n]."""

    forward = layers.rms_norm_of(GPT_OSS.family).forward


class RotaryPosEmb(Layer):
    """For `apply_rotary_pos_emb`: q, k [batch, heads, tokens, head_dim] and cos, sin [batch, tokens, head_dim / 2] -> q, k."""

    forward = layers.rotary_layer_of(GPT_OSS.family).forward


class Experts(Layer):
    """For GptOssExperts: hidden_states [tokens, hidden], router_indices and routing_weights [tokens, top-k] -> [tokens, hidden]."""

    forward = layers.experts_of(GPT_OSS.family).forward


class DecoderLayer(Layer):
    """For GptOssDecoderLayer: hidden_states [batch, tokens, hidden] -> the same, in three autograd nodes."""

    forward = layers.decoder_layer_of(GPT_OSS).forward


class Model(Layer):
    """For GptOssModel: the same, with attention of ours where it has the one that transformers chooses by default."""

    forward = layers.model(GPT_OSS.family).forward


class CausalLM(Layer):
    """For GptOssForCausalLM. With labels in training mode the logits are never all in memory, and `logits` is None."""

    forward = layers.causal_lm_of(GPT_OSS.family).forward
