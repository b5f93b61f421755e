"""Softmax over the last dimension: y[j] = exp(x[j] - max(x)) / sum(exp(x - max(x))).

    dx[j] = y[j] * (dy[j] - sum(dy * y))

Rows of up to 16384 elements in fp32, and of 4096 in half precision, stay in registers, one or several of them a block: 2 passes over
memory forward, 3 backward. So do rows of up to 32768 in half precision, as they lie in memory, which takes half of the registers and holds
twice the rows on an SM (2048 of 16384 took an H200 87 us, forward and backward, and 122 in float32); and, where several SMs can share a
block, most of those of up to 163840 (a vocabulary has 128256 or 151936). Other rows are cut into pieces: the maximum and the sum of every
piece, those of a row from them, and a second reading that writes. There the sum of dy * y is one more pass of the backward, too.

Exponentials are taken in base 2, of differences to the maximum: x * log2(e) - max * log2(e) instead would be off by the rounding of the
products, 6e-4 where x is 1e4. lse is log(sum(e^x)), kept as two numbers as in cross_entropy.py.
"""

import cuda.tile as ct

from kernel_src.cross_entropy import write_lse
from kernel_src.elements import block_from_last, write_within
from kernel_src.prebuild import FLOAT, FLOATS, Array, PerArchitecture, Variant
from kernel_src.row_tiles import (
    HALF,
    MINUS_INFINITY,
    converted_again,
    held_maxima,
    held_tiles,
    piece,
    read,
    rows_of_block,
    tile_columns,
)

Const = ct.Constant[int]
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


# ---------------------------------------------------------------- whole rows
@ct.kernel
def softmax_forward(x, y, ROWS: Const, TILE: Const):
    """x, y: [rows, columns], columns at most TILE. ROWS rows a block."""
    ct.grid_dependency_control_launch_dependents()
    at = rows_of_block(ct.bid(0), ROWS, TILE)
    v = read(x, at, MINUS_INFINITY)
    p = ct.exp2((v - ct.max(v, 1, keepdims=True)) * LOG2E, flush_to_zero=True)
    write_within(y, at, p * (1.0 / ct.sum(p, 1, keepdims=True)))


@ct.kernel
def softmax_backward(y, dy, dx, ROWS: Const, TILE: Const):
    """y, dy, dx: [rows, columns], columns at most TILE. ROWS rows a block."""
    ct.grid_dependency_control_wait()
    at = rows_of_block(block_from_last(), ROWS, TILE)
    p, d = read(y, at, 0), read(dy, at, 0)
    write_within(dx, at, p * (d - ct.sum(p * d, 1, keepdims=True)))


# ---------------------------------------------------------------- whole rows as they lie in memory
@ct.kernel
def softmax_held_forward(x, y, TILE: Const, TILES: Const):
    """x, y: [rows, columns], columns at most TILE * TILES. One row a block."""
    ct.grid_dependency_control_launch_dependents()
    row = ct.bid(0)
    tiles = held_tiles(x, row, TILE, TILES, MINUS_INFINITY)
    m = ct.astype(ct.max(held_maxima(tiles, TILES), 0), ct.float32)
    total = ct.zeros((TILE,), dtype=ct.float32)
    for i in ct.static_iter(range(TILES)):
        total = total + ct.exp2((ct.astype(tiles[i], ct.float32) - m) * LOG2E, flush_to_zero=True)
    s = ct.sum(total, 0)
    for i in ct.static_iter(range(TILES)):
        p = ct.exp2((converted_again(tiles[i], s) - m) * LOG2E, flush_to_zero=True)
        write_within(y, (row, tile_columns(i, TILE)), p * (1.0 / s))


@ct.function
def held_dot(p, d, TILES: Const):
    """The sum of p * d over all tiles of a row, a scalar."""
    total = ct.astype(p[0], ct.float32) * ct.astype(d[0], ct.float32)
    for i in ct.static_iter(range(1, TILES)):
        total = total + ct.astype(p[i], ct.float32) * ct.astype(d[i], ct.float32)
    return ct.sum(total)


@ct.kernel
def softmax_held_backward(y, dy, dx, TILE: Const, TILES: Const):
    """y, dy, dx: as in `softmax_held_forward`; y and dy are held. One row a block."""
    ct.grid_dependency_control_wait()
    row = block_from_last()
    p, d = held_tiles(y, row, TILE, TILES, 0), held_tiles(dy, row, TILE, TILES, 0)
    dot, count = held_dot(p, d, TILES), ct.astype(y.shape[0], ct.float32)
    for i in ct.static_iter(range(TILES)):
        write_within(dx, (row, tile_columns(i, TILE)), converted_again(p[i], count) * (converted_again(d[i], count) - dot))


@ct.kernel
def softmax_walking_backward(y, dy, dx, TILE: Const, TILES: Const):
    """Computes the gradient of rows of which an SM holds one. A block walks over rows, the last first, and where it has written a tile,
    it asks for that of its next row."""
    ct.grid_dependency_control_wait()
    first, step = y.shape[0] - 1 - ct.bid(0), ct.num_blocks(0)
    p, d = held_tiles(y, first, TILE, TILES, 0), held_tiles(dy, first, TILE, TILES, 0)
    count = ct.astype(y.shape[0], ct.float32)
    for walked in range(ct.bid(0), y.shape[0], step):
        row = y.shape[0] - 1 - walked
        following = ct.maximum(row - step, 0)
        dot = held_dot(p, d, TILES)
        next_p, next_d = (), ()
        for i in ct.static_iter(range(TILES)):
            cols = tile_columns(i, TILE)
            write_within(dx, (row, cols), converted_again(p[i], count) * (converted_again(d[i], count) - dot))
            next_p = (*next_p, ct.gather(y, (following, cols), check_bounds=True, padding_value=0, latency=1))  # type: ignore[assignment]
            next_d = (*next_d, ct.gather(dy, (following, cols), check_bounds=True, padding_value=0, latency=1))  # type: ignore[assignment]
        p, d = next_p, next_d


@ct.function
def copied_tiles(array, row, TILE: Const, TILES: Const, LATENCY: Const):
    """A row of just TILE * TILES elements in its own dtype, by tile copies (TMA), of which LATENCY are under way."""
    found = ()
    for i in ct.static_iter(range(TILES)):
        tile = ct.load(array, index=(row, i), shape=(1, TILE), latency=LATENCY, check_bounds=False)
        found = (*found, tile)  # type: ignore[assignment]
    return found


@ct.kernel
def softmax_copied_backward(y, dy, dx, TILE: Const, TILES: Const, LATENCY: Const):
    """Computes what `softmax_walking_backward` does for rows of exactly TILE * TILES elements: the next row lies in shared memory before
    this one's sum is known. With lengths that are not promised, and so padded copies, it takes longer than with gathers."""
    ct.grid_dependency_control_wait()
    last, count = y.shape[0] - 1, ct.astype(y.shape[0], ct.float32)
    for walked in range(ct.bid(0), y.shape[0], ct.num_blocks(0)):
        row = last - walked
        p, d = copied_tiles(y, row, TILE, TILES, LATENCY), copied_tiles(dy, row, TILE, TILES, LATENCY)
        dot = held_dot(p, d, TILES)
        for i in ct.static_iter(range(TILES)):
            tile = converted_again(p[i], count) * (converted_again(d[i], count) - dot)
            ct.store(dx, index=(row, i), tile=ct.astype(tile, dx.dtype), check_bounds=False)


# ---------------------------------------------------------------- whole rows on several SMs
@ct.function
def finite(m):
    """A maximum to subtract. What is -inf everywhere has the sum 0, not the NaN of -inf - -inf."""
    return ct.where(m == MINUS_INFINITY, 0.0, m)


def joined(m, s, n, t):
    """The maximum and the sum of 2^((v - maximum) * log2(e)) of what has the maxima m and n and the sums s and t."""
    high = ct.maximum(m, n)
    at = finite(high)
    return high, s * ct.exp2((m - at) * LOG2E, flush_to_zero=True) + t * ct.exp2((n - at) * LOG2E, flush_to_zero=True)


@ct.function
def sliced_tiles(array, slices, row, TILE: Const, TILES: Const, padding):
    """A row as `held_tiles` gives it, in TILES tiles for each of the slices that the result is written in."""
    width = slices[0].shape[1]
    found = ()
    for k in ct.static_iter(range(len(slices))):
        for i in ct.static_iter(range(TILES)):
            cols = tile_columns(i, TILE)
            inside = cols < slices[k].shape[1]
            tile = ct.gather(array, (row, k * width + cols), mask=inside, check_bounds=False, padding_value=padding)
            found = (*found, tile)  # type: ignore[assignment]
    return found


@ct.function
def spread_forward(x, slices, TILE: Const, TILES: Const):
    """x: [rows, columns]; slices: of the columns of y, equally wide but for the last, which is not wider, and of at most TILE * TILES
    columns. One row a block.

    A block is a cluster of SMs (`num_ctas`), which divides every tile. Stores to one array keep their order, and in a cluster each of them
    waits until all SMs see the one before, so the result comes in slices, an array each: 2048 rows of 151936 took an H200 505 us with
    one array and 397 with five. Every place of the tiles has a maximum of its own in the sum, so that the SMs meet once."""
    row = ct.bid(0)
    tiles = sliced_tiles(x, slices, row, TILE, TILES, MINUS_INFINITY)
    highest = ct.astype(held_maxima(tiles, len(slices) * TILES), ct.float32)
    base, total = finite(highest), ct.zeros((TILE,), dtype=ct.float32)
    for i in ct.static_iter(range(len(slices) * TILES)):
        total = total + ct.exp2((ct.astype(tiles[i], ct.float32) - base) * LOG2E, flush_to_zero=True)
    m, s = ct.reduce((highest, total), 0, joined, (MINUS_INFINITY, 0.0))
    log_sum = ct.log2(s)
    for i in ct.static_iter(range(TILES)):
        for k in ct.static_iter(range(len(slices))):
            p = ct.exp2((converted_again(tiles[k * TILES + i], s) - m) * LOG2E - log_sum, flush_to_zero=True)
            write_within(slices[k], (row, tile_columns(i, TILE)), p)


@ct.function
def spread_backward(y, dy, slices, TILE: Const, TILES: Const):
    """y, dy: [rows, columns], both held; slices: of dx, as in `spread_forward`."""
    row = ct.bid(0)
    p, d = sliced_tiles(y, slices, row, TILE, TILES, 0), sliced_tiles(dy, slices, row, TILE, TILES, 0)
    total = ct.zeros((TILE,), dtype=ct.float32)  # `held_dot`, which does not begin with zero, takes 2 % longer here
    for i in ct.static_iter(range(len(slices) * TILES)):
        total = total + ct.astype(p[i], ct.float32) * ct.astype(d[i], ct.float32)
    dot, count = ct.sum(total, 0), ct.astype(y.shape[0], ct.float32)
    for i in ct.static_iter(range(TILES)):
        for k in ct.static_iter(range(len(slices))):
            at = k * TILES + i
            write_within(slices[k], (row, tile_columns(i, TILE)), converted_again(p[at], count) * (converted_again(d[at], count) - dot))


@ct.kernel
def softmax_spread_5_forward(x, y0, y1, y2, y3, y4, TILE: Const, TILES: Const):
    """x: [rows, columns]; y0 to y4: slices of the columns of y, see `spread_forward`."""
    spread_forward(x, (y0, y1, y2, y3, y4), TILE, TILES)


@ct.kernel
def softmax_spread_8_forward(x, y0, y1, y2, y3, y4, y5, y6, y7, TILE: Const, TILES: Const):
    """Computes what `softmax_spread_5_forward` does, in eight slices."""
    spread_forward(x, (y0, y1, y2, y3, y4, y5, y6, y7), TILE, TILES)


@ct.kernel
def softmax_spread_5_backward(y, dy, dx0, dx1, dx2, dx3, dx4, TILE: Const, TILES: Const):
    """y, dy: [rows, columns]; dx0 to dx4: slices of the columns of dx, see `spread_backward`."""
    ct.grid_dependency_control_wait()
    spread_backward(y, dy, (dx0, dx1, dx2, dx3, dx4), TILE, TILES)


@ct.kernel
def softmax_spread_8_backward(y, dy, dx0, dx1, dx2, dx3, dx4, dx5, dx6, dx7, TILE: Const, TILES: Const):
    """Computes what `softmax_spread_5_backward` does, in eight slices."""
    ct.grid_dependency_control_wait()
    spread_backward(y, dy, (dx0, dx1, dx2, dx3, dx4, dx5, dx6, dx7), TILE, TILES)


# ---------------------------------------------------------------- rows in pieces
@ct.function
def join_partials(part_max, part_sum, row, scale, PARTS: Const):
    """The maximum of a whole row, and its sum of 2^((v - maximum) * scale), from those of its pieces."""
    m = ct.full((), MINUS_INFINITY, dtype=ct.float32)
    s = ct.zeros((), dtype=ct.float32)
    for i in range(ct.cdiv(part_max.shape[1], PARTS)):
        parts = i * PARTS + ct.arange(PARTS, dtype=ct.int32)
        pm = ct.gather(part_max, (row, parts), check_bounds=True, padding_value=MINUS_INFINITY)
        ps = ct.gather(part_sum, (row, parts), check_bounds=True, padding_value=0)
        new = ct.maximum(m, ct.max(pm, 0))
        s = s * ct.exp2((m - finite(new)) * scale) + ct.sum(ps * ct.exp2((pm - finite(new)) * scale), 0)
        m = new
    return m, s


@ct.kernel
def softmax_statistics(x, part_max, part_sum, scale: float, TILE: Const):
    """The maximum of each piece, and the sum of exp((x - maximum) * scale). x: [rows, columns]; part_max, part_sum: [rows, pieces] fp32,
    pieces = ceil(columns / TILE); scale: above 0."""
    ct.grid_dependency_control_wait()
    row, part, cols = piece(ct.bid(0), x, TILE)
    v = ct.gather(x, (row, cols), check_bounds=True, padding_value=MINUS_INFINITY)
    # The maximum of what lies in memory, as it lies: instructions bound half precision.
    m = ct.astype(ct.max(v, 0), ct.float32)
    s = ct.sum(ct.exp2((ct.astype(v, ct.float32) - finite(m)) * (scale * LOG2E), flush_to_zero=True), 0)
    ct.scatter(part_max, (row, part), m, check_bounds=False)
    ct.scatter(part_sum, (row, part), s, check_bounds=False)


@ct.kernel
def softmax_combine(part_max, part_sum, lse, scale: float, PARTS: Const):
    """lse: [rows, 2] fp32: the maximum of x, and log(sum(exp((x - maximum) * scale))). One row a block."""
    ct.grid_dependency_control_wait()
    row = ct.bid(0)
    m, s = join_partials(part_max, part_sum, row, scale * LOG2E, PARTS)
    write_lse(lse, row, m, ct.log2(s) * LN2)


@ct.kernel
def softmax_totals(part_max, part_sum, maximum, total, PARTS: Const):
    """maximum, total: [rows] fp32, the largest x of a row and its sum of exp(x - maximum). One row a block."""
    ct.grid_dependency_control_wait()
    row = ct.bid(0)
    m, s = join_partials(part_max, part_sum, row, LOG2E, PARTS)
    ct.scatter(maximum, row, m, check_bounds=False)
    ct.scatter(total, row, s, check_bounds=False)


@ct.kernel
def softmax_apply(x, maximum, total, y, TILE: Const):
    """x, y: [rows, columns]; maximum, total: [rows] fp32, as softmax_totals writes them."""
    row, _, cols = piece(block_from_last(), x, TILE)
    raw = ct.gather(x, (row, cols), check_bounds=True, padding_value=MINUS_INFINITY)
    ct.grid_dependency_control_wait()
    v = (ct.astype(raw, ct.float32) - ct.gather(maximum, row, check_bounds=False)) * LOG2E
    write_within(y, (row, cols), ct.exp2(v, flush_to_zero=True) * (1.0 / ct.gather(total, row, check_bounds=False)))


@ct.kernel
def softmax_dot(y, dy, partial, TILE: Const):
    """partial: [rows, pieces] fp32, the sums of y * dy over the pieces."""
    ct.grid_dependency_control_wait()
    row, part, cols = piece(ct.bid(0), y, TILE)
    dot = ct.sum(read(y, (row, cols), 0) * read(dy, (row, cols), 0), 0)
    ct.scatter(partial, (row, part), dot, check_bounds=False)


@ct.kernel
def softmax_gradient(y, dy, dot, dx, TILE: Const):
    """dot: [rows] fp32, the sum of y * dy over a row."""
    row, _, cols = piece(block_from_last(), y, TILE)
    p, d = read(y, (row, cols), 0), read(dy, (row, cols), 0)
    ct.grid_dependency_control_wait()
    write_within(dx, (row, cols), p * (d - ct.gather(dot, row, check_bounds=False)))


# ROWS, TILE, warps. A block holds a whole row in registers, so the shortest tile that a row fits in is the one to take.
ROW_TILES = ((16, 128, 4), (4, 1024, 4), (1, 4096, 4), (1, 8192, 8), (1, 16384, 8))
LONGEST_HALF = 4096  # of them in half precision
STATISTICS_PIECE, PIECE, WRITTEN_PIECE, PARTS = 8192, 4096, 2048, 32
HELD_TILE = 4096  # of rows that are held as they lie in memory: in half precision
# TILES, warps and blocks an SM; with as many blocks as sm_90 has, sm_100 spills.
HELD_FORWARD = ((2, 4, PerArchitecture(5, "sm_90", 6)), (4, 8, PerArchitecture(2, "sm_90", 4)), (8, 8, 2))
HELD_BACKWARD = ((2, 8, 4), (4, 8, 2))
# One block an SM, which walks over rows: 2048 rows of 24576 took an H200 82 us and of 32768 107. Where a block had one row they took 98 and
# 106, and where two blocks an SM held y alone 87 and 115; with tile copies those of 32768 take 104.
WALKING = {"TILE": HELD_TILE, "TILES": 8}
WALKING_HINTS = {"num_worker_warps": 8, "occupancy": 1}
COPIED, COPIED_TARGETS = {**WALKING, "LATENCY": 4}, ("sm_90",)


# Rows that a cluster of SMs holds, on an H200 (elsewhere nobody has measured them, and each variant takes room): columns from and to,
# slices, TILE, TILES, SMs, warps, blocks an SM. 2048 rows took, forward and backward, of 65536 181 + 217 us, of 81920 197 + 255, of 128256
# 321 + 421 and of 151936 383 + 544; in pieces 205 + 318, 253 + 393, 386 + 604 and 453 + 710. All tiles of a row are computed, full or not,
# so the shortest rows that win differ.
SPREAD_TARGETS = ("sm_90",)
SPREAD_FORWARD = ((57344, 81920, 5, 8192, 2, 4, 4, 4), (98304, 131072, 8, 8192, 2, 8, 4, 4), (131073, 163840, 5, 16384, 2, 8, 4, 4))
SPREAD_BACKWARD = ((49152, 81920, 5, 16384, 1, 8, 4, 4), (81921, 131072, 8, 16384, 1, 8, 4, 3), (131073, 163840, 5, 16384, 2, 8, 8, 2))


def whole_rows(dtype, longest, *kernels):
    """Variants of kernels, each with the names of its arrays, for rows of every length up to a tile."""
    for rows, tile, warps in ROW_TILES:
        if tile > longest:
            break
        arrays = (Array(dtype, (None, None), divisible=(1, 16)), Array(dtype, (None, None), aligned=False))
        for x in arrays if tile in (1024, 4096) else arrays[:1]:
            hints = {} if warps == 4 else {"num_worker_warps": warps}
            for kernel, names in kernels:
                yield Variant(kernel, {**dict.fromkeys(names, x), "ROWS": rows, "TILE": tile}, hints=hints)


def spread_rows(dtype, table, inputs, output, kernels):
    """Variants of the kernels of rows that several SMs hold, by their number of slices. inputs: names; output: the first part of those of
    the slices."""
    for shortest, longest, slices, tile, tiles, ctas, warps, blocks in table:
        row = Array(dtype, (None, None), divisible=(1, 16), at_least=(1, shortest), at_most=(None, longest))
        part = Array(dtype, (None, None), divisible=(1, 16), at_most=(None, tile * tiles))
        arrays = {**dict.fromkeys(inputs, row), **{f"{output}{i}": part for i in range(slices)}}
        hints = {"num_ctas": ctas, "num_worker_warps": warps, "occupancy": blocks}
        yield Variant(kernels[slices], {**arrays, "TILE": tile, "TILES": tiles}, hints=hints, targets=SPREAD_TARGETS)


def variants():
    vector, matrix = Array("float32", (None,), aligned=False), Array("float32", (None, None), aligned=False)
    for dtype in HALF:
        x = Array(dtype, (None, None), divisible=(1, 16))
        forward, backward = dict.fromkeys(("x", "y"), x), dict.fromkeys(("y", "dy", "dx"), x)
        for kernel, arrays, table in (softmax_held_forward, forward, HELD_FORWARD), (softmax_held_backward, backward, HELD_BACKWARD):
            for tiles, warps, blocks in table:
                hints = {"num_worker_warps": warps, "occupancy": blocks}
                yield Variant(kernel, {**arrays, "TILE": HELD_TILE, "TILES": tiles}, hints=hints)
        exact = dict.fromkeys(backward, Array(dtype, (None, HELD_TILE * WALKING["TILES"])))
        yield Variant(softmax_copied_backward, {**exact, **COPIED}, hints=WALKING_HINTS, targets=COPIED_TARGETS)
        yield Variant(softmax_walking_backward, {**backward, **WALKING}, hints=WALKING_HINTS)
        yield from spread_rows(dtype, SPREAD_FORWARD, ("x",), "y", {5: softmax_spread_5_forward, 8: softmax_spread_8_forward})
        yield from spread_rows(dtype, SPREAD_BACKWARD, ("y", "dy"), "dx", {5: softmax_spread_5_backward, 8: softmax_spread_8_backward})
    for dtype in FLOATS:
        longest = LONGEST_HALF if dtype in HALF else ROW_TILES[-1][1]
        yield from whole_rows(dtype, longest, (softmax_forward, ("x", "y")), (softmax_backward, ("y", "dy", "dx")))
        for x in (Array(dtype, (None, None), divisible=(1, 16)), Array(dtype, (None, None), aligned=False)):
            yield Variant(softmax_statistics, {"x": x, "part_max": matrix, "part_sum": matrix, "scale": FLOAT, "TILE": STATISTICS_PIECE})
            yield Variant(softmax_apply, {"x": x, "maximum": vector, "total": vector, "y": x, "TILE": WRITTEN_PIECE})
            yield Variant(softmax_dot, {"y": x, "dy": x, "partial": matrix, "TILE": PIECE})
            yield Variant(softmax_gradient, {"y": x, "dy": x, "dot": vector, "dx": x, "TILE": WRITTEN_PIECE})
    parts = {"part_max": matrix, "part_sum": matrix}
    yield Variant(softmax_combine, {**parts, "lse": matrix, "scale": FLOAT, "PARTS": PARTS})
    yield Variant(softmax_totals, {**parts, "maximum": vector, "total": vector, "PARTS": PARTS})
