"""Doing ahead of the first step what it would otherwise pay for, and choosing between kernels on the way."""

from typing import NamedTuple

import torch

from .shared.hf.attention_choice import head_dim_of
from .shared.ops import adamw
from .shared.ops.attention import attention, takes_heads
from .shared.ops.linear_cross_entropy import linear_cross_entropy
from .shared.ops.rms_norm import add_rms_norm, rms_norm
from .shared.ops.rotary import rotary
from .shared.ops.swiglu import mlp, swiglu
from .shared.runtime import tuning
from .shared.runtime.tuning import TOKENS, cache_file, clear_autotune_cache, run_backward

__all__ = ["cache_file", "clear_autotune_cache", "warmup_all_kernels"]


class Sizes(NamedTuple):
    """What the kernels of a decoder depend on."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


# Llama 3.1 8B and 3.2 3B, Qwen2.5 7B.
FAMILY = (
    Sizes(4096, 14336, 32, 8, 128, 128256),
    Sizes(3072, 8192, 24, 8, 128, 128256),
    Sizes(3584, 18944, 28, 4, 128, 152064),
)


def sizes_of(model) -> Sizes:
    """Reads the sizes from the configuration of a model, or of the first of its modules that has one. Raises TypeError without one."""
    config = next((module.config for module in model.modules() if hasattr(getattr(module, "config", None), "num_key_value_heads")), None)
    if config is None:
        raise TypeError(f"model is a {type(model).__name__} without the configuration of a decoder, expected a model of transformers")
    heads = config.num_attention_heads, config.num_key_value_heads, head_dim_of(config) or config.hidden_size // config.num_attention_heads
    return Sizes(config.hidden_size, config.intermediate_size, *heads, config.vocab_size)


def warm_up(device, dtype, sizes: Sizes, tokens: int = TOKENS) -> None:
    """Runs each operation forward and backward on some tokens. Draws no random numbers."""

    def ones(*shape):
        return torch.ones(shape, dtype=dtype, device=device, requires_grad=True)

    hidden = (tokens, sizes.hidden)
    rms_norm(ones(*hidden), ones(sizes.hidden)).sum().backward()
    run_backward(*add_rms_norm(ones(*hidden), ones(*hidden), ones(sizes.hidden)))
    q, k = (ones(1, tokens, heads, sizes.head_dim).transpose(1, 2) for heads in (sizes.heads, sizes.kv_heads))
    cos = torch.ones(1, tokens, sizes.head_dim, dtype=dtype, device=device)
    run_backward(*rotary(q, k, cos, cos))
    # The kernels see only the intermediate size and the vocabulary, so the other side of the weights may be narrow.
    narrow = 64
    up, down = (sizes.intermediate, narrow), (narrow, sizes.intermediate)
    mlp(ones(tokens, narrow), ones(*up), ones(*up), ones(*down)).sum().backward()
    swiglu(ones(tokens, sizes.intermediate), ones(tokens, sizes.intermediate)).sum().backward()
    if takes_heads(sizes.head_dim):
        heads = ones(1, tokens, sizes.heads, sizes.head_dim), *(ones(1, tokens, sizes.kv_heads, sizes.head_dim) for _ in range(2))
        attention(*heads).sum().backward()
    target = torch.zeros(TOKENS, dtype=torch.int64, device=device)
    head = ones(TOKENS, narrow), ones(sizes.vocabulary, narrow)
    run_backward(linear_cross_entropy(*head, target))
    adamw.load(dtype, device)
    with torch.no_grad():
        linear_cross_entropy(*head, target)


def warmup_all_kernels(model=None) -> None:
    """Loads what a decoder needs ahead of its first step, and finds the fastest kernels for this GPU.

    Each operation runs once, forward and backward, on a few tokens. Where a kernel has several prebuilt candidates, they are timed
    on more, and the measurements are kept in `cache_file()` by GPU, driver and build of this package.

    Args:
        model: whose sizes, dtypes and GPUs; by default the sizes of Llama 3 and Qwen2.5 in bf16 on the current GPU. The model, its
            gradients and the random numbers are left alone. On a CPU there is nothing to load.

    Raises:
        TypeError: when the model has no configuration of a decoder.
    """
    tuning.warm_up_models(warm_up, model, sizes_of, FAMILY)
