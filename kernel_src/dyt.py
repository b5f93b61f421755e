"""Dynamic tanh (Zhu et al. 2025, arXiv 2503.10622), which takes the place of a norm:

    t = tanh(alpha * x)          y = t * gamma + beta

Backward, with s = 1 - t^2 and g = dy * gamma:

    dx = alpha * s * g        dalpha = sum of x * s * g        dgamma = sum over rows of dy * t        dbeta = sum over rows of dy

No row is reduced. So a block keeps its columns, and gamma and beta with them, and walks over rows: the gradients of the parameters stay
in its registers until the end. They are summed in fp32 in an order that the shape alone decides.
"""

import cuda.tile as ct

from kernel_src.column_sum import TILE as SUM_TILE
from kernel_src.column_sum import sum_columns
from kernel_src.elements import read_once, write
from kernel_src.prebuild import FLOATS, Array, Params, PerArchitecture, Variant
from kernel_src.segments import MIXED, SAME, SEGMENT, columns, place, rows, sum_of

Const = ct.Constant[int]
TWO_LOG2E = 2.8853900817779268


@ct.function
def tanh(z, SHORT: Const):
    """(tanh(z), 1 - tanh(z)^2) with a relative error of 5e-7: by exp2, and by Taylor's series where that would cancel.

    With v = 1 / (1 + e^(2|z|)), tanh(|z|) is 1 - 2v and 1 - tanh^2 is 4v * (1 - v). SHORT: tanh is the hardware's, with a relative error of
    5e-4, a quarter of what rounding to bf16 adds; 1 - tanh^2 is as above, and does not cancel.
    """
    size = ct.abs(z)
    v = ct.truediv(1.0, 1.0 + ct.exp2(size * TWO_LOG2E, flush_to_zero=True), flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
    if SHORT:
        t = ct.tanh(z, rounding_mode=ct.RoundingMode.APPROX)
    else:
        square = z * z
        series = z + z * square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0)))
        large = 1.0 - 2.0 * v
        t = ct.where(size < 0.25, series, ct.where(z < 0.0, -large, large))
    return t, 4.0 * v * (1.0 - v)


@ct.function
def columns_of_block(count, PIECE: Const, SEGMENT: Const):
    """(number of this block along the rows, index of its columns)"""
    pieces = ct.cdiv(count, PIECE)
    segment, _ = place(ct.bid(0) % pieces, count, PIECE)
    return ct.bid(0) // pieces, segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :]


@ct.kernel
def dyt_forward(x, alpha, gamma, beta, y, ROWS: Const, SHORT: Const, SEGMENT: Const, PIECE: Const):
    """x, y: [rows, segments, SEGMENT]; alpha: [1]; gamma, beta: [segments, SEGMENT]. PIECE segments of ROWS rows a block; the last
    blocks write the last row again instead of leaving the array."""
    block, segment, column = columns_of_block(x.shape[1], PIECE, SEGMENT)
    a = read_once(alpha, 0)
    scale, shift = read_once(gamma, (segment, column)), read_once(beta, (segment, column))
    for i in ct.static_iter(range(ROWS)):
        row = ct.minimum(block * ROWS + i, x.shape[0] - 1)
        t, _ = tanh(a * read_once(x, (row, segment, column)), SHORT)
        write(y, (row, segment, column), t * scale + shift)


@ct.function
def gradients(xf, d, a, scale, SHORT: Const):
    """(dx, dz * x, dy * t), elementwise."""
    t, slope = tanh(a * xf, SHORT)
    dz = slope * d * scale
    return a * dz, xf * dz, d * t


@ct.kernel
def dyt_backward(dx, dy, x, alpha, gamma, partial, partial_alpha, ROWS: Const, SHORT: Const, SEGMENT: Const, PIECE: Const):
    """dx, dy, x: [rows, segments, SEGMENT]; partial: [groups, 2, segments, SEGMENT] fp32, the sums for dgamma and dbeta over the rows
    of a group; partial_alpha: [groups, pieces] fp32. A block has PIECE segments and walks over the rows of one group, ROWS neighbours at a
    time, which are all loaded before the first is used."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    groups = partial.shape[0]
    group, segment, column = columns_of_block(x.shape[1], PIECE, SEGMENT)
    a, scale = read_once(alpha, 0), read_once(gamma, (segment, column))
    dgamma = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    dbeta = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    dalpha = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    whole = x.shape[0] // ROWS
    for i in range(group, whole, groups):
        step = whole - 1 - i  # what reads x or writes dy before this has left the last rows in the L2
        loaded = ()
        for at in ct.static_iter(range(ROWS)):
            index = (step * ROWS + at, segment, column)
            pair = ct.gather(x, index, check_bounds=False, latency=1), ct.gather(dy, index, check_bounds=False, latency=1)
            loaded = (*loaded, *pair)  # type: ignore[assignment]
        for at in ct.static_iter(range(ROWS)):
            xf, d = ct.astype(loaded[2 * at], ct.float32), ct.astype(loaded[2 * at + 1], ct.float32)
            gradient, of_alpha, of_gamma = gradients(xf, d, a, scale, SHORT)
            write(dx, (step * ROWS + at, segment, column), gradient)
            dalpha = dalpha + of_alpha
            dgamma = dgamma + of_gamma
            dbeta = dbeta + d
    for row in range(whole * ROWS + group, x.shape[0], groups):
        xf, d = read_once(x, (row, segment, column)), read_once(dy, (row, segment, column))
        gradient, of_alpha, of_gamma = gradients(xf, d, a, scale, SHORT)
        write(dx, (row, segment, column), gradient)
        dalpha = dalpha + of_alpha
        dgamma = dgamma + of_gamma
        dbeta = dbeta + d
    ct.scatter(partial, (group, 0, segment, column), dgamma, check_bounds=False)
    ct.scatter(partial, (group, 1, segment, column), dbeta, check_bounds=False)
    piece = ct.bid(0) % partial_alpha.shape[1]
    _, valid = place(piece, x.shape[1], PIECE)
    ct.scatter(partial_alpha, (group, piece), sum_of(ct.where(valid[:, None], dalpha, 0.0), PIECE, SEGMENT), check_bounds=False)


@ct.kernel
def dyt_parameter_sums(partial, partial_alpha, dparameters, dalpha, ROWS: Const, COLS: Const):
    """partial: [groups, 2 * length] fp32; dparameters: [2 * length], dgamma and dbeta; partial_alpha: [n] fp32; dalpha: [1]."""
    ct.grid_dependency_control_wait()
    sum_columns(partial, dparameters, ROWS, COLS)
    if ct.bid(0) == 0:
        acc = ct.zeros((ROWS,), dtype=ct.float32)
        for i in range(ct.cdiv(partial_alpha.shape[0], ROWS)):
            at = i * ROWS + ct.arange(ROWS, dtype=ct.int32)
            acc = acc + ct.gather(partial_alpha, at, check_bounds=True, padding_value=0)
        ct.scatter(dalpha, 0, ct.astype(ct.sum(acc, axis=0, keepdims=False), dalpha.dtype), check_bounds=False)


# ---------------------------------------------------------------- what is prebuilt
PIECE = {SEGMENT: 16, 1: 512}
ROWS = 4  # of a block of the forward pass
# With the short tanh: rows at once, blocks that an SM holds, and where. Four rows took 56 us where three take 59, and spill on three
# architectures.
BACKWARD = (
    (4, 5, ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103")),
    (3, PerArchitecture(5, "sm_110", 4), ("sm_110", "sm_120", "sm_121")),
)


def variants():
    for x, w in SAME + MIXED:
        for segment in (SEGMENT, 1):
            a, p, alpha = rows(x, segment), columns(w, segment), Array(w, (1,), aligned=False)
            short = int(x == w == "bfloat16")
            constants = {"SHORT": short, "SEGMENT": segment, "PIECE": PIECE[segment]}
            # Parameters in fp32 beside x in half precision need more registers than 6 blocks an SM leave on sm_80 and sm_120.
            blocks = 6 if x == w else PerArchitecture(5, "sm_90", 6)
            inputs: Params = {"x": a, "alpha": alpha, "gamma": p, "beta": p, "y": a, "ROWS": ROWS}
            yield Variant(dyt_forward, {**inputs, **constants}, hints={} if short else {"occupancy": blocks})
            partial, partial_alpha = Array("float32", (None, 2, None, segment), aligned=segment > 1), Array("float32", (None, None),
                                                                                                            aligned=False)
            sums = {"partial": partial, "partial_alpha": partial_alpha}
            found: Params = {"dx": a, "dy": a, "x": a, "alpha": alpha, "gamma": p, **sums}
            # Several rows at once were the fastest on an H200; the long tanh and fp32 leave fewer registers for them.
            if short and segment > 1:
                for rows_at_once, most, targets in BACKWARD:
                    params = {**found, "ROWS": rows_at_once, **constants}
                    yield Variant(dyt_backward, params, hints={"occupancy": most}, targets=targets)
                continue
            blocks = PerArchitecture(3, "sm_90", 4) if x == "float32" else 4
            params = {**found, "ROWS": 2 if x == w and segment > 1 else 1, **constants}
            yield Variant(dyt_backward, params, hints={"occupancy": blocks})
    for w in FLOATS:
        for aligned in (True, False):
            sums = {"partial": Array("float32", (None, None), aligned=aligned), "partial_alpha": Array("float32", (None,), aligned=False)}
            results = {"dparameters": Array(w, (None,), aligned=aligned), "dalpha": Array(w, (1,), aligned=False)}
            yield Variant(dyt_parameter_sums, {**sums, **results, **SUM_TILE})
