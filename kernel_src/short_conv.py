"""The short causal convolution of gated delta nets, of each channel alone, with SiLU behind it:

    p[t, c] = bias[c] + sum over j of w[c, j] x[t - 3 + j, c]          y = silu(p)

where tokens before the start of t's document count as zero. Backward, with s = sigmoid(p):

    d = dy s (1 + p (1 - s))        dx[t] = sum over j of w[j] d[t + 3 - j]        dw[j] = sum over t of d[t] x[t - 3 + j]

x is [tokens, channels], as a projection gives it. `since` says for each token how many tokens of its document come before it, at most 3. A
tile's four readings overlap, so the memory sees each number once and the L1 the rest. d is written before dx is made of it: making it again
for each of the four tokens that need it costs more exponentials than the memory's time.
"""

import cuda.tile as ct

from kernel_src.elements import block_from_last
from kernel_src.prebuild import Array, Params, Variant
from kernel_src.swiglu import sigmoid

Const = ct.Constant[int]
TAPS = 4


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


@ct.kernel
def short_conv_gradients(dy, x, w, bias, since, d, partial, ROWS: Const, COLS: Const, BIAS: Const):
    """dy, x, d: [tokens, channels]; partial: [groups, 5, channels] fp32, the sums of d x[t - 3 + j] and of d over a group's tokens. Grid:
    groups * channels / COLS."""
    pieces, groups = x.shape[1] // COLS, partial.shape[0]
    group, piece = ct.bid(0) // pieces, ct.bid(0) % pieces
    column = piece * COLS + ct.arange(COLS, dtype=ct.int32)[None, :]
    zero = ct.zeros((1, COLS), dtype=ct.float32)
    sum0, sum1, sum2, sum3, total = zero, zero, zero, zero, zero
    shift = zero
    if BIAS:
        shift = ct.astype(ct.gather(bias, column, check_bounds=False), ct.float32)
    for i in range(group, ct.cdiv(x.shape[0], ROWS), groups):
        t = i * ROWS + ct.arange(ROWS, dtype=ct.int32)[:, None]
        before = ct.gather(since, t, padding_value=0)
        x0, x1 = tap(x, t, before, column, 3), tap(x, t, before, column, 2)
        x2, x3 = tap(x, t, before, column, 1), tap(x, t, before, column, 0)
        p = shift + weight_of(w, column, 0) * x0 + weight_of(w, column, 1) * x1
        p = p + weight_of(w, column, 2) * x2 + weight_of(w, column, 3) * x3
        s = sigmoid(p)
        found = ct.astype(ct.gather(dy, (ct.minimum(t, x.shape[0] - 1), column), check_bounds=False), ct.float32)
        found = ct.where(t < x.shape[0], found * s * (1.0 + p * (1.0 - s)), 0.0)
        put(d, t, column, found)
        sum0, sum1 = sum0 + ct.sum(found * x0, 0)[None, :], sum1 + ct.sum(found * x1, 0)[None, :]
        sum2, sum3 = sum2 + ct.sum(found * x2, 0)[None, :], sum3 + ct.sum(found * x3, 0)[None, :]
        total = total + ct.sum(found, 0)[None, :]
    ct.scatter(partial, (group, 0, column), sum0, check_bounds=False)
    ct.scatter(partial, (group, 1, column), sum1, check_bounds=False)
    ct.scatter(partial, (group, 2, column), sum2, check_bounds=False)
    ct.scatter(partial, (group, 3, column), sum3, check_bounds=False)
    ct.scatter(partial, (group, 4, column), total, check_bounds=False)


@ct.function
def ahead(d, t, since, column, forward: Const):
    """d[t + forward], zero where that token is not of t's document."""
    last = d.shape[0] - 1
    later = ct.gather(since, ct.minimum(t + forward, last), check_bounds=False)
    value = ct.gather(d, (ct.minimum(t + forward, last), column), check_bounds=False)
    return ct.where((t + forward <= last) & (later >= forward), ct.astype(value, ct.float32), 0.0)


@ct.kernel
def short_conv_backward(d, w, since, dx, ROWS: Const, COLS: Const):
    """d: what `short_conv_gradients` wrote; dx: [tokens, channels]. Grid: tokens / ROWS * channels / COLS."""
    t, column = place(block_from_last(), d, ROWS, COLS)
    found = weight_of(w, column, 3) * ahead(d, t, since, column, 0) + weight_of(w, column, 2) * ahead(d, t, since, column, 1)
    found = found + weight_of(w, column, 1) * ahead(d, t, since, column, 2) + weight_of(w, column, 0) * ahead(d, t, since, column, 3)
    put(dx, t, column, found)


# ---------------------------------------------------------------- what is prebuilt
COLS = 256  # which the channels of every model of the kind are multiples of
TILE: Params = {"ROWS": 8, "COLS": COLS}
WALK: Params = {"ROWS": 4, "COLS": COLS}


def variants():
    for dtype in ("bfloat16", "float16", "float32"):
        rows, table = Array(dtype, (None, None), divisible=(1, COLS)), Array("int32", (None,), aligned=False)
        weights = Array(dtype, (None, TAPS), aligned=False, divisible=(COLS, 1))
        partial = Array("float32", (None, TAPS + 1, None), divisible=(1, 1, COLS))
        for biased in (0, 1):
            bias = Array(dtype, (None,), aligned=False, divisible=(COLS if biased else 1,))
            given: Params = {"x": rows, "w": weights, "bias": bias, "since": table}
            yield Variant(short_conv_forward, {**given, "y": rows, **TILE, "BIAS": biased})
            yield Variant(short_conv_gradients, {"dy": rows, **given, "d": rows, "partial": partial, **WALK, "BIAS": biased})
        yield Variant(short_conv_backward, {"d": rows, "w": weights, "since": table, "dx": rows, **TILE})
