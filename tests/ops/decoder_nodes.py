"""The decoder layer's two nodes: attention's inputs, and the MLP."""

import contextlib
import functools
import importlib

import torch
from torch.nn.functional import linear, silu

from tests.ops.common import BF16, CPU, FP32, alone, errors_in, exact, leaf, randn
from tests.ops.generated import generated
from tests.ops.rms_norm import norm, rms_norm_exact
from tests.ops.rotary import rotary_exact
from tests.ops.signature import TOKENS, Signature
from tests.tolerances import assert_close


def lay_side_by_side(ops, weights):
    neighbours = importlib.import_module(f"{ops.__name__}.shared.ops.neighbours")
    neighbours.lay_side_by_side(weights)
    assert neighbours.side_by_side(weights) is not None


def part_of(ops, name):
    """A module of the decoder layer of a loaded package."""
    return importlib.import_module(f"{ops.__name__}.shared.decoder.{name}")


@contextlib.contextmanager
def named(**names):
    """Errors under the names that the arguments have in a function of weights alone."""
    try:
        yield
    except ValueError as error:
        first, rest = str(error).split(" is ", 1)
        known = {name.replace("_", ".", 1): name for name in ("gate_weight", "up_weight", "down_weight", "o_weight")}
        known |= {f"projections[{i}].weight": f"weights[{i}]" for i in range(3)}
        raise ValueError(f"{(known | names).get(first, first)} is {rest}") from error


def plain_inputs(ops):
    """`norm_attention_inputs` as a function of weights alone, with Qwen3's description."""
    nodes, spec, projection = (part_of(ops, name) for name in ("nodes", "spec", "projection"))

    def call(x, norm_weight, weights, q_norm, k_norm, cos, sin, shape, rows=None):
        projections = [projection.Projection(weight) for weight in weights]
        description = spec.Inputs(q_norm.shape[-1] if q_norm.dim() else 1, rows=rows)
        with named():
            return nodes.norm_attention_inputs(x, norm_weight, projections, q_norm, k_norm, cos, sin, shape, description)

    return call


def plain_mlp(ops):
    """`norm_mlp` as a function of weights alone, with Qwen3's description."""
    nodes, spec, projection = (part_of(ops, name) for name in ("nodes", "spec", "projection"))

    def call(x, norm_weight, gate_weight, up_weight, down_weight, attended=None, o_weight=None, recompute=False):
        weights = [*([] if o_weight is None else [o_weight]), gate_weight, up_weight, down_weight]
        projections = [projection.Projection(weight) for weight in weights]
        with named(before="norm_weight"):
            return nodes.norm_mlp(x, norm_weight, projections, spec.Outputs(), attended, recompute=recompute)

    return call


def gradient_like(result, seed, as_attention):
    """Random numbers of a result's shape. as_attention: where it has heads, in memory as attention's backward pass leaves them, which
    kernels take without a copy."""
    if not as_attention or result.dim() != 4:
        return randn(*result.shape, dtype=result.dtype, device=CPU, seed=seed)
    return randn(*result.transpose(1, 2).shape, dtype=result.dtype, device=CPU, seed=seed).transpose(1, 2)


def check_norm_attention_inputs(ops, packed=False, as_attention=False, rows=None, normed=True):
    """packed: the weights lie side by side. rows: of q, k and v, where one projection makes them. normed: whether a norm comes first."""
    shape = (1, 6) if as_attention else (2, 3)
    lead = shape if as_attention else (6,)
    x, norm = leaf(randn(*lead, 1024, dtype=BF16, device=CPU)), leaf(randn(1024, dtype=BF16, device=CPU, seed=1) + 1) if normed else None
    weights = [leaf(randn(n * 128, 1024, dtype=BF16, device=CPU, seed=2 + i, scale=1 / 32)) for i, n in enumerate((8, 4, 4))]
    if packed:
        lay_side_by_side(ops, weights)
    weights = weights if rows is None else [leaf(torch.cat(weights).detach())]
    norms = [leaf(randn(128, dtype=BF16, device=CPU, seed=5 + i) + 1) for i in range(2)]
    angles = randn(1, shape[1], 128, dtype=FP32, device=CPU, seed=7)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    results = plain_inputs(ops)(x, norm, weights, *norms, cos, sin, shape, rows)
    grads = [gradient_like(r, 9 + i, as_attention) for i, r in enumerate(results)]
    torch.autograd.backward(results, grads)
    x64, norm64, weights64, norms64 = exact(x), exact(norm) if normed else None, [exact(w) for w in weights], [exact(n) for n in norms]
    y64 = rms_norm_exact(x64, norm64, 1e-6) if normed else x64
    q64, k64, v64 = ((y64 @ w.t()).view(*shape, -1, 128) for w in (weights64 if rows is None else weights64[0].split(rows)))
    heads = [rms_norm_exact(t, w, 1e-6).transpose(1, 2) for t, w in zip((q64, k64), norms64, strict=True)]
    results64 = [*rotary_exact(*heads, cos.double(), sin.double(), 1), v64.transpose(1, 2), x64 * 1]
    torch.autograd.backward(results64, [g.double() for g in grads])
    for found, wanted in zip(results, results64, strict=True):
        assert_close(found, wanted, BF16, "attention's inputs", 2)
    leaves, leaves64 = (x, *[norm] * normed, *weights, *norms), (x64, *[norm64] * normed, *weights64, *norms64)
    for found, wanted in zip(leaves, leaves64, strict=True):
        assert_close(found.grad, wanted.grad, BF16, "gradient of attention's inputs", 2)


def check_norm_mlp(ops, packed=False, attended=False, inner=48, recompute=False, heads=False):
    """heads: attention's output comes with its heads."""
    x, norm = leaf(randn(*(1,) * heads, 3, 1024, dtype=BF16, device=CPU)), leaf(randn(1024, dtype=BF16, device=CPU, seed=1) + 1)
    shapes = (inner, 1024), (inner, 1024), (1024, inner)
    weights = [leaf(randn(*s, dtype=BF16, device=CPU, seed=2 + i, scale=s[1] ** -0.5)) for i, s in enumerate(shapes)]
    if packed:
        lay_side_by_side(ops, weights[:2])
    before = [leaf(randn(3, 64, dtype=BF16, device=CPU, seed=7)), leaf(randn(1024, 64, dtype=BF16, device=CPU, seed=8, scale=1 / 8))]
    before = [leaf(before[0].detach().view(1, 3, 4, 16)) if heads else before[0], before[1]] if attended else []
    y = plain_mlp(ops)(x, norm, *weights, *before, recompute=recompute)
    dy = randn(*y.shape, dtype=BF16, device=CPU, seed=9)
    y.backward(dy)
    x64, norm64, weights64, before64 = exact(x), exact(norm), [exact(w) for w in weights], [exact(t) for t in before]
    total = x64 + before64[0].reshape(*x.shape[:-1], 64) @ before64[1].t() if attended else x64
    normed = rms_norm_exact(total, norm64, 1e-6)
    gate, up = normed @ weights64[0].t(), normed @ weights64[1].t()
    y64 = total + (torch.nn.functional.silu(gate) * up) @ weights64[2].t()
    y64.backward(dy.double())
    assert_close(y, y64, BF16, "norm and MLP", 2)
    for found, wanted in zip((x, norm, *weights, *before), (x64, norm64, *weights64, *before64), strict=True):
        assert_close(found.grad, wanted.grad, BF16, "gradient of norm and MLP", 2)


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "attention_inputs": check_norm_attention_inputs,
    "attention_inputs_packed": functools.partial(check_norm_attention_inputs, packed=True),
    "attention_inputs_replayed": functools.partial(check_norm_attention_inputs, as_attention=True),
    "attention_inputs_packed_replayed": functools.partial(check_norm_attention_inputs, packed=True, as_attention=True),
    "attention_inputs_of_one": functools.partial(check_norm_attention_inputs, rows=(1024, 512, 512)),
    "attention_inputs_without_norm": functools.partial(check_norm_attention_inputs, normed=False),
    "norm_mlp": check_norm_mlp,
    "norm_mlp_attended": functools.partial(check_norm_mlp, attended=True),
    "norm_mlp_again": functools.partial(check_norm_mlp, attended=True, recompute=True),
    "norm_mlp_heads": functools.partial(check_norm_mlp, attended=True, heads=True),
    "attention_inputs_alone": alone("norm_attention_inputs"),
    "norm_mlp_alone": alone("norm_mlp"),
}
MUTANTS = [
    *generated("shared/decoder/steps.py", "norm_mlp_heads or norm_mlp_attended", "flat_heads"),
    *generated("shared/decoder/steps.py", "attention_inputs or attention_inputs_of_one", "inputs_backward"),
    *generated("shared/decoder/projections.py", "attention_inputs or attention_inputs_without_norm", "normed_input_backward"),
    *errors_in("kernel_src/rms_norm.py", "norm_mlp", "rms_norm_apply", ("read(x, (row, cols)) * r", "read(x, (row, cols))")),
    *errors_in("shared/decoder/node.py", "attention_inputs_packed", "_function",
         ("form.whole_of(kept) if", "-form.whole_of(kept) if")),
    *errors_in("shared/decoder/steps.py", "attention_inputs_alone", "inputs_backward",
         ("(need.q_norm, need.k_norm)", "(need.k_norm, need.q_norm)"),
         ("(need.x, need.norm,", "(need.x, need.x,")),
    *errors_in("shared/decoder/projections.py", "attention_inputs_alone", "normed_input_backward",
         ("if need.x or need.norm or need.bias:", "if need.x:")),
    *errors_in("shared/decoder/steps.py", "norm_mlp_heads", "flat_heads", ("flatten(0, 1).flatten(1)", "flatten(0, 1).flip(1).flatten(1)")),
    *errors_in("shared/decoder/steps.py", "norm_mlp_alone", "need_join",
         ("need.x or need.attended or need.after or need.before or need.before_bias or needs_any(need_o)", "need.x")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
def _plain_inputs(x, norm_weight, q_norm, k_norm, cos, sin, **weights):
    n, width = norm(x, norm_weight), q_norm.shape[0]
    q, k, v = (linear(n, rows).view(1, x.shape[:-1].numel(), rows.shape[0] // width, width) for rows in weights.values())
    heads = [norm(t, w).transpose(1, 2) for t, w in ((q, q_norm), (k, k_norm))]
    return (*rotary_exact(*heads, cos, sin, 1), v.transpose(1, 2), x)


def _call_inputs(function, found, **options):
    weights = [tensor for name, tensor in found.items() if name.startswith("weights")]
    rest = [found[name] for name in ("q_norm", "k_norm", "cos", "sin")]
    shape = 1, found["cos"].shape[1] if found["cos"].dim() == 3 else TOKENS
    return function(found["x"], found["norm_weight"], weights, *rest, shape, **options)


def _plain_mlp(x, norm_weight, gate_weight, up_weight, down_weight):
    n = norm(x, norm_weight)
    return x + linear(silu(linear(n, gate_weight)) * linear(n, up_weight), down_weight)


SIGNATURES = {
    "norm_attention_inputs": Signature(
        lambda s: {
            **{"x": (s.tokens, s.length), "norm_weight": (s.length,)},
            **{f"weights[{i}]": (s.heads[min(i, 1)] * s.width, s.length) for i in range(3)},
            **{"q_norm": (s.width,), "k_norm": (s.width,), "cos": (1, s.tokens, s.table), "sin": (1, s.tokens, s.table)},
        },
        _plain_inputs,
        constant=("cos", "sin"),
        sizes={"heads": (4, 4)},
        call=_call_inputs,
        function=plain_inputs,
        passes_on=True,
    ),
    "norm_mlp": Signature(
        lambda s: {"x": (*s.rows, s.length), "norm_weight": (s.length,), "gate_weight": (s.inner, s.length),
                   "up_weight": (s.inner, s.length), "down_weight": (s.length, s.inner)},
        _plain_mlp,
        function=plain_mlp,
    ),
}  # fmt: skip
