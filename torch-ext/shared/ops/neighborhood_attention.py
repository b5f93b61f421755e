"""Attention of each token to its neighbours in one dimension (arXiv 2204.07143), in time and memory of tokens x window."""

import functools
from typing import Iterator, Optional, Sequence, Tuple

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel
from .arguments import describe, fail, need_alike, need_floats
from .arrays import SLAB, Pair, Triple, accumulation_dtype
from .autograd import Function, apply_function, needs_formula
from .operators import traceable

__all__ = ["neighborhood_attention"]

LN2 = 0.6931471805599453
GRID_YZ = 65535  # blocks of a grid in its second and third dimension
WIDTHS = (64, 128)  # columns of the tiles of the kernels with MMA
ROWWISE_WIDTH = 256  # and of those without
ONCE_HALO = 8  # neighbours to a side up to which one kernel for all gradients reads less than one for dq and one for dk and dv


@functools.lru_cache(maxsize=None)
def _kernel(name: str, width: int, dilation: int, halo: int = 0) -> Kernel:
    """A kernel for heads of at most `width` columns; its grid follows from the dilation and from how many rows of its tile are others'."""

    def grid(c, q, *_):
        batch, heads, tokens, _ = q.shape
        positions = -(-tokens // dilation)  # in the longest residue's sequence
        return -(-positions // (c["M"] if "M" in c else c["N"] - halo)), heads, batch * dilation

    return Kernel(name, grid=grid, reads=("q", "k", "v", "out", "dout") if "backward" in name else ("q", "k", "v"), where={"D": width})


def _family(q: torch.Tensor, left: int, right: int, dilation: int) -> Tuple[str, int]:
    """(prefix, width) of the kernels for this band."""
    width = next((n for n in WIDTHS if q.shape[3] <= n), None)
    if q.dtype == torch.float32 or width is None or q.shape[3] % 8:
        return "rowwise_", ROWWISE_WIDTH
    once = _kernel("neighborhood_backward_queries", width, dilation)
    if once.constant("M") + left + right <= once.constant("N"):
        return "", width
    return "wide_", WIDTHS[-1]


# ---------------------------------------------------------------- in PyTorch
def _shifted(x: torch.Tensor, step: int) -> torch.Tensor:
    """x at the tokens `step` further on, and zeros where there are none."""
    kept = x[:, :, step:] if step >= 0 else x[:, :, :step]
    return torch.nn.functional.pad(kept, (0, 0, max(0, -step), max(0, step)))


def _steps(tokens: int, left: int, right: int, dilation: int) -> Iterator[Tuple[int, slice, slice]]:
    """(tokens further on, queries, keys) of each neighbour that a query has."""
    for step in range(-left * dilation, right * dilation + 1, dilation):
        if abs(step) < tokens:
            yield step, slice(max(0, -step), tokens - max(0, step)), slice(max(0, step), tokens + min(0, step))


def forward_reference(q, k, v, left: int, right: int, dilation: int, scale: float) -> Pair:
    """(out, log2-sum-exp2 of the scores [batch * heads, tokens]) in PyTorch, of any kind of tensor."""
    qw, kw, vw = (x.to(accumulation_dtype(q.dtype)) for x in (q, k, v))
    places = torch.arange(q.shape[2], device=q.device)
    steps = [step for step, _, _ in _steps(q.shape[2], left, right, dilation)]
    if not steps:
        return q * v, qw.sum(-1).flatten(0, 1)  # no tokens
    scores = [
        ((qw * _shifted(kw, step)).sum(-1) * scale).masked_fill((places + step < 0) | (places + step >= q.shape[2]), float("-inf"))
        for step in steps
    ]
    lse = torch.stack(scores).logsumexp(0)
    out = sum((score - lse).exp().unsqueeze(-1) * _shifted(vw, step) for score, step in zip(scores, steps))
    return out.to(q.dtype), lse.flatten(0, 1) / LN2


def backward_reference(q, k, v, out, dout, lse, left: int, right: int, dilation: int, scale: float) -> Triple:
    """(dq, dk, dv) in PyTorch."""
    qw, kw, vw, ow, dw = (x.to(accumulation_dtype(q.dtype)) for x in (q, k, v, out, dout))
    lse = lse.view(*q.shape[:3], 1) * LN2
    delta = (ow * dw).sum(-1, keepdim=True)
    dq, dk, dv = map(torch.zeros_like, (qw, kw, vw))
    for _, queries, keys in _steps(q.shape[2], left, right, dilation):
        score = (qw[:, :, queries] * kw[:, :, keys]).sum(-1, keepdim=True) * scale
        p = (score - lse[:, :, queries]).exp()
        ds = p * ((dw[:, :, queries] * vw[:, :, keys]).sum(-1, keepdim=True) - delta[:, :, queries]) * scale
        dq[:, :, queries] += ds * kw[:, :, keys]
        dk[:, :, keys] += ds * qw[:, :, queries]
        dv[:, :, keys] += p * dw[:, :, queries]
    return _like(q).copy_(dq), _like(k).copy_(dk), _like(v).copy_(dv)


# ---------------------------------------------------------------- with the kernels
def _like(x: torch.Tensor) -> torch.Tensor:
    """A tensor that is not filled, with x's order of the dimensions in memory where its columns are the innermost."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_like(x)


def _reach(x: torch.Tensor) -> int:
    """Elements from the first to the last of one batch row."""
    return 1 + sum((length - 1) * step for length, step in zip(x.shape[1:], x.stride()[1:]))


def _fits(q, k, v, dilation: int, *others) -> bool:
    small = q.shape[3] <= ROWWISE_WIDTH and q.shape[1] <= GRID_YZ and dilation <= GRID_YZ and q.shape[2] * q.shape[3] <= SLAB
    return small and q.dtype != torch.float64 and kernels_run_on(q, k, v, *others)


def _slabs(arrays: Sequence[torch.Tensor], lines: Sequence[torch.Tensor], dilation: int) -> Iterator[list]:
    """Parts of the batch that one launch each takes: [batch, heads, tokens, head_dim] arrays, and [batch * heads, tokens] statistics."""
    batch, heads = arrays[0].shape[:2]
    step = min(SLAB // max(max(map(_reach, arrays)), max(x.stride(0) for x in arrays)), GRID_YZ // dilation)
    if step >= batch:
        yield [*arrays, *lines]
        return
    if step:
        for start in range(0, batch, step):
            yield [x[start : start + step] for x in arrays] + [x[heads * start : heads * (start + step)] for x in lines]
        return
    for line in range(batch * heads):  # one sequence alone is too long for 32-bit offsets, unless its tokens are contiguous
        yield [x[line // heads, line % heads][None, None] for x in arrays] + [x[line : line + 1] for x in lines]


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy where one batch row is too long for 32-bit offsets."""
    return x if _reach(x) <= SLAB else x.contiguous()


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int, right: int, dilation: int, scale: float) -> Pair:
    if not _fits(q, k, v, dilation):
        out, lse = forward_reference(q, k, v, left, right, dilation, scale)
        return _like(q).copy_(out), lse
    q, k, v = map(_dense, (q, k, v))
    out, lse = _like(q), q.new_empty((q.shape[0] * q.shape[1], q.shape[2]), dtype=torch.float32)
    if q.numel():
        prefix, width = _family(q, left, right, dilation)
        kernel = _kernel(f"{prefix}neighborhood_forward", width, dilation, left + right)
        for part in _slabs((q, k, v, out), (lse,), dilation):
            kernel(*part, left, right, dilation, scale)
    return out, lse


def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor,
    left: int, right: int, dilation: int, scale: float,
) -> Triple:  # fmt: skip
    """(dq, dk, dv)"""
    if not _fits(q, k, v, dilation, dout):
        return backward_reference(q, k, v, out, dout, lse, left, right, dilation, scale)
    q, k, v, out, dout = map(_dense, (q, k, v, out, dout))
    dq, dk, dv = map(_like, (q, k, v))
    if q.numel() == 0:
        return dq, dk, dv
    prefix, width = _family(q, left, right, dilation)
    numbers = left, right, dilation, scale
    if not prefix and max(left, right) <= ONCE_HALO:
        kernel = _kernel("neighborhood_backward", width, dilation, 2 * max(left, right))
        for *arrays, z in _slabs((q, k, v, out, dout, dq, dk, dv), (lse,), dilation):
            kernel(*arrays[:5], z, *arrays[5:], *numbers)
        return dq, dk, dv
    delta = torch.empty_like(lse)
    kernel = _kernel(f"{prefix}neighborhood_backward_queries", width, dilation)
    for *arrays, z, d in _slabs((q, k, v, *((out,) if prefix else ()), dout, dq), (lse, delta), dilation):
        kernel(*arrays[:-1], z, d, arrays[-1], *numbers)
    kernel = _kernel(f"{prefix}neighborhood_backward_keys", width, dilation)
    for *arrays, z, d in _slabs((q, k, v, dout, dk, dv), (lse, delta), dilation):
        kernel(*arrays[:-2], z, d, *arrays[-2:], *numbers)
    return dq, dk, dv


def _fake_forward(q, k, v, *_):
    return _like(q), q.new_empty((q.shape[0] * q.shape[1], q.shape[2]), dtype=accumulation_dtype(q.dtype))


neighborhood_attention_forward = traceable("neighborhood_attention_forward", _forward, _fake_forward)
neighborhood_attention_backward = traceable(
    "neighborhood_attention_backward", _backward, lambda q, k, v, *_: (_like(q), _like(k), _like(v))
)


class _NeighborhoodAttention(Function):
    def forward(ctx, q, k, v, *band):
        out, lse = neighborhood_attention_forward(q, k, v, *band)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.band = band
        return out

    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        return (*neighborhood_attention_backward(q, k, v, out, dout, lse, *ctx.band), *[None] * 4)


def neighborhood_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: Optional[float] = None,
    causal: bool = False,
) -> torch.Tensor:
    """Computes softmax(scale * q k^T) v over the neighbours of each token, without anything of size tokens x tokens.

    q, k, v: [batch, heads, tokens, head_dim], one shape, dtype and device, any strides. Token i sees the tokens j with
    |i - j| <= kernel_size // 2 * dilation and (i - j) % dilation == 0, with causal only those with j <= i; at the borders of the sequence
    the window is cut off. kernel_size: odd. scale: by default head_dim ** -0.5. bf16 and fp16 with head_dim up to 128, a multiple of 8, run
    on tensor cores; fp32 and other head_dims up to 256 in kernels without them, in float32; the rest in PyTorch. Returns a tensor like q.
    Differentiable in q, k and v. Raises ValueError when shapes, dtypes, devices or options do not fit.
    """
    need_floats(q=q)
    if q.dim() != 4 or q.shape[-1] == 0:
        fail("q", describe(q), "[batch, heads, tokens, head_dim]")
    for name, tensor in (("k", k), ("v", v)):
        need_alike(name, tensor, "q", q)
    if not isinstance(kernel_size, int) or kernel_size < 1 or kernel_size % 2 == 0:
        fail("kernel_size", kernel_size, "an odd positive int")
    if not isinstance(dilation, int) or dilation < 1:
        fail("dilation", dilation, "a positive int")
    tokens = max(1, q.shape[2])
    dilation = min(dilation, tokens)  # from there on no token has a neighbour
    left = min(kernel_size // 2, -(-tokens // dilation) - 1)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    band = left, 0 if causal else left, dilation, scale
    if needs_formula(q, k, v):
        return forward_reference(q, k, v, *band)[0]
    return apply_function(_NeighborhoodAttention, q, k, v, *band)


SELF_CHECKS = {"neighborhood_attention": lambda i: i.call(neighborhood_attention, *i.heads(2, 2, 2, width=64), kernel_size=7)}
