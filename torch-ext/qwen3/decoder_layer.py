"""A whole decoder layer of Qwen3 in three autograd nodes: norm, q, k, v with their norms and rotary embedding; attention; the output
projection, norm and MLP with both residual connections.

A projection is torch.nn.Linear, bitsandbytes' four bits, or PEFT's LoRA around either; under autocast its weight may be wider than the
products. One that is anything else (another adapter, sharded, hooked) is called as the module that it is, and the rest is fused around
it. A layer with anything else unexpected (hooks on its parts, a tracer) runs as transformers wrote it, on the layers of this package.
"""

import sys
from typing import List, Tuple

import torch

from .shared.hf.adapters import projection, projection_or_reason
from .shared.hf.modules import OwnForwards, all_are_listened_to, is_silu, original_forward, plain_weight, why_not_own
from .shared.ops.common import autocasts
from .shared.ops.decoder_nodes import norm_attention_inputs, norm_mlp
from .shared.ops.projected_nodes import projected_attention_inputs, projected_mlp
from .shared.ops.rms_norm import add_rms_norm, rms_norm
from .shared.ops.rotary import qk_norm_rotary
from .shared.runtime.device import PLAIN

MODELING = "transformers.models.qwen3.modeling_qwen3"


_own = OwnForwards(MODELING, "Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention")
_untouched = _own.run_by


def _is_norm_of(norm, x) -> bool:
    weight = norm.__dict__["_parameters"].get("weight")
    return type(weight) in PLAIN and weight.dtype == x.dtype and _untouched(norm)


def _parts(layer):
    """The submodules of a module by name. nn.Module's own look-up costs 0.4 us each, and a layer is taken apart at every call."""
    return layer.__dict__["_modules"]


def _parameter(norm):
    return norm.__dict__["_parameters"]["weight"]


def why_not_fusable(layer, x) -> str:
    """Why the parts of a layer may not be taken apart: somebody listens to them, or they hold other things than Qwen3's. "" when they
    may."""
    if type(x) not in PLAIN or x.dim() != 3:
        return "the input is no ordinary tensor [batch, tokens, hidden]"
    if all_are_listened_to():
        return "hooks listen to all modules of the process"
    if torch.compiler.is_compiling() and autocasts(x.device):
        return "torch.compile under autocast"
    if x.dtype not in (_product_dtype(x), torch.float32):
        return f"autocast to {_product_dtype(x)} over {x.dtype}"
    parts = _parts(layer)
    attention, mlp = parts["self_attn"], parts["mlp"]
    inner = _parts(attention)
    if not _untouched(attention):
        return why_not_own(attention, "self_attn")
    if not _untouched(mlp):
        return why_not_own(mlp, "mlp")
    norms = parts["input_layernorm"], parts["post_attention_layernorm"], inner["q_norm"], inner["k_norm"]
    for norm in norms:
        if not _is_norm_of(norm, x):
            return f"a norm has hooks, a forward that someone else gave it, or a weight that is no ordinary tensor of {x.dtype}"
    if not is_silu(_parts(mlp).get("act_fn")):
        return "the activation of mlp is not SiLU, or has hooks"
    return "" if _own.rotary("apply_rotary_pos_emb") else "apply_rotary_pos_emb is one that someone else put there"


def fusable(layer, x) -> bool:
    return not why_not_fusable(layer, x)


def explain_layer(layer, x) -> List[Tuple[str, str]]:
    """[(part, "" or why it is not fused)] of a layer for an input [batch, tokens, hidden], as `decoder_layer_forward` decides it."""
    reason = why_not_fusable(layer, x)
    if reason:
        return [("decoder layer", reason)]
    inner, mlp = _parts(_parts(layer)["self_attn"]), _parts(_parts(layer)["mlp"])
    dtype, wider = _product_dtype(x), autocasts(x.device)
    rows = []
    for part, names in (("norm, q_proj, k_proj, v_proj, rotary", ("q_proj", "k_proj", "v_proj")), ("o_proj", ("o_proj",)),
                        ("norm, gate_proj, up_proj, down_proj", ("gate_proj", "up_proj", "down_proj"))):  # fmt: skip
        reasons = ((name, projection_or_reason((inner if name in inner else mlp)[name], dtype, wider)) for name in names)
        rows.append((part, next((f"{name}: {found}" for name, found in reasons if isinstance(found, str)), "")))
    return rows


def _product_dtype(x) -> torch.dtype:
    """The dtype in which linear layers multiply x: autocast's, where it is on."""
    if not autocasts(x.device) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def _plain_weights(x, *linears):
    """The weights of linear layers that are all plain and of x's dtype, or None."""
    weights = [plain_weight(linear) for linear in linears]
    return weights if all(weight is not None and weight.dtype == x.dtype for weight in weights) else None


def _projections(dtype, wider, *linears):
    """What linear layers multiply by in a dtype, or None where one of them has to be called."""
    found = []
    if torch.compiler.is_compiling():
        return None
    for linear in linears:
        found.append(projection(linear, dtype, wider))
        if found[-1] is None:
            return None
    return found


def _attention_inputs(layer, x, position_embeddings):
    """q, k, v [batch, heads, tokens, head_dim] of the normalised input, and the residual, flat over the tokens."""
    norm, inner = _parts(layer)["input_layernorm"], _parts(_parts(layer)["self_attn"])
    projections = inner["q_proj"], inner["k_proj"], inner["v_proj"]
    q_norm, k_norm = inner["q_norm"], inner["k_norm"]
    eps, head_eps = norm.variance_epsilon, q_norm.variance_epsilon
    if head_eps != k_norm.variance_epsilon:
        raise ValueError(f"q_norm and k_norm have the epsilons {head_eps} and {k_norm.variance_epsilon}, expected one")
    flat, norm_weight = x.view(-1, x.shape[-1]) if x.is_contiguous() else x.reshape(-1, x.shape[-1]), _parameter(norm)
    head_norms, (cos, sin) = (_parameter(q_norm), _parameter(k_norm)), position_embeddings
    if cos.dtype == x.dtype and not cos.requires_grad:
        dtype = _product_dtype(x)
        weights = _plain_weights(x, *projections) if dtype == x.dtype else None
        if weights is not None:
            return norm_attention_inputs(flat, norm_weight, weights, *head_norms, cos, sin, x.shape[:2], eps, head_eps)
        found = _projections(dtype, autocasts(x.device), *projections)
        if found is not None:
            return projected_attention_inputs(flat, norm_weight, found, *head_norms, cos, sin, x.shape[:2], eps, head_eps, dtype)
    normed = rms_norm(x, norm_weight, eps)
    q, k, v = [projection(normed).view(*x.shape[:2], -1, head_norms[0].shape[0]) for projection in projections]
    return (*qk_norm_rotary(q, k, *head_norms, cos, sin, head_eps), v.transpose(1, 2), flat)


def _attend(attention, q, k, v, attention_mask, past_key_values, kwargs):
    """Attention's output as [tokens, heads * head_dim]."""
    modeling = sys.modules[MODELING]
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, attention.layer_idx)
    interface = modeling.ALL_ATTENTION_FUNCTIONS.get_interface(
        attention.config._attn_implementation, modeling.eager_attention_forward
    )
    output, _ = interface(
        attention,
        q,
        k,
        v,
        attention_mask,
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        sliding_window=attention.sliding_window,
        **kwargs,
    )
    return output.reshape(q.shape[0] * q.shape[2], -1)


def _finish(layer, attended, residual, shape):
    """The output projection and the MLP, with both residual connections."""
    parts = _parts(layer)
    mlp, norm = parts["mlp"], parts["post_attention_layernorm"]
    eps, norm_weight = norm.variance_epsilon, _parameter(norm)
    o_proj, linears = _parts(parts["self_attn"])["o_proj"], _parts(mlp)
    of_mlp = linears["gate_proj"], linears["up_proj"], linears["down_proj"]
    dtype, x = _product_dtype(residual), residual.view(*shape, -1)
    if attended.dtype == residual.dtype == dtype:
        o_weight, mlp_weights = _plain_weights(attended, o_proj), _plain_weights(attended, *of_mlp)
        if mlp_weights is not None and o_weight is not None:
            return norm_mlp(x, norm_weight, *mlp_weights, eps, attended, o_weight[0])
    wider = autocasts(residual.device)
    mlp_found = _projections(dtype, wider, *of_mlp)
    o_found = None if mlp_found is None or attended.dtype != dtype else _projections(dtype, wider, o_proj)
    if o_found is not None:
        return projected_mlp(x, norm_weight, (*o_found, *mlp_found), eps, attended, dtype)
    output = o_proj(attended.view(*shape, -1))
    if mlp_found is not None:
        total = output.reshape(x.shape) + x
        if dtype == x.dtype and all(type(each.weight) in PLAIN and each.weight.dtype == dtype and each.a is None for each in mlp_found):
            return norm_mlp(total, norm_weight, *(each.weight for each in mlp_found), eps)
        return projected_mlp(total, norm_weight, mlp_found, eps, None, dtype)
    if output.dtype != residual.dtype:
        total = x + output
        return total + mlp(rms_norm(total, norm_weight, eps))
    normed, total = add_rms_norm(output, residual.view(output.shape), norm_weight, eps)
    return mlp(normed) + total


def decoder_layer_forward(layer, hidden_states, attention_mask, past_key_values, position_embeddings, kwargs):
    """Of a Qwen3DecoderLayer. kwargs: what its forward passes on, position_ids and use_cache among them."""
    if not fusable(layer, hidden_states):
        return original_forward(layer)(
            layer,
            hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_embeddings=position_embeddings,
            **kwargs,
        )
    q, k, v, residual = _attention_inputs(layer, hidden_states, position_embeddings)
    attended = _attend(_parts(layer)["self_attn"], q, k, v, attention_mask, past_key_values, kwargs)
    return _finish(layer, attended, residual, hidden_states.shape[:-1])
