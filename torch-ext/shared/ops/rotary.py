"""Rotary position embedding of queries and keys, in the half-split form (arXiv 2104.09864); alone, and with their RMSNorm."""

import functools
from typing import Tuple

import torch

from ..runtime import launch
from ..runtime.device import kernels_run_on, multiprocessors
from ..runtime.launch import Kernel
from ..runtime.replay import replayed
from . import head_norm_kernels
from .arguments import describe, fail, need_device, need_floats
from .arrays import Four, Pair, column_sum, new_like
from .autograd import Function, apply_function, needs_formula
from .head_norm_kernels import flat_heads
from .operators import traceable
from .part_rotary import heads_grid
from .rms_norm import ROUNDS, rms_norm_backward_reference, rms_norm_reference
from .rotary_reference import of_part, qk_norm_rotary_reference, rotary_backward_reference, rotary_reference

__all__ = [
    "fake_rotary", "norm_backward_into", "qk_norm_rotary", "qk_norm_rotary_backward", "qk_norm_rotary_forward", "rotary", "rotary_backward",
    "rotary_backward_into", "rotary_forward", "rotate_checked",
]  # fmt: skip

NARROWED = (torch.bfloat16,)  # half precision with kernels for weights and angles in fp32


def _table(angles: torch.Tensor) -> torch.Tensor:
    """[batch or 1, tokens, width] -> [rows, width]."""
    return angles.reshape(-1, angles.shape[-1])


def _forward_views(q, k, q_out, k_out, *others) -> list:
    """others: weights [head_dim], then cos and sin."""
    return [*map(flat_heads, (q, k, q_out, k_out)), *others[:-2], *map(_table, others[-2:])]


def _backward_views(dq_out, dk_out, q, k, dq, dk, q_weight, k_weight, cos, sin, *partials) -> list:
    return [*map(flat_heads, (dq_out, dk_out, q, k, dq, dk)), q_weight, k_weight, *map(_table, (cos, sin)), *partials]


# Forward and backward are one kernel with another constant.
_kernels = tuple(
    Kernel("rotary", "rotary_any", grid=heads_grid, views=_forward_views, reads=("q", "k", "cos", "sin"), where={"BACKWARD": backward})
    for backward in (0, 1)
)
_norm_forward_kernel = Kernel(
    "qk_norm_rotary_forward", grid=heads_grid, views=_forward_views, reads=("q", "k", "q_weight", "k_weight", "cos", "sin")
)
_norm_backward_kernel = Kernel(
    "qk_norm_rotary_backward",
    grid=lambda c, dq, dk, q, k, *rest: (
        rest[-1].shape[0] // (k.shape[1] // c["HEADS"]),
        q.shape[1] // c["HEADS"] + k.shape[1] // c["HEADS"],
    ),
    views=_backward_views,
    reads=("dq_out", "dk_out", "q", "k", "q_weight", "k_weight", "cos", "sin"),
)
_column_sums_kernel = Kernel("column_sum_pair", grid=lambda c, partial, *_: (-(-partial.shape[1] // c["COLS"]), 2))


# ---------------------------------------------------------------- with the kernels
def _launch(q, k, cos, sin, heads_dim, backward) -> Pair:
    """Results lie in memory as [batch, tokens, heads, head_dim], whatever the order of the dimensions: what the projections
    write and what attention and the next backward read without a copy."""
    q, k = (x.transpose(1, 2) if heads_dim == 1 else x for x in (q, k))
    q_out, k_out = new_like(q), new_like(k)
    _kernels[backward](q, k, q_out, k_out, cos, sin)
    return (q_out.transpose(1, 2), k_out.transpose(1, 2)) if heads_dim == 1 else (q_out, k_out)


def _fits(q, k, cos, sin, *others):
    """False for empty tensors too: a launch takes both, or there is nothing to launch."""
    return q.dtype != torch.float64 and cos.dtype == q.dtype and _launches(q, k, cos, sin, *others)


def _launches(q, k, cos, sin, *others):
    return bool(q.numel() and k.numel()) and kernels_run_on(q, k, cos, sin, *others)


def _forward(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads_dim: int) -> Pair:
    if _fits(q, k, cos, sin):
        return _launch(q, k, cos, sin, heads_dim, 0)
    return rotary_reference(q, k, cos, sin, heads_dim)


def _backward(dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads_dim: int) -> Pair:
    if _fits(dq, dk, cos, sin):
        return _launch(dq, dk, cos, sin, heads_dim, 1)
    return rotary_backward_reference(dq, dk, cos, sin, heads_dim)


def rotary_backward_into(outs: Pair, dq, dk, cos, sin) -> None:
    """Computes `rotary_backward` of [batch, tokens, heads, head_dim], with the gradients of q and k written to `outs`."""
    if _fits(dq, dk, cos, sin):
        _kernels[1](dq, dk, *outs, cos, sin)
    else:
        for out, grad in zip(outs, rotary_backward_reference(dq, dk, cos, sin, 2)):
            out.copy_(grad)


def _fused_heads(q, k, q_weight, k_weight, cos, sin, *others) -> bool:
    """True when kernel_src/qk_norm_rotary.py takes these heads, with weights and angles of q's dtype, or in fp32 with q in half precision,
    as autocast has it over an fp32 model. others: what else a kernel reads."""
    dtype, of_weight = q.dtype, q_weight.dtype
    if not of_weight == k_weight.dtype == cos.dtype or dtype == torch.float64:
        return False
    if of_weight != dtype and not (of_weight == torch.float32 and dtype in NARROWED):
        return False
    if not _launches(q, k, cos, sin, q_weight, k_weight, *others):
        return False
    shape = q.shape
    return shape[3] == cos.shape[-1] and _takes_heads(launch.backend, shape[3], shape[2], k.shape[2])


@functools.lru_cache(maxsize=None)
def _takes_heads(backend, head_dim: int, q_heads: int, k_heads: int) -> bool:
    """Tells whether a backend has these kernels for heads of a length and these numbers of them."""
    if "qk_norm_rotary" not in backend.artifacts.operations():
        return False
    heads = min(_norm_backward_kernel.constants("HEADS"))
    return head_dim == 2 * _norm_backward_kernel.constant("HALF") and q_heads % heads == 0 and k_heads % heads == 0


def _other_heads(q, k, q_weight, k_weight, cos, sin, rotary_dim: int, *others) -> bool:
    """True when kernel_src/head_norm_rotary.py takes these heads. others: what else a kernel reads."""
    if not q_weight.dtype == k_weight.dtype == cos.dtype or cos.shape[-1] != (rotary_dim or q.shape[-1]):
        return False
    if not _launches(q, k, cos, sin, q_weight, k_weight, *others):
        return False
    return head_norm_kernels.takes(q.dtype, cos.dtype, q.shape[-1], cos.shape[-1])


def _norm_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    rounds: str = "first",
    rotary_dim: int = 0,
) -> Pair:
    """Results as [batch, heads, tokens, head_dim] views of [batch, tokens, heads, head_dim] in memory, of q's dtype."""
    tensors = q, k, q_weight, k_weight, cos, sin
    if rounds == "first" and not offset and rotary_dim in (0, q.shape[-1]) and _fused_heads(*tensors):
        outs = new_like(q), new_like(k)
        _norm_forward_kernel(q, k, *outs, q_weight, k_weight, cos, sin, eps)
    elif _other_heads(*tensors, rotary_dim):
        outs = head_norm_kernels.forward(*tensors, eps, offset, rounds)
    else:
        q_out, k_out = qk_norm_rotary_reference(*tensors, eps, offset, rounds, rotary_dim)
        return q_out.to(q.dtype), k_out.to(k.dtype)
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)


def _norm_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    need_q_weight: bool,
    need_k_weight: bool,
    offset: float = 0.0,
    rotary_dim: int = 0,
) -> Four:
    """(dq, dk, dq_weight, dk_weight); dq, dk as [batch, heads, tokens, head_dim] come in, [batch, tokens, heads, head_dim] go out.
    A weight's gradient is empty where it is not needed."""
    outs = new_like(q), new_like(k)
    needs = need_q_weight, need_k_weight, offset, rotary_dim
    return (*outs, *norm_backward_into(*outs, dq, dk, q, k, q_weight, k_weight, cos, sin, eps, *needs))


@replayed
def norm_backward_into(
    q_out, k_out, dq, dk, q, k, q_weight, k_weight, cos, sin, eps, need_q_weight, need_k_weight, offset, rotary_dim
) -> Pair:
    """Computes `qk_norm_rotary_backward`, with the gradients of q and k written to the first two; returns those of the weights."""
    dq, dk = dq.transpose(1, 2), dk.transpose(1, 2)
    tensors = q, k, q_weight, k_weight, cos, sin
    if offset or rotary_dim not in (0, q.shape[-1]) or not _fused_heads(*tensors, dq, dk):
        if _other_heads(*tensors, rotary_dim, dq, dk):
            needs = need_q_weight, need_k_weight
            return head_norm_kernels.backward_into((q_out, k_out), dq, dk, *tensors, eps, offset, needs)
        dq, dk = of_part(rotary_backward_reference, dq, dk, cos, sin, rotary_dim)
        (dq, dq_weight), (dk, dk_weight) = (
            rms_norm_backward_reference(d, x, w, rms_norm_reference(x, w, eps)[1], need, offset)
            for d, x, w, need in ((dq, q, q_weight, need_q_weight), (dk, k, k_weight, need_k_weight))
        )
        q_out.copy_(dq)
        k_out.copy_(dk)
        return dq_weight, dk_weight
    q_rows, k_rows = _partial_rows(q.shape, k.shape, multiprocessors(q))
    partials = tuple(torch.empty((rows, q.shape[3]), dtype=torch.float32, device=q.device) for rows in (q_rows, k_rows))
    _norm_backward_kernel(dq, dk, q, k, q_out, k_out, q_weight, k_weight, cos, sin, *partials, eps)
    if need_q_weight and need_k_weight:
        sums = tuple(w.new_empty(w.shape) for w in (q_weight, k_weight))
        _column_sums_kernel(*partials, *sums)
        return sums
    dq_weight = column_sum(partials[0], q_weight.dtype) if need_q_weight else q_weight.new_empty(0)
    dk_weight = column_sum(partials[1], k_weight.dtype) if need_k_weight else k_weight.new_empty(0)
    return dq_weight, dk_weight


@functools.lru_cache(maxsize=None)
def _partial_rows(q_shape: tuple, k_shape: tuple, processors: int) -> Tuple[int, int]:
    """How many partial sums of q's and k's weight gradients there are: one for each block.

    A block walks over tokens with one group of heads. An SM holds two blocks; all groups together fill the GPU once.
    """
    constants = _norm_backward_kernel.constants
    heads = next(heads for heads in constants("HEADS") if q_shape[2] % heads == 0 and k_shape[2] % heads == 0)
    q_groups, k_groups = q_shape[2] // heads, k_shape[2] // heads
    blocks = min(-(-q_shape[0] * q_shape[1] // max(constants("TOKENS"))), max(1, 2 * processors // (q_groups + k_groups)))
    return blocks * q_groups, blocks * k_groups


# ---------------------------------------------------------------- for tracers
def fake_rotary(q, k, cos, sin, heads_dim):
    """Returns tensors without data, of the shapes and strides that `rotary_forward` returns."""
    if heads_dim == 2:
        return q.new_empty(q.shape), k.new_empty(k.shape)
    return tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k))


def _fake_norm_forward(q, k, q_weight, k_weight, cos, sin, eps, offset=0.0, rounds="first", rotary_dim=0):
    return q.new_empty(q.shape).transpose(1, 2), k.new_empty(k.shape).transpose(1, 2)


def _fake_norm_backward(dq, dk, q, k, q_weight, k_weight, cos, sin, eps, need_q_weight, need_k_weight, offset=0.0, rotary_dim=0):
    dweights = [w.new_empty(w.shape if need else 0) for w, need in ((q_weight, need_q_weight), (k_weight, need_k_weight))]
    return (q.new_empty(q.shape), k.new_empty(k.shape), *dweights)


rotary_forward = traceable("rotary_forward", _forward, fake_rotary)
rotary_backward = traceable("rotary_backward", _backward, fake_rotary)
qk_norm_rotary_forward = traceable("qk_norm_rotary_forward", _norm_forward, _fake_norm_forward)
qk_norm_rotary_backward = traceable("qk_norm_rotary_backward", _norm_backward, _fake_norm_backward)


class _Rotary(Function):
    def forward(ctx, q, k, cos, sin, heads_dim):
        ctx.save_for_backward(cos, sin)
        ctx.heads_dim = heads_dim
        return rotary_forward(q, k, cos, sin, heads_dim)

    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return (*rotary_backward(dq, dk, cos, sin, ctx.heads_dim), None, None, None)


class _QKNormRotary(Function):
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, eps, offset, rounds, rotary_dim):
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.eps, ctx.offset, ctx.rotary_dim = eps, offset, rotary_dim
        return qk_norm_rotary_forward(q, k, q_weight, k_weight, cos, sin, eps, offset, rounds, rotary_dim)

    def backward(ctx, dq, dk):
        _, _, need_q_weight, need_k_weight = ctx.needs_input_grad[:4]
        needs = need_q_weight, need_k_weight, ctx.offset, ctx.rotary_dim
        dq, dk, dq_weight, dk_weight = qk_norm_rotary_backward(dq, dk, *ctx.saved_tensors, ctx.eps, *needs)
        return dq, dk, dq_weight if need_q_weight else None, dk_weight if need_k_weight else None, *(None,) * 6


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Pair:
    """Rotates queries and keys by their positions' angles, both in one launch.

    q: [batch, heads, tokens, head_dim] where unsqueeze_dim is 1 (the default), [batch, tokens, heads, head_dim] where it is 2;
    k: the same with its own number of heads. Any strides. cos, sin: [batch or 1, tokens, head_dim], or half as wide when both
    halves of a head use the same angles. Returns new tensors of q's and k's shapes. bf16, fp16 and fp32, all of one dtype, run in
    the kernels; other dtypes, and cos and sin of another dtype than q, in PyTorch with its promotion. Differentiable in q and k,
    and in PyTorch also in cos and sin. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    if unsqueeze_dim % 4 not in (1, 2):
        fail("unsqueeze_dim", unsqueeze_dim, "1 ([batch, heads, tokens, head_dim]) or 2 ([batch, tokens, heads, head_dim])")
    heads_dim = unsqueeze_dim % 4
    _check(q, k, cos, sin, heads_dim)
    return rotate_checked(q, k, cos, sin, heads_dim)


def rotate_checked(q, k, cos, sin, heads_dim: int) -> Pair:
    """`rotary` of arguments that fit."""
    if cos.requires_grad or sin.requires_grad or cos.dtype != q.dtype or needs_formula(q, k, cos, sin):
        return rotary_reference(q, k, cos, sin, heads_dim)
    return apply_function(_Rotary, q, k, cos, sin, heads_dim)


def qk_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    rounds: str = "first",
    rotary_dim: int = 0,
) -> Pair:
    """Normalises every head of q and k and rotates it: what lies between the projections and attention.

    Args:
        q, k: [batch, tokens, heads, head_dim], as the projections write them.
        q_weight, k_weight: [head_dim].
        cos, sin: as in `rotary`, of the part of the head that is rotated.
        eps, offset, rounds: of the norms, as in `rms_norm`.
        rotary_dim: how many columns of a head are rotated, from the first on; 0 for all.

    Returns:
        q and k as attention takes them, [batch, heads, tokens, head_dim]; differentiable in q, k and the weights. Qwen3's kernels take
        head_dim 128 and numbers of heads that are multiples of 4; those of other families, where a package has them, heads of 128 and 256,
        and 64 columns of 256; the rest runs in PyTorch.

    Raises:
        ValueError: if shapes, dtypes, devices or options do not fit.
    """
    if rounds not in ROUNDS:
        fail("rounds", repr(rounds), f"one of {', '.join(ROUNDS)}")
    _check(q, k, cos, sin, 2, rotary_dim)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.shape != q.shape[-1:] or weight.device != q.device:
            fail(name, describe(weight), f"[{q.shape[-1]}] on {q.device}")
    options = float(eps), float(offset), rounds, rotary_dim
    one_dtype = cos.dtype == q_weight.dtype == k_weight.dtype == q.dtype
    if cos.requires_grad or sin.requires_grad or not one_dtype or needs_formula(q, k, q_weight, k_weight, cos, sin):
        return qk_norm_rotary_reference(q, k, q_weight, k_weight, cos, sin, *options)
    return apply_function(_QKNormRotary, q, k, q_weight, k_weight, cos, sin, *options)


def _check(q, k, cos, sin, heads_dim, rotary_dim=0):
    need_floats(q=q, k=k, cos=cos, sin=sin)
    if q.dim() != 4 or q.shape[-1] % 2:
        fail("q", describe(q), "four dimensions with an even head_dim")
    batch, tokens, width = q.shape[0], q.shape[3 - heads_dim], q.shape[-1]
    if k.dim() != 4 or (k.shape[0], k.shape[3 - heads_dim], k.shape[-1]) != (batch, tokens, width):
        fail("k", describe(k), f"q's batch, tokens and head_dim; q is {describe(q)}")
    if rotary_dim % 2 or not 0 <= rotary_dim <= width:
        fail("rotary_dim", rotary_dim, f"an even number of columns of a head, which has {width}, or 0 for all")
    width = rotary_dim or width
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 3 or table.shape[0] not in (1, batch) or table.shape[1] != tokens:
            fail(name, describe(table), f"[{batch} or 1, {tokens}, {width} or {width // 2}]")
        if table.shape[2] not in (width, width // 2) or table.shape != cos.shape or table.dtype != cos.dtype:
            fail(name, describe(table), f"[{batch} or 1, {tokens}, {width} or {width // 2}], the same for cos and sin")
    need_device("q", q.device, k=k, cos=cos, sin=sin)
    if k.dtype != q.dtype:
        fail("k", describe(k), f"of q's dtype, {q.dtype}")


SELF_CHECKS = {
    "rotary": lambda i: i.call(rotary, *i.heads(8, 2), *i.angles(1, i.tokens, i.width)),
    "qk_norm_rotary": lambda i: i.call(
        qk_norm_rotary, *i.heads(8, 4, last=True), i.leaf(i.width), i.leaf(i.width), *i.angles(1, i.tokens, i.width)
    ),
}
