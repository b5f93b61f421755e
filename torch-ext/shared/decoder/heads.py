"""What lies between the projections to queries and keys and attention: their RMSNorm and rotary embedding, as a description has them.

One kernel does it for norms of each head, and one for norms of all heads, where a package has one for their length; the rotary embedding
alone is one too, of halves or neighbours, of whole heads or a part of each.

Angles that are wider than q (autocast over an fp32 model) are used as they are.
"""

from typing import Any, NamedTuple, Optional, Tuple

import torch

from ..ops import head_norm_kernels, pair_rotary, row_norm_kernels
from ..ops.arrays import Pair, new_like
from ..ops.part_rotary import rotate_parts
from ..ops.rotary import (
    norm_backward_into,
    qk_norm_rotary_backward,
    qk_norm_rotary_forward,
    rotary_backward,
    rotary_backward_into,
    rotary_forward,
)
from ..runtime import launch
from ..runtime.device import kernels_run_on
from .norms import is_plain, norm_backward, norm_forward, norm_reference
from .spec import Inputs

__all__ = ["Heads", "heads_backward", "heads_forward", "heads_reference", "is_fused", "turned_reference"]


class Heads(NamedTuple):
    """Holds the inputs of both passes.

    q, k: the projected queries and keys, [batch, tokens, heads, head_dim]; None in a backward pass without norms. q_norm, k_norm: the
    weights of their norms, or None. cos, sin: the rotary angles, [batch or 1, tokens, width], or None without a rotary embedding.
    """

    q: Any
    k: Any
    q_norm: Optional[torch.Tensor]
    k_norm: Optional[torch.Tensor]
    cos: Optional[torch.Tensor]
    sin: Optional[torch.Tensor]


class HeadsGradients(NamedTuple):
    """The gradients of q and k as projected, and of their norms' weights."""

    q: torch.Tensor
    k: torch.Tensor
    q_norm: Optional[torch.Tensor]
    k_norm: Optional[torch.Tensor]


def is_fused(spec: Inputs) -> bool:
    """Tells whether norms, where there are any, and rotary embedding are one operation."""
    if spec.whole or spec.turned_first or spec.rotary != "halves":
        return False
    qwen3s = is_plain(spec.heads) and not spec.turned
    return qwen3s or head_norm_kernels.has(spec.head_dim, spec.turned or spec.head_dim)


def _is_row_kernel(spec: Inputs, heads: Heads, *others: torch.Tensor) -> bool:
    """Tells whether one kernel takes the norms of all heads and their rotary embedding. others: what else it reads."""
    described = spec.whole and spec.rotary == "halves" and not spec.turned and heads.q_norm is not None
    return described and row_norm_kernels.takes(*heads, *others)


def _rows(spec: Inputs, x: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, heads, head_dim] as the rows that a norm reads."""
    return x.flatten(2) if spec.whole else x


def _neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _each_twice(table: torch.Tensor, width: int) -> torch.Tensor:
    """Angles [batch, tokens, 1, width] for pairs: of the first half of a table, or of one half as wide."""
    return table[..., : width // 2].repeat_interleave(2, -1).unsqueeze(2)


def turned_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Rotary embedding of neighbours, or its transpose, in PyTorch, which can differentiate it. x: [batch, tokens, heads, width]."""
    cos, sin = _each_twice(cos, x.shape[-1]), _each_twice(sin, x.shape[-1])
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * cos - _neighbours(wide * sin) if back else wide * cos + _neighbours(wide) * sin).to(x.dtype)


def pair_table(spec: Inputs, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """cos and sin of each pair that is turned, [batch or 1, tokens, pairs, 2] in float32."""
    half = (spec.turned or spec.head_dim) // 2
    table = torch.empty((*cos.shape[:2], half, 2), dtype=torch.float32, device=cos.device)
    for i, angles in enumerate((cos, sin)):
        table[..., i].copy_(angles[..., :half])
    return table


def _runs(operation: str, *tensors: torch.Tensor) -> bool:
    """Tells whether this package ships an operation's kernels and they run on these tensors."""
    return bool(tensors[0].numel()) and kernels_run_on(*tensors) and launch.ships(operation)


def _turned(spec: Inputs, q: torch.Tensor, k: torch.Tensor, cos, sin, back: bool, outs: Optional[Pair] = None) -> Pair:
    """Queries and keys [batch, tokens, heads, head_dim] with their rotary embedding, or its transpose: in `outs`, or anew where what
    computes them makes their memory."""
    if spec.rotary == "none":
        return q, k
    if spec.rotary == "pairs" and _runs("llama4_rope", q, k, cos, sin) and pair_rotary.takes(q):
        return pair_rotary.rotate_pairs(q, k, pair_table(spec, cos, sin), back)
    if spec.rotary == "halves" and spec.turned and q.dtype == cos.dtype and _runs("mrope", q, k, cos, sin):
        return rotate_parts(q, k, cos, sin, spec.turned // 2, 2, back)
    if spec.turned:
        whole, part = spec._replace(turned=0), slice(0, spec.turned)
        pair = _turned(whole, q[..., part], k[..., part], cos, sin, back)
        return tuple(torch.cat((turned, x[..., spec.turned :]), -1) for turned, x in zip(pair, (q, k)))  # type: ignore[return-value]
    if spec.rotary == "pairs":
        return turned_pairs(q, cos, sin, back), turned_pairs(k, cos, sin, back)
    turn = rotary_backward if back else rotary_forward
    if back and outs is not None and q.dtype == cos.dtype:
        rotary_backward_into(outs, q, k, cos, sin)
        return outs
    if q.dtype == cos.dtype:
        return turn(q, k, cos, sin, 2)
    return tuple(x.to(q.dtype) for x in turn(q.to(cos.dtype), k.to(cos.dtype), cos, sin, 2))  # type: ignore[return-value]


def heads_reference(spec: Inputs, heads: Heads) -> Pair:
    """(q, k) as attention takes them, in PyTorch, which can differentiate it."""
    q, k, q_norm, k_norm, cos, sin = heads
    dtype = q.dtype
    if spec.turned_first:
        q, k = (turned_reference(spec, x, cos, sin).to(dtype) for x in (q, k))
    if q_norm is not None and k_norm is not None:
        q, k = (norm_reference(spec.heads, _rows(spec, x), w).view(x.shape).to(dtype) for x, w in ((q, q_norm), (k, k_norm)))
    if not spec.turned_first:
        q, k = (turned_reference(spec, x, cos, sin).to(dtype) for x in (q, k))
    return q.transpose(1, 2), k.transpose(1, 2)


def turned_reference(spec: Inputs, x: torch.Tensor, cos, sin) -> torch.Tensor:
    """The rotary embedding of [batch, tokens, heads, head_dim] in PyTorch, which can differentiate it."""
    if spec.rotary == "none":
        return x
    part, rest = (x[..., : spec.turned], x[..., spec.turned :]) if spec.turned else (x, None)
    if spec.rotary == "pairs":
        part = turned_pairs(part, cos, sin)
    else:
        width = part.shape[-1]
        cos, sin = ((t if t.shape[-1] == width else torch.cat((t, t), -1)).unsqueeze(2) for t in (cos, sin))
        a, b = part.chunk(2, -1)
        part = part * cos + torch.cat((-b, a), -1) * sin
    return part if rest is None else torch.cat((part, rest.to(part.dtype)), -1)


def heads_forward(spec: Inputs, heads: Heads) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(q and k as attention takes them, [batch, heads, tokens, head_dim]; what the backward pass needs of q's and k's norms, None where it
    makes that again)."""
    q, k, q_norm, k_norm, cos, sin = heads
    if heads.q_norm is not None and is_fused(spec):
        return (*qk_norm_rotary_forward(*heads, *spec.heads[:3], spec.turned), None, None)
    if _is_row_kernel(spec, heads):
        found = row_norm_kernels.forward(*heads, *spec.heads[:3])
        return found[0].transpose(1, 2), found[1].transpose(1, 2), found[2], found[3]
    q_rstd = k_rstd = None
    if spec.turned_first:
        q, k = _turned(spec, q, k, cos, sin, False)
    if q_norm is not None and k_norm is not None:
        (q, q_rstd), (k, k_rstd) = (
            norm_forward(spec.heads, _rows(spec, x), w, x.dtype) for x, w in ((q, q_norm), (k, k_norm))
        )
        q, k = q.view(heads.q.shape), k.view(heads.k.shape)
    if not spec.turned_first:
        q, k = _turned(spec, q, k, cos, sin, False)
    return q.transpose(1, 2), k.transpose(1, 2), q_rstd, k_rstd


def heads_backward(spec: Inputs, dq: torch.Tensor, dk: torch.Tensor, heads: Heads, rstds: tuple, needs: Tuple[bool, bool],
                   outs: Optional[Pair] = None) -> HeadsGradients:
    """dq, dk: [batch, heads, tokens, head_dim]; rstds: the last two of `heads_forward`; needs: of the norms' weights; outs: where the
    gradients of q and k go, [batch, tokens, heads, head_dim]. Gradients that are not needed are None or empty."""
    if heads.q_norm is not None and is_fused(spec):
        options = *needs, spec.heads.offset, spec.turned
        if outs is None:
            return HeadsGradients(*qk_norm_rotary_backward(dq, dk, *heads, spec.heads.eps, *options))
        return HeadsGradients(*outs, *norm_backward_into(*outs, dq, dk, *heads, spec.heads.eps, *options))
    dq, dk = dq.transpose(1, 2), dk.transpose(1, 2)
    if _is_row_kernel(spec, heads, dq, dk):
        into = (new_like(dq), new_like(dk)) if outs is None else outs
        return HeadsGradients(*into, *row_norm_kernels.backward_into(into, dq, dk, *heads, rstds, spec.heads.offset, needs))
    q, k, q_norm, k_norm, cos, sin = heads
    if not spec.turned_first:
        dq, dk = _turned(spec, dq, dk, cos, sin, True, outs if q_norm is None else None)
    elif q is not None and k is not None:
        q, k = _turned(spec, q, k, cos, sin, False)
    dq_norm = dk_norm = None
    if q is not None and k is not None and q_norm is not None and k_norm is not None:
        (dq, dq_norm), (dk, dk_norm) = (
            norm_backward(spec.heads, _rows(spec, d), _rows(spec, x), w, rstd, need)
            for d, x, w, rstd, need in zip((dq, dk), (q, k), (q_norm, k_norm), rstds, needs)
        )
        dq, dk = dq.view(q.shape), dk.view(k.shape)
    if spec.turned_first:
        dq, dk = _turned(spec, dq, dk, cos, sin, True, outs)
    if outs is not None and dq is not outs[0]:
        outs[0].copy_(dq)
        outs[1].copy_(dk)
    return HeadsGradients(dq, dk, dq_norm, dk_norm)
