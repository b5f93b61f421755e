"""Rotary position embedding in PyTorch, which every kind of tensor and every transform takes; alone, and with the norms of the heads."""

import torch

from .arrays import Pair
from .rms_norm import rms_norm_reference

__all__ = ["of_part", "qk_norm_rotary_reference", "rotary_backward_reference", "rotary_reference"]


def _full_width(table: torch.Tensor, head_dim: int) -> torch.Tensor:
    return table if table.shape[-1] == head_dim else torch.cat((table, table), -1)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotary_reference(q, k, cos, sin, heads_dim: int) -> Pair:
    """(q, k) rotated, in PyTorch; heads_dim: the dimension of q that holds the heads (1 or 2)."""
    cos, sin = (_full_width(t, q.shape[-1]).unsqueeze(heads_dim) for t in (cos, sin))
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def rotary_backward_reference(dq, dk, cos, sin, heads_dim: int) -> Pair:
    """The transpose of `rotary_reference`, in PyTorch."""
    cos, sin = (_full_width(t, dq.shape[-1]).unsqueeze(heads_dim) for t in (cos, sin))
    return dq * cos - _rotate_half(dq * sin), dk * cos - _rotate_half(dk * sin)


def qk_norm_rotary_reference(q, k, q_weight, k_weight, cos, sin, eps: float, offset=0.0, rounds="first", rotary_dim=0) -> Pair:
    """(q, k) normalised, rotated and as attention takes them, in PyTorch."""
    q, k = (rms_norm_reference(x, w, eps, None, offset, rounds)[0] for x, w in ((q, q_weight), (k, k_weight)))
    q, k = of_part(rotary_reference, q, k, cos, sin, rotary_dim)
    return q.transpose(1, 2), k.transpose(1, 2)


def of_part(rotate, q, k, cos, sin, rotary_dim: int) -> Pair:
    """A function like `rotary_reference` of the first columns of every head; the rest stays. rotary_dim: their number, 0 for all."""
    if not 0 < rotary_dim < q.shape[-1]:
        return rotate(q, k, cos, sin, 2)
    rotated = rotate(q[..., :rotary_dim], k[..., :rotary_dim], cos, sin, 2)
    q, k = (torch.cat((part, x[..., rotary_dim:]), -1) for part, x in zip(rotated, (q, k)))
    return q, k
