"""Launches of kernel_src/mrope.py: rotary position embedding of the first columns of every head, whose others are copied. Without autograd:
what mrope.py and the decoder layer share."""

from typing import Iterator, Sequence, Tuple

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel
from .arrays import SLAB, Pair, new_like
from .rotary_reference import of_part, rotary_backward_reference, rotary_reference

__all__ = ["heads_grid", "part_rotary_reference", "rotate_parts", "token_slabs"]


def heads_grid(c, q, k, *_):
    """Blocks (token, group of heads)."""
    return q.shape[0], max(-(-(q.shape[1] - c.get("Q_TAIL", 0)) // c["Q_HEADS"]), -(-k.shape[1] // c["K_HEADS"]))


def _grid(c, q, k, *others):
    """Blocks of ROWS heads of all tokens for the kernels that have that constant, else `heads_grid`."""
    return (-(-q.shape[0] * (q.shape[1] + k.shape[1]) // c["ROWS"]),) if "ROWS" in c else heads_grid(c, q, k)


_kernels = tuple(
    Kernel("mrope", "mrope_any", grid=_grid, reads=("q", "k", "cos", "sin"), where={"BACKWARD": backward}) for backward in (0, 1)
)


def token_slabs(tensors: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> Iterator[Tuple[list, list]]:
    """(tensors, tables) for each launch: [all tokens, heads, head_dim] and [..., rows, width], views where the strides allow it.

    tensors: [batch, tokens, heads, head_dim]; tables: [..., batch or 1, tokens, width]. One launch where each tensor lies within SLAB
    elements; else a batch row, or a part of it, at a time.
    """
    batch, tokens = tensors[0].shape[:2]
    reach = max(*[max(x.stride(1), x.shape[2] * x.shape[3]) for x in tensors], *[t.stride(-2) for t in tables])
    if batch * tokens * reach <= SLAB:
        yield [x.reshape(-1, *x.shape[2:]) for x in tensors], [t.reshape(*t.shape[:-3], -1, t.shape[-1]) for t in tables]
        return
    step = max(1, SLAB // reach)
    for row in range(batch):
        for start in range(0, tokens, step):
            part = slice(start, start + step)
            yield [x[row, part] for x in tensors], [t.select(-3, row % t.shape[-3])[..., part, :] for t in tables]


def part_rotary_reference(q, k, cos, sin, half: int, backward: bool) -> Pair:
    """(q, k) rotated, or with backward by the transpose, in PyTorch; q, k: [batch, tokens, heads, head_dim]; cos, sin:
    [batch or 1, tokens, half or 2 * half]."""
    return of_part(rotary_backward_reference if backward else rotary_reference, q, k, cos, sin, 2 * half)


def rotate_parts(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, half: int, heads_dim: int, backward: bool
) -> Pair:
    """Returns (q, k) rotated, or with backward by the transpose; heads_dim: the dimension of q that holds the heads, 1 or 2. Results lie
    in memory as [batch, tokens, heads, head_dim], whatever the order of the dimensions."""
    q, k = (x.transpose(1, 2) if heads_dim == 1 else x for x in (q, k))
    if q.dtype != torch.float64 and cos.dtype == q.dtype and kernels_run_on(q, k, cos, sin):
        outs = new_like(q), new_like(k)
        if q.numel() or k.numel():
            for tensors, tables in token_slabs((q, k, *outs), (cos, sin)):
                _kernels[int(backward)](*tensors, *tables, half)
    else:
        outs = part_rotary_reference(q, k, cos, sin, half, backward)
    return (outs[0].transpose(1, 2), outs[1].transpose(1, 2)) if heads_dim == 1 else outs
