"""Groups that one block holds whole, in registers or as they lie in memory; kernel_src/group_norm.py has the formulas and the variants."""

import cuda.tile as ct

from kernel_src.elements import block_from_last, read, read_once, write, write_within
from kernel_src.row_tiles import converted_again, held_tiles, tile_columns
from kernel_src.segments import SEGMENT, place, sum_of, two_sums

Const = ct.Constant[int]


@ct.function
def channels_of(row, segment, segments, channels, per_channel):
    """The channel of each segment. segments: of a row; per_channel: of them, those of one channel."""
    in_group = segments // per_channel
    return row % (channels // in_group) * in_group + segment // per_channel


# ---------------------------------------------------------------- rows in registers
@ct.kernel
def group_norm_forward(x, weight, bias, y, mean, rstd, eps: float, per_channel: int, SEGMENT: Const, PIECE: Const):
    """x, y: [batch * groups, segments, SEGMENT], at most PIECE segments; weight, bias: [channels]; mean, rstd: [batch * groups] fp32;
    per_channel: segments of one channel."""
    row, count = ct.bid(0), x.shape[1]
    segment, valid = place(0, count, PIECE)
    index = (row, segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :])
    length = ct.astype(count * SEGMENT, ct.float32)
    xf = read_once(x, index)
    mu = sum_of(ct.where(valid[:, None], xf, 0.0), PIECE, SEGMENT) / length
    deviation = xf - mu
    r = ct.rsqrt(sum_of(ct.where(valid[:, None], deviation * deviation, 0.0), PIECE, SEGMENT) / length + eps)
    channel = channels_of(row, segment, count, weight.shape[0], per_channel)
    write(y, index, deviation * (r * read_once(weight, channel))[:, None] + read_once(bias, channel)[:, None])
    ct.scatter(mean, row, mu, check_bounds=False)
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def group_norm_backward(dx, dy, x, weight, mean, rstd, sums, per_channel: int, SEGMENT: Const, PIECE: Const):
    """Arrays as in `group_norm_forward`; sums: [2, batch * groups, segments] fp32, of dy * n and of dy in each segment."""
    ct.grid_dependency_control_wait()
    row, count = block_from_last(), x.shape[1]
    segment, valid = place(0, count, PIECE)
    index = (row, segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :])
    one = 1.0 / ct.astype(count * SEGMENT, ct.float32)
    r = ct.gather(rstd, row, check_bounds=False)
    n = (read_once(x, index) - ct.gather(mean, row, check_bounds=False)) * r
    d = read_once(dy, index)
    dweight, dbias = ct.sum(d * n, axis=1), ct.sum(d, axis=1)
    ct.scatter(sums, (0, row, segment), dweight, check_bounds=False)
    ct.scatter(sums, (1, row, segment), dbias, check_bounds=False)
    w = read_once(weight, channels_of(row, segment, count, weight.shape[0], per_channel))
    sum_g, sum_gn = two_sums(ct.where(valid, w * dbias, 0.0), ct.where(valid, w * dweight, 0.0), PIECE)
    mean_g, mean_gn = sum_g * one, sum_gn * one
    write(dx, index, (d * w[:, None] - mean_g - n * mean_gn) * r)


# ---------------------------------------------------------------- rows held as they lie in memory
@ct.function
def held_segments(x, row, PIECE: Const, TILES: Const):
    """A row in its own dtype, in tiles of PIECE segments; all loads are under way together."""
    found = ()
    for t in ct.static_iter(range(TILES)):
        segment, _ = place(t, x.shape[1], PIECE)
        index = (row, segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :])
        found = (*found, ct.gather(x, index, check_bounds=False, latency=1))  # type: ignore[assignment]
    return found


@ct.function
def held_channels(segment, row, segments, channels, per_channel):
    """The channels that `channels_of` gives, by a product instead of a division: exact for fewer than 2^20 segments."""
    in_group = segments // per_channel
    ratio = 1.0 / ct.astype(per_channel, ct.float32)
    return row % (channels // in_group) * in_group + ct.astype((ct.astype(segment, ct.float32) + 0.5) * ratio, ct.int32)


@ct.kernel
def group_norm_held_forward(x, weight, bias, y, mean, rstd, eps: float, per_channel: int, PIECE: Const, TILES: Const):
    """Computes what `group_norm_forward` does for at most PIECE * TILES segments."""
    row, count = ct.bid(0), x.shape[1]
    raw = held_segments(x, row, PIECE, TILES)
    number, channels = ct.astype(count, ct.float32), ct.astype(weight.shape[0], ct.float32)
    length = number * SEGMENT
    total = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    for t in ct.static_iter(range(TILES)):
        _, valid = place(t, count, PIECE)
        total = total + ct.where(valid[:, None], ct.astype(raw[t], ct.float32), 0.0)
    mu = sum_of(total, PIECE, SEGMENT) / length
    total = ct.zeros((PIECE, SEGMENT), dtype=ct.float32)
    for t in ct.static_iter(range(TILES)):
        _, valid = place(t, count, PIECE)
        deviation = ct.where(valid[:, None], converted_again(raw[t], number) - mu, 0.0)
        total = total + deviation * deviation
    r = ct.rsqrt(sum_of(total, PIECE, SEGMENT) / length + eps)
    for t in ct.static_iter(range(TILES)):
        if t * PIECE < count:
            segment, _ = place(t, count, PIECE)
            channel = held_channels(segment, row, count, weight.shape[0], per_channel)
            index = (row, segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :])
            deviation = converted_again(raw[t], channels) - mu
            write(y, index, deviation * (r * read(weight, channel))[:, None] + read(bias, channel)[:, None])
    ct.scatter(mean, row, mu, check_bounds=False)
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def group_norm_held_backward(dx, dy, x, weight, mean, rstd, sums, per_channel: int, PIECE: Const, TILES: Const):
    """Computes what `group_norm_backward` does for at most PIECE * TILES segments; x and dy are held."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    row, count = block_from_last(), x.shape[1]
    x_raw, dy_raw = held_segments(x, row, PIECE, TILES), held_segments(dy, row, PIECE, TILES)
    mu, r = ct.gather(mean, row, check_bounds=False), ct.gather(rstd, row, check_bounds=False)
    sum_g = ct.zeros((PIECE,), dtype=ct.float32)
    sum_gn = ct.zeros((PIECE,), dtype=ct.float32)
    for t in ct.static_iter(range(TILES)):
        segment, valid = place(t, count, PIECE)
        d = ct.astype(dy_raw[t], ct.float32)
        dweight, dbias = ct.sum(d * (ct.astype(x_raw[t], ct.float32) - mu), axis=1) * r, ct.sum(d, axis=1)
        ct.scatter(sums, (0, row, segment), dweight, check_bounds=False)
        ct.scatter(sums, (1, row, segment), dbias, check_bounds=False)
        w = ct.where(valid, read(weight, held_channels(segment, row, count, weight.shape[0], per_channel)), 0.0)
        sum_g = sum_g + w * dbias
        sum_gn = sum_gn + w * dweight
    number = ct.astype(count, ct.float32)
    total_g, total_gn = two_sums(sum_g, sum_gn, PIECE)
    level, slope = total_g / (number * SEGMENT) * r, total_gn / (number * SEGMENT) * r * r
    for t in ct.static_iter(range(TILES)):
        if t * PIECE < count:
            segment, _ = place(t, count, PIECE)
            w = read(weight, held_channels(segment, row, count, weight.shape[0], per_channel)) * r
            index = (row, segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :])
            write(dx, index, converted_again(dy_raw[t], number) * w[:, None] - level - (converted_again(x_raw[t], number) - mu) * slope)


# Where a channel is whole tiles, as those of an image of 64 x 64 are: what a tile is multiplied by is one number.
@ct.kernel
def group_norm_held_tiles_forward(x, weight, bias, y, mean, rstd, eps: float, positions: int, TILE: Const, TILES: Const):
    """x, y: [batch * groups, at most TILES * TILE]; positions: of a channel, whole tiles."""
    row, columns, channels = ct.bid(0), x.shape[1], weight.shape[0]
    raw = held_tiles(x, row, TILE, TILES, 0)
    length, other = ct.astype(columns, ct.float32), ct.astype(channels, ct.float32)
    total = ct.zeros((TILE,), dtype=ct.float32)
    for t in ct.static_iter(range(TILES)):
        total = total + ct.astype(raw[t], ct.float32)
    mu = ct.sum(total, 0) / length
    total = ct.zeros((TILE,), dtype=ct.float32)
    for t in ct.static_iter(range(TILES)):
        deviation = ct.where(tile_columns(t, TILE) < columns, converted_again(raw[t], length) - mu, 0.0)
        total = total + deviation * deviation
    r = ct.rsqrt(ct.sum(total, 0) / length + eps)
    for t in ct.static_iter(range(TILES)):
        channel = channels_of(row, ct.minimum(t * TILE, columns - 1), columns, channels, positions)
        deviation = converted_again(raw[t], other) - mu
        write_within(y, (row, tile_columns(t, TILE)), deviation * (r * read(weight, channel)) + read(bias, channel))
    ct.scatter(mean, row, mu, check_bounds=False)
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def group_norm_held_tiles_backward(dx, dy, x, weight, mean, rstd, sums, positions: int, TILE: Const, TILES: Const, PART: Const):
    """Computes the same; sums: [2, batch * groups, columns / PART] fp32, of dy * n and of dy."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    row, columns, channels = block_from_last(), x.shape[1], weight.shape[0]
    x_raw, dy_raw = held_tiles(x, row, TILE, TILES, 0), held_tiles(dy, row, TILE, TILES, 0)
    mu, r = ct.gather(mean, row, check_bounds=False), ct.gather(rstd, row, check_bounds=False)
    sum_g = ct.zeros((TILE // PART,), dtype=ct.float32)
    sum_gn = ct.zeros((TILE // PART,), dtype=ct.float32)
    for t in ct.static_iter(range(TILES)):
        d = ct.astype(dy_raw[t], ct.float32)
        dn = d * (ct.astype(x_raw[t], ct.float32) - mu)
        dweight = ct.sum(ct.reshape(dn, (TILE // PART, PART)), axis=1) * r
        dbias = ct.sum(ct.reshape(d, (TILE // PART, PART)), axis=1)
        at = t * (TILE // PART) + ct.arange(TILE // PART, dtype=ct.int32)
        ct.scatter(sums, (0, row, at), dweight, check_bounds=True)
        ct.scatter(sums, (1, row, at), dbias, check_bounds=True)
        w = read(weight, channels_of(row, ct.minimum(t * TILE, columns - 1), columns, channels, positions))
        sum_g = sum_g + w * dbias
        sum_gn = sum_gn + w * dweight
    length = ct.astype(columns, ct.float32)
    total_g, total_gn = two_sums(sum_g, sum_gn, TILE // PART)
    level, slope = total_g / length * r, total_gn / length * r * r
    for t in ct.static_iter(range(TILES)):
        w = read(weight, channels_of(row, ct.minimum(t * TILE, columns - 1), columns, channels, positions)) * r
        deviation = converted_again(x_raw[t], length) - mu
        write_within(dx, (row, tile_columns(t, TILE)), converted_again(dy_raw[t], length) * w - level - deviation * slope)
