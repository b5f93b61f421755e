"""RMSNorm of every query and key head, with an offset and either order of rounding, and rotary embedding of all of the head or its first
part: what kernel_src/qk_norm_rotary.py does for Qwen3's heads, for those of other families.

    u = round((weight + offset) * n),  n = x * rstd over the head, rounded to x's dtype first where `rounded`
    y1 = u1 * c1 - u2 * s1,  y2 = u2 * c2 + u1 * s2  for the two halves of the rotary part;  y = u for the rest

Gemma 3: heads of 128 and 256, offset 1, rounded last. Qwen3-Next and Qwen3.5: the same with 64 of 256 columns rotated, and q a half of
every head of its projection. Backward: rotate dy back, then RMSNorm's backward (kernel_src/general_rms_norm.py) with rstd computed again.

Heads of all tokens are rows, ROWS of them a block, first those of q and then those of k; the last block of each repeats the last row.
Rows of cos and sin: as in kernel_src/rotary.py.
"""

import cuda.tile as ct

from kernel_src.elements import read_once, write
from kernel_src.general_rms_norm import scaled
from kernel_src.prebuild import FLOAT, INT, Array, Params, Variant
from kernel_src.rotary import rotate, rotate_back

Const = ct.Constant[int]


@ct.function
def heads_of(i, x, table, ROWS: Const):
    """(token, head, row of the table, whether there is one) of ROWS heads, [ROWS, 1] each."""
    count = x.shape[0] * x.shape[1]
    wanted = i * ROWS + ct.arange(ROWS, dtype=ct.int32)
    row = ct.minimum(wanted, count - 1)
    token = row // x.shape[1]
    return token[:, None], (row - token * x.shape[1])[:, None], (token % table.shape[0])[:, None], (wanted < count)[:, None]


@ct.function
def columns_from(start, WIDTH: Const):
    return (start + ct.arange(WIDTH, dtype=ct.int32))[None, :]


@ct.function
def read_part(x, token, head, start, WIDTH: Const):
    return read_once(x, (token, head, columns_from(start, WIDTH)))


@ct.function
def read_weight(weight, start, WIDTH: Const):
    return read_once(weight, start + ct.arange(WIDTH, dtype=ct.int32))[None, :]


@ct.function
def read_angles(table, row, HALF: Const):
    """The angles of both halves of the rotary part."""
    return read_once(table, (row, columns_from(0, HALF))), read_once(table, (row, columns_from(HALF, HALF)))


@ct.function
def squares(part):
    return ct.sum(part * part, axis=1, keepdims=True)


@ct.function
def normed(n, weight, start, offset, rounded, dtype, WIDTH: Const):
    """The norm's result for WIDTH columns, rounded to the model's dtype, in float32."""
    return ct.astype(ct.astype(scaled(n, read_weight(weight, start, WIDTH), offset, rounded, dtype), dtype), ct.float32)


@ct.function
def forward(x, y, weight, cos, sin, i, eps, offset, rounded, ROWS: Const, HALF: Const, REST1: Const, REST2: Const):
    token, head, angle, _ = heads_of(i, x, cos, ROWS)
    x1, x2 = read_part(x, token, head, 0, HALF), read_part(x, token, head, HALF, HALF)
    total = squares(x1) + squares(x2)
    if REST1 > 0:
        x3 = read_part(x, token, head, 2 * HALF, REST1)
        total = total + squares(x3)
    if REST2 > 0:
        x4 = read_part(x, token, head, 2 * HALF + REST1, REST2)
        total = total + squares(x4)
    r = ct.rsqrt(total * (1.0 / (2 * HALF + REST1 + REST2)) + eps)
    c1, c2 = read_angles(cos, angle, HALF)
    s1, s2 = read_angles(sin, angle, HALF)
    u1 = normed(x1 * r, weight, 0, offset, rounded, x.dtype, HALF)
    u2 = normed(x2 * r, weight, HALF, offset, rounded, x.dtype, HALF)
    y1, y2 = rotate(u1, u2, c1, s1, c2, s2)
    write(y, (token, head, columns_from(0, HALF)), y1)
    write(y, (token, head, columns_from(HALF, HALF)), y2)
    if REST1 > 0:
        u3 = normed(x3 * r, weight, 2 * HALF, offset, rounded, x.dtype, REST1)
        write(y, (token, head, columns_from(2 * HALF, REST1)), u3)
    if REST2 > 0:
        u4 = normed(x4 * r, weight, 2 * HALF + REST1, offset, rounded, x.dtype, REST2)
        write(y, (token, head, columns_from(2 * HALF + REST1, REST2)), u4)


@ct.kernel
def head_norm_rotary_forward(
    q, k, q_out, k_out, q_weight, k_weight, cos, sin, eps: float, offset: float, rounded: int,
    ROWS: Const, HALF: Const, REST1: Const, REST2: Const
):  # fmt: skip
    """q, q_out: [tokens, heads, 2 * HALF + REST1 + REST2], any strides; k, k_out: the same with their own heads; weights: of a head;
    cos, sin: [rows, 2 * HALF]."""
    ct.grid_dependency_control_wait()
    block, of_q = ct.bid(0), ct.cdiv(q.shape[0] * q.shape[1], ROWS)
    if block < of_q:
        forward(q, q_out, q_weight, cos, sin, block, eps, offset, rounded, ROWS, HALF, REST1, REST2)
    else:
        forward(k, k_out, k_weight, cos, sin, block - of_q, eps, offset, rounded, ROWS, HALF, REST1, REST2)


@ct.function
def gradient_of(x, r, d, acc, valid, weight, start, offset, WIDTH: Const):
    """(n, d * (weight + offset), acc + d * n) of WIDTH columns; d: dy rotated back."""
    n = x * r
    return n, d * (read_weight(weight, start, WIDTH) + offset), acc + ct.where(valid, d * n, 0.0)


@ct.function
def write_sums(partial, block, acc, start, WIDTH: Const):
    ct.scatter(partial, (block, start + ct.arange(WIDTH, dtype=ct.int32)), ct.sum(acc, axis=0), check_bounds=False)


@ct.function
def backward(
    dy, x, dx, weight, cos, sin, partial, block, blocks, eps, offset, ROWS: Const, HALF: Const, REST1: Const, REST2: Const
):  # fmt: skip
    """Every blocks-th piece of ROWS heads, the last ones first: those the L2 holds."""
    acc1, acc2 = ct.zeros((ROWS, HALF), dtype=ct.float32), ct.zeros((ROWS, HALF), dtype=ct.float32)
    if REST1 > 0:
        acc3 = ct.zeros((ROWS, REST1), dtype=ct.float32)
    if REST2 > 0:
        acc4 = ct.zeros((ROWS, REST2), dtype=ct.float32)
    pieces = ct.cdiv(x.shape[0] * x.shape[1], ROWS)
    one = 1.0 / (2 * HALF + REST1 + REST2)
    for i in range(block, pieces, blocks):
        token, head, angle, valid = heads_of(pieces - 1 - i, x, cos, ROWS)
        x1, x2 = read_part(x, token, head, 0, HALF), read_part(x, token, head, HALF, HALF)
        total = squares(x1) + squares(x2)
        if REST1 > 0:
            x3 = read_part(x, token, head, 2 * HALF, REST1)
            total = total + squares(x3)
        if REST2 > 0:
            x4 = read_part(x, token, head, 2 * HALF + REST1, REST2)
            total = total + squares(x4)
        r = ct.rsqrt(total * one + eps)
        c1, c2 = read_angles(cos, angle, HALF)
        s1, s2 = read_angles(sin, angle, HALF)
        d1, d2 = rotate_back(read_part(dy, token, head, 0, HALF), read_part(dy, token, head, HALF, HALF), c1, s1, c2, s2)
        n1, g1, acc1 = gradient_of(x1, r, d1, acc1, valid, weight, 0, offset, HALF)
        n2, g2, acc2 = gradient_of(x2, r, d2, acc2, valid, weight, HALF, offset, HALF)
        dot = ct.sum(g1 * n1 + g2 * n2, axis=1, keepdims=True)
        if REST1 > 0:
            d3 = read_part(dy, token, head, 2 * HALF, REST1)
            n3, g3, acc3 = gradient_of(x3, r, d3, acc3, valid, weight, 2 * HALF, offset, REST1)
            dot = dot + ct.sum(g3 * n3, axis=1, keepdims=True)
        if REST2 > 0:
            d4 = read_part(dy, token, head, 2 * HALF + REST1, REST2)
            n4, g4, acc4 = gradient_of(x4, r, d4, acc4, valid, weight, 2 * HALF + REST1, offset, REST2)
            dot = dot + ct.sum(g4 * n4, axis=1, keepdims=True)
        mean = dot * one
        write(dx, (token, head, columns_from(0, HALF)), (g1 - n1 * mean) * r)
        write(dx, (token, head, columns_from(HALF, HALF)), (g2 - n2 * mean) * r)
        if REST1 > 0:
            write(dx, (token, head, columns_from(2 * HALF, REST1)), (g3 - n3 * mean) * r)
        if REST2 > 0:
            write(dx, (token, head, columns_from(2 * HALF + REST1, REST2)), (g4 - n4 * mean) * r)
    write_sums(partial, block, acc1, 0, HALF)
    write_sums(partial, block, acc2, HALF, HALF)
    if REST1 > 0:
        write_sums(partial, block, acc3, 2 * HALF, REST1)
    if REST2 > 0:
        write_sums(partial, block, acc4, 2 * HALF + REST1, REST2)


@ct.kernel
def head_norm_rotary_backward(
    dq_out, dk_out, q, k, dq, dk, q_weight, k_weight, cos, sin, dq_weight, dk_weight, eps: float, offset: float,
    ROWS: Const, HALF: Const, REST1: Const, REST2: Const
):  # fmt: skip
    """dq_out, dk_out: the gradients of the results, and q, k, dq, dk: as in the forward. dq_weight, dk_weight: [blocks, head] fp32, partial
    sums; the first blocks walk over q's heads, the others over k's."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    block, of_q, of_k = ct.bid(0), dq_weight.shape[0], dk_weight.shape[0]
    if block < of_q:
        backward(dq_out, q, dq, q_weight, cos, sin, dq_weight, block, of_q, eps, offset, ROWS, HALF, REST1, REST2)
    else:
        backward(dk_out, k, dk, k_weight, cos, sin, dk_weight, block - of_q, of_k, eps, offset, ROWS, HALF, REST1, REST2)


# ROWS, HALF, REST1, REST2: Gemma's heads of 256 and of 128, and Qwen3.5's, of which a quarter is rotated.
SHAPES = ((4, 128, 0, 0), (8, 64, 0, 0), (4, 32, 64, 128))
# q and k, and weights and angles: wider in an fp32 model under autocast.
DTYPES = (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("bfloat16", "float32"))


def variants():
    for dtype, weight_dtype in DTYPES:
        for count, half, *rest in SHAPES:
            head = 2 * half + sum(rest)
            x, weight, angle = Array(dtype, (None, None, head)), Array(weight_dtype, (head,)), Array(weight_dtype, (None, 2 * half))
            shape: Params = {"ROWS": count, "HALF": half, "REST1": rest[0], "REST2": rest[1]}
            shared: Params = {"q_weight": weight, "k_weight": weight, "cos": angle, "sin": angle}
            inputs: Params = {"q": x, "k": x, "q_out": x, "k_out": x, **shared, "eps": FLOAT, "offset": FLOAT, "rounded": INT}
            yield Variant(head_norm_rotary_forward, {**inputs, **shape})
            partial = Array("float32", (None, head))
            grads: Params = {"dq_out": x, "dk_out": x, "q": x, "k": x, "dq": x, "dk": x, **shared}
            grads = {**grads, "dq_weight": partial, "dk_weight": partial, "eps": FLOAT, "offset": FLOAT, **shape}
            yield Variant(head_norm_rotary_backward, grads, hints={"occupancy": 4})
