"""What the ct.* functions on the elements of tiles compute: dtypes as cuTile's typing rules give them, values by torch."""

import math
from collections.abc import Callable

import cuda.tile as ct
import torch
from cuda.tile import RoundingMode
from cuda.tile._datatype import is_boolean, is_float, is_integral

from .tiles import (
    SIGNED,
    UNSIGNED,
    InterpreterError,
    Tile,
    Value,
    as_dtype,
    common_dtype,
    common_shape,
    convert,
    flip_unsigned,
    in_range,
    tile_of,
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
}
