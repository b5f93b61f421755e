"""Takes Qwen3-MoE's block of a router and experts apart into what `norm_experts` computes with."""

import torch

from .shared.hf.experts import experts_or_reason, is_default
from .shared.hf.modules import OwnForwards, is_marked, own_forward
from .shared.ops.sparse_nodes import Router
from .shared.runtime.device import PLAIN


def is_sparse(mlp) -> bool:
    """Tells a block of a router and experts from the MLP of a dense layer."""
    return "experts" in mlp.__dict__["_modules"]


def sparse_block_or_reason(own: OwnForwards, block, x, dtype: torch.dtype):
    """(router, weights to gate and up, weights to down) of a Qwen3MoeSparseMoeBlock, for an input x whose products are of a dtype; or as
    text, why its router and its experts are called as the modules that they are."""
    if torch.compiler.is_compiling():
        return "torch.compile"
    parts = block.__dict__["_modules"]
    router, experts = parts["gate"], parts["experts"]
    if not own.run_by(router):
        return "the router has hooks (output_router_logits=True puts one there), or a forward that someone else gave it"
    if not is_marked(own_forward(experts)):
        return "experts have hooks, or a forward that someone else gave them, as PEFT's target_parameters do"
    if not is_default(experts):
        return "set_experts_implementation() chose another implementation of experts"
    if getattr(experts, "_is_expert_parallel", False):
        return "experts are spread over processes"
    found = experts_or_reason(experts)
    if isinstance(found, str):
        return found
    weights, options = found
    if options["interleaved"] or options["transposed"] or options["alpha"] or len(weights) != 2:
        return "experts are laid out in another way than Qwen3-MoE's"
    weight = router.__dict__["_parameters"].get("weight")
    for each in (weight, *weights):
        if type(each) not in PLAIN or not each.dtype == x.dtype == dtype:
            return f"the weights of router and experts, the input and the products are not all {dtype}"
    return (Router(weight, router.top_k, router.norm_topk_prob), *weights)
