"""The second half of a decoder layer with a mixture of experts as one autograd node: attention's output projection, the norms, the router
and its top-k experts, with both residual connections.

    n = norm(x)      p = softmax(router(n))      y = x + sum over the top-k experts e of p[e] * expert_e(n)

What else p may be says `Scores`. One more expert, which every token goes to, may add to that (`shared_expert`).

As in `steps`, what is saved is small: the residual stream, one number a row, the experts that were chosen, and the output of the
first grouped GEMM. The normalised input, the rows that are gathered of it and the gated rows are computed again in the backward pass, bit
for bit.
"""

from typing import Any, NamedTuple, Optional, Sequence, Tuple

import torch

from ..ops.arguments import describe, fail, need_floats
from ..ops.autocast import without_autocast
from ..ops.autograd import always
from ..ops.expert_adapters import NO_ADAPTERS, ExpertAdapter, ExpertAdapters, ExpertFactors, Factors
from ..ops.experts import experts_backward, experts_finish, experts_reference, experts_start, first_gemm
from ..ops.four_bits import CodedExperts, dense
from ..ops.grouped_gemm import Groups
from ..ops.routing import Routing
from .checks import check_attended, check_expert_adapter, check_like
from .graph import InGraph
from .mlp_steps import add_branch, add_branch_backward
from .node import Given, Gradients, Node
from .nodes import AFTER_ATTENTION, add_branch_reference, groups_of, named, stream_of
from .norms import norm_reference, normed_again
from .projection import Parts, Projection, flat_parts, needs_in_parts, projection_reference
from .projections import Projections, all_made, of_second_half, of_second_half_loaded
from .router import SOFTMAX, Router, Scores, check_choice, choose_experts, logits_of, rounded, router_backward
from .shared_expert import (
    SharedExpert,
    SharedGradients,
    SharedNeeds,
    check_shared,
    gate_and_up,
    shared_backward,
    shared_reference,
    shared_start,
)
from .sparse_experts import DEFAULT, ExpertOptions, ExpertTensors, tiled_experts, tiled_experts_backward
from .spec import Outputs
from .steps import Joined, JoinedGradients, Optionals, flat_heads, join_backward, join_forward, need_join, shaped

__all__ = ["norm_experts"]


class SparseTensors(NamedTuple):
    """What the node reads beside its projections: the fields of `OutputTensors`, the router's weight, bias and correction, the gate of the
    shared expert's score, the fields of `ExpertTensors`, None for weights in codes, and a and b of their adapters."""

    x: torch.Tensor
    attended: Optionals
    after: Optionals
    before: Optionals
    behind: Optionals
    router: torch.Tensor
    router_bias: Optionals
    correction: Optionals
    shared_gate: Optionals
    gate_up: Optionals
    down: Optionals
    gate_up_bias: Optionals
    down_bias: Optionals
    gate_up_a: Optionals
    gate_up_b: Optionals
    down_a: Optionals
    down_b: Optionals

    @property
    def before_bias(self) -> None:
        """None: experts behind a LayerNorm are called."""
        return None

    @property
    def factors(self) -> ExpertFactors:
        """a and b of both adapters, or their gradients, or which of these are needed."""
        return ExpertFactors(Factors(self.gate_up_a, self.gate_up_b), Factors(self.down_a, self.down_b))


class SparseSpec(NamedTuple):
    """Describes the node. outputs: of the layer. top_k, normalised, by_logits, scores: of `Router`. recompute: whether the backward pass
    makes the first products of all experts again. scalings: of the adapters of gate_up and of down. coded: these weights, None for a
    tensor. tile: the tokens that experts compute at a time, 0 for all."""

    outputs: Outputs
    gate: ExpertOptions
    top_k: int
    normalised: bool
    by_logits: bool
    recompute: bool
    scalings: Tuple[float, float] = (1.0, 1.0)
    coded: Tuple[Optional[CodedExperts], Optional[CodedExperts]] = (None, None)
    tile: int = 0
    scores: Scores = SOFTMAX


class Started(NamedTuple):
    """What the last products read: the output of the experts' first GEMM, in tiles its input, and the shared expert's gated rows times
    their scores."""

    gate_up: torch.Tensor
    scored: Optionals


class SparseSaved(NamedTuple):
    """The tensors that the backward pass reads.

    total, o, rstd, o_rstd, branch, branch_rstd, made: as in `MLPSaved`. scores, expert: of `choose_experts`; logits: as of
    `router_backward`. order, position, ends: of `Routing`, None in tiles. gate_up: the output of the experts' first GEMM. shared_score,
    both: of `shared_start`. The backward pass writes over gate_up and both, and makes them again where they are None.
    """

    total: Optionals
    o: Optionals
    rstd: Optionals
    o_rstd: Optionals
    branch: Optionals
    branch_rstd: Optionals
    scores: torch.Tensor
    expert: torch.Tensor
    logits: Optionals
    order: Any
    position: Any
    ends: Any
    gate_up: Optionals
    shared_score: Any
    both: Optionals
    made: list

    @property
    def routing(self) -> Routing:
        return Routing(self.order, self.position, self.ends)

    @property
    def groups(self) -> Groups:
        return Groups(self.ends, self.expert.numel())


def _adapters(spec: SparseSpec, tensors: SparseTensors) -> ExpertAdapters:
    return ExpertAdapters(*[
        None if a is None else ExpertAdapter(a, b, scaling) for (a, b), scaling in zip(tensors.factors, spec.scalings)
    ])  # fmt: skip


def _experts(spec: SparseSpec, tensors: SparseTensors) -> ExpertTensors:
    gate_up, down = spec.coded
    return ExpertTensors(gate_up or tensors.gate_up, down or tensors.down, tensors.gate_up_bias, tensors.down_bias)


def _factors(spec: SparseSpec, tensors: SparseTensors, dtype: torch.dtype) -> ExpertFactors:
    """Prepares the adapters for products of a dtype."""
    experts = tensors.router.shape[0]
    return ExpertFactors(*[None if each is None else each.factors(experts, dtype) for each in _adapters(spec, tensors)])


def norm_experts_reference(spec: SparseSpec, tensors: SparseTensors, projections: Sequence[Projection], sizes, dtype) -> torch.Tensor:
    """Computes `norm_experts` with PyTorch's operations."""
    x, attended, after, before, behind, router, router_bias, correction, shared_gate, *_ = tensors
    if attended is not None:
        o, *projections = projections
        x = add_branch_reference(x, projection_reference(flat_heads(attended), o), spec.outputs.after, after, spec.outputs.multiplier)
    y = (x if before is None else norm_reference(spec.outputs.before, x, before)).reshape(-1, x.shape[-1])
    logits, kind = logits_of(y, router, router_bias, spec.scores), spec.scores
    scores, expert = choose_experts(logits, spec.top_k, spec.normalised, spec.by_logits, kind, correction)
    gate_up, down, *biases = _experts(spec, tensors)
    weights: Any = [dense(gate_up), dense(down), *biases, *spec.gate, _factors(spec, tensors, y.dtype)]
    out = experts_reference(y, expert, scores.to(y.dtype) if kind.rounds else scores, *weights)
    out = out + shared_reference(y, SharedExpert(shared_gate, projections)) if projections else out
    return add_branch_reference(x, out, spec.outputs.behind, behind, spec.outputs.multiplier)


def _weighted_sum(
    given: Given, gate_up: torch.Tensor, scores: torch.Tensor, expert: torch.Tensor, routing: Routing, groups: Groups,
    factors: ExpertFactors,
):  # fmt: skip
    """Runs the experts from gate_up, as in `Started`, on. scores, expert: of `choose_experts`. factors: of the adapters."""
    tensors, spec = given.tensors, given.layout.spec
    scores = rounded(scores, given.layout.dtype, spec.scores)
    weights, options = _experts(spec, tensors), (spec.gate.transposed, spec.gate.between)
    if spec.tile:
        return tiled_experts(gate_up, expert, scores, weights, spec.gate, factors, spec.tile)
    return experts_finish(gate_up, expert, scores, *weights[1:], routing, groups, *options, factors.down)


def _result(given: Given, total: torch.Tensor, found: torch.Tensor, scored: Any, down: Optional[Projections]):
    """What `add_branch` returns. found: what the experts made, to which the shared one's result is added."""
    if down is not None and down.is_one_product:
        down.again(scored, onto=found, out=found)
    elif down is not None:
        found += down.again(scored)[0]
    return add_branch(given.layout.spec.outputs, given.tensors.x.shape, given.tensors.behind, total, found)


def _forward(given: Given, whole: bool = True) -> Tuple[Sequence, SparseSaved]:
    """whole: False for `Started` instead of the result."""
    layout, tensors, spec = given.layout, given.tensors, given.layout.spec
    projections = of_second_half(groups_of(given), given.whole)
    o, inner, down = named(given, projections)
    total, y, *of_join = join_forward(spec.outputs, tensors, o, layout.dtype)
    logits = logits_of(y, tensors.router, tensors.router_bias, spec.scores)
    scores, expert = choose_experts(logits, spec.top_k, spec.normalised, spec.by_logits, spec.scores, tensors.correction)
    factors, gate_up = _factors(spec, tensors, layout.dtype), y
    routing: Any = (None, None, None)
    groups: Any = None
    if not spec.tile:
        first_weight, transposed = _experts(spec, tensors).gate_up, spec.gate.transposed
        gate_up, routing, groups = experts_start(y, expert, first_weight, transposed, factors.gate_up)
    found = _weighted_sum(given, gate_up, scores, expert, routing, groups, factors) if whole else None
    score = both = scored = None
    if inner is not None:
        score, both, scored = shared_start(y, tensors.shared_gate, inner, down)
    kept = None if spec.recompute or spec.tile else gate_up, score, None if spec.recompute else both
    first: Sequence
    if found is None:
        first, of_branch = Started(gate_up, scored), [None, None]
    else:
        del gate_up, both, y
        out, *of_branch = _result(given, total, found, scored, down)
        first = [out]
    of_total, of_logits = None if tensors.attended is None else total, logits if spec.scores.need_logits(spec.normalised) else None
    saved = of_total, *of_join, *of_branch, scores, expert, of_logits, *routing, *kept, all_made(projections)
    return first, SparseSaved._make(saved)


def _start(given: Given) -> Tuple[Sequence, SparseSaved]:
    return _forward(given, whole=False)


def _finish(given: Given, started: Started, saved: SparseSaved) -> torch.Tensor:
    """Computes the result of a node that has no norm of the experts' branch."""
    _, _, down = named(given, of_second_half_loaded(groups_of(given), saved.made, None))
    spec, tensors = given.layout.spec, given.tensors
    factors = _factors(spec, tensors if spec.tile else tensors._replace(gate_up_a=None), given.layout.dtype)
    found = _weighted_sum(given, started.gate_up, saved.scores, saved.expert, saved.routing, saved.groups, factors)
    return _result(given, stream_of(given, saved), found, started.scored, down)[0]


def _gradients(given: Given, grads: Sequence[torch.Tensor], saved: SparseSaved, need: Gradients) -> Gradients:
    layout, tensors, needed, spec = given.layout, given.tensors, need.tensors, given.layout.spec
    o, inner, down = named(given, of_second_half_loaded(groups_of(given), saved.made, given.whole))
    need_o, need_inner, need_down = named(given, [needs_in_parts(each) for each in layout.by_group(need.parts)])
    need_o = need_o or []
    need_total = need_join(needed, need_o)
    need_logits = need_total or needed.router or needed.router_bias
    need_shared = None if inner is None else SharedNeeds(need_total, needed.shared_gate, need_inner, need_down)
    gate_up: Any = saved.gate_up
    both: Any = saved.both
    x, again = stream_of(given, saved), gate_up is None
    dout, y = grads[0].reshape(x.shape), x  # of which `experts_backward` then reads the shape alone
    weights, factors, need_factors = _experts(spec, tensors), _factors(spec, tensors, layout.dtype), needed.factors
    if needed.gate_up or any(need_factors.gate_up) or needed.router or again or (need_shared is not None and need_shared.reads_input()):
        y = normed_again(spec.outputs.before, x, tensors.before, saved.rstd, layout.dtype)
    if again and not spec.tile:
        gate_up = first_gemm(y, weights.gate_up, saved.order, saved.position, saved.groups, spec.gate.transposed, factors.gate_up)
    if both is None and inner is not None:
        both = gate_and_up(y, inner, again=True)
    of_branch = tensors.behind, saved.branch, saved.branch_rstd
    dbranch, dbehind = add_branch_backward(spec.outputs, dout, *of_branch, layout.dtype, needed.behind)
    inputs = y, saved.expert, rounded(saved.scores, layout.dtype, spec.scores), *weights
    of_weights = needed.gate_up, needed.down, needed.gate_up_bias, needed.down_bias
    needs = [need_total, need_logits, *of_weights]
    if spec.tile:
        gradients = tiled_experts_backward(dbranch, inputs, spec.gate, needs, factors, need_factors, spec.tile)
    else:
        gradients = experts_backward(dbranch, inputs, gate_up, saved.routing, spec.gate, needs, factors, need_factors)
    dy, dscores, *found, of_factors = gradients
    del gradients, gate_up, inputs, weights
    dweights = [gradient if need else None for gradient, need in zip(found, of_weights)]
    for adapter, each in zip(_adapters(spec, tensors), of_factors):
        dweights += (None, None) if adapter is None or each is None else adapter.gradients(each)
    drouter = dbias = None
    if need_logits:
        of_router = saved.scores, saved.expert, saved.logits, (x.shape[0], tensors.router.shape[0])
        dtype = dscores.dtype if spec.scores.wide else layout.dtype  # of the products with the router's weight
        dlogits = router_backward(dscores, *of_router, spec.normalised, dtype, spec.scores)
        drouter = torch.mm(dlogits.t(), y.to(dtype)).to(tensors.router.dtype) if needed.router else None
        dbias = dlogits.sum(0).to(tensors.router.dtype) if needed.router_bias else None
    dshared = SharedGradients(None, None, [], [])
    if need_shared is not None:
        dshared = shared_backward(dbranch, always(y), tensors.shared_gate, saved.shared_score, both, inner, down, need_shared)
    del y, both
    join = JoinedGradients(None, None, None, None, [Parts()] * len(need_o))
    if need_total:
        dy = dy.addmm_(dlogits, tensors.router) if not spec.scores.wide else dy.add_(torch.mm(dlogits, tensors.router.to(dtype)))
        if dshared.y is not None:
            dy += dshared.y
        joined = Joined(x, x, saved.o, saved.rstd, saved.o_rstd)
        join = join_backward(spec.outputs, dy, dout, tensors, joined, o, needed, need_o)
    of_layer = shaped(join.total, grads[0]), join.attended, join.after, join.before, dbehind
    of_node: list = [*of_layer, drouter, dbias, None, dshared.gate, *dweights]
    return Gradients(SparseTensors._make(of_node), flat_parts(join.o, dshared.inner, dshared.down))


def _check(spec: SparseSpec, tensors: SparseTensors, projections: Sequence[Projection], sizes, dtype: torch.dtype) -> None:
    """Raises ValueError when shapes, dtypes or devices do not fit."""
    x, attended, after, before, behind, router, router_bias, correction, shared_gate, *_ = tensors
    gate_up, down, gate_up_bias, down_bias = _experts(spec, tensors)
    need_floats(x=x)
    if x.dim() == 0 or down.dim() != 3:
        fail("weights.down", describe(down), f"[experts, hidden, width], or transposed, for x, which is {describe(x)}")
    if spec.outputs.parallel:
        fail("spec.parallel", True, "False: experts read what attention made of the stream")
    transposed = spec.gate.transposed
    hidden, experts, width = x.shape[-1], down.shape[0], down.shape[1 if transposed else 2]
    if attended is not None:
        o, *projections = projections
        check_attended(x, attended, o, dtype)
    expected: Sequence = (
        ("before", before, (hidden,)),
        ("after", after, (hidden,)),
        ("behind", behind, (hidden,)),
        ("router.weight", router, (experts, hidden), spec.scores.wide),
        ("router.bias", router_bias, (experts,), spec.scores.wide),
        ("router.correction", correction, (experts,), True),
        ("weights.gate_up", gate_up, (experts, hidden, 2 * width) if transposed else (experts, 2 * width, hidden)),
        ("weights.down", down, (experts, width, hidden) if transposed else (experts, hidden, width)),
        ("weights.gate_up_bias", gate_up_bias, (experts, 2 * width)),
        ("weights.down_bias", down_bias, (experts, hidden)),
    )
    for name, tensor, shape, *wide in expected:
        check_like(x, name, tensor, shape, *wide)
    check_expert_adapter(x, "adapters.gate_up", tensors.factors.gate_up, experts, 2 * width, hidden)
    check_expert_adapter(x, "adapters.down", tensors.factors.down, experts, hidden, width)
    check_choice(experts, spec.top_k, spec.normalised, spec.by_logits, spec.scores, correction)
    if projections:
        check_shared(x, SharedExpert(shared_gate, projections))


_node = Node(
    "_NormExperts", _check, norm_experts_reference, _forward, _gradients, _start, _finish,
    in_graph=InGraph("norm_experts", SparseSpec, SparseTensors, SparseSaved, ("correction",)), spends=("gate_up", "both"),
    **AFTER_ATTENTION,
)  # fmt: skip


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
    adapters: ExpertAdapters = NO_ADAPTERS,
    tile: int = 0,
) -> torch.Tensor:
    """Computes total + behind(the weighted sum of what the experts that the router chooses make of before(total)), with total = x or, with
    `attended`, x + after(o(attended)).

    With `shared`, what that expert makes of every token is added to the sum, times its score if it has one. Both branches are multiplied
    by the description's multiplier.

    Differentiable in all tensors but the router's correction; nothing is computed for a weight that does not require a gradient.

    Args:
        x: [..., hidden].
        before, after, behind: [hidden], weights of the norms, or None for no norm.
        router: its weight [experts, hidden], and how it chooses.
        weights: of the experts.
        spec: the description.
        gate: how the experts' weights are laid out.
        attended: [tokens, features] or [batch, tokens, heads, head_dim], attention's output.
        o: attention's output projection, whose tensors may be float32 where x is narrower.
        recompute: whether the experts' first products are recomputed in the backward pass, bit for bit, instead of kept.
        shared: the shared expert, whose projections' tensors may be float32 where x is narrower.
        adapters: of the experts' projections, whose tensors may be float32 where x is narrower.
        tile: the tokens that experts compute at a time, in both passes, a multiple of `TILE_OF`, or 0 for all; more than x has is as 0.

    Returns:
        [..., hidden].

    Raises:
        ValueError: when shapes, dtypes or devices do not fit. All but the projections' and adapters' tensors are of x's dtype and device.
    """
    if (o is None) != (attended is None):
        fail("attended", "None" if attended is None else describe(attended), "it and o, or neither")
    groups: list = [] if o is None else [(o,)]
    if shared is not None:
        groups += shared.projections[:-1], shared.projections[-1:]
    shared_gate = None if shared is None else shared.gate
    of_adapters = [tensor for each in adapters for tensor in (each[:2] if each else (None, None))]
    scalings = adapters.gate_up.scaling if adapters.gate_up else 1.0, adapters.down.scaling if adapters.down else 1.0
    coded = [each if isinstance(each, CodedExperts) else None for each in weights[:2]]
    plain = [None if code else each for code, each in zip((*coded, None, None), weights)]
    of_router = router.weight, router.bias, router.correction
    tensors = SparseTensors(x, attended, after, before, behind, *of_router, shared_gate, *plain, *of_adapters)
    options = gate, router.top_k, router.normalised, router.by_logits, bool(recompute), scalings
    tile = tile if 0 < tile < x.numel() // max(x.shape[-1], 1) else 0
    description = SparseSpec(spec, *options, (coded[0], coded[1]), tile, router.scores)
    with without_autocast(x.device):
        return _node(description, tensors, groups, (), x.dtype)
