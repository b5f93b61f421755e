"""The forward of a gated delta net of Qwen3.5, Qwen3.5-MoE and Qwen3-Next, with documents that do not see each other."""

import sys
from types import FunctionType
from typing import Any, Dict

import torch
from torch import nn
from torch.nn.functional import softplus

from ...ops.delta_chunks import keeping_chunks
from ...ops.gated_delta_rule import gated_delta_rule
from ...ops.gated_delta_step import gated_delta_step
from ...ops.gated_rms_norm import gated_rms_norm
from ...ops.operators import constant_when_traced
from ...ops.short_conv import TAPS, short_conv
from ..attention.row_documents import DOCUMENTS, bounds_in, refuse_cache_of
from ..family.arguments import NET_CACHE
from ..parts.lookups import Lookups, name_of, original_in
from ..parts.modules import ACTIVATIONS, FORWARDS, beside_class, is_marked, is_transformers_own, original_forward, without_decorators
from ..parts.weights import is_plain

__all__ = [
    "INPUTS", "INPUTS_BY_KEY_HEAD", "MASK", "NET", "convolution_function", "convolution_step", "delta_net_forward", "documents_of",
    "gated_norm_forward", "is_before_5_21", "mixed_tokens", "rule_function", "why_not_ours",
]  # fmt: skip

NET = "linear_attn"  # a decoder layer's attribute
# The projections of a net's input, and those of Qwen3-Next, which hold q, k, v and z, and b and a, of one key head after the other.
INPUTS, INPUTS_BY_KEY_HEAD = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")


def gated_norm_forward(layer, hidden_states, gate):
    """Serves as the forward of a gated RMSNorm with `weight` and `variance_epsilon`, whose gate goes through SiLU."""
    weight, own = layer.weight, original_forward(layer)
    if is_plain(weight) and is_plain(hidden_states) and is_plain(gate) and layer.activation in ("silu", "swish"):
        if hidden_states.dtype == gate.dtype == weight.dtype and not replaced_in_net(own):
            return gated_rms_norm(hidden_states, gate, weight, layer.variance_epsilon)
    return own(layer, hidden_states, gate)


FUNCTIONS = "causal_conv1d_fn", "causal_conv1d_update", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
MASK = "apply_mask_to_padding_states"
LIBRARIES = "transformers", "kernels", "fla", "causal_conv1d"  # whose functions ours stand in for
_lookups: Dict[Any, Lookups] = {}  # by the forward of a net or of its norm


@constant_when_traced
def someone_elses_function(modeling: str) -> str:
    """The name of a function of transformers' module that a net calls and that is not transformers' own; "" for none."""
    names = vars(sys.modules[modeling])
    for name in (*FUNCTIONS, MASK):
        function = names.get(name)
        if isinstance(function, FunctionType):
            made_in = function.__globals__.get("__name__", "")  # functools.wraps copies __module__
            if made_in.startswith("torch.") and not (function.__module__ or "").startswith("transformers."):
                made_in = function.__module__  # fla decorates its own with torch.compiler.disable
            if made_in.partition(".")[0] not in LIBRARIES:
                return name
    return ""


@constant_when_traced
def replaced_in_net(forward) -> str:
    """Says what `replaced_below` does of the forward of a net or of its norm, whose SiLU comes from a table, and of the functions that a
    net calls where these are transformers' own."""
    table = sys.modules[ACTIVATIONS].ACT2FN
    for name in ("silu", "swish"):
        silu = getattr(table.get(name), "forward", None)  # the table makes a module of what it is asked for in brackets
        if silu is not FORWARDS[nn.SiLU] and not is_transformers_own(silu, ACTIVATIONS, "SiLUActivation.forward"):
            return f"ACT2FN[{name!r}] computes {name_of(silu or table.get(name))}"
    if forward not in _lookups:
        names = getattr(without_decorators(forward), "__globals__", {})
        called = [original_in(names.get(name)) for name in FUNCTIONS]
        own = [each for each in called if getattr(each, "__globals__", {}).get("__name__", "").startswith("transformers.")]
        silu = sys.modules[ACTIVATIONS].SiLUActivation.forward
        _lookups[forward] = Lookups((forward, silu, *own), (*FUNCTIONS, MASK))
    return _lookups[forward].replaced()


def why_not_ours(layer) -> str:
    """Why a gated delta net runs as transformers wrote it; "" where it need not."""
    forward = original_forward(layer)
    other = someone_elses_function(getattr(forward, "__module__", type(layer).__module__))
    if other:
        return f"{other} is not transformers' own"
    replaced = "" if is_marked(forward) else replaced_in_net(forward)
    if replaced:
        return replaced
    convolution = layer.conv1d
    if "_hf_hook" in vars(convolution):
        return "accelerate moves the convolution's weight when it is called"
    if layer.conv_kernel_size != TAPS or layer.activation not in ("silu", "swish"):
        return f"the convolution has {layer.conv_kernel_size} taps and {layer.activation}, expected {TAPS} and silu"
    return ""


def delta_net_forward(self, kwargs):
    """Serves as the forward of a GatedDeltaNet: hidden_states [batch, tokens, hidden] -> the same. kwargs: its arguments by name.

    Documents come from `cu_seq_lens_q`, as padding-free collators give it, from what the model's forward found in position_ids or seq_idx,
    or from `seq_idx`.
    """
    hidden_states, cache, attention_mask = kwargs.pop("hidden_states"), kwargs.pop(NET_CACHE, None), kwargs.pop("attention_mask", None)
    found = kwargs.get(DOCUMENTS)
    documents = documents_of(kwargs, cache, hidden_states.shape[0])
    if is_before_5_21(cache) or why_not_ours(self):
        if found is not None and kwargs.get("cu_seq_lens_q") is None:  # transformers' functions take these, or raise
            kwargs = {**kwargs, "cu_seq_lens_q": found, "seq_idx": _document_of_each_token(found, hidden_states)}
        return original_forward(self)(self, hidden_states, **{NET_CACHE: cache}, attention_mask=attention_mask, **kwargs)
    hidden_states = beside_class(self, MASK)(hidden_states, attention_mask)
    names = INPUTS if INPUTS[0] in self._modules else INPUTS_BY_KEY_HEAD
    projected = [self._modules[name](hidden_states) for name in names]
    return self.out_proj(mixed_tokens(self, projected, hidden_states.shape, cache, documents).flatten(2))


def is_before_5_21(cache) -> bool:
    """Whether a cache is one of transformers until 5.20, which only its own forwards know."""
    return cache is not None and not hasattr(cache, "get_conv_state")


def documents_of(kwargs, cache, batch: int):
    """The bounds of documents [documents + 1] in the rows of a net's input, or None; see `delta_net_forward`. Takes out of kwargs what the
    model's forward found. Raises ValueError where there are several and a cache."""
    name = "cu_seq_lens_q" if kwargs.get("cu_seq_lens_q") is not None else "seq_idx"
    found = kwargs.pop(DOCUMENTS, None)
    documents = kwargs.get("cu_seq_lens_q") if found is None else keeping_chunks(found)
    documents = bounds_in(kwargs.get("seq_idx")) if documents is None else documents
    if documents is not None and cache is not None:
        refuse_cache_of(documents, batch, name)
        kwargs.pop("cu_seq_lens_q", None)
        return None
    return documents


def mixed_tokens(self, projected, shape, cache, documents) -> torch.Tensor:
    """Mixes the tokens as a net does between its first projections and its last one; returns [batch, tokens, heads, V].

    projected: the results of the first projections; shape: of the input, [batch, tokens, hidden]. documents: of `documents_of`.
    """
    rows = shape[:2] if documents is None else (1, shape[0] * shape[1])
    mixed, z, b, a = _in_order(self, [p.view(*rows, p.shape[-1]) for p in projected])
    mixed = _convolved(self, mixed, cache, documents)
    q, k, v = mixed.split((self.key_dim, self.key_dim, self.value_dim), -1)
    q, k, v = (x.unflatten(-1, (-1, width)) for x, width in ((q, self.head_k_dim), (k, self.head_k_dim), (v, self.head_v_dim)))
    beta = b.sigmoid()
    g = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias)
    out = _ruled(self, q, k, v, g, beta, cache, documents)
    return self.norm(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim)).view(*shape[:2], -1, self.head_v_dim)


def _document_of_each_token(bounds, x):
    """seq_idx [batch, tokens] of documents with bounds [documents + 1] in x [batch, tokens, channels]."""
    tokens = torch.arange(x.shape[0] * x.shape[1], device=bounds.device)
    return torch.bucketize(tokens, bounds[1:], right=True).to(torch.int32).view(x.shape[:2])


def _in_order(self, projected):
    """(q, k and v of all heads side by side, z, b, a) of what the net's first projections make, [batch, tokens, channels] each."""
    if len(projected) == len(INPUTS):
        return projected
    q, k, v, z, b, a = self.fix_query_key_value_ordering(*projected)
    return torch.cat([x.flatten(2) for x in (q, k, v)], -1), z, b, a


def _convolved(self, mixed, cache, documents):
    """q, k and v of all heads side by side [batch, tokens, channels], after the convolution."""
    weight, bias = self.conv1d.weight.squeeze(1).to(mixed.dtype), self.conv1d.bias
    if cache is None:
        return short_conv(mixed, weight, bias, cu_seqlens=documents)
    length, state = mixed.shape[1], cache.get_conv_state(self.layer_idx, state_idx=0)
    channels_first = mixed.transpose(1, 2)
    if state is not None and length == 1 and not cache.is_recording_past(self.layer_idx):
        update = beside_class(self, "causal_conv1d_update")
        return update(channels_first, state, weight, bias, self.activation).transpose(1, 2)
    seen = cache.update_conv_state(channels_first, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
    return short_conv(seen.transpose(1, 2), weight, bias)[:, -length:]


def rule_function(
    query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel,
    cu_seqlens=None, scale=None, seq_idx=None, **others
):  # fmt: skip
    """Serves as transformers' function of the gated delta rule, in chunks or token by token: (output, final state or None).

    Documents come from cu_seqlens, or from seq_idx where the caller gave no more, as for the convolution. A cache is refused for them: the
    attention of a model that has one would let them see each other.
    """
    name = "cu_seq_lens_q" if cu_seqlens is not None else "seq_idx"
    cu_seqlens = bounds_in(seq_idx) if cu_seqlens is None else cu_seqlens
    if cu_seqlens is not None and output_final_state:
        refuse_cache_of(cu_seqlens, query.shape[0], name)
    options = {"initial_state": initial_state, "scale": scale, "l2_norm": use_qk_l2norm_in_kernel}
    given = query, key, value, g, beta
    trained = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (*given, initial_state))
    if query.shape[1] == 1 and initial_state is not None and cu_seqlens is None and not trained:
        out, state = gated_delta_step(*given, **options)
        return out, state if output_final_state else None
    out, state = gated_delta_rule(*given, cu_seqlens=cu_seqlens, output_final_state=output_final_state, **options)
    return out, state if output_final_state else None


def convolution_function(hidden_states, weight, bias, activation, cu_seqlens=None, seq_idx=None):
    """Serves as transformers' causal convolution: hidden_states [batch, channels, tokens] -> the same. seq_idx: the document of each token
    [batch, tokens]."""
    x = hidden_states.transpose(1, 2).to(weight.dtype)
    cu_seqlens = bounds_in(seq_idx) if cu_seqlens is None else cu_seqlens
    shape = x.shape
    if cu_seqlens is not None and shape[0] > 1:
        x = x.reshape(1, -1, shape[2])
    if weight.shape[1] == TAPS and activation in ("silu", "swish"):
        out = short_conv(x, weight, bias, cu_seqlens=cu_seqlens)
    elif cu_seqlens is None:
        padded = torch.nn.functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
        out = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=shape[2])
        out = (out if activation is None else getattr(torch.nn.functional, activation)(out)).transpose(1, 2)
    else:
        raise ValueError(
            f"the convolution of a row with documents has {weight.shape[1]} taps and activation {activation!r}; expected {TAPS} taps and "
            "'silu'. Give each document a row of its own"
        )
    return out.reshape(shape).transpose(1, 2).to(hidden_states.dtype)


def convolution_step(hidden_states, conv_state, weight, bias, activation):
    """Serves as transformers' `causal_conv1d_update`: the convolution of tokens that follow those in conv_state, which takes them in."""
    seen = torch.cat((conv_state, hidden_states), -1)
    conv_state.copy_(seen[:, :, -conv_state.shape[-1] :])
    return convolution_function(seen, weight, bias, activation)[:, :, -hidden_states.shape[-1] :].to(hidden_states.dtype)


def _ruled(self, q, k, v, g, beta, cache, documents):
    if cache is None:
        return gated_delta_rule(q, k, v, g, beta, cu_seqlens=documents, l2_norm=True)[0]
    state = cache.get_recurrent_state(self.layer_idx, state_idx=0)
    if state is not None and q.shape[1] == 1 and not torch.is_grad_enabled():
        out, state = gated_delta_step(q, k, v, g, beta, initial_state=state, l2_norm=True)
    else:
        out, state = gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True, l2_norm=True)
    cache.update_recurrent_state(state, self.layer_idx)
    return out
