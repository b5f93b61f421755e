"""Doing ahead of the first step what it would otherwise pay for, and choosing between kernels on the way."""

from typing import Any, Dict, NamedTuple

import torch

from .norms import add_rms_norm, rms_norm
from .shared.ops import adamw
from .shared.ops.attention import attention
from .shared.ops.experts import experts
from .shared.ops.linear_cross_entropy import linear_cross_entropy
from .shared.ops.rotary import rotary
from .shared.runtime import tuning
from .shared.runtime.tuning import TOKENS, cache_file, clear_autotune_cache, run_backward

__all__ = ["cache_file", "clear_autotune_cache", "warmup_all_kernels"]


class Sizes(NamedTuple):
    """What the kernels of a GPT-OSS depend on. top_k: experts a token goes to."""

    hidden: int
    intermediate: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


FAMILY = Sizes(2880, 2880, 4, 64, 8, 64, 201088)  # 20B and 120B


def sizes_of(model) -> Sizes:
    """From the configuration of a model or of the first of its modules that has one. Raises TypeError when there is none."""
    found = (getattr(module, "config", None) for module in model.modules())
    config = next((config for config in found if getattr(config, "model_type", "") == "gpt_oss"), None)
    if config is None:
        raise TypeError(f"model is a {type(model).__name__} without a GPT-OSS configuration, expected a GPT-OSS model")
    return Sizes(
        config.hidden_size,
        config.intermediate_size,
        config.num_experts_per_tok,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.vocab_size,
    )


def warm_up(device, dtype, sizes: Sizes, tokens: int = TOKENS) -> None:
    """Runs each operation forward and backward on some tokens. Draws no random numbers."""

    def ones(*shape):
        return torch.ones(shape, dtype=dtype, device=device, requires_grad=True)

    hidden = (tokens, sizes.hidden)
    rms_norm(ones(*hidden), ones(sizes.hidden)).sum().backward()
    y, total = add_rms_norm(ones(*hidden), ones(*hidden), ones(sizes.hidden))
    (y.sum() + total.sum()).backward()
    q, k = (ones(1, tokens, heads, sizes.head_dim).transpose(1, 2) for heads in (sizes.heads, sizes.kv_heads))
    cos = torch.ones(1, tokens, sizes.head_dim // 2, dtype=dtype, device=device)
    run_backward(*rotary(q, k, cos, cos))
    heads = ones(1, tokens, sizes.heads, sizes.head_dim), *(ones(1, tokens, sizes.kv_heads, sizes.head_dim) for _ in range(2))
    attention(*heads, sinks=ones(sizes.heads)).sum().backward()
    # The kernels do not see the number of experts.
    count = sizes.top_k
    expert = torch.arange(count, device=device).expand(tokens, count)
    weights = ones(count, sizes.hidden, 2 * sizes.intermediate), ones(count, sizes.intermediate, sizes.hidden)
    biases = ones(count, 2 * sizes.intermediate), ones(count, sizes.hidden)
    gate: Dict[str, Any] = {"transposed": True, "interleaved": True, "alpha": 1.702, "limit": 7.0}
    experts(ones(*hidden), expert, ones(tokens, count), *weights, *biases, **gate).sum().backward()
    # The loss's kernels see only the vocabulary, of which a few tokens make large logits; the weight may be narrow.
    narrow = 64
    target = torch.zeros(TOKENS, dtype=torch.int64, device=device)
    head = ones(TOKENS, narrow), ones(sizes.vocabulary, narrow)
    run_backward(linear_cross_entropy(*head, target))
    adamw.load(dtype, device)
    with torch.no_grad():
        linear_cross_entropy(*head, target)


def warmup_all_kernels(model=None) -> None:
    """Loads what a GPT-OSS needs ahead of its first step, and finds the fastest kernels for this GPU.

    Each operation runs once, forward and backward, on a few tokens. Where a kernel has several prebuilt candidates, they are timed
    on more, and the measurements are kept in `cache_file()` by GPU, driver and build of this package.

    model: whose sizes, dtypes and GPUs; by default the sizes of both models in bf16 on the current GPU. Leaves the model, its
    gradients and the random numbers alone. On a CPU there is nothing to load. Raises TypeError when it is no GPT-OSS.
    """
    tuning.warm_up_models(warm_up, model, sizes_of, (FAMILY,))
