"""Whether the parts of a decoder layer may be taken apart, and what `explain` says of each. own: what serves it, a `FusedLayer`."""

import sys
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from ...decoder.nodes import product_dtype
from ...ops.autograd import autocasts
from ...runtime.device import PLAIN
from ..parts.adapters import projection_or_reason
from ..parts.explanation import Reason
from ..parts.lookups import overridden, replaced_below
from ..parts.modules import ACTIVATIONS, all_are_listened_to, is_activation, runs_torchs, why_not_own
from ..parts.weights import held
from .products import explain_products
from .sparse_block import SparseBlock, is_sparse, sparse_block_or_reason

__all__ = ["WHOLE", "Groups", "explain_layer", "has_plain_norm", "parts_of", "why_not_fusable"]

WHOLE = "decoder layer"  # the part that `explain` names where a layer is not taken apart
Groups = List[Tuple[str, Dict[str, nn.Module]]]  # (part of a layer, its projections by name)


def parts_of(layer):
    """The submodules of a module by name. nn.Module's own look-up costs 0.4 us each, and a layer is taken apart at every call."""
    return layer.__dict__["_modules"]


def has_plain_norm(own: Any, norm, x) -> bool:
    weight, bias = held(norm, "weight"), held(norm, "bias")
    if bias is None and getattr(type(norm), "bias", None) is not None:  # a property: a parametrization, which makes it at each look
        return False
    if bias is not None and (not own.family.centred or type(bias) not in PLAIN or bias.dtype != x.dtype):
        return False
    plain = weight is None if own.family.weightless else type(weight) in PLAIN and weight.dtype == x.dtype
    return plain and own.run_by(norm) and not overridden(type(norm))


def why_not_fusable(own: Any, layer, x) -> Optional[Reason]:
    """Why the parts of a layer may not be taken apart: they have hooks, or hold other things than the family's. None when they may."""
    if type(x) not in PLAIN or x.dim() != 3:
        return Reason("tensor", "the input is not an ordinary tensor [batch, tokens, hidden]")
    if all_are_listened_to():
        return Reason("hooks", "hooks listen to all modules of the process")
    if x.dtype not in (product_dtype(x), torch.float32):
        return Reason("autocast", f"autocast to {product_dtype(x)} over {x.dtype}")
    parts, family = parts_of(layer), own.family
    other = own.why_other(layer)
    if other is not None:
        return other
    apart = not family.mixers and not own.calls_attention
    mlp, inner = parts[family.block], parts_of(parts[family.attention]) if apart else {}
    if apart and not own.run_by(parts[family.attention]):
        return why_not_own(parts[family.attention], family.attention)
    if not own.calls_mlp and not own.run_by(mlp):
        return why_not_own(mlp, family.block)
    for norm in (*[parts[name] for name in own.norms], *[inner[name] for name in own.head_norms]):
        if not has_plain_norm(own, norm, x):
            weight = f"a weight that is not an ordinary tensor of {x.dtype}"
            return Reason("hooks", f"a norm has hooks, a replaced forward, or {weight}")
    activates = not own.calls_mlp and not is_sparse(mlp) and family.act != ""  # a function is among `own.replaced`
    activation = parts_of(mlp).get(family.act) if activates else None
    if activates and not is_activation(activation, family.activation):
        if isinstance(activation, (nn.SiLU, sys.modules[ACTIVATIONS].SiLUActivation)) and replaced_below(type(activation).forward):
            return Reason("below", replaced_below(type(activation).forward))
        return Reason("hooks", f"the activation of {family.block} is not {NAMES[family.activation]}, or has hooks")
    for name in family.dropouts:
        if type(parts[name]) is not nn.Dropout or not runs_torchs(parts[name], nn.Dropout) or (parts[name].p and layer.training):
            return Reason("model", f"{name} zeroes elements, or is not torch.nn.Dropout")
    for function in own.rotary_functions:
        if not own.rotary(function):
            return Reason("replaced", f"{function} is not transformers' own")
    replaced = own.replaced()
    if replaced:
        return Reason("below", replaced)
    if family.multiplier is not None and not isinstance(getattr(layer, family.multiplier), (int, float)):
        return Reason("model", f"{family.multiplier} is not a number: a tensor may want a gradient")
    return None


NAMES = {"silu": "SiLU", "gelu_tanh": "GELU's tanh approximation", "gelu": "GELU", "relu2": "the square of ReLU"}


def explain_layer(own: Any, layer, x) -> List[Tuple[str, Optional[Reason]]]:
    """[(part, None or why it is not fused)] of a layer for an input [batch, tokens, hidden], as `decoder_layer_forward` decides it."""
    reason = why_not_fusable(own, layer, x)
    if reason is not None:
        return [(WHOLE, reason), *explain_products(layer, (), own.family.down, None)]
    block, family = parts_of(layer)[own.family.block], own.family
    dtype, wider = product_dtype(x), autocasts(x.device)
    groups = own.projection_groups(layer, x)
    output = groups[-1][0] if groups else ""
    between = [(family.attention, own.reason_of_called(family.attention))] if groups and own.calls_attention else []
    if not own.calls_mlp and not is_sparse(block):
        groups.append((f"norm, {', '.join(own.of_mlp)}", {name: parts_of(block)[name] for name in own.of_mlp}))
    rows = []
    for part, linears in groups:
        reasons = ((name, projection_or_reason(linear, dtype, wider)) for name, linear in linears.items())
        rows.append((part, next((found.of(name) for name, found in reasons if isinstance(found, Reason)), None)))
    experts = False if is_sparse(block) else None
    if family.sparse is not None and is_sparse(block):
        found = sparse_block_or_reason(own, family.sparse, block, x, dtype, parts_of(layer).get(family.beside))
        adapted = isinstance(found, SparseBlock) and any(found.adapters)
        said = "norm, router, experts" + (" with adapters" if adapted else "") + (", shared expert" if family.sparse.shared else "")
        rows.append((said, found if isinstance(found, Reason) else None))
        experts = not isinstance(found, Reason)
    rows += [(name, own.reason_of_called(name)) for name in family.called if not between or name != family.attention]
    last, reason = rows[-1]
    if reason is not None:
        called = Reason("node", f"the node that it would be in is also that of {last}")
        rows = [(part, called if part == output and reason is None else reason) for part, reason in rows]
    dense = [] if is_sparse(block) else [(linears, reason) for (_, linears), (_, reason) in zip(groups, rows)]
    if dense and (between or (family.mixers and output)) and dense[0][1] is None:
        dense[0] = dense[0][0], Reason("eight_bits", "what mixes tokens is not in their node, which multiplies in the model's dtype")
    return between + rows + explain_products(layer, dense, family.down, dtype, wider, experts)
