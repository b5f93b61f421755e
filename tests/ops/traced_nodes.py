"""The operators of a decoder layer in a graph, called without one: what the nodes of `projected_nodes` compute, in memory of their own."""

import functools
from unittest import mock

import torch

from tests.ops import projected_nodes
from tests.ops.common import BF16, CPU, FP32, errors_in, leaf, randn
from tests.ops.decoder_nodes import part_of
from tests.ops.projected_nodes import inputs, outputs, projections_of
from tests.tolerances import assert_close


def _assert_as_faked(found, faked):
    for real, fake in zip(found, faked, strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == len(found), "results share memory"


def _arguments(ops, shapes, autocast, seed=2):
    """(projections, the operators' tensors and scalings)"""
    projections = projections_of(ops, shapes, autocast, 0.0, seed)[0]
    return projections, [part for one in projections for part in one[:5]], [one.scaling for one in projections]


def _run(operator, *arguments) -> list:
    """What an operator does with the arguments of its function."""
    return operator.run(*operator.pack(*arguments))


def _check_gradients(operator, fake, arguments, leaves, needs):
    wanted = [tensor.grad if tensor is not None and need else None for tensor, need in zip(leaves, needs, strict=True)]
    found = _run(operator, *arguments, needs)
    _assert_as_faked(found, fake(*arguments, needs))
    for number, (mine, other) in enumerate(zip(found, [grad for grad in wanted if grad is not None], strict=True)):
        assert_close(mine, other, BF16, f"gradient {number}", 2)


def check_traced_attention_inputs(ops, autocast=False):
    nodes, traced = (part_of(ops, name) for name in ("nodes", "traced"))
    kind = FP32 if autocast else BF16
    x, norm = leaf(randn(6, 1024, dtype=kind, device=CPU)), leaf(randn(1024, dtype=kind, device=CPU, seed=1) + 1)
    projections, tensors, scalings = _arguments(ops, [(n * 128, 1024) for n in (8, 4, 4)], autocast)
    norms = [leaf(randn(128, dtype=kind, device=CPU, seed=5 + i) + 1) for i in range(2)]
    angles = randn(1, 3, 128, dtype=FP32, device=CPU, seed=7)
    cos, sin = angles.cos().to(kind), angles.sin().to(kind)
    results = nodes.norm_attention_inputs(x, norm, projections, *norms, cos, sin, (2, 3), inputs(ops, 0.5, 0.25), BF16)
    grads = [randn(*r.shape, dtype=r.dtype, device=CPU, seed=9 + i) for i, r in enumerate(results)]
    torch.autograd.backward(results, grads)
    text = part_of(ops, "spec").encoded(inputs(ops, 0.5, 0.25))
    arguments = x, norm, *norms, cos, sin, text, [2, 3], BF16, tensors, scalings
    q, k, projected, *kept = found = _run(traced.ATTENTION_INPUTS, *arguments)
    _assert_as_faked(found, traced._fake_attention_inputs(*arguments))
    v = traced._in_heads(inputs(ops, 0.5, 0.25), projected, [1024, 512, 512], (2, 3))[2].transpose(1, 2)
    for mine, other in zip((q, k, v), results[:3], strict=True):
        assert_close(mine, other, BF16, "a traced projection", 2)
    saved = *grads, x, norm, *norms, cos, sin, text, BF16, tensors, scalings, projected, kept
    leaves = x, norm, *norms, None, None, *tensors
    for left_out in (None, 1, 6):
        needs = [tensor is not None and i != left_out for i, tensor in enumerate(leaves)]
        _check_gradients(traced.ATTENTION_INPUTS_GRADIENTS, traced._fake_attention_inputs_gradients, saved, leaves, needs)


def check_traced_mlp(ops, autocast=False, attended=True):
    nodes, traced = (part_of(ops, name) for name in ("nodes", "traced"))
    kind = FP32 if autocast else BF16
    x, norm = leaf(randn(2, 3, 1024, dtype=kind, device=CPU)), leaf(randn(1024, dtype=kind, device=CPU, seed=1) + 1)
    shapes = [(1024, 64)] * attended + [(48, 1024), (48, 1024), (1024, 48)]
    projections, tensors, scalings = _arguments(ops, shapes, autocast, 2 + (not attended))
    before = leaf(randn(6, 64, dtype=BF16, device=CPU, seed=7)) if attended else None
    expected = nodes.norm_mlp(x, norm, projections, outputs(ops, 0.5), before, dtype=BF16)
    dout = randn(2, 3, 1024, dtype=kind, device=CPU, seed=9)
    expected.backward(dout)
    text = part_of(ops, "spec").encoded(outputs(ops, 0.5))
    arguments = x, before, None, norm, None, text, BF16, tensors, scalings
    out, both, *kept = found = _run(traced.MLP, *arguments)
    _assert_as_faked(found, traced._fake_mlp(*arguments))
    assert_close(out, expected, BF16, "a traced MLP", 2)
    leaves = x, before, None, norm, None, *tensors
    for left_out, products in ((None, both), (3, both), (5, both), (None, None), (5, None)):
        saved = dout, None if attended else x, before, None, norm, None, text, BF16, tensors, scalings, products, kept
        needs = [tensor is not None and i != left_out for i, tensor in enumerate(leaves)]
        _check_gradients(traced.MLP_GRADIENTS, traced._fake_mlp_gradients, saved, leaves, needs)


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
    *errors_in("shared/decoder/steps.py", "traced_mlp", "wanted", ("gradient if need else None", "gradient")),
    *errors_in("shared/decoder/projections.py", "traced_inputs", "normed_input_backward", ("dnorm if need_norm else None", "dnorm")),
    *errors_in("shared/decoder/traced.py", "traced_inputs", "_attention_inputs",
         ("shape, projections, projected)", "shape, projections)"),
         ("_heads_last(found.k_out)", "_heads_last(found.q_out)"),
         ("projected, *kept", "projected[:, :-1], *kept")),
    *errors_in("shared/decoder/traced.py", "traced_inputs", "_attention_inputs_gradients",
         ("q, k, _ = _in_heads", "k, q, _ = _in_heads"),
         ("(dq, dk, dv, dresidual), tensors", "(dq, dk, dv, 0 * dresidual), tensors")),
    *errors_in("shared/decoder/traced.py", "traced_mlp", "_mlp",
         ("OutputGroups(*three_of(found)), both)", "OutputGroups(*three_of(found)))"),
         ("_there(saved.total if", "_there(x.reshape(saved.total.shape) if")),
    *errors_in("shared/decoder/traced.py", "traced_mlp_autocast", "_mlp_gradients",
         ("gate, up = both", "up, gate = both"),
         ("else gradients.x.view(dout.shape)", "else -gradients.x.view(dout.shape)")),
    *errors_in("shared/decoder/projection.py", "traced_inputs_autocast", "Group.shapes_made",
         ("[(tokens, self.rank)] if self.spans", "[] if self.spans"),
         ("if self.rounds_weights", "if not self.rounds_weights")),
    *errors_in("shared/decoder/traced.py", "inputs_of_a_graph", "_AttentionInputs.forward",
         ("tensors = x, norm, q_norm, k_norm, cos, sin\n", "tensors = x, norm, k_norm, q_norm, cos, sin\n")),
    *errors_in("shared/decoder/traced.py", "inputs_of_a_graph", "_AttentionInputs.backward",
         ("(dq, dk, dv, dresidual, x, norm, q_norm", "(dq, dk, dv, dresidual, 2 * x, norm, q_norm")),
    *errors_in("shared/decoder/traced.py", "mlp_of_a_graph", "_MLP.forward",
         ("tensors = attended, after, before, behind", "tensors = attended, after, 2 * before, behind")),
    *errors_in("shared/decoder/traced.py", "mlp_of_a_graph", "_MLP.backward", ("(dout, x, attended,", "(dout, x, 2 * attended,")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
NORM = '[1e-06, 0.0, "first"]'  # Qwen3's descriptions, as `encoded` writes them
INPUTS, OUTPUTS = f'[128, {NORM}, {NORM}, false, "halves", 0, null]', f'[{NORM}, {NORM}, {NORM}, "silu", 1.0]'


def _projection_tensors(new, shapes, dtype, of_weights, adapters) -> tuple:
    """(the tensors of each projection, what the backward pass finds made): of every second one with adapters, of all dtypes."""
    tensors, made, tokens, rows_of_a = [], [], 6, []
    for i, (rows, columns) in enumerate(shapes):
        weight = new(rows, columns, seed=20 + i, dtype=of_weights)
        if adapters and i % 2 == 0:
            kind = (torch.float32, dtype)[i % 4 // 2]
            a, b = new(4 + i, columns, seed=30 + i, dtype=kind), new(rows, 4 + i, seed=40 + i, dtype=kind)
            tensors += [weight, None, a, b, None if i else new(rows, seed=50, dtype=kind)]
            rows_of_a.append(a)
            made += [b.to(dtype)] if kind != dtype else []
        else:
            tensors += [weight, None, None, None, None]
    before = []
    if rows_of_a:
        rank = sum(a.shape[0] for a in rows_of_a)
        before.append(new(tokens, rank, seed=60))
        if len(rows_of_a) > 1 or rows_of_a[0].dtype != dtype:
            before.append(torch.cat([a.to(dtype) for a in rows_of_a]))
    if of_weights != dtype:
        before.append(torch.cat([weight.to(dtype) for weight in tensors[::5]]))
    return tensors, before + made


def _layers_of(new) -> dict:
    """Calls by operator: plain, with adapters beside frozen weights, and over fp32 as under autocast."""
    dtype = new.dtype
    forward, backward, mlp, mlp_backward = [], [], [], []
    for kind, adapters, frozen in ((dtype, False, False), (dtype, True, True), (torch.float32, True, False)):
        x, norm = new(6, 1024, dtype=kind), new(1024, seed=1, dtype=kind)
        heads, tables = ([new(*shape, 128, seed=2 + i, dtype=kind) for i in range(2)] for shape in ((), (1, 3)))
        inputs, of_inputs = _projection_tensors(new, [(512, 1024)] * 3, dtype, kind, adapters)
        grads = [new(2, 3, 4, 128, seed=70 + i).transpose(1, 2) for i in range(3)]
        rstd = new(6, dtype=torch.float32, seed=75).abs()
        forward.append((x, norm, *heads, *tables, INPUTS, [2, 3], dtype, inputs, [2.0, 1.0, 0.5]))
        needs = [tensor is not None and not (frozen and i % 5 == 0) for i, tensor in enumerate(inputs)]
        backward.append((*grads, new(6, 1024, seed=73, dtype=kind), x, norm, *heads, *tables, INPUTS, dtype, inputs,
                         [2.0, 1.0, 0.5], new(6, 1536, seed=74), [rstd, *of_inputs],
                         [True, not frozen, not frozen, True, False, False, *needs]))  # fmt: skip
        for attended in (None, new(6, 256, seed=76)):
            groups = [[(1024, 256)]] * (attended is not None) + [[(96, 1024)] * 2, [(1024, 96)]]
            found = [_projection_tensors(new, group, dtype, kind, adapters) for group in groups]
            tensors, made = ([tensor for pair in found for tensor in pair[i]] for i in range(2))
            scalings = [0.5] * (len(tensors) // 5)
            mlp.append((x.view(2, 3, 1024), attended, None, norm, None, OUTPUTS, dtype, tensors, scalings))
            stream, kept = (x.view(2, 3, 1024), [rstd]) if attended is None else (None, [x, rstd])
            needs = [tensor is not None and not (frozen and i % 5 == 0) for i, tensor in enumerate(tensors)]
            # Where gate and up are made again, of a norm so small that fp16 holds what follows of them.
            needs = [True, attended is not None, False, not frozen, False, *needs]
            for both, weight in ((new(6, 192, seed=78), norm), (None, norm / 64)):
                mlp_backward.append((new(2, 3, 1024, seed=77, dtype=kind), stream, attended, None, weight, None, OUTPUTS, dtype, tensors,
                                     scalings, both, [*kept, *made], needs))  # fmt: skip
    inputs = {"norm_attention_inputs": forward, "norm_attention_inputs_backward": backward}
    return {**inputs, "norm_mlp": mlp, "norm_mlp_backward": mlp_backward}


OPERATORS = {
    name: lambda new, name=name: _layers_of(new)[name]
    for name in ("norm_attention_inputs", "norm_attention_inputs_backward", "norm_mlp", "norm_mlp_backward")
}
