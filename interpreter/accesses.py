"""The ct.* functions that load and store: tiles, views, gathers and raw memory."""

import cuda.tile as ct
import torch
from cuda.tile import MemoryOrder, MemoryScope, PaddingMode
from cuda.tile._datatype import is_integral
from cuda.tile._stub import RawArrayMemory

from .arrays import Array, Place, axis_order, padding, poison
from .tiles import (
    InterpreterError,
    Tile,
    Value,
    axis_of,
    broadcast,
    constant_int,
    constant_shape,
    implicit_cast,
    scalar,
    tile_of,
)


# ---------------------------------------------------------------- tile space
def load(
    array,
    index,
    shape,
    *,
    order="C",
    padding_mode=PaddingMode.UNDETERMINED,
    check_bounds=True,
    latency=None,
    allow_tma=None,
    memory_order=MemoryOrder.WEAK,
    memory_scope=MemoryScope.NONE,
):
    shape = constant_shape(shape)
    place = expect_array(array).tile(index, shape or (1,) * array.ndim, order, check_bounds)
    return read_tile(place, padding_mode, memory_order, memory_scope, shape)


def read_tile(place: Place, padding_mode, memory_order, memory_scope, shape) -> Tile:
    atomic = memory_order is not MemoryOrder.WEAK
    if atomic:
        place.acquire(memory_order, memory_scope)
    x = place.read(padding(padding_mode, place.array.dtype), atomic)
    return Tile(x.data.reshape(shape), x.dtype)


def store(
    array,
    index,
    tile,
    *,
    order="C",
    check_bounds=True,
    latency=None,
    allow_tma=None,
    memory_order=MemoryOrder.WEAK,
    memory_scope=MemoryScope.NONE,
):
    tile = implicit_cast(tile, expect_array(array).dtype, f"the tile stored in {array.name}")
    shape = tile.shape or (1,) * array.ndim
    place = array.tile(index, shape, order, check_bounds)
    atomic = memory_order is not MemoryOrder.WEAK
    place.write(Tile(tile.data.reshape(shape), tile.dtype), atomic)
    if atomic:
        place.release(memory_order, memory_scope)


def num_tiles(array, /, axis, shape, order="C"):
    shape = constant_shape(shape) or (1,) * array.ndim
    return tiles_along(array, axis, shape, axis_order(order, array.ndim))


def tiles_along(array: Array, axis: int, steps: tuple[int, ...], axes: list[int]) -> Tile:
    axis = axis_of(axis, array.ndim)
    return scalar(-(-array.sizes[axes[axis]] // steps[axis]), ct.int32)


class TiledView(ct.TiledView):
    """An array cut into tiles of one shape, `steps` apart."""

    def __init__(self, array: Array, shape: tuple[int, ...], padding_mode, steps: tuple[int, ...]):
        self.array, self._shape, self.padding_mode, self._steps = array, shape, padding_mode, steps
        self.full_shape = shape or (1,) * array.ndim

    @property
    def dtype(self) -> ct.DType:
        return self.array.dtype

    @property
    def tile_shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def traversal_steps(self) -> tuple[int, ...]:
        return self._steps

    def place(self, index, check_bounds: bool) -> Place:
        return self.array.tile(index, self.full_shape, "C", check_bounds, self._steps)


def tiled_view(self, tile_shape, *, padding_mode=PaddingMode.UNDETERMINED, traversal_steps=None):
    shape = constant_shape(tile_shape, "tile_shape")
    full = shape or (1,) * self.ndim
    if len(full) != self.ndim:
        raise InterpreterError(f"{self.name} has {self.ndim} dimensions, but tile_shape is {shape}")
    steps = full
    if traversal_steps is not None:
        steps = traversal_steps if isinstance(traversal_steps, tuple) else (traversal_steps,)
        if len(steps) != self.ndim or any(constant_int(s, "traversal_steps") <= 0 for s in steps):
            raise InterpreterError(f"traversal_steps {steps} must be {self.ndim} positive integers")
    return TiledView(self, shape, padding_mode, steps)


def view_num_tiles(self, axis):
    return tiles_along(self.array, axis, self._steps, list(range(self.array.ndim)))


def view_load(self, index, *, check_bounds=True, latency=None, allow_tma=None):
    return read_tile(self.place(index, check_bounds), self.padding_mode, MemoryOrder.WEAK, MemoryScope.NONE, self._shape)


def view_store(self, index, tile, *, check_bounds=True, latency=None, allow_tma=None):
    tile = implicit_cast(tile, self.dtype, f"the tile stored in {self.array.name}")
    self.place(index, check_bounds).write(Tile(broadcast(tile, self._shape).reshape(self.full_shape), tile.dtype))


def slice_array(self, axis, start, stop):
    axis = axis_of(axis, self.ndim)
    first, last = tile_of(start, "start").value(), tile_of(stop, "stop").value()
    size = self.sizes[axis]
    if not (0 <= first < size and first <= last <= size):
        raise InterpreterError(f"slice {first}:{last} leaves dimension {axis} of {self.name}, of size {size}")
    fixed = not isinstance(start, Tile) and not isinstance(stop, Tile)
    replace = lambda xs, x: tuple(x if i == axis else y for i, y in enumerate(xs))  # noqa: E731
    result = Array(
        self.memory, self.name, self.dtype, self.offset + first * self.steps[axis], replace(self.sizes, last - first), self.steps,
        replace(self.shape, last - first if fixed else scalar(last - first, self.index_dtype)), self.strides, self.index_dtype,
    )  # fmt: skip
    result.aliases = self.aliases
    return result


def make_slice(self, start, length, /):
    self.start, self.length = start, length


def advanced_place(array: Array, indices) -> Place:
    if len(indices) != array.ndim or array.ndim < 2:
        raise InterpreterError(f"advanced indexing of {array.name} needs {array.ndim} indices, and two dimensions or more")
    starts, positions, sparse = [], [], 0
    for i in indices:
        if isinstance(i, ct.Slice):
            (n,) = constant_shape(i.length, "Slice length")
            start = tile_of(i.start, "Slice start").value()
            starts.append(start)
            positions.append(torch.arange(start, start + n))
        elif isinstance(i, Tile) and i.ndim == 1 and is_integral(i.dtype):
            sparse += 1
            starts.append(None)
            positions.append(i.data)
        else:
            raise InterpreterError(f"an advanced index is a 1-d integer tile or a ct.Slice, got {i!r}")
    if sparse != 1:
        raise InterpreterError(f"exactly one advanced index is a 1-d integer tile, got {sparse}")
    return array.box(starts, positions, list(range(array.ndim)), True)


def load_advanced_indexing(array, indices, /, *, padding_mode=PaddingMode.UNDETERMINED, latency=None, allow_tma=None):
    place = advanced_place(expect_array(array), indices)
    return place.read(padding(padding_mode, array.dtype))


def store_advanced_indexing(array, indices, tile, /, *, latency=None, allow_tma=None):
    place = advanced_place(expect_array(array), indices)
    tile = implicit_cast(tile, array.dtype, f"the tile stored in {array.name}")
    if tile.shape != place.shape:
        raise InterpreterError(f"the stored tile has shape {tile.shape}, its indices {place.shape}")
    place.write(tile, may_repeat=True)


# ---------------------------------------------------------------- elements
def expect_array(array) -> Array:
    if not isinstance(array, Array):
        raise InterpreterError(f"expected an array, got {array!r}")
    return array


def gather(array, indices, /, *, mask=None, padding_value=0, check_bounds=True, latency=None):
    place = expect_array(array).element(indices, check_bounds, mask)
    fill = implicit_cast(padding_value, array.dtype, "padding value")
    return place.read(fill)


def scatter(array, indices, value, /, *, mask=None, check_bounds=True, latency=None):
    place = expect_array(array).element(indices, check_bounds, mask)
    place.write(implicit_cast(value, array.dtype, f"the value stored in {array.name}"), may_repeat=True)


class RawMemory(RawArrayMemory):
    """An array's memory by element offsets from its first element."""

    def __init__(self, array: Array):
        self.array = array

    @property
    def dtype(self) -> ct.DType:
        return self.array.dtype

    def place(self, offset: Value, mask: Value | None) -> Place:
        a = self.array
        return Array(a.memory, a.name, a.dtype, a.offset, (extent(a),), (1,), (), ()).element(offset, False, mask)


def extent(array: Array) -> int:
    """Elements from the array's first to its last, in memory."""
    if 0 in array.sizes:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(array.sizes, array.steps, strict=True))


def load_offset(self, offset, /, *, mask=None, padding_value=0, latency=None):
    fill = poison(self.dtype) if padding_value is None else implicit_cast(padding_value, self.dtype, "padding value")
    return self.place(offset, mask).read(fill)


def store_offset(self, offset, value, /, *, mask=None, latency=None):
    self.place(offset, mask).write(implicit_cast(value, self.dtype, "stored value"), may_repeat=True)


OPS = {
    ct.load: load,
    ct.store: store,
    ct.num_tiles: num_tiles,
    ct.gather: gather,
    ct.scatter: scatter,
    ct.load_advanced_indexing: load_advanced_indexing,
    ct.store_advanced_indexing: store_advanced_indexing,
    ct.Slice.__init__: make_slice,
    ct.Array.slice: slice_array,
    ct.Array.tiled_view: tiled_view,
    ct.Array.get_raw_memory: RawMemory,
    ct.TiledView.num_tiles: view_num_tiles,
    ct.TiledView.load: view_load,
    ct.TiledView.store: view_store,
    RawArrayMemory.load_offset: load_offset,
    RawArrayMemory.store_offset: store_offset,
}
