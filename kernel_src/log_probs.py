"""Log-probability of a label, entropy and more of a row of logits, and the gradient of these over the logits.

With x the logits of one token, y its label, c the softcap, s the scale and T the temperature:

    z = c * tanh(s * x / c) / T      (s * x / T without a softcap)
    lse = log(sum(exp(z))),   p = exp(z - lse)
    log_prob = z[y] - lse,    entropy = lse - sum(p * z),    log_sum_sq_probs = log(sum(p^2)),    mean_logits = sum(z) / V

Whatever gradients g, u and w arrive of log_prob, entropy and mean_logits, they are one number a token:

    dx[j] = t[j] * (hit * [j == y] + p[j] * (alpha + beta * log p[j]) + flat),    t = s / T * (1 - tanh^2)
    hit = g,   alpha = -g - u * entropy,   beta = -u,   flat = w / V

As in cross_entropy.py three straight-line kernels: statistics of pieces of a row, one block a row that joins them, and the gradient.
All sums of a piece are relative to its own maximum, so entropies of large logits lose no digits. Exponentials are taken in base 2, of
differences in base e: a large number times log2(e) is rounded, or infinite.

A label that is `ignore_index` or lies outside the vocabulary makes every result of its row 0.
"""

import cuda.tile as ct

from kernel_src.cross_entropy import LN2, LOG2E, MINUS_INFINITY, Const, last_first, piece, shift_of
from kernel_src.prebuild import FLOAT, FLOATS, INT, Array, Variant

# What is kept of a piece: `partial[row, k, part]`. The maximum of z, and with e = exp(z - maximum): the sums of e, e * log2(e) and e^2; the
# sum of z; and the first column that has the maximum.
SUMS = 6
NOWHERE = 1e9  # a column behind every vocabulary


@ct.function
def read_scores(logits, row, cols, scale, softcap, after):
    """(z, tanh of the softcap or 0) of a piece of a row; z is -inf past its end."""
    x = ct.astype(ct.gather(logits, (row, cols), check_bounds=True, padding_value=MINUS_INFINITY), ct.float32) * scale
    ratio = ct.zeros(cols.shape, dtype=ct.float32)
    z = x
    if softcap > 0.0:
        ratio = ct.tanh(x / softcap)
        z = ct.where(cols < logits.shape[1], ratio * softcap, MINUS_INFINITY)
    return z * after, ratio


@ct.function
def weighted(e, x):
    """e * x, and 0 where e is: x may be infinite there."""
    return ct.where(e == 0.0, 0.0, e * x)


@ct.kernel
def log_probs_statistics(logits, partial, scale: float, softcap: float, after: float, more: int, TILE: Const):
    """logits: [tokens, vocabulary]; partial: [tokens, SUMS, pieces] fp32, pieces = ceil(vocabulary / TILE); of which `more` = 0 writes the
    first two. softcap: 0 for none; after: what z is multiplied by after it, 1 / T."""
    row, part = piece(ct.bid(0), logits, TILE)
    cols = part * TILE + ct.arange(TILE, dtype=ct.int32)
    z, _ = read_scores(logits, row, cols, scale, softcap, after)
    m = ct.max(z, 0)
    distance = (z - shift_of(m)) * LOG2E
    e = ct.exp2(distance, flush_to_zero=True)
    ct.scatter(partial, (row, 0, part), m, check_bounds=False)
    ct.scatter(partial, (row, 1, part), ct.sum(e, 0), check_bounds=False)
    if more > 0:
        inside = cols < logits.shape[1]
        ct.scatter(partial, (row, 2, part), ct.sum(weighted(e, distance), 0), check_bounds=False)
        ct.scatter(partial, (row, 3, part), ct.sum(e * e, 0), check_bounds=False)
        ct.scatter(partial, (row, 4, part), ct.sum(ct.where(inside, z, 0.0), 0), check_bounds=False)
        first = ct.min(ct.where(inside & (z == m), ct.astype(cols, ct.float32), NOWHERE), 0)
        ct.scatter(partial, (row, 5, part), first, check_bounds=False)


@ct.function
def read_partials(partial, row, k, parts, padding):
    return ct.gather(partial, (row, k, parts), check_bounds=True, padding_value=padding)


@ct.kernel
def log_probs_combine(
    logits, target, partial, lse, log_probs, entropy, squares, mean, top1, scale: float, softcap: float, after: float, ignore_index: int,
    more: int, PARTS: Const
):  # fmt: skip
    """lse: [tokens] fp32; log_probs, and with `more` entropy, squares (log_sum_sq_probs), mean and top1 (1.0 where the label is the
    first of the largest): [tokens] fp32. One token a block."""
    row = ct.bid(0)
    m = ct.full((), MINUS_INFINITY, dtype=ct.float32)
    s = ct.zeros((), dtype=ct.float32)
    dot = ct.zeros((), dtype=ct.float32)
    sq = ct.zeros((), dtype=ct.float32)
    total = ct.zeros((), dtype=ct.float32)
    best = ct.full((), NOWHERE, dtype=ct.float32)
    for i in range(ct.cdiv(partial.shape[2], PARTS)):
        parts = i * PARTS + ct.arange(PARTS, dtype=ct.int32)
        pm = read_partials(partial, row, 0, parts, MINUS_INFINITY)
        ps = read_partials(partial, row, 1, parts, 0)
        new = ct.maximum(m, ct.max(pm, 0))
        shift = shift_of(new)
        old_distance, distance = (m - shift) * LOG2E, (pm - shift) * LOG2E
        old, ours = ct.exp2(old_distance), ct.exp2(distance)
        if more > 0:
            # The sums of e * log2(e) move to the new maximum with their pieces.
            dot = old * dot + weighted(old * s, old_distance)
            dot = dot + ct.sum(ours * read_partials(partial, row, 2, parts, 0) + weighted(ours * ps, distance), 0)
            sq = old * old * sq + ct.sum(ours * ours * read_partials(partial, row, 3, parts, 0), 0)
            total = total + ct.sum(read_partials(partial, row, 4, parts, 0), 0)
            first = ct.min(ct.where(pm == new, read_partials(partial, row, 5, parts, NOWHERE), NOWHERE), 0)
            best = ct.where(new > m, first, ct.minimum(best, first))
        s = old * s + ct.sum(ours * ps, 0)
        m = new
    bits = ct.log2(s)  # lse, beyond the maximum
    t = ct.gather(target, row, check_bounds=False)
    counted = (t != ignore_index) & (t >= 0) & (t < logits.shape[1])
    label = ct.astype(ct.where(counted, t, 0), ct.int32)
    z = ct.astype(ct.gather(logits, (row, label), check_bounds=False), ct.float32) * scale
    if softcap > 0.0:
        z = softcap * ct.tanh(z / softcap)
    ct.scatter(lse, row, m + bits * LN2, check_bounds=False)
    # From the maximum, like the sum: the difference of two large numbers would have their rounding error.
    ct.scatter(log_probs, row, ct.where(counted, z * after - m - bits * LN2, 0.0), check_bounds=False)
    if more > 0:
        ct.scatter(entropy, row, ct.where(counted, (bits - dot / s) * LN2, 0.0), check_bounds=False)
        ct.scatter(squares, row, ct.where(counted, (ct.log2(sq) - 2.0 * bits) * LN2, 0.0), check_bounds=False)
        ct.scatter(mean, row, ct.where(counted, total / ct.astype(logits.shape[1], ct.float32), 0.0), check_bounds=False)
        ct.scatter(top1, row, ct.where(counted & (best == ct.astype(label, ct.float32)), 1.0, 0.0), check_bounds=False)


@ct.function
def row_number(coefficients, row, k):
    return ct.gather(coefficients, (row, k), check_bounds=False)


@ct.kernel
def log_probs_gradient(
    logits, other, target, lse, coefficients, scale: float, softcap: float, after: float, both: int, TILE: Const
):
    """Writes the gradient over logits. coefficients: [tokens, 6] fp32: hit, alpha, beta, flat, and the alpha and beta of a second gradient,
    without hit and flat, that goes to `other`, like logits, where `both` is not 0. A row whose first four are 0 has the gradient 0 in
    both, whatever its logits are."""
    row, part = last_first(logits, TILE)
    cols = part * TILE + ct.arange(TILE, dtype=ct.int32)
    hit, alpha = row_number(coefficients, row, 0), row_number(coefficients, row, 1)
    beta, flat = row_number(coefficients, row, 2), row_number(coefficients, row, 3)
    if (hit == 0.0) & (alpha == 0.0) & (beta == 0.0) & (flat == 0.0):
        nothing = ct.zeros((TILE,), dtype=logits.dtype)
        ct.scatter(logits, (row, cols), nothing, check_bounds=True)
        if both > 0:
            ct.scatter(other, (row, cols), nothing, check_bounds=True)
    else:
        z, ratio = read_scores(logits, row, cols, scale, softcap, after)
        log_p = z - ct.gather(lse, row, check_bounds=False)
        p = ct.exp2(log_p * LOG2E, flush_to_zero=True)
        slope = (1.0 - ratio * ratio) * (scale * after)
        log_p = ct.where(p == 0.0, 0.0, log_p)
        target_here = ct.astype(cols, ct.int64) == ct.gather(target, row, check_bounds=False)
        dx = (p * (alpha + beta * log_p) + flat + ct.where(target_here, hit, 0.0)) * slope
        ct.scatter(logits, (row, cols), ct.astype(dx, logits.dtype), check_bounds=True)
        if both > 0:
            dx = p * (row_number(coefficients, row, 4) + row_number(coefficients, row, 5) * log_p) * slope
            ct.scatter(other, (row, cols), ct.astype(dx, other.dtype), check_bounds=True)


def variants():
    vector, matrix = (Array("float32", (None,) * dims, aligned=False) for dims in (1, 2))
    partial, target = Array("float32", (None, None, None), aligned=False), Array("int64", (None,), aligned=False)
    numbers = {"scale": FLOAT, "softcap": FLOAT, "after": FLOAT}
    results = dict.fromkeys(("lse", "log_probs", "entropy", "squares", "mean", "top1"), vector)
    for dtype in FLOATS:
        for logits in (Array(dtype, (None, None), divisible=(1, 16)), Array(dtype, (None, None), aligned=False)):
            yield Variant(log_probs_statistics, {"logits": logits, "partial": partial, **numbers, "more": INT, "TILE": 4096})
            yield Variant(
                log_probs_gradient,
                {"logits": logits, "other": logits, "target": target, "lse": vector, "coefficients": matrix, **numbers, "both": INT,
                 "TILE": 2048},
            )
        yield Variant(
            log_probs_combine,
            {"logits": Array(dtype, (None, None), aligned=False), "target": target, "partial": partial, **results, **numbers,
             "ignore_index": INT, "more": INT, "PARTS": 64},
        )
