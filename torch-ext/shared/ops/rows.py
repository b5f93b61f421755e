"""Rows and parameters as the kernels of kernel_src/segments.py take them."""

from typing import Callable, Iterator, List, Sequence, Tuple

import torch

from ..runtime.device import kernels_run_on
from .arrays import HALF, SLAB, aligned, unit_stride

__all__ = [
    "SEGMENT", "as_segments", "blocks_of_pieces", "blocks_of_rows", "groups_of_columns", "kernels_take", "one_block_a_row",
    "one_block_a_sum", "per_row", "rows_of", "slabs",
]  # fmt: skip

SEGMENT = 64  # of kernel_src/segments.py


def kernels_take(x: torch.Tensor, *parameters: torch.Tensor, others: Sequence[torch.Tensor] = ()) -> bool:
    """Whether kernels exist for these dtypes, x and its parameters of one or the parameters in fp32 with x in half precision, and run
    on the tensors. others: what a launch reads beside them, such as the incoming gradient."""
    dtype = parameters[0].dtype
    same = dtype == x.dtype and (dtype in HALF or dtype == torch.float32)
    if not (same or (dtype == torch.float32 and x.dtype in HALF)):
        return False
    return all(p.dtype == dtype for p in parameters) and kernels_run_on(x, *parameters, *others) and x.numel() > 0


def rows_of(x: torch.Tensor, length: int) -> torch.Tensor:
    """x as [rows, length]; a copy where its elements do not lie side by side, or, of whole segments, are not aligned."""
    rows = x if x.dim() == 2 and x.shape[1] == length else x.reshape(-1, length)
    return unit_stride(rows) if length % SEGMENT else aligned(rows)


def as_segments(*others: int) -> Callable[..., List[torch.Tensor]]:
    """Makes the `views` of a kernel on rows: each tensor's last dimension as segments, but as they are those at the positions `others`."""

    def segments(tensor: torch.Tensor) -> torch.Tensor:
        segment = 1 if tensor.shape[-1] % SEGMENT else SEGMENT
        return tensor.unflatten(-1, (tensor.shape[-1] // segment, segment))

    return lambda *tensors: [t if i in others else segments(t) for i, t in enumerate(tensors)]


def slabs(*rows: torch.Tensor) -> Iterator[slice]:
    """The rows, in parts that one launch reaches over: a kernel's offsets are 32-bit, and so many blocks fit into a grid. Every part begins
    at an aligned address, of one number a row too."""
    count = rows[0].shape[0]
    most = max(1, SLAB // max(1, *[r.stride(0) for r in rows]))
    most = most // 4 * 4 or most
    for start in range(0, count, most):
        yield slice(start, min(count, start + most))


# ---------------------------------------------------------------- grids
def one_block_a_row(c, x, *_) -> Tuple[int]:
    return (x.shape[0],)


def blocks_of_rows(c, x, *_) -> Tuple[int]:
    """One block for every ROWS rows, or for each where the kernel has no such constant."""
    return (-(-x.shape[0] // c.get("ROWS", 1)),)


def blocks_of_pieces(c, x, *_) -> Tuple[int]:
    """One block for every TILE elements of a row."""
    return (x.shape[0] * -(-x.shape[1] // c["TILE"]),)


def groups_of_columns(c, *tensors) -> Tuple[int]:
    """One block for every PIECE segments of each row of the last tensor, in which it leaves its sums."""
    return (-(-tensors[-1].shape[-2] // c["PIECE"]) * tensors[-1].shape[0],)


def one_block_a_sum(c, *tensors) -> Tuple[int]:
    """One block for each row of the last tensor, in which it leaves its sums."""
    return (tensors[-1].shape[0],)


# ---------------------------------------------------------------- of each row


def per_row(x: torch.Tensor, rows: int, *more: int) -> torch.Tensor:
    """An fp32 tensor with numbers of each row, not filled."""
    return torch.empty((rows, *more), dtype=torch.float32, device=x.device)
