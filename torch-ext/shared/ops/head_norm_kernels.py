"""Launches of kernel_src/head_norm_rotary.py: the norm of every head and its rotary embedding for families other than Qwen3, whose heads
kernel_src/qk_norm_rotary.py takes. The operation is rotary.py's."""

import functools
from typing import Callable, FrozenSet, Iterator, List, Sequence, Tuple

import torch

from ..runtime import launch
from ..runtime.artifacts import ArtifactError
from ..runtime.device import multiprocessors
from ..runtime.launch import Kernel
from .arrays import SLAB, Pair, aligned, column_sum_of, new_like

__all__ = ["backward_into", "flat_heads", "forward", "gradients_by", "has", "launches_of", "shipped", "takes"]

OPERATION = "head_norm_rotary"
BLOCKS_PER_SM = 4  # in the backward pass


def rows_grid(c, q, k, *_):
    return (sum(-(-x.shape[0] * x.shape[1] // c["ROWS"]) for x in (q, k)),)


_forward_kernel = Kernel("head_norm_rotary_forward", grid=rows_grid)
_backward_kernel = Kernel("head_norm_rotary_backward", grid=lambda c, *tensors: (sum(t.shape[0] for t in tensors[-2:]),))


def has(head_dim: int, rotary_dim: int) -> bool:
    """Tells whether this package has kernels for heads of this length of which this many columns are turned, in some dtype."""
    return any(found[2:] == (head_dim, rotary_dim) for found in _shapes(launch.backend))


@functools.lru_cache(maxsize=None)
def _shapes(backend) -> FrozenSet[tuple]:
    """(dtype, weights' dtype, head_dim, rotary_dim) of each kernel of a backend; none of one without kernels."""
    found = set()
    for variant in shipped(backend, OPERATION, _forward_kernel):
        described = {p.name: p for p in variant.parameters if p.kind == "array"}
        found.add((described["q"].dtype, described["q_weight"].dtype, described["q"].shape[2], described["cos"].shape[1]))
    return frozenset(found)


def shipped(backend, operation: str, kernel: Kernel) -> Sequence:
    """The variants of an operation's kernel that a backend has; none of one without kernels."""
    try:
        has = operation in backend.artifacts.operations()
    except ArtifactError:
        has = False
    return kernel.variants() if has else ()


def takes(dtype: torch.dtype, weight_dtype: torch.dtype, head_dim: int, rotary_dim: int) -> bool:
    """Tells whether this package has kernels for these heads, with weights and angles of one dtype."""
    return (launch.DTYPES.get(dtype), launch.DTYPES.get(weight_dtype), head_dim, rotary_dim) in _shapes(launch.backend)


def forward(q, k, q_weight, k_weight, cos, sin, eps: float, offset: float, rounds: str) -> Pair:
    """Returns (q, k) as [batch, tokens, heads, head_dim], contiguous. cos, sin: as wide as the rotary part."""
    outs = new_like(q), new_like(k)
    arrays = [aligned(flat_heads(q)), aligned(flat_heads(k)), *map(flat_heads, outs)]
    for tensors, tables in launches_of(arrays, (cos, sin)):
        _forward_kernel(*tensors, aligned(q_weight), aligned(k_weight), *tables, eps, offset, int(rounds == "first"))
    return outs


def backward_into(outs: Pair, dq, dk, q, k, q_weight, k_weight, cos, sin, eps: float, offset: float, needs: Tuple[bool, bool]) -> Pair:
    """Writes the gradients of q and k to outs, and returns those of the weights, empty where they are not needed.

    All of q's and k's are [batch, tokens, heads, head_dim]. needs: which weights need a gradient.
    """
    weights = q_weight, k_weight

    def launch(tensors, tables) -> Pair:
        partials = _partials(*tensors[2:4])
        _backward_kernel(*tensors, *map(aligned, weights), *tables, *partials, eps, offset)
        return partials

    return gradients_by(launch, outs, (dq, dk, q, k), (), (cos, sin), weights, needs)


def gradients_by(
    launch: Callable[[list, list], Pair], outs: Pair, heads: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], tables: Pair,
    weights: Pair, needs: Tuple[bool, bool],
) -> Pair:  # fmt: skip
    """`backward_into` by launches over some of the tokens.

    launch: of the arrays (heads, outs and rows, [tokens, ...]) and the tables of one; returns the partial sums of the weights' gradients.
    heads: dq, dk, q and k. rows: what there is beside them of each token.
    """
    written = [out if is_rows(out) else new_like(out) for out in outs]
    arrays = [*[aligned(flat_heads(x)) for x in heads], *map(flat_heads, written), *rows]
    sums = list(zip(*[launch(*given) for given in launches_of(arrays, tables)]))
    for out, result in zip(outs, written):
        if result is not out:
            out.copy_(result)
    dq_weight, dk_weight = (
        column_sum_of([partial.flatten(1) for partial in found], weight.dtype) if need else weight.new_empty(0)
        for found, weight, need in zip(sums, weights, needs)
    )
    return dq_weight, dk_weight


def flat_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, heads, head_dim] -> [batch * tokens, heads, head_dim]."""
    return x.reshape(-1, x.shape[2], x.shape[3])


def is_rows(x: torch.Tensor) -> bool:
    """Whether a kernel can write to a tensor as it lies."""
    flat = flat_heads(x)
    return flat.data_ptr() == x.data_ptr() and aligned(flat) is flat


def launches_of(arrays: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> Iterator[Tuple[List[torch.Tensor], List[torch.Tensor]]]:
    """(arrays, tables) of each launch: one launch reaches over SLAB elements of an array. arrays: [tokens, ...]; tables: cos and sin,
    [batch or 1, tokens, width]."""
    tables = [aligned(table.reshape(-1, table.shape[-1])) for table in tables]
    tokens = arrays[0].shape[0]
    step = max(1, SLAB // max(max(x.stride(0), x.numel() // tokens) for x in arrays))
    if tokens <= step:
        yield list(arrays), tables
        return
    tables = [table.repeat(tokens // table.shape[0], 1) for table in tables]
    for start in range(0, tokens, step):
        yield [x[start : start + step] for x in arrays], [table[start : start + step] for table in tables]


def _partials(q: torch.Tensor, k: torch.Tensor) -> Pair:
    """The partial sums of the weights' gradients: a row for each block, and blocks in proportion to the heads."""
    blocks, heads, found = BLOCKS_PER_SM * multiprocessors(q), q.shape[1] + k.shape[1], []
    for x in (q, k):
        rows = min(x.shape[0] * x.shape[1], max(1, blocks * x.shape[1] // heads))
        found.append(torch.empty((rows, x.shape[2]), dtype=torch.float32, device=x.device))
    return found[0], found[1]
