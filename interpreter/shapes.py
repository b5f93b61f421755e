"""The ct.* functions that make tiles, and that change their shape or dtype."""

import cuda.tile as ct
import torch
from cuda.tile._datatype import is_boolean, is_float

from .arithmetic import add, check_rounding, mul
from .tiles import (
    InterpreterError,
    Tile,
    as_dtype,
    axis_of,
    broadcast,
    carrier,
    common_dtype,
    common_shape,
    constant_int,
    constant_shape,
    convert,
    from_native,
    supported,
    tile_of,
    to_native,
)


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


OPS = {
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
}
