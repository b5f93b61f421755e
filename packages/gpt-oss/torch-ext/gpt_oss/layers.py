"""The layers that take the place of GPT-OSS's. They have no state: `self` is the module whose forward they become."""

from torch import nn

from .decoder_layer import decoder_layer_forward, rms_norm_forward
from .shared.hf.causal_lm import causal_lm_forward
from .shared.hf.checkpointing import checkpointed
from .shared.hf.decoder_model import model_forward
from .shared.hf.experts import experts_forward
from .shared.hf.forwards import rotary_pos_emb
from .shared.hf.modules import mark_forwards


class RMSNorm(nn.Module):
    """For GptOssRMSNorm: hidden_states [..., n] -> [..., n]."""

    can_torch_compile = True

    def forward(self, hidden_states):
        return rms_norm_forward(self, hidden_states)


class RotaryPosEmb(nn.Module):
    """For `apply_rotary_pos_emb`: q, k [batch, heads, tokens, head_dim] and cos, sin [batch, tokens, head_dim / 2] -> q, k."""

    can_torch_compile = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


class Experts(nn.Module):
    """For GptOssExperts: hidden_states [tokens, hidden], router_indices and routing_weights [tokens, top-k] -> [tokens, hidden]."""

    can_torch_compile = True

    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        return experts_forward(self, hidden_states, router_indices, routing_weights)


class DecoderLayer(nn.Module):
    """For GptOssDecoderLayer: hidden_states [batch, tokens, hidden] -> the same, the first residual addition inside the norm behind it."""

    can_torch_compile = True

    @checkpointed
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
        **kwargs,
    ):
        kwargs.update(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
        )
        return decoder_layer_forward(self, hidden_states, kwargs)


class Model(nn.Module):
    """For GptOssModel: the same, with attention of ours where it has the one that transformers chooses by default."""

    can_torch_compile = True

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        return model_forward(self, input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **kwargs)


class CausalLM(nn.Module):
    """For GptOssForCausalLM. With labels in training mode the logits are never all in memory, and `logits` is None."""

    can_torch_compile = True

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_router_logits=None,
        logits_to_keep=0,
        **kwargs,
    ):
        return causal_lm_forward(
            self, input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, labels, use_cache, logits_to_keep,
            output_router_logits=output_router_logits, **kwargs,
        )


mark_forwards(RMSNorm, RotaryPosEmb, Model, Experts, DecoderLayer, CausalLM)
