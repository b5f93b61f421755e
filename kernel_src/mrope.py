"""Rotary position embedding with several positions a token, or over a part of the head, in the half-split form of rotary.py.

Multimodal (Qwen2-VL, arXiv 2409.12191): a token has a time, a height and a width, and cos and sin a table for each. Frequency j of the
`half` of them takes the angle of

    contiguous sections (t, h, w):   time for j < t, height for j < t + h, else width
    interleaved (Qwen3-VL):          height for j = 1 (mod 3) below 3 h, width for j = 2 (mod 3) below 3 w, else time

Partial (GPT-NeoX, GLM): half of the frequencies are fewer than half of the head; the columns behind them are copied.

Rows of the tables: as in rotary.py.
"""

from dataclasses import replace

import cuda.tile as ct

from kernel_src.prebuild import FLOATS, INT, Array, PerArchitecture, Variant
from kernel_src.rotary import read, rotate, rotate_back

Const = ct.Constant[int]


@ct.function
def part_of(j, time, height, width, interleaved, SHORT: Const):
    """0, 1 or 2 for the frequencies j: whose angle each takes. SHORT: is j below 2^15? Each of a block's threads works this out for its
    columns, and with both arrangements and a division it was a third of all instructions."""
    if interleaved > 0:
        third = j - ((j * 43691) >> 17) * 3 if SHORT else j % 3
        part = ct.where((third == 1) & (j < 3 * height), 1, ct.where((third == 2) & (j < 3 * width), 2, 0))
    else:
        part = ct.where(j < time, 0, ct.where(j < time + height, 1, 2))
    return part


@ct.function
def angle_tile(table, part, row, half, HALF: Const):
    return ct.load(table, index=(part, row, half), shape=(1, 1, HALF), allow_tma=False, check_bounds=False)


@ct.function
def chosen_angles(table, parts, row, half, HALF: Const):
    """HALF values of cos or sin, each from its own table, as [1, HALF] in float32."""
    time, height, width = angle_tile(table, 0, row, half, HALF), angle_tile(table, 1, row, half, HALF), angle_tile(table, 2, row, half,
                                                                                                                   HALF)
    chosen = ct.where(parts == 2, width, ct.where(parts == 1, height, time))
    return ct.astype(ct.reshape(chosen, (1, HALF)), ct.float32)


@ct.function
def heads_of(x, group, HEADS: Const):
    """(the heads of a group, which of them exist): [HEADS, 1] each. Past the last one, it is meant again: no load is checked."""
    wanted = (group * HEADS + ct.arange(HEADS, dtype=ct.int32))[:, None]
    return ct.minimum(wanted, x.shape[1] - 1), wanted < x.shape[1]


@ct.function
def read_halves(x, token, heads, cols, HALF: Const):
    return ct.gather(x, (token, heads, cols), check_bounds=False), ct.gather(x, (token, heads, cols + HALF), check_bounds=False)


@ct.function
def write_rotated(y, token, heads, exist, cols, x1, x2, c1, s1, c2, s2, HALF: Const, BACKWARD: Const):
    x1, x2 = ct.astype(x1, ct.float32), ct.astype(x2, ct.float32)
    if BACKWARD:
        y1, y2 = rotate_back(x1, x2, c1, s1, c2, s2)
    else:
        y1, y2 = rotate(x1, x2, c1, s1, c2, s2)
    ct.scatter(y, (token, heads, cols), ct.astype(y1, y.dtype), mask=exist, check_bounds=False)
    ct.scatter(y, (token, heads, cols + HALF), ct.astype(y2, y.dtype), mask=exist, check_bounds=False)


@ct.kernel
def mrope(
    q, k, q_out, k_out, cos, sin, half: int, time: int, height: int, width: int, interleaved: int,
    Q_HEADS: Const, K_HEADS: Const, HALF: Const, BACKWARD: Const
):  # fmt: skip
    """q, q_out, k, k_out: [tokens, heads, 2 * HALF]; cos, sin: [3, rows, 2 * HALF]; half: HALF; time, height, width: the sections.

    Block (token, g) rotates group g of Q_HEADS of q's heads and, while there are any, group g of K_HEADS of k's.
    """
    token, group = ct.bid(0), ct.bid(1)
    cols = ct.arange(HALF, dtype=ct.int32)[None, :]
    q_heads, q_exist = heads_of(q, group, Q_HEADS)
    q1, q2 = read_halves(q, token, q_heads, cols, HALF)
    row = token % cos.shape[1]
    parts = part_of(ct.arange(HALF, dtype=ct.int32), time, height, width, interleaved, True)
    parts = ct.reshape(parts, (1, 1, HALF))
    c1, s1 = chosen_angles(cos, parts, row, 0, HALF), chosen_angles(sin, parts, row, 0, HALF)
    c2, s2 = chosen_angles(cos, parts, row, 1, HALF), chosen_angles(sin, parts, row, 1, HALF)
    if group < ct.cdiv(k.shape[1], K_HEADS):
        k_heads, k_exist = heads_of(k, group, K_HEADS)
        k1, k2 = read_halves(k, token, k_heads, cols, HALF)
        write_rotated(k_out, token, k_heads, k_exist, cols, k1, k2, c1, s1, c2, s2, HALF, BACKWARD)
    write_rotated(q_out, token, q_heads, q_exist, cols, q1, q2, c1, s1, c2, s2, HALF, BACKWARD)


@ct.function
def rotate_part(x, y, token, group, cols, half, c1, s1, c2, s2, HEADS: Const, BACKWARD: Const):
    """Columns `cols` and `half + cols` of a group's heads; a group that reaches past the last head repeats it."""
    heads = ct.minimum(group * HEADS + ct.arange(HEADS, dtype=ct.int32), x.shape[1] - 1)[:, None]
    lo, hi = cols[None, :], (cols + half)[None, :]
    x1, x2 = read(x, (token, heads, lo)), read(x, (token, heads, hi))
    if BACKWARD:
        y1, y2 = rotate_back(x1, x2, c1, s1, c2, s2)
    else:
        y1, y2 = rotate(x1, x2, c1, s1, c2, s2)
    ct.scatter(y, (token, heads, lo), ct.astype(y1, y.dtype), check_bounds=False)
    ct.scatter(y, (token, heads, hi), ct.astype(y2, y.dtype), check_bounds=False)


@ct.function
def copy_part(x, y, token, group, cols, HEADS: Const):
    heads = ct.minimum(group * HEADS + ct.arange(HEADS, dtype=ct.int32), x.shape[1] - 1)[:, None]
    at = (token, heads, cols[None, :])
    ct.scatter(y, at, ct.gather(x, at, check_bounds=False), check_bounds=False)


@ct.kernel
def mrope_any(
    q, k, q_out, k_out, cos, sin, half: int, time: int, height: int, width: int, interleaved: int,
    Q_HEADS: Const, K_HEADS: Const, HALF: Const, BACKWARD: Const
):  # fmt: skip
    """q, q_out, k, k_out: [tokens, heads, at least 2 * half]; cos, sin: [1 or 3, rows, half or 2 * half]. Columns are taken in pieces of
    HALF, and the last piece repeats the last column."""
    token, group = ct.bid(0), ct.bid(1)
    row = token % cos.shape[1]
    second = cos.shape[2] - half  # where the second half of cos and sin starts: 0 when they are half as wide
    has_q, has_k = group < ct.cdiv(q.shape[1], Q_HEADS), group < ct.cdiv(k.shape[1], K_HEADS)
    for i in range(ct.cdiv(half, HALF)):
        cols = ct.minimum(i * HALF + ct.arange(HALF, dtype=ct.int32), half - 1)
        part = part_of(cols, time, height, width, interleaved, False)
        c1, s1 = read(cos, (part, row, cols))[None, :], read(sin, (part, row, cols))[None, :]
        c2, s2 = read(cos, (part, row, cols + second))[None, :], read(sin, (part, row, cols + second))[None, :]
        if has_q:
            rotate_part(q, q_out, token, group, cols, half, c1, s1, c2, s2, Q_HEADS, BACKWARD)
        if has_k:
            rotate_part(k, k_out, token, group, cols, half, c1, s1, c2, s2, K_HEADS, BACKWARD)
    for i in range(ct.cdiv(q.shape[2] - 2 * half, HALF)):
        cols = ct.minimum(2 * half + i * HALF + ct.arange(HALF, dtype=ct.int32), q.shape[2] - 1)
        if has_q:
            copy_part(q, q_out, token, group, cols, Q_HEADS)
        if has_k:
            copy_part(k, k_out, token, group, cols, K_HEADS)


SCALARS = dict.fromkeys(("half", "time", "height", "width", "interleaved"), INT)
# The most heads of q, and the heads of q and of k that one block takes: Qwen2-VL and Qwen2.5-VL have 28 and 4 (7B), 12 and 2, 16 and 2,
# 40 and 8, 64 and 8 of them. With 16 of k's a thread has the same columns of k as of q, and the angles are chosen once.
GROUPS = ((16, 16, 16), (None, 32, 16))
BLOCKS = {16: 6, 32: 8}  # an SM, by the heads of q that a block takes: the fastest on an H200


def variants():
    for backward in (0, 1):
        for dtype in FLOATS:
            for most, q_heads, k_heads in GROUPS if dtype != "float32" else ():
                x, angle = Array(dtype, (None, None, 128)), Array(dtype, (3, None, 128))
                q = replace(x, at_most=(None, most, None)) if most else x
                constants = {"Q_HEADS": q_heads, "K_HEADS": k_heads, "HALF": 64, "BACKWARD": backward}
                arrays = {"q": q, "k": x, "q_out": q, "k_out": x, "cos": angle, "sin": angle}
                yield Variant(mrope, {**arrays, **SCALARS, **constants}, hints={"occupancy": PerArchitecture(4, "sm_90", BLOCKS[q_heads])})
            x, angle = Array(dtype, (None, None, None), aligned=False), Array(dtype, (None, None, None), aligned=False)
            constants = {"Q_HEADS": 8, "K_HEADS": 8, "HALF": 64, "BACKWARD": backward}
            yield Variant(mrope_any, {"q": x, "k": x, "q_out": x, "k_out": x, "cos": angle, "sin": angle, **SCALARS, **constants})
