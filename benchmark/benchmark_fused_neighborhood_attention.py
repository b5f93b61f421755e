"""Attention of every token to the seven around it."""

import torch
import torch.nn.functional as F

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import providers
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, LigerConvention, Limit, Operation, bytes_moved
from .suites import LIGER

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


def of_liger():
    function = providers.liger("ops", "LigerFusedNeighborhoodAttentionFunction")
    return lambda q, k, v: function.apply(q, k, v, WINDOW, 1, None)


def of_package(package):
    function = providers.operation(package, "neighborhood_attention")
    return lambda q, k, v: function(q, k, v, WINDOW)


FUSED_NEIGHBORHOOD_ATTENTION = Operation(
    name="fused_neighborhood_attention",
    title="neighborhood attention",
    suite=LIGER,
    position=40,
    outputs=("out",),
    gradients=("dq", "dk", "dv"),
    inputs=inputs,
    formula=formula,
    bastile=of_package,
    formula_provider="torch",
    compiled=False,
    peers={"torch_fused": of_torch, "torch_flex": of_flex, "liger": of_liger},
    work=bytes_moved(4, 8),  # q, k, v, out; the same, dout, dq, dk, dv
    tokens=(1024, 4096),
    limits=(Limit(4096, 0.45, peer=1.85, liger=25.0, checked=256),),
    liger=LigerConvention(x_name="T", x_label="sequence length"),
)


class FusedNeighborhoodAttentionBenchmark(OperationBenchmark):
    operation = FUSED_NEIGHBORHOOD_ATTENTION


if __name__ == "__main__":
    main(FUSED_NEIGHBORHOOD_ATTENTION)
