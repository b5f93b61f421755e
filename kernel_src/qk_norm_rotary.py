"""RMSNorm of every query and key head, and rotary embedding, in one pass from the projections' output to attention's input.

    n = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps)  over a head        u = round(weight * round(n))
    y1 = u1 * c1 - u2 * s1                                               y2 = u2 * c2 + u1 * s2

Backward: rotate dy back (d), then RMSNorm's backward with g = d * weight (kernel_src/rms_norm.py); rstd is computed again,
so nothing but the projections' output is kept. Saves a write and a read of q and k against two kernels in each direction.

Tokens are counted over the whole batch; cos and sin as in kernel_src/rotary.py.
"""

import cuda.tile as ct

from kernel_src.column_sum import TILE, sum_columns
from kernel_src.prebuild import FLOAT, FLOATS, UNMEASURED, Array, Variant
from kernel_src.rotary import GROUPS, angles, grouped, heads, read_heads, rotate, rotate_back, write_heads

Const = ct.Constant[int]


@ct.function
def norm_weight(weight, part, HALF: Const):
    """One half of a norm's weight, as [1, 1, HALF]."""
    tile = ct.load(weight, index=(part,), shape=(HALF,), allow_tma=False, check_bounds=False)
    return ct.reshape(tile, (1, 1, HALF))


@ct.function
def inverse_rms(x1, x2, eps, HALF: Const):
    return ct.rsqrt(ct.sum(x1 * x1 + x2 * x2, axis=2, keepdims=True) * (0.5 / HALF) + eps)


@ct.function
def forward(x, y, weight, token, group, c1, s1, c2, s2, eps, HEADS: Const, HALF: Const):
    x1, x2 = read_heads(x, token, group, 0, HEADS, HALF), read_heads(x, token, group, 1, HEADS, HALF)
    r = inverse_rms(x1, x2, eps, HALF)
    # The model rounds after the normalisation and after the weight: the product is taken in its dtype.
    u1 = ct.astype(x1 * r, x.dtype) * norm_weight(weight, 0, HALF)
    u2 = ct.astype(x2 * r, x.dtype) * norm_weight(weight, 1, HALF)
    y1, y2 = rotate(ct.astype(u1, ct.float32), ct.astype(u2, ct.float32), c1, s1, c2, s2)
    write_heads(y, token, group, 0, y1)
    write_heads(y, token, group, 1, y2)


@ct.kernel
def qk_norm_rotary_forward(
    q, k, q_out, k_out, q_weight, k_weight, cos, sin, eps: float, Q_HEADS: Const, Q_TAIL: Const, K_HEADS: Const, HALF: Const, FULL: Const
):
    """q, q_out: [tokens, heads, 2 * HALF], heads a multiple of Q_HEADS, or Q_HEADS + Q_TAIL; k, k_out: the same with a multiple of K_HEADS
    heads; q_weight, k_weight: [2 * HALF]; cos, sin: [rows, 2 * HALF if FULL else HALF].

    Block (token, g) works on group g of q's heads and, while there are any, group g of k's."""
    token, group = ct.bid(0), ct.bid(1)
    c1, s1 = angles(cos, token, 0, HALF), angles(sin, token, 0, HALF)
    c2, s2 = angles(cos, token, FULL, HALF), angles(sin, token, FULL, HALF)
    if group < q.shape[1] // Q_HEADS:
        forward(q, q_out, q_weight, token, group, c1, s1, c2, s2, eps, Q_HEADS, HALF)
    if Q_TAIL > 0:
        forward(q, q_out, q_weight, token, Q_HEADS // Q_TAIL, c1, s1, c2, s2, eps, Q_TAIL, HALF)
    if group < k.shape[1] // K_HEADS:
        forward(k, k_out, k_weight, token, group, c1, s1, c2, s2, eps, K_HEADS, HALF)


@ct.function
def read_tokens(x, tokens, group, part, TOKENS: Const, HEADS: Const, HALF: Const):
    """One half of a group of heads of TOKENS tokens, as [TOKENS, HEADS, HALF] in float32; zeros past the last token."""
    shape = (TOKENS, HEADS, HALF)
    tile = ct.load(x, index=(tokens, group, part), shape=shape, latency=3, padding_mode=ct.PaddingMode.ZERO)
    return ct.astype(tile, ct.float32)


@ct.function
def token_angles(table, tokens, part, TOKENS: Const, HALF: Const):
    """cos or sin of TOKENS tokens, at most 4, as [TOKENS, 1, HALF] in float32. Tokens past the last get some row: all else that is read of
    them is zero. A remainder for each token instead of one for all spills on sm_80."""
    rows = tokens * TOKENS % table.shape[0] + ct.arange(TOKENS, dtype=ct.int32)
    rows = ct.minimum(ct.where(rows < table.shape[0], rows, rows - table.shape[0]), table.shape[0] - 1)
    cols = part * HALF + ct.arange(HALF, dtype=ct.int32)
    tile = ct.gather(table, (rows[:, None], cols[None, :]), check_bounds=False)
    return ct.reshape(ct.astype(tile, ct.float32), (TOKENS, 1, HALF))


@ct.function
def backward(dy, x, dx, weight, dweight, cos, sin, group, row, eps, TOKENS: Const, HEADS: Const, HALF: Const, FULL: Const):
    """Gradients of one group of heads over every grid-th TOKENS tokens; the sum of the weight's gradient goes to dweight[row].
    Tokens past the last are zeros and add nothing."""
    w1 = ct.astype(norm_weight(weight, 0, HALF), ct.float32)
    w2 = ct.astype(norm_weight(weight, 1, HALF), ct.float32)
    acc1 = ct.zeros((TOKENS, HEADS, HALF), dtype=ct.float32)
    acc2 = ct.zeros((TOKENS, HEADS, HALF), dtype=ct.float32)
    for tokens in range(ct.bid(0), ct.cdiv(x.shape[0], TOKENS), ct.num_blocks(0)):
        x1 = read_tokens(x, tokens, group, 0, TOKENS, HEADS, HALF)
        x2 = read_tokens(x, tokens, group, 1, TOKENS, HEADS, HALF)
        g1 = read_tokens(dy, tokens, group, 0, TOKENS, HEADS, HALF)
        g2 = read_tokens(dy, tokens, group, 1, TOKENS, HEADS, HALF)
        c1, s1 = token_angles(cos, tokens, 0, TOKENS, HALF), token_angles(sin, tokens, 0, TOKENS, HALF)
        c2, s2 = token_angles(cos, tokens, FULL, TOKENS, HALF), token_angles(sin, tokens, FULL, TOKENS, HALF)
        d1, d2 = rotate_back(g1, g2, c1, s1, c2, s2)
        r = inverse_rms(x1, x2, eps, HALF)
        n1, n2 = x1 * r, x2 * r
        acc1 = acc1 + d1 * n1
        acc2 = acc2 + d2 * n2
        d1, d2 = d1 * w1, d2 * w2
        mean = ct.sum(d1 * n1 + d2 * n2, axis=2, keepdims=True) * (0.5 / HALF)
        ct.store(dx, index=(tokens, group, 0), tile=ct.astype((d1 - n1 * mean) * r, dx.dtype))
        ct.store(dx, index=(tokens, group, 1), tile=ct.astype((d2 - n2 * mean) * r, dx.dtype))
    for part in ct.static_iter(range(2)):
        total = ct.sum(ct.sum(acc1 if part == 0 else acc2, axis=1), axis=0)
        ct.store(dweight, index=(row, part), tile=ct.reshape(total, (1, HALF)), allow_tma=False, check_bounds=False)


@ct.kernel(occupancy=2)
def qk_norm_rotary_backward(
    dq_out, dk_out, q, k, dq, dk, q_weight, k_weight, cos, sin, dq_weight, dk_weight, eps: float,
    TOKENS: Const, HEADS: Const, HALF: Const, FULL: Const
):  # fmt: skip
    """dq_out, dk_out: the gradients of the results, and q, k, dq, dk: as in the forward, heads multiples of HEADS.
    dq_weight: [blocks * groups of q, 2 * HALF] fp32 and dk_weight: [blocks * groups of k, 2 * HALF] fp32, partial sums.
    Grid (blocks, groups of q and behind them those of k): a block walks over the tokens, TOKENS at a time, with one group of heads."""
    group = ct.bid(1)
    q_groups, k_groups = q.shape[1] // HEADS, k.shape[1] // HEADS
    if group < q_groups:
        row = ct.bid(0) * q_groups + group
        backward(dq_out, q, dq, q_weight, dq_weight, cos, sin, group, row, eps, TOKENS, HEADS, HALF, FULL)
    else:
        row = ct.bid(0) * k_groups + group - q_groups
        backward(dk_out, k, dk, k_weight, dk_weight, cos, sin, group - q_groups, row, eps, TOKENS, HEADS, HALF, FULL)


@ct.kernel
def column_sum_pair(first, second, first_out, second_out, ROWS: Const, COLS: Const):
    """The second step of both weights' gradients, in one launch, which costs more than the sums. first, second: [rows, columns] fp32, each
    with its own number of rows; first_out, second_out: [columns] of any dtype. Grid (blocks of COLS columns, 2)."""
    if ct.bid(1) == 0:
        sum_columns(first, first_out, ROWS, COLS)
    else:
        sum_columns(second, second_out, ROWS, COLS)


HALF, FULL = 64, 1  # Qwen3's heads, cos and sin as wide
TOKENS = 4


# Of q and k, and of weights and angles: wider in an fp32 model under autocast.
DTYPES = (*((dtype, dtype) for dtype in FLOATS), ("bfloat16", "float32"))


def variants():
    for dtype, weight_dtype in DTYPES:
        weight, angle = Array(weight_dtype, (2 * HALF,)), Array(weight_dtype, (None, 2 * HALF))
        partial = Array("float32", (None, 2 * HALF))
        shared = {"q_weight": weight, "k_weight": weight, "cos": angle, "sin": angle}
        shape = {"HALF": HALF, "FULL": FULL}
        for group in GROUPS[3:] if dtype == "float32" else GROUPS:
            q, k = grouped(dtype, group, 2 * HALF)
            params = {"q": q, "k": k, "q_out": q, "k_out": k, **shared, "eps": FLOAT, **group, **shape}
            yield Variant(qk_norm_rotary_forward, params)
            if dtype == weight_dtype == "bfloat16" and group["Q_HEADS"] == 32:
                # Half the registers a thread for 5120 and more elements a block. The last bit may differ.
                yield Variant(qk_norm_rotary_forward, params, hints={"num_worker_warps": 8}, targets=UNMEASURED)
        # [8192, 32 and 8 heads] on an H200, whichever of heads and tokens comes first in the gradients: 65 us, 93 % of copy, with 4 tokens
        # of 8 heads, two blocks an SM and three steps under way. 72 at best without tile copies of the heads (1 token, eight blocks); 68
        # with tile copies of the angles, and 123 where their loads check bounds.
        for count in (8, 4):
            x = heads(dtype, count, 2 * HALF)
            yield Variant(
                qk_norm_rotary_backward,
                {"dq_out": x, "dk_out": x, "q": x, "k": x, "dq": x, "dk": x, **shared, "dq_weight": partial,
                 "dk_weight": partial, "eps": FLOAT, "TOKENS": 2 if dtype == "float32" else TOKENS, "HEADS": count, **shape},
            )
        if dtype != weight_dtype:
            continue
        out = Array(dtype, (2 * HALF,))
        yield Variant(column_sum_pair, {"first": partial, "second": partial, "first_out": out, "second_out": out, **TILE})
