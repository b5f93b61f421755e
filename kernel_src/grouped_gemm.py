"""The matrix products of a mixture of experts, each for all experts in one launch. The rows are sorted by expert:

    grouped_mm       out[r] = x[r] @ weight[e]                     for the rows r of each expert e
    grouped_outer    out[e] = sum over the rows r of e of x[r].T @ y[r],   zero for an expert without rows

The host knows how many rows there are, not whose they are: it launches a few blocks more than needed, and these find nothing to
do. Sums are fp32 in one order: two runs give the same bits.

An expert's rows begin anywhere, so a block reads tiles that begin at any row (a view whose tiles are one row apart, which TMA
takes too). Such a tile may reach into the next expert's rows, or into rows of no expert, which may hold anything, NaN too. In
`grouped_mm` such a row makes a row of the result that is not written. In `grouped_outer` it would be summed, so the last rows of
an expert are a step of their own, in which the others are replaced by zeros. (Reading those rows alone, by masked gathers, makes that one
step as long as ten others on an H200.)
"""

import cuda.tile as ct

from kernel_src.prebuild import Array, Variant

Const = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


@ct.function
def tile_of(block, tiles_m, tiles_n, GROUP: Const):
    """(m, n) of a block: blocks go down GROUP tiles before they come to the next column of tiles, so that what a column shares is
    read from memory once for GROUP tiles, and what the rows need stays in the L2 cache."""
    first = block // (GROUP * tiles_n) * GROUP
    height = ct.minimum(tiles_m - first, GROUP)
    within = block % (GROUP * tiles_n)
    return first + within % height, within // height


@ct.function
def read_weight(weight, expert, k, n, TILE_N: Const, TILE_K: Const, TRANSPOSED: Const, LATENCY: Const):
    """[TILE_K, TILE_N]; zero outside the weight."""
    if TRANSPOSED:
        tile = ct.load(weight, index=(expert, n, k), shape=(1, TILE_N, TILE_K), padding_mode=ZERO, latency=LATENCY)
        tile = ct.transpose(ct.reshape(tile, (TILE_N, TILE_K)))
    else:
        tile = ct.load(weight, index=(expert, k, n), shape=(1, TILE_K, TILE_N), padding_mode=ZERO, latency=LATENCY)
        tile = ct.reshape(tile, (TILE_K, TILE_N))
    return tile


@ct.kernel
def grouped_mm(
    x, weight, blocks, out, TILE_M: Const, TILE_N: Const, TILE_K: Const, GROUP: Const, LATENCY: Const, TRANSPOSED: Const
):
    """x: [rows, k]; weight: [experts, k, n], or TRANSPOSED [experts, n, k]; blocks: [3, blocks] int32, the expert, the first row
    and the end of each, at most TILE_M rows and a column of `tile_of`; out: [rows, n]. Rows of no expert are not written."""
    m, n = tile_of(ct.bid(0), blocks.shape[1], ct.cdiv(out.shape[1], TILE_N), GROUP)
    expert, first = ct.gather(blocks, (0, m), check_bounds=False), ct.gather(blocks, (1, m), check_bounds=False)
    last = ct.gather(blocks, (2, m), check_bounds=False)
    if first < last:
        view = x.tiled_view((TILE_M, TILE_K), padding_mode=ZERO, traversal_steps=(1, TILE_K))
        acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
        for k in range(ct.cdiv(x.shape[1], TILE_K)):
            a = view.load((first, k), latency=LATENCY)
            acc = ct.mma(a, read_weight(weight, expert, k, n, TILE_N, TILE_K, TRANSPOSED, LATENCY), acc)
        rows = (first + ct.arange(TILE_M, dtype=ct.int32))[:, None]
        cols = (n * TILE_N + ct.arange(TILE_N, dtype=ct.int32))[None, :]
        inside = (rows < last) & (cols < out.shape[1])
        ct.scatter(out, (rows, cols), ct.astype(acc, out.dtype), mask=inside, check_bounds=False)


@ct.function
def before(tile, row, last, TILE_K: Const):
    """A tile of rows from `row` on, with zeros in place of those from `last` on. Not a product: they may hold NaN."""
    rows = (row + ct.arange(TILE_K, dtype=ct.int32))[:, None]
    return ct.where(rows < last, tile, ct.zeros(tile.shape, dtype=tile.dtype))


@ct.kernel
def grouped_outer(x, y, ends, out, TILE_M: Const, TILE_N: Const, TILE_K: Const, GROUP: Const, LATENCY: Const):
    """x: [rows, m]; y: [rows, n]; ends: [experts] int32, the row behind each expert's last one; out: [experts, m, n].
    Grid (tiles of one expert's result, experts); TILE_K rows a step."""
    expert = ct.bid(1)
    m, n = tile_of(ct.bid(0), ct.cdiv(out.shape[1], TILE_M), ct.cdiv(out.shape[2], TILE_N), GROUP)
    first = ct.gather(ends, expert - 1, check_bounds=True, padding_value=0)
    last = ct.gather(ends, expert, check_bounds=False)
    xs = x.tiled_view((TILE_K, TILE_M), padding_mode=ZERO, traversal_steps=(1, TILE_M))
    ys = y.tiled_view((TILE_K, TILE_N), padding_mode=ZERO, traversal_steps=(1, TILE_N))
    acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    steps = (last - first) // TILE_K
    for i in range(steps):
        row = first + i * TILE_K
        acc = ct.mma(ct.transpose(xs.load((row, m), latency=LATENCY)), ys.load((row, n), latency=LATENCY), acc)
    rest = first + steps * TILE_K
    if rest < last:
        a, b = before(xs.load((rest, m)), rest, last, TILE_K), before(ys.load((rest, n)), rest, last, TILE_K)
        acc = ct.mma(ct.transpose(a), b, acc)
    ct.store(out, index=(expert, m, n), tile=ct.reshape(ct.astype(acc, out.dtype), (1, TILE_M, TILE_N)))


# ---------------------------------------------------------------- what is prebuilt
BLOCK_ROWS = 128  # TILE_M of grouped_mm, which its list of blocks is made for
# In bf16 torch._grouped_mm is a kernel on compute capability 9.0 and 10.x; ours is built for 9.0 to be measured against it. Nothing
# in fp32: its products would be made without tensor cores, by a multiplication and an addition each, and cuBLAS is faster at that.
TORCHS = ("sm_100", "sm_103")
HALVES = ("bfloat16", "float16")
# The large tiles are the fastest on an H200, of 10 for grouped_mm and 7 for grouped_outer, which has the more to do beside its products the
# larger the step in which rows are masked. 32 experts of 2880 x 5760, TFLOP/s of ours and of torch's: 526 and 524 with 256 rows an
# expert, 680 and 697 with 1024; grouped_outer 338 and 407, 562 and 650. The small one is for GPUs with less shared memory, where nothing
# is measured: two blocks of four warps on a multiprocessor, or one of eight with more tiles on their way.
SMALL = {"TILE_M": BLOCK_ROWS, "TILE_N": 128, "TILE_K": 32, "GROUP": 8, "LATENCY": 4}
LARGE = {"TILE_M": BLOCK_ROWS, "TILE_N": 256, "TILE_K": 64, "GROUP": 8, "LATENCY": 6}
LARGE_OUTER = {**SMALL, "LATENCY": 6}
TWO, ONE = {"num_worker_warps": 4, "occupancy": 2}, {"num_worker_warps": 8}
SMALLER, LARGER = ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121"), ("sm_90", "sm_100", "sm_103", "sm_110")
MM_TILES = ((SMALL, TWO, SMALLER, HALVES), (SMALL, ONE, SMALLER, ("bfloat16",)), (LARGE, ONE, LARGER, HALVES))
OUTER_TILES = ((SMALL, TWO, SMALLER, HALVES), (SMALL, ONE, SMALLER, ("bfloat16",)), (LARGE_OUTER, TWO, LARGER, HALVES))


def prebuilt(choices):
    """(tile, hints, architectures, matrices, stacks of matrices) of each variant."""
    for tile, hints, architectures, dtypes in choices:
        for dtype in dtypes:
            targets = tuple(name for name in architectures if dtype == "float16" or name not in TORCHS)
            # Lengths of whole 16 bytes: a load that may end inside of them is one of single elements where there is no TMA.
            matrix, stack = Array(dtype, (None, None), divisible=(1, 8)), Array(dtype, (None, None, None), divisible=(1, 8, 8))
            yield tile, hints, targets, matrix, stack


def variants():
    blocks, ends = Array("int32", (None, None), aligned=False), Array("int32", (None,), aligned=False)
    for tile, hints, targets, matrix, stack in prebuilt(MM_TILES):
        for transposed in (0, 1):
            arrays = {"x": matrix, "weight": stack, "blocks": blocks, "out": matrix}
            yield Variant(grouped_mm, {**arrays, **tile, "TRANSPOSED": transposed}, hints, targets)
    for tile, hints, targets, matrix, stack in prebuilt(OUTER_TILES):
        yield Variant(grouped_outer, {"x": matrix, "y": matrix, "ends": ends, "out": stack, **tile}, hints, targets)
