"""Where the rows of a mixture of experts are: (token, expert) pairs sorted by expert, all of it on the device."""

import functools
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel

__all__ = ["Routing", "route", "row_blocks"]

# Every pair is compared with every expert, so beyond so many comparisons PyTorch's sort is faster. 65536 pairs and 128 experts: 41 us of an
# H200 in 3 launches, PyTorch 60 in 30; 81920 pairs and 512 experts: 181 us, PyTorch 50.
COMPARISONS = 2**24


def _chunks_grid(c, expert, *_):
    return (-(-expert.shape[0] // c["PAIRS"]),)


_sums_kernel = Kernel("expert_sums", grid=lambda c, counts, totals: (-(-totals.shape[0] // c["COLS"]),))
_order_kernel = Kernel("expert_order", grid=_chunks_grid)
_blocks_kernel = Kernel("expert_blocks", grid=lambda c, ends, blocks, stops: (-(-blocks.shape[1] // c["NUMBERS"]),))


class Routing(NamedTuple):
    """Says where the rows are. It is computed on the device, and the host knows the shapes only.

    order: [rows] int64, the (token, expert) pair of each row, token * top-k + k. position: [tokens, top-k] int32, the row of each
    pair; the number of rows where the expert is not here. ends: [experts] int32, the row after each expert's last one.
    """

    order: torch.Tensor
    position: torch.Tensor
    ends: torch.Tensor


@functools.lru_cache(maxsize=None)
def _sorting_of(room: int) -> Tuple[Kernel, Kernel, int]:
    """The kernels that count and place pairs of at most so many experts, and the pairs of a chunk."""
    counts, order = (Kernel(name, grid=_chunks_grid, where={"EXPERTS": room}) for name in ("expert_counts", "expert_order"))
    return counts, order, order.constant("PAIRS")


def _sorting_for(experts: int, pairs: int = 0) -> Optional[Tuple[Kernel, Kernel, int]]:
    """None where no kernel has room for so many experts, and where PyTorch sorts so many pairs faster."""
    if pairs * experts > COMPARISONS:
        return None
    room = min((most for most in _order_kernel.constants("EXPERTS") if most >= experts), default=None)
    return None if room is None else _sorting_of(room)


def route(expert: torch.Tensor, experts: int) -> Routing:
    """Sorts the pairs by expert; those of one expert keep their order.

    expert: [tokens, top-k] int64; ids outside [0, experts) belong to no expert here, and their rows come last.
    """
    sorting = _sorting_for(experts, expert.numel()) if expert.numel() and kernels_run_on(expert) else None
    if sorting is None:
        return route_reference(expert, experts)
    count, place, chunk = sorting
    pairs = expert.reshape(-1).contiguous()  # a view of ids that are not side by side stays one
    rows = pairs.shape[0]
    integers: Dict[str, Any] = {"dtype": torch.int32, "device": expert.device}
    counts, totals, ends = (torch.empty(shape, **integers) for shape in ((-(-rows // chunk), experts), experts, experts))
    order, position = torch.empty_like(pairs), torch.empty(rows, **integers)
    count(pairs, counts)
    _sums_kernel(counts, totals)
    place(pairs, counts, totals, order, position, ends)
    return Routing(order, position.view(expert.shape), ends)


def route_reference(expert: torch.Tensor, experts: int) -> Routing:
    """Computes `route` with PyTorch's operations."""
    flat = expert.reshape(-1).clamp(-1, experts) % (experts + 1)
    rows = flat.shape[0]
    # Two bytes instead of eight are a quarter of the radix sort's passes.
    keys = flat.to(torch.int16 if experts < 2**15 else torch.int32)
    keys, order = torch.sort(keys, stable=True)
    numbers = torch.arange(experts, device=keys.device, dtype=keys.dtype)
    ends = torch.searchsorted(keys, numbers, right=True, out_int32=True)
    position = torch.empty(rows, dtype=torch.int32, device=keys.device)
    position[order] = torch.arange(rows, dtype=torch.int32, device=keys.device)
    position = torch.where(flat < experts, position, rows)
    return Routing(order, position.view(expert.shape), ends)


def row_blocks(ends: torch.Tensor, rows: int, height: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Blocks of up to `height` rows of one expert: [3, blocks] int32, each one's expert, first row and end; and [experts]
    int32, the block after each expert's last one. There are a few more blocks than needed; they are empty."""
    experts = ends.shape[0]
    if not (kernels_run_on(ends) and _sorting_for(experts)):
        return row_blocks_reference(ends, rows, height)
    blocks, stops = ends.new_empty((3, -(-rows // height) + experts)), torch.empty_like(ends)
    _blocks_kernel(ends, blocks, stops, height)
    return blocks, stops


def row_blocks_reference(ends: torch.Tensor, rows: int, height: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Computes `row_blocks` with PyTorch's operations."""
    experts = ends.shape[0]
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    count = (ends - starts + (height - 1)) // height
    stops = torch.cumsum(count, 0, dtype=torch.int32)
    shift = starts - (stops - count) * height
    number = torch.arange(-(-rows // height) + experts, dtype=torch.int32, device=ends.device)
    expert = torch.searchsorted(stops, number, right=True, out_int32=True)
    expert = expert.clamp(max=experts - 1)  # the surplus blocks begin after its end
    return torch.stack((expert, shift[expert] + number * height, ends[expert])), stops
