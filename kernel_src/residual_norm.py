"""What stands between the branches of a decoder layer where it is more than residual + RMSNorm: for rows that fit into the registers.

    total = residual + RMSNorm(branch; inner)                                       OLMo 2 and 3
    total = residual + RMSNorm(branch; inner),   y = RMSNorm(total; weight)         Gemma 2 and 3, GLM-4
    total = residual + multiplier * branch,      y = RMSNorm(total; weight)         Granite
    y = RMSNorm(x; weight) again, from the rstd that a forward pass saved

The norms have an offset and either order of rounding, as in kernel_src/general_rms_norm.py, whose backward kernels serve these too: the
gradient of total comes from the one with the residual, and that of branch from the one without.

[rows, 4096] in bf16 moves 4 arrays in place of 5 (norm and addition, then the norm: 3 + 2) or 6 (norm, then addition and norm: 2 + 4).
"""

from typing import Any

import cuda.tile as ct

from kernel_src.elements import read_once, write
from kernel_src.general_rms_norm import OPTIONS, WHOLE, scaled
from kernel_src.prebuild import FLOAT, Params, PerArchitecture, Variant
from kernel_src.segments import PER_ROW, SAME, SEGMENT, columns, place, rows, sum_of

Const = ct.Constant[int]


@ct.function
def inverse_rms(xf, valid, count, eps, SEGMENT: Const, PIECE: Const):
    """xf: [PIECE, SEGMENT] in float32, whose segments past the row's end count as zero."""
    squares = sum_of(ct.where(valid[:, None], xf * xf, 0.0), PIECE, SEGMENT)
    return ct.rsqrt(squares / ct.astype(count * SEGMENT, ct.float32) + eps)


@ct.function
def add_normed(branch, residual, inner, inner_rstd, row, index, valid, count, eps, offset, rounded, SEGMENT: Const, PIECE: Const):
    """round(residual + round(RMSNorm(branch))), as the model's residual stream holds it."""
    b = read_once(branch, index)
    r = inverse_rms(b, valid, count, eps, SEGMENT, PIECE)
    ct.scatter(inner_rstd, row, r, check_bounds=False)
    normed = ct.astype(scaled(b * r, read_once(inner, index[1:]), offset, rounded, branch.dtype), branch.dtype)
    return ct.astype(ct.astype(normed, ct.float32) + read_once(residual, index), residual.dtype)


@ct.function
def norm_of(total, weight, y, rstd, row, index, valid, count, eps, offset, rounded, SEGMENT: Const, PIECE: Const):
    """Writes y and rstd of a total in the residual stream's dtype."""
    xf = ct.astype(total, ct.float32)
    r = inverse_rms(xf, valid, count, eps, SEGMENT, PIECE)
    write(y, index, scaled(xf * r, read_once(weight, index[1:]), offset, rounded, total.dtype))
    ct.scatter(rstd, row, r, check_bounds=False)


@ct.kernel
def norm_add_forward(
    branch, residual, inner, total, inner_rstd, eps: float, offset: float, rounded: int, SEGMENT: Const, PIECE: Const
):  # fmt: skip
    """branch, residual, total: [rows, segments, SEGMENT], at most PIECE segments; inner: [segments, SEGMENT]; inner_rstd: [rows] fp32."""
    row, count = ct.bid(0), total.shape[1]
    segment, valid = place(0, count, PIECE)
    index = (row, segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :])
    s = add_normed(branch, residual, inner, inner_rstd, row, index, valid, count, eps, offset, rounded, SEGMENT, PIECE)
    ct.scatter(total, index, s, check_bounds=False)


@ct.kernel
def norm_add_norm_forward(
    branch, residual, inner, weight, total, y, inner_rstd, rstd, eps: float, offset: float, rounded: int, SEGMENT: Const, PIECE: Const
):  # fmt: skip
    """Computes what `norm_add_forward` does, and y, the norm of total, with its rstd."""
    row, count = ct.bid(0), total.shape[1]
    segment, valid = place(0, count, PIECE)
    index = (row, segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :])
    s = add_normed(branch, residual, inner, inner_rstd, row, index, valid, count, eps, offset, rounded, SEGMENT, PIECE)
    ct.scatter(total, index, s, check_bounds=False)
    norm_of(s, weight, y, rstd, row, index, valid, count, eps, offset, rounded, SEGMENT, PIECE)


@ct.kernel
def scaled_add_norm_forward(
    branch, residual, weight, total, y, rstd, multiplier: float, eps: float, offset: float, rounded: int, SEGMENT: Const, PIECE: Const
):  # fmt: skip
    """Computes what `norm_add_norm_forward` does, with multiplier * branch instead of its norm. The sum is rounded once."""
    row, count = ct.bid(0), total.shape[1]
    segment, valid = place(0, count, PIECE)
    index = (row, segment[:, None], ct.arange(SEGMENT, dtype=ct.int32)[None, :])
    s = ct.astype(read_once(branch, index) * multiplier + read_once(residual, index), residual.dtype)
    ct.scatter(total, index, s, check_bounds=False)
    norm_of(s, weight, y, rstd, row, index, valid, count, eps, offset, rounded, SEGMENT, PIECE)


@ct.kernel
def general_rms_norm_apply(x, weight, y, rstd, offset: float, rounded: int, SEGMENT: Const, PIECE: Const):
    """y again from x and rstd, for a backward pass that did not keep y. Rows of any number of segments."""
    row, count = ct.bid(0), x.shape[1]
    column = ct.arange(SEGMENT, dtype=ct.int32)[None, :]
    r = ct.gather(rstd, row, check_bounds=False)
    for i in range(ct.cdiv(count, PIECE)):
        segment, _ = place(i, count, PIECE)
        index = (row, segment[:, None], column)
        write(y, index, scaled(read_once(x, index) * r, read_once(weight, index[1:]), offset, rounded, x.dtype))


def variants():
    for dtype, weight_dtype in SAME:
        for piece in WHOLE[dtype]:
            a, w, constants = rows(dtype, SEGMENT, piece), columns(weight_dtype, SEGMENT), {"SEGMENT": SEGMENT, "PIECE": piece}
            wide = piece > 64 or dtype == "float32"
            hints: dict[str, Any] = {"occupancy": 4, "num_worker_warps": 8} if wide else {"occupancy": 8}
            options: Params = {**OPTIONS, **constants}
            both: Params = {"branch": a, "residual": a}
            results: Params = {"weight": w, "total": a, "y": a}
            yield Variant(norm_add_forward, {**both, "inner": w, "total": a, "inner_rstd": PER_ROW, **options}, hints=hints)
            sums: Params = {**both, "inner": w, **results, "inner_rstd": PER_ROW, "rstd": PER_ROW, **options}
            # With 8 blocks an SM, half precision of PIECE 64 spills on sm_86 and sm_89.
            both_norms = hints if wide else {"occupancy": PerArchitecture(6, "sm_90", 8)}
            yield Variant(norm_add_norm_forward, sums, hints=both_norms)
            yield Variant(scaled_add_norm_forward, {**both, **results, "rstd": PER_ROW, "multiplier": FLOAT, **options}, hints=hints)
        a, w = rows(dtype, SEGMENT), columns(weight_dtype, SEGMENT)
        again: Params = {"x": a, "weight": w, "y": a, "rstd": PER_ROW, "offset": FLOAT, "rounded": OPTIONS["rounded"]}
        yield Variant(general_rms_norm_apply, {**again, "SEGMENT": SEGMENT, "PIECE": 32}, hints={"occupancy": 8})
