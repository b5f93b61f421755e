"""Array parameters, slices of them, and where an access to one goes: the bounds of every access, and padding outside of them."""

import math

import cuda.tile as ct
import torch
from cuda.tile import MemoryOrder, MemoryScope, PaddingMode
from cuda.tile._datatype import is_boolean, is_float, is_integral

from .races import Memory
from .tiles import (
    RANGES,
    SIGNED,
    InterpreterError,
    Tile,
    Value,
    as_dtype,
    axis_of,
    broadcast,
    common_shape,
    from_native,
    scalar,
    tile_of,
    to_native,
)


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
