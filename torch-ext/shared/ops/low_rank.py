"""The products of a low-rank adapter by the kernels of kernel_src/low_rank.py, where the host is what a step waits for.

With few tokens the device is done with such a product before the host has asked cuBLAS for the next one, and a decoder layer with adapters
on all projections has forty of them. A launch of ours costs the host half as much, views of its arrays included.
"""

from typing import Optional, Tuple

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel
from .products import accumulate_product

__all__ = ["FEW", "low_rank_add", "low_rank_gradients"]

FEW = 1024  # tokens up to which it is the host's part that counts


def _add_grid(c, y, low, b):
    return (-(-y.shape[0] // c["TOKENS"]) * -(-y.shape[1] // c["TILE"]),)


def _grid(c, dy, low, x, dlow, db, da):
    return (-(-dy.shape[1] // c["TILE"]) + -(-x.shape[1] // c["TILE"]),)


_add_kernels = [Kernel("low_rank_add", grid=_add_grid, where={"TRANSPOSED": transposed}) for transposed in (0, 1)]
_kernel = Kernel("low_rank_gradients", grid=_grid)


def low_rank_add(y: torch.Tensor, low: torch.Tensor, b: torch.Tensor, transposed: bool = False) -> None:
    """y [tokens, out] += low [tokens, rank] @ b, in place; b: [rank, out], or `transposed` [out, rank]."""
    kernel = _add_kernels[transposed]
    if kernels_run_on(y, low, b) and y.shape[0] <= FEW and kernel.takes(y, low, b):
        kernel(y, low, b)
    else:
        accumulate_product(y, low, b.t() if transposed else b)


def low_rank_gradients(
    dy: torch.Tensor, low: torch.Tensor, x: torch.Tensor, dlow: torch.Tensor, dtype: torch.dtype
) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
    """(dlow.T @ x, dy.T @ low), the gradients of a [rank, in] and b [out, rank], of a dtype; None where no kernel takes these or there are
    many tokens.

    dy: [tokens, out]; low, dlow: [tokens, rank]; x: [tokens, in].
    """
    if low.shape[0] > FEW or not kernels_run_on(dy, low, x, dlow):
        return None
    rank = low.shape[1]
    db = torch.empty((dy.shape[1], rank), dtype=dtype, device=dy.device)
    da = torch.empty((rank, x.shape[1]), dtype=dtype, device=dy.device)
    if not _kernel.takes(dy, low, x, dlow, db, da):
        return None
    _kernel(dy, low, x, dlow, db, da)
    return da, db


def _added(y: torch.Tensor, low: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    low_rank_add(y, low, b)
    return y


SELF_CHECKS = {
    "low_rank_add": lambda i: _added(i.constant(i.tokens, i.hidden), i.constant(i.tokens, 16), i.constant(16, i.hidden)),
}
