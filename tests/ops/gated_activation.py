"""GeGLU and SwiGLU with multipliers, packed or not: the formula in float64, what must hold, and errors that must be noticed."""

from functools import partial

import torch
from torch.nn.functional import gelu, silu

from tests.ops.common import FLOATS, assert_rows_close, exact, leaf, randn
from tests.ops.generated import generated
from tests.ops.suite import Case, of_suite


def gated_exact(gate, up, activation, gate_multiplier=1.0, down_multiplier=1.0):
    a = gate * gate_multiplier
    act = silu(a) if activation == "silu" else gelu(a, approximate="tanh" if activation == "tanh" else "none")
    return act * up * down_multiplier


def run(ops, activation, gate, up, multipliers):
    if activation == "silu":
        return ops.swiglu(gate, up, *multipliers)
    return ops.geglu(gate, up, approximate=activation)


def check_gated_activation(ops, device, dtype, shape, activation="tanh", multipliers=(), view=lambda x: x, scale=2.0):
    """view: makes the inputs out of contiguous tensors."""
    base = [leaf(randn(*shape, dtype=dtype, device=device, seed=i, scale=scale)) for i in range(2)]
    gate, up = map(view, base)
    out = run(ops, activation, gate, up, multipliers)
    dout = randn(*out.shape, dtype=dtype, device=device, seed=3)
    before = [t.detach().clone() for t in (gate, up, dout)]
    out.backward(dout)
    base64 = [exact(x) for x in base]
    out64 = gated_exact(*map(view, base64), activation, *multipliers)
    out64.backward(dout.double().cpu())
    what = f"{activation} {shape}"
    pairs = [("out", out, out64), *((name, found.grad, wanted.grad) for name, found, wanted in zip(("dgate", "dup"), base, base64))]
    for name, found, wanted in pairs:
        assert found.dtype == dtype and found.shape == wanted.shape
        # The activation is rounded before the product; of a few elements both roundings may go the same way.
        assert_rows_close(found, wanted, dtype, f"{what} {name}", 1 if found.numel() > 64 else 2)
    assert all(map(torch.equal, before, (gate, up, dout))), f"{what} overwrites what is the caller's"


def check_packed(ops, device, dtype, shape, activation="silu"):
    """shape: of one half."""
    both = leaf(randn(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device, scale=2.0))
    out = ops.swiglu_packed(both) if activation == "silu" else ops.geglu_packed(both, activation)
    dout = randn(*shape, dtype=dtype, device=device, seed=3)
    out.backward(dout)
    both64 = exact(both)
    out64 = gated_exact(*both64.chunk(2, -1), activation)
    out64.backward(dout.double().cpu())
    assert both.grad.is_contiguous()
    assert_rows_close(out, out64, dtype, f"packed {activation} {shape}")
    assert_rows_close(both.grad, both64.grad, dtype, f"packed {activation} {shape} gradient")


def check_extremes(ops, device):
    """Where a square overflows and where the sigmoid is 0 or 1."""
    values = torch.tensor([0.0, 1e-30, 5.4, 5.6, 8.0, 65.0, 3e4, 1e38], device=device)
    gate = torch.cat((values, -values)).requires_grad_()
    for activation in ("silu", "tanh", "none"):
        multipliers = (0.5, 1.0) if activation == "silu" else ()
        out = run(ops, activation, gate, torch.ones_like(gate), multipliers)
        (slope,) = torch.autograd.grad(out.sum(), gate)
        gate64 = exact(gate)
        out64 = gated_exact(gate64, torch.ones_like(gate64), activation, *multipliers)
        (slope64,) = torch.autograd.grad(out64.sum(), gate64)
        for found, wanted in ((out, out64), (slope, slope64)):
            torch.testing.assert_close(found.detach().double().cpu(), wanted.detach(), atol=1e-6, rtol=1e-6)


SHAPES = ((2, 1024), (3, 3072), (1, 2056), (5, 777), (1, 1), (7,), (2, 3, 520), (1, 1023), (0, 8), (3, 0))
VIEWS = (lambda x: x.transpose(0, 1), lambda x: x[:, :1024], lambda x: x[:, ::2], lambda x: x[1:, 1:1025], lambda x: x[:1].expand(x.shape))
MULTIPLIERS = (0.7, 1.3)

KERNEL, OPERATION = "kernel_src/gated_activation.py", "shared/ops/gated_activation.py"
# (file, function, what stands there, what is planted, the check that must notice)
MUTANTS = (
    *generated(KERNEL, "tanh or erf", "act"),
    *generated(KERNEL, "multipliers", "backward forward"),
    *generated(KERNEL, "odd", "place"),
    *generated(OPERATION, "tanh", "_GatedActivation.forward"),
    *generated(OPERATION, "tanh in PyTorch or erf or multipliers", "backward_reference", kernels=False),
    (KERNEL, "gated_activation_backward", "write_rows(dup, at, du, EXACT)", "write_rows(dup, at, dg, EXACT)", "tanh"),
    (OPERATION, "swiglu", "float(gate_multiplier), float(down_multiplier)", "float(down_multiplier), float(gate_multiplier)",
     "multipliers"),
    (OPERATION, "_packed_backward", "zip((dgate, dup)", "zip((dup, dgate)", "packed in PyTorch", False),
    (OPERATION, "_GatedActivation.backward", "backward(dout, ", "backward(-dout, ", "tanh"),
    (OPERATION, "_PackedGatedActivation.forward", "ctx.save_for_backward(gate_up)", "ctx.save_for_backward(-gate_up)", "packed"),
    (OPERATION, "_PackedGatedActivation.backward", "packed_backward(dout, ", "packed_backward(-dout, ", "packed"),
)
FP32 = torch.float32
CHECKS = of_suite({
    "tanh": lambda ops: check_gated_activation(ops, "cpu", FP32, (3, 1024)),
    "tanh in PyTorch": lambda ops: check_gated_activation(ops, "cpu", FP32, (3, 77)),
    "erf": lambda ops: check_gated_activation(ops, "cpu", FP32, (3, 77), "none"),
    "extremes": lambda ops: check_extremes(ops, "cpu"),
    "multipliers": lambda ops: check_gated_activation(ops, "cpu", FP32, (3, 77), "silu", MULTIPLIERS),
    "odd": lambda ops: check_gated_activation(ops, "cpu", FP32, (1, 2056)),
    "packed": lambda ops: check_packed(ops, "cpu", FP32, (3, 77)),
    "packed in PyTorch": lambda ops: check_packed(ops, "cpu", FP32, (3, 77)),
})


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for shape in SHAPES:
            for activation in ("silu", "tanh", "none"):
                multipliers = MULTIPLIERS if activation == "silu" else ()
                yield f"{activation} {shape} {dtype}", partial(check_gated_activation, ops, device, dtype, shape, activation, multipliers)
        for i, view in enumerate(VIEWS):
            yield f"view {i} {dtype}", partial(check_gated_activation, ops, device, dtype, (4, 2048), view=view)
        for activation in ("silu", "tanh", "none"):
            for shape in ((3, 1024), (3, 77), (2, 2, 24)):
                yield f"packed {activation} {shape} {dtype}", partial(check_packed, ops, device, dtype, shape, activation)
    yield "extremes", partial(check_extremes, ops, device)


# ---------------------------------------------------------------- in the tests of every operation
def two_of_rows(call):
    """The case of an operation on gate and up."""
    return Case(
        call,
        aligned=lambda n: ((2, n), (2, n)),
        slabs=((9, 40), (9, 40)),
        rows=2,
        sample=lambda ops, new: (lambda a, b: call(ops, a, b), (new.normal(48, 1024), new.normal(48, 1024, seed=1))),
    )


def packed(call):
    """The case of an operation on both in one tensor."""
    return Case(call, aligned=lambda n: ((2, 2 * n),), slabs=((9, 80),), rows=1)


OPERATIONS = {
    "swiglu": two_of_rows(lambda ops, a, b: ops.swiglu(a, b, 0.5, 2.0)),
    "geglu": two_of_rows(lambda ops, a, b: ops.geglu(a, b)),
    "swiglu_packed": packed(lambda ops, x: ops.swiglu_packed(x)),
    "geglu_packed": packed(lambda ops, x: ops.geglu_packed(x)),
}


def check_large(ops, device):
    check_gated_activation(ops, device, torch.bfloat16, (1025, 14336))


OPERATORS = {
    "gated_activation_forward": lambda new: [(new(3, 1024), new(3, 1024, seed=1), "gelu_tanh", 1.0, 1.0)],
    "gated_activation_backward": lambda new: [(new(3, 1024, seed=2), new(3, 1024), new(3, 1024, seed=1), "gelu_tanh", 1.0, 1.0)],
    "gated_activation_packed_forward": lambda new: [(new(3, 1024), "gelu_tanh")],
    "gated_activation_packed_backward": lambda new: [(new(3, 1024, seed=2)[:, :512], new(3, 1024), "gelu_tanh")],
}
GPU_TESTS = {"gated_activation": ("test_operation[gated_activation", "test_operation[tiled_mlp")}
