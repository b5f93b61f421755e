"""The forwards of a model's small parts: RMSNorm, the rotary embedding and the gated MLP.

The Hub allows a layer class nothing but `forward`, so what a layer does is here.
"""

import torch
from torch import nn

from ..ops.common import autocasts
from ..ops.rms_norm import rms_norm
from ..ops.rotary import rotary, rotary_reference
from ..ops.swiglu import mlp, swiglu
from .modules import LAYER, all_are_listened_to, is_plain, is_silu, plain_weight


def rms_norm_forward(layer, x: torch.Tensor) -> torch.Tensor:
    """Of a module with `weight` and `variance_epsilon`."""
    weight = layer.weight
    if is_plain(weight) and is_plain(x):
        return rms_norm(x, weight, layer.variance_epsilon)
    xf = x.to(torch.float32)
    return weight * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + layer.variance_epsilon)).to(x.dtype)


def rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """transformers' `apply_rotary_pos_emb`."""
    if is_plain(q) and is_plain(k) and q.dtype == k.dtype == cos.dtype:
        return rotary(q, k, cos, sin, unsqueeze_dim)
    return rotary_reference(q, k, cos, sin, unsqueeze_dim)  # of different dtypes the wider one is the result's


setattr(rotary_pos_emb, LAYER, rotary_pos_emb)


def mlp_forward(layer, x: torch.Tensor) -> torch.Tensor:
    """Of a module with `gate_proj`, `up_proj`, `down_proj` and `act_fn`."""
    children = layer.__dict__["_modules"]
    gate_proj, up_proj, down_proj = children["gate_proj"], children["up_proj"], children["down_proj"]
    act_fn = children.get("act_fn")
    if not is_silu(act_fn) or all_are_listened_to():
        return down_proj(layer.act_fn(gate_proj(x)) * up_proj(x))
    gate_weight, up_weight, down_weight = plain_weight(gate_proj), plain_weight(up_proj), plain_weight(down_proj)
    if gate_weight is not None and up_weight is not None and down_weight is not None and is_plain(x):
        same = gate_weight.dtype == up_weight.dtype == down_weight.dtype == x.dtype
        if same and not autocasts(x.device):
            return mlp(x, gate_weight, up_weight, down_weight)
    gate, up = gate_proj(x), up_proj(x)
    if is_plain(gate) and is_plain(up) and gate.dtype == up.dtype:
        return down_proj(swiglu(gate, up))
    return down_proj(nn.functional.silu(gate) * up)
