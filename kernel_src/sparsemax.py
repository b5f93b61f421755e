"""Sparsemax over the last dimension (Martins and Astudillo 2016, arXiv 1602.02068): y[j] = max(x[j] - tau, 0) with sum(y) = 1.

With the support S = {j: x[j] > tau}:

    tau = (sum over S of x - 1) / |S|           dx[j] = dy[j] - mean over S of dy  in S, 0 elsewhere

Nothing is sorted. From S = {x > max - 1}, which holds every possible support, tau of S and S of tau are taken in turns (Newton's
method on a convex, piecewise linear function): S only shrinks, and ends exactly. The excess times the size of S falls to a quarter or
less at each turn, so there are never more than some 30; normal numbers take 3 to 6.

x belongs to S where |S| * x + 1 > sum of S, multiplied and not divided: in half precision an x that equals tau is common, and an
error of one ulp in tau would change its gradient by all of it. All sums are of x - max. y is at least the smallest number of its
dtype in S, and 0 elsewhere, so the backward pass knows S from y.

Rows of up to 8192 elements stay in registers, and so do those of half precision up to 32768, as they lie in memory; in the backward pass
what stays of those is a bit an element, whether it is in S. Of others, one kernel takes the maxima of every CHUNK elements; another, one
row a block, sets tau from the maxima alone, which is never too large, and reads only the chunks that reach above it; a third writes y.
"""

import cuda.tile as ct

from kernel_src.elements import block_from_last, write_within
from kernel_src.prebuild import FLOATS, Array, PerArchitecture, Variant
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
from kernel_src.segments import two_sums
from kernel_src.softmax import LONGEST_HALF, PIECE, WRITTEN_PIECE, whole_rows

Const = ct.Constant[int]


@ct.function
def support(v, size, total):
    """Tells which v belong to a support of `size` elements whose sum is `total`."""
    return size * v + 1.0 > total


@ct.function
def probability(v, size, total, dtype):
    """y of a support, in float32. v: x - max."""
    smallest = 2.0**-24 if dtype == ct.float16 else 2.0**-126
    p = ct.maximum(v - (total - 1.0) / size, smallest)
    # A NaN of the input must not end as a probability of 0.
    return ct.where(support(v, size, total), p, ct.where(ct.isnan(v), v, 0.0))


# ---------------------------------------------------------------- whole rows
@ct.kernel
def sparsemax_forward(x, y, ROWS: Const, TILE: Const):
    """x, y: [rows, columns], columns at most TILE. ROWS rows a block."""
    at = rows_of_block(ct.bid(0), ROWS, TILE)
    v = read(x, at, MINUS_INFINITY)
    v = v - ct.max(v, 1, keepdims=True)
    inside = v > -1.0
    size = ct.sum(ct.where(inside, 1.0, 0.0), 1, keepdims=True)
    total = ct.sum(ct.where(inside, v, 0.0), 1, keepdims=True)
    shrinks = True
    while shrinks:
        inside = support(v, size, total)
        new = ct.sum(ct.where(inside, 1.0, 0.0), 1, keepdims=True)
        smaller = new < size
        total = ct.where(smaller, ct.sum(ct.where(inside, v, 0.0), 1, keepdims=True), total)
        size = ct.where(smaller, new, size)
        shrinks = ct.max(ct.where(smaller, 1, 0)) > 0
    write_within(y, at, probability(v, size, total, y.dtype))


@ct.kernel
def sparsemax_backward(y, dy, dx, ROWS: Const, TILE: Const):
    """y, dy, dx: [rows, columns], columns at most TILE. ROWS rows a block."""
    ct.grid_dependency_control_wait()
    at = rows_of_block(block_from_last(), ROWS, TILE)
    inside, d = read(y, at, 0) > 0.0, read(dy, at, 0)
    size = ct.sum(ct.where(inside, 1.0, 0.0), 1, keepdims=True)
    mean = ct.sum(ct.where(inside, d, 0.0), 1, keepdims=True) / ct.maximum(size, 1.0)
    write_within(dx, at, ct.where(inside, d - mean, 0.0))


# ---------------------------------------------------------------- one row a block
@ct.function
def count_places(v, size, total, TILE: Const):
    """Size and sum of the elements of one tile that belong to a support."""
    inside = support(v, size, total)
    return two_sums(ct.where(inside, 1.0, 0.0), ct.where(inside, v, 0.0), TILE)


@ct.function
def count_held(tiles, m, size, total, TILE: Const, TILES: Const):
    """Size and sum of the elements of a row that belong to a support."""
    count, amount = ct.zeros((TILE,), dtype=ct.float32), ct.zeros((TILE,), dtype=ct.float32)
    for i in ct.static_iter(range(TILES)):
        v = held_difference(tiles[i], m, size, TILES)
        inside = support(v, size, total)
        count = count + ct.where(inside, 1.0, 0.0)
        amount = amount + ct.where(inside, v, 0.0)
    return two_sums(count, amount, TILE)


@ct.function
def held_difference(tile, m, size, TILES: Const):
    """x - max in float32: of one tile it may stay in registers, several are held as they lie in memory."""
    return (converted_again(tile, size) if TILES > 1 else ct.astype(tile, ct.float32)) - m


@ct.kernel
def sparsemax_row_forward(x, y, TILE: Const, TILES: Const):
    """x, y: [rows, columns], columns at most TILE * TILES. One row a block.

    Of several tiles, tau is set from the maxima of every place first, which is never too large: all elements are then counted 2 or 3 times
    instead of 4 to 6.
    """
    row = ct.bid(0)
    tiles = held_tiles(x, row, TILE, TILES, MINUS_INFINITY)
    highest = held_maxima(tiles, TILES)
    m = ct.astype(ct.max(highest, 0), ct.float32)
    top = ct.astype(highest, ct.float32) - m
    # A "support" of one element whose sum is 0: v > -1.
    n, s = count_places(top, 1.0, 0.0, TILE)
    shrinks = True
    while shrinks:
        fewer, less = count_places(top, n, s, TILE)
        shrinks = fewer < n
        n, s = ct.where(shrinks, fewer, n), ct.where(shrinks, less, s)
    if TILES > 1:
        n, s = count_held(tiles, m, n, s, TILE, TILES)
        shrinks = True
        while shrinks:
            fewer, less = count_held(tiles, m, n, s, TILE, TILES)
            shrinks = fewer < n
            n, s = ct.where(shrinks, fewer, n), ct.where(shrinks, less, s)
    for i in ct.static_iter(range(TILES)):
        write_within(y, (row, tile_columns(i, TILE)), probability(held_difference(tiles[i], m, n, TILES), n, s, y.dtype))


def either(a, b):
    return a | b


@ct.function
def bit(bits, i):
    return ((bits >> i) & 1) > 0


@ct.function
def ones(bits):
    """How many of 16 bits are 1, in float32: those of 2, of 4 and of 8 are added up beside each other."""
    bits = (bits & 0x5555) + ((bits >> 1) & 0x5555)
    bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
    bits = (bits & 0x0F0F) + ((bits >> 4) & 0x0F0F)
    return ct.astype((bits & 0xFF) + (bits >> 8), ct.float32)


@ct.kernel
def sparsemax_row_backward(y, dy, dx, TILE: Const, TILES: Const, GROUP: Const):
    """y, dy, dx: [rows, columns], columns at most TILE * TILES; TILES: at most 16. One row a block.

    What is kept of y is a bit an element: is it in the support? Of dy, only the groups of GROUP tiles that hold some of it are read; the
    tiles of one are under way together.
    """
    ct.grid_dependency_control_wait()
    row = block_from_last()
    bits = ct.zeros((TILE,), dtype=ct.int32)
    for i in ct.static_iter(range(TILES)):
        inside = ct.gather(y, (row, tile_columns(i, TILE)), check_bounds=True, padding_value=0) > 0.0
        bits = bits | ct.where(inside, 1 << i, 0)
    size = ct.maximum(ct.sum(ones(bits), 0), 1.0)
    some = ct.reduce(bits, 0, either, 0)
    amount = ct.zeros((TILE,), dtype=ct.float32)
    for first in range(0, TILES, GROUP):
        if ((some >> first) & (2**GROUP - 1)) > 0:
            for i in ct.static_iter(range(GROUP)):
                d = read(dy, (row, tile_columns(first + i, TILE)), 0)
                amount = amount + ct.where(bit(bits, first + i), d, 0.0)
    mean = ct.sum(amount, 0) / size
    for first in range(0, TILES, GROUP):
        if ((some >> first) & (2**GROUP - 1)) > 0:
            for i in ct.static_iter(range(GROUP)):
                cols = tile_columns(first + i, TILE)
                write_within(dx, (row, cols), ct.where(bit(bits, first + i), read(dy, (row, cols), 0) - mean, 0.0))
        else:
            for i in ct.static_iter(range(GROUP)):
                write_within(dx, (row, tile_columns(first + i, TILE)), ct.zeros((TILE,), dtype=ct.float32))


# ---------------------------------------------------------------- rows in pieces
# Element i of a row belongs to block i // (CHUNK * WIDTH) and there to chunk i % WIDTH: a chunk's elements lie WIDTH apart, so taking
# the maxima of all chunks of a block is elementwise.
@ct.kernel
def sparsemax_maxima(x, maxima, CHUNK: Const, WIDTH: Const):
    """x: [rows, columns]; maxima: [rows, chunks] like x, chunks = WIDTH * ceil(columns / (CHUNK * WIDTH))."""
    blocks = ct.cdiv(x.shape[1], CHUNK * WIDTH)
    row, block = ct.bid(0) // blocks, ct.bid(0) % blocks
    lanes = ct.arange(WIDTH, dtype=ct.int32)
    top = ct.gather(x, (row, block * (CHUNK * WIDTH) + lanes), check_bounds=True, padding_value=MINUS_INFINITY)
    for i in ct.static_iter(range(1, CHUNK)):
        more = ct.gather(x, (row, block * (CHUNK * WIDTH) + i * WIDTH + lanes), check_bounds=True, padding_value=MINUS_INFINITY)
        top = ct.maximum(top, more)
    ct.scatter(maxima, (row, block * WIDTH + lanes), top, check_bounds=False)


@ct.function
def count_maxima(maxima, row, m, size, total, TILE: Const):
    """Size and sum of the chunks' maxima that belong to a support."""
    count, amount = ct.zeros((TILE,), dtype=ct.float32), ct.zeros((TILE,), dtype=ct.float32)
    for i in range(ct.cdiv(maxima.shape[1], TILE)):
        v = read(maxima, (row, i * TILE + ct.arange(TILE, dtype=ct.int32)), MINUS_INFINITY) - m
        inside = support(v, size, total)
        count = count + ct.where(inside, 1.0, 0.0)
        amount = amount + ct.where(inside, v, 0.0)
    return ct.sum(count, 0), ct.sum(amount, 0)


@ct.function
def count_elements(x, maxima, row, m, size, total, CHUNK: Const, WIDTH: Const, TILE: Const):
    """Size and sum of the elements that belong to a support, read only from the chunks whose maximum does. All loads of some chunks are
    under way together: one after the other they would wait CHUNK times as long."""
    count, amount = ct.zeros((TILE,), dtype=ct.float32), ct.zeros((TILE,), dtype=ct.float32)
    for i in range(ct.cdiv(maxima.shape[1], TILE)):
        chunks = i * TILE + ct.arange(TILE, dtype=ct.int32)
        reaches = support(read(maxima, (row, chunks), MINUS_INFINITY) - m, size, total)
        if ct.max(ct.where(reaches, 1, 0)) > 0:
            first = chunks // WIDTH * (CHUNK * WIDTH) + chunks % WIDTH
            found = ()
            for j in ct.static_iter(range(CHUNK)):
                raw = ct.gather(x, (row, first + j * WIDTH), mask=reaches, check_bounds=True, padding_value=MINUS_INFINITY, latency=1)
                found = (*found, raw)  # type: ignore[assignment]
            for j in ct.static_iter(range(CHUNK)):
                v = ct.astype(found[j], ct.float32) - m
                inside = support(v, size, total)
                count = count + ct.where(inside, 1.0, 0.0)
                amount = amount + ct.where(inside, v, 0.0)
    return two_sums(count, amount, TILE)


@ct.kernel
def sparsemax_threshold(x, maxima, top, size, total, CHUNK: Const, WIDTH: Const, TILE: Const):
    """top, size, total: [rows] fp32, the maximum of a row, and how many of its elements are in the support and their sum, of
    x - top. One row a block; TILE: the columns of a chunk."""
    ct.grid_dependency_control_wait()
    row = ct.bid(0)
    highest = ct.full((TILE,), MINUS_INFINITY, dtype=ct.float32)
    for i in range(ct.cdiv(maxima.shape[1], TILE)):
        highest = ct.maximum(highest, read(maxima, (row, i * TILE + ct.arange(TILE, dtype=ct.int32)), MINUS_INFINITY))
    m = ct.max(highest, 0)
    # A "support" of one element whose sum is 0: v > -1.
    n, s = count_maxima(maxima, row, m, 1.0, 0.0, TILE)
    shrinks = True
    while shrinks:
        fewer, less = count_maxima(maxima, row, m, n, s, TILE)
        shrinks = fewer < n
        n, s = ct.where(shrinks, fewer, n), ct.where(shrinks, less, s)
    n, s = count_elements(x, maxima, row, m, n, s, CHUNK, WIDTH, TILE)
    shrinks = True
    while shrinks:
        fewer, less = count_elements(x, maxima, row, m, n, s, CHUNK, WIDTH, TILE)
        shrinks = fewer < n
        n, s = ct.where(shrinks, fewer, n), ct.where(shrinks, less, s)
    ct.scatter(top, row, m, check_bounds=False)
    ct.scatter(size, row, n, check_bounds=False)
    ct.scatter(total, row, s, check_bounds=False)


@ct.kernel
def sparsemax_apply(x, top, size, total, y, TILE: Const):
    """x, y: [rows, columns]; top, size, total: as `sparsemax_threshold` leaves them."""
    ct.grid_dependency_control_wait()
    row, _, cols = piece(block_from_last(), x, TILE)
    v = read(x, (row, cols), MINUS_INFINITY) - ct.gather(top, row, check_bounds=False)
    n, s = ct.gather(size, row, check_bounds=False), ct.gather(total, row, check_bounds=False)
    write_within(y, (row, cols), probability(v, n, s, y.dtype))


@ct.kernel
def sparsemax_sums(y, dy, part_size, part_sum, TILE: Const):
    """part_size, part_sum: [rows, pieces] fp32, how many elements of a piece are in the support, and the sum of their dy."""
    ct.grid_dependency_control_wait()
    row, part, cols = piece(ct.bid(0), y, TILE)
    inside = read(y, (row, cols), 0) > 0.0
    ct.scatter(part_size, (row, part), ct.sum(ct.where(inside, 1.0, 0.0), 0), check_bounds=False)
    ct.scatter(part_sum, (row, part), ct.sum(ct.where(inside, read(dy, (row, cols), 0), 0.0), 0), check_bounds=False)


@ct.kernel
def sparsemax_gradient(y, dy, size, total, dx, TILE: Const):
    """size, total: [rows] fp32, the sums over a row of what `sparsemax_sums` leaves."""
    ct.grid_dependency_control_wait()
    row, _, cols = piece(block_from_last(), y, TILE)
    mean = ct.gather(total, row, check_bounds=False) / ct.maximum(ct.gather(size, row, check_bounds=False), 1.0)
    write_within(dx, (row, cols), ct.where(read(y, (row, cols), 0) > 0.0, read(dy, (row, cols), 0) - mean, 0.0))


# At most one element in 16 is read again; a block of sparsemax_maxima has so many loads under way.
CHUNKS = {"CHUNK": 16, "WIDTH": 1024}
CHUNKS_AT_ONCE = 128  # of those that are read again; all their elements are under way together
# Several rows a block, forward: ROWS, TILE, hints. With 16 rows of half precision (8 of fp32) tileiras 13.4 lays out the sizes and sums of
# a block's rows in buffers of 64 (32) bytes and exchanges a bit of their addresses that reaches past the last one: it addresses 64 bytes
# behind the block's shared memory. With 32 the buffers are as long as that bit.
SEVERAL: tuple[tuple[int, int, dict[str, int]], ...] = ((32, 128, {"num_worker_warps": 8}), (4, 1024, {}))
ROWS = ((4096, {"occupancy": 5}), (8192, {"num_worker_warps": 8}))  # that stay in registers, one a block, forward: TILE, hints
UNALIGNED_SEVERAL, UNALIGNED_ROW = 1024, 4096  # TILE at any address
LONGEST = 8192  # backward, in fp32: longer rows in half precision are marked
# Of rows that are held as they lie in memory: TILE, TILES, and how many blocks an SM holds.
HELD = ((1024, 16, PerArchitecture(2, "sm_90", 4)), (2048, 16, PerArchitecture(1, "sm_90", 2)))
# TILE, TILES of rows of which a bit an element is kept. 8192 rows of 8192 take an H200 85 us backward where two elements of a row are in
# the support, and 108 where 140 are; in float32 they took 123, and by the tiles for longer rows 123 and 135.
MARKED = ((1024, 8), (2048, 16))
MARKED_GROUP, MARKED_BLOCKS, WARPS = 2, 4, 8


def held_variants(x):
    """The longer of each is for bf16 alone: in fp16 they would take 160 KiB of the package. Such rows go the way of longer ones."""
    longest = 2 if x.dtype == "bfloat16" else 1
    for tile, tiles, blocks in HELD[:longest]:
        hints = {"num_worker_warps": WARPS, "occupancy": blocks}
        yield Variant(sparsemax_row_forward, {"x": x, "y": x, "TILE": tile, "TILES": tiles}, hints=hints)
    hints = {"num_worker_warps": WARPS, "occupancy": MARKED_BLOCKS}
    for tile, tiles in MARKED[:longest]:
        constants = {"TILE": tile, "TILES": tiles, "GROUP": MARKED_GROUP}
        yield Variant(sparsemax_row_backward, {"y": x, "dy": x, "dx": x, **constants}, hints=hints)


def variants():
    vector, matrix = Array("float32", (None,), aligned=False), Array("float32", (None, None), aligned=False)
    row_sums = {"top": vector, "size": vector, "total": vector}
    for dtype in FLOATS:
        aligned, unaligned = Array(dtype, (None, None), divisible=(1, 16)), Array(dtype, (None, None), aligned=False)
        for number, tile, hints in SEVERAL:
            for x in (aligned, unaligned) if tile == UNALIGNED_SEVERAL else (aligned,):
                yield Variant(sparsemax_forward, {"x": x, "y": x, "ROWS": number, "TILE": tile}, hints=hints)
        for tile, hints in ROWS:
            yield Variant(sparsemax_row_forward, {"x": aligned, "y": aligned, "TILE": tile, "TILES": 1}, hints=hints)
        yield Variant(sparsemax_row_forward, {"x": unaligned, "y": unaligned, "TILE": UNALIGNED_ROW, "TILES": 1})
        yield from whole_rows(dtype, LONGEST_HALF if dtype in HALF else LONGEST, (sparsemax_backward, ("y", "dy", "dx")))
        if dtype in HALF:
            yield from held_variants(aligned)
        maxima = Array(dtype, (None, None), divisible=(1, CHUNKS["WIDTH"]))
        for x in (aligned, unaligned):
            yield Variant(sparsemax_maxima, {"x": x, "maxima": maxima, **CHUNKS})
            yield Variant(sparsemax_apply, {"x": x, **row_sums, "y": x, "TILE": WRITTEN_PIECE})
            yield Variant(sparsemax_sums, {"y": x, "dy": x, "part_size": matrix, "part_sum": matrix, "TILE": PIECE})
            yield Variant(sparsemax_gradient, {"y": x, "dy": x, "size": vector, "total": vector, "dx": x, "TILE": WRITTEN_PIECE})
        yield Variant(sparsemax_threshold, {"x": unaligned, "maxima": maxima, **row_sums, **CHUNKS, "TILE": CHUNKS_AT_ONCE})
