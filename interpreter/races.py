"""Global memory as blocks see each other in it: who wrote and read each element, and races between blocks.

Blocks run one after the other, so a race shows as an order that happened to be taken. Each write is stamped with a *tag*,
which says which block made it and when: tags grow with time, and a block's tags are all at least `Launch.first_tag`. An
access conflicts when it meets an older tag, unless the writer released and this block acquired it through an atomic.
"""

import ctypes
from collections import defaultdict
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import MemoryOrder, MemoryScope

from .tiles import (
    EIGHT_BITS,
    InterpreterError,
    native_dtype,
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
