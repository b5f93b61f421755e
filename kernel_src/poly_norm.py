"""PolyNorm (Zhuo et al. 2024, arXiv 2411.03884): a polynomial of a row's normalised powers.

    n_p = x^p * r_p        r_p = 1 / sqrt(mean(x^2p) + eps)        y = w0 * n_3 + w1 * n_2 + w2 * n_1 + bias

Backward, with m_p = mean(dy * n_p):

    dx = sum over p of w_p * p * x^(p-1) * r_p * (dy - n_p * m_p)        dw_p = sum over rows of length * m_p        dbias = sum of dy

(the published derivative has r_p^3 in the second term, which underflows for large x in fp16). Everything is fp32: a sum of sixth powers
passes the largest fp16 from rows of 4096 normal values on. A row that fits into the registers is read once, a longer one twice.
"""

from dataclasses import replace

import cuda.tile as ct

from kernel_src.elements import read_once, write
from kernel_src.layer_norm import read_row
from kernel_src.prebuild import FLOAT, Array, Variant
from kernel_src.segments import MIXED, SAME, SEGMENT, place, rows, sum_of

Const = ct.Constant[int]


@ct.function
def polynomial(x, r1, r2, r3, w0, w1, w2, bias):
    """y in Horner's form."""
    return ((x * (w0 * r3) + w1 * r2) * x + w2 * r1) * x + bias


@ct.function
def gradient(x, d, r1, r2, r3, m1, m2, m3, w0, w1, w2):
    """dx as d * P'(t) - t * R(t^2) with t = x * r_1, both in Horner's form: half of the instructions of the sum over p. Of t, not of x,
    whose coefficients r_p^2 underflow where x is large."""
    k2, k3 = r2 / (r1 * r1), r3 / (r1 * r1 * r1)
    c1, c2, c3 = w2 * r1, 2.0 * w1 * r1 * k2, 3.0 * w0 * r1 * k3
    e1, e2, e3 = c1 * m1, c2 * k2 * m2, c3 * k3 * m3
    t = x * r1
    square = t * t
    return d * (c1 + t * (c2 + t * c3)) - t * (e1 + square * (e2 + square * e3))


def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@ct.function
def sums_of_powers(square, count: Const):
    """Sums of x^2, x^4 and x^6, from x^2. In one reduction, so that no power is kept for a later one."""
    square = ct.reshape(square, (count,))
    fourth = square * square
    return ct.reduce((square, fourth, fourth * square), 0, add3, (0.0, 0.0, 0.0))


@ct.function
def sums_with_powers(d, x, count: Const):
    """Sums of d, d * x, d * x^2 and d * x^3."""
    d, x = ct.reshape(d, (count,)), ct.reshape(x, (count,))
    d1 = d * x
    d2 = d1 * x
    return ct.reduce((d, d1, d2, d2 * x), 0, add4, (0.0, 0.0, 0.0, 0.0))


@ct.function
def save(rstd, row, r1, r2, r3):
    ct.scatter(rstd, (row, 0), r1, check_bounds=False)
    ct.scatter(rstd, (row, 1), r2, check_bounds=False)
    ct.scatter(rstd, (row, 2), r3, check_bounds=False)


@ct.kernel
def poly_norm_forward(x, weight, bias, y, rstd, eps: float, SEGMENT: Const, PIECE: Const):
    """x, y: [rows, segments, SEGMENT], at most PIECE segments; weight: [3], first the cube's; bias: [1]; rstd: [rows, 3] fp32, r_1 to
    r_3."""
    row, count = ct.bid(0), x.shape[1]
    segment, valid = place(0, count, PIECE)
    index = (row, segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :])
    one = 1.0 / ct.astype(count * SEGMENT, ct.float32)
    xf = read_once(x, index)
    square = ct.where(valid[:, None], xf * xf, 0.0)
    s1, s2, s3 = sums_of_powers(square, PIECE * SEGMENT)
    r1, r2, r3 = ct.rsqrt(s1 * one + eps), ct.rsqrt(s2 * one + eps), ct.rsqrt(s3 * one + eps)
    write(y, index, polynomial(xf, r1, r2, r3, read_once(weight, 0), read_once(weight, 1), read_once(weight, 2), read_once(bias, 0)))
    save(rstd, row, r1, r2, r3)


@ct.kernel
def poly_norm_long_forward(x, weight, bias, y, rstd, eps: float, SEGMENT: Const, PIECE: Const):
    """Computes what `poly_norm_forward` does for rows of any number of segments, which are read twice."""
    row, count = ct.bid(0), x.shape[1]
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    sum2 = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    sum4 = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    sum6 = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    for i in range(ct.cdiv(count, PIECE)):
        segment, valid = place(i, count, PIECE)
        xf = ct.where(valid[:, None], read_once(x, (row, segment[:, None], column)), 0.0)
        square = xf * xf
        sum2 = sum2 + square
        sum4 = sum4 + square * square
        sum6 = sum6 + square * square * square
    length = ct.astype(count * SEGMENT, ct.float32)
    r1 = ct.rsqrt(sum_of(sum2, PIECE, SEGMENT) / length + eps)
    r2 = ct.rsqrt(sum_of(sum4, PIECE, SEGMENT) / length + eps)
    r3 = ct.rsqrt(sum_of(sum6, PIECE, SEGMENT) / length + eps)
    w0, w1, w2, b = read_once(weight, 0), read_once(weight, 1), read_once(weight, 2), read_once(bias, 0)
    for i in range(ct.cdiv(count, PIECE)):
        segment, _ = place(i, count, PIECE)
        index = (row, segment[:, None], column)
        write(y, index, polynomial(read_once(x, index), r1, r2, r3, w0, w1, w2, b))
    save(rstd, row, r1, r2, r3)


@ct.function
def write_sums(partial, block, s0, s1, s2, s3):
    ct.scatter(partial, (block, 0), s0, check_bounds=False)
    ct.scatter(partial, (block, 1), s1, check_bounds=False)
    ct.scatter(partial, (block, 2), s2, check_bounds=False)
    ct.scatter(partial, (block, 3), s3, check_bounds=False)


@ct.kernel
def poly_norm_backward(dx, dy, x, weight, rstd, partial, TILE: Const, LATENCY: Const):
    """dx, dy, x: [rows, length], length at most TILE; partial: [blocks, 4] fp32, a block's sums for the three weights and the bias. A
    block walks over rows."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    block = ct.bid(0)
    w0, w1, w2 = read_once(weight, 0), read_once(weight, 1), read_once(weight, 2)
    one = 1.0 / ct.astype(x.shape[1], ct.float32)
    zero = ct.zeros((), dtype=ct.float32)
    dw0, dw1, dw2, dbias = zero, zero, zero, zero
    for i in range(block, x.shape[0], ct.num_blocks(0)):
        row = x.shape[0] - 1 - i  # what wrote dy or read x before this has left the last rows in the L2
        r1, r2, r3 = read_once(rstd, (row, 0)), read_once(rstd, (row, 1)), read_once(rstd, (row, 2))
        d, xf = read_row(dy, row, TILE, LATENCY), read_row(x, row, TILE, LATENCY)  # zero past the end, and so is all that is summed
        s0, s1, s2, s3 = sums_with_powers(d, xf, TILE)
        s1, s2, s3 = s1 * r1, s2 * r2, s3 * r3
        found = gradient(xf, d, r1, r2, r3, s1 * one, s2 * one, s3 * one, w0, w1, w2)
        ct.store(dx, index=(row, 0), tile=ct.astype(found, dx.dtype))
        dw0, dw1, dw2, dbias = dw0 + s3, dw1 + s2, dw2 + s1, dbias + s0
    write_sums(partial, block, dw0, dw1, dw2, dbias)


@ct.kernel
def poly_norm_long_backward(dx, dy, x, weight, rstd, partial, SEGMENT: Const, PIECE: Const):
    """Computes what `poly_norm_backward` does for rows of any number of segments, which are read twice."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    block, count = ct.bid(0), x.shape[1]
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    w0, w1, w2 = read_once(weight, 0), read_once(weight, 1), read_once(weight, 2)
    one = 1.0 / ct.astype(count * SEGMENT, ct.float32)
    dw0, dw1, dw2 = ct.zeros((), dtype=ct.float32), ct.zeros((), dtype=ct.float32), ct.zeros((), dtype=ct.float32)
    dbias = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    for walked in range(block, x.shape[0], ct.num_blocks(0)):
        row = x.shape[0] - 1 - walked  # what wrote dy or read x before this has left the last rows in the L2
        r1, r2, r3 = read_once(rstd, (row, 0)), read_once(rstd, (row, 1)), read_once(rstd, (row, 2))
        sum1 = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
        sum2 = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
        sum3 = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
        for i in range(ct.cdiv(count, PIECE)):
            segment, valid = place(i, count, PIECE)
            index = (row, segment[:, None], column)
            xf, d = read_once(x, index), ct.where(valid[:, None], read_once(dy, index), 0.0)
            dx1 = d * xf
            sum1 = sum1 + dx1
            sum2 = sum2 + dx1 * xf
            sum3 = sum3 + dx1 * xf * xf
            dbias = dbias + d
        s1 = sum_of(sum1, PIECE, SEGMENT) * r1
        s2 = sum_of(sum2, PIECE, SEGMENT) * r2
        s3 = sum_of(sum3, PIECE, SEGMENT) * r3
        for i in range(ct.cdiv(count, PIECE)):
            segment, _ = place(i, count, PIECE)
            index = (row, segment[:, None], column)
            write(dx, index, gradient(read_once(x, index), read_once(dy, index), r1, r2, r3, s1 * one, s2 * one, s3 * one, w0, w1, w2))
        dw0, dw1, dw2 = dw0 + s3, dw1 + s2, dw2 + s1
    write_sums(partial, block, dw0, dw1, dw2, sum_of(dbias, PIECE, SEGMENT))


# ---------------------------------------------------------------- what is prebuilt
# Rows in registers: segments of 64, the fewest and the most of a row; shorter rows would leave lanes idle.
WHOLE = {"bfloat16": (33, 64)}
WHOLE_BLOCKS, WHOLE_LATENCY = 3, 2  # of the backward pass: blocks that an SM holds, and rows that each has under way
LONG_PIECE = {SEGMENT: 32, 1: 1024}


def forward(kernel, x, w, segment, piece, at_least=None, **options):
    promises = {"at_least": (1, at_least, 1), "at_most": (None, piece, None)} if at_least else {}
    a, parameters = replace(rows(x, segment), **promises), Array(w, (3,), aligned=False)
    inputs = {"x": a, "weight": parameters, "bias": Array(w, (1,), aligned=False), "y": a, "rstd": RSTD, "eps": FLOAT}
    return Variant(kernel, {**inputs, "SEGMENT": segment, "PIECE": piece}, **options)


def backward(kernel, array, w, constants, **options):
    grads = {"dx": array, "dy": array, "x": array, "weight": Array(w, (3,), aligned=False), "rstd": RSTD, "partial": PARTIAL}
    return Variant(kernel, {**grads, **constants}, **options)


RSTD, PARTIAL = Array("float32", (None, 3), aligned=False), Array("float32", (None, 4), aligned=False)


def variants():
    for x, w in SAME:
        if x in WHOLE:
            fewest, most = WHOLE[x]
            yield forward(poly_norm_forward, x, w, SEGMENT, most, fewest, hints={"occupancy": 5})
            a = Array(x, (None, None), divisible=(1, SEGMENT), at_least=(1, fewest * SEGMENT), at_most=(None, most * SEGMENT))
            constants = {"TILE": most * SEGMENT, "LATENCY": WHOLE_LATENCY}
            yield backward(poly_norm_backward, a, w, constants, hints={"occupancy": WHOLE_BLOCKS})
    for x, w in SAME + MIXED:
        for segment in (SEGMENT, 1):
            half = x != "float32"
            constants = {"SEGMENT": segment, "PIECE": LONG_PIECE[segment]}
            yield forward(poly_norm_long_forward, x, w, segment, LONG_PIECE[segment], hints={"occupancy": 6 if half else 5})
            hints = {"num_worker_warps": 8, "occupancy": 3 if half else 1}
            yield backward(poly_norm_long_backward, rows(x, segment), w, constants, hints=hints)
