"""The short causal convolution of gated delta nets, each channel alone, followed by SiLU; kernel_src/short_conv.py has the formulas."""

from typing import Optional, Tuple

import torch
from torch.nn.functional import silu

from ..runtime.device import kernels_run_on, multiprocessors
from ..runtime.launch import Kernel
from .arguments import describe, fail, need_floats
from .arrays import SLAB, accumulation_dtype, aligned, column_sum, unit_stride
from .autocast import outside_autocast
from .autograd import Function, apply_function, needs_formula
from .operators import traceable

__all__ = ["TAPS", "short_conv"]

TAPS = 4
VECTOR, LEAST = 8, 512  # channels that a kernel takes: multiples of the one, at least the other, which is its tile's
FORWARD_BLOCKS, BACKWARD_BLOCKS = 8, 4  # that an SM runs at once
SHORTEST = 16  # span of tokens that a block walks along; it also reads a few tokens beside it
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _groups(x: torch.Tensor, blocks: int) -> int:
    """Returns in how many spans blocks walk along the tokens: as many as run at once, `blocks` on an SM. Where a kernel rounds spans up,
    the last blocks may find no tokens."""
    tokens, channels = x.shape
    return max(min(blocks * multiprocessors(x) // -(-channels // LEAST), tokens // SHORTEST), 1)


def _forward_grid(c, x, *_) -> tuple:
    return (_groups(x, FORWARD_BLOCKS) * -(-x.shape[1] // c["COLS"]),)


def _backward_grid(c, dy, x, w, bias, since, dx, partial) -> tuple:
    return (partial.shape[0] * -(-x.shape[1] // c["COLS"]),)


_forward_kernel = {biased: Kernel("short_conv_forward", grid=_forward_grid, where={"BIAS": biased}) for biased in (0, 1)}
_backward_kernel = {biased: Kernel("short_conv_backward", grid=_backward_grid, where={"BIAS": biased}) for biased in (0, 1)}


def tokens_before(cu_seqlens: Optional[torch.Tensor], batch: int, length: int, device) -> torch.Tensor:
    """[batch * length] int32: how many tokens of its document come before each token, at most 3."""
    if cu_seqlens is None:
        found = torch.arange(length, dtype=torch.int32, device=device).clamp_(max=TAPS - 1)
        return found if batch == 1 else found.repeat(batch)
    t = torch.arange(batch * length, dtype=torch.int32, device=device)
    starts = cu_seqlens.to(torch.int32).contiguous()
    document = torch.searchsorted(starts, t, right=True) - 1
    return (t - starts[document.clamp(min=0)]).clamp(0, TAPS - 1).to(torch.int32)


def short_conv_reference(x, weight, bias, since) -> torch.Tensor:
    """Computes `short_conv` of flat tokens with PyTorch's operations, differentiably."""
    dtype = accumulation_dtype(x.dtype)
    wide, w = x.to(dtype), weight.to(dtype)
    p = wide * w[:, TAPS - 1]
    for back in range(1, TAPS):
        earlier = torch.nn.functional.pad(wide, (0, 0, back, 0))[: x.shape[0]]
        p = p + torch.where((since >= back)[:, None], earlier, 0) * w[:, TAPS - 1 - back]
    return silu(p if bias is None else p + bias.to(dtype)).to(x.dtype)


def _fits(x, weight, *others) -> bool:
    """Whether kernels take these: one dtype, channels of a tile at least, and offsets within 32 bits."""
    shaped = x.dtype in FLOATS and x.dtype == weight.dtype and x.numel() > 0 and x.shape[1] >= LEAST and x.shape[1] % VECTOR == 0
    return shaped and x.shape[0] * x.stride(0) < SLAB and kernels_run_on(x, weight, *others)


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], since: torch.Tensor) -> torch.Tensor:
    if not _fits(x, weight, bias, since):
        return short_conv_reference(x, weight, bias, since)
    x, y = aligned(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    _forward_kernel[bias is not None](x, unit_stride(weight), x.new_empty(1) if bias is None else aligned(bias), since, y)
    return y


def _backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], since: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias; the last is empty without one."""
    if not _fits(x, weight, bias, since, dy):
        leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
        with torch.enable_grad():
            y = short_conv_reference(leaves[0], leaves[1], leaves[2], since)
        dx, dweight, *dbias = torch.autograd.grad(y, [t for t in leaves if t is not None], dy)
        return dx, dweight, dbias[0] if dbias else weight.new_empty(0)
    x, dy, channels = aligned(x), aligned(dy), x.shape[1]
    dx, groups = torch.empty_like(x, memory_format=torch.contiguous_format), _groups(x, BACKWARD_BLOCKS)
    partial = torch.empty((groups, TAPS + 1, channels), dtype=torch.float32, device=x.device)
    shift = x.new_empty(1) if bias is None else aligned(bias)
    _backward_kernel[bias is not None](dy, x, unit_stride(weight), shift, since, dx, partial)
    sums = column_sum(partial.view(groups, -1), torch.float32).view(TAPS + 1, channels)
    dweight = sums[:TAPS].t().to(weight.dtype, memory_format=torch.contiguous_format)
    # A copy in float32 too: an operator must not return a part of a tensor.
    return dx, dweight, weight.new_empty(0) if bias is None else sums[TAPS].to(bias.dtype, copy=True)


def _fake_backward(dy, x, weight, bias, since):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(0 if bias is None else bias.shape)


conv_forward = traceable("short_conv_forward", _forward, lambda x, weight, bias, since: x.new_empty(x.shape))
conv_backward = traceable("short_conv_backward", _backward, _fake_backward)


class _ShortConv(Function):
    def forward(ctx, x, weight, bias, since):
        ctx.save_for_backward(x, weight, bias, since)
        return conv_forward(x, weight, bias, since)

    @outside_autocast
    def backward(ctx, dy):
        x, weight, bias, since = ctx.saved_tensors
        dx, dweight, dbias = conv_backward(dy, x, weight, bias, since)
        need = ctx.needs_input_grad
        return dx if need[0] else None, dweight if need[1] else None, dbias if need[2] else None, None


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    *,
    cu_seqlens: Optional[torch.Tensor] = None,
    since: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Computes silu of a causal convolution of 4 taps over the tokens of each document, each channel alone.

    Args:
        x: [batch, tokens, channels].
        weight: [channels, 4], of x's dtype.
        bias: [channels] or None.
        cu_seqlens: [documents + 1], where documents start in a batch of one row; by default each row is a document.
        since: what `tokens_before` made of cu_seqlens, where several layers share it.

    Returns:
        [batch, tokens, channels]. Differentiable in x, weight and bias.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit.
    """
    need_floats(x=x, weight=weight)
    if x.dim() != 3:
        fail("x", describe(x), "[batch, tokens, channels]")
    if weight.shape != (x.shape[2], TAPS) or weight.device != x.device:
        fail("weight", describe(weight), f"[{x.shape[2]}, {TAPS}] on {x.device}")
    if bias is not None and (bias.shape != x.shape[2:] or bias.device != x.device):
        fail("bias", describe(bias), f"[{x.shape[2]}] on {x.device}")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or x.shape[0] != 1 or cu_seqlens.device != x.device):
        fail("cu_seqlens", f"{describe(cu_seqlens)} with a batch of {x.shape[0]}", f"[documents + 1] on {x.device}, and a batch of 1")
    batch, length, channels = x.shape
    since = tokens_before(cu_seqlens, batch, length, x.device) if since is None else since
    flat = x.reshape(-1, channels)
    if needs_formula(flat, weight, bias, since):
        return short_conv_reference(flat, weight, bias, since).view(x.shape)
    return apply_function(_ShortConv, flat, weight, bias, since).view(x.shape)


SELF_CHECKS = {"short_conv": lambda i: i.call(short_conv, i.leaf(1, i.tokens, 512), i.leaf(512, 4))}
