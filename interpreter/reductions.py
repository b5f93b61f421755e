"""The ct.* functions that reduce and scan tiles, and matrix products."""

import math
from collections.abc import Callable

import cuda.tile as ct
import torch
from cuda.tile._datatype import _mma_supported_dtypes, is_boolean, is_float, is_integral

from .arithmetic import HALVES, _add, _max, _min, _mul, check_rounding
from .tiles import (
    InterpreterError,
    Tile,
    axis_of,
    carrier,
    common_dtype,
    common_shape,
    convert,
    flip_unsigned,
    implicit_cast,
    in_range,
    scalar,
    tile_of,
)


def _axes(axis, ndim: int) -> list[int]:
    if axis is None:
        return list(range(ndim))
    axes = [axis_of(a, ndim) for a in (axis if isinstance(axis, tuple) else (axis,))]
    if len(set(axes)) != len(axes):
        raise InterpreterError(f"repeated axis in {axis}")
    return sorted(axes)


def _fold(xs: list[torch.Tensor], axis: int, combine: Callable) -> list[torch.Tensor]:
    """Combines halves until one element is left: the order that a GPU's tree of threads takes. The axis keeps size 1."""
    n = xs[0].shape[axis]
    while n > 1:
        n //= 2
        xs = combine([x.narrow(axis, 0, n) for x in xs], [x.narrow(axis, n, n) for x in xs])
    return xs


def reduction(fn: Callable, whole: Callable):
    """A reduction by `whole`, over all axes at once, or where that gives None by `fn` on pairs of halves.

    16-bit floats are added up pair by pair, since each partial sum is rounded to 16 bits.
    """

    def run(x, /, axis=None, *, keepdims=False, rounding_mode=None, flush_to_zero=False, **propagate_nan):
        check_rounding(rounding_mode)
        x = tile_of(x)
        x = convert(x, ct.int32) if is_boolean(x.dtype) else x
        axes = _axes(axis, x.ndim)
        if not axes:
            return x
        data = whole(x.data, axes, x.dtype, **propagate_nan)
        if data is None:
            data = x.data
            for a in axes:
                (data,) = _fold([data], a, lambda p, q: [fn(p[0], q[0], x.dtype, **propagate_nan)])
        shape = [n if i not in axes else 1 for i, n in enumerate(x.shape) if i not in axes or keepdims]
        return Tile(data.reshape(shape), x.dtype)

    return run


def _whole_sum(data: torch.Tensor, axes: list[int], dtype: ct.DType) -> torch.Tensor | None:
    if data.dtype in HALVES:
        return None
    if dtype is ct.int64 and data.double().abs().sum() >= 2.0**63:
        raise InterpreterError("sum overflows int64")
    total = data.sum(axes)
    return in_range(total, dtype, "sum") if is_integral(dtype) else total


def _whole_extreme(fn: Callable):
    def run(data: torch.Tensor, axes: list[int], dtype: ct.DType, propagate_nan: bool = False) -> torch.Tensor | None:
        result = flip_unsigned(fn(flip_unsigned(data, dtype), axes), dtype)
        return None if is_float(dtype) and not propagate_nan and bool(result.isnan().any()) else result

    return run


sum_ = reduction(_add, _whole_sum)
prod = reduction(_mul, lambda data, axes, dtype: None)
max_ = reduction(_max, _whole_extreme(torch.amax))
min_ = reduction(_min, _whole_extreme(torch.amin))


def arg_extreme(fn: Callable, worst: float):
    def run(x, /, axis=None, *, keepdims=False, propagate_nan=False):
        x = tile_of(x)
        shape = x.shape
        data = flip_unsigned(convert(x, ct.int32).data if is_boolean(x.dtype) else x.data, x.dtype)
        if is_float(x.dtype) and not propagate_nan:
            data = torch.where(data.isnan(), worst, data)
        if axis is None:
            index = fn(data.reshape(-1), 0)
            return Tile(index.reshape((1,) * len(shape) if keepdims else ()), ct.int32)
        return Tile(fn(data, axis_of(axis, x.ndim), keepdim=keepdims), ct.int32)

    return run


def _tuple(x) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def _body(func: Callable, dtypes: list[ct.DType], is_tuple: bool) -> Callable:
    """`func`, which combines 0-d tiles, on whole carriers: it works element by element, so any shape will do."""

    def combine(p: list[torch.Tensor], q: list[torch.Tensor]) -> list[torch.Tensor]:
        result = func(*(Tile(d, t) for d, t in zip([*p, *q], [*dtypes, *dtypes], strict=True)))
        if isinstance(result, tuple) != is_tuple or len(_tuple(result)) != len(dtypes):
            raise InterpreterError(f"the function must return {len(dtypes)} value(s) for as many tiles")
        return [implicit_cast(r, t, "the function's result").data.expand(p[0].shape) for r, t in zip(_tuple(result), dtypes, strict=True)]

    return combine


def reduce(x, /, axis, func, identity, *, keepdims=False):
    xs = [tile_of(t) for t in _tuple(x)]
    if len(_tuple(identity)) != len(xs):
        raise InterpreterError("reduce needs as many identities as tiles")
    shape = common_shape(*xs)
    axis = axis_of(axis, len(shape))
    dtypes = [t.dtype for t in xs]
    data = _fold([t.data.expand(shape) for t in xs], axis, _body(func, dtypes, isinstance(x, tuple)))
    out = tuple(Tile(d if keepdims else d.squeeze(axis), t) for d, t in zip(data, dtypes, strict=True))
    return out if isinstance(x, tuple) else out[0]


def _prefix(xs: list[torch.Tensor], axis: int, combine: Callable, identities: list[torch.Tensor], reverse: bool) -> list[torch.Tensor]:
    """Inclusive prefixes in log2(n) steps (Hillis and Steele 1986)."""
    xs = [x.flip(axis) for x in xs] if reverse else xs
    n, step = xs[0].shape[axis], 1
    while step < n:
        before = [
            torch.cat([i.expand(x.narrow(axis, 0, step).shape), x.narrow(axis, 0, n - step)], axis)
            for x, i in zip(xs, identities, strict=True)
        ]
        # Elements that have no neighbour that far back are done: `func(identity, x)` need not round as x does.
        done = torch.arange(n).reshape([-1 if d == axis else 1 for d in range(xs[0].ndim)]) < step
        xs = [torch.where(done, x, y) for x, y in zip(xs, combine(before, xs), strict=True)]
        step *= 2
    return [x.flip(axis) for x in xs] if reverse else xs


def scan(x, /, axis, func, identity, *, reverse=False):
    xs = [tile_of(t) for t in _tuple(x)]
    shape = common_shape(*xs)
    dtypes = [t.dtype for t in xs]
    identities = [scalar(i, t).data for i, t in zip(_tuple(identity), dtypes, strict=True)]
    combine = _body(func, dtypes, isinstance(x, tuple))
    data = _prefix([t.data.expand(shape) for t in xs], axis_of(axis, len(shape)), combine, identities, reverse)
    out = tuple(Tile(d, t) for d, t in zip(data, dtypes, strict=True))
    return out if isinstance(x, tuple) else out[0]


def prefix(fn: Callable, identity: int):
    def run(x, /, axis=0, *, reverse=False, rounding_mode=None, flush_to_zero=False):
        check_rounding(rounding_mode)
        x = tile_of(x)
        x = convert(x, ct.int32) if is_boolean(x.dtype) else x
        start = scalar(identity, x.dtype).data
        (data,) = _prefix([x.data], axis_of(axis, x.ndim), lambda p, q: [fn(p[0], q[0], x.dtype)], [start], reverse)
        return Tile(data, x.dtype)

    return run


# ---------------------------------------------------------------- matrix products
def _product(x: Tile, y: Tile, acc_dtype: ct.DType) -> torch.Tensor:
    """x @ y as the accumulator's dtype sees it before the accumulator is added: in float32 for floats of 32 bits and less."""
    wide = carrier(acc_dtype) if is_integral(acc_dtype) or acc_dtype is ct.float64 else torch.float32
    try:
        return x.data.to(wide) @ y.data.to(wide)
    except RuntimeError:
        raise InterpreterError(f"cannot multiply matrices of shapes {x.shape} and {y.shape}") from None


def mma(x, y, /, acc, *, use_fast_acc=False):
    eight_bit = (ct.int8, ct.uint8)
    if x.dtype is not y.dtype and not (x.dtype in eight_bit and y.dtype in eight_bit):
        raise InterpreterError(f"mma takes x and y of one dtype, got {x.dtype} and {y.dtype}")
    if acc.dtype not in _mma_supported_dtypes.get(x.dtype, ()):
        raise InterpreterError(f"mma does not accumulate {x.dtype} in {acc.dtype}")
    if x.ndim < 2 or y.ndim < 2:
        raise InterpreterError(f"mma takes matrices, got shapes {x.shape} and {y.shape}")
    product = _product(x, y, acc.dtype)
    if tuple(product.shape) != acc.shape:
        raise InterpreterError(f"mma's accumulator has shape {acc.shape}, the product {tuple(product.shape)}")
    if is_integral(acc.dtype):
        return Tile(in_range(product + acc.data, acc.dtype, "mma"), acc.dtype)
    return Tile((product + acc.data.to(product.dtype)).to(acc.data.dtype), acc.dtype)


def matmul(x, y, /):
    x, y = tile_of(x), tile_of(y)
    dtype = common_dtype(x, y)
    if dtype not in _mma_supported_dtypes:
        raise InterpreterError(f"matmul does not take {dtype}")
    product = _product(convert(x, dtype), convert(y, dtype), _mma_supported_dtypes[dtype][0])
    return convert(Tile(product, ct.int32), dtype) if is_integral(dtype) else Tile(product.to(carrier(dtype)), dtype)


OPS = {
    ct.sum: sum_,
    ct.prod: prod,
    ct.max: max_,
    ct.min: min_,
    ct.argmax: arg_extreme(torch.argmax, -math.inf),
    ct.argmin: arg_extreme(torch.argmin, math.inf),
    ct.reduce: reduce,
    ct.scan: scan,
    ct.cumsum: prefix(_add, 0),
    ct.cumprod: prefix(_mul, 1),
    ct.mma: mma,
    ct.matmul: matmul,
}
