"""The decoder layer's two nodes for projections with adapters, and with products in another dtype than the residual stream's."""

import functools
import importlib

import torch

from tests.ops.common import BF16, CPU, FP32, errors_in, exact, leaf, randn
from tests.ops.decoder_nodes import gradient_like, lay_side_by_side
from tests.ops.rms_norm import rms_norm_exact
from tests.ops.rotary import rotary_exact
from tests.tolerances import assert_close


def projections_of(ops, shapes, autocast, dropout, seed=2, ranks=(0, 5, 3, 4)):
    """Projections with adapters of several ranks, scalings and dtypes, one with a bias and one without an adapter; and the same in
    float64."""
    projection = importlib.import_module(f"{ops.__name__}.shared.ops.projection").Projection
    found, wanted = [], []
    for i, (rows, columns) in enumerate(shapes):
        rank, dtype = ranks[(i + 1) % 4], FP32 if i % 2 else BF16
        parts = [leaf(randn(rows, columns, dtype=FP32 if autocast else BF16, device=CPU, seed=seed + i, scale=columns**-0.5))]
        if rank:
            parts.append(leaf(randn(rank, columns, dtype=dtype, device=CPU, seed=20 + i, scale=columns**-0.5)))
            parts.append(leaf(randn(rows, rank, dtype=dtype, device=CPU, seed=30 + i, scale=rank**-0.5 / 4)))
        parts += [leaf(randn(rows, dtype=FP32, device=CPU, seed=40 + i))] if i == 1 and rank else [None] * (4 - len(parts))
        parts += [None] * (4 - len(parts))
        numbers = (1.5 + i / 2, dropout if i != 1 else 0.0)
        found.append(projection(*parts, *numbers))
        wanted.append(projection(*(None if part is None else exact(part) for part in parts), *numbers))
    return found, wanted


EIGHTS = (0, 40, 24, 8)  # ranks whose gradients a kernel makes


def projected(x, projection):
    """In float64; the mask is the one that the generator draws now."""
    y = x @ projection.weight.t()
    if projection.a is None:
        return y
    kept = torch.nn.functional.dropout(torch.ones_like(x), projection.dropout) if projection.dropout else 1.0
    low = (x * kept) @ projection.a.t() @ projection.b.t()
    return y + projection.scaling * (low if projection.bias is None else low + projection.bias)


def _assert_gradients(found, wanted, what):
    for mine, exact_one in zip(found, wanted, strict=True):
        if exact_one is not None:
            assert mine.grad.dtype == mine.dtype
            assert_close(mine.grad, exact_one.grad, BF16, what, 3)  # a, b, the narrow product and what it is added to are rounded


def _leaves(projections):
    return [part for projection in projections for part in projection[:4]]


def check_projected_attention_inputs(ops, autocast=False, packed=False, dropout=0.0, as_attention=False, **ranks):
    """ranks: of `projections_of`. as_attention: as of `gradient_like`. autocast: x, norms and weights in fp32 with products in bf16, as
    under autocast."""
    nodes = importlib.import_module(f"{ops.__name__}.shared.ops.projected_nodes")
    shape, kind = (1, 6) if as_attention else (2, 3), FP32 if autocast else BF16
    x, norm = leaf(randn(6, 1024, dtype=kind, device=CPU)), leaf(randn(1024, dtype=kind, device=CPU, seed=1) + 1)
    projections, projections64 = projections_of(ops, [(n * 128, 1024) for n in (8, 4, 4)], autocast, dropout, **ranks)
    if packed:
        lay_side_by_side(ops, [projection.weight for projection in projections])
    norms = [leaf(randn(128, dtype=kind, device=CPU, seed=5 + i) + 1) for i in range(2)]
    angles = randn(1, shape[1], 128, dtype=FP32, device=CPU, seed=7)
    cos, sin = angles.cos().to(kind), angles.sin().to(kind)
    torch.manual_seed(3)
    results = nodes.projected_attention_inputs(x, norm, projections, *norms, cos, sin, shape, 0.5, 0.25, BF16)
    torch.rand(1)  # someone else's number
    after = torch.get_rng_state()
    grads = [gradient_like(r, 9 + i, as_attention) for i, r in enumerate(results)]
    torch.autograd.backward(results, grads)
    assert torch.equal(torch.get_rng_state(), after), "the backward pass left the generator elsewhere"
    x64, norm64, norms64 = exact(x), exact(norm), [exact(n) for n in norms]
    normed = rms_norm_exact(x64, norm64, 0.5)
    torch.manual_seed(3)
    q64, k64, v64 = (projected(normed, projection).view(*shape, -1, 128) for projection in projections64)
    heads = [rms_norm_exact(t, w, 0.25).transpose(1, 2) for t, w in zip((q64, k64), norms64, strict=True)]
    results64 = [*rotary_exact(*heads, cos.double(), sin.double(), 1), v64.transpose(1, 2), x64 * 1]
    torch.autograd.backward(results64, [g.double() for g in grads])
    for found, wanted in zip(results, results64, strict=True):
        assert_close(found, wanted, BF16, "projected attention's inputs", 2)
    assert [r.dtype for r in results] == [BF16, BF16, BF16, kind]
    _assert_gradients((x, norm, *norms), (x64, norm64, *norms64), "gradient of projected attention's inputs")
    _assert_gradients(_leaves(projections), _leaves(projections64), "gradient of a projection")


def check_projected_mlp(ops, autocast=False, packed=False, attended=False, dropout=0.0, inner=48, frozen=False, recompute=False):
    """frozen: only the adapters of the projection to `down` need gradients."""
    nodes = importlib.import_module(f"{ops.__name__}.shared.ops.projected_nodes")
    kind = FP32 if autocast else BF16
    x, norm = leaf(randn(3, 1024, dtype=kind, device=CPU)), leaf(randn(1024, dtype=kind, device=CPU, seed=1) + 1)
    shapes = [(1024, 64)] * attended + [(inner, 1024), (inner, 1024), (1024, inner)]
    projections, projections64 = projections_of(ops, shapes, autocast, dropout, 2 + (not attended))
    if packed:
        lay_side_by_side(ops, [projection.weight for projection in projections[-3:-1]])
    before = leaf(randn(3, 64, dtype=BF16, device=CPU, seed=7)) if attended else None
    if frozen:
        for tensor in (x, norm, before, *_leaves(projections)[:-3]):
            if tensor is not None:
                tensor.requires_grad_(False)
    torch.manual_seed(3)
    y = nodes.projected_mlp(x, norm, projections, 0.5, before, BF16, recompute)
    dy = randn(*y.shape, dtype=y.dtype, device=CPU, seed=9)
    y.backward(dy)
    x64, norm64, before64 = exact(x), exact(norm), exact(before) if attended else None
    torch.manual_seed(3)
    total = x64 + projected(before64, projections64[0]) if attended else x64
    normed = rms_norm_exact(total, norm64, 0.5)
    gate, up = (projected(normed, projection) for projection in projections64[-3:-1])
    y64 = total + projected(torch.nn.functional.silu(gate) * up, projections64[-1])
    y64.backward(dy.double())
    assert y.dtype == kind
    assert_close(y, y64, BF16, "norm and projected MLP", 2)
    found, wanted = (x, norm, before, *_leaves(projections)), (x64, norm64, before64, *_leaves(projections64))
    pairs = [(mine, other) for mine, other in zip(found, wanted, strict=True) if mine is not None and mine.requires_grad]
    _assert_gradients(*zip(*pairs, strict=True), "gradient of norm and projected MLP")


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "projected_inputs": check_projected_attention_inputs,
    "projected_inputs_packed": functools.partial(check_projected_attention_inputs, packed=True),
    "projected_inputs_autocast": functools.partial(check_projected_attention_inputs, autocast=True),
    "projected_inputs_autocast_packed": functools.partial(check_projected_attention_inputs, autocast=True, packed=True),
    "projected_inputs_dropout": functools.partial(check_projected_attention_inputs, dropout=0.25),
    "projected_inputs_packed_dropout": functools.partial(check_projected_attention_inputs, packed=True, dropout=0.25),
    "projected_inputs_autocast_dropout": functools.partial(check_projected_attention_inputs, autocast=True, dropout=0.25),
    "projected_inputs_replayed": functools.partial(check_projected_attention_inputs, as_attention=True),
    "projected_inputs_packed_replayed": functools.partial(check_projected_attention_inputs, packed=True, as_attention=True),
    "projected_inputs_autocast_replayed": functools.partial(check_projected_attention_inputs, autocast=True, as_attention=True),
    "projected_inputs_eights": functools.partial(check_projected_attention_inputs, ranks=EIGHTS),
    "projected_inputs_eights_packed": functools.partial(check_projected_attention_inputs, packed=True, ranks=EIGHTS),
    "projected_inputs_eights_dropout": functools.partial(check_projected_attention_inputs, dropout=0.25, ranks=EIGHTS),
    "projected_mlp": check_projected_mlp,
    "projected_mlp_attended": functools.partial(check_projected_mlp, attended=True),
    "projected_mlp_packed": functools.partial(check_projected_mlp, attended=True, packed=True, inner=512),
    "projected_mlp_autocast": functools.partial(check_projected_mlp, attended=True, autocast=True),
    "projected_mlp_autocast_packed": functools.partial(check_projected_mlp, autocast=True, packed=True, inner=512),
    "projected_mlp_dropout": functools.partial(check_projected_mlp, attended=True, dropout=0.25),
    "projected_mlp_again": functools.partial(check_projected_mlp, attended=True, recompute=True),
    "projected_mlp_packed_again": functools.partial(check_projected_mlp, packed=True, inner=512, recompute=True),
    "projected_mlp_autocast_again": functools.partial(check_projected_mlp, attended=True, autocast=True, recompute=True),
    "projected_mlp_dropout_again": functools.partial(check_projected_mlp, attended=True, dropout=0.25, recompute=True),
    "projected_mlp_frozen": functools.partial(check_projected_mlp, frozen=True),
}
MUTANTS = [
    *errors_in("shared/ops/projection.py", "projected_inputs", "_rounded_adapters",
         ("copies.add([b for", "copies.add([2 * b for")),
    *errors_in("shared/ops/projection.py", "projected_inputs", "Projections.__init__",
         ("else self.whole.to(dtype)", "else 2 * self.whole.to(dtype)", "projected_inputs_autocast_packed"),
         ("_rows_in_one(weights, dtype) if", "2 * _rows_in_one(weights, dtype) if", "projected_inputs_autocast")),
    *errors_in("shared/ops/projection.py", "projected_inputs", "Projections._with_adapters",
         ("self.low[:, span], b, transposed=True)", "-self.low[:, span], b, transposed=True)"),
         (", alpha=self.scalings[i])", ")"),
         ("if biases[i] is not None", "if False")),
    *errors_in("shared/ops/projection.py", "projected_inputs", "Projections._products",
         ("linear(x, self.whole) if", "linear(-x, self.whole) if", "projected_inputs_packed"),
         ("torch.addmm(onto, x, self._weight(0).t(), out=out)", "torch.mm(x, self._weight(0).t(), out=out)", "projected_mlp")),
    *errors_in("shared/ops/projection.py", "projected_inputs", "Projections._low",
         ("self.a[span].t(), beta=0, alpha=self.scalings[i]", "self.a[span].t(), beta=0"),
         ("self.states[i] = _generator(x.device).get_state()\n                dropped = dropout(x, self.dropouts[i])",
          "dropped = dropout(x, self.dropouts[i])\n                self.states[i] = _generator(x.device).get_state()",
          "projected_inputs_dropout"),
         ("beta=0, alpha=scalings.pop()", "beta=0", "projected_mlp_attended")),
    *errors_in("shared/ops/projection.py", "projected_inputs_dropout", "Projections.saved",
         ("[self.a, self.low, *self.weights, *self.b]", "[self.a, 2 * self.low, *self.weights, *self.b]"),
         ("[self.a, self.low, *self.weights, *self.b]", "[self.a, self.low, *self.weights, *[-b for b in self.b]]"),
         ("[self.a, self.low, self.whole, *self.b]", "[self.a, self.low, 2 * self.whole, *self.b]", "projected_inputs_autocast_dropout")),
    *errors_in("shared/ops/projection.py", "projected_inputs", "Projections.loaded",
         ("list(new.whole.split(self.rows))", "list((2 * new.whole).split(self.rows))", "projected_mlp_autocast"),
         ("_whole_of(new.weights)", "-_whole_of(new.weights)", "projected_inputs_packed_dropout"),
         ("new.a, new.low = tensors[:2]", "new.a, new.low = tensors[0], -tensors[1]")),
    *errors_in("shared/ops/projection.py", "projected_inputs", "Projections.low_gradient",
         ("beta=0, alpha=self.scalings[i]", "beta=0"),
         ("grads[i], b, beta", "-grads[i], b, beta")),
    *errors_in("shared/ops/projection.py", "projected_inputs", "Projections.input_gradient",
         ("dx.addmm_(grads[i], self._weight(i))", "pass"),
         ("low_rank_add(dx, dlow, self.a)", "pass"),
         ("torch.mm(together, self.whole)", "torch.mm(together, -self.whole)", "projected_inputs_packed"),
         ("dx += _dropped_again(torch.mm(dlow[:, span], self.a[span]), self.dropouts[i], self.states[i])",
          "dx += torch.mm(dlow[:, span], self.a[span])", "projected_inputs_dropout"),
         ("dx.addmm_(dlow[:, span], self.a[span])", "pass", "projected_inputs_dropout")),
    *errors_in("shared/ops/projection.py", "projected_inputs", "Projections.gradients",
         ("_product(grad.t(), y, self.dtypes[i])", "_product(-grad.t(), y, self.dtypes[i])"),
         ("_product(grad.t(), self.low[:, span], b_dtype)", "_product(-grad.t(), self.low[:, span], b_dtype)"),
         ("found[at + 1 : at + 3] = both", "found[at + 1 : at + 3] = [-part for part in both]", "projected_inputs_eights_packed"),
         (" and not self.dropouts[i]:", ":", "projected_inputs_eights_dropout"),
         (" * self.scalings[i]).to(bias_dtype)", ").to(bias_dtype)"),
         ("_product(dlow[:, self.spans[i]].t(), dropped", "_product(dlow[:, self.spans[i]].t(), 2 * dropped"),
         ("if self.dropouts[i] else y", "if False else y", "projected_inputs_dropout")),
    *errors_in("shared/ops/projection.py", "projected_inputs_dropout", "_dropped_again",
         ("generator.set_state(state)", "pass"),
         ("generator.set_state(now)", "pass")),
    *errors_in("shared/ops/projected_nodes.py", "projected_inputs", "_ProjectedAttentionInputs.forward",
         ("(x, norm_weight, rstd, q, k, q_norm, k_norm, cos, sin, *saved",
          "(2 * x, norm_weight, rstd, q, k, q_norm, k_norm, cos, sin, *saved"),
         ("rstd, q, k, q_norm, k_norm, cos, sin, *saved", "rstd, q, k, k_norm, q_norm, cos, sin, *saved"),
         ("rstd, q, k, q_norm, k_norm, cos, sin, *saved", "rstd, 2 + q, k, q_norm, k_norm, cos, sin, *saved"),
         ("v, saved = v.transpose(1, 2), group.saved()", "v, saved = 2 * v.transpose(1, 2), group.saved()", "projected_inputs_dropout"),
         ("layout.whole_of(tensors), *tensors", "-layout.whole_of(tensors), *tensors", "projected_inputs_packed")),
    *errors_in("shared/ops/projected_nodes.py", "projected_inputs_packed", "_attention_inputs_gradients",
         ("layout.loaded(tensors, whole)", "layout.loaded(tensors, -whole)")),
    *errors_in("shared/ops/projected_nodes.py", "projected_mlp_packed", "_mlp",
         ("whole if layout is inner else None", "-whole if layout is inner else None")),
    *errors_in("shared/ops/projected_nodes.py", "projected_mlp_packed", "_mlp_gradients",
         ("whole if layout is inner else None", "-whole if layout is inner else None")),
    *errors_in("shared/ops/projection.py", "projected_inputs", "Projections.made",
         ("[self.low] if", "[2 * self.low] if"),
         ("[b for b, adapter", "[2 * b for b, adapter")),
    *errors_in("shared/ops/projection.py", "projected_inputs", "Layout.saved_of",
         ("made[1] if self.makes_rows", "2 * made[1] if self.makes_rows"),
         ("            found.append(b)", "            found.append(-b)"),
         ("found += tensors[::OF_ONE]", "found += [-w for w in tensors[::OF_ONE]]"),
         ("found.append(made[at])", "found.append(-made[at])", "projected_inputs_autocast")),
    *errors_in("shared/ops/projection.py", "projected_inputs_packed", "Layout.whole_of_saved",
         ("side_by_side(tensors[2 :", "-side_by_side(tensors[2 :")),
    *errors_in("shared/ops/projected_steps.py", "projected_inputs", "attention_inputs_forward",
         ("rms_norm_forward(x, norm_weight, eps, group.dtype)", "rms_norm_forward(x, norm_weight, 2 * eps, group.dtype)",
          "projected_inputs_autocast")),
    *errors_in("shared/ops/projected_steps.py", "projected_inputs", "attention_inputs_backward",
         ("add_rms_norm_backward(dy, dresidual", "add_rms_norm_backward(dy, torch.zeros_like(dresidual)"),
         ("rms_norm_recompute(x, norm_weight, rstd, group.dtype)", "x"),
         ("(dx, dnorm, dq_norm, dk_norm, *", "(dx, dnorm, dk_norm, dq_norm, *"),
         ("dv_place.copy_(dv)", "dv_place.zero_()", "projected_inputs_packed")),
    *errors_in("shared/ops/projected_nodes.py", "projected_mlp", "_ProjectedMLP.forward",
         ("save_for_backward(total, attended, norm_weight, rstd", "save_for_backward(total, attended, norm_weight, 2 * rstd"),
         ("rstd, gate, up, *biases", "rstd, up, gate, *biases"),
         ("total, rstd, gate, up, *made = _mlp", "total, rstd, up, gate, *made = _mlp"),
         ("gate, up = mlp_forward(", "up, gate = mlp_forward(", "projected_mlp_dropout"),
         ("save_for_backward(total, attended", "save_for_backward(total, 2 * attended", "projected_mlp_attended"),
         ("tensors[-2 * OF_ONE - 1], tensors[-OF_ONE - 1]", "tensors[-OF_ONE - 1], tensors[-2 * OF_ONE - 1]", "projected_mlp_again")),
    *errors_in("shared/ops/projected_steps.py", "projected_mlp", "mlp_forward",
         ("torch.add(x, down", "torch.add(0 * x, down", "projected_mlp_autocast"),
         ("(before[0].forward(attended, o_bias)[0], x,", "(before[0].forward(attended, o_bias)[0], 0 * x,", "projected_mlp_attended")),
    *errors_in("shared/ops/projected_steps.py", "projected_mlp", "mlp_backward",
         ("add_rms_norm_backward(dy, dout", "add_rms_norm_backward(dy, torch.zeros_like(dout)"),
         ("before[0].input_gradient(grads, dlow) if", "before[0].input_gradient(grads, None) if", "projected_mlp_attended"),
         ("before[0].gradients(grads, dlow, always(attended), o_needs)",
          "before[0].gradients((dout.to(dtype),), dlow, always(attended), o_needs)",
          "projected_mlp_attended"),
         ("hidden = swiglu_forward(gate, up)", "hidden = swiglu_forward(up, gate)", "projected_mlp_frozen"),
         ("gate, up = inner.again(", "up, gate = inner.again(", "projected_mlp_again"),
         ("inner.again(normed(), biases", "inner.again(normed(), (None, None)", "projected_mlp_again"),
         ("normed = always(normed())", "normed = always(x.to(inner.dtype))", "projected_mlp_again")),
    *errors_in("shared/ops/projection.py", "projected_mlp_again", "Projections.again",
         ("self._with_adapters(self._products(x, in_one, None, out), biases)", "self._products(x, in_one, None, out)")),
    *errors_in("shared/ops/projected_nodes.py", "projected_inputs", "_ProjectedAttentionInputs.backward",
         ("(dx, dnorm, None, dq_norm, dk_norm,", "(dx, dnorm, None, dk_norm, dq_norm,")),
    *errors_in("shared/ops/projected_nodes.py", "projected_mlp_attended", "_ProjectedMLP.backward",
         ("dx.view(ctx.shape), dattended, dnorm", "dx.view(ctx.shape), -dattended, dnorm")),
]  # fmt: skip
