"""Tensors as the arrays of kernels: as rows, contiguous, aligned, and in parts where there are too many numbers for one launch."""

from typing import Callable, Iterator, List, Optional, Sequence, Tuple

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import GRID_MAX, INT32_MAX, Kernel, overlaps
from .arguments import describe, fail

__all__ = [
    "HALF", "REACH", "SLAB", "ElementwiseKernel", "Four", "Pair", "Triple", "accumulation_dtype", "aligned", "as_rows", "column_sum",
    "column_sum_of", "flat_rows", "kernels_compute", "new_like", "split_rows", "sum_of_rows", "unit_stride", "within_reach",
]  # fmt: skip

Pair = Tuple[torch.Tensor, torch.Tensor]
Triple = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Four = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
HALF = (torch.bfloat16, torch.float16)
REACH = INT32_MAX  # elements: what a kernel counts an array's places in
SLAB = 2**30  # elements that one launch reaches over: offsets into an array are 32-bit


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the arithmetic is done in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernels_compute(x: torch.Tensor, *others: Optional[torch.Tensor]) -> bool:
    """Whether kernels run on these tensors and have something to do: x is neither in float64 nor empty."""
    return x.dtype != torch.float64 and kernels_run_on(x, *others) and x.numel() > 0


column_sum_kernel = Kernel("column_sum", grid=lambda c, partial, out: (-(-partial.shape[1] // c["COLS"]),))


def column_sum(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums of the columns of contiguous fp32 partial results, in `dtype`."""
    out = partial.new_empty(partial.shape[1], dtype=dtype)
    column_sum_kernel(partial, out)
    return out


def column_sum_of(partials: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """`column_sum` of what several launches left, [rows, columns] each."""
    return column_sum(partials[0] if len(partials) == 1 else torch.cat(list(partials)), dtype)


def new_like(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same shape, dtype and device, not filled; 1.5 us cheaper than torch.empty with these as arguments."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, last dimension]; x itself where it is so: a view costs the host a node of autograd's."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def sum_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Sums x [..., n] over all dimensions but the last."""
    return x if x.dim() == 1 else x.flatten(0, -2).sum(0)


def as_rows(*vectors: int) -> Callable[..., List[torch.Tensor]]:
    """Makes the `views` of a kernel on rows: each tensor as [rows, last dimension], but as they are those at the positions `vectors`."""

    def views(*tensors: torch.Tensor) -> List[torch.Tensor]:
        return [t if i in vectors or t.dim() == 2 else t.reshape(-1, t.shape[-1]) for i, t in enumerate(tensors)]

    return views


def split_rows(*arrays: torch.Tensor) -> Optional[Iterator[List[torch.Tensor]]]:
    """Cuts arrays that have a row for each block at the largest grid; those with another first dimension (weights) stay whole.

    Without rows there is no part, so nothing is launched.
    """
    rows = arrays[0].shape[0]
    if 0 < rows <= GRID_MAX[0]:
        return None
    most = GRID_MAX[0] // 64 * 64  # every part starts at an aligned address, of one number a row too
    return ([t[start : start + most] if t.shape[0] == rows else t for t in arrays] for start in range(0, rows, most))


class ElementwiseKernel(Kernel):
    """A kernel on every element of tensors of one shape and dtype.

    exact: takes rows [rows, columns] that a TILE of its variants divides; contiguous tensors are viewed as rows of one TILE. checked:
    takes any number of elements, flat. Tensors are contiguous, or aligned [rows, columns] whose columns a TILE divides. Calling it
    raises ValueError when their shapes or dtypes differ.
    """

    def __init__(self, exact: str, checked: str):
        super().__init__(exact, checked, grid=lambda c, first, *_: (-(-first.numel() // c["TILE"]),), views=self._rows, split=self._slabs)

    def tiles(self) -> tuple:
        """Lists the lengths that rows of the exact kernel are multiples of, the preferred one first."""
        return self.constants("TILE", self.names[0])

    def takes_rows_of(self, columns: int) -> bool:
        """Tells whether rows of so many elements may have a stride of their own."""
        return columns % min(self.tiles()) == 0

    def _rows(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        first = tensors[0]
        for i, tensor in enumerate(tensors):
            if tensor.shape != first.shape or tensor.dtype != first.dtype or tensor.device != first.device:
                fail(f"tensor {i} of {self.names[0]}", describe(tensor), f"like the first, which is {describe(first)}")
        if not all(tensor.is_contiguous() for tensor in tensors):
            return tensors
        aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        tile = next((tile for tile in self.tiles() if aligned and first.numel() and first.numel() % tile == 0), None)
        return [tensor.view(-1, tile) if tile else tensor.view(-1) for tensor in tensors]

    @staticmethod
    def _slabs(*arrays: torch.Tensor) -> Optional[Iterator[List[torch.Tensor]]]:
        if arrays[0].numel() == 0:
            return iter(())
        rows = max(1, SLAB // max(array.stride(0) for array in arrays))
        if arrays[0].shape[0] <= rows:
            return None
        return ([array[start : start + rows] for array in arrays] for start in range(0, arrays[0].shape[0], rows))


def within_reach(*elements: int) -> bool:
    """Whether arrays of so many elements each are within a kernel's reach; what is not goes in parts, or to PyTorch's operations."""
    return max(elements) <= REACH


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a contiguous copy: when its last dimension is strided, or two elements may be one (expanded, overlapping)."""
    shape, steps = tensor.shape, tensor.stride()
    if len(shape) == 2 and steps[1] == 1 and steps[0] >= shape[1]:  # rows, each after the one before: what is asked for most
        return tensor
    if tensor.is_contiguous() or (steps[-1] == 1 and not overlaps(shape, steps)):
        return tensor
    return tensor.contiguous()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`unit_stride`, with a copy too when the address or a stride is not a multiple of 16 bytes: for kernels that exist only in
    an aligned form."""
    tensor = unit_stride(tensor)
    size, odd = tensor.element_size(), tensor.data_ptr()
    for step in tensor.stride()[:-1]:
        odd |= step * size
    return tensor.clone(memory_format=torch.contiguous_format) if odd & 15 else tensor
