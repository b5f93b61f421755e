"""The kernels of kernel_src/general_rms_norm.py and residual_norm.py for rows between two powers of two, as two tiles: 5120 elements are
4096 and 1024, where one tile of 8192 has 3072 idle lanes.

The first tile is whole; in the second, the segments past the row's end are its last segment again, or zeros, as in those files. Kernels
have the names and the arguments that they have there: a package that lists this file first takes these where they fit. A multiplied branch
(Granite, whose rows are of 2048 and 4096) has none.
"""

from typing import Any

import cuda.tile as ct

from kernel_src.elements import read_once, write
from kernel_src.general_rms_norm import OPTIONS, read_row, scaled
from kernel_src.prebuild import FLOAT, Array, Params, Variant
from kernel_src.segments import PER_ROW, SEGMENT, columns, sum_of

Const = ct.Constant[int]


@ct.function
def places(row, count, PIECE: Const, TAIL: Const, SEGMENT: Const):
    """(index of the first tile, of the second, which segments of the second the row has)."""
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    wanted = PIECE + ct.arange(TAIL, dtype=ct.int32)
    tail = ct.minimum(wanted, count - 1)[:, None]
    return (row, ct.arange(PIECE, dtype=ct.int32)[:, None], column), (row, tail, column), (wanted < count)[:, None]


@ct.function
def inverse_rms(x1, x2, valid, count, eps, PIECE: Const, TAIL: Const, SEGMENT: Const):
    total = sum_of(x1 * x1, PIECE, SEGMENT) + sum_of(ct.where(valid, x2 * x2, 0.0), TAIL, SEGMENT)
    return ct.rsqrt(total / ct.astype(count * SEGMENT, ct.float32) + eps)


@ct.function
def norm_of(x1, x2, weight, y, rstd, row, first, second, valid, count, eps, offset, rounded, dtype,
            PIECE: Const, TAIL: Const, SEGMENT: Const):  # fmt: skip
    """Writes y and rstd of a row."""
    r = inverse_rms(x1, x2, valid, count, eps, PIECE, TAIL, SEGMENT)
    write(y, first, scaled(x1 * r, read_once(weight, first[1:]), offset, rounded, dtype))
    write(y, second, scaled(x2 * r, read_once(weight, second[1:]), offset, rounded, dtype))
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def general_rms_norm_forward(
    x, weight, y, rstd, eps: float, offset: float, rounded: int, SEGMENT: Const, PIECE: Const, TAIL: Const
):  # fmt: skip
    """x, y: [rows, segments, SEGMENT], more than PIECE segments and at most TAIL more; weight: [segments, SEGMENT]; rstd: [rows] fp32."""
    row, count = ct.bid(0), x.shape[1]
    first, second, valid = places(row, count, PIECE, TAIL, SEGMENT)
    x1, x2 = read_once(x, first), read_once(x, second)
    norm_of(x1, x2, weight, y, rstd, row, first, second, valid, count, eps, offset, rounded, x.dtype, PIECE, TAIL, SEGMENT)


@ct.kernel
def general_add_rms_norm_forward(
    x, residual, weight, total, y, rstd, eps: float, offset: float, rounded: int, SEGMENT: Const, PIECE: Const, TAIL: Const
):
    """Adds x to the residual and normalises the sum as `general_rms_norm_forward` does."""
    row, count = ct.bid(0), x.shape[1]
    first, second, valid = places(row, count, PIECE, TAIL, SEGMENT)
    s1 = ct.astype(read_once(x, first) + read_once(residual, first), total.dtype)
    s2 = ct.astype(read_once(x, second) + read_once(residual, second), total.dtype)
    ct.scatter(total, first, s1, check_bounds=False)
    ct.scatter(total, second, s2, check_bounds=False)
    x1, x2 = ct.astype(s1, ct.float32), ct.astype(s2, ct.float32)
    norm_of(x1, x2, weight, y, rstd, row, first, second, valid, count, eps, offset, rounded, x.dtype, PIECE, TAIL, SEGMENT)


@ct.function
def add_normed(branch, residual, inner, inner_rstd, row, first, second, valid, count, eps, offset, rounded,
               PIECE: Const, TAIL: Const, SEGMENT: Const):  # fmt: skip
    """round(residual + round(RMSNorm(branch))), as the model's residual stream holds it."""
    b1, b2 = read_once(branch, first), read_once(branch, second)
    r = inverse_rms(b1, b2, valid, count, eps, PIECE, TAIL, SEGMENT)
    ct.scatter(inner_rstd, row, r, check_bounds=False)
    n1 = ct.astype(scaled(b1 * r, read_once(inner, first[1:]), offset, rounded, branch.dtype), branch.dtype)
    n2 = ct.astype(scaled(b2 * r, read_once(inner, second[1:]), offset, rounded, branch.dtype), branch.dtype)
    s1 = ct.astype(ct.astype(n1, ct.float32) + read_once(residual, first), residual.dtype)
    s2 = ct.astype(ct.astype(n2, ct.float32) + read_once(residual, second), residual.dtype)
    return s1, s2


@ct.kernel
def norm_add_forward(
    branch, residual, inner, total, inner_rstd, eps: float, offset: float, rounded: int, SEGMENT: Const, PIECE: Const, TAIL: Const
):  # fmt: skip
    """branch, residual, total: as x; inner: as weight; inner_rstd: as rstd of `general_rms_norm_forward`."""
    row, count = ct.bid(0), total.shape[1]
    first, second, valid = places(row, count, PIECE, TAIL, SEGMENT)
    s1, s2 = add_normed(branch, residual, inner, inner_rstd, row, first, second, valid, count, eps, offset, rounded, PIECE, TAIL, SEGMENT)
    ct.scatter(total, first, s1, check_bounds=False)
    ct.scatter(total, second, s2, check_bounds=False)


@ct.kernel
def norm_add_norm_forward(
    branch, residual, inner, weight, total, y, inner_rstd, rstd, eps: float, offset: float, rounded: int,
    SEGMENT: Const, PIECE: Const, TAIL: Const
):  # fmt: skip
    """Computes what `norm_add_forward` does, and y, the norm of total, with its rstd."""
    row, count = ct.bid(0), total.shape[1]
    first, second, valid = places(row, count, PIECE, TAIL, SEGMENT)
    s1, s2 = add_normed(branch, residual, inner, inner_rstd, row, first, second, valid, count, eps, offset, rounded, PIECE, TAIL, SEGMENT)
    ct.scatter(total, first, s1, check_bounds=False)
    ct.scatter(total, second, s2, check_bounds=False)
    x1, x2 = ct.astype(s1, ct.float32), ct.astype(s2, ct.float32)
    norm_of(x1, x2, weight, y, rstd, row, first, second, valid, count, eps, offset, rounded, total.dtype, PIECE, TAIL, SEGMENT)


# ---------------------------------------------------------------- backward
@ct.function
def read_tail(array, row, TILE: Const, TAIL: Const, LATENCY: Const):
    tile = ct.load(array, index=(row, TILE // TAIL), shape=(1, TAIL), latency=LATENCY, padding_mode=ct.PaddingMode.ZERO)
    return ct.astype(tile, ct.float32)


@ct.function
def read_weight(weight, start, offset, WIDTH: Const):
    w = ct.load(weight, index=(start // WIDTH,), shape=(WIDTH,), padding_mode=ct.PaddingMode.ZERO)
    return ct.astype(ct.reshape(w, (1, WIDTH)), ct.float32) + offset


@ct.function
def backward_rows(dx, dy, dtotal, x, weight, rstd, partial, offset, TILE: Const, TAIL: Const, LATENCY: Const, PAST: Const):
    """The rows that a block walks over. PAST: whether dtotal is added to dx; else it is not read."""
    block = ct.bid(0)
    one = 1.0 / ct.astype(x.shape[1], ct.float32)
    w1, w2 = read_weight(weight, 0, offset, TILE), read_weight(weight, TILE, offset, TAIL)
    acc1, acc2 = ct.zeros((1, TILE), dtype=ct.float32), ct.zeros((1, TAIL), dtype=ct.float32)
    for i in range(block, x.shape[0], ct.num_blocks(0)):
        row = x.shape[0] - 1 - i  # what wrote dy or read x before this has left the last rows in the L2
        d1, d2 = read_row(dy, row, TILE, LATENCY), read_tail(dy, row, TILE, TAIL, LATENCY)
        r = ct.gather(rstd, row, check_bounds=False)
        n1, n2 = read_row(x, row, TILE, LATENCY) * r, read_tail(x, row, TILE, TAIL, LATENCY) * r
        g1, g2 = d1 * w1, d2 * w2
        mean = (ct.sum(g1 * n1) + ct.sum(g2 * n2)) * one
        gradient1, gradient2 = (g1 - n1 * mean) * r, (g2 - n2 * mean) * r
        if PAST:
            gradient1 = gradient1 + read_row(dtotal, row, TILE, LATENCY)
            gradient2 = gradient2 + read_tail(dtotal, row, TILE, TAIL, LATENCY)
        ct.store(dx, index=(row, 0), tile=ct.astype(gradient1, dx.dtype))
        ct.store(dx, index=(row, TILE // TAIL), tile=ct.astype(gradient2, dx.dtype))
        acc1, acc2 = acc1 + d1 * n1, acc2 + d2 * n2
    ct.store(partial, index=(block, 0), tile=acc1)
    ct.store(partial, index=(block, TILE // TAIL), tile=acc2)


@ct.kernel
def general_rms_norm_backward(dx, dy, x, weight, rstd, partial, offset: float, TILE: Const, TAIL: Const, LATENCY: Const):
    """dx, dy, x: [rows, length], more than TILE and at most TAIL more; partial: [blocks, length] fp32, a block's sums for dweight."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    backward_rows(dx, dy, dy, x, weight, rstd, partial, offset, TILE, TAIL, LATENCY, False)


@ct.kernel
def general_add_rms_norm_backward(dx, dy, dtotal, x, weight, rstd, partial, offset: float, TILE: Const, TAIL: Const, LATENCY: Const):
    """Computes what `general_rms_norm_backward` does, with dx += dtotal. x: what was normalised."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    backward_rows(dx, dy, dtotal, x, weight, rstd, partial, offset, TILE, TAIL, LATENCY, True)


# Segments of the two tiles. On an H200, 8192 rows of bf16, of a copy of the same bytes (in brackets: as one tile of 8192 or 4096):
#            norm           residual + norm   residual + norm(branch)   and the norm behind it   backward       with the residual
#     3072   95 % (85)      97 % (89)         93 % (83)                 87 % (79)                level, so one tile of 4096
#     5120   92 % (75)      96 % (82)         86 % (78)                 84 % (69)                82 % (65)      91 % (71)
#     5376   88 % (77)      95 % (84)         86 % (79)                 83 % (71)                69 % (66)      82 % (74)
#     6144   93 % (84)      97 % (90)         90 % (84)                 88 % (78)                75 % (73)      87 % (81)
# With four warps all is slower but the norms of 5120, by 3 % faster; rows of 3584 are level.
TAILS = ((32, 16), (64, 16), (64, 32))
BACKWARD = ((4096, 1024, 2, 2), (4096, 2048, 1, 2))  # TILE, TAIL, blocks an SM, rows under way


def between(dtype, piece, tail):
    """Rows of more than `piece` segments, and at most `tail` more."""
    return Array(dtype, (None, None, SEGMENT), at_least=(1, piece + 1, 1), at_most=(None, piece + tail, None))


def variants():
    dtype = "bfloat16"
    for piece, tail in TAILS:
        a, p, constants = between(dtype, piece, tail), columns(dtype, SEGMENT), {"SEGMENT": SEGMENT, "PIECE": piece, "TAIL": tail}
        hints: dict[str, Any] = {"occupancy": 4, "num_worker_warps": 8} if piece > 32 else {"occupancy": 6}
        options: Params = {**OPTIONS, **constants}
        yield Variant(general_rms_norm_forward, {"x": a, "weight": p, "y": a, "rstd": PER_ROW, **options}, hints=hints)
        sums: Params = {"x": a, "residual": a, "weight": p, "total": a, "y": a, "rstd": PER_ROW}
        yield Variant(general_add_rms_norm_forward, {**sums, **options}, hints=hints)
        both: Params = {"branch": a, "residual": a, "inner": p}
        yield Variant(norm_add_forward, {**both, "total": a, "inner_rstd": PER_ROW, **options}, hints=hints)
        norms: Params = {**both, "weight": p, "total": a, "y": a, "inner_rstd": PER_ROW, "rstd": PER_ROW}
        yield Variant(norm_add_norm_forward, {**norms, **options}, hints=hints)
    for tile, tail, occupancy, latency in BACKWARD:
        a = Array(dtype, (None, None), at_least=(1, tile + 1), at_most=(None, tile + tail))
        constants = {"TILE": tile, "TAIL": tail, "LATENCY": latency}
        partial = Array("float32", (None, None))
        found: Params = {"x": a, "weight": Array(dtype, (None,)), "rstd": PER_ROW, "partial": partial, "offset": FLOAT}
        hints = {"occupancy": occupancy, "num_worker_warps": 8}
        yield Variant(general_rms_norm_backward, {"dx": a, "dy": a, **found, **constants}, hints=hints)
        yield Variant(general_add_rms_norm_backward, {"dx": a, "dy": a, "dtotal": a, **found, **constants}, hints=hints)
