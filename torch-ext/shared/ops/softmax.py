"""Softmax over any dimension, of rows of any length."""

from typing import Callable, Dict, Iterator, Optional, Sequence, Tuple

import torch

from ..runtime.device import multiprocessors
from ..runtime.launch import Kernel
from .arguments import describe, fail
from .arrays import HALF, SLAB, accumulation_dtype, kernels_compute, new_like
from .autograd import Function, apply_function, needs_formula
from .operators import traceable
from .rows import blocks_of_pieces, blocks_of_rows, one_block_a_row

__all__ = [
    "as_rows", "by_dtype_and_tile", "log_sum_exp", "most_pieces", "over_dimension", "pieces", "row_sum", "runs_whole", "slabs", "softmax",
]  # fmt: skip

# Rows of at most so many elements stay in registers: the kernel's tiles, those for half precision, and those that take rows at any address.
TILES, TILES_OF_HALF, TILES_UNALIGNED = (128, 1024, 4096, 8192, 16384), (128, 1024, 4096), (1024, 4096)
MOST_BLOCKS = 2**24 - 1


def _blocks_that_walk(c, x, *_):
    return (min(x.shape[0], multiprocessors(x)),)


def by_dtype_and_tile(name: str, tiles: Sequence[int]) -> Dict[torch.dtype, Dict[int, Kernel]]:
    every = {tile: Kernel(name, grid=blocks_of_rows, where={"TILE": tile}) for tile in tiles}
    of_half = {tile: every[tile] for tile in TILES_OF_HALF}
    return {torch.float32: every, **dict.fromkeys(HALF, of_half)}


_forward_rows, _backward_rows = by_dtype_and_tile("softmax_forward", TILES), by_dtype_and_tile("softmax_backward", TILES)
_held_forward = [Kernel("softmax_held_forward", grid=one_block_a_row, where={"TILES": tiles}) for tiles in (2, 4, 8)]
_held_backward = [
    *[Kernel("softmax_held_backward", grid=one_block_a_row, where={"TILES": tiles}) for tiles in (2, 4)],
    Kernel("softmax_copied_backward", "softmax_walking_backward", grid=_blocks_that_walk),
]
# By the number of slices that the result comes in.
_spread_forward = {count: Kernel(f"softmax_spread_{count}_forward", grid=one_block_a_row) for count in (5, 8)}
_spread_backward = {count: Kernel(f"softmax_spread_{count}_backward", grid=one_block_a_row) for count in (5, 8)}
_statistics = Kernel("softmax_statistics", grid=blocks_of_pieces)
_combine = Kernel("softmax_combine", grid=one_block_a_row)
_totals = Kernel("softmax_totals", grid=one_block_a_row)
_apply = Kernel("softmax_apply", grid=blocks_of_pieces)
_dot = Kernel("softmax_dot", grid=blocks_of_pieces)
_gradient = Kernel("softmax_gradient", grid=blocks_of_pieces)
_row_sum = Kernel("row_sum", grid=one_block_a_row)


# ---------------------------------------------------------------- what operations on rows share
def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, columns] with dense, not expanded rows; a copy only where x does not lie so."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.is_contiguous() or (rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]) else rows.contiguous()


def slabs(blocks_a_row: int, *tensors: torch.Tensor) -> Iterator[Tuple[torch.Tensor, ...]]:
    """The tensors in slices of so many rows that a launch's 32-bit offsets and its grid reach over them."""
    rows, stride = tensors[0].shape[0], max(tensor.stride(0) for tensor in tensors)
    if stride > SLAB:
        fail("a row", f"{stride} elements long", f"at most 2^30, {SLAB}")
    step = max(1, min(SLAB // max(stride, 1), MOST_BLOCKS // blocks_a_row))
    if rows <= step:
        yield tensors
        return
    for start in range(0, rows, step):
        yield tuple(tensor[start : start + step] for tensor in tensors)


def pieces(kernel: Kernel, columns: int) -> int:
    return -(-columns // kernel.constant("TILE"))


def most_pieces(kernel: Kernel, columns: int) -> int:
    """The most blocks that a row takes, where the variants differ in their tiles."""
    return -(-columns // min(kernel.constants("TILE")))


def row_tile(columns: int, tiles, tiles_unaligned, *rows: torch.Tensor) -> Optional[int]:
    """The shortest tile that takes these rows; None where they do not fit into registers."""
    low_bits = columns
    for tensor in rows:
        low_bits |= tensor.data_ptr() | (tensor.stride(0) * tensor.element_size())
    return next((tile for tile in (tiles_unaligned if low_bits & 15 else tiles) if columns <= tile), None)


def are_held(kernel: Kernel, *rows: torch.Tensor) -> bool:
    """Whether a kernel holds rows of one length as they lie in memory: those in half precision, at addresses that it takes, of a dtype that
    it was prebuilt for."""
    if rows[0].dtype not in HALF or rows[0].shape[1] > kernel.constant("TILE") * kernel.constant("TILES"):
        return False
    if not kernel.takes(*(t[:1] for t in rows)):  # which does not depend on how many rows there are
        return False
    return row_tile(rows[0].shape[1], (rows[0].shape[1],), (), *rows) is not None


def runs_whole(by_tile: Dict[int, Kernel], tiles_unaligned, held: Sequence[Kernel], *rows: torch.Tensor) -> bool:
    """Launches the kernel of which a block takes these rows whole; False where they are too long. The last tensor is written. by_tile: of
    rows in registers; held: of rows as they lie in memory, those of the shortest first."""
    tile = row_tile(rows[0].shape[1], by_tile, tiles_unaligned, *rows)
    whole = by_tile[tile] if tile is not None else next((kernel for kernel in held if are_held(kernel, *rows)), None)
    if whole is None:
        return False
    for slab in slabs(1, *rows):
        whole(*slab)
    return True


def _spread(kernels: Dict[int, Kernel], *rows: torch.Tensor) -> bool:
    """Launches the kernel that holds such rows on several SMs; False where there is none. The last tensor is written."""
    *inputs, out = rows
    if out.dtype not in HALF:
        return False
    for count, kernel in kernels.items():
        width = -(-out.shape[1] // (16 * count)) * 16
        arrays = (*inputs, *out.split(width, 1))
        if kernel.takes(*arrays):
            for slab in slabs(1, *arrays):
                kernel(*slab)
            return True
    return False


def row_sum(partial: torch.Tensor) -> torch.Tensor:
    """The sums of fp32 [rows, pieces] over a row's pieces, [rows]."""
    if partial.shape[1] == 1:
        return partial[:, 0]
    out = partial.new_empty(partial.shape[0])
    for slab in slabs(1, partial, out):
        _row_sum(*slab)
    return out


def _partials(x: torch.Tensor, scale: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """The maximum of every piece of a row and its sum of exp((x - maximum) * scale), fp32 [rows, pieces]."""
    parts = pieces(_statistics, x.shape[1])
    part_max, part_sum = (torch.empty((x.shape[0], parts), dtype=torch.float32, device=x.device) for _ in range(2))
    for slab in slabs(parts, x, part_max, part_sum):
        _statistics(*slab, scale)
    return part_max, part_sum


def log_sum_exp(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """log(sum(exp(x * scale))) of every row in two parts, [rows, 2] fp32: the maximum of x, and log(sum(exp((x - maximum) * scale))).
    x: [rows, columns], as `as_rows` gives it; scale: above 0."""
    part_max, part_sum = _partials(x, scale)
    lse = torch.empty((x.shape[0], 2), dtype=torch.float32, device=x.device)
    for slab in slabs(1, part_max, part_sum, lse):
        _combine(*slab, scale)
    return lse


class FunctionOfRows(Function):
    """(x, forward, backward) -> y = forward(x), whose gradient is backward(dy, y): it needs no more than the result."""

    def forward(ctx, x, forward, backward):
        y = forward(x)
        ctx.save_for_backward(y)
        ctx.derivative = backward
        return y

    def backward(ctx, dy):
        return ctx.derivative(dy, *ctx.saved_tensors), None, None


def over_dimension(x: torch.Tensor, dim: int, forward: Callable, backward: Callable, reference: Callable) -> torch.Tensor:
    """Applies a function of rows along one dimension of x. forward, backward: as of `FunctionOfRows`; reference: forward in PyTorch.

    Raises ValueError for a dtype that is not floating point and IndexError for a dimension that x does not have.
    """
    if not x.is_floating_point():
        fail("x", describe(x), "a floating point tensor")
    dims = max(x.dim(), 1)
    if not -dims <= dim < dims:
        fail("dim", dim, f"from {-dims} to {dims - 1}", IndexError)
    if x.dim() == 0:
        return over_dimension(x.view(1), 0, forward, backward, reference).view(())
    dim %= dims
    moved = x if dim == dims - 1 else x.transpose(dim, -1)
    y = reference(moved) if needs_formula(x) else apply_function(FunctionOfRows, moved, forward, backward)
    return y if moved is x else y.transpose(dim, -1)


# ---------------------------------------------------------------- the operation
def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.to(accumulation_dtype(x.dtype)), -1).to(x.dtype)


def softmax_backward_reference(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p, d = y.to(accumulation_dtype(y.dtype)), dy.to(accumulation_dtype(y.dtype))
    return (p * (d - (p * d).sum(-1, keepdim=True))).to(y.dtype)


def _forward(x: torch.Tensor) -> torch.Tensor:
    if not kernels_compute(x):
        return softmax_reference(x)
    rows, out = as_rows(x), new_like(x)
    y = out.view(rows.shape)
    if runs_whole(_forward_rows[x.dtype], TILES_UNALIGNED, _held_forward, rows, y) or _spread(_spread_forward, rows, y):
        return out
    part_max, part_sum = _partials(rows, 1.0)
    maximum, total = (part_max.new_empty(rows.shape[0]) for _ in range(2))
    for slab in slabs(1, part_max, part_sum, maximum, total):
        _totals(*slab)
    for slab in slabs(pieces(_apply, rows.shape[1]), rows, maximum, total, y):
        _apply(*slab)
    return out


def _backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not kernels_compute(y, dy):
        return softmax_backward_reference(dy, y)
    p, d, out = as_rows(y), as_rows(dy), new_like(y)
    dx, columns = out.view(p.shape), p.shape[1]
    if runs_whole(_backward_rows[y.dtype], TILES_UNALIGNED, _held_backward, p, d, dx) or _spread(_spread_backward, p, d, dx):
        return out
    partial = torch.empty((p.shape[0], pieces(_dot, columns)), dtype=torch.float32, device=p.device)
    for slab in slabs(partial.shape[1], p, d, partial):
        _dot(*slab)
    for slab in slabs(pieces(_gradient, columns), p, d, row_sum(partial), dx):
        _gradient(*slab)
    return out


softmax_forward = traceable("softmax_forward", _forward)
softmax_backward = traceable("softmax_backward", _backward)


def softmax(x: torch.Tensor, dim: int = -1, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """Computes exp(x) / sum(exp(x)) over one dimension, in float32 or wider, and rounds once.

    x: any shape, bf16, fp16 or fp32 (float64 runs in PyTorch). dim: of the sum; one that is not the last goes through transposed
    copies. dtype: what x is converted to first. Returns x's shape. Raises ValueError for a dtype that is not floating point and
    IndexError for a dimension that x does not have.
    """
    return over_dimension(x if dtype is None else x.to(dtype), dim, softmax_forward, softmax_backward, softmax_reference)


SELF_CHECKS = {
    "softmax": lambda i: i.call(softmax, i.logits()),
    "softmax (long rows)": lambda i: i.call(softmax, i.leaf(8, i.long)),
}
