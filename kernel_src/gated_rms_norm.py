"""RMSNorm times a gate, as the gated delta nets of Qwen3-Next and Qwen3.5 have it for every value head (Mamba-2's norm, arXiv 2405.21060).

    n = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps)        u = round(weight * round(n))        y = u * silu(gate)

Backward, with s = sigmoid(gate) and d = dy * silu(gate):

    dx = (g - n * mean(g * n)) * rstd,  g = d * weight        dweight = sum over rows of d * n
    dgate = dy * weight * n * s * (1 + gate * (1 - s))

rstd is computed again in the backward pass, so nothing but the arguments is kept. Rows are heads of 64 to 256, ROWS of them a block; the
last block reads and writes the last row again instead of leaving the arrays. Forward 3 arrays, backward 5: that is all that moves.
"""

import cuda.tile as ct

from kernel_src.elements import read_once, write
from kernel_src.prebuild import FLOAT, Array, Params, Variant
from kernel_src.segments import MIXED, SAME, place
from kernel_src.swiglu import sigmoid

Const = ct.Constant[int]


@ct.function
def normalised(x, index, eps, TILE: Const):
    """(n, rstd) of ROWS rows."""
    xf = read_once(x, index)
    r = ct.rsqrt(ct.sum(xf * xf, axis=1, keepdims=True) * (1.0 / TILE) + eps)
    return xf * r, r


@ct.kernel
def gated_rms_norm_forward(x, gate, weight, y, eps: float, ROWS: Const, TILE: Const):
    """x, gate, y: [rows, TILE], any row strides; weight: [TILE], of x's dtype or wider."""
    ct.grid_dependency_control_wait()
    row, _ = place(ct.bid(0), x.shape[0], ROWS)
    column = ct.arange(TILE, dtype=ct.int32)
    index = (row[:, None], column[None, :])
    n, _ = normalised(x, index, eps, TILE)
    # The model rounds after the normalisation and after the weight: the product is taken in its dtype.
    u = ct.astype(n, x.dtype) * ct.gather(weight, column, check_bounds=False)[None, :]
    g = read_once(gate, index)
    write(y, index, ct.astype(u, ct.float32) * (g * sigmoid(g)))


@ct.kernel
def gated_rms_norm_backward(dy, x, gate, weight, dx, dgate, partial, eps: float, ROWS: Const, TILE: Const):
    """dy, x, gate, dx, dgate: [rows, TILE]; partial: [blocks, TILE] fp32, a block's sums for dweight. A block walks over the rows, ROWS at
    a time, the last ones first: those the L2 holds."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    block = ct.bid(0)
    column = ct.arange(TILE, dtype=ct.int32)
    w = read_once(weight, column)[None, :]
    acc = ct.zeros((ROWS, TILE), dtype=ct.float32)
    pieces = ct.cdiv(x.shape[0], ROWS)
    for i in range(block, pieces, ct.num_blocks(0)):
        row, valid = place(pieces - 1 - i, x.shape[0], ROWS)
        index = (row[:, None], column[None, :])
        n, r = normalised(x, index, eps, TILE)
        z, d = read_once(gate, index), read_once(dy, index)
        s = sigmoid(z)
        silu = z * s
        write(dgate, index, d * w * n * (s + silu * (1.0 - s)))
        d = d * silu
        g = d * w
        write(dx, index, (g - n * (ct.sum(g * n, axis=1, keepdims=True) * (1.0 / TILE))) * r)
        acc = acc + ct.where(valid[:, None], d * n, 0.0)
    ct.scatter(partial, (block, column), ct.sum(acc, axis=0), check_bounds=False)


# Rows a block and their length: Qwen3.5's heads are 128.
SHAPES = ((16, 64), (8, 128), (4, 256))


def variants():
    for dtype, weight_dtype in SAME + MIXED:
        for count, tile in SHAPES if dtype == weight_dtype == "bfloat16" else SHAPES[1:2]:
            a, w = Array(dtype, (None, tile)), Array(weight_dtype, (tile,))
            constants: Params = {"eps": FLOAT, "ROWS": count, "TILE": tile}
            inputs: Params = {"x": a, "gate": a, "weight": w}
            yield Variant(gated_rms_norm_forward, {**inputs, "y": a, **constants})
            results: Params = {"dx": a, "dgate": a, "partial": Array("float32", (None, tile))}
            yield Variant(gated_rms_norm_backward, {"dy": a, **inputs, **results, **constants}, hints={"occupancy": 6})
