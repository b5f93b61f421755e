"""Attention whose output is multiplied by the sigmoid of a gate, as Qwen3.5's and Qwen3-Next's: the norms of queries and keys with their
rotary embedding in one operation, and the gate in another."""

from typing import Optional

import torch

from ...decoder.nodes import product_dtype
from ...ops.gated_output import gated_output
from ...ops.rotary import qk_norm_rotary
from ..parts.explanation import Reason
from ..parts.modules import why_not_own
from .decoder_layer import ROTARY, FusedLayer, attend
from .fusable import has_plain_norm

__all__ = ["gated_attention", "why_not_fused"]


def why_not_fused(own: FusedLayer, attention, x) -> Optional[Reason]:
    """Why an attention module is called as it is, for a normalised input x; None where `gated_attention` stands in for it."""
    if not own.run_by(attention):
        return why_not_own(attention, "self_attn")
    parts = attention.__dict__["_modules"]
    if not all(has_plain_norm(own, parts[name], x) for name in ("q_norm", "k_norm")) or parts["q_norm"].eps != parts["k_norm"].eps:
        return Reason("hooks", f"q_norm or k_norm has hooks, another epsilon than the other, or a weight that is not of {x.dtype}")
    if not own.rotary(ROTARY):
        return Reason("replaced", f"{ROTARY} is not transformers' own")
    if x.dtype != product_dtype(x):
        return Reason("autocast", f"autocast to {product_dtype(x)} over {x.dtype}")
    return None


def gated_attention(own: FusedLayer, attention, projected, shape, attention_mask, cache, position_embeddings, kwargs) -> torch.Tensor:
    """Computes attention with its gate up to the input of the output projection, [batch, tokens, heads, head_dim].

    projected: the results of q_proj, k_proj and v_proj; shape: of that, [batch, tokens, hidden]."""
    parts, head_dim, family = attention.__dict__["_modules"], attention.head_dim, own.family
    cos, sin = position_embeddings
    q, k, v = (p.view(*shape[:2], -1, width) for p, width in zip(projected, (2 * head_dim, head_dim, head_dim)))
    q, gate = q.chunk(2, -1)
    weights, turned = (parts["q_norm"].weight, parts["k_norm"].weight), cos.shape[-1] if cos.shape[-1] < head_dim else 0
    q, k = qk_norm_rotary(q, k, *weights, cos, sin, parts["q_norm"].eps, family.offset, family.rounds, turned)
    attended = attend(own, attention, q, k, v.transpose(1, 2), attention_mask, cache, kwargs)
    return gated_output(attended.reshape(gate.shape), gate)
