"""Arguments of operations: how a wrong one is said, and checks that several share."""

from numbers import Integral
from typing import Optional

import torch

from ..runtime.launch import INT32_MAX

__all__ = ["checked_index", "describe", "fail", "need_alike", "need_device", "need_floats", "need_rows"]


def fail(argument: str, found, expected: str, error=ValueError):
    """Raises the error of a wrong argument."""
    raise error(f"{argument} is {found}, expected {expected}")


def describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def checked_index(ignore_index: int) -> int:
    """Returns the ignore_index of a loss as an int.

    Raises ValueError for what is no integer, True among it, and for one beyond 32 bits, which is how a kernel gets it.
    """
    number = isinstance(ignore_index, (int, torch.SymInt, Integral)) and not isinstance(ignore_index, bool)
    if not number or abs(ignore_index) > INT32_MAX:
        fail("ignore_index", repr(ignore_index), "an integer of 32 bits")
    return int(ignore_index)


def need_floats(**tensors: torch.Tensor) -> None:
    """Raises ValueError for a tensor that is not of a floating point dtype."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            fail(name, describe(tensor), "a floating point tensor")


def need_alike(name: str, tensor: torch.Tensor, of: str, other: torch.Tensor) -> None:
    """Raises ValueError for a tensor of another shape, dtype or device than the argument `of`, which is `other`."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype or tensor.device != other.device:
        fail(name, describe(tensor), f"like {of}, which is {describe(other)}")


def need_rows(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor without dimensions."""
    if tensor.dim() == 0:
        fail(name, describe(tensor), "a tensor with a last dimension")


def need_device(of: str, device: torch.device, **tensors: Optional[torch.Tensor]) -> None:
    """Raises ValueError for a tensor on another device than that of the argument `of`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            fail(name, describe(tensor), f"on the device of {of}, {device}")
