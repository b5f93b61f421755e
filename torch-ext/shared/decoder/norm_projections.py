"""A norm and all projections of its result as one autograd node, for layers whose tokens are mixed by something else than plain attention.

It is the first node of `nodes` without heads. The backward pass keeps x, one number a row and the weights. It makes the normalised input
again; the GEMMs add the projections' input gradients, and the norm's backward kernel adds the residual's.
"""

from typing import Optional, Sequence, Tuple

import torch

from ..ops.autocast import outside_autocast
from ..ops.common import apply_function, fail, once_differentiable
from ..runtime.device import is_ordinary
from ..runtime.replay import replayed_with_products
from .checks import check_stream, dense_parts
from .nodes import product_dtype
from .norms import norm_forward, norm_reference
from .projection import (
    Layout,
    Projection,
    by_projection,
    check_projection,
    flat_parts,
    layout_of,
    needs_in_parts,
    present_of,
    projection_reference,
)
from .projections import NormedInput, Projections, normed_input_backward
from .spec import Norm


def norm_projections_reference(spec: Norm, x: torch.Tensor, norm: torch.Tensor, projections: Sequence[Projection], dtype):
    """Computes `norm_projections` in PyTorch."""
    y = norm_reference(spec, x, norm).to(dtype)
    return (*[projection_reference(y, projection) for projection in projections], x)


def _forward(x, norm, layout: Layout, *parts):
    """Returns the projections, the norm's rstd, and `Projections.made`. parts: the tensors of `tensors_of` that are present."""
    (group,), found = layout.groups, layout.all_of(parts)
    _check(x, norm, [Projection(*each) for each in by_projection(found)], layout.dtype)
    projections, flat = Projections(group, found), x.reshape(-1, x.shape[-1])
    y, rstd = norm_forward(layout.spec, flat, norm, layout.dtype)
    results = [result.view(*x.shape[:-1], rows) for result, rows in zip(projections.forward(y, in_one=False), group.rows)]
    return (*results, rstd, *projections.made())


def _gradients(dresidual, layout: Layout, needs: tuple, count: int, *tensors):
    """Returns the gradients of x, the norm's weight and the projections' tensors. needs: which of these are needed.

    tensors: the gradients of the projections; x, the norm's weight, rstd; `count` tensors of projections; `Projections.made`.
    """
    (group,), several = layout.groups, len(layout.groups[0].rows)
    grads = [grad.view(-1, rows) for grad, rows in zip(tensors, group.rows)]
    x, norm, rstd = tensors[several : several + 3]
    parts, made = tensors[several + 3 : several + 3 + count], tensors[several + 3 + count :]
    projections, _ = Projections.loaded(group, layout.all_of(parts), made)
    flat = x.reshape(-1, x.shape[-1])
    given = NormedInput(layout.spec, flat, norm, rstd, dresidual.reshape(flat.shape))
    dx, dnorm, found = normed_input_backward(grads, given, projections, needs[:2], needs_in_parts(layout.all_of(needs[2:])))
    return (None if dx is None else dx.view(x.shape), dnorm, *layout.present(flat_parts(found)))


_replayed = replayed_with_products(_forward)
_replayed_gradients = replayed_with_products(_gradients)


class _NormProjections(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layout, x, norm, *parts):
        run, several = _replayed if layout.replayable else _forward, len(layout.groups[0].rows)
        results = run(x, norm, layout, *parts)
        ctx.save_for_backward(x, norm, results[several], *layout.to_save(parts), *results[several + 1 :])
        ctx.layout, ctx.count = layout, len(parts)
        return (*results[:several], x.view_as(x))

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx, *grads):
        layout, (_, *needs) = ctx.layout, ctx.needs_input_grad
        run = _replayed_gradients if layout.replayable else _gradients
        return (None, *run(grads[-1], layout, tuple(needs), ctx.count, *[grad.contiguous() for grad in grads[:-1]], *ctx.saved_tensors))


def norm_projections(
    x: torch.Tensor, norm_weight: torch.Tensor, projections: Sequence[Projection], spec: Norm, dtype: Optional[torch.dtype] = None
) -> Tuple[torch.Tensor, ...]:
    """Computes several projections of norm(x), and returns x for the residual connection.

    Use the returned x for the residual connection: its gradient is then added for free. Differentiable in all tensors.

    Args:
        x: [..., hidden], of `dtype` or float32.
        norm_weight: [hidden], of x's dtype.
        projections: of the normalised input, [rows, hidden] each.
        spec: the description of the norm.
        dtype: of the products and of the results; by default that of PyTorch's products of x.

    Returns:
        what each projection makes, [..., rows], and x.

    Raises:
        ValueError: when shapes, dtypes or devices do not fit.
    """
    dtype, present = dtype or product_dtype(x), present_of(projections)
    if torch.compiler.is_compiling() or not is_ordinary(x, norm_weight, *dense_parts(present)):
        _check(x, norm_weight, projections, dtype)
        return norm_projections_reference(spec, x, norm_weight, projections, dtype)
    return apply_function(_NormProjections, layout_of(spec, (projections,), dtype), x, norm_weight, *present)


def _check(x: torch.Tensor, norm: torch.Tensor, projections: Sequence[Projection], dtype) -> None:
    """Raises ValueError when shapes, dtypes or devices do not fit."""
    # A node checks in its forward pass where that is not replayed, as those of `nodes` do.
    if x.dim() < 2:
        fail("x", f"{x.dim()} dimensions", "[..., hidden]")
    if not projections:
        fail("projections", "none", "one or more")
    check_stream(x, norm, "norm_weight", dtype)
    for i, projection in enumerate(projections):
        check_projection(f"projections[{i}]", projection, None, x.shape[-1], dtype, x.device)
