"""Rotary position embedding of queries and keys in one launch (Su et al. 2021, arXiv 2104.09864; the half-split form).

With x = (x1, x2) the two halves of a head, and cos = (c1, c2), sin = (s1, s2):

    y1 = x1 * c1 - x2 * s1          y2 = x2 * c2 + x1 * s2

and backward, which is the forward with -sin only where s1 == s2 (so it is written out):

    dx1 = dy1 * c1 + dy2 * s2       dx2 = dy2 * c2 - dy1 * s1

Tokens are counted over the whole batch. cos and sin have a row for each of them, or for each position of one sequence when
all sequences share them. They may be half as wide as a head (GPT-OSS): then both halves of a head use the same values.
"""

import cuda.tile as ct

from kernel_src.elements import read
from kernel_src.prebuild import FLOATS, Array, PerArchitecture, Variant

Const = ct.Constant[int]


@ct.function
def read_heads(x, token, group, part, HEADS: Const, HALF: Const):
    """One half (part 0 or 1) of a group of a token's heads, as [1, HEADS, HALF] in float32."""
    tile = ct.load(x, index=(token, group, part), shape=(1, HEADS, HALF), allow_tma=False, check_bounds=False)
    return ct.astype(tile, ct.float32)


@ct.function
def write_heads(y, token, group, part, value):
    ct.store(y, index=(token, group, part), tile=ct.astype(value, y.dtype), allow_tma=False, check_bounds=False)


@ct.function
def angles(table, token, part, HALF: Const):
    """HALF values of cos or sin, as [1, 1, HALF] in float32."""
    row = token % table.shape[0]
    tile = ct.load(table, index=(row, part), shape=(1, HALF), allow_tma=False, check_bounds=False)
    return ct.reshape(ct.astype(tile, ct.float32), (1, 1, HALF))


@ct.function
def rotate(x1, x2, c1, s1, c2, s2):
    return x1 * c1 - x2 * s1, x2 * c2 + x1 * s2


@ct.function
def rotate_back(y1, y2, c1, s1, c2, s2):
    return y1 * c1 + y2 * s2, y2 * c2 - y1 * s1


@ct.function
def rotate_group(x, y, token, group, c1, s1, c2, s2, HEADS: Const, HALF: Const, BACKWARD: Const):
    x1, x2 = read_heads(x, token, group, 0, HEADS, HALF), read_heads(x, token, group, 1, HEADS, HALF)
    if BACKWARD:
        y1, y2 = rotate_back(x1, x2, c1, s1, c2, s2)
    else:
        y1, y2 = rotate(x1, x2, c1, s1, c2, s2)
    write_heads(y, token, group, 0, y1)
    write_heads(y, token, group, 1, y2)


@ct.kernel
def rotary(
    q, k, q_out, k_out, cos, sin, Q_HEADS: Const, Q_TAIL: Const, K_HEADS: Const, HALF: Const, FULL: Const, BACKWARD: Const
):
    """q, q_out: [tokens, heads, 2 * HALF], heads a multiple of Q_HEADS, or Q_HEADS + Q_TAIL; k, k_out: the same with a multiple of K_HEADS
    heads; cos, sin: [rows, 2 * HALF if FULL else HALF].

    Block (token, g) rotates group g of q's heads and, while there are any, group g of k's.
    """
    ct.grid_dependency_control_wait()
    token, group = ct.bid(0), ct.bid(1)
    c1, s1 = angles(cos, token, 0, HALF), angles(sin, token, 0, HALF)
    c2, s2 = angles(cos, token, FULL, HALF), angles(sin, token, FULL, HALF)
    if group < q.shape[1] // Q_HEADS:
        rotate_group(q, q_out, token, group, c1, s1, c2, s2, Q_HEADS, HALF, BACKWARD)
    if Q_TAIL > 0:
        rotate_group(q, q_out, token, Q_HEADS // Q_TAIL, c1, s1, c2, s2, Q_TAIL, HALF, BACKWARD)
    if group < k.shape[1] // K_HEADS:
        rotate_group(k, k_out, token, group, c1, s1, c2, s2, K_HEADS, HALF, BACKWARD)


@ct.function
def rotate_any(x, y, token, group, cols, c1, s1, c2, s2, HEADS: Const, BACKWARD: Const):
    """A group that reaches past the last head repeats that head, and writes the same values twice."""
    half = x.shape[2] // 2
    heads = ct.minimum(group * HEADS + ct.arange(HEADS, dtype=ct.int32), x.shape[1] - 1)[:, None]
    lo, hi = cols[None, :], (cols + half)[None, :]
    x1, x2 = read(x, (token, heads, lo)), read(x, (token, heads, hi))
    if BACKWARD:
        y1, y2 = rotate_back(x1, x2, c1, s1, c2, s2)
    else:
        y1, y2 = rotate(x1, x2, c1, s1, c2, s2)
    ct.scatter(y, (token, heads, lo), ct.astype(y1, y.dtype), check_bounds=False)
    ct.scatter(y, (token, heads, hi), ct.astype(y2, y.dtype), check_bounds=False)


@ct.kernel
def rotary_any(q, k, q_out, k_out, cos, sin, Q_HEADS: Const, K_HEADS: Const, HALF: Const, BACKWARD: Const):
    """Rotates as `rotary` does, for every number of heads, head_dim, alignment and width of cos and sin: the columns are taken in pieces
    of HALF, and the last piece repeats the last column."""
    ct.grid_dependency_control_wait()
    token, group = ct.bid(0), ct.bid(1)
    half = q.shape[2] // 2
    row = token % cos.shape[0]
    second = cos.shape[1] - half  # where the second half of cos and sin starts: 0 when they are half as wide
    for i in range(ct.cdiv(half, HALF)):
        cols = ct.minimum(i * HALF + ct.arange(HALF, dtype=ct.int32), half - 1)
        c1, s1 = read(cos, (row, cols))[None, :], read(sin, (row, cols))[None, :]
        c2, s2 = read(cos, (row, cols + second))[None, :], read(sin, (row, cols + second))[None, :]
        if group < ct.cdiv(q.shape[1], Q_HEADS):
            rotate_any(q, q_out, token, group, cols, c1, s1, c2, s2, Q_HEADS, BACKWARD)
        if group < ct.cdiv(k.shape[1], K_HEADS):
            rotate_any(k, k_out, token, group, cols, c1, s1, c2, s2, K_HEADS, BACKWARD)


# How many heads one block takes, the variant that fits a model best first: 4B, 8B and 32B; 14B, whose 40 heads are 32 + 8;
# 0.6B and 1.7B; others
GROUPS = (
    {"Q_HEADS": 32, "Q_TAIL": 0, "K_HEADS": 8},
    {"Q_HEADS": 32, "Q_TAIL": 8, "K_HEADS": 8},
    {"Q_HEADS": 16, "Q_TAIL": 0, "K_HEADS": 8},
    {"Q_HEADS": 8, "Q_TAIL": 0, "K_HEADS": 8},
    {"Q_HEADS": 4, "Q_TAIL": 0, "K_HEADS": 4},
)
def heads(dtype, count, head_dim):
    """[tokens, a multiple of `count` heads, head_dim]."""
    return Array(dtype, (None, None, head_dim), divisible=(1, count, 1))


def grouped(dtype, group, head_dim):
    """q and k of one entry of GROUPS."""
    if group["Q_TAIL"]:
        return Array(dtype, (None, group["Q_HEADS"] + group["Q_TAIL"], head_dim)), heads(dtype, group["K_HEADS"], head_dim)
    return heads(dtype, group["Q_HEADS"], head_dim), heads(dtype, group["K_HEADS"], head_dim)


def exact_shapes(dtype):
    """(half the head_dim, cos and sin as wide as a head, group): Qwen3's heads; the same with half-width tables, and GPT-OSS's."""
    if dtype == "float32":
        return [(64, 1, GROUPS[3])]
    return [(64, 1, group) for group in GROUPS] + [(64, 0, GROUPS[3]), (32, 0, GROUPS[3])]


def variants():
    for dtype in FLOATS:
        for backward in (0, 1):
            for half, full, group in exact_shapes(dtype):
                q, k = grouped(dtype, group, 2 * half)
                angle = Array(dtype, (None, half * (1 + full)))
                constants = {**group, "HALF": half, "FULL": full, "BACKWARD": backward}
                arrays = {"q": q, "k": k, "q_out": q, "k_out": k, "cos": angle, "sin": angle}
                # [8192, 32 and 8 heads] on an H200: 93 % of copy with eight blocks an SM, 89 % with four, 83 % where the compiler chooses.
                # Eight spill on sm_80.
                yield Variant(rotary, {**arrays, **constants}, hints={"occupancy": PerArchitecture(4, "sm_90", 8)})
            x, angle = Array(dtype, (None, None, None), aligned=False), Array(dtype, (None, None), aligned=False)
            constants = {"Q_HEADS": 8, "K_HEADS": 8, "HALF": 64, "BACKWARD": backward}
            yield Variant(rotary_any, {"q": x, "k": x, "q_out": x, "k_out": x, "cos": angle, "sin": angle, **constants})
