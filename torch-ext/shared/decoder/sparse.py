"""The second half of a decoder layer with a mixture of experts as one autograd node: attention's output projection, the norms, the router
and its top-k experts, with both residual connections.

    n = norm(x)      p = softmax(router(n))      y = x + sum over the top-k experts e of p[e] * expert_e(n)

One more expert, which every token goes to, may add to that (`shared_expert`).

As in `steps`, what is saved is small: the residual stream, one number a row, the experts that were chosen, and the output of the
first grouped GEMM. The normalised input, the rows that are gathered of it and the gated rows are computed again in the backward pass, bit
for bit.
"""

from contextlib import nullcontext
from functools import partial
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn.functional import linear

from ..ops.autocast import outside_autocast, without_autocast
from ..ops.common import (
    accumulation_dtype,
    always,
    apply_function,
    autocasts,
    describe,
    fail,
    need_floats,
    needs_formula,
    once_differentiable,
)
from ..ops.expert_gate import Gate
from ..ops.experts import experts_backward, experts_finish, experts_forward, experts_reference, experts_start, first_gemm
from ..ops.grouped_gemm import Groups
from ..ops.routing import Routing
from ..ops.second_run import Rest, apply_in_parts, unfinished
from .checks import check_attended, check_like
from .mlp_steps import add_branch, add_branch_backward
from .nodes import add_branch_reference
from .norms import norm_reference, normed_again
from .projection import FourBitWeight, Parts, Projection, flat_parts, layout_of, needs_in_parts, projection_reference, tensors_of
from .projections import Projections, all_made, of_second_half, of_second_half_loaded
from .shared_expert import (
    SharedExpert,
    SharedGradients,
    SharedGroups,
    SharedNeeds,
    check_shared,
    gate_and_up,
    shared_backward,
    shared_reference,
    shared_start,
)
from .spec import Outputs
from .steps import Joined, OutputNeeds, OutputTensors, flat_heads, join_backward, join_forward, need_join


class Router(NamedTuple):
    """weight: [experts, hidden]; bias: [experts] or None. top_k: experts a token goes to. normalised: whether their probabilities are
    divided by their sum. by_logits: whether they are chosen by their logits, which need no softmax over all then; with `normalised`."""

    weight: torch.Tensor
    top_k: int
    normalised: bool
    bias: Optional[torch.Tensor] = None
    by_logits: bool = False


class ExpertOptions(NamedTuple):
    """How the experts' weights are laid out and what lies between them; as the options of `experts`."""

    transposed: bool = False
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = float("inf")


DEFAULT = ExpertOptions()


class ExpertTensors(NamedTuple):
    """gate_up: [experts, 2 * width, hidden], down: [experts, hidden, width], each the other way with `ExpertOptions.transposed`; their
    biases [experts, rows] or None."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: Optional[torch.Tensor] = None
    down_bias: Optional[torch.Tensor] = None


class ExpertNeeds(NamedTuple):
    """Which of `ExpertTensors` need a gradient."""

    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool


class SparseSpec(NamedTuple):
    """What of the node is no tensor. outputs: of the layer; the others: of `Router`."""

    outputs: Outputs
    gate: ExpertOptions
    top_k: int
    normalised: bool
    by_logits: bool


def choose_experts(logits: torch.Tensor, top_k: int, normalised: bool, by_logits: bool = False) -> Tuple[torch.Tensor, torch.Tensor]:
    """(scores, expert), [tokens, top-k] each, of a router's logits [tokens, experts]; scores are in the dtype of the arithmetic, and as
    exact as they would be in that of the logits."""
    precise = accumulation_dtype(logits.dtype)
    if by_logits:
        chosen, expert = torch.topk(logits, top_k, -1)
        return torch.softmax(chosen, -1, dtype=precise), expert
    scores, expert = torch.topk(torch.softmax(logits, -1, dtype=precise), top_k, -1)
    if normalised:
        scores = scores / scores.sum(-1, keepdim=True)
    return scores, expert


def _rounded(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scores with the exactness that the model gives them, in the dtype that they are in."""
    return scores.to(dtype).to(scores.dtype)


def router_backward(dscores, scores, expert, logits, shape, normalised, dtype) -> torch.Tensor:
    """The gradient of a router's logits [tokens, experts], in a dtype. dscores, scores: [tokens, top-k] in the dtype of the arithmetic,
    before rounding; logits: None where the router is `normalised`, whose scores are the softmax over the chosen experts alone."""
    of_scores = scores * dscores
    total = of_scores.sum(-1, keepdim=True)
    if normalised:
        return torch.zeros(shape, dtype=dtype, device=scores.device).scatter_(1, expert, (of_scores - scores * total).to(dtype))
    dlogits = torch.softmax(logits, -1, dtype=scores.dtype).mul_(-total)
    return dlogits.scatter_add_(1, expert, of_scores).to(dtype)


def norm_experts_reference(
    spec: SparseSpec, tensors: OutputTensors, router: Router, weights: ExpertTensors, o, shared: Optional[SharedExpert]
) -> torch.Tensor:
    """Computes `norm_experts` with PyTorch's operations."""
    x, attended, after, before, behind = tensors
    if o is not None and attended is not None:
        x = add_branch_reference(x, projection_reference(flat_heads(attended), o), spec.outputs.after, after, spec.outputs.multiplier)
    y = (x if before is None else norm_reference(spec.outputs.before, x, before)).reshape(-1, x.shape[-1])
    scores, expert = choose_experts(linear(y, router.weight, router.bias), spec.top_k, spec.normalised, spec.by_logits)
    out = experts_reference(y, expert, scores.to(y.dtype), *weights, *spec.gate)
    out = out if shared is None else out + shared_reference(y, shared)
    return add_branch_reference(x, out, spec.outputs.behind, behind, spec.outputs.multiplier)


class SparseGroups(NamedTuple):
    """The projections of the node: attention's output projection, and those of the shared expert; None for what there is none of."""

    o: Optional[Projections]
    shared: Optional[SharedGroups]


def _groups_of(found: Sequence) -> SparseGroups:
    """Names what was found for each group of `layout_of`: first o's, if there is one, then the shared expert's two."""
    return SparseGroups(found[0] if len(found) % 2 else None, SharedGroups(*found[-2:]) if len(found) > 1 else None)


def _finish(spec: SparseSpec, weights: ExpertTensors, started: tuple, total: torch.Tensor, add_shared: Optional[Callable], shape):
    """The result of a node that has started its experts and has no norm behind them. add_shared: of `shared_start`; shape: the result's."""
    gate_up, expert, scores, routing, groups = started
    gate, biases = Gate(*spec.gate[1:]), (weights.gate_up_bias, weights.down_bias)
    found = experts_finish(gate_up, expert, scores, weights.down, *biases, routing, groups, spec.gate.transposed, gate)
    if add_shared is not None:
        add_shared(found)
    return add_branch(spec.outputs, shape, None, total, found)[0]


class _NormExperts(torch.autograd.Function):
    """rest: as of `apply_in_parts`, None with a norm of the branch, whose gradient needs the last products."""

    @staticmethod
    def forward(ctx, rest: Rest, layout, recompute, x, attended, after, before, behind, router_weight, router_bias, shared_gate, *parts):
        spec, tensors = layout.spec, OutputTensors(x, attended, after, before, behind)
        weights, parts = ExpertTensors(*parts[:4]), parts[4:]
        projections = of_second_half(list(zip(layout.groups, layout.by_group(parts))), layout.whole_of(layout.present(parts)))
        o, shared = _groups_of(projections)
        joined = join_forward(spec.outputs, tensors, o, x.dtype)
        logits = linear(joined.y, router_weight, router_bias)
        scores, expert = choose_experts(logits, spec.top_k, spec.normalised, spec.by_logits)
        rounded = _rounded(scores, x.dtype)
        if rest is None:
            found, gate_up, *routing = experts_forward(joined.y, expert, rounded, *weights, *spec.gate)
        else:
            gate_up, routing, groups = experts_start(joined.y, expert, weights.gate_up, spec.gate.transposed)
        shared_score = both = add_shared = None
        if shared is not None:
            shared_score, both, add_shared = shared_start(joined.y, shared_gate, shared)
        total, _, *of_join = joined
        del joined
        out = branch = branch_rstd = None
        if rest is None:
            gate_up, both = (None, None) if recompute else (gate_up, both)
            if add_shared is not None:
                add_shared(found)
            out, branch, branch_rstd = add_branch(spec.outputs, x.shape, behind, total, found)
            del found
        ctx.save_for_backward(
            *(attended, after, before, behind, branch, branch_rstd, router_weight, shared_gate, *weights, total, *of_join),
            *(scores, expert, None if spec.normalised else logits, None if recompute else gate_up, *routing),
            *(shared_score, None if recompute else both, *layout.to_save(parts), *all_made(projections)),
        )
        ctx.layout, ctx.shape, ctx.count, ctx.written_over = layout, x.shape, len(parts), False
        if rest is None:
            return out
        started = gate_up, expert, rounded, routing, groups
        return unfinished(rest, partial(_finish, spec, weights, started, total, add_shared, x.shape), x.shape, total)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx, dout):
        spec, (_, _, _, *needs) = ctx.layout.spec, ctx.needs_input_grad
        attended, after, before, behind, branch, branch_rstd, router_weight, shared_gate, *saved = ctx.saved_tensors
        gate_up_weight, down_weight, gate_up_bias, down_bias, x, o_out, rstd, o_rstd, *saved = saved
        scores, expert, logits, gate_up, order, position, ends, shared_score, both, *saved = saved
        need, (need_router, need_bias, need_gate, *needs) = OutputNeeds(*needs[:5]), needs[5:]
        of_weights = ExpertNeeds(*needs[:4])
        of_parts = [needs_in_parts(each) for each in ctx.layout.by_group(needs[4:])]
        need_o = of_parts[0] if len(of_parts) % 2 else []
        need_total = need_join(need, need_o)
        layout, parts, made = ctx.layout, saved[: ctx.count], saved[ctx.count :]
        pairs, whole = list(zip(layout.groups, layout.by_group(parts))), layout.whole_of(layout.present(parts))
        o, shared = _groups_of(of_second_half_loaded(pairs, made, whole))
        need_logits = need_total or need_router or need_bias
        dout, weights = dout.reshape(x.shape), ExpertTensors(gate_up_weight, down_weight, gate_up_bias, down_bias)
        again = gate_up is None or ctx.written_over  # which it is in a second backward pass (retain_graph)
        need_shared = SharedNeeds(need_total, need_gate, *of_parts[-2:]) if shared is not None else None
        of_shared = need_shared is not None and (need_gate or any(each.weight or each.a for each in need_shared.inner))
        y = x  # of which `experts_backward` then reads the shape alone
        if of_weights.gate_up or need_router or again or of_shared:
            y = normed_again(spec.outputs.before, x, before, rstd, x.dtype)
        if again:
            groups = Groups(ends, expert.numel())
            gate_up = first_gemm(y, gate_up_weight, order, position, groups, spec.gate.transposed)
            both = None if shared is None else gate_and_up(y, shared.inner, again=True)
        ctx.written_over = True
        inputs, routing = (y, expert, _rounded(scores, x.dtype), *weights), Routing(order, position, ends)
        dbranch, dbehind = add_branch_backward(spec.outputs, dout, behind, branch, branch_rstd, x.dtype, need.behind)
        dy, dscores, *found = experts_backward(dbranch, inputs, gate_up, routing, spec.gate, [need_total, need_logits, *of_weights])
        del gate_up, inputs
        dweights = [gradient if need else None for gradient, need in zip(found, of_weights)]
        drouter = dbias = None
        if need_logits:
            shape = x.shape[0], router_weight.shape[0]
            dlogits = router_backward(dscores, scores, expert, logits, shape, spec.normalised, x.dtype)
            drouter = torch.mm(dlogits.t(), y) if need_router else None
            dbias = dlogits.sum(0) if need_bias else None
        dshared = SharedGradients(None, None, [], [])
        if shared is not None and need_shared is not None and _any_shared(need_shared):
            dshared = shared_backward(dbranch, always(y), shared_gate, shared_score, both, shared, need_shared)
        elif shared is not None:
            dshared = dshared._replace(inner=[Parts()] * 2, down=[Parts()])
        del y, both
        dx = dattended = dafter = dbefore = None
        do = [Parts()] * len(need_o)
        if need_total:
            dy.addmm_(dlogits, router_weight)
            if dshared.y is not None:
                dy += dshared.y
            tensors, joined = OutputTensors(x, attended, after, before, behind), Joined(x, x, o_out, rstd, o_rstd)
            dx, dattended, dafter, dbefore, do = join_backward(spec.outputs, dy, dout, tensors, joined, o, need, need_o)
        dparts = flat_parts(do, dshared.inner, dshared.down)
        dx = None if dx is None else dx.view(ctx.shape)
        of_norms = dattended, dafter, dbefore, dbehind
        return (None, None, None, dx, *of_norms, drouter, dbias, dshared.gate, *dweights, *dparts)


def _any_shared(need: SharedNeeds) -> bool:
    return bool(need.y or need.gate or any(any(each) for each in (*need.inner, *need.down)))


def norm_experts(
    x: torch.Tensor,
    before: Optional[torch.Tensor],
    router: Router,
    weights: ExpertTensors,
    spec: Outputs,
    gate: ExpertOptions = DEFAULT,
    attended: Optional[torch.Tensor] = None,
    o: Optional[Projection] = None,
    after: Optional[torch.Tensor] = None,
    recompute: bool = False,
    shared: Optional[SharedExpert] = None,
    behind: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Computes total + behind(the weighted sum of what the experts that the router chooses make of before(total)), with total = x or, with
    `attended`, x + after(o(attended)).

    With `shared`, what that expert makes of every token is added to the sum, times its score. Both branches are multiplied by the
    description's multiplier.

    Differentiable in all tensors; nothing is computed for a weight that does not require a gradient.

    Args:
        x: [..., hidden].
        before, after, behind: [hidden], weights of the norms, or None for no norm.
        router: its weight [experts, hidden], and how it chooses.
        weights: of the experts.
        spec: the description.
        gate: how the experts' weights are laid out.
        attended: [tokens, features] or [batch, tokens, heads, head_dim], attention's output.
        o: attention's output projection, whose tensors may be float32 where x is narrower.
        recompute: whether the experts' first products are made again in the backward pass, bit for bit, instead of kept.
        shared: the shared expert, whose projections' tensors may be float32 where x is narrower.

    Returns:
        [..., hidden].

    Raises:
        ValueError: when shapes, dtypes or devices do not fit. All but the projections' tensors are of x's dtype and device.
    """
    tensors = OutputTensors(x, attended, after, before, behind)
    groups: List[Sequence[Projection]] = [] if o is None else [(o,)]
    _check(tensors, router, weights, spec, gate, o)
    shared_gate = None
    if shared is not None:
        check_shared(x, shared)
        shared_gate, groups = shared.gate, [*groups, shared.projections[:2], shared.projections[2:]]
    parts = [part for group in groups for part in tensors_of(group)]
    dense = [part for part in parts if not isinstance(part, FourBitWeight)]
    description = SparseSpec(spec, gate, router.top_k, router.normalised, router.by_logits)
    with without_autocast(x.device) if autocasts(x.device) else nullcontext():
        if needs_formula(*tensors, router.weight, router.bias, shared_gate, *weights, *dense):
            return norm_experts_reference(description, tensors, router, weights, o, shared)
        layout = layout_of(description, groups, x.dtype)
        of_node = layout, bool(recompute), *tensors, router.weight, router.bias, shared_gate, *weights, *parts
        return apply_in_parts(_NormExperts, *of_node) if behind is None else apply_function(_NormExperts, None, *of_node)


def _check(
    tensors: OutputTensors, router: Router, weights: ExpertTensors, spec: Outputs, gate: ExpertOptions, o: Optional[Projection]
) -> None:
    x, attended, after, before, behind = tensors
    need_floats(x=x)
    if x.dim() == 0 or weights.down.dim() != 3:
        fail("weights.down", describe(weights.down), f"[experts, hidden, width], or transposed, for x, which is {describe(x)}")
    hidden, experts, width = x.shape[-1], weights.down.shape[0], weights.down.shape[1 if gate.transposed else 2]
    if (o is None) != (attended is None):
        fail("attended", "None" if attended is None else describe(attended), "it and o, or neither")
    if o is not None and attended is not None:
        check_attended(x, attended, o, x.dtype)
    expected: Sequence = (
        ("before", before, (hidden,)),
        ("after", after, (hidden,)),
        ("behind", behind, (hidden,)),
        ("router.weight", router.weight, (experts, hidden)),
        ("router.bias", router.bias, (experts,)),
        ("weights.gate_up", weights.gate_up, (experts, hidden, 2 * width) if gate.transposed else (experts, 2 * width, hidden)),
        ("weights.down", weights.down, (experts, width, hidden) if gate.transposed else (experts, hidden, width)),
        ("weights.gate_up_bias", weights.gate_up_bias, (experts, 2 * width)),
        ("weights.down_bias", weights.down_bias, (experts, hidden)),
    )
    for name, tensor, shape in expected:
        check_like(x, name, tensor, shape)
    if not 1 <= router.top_k <= experts:
        fail("router.top_k", router.top_k, f"from 1 to the {experts} experts")
    if router.by_logits and not router.normalised:
        fail("router.by_logits", True, "a router whose probabilities are divided by their sum")
