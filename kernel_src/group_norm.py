"""GroupNorm (Wu and He 2018, arXiv 1803.08494): the channels of a group, with all their positions, share a mean and a deviation.

    n = (x - mean) * rstd        rstd = 1 / sqrt(mean((x - mean)^2) + eps)        y = weight[channel] * n + bias[channel]

Backward, with g = dy * weight[channel], and means over the group:

    dx = (g - mean(g) - n * mean(g * n)) * rstd        dweight = sum of dy * n        dbias = sum of dy        (batch and positions)

A group lies in one piece of memory: a row of channels * positions elements, as segments that do not cross a channel. A row that fits into
the registers is read once, by one block, in bf16 also one that fits as it lies in memory, where there are enough rows. A longer one is
divided among blocks: a first kernel writes what it finds about each part, the second joins the parts of its row, in a fixed order, and
applies them. Where a channel is whole tiles of 4096 elements, as an image of 64 x 64 is, a part is such a tile, and so is what a block
takes at a time of a row that it holds: of 256 rows of 10 channels in 45 us on an H200, forward and backward, where parts take 50. Parts
forward are mean and squared deviations, joined by Chan's formula; backward the sums of dy * n and dy for each channel, which give the means
of the group (weighted) as well as the gradients of the parameters.
"""

import cuda.tile as ct

from kernel_src.elements import block_from_last, read, read_once, write
from kernel_src.group_norm_rows import (
    channels_of,
    group_norm_backward,
    group_norm_forward,
    group_norm_held_backward,
    group_norm_held_forward,
    group_norm_held_tiles_backward,
    group_norm_held_tiles_forward,
)
from kernel_src.layer_norm import row_statistics
from kernel_src.prebuild import FLOAT, FLOATS, INT, Array, Params, PerArchitecture, Variant
from kernel_src.row_tiles import tile_columns
from kernel_src.segments import MIXED, PER_ROW, SAME, SEGMENT, place, rows, two_sums

Const = ct.Constant[int]


# ---------------------------------------------------------------- rows in parts
@ct.kernel
def group_norm_statistics(x, parts, chunk: int, SEGMENT: Const, PIECE: Const):
    """parts: [batch * groups, number, 2] fp32, the mean and the sum of squared deviations of every `chunk` segments."""
    number = parts.shape[1]
    row, part = ct.bid(0) // number, ct.bid(0) % number
    first = part * chunk
    mu, squares = row_statistics(x, row, first, ct.minimum(chunk, x.shape[1] - first), PIECE, SEGMENT)
    ct.scatter(parts, (row, part, 0), mu, check_bounds=False)
    ct.scatter(parts, (row, part, 1), squares, check_bounds=False)


@ct.kernel
def group_norm_apply(
    x, weight, bias, y, parts, mean, rstd, eps: float, per_channel: int, chunk: int, SEGMENT: Const, PIECE: Const, PARTS: Const
):
    """y, mean and rstd from the parts, of which there are at most PARTS in a row. A block has `chunk` segments; the last part comes first,
    because what the statistics read last is still in the L2."""
    ct.grid_dependency_control_wait()
    number, count = parts.shape[1], x.shape[1]
    block = block_from_last()
    row, part = block // number, block % number
    at = ct.minimum(ct.arange(PARTS, dtype=ct.int32), number - 1)
    size = ct.astype(ct.minimum(chunk, count - at * chunk) * SEGMENT, ct.float32)
    size = ct.where(ct.arange(PARTS, dtype=ct.int32) < number, size, 0.0)
    length = ct.astype(count * SEGMENT, ct.float32)
    means = read_once(parts, (row, at, 0))
    mu = ct.sum(means * size, axis=0, keepdims=False) / length
    squares = ct.where(size > 0.0, read_once(parts, (row, at, 1)), 0.0) + size * (means - mu) * (means - mu)
    r = ct.rsqrt(ct.sum(squares, axis=0, keepdims=False) / length + eps)
    first = part * chunk
    mine = ct.minimum(chunk, count - first)
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    for i in range(ct.cdiv(mine, PIECE)):
        segment, _ = place(i, mine, PIECE)
        segment = first + segment
        channel = channels_of(row, segment, count, weight.shape[0], per_channel)
        index = (row, segment[:, None], column)
        write(y, index, (read_once(x, index) - mu) * (r * read_once(weight, channel))[:, None] + read_once(bias, channel)[:, None])
    if part == 0:
        ct.scatter(mean, row, mu, check_bounds=False)
        ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def group_norm_channel_sums(dy, x, mean, rstd, sums, chunk: int, SEGMENT: Const, PIECE: Const):
    """dy, x: [batch * channels, segments, SEGMENT]; sums: [2, batch * channels, parts] fp32, of dy * n and of dy over `chunk` segments."""
    ct.grid_dependency_control_wait()
    channels, number = sums.shape[1], sums.shape[2]
    row, part = ct.bid(0) // number, ct.bid(0) % number
    group = row // (channels // mean.shape[0])
    mu, r = ct.gather(mean, group, check_bounds=False), ct.gather(rstd, group, check_bounds=False)
    first = part * chunk
    mine = ct.minimum(chunk, x.shape[1] - first)
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    dweight = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    dbias = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    for i in range(ct.cdiv(mine, PIECE)):
        segment, valid = place(i, mine, PIECE)
        index = (row, (first + segment)[:, None], column)
        d = ct.where(valid[:, None], read_once(dy, index), 0.0)
        dweight = dweight + d * (read_once(x, index) - mu)
        dbias = dbias + d
    total_w, total_b = two_sums(dweight, dbias, PIECE * SEGMENT)
    ct.scatter(sums, (0, row, part), total_w * r, check_bounds=False)
    ct.scatter(sums, (1, row, part), total_b, check_bounds=False)


@ct.function
def sum_parameters(sums, dparameters, block, ROWS: Const, COLS: Const):
    """sums: [2, batch, channels, parts] fp32; dparameters: [2, channels], dweight and dbias; block: of COLS channels of one of them."""
    batch, channels, parts = sums.shape[1], sums.shape[2], sums.shape[3]
    blocks = ct.cdiv(channels, COLS)
    which = block // blocks
    channel = ct.minimum(block % blocks * COLS + ct.arange(COLS, dtype=ct.int32), channels - 1)
    acc = ct.zeros((ROWS, COLS), dtype=ct.float32)
    for i in range(ct.cdiv(batch * parts, ROWS)):
        at, valid = place(i, batch * parts, ROWS)
        found = read_once(sums, (which, (at // parts)[:, None], channel[None, :], (at % parts)[:, None]))
        acc = acc + ct.where(valid[:, None], found, 0.0)
    write(dparameters, (which, channel), ct.sum(acc, axis=0))


@ct.function
def group_means(sums, weight, row, in_group, length, PARTS: Const):
    """(mean(g), mean(g * n)) of a group. sums: [2, batch, channels, parts]; in_group: channels; length: elements of a group."""
    of_channel, channels = sums.shape[3], sums.shape[2]
    groups = channels // in_group
    sample, first_channel = row // groups, row % groups * in_group
    sum_g = ct.zeros((PARTS,), dtype=ct.float32)
    sum_gn = ct.zeros((PARTS,), dtype=ct.float32)
    for i in range(ct.cdiv(in_group * of_channel, PARTS)):
        at, valid = place(i, in_group * of_channel, PARTS)
        channel = first_channel + at // of_channel
        w = ct.where(valid, read_once(weight, channel), 0.0)
        sum_gn = sum_gn + w * read_once(sums, (0, sample, channel, at % of_channel))
        sum_g = sum_g + w * read_once(sums, (1, sample, channel, at % of_channel))
    one = 1.0 / ct.astype(length, ct.float32)
    total_g, total_gn = two_sums(sum_g, sum_gn, PARTS)
    return total_g * one, total_gn * one


@ct.function
def apply_part(dx, dy, x, weight, mean, rstd, sums, per_channel, chunk, block, PIECE: Const, SEGMENT: Const, PARTS: Const):
    count = x.shape[1]
    number = ct.cdiv(count, chunk)
    row, part = block // number, block % number
    channels = sums.shape[2]
    mean_g, mean_gn = group_means(sums, weight, row, count // per_channel, count * SEGMENT, PARTS)
    mu, r = ct.gather(mean, row, check_bounds=False), ct.gather(rstd, row, check_bounds=False)
    first = part * chunk
    mine = ct.minimum(chunk, count - first)
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    for i in range(ct.cdiv(mine, PIECE)):
        segment, _ = place(i, mine, PIECE)
        segment = first + segment
        w = read_once(weight, channels_of(row, segment, count, channels, per_channel))[:, None]
        index = (row, segment[:, None], column)
        write(dx, index, (read_once(dy, index) * w - mean_g - (read_once(x, index) - mu) * (r * mean_gn)) * r)


@ct.kernel
def group_norm_apply_backward(
    dx, dy, x, weight, mean, rstd, sums, dparameters, per_channel: int, chunk: int, SEGMENT: Const, PIECE: Const, PARTS: Const, ROWS: Const,
    COLS: Const
):  # fmt: skip
    """dx from the sums, [2, batch, channels, parts], PARTS of those of a group at a time. A block has `chunk` segments, the last ones
    first, which the sums' kernel has left in the L2. Blocks behind those sum up dweight and dbias, [2, channels]."""
    ct.grid_dependency_control_wait()
    blocks = x.shape[0] * ct.cdiv(x.shape[1], chunk)
    if ct.bid(0) < blocks:
        apply_part(dx, dy, x, weight, mean, rstd, sums, per_channel, chunk, blocks - 1 - ct.bid(0), PIECE, SEGMENT, PARTS)
    else:
        sum_parameters(sums, dparameters, ct.bid(0) - blocks, ROWS, COLS)


@ct.kernel
def group_norm_parameter_sums(sums, dparameters, ROWS: Const, COLS: Const):
    """Adds up what `sum_parameters` does, with the parts of a channel side by side, as in memory."""
    ct.grid_dependency_control_wait()
    batch, channels, parts = sums.shape[1], sums.shape[2], sums.shape[3]
    blocks = ct.cdiv(channels, COLS)
    which = ct.bid(0) // blocks
    channel = ct.minimum(ct.bid(0) % blocks * COLS + ct.arange(COLS, dtype=ct.int32), channels - 1)
    acc = ct.zeros((COLS, ROWS), dtype=ct.float32)
    for i in range(ct.cdiv(batch * parts, ROWS)):
        at, valid = place(i, batch * parts, ROWS)
        found = read_once(sums, (which, (at // parts)[None, :], channel[:, None], (at % parts)[None, :]))
        acc = acc + ct.where(valid[None, :], found, 0.0)
    write(dparameters, (which, channel), ct.sum(acc, axis=1))


# ---------------------------------------------------------------- rows in tiles
# Where a channel is whole tiles: each block has one tile, in one channel, and loads all of it at once. The second kernel of either pass
# starts while the blocks of the first are still under way (`Variant.waits`), and waits where it needs what those have found.
@ct.kernel
def group_norm_tile_statistics(x, parts, TILE: Const):
    """x: [batch * groups, number * TILE]; parts: [batch * groups, number, 2] fp32, the mean and the squared deviations of each tile."""
    ct.grid_dependency_control_launch_dependents()
    number = parts.shape[1]
    row, part = ct.bid(0) // number, ct.bid(0) % number
    xf = read(x, (row, tile_columns(part, TILE)))
    mu = ct.sum(xf, axis=0, keepdims=False) * (1.0 / TILE)
    deviation = xf - mu
    ct.scatter(parts, (row, part, 0), mu, check_bounds=False)
    ct.scatter(parts, (row, part, 1), ct.sum(deviation * deviation, axis=0, keepdims=False), check_bounds=False)


@ct.kernel
def group_norm_tile_apply(x, weight, bias, y, parts, mean, rstd, eps: float, positions: int, TILE: Const, PARTS: Const):
    """y, mean and rstd from the parts, of which there are at most PARTS in a row, the last tile first. positions: of a channel."""
    columns, number = x.shape[1], parts.shape[1]
    block = block_from_last()
    row, part = block // number, block % number
    index = (row, tile_columns(part, TILE))
    raw = ct.gather(x, index, check_bounds=False)
    channel = channels_of(row, part * TILE, columns, weight.shape[0], positions)
    w, b = read(weight, channel), read(bias, channel)
    at = ct.arange(PARTS, dtype=ct.int32)
    size = ct.where(at < number, ct.full((PARTS,), TILE, dtype=ct.float32), 0.0)
    at = ct.minimum(at, number - 1)
    ct.grid_dependency_control_wait()
    means, squares = read(parts, (row, at, 0)), read(parts, (row, at, 1))
    mu = ct.sum(means * size, axis=0, keepdims=False) / ct.astype(columns, ct.float32)
    squares = ct.where(size > 0.0, squares, 0.0) + size * (means - mu) * (means - mu)
    r = ct.rsqrt(ct.sum(squares, axis=0, keepdims=False) / ct.astype(columns, ct.float32) + eps)
    write(y, index, (ct.astype(raw, ct.float32) - mu) * (r * w) + b)
    if part == 0:
        ct.scatter(mean, row, mu, check_bounds=False)
        ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def group_norm_tile_sums(dy, x, mean, rstd, sums, TILE: Const):
    """dy, x: [batch * channels, parts * TILE]; sums: [2, batch * channels, parts] fp32, of dy * n and of dy over each tile."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    channels, number = sums.shape[1], sums.shape[2]
    row, part = ct.bid(0) // number, ct.bid(0) % number
    index = (row, tile_columns(part, TILE))
    d, xf = read(dy, index), read(x, index)
    group = row // (channels // mean.shape[0])
    mu, r = ct.gather(mean, group, check_bounds=False), ct.gather(rstd, group, check_bounds=False)
    total_w, total_b = two_sums(d * (xf - mu), d, TILE)
    ct.scatter(sums, (0, row, part), total_w * r, check_bounds=False)
    ct.scatter(sums, (1, row, part), total_b, check_bounds=False)


@ct.kernel
def group_norm_tile_apply_backward(
    dx, dy, x, weight, mean, rstd, sums, dparameters, positions: int, TILE: Const, PARTS: Const, ROWS: Const, COLS: Const
):
    """dx from the sums, [2, batch, channels, parts], PARTS of those of a group at a time, the last tile first. Blocks behind those of dx
    sum up dweight and dbias, [2, channels]."""
    columns = x.shape[1]
    number = columns // TILE
    blocks = x.shape[0] * number
    if ct.bid(0) < blocks:
        block = blocks - 1 - ct.bid(0)
        row, part = block // number, block % number
        index = (row, tile_columns(part, TILE))
        dy_raw, x_raw = ct.gather(dy, index, check_bounds=False), ct.gather(x, index, check_bounds=False)
        channels = weight.shape[0]
        w = read(weight, channels_of(row, part * TILE, columns, channels, positions))
        mu, r = ct.gather(mean, row, check_bounds=False), ct.gather(rstd, row, check_bounds=False)
        ct.grid_dependency_control_wait()
        mean_g, mean_gn = group_means(sums, weight, row, columns // positions, columns, PARTS)
        d, deviation = ct.astype(dy_raw, ct.float32), ct.astype(x_raw, ct.float32) - mu
        write(dx, index, d * (w * r) - mean_g * r - deviation * (mean_gn * r * r))
    else:
        ct.grid_dependency_control_wait()
        sum_parameters(sums, dparameters, ct.bid(0) - blocks, ROWS, COLS)


# ---------------------------------------------------------------- what is prebuilt
WHOLE = {"bfloat16": (32, 64), "float16": (64,), "float32": (32,)}  # rows in registers: segments of 64, the shortest first
# Of rows that are held as they lie in memory. Two forward blocks spill on sm_120, and in fp16 the backward one on sm_110.
HELD_FORWARD, HELD_FORWARD_HINTS = {"PIECE": 64, "TILES": 10}, {"occupancy": PerArchitecture(1, "sm_90", 2), "num_worker_warps": 8}
HELD_BACKWARD, HELD_BACKWARD_HINTS = {"PIECE": 32, "TILES": 20}, {"occupancy": 1, "num_worker_warps": 8}
# And of those whose channels are whole tiles. In fp16 the backward one spills on sm_100.
HELD_TILES = {"TILE": 4096, "TILES": 10}
HELD_TILES_FORWARD_HINTS = {"occupancy": PerArchitecture(1, "sm_90", 2), "num_worker_warps": 8}
HELD_TILES_BACKWARD, HELD_TILES_BACKWARD_HINTS = {**HELD_TILES, "PART": 128}, {"occupancy": 1, "num_worker_warps": 8}
PIECE = {SEGMENT: 32, 1: 1024}
PARTS = 128  # of a row at most, forward
SUMS = {"ROWS": 32, "COLS": 16}
SUMS_ALONE = {"ROWS": 256, "COLS": 2}
TILE = 4096  # elements of a block, where a channel is whole tiles


def tiles(x, w):
    a, p = Array(x, (None, None), divisible=(1, TILE)), Array(w, (None,), aligned=False)
    wide = x == "float32"
    hints: dict = {"occupancy": 4 if wide else 5, "num_worker_warps": 8}
    parts, sums = Array("float32", (None, None, 2), aligned=False), Array("float32", (2, None, None), aligned=False)
    statistics = {"mean": PER_ROW, "rstd": PER_ROW}
    if x == w:
        yield Variant(group_norm_tile_statistics, {"x": a, "parts": parts, "TILE": TILE})
        yield Variant(group_norm_tile_sums, {"dy": a, "x": a, **statistics, "sums": sums, "TILE": TILE}, hints=hints)
    inputs: Params = {"x": a, "weight": p, "bias": p, "y": a, "parts": parts, **statistics, "eps": FLOAT, "positions": INT}
    yield Variant(group_norm_tile_apply, {**inputs, "TILE": TILE, "PARTS": PARTS}, hints={"occupancy": 8})
    found, out = Array("float32", (2, None, None, None), aligned=False), Array(w, (2, None), aligned=False)
    grads: Params = {"dx": a, "dy": a, "x": a, "weight": p, **statistics, "sums": found, "dparameters": out, "positions": INT}
    if wide:  # with four it spills on sm_86 and sm_89
        hints = {**hints, "occupancy": PerArchitecture(3, "sm_90", 4)}
    # In bf16 a backward pass of 8 images of 512 channels of 64 x 64 in 32 groups takes an H200 46.5 us with six blocks of 4 warps and 64
    # parts at a time, 49.1 with five of 8 warps. In fp16 six spill.
    parts_at_a_time, hints = (64, {"occupancy": 6}) if x == "bfloat16" else (PARTS, hints)
    yield Variant(group_norm_tile_apply_backward, {**grads, "TILE": TILE, "PARTS": parts_at_a_time, **SUMS}, hints=hints)


def held_in_tiles(dtype):
    a, p = Array(dtype, (None, None), divisible=(1, TILE)), Array(dtype, (None,), aligned=False)
    statistics, sums = {"mean": PER_ROW, "rstd": PER_ROW}, Array("float32", (2, None, None), aligned=False)
    inputs: Params = {"x": a, "weight": p, "bias": p, "y": a, **statistics, "eps": FLOAT, "positions": INT}
    yield Variant(group_norm_held_tiles_forward, {**inputs, **HELD_TILES}, hints=HELD_TILES_FORWARD_HINTS)
    grads: Params = {"dx": a, "dy": a, "x": a, "weight": p, **statistics, "sums": sums, "positions": INT}
    yield Variant(group_norm_held_tiles_backward, {**grads, **HELD_TILES_BACKWARD}, hints=HELD_TILES_BACKWARD_HINTS)


def of_whole_rows(x, w, segments):
    """The parameters forward and backward of kernels that take a row whole, of so many segments at most."""
    a, p, sums = rows(x, SEGMENT, segments), Array(w, (None,), aligned=False), Array("float32", (2, None, None), aligned=False)
    statistics = {"mean": PER_ROW, "rstd": PER_ROW}
    forward: Params = {"x": a, "weight": p, "bias": p, "y": a, **statistics, "eps": FLOAT, "per_channel": INT}
    backward: Params = {"dx": a, "dy": a, "x": a, "weight": p, **statistics, "sums": sums, "per_channel": INT}
    return forward, backward


def variants():
    for x, w in SAME:
        for piece in WHOLE[x]:
            (inputs, grads), constants = of_whole_rows(x, w, piece), {"SEGMENT": SEGMENT, "PIECE": piece}
            yield Variant(group_norm_forward, {**inputs, **constants}, hints={"occupancy": 6 if piece > 32 else 8})
            yield Variant(group_norm_backward, {**grads, **constants}, hints={"occupancy": 4})
        if x == "bfloat16":
            inputs, grads = of_whole_rows(x, w, HELD_FORWARD["PIECE"] * HELD_FORWARD["TILES"])
            yield Variant(group_norm_held_forward, {**inputs, **HELD_FORWARD}, hints=HELD_FORWARD_HINTS)
            yield Variant(group_norm_held_backward, {**grads, **HELD_BACKWARD}, hints=HELD_BACKWARD_HINTS)
            yield from held_in_tiles(x)
    for x, w in SAME + MIXED:
        for segment in (SEGMENT, 1):
            a, p, constants = rows(x, segment), Array(w, (None,), aligned=False), {"SEGMENT": segment, "PIECE": PIECE[segment]}
            parts, sums = Array("float32", (None, None, 2), aligned=False), Array("float32", (2, None, None), aligned=False)
            statistics = {"mean": PER_ROW, "rstd": PER_ROW}
            if x == w:
                yield Variant(group_norm_statistics, {"x": a, "parts": parts, "chunk": INT, **constants}, hints={"occupancy": 8})
                per_part = {"dy": a, "x": a, **statistics, "sums": sums, "chunk": INT}
                yield Variant(group_norm_channel_sums, {**per_part, **constants}, hints={"occupancy": 6 if x != "float32" else 4})
            inputs = {"x": a, "weight": p, "bias": p, "y": a, "parts": parts, **statistics, "eps": FLOAT, "per_channel": INT, "chunk": INT}
            yield Variant(group_norm_apply, {**inputs, **constants, "PARTS": PARTS}, hints={"occupancy": 8})
            found, out = Array("float32", (2, None, None, None), aligned=False), Array(w, (2, None), aligned=False)
            grads = {"dx": a, "dy": a, "x": a, "weight": p, **statistics, "sums": found, "dparameters": out, "per_channel": INT,
                     "chunk": INT}
            yield Variant(group_norm_apply_backward, {**grads, **constants, "PARTS": PARTS, **SUMS},
                          hints={"occupancy": 6 if x == w else 4})
    for x, w in SAME + MIXED:
        yield from tiles(x, w)
    for w in FLOATS:
        sums, out = Array("float32", (2, None, None, None), aligned=False), Array(w, (2, None), aligned=False)
        yield Variant(group_norm_parameter_sums, {"sums": sums, "dparameters": out, **SUMS_ALONE})
