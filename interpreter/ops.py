"""What the ct.* functions that touch no memory compute: dtypes as cuTile's typing rules give them, values by torch."""

import math
from collections.abc import Callable

import cuda.tile as ct
import torch
from cuda.tile import RoundingMode
from cuda.tile._datatype import _mma_supported_dtypes, is_boolean, is_float, is_integral
from cuda.tile._dispatch_mode import DispatchMode

from .tiles import (
    SIGNED,
    UNSIGNED,
    InterpreterError,
    Tile,
    Value,
    as_dtype,
    axis_of,
    broadcast,
    carrier,
    common_dtype,
    common_shape,
    constant_int,
    constant_shape,
    convert,
    flip_unsigned,
    from_native,
    implicit_cast,
    in_range,
    scalar,
    supported,
    tile_of,
    to_native,
)

HALVES = (torch.float16, torch.bfloat16)


def check_rounding(mode: RoundingMode | None) -> None:
    if mode not in (None, RoundingMode.RN, RoundingMode.FULL, RoundingMode.APPROX):
        raise InterpreterError(f"rounding mode {mode} is not implemented")


def in_float32(fn: Callable[..., torch.Tensor], *xs: torch.Tensor) -> torch.Tensor:
    """fn on 16-bit floats, rounded once at the end."""
    dtype = xs[0].dtype
    return fn(*(x.float() for x in xs)).to(dtype) if dtype in HALVES else fn(*xs)


# ---------------------------------------------------------------- arithmetic
def _add(a: torch.Tensor, b: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    r = a + b
    if dtype is ct.int64 and bool((((a ^ r) & (b ^ r)) < 0).any()):
        raise InterpreterError("add overflows int64")
    return in_range(r, dtype, "add") if is_integral(dtype) else r


def _sub(a: torch.Tensor, b: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    r = a - b
    if dtype is ct.int64 and bool((((a ^ b) & (a ^ r)) < 0).any()):
        raise InterpreterError("sub overflows int64")
    return in_range(r, dtype, "sub") if is_integral(dtype) else r


def _mul(a: torch.Tensor, b: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    if dtype is ct.int64 and bool(((a.double() * b.double()).abs() >= 2.0**63).any()):
        raise InterpreterError("mul overflows int64")
    r = a * b
    return in_range(r, dtype, "mul") if is_integral(dtype) else r


def _check_divisor(a: torch.Tensor, b: torch.Tensor, dtype: ct.DType) -> None:
    if bool((b == 0).any()):
        raise InterpreterError("integer division by zero")
    if dtype is ct.uint64 and bool(((a < 0) | (b < 0)).any()):
        raise InterpreterError("division of uint64 values of 2**63 and more is not implemented")


def _floordiv(a: torch.Tensor, b: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    if is_float(dtype):
        return torch.floor(a / b)
    _check_divisor(a, b, dtype)
    return in_range(torch.div(a, b, rounding_mode="floor"), dtype, "floordiv")


def _cdiv(a: torch.Tensor, b: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    if is_float(dtype):
        raise InterpreterError("cdiv takes integers")
    _check_divisor(a, b, dtype)
    return in_range(-torch.div(-a, b, rounding_mode="floor"), dtype, "cdiv")


def _mod(a: torch.Tensor, b: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    if is_float(dtype):
        return in_float32(torch.remainder, a, b)
    _check_divisor(a, b, dtype)
    return torch.remainder(a, b)


def _pow(a: torch.Tensor, b: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    if is_integral(dtype):
        raise InterpreterError("pow of integers is not implemented in cuTile")
    return in_float32(torch.pow, a, b)


def _extreme(integers, ignoring_nan, propagating_nan):
    def run(a: torch.Tensor, b: torch.Tensor, dtype: ct.DType, propagate_nan: bool = False) -> torch.Tensor:
        if is_float(dtype):
            return (propagating_nan if propagate_nan else ignoring_nan)(a, b)
        return flip_unsigned(integers(flip_unsigned(a, dtype), flip_unsigned(b, dtype)), dtype)

    return run


_max = _extreme(torch.maximum, torch.fmax, torch.maximum)
_min = _extreme(torch.minimum, torch.fmin, torch.minimum)


def arithmetic(name: str, fn: Callable, python: Callable, x: Value, y: Value, force_float: bool = False) -> Value:
    """fn on x and y in their common dtype. Two Python numbers stay one: cuTile folds constants as Python does."""
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return python(x, y)
    dtype = common_dtype(x, y, force_float)
    if is_boolean(dtype):
        raise InterpreterError(f"{name} does not take bool tiles; cast them to an integer dtype")
    common_shape(x, y)
    return Tile(fn(as_dtype(x, dtype).data, as_dtype(y, dtype).data, dtype), dtype)


def add(x, y, /, *, rounding_mode=None, flush_to_zero=False):
    check_rounding(rounding_mode)
    return arithmetic("add", _add, lambda x, y: x + y, x, y)


def sub(x, y, /, *, rounding_mode=None, flush_to_zero=False):
    check_rounding(rounding_mode)
    return arithmetic("sub", _sub, lambda x, y: x - y, x, y)


def mul(x, y, /, *, rounding_mode=None, flush_to_zero=False):
    check_rounding(rounding_mode)
    return arithmetic("mul", _mul, lambda x, y: x * y, x, y)


def truediv(x, y, /, *, rounding_mode=None, flush_to_zero=False):
    check_rounding(rounding_mode)
    return arithmetic("truediv", lambda a, b, dtype: a / b, lambda x, y: x / y, x, y, force_float=True)


def floordiv(x, y, /):
    return arithmetic("floordiv", _floordiv, lambda x, y: x // y, x, y)


def cdiv(x, y, /):
    return arithmetic("cdiv", _cdiv, lambda x, y: -(-x // y), x, y)


def mod(x, y, /):
    return arithmetic("mod", _mod, lambda x, y: x % y, x, y)


def divmod_(x, y, /):
    if isinstance(x, Tile) or isinstance(y, Tile):
        if is_float(common_dtype(x, y)):
            raise InterpreterError("divmod() takes integers")
    return floordiv(x, y), mod(x, y)


def pow_(x, y, /):
    if (isinstance(x, Tile) or isinstance(y, Tile)) and is_float(tile_of(x).dtype) and tile_of(y).dtype in SIGNED:
        base, exponent = tile_of(x), tile_of(y)  # an integer exponent leaves the base's dtype alone
        common_shape(base, exponent)
        return Tile(in_float32(torch.pow, base.data, exponent.data.to(base.data.dtype)), base.dtype)
    return arithmetic("pow", _pow, lambda x, y: x**y, x, y)


def atan2(x1, x2, /):
    return arithmetic("atan2", lambda a, b, dtype: in_float32(torch.atan2, a, b), math.atan2, x1, x2)


def maximum(x, y, /, *, flush_to_zero=False, propagate_nan=False):
    return arithmetic("maximum", lambda a, b, dtype: _max(a, b, dtype, propagate_nan), max, x, y)


def minimum(x, y, /, *, flush_to_zero=False, propagate_nan=False):
    return arithmetic("minimum", lambda a, b, dtype: _min(a, b, dtype, propagate_nan), min, x, y)


# ---------------------------------------------------------------- comparison, bits
def comparison(fn: Callable):
    def run(x, y, /):
        if not isinstance(x, Tile) and not isinstance(y, Tile):
            return fn(x, y)
        dtype = common_dtype(x, y)
        common_shape(x, y)
        a, b = as_dtype(x, dtype).data, as_dtype(y, dtype).data
        return Tile(fn(flip_unsigned(a, dtype), flip_unsigned(b, dtype)), ct.bool_)

    return run


def bitwise(fn: Callable):
    def run(x, y, /):
        if not isinstance(x, Tile) and not isinstance(y, Tile):
            return fn(x, y)
        for t in (tile_of(x), tile_of(y)):
            if is_float(t.dtype):
                raise InterpreterError("bitwise operations take integers or bools; use ct.bitcast() first")
        if isinstance(x, Tile) and isinstance(y, Tile) and x.dtype is not y.dtype:
            raise InterpreterError(f"bitwise operands must have one dtype, got {x.dtype} and {y.dtype}")
        dtype = common_dtype(x, y)
        common_shape(x, y)
        return Tile(fn(as_dtype(x, dtype).data, as_dtype(y, dtype).data), dtype)

    return run


def _lshift(a: torch.Tensor, b: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    r = a << b
    if dtype is ct.int64 and bool((r >> b != a).any()):
        raise InterpreterError("lshift overflows int64")
    return in_range(r, dtype, "lshift")


def _rshift(a: torch.Tensor, b: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    if dtype is ct.uint64:
        return torch.where(b == 0, a, (a >> b) & ~(-1 << (64 - b)))
    return a >> b


def shift(name: str, fn: Callable, python: Callable):
    def run(x, y, /):
        if not isinstance(x, Tile) and not isinstance(y, Tile):
            return python(x, y)
        dtype = common_dtype(x, y)
        if not is_integral(tile_of(x).dtype) or not is_integral(tile_of(y).dtype):
            raise InterpreterError(f"{name} takes integers")
        common_shape(x, y)
        a, b = as_dtype(x, dtype).data, as_dtype(y, dtype).data
        if bool(((b < 0) | (b >= dtype.bitwidth)).any()):
            raise InterpreterError(f"{name} of {dtype} by {int(b.max())} bits")
        return Tile(fn(a, b, dtype), dtype)

    return run


def bitwise_not(x, /):
    if not isinstance(x, Tile):
        return not x if isinstance(x, bool) else ~x
    if is_float(x.dtype):
        raise InterpreterError("bitwise_not takes integers or bools")
    return Tile(~x.data if is_boolean(x.dtype) else in_range(~x.data, x.dtype, "bitwise_not"), x.dtype)


# ---------------------------------------------------------------- one operand
def unary(fn: Callable, python: Callable, to_float: bool = True):
    """A function of floats. Integers and bools become float32 first, or are refused."""

    def run(x, /, *, rounding_mode=None, flush_to_zero=False):
        check_rounding(rounding_mode)
        if not isinstance(x, Tile):
            return python(x)
        if not is_float(x.dtype):
            if not to_float:
                raise InterpreterError(f"{python.__name__} takes floats, got {x.dtype}")
            x = convert(x, ct.float32)
        return Tile(in_float32(fn, x.data), x.dtype)

    return run


def negative(x, /):
    if not isinstance(x, Tile):
        return -x
    x = convert(x, ct.int32) if is_boolean(x.dtype) else x
    if x.dtype is ct.int64:
        return Tile(_sub(torch.zeros_like(x.data), x.data, x.dtype), x.dtype)
    return Tile(in_range(-x.data, x.dtype, "negative") if is_integral(x.dtype) else -x.data, x.dtype)


def abs_(x, /):
    if not isinstance(x, Tile):
        return abs(x)
    if is_boolean(x.dtype) or x.dtype in UNSIGNED:
        return x
    return Tile(in_range(x.data.abs(), x.dtype, "abs") if is_integral(x.dtype) else x.data.abs(), x.dtype)


def isnan(x, /):
    if not isinstance(x, Tile):
        return math.isnan(x)
    if not is_float(x.dtype):
        raise InterpreterError(f"isnan takes floats, got {x.dtype}")
    return Tile(x.data.isnan(), ct.bool_)


# ---------------------------------------------------------------- shape and dtype
def astype(x, dtype, /, *, rounding_mode=None):
    check_rounding(rounding_mode)
    x = tile_of(x)
    return convert(x, supported(dtype))


def bitcast(x, /, dtype):
    x = tile_of(x)
    if is_boolean(x.dtype) or is_boolean(dtype) or x.dtype.bitwidth != supported(dtype).bitwidth:
        raise InterpreterError(f"cannot bitcast {x.dtype} to {dtype}")
    native = to_native(x.data, x.dtype).contiguous()
    width = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[dtype.bitwidth]
    target = carrier(dtype) if is_float(dtype) else width
    return Tile(from_native(native.view(target), dtype), dtype)


def pack_to_bytes(x, /):
    x = tile_of(x)
    if is_boolean(x.dtype):
        raise InterpreterError("pack_to_bytes does not take bool tiles")
    return Tile(from_native(to_native(x.data, x.dtype).reshape(-1).contiguous().view(torch.int8), ct.uint8), ct.uint8)


def unpack_from_bytes(x, /, dtype):
    if x.dtype is not ct.uint8 or x.ndim != 1 or is_boolean(dtype):
        raise InterpreterError(f"unpack_from_bytes takes a 1-d uint8 tile, got {x.describe()}")
    native = to_native(x.data, ct.uint8)
    signed = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[supported(dtype).bitwidth]
    return Tile(from_native(native.view(carrier(dtype) if is_float(dtype) else signed), dtype), dtype)


def reshape(x, /, shape):
    x = tile_of(x)
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    for n in shape:
        constant_int(n, "shape")
    try:
        data = x.data.reshape(shape)
    except RuntimeError:
        raise InterpreterError(f"cannot reshape {x.shape} to {shape}") from None
    constant_shape(tuple(data.shape))
    return Tile(data, x.dtype)


def item(self):
    return reshape(self, ())


def broadcast_to(x, /, shape):
    x = tile_of(x)
    return Tile(broadcast(x, constant_shape(shape)), x.dtype)


def expand_dims(x, /, axis):
    return Tile(x.data.unsqueeze(axis_of(axis, x.ndim + 1)), x.dtype)


def permute(x, /, axes):
    axes = [axis_of(a, x.ndim) for a in axes]
    if sorted(axes) != list(range(x.ndim)):
        raise InterpreterError(f"{axes} is not a permutation of {x.ndim} axes")
    return Tile(x.data.permute(axes), x.dtype)


def transpose(x, /, axis0=None, axis1=None):
    if (axis0 is None) != (axis1 is None) or x.ndim < 2 or (axis0 is None and x.ndim != 2):
        raise InterpreterError(f"transpose of {x.describe()} needs both axes")
    axis0, axis1 = (0, 1) if axis0 is None else (axis_of(axis0, x.ndim), axis_of(axis1, x.ndim))
    return Tile(x.data.transpose(axis0, axis1), x.dtype)


def cat(tiles, /, axis):
    if len(tiles) == 1:
        return tiles[0]
    if len(tiles) != 2 or tiles[0].dtype is not tiles[1].dtype or tiles[0].ndim != tiles[1].ndim:
        raise InterpreterError("cat takes two tiles of one dtype and rank")
    x, y = tiles
    axis = axis_of(axis, x.ndim)
    if any(a != b for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if i != axis):
        raise InterpreterError(f"cat of shapes {x.shape} and {y.shape} along axis {axis}")
    data = torch.cat([x.data, y.data], axis)
    constant_shape(tuple(data.shape))
    return Tile(data, x.dtype)


def subtile(x: Tile, index, shape: tuple[int, ...]) -> tuple[slice, ...]:
    index = index if isinstance(index, tuple) else (index,)
    if len(index) != x.ndim or len(shape) != x.ndim:
        raise InterpreterError(f"{x.describe()} needs {x.ndim} indices and dimensions, got {len(index)} and {len(shape)}")
    slices = []
    for i, n, size in zip(index, shape, x.shape, strict=True):
        i = tile_of(i, "index").value()
        if size % n or not 0 <= i < size // n:
            raise InterpreterError(f"subtile {i} of {n} elements lies outside {x.shape}")
        slices.append(slice(i * n, (i + 1) * n))
    return tuple(slices)


def extract(x, /, index, shape):
    shape = constant_shape(shape)
    data = x.data[subtile(x, index, shape or (1,) * x.ndim)]
    return Tile(data.reshape(shape), x.dtype)


def insert(x, /, index, value):
    value = tile_of(value)
    if value.dtype is not x.dtype:
        raise InterpreterError(f"cannot insert {value.dtype} into {x.dtype}")
    part = value.data.reshape((1,) * x.ndim) if value.ndim == 0 else value.data
    data = x.data.clone()
    data[subtile(x, index, tuple(part.shape))] = part
    return Tile(data, x.dtype)


def where(cond, x, y, /):
    cond = convert(tile_of(cond, "condition"), ct.bool_)
    dtype = common_dtype(x, y)
    common_shape(cond, x, y)
    return Tile(torch.where(cond.data, as_dtype(x, dtype).data, as_dtype(y, dtype).data), dtype)


# ---------------------------------------------------------------- new tiles
def full(shape, fill_value, dtype):
    shape = constant_shape(shape)
    if isinstance(fill_value, Tile) and fill_value.ndim:
        raise InterpreterError(f"full takes a scalar, got {fill_value.describe()}")
    return Tile(as_dtype(fill_value, supported(dtype)).data.expand(shape), dtype)


def ones(shape, dtype):
    return full(shape, 1, dtype)


def zeros(shape, dtype):
    return full(shape, 0, dtype)


def arange(size, /, *, dtype, start=0, step=1):
    (size,) = constant_shape(size, "size")
    x = convert(Tile(torch.arange(size), ct.int32), supported(dtype))
    if isinstance(step, Tile) or step != 1:
        x = mul(x, as_dtype(step, dtype))
    if isinstance(start, Tile) or start != 0:
        x = add(x, as_dtype(start, dtype))
    return x


def astile(value, /, *, dtype):
    if not isinstance(value, tuple):
        return as_dtype(value, dtype)
    rows = [astile(v, dtype=dtype) for v in value]
    constant_shape(len(rows), "tuple length")
    if len({r.shape for r in rows}) != 1:
        raise InterpreterError("astile takes nested tuples of one length")
    return Tile(torch.stack([r.data for r in rows]), dtype)


# ---------------------------------------------------------------- reductions and scans
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


# ---------------------------------------------------------------- the block, checks, printing
def bid(axis):
    return scalar(_of_axis(DispatchMode.get_current().launch.block, axis), ct.int32)


def num_blocks(axis):
    return scalar(_of_axis(DispatchMode.get_current().launch.grid, axis), ct.int32)


def _of_axis(triple: tuple[int, int, int], axis) -> int:
    if constant_int(axis, "axis") not in (0, 1, 2):
        raise InterpreterError(f"axis must be 0, 1 or 2, got {axis}")
    return triple[axis]


def assume_divisible_by(x, divisor):
    if constant_int(divisor, "divisor") < 1:
        raise InterpreterError(f"the divisor must be positive, got {divisor}")
    value = tile_of(x).value()
    if value % divisor:
        raise InterpreterError(f"assume_divisible_by: {value} is not divisible by {divisor}")
    return x


def static_eval(expr, /):
    return expr


def static_assert(condition, message=None, /):
    if not isinstance(condition, bool):
        raise InterpreterError(f"static_assert needs a compile-time bool, got {condition!r}")
    if not condition:
        raise InterpreterError(f"static assertion failed: {message or ''}")


def ensure_constant(value, /):
    if isinstance(value, Tile):
        raise InterpreterError(f"{value.describe()} is not a compile-time constant")
    return value


def assert_(cond, /, message=None):
    cond = tile_of(cond)
    if not is_boolean(cond.dtype):
        raise InterpreterError(f"assert_ takes a bool tile, got {cond.describe()}")
    if not bool(cond.data.all()):
        raise InterpreterError(f"assertion failed: {message or ''}")


def printf(format, *args):
    print(format % tuple(tile_of(a).value() if tile_of(a).ndim == 0 else str(a) for a in args), end="")


def print_(*args, sep=" ", end="\n"):
    print(*args, sep=sep, end=end)


def no_op():
    """Programmatic dependent launch orders kernels, not blocks."""


OPS = {
    ct.add: add,
    ct.sub: sub,
    ct.mul: mul,
    ct.truediv: truediv,
    ct.floordiv: floordiv,
    ct.cdiv: cdiv,
    ct.mod: mod,
    ct.divmod: divmod_,
    ct.pow: pow_,
    ct.atan2: atan2,
    ct.maximum: maximum,
    ct.minimum: minimum,
    ct.equal: comparison(lambda a, b: a == b),
    ct.not_equal: comparison(lambda a, b: a != b),
    ct.less: comparison(lambda a, b: a < b),
    ct.less_equal: comparison(lambda a, b: a <= b),
    ct.greater: comparison(lambda a, b: a > b),
    ct.greater_equal: comparison(lambda a, b: a >= b),
    ct.bitwise_and: bitwise(lambda a, b: a & b),
    ct.bitwise_or: bitwise(lambda a, b: a | b),
    ct.bitwise_xor: bitwise(lambda a, b: a ^ b),
    ct.bitwise_lshift: shift("lshift", _lshift, lambda a, b: a << b),
    ct.bitwise_rshift: shift("rshift", _rshift, lambda a, b: a >> b),
    ct.bitwise_not: bitwise_not,
    ct.exp: unary(torch.exp, math.exp),
    ct.exp2: unary(torch.exp2, lambda x: 2**x),
    ct.log: unary(torch.log, math.log),
    ct.log2: unary(torch.log2, math.log2),
    ct.sqrt: unary(torch.sqrt, math.sqrt),
    ct.rsqrt: unary(torch.rsqrt, lambda x: x**-0.5),
    ct.sin: unary(torch.sin, math.sin),
    ct.cos: unary(torch.cos, math.cos),
    ct.tan: unary(torch.tan, math.tan),
    ct.sinh: unary(torch.sinh, math.sinh),
    ct.cosh: unary(torch.cosh, math.cosh),
    ct.tanh: unary(torch.tanh, math.tanh),
    ct.floor: unary(torch.floor, math.floor, to_float=False),
    ct.ceil: unary(torch.ceil, math.ceil, to_float=False),
    ct.negative: negative,
    ct.abs: abs_,
    ct.isnan: isnan,
    ct.astype: astype,
    ct.bitcast: bitcast,
    ct.pack_to_bytes: pack_to_bytes,
    ct.unpack_from_bytes: unpack_from_bytes,
    ct.reshape: reshape,
    ct.Tile.item: item,
    ct.broadcast_to: broadcast_to,
    ct.expand_dims: expand_dims,
    ct.permute: permute,
    ct.transpose: transpose,
    ct.cat: cat,
    ct.extract: extract,
    ct.insert: insert,
    ct.where: where,
    ct.full: full,
    ct.ones: ones,
    ct.zeros: zeros,
    ct.arange: arange,
    ct.astile: astile,
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
    ct.bid: bid,
    ct.num_blocks: num_blocks,
    ct.assume_divisible_by: assume_divisible_by,
    ct.static_eval: static_eval,
    ct.static_assert: static_assert,
    ct.ensure_constant: ensure_constant,
    ct.assert_: assert_,
    ct.printf: printf,
    ct.print: print_,
    ct.grid_dependency_control_wait: no_op,
    ct.grid_dependency_control_launch_dependents: no_op,
}
