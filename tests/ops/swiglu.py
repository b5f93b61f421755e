"""SwiGLU, and the MLP around it."""

import functools

import torch
from torch.nn.functional import linear, silu

from tests.ops.common import FP32, alone, errors_in, exact, leaf, on_cpu, randn
from tests.ops.decoder_nodes import check_norm_mlp, lay_side_by_side
from tests.ops.generated import generated
from tests.ops.signature import Signature
from tests.tolerances import assert_close


def check_swiglu(ops, device, dtype, shape, view=lambda x: x):
    base = [leaf(randn(*shape, dtype=dtype, device=device, seed=i, scale=2.0)) for i in range(2)]
    gate, up = map(view, base)
    out = ops.swiglu(gate, up)
    dout = randn(*out.shape, dtype=dtype, device=device, seed=3)
    out.backward(dout)
    base64 = [exact(x) for x in base]
    gate64, up64 = map(view, base64)
    out64 = torch.nn.functional.silu(gate64) * up64
    out64.backward(dout.double().cpu())
    assert_close(out, out64, dtype, f"SwiGLU {shape}")
    for name, found, wanted in zip(("dgate", "dup"), base, base64):
        assert_close(found.grad, wanted.grad, dtype, f"SwiGLU {shape} {name}")


SWIGLU_SHAPES = ((2, 1024), (3, 3072), (1, 2056), (5, 777), (1, 1), (7,), (2, 3, 520), (1, 1023))


def check_mlp(ops, device, dtype, tokens, hidden, intermediate, packed=False):
    """The GEMMs round their results, so the errors are those of four roundings in a row. packed: whether gate's and up's weights lie side
    by side in memory."""
    x = leaf(randn(1, tokens, hidden, dtype=dtype, device=device))
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    weights = [leaf(randn(*s, dtype=dtype, device=device, seed=1 + i, scale=s[1] ** -0.5)) for i, s in enumerate(shapes)]
    if packed:
        lay_side_by_side(ops, weights[:2])
    y = ops.mlp(x, *weights)
    dy = randn(*y.shape, dtype=dtype, device=device, seed=7)
    y.backward(dy)
    x64, weights64 = exact(x), [exact(w) for w in weights]
    gate, up = (x64 @ w.t() for w in weights64[:2])
    y64 = (torch.nn.functional.silu(gate) * up) @ weights64[2].t()
    y64.backward(dy.double().cpu())
    assert_close(y, y64, dtype, "MLP y")
    for name, found, wanted in zip(("x", "gate", "up", "down"), (x, *weights), (x64, *weights64)):
        assert_close(found.grad, wanted.grad, dtype, f"MLP d{name}")


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "norm_mlp_packed": functools.partial(check_norm_mlp, packed=True, inner=512),
    "norm_mlp_rows": functools.partial(check_norm_mlp, packed=True, inner=2048),
    "mlp_alone": alone("mlp"),
    "swiglu": on_cpu(check_swiglu, FP32, (3, 1536)),
    "swiglu_odd": on_cpu(check_swiglu, FP32, (2, 1501)),
    "mlp": on_cpu(check_mlp, FP32, 33, 64, 512),
    "mlp_apart": on_cpu(check_mlp, FP32, 32, 64, 160),
    "mlp_odd": on_cpu(check_mlp, FP32, 33, 64, 33),
    "mlp_packed": on_cpu(check_mlp, FP32, 33, 64, 512, packed=True),
}
MUTANTS = [
    *generated("kernel_src/swiglu.py", "swiglu", "backward forward sigmoid"),
    *generated("kernel_src/swiglu.py", "norm_mlp_rows", "piece"),
    *generated("kernel_src/swiglu.py", "swiglu_odd", "swiglu_any_backward swiglu_any_forward"),
    *generated("kernel_src/swiglu.py", "mlp_odd", "swiglu_any_backward_recompute"),
    *generated("shared/ops/swiglu.py", "mlp", "_MLP.forward"),
    *generated("shared/ops/swiglu.py", "swiglu", "_SwiGLU.forward"),
    *generated("shared/ops/swiglu.py", "mlp_apart", "backward_in_place"),
    *generated("shared/ops/swiglu.py", "swiglu", "swiglu_backward_reference", kernels=False),
    *errors_in("kernel_src/swiglu.py", "swiglu", "backward",
         ("dout * silu, silu", "dout * s, silu")),
    *errors_in("kernel_src/swiglu.py", "swiglu", "swiglu_backward",
         ("dg, du, _", "du, dg, _"),
         ("ct.scatter(dup, at, ct.astype(du", "ct.scatter(dup, at, ct.astype(dg")),
    *errors_in("kernel_src/swiglu.py", "mlp", "swiglu_backward_recompute", ("forward(g, u", "forward(u, g")),
    *errors_in("kernel_src/swiglu.py", "mlp_odd", "swiglu_any_backward_recompute", ("forward(g, u", "forward(u, g")),
    *errors_in("kernel_src/swiglu.py", "swiglu_odd", "swiglu_any_forward",
         ("out.dtype), check_bounds=True", "out.dtype), check_bounds=False")),
    *errors_in("kernel_src/swiglu.py", "swiglu_odd", "swiglu_any_backward",
               ("read_padded(gate, o), read_padded(up, o)", "read_padded(up, o), read_padded(gate, o)")),
    *errors_in("shared/ops/swiglu.py", "swiglu", "_SwiGLU.backward", ("(dout, *ctx.saved_tensors)", "(dout, *ctx.saved_tensors[::-1])")),
    *errors_in("shared/ops/swiglu.py", "mlp_alone", "mlp_backward",
         ("torch.mm(dy.t(), swiglu_forward(gate, up))", "torch.mm(dy.t(), swiglu_forward(up, gate))"),
         ("(need_x or need_gate or need_up)", "(need_gate or need_up)")),
    *errors_in("shared/ops/swiglu.py", "mlp", "mlp_backward",
         (".addmm_(dup, up_weight)", ""),
         ("torch.mm(dgate.t(), normed)", "torch.mm(dup.t(), normed)"),
         ("torch.mm(dy.t(), hidden)", "torch.mm(dy.t(), gate)"),
         ("torch.mm(both, whole)", "torch.mm(dgate, gate_weight)", "mlp_packed")),
    *errors_in("shared/ops/swiglu.py", "mlp_apart", "backward_in_place",
         ("dgate.copy_(apart[0])", "pass"),
         ("dup.copy_(apart[1])", "dup.copy_(apart[0])")),
    *errors_in("shared/ops/swiglu.py", "mlp", "backward_in_place",
         ("both[:, :columns], both[:, columns:]", "both[:, columns:], both[:, :columns]", "norm_mlp_packed")),
    *errors_in("shared/ops/swiglu.py", "mlp", "backward_in_place", ("target.copy_(value)", "pass"), kernels=False),
    *errors_in("shared/ops/swiglu.py", "mlp_packed", "gate_and_up",
               ("both[:, : gate_weight.shape[0]]", "both[:, gate_weight.shape[0] :]")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
def _mlp(x, gate_weight, up_weight, down_weight):
    return linear(silu(linear(x, gate_weight)) * linear(x, up_weight), down_weight)


SIGNATURES = {
    "swiglu": Signature(lambda s: {"gate": (*s.rows, s.length), "up": (*s.rows, s.length)}, lambda gate, up: silu(gate) * up, rows=2),
    "mlp": Signature(
        lambda s: {"x": (*s.rows, s.length), "gate_weight": (s.inner, s.length), "up_weight": (s.inner, s.length),
                   "down_weight": (s.length, s.inner)},
        _mlp,
    ),
}  # fmt: skip


def _gradient(new):
    return [(new(3, 1024, seed=2), new(3, 1024), new(3, 1024, seed=1))]


OPERATORS = {
    "swiglu_forward": lambda new: [(new(3, 1024), new(3, 1024, seed=1))],
    "swiglu_backward": _gradient,
    "swiglu_backward_recompute": _gradient,
}
GPU_TESTS = {"swiglu": ("test_ops.py::test_swiglu", "test_mlp")}
