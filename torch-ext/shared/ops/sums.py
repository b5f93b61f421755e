"""Sums over many rows and the number of counted labels, found on the device in one launch."""

from typing import Optional, Tuple

import torch

from ..runtime.launch import Kernel
from ..runtime.replay import constant

__all__ = ["counted_mean", "inverse_count", "nothing", "total"]

_span_sum = Kernel("span_sum", grid=lambda c, values, out: (out.shape[0],))

_inverse_count = Kernel("inverse_count", grid=lambda c, *_: (1,))

_counted_mean = Kernel("counted_mean", grid=lambda c, *_: (1,))


_nothing: dict = {}


def nothing(device: torch.device, dtype: torch.dtype, dims: int = 1) -> torch.Tensor:
    """What is passed for an array that a kernel will not look at."""
    key = (device, dtype, dims)
    if key not in _nothing:
        _nothing[key] = constant(torch.zeros((1, 16) if dims == 2 else 16, dtype=dtype, device=device))
    return _nothing[key]


def total(values: torch.Tensor) -> torch.Tensor:
    """The sum of contiguous fp32 numbers, [], in an order that follows from their number alone."""
    values = values.view(-1)
    span = _span_sum.constant("SPAN")
    while True:
        out = values.new_empty(-(-values.shape[0] // span))
        _span_sum(values, out)
        if out.shape[0] == 1:
            return out.view(())
        values = out


def inverse_count(labels: Optional[torch.Tensor], ignore_index: int, classes: int = -1) -> torch.Tensor:
    """One over the number of labels that count, or 1 where none does; fp32 [1]. classes: labels from there on do not count."""
    assert labels is not None, "an average counts labels"
    out = torch.empty(1, dtype=torch.float32, device=labels.device)
    _inverse_count(labels, out, ignore_index, classes)
    return out


def counted_mean(losses: torch.Tensor, labels: torch.Tensor, ignore_index: int, classes: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """(the sum of contiguous fp32 losses times `inverse_count`, []; that, [1]), in one launch."""
    mean, inverse = (torch.empty(1, dtype=torch.float32, device=labels.device) for _ in range(2))
    _counted_mean(losses, labels, mean, inverse, ignore_index, classes)
    return mean.view(()), inverse
