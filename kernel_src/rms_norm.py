"""RMSNorm in Qwen3's order: normalise in fp32, round to the input's dtype, then multiply by the weight.

    rstd = 1 / sqrt(mean(x^2) + eps)          y = weight * round(x * rstd)

Backward, with n = x * rstd and g = dy * weight:

    dx = (g - n * mean(g * n)) * rstd         dweight = sum over rows of dy * n

(Zhang and Sennrich 2019, arXiv 1910.07467, differentiated.) Rows are short enough to live in registers, so each kernel
reads its inputs once. The gradient of the weight is summed in fp32: every block adds up the rows it walks over, in a fixed
order, and `column_sum` adds the blocks, so two runs give the same bits.

Three shapes of the same formula are prebuilt:
  * whole rows of TILE + TAIL elements (1024, 2048, 2560 = 2048 + 512, 4096, 5120 = 4096 + 1024: the hidden sizes of Qwen3),
    one row a block, no bounds checks;
  * short rows (head_dim 64 to 256), ROWS of them a block;
  * any length and alignment, in checked pieces of TILE: slower, and right for every size.
"""

from dataclasses import replace
from itertools import chain

import cuda.tile as ct

from kernel_src.elements import read, read_once, read_padded
from kernel_src.prebuild import FLOAT, FLOATS, UNMEASURED, Array, PerArchitecture, Variant

Const = ct.Constant[int]


@ct.function
def scaled(n, weight, x_dtype, y_dtype):
    """weight * round(n), the product in the wider of the two dtypes, as the model takes it. weight: in its own dtype."""
    return ct.astype(ct.astype(n, x_dtype) * weight, y_dtype)


@ct.function
def read_raw(array, index):
    return ct.gather(array, index, check_bounds=False)


# ---------------------------------------------------------------- whole rows
@ct.kernel
def rms_norm_forward(x, weight, y, rstd, eps: float, TILE: Const, TAIL: Const):
    """x, y: [rows, TILE + TAIL]; weight: [TILE + TAIL]; rstd: [rows] fp32. One row a block."""
    row = ct.bid(0)
    cols = ct.arange(TILE, dtype=ct.int32)
    xf = read(x, (row, cols))
    total = ct.sum(xf * xf, axis=0, keepdims=False)
    if TAIL > 0:
        tail_cols = ct.arange(TAIL, dtype=ct.int32) + TILE
        tail = read(x, (row, tail_cols))
        total = total + ct.sum(tail * tail, axis=0, keepdims=False)
    r = ct.rsqrt(total * (1.0 / (TILE + TAIL)) + eps)
    ct.scatter(y, (row, cols), scaled(xf * r, read_raw(weight, cols), x.dtype, y.dtype), check_bounds=False)
    if TAIL > 0:
        ct.scatter(y, (row, tail_cols), scaled(tail * r, read_raw(weight, tail_cols), x.dtype, y.dtype), check_bounds=False)
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.function
def read_tile(array, row, start, WIDTH: Const, LATENCY: Const):
    """Elements start to start + WIDTH of a row, as [1, WIDTH] in float32; start: a multiple of WIDTH. Where there are tile copies
    (TMA), LATENCY rows are under way while one is worked on."""
    tile = ct.load(array, index=(row, start // WIDTH), shape=(1, WIDTH), latency=LATENCY, check_bounds=False)
    return ct.astype(tile, ct.float32)


@ct.function
def write_tile(array, row, start, WIDTH: Const, value):
    ct.store(array, index=(row, start // WIDTH), tile=ct.astype(value, array.dtype), check_bounds=False)


@ct.function
def read_weight(weight, start, WIDTH: Const):
    tile = ct.load(weight, index=(start // WIDTH,), shape=(WIDTH,), check_bounds=False)
    return ct.astype(ct.reshape(tile, (1, WIDTH)), ct.float32)


@ct.function
def backward_rows(dx, dy, dtotal, x, weight, rstd, dweight, TILE: Const, TAIL: Const, LATENCY: Const, PAST: Const):
    """The rows that a block walks over. PAST: whether dtotal is added to dx; else it is not read."""
    block = ct.bid(0)
    w = read_weight(weight, 0, TILE)
    acc = ct.zeros((1, TILE), dtype=ct.float32)
    if TAIL > 0:
        tail_w = read_weight(weight, TILE, TAIL)
        tail_acc = ct.zeros((1, TAIL), dtype=ct.float32)
    for i in range(block, x.shape[0], ct.num_blocks(0)):
        row = x.shape[0] - 1 - i  # what wrote dy or read x before this has left the last rows in the L2
        n, d = read_tile(x, row, 0, TILE, LATENCY), read_tile(dy, row, 0, TILE, LATENCY)
        if PAST:
            past = read_tile(dtotal, row, 0, TILE, LATENCY)
        r = ct.gather(rstd, row, check_bounds=False)
        n = n * r
        g = d * w
        total = ct.sum(g * n)
        acc = acc + d * n
        if TAIL > 0:
            tail_n, tail_d = read_tile(x, row, TILE, TAIL, LATENCY) * r, read_tile(dy, row, TILE, TAIL, LATENCY)
            if PAST:
                tail_past = read_tile(dtotal, row, TILE, TAIL, LATENCY)
            tail_g = tail_d * tail_w
            total = total + ct.sum(tail_g * tail_n)
            tail_acc = tail_acc + tail_d * tail_n
        mean = total * (1.0 / (TILE + TAIL))
        gradient = (g - n * mean) * r
        write_tile(dx, row, 0, TILE, gradient + past if PAST else gradient)
        if TAIL > 0:
            tail_gradient = (tail_g - tail_n * mean) * r
            write_tile(dx, row, TILE, TAIL, tail_gradient + tail_past if PAST else tail_gradient)
    write_tile(dweight, block, 0, TILE, acc)
    if TAIL > 0:
        write_tile(dweight, block, TILE, TAIL, tail_acc)


@ct.kernel
def rms_norm_backward(dx, dy, x, weight, rstd, dweight, TILE: Const, TAIL: Const, LATENCY: Const):
    """dx, dy, x: [rows, TILE + TAIL]; rstd: [rows] fp32; dweight: [blocks, TILE + TAIL] fp32, one partial sum a block."""
    backward_rows(dx, dy, dy, x, weight, rstd, dweight, TILE, TAIL, LATENCY, False)


@ct.kernel
def rms_norm_apply(x, weight, y, rstd, TILE: Const, TAIL: Const):
    """y again from x and rstd, for a backward pass that did not keep y."""
    row = ct.bid(0)
    r = ct.gather(rstd, row, check_bounds=False)
    cols = ct.arange(TILE, dtype=ct.int32)
    n = read(x, (row, cols)) * r
    ct.scatter(y, (row, cols), scaled(n, read_raw(weight, cols), x.dtype, y.dtype), check_bounds=False)
    if TAIL > 0:
        tail_cols = ct.arange(TAIL, dtype=ct.int32) + TILE
        tail = read(x, (row, tail_cols)) * r
        ct.scatter(y, (row, tail_cols), scaled(tail, read_raw(weight, tail_cols), x.dtype, y.dtype), check_bounds=False)


# ---------------------------------------------------------------- with the residual
@ct.function
def add(x, residual, index):
    """round(x + residual), as the model's residual stream holds it, of residual's dtype."""
    return ct.astype(ct.astype(read(x, index) + read(residual, index), residual.dtype), ct.float32)


@ct.kernel
def add_rms_norm_forward(x, residual, weight, total, y, rstd, eps: float, TILE: Const, TAIL: Const):
    """total = x + residual; y = RMSNorm(total). All [rows, TILE + TAIL], rstd: [rows] fp32. One row a block. An fp32 residual stream has
    an x and a y in half precision under autocast."""
    row = ct.bid(0)
    cols = ct.arange(TILE, dtype=ct.int32)
    s = add(x, residual, (row, cols))
    squares = ct.sum(s * s, axis=0, keepdims=False)
    ct.scatter(total, (row, cols), ct.astype(s, total.dtype), check_bounds=False)
    if TAIL > 0:
        tail_cols = ct.arange(TAIL, dtype=ct.int32) + TILE
        tail = add(x, residual, (row, tail_cols))
        squares = squares + ct.sum(tail * tail, axis=0, keepdims=False)
        ct.scatter(total, (row, tail_cols), ct.astype(tail, total.dtype), check_bounds=False)
    r = ct.rsqrt(squares * (1.0 / (TILE + TAIL)) + eps)
    ct.scatter(y, (row, cols), scaled(s * r, read_raw(weight, cols), total.dtype, y.dtype), check_bounds=False)
    if TAIL > 0:
        ct.scatter(y, (row, tail_cols), scaled(tail * r, read_raw(weight, tail_cols), total.dtype, y.dtype), check_bounds=False)
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def add_rms_norm_backward(dx, dy, dtotal, x, weight, rstd, dweight, TILE: Const, TAIL: Const, LATENCY: Const):
    """Computes what `rms_norm_backward` does, and adds dtotal, the gradient that reaches x past the norm, to dx. x: what was normalised."""
    backward_rows(dx, dy, dtotal, x, weight, rstd, dweight, TILE, TAIL, LATENCY, True)


# ---------------------------------------------------------------- short rows
@ct.kernel
def rms_norm_rows_forward(x, weight, y, rstd, eps: float, ROWS: Const, TILE: Const):
    """x, y: [rows, TILE]; ROWS rows a block. The last block reads and writes the last row again instead of leaving the array."""
    rows = ct.minimum(ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32), x.shape[0] - 1)
    index = (rows[:, None], ct.arange(TILE, dtype=ct.int32)[None, :])
    xf = read(x, index)
    r = ct.rsqrt(ct.sum(xf * xf, axis=1, keepdims=True) * (1.0 / TILE) + eps)
    w = read_raw(weight, ct.arange(TILE, dtype=ct.int32))[None, :]
    ct.scatter(y, index, scaled(xf * r, w, x.dtype, y.dtype), check_bounds=False)
    ct.scatter(rstd, rows, ct.reshape(r, (ROWS,)), check_bounds=False)


@ct.kernel(occupancy=8)
def rms_norm_rows_backward(dx, dy, x, weight, rstd, dweight, ROWS: Const, TILE: Const):
    """dx, dy, x: [rows, TILE]; dweight: [blocks, TILE] fp32. Rows past the end count as nothing in dweight."""
    block = ct.bid(0)
    cols = ct.arange(TILE, dtype=ct.int32)[None, :]
    w = read(weight, ct.arange(TILE, dtype=ct.int32))[None, :]
    acc = ct.zeros((ROWS, TILE), dtype=ct.float32)
    pieces = ct.cdiv(x.shape[0], ROWS)
    for i in range(block, pieces, ct.num_blocks(0)):
        wanted = (pieces - 1 - i) * ROWS + ct.arange(ROWS, dtype=ct.int32)  # the last rows first, as above
        rows = ct.minimum(wanted, x.shape[0] - 1)
        r = ct.gather(rstd, rows, check_bounds=False)[:, None]
        n = read_once(x, (rows[:, None], cols)) * r
        d = read_once(dy, (rows[:, None], cols))
        g = d * w
        mean = ct.sum(g * n, axis=1, keepdims=True) * (1.0 / TILE)
        ct.scatter(dx, (rows[:, None], cols), ct.astype((g - n * mean) * r, dx.dtype), check_bounds=False)
        acc = acc + ct.where((wanted < x.shape[0])[:, None], d * n, 0.0)
    ct.scatter(dweight, (block, ct.arange(TILE, dtype=ct.int32)), ct.sum(acc, axis=0), check_bounds=False)


# ---------------------------------------------------------------- any row
@ct.kernel
def rms_norm_any_forward(x, weight, y, rstd, eps: float, TILE: Const):
    """x, y: [rows, length] of any length; the row is read twice, the second time from the cache."""
    row = ct.bid(0)
    length = x.shape[1]
    acc = ct.zeros((TILE,), dtype=ct.float32)
    for i in range(ct.cdiv(length, TILE)):
        xf = read_padded(x, (row, ct.arange(TILE, dtype=ct.int32) + i * TILE))
        acc = acc + xf * xf
    r = ct.rsqrt(ct.sum(acc, axis=0, keepdims=False) / ct.astype(length, ct.float32) + eps)
    for i in range(ct.cdiv(length, TILE)):
        cols = ct.arange(TILE, dtype=ct.int32) + i * TILE
        xf = read_padded(x, (row, cols))
        ct.scatter(y, (row, cols),
                   scaled(xf * r, ct.gather(weight, cols, check_bounds=True, padding_value=0), x.dtype, y.dtype), check_bounds=True)
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def rms_norm_any_backward(dx, dy, x, weight, rstd, dweight, TILE: Const):
    """Computes what `rms_norm_backward` does for rows of any length, which are read twice. A row of dweight is this block's own: it adds
    to it in memory."""
    block = ct.bid(0)
    length = x.shape[1]
    for row in range(block, x.shape[0], ct.num_blocks(0)):
        r = ct.gather(rstd, row, check_bounds=False)
        acc = ct.zeros((TILE,), dtype=ct.float32)
        for i in range(ct.cdiv(length, TILE)):
            cols = ct.arange(TILE, dtype=ct.int32) + i * TILE
            acc = acc + read_padded(dy, (row, cols)) * read_padded(weight, cols) * read_padded(x, (row, cols)) * r
        mean = ct.sum(acc, axis=0, keepdims=False) / ct.astype(length, ct.float32)
        for i in range(ct.cdiv(length, TILE)):
            cols = ct.arange(TILE, dtype=ct.int32) + i * TILE
            d = read_padded(dy, (row, cols))
            n = read_padded(x, (row, cols)) * r
            g = d * read_padded(weight, cols)
            ct.scatter(dx, (row, cols), ct.astype((g - n * mean) * r, dx.dtype), check_bounds=True)
            so_far = ct.where(row == block, 0.0, read_padded(dweight, (block, cols)))
            ct.scatter(dweight, (block, cols), so_far + d * n, check_bounds=True)


# ---------------------------------------------------------------- what is prebuilt
# TILE, TAIL, and for the backward pass: how many blocks an SM holds, and how many rows a block has under way. Best of a sweep on
# an H200 (bf16; a copy of the same bytes: 100 %), without the column sum:
#     RMSNorm              82 %, 94 %, 103 %, 105 % and 103 %; with gathers instead of tile copies 85, 90, 88, 94 and 84 %
#     residual + RMSNorm   94 %, 100 %, 100 %, 98 % and 91 %; with gathers 72 % at 4096, where four rows do not fit into the registers
# Forward, where no block has a second row to wait for: 100 % and more with gathers and no hint; eight worker warps cost 25 % at 1024.
ROW_TILES = ((1024, 0, 6, 2), (2048, 0, 3, 2), (2048, 512, 3, 3), (4096, 0, 2, 3), (4096, 1024, 2, 2))
# What competes where nothing was measured, in bf16. Backward, at 4096: one row under way, for GPUs without tile copies and for those
# that hide latency better; without the residual also on sm_90, whose winner is known: what chooses must run where it can be tested.
# Every other length would cost 200 KiB.
# Forward: eight worker warps for rows of 4096 and more (on an H200 as fast; TileGym, on a B200: half the time for rows of 8192 and
# more), and MORE_ROWS a block, which keeps more bytes in flight. They add a row up in another order, so the last bit may differ.
EIGHT_WARPS = ("rms_norm_forward", "add_rms_norm_forward")
MORE_ROWS = ((16, 128),)
# ROWS, TILE. Backward [262144, 128] with 8, 16 and 32 rows a block: 94 %, 91 % and 87 %.
SHORT_ROWS = ((16, 64), (8, 128), (4, 256))
# x in half precision and an fp32 weight: q_norm and k_norm under autocast. Their y is fp32, as PyTorch promotes it.
MIXED_ROWS = ((4, 128),)
MIXED = (("bfloat16", "float32"), ("float16", "float32"))
# x and weight in fp32 and y in half precision: the norms of an fp32 model's layers under autocast, whose y goes into products.
NARROWED = ("bfloat16", "float16")
RSTD = Array("float32", (None,))


def arrays(x, w, length, y=None, **promises):
    """The arrays that the kernels share. length: of a row, None for any; y: its dtype, w by default."""
    row = (None, length)
    return {
        "x": Array(x, row, **promises),
        "weight": Array(w, row[1:], **promises),
        "y": Array(y or w, row, **promises),
        "dweight": Array("float32", row, **promises),
    }


def pair(forward, backward, a, constants, latency=None, **options):
    """Forward and backward of one tiling; a: what `arrays` returns."""
    x, w, y, dweight = a["x"], a["weight"], a["y"], a["dweight"]
    yield Variant(forward, {"x": x, "weight": w, "y": y, "rstd": RSTD, "eps": FLOAT, **constants})
    grads = {"dx": x, "dy": y, "x": x, "weight": w, "rstd": RSTD, "dweight": dweight, **constants}
    yield Variant(backward, {**grads, **({"LATENCY": latency} if latency else {})}, **options)


def fused(a, constants, latency, **options):
    """The kernels of the decoder layer: y again, and both directions with the residual."""
    x, w, y, dweight = a["x"], a["weight"], a["y"], a["dweight"]
    yield Variant(rms_norm_apply, {"x": x, "weight": w, "y": y, "rstd": RSTD, **constants})
    sums = {"x": y, "residual": x, "weight": w, "total": x, "y": y, "rstd": RSTD, "eps": FLOAT, **constants}
    yield Variant(add_rms_norm_forward, sums)
    grads = {"dx": x, "dy": y, "dtotal": x, "x": x, "weight": w, "rstd": RSTD, "dweight": dweight, **constants, "LATENCY": latency}
    yield Variant(add_rms_norm_backward, grads, **options)


def competing(variant, length):
    """What competes with a variant of whole rows."""
    if "LATENCY" in variant.params and length == 4096:
        targets = () if variant.kernel is rms_norm_backward else UNMEASURED
        yield replace(variant, params={**variant.params, "LATENCY": 1}, targets=targets)
    elif variant.kernel_name in EIGHT_WARPS and length >= 4096:
        yield replace(variant, hints={**variant.hints, "num_worker_warps": 8}, targets=UNMEASURED)


def variants():
    for dtype in FLOATS:
        for tile, tail, occupancy, latency in ROW_TILES:
            a, constants = arrays(dtype, dtype, tile + tail), {"TILE": tile, "TAIL": tail}
            hints: dict[str, int | PerArchitecture]
            if dtype == "float32":
                # Twice the bytes a row. The fused kernels are for half precision; fp32 takes them as two operations.
                hints = {"occupancy": max(1, occupancy // 2)}
                yield from pair(rms_norm_forward, rms_norm_backward, a, constants, latency, hints=hints)
                continue
            hints = {"occupancy": occupancy}
            if tile + tail > 4096:
                # With four warps the residual's backward spills on sm_100; on sm_90 they are faster and do not.
                hints["num_worker_warps"] = PerArchitecture(8, "sm_90", 4)
            alone = pair(rms_norm_forward, rms_norm_backward, a, constants, latency, hints=hints)
            for variant in chain(alone, fused(a, constants, latency, hints=hints)):
                yield variant
                if dtype == "bfloat16":
                    yield from competing(variant, tile + tail)
    for x, w in tuple((d, d) for d in FLOATS) + MIXED:
        for rows, tile in SHORT_ROWS if x == w else MIXED_ROWS:
            constants = {"ROWS": rows, "TILE": tile}
            yield from pair(rms_norm_rows_forward, rms_norm_rows_backward, arrays(x, w, tile), constants)
        for rows, tile in MORE_ROWS if x == w == "bfloat16" else ():
            forward, _ = pair(rms_norm_rows_forward, rms_norm_rows_backward, arrays(x, w, tile), {"ROWS": rows, "TILE": tile})
            yield replace(forward, targets=UNMEASURED)
        yield from pair(rms_norm_any_forward, rms_norm_any_backward, arrays(x, w, None, aligned=False), {"TILE": 1024})
    for y in NARROWED:
        yield from pair(rms_norm_any_forward, rms_norm_any_backward, arrays("float32", "float32", None, y, aligned=False), {"TILE": 1024})
    for tile, tail, occupancy, latency in ROW_TILES:
        a, constants = arrays("float32", "float32", tile + tail, "bfloat16"), {"TILE": tile, "TAIL": tail}
        hints = {"occupancy": max(1, occupancy // 2)}
        yield from pair(rms_norm_forward, rms_norm_backward, a, constants, latency, hints=hints)
        yield from fused(a, constants, latency, hints=hints)
