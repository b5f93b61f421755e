"""The generalised Jensen-Shannon divergence of a student's and a teacher's logits, which are there in float32, and its gradient over the
student's.

With p the student's distribution, q the teacher's, m = (1 - beta) p + beta q, and scores as in log_probs.py, per token:

    beta = 0:  D = sum q (log q - log p),    dz = p - q
    beta = 1:  D = sum p (log p - log q),    dz = p (log p - log q - D)
    between:   D = beta sum q (log q - log m) + (1 - beta) K,   K = sum p (log p - log m),   dz = (1 - beta) p (log p - log m - K)

and dx = dz * g * t, t the slope of the scores. The statistics of both rows are those of log_probs.py. Logarithms are in base 2 inside.
"""

import cuda.tile as ct

from kernel_src.cross_entropy import LN2, LOG2E, Const, last_first, piece, read_logits, read_lse
from kernel_src.log_probs import LEAST, capped
from kernel_src.prebuild import FLOAT, Array, Variant


@ct.function
def finite(bits):
    """At least LEAST; a NaN stays one."""
    return ct.where(bits < LEAST, LEAST, bits)


@ct.function
def log_p(logits, lse, row, cols, scale, softcap, after):
    """The base-2 logarithms of probabilities, these, and the slope of the scores; past a row's end LEAST and 0."""
    values = read_logits(logits, row, cols)
    slope = ct.full(cols.shape, 1.0, dtype=ct.float32)
    if softcap > 0.0:
        values, slope = capped(values, scale, softcap)
    top, log_sum = read_lse(lse, row)
    bits = finite((values - top) * (after * LOG2E) - log_sum * LOG2E)
    bits = ct.where(cols < logits.shape[1], bits, LEAST)
    return bits, ct.exp2(bits, flush_to_zero=True), slope * (scale * after)


@ct.function
def log_mixture(p, q, beta):
    return finite(ct.log2((1.0 - beta) * p + beta * q))


@ct.kernel
def head_divergence_sums(
    x, y, lse, teacher_lse, loss, own, scale: float, softcap: float, after: float, teacher_scale: float, teacher_softcap: float,
    teacher_after: float, beta: float, TILE: Const
):  # fmt: skip
    """x, y: logits [tokens, vocabulary]; lse, teacher_lse: [tokens, 2] fp32, see log_probs.py; loss, own: [tokens, pieces] fp32, sums over
    pieces of what D and K are made of (where beta is 1, K is D). scale, softcap, after: as in `log_probs_statistics`."""
    row, part = piece(ct.bid(0), x, TILE)
    cols = part * TILE + ct.arange(TILE, dtype=ct.int32)
    bits, p, _ = log_p(x, lse, row, cols, scale, softcap, after)
    teacher_bits, q, _ = log_p(y, teacher_lse, row, cols, teacher_scale, teacher_softcap, teacher_after)
    if beta == 0.0:
        ct.scatter(loss, (row, part), ct.sum(q * (teacher_bits - bits), 0) * LN2, check_bounds=False)
        ct.scatter(own, (row, part), 0.0, check_bounds=False)
    else:
        m = teacher_bits
        if beta < 1.0:
            m = log_mixture(p, q, beta)
        mine = ct.sum(p * (bits - m), 0) * LN2
        ct.scatter(own, (row, part), mine, check_bounds=False)
        if beta < 1.0:
            mine = (1.0 - beta) * mine + beta * ct.sum(q * (teacher_bits - m), 0) * LN2
        ct.scatter(loss, (row, part), mine, check_bounds=False)


@ct.kernel
def head_divergence_gradient(
    x, y, lse, teacher_lse, own, upstream, scale: float, softcap: float, after: float, teacher_scale: float, teacher_softcap: float,
    teacher_after: float, beta: float, TILE: Const
):  # fmt: skip
    """Writes the gradient over x. own: [tokens] fp32, K; upstream: fp32, [1] or [tokens], what D's gradient is multiplied by."""
    row, part = last_first(x, TILE)
    cols = part * TILE + ct.arange(TILE, dtype=ct.int32)
    bits, p, slope = log_p(x, lse, row, cols, scale, softcap, after)
    teacher_bits, q, _ = log_p(y, teacher_lse, row, cols, teacher_scale, teacher_softcap, teacher_after)
    g = ct.gather(upstream, ct.where(upstream.shape[0] == 1, 0, row), check_bounds=False)
    dz = p - q
    if beta > 0.0:
        m, rest = teacher_bits, 1.0
        if beta < 1.0:
            m = log_mixture(p, q, beta)
            rest = 1.0 - beta
        dz = p * ((bits - m) * LN2 - ct.gather(own, row, check_bounds=False)) * rest
    dx = dz * g * slope
    ct.scatter(x, (row, cols), ct.where(g == 0.0, 0.0, dx), check_bounds=True)


def variants():
    vector, matrix = (Array("float32", (None,) * dims, aligned=False) for dims in (1, 2))
    names = ("scale", "softcap", "after", "teacher_scale", "teacher_softcap", "teacher_after", "beta")
    numbers = dict.fromkeys(names, FLOAT)
    for logits in (Array("float32", (None, None), divisible=(1, 16)), Array("float32", (None, None), aligned=False)):
        both = {"x": logits, "y": logits, "lse": matrix, "teacher_lse": matrix}
        yield Variant(head_divergence_sums, {**both, "loss": matrix, "own": matrix, **numbers, "TILE": 2048})
        yield Variant(head_divergence_gradient, {**both, "own": vector, "upstream": vector, **numbers, "TILE": 1024})
