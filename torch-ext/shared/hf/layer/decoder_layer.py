"""A whole decoder layer in three autograd nodes: norm, q, k, v with their norms and rotary embedding; attention; the output projection,
norms and MLP, or router and experts, with both residual connections. What each family has of that is in its row of the table (`Family`).

A projection is torch.nn.Linear, bitsandbytes' four bits, or PEFT's LoRA around either; under autocast its weight may be wider than the
products. One that is anything else (another adapter, sharded, hooked) is called as the module that it is, and the rest is fused around
it. A layer with anything else unexpected (hooks on its parts, a tracer) runs as transformers wrote it, on the layers of this package.
"""

import functools
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from ...decoder.heads import is_fused
from ...decoder.nodes import norm_attention_inputs, norm_mlp, product_dtype
from ...decoder.norms import add_rms_norm, any_norm, rms_norm
from ...decoder.projection import Projection
from ...decoder.sparse import norm_experts
from ...decoder.spec import Inputs, Norm, Outputs
from ...ops.autograd import autocasts
from ...ops.operators import constant, constant_when_traced
from ...ops.rotary import qk_norm_rotary
from ..attention.masks import unless_none
from ..family.arguments import CACHE, SINCE_5_24
from ..family.families import Family
from ..parts.adapters import projections
from ..parts.explanation import Reason
from ..parts.facts import follow
from ..parts.lookups import ROTARY, Lookups, original_forward_of
from ..parts.modules import OwnForwards, original_forward, own_class, runs_torchs
from ..parts.weights import bias_of, eps_of, weight_of
from .checkpointing import attend_once, captured_alike, keeps_attention, recomputes_mlp, tile_of, warn_of_called_attention, warn_of_kept_mlp
from .fusable import Groups, explain_layer, parts_of, why_not_fusable
from .products import products_of
from .sparse_block import SparseBlock, is_sparse, sparse_block_or_reason

__all__ = ["FusedLayer", "Mixed", "attend", "decoder_layer_forward", "make_inputs", "make_outputs"]


class Mixed(NamedTuple):
    """Holds the result of attention or of another mixer of tokens. attended: [batch, tokens, hidden] after the last projection, or its
    contiguous input, [batch, tokens, heads, head_dim] or [tokens, features]. output: the last projection, None where it has been applied.
    residual: the residual stream. normed: what a norm that is called made of it, None without one. others: what a module that was called
    returned beside its result."""

    attended: torch.Tensor
    output: Optional[nn.Module]
    residual: torch.Tensor
    normed: Optional[torch.Tensor] = None
    others: Tuple[Any, ...] = ()


class FusedLayer(OwnForwards):
    """A row of the table, with what is known of the forwards of its classes. attention_input: what attention calls its input."""

    attention_input = "hidden_states"

    def __init__(self, family: Family):
        super().__init__(family.modeling, *family.classes())
        self.family = family
        self.norms = tuple(name for name in family.norms if name and name not in family.called)
        self.of_mlp = (*family.gate_up, family.down)  # the projections
        self.calls_attention, self.calls_mlp = family.attention in family.called, family.block in family.called
        self.head_norms = () if family.qk_norm == "none" or self.calls_attention else family.head_norms
        self.rotary_functions = () if family.mixers or self.calls_attention else (ROTARY, *family.position_scale[:1])  # of the module
        self.classes = (f"{family.prefix}DecoderLayer", *family.classes())
        self.specs: dict = {}  # descriptions that were made, by what they follow from

    @functools.cached_property
    def lookups(self) -> Lookups:
        """What the forwards of the family look up, except for what this file looks up where they do."""
        found = (own_class(sys.modules[self.modeling], name) for name in self.classes)
        forwards = [original_forward_of(cls) for cls in found if cls is not None]
        return Lookups(forwards, ("eager_attention_forward", *self.family.position_scale[:1]))

    @constant_when_traced
    def replaced(self) -> str:
        """Says what is not the library's own; "" where all is."""
        return self.lookups.replaced()

    def why_other(self, layer) -> Optional[Reason]:
        """Why a layer computes something else than the row says; None where it does not."""
        for name in self.family.absent:
            found = parts_of(layer).get(name) if "." not in name else follow(layer, tuple(name.split(".")))
            if found is not None and found != 0:
                has = f"the layer has {name}, which is called as it is"
                return Reason("model", has if name in parts_of(layer) else f"{name} is {found}, so the layer is called as it is")
        return None

    def reason_of_called(self, name: str) -> Reason:
        """Why a part is called as the module that it is. name: the layer's attribute."""
        return Reason("called", f"{self.family.model}'s is called as the module that it is, and the layer around it is fused")

    def norm(self, eps: Optional[float]) -> Norm:
        """The description of one of the family's norms; eps: None for no norm."""
        family = self.family
        return Norm() if eps is None else Norm(eps, family.offset, family.rounds, family.centred, family.weightless is None)

    def eps(self, norm) -> Optional[float]:
        """The epsilon of one of the family's norms, None for no norm."""
        return eps_of(norm) if norm is None or self.family.weightless is None else self.family.weightless

    def turns(self, attention) -> bool:
        """Whether an attention turns its heads by the rotary embedding."""
        family = self.family
        name = family.windowed if family.windowed and attention.sliding_window is not None else family.turned
        return name is None or bool(getattr(attention, name))

    def run_by(self, module) -> bool:
        """Extends `OwnForwards.run_by` to torch.nn.LayerNorm, in families whose norms compute the same."""
        if type(module) is not nn.LayerNorm:
            return super().run_by(module)
        alike = self.family.centred and not self.family.offset and len(module.normalized_shape) == 1
        return alike and runs_torchs(module, nn.LayerNorm)

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
        norm, attention = self.family.norms.inputs, parts_of(layer)[self.family.attention]
        if self.calls_attention:
            warn_of_called_attention(layer)
            given = {"attention_mask": attention_mask, CACHE: cache, "position_embeddings": position_embeddings, **kwargs}
            return self.mix_by_call(layer, attention, x, given)
        normed = self.normed(layer, norm, x) if norm in self.family.called else None
        q, k, v, residual = _attention_inputs(self, layer, x if normed is None else normed, position_embeddings)
        if self.family.position_scale:
            q = _scaled_by_position(self, attention, q, kwargs.get("position_ids"))
        if cache is None and keeps_attention(layer) and not dropout_of(self.family, attention):
            conditions = attention_mask, *(position_embeddings or ()), *kwargs.values()
            attended = attend_once(layer, x, conditions, lambda: attend(self, attention, q, k, v, attention_mask, None, kwargs))
        else:
            attended = attend(self, attention, q, k, v, attention_mask, cache, kwargs)
        return Mixed(attended, parts_of(attention)[self.family.output], residual if normed is None else x, normed)

    def mix_by_call(self, layer, attention, x, given: Dict[str, Any]) -> Mixed:
        """Calls attention as a module, after the norm in front of it. given: as of `call_attention`."""
        normed = self.normed(layer, self.family.norms.inputs, x)
        attended, *others = self.call_attention(attention, normed, given)
        return Mixed(attended, None, x, normed, tuple(others))

    def call_attention(self, attention, normed, given: Dict[str, Any]) -> Tuple[Any, ...]:
        """Calls attention as the module that it is. given: what the layer has, by its own names. Returns the results."""
        return attention(**{self.attention_input: normed, **given})

    def fused_norm(self, layer, name: Optional[str]) -> Optional[nn.Module]:
        """A norm of the layer that is not called as the module that it is."""
        return None if name is None or name in self.family.called else parts_of(layer)[name]

    def normed(self, layer, name: Optional[str], x):
        """x behind a norm of the layer, where there is one."""
        norm = self.fused_norm(layer, name)
        if norm is not None:
            return any_norm(self.norm(self.eps(norm)), x, weight_of(norm), bias_of(norm))
        return x if name is None else parts_of(layer)[name](x)

    def returned(self, layer, x, mixed: Mixed, given: Dict[str, Any]) -> Any:
        """Returns the result of a layer. x: the residual stream after both branches; given: as of `call_attention`."""
        return x

    def projection_groups(self, layer, x) -> Groups:
        """Groups attention's projections as `explain` shows them."""
        if self.calls_attention:
            return []
        inner, names, last = parts_of(parts_of(layer)[self.family.attention]), self.family.qkv, self.family.output
        norm = [] if self.family.norms.inputs in self.family.called else ["norm"]
        rotary = ["rotary"] if "position_embeddings" in self.family.takes else []
        return [(", ".join([*norm, *names, *rotary]), {name: inner[name] for name in names}), (last, {last: inner[last]})]

    def explain(self, layer, x) -> List[Tuple[str, Optional[Reason]]]:
        """What `explain_layer` says of a layer of the family."""
        return explain_layer(self, layer, x)


def make_inputs(own: FusedLayer, head_dim, eps, head_eps, width, rows) -> Inputs:
    """The description of what stands in front of attention. width: of the angles, None without; rows: of a packed projection's parts."""
    family = own.family
    turned = width if family.partial and width is not None and width < head_dim else 0
    norms = own.norm(eps), own.norm(head_eps)
    rotary = "none" if width is None else family.rotary
    return Inputs(head_dim, *norms, family.qk_norm == "whole", rotary, turned, rows, family.turned_first)


def make_outputs(own: FusedLayer, after, before, behind, multiplier) -> Outputs:
    """The description of what follows attention. after, before, behind: the epsilons of its norms."""
    norms = own.norm(after), own.norm(before), own.norm(behind)
    return Outputs(*norms, own.family.activation, multiplier, own.family.gated, own.family.parallel)


def _inputs_spec(own: FusedLayer, attention, norm, q_norm, k_norm, width) -> Inputs:
    head_dim, rows, head_eps = attention.head_dim, None, eps_of(q_norm)
    if k_norm is not None and eps_of(k_norm) != head_eps:
        raise ValueError(f"q_norm and k_norm have the epsilons {head_eps} and {eps_of(k_norm)}, expected one")
    if len(own.family.qkv) == 1:
        config = attention.config
        keys = config.num_key_value_heads * head_dim
        rows = config.num_attention_heads * head_dim, keys, keys
    return own.spec(make_inputs, head_dim, own.eps(norm), head_eps, width, rows)


def _attention_inputs(own: FusedLayer, layer, x, position_embeddings):
    """q, k, v [batch, heads, tokens, head_dim] of the normalised input, and the residual; of a norm that is called x is the result."""
    family, attention = own.family, parts_of(layer)[own.family.attention]
    norm, inner = own.fused_norm(layer, family.norms.inputs), parts_of(attention)
    q_norm, k_norm = [inner[name] for name in own.head_norms] or (None, None)
    is_turned = position_embeddings is not None and own.turns(attention)
    angles = position_embeddings if is_turned else (None, None)
    width, step = None if angles[0] is None else angles[0].shape[-1], 2 if family.spread else 1
    cos, sin = (None if each is None else each[..., ::step] for each in angles)
    linears = [inner[name] for name in family.qkv]
    x = x.contiguous()
    spec, weights = _inputs_spec(own, attention, norm, q_norm, k_norm, width), (weight_of(q_norm), weight_of(k_norm))
    if cos is None or (cos.dtype in (x.dtype, torch.float32) and not cos.requires_grad):
        dtype, wider = product_dtype(x), autocasts(x.device)
        found = projections(linears, dtype, wider)
        if found is not None:
            kind = products_of(layer)
            if kind != "bf16" and is_sparse(parts_of(layer)[family.block]):
                kind = "bf16"
            return norm_attention_inputs(x, weight_of(norm), found, *weights, cos, sin, x.shape[:2], spec, dtype, kind, bias_of(norm))
    normed = x if norm is None else any_norm(spec.norm, x, weight_of(norm), bias_of(norm))
    projected = [linear(normed) for linear in linears]
    q, k, v = [p.view(*x.shape[:2], -1, spec.head_dim) for p in (projected[0].split(spec.rows, -1) if spec.rows else projected)]
    if q_norm is not None and is_fused(spec) and cos is not None and sin is not None:
        eps, offset, rounds = spec.heads[:3]
        return (*qk_norm_rotary(q, k, *weights, cos, sin, eps, offset, rounds, spec.turned), v.transpose(1, 2), x)
    if q_norm is not None and not spec.turned_first:
        q, k = [rms_norm(spec.heads, t.flatten(2) if spec.whole else t, w).view(t.shape) for t, w in zip((q, k), weights)]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if angles[0] is not None:
        rotate, width = getattr(sys.modules[family.modeling], ROTARY), spec.turned or spec.head_dim
        turned = rotate(q[..., :width], k[..., :width], *angles)
        q, k = (torch.cat((part, t[..., width:]), -1) if spec.turned else part for part, t in zip(turned, (q, k)))
    if q_norm is not None and spec.turned_first:
        q, k = [rms_norm(spec.heads, t, w) for t, w in zip((q, k), weights)]
    return q, k, v, x


def _scaled_by_position(own: FusedLayer, attention, q, position_ids):
    """The queries, each multiplied by its position's factor."""
    function, *entries = own.family.position_scale
    scale = getattr(sys.modules[own.modeling], function)(position_ids, *map(attention.config.rope_parameters.get, entries))
    return q * scale.to(q.dtype)


def dropout_of(family: Family, attention) -> float:
    """The probability with which attention drops what it attends to in training."""
    return getattr(attention, family.attention_dropout) if family.attention_dropout else 0.0


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
    if own.family.windowed and not getattr(attention, own.family.windowed):
        options["sliding_window"] = None
    output, _ = interface(
        attention,
        q,
        k,
        v,
        attention_mask,
        dropout=dropout_of(own.family, attention) if attention.training else 0.0,
        scaling=attention.scaling,
        **options,
        **kwargs,
    )
    # A view that autograd knows of would cost the host more than the node, which flattens it.
    return output if output.dim() == 4 and output.is_contiguous() else output.reshape(q.shape[0] * q.shape[2], -1)


def _finish(own: FusedLayer, layer, mixed: Mixed):
    """The output projection and the MLP or the experts, with both residual connections.

    | MLP or experts | output projection | what runs                                                                         |
    |----------------|-------------------|-----------------------------------------------------------------------------------|
    | fused          | fused             | one node                                                                          |
    | fused          | called            | attention's branch is added to the residual stream, and the node reads the sum    |
    | called         | called            | norms with the residual connections around the module (`_finish_apart`)           |
    | fused, beside attention | called   | the node reads the stream, and attention's branch is added to its result          |
    """
    family, parts = own.family, parts_of(layer)
    attended: Any = mixed.attended
    o_proj, x = mixed.output, mixed.residual
    dtype, wider = product_dtype(x), autocasts(x.device)
    after, before, behind = [own.fused_norm(layer, name) for name in family.norms[1:]]
    multiplier = 1.0 if family.multiplier is None else float(getattr(layer, family.multiplier))
    spec = own.spec(make_outputs, own.eps(after), own.eps(before), own.eps(behind), multiplier)
    fused = _fused_block(own, parts[family.block], x, dtype, wider, parts.get(family.beside))
    o = None if fused is None or o_proj is None or attended.dtype != dtype else projections((o_proj,), dtype, wider)
    if o is None:
        output = attended if o_proj is None else o_proj(attended.view(*x.shape[:-1], -1))
        if fused is None or (isinstance(fused, SparseBlock) and output.dtype != dtype):
            return _finish_apart(own, spec, layer, output, mixed)
        branch = _branch(own, spec, layer, family.norms.after, output.reshape(x.shape))
        x, attended, after = x if family.parallel else branch + x, None, None
    recompute = recomputes_mlp(layer)
    if isinstance(fused, SparseBlock):
        router, weights, options, shared, adapters = fused
        of_attention = attended, None if o is None else o[0], weight_of(after)
        of_experts = spec, options, *of_attention, recompute, shared, weight_of(behind), adapters
        return norm_experts(x, weight_of(before), router, weights, *of_experts, tile_of(layer))
    assert fused is not None  # else the layer ended above: without it there is no o
    found = fused if o is None else (*o, *fused)
    norms, tile = (weight_of(after), weight_of(behind)), tile_of(layer)
    out = norm_mlp(x, weight_of(before), found, spec, attended, *norms, dtype, recompute, products_of(layer), tile, bias_of(before))
    return branch + out if o is None and family.parallel else out


def _fused_block(own: FusedLayer, mlp, x, dtype, wider, beside) -> Union[List[Projection], SparseBlock, None]:
    """The projections of an MLP, or a block of experts, as the nodes take them; None where the module has to be called."""
    if own.calls_mlp:
        return None
    if own.family.sparse is not None and is_sparse(mlp):
        found = sparse_block_or_reason(own, own.family.sparse, mlp, x, dtype, beside)
        return None if isinstance(found, Reason) else found
    linears = parts_of(mlp)
    return projections([linears[name] for name in own.of_mlp], dtype, wider)


def _branch(own: FusedLayer, spec: Outputs, layer, norm: Optional[str], output):
    """Returns what a branch adds to the residual stream. norm: the name of the norm after the branch."""
    output = own.normed(layer, norm, output)
    return output if spec.multiplier == 1 else output * spec.multiplier


def _finish_apart(own: FusedLayer, spec: Outputs, layer, output, mixed: Mixed):
    """The norms with the residual connections, and between them the MLP or the experts called as the module that they are."""
    warn_of_kept_mlp(layer)
    family, x = own.family, mixed.residual
    first, after, before, behind = family.norms
    norm = own.fused_norm(layer, before)
    of_sum = norm is not None and not family.centred and not family.parallel
    if of_sum and after is None and spec.multiplier == 1 and output.dtype == x.dtype:
        normed, total = add_rms_norm(spec.before, output, x.view(output.shape), weight_of(norm))
    else:
        total = x + _branch(own, spec, layer, after, output)
        both = mixed.normed if before == first and family.parallel else None
        normed = own.normed(layer, before, x if family.parallel else total) if both is None else both
    found = parts_of(layer)[family.block](normed)
    found = (found[0] if isinstance(found, tuple) else found).view(total.shape)
    found = found + parts_of(layer)[family.beside](normed) if family.beside else found
    return _branch(own, spec, layer, behind, found) + total


def decoder_layer_forward(own: FusedLayer, layer, kwargs):
    """Serves as the forward of a family's decoder layer. kwargs: its arguments by name."""
    return captured_alike(layer, kwargs.get("position_embeddings"), lambda: _run(own, layer, kwargs))


def _run(own: FusedLayer, layer, kwargs):
    x, given = kwargs.pop(own.family.takes[0]), {**kwargs}
    if "attention_mask" in given:
        given["attention_mask"] = unless_none(given["attention_mask"])
    if why_not_fusable(own, layer, x):
        warn_of_kept_mlp(layer)
        return original_forward(layer)(layer, x, **given)
    rest = {**given}
    mask, cache, position_embeddings = (rest.pop(name, None) for name in ("attention_mask", CACHE, "position_embeddings"))
    mixed = own.mix(layer, x, mask, cache, position_embeddings, rest)
    return own.returned(layer, _finish(own, layer, mixed), mixed, given)
