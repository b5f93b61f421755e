"""Layers that take the place of torch.nn's and transformers'. They have no state: `self` is the module whose forward they become."""

from .forwards import (
    gated_mlp_forward,
    group_norm_forward,
    layer_norm_forward,
    packed_mlp_forward,
    rms_norm_forward,
    torch_rms_norm_forward,
)
from .shared.hf.parts.modules import Layer, rotary_forward
from .shared.ops.llama4_rope import rotary_complex
from .shared.ops.mrope import partial_rotary, rotary_multimodal


class RMSNorm(Layer):
    """For transformers' RMSNorms of Llama's kind (weight, variance_epsilon): hidden_states [..., n] -> [..., n]."""

    def forward(self, hidden_states):
        return rms_norm_forward(self, hidden_states)


class GemmaRMSNorm(Layer):
    """For transformers' RMSNorms of Gemma's kind, which multiply by 1 + weight: x [..., n] -> [..., n]."""

    def forward(self, x):
        return rms_norm_forward(self, x, 1.0, "gemma")


class TorchRMSNorm(Layer):
    """For torch.nn.RMSNorm over the last dimension: x [..., n] -> [..., n]."""

    def forward(self, x):
        return torch_rms_norm_forward(self, x)


class LayerNorm(Layer):
    """For torch.nn.LayerNorm: input [..., *normalized_shape] -> the same."""

    def forward(self, input):
        return layer_norm_forward(self, input)


class GroupNorm(Layer):
    """For torch.nn.GroupNorm: input [batch, channels, ...] -> the same."""

    def forward(self, input):
        return group_norm_forward(self, input)


class GatedMLP(Layer):
    """For MLPs with gate_proj, up_proj, down_proj and act_fn (SiLU or GELU): x [..., hidden] -> [..., hidden]."""

    def forward(self, x):
        return gated_mlp_forward(self, x)


class PackedMLP(Layer):
    """For MLPs with gate_up_proj and down_proj (Phi-3): hidden_states [..., hidden] -> [..., hidden]."""

    def forward(self, hidden_states):
        return packed_mlp_forward(self, hidden_states)


class RotaryPosEmb(Layer):
    """For `apply_rotary_pos_emb`: q, k [batch, heads, tokens, head_dim] and cos, sin [batch, tokens, rotary_dim] -> q, k."""

    forward = rotary_forward(lambda q, k, cos, sin, unsqueeze_dim: partial_rotary(q, k, cos, sin, None, unsqueeze_dim))


class ComplexRotaryEmb(Layer):
    """For Llama 4's `apply_rotary_emb`: xq, xk [batch, tokens, heads, head_dim] and complex freqs_cis [batch, tokens, head_dim / 2] ->
    xq, xk."""

    def forward(self, xq, xk, freqs_cis):
        return rotary_complex(xq, xk, freqs_cis)


class MultimodalRotaryPosEmb(Layer):
    """For `apply_multimodal_rotary_pos_emb`: q, k [batch, heads, tokens, head_dim] and cos, sin [3, batch, tokens, head_dim] -> q, k."""

    def forward(self, q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        return rotary_multimodal(q, k, cos, sin, mrope_section, unsqueeze_dim)
