"""The layers that take the place of GPT-OSS's. They have no state: `self` is the module whose forward they become."""

from .families import GPT_OSS
from .shared.hf import layers


class RMSNorm(layers.rms_norm_of(GPT_OSS.family)):
    """For GptOssRMSNorm: hidden_states [..., n] -> [..., n]."""


class RotaryPosEmb(layers.rotary_layer_of(GPT_OSS.family)):
    """For `apply_rotary_pos_emb`: q, k [batch, heads, tokens, head_dim] and cos, sin [batch, tokens, head_dim / 2] -> q, k."""


class Experts(layers.experts_of(GPT_OSS.family)):
    """For GptOssExperts: hidden_states [tokens, hidden], router_indices and routing_weights [tokens, top-k] -> [tokens, hidden]."""


class DecoderLayer(layers.decoder_layer_of(GPT_OSS)):
    """For GptOssDecoderLayer: hidden_states [batch, tokens, hidden] -> the same, in three autograd nodes."""


class Model(layers.model()):
    """For GptOssModel: the same, with attention of ours where it has the one that transformers chooses by default."""


class CausalLM(layers.causal_lm_of(GPT_OSS.family)):
    """For GptOssForCausalLM. With labels in training mode the logits are never all in memory, and `logits` is None."""
