"""RMSNorm over all heads of q, and over all of k, and rotary embedding, in one pass from the projections' output to attention's input: what
kernel_src/head_norm_rotary.py does where every head has a norm of its own. OLMo 2 and 3.

    u = round((weight + offset) * n),  n = x * rstd over the row, rounded to x's dtype first where `rounded`
    y1 = u1 * c1 - u2 * s1,  y2 = u2 * c2 + u1 * s2  for the two halves of each head

Backward: rotate dy back, then RMSNorm's backward (kernel_src/rms_norm.py) with the rstd that the forward pass saved.

A block has a token's heads, those of q or those of k, as two tiles for each half: HEADS and TAIL of them, so that the 40 heads of 13B and
32B leave no lane idle. Rows of cos and sin: as in kernel_src/rotary.py; OLMo's are fp32 whatever the model is.
"""

from typing import Any

import cuda.tile as ct

from kernel_src.elements import read_once, write
from kernel_src.general_rms_norm import scaled
from kernel_src.prebuild import FLOAT, INT, Array, Params, Variant
from kernel_src.rotary import rotate, rotate_back

Const = ct.Constant[int]


@ct.function
def heads_from(start, COUNT: Const):
    return (start + ct.arange(COUNT, dtype=ct.int32))[:, None]


@ct.function
def half_of(part, HALF: Const):
    return (part * HALF + ct.arange(HALF, dtype=ct.int32))[None, :]


@ct.function
def read_halves(x, token, start, COUNT: Const, HALF: Const):
    """Both halves of COUNT heads of a token, [COUNT, HALF] each."""
    heads = heads_from(start, COUNT)
    return read_once(x, (token, heads, half_of(0, HALF))), read_once(x, (token, heads, half_of(1, HALF)))


@ct.function
def write_halves(y, token, start, y1, y2, COUNT: Const, HALF: Const):
    heads = heads_from(start, COUNT)
    write(y, (token, heads, half_of(0, HALF)), y1)
    write(y, (token, heads, half_of(1, HALF)), y2)


@ct.function
def weight_halves(weight, start, offset, COUNT: Const, HALF: Const):
    heads = heads_from(start, COUNT)
    return read_once(weight, (heads, half_of(0, HALF))) + offset, read_once(weight, (heads, half_of(1, HALF))) + offset


@ct.function
def angles_of(table, token, HALF: Const):
    row = token % table.shape[0]
    return read_once(table, (row, half_of(0, HALF))), read_once(table, (row, half_of(1, HALF)))


@ct.function
def dots(a1, b1, a2, b2, COUNT: Const, HALF: Const):
    """The sum of a * b over both halves, a scalar: of one axis, for two are added up one after the other, through shared memory."""
    return ct.sum(ct.reshape(a1 * b1 + a2 * b2, (COUNT * HALF,)), axis=0, keepdims=False)


@ct.function
def turned(x1, x2, r, weight, start, c1, s1, c2, s2, offset, rounded, dtype, COUNT: Const, HALF: Const):
    """The results of COUNT heads: the norm's in the model's dtype, then turned."""
    heads = heads_from(start, COUNT)
    w1, w2 = read_once(weight, (heads, half_of(0, HALF))), read_once(weight, (heads, half_of(1, HALF)))
    u1, u2 = scaled(x1 * r, w1, offset, rounded, dtype), scaled(x2 * r, w2, offset, rounded, dtype)
    return rotate(ct.astype(ct.astype(u1, dtype), ct.float32), ct.astype(ct.astype(u2, dtype), ct.float32), c1, s1, c2, s2)


@ct.function
def forward(x, y, weight, rstd, cos, sin, token, eps, offset, rounded, HEADS: Const, TAIL: Const, HALF: Const):
    x1, x2 = read_halves(x, token, 0, HEADS, HALF)
    total = dots(x1, x1, x2, x2, HEADS, HALF)
    if TAIL > 0:
        t1, t2 = read_halves(x, token, HEADS, TAIL, HALF)
        total = total + dots(t1, t1, t2, t2, TAIL, HALF)
    r = ct.rsqrt(total * (0.5 / ((HEADS + TAIL) * HALF)) + eps)
    ct.scatter(rstd, token, r, check_bounds=False)
    c1, c2 = angles_of(cos, token, HALF)
    s1, s2 = angles_of(sin, token, HALF)
    y1, y2 = turned(x1, x2, r, weight, 0, c1, s1, c2, s2, offset, rounded, x.dtype, HEADS, HALF)
    write_halves(y, token, 0, y1, y2, HEADS, HALF)
    if TAIL > 0:
        z1, z2 = turned(t1, t2, r, weight, HEADS, c1, s1, c2, s2, offset, rounded, x.dtype, TAIL, HALF)
        write_halves(y, token, HEADS, z1, z2, TAIL, HALF)


@ct.kernel
def row_norm_rotary_forward(
    q, k, q_out, k_out, q_weight, k_weight, q_rstd, k_rstd, cos, sin, eps: float, offset: float, rounded: int,
    Q_HEADS: Const, Q_TAIL: Const, K_HEADS: Const, K_TAIL: Const, HALF: Const,
):  # fmt: skip
    """q, q_out: [tokens, Q_HEADS + Q_TAIL, 2 * HALF], any strides of the first two; k, k_out: the same with their own heads; weights:
    [heads, 2 * HALF]; q_rstd, k_rstd: [tokens] fp32; cos, sin: [rows, 2 * HALF]. Grid: 2 * tokens, those of q first."""
    ct.grid_dependency_control_wait()
    block, tokens = ct.bid(0), q.shape[0]
    if block < tokens:
        forward(q, q_out, q_weight, q_rstd, cos, sin, block, eps, offset, rounded, Q_HEADS, Q_TAIL, HALF)
    else:
        forward(k, k_out, k_weight, k_rstd, cos, sin, block - tokens, eps, offset, rounded, K_HEADS, K_TAIL, HALF)


@ct.function
def backward(
    dy, x, dx, weight, rstd, cos, sin, partial, block, blocks, offset, HEADS: Const, TAIL: Const, HALF: Const
):  # fmt: skip
    """Every blocks-th token, the last ones first: those the L2 holds."""
    acc1, acc2 = ct.zeros((HEADS, HALF), dtype=ct.float32), ct.zeros((HEADS, HALF), dtype=ct.float32)
    if TAIL > 0:
        tail1, tail2 = ct.zeros((TAIL, HALF), dtype=ct.float32), ct.zeros((TAIL, HALF), dtype=ct.float32)
    for i in range(block, x.shape[0], blocks):
        token = x.shape[0] - 1 - i
        r = ct.gather(rstd, token, check_bounds=False)
        c1, c2 = angles_of(cos, token, HALF)
        s1, s2 = angles_of(sin, token, HALF)
        x1, x2 = read_halves(x, token, 0, HEADS, HALF)
        y1, y2 = read_halves(dy, token, 0, HEADS, HALF)
        d1, d2 = rotate_back(y1, y2, c1, s1, c2, s2)
        n1, n2 = x1 * r, x2 * r
        w1, w2 = weight_halves(weight, 0, offset, HEADS, HALF)
        g1, g2 = d1 * w1, d2 * w2
        acc1, acc2 = acc1 + d1 * n1, acc2 + d2 * n2
        total = dots(g1, n1, g2, n2, HEADS, HALF)
        if TAIL > 0:
            x3, x4 = read_halves(x, token, HEADS, TAIL, HALF)
            y3, y4 = read_halves(dy, token, HEADS, TAIL, HALF)
            d3, d4 = rotate_back(y3, y4, c1, s1, c2, s2)
            n3, n4 = x3 * r, x4 * r
            v1, v2 = weight_halves(weight, HEADS, offset, TAIL, HALF)
            g3, g4 = d3 * v1, d4 * v2
            tail1, tail2 = tail1 + d3 * n3, tail2 + d4 * n4
            total = total + dots(g3, n3, g4, n4, TAIL, HALF)
        mean = total * (0.5 / ((HEADS + TAIL) * HALF))
        write_halves(dx, token, 0, (g1 - n1 * mean) * r, (g2 - n2 * mean) * r, HEADS, HALF)
        if TAIL > 0:
            write_halves(dx, token, HEADS, (g3 - n3 * mean) * r, (g4 - n4 * mean) * r, TAIL, HALF)
    write_halves(partial, block, 0, acc1, acc2, HEADS, HALF)
    if TAIL > 0:
        write_halves(partial, block, HEADS, tail1, tail2, TAIL, HALF)


@ct.kernel
def row_norm_rotary_backward(
    dq_out, dk_out, q, k, dq, dk, q_weight, k_weight, q_rstd, k_rstd, cos, sin, dq_weight, dk_weight, offset: float,
    Q_HEADS: Const, Q_TAIL: Const, K_HEADS: Const, K_TAIL: Const, HALF: Const,
):  # fmt: skip
    """dq_out, dk_out: the gradients of the results, and q, k, dq, dk: as in the forward. dq_weight, dk_weight: [blocks, heads, 2 * HALF]
    fp32, partial sums; the first blocks walk over q's tokens, the others over k's."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    block, of_q, of_k = ct.bid(0), dq_weight.shape[0], dk_weight.shape[0]
    if block < of_q:
        backward(dq_out, q, dq, q_weight, q_rstd, cos, sin, dq_weight, block, of_q, offset, Q_HEADS, Q_TAIL, HALF)
    else:
        backward(dk_out, k, dk, k_weight, k_rstd, cos, sin, dk_weight, block - of_q, of_k, offset, K_HEADS, K_TAIL, HALF)


# Heads of q and k, each as a power of two and what is left: OLMo 2 1B, OLMo 2 and 3 7B, OLMo 2 13B, OLMo 2 and 3 32B.
SHAPES = ((16, 0, 16, 0), (32, 0, 32, 0), (32, 8, 32, 8), (32, 8, 8, 0))
HALF = 64
# x, weights and which shapes: weights are wider in an fp32 model under autocast, as whose size 1B will do.
DTYPES = (("bfloat16", "bfloat16", SHAPES), ("bfloat16", "float32", SHAPES[:1]))


def variants():
    for dtype, weight_dtype, shapes in DTYPES:
        for q_heads, q_tail, k_heads, k_tail in shapes:
            heads = q_heads + q_tail, k_heads + k_tail
            q, k = (Array(dtype, (None, count, 2 * HALF)) for count in heads)
            w, v = (Array(weight_dtype, (count, 2 * HALF)) for count in heads)
            p, s = (Array("float32", (None, count, 2 * HALF)) for count in heads)
            rstd, angle = Array("float32", (None,), aligned=False), Array("float32", (None, 2 * HALF))
            shape: Params = {"Q_HEADS": q_heads, "Q_TAIL": q_tail, "K_HEADS": k_heads, "K_TAIL": k_tail, "HALF": HALF}
            weights: Params = {"q_weight": w, "k_weight": v, "q_rstd": rstd, "k_rstd": rstd, "cos": angle, "sin": angle}
            numbers: Params = {"eps": FLOAT, "offset": FLOAT, "rounded": INT}
            yield Variant(row_norm_rotary_forward, {"q": q, "k": k, "q_out": q, "k_out": k, **weights, **numbers, **shape})
            grads: Params = {"dq_out": q, "dk_out": k, "q": q, "k": k, "dq": q, "dk": k, **weights, "dq_weight": p, "dk_weight": s}
            hints: dict[str, Any] = {"occupancy": 2, **({"num_worker_warps": 8} if q_heads > 16 else {})}
            spills = "24 to 48 bytes on sm_80 and sm_110; none with one block an SM, which reads too little at a time" if q_tail else ""
            yield Variant(row_norm_rotary_backward, {**grads, "offset": FLOAT, **shape}, hints=hints, spills=spills)
