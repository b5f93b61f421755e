"""A whole decoder layer in three autograd nodes: norm, q, k, v with their norms and rotary embedding; attention; the output projection,
norms and MLP, or router and experts, with both residual connections. What each family has of that is in its row of the table (`Family`).

A projection is torch.nn.Linear, bitsandbytes' four bits, or PEFT's LoRA around either; under autocast its weight may be wider than the
products. One that is anything else (another adapter, sharded, hooked) is called as the module that it is, and the rest is fused around
it. A layer with anything else unexpected (hooks on its parts, a tracer) runs as transformers wrote it, on the layers of this package.
"""

import functools
import sys
from typing import Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from ...decoder.heads import is_fused
from ...decoder.nodes import norm_attention_inputs, norm_mlp, product_dtype
from ...decoder.norms import add_rms_norm, rms_norm
from ...decoder.projection import Projection
from ...decoder.sparse import norm_experts
from ...decoder.spec import Inputs, Norm, Outputs
from ...ops.common import autocasts, constant, constant_when_traced
from ...ops.rotary import qk_norm_rotary
from ...runtime.device import PLAIN
from ..attention.masks import unless_none
from ..family.arguments import CACHE, SINCE_5_24
from ..family.families import Family
from ..parts.adapters import projection_or_reason, projections
from ..parts.explanation import Reason
from ..parts.facts import follow
from ..parts.lookups import ROTARY, SAVED, Lookups, overridden, replaced_below
from ..parts.modules import (
    ACTIVATIONS,
    OwnForwards,
    all_are_listened_to,
    is_activation,
    original_forward,
    own_class,
    runs_torchs,
    why_not_own,
)
from ..parts.weights import eps_of, held, weight_of
from ..parts.wrapped import inside
from .checkpointing import attend_once, captured_alike, keeps_attention, recomputes_mlp, tile_of, warn_of_called_attention, warn_of_kept_mlp
from .products import explain_products, products_of
from .sparse_block import SparseBlock, is_sparse, sparse_block_or_reason

WHOLE = "decoder layer"  # the part that `explain` names where a layer is not taken apart
Groups = List[Tuple[str, Dict[str, nn.Module]]]  # (part of a layer, its projections by name)


class Mixed(NamedTuple):
    """Holds the result of attention or of another mixer of tokens. attended: [batch, tokens, hidden] after the last projection, or its
    contiguous input, [batch, tokens, heads, head_dim] or [tokens, features]. output: the last projection, None where it has been applied.
    residual: the residual stream."""

    attended: torch.Tensor
    output: Optional[nn.Module]
    residual: torch.Tensor


class FusedLayer(OwnForwards):
    """A row of the table, with what is known of the forwards of its classes. attention_input: what attention calls its input."""

    attention_input = "hidden_states"

    def __init__(self, family: Family):
        super().__init__(family.modeling, *family.classes())
        self.family = family
        self.norms = tuple(name for name in family.norms if name)
        self.head_norms = () if family.qk_norm == "none" else ("q_norm", "k_norm")
        self.of_mlp = (*family.gate_up, family.down)  # the projections
        self.calls_attention, self.calls_mlp = "self_attn" in family.called, family.block in family.called
        self.rotary_functions = () if family.mixers or self.calls_attention else (ROTARY, *family.position_scale[:1])  # of the module
        self.classes = (f"{family.prefix}DecoderLayer", *family.classes())
        self.specs: dict = {}  # descriptions that were made, by what they follow from

    @functools.cached_property
    def lookups(self) -> Lookups:
        """What the forwards of the family look up, except for what this file looks up where they do."""
        found = (own_class(sys.modules[self.modeling], name) for name in self.classes)
        forwards = [inside(getattr(cls, SAVED + "forward", cls.forward)) for cls in found if cls is not None]
        return Lookups(forwards, ("eager_attention_forward", *self.family.position_scale[:1]))

    @constant_when_traced
    def replaced(self) -> str:
        """Says what is not the library's own; "" where all is."""
        return self.lookups.replaced()

    def why_other(self, layer) -> Optional[Reason]:
        """Why a layer computes something else than the row says; None where it does not."""
        for name in self.family.absent:
            found = _parts(layer).get(name) if "." not in name else follow(layer, tuple(name.split(".")))
            if found is not None and found != 0:
                has = f"the layer has {name}, which is called as it is"
                return Reason("model", has if name in _parts(layer) else f"{name} is {found}, so the layer is called as it is")
        return None

    def reason_of_called(self, name: str) -> Reason:
        """Why a part is called as the module that it is. name: the layer's attribute."""
        return Reason("called", f"{self.family.model}'s is called as the module that it is, and the layer around it is fused")

    def norm(self, eps: Optional[float]) -> Norm:
        """The description of one of the family's norms; eps: None for no norm."""
        return Norm() if eps is None else Norm(eps, self.family.offset, self.family.rounds)

    def spec(self, make, *values):
        """make(self, *values), made once for each combination of values."""
        if torch.compiler.is_compiling():  # a graph that looked into the table would be compiled again whenever it grows
            return make(self, *map(constant, values))
        found = self.specs.get((make, values))
        if found is None:
            found = self.specs[make, values] = make(self, *values)
        return found

    def mix(self, layer, x, attention_mask, cache, position_embeddings, kwargs) -> Mixed:
        """Runs attention on x, from the norm in front of it to the input of its output projection."""
        if self.calls_attention:
            warn_of_called_attention(layer)
            norm = _part(layer, self.family.norms.inputs)
            normed = x if norm is None else rms_norm(self.norm(eps_of(norm)), x, weight_of(norm))
            given = {self.attention_input: normed, "attention_mask": attention_mask, CACHE: cache, **kwargs}
            return Mixed(_parts(layer)["self_attn"](position_embeddings=position_embeddings, **given)[0], None, x)
        q, k, v, residual = _attention_inputs(self, layer, x, position_embeddings)
        attention = _parts(layer)["self_attn"]
        if self.family.position_scale:
            q = _scaled_by_position(self, attention, q, kwargs.get("position_ids"))
        if cache is None and keeps_attention(layer) and not attention.attention_dropout:
            conditions = attention_mask, *(position_embeddings or ()), *kwargs.values()
            attended = attend_once(layer, x, conditions, lambda: attend(self, attention, q, k, v, attention_mask, None, kwargs))
        else:
            attended = attend(self, attention, q, k, v, attention_mask, cache, kwargs)
        return Mixed(attended, _parts(attention)["o_proj"], residual)

    def projection_groups(self, layer, x) -> Groups:
        """Groups attention's projections as `explain` shows them."""
        if self.calls_attention:
            return []
        inner, names = _parts(_parts(layer)["self_attn"]), self.family.qkv
        return [(f"norm, {', '.join(names)}, rotary", {name: inner[name] for name in names}), ("o_proj", {"o_proj": inner["o_proj"]})]

    def explain(self, layer, x) -> List[Tuple[str, Optional[Reason]]]:
        """What `explain_layer` says of a layer of the family."""
        return explain_layer(self, layer, x)


def _parts(layer):
    """The submodules of a module by name. nn.Module's own look-up costs 0.4 us each, and a layer is taken apart at every call."""
    return layer.__dict__["_modules"]


def _part(layer, name: Optional[str]):
    return None if name is None else layer.__dict__["_modules"][name]


def has_plain_norm(own: OwnForwards, norm, x) -> bool:
    weight = held(norm, "weight")
    return type(weight) in PLAIN and weight.dtype == x.dtype and own.run_by(norm) and not overridden(type(norm))


def why_not_fusable(own: FusedLayer, layer, x) -> Optional[Reason]:
    """Why the parts of a layer may not be taken apart: they have hooks, or hold other things than the family's. None when they may."""
    if type(x) not in PLAIN or x.dim() != 3:
        return Reason("tensor", "the input is not an ordinary tensor [batch, tokens, hidden]")
    if all_are_listened_to():
        return Reason("hooks", "hooks listen to all modules of the process")
    if x.dtype not in (product_dtype(x), torch.float32):
        return Reason("autocast", f"autocast to {product_dtype(x)} over {x.dtype}")
    parts, family = _parts(layer), own.family
    other = own.why_other(layer)
    if other is not None:
        return other
    apart = not family.mixers and not own.calls_attention
    mlp, inner = parts[family.block], _parts(parts["self_attn"]) if apart else {}
    if apart and not own.run_by(parts["self_attn"]):
        return why_not_own(parts["self_attn"], "self_attn")
    if not own.calls_mlp and not own.run_by(mlp):
        return why_not_own(mlp, family.block)
    for norm in (*[parts[name] for name in own.norms], *[inner[name] for name in own.head_norms]):
        if not has_plain_norm(own, norm, x):
            weight = f"a weight that is not an ordinary tensor of {x.dtype}"
            return Reason("hooks", f"a norm has hooks, a replaced forward, or {weight}")
    gated = not own.calls_mlp and not is_sparse(mlp)
    activation = _parts(mlp).get(family.act) if gated else None
    if gated and not is_activation(activation, family.activation):
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


NAMES = {"silu": "SiLU", "gelu_tanh": "GELU's tanh approximation"}


def explain_layer(own: FusedLayer, layer, x) -> List[Tuple[str, Optional[Reason]]]:
    """[(part, None or why it is not fused)] of a layer for an input [batch, tokens, hidden], as `decoder_layer_forward` decides it."""
    reason = why_not_fusable(own, layer, x)
    if reason is not None:
        return [(WHOLE, reason), *explain_products(layer, (), own.family.down, None)]
    block, family = _parts(layer)[own.family.block], own.family
    dtype, wider = product_dtype(x), autocasts(x.device)
    groups = own.projection_groups(layer, x)
    output = groups[-1][0] if groups else ""
    if not own.calls_mlp and not is_sparse(block):
        groups.append((f"norm, {', '.join(own.of_mlp)}", {name: _parts(block)[name] for name in own.of_mlp}))
    rows = []
    for part, linears in groups:
        reasons = ((name, projection_or_reason(linear, dtype, wider)) for name, linear in linears.items())
        rows.append((part, next((found.of(name) for name, found in reasons if isinstance(found, Reason)), None)))
    if family.sparse is not None and is_sparse(block):
        found = sparse_block_or_reason(own, family.sparse, block, x, dtype)
        adapted = isinstance(found, SparseBlock) and any(found.adapters)
        said = "norm, router, experts" + (" with adapters" if adapted else "") + (", shared expert" if family.sparse.shared else "")
        rows.append((said, found if isinstance(found, Reason) else None))
    for name in family.called:
        rows.append((name, own.reason_of_called(name)))
    last, reason = rows[-1]
    if reason is not None:
        called = Reason("node", f"the node that it would be in is also that of {last}")
        rows = [(part, called if part == output and reason is None else reason) for part, reason in rows]
    dense = () if is_sparse(block) else [(linears, reason) for (_, linears), (_, reason) in zip(groups, rows)]
    return rows + explain_products(layer, dense, family.down, dtype, wider)


def make_inputs(own: FusedLayer, head_dim, eps, head_eps, width, rows) -> Inputs:
    """The description of what stands in front of attention. width: of the angles, None without; rows: of a packed projection's parts."""
    family = own.family
    turned = width if family.partial and width is not None and width < head_dim else 0
    norms = own.norm(eps), own.norm(head_eps)
    return Inputs(head_dim, *norms, family.qk_norm == "whole", "none" if width is None else family.rotary, turned, rows)


def make_outputs(own: FusedLayer, after, before, behind, multiplier) -> Outputs:
    """The description of what follows attention. after, before, behind: the epsilons of its norms."""
    return Outputs(own.norm(after), own.norm(before), own.norm(behind), own.family.activation, multiplier)


def _inputs_spec(own: FusedLayer, attention, norm, q_norm, k_norm, cos) -> Inputs:
    head_dim, rows, head_eps = attention.head_dim, None, eps_of(q_norm)
    if k_norm is not None and eps_of(k_norm) != head_eps:
        raise ValueError(f"q_norm and k_norm have the epsilons {head_eps} and {eps_of(k_norm)}, expected one")
    if len(own.family.qkv) == 1:
        config = attention.config
        keys = config.num_key_value_heads * head_dim
        rows = config.num_attention_heads * head_dim, keys, keys
    return own.spec(make_inputs, head_dim, eps_of(norm), head_eps, None if cos is None else cos.shape[-1], rows)


def _attention_inputs(own: FusedLayer, layer, x, position_embeddings):
    """q, k, v [batch, heads, tokens, head_dim] of the normalised input, and the residual."""
    family, attention = own.family, _parts(layer)["self_attn"]
    norm, inner = _part(layer, family.norms.inputs), _parts(attention)
    q_norm, k_norm = [inner[name] for name in own.head_norms] or (None, None)
    turned = position_embeddings is not None and (family.turned is None or getattr(attention, family.turned))
    cos, sin = position_embeddings if turned else (None, None)
    linears = [inner[name] for name in family.qkv]
    x = x.contiguous()
    spec, weights = _inputs_spec(own, attention, norm, q_norm, k_norm, cos), (weight_of(q_norm), weight_of(k_norm))
    if cos is None or (cos.dtype in (x.dtype, torch.float32) and not cos.requires_grad):
        wider = autocasts(x.device)
        dtype = product_dtype(x) if wider else x.dtype
        found = projections(linears, dtype, wider)
        if found is not None:
            kind = products_of(layer)
            if kind != "bf16" and is_sparse(_parts(layer)[family.block]):
                kind = "bf16"
            return norm_attention_inputs(x, weight_of(norm), found, *weights, cos, sin, x.shape[:2], spec, dtype, kind)
    normed = x if norm is None else rms_norm(spec.norm, x, weight_of(norm))
    projected = [linear(normed) for linear in linears]
    q, k, v = [p.view(*x.shape[:2], -1, spec.head_dim) for p in (projected[0].split(spec.rows, -1) if spec.rows else projected)]
    if q_norm is not None and is_fused(spec) and cos is not None and sin is not None:
        eps, offset, rounds = spec.heads
        return (*qk_norm_rotary(q, k, *weights, cos, sin, eps, offset, rounds, spec.turned), v.transpose(1, 2), x)
    if q_norm is not None:
        q, k = [rms_norm(spec.heads, t.flatten(2) if spec.whole else t, w).view(t.shape) for t, w in zip((q, k), weights)]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return (*((q, k) if cos is None else getattr(sys.modules[family.modeling], ROTARY)(q, k, cos, sin)), v, x)


def _scaled_by_position(own: FusedLayer, attention, q, position_ids):
    """The queries, each multiplied by its position's factor."""
    function, *entries = own.family.position_scale
    scale = getattr(sys.modules[own.modeling], function)(position_ids, *map(attention.config.rope_parameters.get, entries))
    return q * scale.to(q.dtype)


def attend(own: FusedLayer, attention, q, k, v, attention_mask, cache, kwargs):
    """Attention's output [batch, tokens, heads, head_dim], or [tokens, heads * head_dim]."""
    modeling = sys.modules[own.modeling]
    if cache is not None:
        # Since transformers 5.24, a paged cache adds what attention needs to kwargs.
        k, v = cache.update(k, v, attention.layer_idx, **({"kwargs": kwargs} if SINCE_5_24 else {}))
    interface = modeling.ALL_ATTENTION_FUNCTIONS.get_interface(
        attention.config._attn_implementation, modeling.eager_attention_forward
    )
    options = {name: follow(attention, tuple(path)) for name, *path in own.family.options}
    output, _ = interface(
        attention,
        q,
        k,
        v,
        attention_mask,
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        **options,
        **kwargs,
    )
    # A view that autograd knows of would cost the host more than the node, which flattens it.
    return output if output.dim() == 4 and output.is_contiguous() else output.reshape(q.shape[0] * q.shape[2], -1)


def _finish(own: FusedLayer, layer, attended, o_proj, x):
    """The output projection and the MLP or the experts, with both residual connections. attended, o_proj, x: as of `Mixed`.

    | MLP or experts | output projection | what runs                                                                         |
    |----------------|-------------------|-----------------------------------------------------------------------------------|
    | fused          | fused             | one node                                                                          |
    | fused          | called            | attention's branch is added to the residual stream, and the node reads the sum    |
    | called         | called            | norms with the residual connections around the module (`_finish_apart`)           |
    """
    family, parts = own.family, _parts(layer)
    wider = autocasts(x.device)
    dtype = product_dtype(x) if wider else x.dtype
    after, before, behind = [None if name is None else parts[name] for name in family.norms[1:]]
    multiplier = 1.0 if family.multiplier is None else float(getattr(layer, family.multiplier))
    spec = own.spec(make_outputs, eps_of(after), eps_of(before), eps_of(behind), multiplier)
    fused = _fused_block(own, parts[family.block], x, dtype, wider)
    o = None if fused is None or o_proj is None or attended.dtype != dtype else projections((o_proj,), dtype, wider)
    if o is None:
        output = attended if o_proj is None else o_proj(attended.view(*x.shape[:-1], -1))
        if fused is None or (isinstance(fused, SparseBlock) and output.dtype != dtype):
            return _finish_apart(own, spec, layer, output, x)
        x, attended, after = _branch(spec, spec.after, after, output.reshape(x.shape)) + x, None, None
    recompute = recomputes_mlp(layer)
    if isinstance(fused, SparseBlock):
        router, weights, options, shared, adapters = fused
        of_attention = attended, None if o is None else o[0], weight_of(after)
        of_experts = spec, options, *of_attention, recompute, shared, weight_of(behind), adapters
        return norm_experts(x, weight_of(before), router, weights, *of_experts)
    assert fused is not None  # else the layer ended above: without it there is no o
    found = fused if o is None else (*o, *fused)
    norms = weight_of(after), weight_of(behind)
    return norm_mlp(x, weight_of(before), found, spec, attended, *norms, dtype, recompute, products_of(layer), tile_of(layer))


def _fused_block(own: FusedLayer, mlp, x, dtype, wider) -> Union[List[Projection], SparseBlock, None]:
    """The projections of an MLP, or a block of experts, as the nodes take them; None where the module has to be called."""
    if own.calls_mlp:
        return None
    if own.family.sparse is not None and is_sparse(mlp):
        found = sparse_block_or_reason(own, own.family.sparse, mlp, x, dtype)
        return None if isinstance(found, Reason) else found
    linears = _parts(mlp)
    return projections([linears[name] for name in own.of_mlp], dtype, wider)


def _branch(spec: Outputs, norm: Norm, module, output):
    """What a branch adds to the residual stream."""
    output = output if module is None else rms_norm(norm, output, weight_of(module))
    return output if spec.multiplier == 1 else output * spec.multiplier


def _finish_apart(own: FusedLayer, spec: Outputs, layer, output, x):
    """The norms with the residual connections, and between them the MLP or the experts called as the module that they are."""
    warn_of_kept_mlp(layer)
    after, before, behind = [_part(layer, name) for name in own.family.norms[1:]]
    if before is not None and after is None and spec.multiplier == 1 and output.dtype == x.dtype:
        normed, total = add_rms_norm(spec.before, output, x.view(output.shape), weight_of(before))
    else:
        total = x + _branch(spec, spec.after, after, output)
        normed = total if before is None else rms_norm(spec.before, total, weight_of(before))
    found = _parts(layer)[own.family.block](normed)
    return _branch(spec, spec.behind, behind, found[0] if isinstance(found, tuple) else found) + total


def decoder_layer_forward(own: FusedLayer, layer, kwargs):
    """Serves as the forward of a family's decoder layer. kwargs: its arguments by name."""
    return captured_alike(layer, kwargs.get("position_embeddings"), lambda: _run(own, layer, kwargs))


def _run(own: FusedLayer, layer, kwargs):
    hidden_states, attention_mask = kwargs.pop("hidden_states"), unless_none(kwargs.pop("attention_mask", None))
    cache, position_embeddings = kwargs.pop(CACHE, None), kwargs.pop("position_embeddings", None)
    if why_not_fusable(own, layer, hidden_states):
        warn_of_kept_mlp(layer)
        named = {"attention_mask": attention_mask, CACHE: cache, "position_embeddings": position_embeddings}
        return original_forward(layer)(layer, hidden_states, **named, **kwargs)
    return _finish(own, layer, *own.mix(layer, hidden_states, attention_mask, cache, position_embeddings, kwargs))
