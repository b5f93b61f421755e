"""A norm and all projections of its result as one autograd node, for layers whose tokens are mixed by something else than plain attention.

It is the first node of `nodes` without heads. The backward pass keeps x, one number a row and the weights. It makes the normalised input
again; the GEMMs add the projections' input gradients, and the norm's backward kernel adds the residual's.
"""

from typing import NamedTuple, Optional, Sequence, Tuple

import torch

from ..ops.arguments import fail
from .checks import check_bias, check_stream
from .graph import InGraph
from .node import Given, Gradients, Node
from .nodes import product_dtype
from .norms import norm_forward, norm_reference
from .projection import Projection, check_projection, flat_parts, needs_in_parts, projection_reference
from .projections import NormedInput, NormedInputGradients, Projections, normed_input_backward
from .spec import Norm, is_there
from .steps import Optionals, shaped

__all__ = ["norm_projections"]


class Stream(NamedTuple):
    """x: [..., hidden]; norm: [hidden], the norm's weight, None for one without; norm_bias: of a LayerNorm, or None."""

    x: torch.Tensor
    norm: Optionals
    norm_bias: Optionals = None


class Saved(NamedTuple):
    """rstd: of the norm; made: of the projections, `Projections.made`."""

    rstd: torch.Tensor
    made: list


def _check(spec: Norm, tensors: Stream, projections: Sequence[Projection], sizes, dtype: torch.dtype) -> None:
    """Raises ValueError when shapes, dtypes or devices do not fit."""
    x, norm, bias = tensors
    if x.dim() < 2:
        fail("x", f"{x.dim()} dimensions", "[..., hidden]")
    if not projections:
        fail("projections", "none", "one or more")
    check_stream(x, norm, "norm_weight", dtype)
    check_bias(x, "norm_bias", bias, spec, norm)
    if not is_there(spec, norm):
        fail("norm_weight", "None", f"[{x.shape[-1]}], for the norm has a weight")
    for i, projection in enumerate(projections):
        check_projection(f"projections[{i}]", projection, None, x.shape[-1], dtype, x.device)


def _reference(spec: Norm, tensors: Stream, projections: Sequence[Projection], sizes, dtype: torch.dtype):
    """Computes `norm_projections` in PyTorch."""
    y = norm_reference(spec, *tensors).to(dtype)  # type: ignore[arg-type]  # a weight, or a norm without
    return (*[projection_reference(y, projection) for projection in projections], tensors.x)


def _forward(given: Given) -> Tuple[list, Saved]:
    layout, (x, norm, bias), (group,) = given.layout, given.tensors, given.layout.groups
    projections = Projections(group, given.parts)
    y, rstd = norm_forward(layout.spec, x.reshape(-1, x.shape[-1]), norm, layout.dtype, bias)
    results = [result.view(*x.shape[:-1], rows) for result, rows in zip(projections.forward(y, in_one=False), group.rows)]
    return results, Saved(rstd, projections.made())


def _backward(given: Given, grads: Sequence[torch.Tensor], saved: Saved, need: Gradients) -> Gradients:
    (*grads, dstream), layout, (x, norm, bias), (group,) = grads, given.layout, given.tensors, given.layout.groups
    projections, _ = Projections.loaded(group, given.parts, saved.made)
    flat = x.reshape(-1, x.shape[-1])
    normed = NormedInput(layout.spec, flat, norm, saved.rstd, dstream.reshape(flat.shape), bias)
    rows = [grad.contiguous().view(-1, count) for grad, count in zip(grads, group.rows)]
    found = normed_input_backward(rows, normed, projections, NormedInputGradients(*need.tensors), needs_in_parts(need.parts))
    return Gradients(Stream(shaped(found.x, x), found.norm, found.bias), flat_parts(found.projections))


_node = Node(
    "_NormProjections", _check, _reference, _forward, _backward,
    in_graph=InGraph("norm_projections", Norm, Stream, Saved), passes_on=True, packs=False,
)  # fmt: skip


def norm_projections(
    x: torch.Tensor, norm_weight: Optionals, projections: Sequence[Projection], spec: Norm, dtype: Optional[torch.dtype] = None,
    norm_bias: Optionals = None,
) -> Tuple[torch.Tensor, ...]:
    """Computes several projections of norm(x), and returns x for the residual connection.

    Use the returned x for the residual connection: its gradient is then added for free. Differentiable in all tensors.

    Args:
        x: [..., hidden], of `dtype` or float32.
        norm_weight: [hidden], of x's dtype, or None for a LayerNorm without parameters.
        projections: of the normalised input, [rows, hidden] each.
        spec: the description of the norm.
        dtype: of the products and of the results; by default that of PyTorch's products of x.
        norm_bias: [hidden], of x's dtype, the bias of a LayerNorm, or None.

    Returns:
        what each projection makes, [..., rows], and x.

    Raises:
        ValueError: when shapes, dtypes or devices do not fit.
    """
    return _node(spec, Stream(x, norm_weight, norm_bias), (projections,), (), dtype or product_dtype(x))
