"""One matrix product for all experts: the rows of each times its own weight.

torch's grouped GEMM where that is one kernel, else that of kernel_src/grouped_gemm.py; where neither takes the tensors, a loop over the
experts, for which alone the host waits.
"""

import functools
from typing import Sequence

import torch

from ..runtime.device import PLAIN, kernels_run_on
from ..runtime.launch import Kernel, PromiseError
from .arrays import within_reach
from .four_bits import CodedExperts, Weight, dense
from .products import write_product
from .routing import row_blocks

__all__ = ["Groups", "coded_mm", "grouped_mm", "grouped_outer"]

# Between so many rows an expert ours beats torch's on compute capability 9.0: by 1, 9 and 10 % with 256 (H200, three shapes). With 1024 it
# is 2 % slower to 1 % faster, and with few rows the host's part counts, which is larger: ours needs a list of blocks.
# What makes a layer of experts slower than its products alone (Qwen3-30B-A3B, 8192 tokens, us of an H200) is the passes around them: rows
# of tokens 84, gate 76 and 155 backward, sum over experts 74, each at 3.6 to 4.1 TB/s. Putting them into the products was slower: the gate
# behind the first one 950 instead of 690 + 76, its backward pass behind the other 1147 instead of 352 + 155, a gather of the tokens' rows
# inside 785 instead of 690 + 84, level. Shorter blocks for an expert's last rows made every product slower by a tenth or more, for their
# branch. Tiles of 128 x 128, two blocks on an SM, are 8 % faster where a row has 768 numbers and 2 to 8 % slower where it has 2048.
OURS_FROM, OURS_TO = 128, 512
# Of a weight in codes so many bytes at once, in columns of whole tiles: GPT-OSS-20B's in three to four parts.
PART, WIDTH = 288 * 2**20, 256


def _mm_grid(c, x, weight, blocks, out):
    return (blocks.shape[1] * -(-out.shape[1] // c["TILE_N"]),)


def _outer_grid(c, x, y, ends, out):
    return (-(-out.shape[1] // c["TILE_M"]) * -(-out.shape[2] // c["TILE_N"]), out.shape[0])


_mm_kernels = [Kernel("grouped_mm", grid=_mm_grid, where={"TRANSPOSED": transposed}) for transposed in (0, 1)]
_outer_kernel = Kernel("grouped_outer", grid=_outer_grid)


class Groups:
    """The rows of each expert, as the grouped GEMMs want them. ends: [experts] int32, the row after each expert's last one."""

    def __init__(self, ends: torch.Tensor, rows: int):
        self.ends, self.rows = ends, rows

    @functools.cached_property
    def blocks(self) -> torch.Tensor:
        """What `row_blocks` returns, made once for all GEMMs of a pass."""
        return row_blocks(self.ends, self.rows, _mm_kernels[0].constant("TILE_M"))[0]

    def slices(self):
        """(expert, its rows) for the host, which waits for the device here."""
        start = 0
        for expert, end in enumerate(self.ends.tolist()):
            yield expert, slice(start, end)
            start = end


@functools.lru_cache(maxsize=None)
def _has_grouped_mm(device: int) -> bool:
    """Whether torch._grouped_mm is a kernel: on compute capability 9.0, and from torch 2.9 on 10.x. Elsewhere it reads the offsets
    on the host and loops, or raises."""
    major = torch.cuda.get_device_capability(device)[0]
    return hasattr(torch, "_grouped_mm") and (major == 9 or major == 10 and torch.__version__ >= (2, 9))  # type: ignore[operator]


@functools.lru_cache(maxsize=None)
def _can_beat_torch(device: int) -> bool:
    """Whether our `grouped_mm` can be faster than torch's where that is a kernel too; see OURS_FROM."""
    return torch.cuda.get_device_capability(device)[0] == 9


def _beats_torch(x: torch.Tensor, experts: int) -> bool:
    return OURS_FROM * experts <= x.shape[0] <= OURS_TO * experts and _can_beat_torch(x.get_device())


def _native(*tensors: torch.Tensor) -> bool:
    """True where torch._grouped_mm runs one kernel: bf16, a GPU that has it, and rows or columns that begin at whole 16 bytes."""
    first = tensors[0]
    if not first.is_cuda or first.dtype != torch.bfloat16 or first.shape[0] == 0 or not _has_grouped_mm(first.get_device()):
        return False
    return all(t.data_ptr() % 16 == 0 and _begins_at_16_bytes(t.stride()) for t in tensors)


def _begins_at_16_bytes(stride: Sequence[int]) -> bool:
    """Whether a bf16 matrix, or each of several, lies in rows or in columns that begin at whole 16 bytes."""
    *outer, row, column = stride
    return all(step % 8 == 0 for step in outer) and ((column == 1 and row % 8 == 0) or (row == 1 and column % 8 == 0))


def _has_kernel(*tensors: torch.Tensor) -> bool:
    """False where none of our grouped GEMMs is for the dtype, the GPU or so many elements."""
    first = tensors[0]
    half = first.dtype in (torch.bfloat16, torch.float16)
    return half and kernels_run_on(*tensors) and within_reach(*[tensor.numel() for tensor in tensors])


def _launched(kernel: Kernel, *tensors: torch.Tensor) -> bool:
    """Launches it where lengths, strides and addresses are of whole 16 bytes; else False."""
    try:
        kernel(*tensors)
    except PromiseError:
        return False
    return True


def _ours(x: torch.Tensor, weight: torch.Tensor, groups: Groups, out: torch.Tensor) -> bool:
    """Writes `grouped_mm` into out by our kernel; False where none takes the tensors."""
    transposed = weight.stride(2) != 1
    stored = weight.transpose(1, 2) if transposed else weight
    return _has_kernel(x, stored, out) and _launched(_mm_kernels[transposed], x, stored, groups.blocks, out)


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[rows, n]: the rows of each expert of x [rows, k] times its weight [experts, k, n]. What rows of no expert hold is
    undefined on a GPU."""
    if type(x) not in PLAIN:  # without data, in the fake function of an operator
        return x.new_empty((x.shape[0], weight.shape[2]))
    native = _native(x, weight)
    if native and not _beats_torch(x, weight.shape[0]):
        return torch._grouped_mm(x, weight, offs=groups.ends)
    out = x.new_empty((x.shape[0], weight.shape[2]))
    if _ours(x, weight, groups, out):
        return out
    if native:
        return torch._grouped_mm(x, weight, offs=groups.ends)
    out.zero_()
    for expert, rows in groups.slices():
        write_product(out[rows], x[rows], weight[expert])
    return out


def coded_mm(x: torch.Tensor, weight: Weight, groups: Groups) -> torch.Tensor:
    """`grouped_mm`, of which a weight in codes is made in parts where our kernel multiplies: PART bytes of it are there at most. A tile's
    bits do not depend on which others there are."""
    if not isinstance(weight, CodedExperts):
        return grouped_mm(x, weight, groups)
    experts, depth, columns = weight.shape
    width = max(PART // (experts * depth * weight.dtype.itemsize * WIDTH), 1) * WIDTH
    if weight.in_parts and width < columns and _has_kernel(x) and (not _native(x) or _beats_torch(x, experts)):
        out = x.new_empty((x.shape[0], columns))
        parts = [slice(start, min(start + width, columns)) for start in range(0, columns, width)]
        if all(_ours(x, weight.make(2, part), groups, out[:, part]) for part in parts):
            return out
    return grouped_mm(x, dense(weight), groups)


def grouped_outer(x: torch.Tensor, y: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[experts, m, n]: x.T @ y over the rows of each expert; x: [rows, m], y: [rows, n]. Zero for an expert without rows."""
    if _native(x, y):
        return torch._grouped_mm(x.t(), y, offs=groups.ends)
    out = x.new_empty((groups.ends.shape[0], x.shape[1], y.shape[1]))
    if not (_has_kernel(x, y, out) and _launched(_outer_kernel, x, y, groups.ends, out)):
        for expert, rows in groups.slices():
            torch.mm(x[rows].t(), y[rows], out=out[expert])
    return out
