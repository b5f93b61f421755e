"""Rotary position embedding of queries and keys in one launch (Su et al. 2021, arXiv 2104.09864; the half-split form).

With x = (x1, x2) the two halves of a head, and cos = (c1, c2), sin = (s1, s2):

    y1 = x1 * c1 - x2 * s1          y2 = x2 * c2 + x1 * s2

and backward, which is the forward with -sin only where s1 == s2 (so it is written out):

    dx1 = dy1 * c1 + dy2 * s2       dx2 = dy2 * c2 - dy1 * s1

cos and sin may be half as wide as a head (GPT-OSS): then both halves use the same values.
"""

import cuda.tile as ct

from kernel_src.prebuild import FLOATS, Array, Variant

Const = ct.Constant[int]


@ct.function
def read(array, index):
    return ct.astype(ct.gather(array, index, check_bounds=False), ct.float32)


@ct.function
def rotate(x, y, batch, token, heads, cols, c1, s1, c2, s2, BACKWARD: Const):
    """Rotates heads `heads` of one token. cols: the columns of the first half. Indices lie inside the arrays; an index that
    occurs twice (see `rotary`) writes the same value twice."""
    half = x.shape[3] // 2
    h = heads[:, None]
    lo, hi = cols[None, :], (cols + half)[None, :]
    x1, x2 = read(x, (batch, token, h, lo)), read(x, (batch, token, h, hi))
    if BACKWARD:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    ct.scatter(y, (batch, token, h, lo), ct.astype(y1, y.dtype), check_bounds=False)
    ct.scatter(y, (batch, token, h, hi), ct.astype(y2, y.dtype), check_bounds=False)


@ct.function
def angles(table, batch, token, piece, HALF: Const):
    """HALF values of cos or sin, as [1, HALF]."""
    row = ct.minimum(batch, table.shape[0] - 1)
    tile = ct.load(table, index=(row, token, piece), shape=(1, 1, HALF), allow_tma=False, check_bounds=False)
    return ct.reshape(ct.astype(tile, ct.float32), (1, HALF))


@ct.function
def any_angles(table, batch, token, cols):
    row = ct.minimum(batch, table.shape[0] - 1)
    return read(table, (row, token, cols))[None, :]


@ct.kernel
def rotary(q, k, q_out, k_out, cos, sin, HEADS: Const, HALF: Const, FULL: Const, BACKWARD: Const):
    """q, q_out: [batch, tokens, heads, 2 * HALF] in any memory order; k, k_out the same with fewer heads; cos, sin:
    [batch or 1, tokens, 2 * HALF if FULL else HALF].

    Block (token, batch, g) rotates HEADS heads: group g of q, and behind the last group of q those of k. A group that reaches
    past the last head repeats that head.
    """
    token, batch, group = ct.bid(0), ct.bid(1), ct.bid(2)
    c1, s1 = angles(cos, batch, token, 0, HALF), angles(sin, batch, token, 0, HALF)
    c2, s2 = angles(cos, batch, token, FULL, HALF), angles(sin, batch, token, FULL, HALF)
    cols = ct.arange(HALF, dtype=ct.int32)
    q_groups = ct.cdiv(q.shape[2], HEADS)
    if group < q_groups:
        heads = ct.minimum(group * HEADS + ct.arange(HEADS, dtype=ct.int32), q.shape[2] - 1)
        rotate(q, q_out, batch, token, heads, cols, c1, s1, c2, s2, BACKWARD)
    else:
        heads = ct.minimum((group - q_groups) * HEADS + ct.arange(HEADS, dtype=ct.int32), k.shape[2] - 1)
        rotate(k, k_out, batch, token, heads, cols, c1, s1, c2, s2, BACKWARD)


@ct.kernel
def rotary_any(q, k, q_out, k_out, cos, sin, HEADS: Const, HALF: Const, BACKWARD: Const):
    """As `rotary` for every head_dim, alignment and width of cos and sin: the columns are taken in pieces of HALF, and the
    last piece repeats the last column."""
    token, batch, group = ct.bid(0), ct.bid(1), ct.bid(2)
    half = q.shape[3] // 2
    second = cos.shape[2] - half  # where the second half of cos and sin starts: 0 when they are half as wide
    q_groups = ct.cdiv(q.shape[2], HEADS)
    for i in range(ct.cdiv(half, HALF)):
        cols = ct.minimum(i * HALF + ct.arange(HALF, dtype=ct.int32), half - 1)
        c1, s1 = any_angles(cos, batch, token, cols), any_angles(sin, batch, token, cols)
        c2, s2 = any_angles(cos, batch, token, cols + second), any_angles(sin, batch, token, cols + second)
        if group < q_groups:
            heads = ct.minimum(group * HEADS + ct.arange(HEADS, dtype=ct.int32), q.shape[2] - 1)
            rotate(q, q_out, batch, token, heads, cols, c1, s1, c2, s2, BACKWARD)
        else:
            heads = ct.minimum((group - q_groups) * HEADS + ct.arange(HEADS, dtype=ct.int32), k.shape[2] - 1)
            rotate(k, k_out, batch, token, heads, cols, c1, s1, c2, s2, BACKWARD)


# (half the head_dim, cos and sin as wide as a head): Qwen3's heads, the same with half-width tables, and GPT-OSS's
EXACT_SHAPES = ((64, 1), (64, 0), (32, 0))


def arrays(dtype, head_dim, width, **promises):
    x = Array(dtype, (None, None, None, head_dim), **promises)
    angle = Array(dtype, (None, None, width), **promises)
    return {"q": x, "k": x, "q_out": x, "k_out": x, "cos": angle, "sin": angle}


def variants():
    for dtype in FLOATS:
        for backward in (0, 1):
            for half, full in EXACT_SHAPES:
                constants = {"HEADS": 8, "HALF": half, "FULL": full, "BACKWARD": backward}
                yield Variant(rotary, {**arrays(dtype, 2 * half, half * (1 + full)), **constants})
            yield Variant(
                rotary_any, {**arrays(dtype, None, None, aligned=False), "HEADS": 4, "HALF": 64, "BACKWARD": backward}
            )
