"""Global memory: arrays, the bounds of every access, and races between blocks.

Blocks run one after the other, so a race shows as an order that happened to be taken. Each write is stamped with a *tag*,
which says which block made it and when: tags grow with time, and a block's tags are all at least `Launch.first_tag`. An
access conflicts when it meets an older tag, unless the writer released and this block acquired it through an atomic.
"""

import ctypes
import math
from collections import defaultdict
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import MemoryOrder, MemoryScope, PaddingMode
from cuda.tile._datatype import is_boolean, is_float, is_integral
from cuda.tile._stub import RawArrayMemory

from .tiles import (
    EIGHT_BITS,
    RANGES,
    SIGNED,
    InterpreterError,
    Tile,
    Value,
    as_dtype,
    axis_of,
    broadcast,
    common_shape,
    constant_int,
    constant_shape,
    flip_unsigned,
    from_native,
    implicit_cast,
    in_range,
    native_dtype,
    scalar,
    tile_of,
    to_native,
)

NEVER = torch.iinfo(torch.int32).max  # the tag of memory that no block touched
READS_KEPT = 1 << 22  # elements whose reads are remembered before they are written down in `first_reader`
ATOMICS_A_BLOCK = 10_000  # more than this and the block waits for one that runs later


class Launch:
    """The block that runs now, and what it may see of the others' writes."""

    def __init__(self, grid: tuple[int, int, int], races: bool, read_back: bool = True):
        self.grid = grid
        self.races = races
        self.read_back = read_back
        self.block = (0, 0, 0)
        self.tag = 0  # the present block's current tag; a release starts the next one
        self.first_tag = 0  # the present block's first tag
        # What another block's work counts as known: its first tag -> the last tag that it released.
        self.seen: dict[int, int] = {}  # acquired by the present block
        self.released: dict[Any, dict[int, int]] = defaultdict(dict)  # by the address of the atomic
        self.atomics = 0
        self.memories: dict[Any, Memory] = {}
        self.regions: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by a storage's address: of the memory that holds it, and that

    def begin(self, block: tuple[int, int, int]) -> None:
        self.block = block
        self.tag += 1
        self.first_tag = self.tag
        self.seen = {}
        self.atomics = 0

    def cover(self, tensors: list[torch.Tensor]) -> None:
        """Makes one memory of storages that lie over each other, so that a race between two arguments in it is seen."""
        storages = sorted({(s.data_ptr(), s.nbytes()): s for t in tensors if (s := t.untyped_storage()).nbytes()}.items())
        while storages:
            (start, size), storage = storages.pop(0)
            end, group = start + size, [start]
            while storages and storages[0][0][0] < end:
                (other, size), _ = storages.pop(0)
                end = max(end, other + size)
                group.append(other)
            if len(group) > 1:
                storage = torch.frombuffer((ctypes.c_char * (end - start)).from_address(start), dtype=torch.uint8).untyped_storage()
            self.regions.update((address, (start, storage)) for address in group)

    def memory(self, tensor: torch.Tensor, dtype: ct.DType) -> tuple["Memory", int]:
        """The memory that holds a tensor, and the offset of its first element there."""
        storage = tensor.untyped_storage()
        start, whole = self.regions.get(storage.data_ptr(), (storage.data_ptr(), storage))
        first = tensor.storage_offset() * tensor.itemsize + storage.data_ptr() - start
        if first % tensor.itemsize:  # an array of wider elements that starts between two of them: alone in its memory
            start, whole, first = storage.data_ptr(), storage, tensor.storage_offset() * tensor.itemsize
        key = (start, native_dtype(dtype))
        if key not in self.memories:
            self.memories[key] = Memory(self, whole, native_dtype(dtype))
        return self.memories[key], first // tensor.itemsize

    def synchronize(self, place: Any, order: MemoryOrder, scope: MemoryScope) -> None:
        """What an atomic at one address makes visible."""
        if scope in (MemoryScope.NONE, MemoryScope.BLOCK):
            return
        if order is MemoryOrder.ACQUIRE:
            merge(self.seen, self.released[place])
        if order is MemoryOrder.RELEASE:
            merge(self.released[place], {**self.seen, self.first_tag: self.tag})
            self.tag += 1

    def knows(self, tag: int) -> bool:
        return any(first <= tag <= last for first, last in self.seen.items())

    def count_atomics(self) -> None:
        self.atomics += 1
        if self.atomics > ATOMICS_A_BLOCK:
            raise InterpreterError("the block seems to wait for one that has not run: blocks may run in any order")


def merge(into: dict[int, int], other: dict[int, int]) -> None:
    for first, last in other.items():
        into[first] = max(last, into.get(first, last))


class Memory:
    """One torch storage as a flat tensor, and who wrote and read each element."""

    def __init__(self, launch: Launch, storage: torch.UntypedStorage, dtype: torch.dtype):
        self.launch = launch
        self.flat = torch.empty(0, dtype=dtype).set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
        self.writer: torch.Tensor | None = None  # 2 * tag, + 1 if the last write was atomic
        self.first_reader: torch.Tensor | None = None
        self.reads: list[tuple[int, torch.Tensor]] = []
        self.reads_kept = 0

    def _stamps(self) -> torch.Tensor:
        return torch.full(self.flat.shape, NEVER, dtype=torch.int32)

    def _write_down_reads(self) -> None:
        if self.reads and self.first_reader is None:
            self.first_reader = self._stamps()
        for tag, offsets in self.reads:
            self.first_reader.scatter_reduce_(0, offsets, torch.full(offsets.shape, tag, dtype=torch.int32), "amin")
        self.reads, self.reads_kept = [], 0

    def _unseen(self, tags: torch.Tensor) -> torch.Tensor:
        """Which of `tags` belong to another block whose work this block cannot know of."""
        other = tags < self.launch.first_tag
        for tag in tags[other].unique().tolist():
            if self.launch.knows(tag):
                other &= tags != tag
        return other

    def _check_writer(self, offsets: torch.Tensor, atomic: bool, values: torch.Tensor | None, what: str, where):
        """The places (with their stamps) that another block wrote too, with the same `values`. values: None for a read."""
        if self.writer is None:
            return None
        stamps = self.writer.index_select(0, offsets)
        if values is None and not (atomic or self.launch.read_back):
            own = (stamps >= 2 * self.launch.tag) & (stamps != NEVER)
            if own.any():
                raise InterpreterError(f"this block {what} {where(own)}, which it wrote itself and has not released")
        if int(stamps.amin()) >= 2 * self.launch.first_tag:
            return None
        shared = self._unseen(stamps >> 1)
        if atomic:
            shared &= stamps % 2 == 0
        bad = shared
        if values is not None:
            bad = shared & ~same_bits(self.flat.index_select(0, offsets), values)
        if bad.any():
            raise InterpreterError(f"race: another block wrote {where(bad)}, which this block {what}")
        return offsets[shared], stamps[shared]

    def _check_readers(self, offsets: torch.Tensor, values: torch.Tensor | None, where) -> None:
        self._write_down_reads()
        if self.first_reader is None:
            return
        tags = self.first_reader.index_select(0, offsets)
        if int(tags.amin()) >= self.launch.first_tag:
            return
        bad = self._unseen(tags)
        if values is not None:
            bad &= ~same_bits(self.flat.index_select(0, offsets), values)
        if bad.any():
            raise InterpreterError(f"race: another block read {where(bad)}, which this block writes")

    def read(self, offsets: torch.Tensor, where, atomic: bool = False) -> torch.Tensor:
        if self.launch.races:
            self._check_writer(offsets, atomic, None, "reads", where)
            if not atomic:
                self.reads.append((self.launch.tag, offsets))
                self.reads_kept += offsets.numel()
                if self.reads_kept > READS_KEPT:
                    self._write_down_reads()
        return self.flat.index_select(0, offsets)

    def write(self, offsets: torch.Tensor, values: torch.Tensor, where, atomic: bool = False, may_repeat: bool = False) -> None:
        if self.launch.races:
            # Blocks may write the same value to one place: whichever comes last, the memory holds that value.
            allowed = None if atomic else values
            shared = self._check_writer(offsets, atomic, allowed, "writes", where)
            self._check_readers(offsets, allowed, where)
            if self.writer is None:
                self.writer = self._stamps()
            self.writer.index_fill_(0, offsets, 2 * self.launch.tag + atomic)
            if shared is not None and allowed is not None:  # the other block's stamp stays: a different value may follow
                self.writer.index_copy_(0, *shared)
        # scatter_ is fifty times slower for bfloat16, and neither takes eight-bit floats
        flat, given = (x.view(torch.int8) if x.dtype in EIGHT_BITS.values() else x for x in (self.flat, values))
        flat.index_copy_(0, offsets, given)
        if may_repeat:
            lost = ~same_bits(self.flat.index_select(0, offsets), values)
            if lost.any():
                raise InterpreterError(f"one store writes two different values to {where(lost)}")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype.is_floating_point:
        width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
        a, b = a.contiguous().view(width), b.contiguous().view(width)
    return a == b


def poison(dtype: ct.DType) -> Tile:
    """The stand-in for a value that the language leaves undetermined: whatever uses it should go visibly wrong."""
    if is_float(dtype):
        return scalar(math.nan, dtype)
    if is_boolean(dtype):
        return scalar(True, dtype)
    return scalar(RANGES[dtype][0 if dtype in SIGNED else 1], dtype)


class Place:
    """Where an access goes: for each element of a tile of `shape`, an offset into the memory or nothing (`inside` is False)."""

    def __init__(
        self, array: "Array", shape: tuple[int, ...], indices: list[torch.Tensor], strides: list[int], inside: torch.Tensor | None
    ):
        self.array, self.shape, self.indices = array, shape, indices
        first, offsets = array.offset, None
        for index, stride in zip(indices, strides, strict=True):
            if index.ndim == 0:
                first += int(index) * stride
            else:
                step = index if stride == 1 else index * stride
                offsets = step if offsets is None else offsets + step
        offsets = torch.full((), first) if offsets is None else offsets + first
        offsets = offsets.expand(shape).reshape(-1)
        self.inside = None if inside is None else inside.expand(shape).reshape(-1)
        if self.inside is not None and bool(self.inside.all()):
            self.inside = None
        self.offsets = offsets if self.inside is None else offsets[self.inside]

    def where(self, bad: torch.Tensor) -> str:
        """Names the first element of the access for which `bad` holds."""
        position = int(bad.nonzero()[0])
        if self.inside is not None:
            position = int(self.inside.nonzero()[position])
        index = ", ".join(str(int(i.expand(self.shape).reshape(-1)[position])) for i in self.indices)
        return f"{self.array.name}[{index}]"

    def read(self, padding: Value | Tile, atomic: bool = False) -> Tile:
        array = self.array
        native = array.memory.read(self.offsets, self.where, atomic) if self.offsets.numel() else None
        if self.inside is None:
            return Tile(from_native(native, array.dtype).reshape(self.shape), array.dtype)
        data = broadcast(as_dtype(padding, array.dtype), self.shape, "padding value").reshape(-1).clone()
        if native is not None:
            data[self.inside] = from_native(native, array.dtype)
        return Tile(data.reshape(self.shape), array.dtype)

    def select(self, x: Tile, what: str) -> torch.Tensor:
        """The elements of x that are accessed, as memory holds them."""
        data = to_native(broadcast(x, self.shape, what), x.dtype).reshape(-1)
        return data if self.inside is None else data[self.inside]

    def write(self, x: Tile, atomic: bool = False, may_repeat: bool = False) -> None:
        self.array.check_alias()
        values = self.select(x, "stored value")
        if self.offsets.numel():
            self.array.memory.write(self.offsets, values, self.where, atomic, may_repeat or 0 in self.array.steps)

    def _synchronize(self, order: MemoryOrder, scope: MemoryScope) -> None:
        if self.offsets.numel() == 1:  # a tile of atomics is taken as relaxed
            place = (id(self.array.memory), int(self.offsets[0]))
            self.array.memory.launch.synchronize(place, order, scope)

    def acquire(self, order: MemoryOrder, scope: MemoryScope) -> None:
        """Called before an atomic access."""
        self.array.memory.launch.count_atomics()
        if order in (MemoryOrder.ACQUIRE, MemoryOrder.ACQ_REL):
            self._synchronize(MemoryOrder.ACQUIRE, scope)

    def release(self, order: MemoryOrder, scope: MemoryScope) -> None:
        """Called after an atomic access."""
        if order in (MemoryOrder.RELEASE, MemoryOrder.ACQ_REL):
            self._synchronize(MemoryOrder.RELEASE, scope)


class Array(ct.Array):
    """An array parameter, or a slice of one. Sizes are 0-d tiles, or Python ints where the kernel's signature fixes them."""

    def __init__(
        self, memory: Memory, name: str, dtype: ct.DType, offset: int, sizes, steps, shape, strides, index_dtype: ct.DType = ct.int32
    ):
        self.memory, self.name, self._dtype, self.offset = memory, name, dtype, offset
        self.sizes, self.steps = tuple(sizes), tuple(steps)  # plain ints, for the interpreter
        self._shape, self._strides = tuple(shape), tuple(strides)  # as the kernel sees them
        self.index_dtype = index_dtype
        self.aliases: list[str] = []  # the other arguments that share its memory without being allowed to

    @property
    def dtype(self) -> ct.DType:
        return self._dtype

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def shape(self) -> tuple:
        return self._shape

    @property
    def strides(self) -> tuple:
        return self._strides

    def __getitem__(self, index):
        raise InterpreterError("arrays take no brackets: use ct.load() or ct.gather()")

    def __repr__(self) -> str:
        return f"<array {self.name}: {self.dtype}, {self.sizes}>"

    def check_alias(self) -> None:
        if self.aliases:
            raise InterpreterError(
                f"{self.name} is written and shares memory with {', '.join(self.aliases)}: "
                "cuTile takes array arguments not to alias; pass the tensor once, or give both an alias group"
            )

    def element(self, indices, check_bounds: bool, mask: Value | None = None) -> Place:
        """Elements at integer indices, as ct.gather and ct.scatter take them."""
        indices = indices if isinstance(indices, tuple) else (indices,)
        if len(indices) != self.ndim:
            raise InterpreterError(f"{self.name} has {self.ndim} dimensions, but {len(indices)} indices were given")
        tiles = [tile_of(i, "index") for i in indices]
        for i in tiles:
            if not is_integral(i.dtype):
                raise InterpreterError(f"an index of {self.name} has dtype {i.dtype}")
        shape = common_shape(*tiles)
        inside = None
        if mask is not None:
            mask = tile_of(mask, "mask")
            if not is_boolean(mask.dtype):
                raise InterpreterError(f"mask must be a bool tile, got {mask.describe()}")
            inside = broadcast(mask, shape, "mask")
        wanted = inside
        for i, size in zip(tiles, self.sizes, strict=True):
            low, high = (int(x) for x in torch.aminmax(i.data))
            if low < 0 or high >= size:
                within = (i.data >= 0) & (i.data < size)
                inside = within if inside is None else inside & within
        place = Place(self, shape, [i.data for i in tiles], self.steps, inside)
        if not check_bounds and inside is not wanted:
            outside = ~inside.expand(shape).reshape(-1)
            if wanted is not None:
                outside &= wanted.expand(shape).reshape(-1)
            if outside.any():
                place.inside = None
                raise InterpreterError(f"{place.where(outside)} is out of bounds for shape {self.sizes} (check_bounds=False)")
        return place

    def tile(self, index, shape: tuple[int, ...], order, check_bounds: bool, steps: tuple[int, ...] | None = None) -> Place:
        """The tile at `index` of the tile space, as ct.load and ct.store take it."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.ndim:
            raise InterpreterError(f"{self.name} has {self.ndim} dimensions, but {len(index)} indices were given")
        if len(shape) != self.ndim:
            raise InterpreterError(f"{self.name} has {self.ndim} dimensions, but the tile's shape is {shape}")
        axes = axis_order(order, self.ndim)
        starts = [tile_of(i, "index") for i in index]
        for i in starts:
            if i.ndim or i.dtype not in SIGNED:
                raise InterpreterError(f"an index of {self.name} must be a signed integer scalar, got {i.describe()}")
        starts = [i.value() * step for i, step in zip(starts, steps or shape, strict=True)]
        return self.box(starts, [torch.arange(s, s + n) for s, n in zip(starts, shape, strict=True)], axes, check_bounds)

    def box(self, starts, positions: list[torch.Tensor], axes: list[int], check_bounds: bool) -> Place:
        """The elements at every combination of `positions`, one 1-d tensor for each dimension of the tile."""
        low, high = RANGES[self.index_dtype]
        n, inside, indices = len(positions), None, [None] * len(positions)
        for d, (start, position) in enumerate(zip(starts, positions, strict=True)):
            if start is not None and not low <= start <= high:
                raise InterpreterError(f"the tile's first index {start} in {self.name} overflows {self.index_dtype}")
            size = self.sizes[axes[d]]
            within = (position >= 0) & (position < size)
            position = position.reshape([-1 if k == d else 1 for k in range(n)])
            indices[axes[d]] = position
            if not bool(within.all()):
                if not check_bounds or not bool(within.any()):
                    what = "lies entirely outside" if check_bounds else "leaves (check_bounds=False)"
                    raise InterpreterError(
                        f"the tile {what} {self.name} of shape {self.sizes}: "
                        f"indices {int(position.min())} to {int(position.max())} in dimension {axes[d]}"
                    )
                within = within.reshape(position.shape)
                inside = within if inside is None else inside & within
        shape = tuple(p.numel() for p in positions)
        return Place(self, shape, indices, self.steps, inside)


def axis_order(order, ndim: int) -> list[int]:
    if order == "C":
        return list(range(ndim))
    if order == "F":
        return list(range(ndim - 1, -1, -1))
    axes = [axis_of(a, ndim) for a in order]
    if sorted(axes) != list(range(ndim)):
        raise InterpreterError(f"order {order} is not a permutation of {ndim} axes")
    return axes


PADDING = {
    PaddingMode.ZERO: 0.0,
    PaddingMode.NEG_ZERO: -0.0,
    PaddingMode.NAN: math.nan,
    PaddingMode.POS_INF: math.inf,
    PaddingMode.NEG_INF: -math.inf,
}


def padding(mode: PaddingMode | str, dtype: ct.DType) -> Tile:
    mode = PaddingMode[mode] if isinstance(mode, str) else mode
    if mode is PaddingMode.UNDETERMINED:
        return poison(dtype)
    if mode is not PaddingMode.ZERO and not is_float(dtype):
        raise InterpreterError(f"padding mode {mode.name} needs a float array, not {dtype}")
    return scalar(PADDING[mode], dtype)


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


# ---------------------------------------------------------------- atomics
WORDS = (ct.int32, ct.int64, ct.uint32, ct.uint64)
WORDS_AND_FLOATS = (*WORDS, ct.float32, ct.float64)
BITWISE = ("and", "or", "xor")
ATOMIC_DTYPES = {"cas": WORDS_AND_FLOATS, "xchg": WORDS_AND_FLOATS, "add": (*WORDS_AND_FLOATS, ct.float16, ct.bfloat16)}


def _combine(kind: str, old: torch.Tensor, new: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    """The updated values, in carriers."""
    if kind == "xchg":
        return new
    if kind == "add":
        total = old + new
        return in_range(total, dtype, "atomic_add") if is_integral(dtype) else total
    if kind in ("max", "min"):
        fn = torch.maximum if kind == "max" else torch.minimum
        return flip_unsigned(fn(flip_unsigned(old, dtype), flip_unsigned(new, dtype)), dtype)
    return {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}[kind](old, new)


def atomic(place: Place, kind: str, update: Value, order, scope, expected: Value | None = None) -> Tile:
    """Updates the elements one after the other, in the tile's order. Where the index lies outside nothing happens."""
    array, dtype = place.array, place.array.dtype
    if dtype not in ATOMIC_DTYPES.get(kind, WORDS):
        raise InterpreterError(f"atomic {kind} does not take arrays of {dtype}")
    if kind in BITWISE and not (isinstance(update, Tile) and update.dtype is dtype):
        raise InterpreterError(f"atomic {kind} needs an update of exactly {array.name}'s dtype, {dtype}")
    new = place.select(implicit_cast(update, dtype, "update"), "update")
    fill = poison(dtype)
    if expected is not None:
        fill = implicit_cast(expected, dtype, "expected value")
        wanted = place.select(fill, "expected value")
    array.check_alias()
    place.acquire(order, scope)
    n = place.offsets.numel()
    # A vectorised round may touch an address once; where one repeats, every element is a round of its own.
    rounds = torch.arange(n).split(n if place.offsets.unique().numel() == n else 1) if n else ()
    old = torch.empty_like(new)
    for at in rounds:

        def where(bad, at=at):
            return place.where(torch.zeros(n, dtype=torch.bool).index_fill_(0, at[bad], True))

        offsets = place.offsets[at]
        now = array.memory.read(offsets, where, atomic=True)
        if kind == "cas":
            value = torch.where(same_bits(now, wanted[at]), new[at], now)
        else:
            value = to_native(_combine(kind, from_native(now, dtype), from_native(new[at], dtype), dtype), dtype)
        array.memory.write(offsets, value, where, atomic=True)
        old[at] = now
    place.release(order, scope)
    if place.inside is None:
        return Tile(from_native(old, dtype).reshape(place.shape), dtype)
    data = broadcast(fill, place.shape).reshape(-1).clone()
    data[place.inside] = from_native(old, dtype)
    return Tile(data.reshape(place.shape), dtype)


def atomic_rmw(kind: str):
    def run(array, indices, update, /, *, check_bounds=True, memory_order=MemoryOrder.ACQ_REL, memory_scope=MemoryScope.DEVICE):
        return atomic(expect_array(array).element(indices, check_bounds), kind, update, memory_order, memory_scope)

    return run


def atomic_rmw_offset(kind: str):
    def run(self, offset, update, /, *, mask=None, memory_order=MemoryOrder.ACQ_REL, memory_scope=MemoryScope.DEVICE):
        return atomic(self.place(offset, mask), kind, update, memory_order, memory_scope)

    return run


def atomic_store(kind: str):
    def run(self, index, update, /):
        atomic(self.place(index, True), kind, tile_of(update), MemoryOrder.RELAXED, MemoryScope.DEVICE)

    return run


def atomic_cas(
    array, indices, expected, desired, /, *, check_bounds=True, memory_order=MemoryOrder.ACQ_REL, memory_scope=MemoryScope.DEVICE
):
    place = expect_array(array).element(indices, check_bounds)
    return atomic(place, "cas", desired, memory_order, memory_scope, expected)


def atomic_cas_offset(self, offset, expected, desired, /, *, mask=None, memory_order=MemoryOrder.ACQ_REL, memory_scope=MemoryScope.DEVICE):
    return atomic(self.place(offset, mask), "cas", desired, memory_order, memory_scope, expected)


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
    RawArrayMemory.atomic_cas_offset: atomic_cas_offset,
    ct.atomic_cas: atomic_cas,
}
for _kind in ("xchg", "add", "max", "min", *BITWISE):
    OPS[getattr(ct, f"atomic_{_kind}")] = atomic_rmw(_kind)
    OPS[getattr(RawArrayMemory, f"atomic_{_kind}_offset")] = atomic_rmw_offset(_kind)
    if _kind != "xchg":
        OPS[getattr(ct.TiledView, f"atomic_store_{_kind}")] = atomic_store(_kind)
