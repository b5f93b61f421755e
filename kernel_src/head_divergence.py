"""The generalised Jensen-Shannon divergence of a student's and a teacher's logits, which are there in float32, and its gradient over the
student's.

With p the student's distribution, q the teacher's, m = (1 - beta) p + beta q, and scores as in log_probs.py, per token:

    beta = 0:  D = sum q (log q - log p),    dz = p - q
    beta = 1:  D = sum p (log p - log q),    dz = p (log p - log q - D)
    between:   D = beta sum q (log q - log m) + (1 - beta) K,   K = sum p (log p - log m),   dz = (1 - beta) p (log p - log m - K)

and dx = dz * g * t, t the slope of the scores. The statistics of both rows are those of log_probs.py. Logarithms are in base 2 inside.
"""

import cuda.tile as ct

from kernel_src.cross_entropy import LN2, LOG2E, Const, last_first, piece
from kernel_src.log_probs import read_scores
from kernel_src.prebuild import FLOAT, Array, Variant

LEAST = -1000.0  # stands in for the logarithm of 0


@ct.function
def finite(bits):
    """At least LEAST; a NaN stays one."""
    return ct.where(bits < LEAST, LEAST, bits)


@ct.function
def log_p(z, lse, row):
    """The base-2 logarithms of probabilities, and these; past a row's end LEAST and 0."""
    bits = finite((z - ct.gather(lse, row, check_bounds=False)) * LOG2E)
    return bits, ct.exp2(bits, flush_to_zero=True)


@ct.function
def log_mixture(p, q, beta):
    return finite(ct.log2((1.0 - beta) * p + beta * q))


@ct.kernel
def head_divergence_sums(
    x, y, lse, teacher_lse, loss, own, scale: float, softcap: float, after: float, teacher_scale: float, teacher_softcap: float,
    teacher_after: float, beta: float, TILE: Const
):  # fmt: skip
    """x, y: logits [tokens, vocabulary]; lse, teacher_lse: [tokens] fp32; loss, own: [tokens, pieces] fp32, sums over pieces of
    what D and K are made of (where beta is 1, K is D). scale, softcap, after: as in `log_probs_statistics`."""
    row, part = piece(ct.bid(0), x, TILE)
    cols = part * TILE + ct.arange(TILE, dtype=ct.int32)
    z, _ = read_scores(x, row, cols, scale, softcap, after)
    z_teacher, _ = read_scores(y, row, cols, teacher_scale, teacher_softcap, teacher_after)
    bits, p = log_p(z, lse, row)
    teacher_bits, q = log_p(z_teacher, teacher_lse, row)
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
    z, ratio = read_scores(x, row, cols, scale, softcap, after)
    z_teacher, _ = read_scores(y, row, cols, teacher_scale, teacher_softcap, teacher_after)
    bits, p = log_p(z, lse, row)
    teacher_bits, q = log_p(z_teacher, teacher_lse, row)
    g = ct.gather(upstream, ct.where(upstream.shape[0] == 1, 0, row), check_bounds=False)
    dz = p - q
    if beta > 0.0:
        m, rest = teacher_bits, 1.0
        if beta < 1.0:
            m = log_mixture(p, q, beta)
            rest = 1.0 - beta
        dz = p * ((bits - m) * LN2 - ct.gather(own, row, check_bounds=False)) * rest
    dx = dz * g * ((1.0 - ratio * ratio) * (scale * after))
    ct.scatter(x, (row, cols), ct.where(g == 0.0, 0.0, dx), check_bounds=True)


def variants():
    vector, matrix = (Array("float32", (None,) * dims, aligned=False) for dims in (1, 2))
    names = ("scale", "softcap", "after", "teacher_scale", "teacher_softcap", "teacher_after", "beta")
    numbers = dict.fromkeys(names, FLOAT)
    for logits in (Array("float32", (None, None), divisible=(1, 16)), Array("float32", (None, None), aligned=False)):
        both = {"x": logits, "y": logits, "lse": vector, "teacher_lse": vector}
        yield Variant(head_divergence_sums, {**both, "loss": matrix, "own": matrix, **numbers, "TILE": 2048})
        yield Variant(head_divergence_gradient, {**both, "own": vector, "upstream": vector, **numbers, "TILE": 1024})
