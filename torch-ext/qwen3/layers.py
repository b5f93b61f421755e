"""The layers that take the place of Qwen3's and Qwen3-MoE's. They have no state: `self` is the module whose forward they become."""

from torch import nn

from .decoder_layer import QWEN3, QWEN3_MOE, decoder_layer_forward
from .shared.hf.causal_lm import causal_lm_forward, causal_lm_loss, causal_lm_loss_of_logits
from .shared.hf.checkpointing import checkpointed
from .shared.hf.decoder_model import model_forward
from .shared.hf.experts import experts_forward
from .shared.hf.forwards import mlp_forward, rms_norm_forward, rotary_pos_emb
from .shared.hf.modules import mark_forwards


class RMSNorm(nn.Module):
    """For Qwen3RMSNorm and Qwen3MoeRMSNorm: hidden_states [..., n] -> [..., n]."""

    can_torch_compile = True

    def forward(self, hidden_states):
        return rms_norm_forward(self, hidden_states)


class RotaryPosEmb(nn.Module):
    """For `apply_rotary_pos_emb`: q, k [batch, heads, tokens, head_dim] and cos, sin [batch, tokens, head_dim] -> q, k."""

    can_torch_compile = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


class MLP(nn.Module):
    """For Qwen3MLP and Qwen3MoeMLP: x [..., hidden] -> [..., hidden]. Recomputes its activations in the backward pass."""

    can_torch_compile = True

    def forward(self, x):
        return mlp_forward(self, x)


class Experts(nn.Module):
    """For Qwen3MoeExperts: hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, top-k] -> [tokens, hidden]."""

    can_torch_compile = True

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class SwiGLUMLP(nn.Module):
    """For the layer name that transformers reserves for MLPs such as Qwen3's."""

    can_torch_compile = True

    def forward(self, x):
        return mlp_forward(self, x)


class DecoderLayer(nn.Module):
    """For Qwen3DecoderLayer: hidden_states [batch, tokens, hidden] -> the same, in three autograd nodes."""

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
        kwargs.update(position_ids=position_ids, use_cache=use_cache)
        return decoder_layer_forward(QWEN3, self, hidden_states, attention_mask, past_key_values, position_embeddings, kwargs)


class Model(nn.Module):
    """For Qwen3Model: the same, with attention of ours where it has the one that transformers chooses by default."""

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
    """For Qwen3ForCausalLM. With labels in training mode the logits are never all in memory, and `logits` is None.

    kwargs: transformers' own, the options of `linear_cross_entropy`, and `skip_logits`: True for no logits in eval mode either,
    False for logits in training mode too.
    """

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
        logits_to_keep=0,
        **kwargs,
    ):
        return causal_lm_forward(
            self, input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, labels, use_cache, logits_to_keep, **kwargs
        )


class MoeDecoderLayer(nn.Module):
    """For Qwen3MoeDecoderLayer: hidden_states [batch, tokens, hidden] -> the same, in three autograd nodes."""

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
        kwargs.update(position_ids=position_ids, use_cache=use_cache)
        return decoder_layer_forward(QWEN3_MOE, self, hidden_states, attention_mask, past_key_values, position_embeddings, kwargs)


class MoeModel(nn.Module):
    """For Qwen3MoeModel: the same, with attention of ours where it has the one that transformers chooses by default."""

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


class MoeCausalLM(nn.Module):
    """For Qwen3MoeForCausalLM: as `CausalLM`, with the router's auxiliary loss and its logits where they are asked for."""

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


class ForCausalLMLoss(nn.Module):
    """For the layer name that transformers reserves for the loss of a causal LM.

    With hidden_states [..., features] and lm_head_weight [vocab_size, features] the logits may be None and are never made;
    with logits [..., vocab_size] alone it is PyTorch's cross entropy of them in float32. kwargs: the options of
    `linear_cross_entropy`; others are for nothing, as in transformers.
    """

    can_torch_compile = True

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


mark_forwards(RMSNorm, RotaryPosEmb, Model, MLP, Experts, SwiGLUMLP, DecoderLayer, CausalLM, ForCausalLMLoss)
mark_forwards(MoeModel, MoeDecoderLayer, MoeCausalLM)
