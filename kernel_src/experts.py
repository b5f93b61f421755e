"""What lies around the grouped GEMMs of a mixture of experts: the gate of every expert, and the sums over a token's experts.

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


# ---------------------------------------------------------------- sums over a token's experts
@ct.kernel
def token_sum(y, position, out, COLS: Const):
    """out: [tokens, columns], each the sum of its rows of y: [rows, columns], which position: [tokens, top-k] int32 names. A
    position past the last row counts as zero. Grid (tokens, pieces of COLS columns)."""
    token = ct.bid(0)
    cols = ct.bid(1) * COLS + ct.arange(COLS, dtype=ct.int32)
    acc = ct.zeros((COLS,), dtype=ct.float32)
    for k in range(position.shape[1]):
        row = ct.gather(position, (token, k), check_bounds=False)
        acc = acc + ct.astype(ct.gather(y, (row, cols), check_bounds=True, padding_value=0), ct.float32)
    ct.scatter(out, (token, cols), ct.astype(acc, out.dtype), check_bounds=True)


# ---------------------------------------------------------------- what is prebuilt
BLOCK_ROWS = 32  # rows that a block takes
COLUMNS = 64  # 768 and 2880, the widths of Qwen3-MoE and GPT-OSS, are multiples of it, and 2880 of nothing larger
SCORES, POSITION = Array("float32", (None,), aligned=False), Array("int32", (None, None), aligned=False)
MATRIX = Array("float32", (None, None), aligned=False)


def sum_arrays(dtype):
    """The arrays of results whose rows are whole 16 bytes, and of any."""
    return Array(dtype, (None, None), divisible=(1, 8)), Array(dtype, (None, None), aligned=False)


def variants():
    tile = {"ROWS": BLOCK_ROWS, "COLS": COLUMNS}
    for dtype in FLOATS:
        for array, masked in ((Array(dtype, (None, None), divisible=(1, COLUMNS)), 0), (Array(dtype, (None, None), aligned=False), 1)):
            pair = {"gate_up": array, "scores": SCORES}
            yield Variant(swiglu_rows_forward, {**pair, "out": array, **tile, "MASKED": masked})
            for weights in (1, 0):
                yield Variant(swiglu_rows_backward, {**pair, "dout": array, "dscores": MATRIX, **tile, "WEIGHTS": weights})
        for array in sum_arrays(dtype):
            yield Variant(token_sum, {"y": array, "position": POSITION, "out": array, "COLS": 1024})
