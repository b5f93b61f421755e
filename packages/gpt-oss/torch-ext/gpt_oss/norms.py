"""RMSNorm as GPT-OSS computes it: the weight multiplies in fp32, and the product alone is rounded."""

from typing import Tuple

import torch

from .shared.ops import rms_norm as norms


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Normalises the last dimension by its root mean square and multiplies it by a weight, in fp32, and rounds to x's dtype.

    Args:
        x: [..., n], bf16, fp16 or fp32 (float64, and rows longer than 4096, run in PyTorch).
        weight: [n], of x's dtype or fp32.
        eps: added to the mean square.

    Returns:
        [..., n] in x's dtype; differentiable in x and weight.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit.
    """
    return norms.rms_norm(x, weight, eps, rounds="last")


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> Tuple[torch.Tensor, torch.Tensor]:
    """Adds x to the residual stream and normalises the sum.

    Args:
        x, residual: [..., n], of one dtype.
        weight, eps: as of `rms_norm`.

    Returns:
        (RMSNorm(x + residual), x + residual), the sum rounded to x's dtype as the residual stream holds it.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit.
    """
    return norms.add_rms_norm(x, residual, weight, eps, rounds="last")
