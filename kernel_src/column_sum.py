"""Column sums of fp32 partial results, the second step of every weight gradient: out[j] = sum over i of partial[i, j].

The order of the additions depends on the shape alone, so two runs give the same bits.
"""

import cuda.tile as ct

from kernel_src.prebuild import FLOATS, Array, Variant

Const = ct.Constant[int]


@ct.function
def sum_columns(partial, out, ROWS: Const, COLS: Const):
    cols = ct.bid(0) * COLS + ct.arange(COLS, dtype=ct.int32)
    acc = ct.zeros((ROWS, COLS), dtype=ct.float32)
    for i in range(ct.cdiv(partial.shape[0], ROWS)):
        rows = i * ROWS + ct.arange(ROWS, dtype=ct.int32)
        acc = acc + ct.gather(partial, (rows[:, None], cols[None, :]), check_bounds=True, padding_value=0)
    ct.scatter(out, cols, ct.astype(ct.sum(acc, axis=0), out.dtype), check_bounds=True)


@ct.kernel
def column_sum(partial, out, ROWS: Const, COLS: Const):
    """partial: [rows, columns] fp32; out: [columns] of any dtype. COLS columns a block, ROWS rows a step."""
    ct.grid_dependency_control_wait()
    sum_columns(partial, out, ROWS, COLS)


# The best of seven sizes on an H200: 3.2 us for [396, 4096], where torch.sum and a cast take 12 us.
TILE = {"ROWS": 256, "COLS": 16}


def variants():
    for dtype in FLOATS:
        for aligned in (True, False):
            partial, out = Array("float32", (None, None), aligned=aligned), Array(dtype, (None,), aligned=aligned)
            yield Variant(column_sum, {"partial": partial, "out": out, **TILE})
