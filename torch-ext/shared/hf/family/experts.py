"""The forward of a layer of experts, and the same as an implementation that transformers lets a user choose."""

import sys
from contextlib import nullcontext
from typing import Any, Iterable

import torch

from ...ops.autograd import autocasts
from ...ops.experts import experts
from ...ops.four_bits import CodedExperts, dense
from ...ops.operators import constant_when_traced
from ...runtime.device import PLAIN
from ..parts.explanation import Reason
from ..parts.four_bit_experts import weight_or_codes
from ..parts.lookups import replaced_below
from ..parts.modules import is_silu, is_transformers_own, original_forward
from ..parts.offers import offer, withdraw

__all__ = ["MOE", "WEIGHTS", "experts_forward", "experts_gate", "experts_or_reason", "is_default", "register_experts", "unregister_experts"]

WEIGHTS = "gate_up_proj", "down_proj"
MOE = "transformers.integrations.moe"
EXPERTS = "bastile"  # the name of our implementation among transformers' implementations of experts


def experts_gate(layer):
    """The gate of a module of experts as `experts` takes it, or None for one that it does not know.

    `_apply_gate` is what transformers' implementations call between the two projections: its own default one for gate before up,
    and GPT-OSS's, which is told by its two constants.
    """
    gate: Any = getattr(type(layer), "_apply_gate", None)
    module = getattr(gate, "__module__", "")
    if gate is None or not getattr(layer, "has_gate", False) or getattr(layer, "has_post_expert_norm", False):
        return None
    if not _is_own_gate(gate):
        return None
    if module == MOE:
        known = layer.is_concatenated and is_silu(layer.act_fn)
        return {"interleaved": False, "alpha": 0.0, "limit": float("inf")} if known else None
    if module.startswith("transformers.models.gpt_oss.") and not layer.is_concatenated:
        return {"interleaved": True, "alpha": layer.alpha, "limit": layer.limit}
    return None


@constant_when_traced
def _is_own_gate(gate) -> bool:
    return is_transformers_own(gate, gate.__module__, gate.__qualname__) and not replaced_below(gate)


def experts_or_reason(layer):
    """(weights and biases, gate) of a module of transformers' with `gate_up_proj` and `down_proj`, as `experts` takes them, but for weights
    in four bits, which are `CodedExperts`; or the `Reason` why `experts` is not for it."""
    gate = experts_gate(layer)
    if gate is None:
        return Reason("called", "the gate of experts is one that is not known")
    replaced = replaced_below(sys.modules[MOE].grouped_mm_experts_forward) or replaced_below(original_forward(layer))
    if replaced:
        return Reason("below", replaced)
    weights = [weight_or_codes(layer, name) for name in WEIGHTS]
    if layer.has_bias:
        weights += [layer.gate_up_proj_bias, layer.down_proj_bias]
    if not all(type(weight) in (*PLAIN, CodedExperts) and weight.dtype == weights[0].dtype for weight in weights):
        return Reason("tensor", "a weight of experts is not an ordinary tensor, or of another dtype than the others")
    return weights, {**gate, "transposed": layer.is_transposed}


def _known_experts(layer, hidden, index, scores):
    """The result of `experts` for a module that it is for; else None."""
    found = None if index is None or scores is None else experts_or_reason(layer)
    if found is None or isinstance(found, Reason) or not all(type(tensor) in PLAIN for tensor in (hidden, index, scores)):
        return None
    weights, options = [dense(each) for each in found[0]], found[1]
    flat = hidden.reshape(-1, hidden.shape[-1]).to(weights[0].dtype)
    # Under autocast transformers' grouped GEMMs run in the dtype of the weights too.
    with torch.autocast(hidden.device.type, enabled=False) if autocasts(hidden.device) else nullcontext():
        result = experts(flat, index, scores, *weights, **options)
    return result.view(hidden.shape).to(hidden.dtype)


def is_default(layer) -> bool:
    """True where transformers would run its default, grouped_mm, or ours: any other implementation of experts is the user's choice."""
    name = getattr(getattr(layer, "config", None), "_experts_implementation", None)
    if name is None or name == EXPERTS:
        return True
    moe = sys.modules[MOE]
    chosen = moe.ALL_EXPERTS_FUNCTIONS.get(name) if name == "grouped_mm" else None
    return is_transformers_own(chosen, MOE, "grouped_mm_experts_forward")


def experts_forward(layer, hidden, index, scores):
    """Serves as the forward of a class that transformers' `use_experts_implementation` decorates, where its model has transformers' default
    implementation.

    hidden: [..., hidden]; index: [tokens, top-k], in which an id from the number of experts on is none of them; scores: [tokens, top-k].
    """
    found = _known_experts(layer, hidden, index, scores) if is_default(layer) else None
    return original_forward(layer)(layer, hidden, index, scores) if found is None else found


def experts_implementation(layer, hidden, index, scores):
    """Serves as one of transformers' implementations of experts, with the arguments of `experts_forward`. What it does not know runs in
    transformers' grouped_mm."""
    found = _known_experts(layer, hidden, index, scores)
    if found is not None:
        return found
    return sys.modules[MOE].grouped_mm_experts_forward(layer, hidden, index, scores)


def register_experts() -> None:
    """Makes experts_implementation="bastile" a choice when a model is loaded."""
    offer(MOE, "ExpertsInterface", EXPERTS, experts_implementation, __name__)


def unregister_experts(modules: Iterable) -> None:
    """Takes the choice back, unless another package offers it too or one of the modules still asks for it."""
    asked = (getattr(vars(module).get("config"), "_experts_implementation", None) == EXPERTS for module in modules)
    withdraw(MOE, "ExpertsInterface", EXPERTS, __name__, lambda: any(asked))
