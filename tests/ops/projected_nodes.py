"""The decoder layer's two nodes for projections with adapters, and with products in another dtype than the residual stream's."""

import functools
import importlib

import torch

from tests.ops.common import BF16, CPU, FP32, errors_in, exact, leaf, randn
from tests.ops.decoder_nodes import gradient_like, lay_side_by_side, part_of
from tests.ops.generated import generated
from tests.ops.layer_norm import layer_norm_exact
from tests.ops.rms_norm import rms_norm_exact
from tests.ops.rotary import rotary_exact
from tests.tolerances import assert_close


def projections_of(ops, shapes, autocast, dropout, seed=2, ranks=(0, 5, 3, 4), biases=False):
    """Projections with adapters of several ranks, scalings and dtypes, one with a bias of its adapter and one without an adapter; and the
    same in float64. biases: whether the layers have biases of their own."""
    projection = importlib.import_module(f"{ops.__name__}.shared.decoder.projection").Projection
    found, wanted = [], []
    for i, (rows, columns) in enumerate(shapes):
        rank, dtype = ranks[(i + 1) % 4], FP32 if i % 2 else BF16
        parts = [leaf(randn(rows, columns, dtype=FP32 if autocast else BF16, device=CPU, seed=seed + i, scale=columns**-0.5))]
        if rank:
            parts.append(leaf(randn(rank, columns, dtype=dtype, device=CPU, seed=20 + i, scale=columns**-0.5)))
            parts.append(leaf(randn(rows, rank, dtype=dtype, device=CPU, seed=30 + i, scale=rank**-0.5 / 4)))
        parts += [leaf(randn(rows, dtype=FP32, device=CPU, seed=40 + i))] if i == 1 and rank else [None] * (4 - len(parts))
        parts += [None] * (4 - len(parts))
        parts.insert(1, leaf(randn(rows, dtype=dtype, device=CPU, seed=50 + i)) if biases else None)
        numbers = (1.5 + i / 2, dropout if i != 1 else 0.0)
        found.append(projection(*parts, *numbers))
        wanted.append(projection(*(None if part is None else exact(part) for part in parts), *numbers))
    return found, wanted


# Kinds of a LayerNorm: what is added to its weight, None for one without.
NORMS = {"layer": 0.0, "layer, 1 + weight": 1.0, "layer, no bias": 0.0, "layer, no parameters": None}


def norm_of(ops, eps, kind=""):
    """The description of a norm, an RMSNorm or one of `NORMS`."""
    spec = part_of(ops, "spec")
    added = NORMS.get(kind, 0.0)
    return spec.Norm(eps, added or 0.0, centred=bool(kind), weighted=added is not None)


def norm_exact(x, weight, bias, eps, kind):
    return layer_norm_exact(x, None if weight is None else weight + NORMS[kind], bias, eps) if kind else rms_norm_exact(x, weight, eps)


def weight_of(kind, dtype):
    """The weight of a norm of 1024, None for one without."""
    return None if NORMS.get(kind, 0.0) is None else leaf(randn(1024, dtype=dtype, device=CPU, seed=1) + 1)


def bias_of(kind, dtype):
    """The bias of a norm of 1024, None for one without."""
    return leaf(randn(1024, dtype=dtype, device=CPU, seed=60)) if kind in ("layer", "layer, 1 + weight") else None


def inputs(ops, eps, head_eps, turned_first=False, norm=""):
    """Qwen3's description of what stands in front of attention. norm: as of `norm_of`."""
    spec = part_of(ops, "spec")
    return spec.Inputs(128, norm_of(ops, eps, norm), spec.Norm(head_eps), turned_first=turned_first)


def outputs(ops, eps, alone="", norm=""):
    """Qwen3's description of what follows attention. alone: the activation of an MLP without a gate; norm: as of `norm_of`."""
    spec = part_of(ops, "spec")
    found = spec.Outputs(before=norm_of(ops, eps, norm))
    return found._replace(activation=alone, gated=False) if alone else found


ALONE = {
    "relu2": lambda a: a.clamp_min(0) ** 2, "silu": lambda a: a * a.sigmoid(), "gelu": lambda a: a * torch.special.ndtr(a),
    "gelu_tanh": lambda a: a * torch.sigmoid((8 / torch.pi) ** 0.5 * (a + 0.044715 * a**3)),
}  # fmt: skip
EIGHTS = (0, 40, 24, 8)  # ranks whose gradients a kernel makes


def projected(x, projection):
    """In float64; the mask is the one that the generator draws now."""
    y = x @ projection.weight.t()
    y = y if projection.bias is None else y + projection.bias
    if projection.a is None:
        return y
    kept = torch.nn.functional.dropout(torch.ones_like(x), projection.dropout) if projection.dropout else 1.0
    low = (x * kept) @ projection.a.t() @ projection.b.t()
    return y + projection.scaling * (low if projection.adapter_bias is None else low + projection.adapter_bias)


def _assert_gradients(found, wanted, what):
    for mine, exact_one in zip(found, wanted, strict=True):
        if mine is not None and exact_one is not None:
            assert mine.grad.dtype == mine.dtype
            assert_close(mine.grad, exact_one.grad, BF16, what, 3)  # a, b, the narrow product and what it is added to are rounded


def _leaves(projections):
    return [part for projection in projections for part in projection[:5]]


def check_projected_attention_inputs(ops, autocast=False, packed=False, dropout=0.0, as_attention=False, turned_first=False,
                                     kind_of_norm="", **ranks):
    """ranks: of `projections_of`. as_attention: as of `gradient_like`. autocast: x, norms and weights in fp32 with products in bf16, as
    under autocast. kind_of_norm: as of `norm_of`."""
    nodes = importlib.import_module(f"{ops.__name__}.shared.decoder.nodes")
    shape, kind = (1, 6) if as_attention else (2, 3), FP32 if autocast else BF16
    x, norm = leaf(randn(6, 1024, dtype=kind, device=CPU)), weight_of(kind_of_norm, kind)
    projections, projections64 = projections_of(ops, [(n * 128, 1024) for n in (8, 4, 4)], autocast, dropout, **ranks)
    if packed:
        lay_side_by_side(ops, [projection.weight for projection in projections])
    norms = [leaf(randn(128, dtype=kind, device=CPU, seed=5 + i) + 1) for i in range(2)]
    angles = randn(1, shape[1], 128, dtype=FP32, device=CPU, seed=7)
    cos, sin = angles.cos().to(kind), angles.sin().to(kind)
    torch.manual_seed(3)
    spec, bias = inputs(ops, 0.5, 0.25, turned_first, kind_of_norm), bias_of(kind_of_norm, kind)
    results = nodes.norm_attention_inputs(x, norm, projections, *norms, cos, sin, shape, spec, BF16, norm_bias=bias)
    torch.rand(1)  # a random number that is not the operation's
    after = torch.get_rng_state()
    grads = [gradient_like(r, 9 + i, as_attention) for i, r in enumerate(results)]
    torch.autograd.backward(results, grads)
    assert torch.equal(torch.get_rng_state(), after), "the backward pass left the generator elsewhere"
    norm64, bias64 = (None if each is None else exact(each) for each in (norm, bias))
    x64, norms64 = exact(x), [exact(n) for n in norms]
    normed = norm_exact(x64, norm64, bias64, 0.5, kind_of_norm)
    torch.manual_seed(3)
    q64, k64, v64 = (projected(normed, projection).view(*shape, -1, 128) for projection in projections64)
    heads, angles64 = [q64.transpose(1, 2), k64.transpose(1, 2)], (cos.double(), sin.double())
    heads = rotary_exact(*heads, *angles64, 1) if turned_first else heads
    heads = [rms_norm_exact(t, w, 0.25) for t, w in zip(heads, norms64, strict=True)]
    results64 = [*(heads if turned_first else rotary_exact(*heads, *angles64, 1)), v64.transpose(1, 2), x64 * 1]
    torch.autograd.backward(results64, [g.double() for g in grads])
    for found, wanted in zip(results, results64, strict=True):
        assert_close(found, wanted, BF16, "projected attention's inputs", 2)
    assert [r.dtype for r in results] == [BF16, BF16, BF16, kind]
    _assert_gradients((x, norm, bias, *norms), (x64, norm64, bias64, *norms64), "gradient of projected attention's inputs")
    _assert_gradients(_leaves(projections), _leaves(projections64), "gradient of a projection")


def check_projected_mlp(ops, autocast=False, packed=False, attended=False, dropout=0.0, inner=48, frozen=False, recompute=False,
                        biases=False, tile=0, tokens=3, alone="", kind_of_norm="", parallel=False, ranks=(0, 5, 3, 4)):
    """frozen: only the adapters of the projection to `down` need gradients. alone: as of `outputs`; kind_of_norm: as of `norm_of`."""
    nodes = importlib.import_module(f"{ops.__name__}.shared.decoder.nodes")
    kind = FP32 if autocast else BF16
    x, norm = leaf(randn(tokens, 1024, dtype=kind, device=CPU)), weight_of(kind_of_norm, kind)
    bias = bias_of(kind_of_norm, kind)
    shapes = [(1024, 64)] * attended + [(inner, 1024)] * (1 if alone else 2) + [(1024, inner)]
    projections, projections64 = projections_of(ops, shapes, autocast, dropout, 2 + (not attended), ranks, biases)
    if packed:
        lay_side_by_side(ops, [projection.weight for projection in projections[-3:-1]])
    before = leaf(randn(tokens, 64, dtype=BF16, device=CPU, seed=7)) if attended else None
    if frozen:
        for tensor in (x, norm, bias, before, *_leaves(projections)[:-4]):
            if tensor is not None:
                tensor.requires_grad_(False)
    torch.manual_seed(3)
    spec = outputs(ops, 0.5, alone, kind_of_norm)._replace(parallel=parallel)
    options = {"dtype": BF16, "recompute": recompute, "tile": tile, "before_bias": bias}
    y = nodes.norm_mlp(x, norm, projections, spec, before, **options)
    dy = randn(*y.shape, dtype=y.dtype, device=CPU, seed=9)
    y.backward(dy)
    norm64, before64, bias64 = (None if each is None else exact(each) for each in (norm, before, bias))
    x64 = exact(x)
    torch.manual_seed(3)
    total = x64 + projected(before64, projections64[0]) if attended else x64
    normed = norm_exact(x64 if parallel else total, norm64, bias64, 0.5, kind_of_norm)
    gate, *up = (projected(normed, projection) for projection in projections64[attended:-1])
    hidden = ALONE[alone](gate) if alone else torch.nn.functional.silu(gate) * up[0]
    y64 = total + projected(hidden, projections64[-1])
    y64.backward(dy.double())
    assert y.dtype == kind
    assert_close(y, y64, BF16, "norm and projected MLP", 2)
    found, wanted = (x, norm, bias, before, *_leaves(projections)), (x64, norm64, bias64, before64, *_leaves(projections64))
    pairs = [(mine, other) for mine, other in zip(found, wanted, strict=True) if mine is not None and mine.requires_grad]
    _assert_gradients(*zip(*pairs, strict=True), "gradient of norm and projected MLP")


# ---------------------------------------------------------------- planted errors
TILES, PLAIN = {"tile": 16, "tokens": 35}, (0,) * 4
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
    "projected_inputs_biases": functools.partial(check_projected_attention_inputs, biases=True),
    "projected_inputs_biases_packed": functools.partial(check_projected_attention_inputs, packed=True, biases=True, as_attention=True),
    "projected_inputs_biases_autocast": functools.partial(check_projected_attention_inputs, autocast=True, biases=True),
    "turned_first": functools.partial(check_projected_attention_inputs, turned_first=True),
    "turned_first_packed": functools.partial(check_projected_attention_inputs, turned_first=True, packed=True),
    "turned_first_autocast": functools.partial(check_projected_attention_inputs, turned_first=True, autocast=True),
    "turned_first_replayed": functools.partial(check_projected_attention_inputs, turned_first=True, as_attention=True),
    **{f"inputs behind {kind}": functools.partial(check_projected_attention_inputs, kind_of_norm=kind) for kind in NORMS},
    "inputs behind layer, packed": functools.partial(check_projected_attention_inputs, kind_of_norm="layer", packed=True),
    "inputs behind layer, autocast": functools.partial(check_projected_attention_inputs, kind_of_norm="layer", autocast=True),
    "inputs behind layer, replayed": functools.partial(check_projected_attention_inputs, kind_of_norm="layer", as_attention=True),
    **{f"mlp behind {kind}": functools.partial(check_projected_mlp, kind_of_norm=kind) for kind in NORMS},
    "mlp behind layer, attended": functools.partial(check_projected_mlp, kind_of_norm="layer", attended=True, alone="gelu_tanh"),
    "mlp behind layer, again": functools.partial(check_projected_mlp, kind_of_norm="layer", attended=True, recompute=True),
    "mlp behind layer, autocast": functools.partial(check_projected_mlp, kind_of_norm="layer", attended=True, autocast=True),
    "mlp behind layer, frozen": functools.partial(check_projected_mlp, kind_of_norm="layer", frozen=True),
    "mlp behind layer, tiles": functools.partial(check_projected_mlp, kind_of_norm="layer", attended=True, **TILES),
    **{f"mlp beside attention, {name}": functools.partial(check_projected_mlp, parallel=True, **{"attended": True, **options})
       for name, options in (("", {}), ("layer", {"kind_of_norm": "layer"}), ("again", {"recompute": True}), ("tiles", TILES),
                             ("adapters", {"ranks": (5,) * 4}), ("plain", {"ranks": PLAIN}), ("plain tiles", {"ranks": PLAIN, **TILES}),
                             ("autocast", {"autocast": True}), ("alone", {"attended": False}))},
    "projected_mlp": check_projected_mlp,
    "projected_mlp_plain": functools.partial(check_projected_mlp, attended=True, ranks=PLAIN),
    "projected_mlp_tiles_plain": functools.partial(check_projected_mlp, attended=True, ranks=PLAIN, **TILES),
    **{f"mlp_{name}": functools.partial(check_projected_mlp, attended=True, alone=name) for name in ALONE},
    "mlp_relu2_biases": functools.partial(check_projected_mlp, biases=True, alone="relu2"),
    "mlp_relu2_again": functools.partial(check_projected_mlp, autocast=True, recompute=True, alone="relu2"),
    "mlp_silu_frozen": functools.partial(check_projected_mlp, frozen=True, alone="silu"),
    # Wide enough for an error that is not that of a few squares.
    "mlp_relu2_dropout": functools.partial(check_projected_mlp, attended=True, dropout=0.25, alone="relu2", inner=192),
    "mlp_relu2_tiles": functools.partial(check_projected_mlp, attended=True, alone="relu2", **TILES),
    "projected_mlp_biases": functools.partial(check_projected_mlp, attended=True, biases=True),
    "projected_mlp_biases_again": functools.partial(check_projected_mlp, biases=True, recompute=True),
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
    "projected_mlp_tiles": functools.partial(check_projected_mlp, attended=True, biases=True, **TILES),
    "projected_mlp_tiles_packed": functools.partial(check_projected_mlp, packed=True, inner=512, **TILES),
    "projected_mlp_tiles_autocast": functools.partial(check_projected_mlp, attended=True, autocast=True, **TILES),
    "projected_mlp_tiles_frozen": functools.partial(check_projected_mlp, frozen=True, **TILES),
    "projected_mlp_tiles_dropout": functools.partial(check_projected_mlp, attended=True, dropout=0.25, **TILES),  # which is ignored
}
PROJECTIONS, NODES, STEPS = "shared/decoder/projections.py", "shared/decoder/nodes.py", "shared/decoder/steps.py"
MLP_STEPS, ACTIVATION = "shared/decoder/mlp_steps.py", "shared/decoder/activation.py"
MUTANTS = [
    *generated(PROJECTIONS, "projected_mlp or projected_inputs or projected_mlp_packed",
               "Projections._of_adapter Projections._products of_second_half"),
    *generated(NODES, "projected_mlp", "stream_of"),
    *generated(MLP_STEPS, "projected_mlp_tiles", "Sums.found tiles_of"),
    *errors_in(PROJECTIONS, "projected_inputs", "Projections._round_adapters",
         ("copies.add([b for", "copies.add([2 * b for"),
         ("copies.add(rows,", "copies.add([2 * row for row in rows],")),
    *errors_in(PROJECTIONS, "projected_inputs", "Projections.__init__",
         ("else whole.to(dtype)", "else 2 * whole.to(dtype)", "projected_inputs_autocast_packed"),
         ("self.whole = _joined(", "self.whole = 2 * _joined(", "projected_inputs_autocast")),
    *errors_in(PROJECTIONS, "projected_inputs", "Projections.again",
         ("self.low[:, span], b, transposed=True)", "-self.low[:, span], b, transposed=True)"),
         (", alpha=group.scalings[i])", ")"),
         ("low_rank_add(results[i]", "low_rank_add(torch.empty_like(results[i])", "projected_mlp_again"),
         ("if bias is not None", "if False")),
    *errors_in(PROJECTIONS, "projected_inputs", "Projections._products",
         ("_affine(x, self.whole, self._bias", "_affine(-x, self.whole, self._bias", "projected_inputs_packed"),
         ("self._weight(0).t(), onto)", "self._weight(0).t())", "projected_mlp_plain")),
    *errors_in(PROJECTIONS, "projected_inputs_biases_packed", "Projections._bias", ("return _joined(", "return -_joined(")),
    *errors_in(PROJECTIONS, "projected_inputs_biases", "_column_sum", ("total if", "2 * total if")),
    *errors_in(PROJECTIONS, "projected_inputs", "Projections._low",
         ("self.a[span].t(), beta=0, alpha=group.scalings[i]", "self.a[span].t(), beta=0"),
         ("beta=0, alpha=scalings.pop()", "beta=0", "projected_mlp_attended")),
    *errors_in(PROJECTIONS, "projected_inputs", "Projections.made",
         ("[self.low] if", "[2 * self.low] if"),
         ("[self.a] if", "[2 * self.a] if"),
         ("[self.whole] if", "[2 * self.whole] if", "projected_inputs_autocast"),
         ("[b for i, b in", "[2 * b for i, b in")),
    *errors_in(PROJECTIONS, "projected_inputs", "Projections.loaded",
         ("new.low = next(left)", "new.low = -next(left)"),
         ("new.whole = whole", "new.whole = None if whole is None else -whole", "projected_inputs_packed_dropout")),
    *errors_in(PROJECTIONS, "projected_inputs", "Projections.low_gradient",
         ("beta=0, alpha=group.scalings[i]", "beta=0"),
         ("grads[i], b, beta", "-grads[i], b, beta")),
    *errors_in(PROJECTIONS, "projected_inputs", "Projections.input_gradient",
         ("dx.addmm_(grads[i], self._weight(i))", "pass"),
         ("low_rank_add(dx, dlow, self.a)", "pass"),
         ("torch.mm(together, self.whole)", "torch.mm(together, -self.whole)", "projected_inputs_packed"),
         ("dx += dropped_again(torch.mm(dlow[:, span], self.a[span]), group.dropouts[i], self.states[i])",
          "dx += torch.mm(dlow[:, span], self.a[span])", "projected_inputs_dropout"),
         ("dx.addmm_(dlow[:, span], self.a[span])", "pass", "projected_inputs_dropout")),
    *errors_in(PROJECTIONS, "projected_inputs", "Projections.gradients",
         ("_product(grad.t(), y, dtypes[i].weight)", "_product(-grad.t(), y, dtypes[i].weight)"),
         ("_column_sum(grad, dtypes[i].bias) if", "-_column_sum(grad, dtypes[i].bias) if", "projected_inputs_biases")),
    *errors_in(PROJECTIONS, "projected_inputs", "Projections._of_adapter",
         ("_product(grad.t(), self.low[:, span], dtypes.b)", "_product(-grad.t(), self.low[:, span], dtypes.b)"),
         ("a=both[0], b=both[1]", "a=-both[0], b=both[1]", "projected_inputs_eights_packed"),
         (" and not self.group.dropouts[i]:", ":", "projected_inputs_eights_dropout")),
    *errors_in(PROJECTIONS, "projected_inputs", "Projections._set_gradients_of_a",
         ("_product(dlow[:, group.spans[i]].t(), dropped", "_product(dlow[:, group.spans[i]].t(), 2 * dropped"),
         ("if group.dropouts[i] else y", "if False else y", "projected_inputs_dropout")),
    *errors_in("shared/ops/dropout.py", "projected_inputs_dropout", "dropped_with_state",
         ("return dropout(x, probability), state", "return dropout(x, probability), _generator(x.device).get_state()")),
    *errors_in("shared/ops/dropout.py", "projected_inputs_dropout", "dropped_again",
         ("generator.set_state(state)", "pass"),
         ("generator.set_state(now)", "pass")),
    *errors_in(NODES, "projected_inputs", "_inputs",
         ("tensors._replace(x=stream)", "tensors._replace(x=2 * stream)"),
         ("given.parts, given.whole)", "given.parts, -given.whole)", "projected_inputs_packed")),
    *errors_in(NODES, "projected_inputs", "_inputs_gradients",
         ("shaped(found.x, tensors.x))", "shaped(found.x, tensors.x), q_norm=found.k_norm, k_norm=found.q_norm)"),
         ("(dq, dk, dv, dstream), needs", "(dq, dk, dv, 0 * dstream), needs"),
         ("saved.made, given.whole)", "saved.made, -given.whole)", "projected_inputs_packed"),
         ("shaped(found.x, tensors.x)", "shaped(-found.x, tensors.x)", "projected_inputs_packed")),
    *errors_in(PROJECTIONS, "projected_mlp_packed", "of_second_half_loaded", ("whole if i", "-whole if i")),
    *errors_in(NODES, "projected_mlp_attended", "_mlp_gradients",
         ("shaped(gradients.x, dout)", "shaped(-gradients.x, dout)"),
         ("shaped(gradients.x, dout))", "shaped(gradients.x, dout), attended=-gradients.attended)"),
         ("outputs, dout, given", "outputs, 2 * dout, given")),
    *errors_in(NODES, "projected_mlp", "_mlp", ("return [first]", "return [2 * first]")),
    *errors_in(NODES, "projected_mlp", "_saved",
         ("made=all_made(found)", "made=all_made(found), rstd=2 * saved.rstd"),
         ("made=all_made(found)", "made=all_made(found), gate=saved.up, up=saved.gate"),
         ("parallel else saved.total", "parallel else 2 * saved.total", "projected_mlp_attended")),
    *errors_in(STEPS, "projected_inputs", "inputs_forward",
         ("k_out, v.transpose(1, 2)]", "k_out, 2 * v.transpose(1, 2)]"),
         ("(q, k, rstd", "(q, 2 + k, rstd"),
         ("(q, k, rstd", "(q, k, 2 * rstd"),
         ("norm_forward(spec.norm, x, norm, group",
          "norm_forward(spec.norm._replace(eps=1.0), x, norm, group", "projected_inputs_autocast"),
         ("group.group.dtype, bias)", "group.group.dtype)", "inputs behind layer")),
    *errors_in("shared/decoder/norms.py", "inputs behind layer, 1 + weight", "_scale", ("weight + norm.offset if", "weight if")),
    *errors_in("shared/decoder/spec.py", "mlp behind layer, no parameters", "is_there", (" or not norm.weighted", "")),
    *errors_in("shared/decoder/norms.py", "mlp behind layer, attended", "add_norm_forward",
         ("(residual, x, alpha", "(0 * residual, x, alpha")),
    *errors_in("shared/decoder/norms.py", "inputs behind layer", "add_norm_backward",
         ("dx.add_(dtotal)", "dx"),
         ("dweight, dbias\n", "dbias, dweight\n")),
    *errors_in("shared/decoder/norms.py", "inputs behind layer", "normed_again", ("weight, dtype, bias)", "weight, dtype)")),
    *errors_in(PROJECTIONS, "projected_inputs", "normed_input_backward",
         ("add_norm_backward(spec, dy, dresidual", "add_norm_backward(spec, dy, torch.zeros_like(dresidual)"),
         ("partial(normed_again, spec, x, norm, rstd, projections.group.dtype, bias)", "partial(x.to, projections.group.dtype)")),
    *errors_in(STEPS, "projected_inputs", "inputs_backward",
         ("wanted(need.q_norm, dq_norm), wanted(need.k_norm, dk_norm)", "wanted(need.q_norm, dk_norm), wanted(need.k_norm, dq_norm)"),
         ("dv_place.copy_(dv)", "dv_place.zero_()", "projected_inputs_packed")),
    *errors_in(MLP_STEPS, "projected_mlp_plain", "mlp_finish",
         ("multiply(total, result", "multiply(0 * total, result"),
         ("onto[rows]", "0 * onto[rows]", "projected_mlp_tiles_plain"),
         ("first[rows]", "first[: rows.stop - rows.start]", "projected_mlp_tiles"),
         ("multiply(beside, ", "multiply(0 * beside, ", "mlp beside attention, plain"),
         ("branch + beside", "branch", "mlp beside attention, adapters")),
    *errors_in(STEPS, "projected_mlp_attended", "join_forward",
         ("add_norm_forward(spec.before, branch, x, norm", "add_norm_forward(spec.before, branch, 0 * x, norm")),
    *errors_in(STEPS, "mlp beside attention, layer", "join_forward", (" and spec.parallel", " and False")),
    *errors_in(STEPS, "mlp beside attention, layer", "branch_beside", ("(flat_heads(attended))", "(2 * flat_heads(attended))")),
    *errors_in(STEPS, "mlp beside attention, layer", "join_backward", ("dbranch if spec.parallel else dtotal", "dtotal")),
    *errors_in(STEPS, "projected_mlp_attended", "join_backward",
         ("add_norm_backward(spec.before, dy, dtotal", "add_norm_backward(spec.before, dy, torch.zeros_like(dtotal)"),
         ("o.input_gradient((branch,), dlow).view", "o.input_gradient((branch,), None).view"),
         ("o.gradients((branch,)", "o.gradients((2 * branch,)")),
    *errors_in(MLP_STEPS, "projected_mlp_frozen", "_inner_backward",
         ("hidden = gated_forward(gate, up, spec.activation)", "hidden = gated_forward(up, gate, spec.activation)")),
    *errors_in(MLP_STEPS, "projected_mlp_tiles", "_hidden_of",
         ("gate, up = gate_and_up", "up, gate = gate_and_up")),
    *errors_in(MLP_STEPS, "projected_mlp_tiles_packed", "begin_down", ("down.begin(hidden)", "down.begin(2 * hidden)")),
    *errors_in(ACTIVATION, "mlp_relu2", "activated", ("positive * positive", "positive"), ("torch.relu(gate)", "gate")),
    *errors_in(ACTIVATION, "mlp_relu2", "activated_backward",
         (".mul_(2)", ""),
         ("positive.mul_(positive)", "positive"),
         ("torch.relu(gate)", "gate"),
         ("silu_backward(dout, gate)", "silu_backward(dout, -gate)", "mlp_silu"),
         ("gelu_backward(dout, gate", "gelu_backward(dout, -gate", "mlp_gelu")),
    *errors_in(ACTIVATION, "mlp_relu2", "gated_backward_in_place", ("dout.copy_(hidden)", "pass")),
    *errors_in("shared/decoder/heads.py", "turned_first", "heads_forward",
         ("q, k = _turned(spec, q, k, cos, sin, False)\n    if q_norm", "pass\n    if q_norm"),
         ("if not spec.turned_first:", "if True:")),
    *errors_in("shared/decoder/heads.py", "turned_first", "heads_backward",
         ("if not spec.turned_first:", "if True:"),
         ("q, k = _turned(spec, q, k, cos, sin, False)", "pass"),
         ("dq, dk = _turned(spec, dq, dk, cos, sin, True, outs)", "pass")),
    *errors_in(MLP_STEPS, "projected_mlp_tiles", "mlp_start", ("return y, MLPSaved(total", "return y, MLPSaved(2 * total")),
    *errors_in(MLP_STEPS, "projected_mlp_tiles", "Sums.add", ("total.add_(part)", "pass")),
    *errors_in(MLP_STEPS, "projected_mlp_tiles", "_tiled_backward",
         ("dbranch[rows], always", "dbranch[: rows.stop - rows.start], always"),
         ("dy[rows] = part", "dy[rows] = 0 * part"),
         ("of_down.add(down)", "of_down.add([each._replace(b=-each.b) for each in down])", "projected_mlp_tiles_frozen")),
    *errors_in(MLP_STEPS, "projected_mlp_tiles", "mlp_backward",
         ("saved.rstd[..., rows]", "saved.rstd[: rows.stop - rows.start]"),
         ("tensors.before_bias)\n\n", "None)\n\n", "mlp behind layer, tiles"),
         ("normed_again(spec.before, total[rows]", "normed_again(spec.before, total[: rows.stop - rows.start]")),
    *errors_in(MLP_STEPS, "projected_mlp", "mlp_backward",
         ("gate, up = gate_and_up(inner.again(", "up, gate = gate_and_up(inner.again(", "projected_mlp_again"),
         ("normed = always(normed())", "normed = always(total.to(dtype))", "projected_mlp_again")),
]  # fmt: skip
