"""The residual stream with a normalised or a multiplied branch, and the norm after it, against float64."""

import functools
import importlib

import torch

from tests.ops.common import BF16, CPU, FLOATS, FP16, FP32, assert_rows_close, errors_in, exact, leaf, randn, unchanged
from tests.ops.generated import generated
from tests.ops.rms_norm import norm, rms_norm_exact
from tests.ops.signature import Signature
from tests.tolerances import RELATIVE_ERROR, relative_error

# Rows in registers of every size, odd ones, and longer ones, which are two operations.
SHAPES = ((3, 64), (2, 2, 1024), (5, 2560), (2, 4096), (1, 5376), (3, 77), (1, 8256))
TWO_TILES = ((3, 5120), (5, 4160), (3, 2112), (2, 6144))  # and 2560, 5376: rows between two powers of two, in bf16


def module(ops, name="residual_norm"):
    """A file of operations of a loaded package."""
    return importlib.import_module(f"{ops.__name__}.shared.ops.{name}")


def check_norm_add(ops, device, dtype, shape, *, following=True, offset=0.0, rounds="last", eps=1e-6, view=lambda x: x):
    """following: whether the sum is normalised too. view: makes the arguments out of contiguous tensors."""
    branch, residual = (leaf(randn(*shape, dtype=dtype, device=device, seed=i)) for i in range(2))
    length = view(branch).shape[-1]
    weights = [leaf(randn(length, dtype=dtype, device=device, seed=2 + i) + 1 - offset) for i in range(1 + following)]
    operation = getattr(module(ops), "norm_add_norm" if following else "norm_add")
    results = operation(view(branch), view(residual), *weights, eps, offset, rounds)
    results = results if following else (results,)
    leaves = [branch, residual, *weights]
    leaves64 = [exact(tensor) for tensor in leaves]
    upstream = [randn(*result.shape, dtype=dtype, device=device, seed=4 + i) for i, result in enumerate(results)]
    untouched = unchanged(*leaves, *upstream)
    total64 = view(leaves64[1]) + rms_norm_exact(view(leaves64[0]), leaves64[2], eps, offset)
    results64 = (total64,)
    if following:
        # The norm of the rounded sum: what the residual stream holds.
        rounded = total64 + (results[1].detach().double().cpu() - total64.detach())
        results64 = rms_norm_exact(rounded, leaves64[3], eps, offset), total64
    found = torch.autograd.grad(results, leaves, upstream)
    wanted = torch.autograd.grad(results64, leaves64, [g.double().cpu() for g in upstream])
    for name, a, b in zip(("total",) if not following else ("y", "total"), results, results64):
        assert_rows_close(a, b, dtype, f"{name} {tuple(shape)}", 1.5)
    for name, a, b in zip(("branch", "residual", "weight", "next weight"), found, wanted):
        assert_rows_close(a, b, dtype, f"gradient of {name} {tuple(shape)}", 2.0)
    untouched()


def check_rounding(ops, device, dtype):
    """"last" rounds the norm once before it is added, and the sum once; "first" rounds in the norm too."""
    branch, residual = (randn(4, 2048, dtype=dtype, device=device, seed=i) for i in range(2))
    weight = randn(2048, dtype=dtype, device=device, seed=2)
    normed = rms_norm_exact(exact(branch), exact(weight), 1e-6, 1.0).to(dtype)
    wanted = (residual.cpu().double() + normed.double()).to(dtype)
    off = {
        rounds: (module(ops).norm_add(branch, residual, weight, 1e-6, 1.0, rounds).cpu() != wanted).double().mean().item()
        for rounds in ("first", "last")
    }
    assert off["last"] < 0.01 and off["first"] > 0.05, off


def check_multiplied_branch(ops, device, dtype, shape, multiplier=0.22, offset=0.0, rounds="first"):
    """residual + multiplier * branch, and its norm; the same y again from what is saved."""
    norms = module(ops, "rms_norm")
    branch, residual = (randn(*shape, dtype=dtype, device=device, seed=i) for i in range(2))
    weight = randn(shape[-1], dtype=dtype, device=device, seed=2) + 1 - offset
    total, y, rstd = norms.add_rms_norm_forward(branch, residual, weight, 1e-6, None, offset, rounds, multiplier)
    total64 = exact(residual) + multiplier * exact(branch)
    assert relative_error(total, total64) <= RELATIVE_ERROR[dtype]
    assert_rows_close(y, rms_norm_exact(exact(total), exact(weight), 1e-6, offset), dtype, "y", 1.5)
    assert torch.equal(norms.rms_norm_recompute(total, weight, rstd, None, offset, rounds), y), "y again has other bits"


def check_again(ops, device, dtype, shape, offset=1.0, rounds="last"):
    """y has the same bits again, of rows of any length, and of a slice of longer ones."""
    norms = module(ops, "rms_norm")
    for x in (randn(*shape, dtype=dtype, device=device), randn(shape[0], 2 * shape[1], dtype=dtype, device=device)[:, : shape[1]]):
        weight = randn(shape[-1], dtype=dtype, device=device, seed=2)
        y, rstd = norms.rms_norm_forward(x, weight, 1e-6, None, offset, rounds)
        assert torch.equal(norms.rms_norm_recompute(x, weight, rstd, None, offset, rounds), y)


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check. ops: a loaded package."""
    check = functools.partial
    for dtype in dtypes:
        for shape in SHAPES:
            yield f"norm_add_norm {shape}", check(check_norm_add, ops, device, dtype, shape, offset=1.0)
        for shape in SHAPES[1::2]:
            yield f"norm_add {shape}", check(check_norm_add, ops, device, dtype, shape, following=False)
            yield f"again {shape}", check(check_again, ops, device, dtype, (3, shape[-1]))
            yield f"multiplied {shape}", check(check_multiplied_branch, ops, device, dtype, shape)
        for shape in TWO_TILES if dtype == BF16 else ():
            yield f"norm_add_norm {shape}", check(check_norm_add, ops, device, dtype, shape, offset=1.0)
            yield f"norm_add {shape}", check(check_norm_add, ops, device, dtype, shape, following=False)
            yield f"added {shape}", check(check_multiplied_branch, ops, device, dtype, shape, multiplier=1.0)
            yield f"again {shape}", check(check_again, ops, device, dtype, shape)
        yield "first", check(check_norm_add, ops, device, dtype, (3, 192), rounds="first")
        yield "transposed", check(check_norm_add, ops, device, dtype, (256, 4), view=lambda x: x.t())
        yield "multiplied, last", check(check_multiplied_branch, ops, device, dtype, (3, 192), offset=1.0, rounds="last")
    yield "rounding", check(check_rounding, ops, device, BF16)


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "norm_add": functools.partial(check_norm_add, device=CPU, dtype=FP32, shape=(3, 192), following=False, offset=1.0),
    "norm_add_norm": functools.partial(check_norm_add, device=CPU, dtype=FP32, shape=(3, 192), offset=1.0, eps=0.5),
    "part": functools.partial(check_norm_add, device=CPU, dtype=FP16, shape=(3, 704)),
    "rounding": functools.partial(check_rounding, device=CPU, dtype=BF16),
    "multiplied": functools.partial(check_multiplied_branch, device=CPU, dtype=BF16, shape=(3, 192), offset=1.0),
    "again": functools.partial(check_again, device=CPU, dtype=FP32, shape=(3, 2112)),
    "two tiles": functools.partial(check_norm_add, device=CPU, dtype=BF16, shape=(19, 4864), offset=1.0, eps=0.5),
    "two tiles, one norm": functools.partial(check_norm_add, device=CPU, dtype=BF16, shape=(3, 4864), following=False, eps=0.5),
    "two tiles, added": functools.partial(
        check_multiplied_branch, device=CPU, dtype=BF16, shape=(3, 4160), multiplier=1.0, offset=1.0, rounds="last"
    ),
    "two tiles, alone": functools.partial(check_again, device=CPU, dtype=BF16, shape=(3, 2112)),
}
DOUBLE = "kernel_src/double_tile_norms.py"
FILE, OPERATION = "kernel_src/residual_norm.py", "shared/ops/residual_norm.py"
MUTANTS = [
    *generated(DOUBLE, "two tiles, one norm", "add_normed"),
    *generated(DOUBLE, "two tiles", "backward_rows inverse_rms norm_of read_weight"),
    *generated(DOUBLE, "two tiles, added", "general_add_rms_norm_forward"),
    *generated(FILE, "norm_add", "add_normed"),
    *generated(FILE, "again", "general_rms_norm_apply"),
    *generated(FILE, "norm_add_norm", "inverse_rms norm_of"),
    *generated(FILE, "multiplied", "scaled_add_norm_forward"),
    *generated(OPERATION, "norm_add", "NormAddFunction.backward NormAddFunction.forward"),
    *generated(OPERATION, "norm_add_norm", "NormAddNormFunction.backward NormAddNormFunction.forward"),
    *errors_in(FILE, "norm_add", "add_normed", ("inner_rstd, row, r,", "inner_rstd, row, r * r,")),
    *errors_in(FILE, "norm_add_norm", "norm_of", ("rstd, row, r,", "rstd, row, r * r,")),
    *errors_in(FILE, "norm_add", "norm_add_forward", ("ct.scatter(total, index, s,", "ct.scatter(total, index, s + s,")),
    *errors_in(FILE, "norm_add_norm", "norm_add_norm_forward", ("ct.scatter(total, index, s,", "ct.scatter(total, index, s + s,"),
               ("norm_of(s, weight", "norm_of(s, inner")),
    *errors_in(FILE, "multiplied", "scaled_add_norm_forward", ("ct.scatter(total, index, s,", "ct.scatter(total, index, s + s,")),
    *errors_in(FILE, "again", "general_rms_norm_apply", ("place(i, count", "place(0, count")),
    *errors_in(DOUBLE, "two tiles", "places", ("PIECE + ct.arange(TAIL", "ct.arange(TAIL")),
    *errors_in(DOUBLE, "two tiles", "norm_of", ("rstd, row, r,", "rstd, row, r * r,"),
               ("second[1:]), offset", "second[1:]), 0.0")),
    *errors_in(DOUBLE, "two tiles, one norm", "add_normed", ("inner_rstd, row, r,", "inner_rstd, row, r * r,")),
    *errors_in(DOUBLE, "two tiles, one norm", "norm_add_forward", ("ct.scatter(total, second, s2", "ct.scatter(total, second, s2 + s2")),
    *errors_in(DOUBLE, "two tiles", "norm_add_norm_forward", ("ct.scatter(total, first, s1", "ct.scatter(total, first, s1 + s1")),
    *errors_in(DOUBLE, "two tiles, alone", "general_rms_norm_forward", ("read_once(x, second)", "0.5 * read_once(x, second)")),
    *errors_in(DOUBLE, "two tiles", "read_tail", ("TILE // TAIL", "0")),
    *errors_in(DOUBLE, "two tiles", "backward_rows", ("ct.sum(g2 * n2)", "40.0 * ct.sum(g2 * n2)")),
    *errors_in(OPERATION, "norm_add", "NormAddFunction.forward", ("ctx.offset = offset", "ctx.offset = 0.0")),
    *errors_in(OPERATION, "norm_add_norm", "NormAddNormFunction.forward", ("ctx.offset = offset", "ctx.offset = 0.0")),
    *errors_in(OPERATION, "norm_add_norm", "NormAddNormFunction.backward", ("rms_norm_backward(dstream,", "rms_norm_backward(dtotal,")),
    *errors_in(OPERATION, "norm_add", "_add", ("residual + y.view(residual.shape), rstd", "y.view(residual.shape), rstd"), kernels=False),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
def _sum(branch, residual, weight):
    return residual + norm(branch, weight, last=True)


def _sum_and_norm(branch, residual, weight, next_weight):
    total = _sum(branch, residual, weight)
    return norm(total, next_weight, last=True), total


def _shapes(s):
    return {"branch": (*s.rows, s.length), "residual": (*s.rows, s.length), "weight": (s.length,)}


SIGNATURES = {
    "norm_add": Signature(_shapes, _sum, rows=2),
    "norm_add_norm": Signature(lambda s: {**_shapes(s), "next_weight": (s.length,)}, _sum_and_norm, rows=2),
}


def _calls(new, *more):
    tensors = new(3, 1024), new(3, 1024, seed=1), new(1024, seed=3), *([-new(1024, seed=3)] * len(more))
    return [(*tensors, 1e-6), (*tensors, 1e-6, *more, 1.0, "last")]


OPERATORS = {"norm_add_forward": _calls, "norm_add_norm_forward": lambda new: _calls(new, new.dtype)}
GPU_TESTS = {"residual_norm": ("test_residual_norm",), "double_tile_norms": ("test_residual_norm",)}
