"""Tiles: immutable values with a cuTile dtype and a power-of-two shape, held in torch CPU tensors.

How a tile is held (its *carrier*): floats in the torch dtype of the same name, so every operation rounds as the tile's dtype does;
booleans as torch.bool; integers of every width as int64, so an operation is exact and its result can be checked against the
range of the real dtype. A uint64 is held as the int64 with the same bits.
"""

import builtins
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._datatype import is_boolean, is_float, is_integral
from cuda.tile._ir.cast_ops import check_implicit_cast
from cuda.tile._ir.ops_utils import BroadcastError, broadcast_shapes2, promote_dtypes
from cuda.tile._ir.type import LooselyTypedScalar, TileTy


class InterpreterError(Exception):
    """A kernel broke a rule of cuTile, or used what the interpreter does not know."""


FLOATS = {ct.float16: torch.float16, ct.bfloat16: torch.bfloat16, ct.float32: torch.float32, ct.float64: torch.float64}
SIGNED = {ct.int8: torch.int8, ct.int16: torch.int16, ct.int32: torch.int32, ct.int64: torch.int64}
UNSIGNED = {ct.uint8: torch.uint8, ct.uint16: torch.uint16, ct.uint32: torch.uint32, ct.uint64: torch.uint64}
EIGHT_BITS = {ct.float8_e4m3fn: torch.float8_e4m3fn, ct.float8_e5m2: torch.float8_e5m2}  # without arithmetic, as in cuTile
TORCH_DTYPES = {ct.bool_: torch.bool, **FLOATS, **EIGHT_BITS, **SIGNED, **UNSIGNED}
TILE_DTYPES = {t: d for d, t in TORCH_DTYPES.items()}
TORCH_DTYPES[ct.tfloat32] = torch.float32  # a tile's dtype alone: no array has it
TF32_LEAST, TF32_MASK = 1 << 12, ~((1 << 13) - 1)  # half of the last of its 10 bits, and the bits that it has

# Memory is read and written through the signed type of the same width: torch's own uint16 to uint64 can do next to nothing.
SIGNED_OF_WIDTH = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}

RANGES = {d: (-(1 << d.bitwidth - 1), (1 << d.bitwidth - 1) - 1) for d in SIGNED}
RANGES |= {d: (0, (1 << d.bitwidth) - 1) for d in UNSIGNED}

_TOP_BIT = -(1 << 63)


def supported(dtype: ct.DType) -> ct.DType:
    if dtype not in TORCH_DTYPES:
        raise InterpreterError(f"dtype {dtype} is not implemented")
    return dtype


def carrier(dtype: ct.DType) -> torch.dtype:
    return torch.int64 if is_integral(dtype) else TORCH_DTYPES[supported(dtype)]


def native_dtype(dtype: ct.DType) -> torch.dtype:
    """The torch dtype that memory of `dtype` is accessed with."""
    return SIGNED_OF_WIDTH[dtype.bitwidth] if is_integral(dtype) else TORCH_DTYPES[supported(dtype)]


def to_native(data: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    return data.to(native_dtype(dtype))


def from_native(data: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    if not is_integral(dtype):
        return data
    data = data.to(torch.int64)
    return data & RANGES[dtype][1] if dtype in UNSIGNED and dtype.bitwidth < 64 else data


class Tile(ct.Tile):
    """A tile value. The operators come from `ct.Tile`: they call the ct.* functions, which the interpreter answers."""

    __slots__ = ("data", "dtype")

    def __init__(self, data: torch.Tensor, dtype: ct.DType):
        self.data = data
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        return self.data.ndim

    def value(self) -> bool | int | float:
        """The Python value of a 0-d tile."""
        value = self.data.item()
        return value + (1 << 64) if self.dtype is ct.uint64 and value < 0 else value

    def __bool__(self) -> bool:
        if self.ndim or not is_boolean(self.dtype):
            raise InterpreterError(f"a condition must be a 0-d bool tile, got {self.describe()}")
        return bool(self.data)

    def __index__(self) -> int:
        if self.ndim or not is_integral(self.dtype):
            raise InterpreterError(f"an index must be a 0-d integer tile, got {self.describe()}")
        return self.value()

    def __getitem__(self, index) -> "Tile":
        index = index if isinstance(index, tuple) else (index,)
        if any(i is not None and i is not Ellipsis and i != slice(None) for i in index):
            raise InterpreterError("a tile takes only None, `...` and `:` between brackets; use ct.extract() or .item()")
        return Tile(self.data[index], self.dtype)

    def __abs__(self) -> "Tile":
        return ct.abs(self)

    def __pos__(self) -> "Tile":
        return convert(self, ct.int32) if is_boolean(self.dtype) else self

    def describe(self) -> str:
        return f"tile[{self.dtype}, {self.shape}]"

    def __repr__(self) -> str:
        return f"<{self.describe()}: {self}>"

    def __str__(self) -> str:
        return format(self)

    def __format__(self, spec: str) -> str:
        def text(x):
            return "[" + ", ".join(map(text, x)) + "]" if isinstance(x, list) else builtins.format(x, spec)

        data = self.data.to(torch.int64) if is_boolean(self.dtype) else self.data
        return text(data.tolist())


Value = Tile | bool | int | float


def scalar(value: bool | int | float, dtype: ct.DType) -> Tile:
    """A 0-d tile. `value` is rounded to a float dtype, and must lie in the range of an integer dtype."""
    if is_float(dtype):
        return Tile(torch.tensor(float(value), dtype=torch.float64).to(carrier(dtype)), dtype)
    if is_boolean(dtype):
        return Tile(torch.tensor(bool(value)), dtype)
    value = int(value)
    low, high = RANGES[supported(dtype)]
    if not low <= value <= high:
        raise InterpreterError(f"{value} is out of range of {dtype}")
    return Tile(torch.tensor(value - (1 << 64) if value > RANGES[ct.int64][1] else value), dtype)


def tile_of(x: Any, what: str = "value") -> Tile:
    """A tile as it is; a Python number as the tile that cuTile makes of it where no other operand gives a dtype."""
    if isinstance(x, Tile):
        return x
    if isinstance(x, bool):
        return scalar(x, ct.bool_)
    if isinstance(x, int):
        return scalar(x, ct.int32 if -(1 << 31) <= x < 1 << 31 else ct.int64)
    if isinstance(x, float):
        return scalar(x, ct.float32)
    raise InterpreterError(f"{what} must be a tile or a number, got {type(x).__name__}")


def in_range(data: torch.Tensor, dtype: ct.DType, what: str) -> torch.Tensor:
    """An exact integer result as `dtype`: wrapped if unsigned; an error if a signed result does not fit."""
    if dtype.bitwidth == 64:
        return data
    low, high = RANGES[dtype]
    if dtype in UNSIGNED:
        return data & high
    least, most = (int(x) for x in torch.aminmax(data))
    if least < low or most > high:
        raise InterpreterError(f"{what} overflows {dtype}: {most if most > high else least}")
    return data


def convert(x: Tile, dtype: ct.DType) -> Tile:
    """x as `dtype`, as ct.astype does it.

    A float outside the range of an integer dtype is undefined on the GPU: here it becomes the nearest integer of the
    dtype, and NaN the lowest. A signed integer that a narrower signed dtype cannot hold is an error; unsigned dtypes wrap.
    """
    source, data = x.dtype, x.data
    if source is dtype:
        return x
    if is_boolean(dtype):
        return Tile(data != 0, dtype)
    if is_float(dtype):
        if dtype in EIGHT_BITS:  # cvt.rn.satfinite: what does not fit becomes the largest finite number, infinity too; NaN stays
            most = torch.finfo(EIGHT_BITS[dtype]).max
            data = data.to(torch.float32).clamp(-most, most)
        elif source in EIGHT_BITS:
            data = data.to(torch.float32)
        result = data.to(carrier(dtype))
        if source is ct.uint64:
            result = torch.where(data < 0, (data.to(torch.float64) + 2.0**64).to(result.dtype), result)
        if dtype is ct.tfloat32:
            result = ((result.contiguous().view(torch.int32) + TF32_LEAST) & TF32_MASK).view(torch.float32)
        return Tile(result, dtype)
    low, high = RANGES[supported(dtype)]
    if is_float(source):
        exact = data.to(torch.float64).trunc()
        inside = exact.clamp(low, high).nan_to_num(low)
        result = inside.to(torch.int64)
        if dtype is ct.uint64:
            result = torch.where(inside >= 2.0**63, (inside - 2.0**64).to(torch.int64), result)
        elif dtype is ct.int64:
            result = torch.where(inside >= 2.0**63, high, result)
        return Tile(result, dtype)
    data = data.to(torch.int64)
    if source in UNSIGNED and dtype in SIGNED:  # the same bits, cut off and sign-extended
        shift = 64 - dtype.bitwidth
        return Tile((data << shift) >> shift, dtype)
    return Tile(in_range(data, dtype, f"astype({dtype})"), dtype)


def loose(x: Value) -> Any:
    """x as cuTile's typing rules take it: a dtype, or a Python constant that adapts to the other operand."""
    return x.dtype if isinstance(x, Tile) else LooselyTypedScalar(x)


def as_dtype(x: Value, dtype: ct.DType) -> Tile:
    return convert(x, dtype) if isinstance(x, Tile) else scalar(x, dtype)


def common_dtype(x: Value, y: Value, force_float: bool = False) -> ct.DType:
    return supported(promote_dtypes(loose(x), loose(y), force_float))


def shape_of(x: Value) -> tuple[int, ...]:
    return x.shape if isinstance(x, Tile) else ()


def common_shape(*xs: Value) -> tuple[int, ...]:
    shape = ()
    for x in xs:
        other = shape_of(x)
        if other and other != shape:
            try:
                shape = broadcast_shapes2(shape, other)
            except BroadcastError as e:
                raise InterpreterError(str(e)) from None
    return shape


def implicit_cast(x: Value, dtype: ct.DType, what: str) -> Tile:
    """x as `dtype` where cuTile converts without being asked: only to a dtype that holds every value of x's."""
    if not isinstance(x, (Tile, bool, int, float)):
        raise InterpreterError(f"{what} must be a tile or a number, got {type(x).__name__}")
    try:
        check_implicit_cast(TileTy(x.dtype, x.shape) if isinstance(x, Tile) else LooselyTypedScalar(x), dtype)
    except ct.TileError as e:
        raise InterpreterError(f"{what}: {e}; use ct.astype()") from None
    return as_dtype(x, dtype)


def broadcast(x: Tile, shape: tuple[int, ...], what: str = "tile") -> torch.Tensor:
    try:
        return x.data.expand(shape)
    except RuntimeError:
        raise InterpreterError(f"{what} of shape {x.shape} does not broadcast to {shape}") from None


def flip_unsigned(data: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    """Carriers whose signed order is the order of the values."""
    return data ^ _TOP_BIT if dtype is ct.uint64 else data


def constant_int(x: Any, what: str) -> int:
    if isinstance(x, bool) or not isinstance(x, int):
        raise InterpreterError(f"{what} must be a compile-time integer, got {x!r}")
    return x


def constant_shape(shape: Any, what: str = "shape") -> tuple[int, ...]:
    shape = shape if isinstance(shape, (tuple, list)) else (shape,)
    for n in shape:
        constant_int(n, what)
        if n <= 0 or n & (n - 1):
            raise InterpreterError(f"every dimension of {what} {tuple(shape)} must be a power of two")
    return tuple(shape)


def axis_of(axis: Any, ndim: int) -> int:
    axis = constant_int(axis, "axis")
    if not -ndim <= axis < ndim:
        raise InterpreterError(f"axis {axis} is out of range for {ndim} dimensions")
    return axis % ndim
