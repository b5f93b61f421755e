"""Arguments of operations: how a wrong one is said, and checks that several share."""

from numbers import Integral

import torch

from ..runtime.launch import INT32_MAX

__all__ = ["checked_index", "describe", "fail", "need_floats"]


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
