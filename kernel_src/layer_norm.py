"""LayerNorm over rows (Ba, Kiros and Hinton 2016, arXiv 1607.06450):

    n = (x - mean) * rstd        rstd = 1 / sqrt(mean((x - mean)^2) + eps)        y = weight * n + bias

Backward, with g = dy * weight:

    dx = (g - mean(g) - n * mean(g * n)) * rstd        dweight = sum over rows of dy * n        dbias = sum over rows of dy

The variance is taken around the mean, never as a difference of squares, which loses all digits where the mean is large. A row that
fits into the registers is read once. A longer one is read twice: every lane keeps the mean and the squared deviations of what it
has seen (Welford), and the lanes are joined by Chan's formula.

The gradients of the parameters are summed in fp32 by each block over the rows that it walks over, and `column_sum` adds up the blocks:
two runs give the same bits.

A forward pass lets the launch behind it start while its last blocks run (`grid_dependency_control_launch_dependents`): where that is a
backward pass, which waits by itself, the pair takes 1 % less on an H200. Other norms were level or 1 % slower with it.
"""

import cuda.tile as ct

from kernel_src.elements import block_from_last, read, read_once, write
from kernel_src.prebuild import FLOAT, Array, Params, Variant
from kernel_src.segments import MIXED, PER_ROW, SAME, SEGMENT, columns, place, rows, sum_of, two_sums

Const = ct.Constant[int]


# ---------------------------------------------------------------- forward
@ct.kernel
def layer_norm_forward(x, weight, bias, y, mean, rstd, eps: float, SEGMENT: Const, PIECE: Const):
    """x, y: [rows, segments, SEGMENT], at most PIECE segments; weight, bias: [segments, SEGMENT]; mean, rstd: [rows] fp32."""
    ct.grid_dependency_control_launch_dependents()
    row, count = ct.bid(0), x.shape[1]
    segment, valid = place(0, count, PIECE)
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    index = (segment[:, None], column)
    length = ct.astype(count * SEGMENT, ct.float32)
    xf = read_once(x, (row, segment[:, None], column))
    # Asked for before the sums of the row are waited for.
    w, b = ct.gather(weight, index, check_bounds=False), ct.gather(bias, index, check_bounds=False)
    mu = sum_of(ct.where(valid[:, None], xf, 0.0), PIECE, SEGMENT) / length
    deviation = xf - mu
    r = ct.rsqrt(sum_of(ct.where(valid[:, None], deviation * deviation, 0.0), PIECE, SEGMENT) / length + eps)
    write(y, (row, segment[:, None], column), deviation * r * ct.astype(w, ct.float32) + ct.astype(b, ct.float32))
    ct.scatter(mean, row, mu, check_bounds=False)
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def layer_norm_exact_forward(x, weight, bias, y, mean, rstd, eps: float, TILE: Const):
    """Computes what `layer_norm_forward` does for rows of exactly TILE elements, [rows, TILE]; weight, bias: [TILE]."""
    ct.grid_dependency_control_launch_dependents()
    row, column = ct.bid(0), ct.arange(TILE, dtype=ct.int32)
    xf = read(x, (row, column))
    # Asked for before the sums of the row are waited for.
    w, b = ct.gather(weight, column, check_bounds=False), ct.gather(bias, column, check_bounds=False)
    mu = ct.sum(xf, axis=0, keepdims=False) * (1.0 / TILE)
    deviation = xf - mu
    r = ct.rsqrt(ct.sum(deviation * deviation, axis=0, keepdims=False) * (1.0 / TILE) + eps)
    write(y, (row, column), deviation * r * ct.astype(w, ct.float32) + ct.astype(b, ct.float32))
    ct.scatter(mean, row, mu, check_bounds=False)
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.function
def row_statistics(x, row, first, count, PIECE: Const, SEGMENT: Const):
    """(mean, sum of squared deviations) of `count` segments of a row from `first` on."""
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    mean = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    squares = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    for i in range(ct.cdiv(count, PIECE)):
        segment, valid = place(i, count, PIECE)
        xf = read_once(x, (row, (first + segment)[:, None], column))
        deviation = ct.where(valid[:, None], xf - mean, 0.0)
        mean = mean + deviation * (1.0 / ct.astype(i + 1, ct.float32))
        squares = squares + deviation * (xf - mean)
    # How many values each lane has seen: cdiv(count - lane, PIECE), none for the lanes behind a short row.
    seen = ct.astype((count - ct.arange(PIECE, dtype=ct.int32) + (PIECE - 1)) // PIECE, ct.float32)
    seen = ct.maximum(seen, 0.0)[:, None]
    mu = sum_of(mean * seen, PIECE, SEGMENT) / ct.astype(count * SEGMENT, ct.float32)
    return mu, sum_of(squares + seen * (mean - mu) * (mean - mu), PIECE, SEGMENT)


@ct.kernel
def layer_norm_long_forward(x, weight, bias, y, mean, rstd, eps: float, SEGMENT: Const, PIECE: Const):
    """Computes what `layer_norm_forward` does for rows of any number of segments, which are read twice."""
    row, count = ct.bid(0), x.shape[1]
    mu, squares = row_statistics(x, row, 0, count, PIECE, SEGMENT)
    r = ct.rsqrt(squares / ct.astype(count * SEGMENT, ct.float32) + eps)
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    for i in range(ct.cdiv(count, PIECE)):
        segment, _ = place(i, count, PIECE)
        index = (segment[:, None], column)
        n = (read_once(x, (row, segment[:, None], column)) - mu) * r
        write(y, (row, segment[:, None], column), n * read_once(weight, index) + read_once(bias, index))
    ct.scatter(mean, row, mu, check_bounds=False)
    ct.scatter(rstd, row, r, check_bounds=False)


# ---------------------------------------------------------------- backward
@ct.function
def read_row(array, row, TILE: Const, LATENCY: Const):
    """A row as [1, TILE] in float32, zero past its end; where there are tile copies (TMA), LATENCY rows are under way."""
    tile = ct.load(array, index=(row, 0), shape=(1, TILE), latency=LATENCY, padding_mode=ct.PaddingMode.ZERO)
    return ct.astype(tile, ct.float32)


@ct.kernel
def layer_norm_backward(dx, dy, x, weight, mean, rstd, partial, TILE: Const, LATENCY: Const):
    """dx, dy, x: [rows, length], length at most TILE; weight: [length]; mean, rstd: [rows] fp32; partial: [blocks, 2, length] fp32,
    a block's sums for dweight and dbias. A block walks over rows."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    block = ct.bid(0)
    one = 1.0 / ct.astype(x.shape[1], ct.float32)
    w = ct.load(weight, index=(0,), shape=(TILE,), padding_mode=ct.PaddingMode.ZERO)
    w = ct.astype(ct.reshape(w, (1, TILE)), ct.float32)
    dweight = ct.zeros((1, TILE), dtype=ct.float32)
    dbias = ct.zeros((1, TILE), dtype=ct.float32)
    for i in range(block, x.shape[0], ct.num_blocks(0)):
        row = x.shape[0] - 1 - i  # what wrote dy or read x before this has left the last rows in the L2
        d = read_row(dy, row, TILE, LATENCY)  # zero past the end, and so is all that is summed
        r = ct.gather(rstd, row, check_bounds=False)
        n = (read_row(x, row, TILE, LATENCY) - ct.gather(mean, row, check_bounds=False)) * r
        g = d * w
        sum_g, sum_gn = two_sums(g, g * n, TILE)
        # (g - mean(g) - n * mean(g * n)) * r, with r on the scalars' side.
        gradient = g * r - (n * (sum_gn * one * r) + sum_g * one * r)
        ct.store(dx, index=(row, 0), tile=ct.astype(gradient, dx.dtype))
        dweight = dweight + d * n
        dbias = dbias + d
    ct.store(partial, index=(block, 0, 0), tile=ct.reshape(dweight, (1, 1, TILE)))
    ct.store(partial, index=(block, 1, 0), tile=ct.reshape(dbias, (1, 1, TILE)))


@ct.kernel
def layer_norm_exact_backward(dx, dy, x, weight, mean, rstd, partial, TILE: Const):
    """Computes what `layer_norm_backward` does for rows of exactly TILE elements, without masks and tile copies: the next row is asked
    for before the one that is there is worked on."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    block, last = ct.bid(0), x.shape[0] - 1
    column = ct.arange(TILE, dtype=ct.int32)
    w = ct.gather(weight, column, check_bounds=False, latency=1)
    dweight = ct.zeros((TILE,), dtype=ct.float32)
    dbias = ct.zeros((TILE,), dtype=ct.float32)
    first = last - ct.minimum(block, last)
    d_raw = ct.gather(dy, (first, column), check_bounds=False, latency=1)
    x_raw = ct.gather(x, (first, column), check_bounds=False, latency=1)
    for i in range(block, x.shape[0], ct.num_blocks(0)):
        row, following = last - i, last - ct.minimum(i + ct.num_blocks(0), last)  # the last rows first, as above
        d_next = ct.gather(dy, (following, column), check_bounds=False, latency=1)
        x_next = ct.gather(x, (following, column), check_bounds=False, latency=1)
        r, mu = ct.gather(rstd, row, check_bounds=False), ct.gather(mean, row, check_bounds=False)
        d = ct.astype(d_raw, ct.float32)
        n = (ct.astype(x_raw, ct.float32) - mu) * r
        g = d * ct.astype(w, ct.float32)
        sum_g, sum_gn = two_sums(g, g * n, TILE)
        write(dx, (row, column), g * r - (n * (sum_gn * (r / TILE)) + sum_g * (r / TILE)))
        dweight = dweight + d * n
        dbias = dbias + d
        d_raw, x_raw = d_next, x_next
    ct.scatter(partial, (block, 0, column), dweight, check_bounds=False)
    ct.scatter(partial, (block, 1, column), dbias, check_bounds=False)


@ct.kernel
def layer_norm_row_means(dy, x, weight, mean, rstd, means, SEGMENT: Const, PIECE: Const):
    """means: [rows, 2] fp32, mean(g) and mean(g * n) of each row; the rest as in `layer_norm_long_forward`."""
    row, count = block_from_last(), x.shape[1]
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    mu, r = ct.gather(mean, row, check_bounds=False), ct.gather(rstd, row, check_bounds=False)
    sum_g = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    sum_gn = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    for i in range(ct.cdiv(count, PIECE)):
        segment, valid = place(i, count, PIECE)
        index = (row, segment[:, None], column)
        g = ct.where(valid[:, None], read_once(dy, index) * read_once(weight, (segment[:, None], column)), 0.0)
        sum_g = sum_g + g
        sum_gn = sum_gn + g * (read_once(x, index) - mu)
    length = ct.astype(count * SEGMENT, ct.float32)
    total_g, total_gn = two_sums(sum_g, sum_gn, PIECE * SEGMENT)
    ct.scatter(means, (row, 0), total_g / length, check_bounds=False)
    ct.scatter(means, (row, 1), total_gn * r / length, check_bounds=False)


@ct.kernel
def layer_norm_columns_backward(dx, dy, x, weight, mean, rstd, means, partial, SEGMENT: Const, PIECE: Const):
    """The gradients of rows of any length, whose means are known. partial: [groups, 2, segments, SEGMENT] fp32. A block has PIECE
    segments of the columns, and walks over the rows of one of the groups."""
    count, groups = x.shape[1], partial.shape[0]
    pieces = ct.cdiv(count, PIECE)
    group = ct.bid(0) // pieces
    segment, _ = place(ct.bid(0) % pieces, count, PIECE)
    segment, column = segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    w = read_once(weight, (segment, column))
    dweight = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    dbias = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    for row in range(group, x.shape[0], groups):
        r = ct.gather(rstd, row, check_bounds=False)
        n = (read_once(x, (row, segment, column)) - ct.gather(mean, row, check_bounds=False)) * r
        d = read_once(dy, (row, segment, column))
        mean_g, mean_gn = ct.gather(means, (row, 0), check_bounds=False), ct.gather(means, (row, 1), check_bounds=False)
        write(dx, (row, segment, column), (d * w - mean_g - n * mean_gn) * r)
        dweight = dweight + d * n
        dbias = dbias + d
    ct.scatter(partial, (group, 0, segment, column), dweight, check_bounds=False)
    ct.scatter(partial, (group, 1, segment, column), dbias, check_bounds=False)


# ---------------------------------------------------------------- what is prebuilt
# Rows in registers, forward: segments of 64, the shortest first.
WHOLE = {"bfloat16": (16, 32, 64, 128), "float16": (64,), "float32": (64,)}
EXACT = (("bfloat16", 4096),)  # lengths of rows with a kernel of their own
# Rows in registers, backward: TILE, how many blocks an SM holds, and how many rows a block has under way.
WHOLE_BACKWARD = {
    "bfloat16": ((1024, 4, 2), (2048, 3, 2), (4096, 2, 2), (8192, 1, 2)),
    "float16": ((4096, 2, 2),),
    "float32": ((2048, 2, 2),),
}
LONG_PIECE = {SEGMENT: 32, 1: 1024}
COLUMNS_PIECE = {SEGMENT: 16, 1: 512}


def forward(kernel, x, w, segment, piece, at_most=None, **options):
    a, p = rows(x, segment, at_most), columns(w, segment)
    constants = {"SEGMENT": segment, "PIECE": piece}
    return Variant(kernel, {"x": a, "weight": p, "bias": p, "y": a, "mean": PER_ROW, "rstd": PER_ROW, "eps": FLOAT, **constants}, **options)


def long_backward(x, w, segment):
    a, p, means = rows(x, segment), columns(w, segment), Array("float32", (None, 2), aligned=False)
    statistics = {"mean": PER_ROW, "rstd": PER_ROW, "means": means}
    constants = {"SEGMENT": segment, "PIECE": LONG_PIECE[segment]}
    yield Variant(layer_norm_row_means, {"dy": a, "x": a, "weight": p, **statistics, **constants})
    partial = Array("float32", (None, 2, None, segment), aligned=segment > 1)
    constants = {"SEGMENT": segment, "PIECE": COLUMNS_PIECE[segment]}
    yield Variant(layer_norm_columns_backward, {"dx": a, "dy": a, "x": a, "weight": p, **statistics, "partial": partial, **constants})


def variants():
    for x, w in SAME:
        for piece in WHOLE[x]:
            # 8 blocks of 4 warps or 4 blocks of 8 warps fill an SM's threads and leave 64 registers to each.
            wide = piece > 64 or x == "float32"
            hints = {"occupancy": 4, "num_worker_warps": 8} if wide else {"occupancy": 8}
            yield forward(layer_norm_forward, x, w, SEGMENT, piece, piece, hints=hints)
        for tile, occupancy, latency in WHOLE_BACKWARD[x]:
            a = Array(x, (None, None), at_most=(None, tile))
            grads = {"dx": a, "dy": a, "x": a, "weight": Array(w, (None,)), "mean": PER_ROW, "rstd": PER_ROW}
            partial = Array("float32", (None, 2, None))
            hints = {"occupancy": occupancy, **({"num_worker_warps": 8} if tile >= 4096 else {})}
            yield Variant(layer_norm_backward, {**grads, "partial": partial, "TILE": tile, "LATENCY": latency}, hints=hints)
    for x, tile in EXACT:
        # 36.5 us for 8192 rows of 4096 on an H200; the kernel for rows of at most as many, which has masks, took 38.4.
        a, p = Array(x, (None, tile)), Array(x, (tile,))
        inputs: Params = {"x": a, "weight": p, "bias": p, "y": a, "mean": PER_ROW, "rstd": PER_ROW, "eps": FLOAT, "TILE": tile}
        yield Variant(layer_norm_exact_forward, inputs, hints={"occupancy": 8})
        # 95.1 us forward and backward, column sums included; with the kernel for rows of at most as many 97.3.
        grads = {"dx": a, "dy": a, "x": a, "weight": p, "mean": PER_ROW, "rstd": PER_ROW, "partial": Array("float32", (None, 2, tile))}
        yield Variant(layer_norm_exact_backward, {**grads, "TILE": tile}, hints={"occupancy": 2, "num_worker_warps": 8})
    for x, w in SAME + MIXED:
        for segment in (SEGMENT, 1):
            yield forward(layer_norm_long_forward, x, w, segment, LONG_PIECE[segment], hints={"occupancy": 8 if x == w else 6})
            yield from long_backward(x, w, segment)
