"""Takes a block of a router and experts apart into what `norm_experts` computes with."""

import torch

from ..decoder.sparse import ExpertOptions, ExpertTensors, Router
from ..runtime.device import PLAIN
from .experts import experts_or_reason, is_default
from .explanation import Reason
from .families import Sparse
from .modules import OwnForwards, is_marked, own_forward


def is_sparse(mlp) -> bool:
    """Tells a block of a router and experts from the MLP of a dense layer."""
    return "experts" in mlp.__dict__["_modules"]


def sparse_block_or_reason(own: OwnForwards, sparse: Sparse, block, x, dtype: torch.dtype):
    """(router, experts' weights, how they are laid out) of a block, for an input x whose products are of a dtype; or the `Reason`
    why its router and its experts are called as the modules that they are."""
    if torch.compiler.is_compiling():
        return Reason("called", "torch.compile")
    parts = block.__dict__["_modules"]
    router, experts = parts[sparse.router], parts["experts"]
    if not own.run_by(router):
        return Reason("hooks", "the router has hooks (output_router_logits=True puts one there), or a forward that someone else gave it")
    if not is_marked(own_forward(experts)):
        return Reason("hooks", "experts have hooks, or a forward that someone else gave them, as PEFT's target_parameters do")
    if not is_default(experts):
        return Reason("called", "set_experts_implementation() chose another implementation of experts")
    if getattr(experts, "_is_expert_parallel", False):
        return Reason("called", "experts are spread over processes")
    found = experts_or_reason(experts)
    if isinstance(found, Reason):
        return found
    weights, options = found
    parameters = router.__dict__["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    for each in (weight, *([] if bias is None else [bias]), *weights):
        if type(each) not in PLAIN or not each.dtype == x.dtype == dtype:
            return Reason("dtype", f"the weights of router and experts, the input and the products are not all {dtype}")
    normalised = sparse.by_logits or router.norm_topk_prob
    return Router(weight, router.top_k, normalised, bias, sparse.by_logits), ExpertTensors(*weights), ExpertOptions(**options)
