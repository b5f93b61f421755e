"""GPT-OSS's gate between the grouped GEMMs of its experts, with the biases of both of them; rows and scores as in experts.py.

Gate and up of a column lie side by side, with biases of their own (L = limit):

    g = min(gate + bias, L)    u = clamp(up + bias, -L, L)    h = (u + 1) * g * sigmoid(alpha * g)    out = score * h

    dg = d * (u + 1) * s * (1 + alpha * g * (1 - s))  where gate + bias <= L, else 0        d = score * dout, s = sigmoid(alpha * g)
    du = d * g * s                                    where |up + bias| <= L, else 0        dscore = sum over the row of h * dout

In half precision gate and up of a column are one 32-bit word, which is loaded and stored as such (PACKED).

A block works on ROWS rows of one expert, so a bias is read once a block, and its gradient is a sum over the block's rows; the
partial sums of an expert's blocks are added in their order.
"""

import cuda.tile as ct

from kernel_src.experts import MATRIX, POSITION, SCORES, SHAPES, read, read_scores, sum_arrays, write
from kernel_src.prebuild import FLOAT, FLOATS, Array, Params, Variant
from kernel_src.swiglu import sigmoid

Const = ct.Constant[int]


# ---------------------------------------------------------------- reading and writing gate and up
@ct.function
def split(word, dtype):
    """The two halves of 32-bit words, the one at the lower address first, as float32."""
    w = ct.bitcast(word, ct.uint32)
    low = ct.bitcast(ct.astype(w & 0xFFFF, ct.uint16), dtype)
    high = ct.bitcast(ct.astype(w >> 16, ct.uint16), dtype)
    return ct.astype(low, ct.float32), ct.astype(high, ct.float32)


@ct.function
def join(low, high, dtype):
    """The inverse of `split`, rounding to dtype."""
    a = ct.astype(ct.bitcast(ct.astype(low, dtype), ct.uint16), ct.uint32)
    b = ct.astype(ct.bitcast(ct.astype(high, dtype), ct.uint16), ct.uint32)
    return ct.bitcast(a | (b << 16), ct.int32)


@ct.function
def read_interleaved(array, rows, cols, inside, dtype, PACKED: Const, MASKED: Const):
    """(gate, up) of the given columns in float32."""
    if PACKED:
        gate, up = split(read(array, rows, cols, inside, MASKED), dtype)
    else:
        gate = ct.astype(read(array, rows, 2 * cols, inside, MASKED), ct.float32)
        up = ct.astype(read(array, rows, 2 * cols + 1, inside, MASKED), ct.float32)
    return gate, up


@ct.function
def write_interleaved(array, rows, cols, inside, gate, up, dtype, PACKED: Const, MASKED: Const):
    if PACKED:
        write(array, rows, cols, inside, join(gate, up, dtype), MASKED)
    else:
        write(array, rows, 2 * cols, inside, ct.astype(gate, dtype), MASKED)
        write(array, rows, 2 * cols + 1, inside, ct.astype(up, dtype), MASKED)


# ---------------------------------------------------------------- the gate
@ct.function
def clamped(gate, up, limit: float):
    """torch.clamp, which lets NaN through."""
    return ct.where(gate > limit, limit, gate), ct.where(up > limit, limit, ct.where(up < -limit, -limit, up))


@ct.function
def clamped_forward_tile(gate_up, bias, scores, out, expert, rows, last, alpha: float, limit: float, COLS: Const, PACKED: Const,
                         MASKED: Const):
    cols = (ct.bid(1) * COLS + ct.arange(COLS, dtype=ct.int32))[None, :]
    rows = rows[:, None]
    columns = cols < out.shape[1]
    inside = (rows < last) & columns
    gate, up = read_interleaved(gate_up, rows, cols, inside, out.dtype, PACKED, MASKED)
    gate_bias, up_bias = read_interleaved(bias, expert, cols, columns, out.dtype, PACKED, MASKED)
    g, u = clamped(gate + gate_bias, up + up_bias, limit)
    h = (u + 1.0) * (g * sigmoid(g * alpha))
    write(out, rows, cols, inside, ct.astype(h * read_scores(scores, rows, rows < last, MASKED), out.dtype), MASKED)


@ct.kernel
def clamped_gate_forward(
    gate_up, bias, scores, blocks, out, alpha: float, limit: float, ROWS: Const, COLS: Const, PACKED: Const, MASKED: Const
):
    """gate_up: [rows, 2 * width], gate and up interleaved, or PACKED [rows, width] words of both; bias: [experts, as gate_up];
    scores: [rows] fp32; out: [rows, width]; blocks: [3, blocks] int32, the expert, the first row and the end of each.

    Grid (blocks, pieces of COLS columns). Without MASKED, COLS divides the width, and only the last block of an expert checks.
    """
    block = ct.bid(0)
    expert, first = ct.gather(blocks, (0, block), check_bounds=False), ct.gather(blocks, (1, block), check_bounds=False)
    last = ct.gather(blocks, (2, block), check_bounds=False)
    rows = first + ct.arange(ROWS, dtype=ct.int32)
    if first < last:
        if MASKED:
            clamped_forward_tile(gate_up, bias, scores, out, expert, rows, last, alpha, limit, COLS, PACKED, 1)
        elif first + ROWS <= last:
            clamped_forward_tile(gate_up, bias, scores, out, expert, rows, last, alpha, limit, COLS, PACKED, 0)
        else:
            clamped_forward_tile(gate_up, bias, scores, out, expert, rows, last, alpha, limit, COLS, PACKED, 1)


@ct.function
def clamped_backward_tile(
    gate_up, bias, scores, dout, dscores, dbias, expert, rows, last, alpha: float, limit: float,
    COLS: Const, PACKED: Const, WEIGHTS: Const, MASKED: Const
):  # fmt: skip
    piece = ct.bid(1)
    flat = rows
    cols = (piece * COLS + ct.arange(COLS, dtype=ct.int32))[None, :]
    rows = rows[:, None]
    columns = cols < dout.shape[1]
    inside = (rows < last) & columns
    gate, up = read_interleaved(gate_up, rows, cols, inside, dout.dtype, PACKED, MASKED)
    gate_bias, up_bias = read_interleaved(bias, expert, cols, columns, dout.dtype, PACKED, MASKED)
    gate, up = gate + gate_bias, up + up_bias
    g, u = clamped(gate, up, limit)
    s = sigmoid(g * alpha)
    silu = g * s
    h = (u + 1.0) * silu
    d = ct.astype(read(dout, rows, cols, inside, MASKED), ct.float32)
    score = read_scores(scores, rows, rows < last, MASKED)
    partial = ct.sum(d * h, axis=1, keepdims=False)
    if MASKED:
        ct.scatter(dscores, (flat, piece), partial, mask=flat < last, check_bounds=False)
    else:
        ct.scatter(dscores, (flat, piece), partial, check_bounds=False)
    d = d * score
    dgate = ct.where(gate > limit, 0.0, d * (u + 1.0) * (s + alpha * silu * (1.0 - s)))
    dup = ct.where((up > limit) | (up < -limit), 0.0, d * silu)
    write_interleaved(gate_up, rows, cols, inside, dgate, dup, dout.dtype, PACKED, MASKED)
    if WEIGHTS:
        write(dout, rows, cols, inside, ct.astype(h * score, dout.dtype), MASKED)
        block = ct.bid(0)
        # Rows past the end have a gradient of zero.
        dgate, dup = ct.sum(dgate, axis=0, keepdims=True), ct.sum(dup, axis=0, keepdims=True)
        write(dbias, block, 2 * cols, columns, dgate, MASKED)
        write(dbias, block, 2 * cols + 1, columns, dup, MASKED)


@ct.kernel
def clamped_gate_backward(
    gate_up, bias, scores, blocks, dout, dscores, dbias, alpha: float, limit: float,
    ROWS: Const, COLS: Const, PACKED: Const, MASKED: Const, WEIGHTS: Const
):  # fmt: skip
    """Writes the gradient over gate_up, which is as in `clamped_gate_forward`; dscores: [rows, pieces] fp32, sums over a piece of the
    columns; dout: [rows, width], the gradient of `out` before the scores: of the second GEMM's input when nothing was multiplied.

    WEIGHTS: `out` again is written over dout, and dbias: [blocks, 2 * width] fp32 gets sums over a block's rows.
    """
    block = ct.bid(0)
    expert, first = ct.gather(blocks, (0, block), check_bounds=False), ct.gather(blocks, (1, block), check_bounds=False)
    last = ct.gather(blocks, (2, block), check_bounds=False)
    rows = first + ct.arange(ROWS, dtype=ct.int32)
    if first < last:
        if MASKED:
            clamped_backward_tile(gate_up, bias, scores, dout, dscores, dbias, expert, rows, last, alpha, limit, COLS, PACKED, WEIGHTS, 1)
        elif first + ROWS <= last:
            clamped_backward_tile(gate_up, bias, scores, dout, dscores, dbias, expert, rows, last, alpha, limit, COLS, PACKED, WEIGHTS, 0)
        else:
            clamped_backward_tile(gate_up, bias, scores, dout, dscores, dbias, expert, rows, last, alpha, limit, COLS, PACKED, WEIGHTS, 1)


@ct.kernel
def expert_bias_sum(partial, stops, out, ROWS: Const, COLS: Const):
    """out: [experts, columns], each the sum of the expert's rows of partial: [blocks, columns] fp32, which end before
    stops: [experts] int32. Grid (pieces of COLS columns, experts)."""
    expert = ct.bid(1)
    cols = ct.bid(0) * COLS + ct.arange(COLS, dtype=ct.int32)[None, :]
    first = ct.gather(stops, expert - 1, check_bounds=True, padding_value=0)
    last = ct.gather(stops, expert, check_bounds=False)
    acc = ct.zeros((ROWS, COLS), dtype=ct.float32)
    for i in range(ct.cdiv(last - first, ROWS)):
        rows = (first + i * ROWS + ct.arange(ROWS, dtype=ct.int32))[:, None]
        inside = (rows < last) & (cols < partial.shape[1])
        acc = acc + ct.gather(partial, (rows, cols), mask=inside, check_bounds=False, padding_value=0)
    total = ct.astype(ct.sum(acc, axis=0, keepdims=True), out.dtype)
    ct.scatter(out, (expert, cols), total, check_bounds=True)


# ---------------------------------------------------------------- with the second GEMM's bias
@ct.kernel
def token_sum_bias(y, position, expert, scores, bias, out, COLS: Const):
    """Adds up what `token_sum` of experts.py does, and each row's bias: [experts, columns] times its score. expert: [tokens, top-k]
    int32; scores: the same in fp32. An expert that is not there has no bias."""
    token = ct.bid(0)
    cols = ct.bid(1) * COLS + ct.arange(COLS, dtype=ct.int32)
    acc = ct.zeros((COLS,), dtype=ct.float32)
    for k in range(position.shape[1]):
        row, e = ct.gather(position, (token, k), check_bounds=False), ct.gather(expert, (token, k), check_bounds=False)
        score = ct.gather(scores, (token, k), check_bounds=False)
        b = ct.astype(ct.gather(bias, (e, cols), check_bounds=True, padding_value=0), ct.float32)
        acc = acc + (ct.astype(ct.gather(y, (row, cols), check_bounds=True, padding_value=0), ct.float32) + score * b)
    ct.scatter(out, (token, cols), ct.astype(acc, out.dtype), check_bounds=True)


# ---------------------------------------------------------------- what is prebuilt
def variants():
    rows, columns = SHAPES[-1]  # the width of GPT-OSS is a multiple of no more columns
    tile = {"ROWS": rows, "COLS": columns}
    for dtype in FLOATS:
        any_matrix = Array(dtype, (None, None), aligned=False)
        forms = [(any_matrix, any_matrix, {"PACKED": 0, "MASKED": 1})]
        if dtype != "float32":
            words, exact = (Array(d, (None, None), divisible=(1, columns)) for d in ("int32", dtype))
            forms.insert(0, (words, exact, {"PACKED": 1, "MASKED": 0}))
        for gate_up, out, form in forms:
            inputs = {"gate_up": gate_up, "bias": gate_up, "scores": SCORES, "blocks": POSITION}
            numbers: Params = {"alpha": FLOAT, "limit": FLOAT, **tile, **form}
            yield Variant(clamped_gate_forward, {**inputs, "out": out, **numbers})
            for weights in (1, 0):
                outputs = {"dout": out, "dscores": MATRIX, "dbias": MATRIX}
                yield Variant(clamped_gate_backward, {**inputs, **outputs, **numbers, "WEIGHTS": weights})
        stops = Array("int32", (None,), aligned=False)
        yield Variant(expert_bias_sum, {"partial": MATRIX, "stops": stops, "out": any_matrix, "ROWS": 32, "COLS": 64})
        for array in sum_arrays(dtype):
            sums = {"y": array, "position": POSITION, "expert": POSITION, "scores": MATRIX, "bias": array, "out": array}
            yield Variant(token_sum_bias, {**sums, "COLS": 1024})
