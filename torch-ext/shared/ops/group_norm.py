"""GroupNorm: the channels of a group, with all their positions, share a mean and a deviation (arXiv 1803.08494)."""

import functools
import math
from typing import NamedTuple, Optional, Sequence, Tuple

import torch

from ..runtime.device import multiprocessors
from ..runtime.launch import Kernel
from .arguments import describe, fail, need_floats
from .arrays import SLAB, accumulation_dtype, aligned, new_like
from .autograd import Function, apply_function, needs_formula
from .operators import halves, traceable
from .rows import SEGMENT, kernels_take, one_block_a_row, per_row, slabs

__all__ = ["group_norm"]

# Segments of 64 of the longest group that the kernels hold in registers (kernel_src/group_norm.py).
WHOLE = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
HELD = {torch.bfloat16: 640}  # and that they hold as it lies in memory
PARTS = 128  # of a row at most
TILE = 4096  # elements of a part where a channel is whole parts
BLOCKS_PER_SM = 8  # that a group's parts should give work to
PIECE = 2048  # elements that a part should have at least


class GroupLayout(NamedTuple):
    """How the kernels see a contiguous tensor. segment: elements; per_channel, per_group: segments."""

    segment: int
    per_channel: int
    per_group: int


def layout_of(x: torch.Tensor, groups: int) -> GroupLayout:
    batch, channels = x.shape[:2]
    positions = x.numel() // (batch * channels)
    segment = SEGMENT if positions % SEGMENT == 0 else 1
    return GroupLayout(segment, positions // segment, channels // groups * positions // segment)


@functools.lru_cache(maxsize=4096)
def chunk_of(rows: int, segments: int, segment: int, processors: int) -> int:
    """Segments of a part of a row, so that the parts of all rows give every SM work."""
    piece = -(-PIECE // segment)
    wanted = min(PARTS, max(1, BLOCKS_PER_SM * processors // rows))
    return piece * -(-segments // (piece * wanted))


def _chunk(x: torch.Tensor) -> int:
    """x: [rows, segments, segment]"""
    return chunk_of(*x.shape, multiprocessors(x))


def _parts(x: torch.Tensor) -> int:
    return -(-x.shape[1] // _chunk(x))


_forward_kernel = Kernel("group_norm_forward", grid=one_block_a_row)
_backward_kernel = Kernel("group_norm_backward", grid=one_block_a_row)
_held_forward_kernel = Kernel("group_norm_held_forward", grid=one_block_a_row)
_held_backward_kernel = Kernel("group_norm_held_backward", grid=one_block_a_row)
_held_tiles_forward_kernel = Kernel("group_norm_held_tiles_forward", grid=one_block_a_row)
_held_tiles_backward_kernel = Kernel("group_norm_held_tiles_backward", grid=one_block_a_row)
_statistics_kernel = Kernel("group_norm_statistics", grid=lambda c, x, parts: (parts.shape[0] * parts.shape[1],))
_apply_kernel = Kernel("group_norm_apply", grid=lambda c, x, weight, bias, y, parts, *_: (parts.shape[0] * parts.shape[1],))
_channel_sums_kernel = Kernel("group_norm_channel_sums", grid=lambda c, *tensors: (tensors[-1][0].numel(),))


def _parameter_blocks(c, sums, out) -> int:
    return 2 * -(-out.shape[1] // c["COLS"]) if out.shape[1] == sums.shape[2] else 0


def _parts_and_parameters(c, dx, dy, x, weight, mean, rstd, sums, out):
    return (x.shape[0] * _parts(x) + _parameter_blocks(c, sums, out),)


def _tiles_and_parameters(c, dx, dy, x, weight, mean, rstd, sums, out):
    return (x.numel() // c["TILE"] + _parameter_blocks(c, sums, out),)


_apply_backward_kernel = Kernel("group_norm_apply_backward", grid=_parts_and_parameters)
_tile_apply_backward_kernel = Kernel("group_norm_tile_apply_backward", grid=_tiles_and_parameters)
_tile_statistics_kernel = Kernel("group_norm_tile_statistics", grid=lambda c, x, parts: (parts.shape[0] * parts.shape[1],))
_tile_apply_kernel = Kernel("group_norm_tile_apply", grid=lambda c, x, *_: (x.numel() // c["TILE"],))
_tile_sums_kernel = Kernel("group_norm_tile_sums", grid=lambda c, *tensors: (tensors[-1][0].numel(),))
_parameter_sums_kernel = Kernel("group_norm_parameter_sums", grid=lambda c, sums, out: (2 * -(-out.shape[1] // c["COLS"]),))


def _channel_shape(x):
    return (1, x.shape[1], *[1] * (x.dim() - 2))


def group_norm_reference(x, weight, bias, groups, eps) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) in PyTorch, mean and rstd [batch * groups]."""
    xf = x.to(accumulation_dtype(x.dtype)).reshape(x.shape[0] * groups, math.prod(x.shape[1:]) // groups)
    mean = xf.mean(-1, keepdim=True)
    deviation = xf - mean
    rstd = torch.rsqrt(deviation.square().mean(-1, keepdim=True) + eps)
    n = (deviation * rstd).view(x.shape)
    y = n * weight.view(_channel_shape(x)) + bias.view(_channel_shape(x))
    return y.to(x.dtype), mean.flatten(), rstd.flatten()


def group_norm_backward_reference(dy, x, weight, mean, rstd) -> Tuple[torch.Tensor, torch.Tensor]:
    """(dx, [dweight, dbias]) in PyTorch."""
    acc, number = accumulation_dtype(x.dtype), mean.shape[0]
    mean, rstd = mean[:, None], rstd[:, None]
    of_groups = number, x.numel() // max(1, number)
    n, d = (x.to(acc).reshape(of_groups) - mean) * rstd, dy.to(acc)
    g = (d * weight.to(acc).view(_channel_shape(x))).reshape(of_groups)
    dx = (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True)) * rstd
    others = [i for i in range(x.dim()) if i != 1]
    return dx.view(x.shape).to(x.dtype), torch.stack([(d * n.view(x.shape)).sum(others), d.sum(others)]).to(weight.dtype)


def _takes(x: torch.Tensor, *parameters: torch.Tensor, others: Sequence[torch.Tensor] = ()) -> bool:
    return kernels_take(x, *parameters, others=others) and x[0].numel() <= SLAB


def _in_memory(x: torch.Tensor) -> torch.Tensor:
    return aligned(x.contiguous())


def _whole(x, weight, layout) -> bool:
    """Whether a group fits into the registers of a block."""
    return layout.segment == SEGMENT and weight.dtype == x.dtype and layout.per_group <= WHOLE[x.dtype]


def _held(x, weight, layout, rows: int) -> bool:
    """Whether a group fits into the registers of a block as it lies in memory, and there are enough of them for every SM. Of whole tiles,
    one that takes at least half of the registers."""
    most = HELD.get(x.dtype, 0)
    fits = layout.segment == SEGMENT and weight.dtype == x.dtype and layout.per_group <= most
    return fits and rows >= multiprocessors(x) and (2 * layout.per_group >= most or not _in_tiles(layout))


def _in_tiles(layout) -> bool:
    """Whether a channel is whole tiles, and a group not more of them than a row has parts."""
    return layout.per_channel * layout.segment % TILE == 0 and layout.per_group * layout.segment <= PARTS * TILE


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not _takes(x, weight, bias):
        return group_norm_reference(x, weight, bias, groups, eps)
    x, weight, bias = _in_memory(x), weight.contiguous(), bias.contiguous()
    y = new_like(x)
    mean, rstd = per_row(x, x.shape[0] * groups), per_row(x, x.shape[0] * groups)
    for samples in slabs(x):
        part = slice(samples.start * groups, samples.stop * groups)
        _forward_launch(x[samples], weight, bias, y[samples], mean[part], rstd[part], groups, eps)
    return y, mean, rstd


def _forward_launch(x, weight, bias, y, mean, rstd, groups, eps):
    batch, channels = x.shape[:2]
    layout = layout_of(x, groups)
    shape = batch * groups, layout.per_group, layout.segment
    x, y = x.view(shape), y.view(shape)
    if _whole(x, weight, layout):
        _forward_kernel(x, weight, bias, y, mean, rstd, eps, layout.per_channel)
        return
    if _held(x, weight, layout, batch * groups):
        if _in_tiles(layout):
            _held_tiles_forward_kernel(x.flatten(1), weight, bias, y.flatten(1), mean, rstd, eps, layout.per_channel * SEGMENT)
        else:
            _held_forward_kernel(x, weight, bias, y, mean, rstd, eps, layout.per_channel)
        return
    if _in_tiles(layout):
        x, y = x.flatten(1), y.flatten(1)
        parts = per_row(x, batch * groups, x.shape[1] // TILE, 2)
        _tile_statistics_kernel(x, parts)
        _tile_apply_kernel(x, weight, bias, y, parts, mean, rstd, eps, layout.per_channel * layout.segment)
        return
    parts, chunk = per_row(x, batch * groups, _parts(x), 2), _chunk(x)
    _statistics_kernel(x, parts, chunk)
    _apply_kernel(x, weight, bias, y, parts, mean, rstd, eps, layout.per_channel, chunk)


def _backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, need_parameters: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    """(dx, [dweight, dbias]); the second is empty unless it is needed."""
    if not _takes(x, weight, others=(dy,)):
        dx, parameters = group_norm_backward_reference(dy, x, weight, mean, rstd)
        return dx, parameters if need_parameters else weight.new_empty(0)
    dy, x, weight = _in_memory(dy), _in_memory(x), weight.contiguous()
    dx, groups = new_like(x), mean.shape[0] // x.shape[0]
    parameters, all_samples = weight.new_empty((2, x.shape[1]) if need_parameters else 0), list(slabs(x))
    # The gradients of the parameters are summed up in the launch that writes dx, where that is the only one.
    once = need_parameters and len(all_samples) == 1
    out, sums, summed = parameters if once else weight.new_empty((2, 1)), [], False
    for samples in all_samples:
        part = slice(samples.start * groups, samples.stop * groups)
        found, summed = _backward_launch(dx[samples], dy[samples], x[samples], weight, mean[part], rstd[part], groups, out)
        sums.append(found)
    if need_parameters and not (once and summed):
        # Slabs of another size may have other parts; they are few, and their sums are added up in PyTorch.
        found = sums[0] if len(sums) == 1 else torch.stack([s.sum((1, 3)) for s in sums], 1)[..., None]
        _parameter_sums_kernel(found, parameters)
    return dx, parameters


def _backward_launch(dx, dy, x, weight, mean, rstd, groups, out) -> Tuple[torch.Tensor, bool]:
    """Writes dx. Returns the sums of dy * n and of dy, [2, batch, channels, parts], and whether `out`, if it is as wide as the channels,
    has been given their sums over batch and parts."""
    batch, channels = x.shape[:2]
    layout = layout_of(x, groups)
    of_groups = [t.view(batch * groups, layout.per_group, layout.segment) for t in (dx, dy, x)]
    whole = _whole(x, weight, layout)
    held = not whole and _held(x, weight, layout, batch * groups)
    if held and _in_tiles(layout):
        positions = layout.per_channel * SEGMENT
        sums = per_row(x, 2, batch * groups, layout.per_group * SEGMENT // _held_tiles_backward_kernel.constant("PART"))
        _held_tiles_backward_kernel(*[t.flatten(1) for t in of_groups], weight, mean, rstd, sums, positions)
        return sums.view(2, batch, channels, -1), False
    if whole or held:
        sums = per_row(x, 2, batch * groups, layout.per_group)
        (_backward_kernel if whole else _held_backward_kernel)(*of_groups, weight, mean, rstd, sums, layout.per_channel)
        return sums.view(2, batch, channels, layout.per_channel), False
    if _in_tiles(layout):
        positions = layout.per_channel * layout.segment
        sums = per_row(x, 2, batch * channels, positions // TILE)
        _tile_sums_kernel(*[t.view(batch * channels, positions) for t in (dy, x)], mean, rstd, sums)
        sums = sums.view(2, batch, channels, sums.shape[2])
        _tile_apply_backward_kernel(*[t.flatten(1) for t in of_groups], weight, mean, rstd, sums, out, positions)
        return sums, True
    dy, x = (t.view(batch * channels, layout.per_channel, layout.segment) for t in (dy, x))
    sums = per_row(x, 2, batch * channels, _parts(x))
    _channel_sums_kernel(dy, x, mean, rstd, sums, _chunk(x))
    sums = sums.view(2, batch, channels, sums.shape[2])
    _apply_backward_kernel(*of_groups, weight, mean, rstd, sums, out, layout.per_channel, _chunk(of_groups[0]))
    return sums, True


group_norm_forward = traceable("group_norm_forward", _forward)
group_norm_backward = traceable("group_norm_backward", _backward, then=halves)


class GroupNormFunction(Function):
    def forward(ctx, x, weight, bias, groups, eps):
        y, mean, rstd = group_norm_forward(x, weight, bias, groups, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    def backward(ctx, dy):
        _, need_weight, need_bias, _, _ = ctx.needs_input_grad
        dx, dweight, dbias = group_norm_backward(dy, *ctx.saved_tensors, need_weight or need_bias)
        return dx, dweight if need_weight else None, dbias if need_bias else None, None, None


def group_norm(
    x: torch.Tensor, num_groups: int, weight: Optional[torch.Tensor] = None, bias: Optional[torch.Tensor] = None, eps: float = 1e-5
) -> torch.Tensor:
    """GroupNorm, in fp32, rounded once.

    x: [batch, channels, ...] of any number of dimensions from two on, bf16, fp16 or fp32 (float64 runs in PyTorch); channels_last is
    copied. num_groups: divides the channels. weight, bias: [channels], of x's dtype or fp32; None for 1 and 0. Returns a contiguous tensor
    like x. Differentiable in x, weight and bias. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    if x.dim() < 2:
        fail("x", describe(x), "[batch, channels, ...]")
    channels = x.shape[1]
    if num_groups < 1 or channels % num_groups:
        fail("num_groups", num_groups, f"a number that divides the {channels} channels of x")
    given = [(name, p) for name, p in (("weight", weight), ("bias", bias)) if p is not None]
    need_floats(x=x, **dict(given))
    for name, parameter in given:
        if parameter.shape != x.shape[1:2] or parameter.device != x.device:
            fail(name, describe(parameter), f"one value for each of the {channels} channels of x, on {x.device}")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        fail("bias", describe(bias), f"of the dtype of weight, {weight.dtype}")
    like = given[0][1] if given else x.new_empty(0)
    weight = like.new_ones(channels) if weight is None else weight
    bias = like.new_zeros(channels) if bias is None else bias
    if needs_formula(x, weight, bias):
        return group_norm_reference(x, weight, bias, int(num_groups), float(eps))[0]
    return apply_function(GroupNormFunction, x, weight, bias, int(num_groups), float(eps))


SELF_CHECKS = {
    "group_norm": lambda i: i.call(group_norm, i.leaf(2, 64, 16, 16), 8, i.leaf(64), i.leaf(64)),
    "group_norm (large groups)": lambda i: i.call(group_norm, i.leaf(2, 64, 96, 96), 4, i.leaf(64), i.leaf(64)),
}
