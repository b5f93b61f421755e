"""The forwards of a model's small parts: RMSNorm, the rotary embedding and the gated MLP.

The Hub allows a layer class nothing but `forward`, so what a layer does is here.
"""

from typing import Callable

import torch
from torch import nn

from ...decoder.heads import turned_reference
from ...decoder.mlp_steps import gate_and_up
from ...decoder.norms import rms_norm
from ...decoder.spec import Inputs, Norm
from ...ops.autograd import autocasts
from ...ops.rotary import rotary, rotary_reference
from ...ops.swiglu import mlp, swiglu
from ..parts.facts import follow
from ..parts.lookups import overridden, replaced_below
from ..parts.modules import all_are_listened_to, is_silu, marked, original_forward
from ..parts.weights import is_plain, plain_weight

__all__ = ["gated_mlp_forward", "mlp_forward", "norm_forward", "rotary_of", "rotary_pos_emb", "unless_replaced"]


def norm_forward(norm: Norm, layer, x: torch.Tensor) -> torch.Tensor:
    """The forward of a module with `weight`, and `variance_epsilon` or `eps`. norm: the description, without the epsilon."""
    own = original_forward(layer)
    if replaced_below(own) or overridden(type(layer)):
        return own(layer, x)
    weight, eps = layer.weight, layer.variance_epsilon if hasattr(layer, "variance_epsilon") else layer.eps
    if is_plain(weight) and is_plain(x):
        return rms_norm(norm._replace(eps=eps), x, weight)
    xf = x.to(torch.float32)
    xf = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)
    if norm.offset:
        weight = weight + norm.offset
    return weight * xf.to(x.dtype) if norm.rounds == "first" else (weight * xf).to(x.dtype)


@marked
def rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """transformers' `apply_rotary_pos_emb`."""
    if is_plain(q) and is_plain(k) and q.dtype == k.dtype == cos.dtype:
        return rotary(q, k, cos, sin, unsqueeze_dim)
    return rotary_reference(q, k, cos, sin, unsqueeze_dim)  # of different dtypes the wider one is the result's


def unless_replaced(rotate: Callable, replaced: Callable[[], str], original: Callable[[], Callable]) -> Callable:
    """Makes a function that rotates as `rotate` does, or as the original where a name that this looks up, such as rotate_half, stands for
    something of the user's."""

    def checked(q, k, cos, sin, unsqueeze_dim=1):
        return (original() if replaced() else rotate)(q, k, cos, sin, unsqueeze_dim)

    return marked(checked)


@marked
def narrow_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """`rotary_pos_emb` of families whose angles are fp32 whatever the model's dtype: the result has the dtypes of q and k."""
    turned_q, turned_k = rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    return turned_q.to(q.dtype), turned_k.to(k.dtype)


def rotary_of(family) -> Callable:
    """The function that stands for a family's `apply_rotary_pos_emb`. family: its row."""
    if family.rotary == "halves" and not family.partial:
        return narrow_rotary_pos_emb if family.narrow else rotary_pos_emb

    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        width = cos.shape[-1] if family.partial and cos.shape[-1] < q.shape[-1] else 0
        if family.spread:
            cos, sin = cos[..., ::2], sin[..., ::2]
        spec = Inputs(q.shape[-1], rotary=family.rotary, turned=width)
        if unsqueeze_dim == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = (turned_reference(spec, x, cos, sin) for x in (q, k))
        return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)

    return marked(rotate)


def mlp_forward(layer, x: torch.Tensor) -> torch.Tensor:
    """Serves as the forward of a module with `gate_proj`, `up_proj`, `down_proj` and `act_fn`."""
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


def gated_mlp_forward(family):
    """Makes the forward of an MLP whose gate and up are packed, whose activation is another one than SiLU, or without a gate. family: its
    row."""
    drops = [tuple(name.split(".")[1:]) for name in family.absent if name.startswith(f"{family.block}.")]

    def forward(layer, x: torch.Tensor) -> torch.Tensor:
        if any(follow(layer, path) for path in drops):
            return original_forward(layer)(layer, x)
        children = layer.__dict__["_modules"]
        products = [children[name](x) for name in family.gate_up]
        act = getattr(layer, family.act)  # a user's may be a function, which is no child
        gate, up = gate_and_up(products, family.gated)
        if up is None:
            return children[family.down](act(gate))
        plain = is_silu(act) and is_plain(gate) and is_plain(up) and not all_are_listened_to()
        return children[family.down](swiglu(gate, up) if plain else act(gate) * up)

    return forward
