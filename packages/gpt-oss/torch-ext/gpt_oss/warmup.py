"""Doing ahead of the first step what it would otherwise pay for, and choosing between kernels on the way."""

from functools import partial

from .families import GPT_OSS
from .shared.decoder.sparse import ExpertOptions
from .shared.hf import warmup
from .shared.hf.warmup import Case, Sizes
from .shared.runtime.tuning import cache_file, clear_autotune_cache, warm_up_models

__all__ = ["cache_file", "clear_autotune_cache", "warmup_all_kernels"]

FAMILY = (Case(GPT_OSS, Sizes(2880, 0, 64, 8, 64, 201088, angles=32, expert=2880, top_k=4, bias=True)),)  # 20B and 120B
GATE = ExpertOptions(transposed=True, interleaved=True, alpha=1.702, limit=7.0)
warm_up = partial(warmup.warm_up, options=GATE)


def case_of(model) -> Case:
    """Reads the sizes of a model, whose angles are half as wide as its heads. Raises TypeError when it is no GPT-OSS."""
    own, sizes = warmup.case_of(model, (GPT_OSS,))
    return Case(own, sizes._replace(angles=sizes.head_dim // 2))


def warmup_all_kernels(model=None) -> None:
    """Loads what a GPT-OSS needs ahead of its first step, and finds the fastest kernels for this GPU.

    Each operation runs once, forward and backward, on a few tokens. Where a kernel has several prebuilt candidates, they are timed
    on more, and the measurements are kept in `cache_file()` by GPU, driver and build of this package.

    Args:
        model: whose sizes, dtypes and GPUs; by default the sizes of both models in bf16 on the current GPU. The model, its gradients and
            the random numbers are left alone. On a CPU there is nothing to load.

    Raises:
        TypeError: when the model is no GPT-OSS.
    """
    warm_up_models(warm_up, model, case_of, FAMILY)
