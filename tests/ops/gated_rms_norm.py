"""RMSNorm times SiLU of a gate, against float64."""

import functools

import torch
from torch.nn.functional import silu

from tests.ops.common import BF16, CPU, FLOATS, FP16, FP32, assert_rows_close, backward_twice, errors_in, exact, leaf, randn, unchanged
from tests.ops.generated import generated
from tests.ops.residual_norm import module
from tests.ops.rms_norm import norm, rms_norm_exact
from tests.ops.signature import WIDTH, Signature


def check_gated_rms_norm(ops, device, dtype, shape, *, weight_dtype=None, eps=1e-6, view=lambda x: x):
    """view: makes x and the gate out of contiguous tensors."""
    x, gate = (leaf(randn(*shape, dtype=dtype, device=device, seed=i, scale=1 + i)) for i in range(2))
    weight = leaf(randn(view(x).shape[-1], dtype=weight_dtype or dtype, device=device, seed=2) + 1)
    y = module(ops, "gated_rms_norm").gated_rms_norm(view(x), view(gate), weight, eps)
    dy = randn(*y.shape, dtype=dtype, device=device, seed=3)
    untouched = unchanged(x, gate, weight, dy)
    leaves, leaves64 = [x, gate, weight], [exact(t) for t in (x, gate, weight)]
    y64 = rms_norm_exact(view(leaves64[0]), leaves64[2], eps) * silu(view(leaves64[1]))
    wanted = torch.autograd.grad(y64, leaves64, dy.double().cpu())
    assert_rows_close(y, y64, dtype, f"y {shape}", 2.0)  # three roundings
    for name, found, gradient in zip(("x", "gate", "weight"), backward_twice(y, dy, leaves), wanted):
        assert_rows_close(found, gradient, found.dtype, f"gradient of {name} {shape}", 1.0 if dtype != FP32 else 2.0)
    untouched()


# Heads of several lengths, numbers of rows that fill no block, and rows without kernels.
SHAPES = ((2, 5, 3, 128), (19, 128), (1, 128), (33, 64), (7, 256), (3, 96), (2, 77))


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check. ops: a loaded package."""
    check = functools.partial(check_gated_rms_norm, ops, device)
    for dtype in dtypes:
        for shape in SHAPES:
            yield f"{shape}", functools.partial(check, dtype, shape)
        yield "sliced", functools.partial(check, dtype, (9, 256), view=lambda x: x[:, 128:])
        yield "transposed", functools.partial(check, dtype, (128, 9), view=lambda x: x.t())
        if dtype != FP32:
            yield "fp32 weight", functools.partial(check, dtype, (19, 128), weight_dtype=FP32)


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "rows": functools.partial(check_gated_rms_norm, device=CPU, dtype=FP32, shape=(19, 128), eps=0.5),
    "many": functools.partial(check_gated_rms_norm, device=CPU, dtype=FP16, shape=(131, 128)),
    "one": functools.partial(check_gated_rms_norm, device=CPU, dtype=BF16, shape=(3, 128)),
}
FILE, OPERATION = "kernel_src/gated_rms_norm.py", "shared/ops/gated_rms_norm.py"
MUTANTS = [
    *generated(FILE, "rows", "gated_rms_norm_backward gated_rms_norm_forward normalised"),
    *generated(OPERATION, "one", "GatedRMSNormFunction.backward GatedRMSNormFunction.forward"),
    *generated(OPERATION, "rows", "gated_rms_norm_backward_reference gated_rms_norm_reference", kernels=False),
    *errors_in(FILE, "rows", "normalised", ("1.0 / TILE", "2.0 / TILE")),
    *errors_in(FILE, "rows", "gated_rms_norm_forward", ("ct.bid(0), x.shape", "0, x.shape"),
               ("* ct.gather(weight, column, check_bounds=False)[None, :]", "* 1.0")),
    *errors_in(FILE, "rows", "gated_rms_norm_backward", ("silu * (1.0 - s)", "s * (1.0 - s)"),
               ("d = d * silu", "d = d * s")),
    *errors_in(FILE, "many", "gated_rms_norm_backward", ("range(block, pieces", "range(0, pieces")),
    *errors_in(OPERATION, "one", "GatedRMSNormFunction.forward", ("ctx.eps = eps", "ctx.eps = 1.0")),
    *errors_in(OPERATION, "rows", "gated_rms_norm_backward_reference", ("1 + z * (1 - s)", "1 - s"),
               ("sum_of_rows(d * n)", "(d * n)[0]"), kernels=False),
    *errors_in(OPERATION, "rows", "gated_rms_norm_reference", ("silu(gate.to(acc))", "gate.to(acc)"), kernels=False),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
SIGNATURES = {
    "gated_rms_norm": Signature(
        lambda s: {"x": (*s.rows, s.length), "gate": (*s.rows, s.length), "weight": (s.length,)},
        lambda x, gate, weight: norm(x, weight) * silu(gate),
        rows=2,
        sizes={"more": (8,), "length": WIDTH},
        package="packages/qwen3_5",
    )
}
GPU_TESTS = {"gated_rms_norm": ("test_operations_of_gated_delta_nets[gated_rms_norm]",)}
OPERATORS = {
    "gated_rms_norm_forward": lambda new: [(new(3, WIDTH), new(3, WIDTH, seed=1), new(WIDTH), 1e-6)],
    "gated_rms_norm_backward": lambda new: [
        (new(3, WIDTH, seed=2), new(3, WIDTH), new(3, WIDTH, seed=1), new(WIDTH), 1e-6, need) for need in (True, False)
    ],
}
