"""Weights that lie side by side in memory, so that one product takes all of them."""

from typing import Optional, Sequence

import torch

__all__ = ["lay_side_by_side", "side_by_side"]

BLOCK = "_bastile_block"  # on the storage of a weight that `lay_side_by_side` placed: the tensor that holds it and its neighbours


@torch.inference_mode(False)
@torch.no_grad()
def lay_side_by_side(weights: Sequence[torch.Tensor], dtype: Optional[torch.dtype] = None) -> None:
    """Moves weights [rows, columns] of one number of columns, dtype and device side by side into one piece of memory.
    dtype: as which they are read there, of as many bytes; by default their own.

    Each gets a storage of its own over its part, because what saves models keeps one of the tensors that share a storage. A slice of
    a storage is such a one, and keeps the whole piece alive. CUDA's allocator does not know it: `weight.record_stream` does nothing.
    """
    block = torch.cat([weight.detach() for weight in weights])
    read = block if dtype is None else block.view(dtype)
    start = 0
    for weight in weights:
        storage = block.untyped_storage()[start : start + weight.nbytes]
        setattr(storage, BLOCK, read)  # PyTorch keeps the Python object of a storage, and so the mark, as long as the storage
        start += weight.nbytes
        weight.data = block.new_empty(0).set_(storage, 0, weight.shape)  # type: ignore[call-overload]  # a storage that is a slice


def side_by_side(weights: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
    """The [all rows, columns] tensor whose rows are exactly those of these weights, in this order, where `lay_side_by_side` put them
    there and nothing has moved them since; else None, and None for a tracer, whose tensors lie nowhere.

    Neighbours by chance do not count: nothing keeps the memory of one alive as long as that of another.
    """
    if torch.compiler.is_compiling():
        return None
    block = getattr(weights[0].untyped_storage(), BLOCK, None)
    if block is None:
        return None
    start, dtype, (all_rows, columns) = block.data_ptr(), block.dtype, block.shape
    row, rows = columns * dtype.itemsize, 0
    for weight in weights:  # what lies at an address of the block, which is alive, lies in the block
        if weight.data_ptr() != start + rows * row or weight.dtype != dtype or not weight.is_contiguous() or weight.is_neg():
            return None
        more, width = weight.shape
        if width != columns:
            return None
        rows += more
    return block if rows == all_rows else None
