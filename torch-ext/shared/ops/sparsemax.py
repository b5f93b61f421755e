"""Sparsemax over any dimension, of rows of any length, without sorting."""

import torch

from ..runtime.launch import Kernel
from .arrays import accumulation_dtype, kernels_compute, new_like
from .operators import traceable
from .rows import blocks_of_pieces, blocks_of_rows, one_block_a_row
from .softmax import as_rows, by_dtype_and_tile, over_dimension, pieces, row_sum, runs_whole, slabs

__all__ = ["sparsemax"]

TILES, TILES_UNALIGNED = (128, 1024, 4096, 8192), (1024, 4096)
SEVERAL = 1024  # elements of the longest rows of which a forward block takes several
HELD, HELD_TILES = (1024, 2048), 16  # of the kernels that hold a row in half precision as it lies in memory: TILE and TILES


def _chunk_blocks(c, x, *_):
    return (x.shape[0] * -(-x.shape[1] // (c["CHUNK"] * c["WIDTH"])),)


_forward_rows = {
    tile: Kernel("sparsemax_forward", grid=blocks_of_rows, where={"TILE": tile})
    if tile <= SEVERAL
    else Kernel("sparsemax_row_forward", grid=one_block_a_row, where={"TILE": tile, "TILES": 1})
    for tile in TILES
}
_backward_rows = by_dtype_and_tile("sparsemax_backward", TILES)
_held_forward = [Kernel("sparsemax_row_forward", grid=one_block_a_row, where={"TILE": tile, "TILES": HELD_TILES}) for tile in HELD]
_held_backward = [Kernel("sparsemax_row_backward", grid=one_block_a_row, where={"TILES": tiles}) for tiles in (8, 16)]
_maxima = Kernel("sparsemax_maxima", grid=_chunk_blocks)
_threshold = Kernel("sparsemax_threshold", grid=one_block_a_row)
_apply = Kernel("sparsemax_apply", grid=blocks_of_pieces)
_sums = Kernel("sparsemax_sums", grid=blocks_of_pieces)
_gradient = Kernel("sparsemax_gradient", grid=blocks_of_pieces)


def sparsemax_reference(x: torch.Tensor) -> torch.Tensor:
    """Sparsemax by sorting (Martins and Astudillo 2016, algorithm 1)."""
    if x.numel() == 0:  # a row without elements has no maximum
        return x.clone()
    v = x.to(accumulation_dtype(x.dtype))
    v = v - v.amax(-1, keepdim=True)
    z = v.sort(-1, descending=True).values
    k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=v.dtype)
    total = z.cumsum(-1)
    size = (1 + k * z > total).sum(-1, keepdim=True).clamp(min=1)
    total = total.gather(-1, size - 1)
    smallest = torch.finfo(x.dtype).tiny if x.dtype != torch.float16 else torch.finfo(x.dtype).smallest_normal * 2**-10
    p = (v - (total - 1) / size).clamp(min=smallest)
    return torch.where(1 + size * v > total, p, torch.where(v.isnan(), v, 0.0)).to(x.dtype)


def sparsemax_backward_reference(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    inside, d = y > 0, dy.to(accumulation_dtype(y.dtype))
    mean = torch.where(inside, d, 0.0).sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(inside, d - mean, 0.0).to(y.dtype)


def _forward(x: torch.Tensor) -> torch.Tensor:
    if not kernels_compute(x):
        return sparsemax_reference(x)
    rows, out = as_rows(x), new_like(x)
    y, columns = out.view(rows.shape), rows.shape[1]
    if runs_whole(_forward_rows, TILES_UNALIGNED, _held_forward, rows, y):
        return out
    width = _maxima.constant("WIDTH")
    blocks = -(-columns // (_maxima.constant("CHUNK") * width))
    maxima = rows.new_empty((rows.shape[0], blocks * width))
    top, size, total = torch.empty((3, rows.shape[0]), dtype=torch.float32, device=x.device)
    for slab in slabs(blocks, rows, maxima):
        _maxima(*slab)
    for slab in slabs(1, rows, maxima, top, size, total):
        _threshold(*slab)
    for slab in slabs(pieces(_apply, columns), rows, top, size, total, y):
        _apply(*slab)
    return out


def _backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not kernels_compute(y, dy):
        return sparsemax_backward_reference(dy, y)
    p, d, out = as_rows(y), as_rows(dy), new_like(y)
    dx, columns = out.view(p.shape), p.shape[1]
    if runs_whole(_backward_rows[y.dtype], TILES_UNALIGNED, _held_backward, p, d, dx):
        return out
    shape = (p.shape[0], pieces(_sums, columns))
    part_size, part_sum = (torch.empty(shape, dtype=torch.float32, device=p.device) for _ in range(2))
    for slab in slabs(shape[1], p, d, part_size, part_sum):
        _sums(*slab)
    for slab in slabs(pieces(_gradient, columns), p, d, row_sum(part_size), row_sum(part_sum), dx):
        _gradient(*slab)
    return out


sparsemax_forward = traceable("sparsemax_forward", _forward, lambda x: x.new_empty(x.shape))
sparsemax_backward = traceable("sparsemax_backward", _backward)


def sparsemax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Projects x onto the probability simplex along one dimension: max(x - tau, 0), which sums to 1 (arXiv 1602.02068).

    x: any shape, bf16, fp16 or fp32 (float64 runs in PyTorch). dim: of the sum; one that is not the last goes through transposed
    copies. Returns x's shape and dtype. The gradient is that of the support, which is decided without a division: an element that
    equals tau is outside, and its probability and gradient are 0. Raises ValueError for a dtype that is not floating point and
    IndexError for a dimension that x does not have.
    """
    return over_dimension(x, dim, sparsemax_forward, sparsemax_backward, sparsemax_reference)


SELF_CHECKS = {
    "sparsemax": lambda i: i.call(sparsemax, i.logits()),
    "sparsemax (long rows)": lambda i: i.call(sparsemax, i.leaf(8, i.long)),
}
