"""The short causal convolution of gated delta nets, of each channel alone, with SiLU behind it:

    p[t, c] = bias[c] + sum over j of w[c, j] x[t - 3 + j, c]          y = silu(p)

where tokens before the start of t's document count as zero. Backward, with s = sigmoid(p):

    d = dy s (1 + p (1 - s))        dx[t] = sum over j of w[j] d[t + 3 - j]        dw[j] = sum over t of d[t] x[t - 3 + j]

x is [tokens, channels], as a projection gives it. `since` says for each token how many tokens of its document come before it, at most 3.

A block walks along a span of tokens with a few channels, STEP tokens at a time, which are all asked for before the first is used. What the
next token needs of those before it is still there: three rows of x, and in the backward pass what is known of their dx, which is whole
when d of the third token after it is. So memory sees x, dy, y and dx once, and a few tokens beside a span twice. As many blocks walk as run
at once, so that spans are long. Steps in which no document starts and no span ends, nearly all, have code of their own without masks: 17
instructions for each number forward and 32 backward, instead of 20 and 40.
"""

import cuda.tile as ct

from kernel_src.prebuild import Array, Params, Variant
from kernel_src.swiglu import sigmoid

Const = ct.Constant[int]
TAPS = 4
VECTOR = 8  # channels are a multiple of it, so that rows and their pieces are aligned in every dtype


@ct.function
def weight_of(w, column, j: Const):
    tap = ct.arange(TAPS, dtype=ct.int32)[None, :]
    every = ct.gather(w, (column[:, None], tap), check_bounds=False)
    return ct.astype(ct.reshape(ct.extract(every, index=(0, j), shape=(column.shape[0], 1)), column.shape), ct.float32)


@ct.function
def weights_of(w, bias, column, BIAS: Const):
    """The four weights of each channel and its bias, 0 without BIAS."""
    shift = ct.zeros(column.shape, dtype=ct.float32)
    if BIAS:
        shift = ct.astype(ct.gather(bias, column, check_bounds=False), ct.float32)
    return weight_of(w, column, 0), weight_of(w, column, 1), weight_of(w, column, 2), weight_of(w, column, 3), shift


@ct.function
def row_of(array, t, column):
    """The numbers of a token, of the first or the last one past an end."""
    return ct.gather(array, (ct.maximum(ct.minimum(t, array.shape[0] - 1), 0), column), check_bounds=False, latency=1)


@ct.function
def rows_of(array, t, column, STEP: Const):
    """Reads the rows of STEP tokens, all asked for before the first is used."""
    rows = ()
    for j in ct.static_iter(range(STEP)):
        rows = (*rows, row_of(array, t + j, column))  # type: ignore[assignment]
    return rows


@ct.function
def counts_of(since, t, STEP: Const):
    """(how many tokens come before each of STEP tokens in its document, at most 3; whether all have three)"""
    counts, least = (), 3
    for j in ct.static_iter(range(STEP)):
        count = ct.gather(since, t + j, padding_value=0, latency=1)
        counts, least = (*counts, count), ct.minimum(least, count)  # type: ignore[assignment]
    return counts, least == 3


@ct.function
def put(array, t, column, tile, wanted, MASKS: Const):
    if MASKS:
        ct.scatter(array, (t, column), ct.astype(tile, array.dtype), mask=wanted, check_bounds=False)
    else:
        ct.scatter(array, (t, column), ct.astype(tile, array.dtype), check_bounds=False)


@ct.function
def walk_of(x, STEP: Const, BESIDE: Const, COLS: Const):
    """(this block's group, its first token, the one after its last, its channels [COLS]). As many groups as there are share the tokens, and
    walk in whole steps along theirs and BESIDE tokens more; the last channels are in two pieces where COLS does not divide them, and come
    to the same in both."""
    pieces = ct.cdiv(x.shape[1], COLS)
    group, piece = ct.bid(0) // pieces, ct.bid(0) % pieces
    span = ct.cdiv(ct.cdiv(x.shape[0], ct.num_blocks(0) // pieces) + BESIDE, STEP) * STEP - BESIDE
    first = ct.minimum(piece * (COLS // VECTOR), x.shape[1] // VECTOR - COLS // VECTOR) * VECTOR
    return group, group * span, ct.minimum((group + 1) * span, x.shape[0]), first + ct.arange(COLS, dtype=ct.int32)


@ct.function
def before_walk(x, since, start, column):
    """x of the three tokens before a span, zero where they are not of its first token's document."""
    count = ct.gather(since, start, padding_value=0)
    x1, x2, x3 = row_of(x, start - 1, column), row_of(x, start - 2, column), row_of(x, start - 3, column)
    x1, x2, x3 = ct.where(count >= 1, x1, 0), ct.where(count >= 2, x2, 0), ct.where(count >= 3, x3, 0)
    return ct.astype(x1, ct.float32), ct.astype(x2, ct.float32), ct.astype(x3, ct.float32)


@ct.function
def forward_step(y, rows, counts, x1, x2, x3, w0, w1, w2, w3, shift, first, column, STEP: Const, MASKS: Const):
    for j in ct.static_iter(range(STEP)):
        if MASKS:
            same = counts[j] > 0  # else a document starts
            x1, x2, x3 = ct.where(same, x1, 0.0), ct.where(same, x2, 0.0), ct.where(same, x3, 0.0)
        x0 = ct.astype(rows[j], ct.float32)
        p = shift + w3 * x0 + w2 * x1 + w1 * x2 + w0 * x3
        put(y, first + j, column, p * sigmoid(p), first + j < y.shape[0], MASKS)
        x3, x2, x1 = x2, x1, x0
    return x1, x2, x3


@ct.kernel
def short_conv_forward(x, w, bias, since, y, STEP: Const, COLS: Const, BIAS: Const):
    """x, y: [tokens, channels]; w: [channels, 4]; bias: [channels], read with BIAS; since: [tokens] int32. Grid: groups of tokens * pieces
    of COLS channels."""
    _, start, end, column = walk_of(x, STEP, 0, COLS)
    w0, w1, w2, w3, shift = weights_of(w, bias, column, BIAS)
    x1, x2, x3 = before_walk(x, since, start, column)
    for i in range(ct.cdiv(end - start, STEP)):
        t = start + i * STEP
        rows, (counts, inside) = rows_of(x, t, column, STEP), counts_of(since, t, STEP)
        if inside:  # tokens past the last one have none before them
            x1, x2, x3 = forward_step(y, rows, counts, x1, x2, x3, w0, w1, w2, w3, shift, t, column, STEP, 0)
        else:
            x1, x2, x3 = forward_step(y, rows, counts, x1, x2, x3, w0, w1, w2, w3, shift, t, column, STEP, 1)


@ct.function
def backward_step(
    dx, rows, drows, counts, x1, x2, x3, dx1, dx2, dx3, sum0, sum1, sum2, sum3, total, w0, w1, w2, w3, shift, first, start, end, column,
    STEP: Const, BIAS: Const, MASKS: Const,
):  # fmt: skip
    for j in ct.static_iter(range(STEP)):
        t, count, x0 = first + j, counts[j], ct.astype(rows[j], ct.float32)
        if MASKS:
            x1, x2, x3 = ct.where(count > 0, x1, 0.0), ct.where(count > 0, x2, 0.0), ct.where(count > 0, x3, 0.0)
        p = shift + w3 * x0 + w2 * x1 + w1 * x2 + w0 * x3
        s = sigmoid(p)
        d = ct.astype(drows[j], ct.float32) * s * (1.0 + p * (1.0 - s))
        if MASKS:
            dx3, dx2 = ct.where(count >= 3, dx3 + w0 * d, dx3), ct.where(count >= 2, dx2 + w1 * d, dx2)
            dx1 = ct.where(count >= 1, dx1 + w2 * d, dx1)
        else:
            dx3, dx2, dx1 = dx3 + w0 * d, dx2 + w1 * d, dx1 + w2 * d
        put(dx, t - 3, column, dx3, (t - 3 >= start) & (t - 3 < end), MASKS)
        dx3, dx2, dx1 = dx2, dx1, w3 * d
        if MASKS:
            d = ct.where(t < end, d, 0.0)  # else another block's
        sum0, sum1, sum2, sum3 = sum0 + d * x3, sum1 + d * x2, sum2 + d * x1, sum3 + d * x0
        if BIAS:
            total = total + d
        x3, x2, x1 = x2, x1, x0
    return x1, x2, x3, dx1, dx2, dx3, sum0, sum1, sum2, sum3, total


@ct.kernel
def short_conv_backward(dy, x, w, bias, since, dx, partial, STEP: Const, COLS: Const, BIAS: Const):
    """dy, x, dx: [tokens, channels]; partial: [groups, 5, channels] fp32, the sums of d x[t - 3 + j] and of d over a group's tokens. The
    rest and the grid: as `short_conv_forward`."""
    group, start, end, column = walk_of(x, STEP, TAPS - 1, COLS)
    zero = ct.zeros((COLS,), dtype=ct.float32)
    w0, w1, w2, w3, shift = weights_of(w, bias, column, BIAS)
    x1, x2, x3 = before_walk(x, since, start, column)
    dx1, dx2, dx3 = zero, zero, zero  # what is known so far of the gradients of the three tokens before t
    sum0, sum1, sum2, sum3, total = zero, zero, zero, zero, zero
    for i in range(ct.cdiv(end - start + 3, STEP)):
        t = start + i * STEP
        rows, drows, (counts, inside) = rows_of(x, t, column, STEP), rows_of(dy, t, column, STEP), counts_of(since, t, STEP)
        if inside & (i > 0) & (t + STEP <= end):
            x1, x2, x3, dx1, dx2, dx3, sum0, sum1, sum2, sum3, total = backward_step(
                dx, rows, drows, counts, x1, x2, x3, dx1, dx2, dx3, sum0, sum1, sum2, sum3, total, w0, w1, w2, w3, shift, t, start, end,
                column, STEP, BIAS, 0,
            )  # fmt: skip
        else:
            x1, x2, x3, dx1, dx2, dx3, sum0, sum1, sum2, sum3, total = backward_step(
                dx, rows, drows, counts, x1, x2, x3, dx1, dx2, dx3, sum0, sum1, sum2, sum3, total, w0, w1, w2, w3, shift, t, start, end,
                column, STEP, BIAS, 1,
            )  # fmt: skip
    ct.scatter(partial, (group, 0, column), sum0, check_bounds=False)
    ct.scatter(partial, (group, 1, column), sum1, check_bounds=False)
    ct.scatter(partial, (group, 2, column), sum2, check_bounds=False)
    ct.scatter(partial, (group, 3, column), sum3, check_bounds=False)
    ct.scatter(partial, (group, 4, column), total, check_bounds=False)


# ---------------------------------------------------------------- what is prebuilt
COLS = 512
STEP = 4  # of 3 at least: a step without masks writes the three tokens before its own
LONG_STEP = 8  # of the backward pass where it spills nothing: 120 instead of 136 us (H200, 8192 tokens of 8192 channels)


def variants():
    for dtype in ("bfloat16", "float16", "float32"):
        rows = Array(dtype, (None, None), divisible=(1, VECTOR), at_least=(1, COLS))
        table, weights = Array("int32", (None,), aligned=False), Array(dtype, (None, TAPS), aligned=False)
        partial = Array("float32", (None, TAPS + 1, None), divisible=(1, 1, VECTOR))
        for biased in (0, 1):
            bias = Array(dtype, (None,), divisible=(VECTOR if biased else 1,))
            given: Params = {"x": rows, "w": weights, "bias": bias, "since": table}
            walk: Params = {"STEP": STEP, "COLS": COLS, "BIAS": biased}
            yield Variant(short_conv_forward, {**given, "y": rows, **walk}, hints={"occupancy": 8 - biased})
            made: Params = {"dx": rows, "partial": partial, **walk}
            if dtype == "bfloat16" and not biased:
                made["STEP"] = LONG_STEP
            yield Variant(short_conv_backward, {"dy": rows, **given, **made}, hints={"occupancy": 4 - biased})
