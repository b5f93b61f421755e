"""What the layers do that are GPT-OSS's own: its norm and its decoder layer."""

from typing import List, Tuple

import torch

from .norms import add_rms_norm, rms_norm
from .shared.hf.modules import OwnForwards, original_forward, why_not_own
from .shared.runtime.device import PLAIN

_own = OwnForwards("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssRMSNorm")


def rms_norm_forward(layer, x: torch.Tensor) -> torch.Tensor:
    """Of a module with `weight` and `variance_epsilon`."""
    weight = layer.weight
    if type(weight) in PLAIN and type(x) in PLAIN:
        return rms_norm(x, weight, layer.variance_epsilon)
    xf = x.to(torch.float32)
    return (weight * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + layer.variance_epsilon))).to(x.dtype)


def _norm_is_plain(norm) -> bool:
    """True when calling this norm does what transformers or this package wrote, and nobody listens."""
    return _own.run_by(norm) and type(norm.__dict__["_parameters"].get("weight")) in PLAIN


def why_not_fusable(layer, x) -> str:
    """Why a layer runs as transformers wrote it; "" where its residual connection and norm are one."""
    if torch.compiler.is_compiling():
        return "torch.compile"
    if type(x) not in PLAIN:
        return "the input is no ordinary tensor"
    if not _norm_is_plain(layer.post_attention_layernorm):
        return why_not_own(layer.post_attention_layernorm, "post_attention_layernorm")
    return ""


def explain_layer(layer, x) -> List[Tuple[str, str]]:
    """[(part, "" or why it is not fused)] of a layer, as `decoder_layer_forward` decides it."""
    return [("residual and norm", why_not_fusable(layer, x))]


def decoder_layer_forward(layer, x: torch.Tensor, kwargs) -> torch.Tensor:
    """Of a GptOssDecoderLayer. kwargs: what its forward gets beside the hidden states."""
    norm = layer.post_attention_layernorm
    if why_not_fusable(layer, x):
        return original_forward(layer)(layer, x, **kwargs)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)
    if attended.dtype == x.dtype and type(attended) in PLAIN:
        normed, total = add_rms_norm(attended, x, norm.weight, norm.variance_epsilon)
    else:  # under autocast
        total = x + attended
        normed = norm(total)
    hidden, _ = layer.mlp(normed)
    return total + hidden
