"""The promises of a KernelSignature against the arguments of a launch. Nothing checks them on a GPU."""

import math
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile.compilation import ArrayConstraint, ConstantConstraint, KernelSignature, ListConstraint, ScalarConstraint, TupleConstraint

from .tiles import RANGES, TILE_DTYPES, InterpreterError


def check_signature(signature: KernelSignature, names: list[str], args: tuple) -> None:
    """Checks every constraint.

    Raises:
        InterpreterError: names the argument, the promise, and what was found.
    """
    if len(signature.parameters) != len(args):
        raise InterpreterError(f"the signature has {len(signature.parameters)} parameters, the launch {len(args)} arguments")
    for name, constraint, arg in zip(names, signature.parameters, args, strict=True):
        check(name, constraint, arg)


def broken(name: str, promise: str, found: Any) -> InterpreterError:
    return InterpreterError(f"argument {name} breaks its signature: {promise}, got {found}")


def check(name: str, constraint, arg) -> None:
    if isinstance(constraint, ArrayConstraint):
        check_array(name, constraint, arg)
    elif isinstance(constraint, ScalarConstraint):
        check_scalar(name, constraint.dtype, arg)
    elif isinstance(constraint, ConstantConstraint):
        if type(arg) is not type(constraint.value) or arg != constraint.value:
            raise broken(name, f"constant {constraint.value!r}", repr(arg))
    elif isinstance(constraint, TupleConstraint):
        if not isinstance(arg, tuple) or len(arg) != len(constraint.items):
            raise broken(name, f"a tuple of {len(constraint.items)}", repr(arg))
        for i, (item, x) in enumerate(zip(constraint.items, arg, strict=True)):
            check(f"{name}[{i}]", item, x)
    elif isinstance(constraint, ListConstraint):
        if not isinstance(arg, list):
            raise broken(name, "a list of arrays", repr(arg))
        for i, x in enumerate(arg):
            check(f"{name}[{i}]", constraint.element, x)
    else:
        raise InterpreterError(f"{type(constraint).__name__} is not implemented")


def check_scalar(name: str, dtype: ct.DType, arg) -> None:
    if dtype in RANGES:
        low, high = RANGES[dtype]
        if isinstance(arg, bool) or not isinstance(arg, int) or not low <= arg <= high:
            raise broken(name, f"a scalar of {dtype}", repr(arg))
    elif dtype is ct.bool_ and not isinstance(arg, bool):
        raise broken(name, "a bool", repr(arg))
    elif isinstance(arg, bool) or not isinstance(arg, (int, float)):
        raise broken(name, f"a scalar of {dtype}", repr(arg))


def check_array(name: str, c: ArrayConstraint, arg) -> None:
    if not isinstance(arg, torch.Tensor):
        raise broken(name, "an array", type(arg).__name__)
    if TILE_DTYPES.get(arg.dtype) is not c.dtype:
        raise broken(name, f"dtype {c.dtype}", arg.dtype)
    if arg.ndim != c.ndim:
        raise broken(name, f"{c.ndim} dimensions", f"shape {tuple(arg.shape)}")
    if arg.data_ptr() % c.base_addr_divisible_by:
        raise broken(name, f"an address divisible by {c.base_addr_divisible_by} bytes", hex(arg.data_ptr()))
    low, high = RANGES[c.index_dtype]
    for d, (size, stride) in enumerate(zip(arg.shape, arg.stride(), strict=True)):
        for what, value in (("size", size), ("stride", stride)):
            if not low <= value <= high:
                raise broken(name, f"{what} of dimension {d} in {c.index_dtype}", value)
        if c.shape_constant[d] is not None and size != c.shape_constant[d]:
            raise broken(name, f"size {c.shape_constant[d]} in dimension {d}", size)
        if size % c.shape_divisible_by[d]:
            raise broken(name, f"size of dimension {d} divisible by {c.shape_divisible_by[d]}", size)
        if size <= 1:  # no second element, so its stride is never used; the launcher has the same rule
            continue
        if c.stride_constant[d] is not None and stride != c.stride_constant[d]:
            raise broken(name, f"stride {c.stride_constant[d]} in dimension {d}", stride)
        if stride % c.stride_divisible_by[d]:
            raise broken(name, f"stride of dimension {d} divisible by {c.stride_divisible_by[d]}", stride)
        if c.stride_lower_bound_incl[d] is not None and stride < c.stride_lower_bound_incl[d]:
            raise broken(name, f"stride of at least {c.stride_lower_bound_incl[d]} in dimension {d}", stride)
    if not c.may_alias_internally and not is_nested(arg) and element_offsets(arg).unique().numel() < arg.numel():
        raise broken(name, "no two indices at one address", f"shape {tuple(arg.shape)} with strides {arg.stride()}")


def is_nested(tensor: torch.Tensor) -> bool:
    """Whether each dimension steps over all that the narrower ones reach, so that no two indices can be at one address."""
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True


def element_offsets(tensor: torch.Tensor) -> torch.Tensor:
    """The offset of every element into the tensor's storage, in elements."""
    offsets = torch.full((1,), tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + torch.arange(size) * stride).reshape(-1)
    return offsets


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share at least one byte, by their addresses: each may have a storage of its own over one memory."""
    if not a.numel() or not b.numel():
        return False
    ends = []
    for t in (a, b):
        extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        ends.append((t.data_ptr(), t.data_ptr() + extent * t.itemsize))
    if ends[0][0] >= ends[1][1] or ends[1][0] >= ends[0][1]:
        return False
    base = min(a.data_ptr(), b.data_ptr())
    units = []
    unit = math.gcd(a.itemsize, b.itemsize, abs(a.data_ptr() - b.data_ptr()))
    for t in (a, b):
        elements = (element_offsets(t) - t.storage_offset()) * (t.itemsize // unit) + (t.data_ptr() - base) // unit
        units.append((elements[:, None] + torch.arange(t.itemsize // unit)).reshape(-1))
    touched = torch.zeros(1 + int(units[0].max()), dtype=torch.bool)
    touched[units[0]] = True
    return bool(touched[units[1][units[1] < touched.numel()]].any())
