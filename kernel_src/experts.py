"""Kernels around the grouped GEMMs of a mixture of experts: they copy a token to its rows, apply each expert's gate, and add up a token's
experts.

A row is one (token, expert) pair; the rows are sorted by expert, so an expert's rows lie side by side. The output of the first
GEMM is gate and up in one row, and its gradient is written over it. `scores` are the routing weights, one a row; they multiply
the gated row before the second GEMM instead of its result, so both directions end in a plain sum over a token's rows:

    h = silu(gate) * up          out = score * h          dscore = sum over the row of h * dout

with gate before up in a row, as Qwen3-MoE has them, and the gradients of kernel_src/swiglu.py. GPT-OSS's gate: clamped_gate.py.

Everything has one order of additions: two runs give the same bits.
"""

import cuda.tile as ct

from kernel_src.prebuild import FLOATS, Array, Variant
from kernel_src.swiglu import sigmoid

Const = ct.Constant[int]
LAST = 2**31 - 1  # past every row


# ---------------------------------------------------------------- reading and writing
@ct.function
def read(array, rows, cols, inside, MASKED: Const):
    """array[rows, cols]; zero where `inside` is false, which only MASKED blocks have."""
    if MASKED:
        tile = ct.gather(array, (rows, cols), mask=inside, check_bounds=False, padding_value=0)
    else:
        tile = ct.gather(array, (rows, cols), check_bounds=False)
    return tile


@ct.function
def write(array, rows, cols, inside, tile, MASKED: Const):
    if MASKED:
        ct.scatter(array, (rows, cols), tile, mask=inside, check_bounds=False)
    else:
        ct.scatter(array, (rows, cols), tile, check_bounds=False)


@ct.function
def read_scores(scores, rows, inside, MASKED: Const):
    """[ROWS, 1]"""
    if MASKED:
        tile = ct.gather(scores, rows, mask=inside, check_bounds=False, padding_value=0)
    else:
        tile = ct.gather(scores, rows, check_bounds=False)
    return tile


# ---------------------------------------------------------------- the gate
@ct.kernel
def swiglu_rows_forward(gate_up, scores, out, ROWS: Const, COLS: Const, MASKED: Const):
    """gate_up: [rows, 2 * width], gate before up; scores: [rows] fp32; out: [rows, width], score * silu(gate) * up.
    Grid (blocks of ROWS rows, pieces of COLS columns). Without MASKED, COLS divides the width, and the last block of rows takes
    the last row again instead of leaving the array."""
    rows = (ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32))[:, None]
    cols = (ct.bid(1) * COLS + ct.arange(COLS, dtype=ct.int32))[None, :]
    width = out.shape[1]
    inside = (rows < out.shape[0]) & (cols < width)
    if not MASKED:
        rows = ct.minimum(rows, out.shape[0] - 1)
    gate = ct.astype(read(gate_up, rows, cols, inside, MASKED), ct.float32)
    up = ct.astype(read(gate_up, rows, cols + width, inside, MASKED), ct.float32)
    score = read_scores(scores, rows, rows < out.shape[0], MASKED)
    write(out, rows, cols, inside, ct.astype(gate * sigmoid(gate) * up * score, out.dtype), MASKED)


@ct.kernel
def swiglu_rows_backward(gate_up, scores, dout, dscores, ROWS: Const, COLS: Const, WEIGHTS: Const):
    """Writes the gradients of `swiglu_rows_forward` over gate_up and dout, as `clamped_gate_backward` does. Its blocks check their rows
    and columns: a row that is read again could have been written over."""
    piece = ct.bid(1)
    flat = ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32)
    rows = flat[:, None]
    cols = (piece * COLS + ct.arange(COLS, dtype=ct.int32))[None, :]
    width = dout.shape[1]
    inside = (rows < dout.shape[0]) & (cols < width)
    gate = ct.astype(read(gate_up, rows, cols, inside, 1), ct.float32)
    up = ct.astype(read(gate_up, rows, cols + width, inside, 1), ct.float32)
    score = read_scores(scores, rows, rows < dout.shape[0], 1)
    s = sigmoid(gate)
    silu = gate * s
    d = ct.astype(read(dout, rows, cols, inside, 1), ct.float32)
    ct.scatter(dscores, (flat, piece), ct.sum(d * silu * up, axis=1, keepdims=False), mask=flat < dout.shape[0], check_bounds=False)
    d = d * score
    write(gate_up, rows, cols, inside, ct.astype(d * up * (s + silu * (1.0 - s)), gate_up.dtype), 1)
    write(gate_up, rows, cols + width, inside, ct.astype(d * silu, gate_up.dtype), 1)
    if WEIGHTS:
        write(dout, rows, cols, inside, ct.astype(silu * up * score, dout.dtype), 1)


# ---------------------------------------------------------------- from tokens to their rows, and back
@ct.kernel
def token_rows(x, position, out, COLS: Const):
    """x: [tokens, columns]; out: [rows, columns], of which position: [tokens, top-k] int32 names those that get a token's columns. A
    position past the last row is none. Grid (tokens, pieces of COLS columns): x is read once, not once a row."""
    token = ct.bid(0)
    cols = ct.bid(1) * COLS + ct.arange(COLS, dtype=ct.int32)
    tile = ct.gather(x, (token, cols), check_bounds=True, padding_value=0)
    for k in range(position.shape[1]):
        row = ct.gather(position, (token, k), check_bounds=False)
        ct.scatter(out, (row, cols), tile, check_bounds=True)


@ct.kernel
def token_sum(y, position, out, TOP_K: Const, COLS: Const):
    """out: [tokens, columns], each the sum of its rows of y: [rows, columns], which position: [tokens, top-k] int32 names. A
    position past the last row counts as zero. Grid (tokens, pieces of COLS columns). TOP_K rows are asked for at a time: one after the
    other took 119 us of an H200 where 74 do for 8192 tokens with 8 rows of 2048."""
    token = ct.bid(0)
    cols = ct.bid(1) * COLS + ct.arange(COLS, dtype=ct.int32)
    acc = ct.zeros((COLS,), dtype=ct.float32)
    for i in range(ct.cdiv(position.shape[1], TOP_K)):
        rows = ct.gather(position, (token, i * TOP_K + ct.arange(TOP_K, dtype=ct.int32)), check_bounds=True, padding_value=LAST)
        tile = ct.gather(y, (rows[:, None], cols[None, :]), check_bounds=True, padding_value=0)
        acc = acc + ct.sum(ct.astype(tile, ct.float32), axis=0)
    ct.scatter(out, (token, cols), ct.astype(acc, out.dtype), check_bounds=True)


# ---------------------------------------------------------------- what is prebuilt
# Rows and columns of a block, by what divides the width. Long pieces of rows are faster: 65536 rows of 2 * 768, backward, took 158 us of an
# H200 with (8, 256), 165 with (16, 128) and 198 with (32, 64). 2880, the width of GPT-OSS, is a multiple of 64 and of nothing larger.
SHAPES = ((8, 256), (32, 64))
TOP_K = 8  # rows of a token that are asked for at a time; without a loop where there are so many
SCORES, POSITION = Array("float32", (None,), aligned=False), Array("int32", (None, None), aligned=False)
MATRIX = Array("float32", (None, None), aligned=False)


def sum_arrays(dtype):
    """The arrays of results whose rows are whole 16 bytes, and of any."""
    return Array(dtype, (None, None), divisible=(1, 8)), Array(dtype, (None, None), aligned=False)


def variants():
    for dtype in FLOATS:
        any_width = Array(dtype, (None, None), aligned=False), *SHAPES[-1], 1
        for array, rows, cols, masked in (*((Array(dtype, (None, None), divisible=(1, c)), r, c, 0) for r, c in SHAPES), any_width):
            pair, tile = {"gate_up": array, "scores": SCORES}, {"ROWS": rows, "COLS": cols}
            yield Variant(swiglu_rows_forward, {**pair, "out": array, **tile, "MASKED": masked})
            for weights in (1, 0):
                yield Variant(swiglu_rows_backward, {**pair, "dout": array, "dscores": MATRIX, **tile, "WEIGHTS": weights})
        for array in sum_arrays(dtype):
            yield Variant(token_rows, {"x": array, "position": POSITION, "out": array, "COLS": 1024})
            for position in (Array("int32", (None, TOP_K), aligned=False), POSITION):
                yield Variant(token_sum, {"y": array, "position": position, "out": array, "TOP_K": TOP_K, "COLS": 1024})
