"""A whole decoder layer of Qwen3 in three autograd nodes: norm, q, k, v with their norms and rotary embedding; attention; the output
projection, norm and MLP with both residual connections.

A projection that is not exactly torch.nn.Linear (LoRA, quantised, sharded, hooked) is called as the module that it is, and the
rest is fused around it. A layer with anything else unexpected (hooks on its parts, autocast, a tracer) runs as transformers
wrote it, on the layers of this package.
"""

import sys

import torch

from .shared.hf.modules import SAVED, all_are_listened_to, is_marked, is_silu, original_forward, own_forward, plain_weight
from .shared.ops.common import autocasts
from .shared.ops.decoder_nodes import norm_attention_inputs, norm_mlp
from .shared.ops.rms_norm import add_rms_norm, rms_norm
from .shared.ops.rotary import qk_norm_rotary
from .shared.runtime.device import PLAIN

MODELING = "transformers.models.qwen3.modeling_qwen3"


_known: set = set()


def _learn_forwards() -> None:
    """Fills `_known` with transformers' own forwards of the parts of a layer."""
    modeling = sys.modules[MODELING]
    for cls in (modeling.Qwen3RMSNorm, modeling.Qwen3MLP, modeling.Qwen3Attention):
        _known.add(vars(cls).get(SAVED + "forward", vars(cls)["forward"]))


def _untouched(module) -> bool:
    """True when calling a module does what transformers or this package wrote, and nobody listens."""
    function = own_forward(module)
    return function in _known or is_marked(function)


def _is_norm_of(norm, x) -> bool:
    weight = norm.__dict__["_parameters"].get("weight")
    return type(weight) in PLAIN and weight.dtype == x.dtype and _untouched(norm)


def _parts(layer):
    """The submodules of a module by name. nn.Module's own look-up costs 0.4 us each, and a layer is taken apart at every call."""
    return layer.__dict__["_modules"]


def _parameter(norm):
    return norm.__dict__["_parameters"]["weight"]


def fusable(layer, x) -> bool:
    """True when the parts of a layer may be taken apart: nobody listens to them, and they hold what Qwen3's do."""
    if type(x) not in PLAIN or x.dim() != 3 or torch.compiler.is_compiling() or autocasts(x.device):
        return False
    if all_are_listened_to():
        return False
    if not _known:
        _learn_forwards()
    parts = _parts(layer)
    attention, mlp = parts["self_attn"], parts["mlp"]
    inner = _parts(attention)
    return (
        _untouched(attention)
        and _untouched(mlp)
        and _is_norm_of(parts["input_layernorm"], x)
        and _is_norm_of(parts["post_attention_layernorm"], x)
        and _is_norm_of(inner["q_norm"], x)
        and _is_norm_of(inner["k_norm"], x)
        and is_silu(_parts(mlp).get("act_fn"))
    )


def _plain_weights(x, *linears):
    """The weights of linear layers that are all plain and of x's dtype, or None."""
    weights = [plain_weight(linear) for linear in linears]
    return weights if all(weight is not None and weight.dtype == x.dtype for weight in weights) else None


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
    weights = _plain_weights(x, *projections)
    if weights is not None and cos.dtype == x.dtype and not cos.requires_grad:
        return norm_attention_inputs(flat, norm_weight, weights, *head_norms, cos, sin, x.shape[:2], eps, head_eps)
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
    o_weight = _plain_weights(attended, o_proj)
    mlp_weights = _plain_weights(attended, linears["gate_proj"], linears["up_proj"], linears["down_proj"])
    if mlp_weights is not None and o_weight is not None:
        return norm_mlp(residual.view(*shape, -1), norm_weight, *mlp_weights, eps, attended, o_weight[0])
    if mlp_weights is not None:
        total = o_proj(attended.view(*shape, -1)).reshape(residual.shape) + residual
        return norm_mlp(total.view(*shape, -1), norm_weight, *mlp_weights, eps)
    output = o_proj(attended.view(*shape, -1))
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
