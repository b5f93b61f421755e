"""Log-probability of a label, entropy and more of a row of logits, and the gradient of these over the logits.

With x the logits of one token, y its label, c the softcap, s the scale and T the temperature:

    z = c * tanh(s * x / c) / T      (s * x / T without a softcap)
    lse = log(sum(exp(z))),   p = exp(z - lse)
    log_prob = z[y] - lse,    entropy = lse - sum(p * z),    log_sum_sq_probs = log(sum(p^2)),    mean_logits = sum(z) / V

Whatever gradients g, u and w arrive of log_prob, entropy and mean_logits, they are one number a token:

    dx[j] = t[j] * (hit * [j == y] + p[j] * (alpha + beta * log p[j]) + flat),    t = s / T * (1 - tanh^2)
    hit = g,   alpha = -g - u * entropy,   beta = -u,   flat = w / V

As in cross_entropy.py three straight-line kernels: statistics of pieces of a row, one block a row that joins them, and the gradient. The
first and the last have three forms, chosen by constants: log_probs alone, more without a softcap, and everything with one. Measured on an
H200 for [1024, 151936] bf16, where a copy takes 150 us: prototypes of the gradient took 151 us alone and 187 with the entropy's, where one
form for everything took 262.

A score is the last factor `after` times a *value*: x, with after = s / T, or c * tanh(s * x / c), with after = 1 / T. Maxima are kept of
values, because the compiler joins a product and a difference to one instruction: (value - maximum) * after is 0 at the maximum, where
after * value - rounded score would be the rounding error of a large score. All sums of a piece are relative to its own maximum, so
entropies of large logits lose no digits, and lse goes to the gradient in two parts. Exponentials are taken in base 2.

A label that is `ignore_index` or lies outside the vocabulary makes every result of its row 0.
"""

import cuda.tile as ct

from kernel_src.cross_entropy import (
    LN2,
    LOG2E,
    MINUS_INFINITY,
    Const,
    exponents,
    last_first,
    piece,
    read_logits,
    read_lse,
    shift_of,
    write_lse,
)
from kernel_src.dyt import tanh
from kernel_src.prebuild import FLOAT, FLOATS, INT, Array, PerArchitecture, Variant

# What is kept of a piece: `partial[row, k, part]`. The logit of the largest score, negated where scores fall with the logits; and with
# e = exp(score - largest score): the sums of e, e * log2(e) and e^2; the sum of the values / 2V; the first column of the largest.
SUMS = 6
LARGEST = 3.4028234663852886e38  # of fp32
NOWHERE = 2**30  # a column behind every vocabulary
LEAST = -1000.0  # stands in for the logarithm of 0
# The bits of `more`: what is computed beside log_probs.
ENTROPY, SQUARES, MEAN, TOP1 = 1, 2, 4, 8


@ct.function
def capped(x, scale, softcap):
    """(softcap * tanh(scale * x / softcap), the derivative of that tanh)."""
    t, slope = tanh(x * (scale / softcap), False)
    return t * softcap, slope


@ct.function
def sign_of(number):
    return ct.where(number < 0.0, -1.0, 1.0)


@ct.function
def times_bits(e, bits):
    """e * bits, bits = log2(e), and 0 where e is: -inf is no factor there."""
    return e * ct.maximum(bits, LEAST)


@ct.kernel
def log_probs_statistics(
    logits, partial, scale: float, softcap: float, after: float, more: int, MORE: Const, CAPPED: Const, TILE: Const, STEP: Const
):  # fmt: skip
    """logits: [tokens, vocabulary]; partial: [tokens, SUMS, pieces] fp32, pieces = ceil(vocabulary / TILE), of which the first two are
    always written. scale, softcap, after: see above; without CAPPED scale is 1 and softcap is ignored. more: ignored without MORE. A block
    keeps TILE logits as they lie in memory, and takes STEP at a time: sums over the steps are one instruction a number."""
    row, part = piece(ct.bid(0), logits, TILE)
    falling = scale * after < 0.0
    padding = ct.astype(ct.where(falling, -MINUS_INFINITY, MINUS_INFINITY), logits.dtype)
    steps: tuple = ()
    for i in ct.static_iter(range(TILE // STEP)):
        cols = part * TILE + i * STEP + ct.arange(STEP, dtype=ct.int32)
        steps += ((cols, ct.gather(logits, (row, cols), check_bounds=True, padding_value=padding)),)
    largest = steps[0][1]
    if falling:
        for i in ct.static_iter(range(1, TILE // STEP)):
            largest = ct.minimum(largest, steps[i][1])
        m = ct.astype(ct.min(largest, 0), ct.float32)
    else:
        for i in ct.static_iter(range(1, TILE // STEP)):
            largest = ct.maximum(largest, steps[i][1])
        m = ct.astype(ct.max(largest, 0), ct.float32)
    sign = sign_of(scale * after)
    ct.scatter(partial, (row, 0, part), m * sign, check_bounds=False)
    shift = shift_of(m * sign) * sign
    if CAPPED:
        shift, _ = capped(m, scale, softcap)
    nothing = ct.zeros((STEP,), dtype=ct.float32)
    total, dot, squares, mean = nothing, nothing, nothing, nothing
    first = ct.full((STEP,), NOWHERE, dtype=ct.int32)
    share = 0.5 / ct.astype(logits.shape[1], ct.float32)  # of each value: their sum may be too large for fp32, and rounded their mean
    for i in ct.static_iter(range(TILE // STEP)):
        cols, x = steps[i]
        x = ct.astype(x, ct.float32)
        inside = cols < logits.shape[1]
        values = x
        if CAPPED:
            values, _ = capped(x, scale, softcap)
            values = ct.where(inside, values, MINUS_INFINITY)
        bits = exponents(values, shift, 0.0, after)
        e = ct.exp2(bits, flush_to_zero=True)
        total = total + e
        if MORE:
            if (more & ENTROPY) != 0:
                dot = dot + times_bits(e, bits)
            if (more & SQUARES) != 0:
                squares = squares + e * e
            if (more & MEAN) != 0:
                mean = mean + ct.where(inside, values * share, 0.0)
            if (more & TOP1) != 0:
                largest_here = x == m
                if CAPPED:
                    largest_here = largest_here | (values >= shift)  # other logits may have the same score
                first = ct.minimum(first, ct.where(largest_here, cols, NOWHERE))
    ct.scatter(partial, (row, 1, part), ct.sum(total, 0), check_bounds=False)
    if MORE:
        if (more & ENTROPY) != 0:
            ct.scatter(partial, (row, 2, part), ct.sum(dot, 0), check_bounds=False)
        if (more & SQUARES) != 0:
            ct.scatter(partial, (row, 3, part), ct.sum(squares, 0), check_bounds=False)
        if (more & MEAN) != 0:
            ct.scatter(partial, (row, 4, part), ct.sum(mean, 0), check_bounds=False)
        if (more & TOP1) != 0:
            ct.scatter(partial, (row, 5, part), ct.astype(ct.min(first, 0), ct.float32), check_bounds=False)


@ct.function
def read_partials(partial, row, k, parts, padding):
    return ct.gather(partial, (row, k, parts), check_bounds=True, padding_value=padding)


@ct.function
def rising_values(x, scale, softcap):
    """The values of logits of which the largest scores fall, negated, or rise, as they are."""
    if softcap > 0.0:
        x, _ = capped(x, ct.abs(scale), softcap)
    return x


@ct.kernel
def log_probs_combine(
    logits, target, partial, lse, log_probs, entropy, squares, mean, top1, scale: float, softcap: float, after: float, ignore_index: int,
    more: int, PARTS: Const
):  # fmt: skip
    """lse: [tokens, 2] fp32, the value of the largest score, and log(sum(exp(score - largest))); log_probs, and what `more` asks for of
    entropy, squares (log_sum_sq_probs), mean and top1 (1.0 where the label is the first of the largest): [tokens] fp32. softcap: 0 for
    none. One token a block."""
    row = ct.bid(0)
    factor = ct.abs(after) * LOG2E
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
        old_top, top, tops = rising_values(m, scale, softcap), rising_values(new, scale, softcap), rising_values(pm, scale, softcap)
        old_bits, bits = (old_top - shift_of(top)) * factor, (tops - shift_of(top)) * factor
        old, ours = ct.exp2(old_bits), ct.exp2(bits)
        if (more & ENTROPY) != 0:  # the sums of e * log2(e) move to the new maximum with their pieces
            dot = old * dot + times_bits(old, old_bits) * s
            dot = dot + ct.sum(ours * read_partials(partial, row, 2, parts, 0) + times_bits(ours, bits) * ps, 0)
        if (more & SQUARES) != 0:
            sq = old * old * sq + ct.sum(ours * ours * read_partials(partial, row, 3, parts, 0), 0)
        if (more & MEAN) != 0:
            total = total + ct.sum(read_partials(partial, row, 4, parts, 0), 0)
        if (more & TOP1) != 0:
            first = ct.min(ct.where((pm == new) | (tops >= top), read_partials(partial, row, 5, parts, NOWHERE), NOWHERE), 0)
            best = ct.where(top > old_top, first, ct.minimum(best, first))
        s = old * s + ct.sum(ours * ps, 0)
        m = new
    bits_of_sum = ct.log2(s)
    t = ct.gather(target, row, check_bounds=False)
    counted = (t != ignore_index) & (t >= 0) & (t < logits.shape[1])
    label = ct.astype(ct.where(counted, t, 0), ct.int32)
    value, top = ct.astype(ct.gather(logits, (row, label), check_bounds=False), ct.float32), m * sign_of(scale * after)
    if softcap > 0.0:
        value, _ = capped(value, scale, softcap)
        top, _ = capped(top, scale, softcap)
    write_lse(lse, row, top, bits_of_sum * LN2)
    ct.scatter(log_probs, row, ct.where(counted, (value - top) * after - bits_of_sum * LN2, 0.0), check_bounds=False)
    if (more & ENTROPY) != 0:
        ct.scatter(entropy, row, ct.where(counted, (bits_of_sum - dot / s) * LN2, 0.0), check_bounds=False)
    if (more & SQUARES) != 0:
        ct.scatter(squares, row, ct.where(counted, (ct.log2(sq) - 2.0 * bits_of_sum) * LN2, 0.0), check_bounds=False)
    if (more & MEAN) != 0:
        whole = ct.where(ct.abs(total) < LARGEST, ct.minimum(ct.maximum(2.0 * total, -LARGEST), LARGEST), total)  # an infinite one stays
        ct.scatter(mean, row, ct.where(counted, whole * after, 0.0), check_bounds=False)
    if (more & TOP1) != 0:
        ct.scatter(top1, row, ct.where(counted & (best == ct.astype(label, ct.float32)), 1.0, 0.0), check_bounds=False)


@ct.function
def row_number(coefficients, row, k):
    return ct.gather(coefficients, (row, k), check_bounds=False)


@ct.kernel
def log_probs_gradient(
    logits, other, target, lse, coefficients, scale: float, softcap: float, after: float, both: int, MORE: Const, CAPPED: Const, TILE: Const
):
    """Writes the gradient over logits. coefficients: [tokens, 6] fp32: hit, alpha, and with MORE beta, flat, and the alpha and beta of a
    second gradient, without hit and flat, that goes to `other`, like logits, where `both` is not 0. A row whose first four (two) are 0 has
    the gradient 0 in both, whatever its logits are."""
    row, part = last_first(logits, TILE)
    lanes = ct.arange(TILE, dtype=ct.int32)
    cols = part * TILE + lanes
    hit, alpha = row_number(coefficients, row, 0), row_number(coefficients, row, 1)
    silent = (hit == 0.0) & (alpha == 0.0)
    if MORE:
        beta, flat = row_number(coefficients, row, 2), row_number(coefficients, row, 3)
        silent = silent & (beta == 0.0) & (flat == 0.0)
    if silent:
        nothing = ct.zeros((TILE,), dtype=logits.dtype)
        ct.scatter(logits, (row, cols), nothing, check_bounds=True)
        if MORE:
            if both > 0:
                ct.scatter(other, (row, cols), nothing, check_bounds=True)
    else:
        values, factor = read_logits(logits, row, cols), after
        if CAPPED:
            values, slope = capped(values, scale, softcap)
            factor = scale * after
        top, log_sum = read_lse(lse, row)
        bits = (values - top) * (after * LOG2E) - log_sum * LOG2E  # reading and writing bound this kernel, not instructions
        p = ct.exp2(bits, flush_to_zero=True)
        dx = p * (alpha * factor)
        if MORE:
            dx = dx + times_bits(p, bits) * (beta * factor * LN2) + flat * factor
        # One block of a row has the target, and it alone looks for it.
        lane = ct.astype(ct.gather(target, row, check_bounds=False), ct.int32) - part * TILE
        if (lane >= 0) & (lane < TILE):
            dx = ct.where(lanes == lane, dx + hit * factor, dx)
        if CAPPED:
            dx = dx * slope
        ct.scatter(logits, (row, cols), ct.astype(dx, logits.dtype), check_bounds=True)
        if MORE:
            if both > 0:
                dx = p * (row_number(coefficients, row, 4) * factor)
                dx = dx + times_bits(p, bits) * (row_number(coefficients, row, 5) * factor * LN2)
                if CAPPED:
                    dx = dx * slope
                ct.scatter(other, (row, cols), ct.astype(dx, other.dtype), check_bounds=True)


def variants():
    vector, matrix = (Array("float32", (None,) * dims, aligned=False) for dims in (1, 2))
    partial, target = Array("float32", (None, None, None), aligned=False), Array("int64", (None,), aligned=False)
    numbers = {"scale": FLOAT, "softcap": FLOAT, "after": FLOAT}
    results = {"lse": matrix, **dict.fromkeys(("log_probs", "entropy", "squares", "mean", "top1"), vector)}
    for dtype in FLOATS:
        for logits in (Array(dtype, (None, None), divisible=(1, 16)), Array(dtype, (None, None), aligned=False)):
            # As many blocks an SM as nothing spills with.
            tight = logits.aligned and dtype != "float32"
            blocks = PerArchitecture(6, "sm_90", 7), PerArchitecture(4, "sm_90", 6)
            sums = PerArchitecture(4, "sm_90", 5), 5
            # TILE and STEP of the statistics: 1024 rows of 151936 bf16 numbers took an H200 76 us alone and 130 with the entropy (144 with
            # 4096 and 1024), where a copy takes 149.
            for more, is_capped, tile, step in ((0, 0, 8192, 1024), (1, 0, 8192, 512), (1, 1, 4096, 1024)):
                form = {"MORE": more, "CAPPED": is_capped}
                yield Variant(
                    log_probs_statistics,
                    {"logits": logits, "partial": partial, **numbers, "more": INT, **form, "TILE": tile, "STEP": step},
                    hints={"occupancy": sums[is_capped]} if tight and more else {},
                )
                yield Variant(
                    log_probs_gradient,
                    {"logits": logits, "other": logits, "target": target, "lse": matrix, "coefficients": matrix, **numbers, "both": INT,
                     **form, "TILE": 2048},
                    hints={"occupancy": blocks[is_capped]} if tight and more else {},
                )
        yield Variant(
            log_probs_combine,
            {"logits": Array(dtype, (None, None), aligned=False), "target": target, "partial": partial, **results, **numbers,
             "ignore_index": INT, "more": INT, "PARTS": 64},
        )
