"""Cross entropy of logits, and its gradient: over the logits, where they are a chunk of a linear layer's, or beside them.

With z the logits of one token (softcapped where the model does that), t its label and lse = log(sum(exp(z))):

    loss = lse - z[t]                      dz[j] = (exp(z[j] - lse) - [j == t]) * scale

and with label smoothing e, class weights w, and the square of lse (z-loss, weight q), per token:

    loss = (1 - e) * w[t] * (lse - z[t]) + e / V * sum_j w[j] * (lse - z[j]) + q * lse^2
    dz[j] = softmax[j] * a - [j == t] * b - w[j] * c
    a = (1 - e) * w[t] + e / V * sum_j w[j] + 2 * q * lse,   b = (1 - e) * w[t],   c = e / V

Three straight-line kernels, each of them at the memory's speed: partial statistics of pieces of a row, one block a row that
joins them, and the gradient. Measured on an H200 for [4096, 151936] bf16: 925 us, 99 % of what the three passes cost as
copies; one block a row 1041 us or more, a last-arriving block that finishes its row 972 us or more.

A label that is `ignore_index` or lies outside the vocabulary contributes no loss and no gradient.
Exponentials are taken in base 2, and maxima and lse kept in base e: fp32 holds no finite logit beyond 2.36e38 times log2(e). lse is kept
as two numbers, the maximum of z and log(sum(exp(z - maximum))): of a row that a mask has filled with -1e9, their rounded sum is the first.
"""

import cuda.tile as ct

from kernel_src.elements import block_from_last
from kernel_src.prebuild import FLOAT, FLOATS, INT, Array, Variant

Const = ct.Constant[int]
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
MINUS_INFINITY = -float("inf")
LARGE = 1024.0  # from where on the rounding of a product with log2(e) shows in an exponential


@ct.function
def piece(block, logits, TILE: Const):
    """The row of a block and its piece of the row. Blocks are counted in one dimension, the pieces of a row behind each other: a
    grid has 65535 blocks in its others, and a chunk may have more tokens."""
    pieces = ct.cdiv(logits.shape[1], TILE)
    return block // pieces, block % pieces


@ct.function
def last_first(logits, TILE: Const):
    """Counts as `piece` does, from the last row on: the statistics have left it in the L2."""
    return piece(block_from_last(), logits, TILE)


@ct.function
def read_logits(logits, row, cols):
    """A piece of a row as float32; -inf past its end."""
    return ct.astype(ct.gather(logits, (row, cols), check_bounds=True, padding_value=MINUS_INFINITY), ct.float32)


@ct.function
def cap(z, softcap):
    """softcap * tanh(z / softcap). Past the row's end z is -inf, which a cap would make finite: the caller masks there."""
    return softcap * ct.tanh(z / softcap)


@ct.function
def shift_of(m):
    """A maximum to subtract. A piece of a row that is -inf everywhere has the sum 0, not the NaN of -inf - -inf."""
    return ct.where(m == MINUS_INFINITY, 0.0, m)


@ct.function
def exponents(z, top, log_sum=0.0, scale=1.0):
    """((z - top) * scale - log_sum) * log2(e), all but z numbers: where that is exact enough one instruction, a product with the
    subtraction. Instructions bound half precision."""
    if ct.abs(top * scale) < LARGE:
        v = z * (scale * LOG2E) - (top * scale + log_sum) * LOG2E
    else:
        v = (z - top) * (scale * LOG2E) - log_sum * LOG2E
    return v


@ct.function
def write_lse(lse, row, top, log_sum):
    ct.scatter(lse, (row, 0), top, check_bounds=False)
    ct.scatter(lse, (row, 1), log_sum, check_bounds=False)


@ct.function
def read_lse(lse, row):
    """(maximum, log_sum) of a row."""
    return ct.gather(lse, (row, 0), check_bounds=False), ct.gather(lse, (row, 1), check_bounds=False)


@ct.function
def probabilities(z, lse, row):
    """exp(z - lse)."""
    top, log_sum = read_lse(lse, row)
    return ct.exp2(exponents(z, top, log_sum), flush_to_zero=True)


@ct.function
def write_partial(part_max, part_sum, row, part, m, z):
    """m, the maximum of z, and the sum of e^(z - m)."""
    s = ct.sum(ct.exp2(exponents(z, shift_of(m)), flush_to_zero=True), 0)
    ct.scatter(part_max, (row, part), m, check_bounds=False)
    ct.scatter(part_sum, (row, part), s, check_bounds=False)


@ct.function
def join_partials(part_max, part_sum, row, PARTS: Const):
    """(the maximum of a whole row, the logarithm of the sum of e^(z - maximum)), from the partial maxima and sums."""
    m = ct.full((), MINUS_INFINITY, dtype=ct.float32)
    s = ct.zeros((), dtype=ct.float32)
    for i in range(ct.cdiv(part_max.shape[1], PARTS)):
        parts = i * PARTS + ct.arange(PARTS, dtype=ct.int32)
        pm = ct.gather(part_max, (row, parts), check_bounds=True, padding_value=MINUS_INFINITY)
        ps = ct.gather(part_sum, (row, parts), check_bounds=True, padding_value=0)
        new = ct.maximum(m, ct.max(pm, 0))
        shift = shift_of(new)
        s = s * ct.exp2((m - shift) * LOG2E) + ct.sum(ps * ct.exp2((pm - shift) * LOG2E), 0)
        m = new
    return m, ct.log2(s) * LN2


@ct.kernel
def cross_entropy_statistics(logits, part_max, part_sum, TILE: Const):
    """logits: [tokens, vocabulary]; part_max, part_sum: [tokens, pieces] fp32, pieces = ceil(vocabulary / TILE)."""
    row, part = piece(ct.bid(0), logits, TILE)
    cols = part * TILE + ct.arange(TILE, dtype=ct.int32)
    z = ct.gather(logits, (row, cols), check_bounds=True, padding_value=MINUS_INFINITY)
    # The maximum of what lies in memory: instructions bound half precision.
    write_partial(part_max, part_sum, row, part, ct.astype(ct.max(z, 0), ct.float32), ct.astype(z, ct.float32))


@ct.kernel
def cross_entropy_statistics_weighted(logits, class_weight, part_max, part_sum, part_total, softcap: float, TILE: Const):
    """Writes what `cross_entropy_statistics` does, with softcap (0: none), and part_total: [tokens, pieces], sums of class_weight *
    (the piece's maximum - z) / 2. Halves: the difference of two numbers of fp32 may be none."""
    row, part = piece(ct.bid(0), logits, TILE)
    cols = part * TILE + ct.arange(TILE, dtype=ct.int32)
    z = read_logits(logits, row, cols)
    inside = cols < logits.shape[1]
    if softcap > 0.0:
        z = ct.where(inside, cap(z, softcap), MINUS_INFINITY)
    m = ct.max(z, 0)
    write_partial(part_max, part_sum, row, part, m, z)
    w = ct.gather(class_weight, cols, check_bounds=True, padding_value=0)
    distance = shift_of(m) * 0.5 - z * 0.5
    ct.scatter(part_total, (row, part), ct.sum(ct.where(inside, distance * w, 0.0), 0), check_bounds=False)


@ct.kernel
def cross_entropy_combine(logits, target, part_max, part_sum, lse, loss, ignore_index: int, softcap: float, PARTS: Const):
    """lse: [tokens, 2] fp32, its two parts. loss: [tokens] fp32, lse - z[target], 0 for an ignored token. One token a block."""
    row = ct.bid(0)
    m, log_sum = join_partials(part_max, part_sum, row, PARTS)
    t = ct.gather(target, row, check_bounds=False)
    counted = (t != ignore_index) & (t >= 0) & (t < logits.shape[1])
    z = ct.astype(ct.gather(logits, (row, ct.astype(ct.where(counted, t, 0), ct.int32)), check_bounds=False), ct.float32)
    if softcap > 0.0:
        z = cap(z, softcap)
    ct.scatter(loss, row, ct.where(counted, (m - z) + log_sum, 0.0), check_bounds=False)
    write_lse(lse, row, m, log_sum)


@ct.function
def write_gradient(logits, out, target, lse, scale, ignore_index, TILE: Const):
    """(softmax - [j == target]) * scale of a piece of a row; 0 for an ignored token."""
    row, part = last_first(logits, TILE)
    lanes = ct.arange(TILE, dtype=ct.int32)
    cols = part * TILE + lanes
    t = ct.gather(target, row, check_bounds=False)
    if (t != ignore_index) & (t >= 0) & (t < logits.shape[1]):
        p = probabilities(read_logits(logits, row, cols), lse, row)
        # One block of a row has the target, and it alone looks for it.
        lane = ct.astype(t, ct.int32) - part * TILE
        if (lane >= 0) & (lane < TILE):
            p = ct.where(lanes == lane, p - 1.0, p)
        ct.scatter(out, (row, cols), ct.astype(p * scale, out.dtype), check_bounds=True)
    else:
        ct.scatter(out, (row, cols), ct.zeros((TILE,), dtype=out.dtype), check_bounds=True)


@ct.function
def write_gradient_weighted(logits, out, class_weight, target, lse, a, b, c, softcap, TILE: Const):
    """softmax * a - [j == target] * b - class_weight * c of a piece of a row."""
    row, part = last_first(logits, TILE)
    cols = part * TILE + ct.arange(TILE, dtype=ct.int32)
    t = ct.gather(target, row, check_bounds=False)
    row_a = ct.gather(a, row, check_bounds=False)
    z = read_logits(logits, row, cols)
    slope = ct.full((TILE,), 1.0, dtype=ct.float32)
    if softcap > 0.0:
        ratio = ct.tanh(z / softcap)
        slope = 1.0 - ratio * ratio
        z = ratio * softcap
    p = probabilities(z, lse, row)
    hit = ct.where(ct.astype(cols, ct.int64) == t, ct.gather(b, row, check_bounds=False), 0.0)
    w = ct.gather(class_weight, cols, check_bounds=True, padding_value=0)
    g = (p * row_a - hit - w * ct.gather(c, row, check_bounds=False)) * slope
    ct.scatter(out, (row, cols), ct.astype(ct.where(row_a == 0.0, 0.0, g), out.dtype), check_bounds=True)


@ct.kernel
def cross_entropy_gradient(logits, target, lse, scale, ignore_index: int, TILE: Const):
    """Writes the gradient over logits. scale: [1] fp32, what every counted token's gradient is multiplied by."""
    write_gradient(logits, logits, target, lse, ct.gather(scale, 0, check_bounds=False), ignore_index, TILE)


@ct.kernel
def cross_entropy_gradient_weighted(logits, class_weight, target, lse, a, b, c, softcap: float, TILE: Const):
    """Writes softmax * a - [j == target] * b - class_weight * c over logits. a, b, c: [tokens] fp32; a == 0 marks a token
    whose gradient is 0 whatever its logits are."""
    write_gradient_weighted(logits, logits, class_weight, target, lse, a, b, c, softcap, TILE)


@ct.kernel
def cross_entropy_backward(logits, target, lse, dloss, scale, dlogits, ignore_index: int, TILE: Const):
    """Writes what `cross_entropy_gradient` does into dlogits. dloss: fp32, [1] or [tokens]; scale: [1] fp32; both multiply the gradient."""
    row, _ = last_first(logits, TILE)
    factor = ct.gather(dloss, ct.where(dloss.shape[0] == 1, 0, row), check_bounds=False) * ct.gather(scale, 0, check_bounds=False)
    write_gradient(logits, dlogits, target, lse, factor, ignore_index, TILE)


@ct.kernel
def cross_entropy_backward_weighted(logits, class_weight, target, lse, a, b, c, dlogits, softcap: float, TILE: Const):
    """Writes what `cross_entropy_gradient_weighted` does into dlogits."""
    write_gradient_weighted(logits, dlogits, class_weight, target, lse, a, b, c, softcap, TILE)


def variants():
    vector, matrix = (Array("float32", (None,) * dims, aligned=False) for dims in (1, 2))
    target = Array("int64", (None,), aligned=False)
    for dtype in FLOATS:
        aligned = Array(dtype, (None, None), divisible=(1, 16))
        for logits in (aligned, Array(dtype, (None, None), aligned=False)):
            weight = Array("float32", (None,), aligned=logits.aligned)
            wide = logits.aligned and dtype != "float32"  # whose two arrays of 4096 elements leave 8 blocks an SM enough registers
            # A whole row of a vocabulary is then 16 to 19 blocks: 145 us where 4096 take 161, of bf16 [2048, 151936] on an H200.
            yield Variant(cross_entropy_statistics, {"logits": logits, "part_max": matrix, "part_sum": matrix, "TILE": 8192})
            yield Variant(
                cross_entropy_statistics_weighted,
                {"logits": logits, "class_weight": weight, "part_max": matrix, "part_sum": matrix, "part_total": matrix,
                 "softcap": FLOAT, "TILE": 4096},
            )
            yield Variant(
                cross_entropy_gradient,
                {"logits": logits, "target": target, "lse": matrix, "scale": vector, "ignore_index": INT, "TILE": 2048},
            )
            yield Variant(
                cross_entropy_gradient_weighted,
                {"logits": logits, "class_weight": weight, "target": target, "lse": matrix, "a": vector, "b": vector,
                 "c": vector, "softcap": FLOAT, "TILE": 2048},
            )
            yield Variant(
                cross_entropy_backward,
                {"logits": logits, "target": target, "lse": matrix, "dloss": vector, "scale": vector, "dlogits": logits,
                 "ignore_index": INT, "TILE": 4096 if wide else 2048},
                hints={"occupancy": 8} if wide else {},
            )
            yield Variant(
                cross_entropy_backward_weighted,
                {"logits": logits, "class_weight": weight, "target": target, "lse": matrix, "a": vector, "b": vector,
                 "c": vector, "dlogits": logits, "softcap": FLOAT, "TILE": 2048},
            )
        yield Variant(
            cross_entropy_combine,
            {"logits": Array(dtype, (None, None), aligned=False), "target": target, "part_max": matrix, "part_sum": matrix,
             "lse": matrix, "loss": vector, "ignore_index": INT, "softcap": FLOAT, "PARTS": 64},
        )
