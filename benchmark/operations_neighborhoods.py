"""Attention of every token to the seven around it."""

import torch
import torch.nn.functional as F

from . import providers
from .liger_operations import declare
from .operation import Inputs, Limit, bytes_moved

WINDOW = 7


def inputs(size, tokens, random) -> Inputs:
    shape = (1, size.heads, tokens, size.head_dim)
    return Inputs(tuple(random.normal(*shape) for _ in range(3)), output_gradients=(random.normal(*shape),))


def neighbours(tokens, device) -> torch.Tensor:
    """Return which keys each query sees, [tokens, tokens]."""
    at = torch.arange(tokens, device=device)
    return (at[:, None] - at).abs() <= WINDOW // 2


def formula(q, k, v):
    """Compute the softmax over all keys but those outside of the window."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(wide) * q.shape[-1] ** -0.5
    return scores.masked_fill(~neighbours(q.shape[2], q.device), float("-inf")).softmax(-1).to(q.dtype) @ v


def of_torch():
    """Return scaled_dot_product_attention with a mask."""
    masks = {}

    def call(q, k, v):
        if q.shape[2] not in masks:
            masks[q.shape[2]] = neighbours(q.shape[2], q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=masks[q.shape[2]])

    return call


def of_flex():
    """Return compiled FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    masks, compiled = {}, providers.compiled(flex_attention)

    def near(b, h, i, j):
        return (i - j).abs() <= WINDOW // 2

    def call(q, k, v):
        tokens = q.shape[2]
        if tokens not in masks:
            masks[tokens] = create_block_mask(near, None, None, tokens, tokens, device=q.device)
        return compiled(q, k, v, block_mask=masks[tokens])

    return call


NEIGHBORHOOD_ATTENTION = declare(
    "fused_neighborhood_attention", "neighborhood attention", 40, "LigerFusedNeighborhoodAttentionFunction", ours="neighborhood_attention",
    outputs=("out",), gradients=("dq", "dk", "dv"),
    inputs=inputs,
    formula=formula,
    call=lambda function: lambda q, k, v: function(q, k, v, WINDOW),
    call_theirs=lambda function: lambda q, k, v: function(q, k, v, WINDOW, 1, None),
    compiled=False,
    peers={"torch_fused": of_torch, "torch_flex": of_flex},
    work=bytes_moved(4, 8),  # q, k, v, out; the same, dout, dq, dk, dv
    tokens=(1024, 4096),
    limits=(Limit(4096, 0.45, peer=1.85, liger=25.0, checked=256),),
)
