"""The ct.* functions that update memory atomically."""

import cuda.tile as ct
import torch
from cuda.tile import MemoryOrder, MemoryScope
from cuda.tile._datatype import is_integral
from cuda.tile._stub import RawArrayMemory

from .accesses import expect_array
from .arrays import Place, poison
from .races import same_bits
from .tiles import (
    InterpreterError,
    Tile,
    Value,
    broadcast,
    flip_unsigned,
    from_native,
    implicit_cast,
    in_range,
    tile_of,
    to_native,
)

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
    RawArrayMemory.atomic_cas_offset: atomic_cas_offset,
    ct.atomic_cas: atomic_cas,
}
for _kind in ("xchg", "add", "max", "min", *BITWISE):
    OPS[getattr(ct, f"atomic_{_kind}")] = atomic_rmw(_kind)
    OPS[getattr(RawArrayMemory, f"atomic_{_kind}_offset")] = atomic_rmw_offset(_kind)
    if _kind != "xchg":
        OPS[getattr(ct.TiledView, f"atomic_store_{_kind}")] = atomic_store(_kind)
