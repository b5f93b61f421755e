"""PolyNorm against float64."""

from functools import partial

import torch

from tests.ops.common import BF16, FLOATS, FP16, FP32, assert_rows_close, backward_twice, exact, leaf, randn, unchanged
from tests.ops.generated import generated
from tests.ops.suite import Case, of_suite


def poly_norm_exact(x, weight, bias, eps):
    terms = [x**p * torch.rsqrt((x**p).square().mean(-1, keepdim=True) + eps) for p in (3, 2, 1)]
    return sum(w * term for w, term in zip(weight, terms)) + bias


def check_poly_norm(ops, device, dtype, shape, *, parameter_dtype=None, bias_shape=(), scale=1.0, eps=1e-6, view=lambda x: x):
    """scale: of x; in fp16 the sixth power of x passes the largest number from 6 on, the sum of a row's sooner."""
    parameter_dtype = parameter_dtype or dtype
    base = leaf(randn(*shape, dtype=FP32, device=device, scale=scale).to(dtype))
    x = view(base)
    weight = leaf(torch.tensor([0.5, -0.75, 1.25], dtype=parameter_dtype, device=device))
    bias = leaf(torch.full(bias_shape, 0.3, dtype=parameter_dtype, device=device))
    dy = randn(*x.shape, dtype=dtype, device=device, seed=3) + 0.25
    leaves = (base, weight, bias)
    base64, weight64, bias64 = map(exact, leaves)
    untouched = unchanged(*leaves, dy)
    y = ops.poly_norm(x, weight, bias, eps)
    y64 = poly_norm_exact(view(base64), weight64, bias64, eps)
    what = f"PolyNorm {tuple(shape)}"
    assert_rows_close(y, y64, dtype, f"{what} y")
    y64.backward(dy.double().cpu())
    dx, dweight, dbias = backward_twice(y, dy, leaves)
    assert dbias.shape == bias.shape
    # For a row of one element every n_p is about 1 and dx is what eps leaves of it: fp32 holds none of its digits.
    if x.shape[-1] > 1:
        assert_rows_close(dx, base64.grad, dtype, f"{what} dx")
    for name, found, wanted in (("dweight", dweight, weight64.grad), ("dbias", dbias, bias64.grad)):
        assert_rows_close(found, wanted, parameter_dtype, f"{what} {name}")
    untouched()


# Rows in registers (bf16, more than 2048), longer and shorter ones, rows that fill no piece, odd lengths.
SHAPES = ((3, 4096), (2, 2112), (2, 3, 1024), (2, 4160), (2, 6208), (5, 64), (3, 77), (2, 1537), (0, 64))


def check_options(ops, device, dtype):
    check_poly_norm(ops, device, dtype, (3, 192), bias_shape=(1,))
    for scale in (1e-2, 100.0):
        check_poly_norm(ops, device, dtype, (3, 256), scale=scale, eps=1e-12 if dtype == FP32 else 1e-6)
    if dtype != FP32:
        check_poly_norm(ops, device, dtype, (3, 320), parameter_dtype=FP32)
        check_poly_norm(ops, device, dtype, (3, 33), parameter_dtype=FP32)
    check_poly_norm(ops, device, dtype, (128, 4), view=lambda x: x.t())


def check_largest_fp16(ops, device):
    """The cube of fp16's largest numbers is 2.8e14, its sixth power 8e28: fp32 holds both, and a published r^3 would underflow."""
    check_poly_norm(ops, device, FP16, (3, 256), scale=15000.0)


MUTANTS = (
    *generated("kernel_src/poly_norm.py", "odd", "gradient polynomial"),
    *generated("kernel_src/poly_norm.py", "walk", "poly_norm_backward"),
    *generated("kernel_src/poly_norm.py", "whole", "poly_norm_forward sums_with_powers"),
    *generated("kernel_src/poly_norm.py", "odd or long", "poly_norm_long_backward"),
    *generated("kernel_src/poly_norm.py", "long", "poly_norm_long_forward"),
    *generated("shared/ops/poly_norm.py", "whole", "PolyNormFunction.forward"),
    ("kernel_src/poly_norm.py", "write_sums", "s3, check", "s2, check", "odd"),
    ("shared/ops/poly_norm.py", "PolyNormFunction.backward", "dweight if need_weight", "dweight.flip(0) if need_weight", "whole"),
)
CHECKS = of_suite({
    "whole": lambda ops: check_poly_norm(ops, "cpu", BF16, (3, 2112), eps=0.5),
    "walk": lambda ops: check_poly_norm(ops, "cpu", BF16, (13, 2112)),
    "mixed": lambda ops: check_poly_norm(ops, "cpu", BF16, (2, 2112), parameter_dtype=FP32),
    "long": lambda ops: check_poly_norm(ops, "cpu", BF16, (2, 4160), eps=0.5),
    "odd": lambda ops: check_poly_norm(ops, "cpu", FP16, (19, 77), eps=0.5),
})


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for shape in SHAPES:
            yield f"{shape} {dtype}", partial(check_poly_norm, ops, device, dtype, shape)
        yield f"options {dtype}", partial(check_options, ops, device, dtype)
    if FP16 in dtypes:
        yield "largest fp16", partial(check_largest_fp16, ops, device)


# ---------------------------------------------------------------- in the tests of every operation
OPERATIONS = {
    "poly_norm": Case(
        lambda ops, x, w, b: ops.poly_norm(x, w, b),
        aligned=lambda n: ((2, n), (3,), (1,)),
        slabs=((9, 40), (3,), (1,)),
        rows=1,
        sample=lambda ops, new: (ops.poly_norm, (new.normal(48, 1024), new.ones(3), new.ones(1))),
    ),
}


def check_large(ops, device):
    check_poly_norm(ops, device, BF16, (2049, 4096))


GPU_TESTS = {"sums": ("test_operation[poly_norm",)}

OPERATORS = {
    "poly_norm_forward": lambda new: [(new(3, 1024), new(3), new(1), 1e-6)],
    "poly_norm_backward": lambda new: [
        (new(3, 1024, seed=2), new(3, 1024), new(3), new.exact(3, 3).abs() + 0.5, need) for need in (True, False)
    ],
}
