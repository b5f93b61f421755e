"""The operators of a decoder layer in a graph, called without one: what the nodes of `projected_nodes` compute, in memory of their own."""

import functools
import importlib
from unittest import mock

import torch

from tests.ops import projected_nodes
from tests.ops.common import BF16, CPU, FP32, errors_in, leaf, randn
from tests.ops.projected_nodes import projections_of
from tests.tolerances import assert_close


def _assert_as_faked(found, faked):
    for real, fake in zip(found, faked, strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == len(found), "results share memory"


def _arguments(ops, shapes, autocast, seed=2):
    """(projections, the operators' tensors and scalings)"""
    projections = projections_of(ops, shapes, autocast, 0.0, seed)[0]
    return projections, [part for one in projections for part in one[:4]], [one.scaling for one in projections]


def _check_gradients(operator, fake, arguments, leaves, needs):
    wanted = [tensor.grad if tensor is not None and need else None for tensor, need in zip(leaves, needs, strict=True)]
    found = operator(*arguments, needs)
    _assert_as_faked(found, fake(*arguments, needs))
    for number, (mine, other) in enumerate(zip(found, [grad for grad in wanted if grad is not None], strict=True)):
        assert_close(mine, other, BF16, f"gradient {number}", 2)


def check_traced_attention_inputs(ops, autocast=False):
    nodes, traced = (importlib.import_module(f"{ops.__name__}.shared.ops.{name}") for name in ("projected_nodes", "traced_nodes"))
    kind = FP32 if autocast else BF16
    x, norm = leaf(randn(6, 1024, dtype=kind, device=CPU)), leaf(randn(1024, dtype=kind, device=CPU, seed=1) + 1)
    projections, tensors, scalings = _arguments(ops, [(n * 128, 1024) for n in (8, 4, 4)], autocast)
    norms = [leaf(randn(128, dtype=kind, device=CPU, seed=5 + i) + 1) for i in range(2)]
    angles = randn(1, 3, 128, dtype=FP32, device=CPU, seed=7)
    cos, sin = angles.cos().to(kind), angles.sin().to(kind)
    results = nodes.projected_attention_inputs(x, norm, projections, *norms, cos, sin, (2, 3), 0.5, 0.25, BF16)
    grads = [randn(*r.shape, dtype=r.dtype, device=CPU, seed=9 + i) for i, r in enumerate(results)]
    torch.autograd.backward(results, grads)
    arguments = x, norm, 0.5, *norms, 0.25, cos, sin, [2, 3], BF16, tensors, scalings
    q, k, projected, rstd, *made = found = traced._attention_inputs(*arguments)
    _assert_as_faked(found, traced._fake_attention_inputs(*arguments))
    v = traced._parts(projected, [1024, 512, 512], (2, 3), 128)[2].transpose(1, 2)
    for mine, other in zip((q, k, v), results[:3], strict=True):
        assert_close(mine, other, BF16, "a traced projection", 2)
    saved = *grads, x, norm, *norms, 0.25, cos, sin, BF16, tensors, scalings, projected, rstd, made
    leaves = x, norm, *norms, *tensors
    for left_out in (None, 1, 4):
        needs = [tensor is not None and i != left_out for i, tensor in enumerate(leaves)]
        _check_gradients(traced._attention_inputs_gradients, traced._fake_attention_inputs_gradients, saved, leaves, needs)


def check_traced_mlp(ops, autocast=False, attended=True):
    nodes, traced = (importlib.import_module(f"{ops.__name__}.shared.ops.{name}") for name in ("projected_nodes", "traced_nodes"))
    kind = FP32 if autocast else BF16
    x, norm = leaf(randn(2, 3, 1024, dtype=kind, device=CPU)), leaf(randn(1024, dtype=kind, device=CPU, seed=1) + 1)
    shapes = [(1024, 64)] * attended + [(48, 1024), (48, 1024), (1024, 48)]
    projections, tensors, scalings = _arguments(ops, shapes, autocast, 2 + (not attended))
    before = leaf(randn(6, 64, dtype=BF16, device=CPU, seed=7)) if attended else None
    expected = nodes.projected_mlp(x, norm, projections, 0.5, before, BF16)
    dout = randn(2, 3, 1024, dtype=kind, device=CPU, seed=9)
    expected.backward(dout)
    arguments = x, before, norm, 0.5, BF16, tensors, scalings
    out, rstd, both, *rest = found = traced._mlp(*arguments)
    _assert_as_faked(found, traced._fake_mlp(*arguments))
    assert_close(out, expected, BF16, "a traced MLP", 2)
    total, made = (rest[0], rest[1:]) if attended else (x, rest)
    leaves = x, before, norm, *tensors
    for left_out, kept in ((None, both), (2, both), (3, both), (None, None), (3, None)):
        saved = dout, total, before, norm, BF16, tensors, scalings, rstd, kept, made
        needs = [tensor is not None and i != left_out for i, tensor in enumerate(leaves)]
        _check_gradients(traced._mlp_gradients, traced._fake_mlp_gradients, saved, leaves, needs)


def as_in_a_graph(check):
    """The check of the nodes of eager mode on those of a graph, as they are where a graph is traced."""

    def checked(ops):
        import torch._dynamo  # noqa: F401  where this is imported first, inside of the patch, no graph finds is_compiling any more

        with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
            check(ops)

    return checked


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "inputs_of_a_graph": as_in_a_graph(projected_nodes.check_projected_attention_inputs),
    "mlp_of_a_graph": as_in_a_graph(functools.partial(projected_nodes.check_projected_mlp, attended=True)),
    "mlp_of_a_graph_again": as_in_a_graph(functools.partial(projected_nodes.check_projected_mlp, attended=True, recompute=True)),
    "traced_inputs": check_traced_attention_inputs,
    "traced_inputs_autocast": functools.partial(check_traced_attention_inputs, autocast=True),
    "traced_mlp": check_traced_mlp,
    "traced_mlp_alone": functools.partial(check_traced_mlp, attended=False),
    "traced_mlp_autocast": functools.partial(check_traced_mlp, autocast=True),
}
MUTANTS = [
    *errors_in("shared/ops/traced_nodes.py", "traced_inputs", "_attention_inputs",
         ("group, biases_of(projections), projected)", "group, biases_of(projections))"),
         ("_heads_last(q), _heads_last(k)", "_heads_last(q), _heads_last(q)"),
         ("projected, rstd, *group", "projected[:, :-1], rstd, *group")),
    *errors_in("shared/ops/traced_nodes.py", "traced_inputs", "_attention_inputs_gradients",
         ("q, k, _ = _parts", "k, q, _ = _parts"),
         ("(dq, dk, dv, dresidual), *", "(dq, dk, dv, 0 * dresidual), *")),
    *errors_in("shared/ops/traced_nodes.py", "traced_mlp", "_mlp",
         ("biases_of(projections), both)", "biases_of(projections))"),
         ("else [total]", "else [x.reshape(total.shape)]")),
    *errors_in("shared/ops/traced_nodes.py", "traced_mlp_autocast", "_mlp_gradients",
         ("gate, up = both", "up, gate = both"),
         ("biases_of(projections[-3:-1])", "(None, None)"),
         ("else dx.view(dout.shape)", "else -dx.view(dout.shape)")),
    *errors_in("shared/ops/projection.py", "traced_inputs_autocast", "shapes_made",
         ("shapes.append((tokens, rank))", "pass"),
         ("weight.dtype != dtype for", "weight.dtype == dtype for")),
    *errors_in("shared/ops/traced_nodes.py", "inputs_of_a_graph", "_AttentionInputs.forward",
         ("save_for_backward(x, norm_weight, q_norm, k_norm", "save_for_backward(x, norm_weight, k_norm, q_norm")),
    *errors_in("shared/ops/traced_nodes.py", "inputs_of_a_graph", "_AttentionInputs.backward",
         ("(dx, dnorm, None, dq_norm, dk_norm,", "(dx, dnorm, None, dk_norm, dq_norm,")),
    *errors_in("shared/ops/traced_nodes.py", "mlp_of_a_graph", "_MLP.forward", ("(rest[0], rest[1:])", "(x, rest[1:])")),
    *errors_in("shared/ops/traced_nodes.py", "mlp_of_a_graph", "_MLP.backward", ("(dx, dattended, dnorm,", "(dx, -dattended, dnorm,")),
]  # fmt: skip
