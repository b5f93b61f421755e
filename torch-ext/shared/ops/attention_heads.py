"""Attention of so many tokens that its kernels could not count the places of q, k and v in 32 bits: some heads at a time, which need no
other head. From 2^31 numbers in a tensor on, or in the rows of a projection that it is a part of: 524 288 tokens of 32 heads of 128."""

from typing import List, Tuple

import torch

from .arrays import REACH, within_reach

__all__ = ["of_heads", "one_head_is_within_reach", "parts_of_heads"]


def parts_of_heads(q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor) -> List[Tuple[slice, slice]]:
    """(heads of q, heads of k) of the parts that attention is computed in, each of copies; [] where the whole is within reach.

    q, k, others: [tokens, heads, head_dim], of which a single head of k with its group of q is within reach.
    """
    if within_reach(*[x.shape[0] * x.stride(0) for x in (q, k, *others)]):
        return []
    group = q.shape[1] // k.shape[1]
    at_once = min(REACH // (q.shape[0] * group * q.shape[2]), k.shape[1])
    starts = range(0, k.shape[1], at_once)
    return [(slice(start * group, (start + at_once) * group), slice(start, start + at_once)) for start in starts]


def one_head_is_within_reach(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether a single head of k with its group of q is."""
    return within_reach(q.shape[0] * (q.shape[1] // k.shape[1]) * q.shape[2])


def of_heads(heads: slice, *tensors: torch.Tensor) -> List[torch.Tensor]:
    """Copies of some heads of tensors [tokens, heads, head_dim]."""
    return [tensor[:, heads].contiguous() for tensor in tensors]
