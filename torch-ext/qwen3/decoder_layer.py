"""A whole decoder layer of Qwen3 and Qwen3-MoE in three autograd nodes: norm, q, k, v with their norms and rotary embedding; attention; the
output projection, norm and MLP, or router and experts, with both residual connections.

A projection is torch.nn.Linear, bitsandbytes' four bits, or PEFT's LoRA around either; under autocast its weight may be wider than the
products. One that is anything else (another adapter, sharded, hooked) is called as the module that it is, and the rest is fused around
it. A layer with anything else unexpected (hooks on its parts, a tracer) runs as transformers wrote it, on the layers of this package.
"""

import sys
from typing import List, Tuple

import torch

from .shared.hf.adapters import projection, projection_or_reason
from .shared.hf.checkpointing import attend_once, keeps_attention, recomputes_mlp, warn_of_kept_mlp
from .shared.hf.modules import OwnForwards, all_are_listened_to, is_silu, original_forward, plain_weight, why_not_own
from .shared.ops.common import autocasts
from .shared.ops.decoder_nodes import norm_attention_inputs, norm_mlp
from .shared.ops.projected_nodes import projected_attention_inputs, projected_mlp
from .shared.ops.projection import is_traceable
from .shared.ops.rms_norm import add_rms_norm, rms_norm
from .shared.ops.rotary import qk_norm_rotary
from .shared.ops.sparse_nodes import norm_experts
from .shared.runtime.device import PLAIN
from .sparse_block import is_sparse, sparse_block_or_reason

QWEN3 = OwnForwards("transformers.models.qwen3.modeling_qwen3", "Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention")
QWEN3_MOE = OwnForwards(
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    *("Qwen3MoeRMSNorm", "Qwen3MoeMLP", "Qwen3MoeAttention", "Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter"),
)


def _is_norm_of(own: OwnForwards, norm, x) -> bool:
    weight = norm.__dict__["_parameters"].get("weight")
    return type(weight) in PLAIN and weight.dtype == x.dtype and own.run_by(norm)


def _parts(layer):
    """The submodules of a module by name. nn.Module's own look-up costs 0.4 us each, and a layer is taken apart at every call."""
    return layer.__dict__["_modules"]


def _parameter(norm):
    return norm.__dict__["_parameters"]["weight"]


def why_not_fusable(own: OwnForwards, layer, x) -> str:
    """Why the parts of a layer may not be taken apart: somebody listens to them, or they hold other things than Qwen3's. "" when they
    may. own: QWEN3 or QWEN3_MOE."""
    if type(x) not in PLAIN or x.dim() != 3:
        return "the input is no ordinary tensor [batch, tokens, hidden]"
    if all_are_listened_to():
        return "hooks listen to all modules of the process"
    if x.dtype not in (_product_dtype(x), torch.float32):
        return f"autocast to {_product_dtype(x)} over {x.dtype}"
    parts = _parts(layer)
    attention, mlp = parts["self_attn"], parts["mlp"]
    inner = _parts(attention)
    if not own.run_by(attention):
        return why_not_own(attention, "self_attn")
    if not own.run_by(mlp):
        return why_not_own(mlp, "mlp")
    norms = parts["input_layernorm"], parts["post_attention_layernorm"], inner["q_norm"], inner["k_norm"]
    for norm in norms:
        if not _is_norm_of(own, norm, x):
            return f"a norm has hooks, a forward that someone else gave it, or a weight that is no ordinary tensor of {x.dtype}"
    if not is_sparse(mlp) and not is_silu(_parts(mlp).get("act_fn")):
        return "the activation of mlp is not SiLU, or has hooks"
    return "" if own.rotary("apply_rotary_pos_emb") else "apply_rotary_pos_emb is one that someone else put there"


def explain_layer(own: OwnForwards, layer, x) -> List[Tuple[str, str]]:
    """[(part, "" or why it is not fused)] of a layer for an input [batch, tokens, hidden], as `decoder_layer_forward` decides it."""
    reason = why_not_fusable(own, layer, x)
    if reason:
        return [("decoder layer", reason)]
    block = _parts(layer)["mlp"]
    inner, mlp = _parts(_parts(layer)["self_attn"]), _parts(block)
    dtype, wider = _product_dtype(x), autocasts(x.device)
    groups = [("norm, q_proj, k_proj, v_proj, rotary", ("q_proj", "k_proj", "v_proj")), ("o_proj", ("o_proj",))]
    if not is_sparse(block):
        groups.append(("norm, gate_proj, up_proj, down_proj", ("gate_proj", "up_proj", "down_proj")))
    rows = []
    for part, names in groups:
        reasons = ((name, projection_or_reason((inner if name in inner else mlp)[name], dtype, wider)) for name in names)
        rows.append((part, next((f"{name}: {found}" for name, found in reasons if isinstance(found, str)), "")))
    if is_sparse(block):
        found = sparse_block_or_reason(own, block, x, dtype)
        rows.append(("norm, router, experts", found if isinstance(found, str) else ""))
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
    for linear in linears:
        found.append(projection(linear, dtype, wider))
        if found[-1] is None or (torch.compiler.is_compiling() and not is_traceable(found[-1])):
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


def _attend(own: OwnForwards, attention, q, k, v, attention_mask, past_key_values, kwargs):
    """Attention's output as [tokens, heads * head_dim]."""
    modeling = sys.modules[own.modeling]
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


def _finish(own: OwnForwards, layer, attended, residual, shape):
    """The output projection and the MLP or the experts, with both residual connections."""
    parts = _parts(layer)
    o_proj, mlp, norm = _parts(parts["self_attn"])["o_proj"], parts["mlp"], parts["post_attention_layernorm"]
    x, of_norm = residual.view(*shape, -1), (_parameter(norm), norm.variance_epsilon)
    if is_sparse(mlp):
        return _finish_experts(own, layer, mlp, o_proj, attended, x, *of_norm)
    return _finish_mlp(layer, mlp, o_proj, attended, x, *of_norm)


def _finish_mlp(layer, mlp, o_proj, attended, x, norm_weight, eps):
    linears, dtype, recompute = _parts(mlp), _product_dtype(x), recomputes_mlp(layer)
    of_mlp = linears["gate_proj"], linears["up_proj"], linears["down_proj"]
    if attended.dtype == x.dtype == dtype:
        o_weight, mlp_weights = _plain_weights(attended, o_proj), _plain_weights(attended, *of_mlp)
        if mlp_weights is not None and o_weight is not None:
            return norm_mlp(x, norm_weight, *mlp_weights, eps, attended, o_weight[0], recompute)
    wider = autocasts(x.device)
    mlp_found = _projections(dtype, wider, *of_mlp)
    o_found = None if mlp_found is None or attended.dtype != dtype else _projections(dtype, wider, o_proj)
    if o_found is not None:
        return projected_mlp(x, norm_weight, (*o_found, *mlp_found), eps, attended, dtype, recompute)
    output = o_proj(attended.view(*x.shape[:-1], -1))
    if mlp_found is None:
        return _finish_apart(layer, mlp, output, x, norm_weight, eps)
    total = output.reshape(x.shape) + x
    if dtype == x.dtype and all(type(each.weight) in PLAIN and each.weight.dtype == dtype and each.a is None for each in mlp_found):
        return norm_mlp(total, norm_weight, *(each.weight for each in mlp_found), eps, recompute=recompute)
    return projected_mlp(total, norm_weight, mlp_found, eps, None, dtype, recompute)


def _finish_experts(own: OwnForwards, layer, block, o_proj, attended, x, norm_weight, eps):
    dtype, recompute = _product_dtype(x), recomputes_mlp(layer)
    found = sparse_block_or_reason(own, block, x, dtype)
    if not isinstance(found, str) and attended.dtype == dtype:
        projections = _projections(dtype, autocasts(x.device), o_proj)
        if projections is not None:
            return norm_experts(x, norm_weight, *found, eps, attended, *projections, recompute)
    output = o_proj(attended.view(*x.shape[:-1], -1))
    if isinstance(found, str) or output.dtype != dtype:
        return _finish_apart(layer, block, output, x, norm_weight, eps)
    return norm_experts(output.reshape(x.shape) + x, norm_weight, *found, eps, recompute=recompute)


def _finish_apart(layer, mlp, output, x, norm_weight, eps):
    """The norm with its residual connection, and what follows called as the module that it is."""
    warn_of_kept_mlp(layer)
    if output.dtype != x.dtype:
        total = x + output
        return total + mlp(rms_norm(total, norm_weight, eps))
    normed, total = add_rms_norm(output, x.view(output.shape), norm_weight, eps)
    return mlp(normed) + total


def decoder_layer_forward(own: OwnForwards, layer, hidden_states, attention_mask, past_key_values, position_embeddings, kwargs):
    """Of a Qwen3DecoderLayer or, with QWEN3_MOE as `own`, of a Qwen3MoeDecoderLayer. kwargs: what its forward passes on, position_ids and
    use_cache among them."""
    if why_not_fusable(own, layer, hidden_states):
        warn_of_kept_mlp(layer)
        return original_forward(layer)(
            layer,
            hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_embeddings=position_embeddings,
            **kwargs,
        )
    q, k, v, residual = _attention_inputs(layer, hidden_states, position_embeddings)
    attention = _parts(layer)["self_attn"]
    if past_key_values is None and keeps_attention(layer) and not attention.attention_dropout:
        conditions = attention_mask, *position_embeddings, *kwargs.values()
        attended = attend_once(layer, hidden_states, conditions, lambda: _attend(own, attention, q, k, v, attention_mask, None, kwargs))
    else:
        attended = _attend(own, attention, q, k, v, attention_mask, past_key_values, kwargs)
    return _finish(own, layer, attended, residual, hidden_states.shape[:-1])
