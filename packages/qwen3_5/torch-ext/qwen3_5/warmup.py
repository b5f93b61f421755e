"""Doing ahead of the first step what it would otherwise pay for, and choosing between kernels on the way."""

from functools import partial

import torch

from .families import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from .shared.hf import warmup
from .shared.hf.decoder_layer import FusedLayer
from .shared.hf.warmup import EPS, Case, Maker, Sizes, attend
from .shared.ops.gated_delta_rule import gated_delta_rule
from .shared.ops.gated_output import gated_output
from .shared.ops.gated_rms_norm import gated_rms_norm
from .shared.ops.rotary import qk_norm_rotary
from .shared.ops.short_conv import TAPS, short_conv
from .shared.runtime.tuning import cache_file, clear_autotune_cache, run_backward, warm_up_models

__all__ = ["cache_file", "clear_autotune_cache", "warmup_all_kernels"]

# Qwen3.5 9B, 35B-A3B.
FAMILY = (
    Case(QWEN3_5, Sizes(4096, 12288, 16, 4, 256, 248320, angles=64, delta=(16, 32, 128, 128))),
    Case(QWEN3_5_MOE, Sizes(2048, 0, 16, 2, 256, 248320, angles=64, expert=512, top_k=8, shared=512, delta=(16, 32, 128, 128))),
)
DOCUMENTS = 1, 4, 32  # the kernels of the gated delta rule differ by their number


def mix(make: Maker, own: FusedLayer, sizes: Sizes) -> None:
    """Runs gated attention and a delta net, the two ways in which these layers mix tokens."""
    family, head_dim = own.family, sizes.head_dim
    cos = torch.ones(1, make.tokens, sizes.angles or head_dim, dtype=make.dtype, device=make.device)
    q, k, gate = (make.ones(1, make.tokens, heads, head_dim) for heads in (sizes.heads, sizes.kv_heads, sizes.heads))
    turned = sizes.angles if sizes.angles < head_dim else 0
    norms = make.ones(head_dim), make.ones(head_dim)
    run_backward(*qk_norm_rotary(q, k, *norms, cos, cos, EPS, family.offset, family.rounds, turned))
    attend(make, sizes)
    gated_output(make.ones(*gate.shape), gate).sum().backward()
    key_heads, heads, length, width = sizes.delta
    channels = 2 * key_heads * length + heads * width
    short_conv(make.ones(1, make.tokens, channels), make.ones(channels, TAPS)).sum().backward()
    q, k, v = (make.ones(1, make.tokens, n, size) for n, size in ((key_heads, length), (key_heads, length), (heads, width)))
    g, beta = make.ones(1, make.tokens, heads), make.ones(1, make.tokens, heads)
    for count in DOCUMENTS:
        bounds = torch.arange(count + 1, device=make.device, dtype=torch.int32) * (make.tokens // count)
        bounds[-1] = make.tokens
        gated_delta_rule(q, k, v, -g, beta, cu_seqlens=bounds, l2_norm=True)[0].sum().backward()
    rows = make.ones(make.tokens * heads, width), make.ones(make.tokens * heads, width)
    gated_rms_norm(*rows, make.ones(width)).sum().backward()


warm_up = partial(warmup.warm_up, mix=mix)
case_of = partial(warmup.case_of, rows=(QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT))


def warmup_all_kernels(model=None) -> None:
    """Loads what a Qwen3.5 or Qwen3-Next needs ahead of its first step, and finds the fastest kernels for this GPU.

    Each operation runs once, forward and backward, on a few tokens. Where a kernel has several prebuilt candidates, they are timed
    on more, and the measurements are kept in `cache_file()` by GPU, driver and build of this package.

    Args:
        model: whose sizes, dtypes and GPUs; by default the sizes of the 9B and the 35B-A3B in bf16 on the current GPU. The model, its
            gradients and the random numbers are left alone. On a CPU there is nothing to load.

    Raises:
        TypeError: when the model is of another family.
    """
    warm_up_models(warm_up, model, case_of, FAMILY)
