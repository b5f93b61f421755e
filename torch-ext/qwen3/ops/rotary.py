"""Rotary position embedding of queries and keys, in the half-split form (arXiv 2104.09864)."""

from typing import Tuple

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel
from .common import describe, fail, traceable, unit_stride

Pair = Tuple[torch.Tensor, torch.Tensor]


def _grid(c, q, k, *_):
    groups = -(-q.shape[2] // c["HEADS"]) + -(-k.shape[2] // c["HEADS"])
    return (q.shape[1], q.shape[0], groups)


class _RotaryKernel(Kernel):
    """Forward and backward are one kernel with another constant."""

    def __init__(self, backward: int):
        super().__init__("rotary", "rotary_any", grid=_grid)
        self.backward = backward

    def _unfit(self, variant, args):
        if variant.constants["BACKWARD"] != self.backward:
            return "is for the other direction"
        return super()._unfit(variant, args)


_kernels = (_RotaryKernel(0), _RotaryKernel(1))


def _full_width(table: torch.Tensor, head_dim: int) -> torch.Tensor:
    return table if table.shape[-1] == head_dim else torch.cat((table, table), -1)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotary_reference(q, k, cos, sin, heads_dim: int) -> Pair:
    """(q, k) rotated, in PyTorch; heads_dim: the dimension of q that holds the heads (1 or 2)."""
    cos, sin = (_full_width(t, q.shape[-1]).unsqueeze(heads_dim) for t in (cos, sin))
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def rotary_backward_reference(dq, dk, cos, sin, heads_dim: int) -> Pair:
    """The transpose of `rotary_reference`, in PyTorch."""
    cos, sin = (_full_width(t, dq.shape[-1]).unsqueeze(heads_dim) for t in (cos, sin))
    return dq * cos - _rotate_half(dq * sin), dk * cos - _rotate_half(dk * sin)


def _launch(q, k, cos, sin, heads_dim, backward) -> Pair:
    """Results lie in memory as [batch, tokens, heads, head_dim], whatever the order of the dimensions: what the projections
    write and what attention and the next backward read without a copy."""
    q, k = (unit_stride(x.transpose(1, 2) if heads_dim == 1 else x) for x in (q, k))
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if q.numel():
        _kernels[backward](q, k, q_out, k_out, unit_stride(cos), unit_stride(sin))
    return (q_out.transpose(1, 2), k_out.transpose(1, 2)) if heads_dim == 1 else (q_out, k_out)


def _forward(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads_dim: int) -> Pair:
    if _fits(q, cos):
        return _launch(q, k, cos, sin, heads_dim, 0)
    return rotary_reference(q, k, cos, sin, heads_dim)


def _backward(dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads_dim: int) -> Pair:
    if _fits(dq, cos):
        return _launch(dq, dk, cos, sin, heads_dim, 1)
    return rotary_backward_reference(dq, dk, cos, sin, heads_dim)


def _fits(q, cos):
    return q.dtype != torch.float64 and cos.dtype == q.dtype and kernels_run_on(q)


def _fake(q, k, cos, sin, heads_dim):
    if heads_dim == 2:
        return q.new_empty(q.shape), k.new_empty(k.shape)
    return tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k))


rotary_forward = traceable("rotary_forward", _forward, _fake)
rotary_backward = traceable("rotary_backward", _backward, _fake)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, heads_dim):
        ctx.save_for_backward(cos, sin)
        ctx.heads_dim = heads_dim
        return rotary_forward(q, k, cos, sin, heads_dim)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return (*rotary_backward(dq, dk, cos, sin, ctx.heads_dim), None, None, None)


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Pair:
    """Rotates queries and keys by their positions' angles, both in one launch.

    q: [batch, heads, tokens, head_dim] where unsqueeze_dim is 1 (the default), [batch, tokens, heads, head_dim] where it is 2;
    k: the same with its own number of heads. Any strides. cos, sin: [batch or 1, tokens, head_dim], or half as wide when both
    halves of a head use the same angles. Returns new tensors of q's and k's shapes. bf16, fp16 and fp32, all of one dtype, run in
    the kernels; other dtypes, and cos and sin of another dtype than q, in PyTorch with its promotion. Differentiable in q and k, not in cos and sin. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    if q.dim() != 4 or q.shape[-1] % 2:
        fail("q", describe(q), "four dimensions with an even head_dim")
    if unsqueeze_dim % 4 not in (1, 2):
        fail("unsqueeze_dim", unsqueeze_dim, "1 ([batch, heads, tokens, head_dim]) or 2 ([batch, tokens, heads, head_dim])")
    heads_dim = unsqueeze_dim % 4
    batch, tokens, width = q.shape[0], q.shape[3 - heads_dim], q.shape[-1]
    if k.dim() != 4 or (k.shape[0], k.shape[3 - heads_dim], k.shape[-1]) != (batch, tokens, width):
        fail("k", describe(k), f"q's batch, tokens and head_dim; q is {describe(q)}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 3 or table.shape[0] not in (1, batch) or table.shape[1] != tokens:
            fail(name, describe(table), f"[{batch} or 1, {tokens}, {width} or {width // 2}]")
        if table.shape[2] not in (width, width // 2) or table.shape != cos.shape or table.dtype != cos.dtype:
            fail(name, describe(table), f"[{batch} or 1, {tokens}, {width} or {width // 2}], the same for cos and sin")
    for name, tensor in (("k", k), ("cos", cos), ("sin", sin)):
        if tensor.device != q.device:
            fail(name, describe(tensor), f"on the device of q, {q.device}")
    if k.dtype != q.dtype:
        fail("k", describe(k), f"of q's dtype, {q.dtype}")
    if cos.requires_grad or sin.requires_grad or cos.dtype != q.dtype:
        return rotary_reference(q, k, cos, sin, heads_dim)
    return _Rotary.apply(q, k, cos, sin, heads_dim)
