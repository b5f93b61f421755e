"""Attention's output times the sigmoid of a gate, as Qwen3-Next and Qwen3.5 have it (arXiv 2505.06708).

    y = out * s,  s = sigmoid(gate)        dout = dy * s        dgate = dy * out * s * (1 - s)

gate is the second half of every head of one projection, whose first half is the query: rows of a head with a stride of two, which the
backward pass also writes, so the projection's gradient needs no concatenation. The last block reads and writes the last row again.
"""

import cuda.tile as ct

from kernel_src.elements import read_once, write
from kernel_src.prebuild import FLOATS, Array, Params, Variant
from kernel_src.segments import place
from kernel_src.swiglu import sigmoid

Const = ct.Constant[int]


@ct.kernel
def gated_output_forward(out, gate, y, ROWS: Const, TILE: Const):
    """out, gate, y: [rows, TILE], any row strides."""
    ct.grid_dependency_control_wait()
    row, _ = place(ct.bid(0), out.shape[0], ROWS)
    index = (row[:, None], ct.arange(TILE, dtype=ct.int32)[None, :])
    write(y, index, read_once(out, index) * sigmoid(read_once(gate, index)))


@ct.kernel
def gated_output_backward(dy, out, gate, dout, dgate, ROWS: Const, TILE: Const):
    """All [rows, TILE], any row strides. The last rows first: those the L2 holds."""
    ct.grid_dependency_control_wait()
    row, _ = place(ct.num_blocks(0) - 1 - ct.bid(0), out.shape[0], ROWS)
    index = (row[:, None], ct.arange(TILE, dtype=ct.int32)[None, :])
    d, s = read_once(dy, index), sigmoid(read_once(gate, index))
    write(dout, index, d * s)
    write(dgate, index, d * read_once(out, index) * (s * (1.0 - s)))


# Rows a block and their length: Qwen3.5's heads are 256.
SHAPES = ((8, 128), (4, 256))


def variants():
    for dtype in FLOATS:
        for count, tile in SHAPES:
            a = Array(dtype, (None, tile))
            constants: Params = {"ROWS": count, "TILE": tile}
            yield Variant(gated_output_forward, {"out": a, "gate": a, "y": a, **constants})
            yield Variant(gated_output_backward, {"dy": a, "out": a, "gate": a, "dout": a, "dgate": a, **constants})
