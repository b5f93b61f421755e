"""Layers that take the place of torch.nn's and transformers'. They have no state: `self` is the module whose forward they become."""

from typing import Any

from torch.nn import functional

from .forwards import eps_of, gated, packed, takes
from .norms import rms_norm
from .shared.hf.parts.modules import Layer, rotary_forward
from .shared.ops.group_norm import group_norm
from .shared.ops.layer_norm import layer_norm
from .shared.ops.llama4_rope import rotary_complex
from .shared.ops.mrope import partial_rotary, rotary_multimodal


class RMSNorm(Layer):
    """For transformers' RMSNorms of Llama's kind (weight, variance_epsilon): hidden_states [..., n] -> [..., n]."""

    def forward(self: Any, hidden_states):
        return rms_norm(hidden_states, self.weight, eps_of(self))


class GemmaRMSNorm(Layer):
    """For transformers' RMSNorms of Gemma's kind, which multiply by 1 + weight: x [..., n] -> [..., n]."""

    def forward(self: Any, x):
        return rms_norm(x, self.weight, eps_of(self), 1.0, "gemma")


class TorchRMSNorm(Layer):
    """For torch.nn.RMSNorm over the last dimension: x [..., n] -> [..., n]."""

    def forward(self: Any, x):
        if len(self.normalized_shape) != 1 or self.eps is None or not takes(x, self.weight):
            return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps, 0.0, "gemma")


class LayerNorm(Layer):
    """For torch.nn.LayerNorm: input [..., *normalized_shape] -> the same."""

    def forward(self: Any, input):
        if not takes(input, self.weight, self.bias):
            return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return layer_norm(input, self.weight, self.bias, self.eps, self.normalized_shape)


class GroupNorm(Layer):
    """For torch.nn.GroupNorm: input [batch, channels, ...] -> the same."""

    def forward(self: Any, input):
        if not takes(input, self.weight, self.bias):
            return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class GatedMLP(Layer):
    """For MLPs with gate_proj, up_proj, down_proj and act_fn (SiLU or GELU): x [..., hidden] -> [..., hidden]."""

    def forward(self: Any, x):
        return self.down_proj(gated(self, self.gate_proj(x), self.up_proj(x)))


class PackedMLP(Layer):
    """For MLPs with gate_up_proj and down_proj (Phi-3): hidden_states [..., hidden] -> [..., hidden]."""

    def forward(self: Any, hidden_states):
        return self.down_proj(packed(self, self.gate_up_proj(hidden_states)))


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
