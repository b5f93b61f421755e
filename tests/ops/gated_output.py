"""Attention's output times the sigmoid of a gate, against float64."""

import functools

import torch

from tests.ops.common import CPU, FLOATS, FP32, assert_rows_close, backward_twice, errors_in, exact, leaf, randn, unchanged
from tests.ops.generated import generated
from tests.ops.residual_norm import module
from tests.ops.signature import WIDTH, Signature


def check_gated_output(ops, device, dtype, shape, *, packed=False, view=lambda x: x):
    """packed: the gate is the second half of every head of one projection. view: makes the arguments out of contiguous tensors."""
    out = leaf(randn(*shape, dtype=dtype, device=device))
    whole = leaf(randn(*shape[:-1], shape[-1] * (1 + packed), dtype=dtype, device=device, seed=1, scale=2.0))
    width = shape[-1]
    y = module(ops, "gated_output").gated_output(view(out), view(whole[..., -width:]))
    dy = randn(*y.shape, dtype=dtype, device=device, seed=2)
    untouched = unchanged(out, whole, dy)
    out64, whole64 = exact(out), exact(whole)
    y64 = view(out64) * torch.sigmoid(view(whole64[..., -width:]))
    wanted = torch.autograd.grad(y64, (out64, whole64), dy.double().cpu())
    assert_rows_close(y, y64, dtype, f"y {shape}")
    for name, found, gradient in zip(("out", "gate"), backward_twice(y, dy, (out, whole)), wanted):
        assert_rows_close(found, gradient, dtype, f"gradient of {name} {shape}")
    untouched()


def check_into_a_projection(ops, device, dtype, shape):
    """The gradient of the gate goes to where it lies in the projection's, and the query's half stays as it is."""
    into, width = module(ops, "gated_output").gated_output_backward_into, shape[-1]
    out, dy = (randn(*shape, dtype=dtype, device=device, seed=i) for i in range(2))
    whole = randn(*shape[:-1], 2 * width, dtype=dtype, device=device, seed=2)
    dwhole, dout = torch.full_like(whole, 7.0), torch.empty_like(out)
    into(dout, dwhole[..., width:], dy, out, whole[..., width:])
    s = torch.sigmoid(exact(whole[..., width:]))
    assert (dwhole[..., :width] == 7).all()
    assert_rows_close(dout, dy.double().cpu() * s, dtype, "dout")
    assert_rows_close(dwhole[..., width:].contiguous(), dy.double().cpu() * exact(out) * s * (1 - s), dtype, "dgate")


# Qwen3.5's heads, others with kernels, and one without.
SHAPES = ((2, 5, 3, 256), (19, 128), (1, 256), (3, 96))


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check. ops: a loaded package."""
    check = functools.partial
    for dtype in dtypes:
        for shape in SHAPES:
            yield f"{shape}", check(check_gated_output, ops, device, dtype, shape, packed=True)
            yield f"into {shape}", check(check_into_a_projection, ops, device, dtype, shape)
        yield "contiguous", check(check_gated_output, ops, device, dtype, (5, 128))
        yield "transposed", check(check_gated_output, ops, device, dtype, (256, 5), view=lambda x: x.t())


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "rows": functools.partial(check_gated_output, device=CPU, dtype=FP32, shape=(3, 3, 256), packed=True),
    "into": functools.partial(check_into_a_projection, device=CPU, dtype=FP32, shape=(3, 3, 256)),
}
FILE, OPERATION = "kernel_src/gated_output.py", "shared/ops/gated_output.py"
MUTANTS = [
    *generated(FILE, "rows", "gated_output_forward"),
    *generated(FILE, "into", "gated_output_backward"),
    *generated(OPERATION, "rows", "GatedOutputFunction.forward"),
    *generated(OPERATION, "rows", "gated_output_reference gated_output_backward_reference", kernels=False),
    *errors_in(FILE, "rows", "gated_output_forward", ("ct.bid(0), out", "0, out")),
    *errors_in(OPERATION, "rows", "GatedOutputFunction.backward", ("return gated", "return (dy, dy) or gated")),
    *errors_in(OPERATION, "into", "gated_output_backward_into", ("dgate.copy_(found[1])", "dgate.copy_(found[0])"), kernels=False),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
SIGNATURES = {
    "gated_output": Signature(
        lambda s: {"out": (*s.rows, s.length), "gate": (*s.rows, s.length)},
        lambda out, gate: out * torch.sigmoid(gate),
        rows=2,
        sizes={"more": (8,), "length": WIDTH},
        package="packages/qwen3_5",
    )
}
GPU_TESTS = {"gated_output": ("test_operations_of_gated_delta_nets[gated_output]",)}
OPERATORS = {
    "gated_output_forward": lambda new: [(new(3, 512), new(3, 512, seed=1))],
    "gated_output_backward": lambda new: [(new(3, 512, seed=2), new(3, 512), new(3, 512, seed=1))],
}
