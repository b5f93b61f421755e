"""Takes a block of a router and experts apart into what `norm_experts` computes with."""

from typing import Any, NamedTuple, Optional, Union

import torch

from ...decoder.projection import is_traceable
from ...decoder.router import Scores
from ...decoder.shared_expert import SharedExpert
from ...decoder.sparse import ExpertOptions, ExpertTensors, Router
from ...ops.expert_adapters import ExpertAdapters
from ...ops.four_bits import CodedExperts
from ...runtime.device import PLAIN
from ..family.experts import experts_or_reason, is_default
from ..family.families import Scored, Sparse
from ..family.ownership import runs_ours
from ..parts.adapters import expert_adapters_or_reason, inside_wrappers, projection_or_reason, router_weight_or_reason
from ..parts.explanation import Reason
from ..parts.facts import follow
from ..parts.modules import OwnForwards, is_marked, is_silu, own_forward
from ..parts.weights import held, why_not_plain

__all__ = ["SparseBlock", "is_sparse", "sparse_block_or_reason"]


class SparseBlock(NamedTuple):
    """What `norm_experts` computes with."""

    router: Router
    weights: ExpertTensors
    options: ExpertOptions
    shared: Optional[SharedExpert]
    adapters: ExpertAdapters


def is_sparse(mlp) -> bool:
    """Tells a block of a router and experts from the MLP of a dense layer."""
    return "experts" in mlp.__dict__["_modules"]


def sparse_block_or_reason(own: OwnForwards, sparse: Sparse, block, x, dtype: torch.dtype, beside=None) -> Union[SparseBlock, Reason]:
    """Takes a block apart, for an input x whose products are of a dtype; or gives the `Reason` why its router and its experts are called
    as the modules that they are. beside: the layer's MLP whose result is added to the block's, or None."""
    parts = block.__dict__["_modules"]
    router, experts = inside_wrappers(parts[sparse.router]), inside_wrappers(parts["experts"])
    if getattr(experts, "_is_expert_parallel", False):
        ours = not torch.compiler.is_compiling() and runs_ours(experts)
        what = "Bastile's grouped products run between transformers' exchanges" if ours else "they are transformers' own"
        return Reason("called", f"experts are spread over processes (ep_size): {what}")
    if not all(map(own.run_by, (router, *router.__dict__["_modules"].values()))):
        return Reason("hooks", "the router has hooks (output_router_logits=True puts one there), or a replaced forward")
    if not is_marked(own_forward(experts)):
        return Reason("hooks", "experts have hooks, or a replaced forward")
    if not is_default(experts):
        return Reason("called", "set_experts_implementation() chose another implementation of experts")
    found = experts_or_reason(experts)
    if isinstance(found, Reason):
        return found
    weights, options = found
    if torch.compiler.is_compiling() and any(isinstance(each, CodedExperts) for each in weights):
        return Reason("called", "torch.compile, for experts in four bits")
    weight, bias = held(router, "weight"), held(router, "bias")
    correction, scores = _correction(sparse, block, router), _scores(sparse.scored, router, weight)
    if isinstance(scores, Reason):
        return scores
    wide = [*([weight] if scores.wide else []), *([] if correction is None else [correction])]  # may be
    for each in (weight, *([] if bias is None else [bias]), *wide, *weights):
        fits = each.dtype == x.dtype or any(each is one and each.dtype == torch.float32 for one in wide)
        if type(each) not in (*PLAIN, CodedExperts) or not fits or x.dtype != dtype:
            return Reason("dtype", f"the weights of router and experts, the input and the products are not all {dtype}")
    weight = router_weight_or_reason(parts[sparse.router], dtype, weight)
    if isinstance(weight, Reason):
        return weight.of("the router")
    adapters = expert_adapters_or_reason(parts["experts"], dtype, weights[0], options["transposed"])
    if isinstance(adapters, Reason):
        return adapters
    shared = _shared_or_reason(own, sparse, parts if beside is None else {sparse.shared: beside}, x, dtype) if sparse.shared else None
    if isinstance(shared, Reason):
        return shared
    normalised = sparse.scored.normalised
    if normalised is None:
        normalised = sparse.by_logits or router.__dict__.get("norm_topk_prob", True)  # Qwen3.5-MoE's always is
    made = Router(weight, router.top_k, normalised, bias, sparse.by_logits, correction, scores)
    return SparseBlock(made, ExpertTensors(*weights), ExpertOptions(**options), shared, adapters)


def _correction(sparse: Sparse, block, router) -> Any:
    """What is added to scores where experts are chosen, [experts], or None. router: without what is around it."""
    first, *rest = sparse.scored.correction or ("",)
    found: Any = follow(router, tuple(rest)) if first == sparse.router else getattr(block, first) if first else None
    return found if found is None or found.dim() == 1 else found.detach().reshape(-1)


def _scores(scored: Scored, router, weight: torch.Tensor) -> Union[Scores, Reason]:
    """How a router scores now. weight: its own, [experts, hidden], or a piece of it while FSDP has no forward pass."""
    names = {"factor": scored.factor, "least": scored.least, **dict(zip(("groups", "chosen"), scored.groups))}
    held = {field: router.__dict__[name] for field, name in names.items() if name}
    if not all(type(value) in (int, float) for value in held.values()):
        return Reason("model", f"{', '.join(filter(None, names.values()))} of the router are not all numbers")
    kind = scored.kind._replace(**held) if held else scored.kind
    among = kind.chosen * weight.shape[0] // kind.groups
    if kind.chosen < kind.groups and weight.dim() == 2 and router.top_k > among:  # the others' scores are what the router masks them with
        return Reason("model", f"top_k is {router.top_k}, and the groups that are chosen have {among} experts")
    return kind


def _shared_or_reason(own: OwnForwards, sparse: Sparse, parts, x, dtype: torch.dtype) -> Union[SharedExpert, Reason]:
    """Takes apart the expert that every token goes to. parts: of the block or of the layer, whichever holds it."""
    name = sparse.shared
    expert, weight = parts[name], None
    inner = expert.__dict__["_modules"]
    if not own.run_by(expert) or not (sparse.act == "" or is_silu(inner[sparse.act])):
        return Reason("hooks", f"{name} has hooks, a replaced forward, or another activation than SiLU")
    if sparse.gated:
        reason = why_not_plain(parts[f"{name}_gate"])
        if reason is not None:
            return reason.of(f"{name}_gate")
        weight = held(parts[f"{name}_gate"], "weight")
        if weight.dtype != x.dtype:
            return Reason("dtype", f"the weight of {name}_gate is {weight.dtype}, the input {x.dtype}")
    found = []
    for each in sparse.projections:
        projection = projection_or_reason(inner[each], dtype)
        if isinstance(projection, Reason):
            return projection.of(f"{name}.{each}")
        if torch.compiler.is_compiling() and not is_traceable(projection):
            return Reason("called", "torch.compile, for an adapter with dropout or a weight in four bits").of(f"{name}.{each}")
        found.append(projection)
    if sparse.gated and (found[-1].bias is not None or found[-1].adapter_bias is not None):
        return Reason("bias", f"{name}.{sparse.projections[-1]} has a bias, which its score does not multiply in one product")
    return SharedExpert(weight, found)
