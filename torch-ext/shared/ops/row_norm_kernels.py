"""Launches of kernel_src/row_norm_rotary.py: the norm over all heads of q, the one over all of k, and their rotary embedding, as OLMo has
them. What the decoder layer calls."""

import functools
from typing import FrozenSet, List, Tuple

import torch

from ..runtime import launch
from ..runtime.device import kernels_run_on, multiprocessors
from ..runtime.launch import Kernel
from .arrays import Pair, aligned, new_like
from .head_norm_kernels import flat_heads, gradients_by, launches_of, shipped

__all__ = ["backward_into", "forward", "takes"]

OPERATION = "row_norm_rotary"
BLOCKS_PER_SM = 2  # in the backward pass
OF_A_ROW = 8  # heads whose time a row takes whatever its heads are

_forward_kernel = Kernel("row_norm_rotary_forward", grid=lambda c, q, *_: (2 * q.shape[0],))
_backward_kernel = Kernel("row_norm_rotary_backward", grid=lambda c, *tensors: (sum(t.shape[0] for t in tensors[-2:]),))


@functools.lru_cache(maxsize=None)
def _shapes(backend) -> FrozenSet[tuple]:
    """(dtype, weights' dtype, heads of q, heads of k, head_dim) of each kernel of a backend; none of one without kernels."""
    found = set()
    for variant in shipped(backend, OPERATION, _forward_kernel):
        q, k, weight = ({p.name: p for p in variant.parameters}[name] for name in ("q", "k", "q_weight"))
        found.add((q.dtype, weight.dtype, q.shape[1], k.shape[1], q.shape[2]))
    return frozenset(found)


def takes(q, k, q_weight, k_weight, cos, sin, *others) -> bool:
    """Tells whether this package has kernels for these queries and keys, [batch, tokens, heads, head_dim], weights [heads * head_dim] and
    angles [batch or 1, tokens, head_dim]. others: what else a kernel reads."""
    if cos is None or cos.shape[-1] != q.shape[-1] or not q.numel() or k.dtype != q.dtype or k_weight.dtype != q_weight.dtype:
        return False
    if not kernels_run_on(q, k, q_weight, k_weight, cos, sin, *others):
        return False
    dtypes = launch.DTYPES.get(q.dtype), launch.DTYPES.get(q_weight.dtype)
    return (*dtypes, q.shape[2], k.shape[2], q.shape[3]) in _shapes(launch.backend)


def _tables(cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """The angles as the kernels take them, in fp32: as OLMo's are, whatever its weights are."""
    return cos.to(torch.float32), sin.to(torch.float32)


def _weights(head_dim: int, *weights: torch.Tensor) -> List[torch.Tensor]:
    return [aligned(w).view(-1, head_dim) for w in weights]


def forward(
    q, k, q_weight, k_weight, cos, sin, eps: float, offset: float, rounds: str
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (q, k) as [batch, tokens, heads, head_dim], contiguous, and the rstd of each token's q and k."""
    outs = new_like(q), new_like(k)
    tokens = q.shape[0] * q.shape[1]
    rstds = [torch.empty(tokens, dtype=torch.float32, device=q.device) for _ in range(2)]
    arrays = [aligned(flat_heads(q)), aligned(flat_heads(k)), *map(flat_heads, outs), *rstds]
    weights = _weights(q.shape[3], q_weight, k_weight)
    for (*tensors, q_rstd, k_rstd), tables in launches_of(arrays, _tables(cos, sin)):
        _forward_kernel(*tensors, *weights, q_rstd, k_rstd, *tables, eps, offset, int(rounds == "first"))
    return (*outs, rstds[0], rstds[1])


def backward_into(outs: Pair, dq, dk, q, k, q_weight, k_weight, cos, sin, rstds: Pair, offset: float, needs: Tuple[bool, bool]) -> Pair:
    """Writes the gradients of q and k to outs, and returns those of the weights, empty where they are not needed.

    All of q's and k's are [batch, tokens, heads, head_dim]. rstds: the last two of `forward`. needs: which weights need a gradient.
    """
    weights = _weights(q.shape[3], q_weight, k_weight)

    def launch(arrays, tables) -> Pair:
        *tensors, q_rstd, k_rstd = arrays
        partials = _partials(*tensors[2:4])
        _backward_kernel(*tensors, *weights, q_rstd, k_rstd, *tables, *partials, offset)
        return partials

    return gradients_by(launch, outs, (dq, dk, q, k), rstds, _tables(cos, sin), (q_weight, k_weight), needs)


def _partials(q: torch.Tensor, k: torch.Tensor) -> Pair:
    """The partial sums of the weights' gradients: a row for each block, and blocks in proportion to the time of a row, which an H200 took
    1.2 us for 8 heads and 3.7 for 40."""
    blocks, heads, found = BLOCKS_PER_SM * multiprocessors(q), q.shape[1] + k.shape[1] + 2 * OF_A_ROW, []
    for x in (q, k):
        rows = min(x.shape[0], max(1, blocks * (x.shape[1] + OF_A_ROW) // heads))
        found.append(torch.empty((rows, *x.shape[1:]), dtype=torch.float32, device=x.device))
    return found[0], found[1]
