"""Matrix products that are written to existing memory, also where a selective checkpoint sees PyTorch's operations.

Such a checkpoint keeps the results of the operations that its user names and returns them in the second run, in which these operations do
not run: nothing may write to what they returned, and they write to no `out`. So there a product is computed apart and copied.
"""

from typing import Any, Optional

import torch

from .second_run import are_watched

__all__ = ["accumulate_product", "write_product", "write_wide_product"]


def write_product(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, onto: Optional[torch.Tensor] = None, **factors: Any):
    """Writes x @ y to out and returns it. onto: added to the product. factors: beta, onto's, and alpha, the product's, with `onto`."""
    if onto is None:
        return out.copy_(torch.mm(x, y)) if are_watched() else torch.mm(x, y, out=out)
    if are_watched():
        return out.copy_(torch.addmm(onto, x, y, **factors))
    return torch.addmm(onto, x, y, out=out, **factors)


def accumulate_product(total: torch.Tensor, x: torch.Tensor, y: torch.Tensor, **factors: Any) -> torch.Tensor:
    """Adds x @ y to total and returns it. factors: beta, total's, and alpha, the product's."""
    return total.copy_(torch.addmm(total, x, y, **factors)) if are_watched() else total.addmm_(x, y, **factors)


def write_wide_product(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, onto: Optional[torch.Tensor] = None, **factors: Any) -> None:
    """Does what `write_product` does in the dtype of out, which is wider than that of x and y. Needs a GPU and torch 2.8."""
    mm, addmm, watched = torch.ops.aten.mm, torch.ops.aten.addmm, are_watched()
    if onto is None:
        found = mm.dtype(x, y, out.dtype) if watched else mm.dtype_out(x, y, out.dtype, out=out)
    else:
        found = addmm.dtype(onto, x, y, out.dtype, **factors) if watched else addmm.dtype_out(onto, x, y, out.dtype, **factors, out=out)
    if watched:
        out.copy_(found)
