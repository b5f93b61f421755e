"""The kernels of RMSNorm: three families of one formula, and which of them takes a norm.

| family | kernel_src | takes |
|---|---|---|
| `ROWS` | rms_norm.py | offset 0, rounded first: Qwen3's row lengths with tuned tiles, short rows, and any other length more slowly |
| `SEGMENTS` | general_rms_norm.py, double_tile_norms.py; residual_norm.py: y again, multiplier | any offset, either rounding, any length |
| `ONE_TILE` | round_last_rms_norm.py | offset 0, rounded last, rows of up to 4096 |

A package ships one family or several. The first one that it ships, that takes the norm and that reads a row of this length once is chosen;
without such a family the first that takes the norm, and without that PyTorch. Every family sums the weight's gradient in fp32: each block
writes one row of partial sums, and `column_sum` adds the rows.
"""

import functools
from typing import Any, NamedTuple, Sequence

import torch

from ..runtime import launch
from ..runtime.device import kernels_run_on, multiprocessors
from ..runtime.launch import Kernel
from .arrays import HALF, Pair, Triple, as_rows, column_sum, column_sum_of, new_like, split_rows
from .rows import SEGMENT, as_segments, blocks_of_rows, groups_of_columns, one_block_a_sum, per_row, rows_of, slabs

__all__ = ["SEGMENTS", "NormCall", "family_of"]

FLOATS = (*HALF, torch.float32)


class NormCall(NamedTuple):
    """What the choice of kernels follows from. y: dtype of the result and its gradient; length: of a row."""

    x: torch.dtype
    weight: torch.dtype
    y: torch.dtype
    length: int
    offset: float = 0.0
    rounds: str = "first"


class WholeRows:
    """Kernels on rows that one block holds, without an offset.

    operation: of kernel_src; rounds: the order of rounding of its forward kernels; prefix: of the kernels' names; kinds: of kernels without
    the residual, the preferred one first. The kernel that makes y again has one name for all.
    """

    def __init__(self, operation: str, rounds: str, prefix: str = "", kinds: Sequence[str] = ("rms_norm",)):
        self.operation, self.rounds = operation, rounds
        forwards: Any = {"grid": blocks_of_rows, "split": split_rows}
        names, backwards = [f"{prefix}{kind}" for kind in kinds], [f"{prefix}{kind}_backward" for kind in kinds]
        added, reads = f"{prefix}add_rms_norm", ("x", "weight", "rstd")
        self.kernels = {
            "forward": Kernel(*[f"{name}_forward" for name in names], views=as_rows(1, 3), reads=reads[:2], **forwards),
            "backward": Kernel(*backwards, grid=one_block_a_sum, views=as_rows(3, 4), reads=("dy", *reads)),
            "add_forward": Kernel(f"{added}_forward", views=as_rows(2, 5), reads=("residual", *reads[:2]), **forwards),
            "add_backward": Kernel(f"{added}_backward", grid=one_block_a_sum, views=as_rows(4, 5), reads=("dy", "dtotal", *reads)),
            "recompute": Kernel("rms_norm_apply", views=as_rows(1, 3), reads=reads[:2], **forwards),
        }

    def forward(self, x, weight, eps: float, norm: NormCall) -> Pair:
        """Returns (y, rstd [rows])."""
        y, rstd = _result_like(x, norm.y), per_row(x, x.numel() // norm.length)
        self.kernels["forward"](x, weight, y, rstd, eps)
        return y, rstd

    def add_forward(self, x, residual, weight, eps: float, norm: NormCall, multiplier: float = 1.0) -> Triple:
        """Returns (total, y, rstd [rows]). multiplier: 1 for these kernels."""
        total, y, rstd = new_like(residual), new_like(x), per_row(x, x.numel() // norm.length)
        self.kernels["add_forward"](x, residual, weight, total, y, rstd, eps)
        return total, y, rstd

    def backward(self, grads: Sequence[torch.Tensor], x, weight, rstd, need_dweight: bool, norm: NormCall) -> Pair:
        """Returns (dx, dweight). grads: dy, and the gradient of the residual stream where there is one, which is added to dx."""
        blocks = self.blocks(x.numel() // norm.length, norm.length, multiprocessors(x))
        dx, partial = new_like(x), per_row(x, blocks, norm.length)
        self.kernels["backward" if len(grads) == 1 else "add_backward"](dx, *grads, x, weight, rstd, partial)
        return dx, column_sum(partial, weight.dtype) if need_dweight else weight.new_empty(0)

    def recompute(self, x, weight, rstd, norm: NormCall) -> torch.Tensor:
        """Returns y again."""
        y = _result_like(x, norm.y)
        self.kernels["recompute"](x, weight, y, rstd)
        return y

    def takes(self, norm: NormCall, step: str) -> bool:
        """Tells whether there are kernels for a step of a norm: "forward", "backward", "add_forward", "scaled_add_forward",
        "add_backward" or "recompute"."""
        raise NotImplementedError

    def operation_of(self, step: str) -> str:
        """Returns the file of kernel_src that has the kernels of a step."""
        return self.operation

    def reads_once(self, norm: NormCall) -> bool:
        """Tells whether rows of this length are read once, and not a second time from the cache."""
        raise NotImplementedError

    def blocks(self, rows: int, length: int, processors: int) -> int:
        """Returns the number of blocks of the backward pass: as many as the GPU holds at once, each of which walks over its rows."""
        raise NotImplementedError


def _result_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return new_like(x) if x.dtype == dtype else torch.empty(x.shape, dtype=dtype, device=x.device)


class Rows(WholeRows):
    """kernel_src/rms_norm.py."""

    # Dtypes of x, weight and y. The fused steps: y again, and both passes with the residual.
    FUSED = {*((dtype,) * 3 for dtype in HALF), (torch.float32, torch.float32, torch.bfloat16)}  # the last: an fp32 model under autocast
    ALONE = {
        *FUSED,
        *((torch.float32, torch.float32, dtype) for dtype in FLOATS),
        *((dtype, torch.float32, torch.float32) for dtype in HALF),  # q_norm and k_norm under autocast
    }
    # Blocks that an SM holds in the backward pass, by the longest row, swept on an H200.
    PER_SM = ((256, 8), (1024, 6), (2560, 3))

    def takes(self, norm: NormCall, step: str) -> bool:
        if norm.offset or step == "scaled_add_forward" or (norm.rounds != self.rounds and "backward" not in step):
            return False
        if step in ("forward", "backward"):
            return (norm.x, norm.weight, norm.y) in self.ALONE
        return (norm.x, norm.weight, norm.y) in self.FUSED and norm.length in self.kernels["add_forward"].lengths("x", 1)

    def reads_once(self, norm: NormCall) -> bool:
        return norm.length in self.kernels["forward"].lengths("x", 1)

    def blocks(self, rows: int, length: int, processors: int) -> int:
        return min(rows, processors * next((blocks for most, blocks in self.PER_SM if length <= most), 2))


class OneTile(WholeRows):
    """kernel_src/round_last_rms_norm.py."""

    PER_SM = 2  # in the backward pass: what 8 warps of 120 registers leave room for

    def takes(self, norm: NormCall, step: str) -> bool:
        if norm.offset or norm.x != norm.y or step in ("scaled_add_forward", "recompute"):
            return False
        if norm.rounds != self.rounds and "backward" not in step:
            return False
        return _parameters_fit(norm) and norm.length <= self.kernels["forward"].constant("TILE")

    def reads_once(self, norm: NormCall) -> bool:
        return True

    def blocks(self, rows: int, length: int, processors: int) -> int:
        return min(rows, self.PER_SM * processors)


def _parameters_fit(norm: NormCall) -> bool:
    """Whether the weight has x's dtype, or is in fp32 with x in half precision."""
    same = norm.x == norm.weight and norm.x in FLOATS
    return same or (norm.weight == torch.float32 and norm.x in HALF)


# ---------------------------------------------------------------- rows as segments
class Segments:
    """kernel_src/general_rms_norm.py."""

    operation = "general_rms_norm"
    WHOLE = {torch.bfloat16: 8192, torch.float16: 4096, torch.float32: 4096}  # the longest row in registers, forward
    # Blocks that an SM holds in the backward pass of rows in registers, by the longest row.
    PER_SM = {
        torch.bfloat16: ((1024, 6), (2048, 3), (4096, 2), (8192, 1)),
        torch.float16: ((4096, 2),),
        torch.float32: ((2048, 2),),
    }
    TWO_TILES = 5120  # the longest row of which an SM holds two blocks where it is two tiles: kernel_src/double_tile_norms.py
    SHORT, SHORT_PER_SM = 128, 8  # rows of this length are several a block
    GROUPS_PER_SM = 8  # blocks that walk over the rows of some columns

    def __init__(self):
        self._forward = Kernel("general_rms_norm_forward", "general_rms_norm_long_forward", grid=blocks_of_rows, views=as_segments(3))
        self._short_forward = Kernel("general_rms_norm_rows_forward", grid=blocks_of_rows)
        self._add_forward = Kernel("general_add_rms_norm_forward", grid=blocks_of_rows, views=as_segments(5))
        self._scaled_add_forward = Kernel("scaled_add_norm_forward", grid=blocks_of_rows, views=as_segments(5))
        self._apply = Kernel("general_rms_norm_apply", grid=blocks_of_rows, views=as_segments(3))
        self._backward = Kernel("general_rms_norm_backward", grid=one_block_a_sum)
        self._short_backward = Kernel("general_rms_norm_rows_backward", grid=one_block_a_sum)
        self._add_backward = Kernel("general_add_rms_norm_backward", grid=one_block_a_sum)
        self._row_means = Kernel("general_rms_norm_row_means", grid=blocks_of_rows, views=as_segments(3, 4))
        self._columns = Kernel("general_rms_norm_columns_backward", grid=groups_of_columns, views=as_segments(4, 5))
        self._add_columns = Kernel("general_add_rms_norm_columns_backward", grid=groups_of_columns, views=as_segments(5, 6))

    def takes(self, norm: NormCall, step: str) -> bool:
        """See `WholeRows.takes`."""
        if norm.x != norm.y or not _parameters_fit(norm):
            return False
        if step == "recompute":
            return norm.x == norm.weight and norm.length % SEGMENT == 0
        return "add_forward" not in step or (norm.x == norm.weight and self.reads_once(norm))

    def operation_of(self, step: str) -> str:
        """See `WholeRows.operation_of`."""
        return "residual_norm" if step in ("scaled_add_forward", "recompute") else self.operation

    def reads_once(self, norm: NormCall) -> bool:
        """See `WholeRows.reads_once`."""
        return norm.x == norm.weight and norm.length % SEGMENT == 0 and norm.length <= self.WHOLE[norm.x]

    def forward(self, x, weight, eps: float, norm: NormCall) -> Pair:
        """Returns (y, rstd [rows])."""
        n, options = norm.length, (eps, norm.offset, int(norm.rounds == "first"))
        rows, weight = rows_of(x, n), rows_of(weight, n)[0]
        y, rstd = new_like(rows), per_row(x, rows.shape[0])
        kernel = self._short_forward if n == self.SHORT and weight.dtype == x.dtype else self._forward
        for part in slabs(rows):
            kernel(rows[part], weight, y[part], rstd[part], *options)
        return y.view(x.shape), rstd

    def recompute(self, x, weight, rstd, norm: NormCall) -> torch.Tensor:
        """Returns y again."""
        n = norm.length
        rows, weight = rows_of(x, n), rows_of(weight, n)[0]
        y = new_like(rows)
        for part in slabs(rows):
            self._apply(rows[part], weight, y[part], rstd[part], norm.offset, int(norm.rounds == "first"))
        return y.view(x.shape)

    def add_forward(self, x, residual, weight, eps: float, norm: NormCall, multiplier: float = 1.0) -> Triple:
        """Returns (total = residual + multiplier * x, y, rstd [rows])."""
        n, options = norm.length, [eps, norm.offset, int(norm.rounds == "first")]
        kernel = self._add_forward
        if multiplier != 1.0:
            kernel, options = self._scaled_add_forward, [multiplier, *options]
        rows, residual, weight = rows_of(x, n), rows_of(residual, n), rows_of(weight, n)[0]
        total, y, rstd = new_like(rows), new_like(rows), per_row(x, rows.shape[0])
        for part in slabs(rows, residual):
            kernel(rows[part], residual[part], weight, total[part], y[part], rstd[part], *options)
        return total.view(x.shape), y.view(x.shape), rstd

    def backward(self, grads: Sequence[torch.Tensor], x, weight, rstd, need_dweight: bool, norm: NormCall) -> Pair:
        """Returns (dx, dweight). grads: dy, and the gradient of the residual stream where there is one, which is added to dx."""
        n, offset, alone = norm.length, norm.offset, len(grads) == 1
        grads, rows, weight = [rows_of(g, n) for g in grads], rows_of(x, n), rows_of(weight, n)[0]
        dx, partials, processors = new_like(rows), [], multiprocessors(x)
        blocks = self._blocks_per_sm(norm)
        for part in slabs(rows, *grads):
            count = part.stop - part.start
            given = [g[part] for g in grads]
            if blocks:
                short = n == self.SHORT and alone
                kernel = self._short_backward if short else self._backward if alone else self._add_backward
                partial = per_row(x, min(count, (self.SHORT_PER_SM if short else blocks) * processors), n)
                kernel(dx[part], *given, rows[part], weight, rstd[part], partial, offset)
            else:
                partial = per_row(x, min(count, max(1, self.GROUPS_PER_SM * processors * 1024 // n)), n)
                means = per_row(x, count)
                self._row_means(given[0], rows[part], weight, rstd[part], means, offset)
                kernel = self._columns if alone else self._add_columns
                kernel(dx[part], *given, rows[part], weight, rstd[part], means, partial, offset)
            partials.append(partial)
        if not need_dweight:
            return dx.view(x.shape), weight.new_empty(0)
        return dx.view(x.shape), column_sum_of(partials, weight.dtype)

    def _blocks_per_sm(self, norm: NormCall) -> int:
        """Blocks that an SM holds of the kernel for rows in registers; 0 where none takes such rows."""
        if norm.x != norm.weight or norm.length % SEGMENT:
            return 0
        if norm.x == torch.bfloat16 and 4096 < norm.length <= self.TWO_TILES and self._backward.constants("TAIL"):
            return 2
        return next((blocks for longest, blocks in self.PER_SM[norm.x] if norm.length <= longest), 0)


# ---------------------------------------------------------------- the families
ROWS = Rows("rms_norm", "first", kinds=("rms_norm", "rms_norm_rows", "rms_norm_any"))
ONE_TILE = OneTile("round_last_rms_norm", "last", "round_last_")
SEGMENTS = Segments()
FAMILIES = (ROWS, SEGMENTS, ONE_TILE)


def family_of(norm: NormCall, step: str, x: torch.Tensor, *others: torch.Tensor):
    """The family whose kernels take a step of a norm; None where PyTorch does it. others: what else a kernel reads."""
    if not kernels_run_on(x, *others) or x.numel() == 0:
        return None
    return _chosen(launch.backend, norm, step)


@functools.lru_cache(maxsize=1024)
def _chosen(backend, norm: NormCall, step: str):
    """backend: part of the key, for it says which kernels there are."""
    shipped = backend.artifacts.operations()
    found = [family for family in FAMILIES if family.operation_of(step) in shipped and family.takes(norm, step)]
    return next((family for family in found if family.reads_once(norm)), found[0] if found else None)
