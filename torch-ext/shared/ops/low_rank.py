"""The gradients of a low-rank adapter in one launch of kernel_src/low_rank.py, where the host is what a step waits for.

With few tokens the device is done with such a product before the host has asked for the next one, and a decoder layer has fourteen of them.
"""

from typing import Optional, Tuple

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel

FEW = 1024  # tokens up to which a launch of two products is worth more than the products of cuBLAS


def _grid(c, dy, low, x, dlow, db, da):
    return (-(-dy.shape[1] // c["TILE"]) + -(-x.shape[1] // c["TILE"]),)


_kernel = Kernel("low_rank_gradients", grid=_grid)


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
