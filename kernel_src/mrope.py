"""Rotary position embedding with several positions a token, or over a part of the head, in the half-split form of rotary.py.

Multimodal (Qwen2-VL, arXiv 2409.12191): a token has a time, a height and a width, and cos and sin a table for each. Frequency j of the
`half` of them takes the angle of

    contiguous sections (t, h, w):   time for j < t, height for j < t + h, else width
    interleaved (Qwen3-VL):          height for j = 1 (mod 3) below 3 h, width for j = 2 (mod 3) below 3 w, else time

The angles are picked once, into one table that the forward and the backward pass rotate by: of 28 and 4 heads and 8192 tokens, picking
takes an H200 6 us and a pass 36; a pass that picks for itself took 47. Where sections are whole eights, 16 bytes are of one table.

Partial (GPT-NeoX, GLM): half of the frequencies are fewer than half of the head; the columns behind them are copied.

Rows of the table: as in rotary.py.
"""

import cuda.tile as ct

from kernel_src.prebuild import FLOATS, INT, Array, Params, Variant
from kernel_src.rotary import read, rotate, rotate_back
from kernel_src.row_tiles import HALF as HALF_PRECISION

Const = ct.Constant[int]


@ct.function
def part_of(j, time, height, width, interleaved):
    """0, 1 or 2 for the frequencies j: whose angle each takes."""
    if interleaved > 0:
        third = j % 3
        part = ct.where((third == 1) & (j < 3 * height), 1, ct.where((third == 2) & (j < 3 * width), 2, 0))
    else:
        part = ct.where(j < time, 0, ct.where(j < time + height, 1, 2))
    return part


@ct.function
def pick(table, picked, part, rows, cols):
    ct.scatter(picked, (rows, cols), ct.gather(table, (part, rows, cols), check_bounds=False), check_bounds=False)


@ct.kernel
def mrope_pick(
    cos, sin, cos_picked, sin_picked, half: int, time: int, height: int, width: int, interleaved: int, ROWS: Const, COLS: Const
):  # fmt: skip
    """cos, sin: [3, rows, half or 2 * half]; cos_picked, sin_picked: [rows, half or 2 * half]; time, height, width: the sections. The last
    pieces repeat the last row and the last column."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    rows = ct.minimum(ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32), cos.shape[1] - 1)[:, None]
    cols = ct.minimum(ct.bid(1) * COLS + ct.arange(COLS, dtype=ct.int32), cos.shape[2] - 1)
    part = part_of(ct.where(cols < half, cols, cols - half), time, height, width, interleaved)[None, :]
    pick(cos, cos_picked, part, rows, cols[None, :])
    pick(sin, sin_picked, part, rows, cols[None, :])


@ct.kernel
def mrope_pick_groups(cos, sin, cos_picked, sin_picked, half: int, time: int, height: int, ROWS: Const, GROUPS: Const):
    """Picks what `mrope_pick` does of contiguous sections, with columns in groups of eight that have one table each. cos, sin:
    [3, rows, groups, 8], at most GROUPS; cos_picked, sin_picked: [rows, groups, 8]; half, time, height: in groups."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    rows = ct.minimum(ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32), cos.shape[1] - 1)[:, None, None]
    groups = ct.minimum(ct.arange(GROUPS, dtype=ct.int32), cos.shape[2] - 1)[None, :, None]
    inner = ct.arange(8, dtype=ct.int32)[None, None, :]
    part = part_of(ct.where(groups < half, groups, groups - half), time, height, half, 0)
    c, s = ct.gather(cos, (part, rows, groups, inner), check_bounds=False), ct.gather(sin, (part, rows, groups, inner), check_bounds=False)
    ct.scatter(cos_picked, (rows, groups, inner), c, check_bounds=False)
    ct.scatter(sin_picked, (rows, groups, inner), s, check_bounds=False)


@ct.function
def read_head(q, k, token, head, cols):
    """Columns of heads that are counted through q's and k's, in float32."""
    of_q, last = head < q.shape[1], q.shape[1] - 1
    mine = ct.gather(q, (token, ct.minimum(head, last), cols), mask=of_q, check_bounds=False, padding_value=0)
    other = ct.gather(k, (token, ct.maximum(head - q.shape[1], 0), cols), mask=head > last, check_bounds=False, padding_value=0)
    return ct.astype(ct.where(of_q, mine, other), ct.float32)


@ct.function
def write_head(q, k, token, head, cols, value):
    value = ct.astype(value, q.dtype)
    ct.scatter(q, (token, head, cols), value, mask=head < q.shape[1], check_bounds=False)
    ct.scatter(k, (token, head - q.shape[1], cols), value, mask=head >= q.shape[1], check_bounds=False)


@ct.kernel
def mrope(q, k, q_out, k_out, cos, sin, half: int, ROWS: Const, HALF: Const, BACKWARD: Const):
    """q, q_out, k, k_out: [tokens, heads, 2 * HALF]; cos, sin: [rows, 2 * HALF]; half: HALF.

    A block rotates ROWS heads, counted through q's heads of a token, k's behind them, and then those of the next token: so no lane is
    idle, however many heads there are. The last block repeats the last head.
    """
    ct.grid_dependency_control_wait()
    heads = q.shape[1] + k.shape[1]
    place = ct.minimum(ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32), q.shape[0] * heads - 1)[:, None]
    token = place // heads
    head = place - token * heads
    row = token % cos.shape[0]
    first = ct.arange(HALF, dtype=ct.int32)[None, :]
    second = first + HALF
    x1, x2 = read_head(q, k, token, head, first), read_head(q, k, token, head, second)
    c1, s1, c2, s2 = read(cos, (row, first)), read(sin, (row, first)), read(cos, (row, second)), read(sin, (row, second))
    if BACKWARD:
        y1, y2 = rotate_back(x1, x2, c1, s1, c2, s2)
    else:
        y1, y2 = rotate(x1, x2, c1, s1, c2, s2)
    write_head(q_out, k_out, token, head, first, y1)
    write_head(q_out, k_out, token, head, second, y2)


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
def mrope_any(q, k, q_out, k_out, cos, sin, half: int, Q_HEADS: Const, K_HEADS: Const, HALF: Const, BACKWARD: Const):
    """q, q_out, k, k_out: [tokens, heads, at least 2 * half]; cos, sin: [rows, half or 2 * half]. Columns are taken in pieces of HALF, and
    the last piece repeats the last column."""
    ct.grid_dependency_control_wait()
    token, group = ct.bid(0), ct.bid(1)
    row = token % cos.shape[0]
    second = cos.shape[1] - half  # where the second half of cos and sin starts: 0 when they are half as wide
    has_q, has_k = group < ct.cdiv(q.shape[1], Q_HEADS), group < ct.cdiv(k.shape[1], K_HEADS)
    for i in range(ct.cdiv(half, HALF)):
        cols = ct.minimum(i * HALF + ct.arange(HALF, dtype=ct.int32), half - 1)
        c1, s1 = read(cos, (row, cols))[None, :], read(sin, (row, cols))[None, :]
        c2, s2 = read(cos, (row, cols + second))[None, :], read(sin, (row, cols + second))[None, :]
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


ROWS = 16  # a block: each of 128 threads has 16 bytes of both halves
PICKED = {"ROWS": 2, "COLS": 128}
PICKED_GROUPS = {"ROWS": 8, "GROUPS": 16}


def variants():
    sections: Params = dict.fromkeys(("half", "time", "height", "width", "interleaved"), INT)
    for dtype in FLOATS:
        tables, table = Array(dtype, (None, None, None), aligned=False), Array(dtype, (None, None), aligned=False)
        yield Variant(mrope_pick, {"cos": tables, "sin": tables, "cos_picked": table, "sin_picked": table, **sections, **PICKED})
        groups: Params = dict.fromkeys(("cos", "sin"), Array(dtype, (None, None, None, 8), at_most=(None, None, 16, None)))
        groups |= dict.fromkeys(("cos_picked", "sin_picked"), Array(dtype, (None, None, 8), at_most=(None, 16, None)))
        yield Variant(mrope_pick_groups, {**groups, **dict.fromkeys(("half", "time", "height"), INT), **PICKED_GROUPS})
        for backward in (0, 1):
            if dtype in HALF_PRECISION:
                x, angle = Array(dtype, (None, None, 128)), Array(dtype, (None, 128))
                arrays = {"q": x, "k": x, "q_out": x, "k_out": x, "cos": angle, "sin": angle}
                yield Variant(mrope, {**arrays, "half": INT, "ROWS": ROWS, "HALF": 64, "BACKWARD": backward})
            constants: Params = {"half": INT, "Q_HEADS": 8, "K_HEADS": 8, "HALF": 64, "BACKWARD": backward}
            yield Variant(mrope_any, {"q": tables, "k": tables, "q_out": tables, "k_out": tables, "cos": table, "sin": table, **constants})
