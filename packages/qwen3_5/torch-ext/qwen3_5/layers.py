"""The layers that take the place of Qwen3.5's and Qwen3-Next's, and those under the names that transformers opens for every gated delta
net. They have no state: `self` is the module whose forward they become."""

from .shared.hf.install import layers
from .shared.hf.layer import delta_net
from .shared.hf.parts.modules import Layer
from .shared.rows import qwen3_5 as rows
from .shared.rows.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT


class RMSNormZeroCentered(Layer):
    """For Qwen3_5RMSNorm, Qwen3_5MoeRMSNorm and Qwen3NextRMSNorm, which multiply by 1 + weight: x [..., n] -> [..., n]."""

    forward = layers.rms_norm_of(QWEN3_5.family).forward


class RMSNormGated(Layer):
    """For the norm that follows a delta net: hidden_states and gate [..., n] -> [..., n]."""

    forward = rows.RMSNormGated.forward


class RotaryPosEmb(Layer):
    """For `apply_rotary_pos_emb`, which turns the first part of each head."""

    forward = layers.rotary_layer_of(QWEN3_5.family).forward


class MLP(Layer):
    """For Qwen3_5MLP and its kin, also the experts that every token goes to: x [..., hidden] -> [..., hidden]. Recomputes its activations
    in the backward pass."""

    forward = layers.mlp_of(QWEN3_5.family).forward


class Experts(Layer):
    """For Qwen3_5MoeExperts and Qwen3NextExperts: hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, top-k] ->
    [tokens, hidden]."""

    forward = layers.experts_of(QWEN3_5_MOE.family).forward


class Qwen3_5GatedDeltaNet(Layer):
    """For the delta nets of all three: hidden_states [batch, tokens, hidden] -> the same, with documents that do not see each other."""

    forward = rows.GatedDeltaNet.forward


class ChunkGatedDeltaRule(Layer):
    """For the function `chunk_gated_delta_rule` of every gated delta net: query, key [batch, tokens, key heads, K], value [batch, tokens,
    heads, V], g and beta [batch, tokens, heads] -> (output like value, final states)."""

    def forward(self, query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                use_qk_l2norm_in_kernel=False, **kwargs):
        state = initial_state, output_final_state, use_qk_l2norm_in_kernel
        return delta_net.rule_function(query, key, value, g, beta, *state, **kwargs)


class FusedRecurrentGatedDeltaRule(Layer):
    """For the function `fused_recurrent_gated_delta_rule`: the same, for generating text."""

    def forward(self, query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **kwargs):
        state = initial_state, output_final_state, use_qk_l2norm_in_kernel
        return delta_net.rule_function(query, key, value, g, beta, *state, **kwargs)


class CausalConv1dFn(Layer):
    """For the function `causal_conv1d_fn`: hidden_states [batch, channels, tokens] -> the same."""

    def forward(self, hidden_states, weight, bias=None, activation=None, **kwargs):
        documents = kwargs.get("cu_seq_lens_q")
        return delta_net.convolution_function(hidden_states, weight, bias, activation, documents, kwargs.get("seq_idx"))


class CausalConv1dUpdate(Layer):
    """For the function `causal_conv1d_update`, which writes the last tokens into conv_state [batch, channels, taps]."""

    def forward(self, hidden_states, conv_state, weight, bias=None, activation=None):
        return delta_net.convolution_step(hidden_states, conv_state, weight, bias, activation)


class DecoderLayer(Layer):
    """For Qwen3_5DecoderLayer: hidden_states [batch, tokens, hidden] -> the same; norm, MLP and residual connections in one node."""

    forward = layers.decoder_layer_of(QWEN3_5).forward


class Model(Layer):
    """For Qwen3_5TextModel, Qwen3_5MoeTextModel and Qwen3NextModel: finds documents in position_ids where the caller gave no more, which
    transformers does not do."""

    forward = rows.Model.forward


class CausalLM(Layer):
    """For Qwen3_5ForCausalLM. With labels in training mode the logits are never all in memory, and `logits` is None."""

    forward = layers.causal_lm_of(QWEN3_5.family).forward


class WithVision(Layer):
    """For Qwen3_5ForConditionalGeneration: as `CausalLM`; the vision tower is left as it is."""

    forward = layers.with_vision_of(QWEN3_5.family, *QWEN3_5.family.towers).forward


class MoeDecoderLayer(Layer):
    """For Qwen3_5MoeDecoderLayer: as `DecoderLayer`, with the router, its experts and the one that every token goes to."""

    forward = layers.decoder_layer_of(QWEN3_5_MOE).forward


class MoeCausalLM(Layer):
    """For Qwen3_5MoeForCausalLM: as `CausalLM`, with the router's auxiliary loss and its logits where they are asked for."""

    forward = layers.causal_lm_of(QWEN3_5_MOE.family).forward


class MoeWithVision(Layer):
    """For Qwen3_5MoeForConditionalGeneration: as `MoeCausalLM`; the vision tower is left as it is."""

    forward = layers.with_vision_of(QWEN3_5_MOE.family, *QWEN3_5_MOE.family.towers).forward


class NextDecoderLayer(Layer):
    """For Qwen3NextDecoderLayer: as `MoeDecoderLayer`."""

    forward = layers.decoder_layer_of(QWEN3_NEXT).forward


class NextCausalLM(Layer):
    """For Qwen3NextForCausalLM: as `MoeCausalLM`."""

    forward = layers.causal_lm_of(QWEN3_NEXT.family).forward
