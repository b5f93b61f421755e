"""RMSNorm with the arguments that Liger's has."""

from typing import Optional, Tuple

import torch

from .shared.ops import rms_norm as norms
from .shared.ops.arguments import fail

# Liger's casting mode -> when the normalised x is rounded. "none" computes in x's dtype in Liger: its errors are larger than those of
# "gemma" and it promises nothing that "gemma" does not, so it runs as that.
ROUNDS = {"llama": "first", "gemma": "last", "none": "last"}


def _rounds(casting: str) -> str:
    if casting not in ROUNDS:
        fail("casting", repr(casting), f"one of {', '.join(ROUNDS)}")
    return ROUNDS[casting]


def rms_norm(
    x: torch.Tensor, weight: Optional[torch.Tensor] = None, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama"
) -> torch.Tensor:
    """Normalises the last dimension by its root mean square, in fp32, and multiplies it by a weight.

    Args:
        x: [..., n], bf16, fp16 or fp32 (float64 runs in PyTorch).
        weight: [n], of x's dtype or fp32; None for 1, without the offset.
        eps: added to the mean square.
        offset: added to the weight.
        casting: "llama" rounds the normalised x to its dtype before it is multiplied by weight + offset; "gemma" rounds the product alone,
            and so does "none".

    Returns:
        [..., n] in x's dtype; differentiable in x and weight.

    Raises:
        ValueError: if shapes, dtypes, devices or `casting` do not fit.
    """
    return norms.rms_norm(x, weight, eps, offset, _rounds(casting), x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Adds x to the residual stream and normalises the sum.

    Args:
        x, residual: [..., n], of one dtype.
        weight, eps, offset, casting: as of `rms_norm`.

    Returns:
        (RMSNorm(x + residual), x + residual), the sum rounded to x's dtype as the residual stream holds it.

    Raises:
        ValueError: if shapes, dtypes, devices or `casting` do not fit.
    """
    return norms.add_rms_norm(x, residual, weight, eps, offset, _rounds(casting), x.dtype)
