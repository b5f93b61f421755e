"""LayerNorm against float64."""

from functools import partial

import torch

from tests.ops.common import BF16, FLOATS, FP16, FP32, assert_rows_close, backward_twice, exact, leaf, never_refused, randn, unchanged
from tests.ops.generated import generated
from tests.ops.suite import Case, of_suite


def layer_norm_exact(x, weight, bias, eps):
    """weight, bias: of the dimensions to normalise over, or None for both."""
    shape = weight.shape if weight is not None else bias.shape if bias is not None else x.shape[-1:]
    dims = tuple(range(-len(shape), 0))
    deviation = x - x.mean(dims, keepdim=True)
    n = deviation * torch.rsqrt(deviation.square().mean(dims, keepdim=True) + eps)
    n = n if weight is None else n * weight
    return n if bias is None else n + bias


def check_norm(run, formula, base, of_parameters, dtype, what, *, parameters, weight_dtype, eps, view, factor, along=0.0, rows=None):
    """Compares a norm with weight and bias with its formula: results, and gradients of two backward passes.

    run, formula: of x, weight and bias. of_parameters: the shape of these two; parameters: "both", "weight", "bias" or "none". view: makes
    x out of base. along: how much of x there is in dy. rows: of x, what is a row for the bounds, by default the last dimension.
    """
    x, weight_dtype, device = view(base), weight_dtype or dtype, base.device
    weight = leaf(randn(*of_parameters, dtype=weight_dtype, device=device, seed=1) + 1) if parameters in ("both", "weight") else None
    bias = leaf(randn(*of_parameters, dtype=weight_dtype, device=device, seed=2)) if parameters in ("both", "bias") else None
    dy = randn(*x.shape, dtype=dtype, device=device, seed=3) + (along * x.detach() if along else 0)
    leaves = {name: t for name, t in (("x", base), ("weight", weight), ("bias", bias)) if t is not None}
    leaves64 = {name: exact(t) for name, t in leaves.items()}
    untouched = unchanged(*leaves.values(), dy)
    y = run(x, weight, bias)
    y64 = formula(view(leaves64["x"]), leaves64.get("weight"), leaves64.get("bias"))
    assert_rows_close(*(rows(t) if rows else t for t in (y, y64)), dtype, f"{what} y", factor)
    y64.backward(dy.double().cpu())
    largest = 1.0 if weight is None else float(weight.detach().abs().max())
    for (name, tensor), found in zip(leaves.items(), backward_twice(y, dy, list(leaves.values())), strict=True):
        both = found, leaves64[name].grad
        if name == "x" and rows:
            both = [rows(view(t)) for t in both]
        terms = largest * (float(dy.abs().max()) if dy.numel() else 0.0) / eps**0.5 if name == "x" else 0.0  # of a row of one element
        assert_rows_close(*both, tensor.dtype, f"{what} d{name}", factor, terms=terms)
    untouched()


def check_layer_norm(
    ops, device, dtype, shape, *, parameters="both", weight_dtype=None, dims=1, eps=1e-5, mean=0.5, trend=0.0, view=lambda x: x, factor=1.0
):
    """parameters, view: as of `check_norm`. dims: to normalise over. mean: of x; trend: how far it changes to either side along a row."""
    base = randn(*shape, dtype=FP32, device=device) + mean
    base = leaf((base + torch.linspace(-trend, trend, shape[-1], device=device)).to(dtype))
    check_norm(
        lambda *tensors: ops.layer_norm(*tensors, eps), lambda *tensors: layer_norm_exact(*tensors, eps), base, view(base).shape[-dims:],
        dtype, f"LayerNorm {tuple(shape)} {parameters}", parameters=parameters, weight_dtype=weight_dtype, eps=eps, view=view,
        factor=factor,
    )  # fmt: skip


# Rows in registers of each size, those with a kernel of their own, shorter ones that it must not take, longer ones, and rows of whole
# segments that fill no piece; odd lengths.
SHAPES = ((3, 1024), (5, 768), (2, 1280), (3, 2048), (2, 3, 2560), (3, 4096), (2, 4032), (2, 5120), (2, 8192), (2, 8256), (2, 64), (7, 128),
          (3, 77), (2, 1), (1, 1537), (0, 64), (2, 0, 64))
LAYOUTS = {
    "transposed": ((1024, 4), lambda x: x.t()),
    "sliced": ((6, 2048), lambda x: x[::2, :1024]),
    "misaligned": ((3, 1025), lambda x: x[:, 1:]),
    "misaligned, no whole segments": ((3, 73), lambda x: x[:, 1:]),
    "expanded": ((1, 256), lambda x: x.expand(4, 256)),
}


def check_large_mean(ops, device):
    """A variance that is a difference of squares loses every digit of a deviation of 1 beside a mean of 1000."""
    for shape in ((3, 2048), (2, 9024)):
        check_layer_norm(ops, device, FP32, shape, mean=1000.0, factor=10)


def check_layouts(ops, device, dtype):
    for shape, view in LAYOUTS.values():
        check_layer_norm(ops, device, dtype, shape, view=view)


def check_options(ops, device, dtype):
    for parameters in ("weight", "bias", "none"):
        check_layer_norm(ops, device, dtype, (3, 192), parameters=parameters)
    check_layer_norm(ops, device, dtype, (3, 4, 32), dims=2)
    if dtype != FP32:
        check_layer_norm(ops, device, dtype, (3, 320), weight_dtype=FP32)
        check_layer_norm(ops, device, dtype, (3, 33), weight_dtype=FP32)


# (file, function, old, new, name of the check that must notice it)
MUTANTS = (
    *generated("kernel_src/layer_norm.py", "whole", "layer_norm_backward layer_norm_forward"),
    *generated("kernel_src/layer_norm.py", "long", "layer_norm_columns_backward layer_norm_row_means row_statistics"),
    *generated("kernel_src/layer_norm.py", "exact", "layer_norm_exact_backward layer_norm_exact_forward"),
    *generated("kernel_src/layer_norm.py", "odd", "layer_norm_long_forward"),
    *generated("shared/ops/layer_norm.py", "whole or bias alone", "LayerNormFunction.backward"),
    *generated("shared/ops/layer_norm.py", "whole", "LayerNormFunction.forward"),
    ("kernel_src/layer_norm.py", "layer_norm_exact_forward", "ct.scatter(mean, row, mu", "ct.scatter(mean, row, r", "exact"),
    ("kernel_src/layer_norm.py", "layer_norm_exact_backward", "(block, 1, column), dbias", "(block, 1, column), dweight", "exact"),
    ("shared/ops/layer_norm.py", "_read_by_kernels", "key = number, n,", "key = n,", "no parameters"),
    ("shared/ops/layer_norm.py", "_backward", "if blocks and n % SEGMENT:", "if False:", "misaligned"),
    ("shared/ops/layer_norm.py", "LayerNormFunction.backward", "dweight, dbias = layer", "dbias, dweight = layer", "whole"),
)
CHECKS = of_suite({
    "whole": lambda ops: check_layer_norm(ops, "cpu", BF16, (3, 768), eps=0.5),
    "many": lambda ops: check_layer_norm(ops, "cpu", BF16, (13, 1024)),
    "exact": lambda ops: check_layer_norm(ops, "cpu", BF16, (3, 4096)),
    "exact many": lambda ops: check_layer_norm(ops, "cpu", BF16, (13, 4096)),
    "long": lambda ops: check_layer_norm(ops, "cpu", BF16, (3, 8256), trend=2.0),
    "odd": lambda ops: check_layer_norm(ops, "cpu", FP16, (19, 77), eps=0.5),
    "weight alone": lambda ops: check_layer_norm(ops, "cpu", BF16, (3, 768), parameters="weight"),
    "no parameters": lambda ops: check_layer_norm(ops, "cpu", BF16, (3, 4096), parameters="none"),
    "bias alone": lambda ops: check_layer_norm(ops, "cpu", BF16, (3, 768), parameters="bias"),
    "misaligned": never_refused(lambda ops: check_layer_norm(ops, "cpu", BF16, (3, 73), view=lambda x: x[:, 1:])),
})


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for shape in SHAPES:
            yield f"{shape} {dtype}", partial(check_layer_norm, ops, device, dtype, shape)
        yield f"options {dtype}", partial(check_options, ops, device, dtype)
        yield f"layouts {dtype}", partial(check_layouts, ops, device, dtype)
    if FP32 in dtypes:
        yield "large mean", partial(check_large_mean, ops, device)
        yield "odd", partial(check_layer_norm, ops, device, FP32, (13, 65))


# ---------------------------------------------------------------- in the tests of every operation
OPERATIONS = {
    "layer_norm": Case(
        lambda ops, x, w, b: ops.layer_norm(x, w, b),
        aligned=lambda n: ((2, n), (n,), (n,)),
        slabs=((9, 40), (40,), (40,)),
        rows=1,
        sample=lambda ops, new: (ops.layer_norm, (new.normal(48, 1024), new.normal(1024, seed=2), new.normal(1024, seed=3))),
    ),
}


def check_large(ops, device):
    check_layer_norm(ops, device, BF16, (2049, 4096))
    check_layer_norm(ops, device, BF16, (513, 12288))


OPERATORS = {
    "layer_norm_forward": lambda new: [
        (new(3, 1024), *parameters, 1e-6) for parameters in ((new(1024), new(1024, seed=1)), (new(1024), None), (None, None))
    ],
    "layer_norm_backward": lambda new: [
        (new(3, 1024, seed=2), new(3, 1024), weight, (1 + new.exact(2, 4).abs())[:, :3], need)
        for weight, need in ((new(1024), True), (new(1024), False), (None, False))
    ],
}
