"""Doing ahead of the first step what it would otherwise pay for, and forgetting what was measured."""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from .ops.decoder import norm_attention_inputs
from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.rms_norm import add_rms_norm, rms_norm
from .ops.rotary import qk_norm_rotary, rotary
from .ops.swiglu import mlp

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOKENS = 256


class Sizes(NamedTuple):
    """What the kernels of a Qwen3 depend on."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


# Qwen3 0.6B, 1.7B, 4B, 8B, 14B, 32B.
FAMILY = (
    Sizes(1024, 3072, 16, 8, 128, 151936),
    Sizes(2048, 6144, 16, 8, 128, 151936),
    Sizes(2560, 9728, 32, 8, 128, 151936),
    Sizes(4096, 12288, 32, 8, 128, 151936),
    Sizes(5120, 17408, 40, 8, 128, 151936),
    Sizes(5120, 25600, 64, 8, 128, 151936),
)


def sizes_of(model) -> Sizes:
    """From the configuration of a model or of the first of its modules that has one. Raises TypeError when there is none."""
    config = next((module.config for module in model.modules() if hasattr(getattr(module, "config", None), "head_dim")), None)
    if config is None:
        raise TypeError(f"model is a {type(model).__name__} without a Qwen3 configuration, expected a Qwen3 model")
    return Sizes(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.vocab_size,
    )


def warm_up(device, dtype, sizes: Sizes) -> None:
    """Runs each operation forward and backward on a few tokens. Draws no random numbers."""

    def ones(*shape):
        return torch.ones(shape, dtype=dtype, device=device, requires_grad=True)

    for shape in ((TOKENS, sizes.hidden), (1, TOKENS, sizes.heads, sizes.head_dim), (1, TOKENS, sizes.kv_heads, sizes.head_dim)):
        rms_norm(ones(*shape), ones(shape[-1])).sum().backward()
    q, k = (ones(1, TOKENS, heads, sizes.head_dim).transpose(1, 2) for heads in (sizes.heads, sizes.kv_heads))
    cos = torch.ones(1, TOKENS, sizes.head_dim, dtype=dtype, device=device)
    sum(x.sum() for x in rotary(q, k, cos, cos)).backward()
    # The kernels see only the intermediate size and the vocabulary, so the other side of the weights may be narrow.
    narrow = 64
    up, down = (sizes.intermediate, narrow), (narrow, sizes.intermediate)
    mlp(ones(TOKENS, narrow), ones(*up), ones(*up), ones(*down)).sum().backward()
    # The decoder layer's kernels.
    hidden = (TOKENS, sizes.hidden)
    sum(x.sum() for x in add_rms_norm(ones(*hidden), ones(*hidden), ones(sizes.hidden))).backward()
    q, k, v = (ones(heads * sizes.head_dim, sizes.hidden) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
    norms = ones(sizes.head_dim), ones(sizes.head_dim)
    inputs = norm_attention_inputs(ones(*hidden), ones(sizes.hidden), (q, k, v), *norms, cos, cos, (1, TOKENS))
    sum(x.sum() for x in inputs).backward()
    q, k = (ones(1, TOKENS, heads, sizes.head_dim) for heads in (sizes.heads, sizes.kv_heads))
    sum(x.sum() for x in qk_norm_rotary(q, k, *norms, cos, cos)).backward()
    target = torch.zeros(TOKENS, dtype=torch.int64, device=device)
    linear_cross_entropy(ones(TOKENS, narrow), ones(sizes.vocabulary, narrow), target).backward()


def warmup_all_kernels(model=None) -> None:
    """Loads what a Qwen3 needs ahead of its first step: each operation once, forward and backward, on a few tokens.

    model: whose sizes, dtypes and GPUs; by default the sizes of the whole family in bf16 on the current GPU. Leaves the model,
    its gradients and the random numbers alone. On a CPU there is nothing to load. Raises TypeError when it is no Qwen3.
    """
    if model is None:
        if not torch.cuda.is_available():
            return
        cases = [(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, sizes) for sizes in FAMILY]
    else:
        sizes = sizes_of(model)
        found = {(parameter.device, parameter.dtype) for parameter in model.parameters()}
        cases = [(device, dtype, sizes) for device, dtype in found if device.type == "cuda" and dtype in DTYPES]
    with torch.enable_grad():
        for device, dtype, sizes in cases:
            warm_up(device, dtype, sizes)


def cache_file() -> Path:
    """Where measured choices of variants are remembered: in BASTILE_CACHE, else in `bastile` under XDG_CACHE_HOME or ~/.cache."""
    folder = os.environ.get("BASTILE_CACHE")
    if not folder:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bastile"
    return Path(folder) / "tuning.json"


def clear_autotune_cache() -> None:
    """Forgets which variants were measured to be the fastest on this machine."""
    try:
        cache_file().unlink()
    except FileNotFoundError:
        pass
