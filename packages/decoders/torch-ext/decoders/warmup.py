"""Doing ahead of the first step what it would otherwise pay for, and choosing between kernels on the way."""

from functools import partial

from .families import LLAMA, QWEN2, ROWS
from .shared.hf import warmup
from .shared.hf.warmup import Case, Sizes, warm_up
from .shared.runtime.tuning import cache_file, clear_autotune_cache, warm_up_models

__all__ = ["cache_file", "clear_autotune_cache", "warmup_all_kernels"]

# Llama 3.1 8B and 3.2 3B, Qwen2.5 7B.
FAMILY = (
    Case(LLAMA, Sizes(4096, 14336, 32, 8, 128, 128256)),
    Case(LLAMA, Sizes(3072, 8192, 24, 8, 128, 128256)),
    Case(QWEN2, Sizes(3584, 18944, 28, 4, 128, 152064, bias=True)),
)
case_of = partial(warmup.case_of, rows=ROWS, other=LLAMA)


def warmup_all_kernels(model=None) -> None:
    """Loads what a decoder needs ahead of its first step, and finds the fastest kernels for this GPU.

    Each operation runs once, forward and backward, on a few tokens. Where a kernel has several prebuilt candidates, they are timed
    on more, and the measurements are kept in `cache_file()` by GPU, driver and build of this package.

    Args:
        model: whose layers, sizes, dtypes and GPUs; by default the sizes of Llama 3 and Qwen2.5 in bf16 on the current GPU. Of a model of
            another family, what it shares with Llama. The model, its gradients and the random numbers are left alone. On a CPU there is
            nothing to load.

    Raises:
        TypeError: when the model has no configuration of a decoder.
    """
    warm_up_models(warm_up, model, case_of, FAMILY)
