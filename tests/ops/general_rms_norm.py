"""RMSNorm with every option, alone and with the residual, against float64."""

from functools import partial

import torch

from tests.ops.common import BF16, FLOATS, FP16, FP32, assert_rows_close, backward_twice, exact, leaf, randn, unchanged
from tests.ops.generated import generated
from tests.ops.suite import Case, of_suite


def rms_norm_exact(x, weight, eps, offset):
    n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return n if weight is None else n * (weight + offset)


def check_rms_norm(
    ops, device, dtype, shape, *, residual=False, weight=True, weight_dtype=None, offset=0.0, casting="llama", used=("y", "total"),
    eps=1e-6, view=lambda x: x,
):  # fmt: skip
    """residual: whether there is one; used: which of its two results. view: makes the arguments out of contiguous tensors."""
    weight_dtype = weight_dtype or dtype
    base, other = (leaf(randn(*shape, dtype=dtype, device=device, seed=i)) for i in (0, 4))
    x = view(base)
    w = leaf(randn(x.shape[-1], dtype=weight_dtype, device=device, seed=1) + 1 - offset) if weight else None
    dy, dtotal = (randn(*x.shape, dtype=dtype, device=device, seed=2 + i) for i in range(2))
    leaves = [t for t in (base, other if residual else None, w) if t is not None]
    leaves64 = {id(t): exact(t) for t in leaves}
    x64, w64 = view(leaves64[id(base)]), None if w is None else leaves64[id(w)]
    untouched = unchanged(*leaves, dy, dtotal)
    if residual:
        y, total = ops.general_add_rms_norm(x, view(other), w, eps, offset, casting)
        assert torch.equal(total, x + view(other)), "total is not the rounded sum"
        x64 = x64 + view(leaves64[id(other)])
        # The norm of the rounded sum: what the model's residual stream holds.
        total64 = x64 + (total.detach().double().cpu() - x64.detach())
    else:
        y, total64 = ops.general_rms_norm(x, w, eps, offset, casting), x64
    y64 = rms_norm_exact(total64, w64, eps, offset)
    what, factor = f"RMSNorm {tuple(shape)} {casting} offset {offset}", 1.5 if casting == "llama" else 1.0
    assert_rows_close(y, y64, dtype, f"{what} y", factor)
    results, given, results64, given64 = [y], [dy], [y64], [dy.double().cpu()]
    if residual:
        chosen = [i for i, name in enumerate(("y", "total")) if name in used]
        results, given = [(y, total)[i] for i in chosen], [(dy, dtotal)[i] for i in chosen]
        results64, given64 = [(y64, total64)[i] for i in chosen], [g.double().cpu() for g in given]
    wanted = torch.autograd.grad(results64, list(leaves64.values()), given64, allow_unused=True)
    if "y" not in used:
        leaves, wanted = leaves[:2], wanted[:2]
    for name, tensor, found, gradient in zip("xrw", leaves, backward_twice(results, given, leaves), wanted):
        assert_rows_close(found, gradient, tensor.dtype, f"{what} d{name}")
    untouched()


# Rows in registers of each size, several a block, longer ones, odd ones.
SHAPES = ((3, 1024), (5, 768), (2, 3, 2560), (3, 4096), (2, 5120), (2, 8256), (2, 64), (19, 128), (3, 77), (2, 3), (1, 1537), (0, 64))


def check_options(ops, device, dtype):
    for casting in ("llama", "gemma", "none"):
        for offset in (0.0, 1.0):
            check_rms_norm(ops, device, dtype, (3, 192), casting=casting, offset=offset)
            check_rms_norm(ops, device, dtype, (3, 128), casting=casting, offset=offset)
        check_rms_norm(ops, device, dtype, (3, 192), casting=casting, weight=False, offset=1.0)
    check_rms_norm(ops, device, dtype, (2, 8256), casting="gemma", offset=1.0)
    if dtype != FP32:
        check_rms_norm(ops, device, dtype, (3, 320), weight_dtype=FP32, offset=1.0)
        check_rms_norm(ops, device, dtype, (3, 33), weight_dtype=FP32)
        check_rms_norm(ops, device, dtype, (3, 128), weight_dtype=FP32)
    check_rms_norm(ops, device, dtype, (256, 4), view=lambda x: x.t())
    check_rms_norm(ops, device, dtype, (3, 1025), view=lambda x: x[:, 1:])


def check_residual(ops, device, dtype):
    for shape in ((3, 768), (3, 4096), (2, 8256), (3, 77), (5, 128)):
        check_rms_norm(ops, device, dtype, shape, residual=True)
    check_rms_norm(ops, device, dtype, (3, 192), residual=True, casting="gemma", offset=1.0)
    check_rms_norm(ops, device, dtype, (3, 192), residual=True, weight=False)
    check_rms_norm(ops, device, dtype, (3, 192), residual=True, used=("y",))
    check_rms_norm(ops, device, dtype, (3, 192), residual=True, used=("total",))
    check_rms_norm(ops, device, dtype, (256, 4), residual=True, view=lambda x: x.t())
    if dtype != FP32:
        check_rms_norm(ops, device, dtype, (3, 192), residual=True, weight_dtype=FP32)


def check_rounding(ops, device, dtype):
    """In half precision "gemma" rounds once: y is the exact result, rounded, but for ties. "llama" is not."""
    x, w = randn(4, 2048, dtype=dtype, device=device), randn(2048, dtype=dtype, device=device, seed=1)
    wanted = rms_norm_exact(exact(x), exact(w), 1e-6, 1.0).detach().to(dtype)
    off = {c: (ops.general_rms_norm(x, w, 1e-6, 1.0, c).cpu() != wanted).double().mean().item() for c in ("llama", "gemma", "none")}
    assert off["gemma"] < 0.01 and off["none"] < 0.01 and off["llama"] > 0.1, off


MUTANTS = (
    *generated("kernel_src/general_rms_norm.py", "odd_residual", "backward_columns"),
    *generated("kernel_src/general_rms_norm.py", "offset or residual", "backward_rows"),
    *generated("kernel_src/general_rms_norm.py", "residual", "general_add_rms_norm_forward"),
    *generated("kernel_src/general_rms_norm.py", "whole", "general_rms_norm_forward"),
    *generated("kernel_src/general_rms_norm.py", "long", "general_rms_norm_long_forward general_rms_norm_row_means"),
    *generated("kernel_src/general_rms_norm.py", "rows", "general_rms_norm_rows_backward general_rms_norm_rows_forward"),
    *generated("kernel_src/general_rms_norm.py", "offset", "scaled"),
)
CHECKS = of_suite({
    "whole": lambda ops: check_rms_norm(ops, "cpu", BF16, (3, 768), eps=0.5),
    "offset": lambda ops: check_rms_norm(ops, "cpu", BF16, (3, 768), offset=1.0),
    "rounding": lambda ops: check_rounding(ops, "cpu", BF16),
    "many": lambda ops: check_rms_norm(ops, "cpu", BF16, (29, 1024), offset=1.0),
    "long": lambda ops: check_rms_norm(ops, "cpu", BF16, (3, 8256), offset=1.0, eps=0.5),
    "rows": lambda ops: check_rms_norm(ops, "cpu", FP16, (19, 128), offset=1.0, eps=0.5),
    "residual": lambda ops: check_rms_norm(ops, "cpu", BF16, (3, 768), residual=True, offset=1.0),
    "odd_residual": lambda ops: check_rms_norm(ops, "cpu", FP16, (3, 77), residual=True, offset=1.0),
})


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for shape in SHAPES:
            yield f"{shape} {dtype}", partial(check_rms_norm, ops, device, dtype, shape)
        yield f"options {dtype}", partial(check_options, ops, device, dtype)
        yield f"residual {dtype}", partial(check_residual, ops, device, dtype)
        if dtype != FP32:
            yield f"rounding {dtype}", partial(check_rounding, ops, device, dtype)


# ---------------------------------------------------------------- in the tests of every operation
MODULE = "rms_norm"
ROUNDS = {"llama": "first", "gemma": "last", "none": "last"}  # of Liger's casting modes


def general_rms_norm(norms, x, weight=None, eps=1e-6, offset=0.0, casting="llama"):
    """Runs what the package for Liger's users has. norms: the module of the operation."""
    return norms.rms_norm(x, weight, eps, offset, ROUNDS[casting], x.dtype)


def general_add_rms_norm(norms, x, residual, weight=None, eps=1e-6, offset=0.0, casting="llama"):
    """Runs what the package for Liger's users has. norms: the module of the operation."""
    return norms.add_rms_norm(x, residual, weight, eps, offset, ROUNDS[casting], x.dtype)


WITH_LIGERS_ARGUMENTS = {"general_rms_norm": general_rms_norm, "general_add_rms_norm": general_add_rms_norm}
OPERATIONS = {
    "general_rms_norm": Case(
        lambda ops, x, w: ops.general_rms_norm(x, w),
        aligned=lambda n: ((2, n), (n,)),
        rows=1,
        sample=lambda ops, new: (ops.general_rms_norm, (new.normal(48, 1024), new.normal(1024, seed=2))),
    ),
    "general_rms_norm, offset": Case(lambda ops, x, w: ops.general_rms_norm(x, w, offset=1.0), slabs=((9, 40), (40,))),
    "general_add_rms_norm": Case(
        lambda ops, x, r, w: sum(ops.general_add_rms_norm(x, r, w)),
        aligned=lambda n: ((2, n), (2, n), (n,)),
        rows=2,
        sample=lambda ops, new: (
            lambda x, r, w: sum(ops.general_add_rms_norm(x, r, w)),
            (new.normal(48, 1024), new.normal(48, 1024, seed=1), new.normal(1024, seed=2)),
        ),
    ),
    "general_add_rms_norm, offset": Case(
        lambda ops, x, r, w: sum(ops.general_add_rms_norm(x, r, w, offset=1.0)), slabs=((9, 64), (9, 64), (64,))
    ),
}


def check_large(ops, device):
    check_rms_norm(ops, device, BF16, (2049, 4096))
    check_rms_norm(ops, device, BF16, (65537, 128))
