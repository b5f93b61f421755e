"""Layers that take the place of torch.nn's and transformers'. They have no state: `self` is the module whose forward they become."""

from torch import nn
from torch.nn import functional

from .forwards import gated, packed, rms_norm_forward, takes
from .shared.ops.general_rms_norm import general_rms_norm
from .shared.ops.group_norm import group_norm
from .shared.ops.layer_norm import layer_norm
from .shared.ops.llama4_rope import rotary_complex
from .shared.ops.mrope import partial_rotary, rotary_multimodal


class RMSNorm(nn.Module):
    """For transformers' RMSNorms of Llama's kind (weight, variance_epsilon): hidden_states [..., n] -> [..., n]."""

    can_torch_compile = True

    def forward(self, hidden_states):
        return rms_norm_forward(self, hidden_states)


class GemmaRMSNorm(nn.Module):
    """For transformers' RMSNorms of Gemma's kind, which multiply by 1 + weight: x [..., n] -> [..., n]."""

    can_torch_compile = True

    def forward(self, x):
        return rms_norm_forward(self, x, 1.0, "gemma")


class TorchRMSNorm(nn.Module):
    """For torch.nn.RMSNorm over the last dimension: x [..., n] -> [..., n]."""

    can_torch_compile = True

    def forward(self, x):
        if len(self.normalized_shape) != 1 or self.eps is None or not takes(x, self.weight):
            return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return general_rms_norm(x, self.weight, self.eps, 0.0, "gemma")


class LayerNorm(nn.Module):
    """For torch.nn.LayerNorm: input [..., *normalized_shape] -> the same."""

    can_torch_compile = True

    def forward(self, input):
        if not takes(input, self.weight, self.bias):
            return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return layer_norm(input, self.weight, self.bias, self.eps, self.normalized_shape)


class GroupNorm(nn.Module):
    """For torch.nn.GroupNorm: input [batch, channels, ...] -> the same."""

    can_torch_compile = True

    def forward(self, input):
        if not takes(input, self.weight, self.bias):
            return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class GatedMLP(nn.Module):
    """For MLPs with gate_proj, up_proj, down_proj and act_fn (SiLU or GELU): x [..., hidden] -> [..., hidden]."""

    can_torch_compile = True

    def forward(self, x):
        return self.down_proj(gated(self, self.gate_proj(x), self.up_proj(x)))


class PackedMLP(nn.Module):
    """For MLPs with gate_up_proj and down_proj (Phi-3): hidden_states [..., hidden] -> [..., hidden]."""

    can_torch_compile = True

    def forward(self, hidden_states):
        return self.down_proj(packed(self, self.gate_up_proj(hidden_states)))


class RotaryPosEmb(nn.Module):
    """For `apply_rotary_pos_emb`: q, k [batch, heads, tokens, head_dim] and cos, sin [batch, tokens, rotary_dim] -> q, k."""

    can_torch_compile = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return partial_rotary(q, k, cos, sin, None, unsqueeze_dim)


class ComplexRotaryEmb(nn.Module):
    """For Llama 4's `apply_rotary_emb`: xq, xk [batch, tokens, heads, head_dim] and complex freqs_cis [batch, tokens, head_dim / 2] ->
    xq, xk."""

    can_torch_compile = True

    def forward(self, xq, xk, freqs_cis):
        return rotary_complex(xq, xk, freqs_cis)


class MultimodalRotaryPosEmb(nn.Module):
    """For `apply_multimodal_rotary_pos_emb`: q, k [batch, heads, tokens, head_dim] and cos, sin [3, batch, tokens, head_dim] -> q, k."""

    can_torch_compile = True

    def forward(self, q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        return rotary_multimodal(q, k, cos, sin, mrope_section, unsqueeze_dim)
