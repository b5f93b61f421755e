"""The decoder layer's node of a mixture of experts: projection, RMSNorm, router and experts with both residual connections."""

import importlib

import torch

from tests.ops.common import BF16, FP32, errors_in, exact, leaf, on_cpu, randn
from tests.ops.decoder_nodes import lay_side_by_side
from tests.ops.experts import experts_exact
from tests.ops.generated import generated
from tests.ops.projected_nodes import PLAIN, projected, projections_of
from tests.ops.rms_norm import rms_norm_exact
from tests.tolerances import assert_close

FEATURES = 64
AFTER, BEHIND = 0.25, 0.125  # epsilons of the norms of the branches


def leaves_of(dtype, device, tokens, hidden, width, experts):
    """The node's tensors by name."""
    made = {
        "x": randn(tokens, hidden, dtype=dtype, device=device),
        "norm_weight": randn(hidden, dtype=dtype, device=device, seed=1) + 1,
        "router": randn(experts, hidden, dtype=dtype, device=device, seed=2, scale=hidden**-0.5),
        "gate_up": randn(experts, 2 * width, hidden, dtype=dtype, device=device, seed=3, scale=hidden**-0.5),
        "down": randn(experts, hidden, width, dtype=dtype, device=device, seed=4, scale=width**-0.5),
    }
    return {name: leaf(tensor) for name, tensor in made.items()}


def chosen_exact(logits, top_k, normalised, correction, of="softmax", groups=1, chosen=1, best=1, eps=0.0, least=0.0, factor=1.0, **_):
    """Scores and experts in float64, one token after the other."""
    scores = torch.softmax(logits, -1) if of == "softmax" else torch.sigmoid(logits)
    ranked = scores.detach() + (0 if correction is None else correction.double().cpu())
    experts, size = [], logits.shape[1] // groups
    for row in ranked:
        parts = row.split(size)
        kept = sorted(range(groups), key=lambda i, parts=parts: -float(parts[i].sort(descending=True)[0][:best].sum()))[:chosen]
        experts.append(sorted((i for i in range(len(row)) if i // size in kept), key=lambda i, row=row: -float(row[i]))[:top_k])
    expert = torch.tensor(experts, dtype=torch.long).reshape(-1, top_k)
    scores = scores.gather(1, expert)
    return factor * (scores / (scores.sum(-1, keepdim=True) + eps).clamp(min=least) if normalised else scores), expert


def norm_experts_exact(x, norm_weight, router, gate_up, down, top_k, normalised, eps, shared=None, behind=None, multiplier=1.0,
                       correction=None, kind=None):
    """In float64, one expert after the other. shared: the gate of the expert that every token goes to, or None, and its projections."""
    y = x if norm_weight is None else rms_norm_exact(x, norm_weight, eps)
    scores, expert = chosen_exact(y @ router.t(), top_k, normalised, correction, **(kind or {}))
    branch = experts_exact(y, expert, scores, gate_up, down)
    if shared is not None:
        score_gate, (*inner, last) = shared
        gate, up = torch.cat([projected(y, each) for each in inner], -1).chunk(2, -1)
        gated = torch.nn.functional.silu(gate) * up
        score = 1 if score_gate is None else torch.sigmoid(y @ score_gate.t())
        branch = branch + score * projected(gated, last)
    return x + multiplier * (branch if behind is None else rms_norm_exact(branch, behind, BEHIND))


def check_norm_experts(ops, device, dtype=FP32, top_k=2, normalised=True, attended=False, dropout=0.0, frozen=(), again=False, tokens=7,
                       hidden=1024, width=20, experts=6, recompute=False, shared=0, packed=False,
                       norms=("before",), multiplier=1.0, tile=0, scoring=None, corrected=False, gated=True, ranks=(0, 5, 3, 4),
                       joined=False):
    """attended: with attention's output and its projection, which has an adapter, in front. frozen: names that need no gradient, "shared"
    for the projections of the shared expert, "shared weights" for these without adapters. again: a second backward pass. shared: width of
    the expert that every token goes to, whose gate, up and down have adapters of `ranks`; 0 for none. packed: gate and up lie side by
    side. norms: "before", "after" and "behind", those that there are; multiplier: of both branches; tile: of `norm_experts`. scoring: of
    `Scores`; corrected: whether the router has a correction; gated: whether the expert that every token goes to has a score; without, its
    last projection has biases; joined: whether its gate and up are one projection. In half precision the sizes must leave no choice of
    experts to rounding."""
    nodes = importlib.import_module(f"{ops.__name__}.shared.decoder.sparse")
    leaves = leaves_of(dtype, device, tokens, hidden, width, experts)
    more = [(name, seed) for name, seed in (("after", 21), ("behind", 22)) if name in norms]
    leaves |= {name: leaf(randn(hidden, dtype=dtype, device=device, seed=seed) + 1) for name, seed in more}
    exacts = {name: exact(tensor) for name, tensor in leaves.items()}
    before, o = (None, None), (None, None)
    if attended:
        before = [leaf(randn(tokens, FEATURES, dtype=dtype, device=device, seed=7))]
        before.append(exact(before[0]))
        (o, *_), (o64, *_) = projections_of(ops, [(hidden, FEATURES)], dtype == FP32, dropout)
        kind = None if dtype == BF16 else dtype
        o = type(o)(*(None if part is None else leaf(part.to(device, kind)) for part in o[:5]), *o[5:]), o64
    of_shared = of_shared64 = ()
    if shared:
        if gated:
            leaves["score_gate"] = leaf(randn(1, hidden, dtype=dtype, device=device, seed=5, scale=hidden**-0.5))
            exacts["score_gate"] = exact(leaves["score_gate"])
        shapes = [(2 * shared, hidden)] if joined else [(shared, hidden), (shared, hidden)]
        shapes.append((hidden, shared))
        of_shared, of_shared64 = projections_of(ops, shapes, dtype == FP32, dropout, seed=11, ranks=ranks)
        of_shared, of_shared64 = ([one._replace(adapter_bias=None) if one is each[-1] and gated else one for one in each]
                                  for each in (of_shared, of_shared64))
        if packed:
            lay_side_by_side(ops, [one.weight for one in of_shared[:2]])
        kind = None if dtype == BF16 else dtype
        of_shared = [type(one)(*(None if part is None else leaf(part.to(device, kind)) for part in one[:5]), *one[5:]) for one in of_shared]
        for one in of_shared:
            for part in one[: 5 if "shared" in frozen else 1 if "shared weights" in frozen else 0]:
                if part is not None:
                    part.requires_grad_(False)
    for name in set(frozen) - {"shared", "shared weights"}:
        leaves[name].requires_grad_(False)
    x, norm_weight, router, *weights = list(leaves.values())[:5]
    torch.manual_seed(3)
    spec = importlib.import_module(f"{ops.__name__}.shared.decoder.spec")
    described = spec.Outputs(spec.Norm(AFTER), spec.Norm(0.5), spec.Norm(BEHIND), multiplier=multiplier)
    before_norm = norm_weight if "before" in norms else None
    correction = randn(experts, dtype=FP32, device=device, seed=31, scale=0.3) if corrected else None
    choice = nodes.Router(router, top_k, normalised, correction=correction, scores=nodes.Scores(**(scoring or {})))
    arguments = x, before_norm, choice, nodes.ExpertTensors(*weights), described
    of_branches = {name: leaves[name] for name, _ in more}
    expert = nodes.SharedExpert(leaves.get("score_gate"), of_shared) if shared else None
    y = nodes.norm_experts(*arguments, attended=before[0], o=o[0], recompute=recompute, shared=expert, tile=tile, **of_branches)
    dy = randn(*y.shape, dtype=dtype, device=device, seed=9)
    if again:
        y.backward(dy, retain_graph=True)
        for tensor in (*leaves.values(), *(part for one in of_shared for part in one[:5] if part is not None)):
            tensor.grad = None
    y.backward(dy)
    torch.manual_seed(3)
    x64, norm64, *rest = list(exacts.values())[:5]
    total = x64
    if attended:
        branch = projected(before[1], o[1])
        total = x64 + multiplier * (rms_norm_exact(branch, exacts["after"], AFTER) if "after" in norms else branch)
    of_shared64 = (exacts.get("score_gate"), of_shared64) if shared else None
    options = top_k, normalised, 0.5, of_shared64, exacts.get("behind"), multiplier, correction, scoring
    y64 = norm_experts_exact(total, norm64 if "before" in norms else None, *rest, *options)
    y64.backward(dy.double().cpu())
    assert_close(y, y64, dtype, "norm and experts", 2)
    for name, tensor in leaves.items():
        if name in frozen or (name == "norm_weight" and "before" not in norms):
            assert tensor.grad is None
            continue
        assert tensor.grad.dtype == tensor.dtype
        assert_close(tensor.grad, exacts[name].grad, dtype, f"gradient of norm and experts: {name}", 3)
    parts, parts64 = ([part for one in each for part in one[:5]] for each in (of_shared, of_shared64[1] if shared else ()))
    for found, wanted in zip(parts, parts64, strict=True):
        if found is not None and not found.requires_grad:
            assert found.grad is None
        elif found is not None:
            assert_close(found.grad, wanted.grad, dtype, "gradient of the shared expert", 3)
    for found, wanted in zip((before[0], *(o[0] or ())[:5]), (before[1], *(o[1] or ())[:5]), strict=True):
        if found is not None:
            assert_close(found.grad, wanted.grad, dtype, "gradient of attention's output or its projection", 3)


def check_shared_expert(ops, device):
    """The expert that every token goes to: alone, after attention, with gate and up side by side, made again, and partly frozen."""
    check_norm_experts(ops, device, shared=40, top_k=3, normalised=False)
    check_norm_experts(ops, device, BF16, top_k=6, shared=24, attended=True)
    check_norm_experts(ops, device, shared=24, recompute=True, again=True)
    check_norm_experts(ops, device, shared=24, packed=True, frozen=("shared",))
    check_norm_experts(ops, device, shared=24, frozen=("x", "norm_weight", "gate_up", "down", "router", "shared"))
    check_norm_experts(ops, device, shared=24, frozen=("x", "norm_weight", "gate_up", "down", "router", "score_gate"))
    check_norm_experts(ops, device, shared=24, frozen=("gate_up", "down", "router", "score_gate", "shared weights"))
    check_norm_experts(ops, device, shared=24, ranks=PLAIN)
    check_norm_experts(ops, device, tokens=0, shared=24)


DEEPSEEK = {"of": "sigmoid", "groups": 3, "chosen": 2, "best": 2, "eps": 1e-20, "factor": 2.5, "wide": True, "rounds": False}


def check_scores(ops, device):
    """DeepSeek-V3's router, its V2's, ERNIE's and MiniMax-M2's; and sums that are less than they count as, or have something added."""
    options = {"experts": 12, "top_k": 3, "corrected": True}
    check_norm_experts(ops, device, **options, scoring=DEEPSEEK)
    check_norm_experts(ops, device, **options, scoring={**DEEPSEEK, "eps": 0.5, "groups": 1, "chosen": 1}, normalised=True, again=True)
    check_norm_experts(ops, device, **options, scoring=DEEPSEEK, normalised=False, recompute=True)
    check_norm_experts(ops, device, experts=12, top_k=3, scoring={"groups": 3, "chosen": 2, "factor": 4.0, "wide": True}, normalised=False)
    check_norm_experts(ops, device, **options, scoring={"least": 0.3, "wide": True})
    check_norm_experts(ops, device, experts=12, top_k=3, scoring={"of": "sigmoid", "rounds": False}, frozen=("router",))
    check_norm_experts(ops, device, BF16, experts=6, top_k=6, scoring={**DEEPSEEK, "chosen": 3})
    check_norm_experts(ops, device, **options, scoring=DEEPSEEK, tokens=0)


def check_expert_without_a_score(ops, device):
    """The expert that every token goes to without a gate of its own, with all kinds of what is frozen."""
    check_norm_experts(ops, device, shared=40, gated=False, scoring=DEEPSEEK, corrected=True, attended=True)
    check_norm_experts(ops, device, BF16, top_k=6, shared=24, gated=False)
    check_norm_experts(ops, device, shared=24, gated=False, recompute=True, again=True, packed=True)
    check_norm_experts(ops, device, shared=24, gated=False, joined=True, attended=True, multiplier=0.5)
    check_norm_experts(ops, device, shared=24, joined=True, recompute=True, ranks=(5, 3, 4))
    check_norm_experts(ops, device, shared=24, gated=False, frozen=("shared",), norms=("before", "behind"), multiplier=0.22)
    check_norm_experts(ops, device, shared=24, gated=False, frozen=("x", "norm_weight", "gate_up", "down", "router"))
    check_norm_experts(ops, device, shared=24, gated=False, frozen=("gate_up", "down", "router", "shared weights"))


def check_norms_of_the_branches(ops, device):
    """FlexOlmo's norms and Granite-MoE's multiplier; and both with all others, a shared expert, and without what needs no gradient."""
    check_norm_experts(ops, device, norms=("after", "behind"), attended=True)
    check_norm_experts(ops, device, BF16, multiplier=0.22, attended=True)
    check_norm_experts(ops, device, norms=("before", "after", "behind"), multiplier=0.22, attended=True, shared=24)
    check_norm_experts(ops, device, norms=("before", "behind"), recompute=True, again=True, frozen=("behind", "norm_weight", "gate_up"))
    check_norm_experts(ops, device, norms=("behind",), multiplier=0.22, frozen=("x", "down", "gate_up", "router"))


def check_tiles_of_experts(ops, device):
    """Several tiles, the last one short: all trained, beside a shared expert, a second backward pass, some frozen, and no more than one."""
    check_norm_experts(ops, device, tokens=40, tile=16)
    check_norm_experts(ops, device, tokens=40, tile=16, shared=24, attended=True, top_k=3, normalised=False)
    check_norm_experts(ops, device, tokens=40, tile=16, shared=24, again=True, recompute=True)
    check_norm_experts(ops, device, tokens=40, tile=16, frozen=("x", "norm_weight", "router", "gate_up"))
    check_norm_experts(ops, device, tokens=40, tile=16, frozen=("gate_up", "down"), norms=("before", "behind"))
    check_norm_experts(ops, device, tokens=16, tile=16)
    check_norm_experts(ops, device, tokens=40, tile=16, shared=24, gated=False, scoring=DEEPSEEK, corrected=True)


def check_parts_of_norm_experts_that_are_frozen(ops, device):
    """Those that are trained get the gradients that they have among the others."""
    check_norm_experts(ops, device, frozen=("x", "norm_weight", "gate_up", "down"))
    check_norm_experts(ops, device, frozen=("x", "norm_weight", "router", "gate_up"))


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "norm_experts": on_cpu(check_norm_experts),
    "norm_experts_half": on_cpu(check_norm_experts, BF16),
    "norm_experts_plain": on_cpu(check_norm_experts, top_k=3, normalised=False),
    "norm_experts_attended": on_cpu(check_norm_experts, BF16, attended=True),
    "norm_experts_dropout": on_cpu(check_norm_experts, BF16, attended=True, dropout=0.25),
    "norm_experts_frozen": on_cpu(check_parts_of_norm_experts_that_are_frozen),
    "norm_experts_recomputed": on_cpu(check_norm_experts, recompute=True, frozen=("gate_up", "router")),
    "norm_experts_shared": on_cpu(check_shared_expert),
    "norm_experts_branches": on_cpu(check_norms_of_the_branches),
    "norm_experts_tiles": on_cpu(check_tiles_of_experts),
    "norm_experts_scores": on_cpu(check_scores),
    "norm_experts_ungated": on_cpu(check_expert_without_a_score),
    "norm_experts_again": on_cpu(check_norm_experts, again=True, frozen=("gate_up", "router")),
}
MUTANTS = [
    *generated("shared/decoder/router.py", "norm_experts_scores or norm_experts", "choose_experts router_backward"),
    *generated("shared/decoder/shared_expert.py", "norm_experts_shared", "SharedNeeds.reads_input"),
    *errors_in("shared/decoder/router.py", "norm_experts", "choose_experts", ("if normalised:", "if True:", "norm_experts_plain")),
    *errors_in("shared/decoder/router.py", "norm_experts_scores", "Scores.sum_of",
         ("total + self.eps", "total"),
         (".clamp(min=self.least)", "")),
    *errors_in("shared/decoder/router.py", "norm_experts_scores", "Scores.within_groups",
         ("topk(self.best, -1)", "topk(1, -1)"),
         ("scatter_(1, of_groups", "scatter_(1, -of_groups"),
         ("if self.chosen == self.groups", "if True")),
    *errors_in("shared/decoder/router.py", "norm_experts_scores", "choose_experts", ("if ranked is not of_all:", "if False:")),
    *errors_in("shared/decoder/sparse.py", "norm_experts_scores", "_gradients",
         ("dy.add_(torch.mm(dlogits, tensors.router.to(dtype)))", "dy")),
    *errors_in("shared/decoder/shared_expert.py", "norm_experts_ungated", "_gate_backward",
         ('"silu")[0], dscored, None', '"silu")[0], 2 * dscored, None')),
    *errors_in("shared/decoder/shared_expert.py", "norm_experts_ungated", "shared_backward",
         ("inner.input_gradient(grads, dlow, both) if need.y", "inner.input_gradient(grads, None, both) if need.y"),
         ("SharedGradients(dy, None, dinner, ddown)", "SharedGradients(dy, None, dinner, [Parts()])")),
    *errors_in("shared/decoder/sparse.py", "norm_experts", "_forward",
         ("*of_join, *of_branch", "of_join[0], 2 * of_join[1], of_join[2], *of_branch")),
    *errors_in("shared/decoder/mlp_steps.py", "norm_experts", "add_branch",
         ("torch.add(total, branch", "torch.add(0 * total, branch"),
         (", alpha=spec.multiplier", "", "norm_experts_branches"),
         ("branch.dtype)", "branch.dtype)\n        branch = kept", "norm_experts_branches"),
         ("return out, branch, rstd", "return out, branch, 2 * rstd", "norm_experts_branches")),
    *errors_in("shared/decoder/mlp_steps.py", "norm_experts_branches", "add_branch_backward",
         ("scaled(dout, spec.multiplier)", "dout"),
         ("return dbranch, wanted(need, dbehind)", "return dout, wanted(need, dbehind)")),
    *errors_in("shared/decoder/steps.py", "norm_experts_attended", "join_forward",
         ("add_norm_forward(spec.before, branch, x, norm", "add_norm_forward(spec.before, branch, 0 * x, norm")),
    *errors_in("shared/decoder/node.py", "norm_experts_again", "_function",
         ("if ctx.spent else run, True", "if ctx.spent else run, False")),
    *errors_in("shared/decoder/sparse.py", "norm_experts", "_gradients",
         ("or needed.router or again", "or again", "norm_experts_frozen"),
         ("or needed.router or again", "or needed.router", "norm_experts_again"),
         ("dy.addmm_(dlogits, tensors.router)", "dy"),
         ("dout, tensors, joined", "dout, tensors._replace(attended=2 * tensors.attended), joined", "norm_experts_attended"),
         ("torch.mm(dlogits.t(), y.to(dtype))", "torch.mm(dlogits.t(), x.to(dtype))"),
         ("dbranch, inputs, gate_up", "dout, inputs, gate_up", "norm_experts_branches"),
         ("shared_backward(dbranch", "shared_backward(dout", "norm_experts_branches"),
         ("spec.outputs, dy, dout, tensors", "spec.outputs, dy, torch.zeros_like(dout), tensors")),
    *errors_in("shared/decoder/sparse_experts.py", "norm_experts_tiles", "tiled_experts",
         ("y[rows], expert[rows]", "0 * y[rows], expert[rows]"),
         ("gate_up, expert[rows], scores[rows]", "gate_up, expert[rows], 2 * scores[rows]")),
    *errors_in("shared/decoder/sparse_experts.py", "norm_experts_tiles", "tiled_experts_backward",
         ("dout[rows], (*mine", "2 * dout[rows], (*mine"),
         ("whole[rows] = part", "whole[rows] = 0 * part"),
         ("found.gate_up_bias, *of_gate_up), Parts(found.down", "found.gate_up_bias, *of_gate_up), Parts(2 * found.down")),
    *errors_in("shared/decoder/sparse.py", "norm_experts_tiles", "_forward",
         ("None if spec.recompute or spec.tile else gate_up", "None if spec.recompute else gate_up")),
    *errors_in("shared/decoder/shared_expert.py", "norm_experts_shared", "shared_backward",
         ("score * (1 - score)", "score"),
         (".addmm_(dlogit, gate)", ""),
         ("inner.input_gradient(grads, dlow, both)", "inner.input_gradient(grads, None, both)")),
    *errors_in("shared/decoder/sparse.py", "norm_experts_shared", "_result",
         ("onto=found, out=found", "onto=0 * found, out=found")),
    *errors_in("shared/decoder/sparse.py", "norm_experts_shared", "_gradients",
         ("dy += dshared.y", "pass"),
         ("and need_shared.reads_input()", "and False"),
         ("gate_and_up(y, inner", "gate_and_up(0 * y, inner")),
    *errors_in("shared/decoder/steps.py", "norm_experts_attended", "join_backward",
         ("o.input_gradient((branch,), dlow)", "o.input_gradient((branch,), None)"),
         ("o.gradients((branch,)", "o.gradients((2 * branch,)")),
]  # fmt: skip
