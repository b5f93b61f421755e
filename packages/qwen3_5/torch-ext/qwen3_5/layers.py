"""The layers that take the place of Qwen3.5's and Qwen3-Next's, and those under the names that transformers opens for every gated delta
net. They have no state: `self` is the module whose forward they become. What makes one of a row says what goes in and what comes out."""

from .shared.hf.install import layers
from .shared.hf.layer import delta_net
from .shared.hf.parts.modules import Layer
from .shared.rows import qwen3_5 as rows
from .shared.rows.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT

RMSNormZeroCentered = layers.rms_norm_of(QWEN3_5.family)  # of all three, which multiply by 1 + weight
RMSNormGated = rows.RMSNormGated
RotaryPosEmb = layers.rotary_layer_of(QWEN3_5.family)
MLP = layers.mlp_of(QWEN3_5.family)  # also the experts that every token goes to
Experts = layers.experts_of(QWEN3_5_MOE.family)
Qwen3_5GatedDeltaNet = rows.GatedDeltaNet
DecoderLayer = layers.decoder_layer_of(QWEN3_5)
Model = rows.Model
CausalLM = layers.causal_lm_of(QWEN3_5.family)
WithVision = layers.with_vision_of(QWEN3_5.family, *QWEN3_5.family.towers)  # the vision tower is left as it is
MoeDecoderLayer = layers.decoder_layer_of(QWEN3_5_MOE)
MoeCausalLM = layers.causal_lm_of(QWEN3_5_MOE.family)
MoeWithVision = layers.with_vision_of(QWEN3_5_MOE.family, *QWEN3_5_MOE.family.towers)
NextDecoderLayer = layers.decoder_layer_of(QWEN3_NEXT)
NextCausalLM = layers.causal_lm_of(QWEN3_NEXT.family)


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
