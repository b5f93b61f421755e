"""RMSNorm, alone and after a residual's addition."""

import torch

from tests.ops.common import BF16, CPU, FP16, FP32, errors_in, exact, launched, leaf, limit, on_cpu, randn
from tests.ops.generated import generated
from tests.ops.signature import Signature
from tests.tolerances import assert_close


def rms_norm_exact(x, weight, eps, offset=0.0):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)


def check_rms_norm(ops, device, dtype, shape, weight_dtype=None, eps=1e-6, view=lambda x: x, **options):
    """view: makes the operation's input out of a contiguous tensor (a transpose, a slice)."""
    weight_dtype = weight_dtype or dtype
    base = leaf(randn(*shape, dtype=dtype, device=device))
    x = view(base)
    weight = leaf(randn(x.shape[-1], dtype=weight_dtype, device=device, seed=1) + 1)
    y = ops.rms_norm(x, weight, eps, **options)
    dy = randn(*y.shape, dtype=y.dtype, device=device, seed=2)
    y.backward(dy)
    base64, weight64 = exact(base), exact(weight)
    y64 = rms_norm_exact(view(base64), weight64, eps, options.get("offset", 0.0))
    y64.backward(dy.double().cpu())
    what = f"RMSNorm {tuple(shape)}"
    assert y.dtype == torch.promote_types(dtype, weight_dtype)
    assert_close(y, y64, dtype, f"{what} y")
    assert_close(base.grad, base64.grad, dtype, f"{what} dx")
    assert_close(weight.grad, weight64.grad, weight_dtype if weight_dtype == dtype else torch.float32, f"{what} dweight", 2)


# Whole rows of Qwen3, short rows, and rows that fit nothing; numbers of rows that fill no tile.
RMS_NORM_SHAPES = (
    (3, 1024),
    (5, 2048),
    (2, 2560),
    (7, 4096),
    (1, 5120),
    (2, 3, 5, 128),
    (33, 64),
    (9, 256),
    (17, 128),
    (4, 1000),
    (3, 77),
    (2, 3),
    (3, 6000),
    (2, 1025),
)


def check_add_rms_norm(ops, device, dtype, shape, weight_dtype=None, eps=1e-6, **options):
    """The sum is rounded to the model's dtype before it is normalised, which is one rounding more."""
    x, residual = (leaf(randn(*shape, dtype=dtype, device=device, seed=i)) for i in range(2))
    weight = leaf(randn(shape[-1], dtype=weight_dtype or dtype, device=device, seed=2) + 1)
    y, total = ops.add_rms_norm(x, residual, weight, eps, **options)
    dy, dtotal = (randn(*shape, dtype=tensor.dtype, device=device, seed=3 + i) for i, tensor in enumerate((y, total)))
    torch.autograd.backward((y, total), (dy, dtotal))
    x64, residual64, weight64 = exact(x), exact(residual), exact(weight)
    total64 = x64 + residual64
    y64 = rms_norm_exact(total64, weight64, eps, options.get("offset", 0.0))
    torch.autograd.backward((y64, total64), (dy.double().cpu(), dtotal.double().cpu()))
    assert_close(total, total64, dtype, "total")
    assert_close(y, y64, dtype, "add + RMSNorm y", 1.5)
    for name, found, wanted in (("x", x, x64), ("residual", residual, residual64), ("weight", weight, weight64)):
        assert_close(found.grad, wanted.grad, dtype, f"add + RMSNorm d{name}", 1.5)


ADD_RMS_NORM_SHAPES = ((3, 1024), (2, 2, 2048), (5, 2560), (2, 4096), (3, 5120), (4, 999), (7, 128))


def check_norm_in_parts(ops):
    """More rows than a grid has blocks, with the bound put low."""
    with limit(ops, "arrays", "GRID_MAX", (64, 1, 1)):
        before = len(launched(ops))
        check_rms_norm(ops, CPU, FP32, (130, 1024))
        assert len(launched(ops)) - before >= 4


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "rms_norm": on_cpu(check_rms_norm, FP32, (3, 1024), eps=0.5),
    "rms_norm_tail": on_cpu(check_rms_norm, BF16, (19, 2560), eps=0.5),
    "rms_norm_many_rows": on_cpu(check_rms_norm, FP32, (19, 1024)),
    "rms_norm_short": on_cpu(check_rms_norm, FP32, (81, 64), eps=0.5),
    "rms_norm_odd": on_cpu(check_rms_norm, BF16, (19, 1030), FP32, eps=0.5),
    "add_rms_norm": on_cpu(check_add_rms_norm, FP16, (3, 1024), eps=0.5),
    "add_rms_norm_tail": on_cpu(check_add_rms_norm, FP16, (3, 2560), eps=0.5),
    "add_rms_norm_odd": on_cpu(check_add_rms_norm, BF16, (3, 77), FP32),
    "offset": on_cpu(check_rms_norm, FP32, (3, 40), offset=1.0),
    "add_offset": on_cpu(check_add_rms_norm, FP32, (3, 40), offset=1.0),
}
MUTANTS = [
    *generated("kernel_src/rms_norm.py", "add_rms_norm", "add"),
    *generated("kernel_src/rms_norm.py", "add_rms_norm_tail", "add_rms_norm_forward"),
    *generated("kernel_src/rms_norm.py", "rms_norm or rms_norm_tail or rms_norm_many_rows or add_rms_norm_tail", "backward_rows"),
    *generated("kernel_src/rms_norm.py", "rms_norm_odd", "rms_norm_any_backward rms_norm_any_forward"),
    *generated("kernel_src/rms_norm.py", "rms_norm_tail", "rms_norm_forward"),
    *generated("kernel_src/rms_norm.py", "rms_norm_short", "rms_norm_rows_backward rms_norm_rows_forward"),
    *generated("kernel_src/rms_norm.py", "rms_norm", "scaled"),
    *generated("shared/ops/rms_norm.py", "add_rms_norm", "AddRMSNormFunction.forward"),
    *generated("shared/ops/rms_norm.py", "rms_norm", "RMSNormFunction.forward"),
    *generated("shared/ops/rms_norm.py", "add_rms_norm_odd", "_add_backward"),
    *generated("shared/ops/rms_norm.py", "rms_norm or offset", "rms_norm_backward_reference", kernels=False),
    *generated("shared/ops/rms_norm.py", "rms_norm or add_rms_norm", "AddRMSNormFunction.backward RMSNormFunction.backward"),
    *errors_in("kernel_src/elements.py", "rms_norm_odd", "read_padded", ("padding_value=0", "padding_value=1")),
    *errors_in("kernel_src/rms_norm.py", "rms_norm", "rms_norm_forward",
         ("total = total + ct.sum(tail * tail, axis=0, keepdims=False)", "pass", "rms_norm_tail")),
    *errors_in("kernel_src/rms_norm.py", "rms_norm", "backward_rows",
         ("ct.sum(g * n)", "ct.sum(d * n)"),
         ("acc = acc + d * n", "acc = acc + g * n"),
         ("        n = n * r", "        pass"),
         ("range(block, x.shape[0]", "range(0, x.shape[0]", "rms_norm_many_rows"),
         ("x.shape[0], ct.num_blocks(0)", "x.shape[0], ct.num_blocks(0) + 1", "rms_norm_many_rows"),
         ("read_tile(dtotal, row, 0, TILE, LATENCY)", "read_tile(dy, row, 0, TILE, LATENCY)", "add_rms_norm"),
         ("read_tile(dtotal, row, TILE, TAIL, LATENCY)", "read_tile(dtotal, row, 0, TAIL, LATENCY)", "add_rms_norm_tail")),
    *errors_in("kernel_src/rms_norm.py", "rms_norm", "rms_norm_backward", ("LATENCY, False)", "LATENCY, True)"),
               ("(dx, dy, dy, x,", "(dx, x, dy, x,")),
    *errors_in("kernel_src/rms_norm.py", "add_rms_norm", "add_rms_norm_forward",
         ("ct.scatter(total, (row, cols), ct.astype(s,", "ct.scatter(total, (row, cols), ct.astype(s * s,"),
         ("ct.scatter(total, (row, tail_cols)", "ct.scatter(total, (row, tail_cols - 1)", "add_rms_norm_tail")),
    *errors_in("kernel_src/rms_norm.py", "add_rms_norm", "add_rms_norm_backward",
         ("LATENCY, True)", "LATENCY, False)"),
         ("backward_rows(dx, dy, dtotal, x", "backward_rows(dx, dtotal, dy, x")),
    *errors_in("kernel_src/rms_norm.py", "rms_norm_tail", "read_tile", ("start // WIDTH", "start")),
    *errors_in("kernel_src/rms_norm.py", "rms_norm_tail", "read_weight", ("start // WIDTH", "0")),
    *errors_in("kernel_src/rms_norm.py", "rms_norm_tail", "write_tile", ("start // WIDTH", "0")),
    *errors_in("kernel_src/rms_norm.py", "rms_norm_short", "rms_norm_rows_backward",
         ("ct.minimum(wanted, x.shape[0] - 1)", "wanted"),
         ("ct.cdiv(x.shape[0], ROWS)", "x.shape[0] // ROWS")),
    *errors_in("kernel_src/rms_norm.py", "rms_norm_odd", "rms_norm_any_backward",
         ("read_padded(dweight, (block, cols)))", "0.0)"),
         ("dx.dtype), check_bounds=True", "dx.dtype), check_bounds=False")),
    *errors_in("shared/ops/rms_norm.py", "rms_norm", "RMSNormFunction.backward", ("need, ctx.offset", "need, 1.0")),
    *errors_in("shared/ops/rms_norm_kernels.py", "rms_norm_many_rows", "WholeRows.backward",
               ("column_sum(partial, weight.dtype)", "partial[0].to(weight.dtype)")),
    *errors_in("shared/ops/rms_norm.py", "add_rms_norm", "AddRMSNormFunction.forward", ("return y, total", "return y, x + 0 * total")),
    *errors_in("shared/ops/rms_norm.py", "add_rms_norm", "AddRMSNormFunction.backward",
         ("dtotal is None:", "True:"),
         ("(dy, dtotal, total", "(dtotal, dy, total")),
    *errors_in("shared/ops/rms_norm.py", "rms_norm", "rms_norm_backward_reference",
         ("sum_of_rows(d * n)", "(d * n)[0]"),
         kernels=False),
    *errors_in("shared/ops/rms_norm.py", "offset", "_scaled", ("weight.to(acc) + offset if offset else weight", "weight"), kernels=False),
    *errors_in("shared/ops/rms_norm.py", "offset", "RMSNormFunction.forward", ("ctx.offset = offset", "ctx.offset = 0.0"), kernels=False),
    *errors_in("shared/ops/rms_norm.py", "add_offset", "AddRMSNormFunction.forward", ("ctx.offset = offset", "ctx.offset = 0.0"),
         kernels=False),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
def norm(x, weight, eps=1e-6, last=False):
    """In float32 or wider, as models do it. last: whether it is rounded after the weight."""
    xf = x.to(torch.promote_types(x.dtype, FP32))
    normed = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    return (weight * normed).to(x.dtype) if last else weight * normed.to(x.dtype)


SIGNATURES = {
    "rms_norm": Signature(lambda s: {"x": (*s.rows, s.length), "weight": (s.length,)}, norm, rows=1),
    "add_rms_norm": Signature(
        lambda s: {"x": (*s.rows, s.length), "residual": (*s.rows, s.length), "weight": (s.length,)},
        lambda x, residual, weight: (norm(x + residual, weight), x + residual),
        rows=2,
    ),
}


def _gradient(new):
    """dy, x, weight and rstd of a backward pass."""
    return new(3, 1024, seed=2), new(3, 1024), new(1024, seed=3), new.exact(3).abs()


OPERATORS = {
    "rms_norm_forward": lambda new: [
        (new(3, 1024), new(1024, seed=3), 1e-6),
        (new(3, 1024)[:, 1:], new(1024, seed=3)[1:], 1e-6),
        (new(3, 1024), new(1024, seed=3), 1e-6, new.dtype, 1.0, "last"),
    ],
    "rms_norm_backward": lambda new: [(*_gradient(new), need) for need in (True, False)],
    "rms_norm_recompute": lambda new: [_gradient(new)[1:]],
    "add_rms_norm_forward": lambda new: [
        (new(3, 1024), new(3, 1024, seed=1), new(1024, seed=3), 1e-6, *options)
        for options in ((), (new.dtype, 1.0, "last", 0.5))
    ],
    "add_rms_norm_backward": lambda new: [(_gradient(new)[0], new(3, 1024, seed=1), *_gradient(new)[1:], need) for need in (True, False)],
}
GPU_TESTS = {"rms_norm": ("test_ops.py::test_rms_norm", "test_ops.py::test_add_rms_norm")}
