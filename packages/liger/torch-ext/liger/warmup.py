"""Loading ahead of the first step what it would otherwise wait for."""

from typing import NamedTuple

import torch

from .norms import add_rms_norm, rms_norm
from .shared.ops.cross_entropy_of_logits import cross_entropy
from .shared.ops.gated_activation import geglu, swiglu
from .shared.ops.layer_norm import layer_norm
from .shared.ops.linear_cross_entropy import linear_cross_entropy
from .shared.ops.mrope import partial_rotary
from .shared.runtime.tuning import clear_autotune_cache, run_backward, warm_up_models

__all__ = ["clear_autotune_cache", "warmup_all_kernels"]


class Sizes(NamedTuple):
    """What the kernels that Liger puts on a language model depend on."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


FAMILY = (Sizes(4096, 14336, 32, 8, 128, 128256),)  # Llama 3.1 8B


def sizes_of(model) -> Sizes:
    """Reads the sizes from the configuration of a model or of its first module that has one. Raises TypeError when there is none."""
    names = "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and all(isinstance(getattr(config, name, None), int) for name in names):
            heads = config.num_attention_heads
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            return Sizes(config.hidden_size, config.intermediate_size, heads, kv_heads, head_dim, config.vocab_size)
    raise TypeError(f"model is a {type(model).__name__} without a configuration that has {', '.join(names)}, expected a language model")


def warm_up(device, dtype, sizes: Sizes, tokens: int) -> None:
    """Runs what Liger puts on a language model, forward and backward, on some tokens. Draws no random numbers."""

    def ones(*shape):
        return torch.ones(shape, dtype=dtype, device=device, requires_grad=True)

    hidden, up = (tokens, sizes.hidden), (tokens, sizes.intermediate)
    for casting, offset in (("llama", 0.0), ("gemma", 1.0)):
        rms_norm(ones(*hidden), ones(sizes.hidden), 1e-6, offset, casting).sum().backward()
        y, total = add_rms_norm(ones(*hidden), ones(*hidden), ones(sizes.hidden), 1e-6, offset, casting)
        (y.sum() + total.sum()).backward()
    rms_norm(ones(1, tokens, sizes.heads, sizes.head_dim), ones(sizes.head_dim), 1e-6).sum().backward()
    layer_norm(ones(*hidden), ones(sizes.hidden), ones(sizes.hidden)).sum().backward()
    swiglu(ones(*up), ones(*up)).sum().backward()
    geglu(ones(*up), ones(*up), "tanh").sum().backward()
    q, k = (ones(1, tokens, heads, sizes.head_dim).transpose(1, 2) for heads in (sizes.heads, sizes.kv_heads))
    cos = torch.ones(1, tokens, sizes.head_dim, dtype=dtype, device=device)
    run_backward(*partial_rotary(q, k, cos, cos))
    target = torch.zeros(tokens, dtype=torch.int64, device=device)
    run_backward(cross_entropy(ones(tokens, sizes.vocabulary), target))
    # The kernels see only the vocabulary, so the other side of the head may be narrow.
    run_backward(linear_cross_entropy(ones(tokens, 64), ones(sizes.vocabulary, 64), target))


def warmup_all_kernels(model=None) -> None:
    """Loads the kernels that Liger's names put on a language model ahead of its first step: a few ms each.

    Each operation runs once, forward and backward, on a few tokens. model: whose sizes, dtypes and GPUs; by default the sizes of Llama 3.1
    8B in bf16 on the current GPU. Leaves the model, its gradients and the random numbers alone. On a CPU there is nothing to load. Raises
    TypeError when the model is no language model with a configuration of transformers.
    """
    warm_up_models(warm_up, model, sizes_of, FAMILY)
