"""RMSNorm with every option (Zhang and Sennrich 2019, arXiv 1910.07467): an offset on the weight, either order of rounding, any length.

    n = x * rstd        rstd = 1 / sqrt(mean(x^2) + eps)        y = (weight + offset) * n, n rounded to x's dtype first where `rounded`

Llama and Qwen round n before the product, Gemma (offset 1) and GPT-OSS round the product alone. Backward, where g = dy * (weight +
offset):

    dx = (g - n * mean(g * n)) * rstd        dweight = sum over rows of dy * n

Alone, and with the residual stream: total = round(x + residual), y = RMSNorm(total), to whose dx the gradient of total is added. Rows that
fit into the registers are read once, several short ones by one block. kernel_src/rms_norm.py has the lengths of Qwen3, in one order.
"""

from typing import Any

import cuda.tile as ct

from kernel_src.elements import block_from_last, read_once, write
from kernel_src.prebuild import FLOAT, INT, Array, Params, PerArchitecture, Variant
from kernel_src.segments import MIXED, PER_ROW, SAME, SEGMENT, columns, place, rows, sum_of

Const = ct.Constant[int]


@ct.function
def scaled(n, weight, offset, rounded, x_dtype):
    """y in float32. rounded: whether n is rounded to x's dtype first."""
    return ct.where(rounded != 0, ct.astype(ct.astype(n, x_dtype), ct.float32), n) * (weight + offset)


# ---------------------------------------------------------------- forward
@ct.kernel
def general_rms_norm_forward(x, weight, y, rstd, eps: float, offset: float, rounded: int, SEGMENT: Const, PIECE: Const):
    """x, y: [rows, segments, SEGMENT], at most PIECE segments; weight: [segments, SEGMENT]; rstd: [rows] fp32."""
    row, count = ct.bid(0), x.shape[1]
    segment, valid = place(0, count, PIECE)
    segment, column = segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    xf = read_once(x, (row, segment, column))
    squares = sum_of(ct.where(valid[:, None], xf * xf, 0.0), PIECE, SEGMENT)
    r = ct.rsqrt(squares / ct.astype(count * SEGMENT, ct.float32) + eps)
    write(y, (row, segment, column), scaled(xf * r, read_once(weight, (segment, column)), offset, rounded, x.dtype))
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def general_rms_norm_long_forward(x, weight, y, rstd, eps: float, offset: float, rounded: int, SEGMENT: Const, PIECE: Const):
    """Computes what `general_rms_norm_forward` does for rows of any number of segments, which are read twice."""
    row, count = ct.bid(0), x.shape[1]
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    acc = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    for i in range(ct.cdiv(count, PIECE)):
        segment, valid = place(i, count, PIECE)
        xf = ct.where(valid[:, None], read_once(x, (row, segment[:, None], column)), 0.0)
        acc = acc + xf * xf
    r = ct.rsqrt(sum_of(acc, PIECE, SEGMENT) / ct.astype(count * SEGMENT, ct.float32) + eps)
    for i in range(ct.cdiv(count, PIECE)):
        segment, _ = place(i, count, PIECE)
        index = (row, segment[:, None], column)
        write(y, index, scaled(read_once(x, index) * r, read_once(weight, (segment[:, None], column)), offset, rounded, x.dtype))
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def general_add_rms_norm_forward(
    x, residual, weight, total, y, rstd, eps: float, offset: float, rounded: int, SEGMENT: Const, PIECE: Const
):
    """Computes what `general_rms_norm_forward` does of total = x + residual, all [rows, segments, SEGMENT]."""
    row, count = ct.bid(0), x.shape[1]
    segment, valid = place(0, count, PIECE)
    segment, column = segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    index = (row, segment, column)
    s = ct.astype(read_once(x, index) + read_once(residual, index), total.dtype)
    ct.scatter(total, index, s, check_bounds=False)
    xf = ct.astype(s, ct.float32)
    squares = sum_of(ct.where(valid[:, None], xf * xf, 0.0), PIECE, SEGMENT)
    r = ct.rsqrt(squares / ct.astype(count * SEGMENT, ct.float32) + eps)
    write(y, index, scaled(xf * r, read_once(weight, (segment, column)), offset, rounded, x.dtype))
    ct.scatter(rstd, row, r, check_bounds=False)


# ---------------------------------------------------------------- backward
@ct.function
def read_row(array, row, TILE: Const, LATENCY: Const):
    """A row as [1, TILE] in float32, zero past its end; where there are tile copies (TMA), LATENCY rows are under way."""
    tile = ct.load(array, index=(row, 0), shape=(1, TILE), latency=LATENCY, padding_mode=ct.PaddingMode.ZERO)
    return ct.astype(tile, ct.float32)


@ct.function
def backward_rows(dx, dy, dtotal, x, weight, rstd, partial, offset, TILE: Const, LATENCY: Const, PAST: Const):
    """The rows that a block walks over. PAST: whether dtotal is added to dx; else it is not read."""
    block = ct.bid(0)
    one = 1.0 / ct.astype(x.shape[1], ct.float32)
    w = ct.load(weight, index=(0,), shape=(TILE,), padding_mode=ct.PaddingMode.ZERO)
    w = ct.astype(ct.reshape(w, (1, TILE)), ct.float32) + offset
    acc = ct.zeros((1, TILE), dtype=ct.float32)
    for i in range(block, x.shape[0], ct.num_blocks(0)):
        row = x.shape[0] - 1 - i  # what wrote dy or read x before this has left the last rows in the L2
        d = read_row(dy, row, TILE, LATENCY)  # zero past the end, and so is all that is summed
        r = ct.gather(rstd, row, check_bounds=False)
        n = read_row(x, row, TILE, LATENCY) * r
        g = d * w
        gradient = (g - n * (ct.sum(g * n) * one)) * r
        if PAST:
            gradient = gradient + read_row(dtotal, row, TILE, LATENCY)
        ct.store(dx, index=(row, 0), tile=ct.astype(gradient, dx.dtype))
        acc = acc + d * n
    ct.store(partial, index=(block, 0), tile=acc)


@ct.kernel
def general_rms_norm_backward(dx, dy, x, weight, rstd, partial, offset: float, TILE: Const, LATENCY: Const):
    """dx, dy, x: [rows, length], length at most TILE; rstd: [rows] fp32; partial: [blocks, length] fp32, a block's sums for dweight."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    backward_rows(dx, dy, dy, x, weight, rstd, partial, offset, TILE, LATENCY, False)


@ct.kernel
def general_add_rms_norm_backward(dx, dy, dtotal, x, weight, rstd, partial, offset: float, TILE: Const, LATENCY: Const):
    """Computes what `general_rms_norm_backward` does, and adds dtotal to dx. x: what was normalised."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    backward_rows(dx, dy, dtotal, x, weight, rstd, partial, offset, TILE, LATENCY, True)


@ct.kernel
def general_rms_norm_row_means(dy, x, weight, rstd, means, offset: float, SEGMENT: Const, PIECE: Const):
    """means: [rows] fp32, mean(g * n) of each row of any number of segments."""
    ct.grid_dependency_control_wait()
    row, count = block_from_last(), x.shape[1]
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    acc = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    for i in range(ct.cdiv(count, PIECE)):
        segment, valid = place(i, count, PIECE)
        index = (row, segment[:, None], column)
        g = read_once(dy, index) * (read_once(weight, (segment[:, None], column)) + offset)
        acc = acc + ct.where(valid[:, None], g * read_once(x, index), 0.0)
    r = ct.gather(rstd, row, check_bounds=False)
    ct.scatter(means, row, sum_of(acc, PIECE, SEGMENT) * r / ct.astype(count * SEGMENT, ct.float32), check_bounds=False)


@ct.function
def backward_columns(dx, dy, dtotal, x, weight, rstd, means, partial, offset, SEGMENT: Const, PIECE: Const, PAST: Const):
    """A block has PIECE segments of the columns, and walks over the rows of one of the groups."""
    count, groups = x.shape[1], partial.shape[0]
    pieces = ct.cdiv(count, PIECE)
    group = ct.bid(0) // pieces
    segment, _ = place(ct.bid(0) % pieces, count, PIECE)
    segment, column = segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    w = read_once(weight, (segment, column)) + offset
    acc = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    for row in range(group, x.shape[0], groups):
        index = (row, segment, column)
        r = ct.gather(rstd, row, check_bounds=False)
        n, d = read_once(x, index) * r, read_once(dy, index)
        gradient = (d * w - n * ct.gather(means, row, check_bounds=False)) * r
        if PAST:
            gradient = gradient + read_once(dtotal, index)
        write(dx, index, gradient)
        acc = acc + d * n
    ct.scatter(partial, (group, segment, column), acc, check_bounds=False)


@ct.kernel
def general_rms_norm_columns_backward(dx, dy, x, weight, rstd, means, partial, offset: float, SEGMENT: Const, PIECE: Const):
    """The gradients of rows of any length whose means are known. partial: [groups, segments, SEGMENT] fp32."""
    ct.grid_dependency_control_wait()
    backward_columns(dx, dy, dy, x, weight, rstd, means, partial, offset, SEGMENT, PIECE, False)


@ct.kernel
def general_add_rms_norm_columns_backward(dx, dy, dtotal, x, weight, rstd, means, partial, offset: float, SEGMENT: Const, PIECE: Const):
    """Computes what `general_rms_norm_columns_backward` does, and adds dtotal to dx."""
    ct.grid_dependency_control_wait()
    backward_columns(dx, dy, dtotal, x, weight, rstd, means, partial, offset, SEGMENT, PIECE, True)


# ---------------------------------------------------------------- short rows
@ct.kernel
def general_rms_norm_rows_forward(x, weight, y, rstd, eps: float, offset: float, rounded: int, ROWS: Const, TILE: Const):
    """x, y: [rows, TILE]; ROWS rows a block. The last block reads and writes the last row again instead of leaving the array."""
    row, _ = place(ct.bid(0), x.shape[0], ROWS)
    column = ct.arange(TILE, dtype=ct.int32)
    xf = read_once(x, (row[:, None], column[None, :]))
    r = ct.rsqrt(ct.sum(xf * xf, axis=1, keepdims=True) * (1.0 / TILE) + eps)
    write(y, (row[:, None], column[None, :]), scaled(xf * r, read_once(weight, column)[None, :], offset, rounded, x.dtype))
    ct.scatter(rstd, row, ct.reshape(r, (ROWS,)), check_bounds=False)


@ct.kernel
def general_rms_norm_rows_backward(dx, dy, x, weight, rstd, partial, offset: float, ROWS: Const, TILE: Const):
    """dx, dy, x: [rows, TILE]; partial: [blocks, TILE] fp32. A block walks over the rows, ROWS at a time."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    block = ct.bid(0)
    column = ct.arange(TILE, dtype=ct.int32)
    w = read_once(weight, column)[None, :] + offset
    acc = ct.zeros((ROWS, TILE), dtype=ct.float32)
    for i in range(block, ct.cdiv(x.shape[0], ROWS), ct.num_blocks(0)):
        row, valid = place(i, x.shape[0], ROWS)
        index = (row[:, None], column[None, :])
        r = ct.gather(rstd, row, check_bounds=False)[:, None]
        n, d = read_once(x, index) * r, read_once(dy, index)
        g = d * w
        write(dx, index, (g - n * (ct.sum(g * n, axis=1, keepdims=True) * (1.0 / TILE))) * r)
        acc = acc + ct.where(valid[:, None], d * n, 0.0)
    ct.scatter(partial, (block, column), ct.sum(acc, axis=0), check_bounds=False)


# ---------------------------------------------------------------- what is prebuilt
# Rows in registers, forward: segments of 64, the shortest first. With the residual, longer rows are two operations.
WHOLE = {"bfloat16": (16, 32, 64, 128), "float16": (64,), "float32": (64,)}
# Rows in registers, backward: TILE, how many blocks an SM holds, and how many rows a block has under way.
WHOLE_BACKWARD = {
    "bfloat16": ((1024, 6, 2), (2048, 3, 2), (4096, 2, 3), (8192, 1, 2)),
    "float16": ((4096, 2, 3),),
    "float32": ((2048, 2, 2),),
}
ROWS = {"bfloat16": ((8, 128),), "float16": ((8, 128),), "float32": ((4, 128),)}
LONG_PIECE = {SEGMENT: 32, 1: 1024}
COLUMNS_PIECE = {SEGMENT: 16, 1: 512}
OPTIONS: Params = {"eps": FLOAT, "offset": FLOAT, "rounded": INT}


def variants():
    for x, w in SAME:
        for piece in WHOLE[x]:
            a, p, constants = rows(x, SEGMENT, piece), columns(w, SEGMENT), {"SEGMENT": SEGMENT, "PIECE": piece}
            wide = piece > 64 or x == "float32"
            hints: dict[str, Any] = {"occupancy": 4, "num_worker_warps": 8} if wide else {"occupancy": 8}
            yield Variant(general_rms_norm_forward, {"x": a, "weight": p, "y": a, "rstd": PER_ROW, **OPTIONS, **constants}, hints=hints)
            sums: Params = {"x": a, "residual": a, "weight": p, "total": a, "y": a, "rstd": PER_ROW}
            yield Variant(general_add_rms_norm_forward, {**sums, **OPTIONS, **constants}, hints=hints)
        for tile, occupancy, latency in WHOLE_BACKWARD[x]:
            a, constants = Array(x, (None, None), at_most=(None, tile)), {"TILE": tile, "LATENCY": latency}
            partial = Array("float32", (None, None))
            found: Params = {"x": a, "weight": Array(w, (None,)), "rstd": PER_ROW, "partial": partial, "offset": FLOAT}
            # With 6 blocks an SM this one spills on sm_100 and sm_120, where nothing was measured.
            blocks = PerArchitecture(5, "sm_90", 6) if occupancy == 6 else occupancy
            # [8192, 4096] bf16 on an H200: 55.3 us with eight warps, 56.5 with four; with the gradient of the residual it is the same.
            for kernel, longest_of_four, arrays in (
                (general_rms_norm_backward, 2048, {"dx": a, "dy": a}),
                (general_add_rms_norm_backward, 4096, {"dx": a, "dy": a, "dtotal": a}),
            ):
                hints = {"occupancy": blocks, **({"num_worker_warps": 8} if tile > longest_of_four else {})}
                yield Variant(kernel, {**arrays, **found, **constants}, hints=hints)
        for number, tile in ROWS[x]:
            a, p, constants = Array(x, (None, tile)), Array(w, (tile,)), {"ROWS": number, "TILE": tile}
            yield Variant(general_rms_norm_rows_forward, {"x": a, "weight": p, "y": a, "rstd": PER_ROW, **OPTIONS, **constants})
            found = {"x": a, "weight": p, "rstd": PER_ROW, "partial": Array("float32", (None, tile)), "offset": FLOAT}
            yield Variant(general_rms_norm_rows_backward, {"dx": a, "dy": a, **found, **constants}, hints={"occupancy": 8})
    for x, w in SAME + MIXED:
        for segment in (SEGMENT, 1):
            a, p, constants = rows(x, segment), columns(w, segment), {"SEGMENT": segment, "PIECE": LONG_PIECE[segment]}
            inputs: Params = {"x": a, "weight": p, "y": a, "rstd": PER_ROW, **OPTIONS, **constants}
            yield Variant(general_rms_norm_long_forward, inputs, hints={"occupancy": 8})
            found = {"dy": a, "x": a, "weight": p, "rstd": PER_ROW, "means": PER_ROW}
            yield Variant(general_rms_norm_row_means, {**found, "offset": FLOAT, **constants})
            partial = Array("float32", (None, None, segment), aligned=segment > 1)
            found = {"x": a, "weight": p, "rstd": PER_ROW, "means": PER_ROW, "partial": partial, "offset": FLOAT}
            constants = {"SEGMENT": segment, "PIECE": COLUMNS_PIECE[segment]}
            yield Variant(general_rms_norm_columns_backward, {"dx": a, "dy": a, **found, **constants})
            yield Variant(general_add_rms_norm_columns_backward, {"dx": a, "dy": a, "dtotal": a, **found, **constants})
