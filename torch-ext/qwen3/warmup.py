"""Doing ahead of the first step what it would otherwise pay for, and choosing between kernels on the way."""

from typing import NamedTuple

import torch

from .shared.decoder.nodes import norm_attention_inputs
from .shared.decoder.projection import Projection
from .shared.decoder.sparse import ExpertTensors, Router, norm_experts
from .shared.decoder.spec import Inputs, Outputs
from .shared.hf.attention_choice import head_dim_of
from .shared.ops import adamw
from .shared.ops.attention import attention
from .shared.ops.linear_cross_entropy import linear_cross_entropy
from .shared.ops.linear_log_probs import linear_log_probs
from .shared.ops.rms_norm import add_rms_norm, rms_norm
from .shared.ops.rotary import qk_norm_rotary, rotary
from .shared.ops.swiglu import mlp, swiglu
from .shared.runtime import tuning
from .shared.runtime.tuning import TOKENS, cache_file, clear_autotune_cache, run_backward

__all__ = ["cache_file", "clear_autotune_cache", "warmup_all_kernels"]


class Sizes(NamedTuple):
    """What the kernels of a Qwen3 depend on. expert: the intermediate size of an expert, and top_k: experts a token goes to; 0 for a dense
    model."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    expert: int = 0
    top_k: int = 0


# Qwen3 0.6B, 1.7B, 4B, 8B, 14B, 32B, 30B-A3B, 235B-A22B.
FAMILY = (
    Sizes(1024, 3072, 16, 8, 128, 151936),
    Sizes(2048, 6144, 16, 8, 128, 151936),
    Sizes(2560, 9728, 32, 8, 128, 151936),
    Sizes(4096, 12288, 32, 8, 128, 151936),
    Sizes(5120, 17408, 40, 8, 128, 151936),
    Sizes(5120, 25600, 64, 8, 128, 151936),
    Sizes(2048, 6144, 32, 4, 128, 151936, 768, 8),
    Sizes(4096, 12288, 64, 4, 128, 151936, 1536, 8),
)


def sizes_of(model) -> Sizes:
    """From the configuration of a model or of the first of its modules that has one. Raises TypeError when there is none."""
    config = next((module.config for module in model.modules() if hasattr(getattr(module, "config", None), "num_key_value_heads")), None)
    if config is None:
        raise TypeError(f"model is a {type(model).__name__} without a Qwen3 configuration, expected a Qwen3 model")
    return Sizes(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim_of(config) or 0,
        config.vocab_size,
        *((config.moe_intermediate_size, config.num_experts_per_tok) if hasattr(config, "moe_intermediate_size") else ()),
    )


def warm_up(device, dtype, sizes: Sizes, tokens: int = TOKENS) -> None:
    """Runs each operation forward and backward on some tokens. Draws no random numbers."""

    def ones(*shape):
        return torch.ones(shape, dtype=dtype, device=device, requires_grad=True)

    for shape in ((tokens, sizes.hidden), (1, tokens, sizes.heads, sizes.head_dim), (1, tokens, sizes.kv_heads, sizes.head_dim)):
        rms_norm(ones(*shape), ones(shape[-1])).sum().backward()
    q, k = (ones(1, tokens, heads, sizes.head_dim).transpose(1, 2) for heads in (sizes.heads, sizes.kv_heads))
    cos = torch.ones(1, tokens, sizes.head_dim, dtype=dtype, device=device)
    run_backward(*rotary(q, k, cos, cos))
    # The kernels see only the intermediate size and the vocabulary, so the other side of the weights may be narrow.
    narrow = 64
    up, down = (sizes.intermediate, narrow), (narrow, sizes.intermediate)
    mlp(ones(tokens, narrow), ones(*up), ones(*up), ones(*down)).sum().backward()
    swiglu(ones(tokens, sizes.intermediate), ones(tokens, sizes.intermediate)).sum().backward()
    # The decoder layer's kernels.
    hidden = (tokens, sizes.hidden)
    run_backward(*add_rms_norm(ones(*hidden), ones(*hidden), ones(sizes.hidden)))
    q, k, v = (ones(heads * sizes.head_dim, sizes.hidden) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
    norms = ones(sizes.head_dim), ones(sizes.head_dim)
    linears = [Projection(weight) for weight in (q, k, v)]
    inputs = norm_attention_inputs(ones(*hidden), ones(sizes.hidden), linears, *norms, cos, cos, (1, tokens), Inputs(sizes.head_dim))
    run_backward(*inputs)
    q, k = (ones(1, tokens, heads, sizes.head_dim) for heads in (sizes.heads, sizes.kv_heads))
    run_backward(*qk_norm_rotary(q, k, *norms, cos, cos))
    if sizes.top_k:  # the kernels do not see the number of experts
        router = Router(ones(sizes.top_k, sizes.hidden), sizes.top_k, True)
        weights = ExpertTensors(ones(sizes.top_k, 2 * sizes.expert, sizes.hidden), ones(sizes.top_k, sizes.hidden, sizes.expert))
        norm_experts(ones(*hidden), ones(sizes.hidden), router, weights, Outputs()).sum().backward()
    heads = ones(1, tokens, sizes.heads, sizes.head_dim), *(ones(1, tokens, sizes.kv_heads, sizes.head_dim) for _ in range(2))
    attention(*heads).sum().backward()
    # So many classes that a few tokens make large logits.
    target = torch.zeros(TOKENS, dtype=torch.int64, device=device)
    head = ones(TOKENS, narrow), ones(sizes.vocabulary, narrow)
    run_backward(linear_cross_entropy(*head, target))
    linear_log_probs(*head, target, outputs=("entropy",), skip_ignored=False).log_probs.sum().backward()
    adamw.load(dtype, device)
    with torch.no_grad():
        linear_cross_entropy(*head, target)


def warmup_all_kernels(model=None) -> None:
    """Loads what a Qwen3 needs ahead of its first step, and finds the fastest kernels for this GPU.

    Each operation runs once, forward and backward, on a few tokens. Where a kernel has several prebuilt candidates (most have them
    on GPUs that we could not measure, few on an H200), they are timed, in a few seconds and 1.5 GiB at the sizes of Qwen3-8B. The
    measurements are kept in `cache_file()` by GPU, driver and build of this package: the next process only reads them. A process
    that does not call this launches the default candidates. Two candidates may differ in the last bit of a result; two launches of
    one never do.

    model: whose sizes, dtypes and GPUs; by default the sizes of the whole family in bf16 on the current GPU. Leaves the model,
    its gradients and the random numbers alone. On a CPU there is nothing to load. Raises TypeError when it is no Qwen3.
    """
    tuning.warm_up_models(warm_up, model, sizes_of, FAMILY)
