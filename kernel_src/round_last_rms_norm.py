"""RMSNorm that rounds last, as GPT-OSS does: the weight multiplies in fp32, and the result is rounded once.

    rstd = 1 / sqrt(mean(x^2) + eps)          y = round(weight * x * rstd)

Backward as in kernel_src/rms_norm.py, which rounds before it multiplies. The weight may be wider than x: transformers keeps
GPT-OSS's norms in fp32 when it loads the model in fp16.

One block a row, which lies in one tile whatever its length is (2880 for both models, no power of two): what lies past its end
reads as zero and is not written.
"""

import cuda.tile as ct

from kernel_src.elements import read_padded, read_padded_once, write_within
from kernel_src.prebuild import FLOAT, FLOATS, Array, Params, Variant
from kernel_src.rms_norm import RSTD

Const = ct.Constant[int]


@ct.function
def normalise(v, weight, y, rstd, row, cols, eps: float):
    r = ct.rsqrt(ct.sum(v * v, axis=0, keepdims=False) / ct.astype(y.shape[1], ct.float32) + eps)
    write_within(y, (row, cols), v * r * read_padded(weight, cols))
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def round_last_rms_norm_forward(x, weight, y, rstd, eps: float, TILE: Const):
    """x, y: [rows, length], length at most TILE; weight: [length]; rstd: [rows] fp32."""
    row, cols = ct.bid(0), ct.arange(TILE, dtype=ct.int32)
    normalise(read_padded(x, (row, cols)), weight, y, rstd, row, cols, eps)


@ct.kernel
def round_last_add_rms_norm_forward(x, residual, weight, total, y, rstd, eps: float, TILE: Const):
    """total = x + residual, rounded as the model's residual stream holds it; y: its RMSNorm. Shapes as above."""
    row, cols = ct.bid(0), ct.arange(TILE, dtype=ct.int32)
    s = ct.astype(read_padded(x, (row, cols)) + read_padded(residual, (row, cols)), total.dtype)
    ct.scatter(total, (row, cols), s, check_bounds=True)
    normalise(ct.astype(s, ct.float32), weight, y, rstd, row, cols, eps)


@ct.function
def backward_rows(dx, dy, dtotal, x, weight, rstd, dweight, TILE: Const, PAST: Const):
    """The rows that a block walks over. PAST: whether dtotal is added to dx; else it is not read."""
    block, cols = ct.bid(0), ct.arange(TILE, dtype=ct.int32)
    w = read_padded(weight, cols)
    acc = ct.zeros((TILE,), dtype=ct.float32)
    for row in range(block, x.shape[0], ct.num_blocks(0)):
        r = ct.gather(rstd, row, check_bounds=False)
        n, d = read_padded_once(x, (row, cols)) * r, read_padded_once(dy, (row, cols))
        g = d * w
        mean = ct.sum(g * n, axis=0, keepdims=False) / ct.astype(x.shape[1], ct.float32)
        gradient = (g - n * mean) * r
        write_within(dx, (row, cols), gradient + read_padded_once(dtotal, (row, cols)) if PAST else gradient)
        acc = acc + d * n
    write_within(dweight, (block, cols), acc)


@ct.kernel
def round_last_rms_norm_backward(dx, dy, x, weight, rstd, dweight, TILE: Const):
    """dx, dy, x: [rows, length]; dweight: [blocks, length] fp32, one partial sum a block, which walks over rows."""
    backward_rows(dx, dy, dy, x, weight, rstd, dweight, TILE, False)


@ct.kernel
def round_last_add_rms_norm_backward(dx, dy, dtotal, x, weight, rstd, dweight, TILE: Const):
    """Computes what `round_last_rms_norm_backward` does, and adds dtotal, the gradient that reaches x past the norm, to dx. x: what was
    normalised."""
    backward_rows(dx, dy, dtotal, x, weight, rstd, dweight, TILE, True)


TILE = 4096  # the longest row; ops/rms_norm_kernels.py chooses these kernels up to it
LENGTHS = (2880, None)  # of a row: GPT-OSS's hidden size, and any


def variants():
    for x_dtype, w_dtype in (*((d, d) for d in FLOATS), ("bfloat16", "float32"), ("float16", "float32")):
        for length in LENGTHS:
            aligned = length is not None
            x, w = Array(x_dtype, (None, length), aligned=aligned), Array(w_dtype, (length,), aligned=aligned)
            dweight = Array("float32", (None, length), aligned=aligned)
            yield Variant(round_last_rms_norm_forward, {"x": x, "weight": w, "y": x, "rstd": RSTD, "eps": FLOAT, "TILE": TILE})
            sums: Params = {"x": x, "residual": x, "weight": w, "total": x, "y": x, "rstd": RSTD, "eps": FLOAT, "TILE": TILE}
            yield Variant(round_last_add_rms_norm_forward, sums)
            hints = {"num_worker_warps": 8}
            inputs: Params = {"x": x, "weight": w, "rstd": RSTD, "dweight": dweight, "TILE": TILE}
            yield Variant(round_last_rms_norm_backward, {"dx": x, "dy": x, **inputs}, hints=hints)
            yield Variant(round_last_add_rms_norm_backward, {"dx": x, "dy": x, "dtotal": x, **inputs}, hints=hints)
