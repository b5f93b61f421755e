"""The node in front of a delta net and of attention with a gate: a norm and all projections of what it makes."""

import functools

import torch
from torch.nn.functional import linear

from tests.ops.common import BF16, CPU, FP32, alone, errors_in, exact, leaf, randn
from tests.ops.decoder_nodes import named, part_of
from tests.ops.projected_nodes import EIGHTS, NORMS, bias_of, norm_exact, norm_of, projected, projections_of, weight_of
from tests.ops.rms_norm import norm
from tests.ops.signature import Signature
from tests.tolerances import assert_close

ROWS = 1024, 512, 8, 8  # as a delta net's: q, k and v, z, and a number or two for each head


def plain_projections(ops):
    """`norm_projections` as a function of weights alone."""
    node, spec, projection = (part_of(ops, name) for name in ("norm_projections", "spec", "projection"))

    def call(x, norm_weight, weights):
        with named():
            return node.norm_projections(x, norm_weight, [projection.Projection(weight) for weight in weights], spec.Norm())

    return call


def check_norm_projections(ops, autocast=False, dropout=0.0, offset=0.0, frozen=False, residual=True, kind_of_norm="", **options):
    """autocast: x and weights in fp32 with products in bf16. frozen: only adapters need gradients. residual: whether the x that comes back
    is used. kind_of_norm: as of `norm_of`. options: of `projections_of`."""
    node, spec = (part_of(ops, name) for name in ("norm_projections", "spec"))
    kind = FP32 if autocast else BF16
    x, bias = leaf(randn(2, 3, 1024, dtype=kind, device=CPU)), bias_of(kind_of_norm, kind)
    weight = weight_of(kind_of_norm, kind) if kind_of_norm else leaf(randn(1024, dtype=kind, device=CPU, seed=1) + 1 - offset)
    projections, projections64 = projections_of(ops, [(rows, 1024) for rows in ROWS], autocast, dropout, **options)
    if frozen:
        for tensor in (weight, *(one.weight for one in projections)):
            tensor.requires_grad_(False)
    description = norm_of(ops, 0.5, kind_of_norm) if kind_of_norm else spec.Norm(0.5, offset, "last" if offset else "first")
    torch.manual_seed(3)
    *results, stream = node.norm_projections(x, weight, projections, description, BF16, bias)
    torch.rand(1)  # a random number that is not the operation's
    after = torch.get_rng_state()
    assert [result.shape for result in results] == [(2, 3, rows) for rows in ROWS] and {result.dtype for result in results} == {BF16}
    assert torch.equal(stream, x)
    used = [*results, stream] if residual else results
    grads = [randn(*result.shape, dtype=result.dtype, device=CPU, seed=9 + i) for i, result in enumerate(used)]
    torch.autograd.backward(used, grads)
    assert torch.equal(torch.get_rng_state(), after), "the backward pass left the generator elsewhere"
    x64, weight64, bias64 = (None if each is None else exact(each) for each in (x, weight, bias))
    torch.manual_seed(3)
    normed = norm_exact(x64, weight64 if kind_of_norm else weight64 + offset, bias64, 0.5, kind_of_norm)
    results64 = [*[projected(normed, projection) for projection in projections64], x64 * 1][: len(used)]
    torch.autograd.backward(results64, [grad.double() for grad in grads])
    for found, wanted in zip(used, results64, strict=True):
        assert_close(found, wanted, BF16, "projections of a norm", 2)
    parts, parts64 = ([part for one in each for part in one[:5]] for each in (projections, projections64))
    for found, wanted in zip((x, weight, bias, *parts), (x64, weight64, bias64, *parts64), strict=True):
        if found is not None and found.requires_grad:
            assert found.grad is not None and found.grad.dtype == found.dtype
            assert_close(found.grad, wanted.grad, BF16, "gradient of projections of a norm", 3)
        elif found is not None:
            assert found.grad is None


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "projections_replayed": check_norm_projections,
    "projections_offset_replayed": functools.partial(check_norm_projections, offset=1.0),
    "projections_plain_replayed": functools.partial(check_norm_projections, ranks=(0, 0, 0, 0)),
    "projections_autocast_replayed": functools.partial(check_norm_projections, autocast=True),
    "projections_dropout": functools.partial(check_norm_projections, dropout=0.25),
    "projections_eights_replayed": functools.partial(check_norm_projections, ranks=EIGHTS),
    "projections_biases_replayed": functools.partial(check_norm_projections, biases=True),
    "projections_frozen_replayed": functools.partial(check_norm_projections, frozen=True),
    "projections_without_residual": functools.partial(check_norm_projections, residual=False),
    **{f"projections of a norm, {kind}": functools.partial(check_norm_projections, kind_of_norm=kind) for kind in NORMS},
    "projections_alone": alone("norm_projections"),
}
PATH, NODE = "shared/decoder/norm_projections.py", "shared/decoder/node.py"
MUTANTS = [
    *errors_in(PATH, "projections_replayed", "_backward",
         ("flat, norm, saved.rstd", "flat, norm, 2 * saved.rstd"),
         ("dstream.reshape(flat.shape)", "torch.zeros_like(flat)"),
         ("grad.contiguous().view", "-grad.contiguous().view"),
         ("(*need.tensors), needs_in_parts", "(*need.tensors[::-1]), needs_in_parts", "projections_frozen_replayed")),
    *errors_in("shared/decoder/projections.py", "projections_replayed", "normed_input_backward",
         ("x, norm, rstd, need.norm", "x, norm, 2 * rstd, need.norm"),
         ("spec, x, norm, rstd, projections", "spec, x, norm, 2 * rstd, projections"),
         ("dx if need.x else None", "dx if need.norm else None", "projections_frozen_replayed")),
    *errors_in(PATH, "projections_offset_replayed", "_forward",
         ("norm_forward(layout.spec, x", "norm_forward(layout.spec._replace(offset=0.0), x"),
         ("Saved(rstd,", "Saved(2 * rstd,"),
         ("layout.dtype, bias)", "layout.dtype)", "projections of a norm, layer")),
    *errors_in(PATH, "projections of a norm, layer", "_backward", (", found.bias)", ", -found.bias)")),
    *errors_in(NODE, "projections_replayed", "_function",
         ("present[0].view_as(present[0])", "2 * present[0]"),
         ("(*form.kept(present), *found", "(*form.kept([2 * present[0], *present[1:]]), *found"),
         ("run(*grads, *form", "run(*[2 * grad for grad in grads], *form")),
    *errors_in(NODE, "projections_alone", "Form.needed", ("*map(bool, tensors)", "*map(bool, tensors[::-1])")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
def _formula(x, norm_weight, **weights):
    normed = norm(x, norm_weight)
    return (*[linear(normed, rows) for rows in weights.values()], x)


def _call(function, found, **options):
    weights = [tensor for name, tensor in found.items() if name.startswith("weights")]
    return function(found["x"], found["norm_weight"], weights, **options)


SIGNATURES = {
    "norm_projections": Signature(
        lambda s: {
            **{"x": (s.tokens, s.length), "norm_weight": (s.length,)},
            **{f"weights[{i}]": (rows, s.length) for i, rows in enumerate((s.inner, 8))},
        },
        _formula,
        call=_call,
        function=plain_projections,
        passes_on=True,
    ),
}  # fmt: skip
