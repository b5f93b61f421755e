"""Autocast and the operations: their products in autocast's dtype where PyTorch's would be, and never something else in the backward
pass."""

import contextlib
import functools
from typing import Any, List, Optional

import torch

from .autograd import autocasts

__all__ = ["as_autocast", "casts_products_of", "outside_autocast", "without_autocast"]


def without_autocast(device: torch.device):
    """Makes a context in which products are computed in the dtypes of their tensors."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else contextlib.nullcontext()


def as_autocast(device: torch.device, *tensors: Optional[torch.Tensor]) -> List[Any]:
    """Casts tensors, or None, as autocast casts those of a matrix product: to its dtype, except float64 and integers."""
    dtype = torch.get_autocast_dtype(device.type)
    return [t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def casts_products_of(x: torch.Tensor) -> bool:
    """True when autocast would compute a product of x in another dtype than x's."""
    return autocasts(x.device) and x.dtype not in (torch.get_autocast_dtype(x.device.type), torch.float64)


def outside_autocast(backward):
    """Decorates the backward pass of an autograd function: it computes in the dtypes of what was saved, also where the caller calls
    `backward()` under autocast, whose products would be of another dtype than the tensors that they are added to."""

    @functools.wraps(backward)
    def run(ctx, *grads):
        device = next((grad.device for grad in grads if grad is not None), None)
        with contextlib.nullcontext() if device is None else without_autocast(device):
            return backward(ctx, *grads)

    return run
