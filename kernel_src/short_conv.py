"""The short causal convolution of gated delta nets, of each channel alone, with SiLU behind it:

    p[t, c] = bias[c] + sum over j of w[c, j] x[t - 3 + j, c]          y = silu(p)

where tokens before the start of t's document count as zero. Backward, with s = sigmoid(p):

    d = dy s (1 + p (1 - s))        dx[t] = sum over j of w[j] d[t + 3 - j]        dw[j] = sum over t of d[t] x[t - 3 + j]

x is [tokens, channels], as a projection gives it. `since` says for each token how many tokens of its document come before it, at most 3. In
the forward pass a tile's four readings overlap, so the memory sees each number once and the L1 the rest.

The backward pass walks along spans of tokens, several side by side in one tile. A step reads one token of each: the three tokens before it
are still there, and so is what is known of their dx, which is whole when d of the third token after it is. So d is made once and never
written, and memory sees dy, x and dx alone, and the three tokens on each side of a span twice.
"""

import cuda.tile as ct

from kernel_src.prebuild import INT, Array, Params, Variant
from kernel_src.swiglu import sigmoid

Const = ct.Constant[int]
TAPS = 4
LATENCY = 3  # how many steps ahead a walk asks for its rows


@ct.function
def tap(x, t, since, column, back: Const):
    """x[t - back], zero where that is not of t's document. t: [ROWS, 1]; column: [1, COLS]."""
    value = ct.gather(x, (ct.maximum(ct.minimum(t, x.shape[0] - 1) - back, 0), column), check_bounds=False)
    return ct.where(since >= back, ct.astype(value, ct.float32), 0.0)


@ct.function
def weight_of(w, column, j: Const):
    return ct.astype(ct.gather(w, (column, j), check_bounds=False), ct.float32)


@ct.function
def preactivation(x, w, t, since, column):
    p = weight_of(w, column, 3) * tap(x, t, since, column, 0)
    p = p + weight_of(w, column, 2) * tap(x, t, since, column, 1)
    p = p + weight_of(w, column, 1) * tap(x, t, since, column, 2)
    return p + weight_of(w, column, 0) * tap(x, t, since, column, 3)


@ct.function
def put(array, t, column, tile):
    """Writes rows of tokens; those past the last one are skipped."""
    ct.scatter(array, (t, column), ct.astype(tile, array.dtype), mask=t < array.shape[0], check_bounds=False)


@ct.function
def place(block, x, ROWS: Const, COLS: Const):
    """(tokens [ROWS, 1], which may reach past the last one, channels [1, COLS]) of a block."""
    pieces = x.shape[1] // COLS
    rows = block // pieces * ROWS + ct.arange(ROWS, dtype=ct.int32)[:, None]
    return rows, block % pieces * COLS + ct.arange(COLS, dtype=ct.int32)[None, :]


@ct.kernel
def short_conv_forward(x, w, bias, since, y, ROWS: Const, COLS: Const, BIAS: Const):
    """x, y: [tokens, channels]; w: [channels, 4]; bias: [channels], read with BIAS; since: [tokens] int32. Grid: tokens / ROWS * channels /
    COLS."""
    t, column = place(ct.bid(0), x, ROWS, COLS)
    p = preactivation(x, w, t, ct.gather(since, t, padding_value=0), column)
    if BIAS:
        p = p + ct.astype(ct.gather(bias, column, check_bounds=False), ct.float32)
    put(y, t, column, p * sigmoid(p))


@ct.function
def row_of(array, t, column):
    """[ROWS, COLS]: numbers of tokens [ROWS, 1], the first or the last one's past an end."""
    at = ct.maximum(ct.minimum(t, array.shape[0] - 1), 0)
    return ct.astype(ct.gather(array, (at, column), check_bounds=False, latency=LATENCY), ct.float32)


@ct.kernel
def short_conv_backward(dy, x, w, bias, since, dx, partial, span: int, ROWS: Const, COLS: Const, BIAS: Const):
    """dy, x, dx: [tokens, channels]; partial: [groups, 5, channels] fp32, the sums of d x[t - 3 + j] and of d over a group's tokens, ROWS
    spans of `span` tokens. Grid: groups * channels / COLS."""
    pieces = x.shape[1] // COLS
    group, column = ct.bid(0) // pieces, ct.bid(0) % pieces * COLS + ct.arange(COLS, dtype=ct.int32)[None, :]
    start = (group * ROWS + ct.arange(ROWS, dtype=ct.int32)[:, None]) * span
    w0, w1, w2, w3 = weight_of(w, column, 0), weight_of(w, column, 1), weight_of(w, column, 2), weight_of(w, column, 3)
    shift = ct.zeros((1, COLS), dtype=ct.float32)
    if BIAS:
        shift = ct.astype(ct.gather(bias, column, check_bounds=False), ct.float32)
    zero = ct.zeros((ROWS, COLS), dtype=ct.float32)
    x1, x2, x3 = row_of(x, start - 1, column), row_of(x, start - 2, column), row_of(x, start - 3, column)
    dx1, dx2, dx3 = zero, zero, zero  # what is known so far of the gradients of the three tokens before t
    sum0, sum1, sum2, sum3, total = zero, zero, zero, zero, zero
    for i in range(span + 3):
        t = start + i
        before = ct.gather(since, t, padding_value=0)
        x0 = row_of(x, t, column)
        y1, y2, y3 = ct.where(before >= 1, x1, 0.0), ct.where(before >= 2, x2, 0.0), ct.where(before >= 3, x3, 0.0)
        p = shift + w3 * x0 + w2 * y1 + w1 * y2 + w0 * y3
        s = sigmoid(p)
        d = ct.where(t < x.shape[0], row_of(dy, t, column) * s * (1.0 + p * (1.0 - s)), 0.0)
        found = dx3 + ct.where(before >= 3, w0 * d, 0.0)
        ct.scatter(dx, (t - 3, column), ct.astype(found, dx.dtype), mask=(i >= 3) & (t - 3 < x.shape[0]), check_bounds=False)
        dx3, dx2, dx1 = dx2 + ct.where(before >= 2, w1 * d, 0.0), dx1 + ct.where(before >= 1, w2 * d, 0.0), w3 * d
        d = ct.where(i < span, d, 0.0)  # the tokens behind the span are another's
        sum0, sum1, sum2, sum3, total = sum0 + d * y3, sum1 + d * y2, sum2 + d * y1, sum3 + d * x0, total + d
        x3, x2, x1 = x2, x1, x0
    ct.scatter(partial, (group, 0, column), ct.sum(sum0, 0)[None, :], check_bounds=False)
    ct.scatter(partial, (group, 1, column), ct.sum(sum1, 0)[None, :], check_bounds=False)
    ct.scatter(partial, (group, 2, column), ct.sum(sum2, 0)[None, :], check_bounds=False)
    ct.scatter(partial, (group, 3, column), ct.sum(sum3, 0)[None, :], check_bounds=False)
    ct.scatter(partial, (group, 4, column), ct.sum(total, 0)[None, :], check_bounds=False)


# ---------------------------------------------------------------- what is prebuilt
COLS = 256  # which the channels of every model of the kind are multiples of
TILE: Params = {"ROWS": 8, "COLS": COLS}
WALK: Params = {"ROWS": 2, "COLS": COLS}


def variants():
    for dtype in ("bfloat16", "float16", "float32"):
        rows, table = Array(dtype, (None, None), divisible=(1, COLS)), Array("int32", (None,), aligned=False)
        weights = Array(dtype, (None, TAPS), aligned=False, divisible=(COLS, 1))
        partial = Array("float32", (None, TAPS + 1, None), divisible=(1, 1, COLS))
        for biased in (0, 1):
            bias = Array(dtype, (None,), aligned=False, divisible=(COLS if biased else 1,))
            given: Params = {"x": rows, "w": weights, "bias": bias, "since": table}
            yield Variant(short_conv_forward, {**given, "y": rows, **TILE, "BIAS": biased})
            made: Params = {"dx": rows, "partial": partial, "span": INT}
            yield Variant(short_conv_backward, {"dy": rows, **given, **made, **WALK, "BIAS": biased}, hints={"occupancy": 4})
