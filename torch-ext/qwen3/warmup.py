"""Doing ahead of the first step what it would otherwise pay for, and choosing between kernels on the way."""

from functools import partial

from .families import QWEN3, QWEN3_MOE
from .shared.hf import warmup
from .shared.hf.warmup import Case, Sizes, warm_up
from .shared.runtime.tuning import cache_file, clear_autotune_cache, warm_up_models

__all__ = ["cache_file", "clear_autotune_cache", "warmup_all_kernels"]

# Qwen3 0.6B, 1.7B, 4B, 8B, 14B, 32B; 30B-A3B, 235B-A22B.
FAMILY = (
    Case(QWEN3, Sizes(1024, 3072, 16, 8, 128, 151936)),
    Case(QWEN3, Sizes(2048, 6144, 16, 8, 128, 151936)),
    Case(QWEN3, Sizes(2560, 9728, 32, 8, 128, 151936)),
    Case(QWEN3, Sizes(4096, 12288, 32, 8, 128, 151936)),
    Case(QWEN3, Sizes(5120, 17408, 40, 8, 128, 151936)),
    Case(QWEN3, Sizes(5120, 25600, 64, 8, 128, 151936)),
    Case(QWEN3_MOE, Sizes(2048, 6144, 32, 4, 128, 151936, expert=768, top_k=8)),
    Case(QWEN3_MOE, Sizes(4096, 12288, 64, 4, 128, 151936, expert=1536, top_k=8)),
)
case_of = partial(warmup.case_of, rows=(QWEN3, QWEN3_MOE))


def warmup_all_kernels(model=None) -> None:
    """Loads what a Qwen3 needs ahead of its first step, and finds the fastest kernels for this GPU.

    Each operation runs once, forward and backward, on a few tokens. Where a kernel has several prebuilt candidates (most have them
    on GPUs that we could not measure, few on an H200), they are timed, in a few seconds and 1.5 GiB at the sizes of Qwen3-8B. The
    measurements are kept in `cache_file()` by GPU, driver and build of this package: the next process only reads them. A process
    that does not call this launches the default candidates. Two candidates may differ in the last bit of a result; two launches of
    one never do.

    Args:
        model: whose sizes, dtypes and GPUs; by default the sizes of the whole family in bf16 on the current GPU. The model, its gradients
            and the random numbers are left alone. On a CPU there is nothing to load.

    Raises:
        TypeError: when the model is no Qwen3.
    """
    warm_up_models(warm_up, model, case_of, FAMILY)
