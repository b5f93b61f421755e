"""Qwen3's formulas as transformers computes them in eager mode; tests/cpu/test_benchmark_correctness.py holds them equal bit for bit.

In float64 they are the reference that every provider is checked against.
"""

import torch
import torch.nn.functional as F

EPS = 1e-6


def to_float32(x):
    """Convert half precision; float64, for the reference, stays what it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x, weight, eps=EPS):
    """Compute Qwen3RMSNorm: normalise in fp32, round, then scale. x: [..., n]; weight: [n]."""
    x32 = to_float32(x)
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(x, residual, weight, eps=EPS):
    """Compute what a decoder layer does between attention and MLP: the norm of the sum, and the sum, which goes on as the residual."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def _rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotary(q, k, cos, sin):
    """Compute apply_rotary_pos_emb. q, k: [batch, heads, tokens, head_dim]; cos, sin: [batch or 1, tokens, head_dim]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def qk_norm_rotary(q, k, q_weight, k_weight, cos, sin):
    """Compute q_norm, k_norm and rotary of Qwen3Attention. q, k: [batch, tokens, heads, head_dim] -> [batch, heads, tokens, head_dim]."""
    return rotary(rms_norm(q, q_weight).transpose(1, 2), rms_norm(k, k_weight).transpose(1, 2), cos, sin)


def swiglu(gate, up):
    """Compute what Qwen3MLP does between its projections."""
    return F.silu(gate) * up


def linear_cross_entropy(hidden, weight, target):
    """Compute lm_head and ForCausalLMLoss (which is in fp32), for labels that are already shifted."""
    return F.cross_entropy(to_float32(F.linear(hidden, weight)), target)


def angles(tokens, head_dim, theta=1e6):
    """Return the cos and sin that Qwen3RotaryEmbedding passes, [1, tokens, head_dim] in fp32."""
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.arange(tokens).float()[:, None] * frequency
    angle = torch.cat((angle, angle), -1)[None]
    return angle.cos(), angle.sin()
