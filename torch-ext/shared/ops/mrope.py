"""Rotary position embedding with several positions a token (Qwen2-VL, arXiv 2409.12191), or over a part of the head."""

from typing import Sequence

import torch

from ..runtime.launch import Kernel
from ..runtime.replay import replayed
from .arguments import describe, fail, need_device, need_floats
from .arrays import SLAB, Pair, kernels_compute
from .autograd import Function, apply_function, needs_formula
from .operators import traceable
from .part_rotary import part_rotary_reference, rotate_parts
from .rotary import fake_rotary, rotate_checked

__all__ = ["partial_rotary", "rotary_multimodal"]

GROUP, GROUPED_WIDTH = 8, 128  # columns of a section that have one table, and of a table at most, where whole groups are picked


def _pick_grid(c, cos, *_):
    return -(-cos.shape[1] // c["ROWS"]), -(-cos.shape[2] // c["COLS"])


def _groups_grid(c, cos, *_):
    return (-(-cos.shape[1] // c["ROWS"]),)


def _in_groups(*tables):
    return tuple(t.unflatten(-1, (-1, GROUP)) for t in tables)


_pick_kernel = Kernel("mrope_pick", grid=_pick_grid, reads=("cos", "sin"))
_pick_groups_kernel = Kernel("mrope_pick_groups", grid=_groups_grid, views=_in_groups, reads=("cos", "sin"))
# ---------------------------------------------------------------- in PyTorch
def _parts(half: int, sections: Sequence[int], interleaved: bool, device) -> torch.Tensor:
    """Returns the number of the table that each frequency takes."""
    time, height, width = sections
    j = torch.arange(half, device=device)
    if interleaved:
        return ((j % 3 == 1) & (j < 3 * height)).long() + 2 * ((j % 3 == 2) & (j < 3 * width)).long()
    return (j >= time).long() + (j >= time + height).long()


def _chosen(table: torch.Tensor, half: int, sections: Sequence[int], interleaved: bool) -> torch.Tensor:
    """[3, batch or 1, tokens, half or 2 * half] -> [batch or 1, tokens, half or 2 * half]."""
    part = _parts(half, sections, interleaved, table.device).repeat(table.shape[-1] // half)
    return table.gather(0, part.expand(1, *table.shape[1:]))[0]


def pick_reference(cos, sin, half: int, sections: Sequence[int], interleaved: bool) -> Pair:
    return _chosen(cos, half, sections, interleaved), _chosen(sin, half, sections, interleaved)


# ---------------------------------------------------------------- with the kernels
def _within_reach(table: torch.Tensor) -> torch.Tensor:
    """[3, rows, width], a copy where the three lie too far from each other for 32-bit offsets."""
    return table if 2 * table.stride(0) + table.shape[1] * table.stride(1) <= SLAB else table.contiguous()


def _pick(cos: torch.Tensor, sin: torch.Tensor, half: int, time: int, height: int, width: int, interleaved: bool) -> Pair:
    """Picks the table of each frequency from cos and sin, [3, batch or 1, tokens, width]; returns [batch or 1, tokens, width]."""
    if not kernels_compute(cos, sin):
        return pick_reference(cos, sin, half, (time, height, width), interleaved)
    outs = [t.new_empty(t.shape[1:]) for t in (cos, sin)]
    tables = [t.reshape(3, -1, t.shape[-1]) for t in (cos, sin)]
    picked = [t.view(-1, t.shape[-1]) for t in outs]
    step = max(1, SLAB // (3 * cos.shape[-1]))
    grouped = not interleaved and (half | time | height) % GROUP == 0 and cos.shape[-1] <= GROUPED_WIDTH
    for start in range(0, tables[0].shape[1], step):
        part = slice(start, start + step)
        arrays = *[_within_reach(t[:, part]) for t in tables], *[t[part] for t in picked]
        if grouped:
            _pick_groups_kernel(*arrays, half // GROUP, time // GROUP, height // GROUP)
        else:
            _pick_kernel(*arrays, half, time, height, width, int(interleaved))
    return outs[0], outs[1]


mrope_pick = traceable("mrope_pick", _pick)
mrope_rotate = traceable(
    "mrope", rotate_parts, lambda q, k, cos, sin, half, heads_dim, backward: fake_rotary(q, k, cos, sin, heads_dim)
)


@replayed
def _pick_and_rotate(q, k, cos, sin, half, heads_dim, *sections):
    tables = _pick(cos, sin, half, *sections)
    return (*rotate_parts(q, k, *tables, half, heads_dim, False), *tables)


class _MRoPE(Function):
    def forward(ctx, q, k, cos, sin, half, sections, heads_dim):
        """sections: (time, height, width, interleaved), or None where cos and sin are one table."""
        ctx.options = half, heads_dim
        if sections is not None and not torch.compiler.is_compiling():
            q, k, cos, sin = _pick_and_rotate(q, k, cos, sin, half, heads_dim, *sections)
        else:
            if sections is not None:
                cos, sin = mrope_pick(cos, sin, half, *sections)
            q, k = mrope_rotate(q, k, cos, sin, half, heads_dim, False)
        ctx.save_for_backward(cos, sin)
        return q, k

    def backward(ctx, dq, dk):
        return (*mrope_rotate(dq, dk, *ctx.saved_tensors, *ctx.options, True), *[None] * 5)


def _apply(q, k, cos, sin, half, sections, heads_dim) -> Pair:
    if cos.requires_grad or sin.requires_grad or cos.dtype != q.dtype or needs_formula(q, k, cos, sin):
        if sections is not None:
            cos, sin = pick_reference(cos, sin, half, sections[:3], sections[3])
        q, k = (x.transpose(1, 2) if heads_dim == 1 else x for x in (q, k))
        outs = part_rotary_reference(q, k, cos, sin, half, False)
        return (outs[0].transpose(1, 2), outs[1].transpose(1, 2)) if heads_dim == 1 else outs
    return apply_function(_MRoPE, q, k, cos, sin, half, sections, heads_dim)


def _check(q, k, cos, sin, unsqueeze_dim) -> int:
    """The dimension of the heads."""
    need_floats(q=q, k=k, cos=cos, sin=sin)
    if unsqueeze_dim % 4 not in (1, 2):
        fail("unsqueeze_dim", unsqueeze_dim, "1 ([batch, heads, tokens, head_dim]) or 2 ([batch, tokens, heads, head_dim])")
    heads_dim = unsqueeze_dim % 4
    tokens_dim = 3 - heads_dim
    if q.dim() != 4:
        fail("q", describe(q), "four dimensions")
    same = k.dim() == 4 and all(k.shape[i] == q.shape[i] for i in (0, tokens_dim, 3))
    if not same or k.dtype != q.dtype or k.device != q.device:
        fail("k", describe(k), f"q's batch, tokens, head_dim, dtype and device; q is {describe(q)}")
    need_device("q", q.device, cos=cos, sin=sin)
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        fail("sin", describe(sin), f"like cos, which is {describe(cos)}")
    return heads_dim


def rotary_multimodal(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sections: Sequence[int],
    unsqueeze_dim: int = 1,
    interleaved: bool = False,
) -> Pair:
    """Rotates queries and keys by angles of a time, a height and a width for each token, which are picked and kept for the backward pass.

    q: [batch, heads, tokens, head_dim] where unsqueeze_dim is 1 (the default), [batch, tokens, heads, head_dim] where it is 2; k: the same
    with its own number of heads; any strides. sections: (time, height, width), how many frequencies each has; their sum is half of the
    columns that are rotated, the first ones of a head, and the others are copied. cos, sin: [3, batch or 1, tokens, twice the sum], or the
    sum wide when both halves of a head use the same angles. interleaved: frequencies 1, 4, 7, ... belong to the height and 2, 5, 8, ... to
    the width, as in Qwen3-VL, and not in three pieces. Returns new tensors. bf16, fp16 and fp32, all of one dtype, run in the kernels;
    other dtypes, and cos and sin of another dtype than q, in PyTorch with its promotion. Differentiable in q and k, and in PyTorch
    also in cos and sin. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    heads_dim = _check(q, k, cos, sin, unsqueeze_dim)
    batch, tokens, width = q.shape[0], q.shape[3 - heads_dim], q.shape[3]
    sections = tuple(int(n) for n in sections)
    half = sum(sections)
    if len(sections) != 3 or min(sections) < 0 or not 0 < 2 * half <= width:
        fail("sections", sections, f"three numbers (time, height, width) whose sum is at most {width // 2}")
    if interleaved and (3 * sections[1] > half + 1 or 3 * sections[2] > half):
        fail("sections", sections, f"at most every third of the {half} frequencies for height and width where they are interleaved")
    expected = f"[3, {batch} or 1, {tokens}, {2 * half} or {half}]"
    if cos.dim() != 4 or cos.shape[0] != 3 or cos.shape[1] not in (1, batch) or cos.shape[2] != tokens or cos.shape[3] not in (half,
                                                                                                                               2 * half):
        fail("cos", describe(cos), expected)
    return _apply(q, k, cos, sin, half, (*sections, bool(interleaved)), heads_dim)


def partial_rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim=None, unsqueeze_dim: int = 1) -> Pair:
    """Rotates the first rotary_dim columns of every head of queries and keys, and copies the others, in one launch.

    q, k, unsqueeze_dim, dtypes and gradients: as in `rotary_multimodal`. cos, sin: [batch or 1, tokens, rotary_dim], or half as wide; also
    [tokens, width], or with a dimension of 1 at unsqueeze_dim. rotary_dim: by default the tables' width.
    """
    heads_dim = _check(q, k, cos, sin, unsqueeze_dim)
    batch, tokens, width = q.shape[0], q.shape[3 - heads_dim], q.shape[3]
    tables = []
    for name, table in (("cos", cos), ("sin", sin)):
        found = table.squeeze(heads_dim) if table.dim() == 4 and table.shape[heads_dim] == 1 else table
        found = found.unsqueeze(0) if found.dim() == 2 else found
        if found.dim() != 3 or found.shape[0] not in (1, batch) or found.shape[1] != tokens:
            fail(name, describe(table), f"[{batch} or 1, {tokens}, rotary_dim]")
        tables.append(found)
    cos, sin = tables
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    if not 0 < rotary_dim <= width or rotary_dim % 2:
        fail("rotary_dim", rotary_dim, f"an even number up to the head_dim, {width}")
    if cos.shape[-1] not in (rotary_dim, rotary_dim // 2):
        fail("cos", describe(cos), f"[{batch} or 1, {tokens}, {rotary_dim} or {rotary_dim // 2}]")
    if rotary_dim == width:
        return rotate_checked(q, k, cos, sin, heads_dim)
    return _apply(q, k, cos, sin, rotary_dim // 2, None, heads_dim)


SELF_CHECKS = {
    "rotary_multimodal": lambda i: i.call(rotary_multimodal, *i.heads(8, 2), *i.angles(3, 1, i.tokens, i.width), (16, 24, 24)),
    "partial_rotary": lambda i: i.call(partial_rotary, *i.heads(8, 2), *i.angles(1, i.tokens, i.width // 2)),
}
