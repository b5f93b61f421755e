"""Whether tensors are laid out as others were: what a launch that was prepared for those may be made on.

An address alone does not tell: a tensor whose memory was given back and taken again, or that was resized, lies where it lay.
"""

from typing import Any, Callable, Optional, Sequence

import torch

# Of C++: by these torch.compile knows the arguments of a compiled function again.
TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def _described(tensor: torch.Tensor) -> tuple:
    """All that a launch relies on, but the address."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tensor.dtype, tensor.device, tensor.is_neg(), tensor.shape, strides


def _guards(tensors: Sequence[torch.Tensor]) -> Optional[Callable[..., bool]]:
    """What checks tensors in 60 ns each, a fifth of what `_described` takes, or None where this torch has another form of it."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    try:
        check = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*tensors) is True else None
    except Exception:
        return None


def same_as(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """A function that tells whether as many other tensors have the types, dtypes, devices, shapes and strides that these have now, and
    hold their numbers in the same way (their sign turned or not). It may be False where they have, if something else differs."""
    check, count = _guards(tensors), len(tensors)
    if check is not None:
        return lambda others: len(others) == count and check(*others)
    known = list(map(_described, tensors))
    return lambda others: list(map(_described, others)) == known
