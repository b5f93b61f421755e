"""What the layers do that are GPT-OSS's own: its norm, its decoder layer, and the choice of its attention."""

import sys
import warnings

import torch

from .shared.hf import causal_lm
from .shared.hf.modules import SAVED, is_marked, original_forward, own_forward
from .shared.ops.wide_rms_norm import wide_add_rms_norm, wide_rms_norm
from .shared.runtime.device import PLAIN

FLEX = SAVED + "flex_attention"  # on GptOssForCausalLM: what apply() was told about `attention`
_hinted: set = set()


def rms_norm_forward(layer, x: torch.Tensor) -> torch.Tensor:
    """Of a module with `weight` and `variance_epsilon`."""
    weight = layer.weight
    if type(weight) in PLAIN and type(x) in PLAIN:
        return wide_rms_norm(x, weight, layer.variance_epsilon)
    xf = x.to(torch.float32)
    return (weight * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + layer.variance_epsilon))).to(x.dtype)


def _norm_is_plain(norm) -> bool:
    """True when calling this norm does what transformers or this package wrote, and nobody listens."""
    norms, function = sys.modules["transformers.models.gpt_oss.modeling_gpt_oss"].GptOssRMSNorm, own_forward(norm)
    untouched = is_marked(function) or function is vars(norms).get(SAVED + "forward", vars(norms)["forward"])
    return untouched and type(norm.__dict__["_parameters"].get("weight")) in PLAIN


def decoder_layer_forward(layer, x: torch.Tensor, kwargs) -> torch.Tensor:
    """Of a GptOssDecoderLayer. kwargs: what its forward gets beside the hidden states."""
    norm = layer.post_attention_layernorm
    if torch.compiler.is_compiling() or type(x) not in PLAIN or not _norm_is_plain(norm):
        return original_forward(layer)(layer, x, **kwargs)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)
    if attended.dtype == x.dtype and type(attended) in PLAIN:
        normed, total = wide_add_rms_norm(attended, x, norm.weight, norm.variance_epsilon)
    else:  # under autocast
        total = x + attended
        normed = norm(total)
    hidden, _ = layer.mlp(normed)
    return total + hidden


def choose_attention(model) -> None:
    """For a model that trains on a GPU with eager attention: flex_attention instead where apply(attention=True) asked for it, else
    once a hint that there is such a thing."""
    if model.config._attn_implementation != "eager" or model.device.type != "cuda":
        return
    if getattr(type(model), FLEX, False):
        vars(model)[SAVED + "attention"] = "eager"
        model.set_attn_implementation("flex_attention")
    elif not _hinted:
        _hinted.add(model.config._attn_implementation)
        warnings.warn(
            "this GPT-OSS trains with eager attention, which holds a score for every pair of tokens in memory. "
            'Load it with attn_implementation="flex_attention", or call apply(attention=True)',
            RuntimeWarning,
            stacklevel=4,
        )


def causal_lm_forward(model, labels, kwargs):
    """Of a GptOssForCausalLM; see `causal_lm.causal_lm_forward`."""
    if model.training:
        choose_attention(model)
    return causal_lm.causal_lm_forward(model, labels, kwargs)
