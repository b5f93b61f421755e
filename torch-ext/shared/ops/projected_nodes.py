"""The two autograd nodes of `decoder_nodes` for projections that are more than a weight: with a low-rank adapter, in four bits, or wider
than the dtype of the products, as autocast over an fp32 model has them.

Under autocast over fp32 the residual stream stays in fp32: the norms read it and write the dtype of the products, and each weight is
rounded to that once a forward pass, whose result the backward pass uses again. Gradients are of their parameters' own dtypes.
"""

from typing import List, Optional, Sequence, Tuple

import torch

from ..runtime.replay import replayed_with_products
from .common import apply_function, describe, fail, need_floats, needs_formula, once_differentiable
from .projected_steps import (
    attention_inputs_backward,
    attention_inputs_forward,
    biases_of,
    groups_of,
    mlp_backward,
    mlp_forward,
    split_groups,
)
from .projection import (
    OF_ONE,
    Copies,
    FourBitWeight,
    Layout,
    Projection,
    Projections,
    from_parts,
    layout_of,
    layouts_of,
    numbers_of,
    projection_reference,
    scalings_without_dropout,
    tensors_of,
)
from .rms_norm import rms_norm_reference
from .rotary import qk_norm_rotary_reference
from .swiglu import swiglu_reference
from .traced_nodes import traced_attention_inputs, traced_mlp


def projected_attention_inputs_reference(x, norm_weight, projections, q_norm, k_norm, cos, sin, shape, eps, head_eps, dtype):
    """What `projected_attention_inputs` returns, in PyTorch."""
    y = rms_norm_reference(x, norm_weight, eps)[0].to(dtype)
    q, k, v = (projection_reference(y, p).view(*shape, -1, q_norm.shape[0]) for p in projections)
    q, k = qk_norm_rotary_reference(q, k, q_norm, k_norm, cos, sin, head_eps)
    return q.to(dtype), k.to(dtype), v.transpose(1, 2), x


def projected_mlp_reference(x, norm_weight, projections, eps, attended, dtype) -> torch.Tensor:
    """What `projected_mlp` returns, in PyTorch."""
    *before, gate, up, down = projections
    if before:
        x = x + projection_reference(attended, before[0]).view(x.shape)
    y = rms_norm_reference(x, norm_weight, eps)[0].to(dtype)
    return x + projection_reference(swiglu_reference(projection_reference(y, gate), projection_reference(y, up)), down)


@replayed_with_products
def _attention_inputs(x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin, batch, length, layout: Layout, whole, *tensors):
    """q, k and v as attention takes them, q and k as projected, rstd, and `Projections.made`. tensors: of `tensors_of`."""
    projections = layout.projections(tensors)
    _check_attention_inputs(x, norm_weight, projections, q_norm, k_norm, cos, sin, (batch, length), layout.dtype)
    group = Projections(projections, layout.dtype, whole=whole)
    arguments = x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin, (batch, length)
    q_out, k_out, (q, k, v), rstd = attention_inputs_forward(*arguments, group, biases_of(projections))
    return (q_out, k_out, v.transpose(1, 2), q, k, rstd, *group.made(projections))


@replayed_with_products
def _attention_inputs_gradients(dq, dk, dv, dresidual, x, norm_weight, rstd, q, k, q_norm, k_norm, head_eps, cos, sin, layout: Layout,
                                whole, needs, *tensors):
    """As `attention_inputs_backward`. tensors: of `Projections.saved`."""
    group, _ = layout.loaded(tensors, whole)
    saved = x, norm_weight, rstd, q, k, q_norm, k_norm, head_eps, cos, sin
    return attention_inputs_backward((dq, dk, dv, dresidual), *saved, group, needs)


class _ProjectedAttentionInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin, shape, dtype, layout, numbers, *tensors):
        arguments = x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin
        if layout is None:
            projections = from_parts(tensors, numbers)
            _check_attention_inputs(x, norm_weight, projections, q_norm, k_norm, cos, sin, shape, dtype)
            group = Projections(projections, dtype)
            q_out, k_out, (q, k, v), rstd = attention_inputs_forward(*arguments, shape, group, biases_of(projections))
            v, saved = v.transpose(1, 2), group.saved()
        else:
            group = layout
            q_out, k_out, v, q, k, rstd, *made = _attention_inputs(*arguments, *shape, layout, layout.whole_of(tensors), *tensors)
            saved, _ = layout.saved_of(tensors, made)
        ctx.save_for_backward(x, norm_weight, rstd, q, k, q_norm, k_norm, cos, sin, *saved)
        ctx.group, ctx.head_eps = group, head_eps
        return q_out, k_out, v, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, norm_weight, rstd, q, k, q_norm, k_norm, cos, sin, *tensors = ctx.saved_tensors
        group, needs = ctx.group, ctx.needs_input_grad
        needs = (*needs[:2], *needs[3:5], *needs[12:])
        saved = x, norm_weight, rstd, q, k, q_norm, k_norm, ctx.head_eps, cos, sin
        if type(group) is Layout:
            found = _attention_inputs_gradients(*grads, *saved, group, group.whole_of_saved(tensors), needs, *tensors)
        else:
            found = attention_inputs_backward(grads, *saved, group.loaded(tensors)[0], needs)
        dx, dnorm, dq_norm, dk_norm, *dprojections = found
        return (dx, dnorm, None, dq_norm, dk_norm, None, None, None, None, None, None, None, *dprojections)


@replayed_with_products
def _mlp(x, attended, norm_weight, eps, o: Optional[Layout], inner: Layout, down: Layout, whole, *tensors):
    """The result, the residual stream behind attention where this adds to it, flat, its rstd, gate, up, and `Projections.made`. tensors: of
    `tensors_of`; whole: of gate and up."""
    groups, projections, start, copies = [], [], 0, Copies()
    for layout in (inner, down) if o is None else (o, inner, down):
        of_group = layout.projections(tensors[start : start + layout.tensors])
        groups.append(Projections(of_group, layout.dtype, None, whole if layout is inner else None, copies))
        projections.append(of_group)
        start += layout.tensors
    copies.make()
    together = [projection for of_group in projections for projection in of_group]
    _check_mlp(x, norm_weight, together, attended, inner.dtype)
    biases = biases_of(together)
    out, total, rstd, gate, up = mlp_forward(x, attended, norm_weight, eps, groups, biases)
    made = [tensor for group, of_group in zip(groups, projections) for tensor in group.made(of_group)]
    return (out, None if o is None else total, rstd, gate, up, *made)


@replayed_with_products
def _mlp_gradients(dout, total, attended, norm_weight, rstd, gate, up, gate_bias, up_bias, o: Optional[Layout], inner: Layout,
                   down: Layout, whole, needs, *tensors):
    """As `mlp_backward`. tensors: of `Projections.saved`."""
    groups: List[Projections] = []
    left: Sequence = tensors
    for layout in (inner, down) if o is None else (o, inner, down):
        group, left = layout.loaded(left, whole if layout is inner else None)
        groups.append(group)
    return mlp_backward(dout, total, attended, norm_weight, rstd, gate, up, (gate_bias, up_bias), groups, needs)


class _ProjectedMLP(torch.autograd.Function):
    """With attention's output and its projection, when there are these, in front: x is the residual stream before or behind it."""

    @staticmethod
    def forward(ctx, x, attended, norm_weight, eps, dtype, recompute, layouts, numbers, *tensors):
        groups: list
        if layouts is None:
            projections = from_parts(tensors, numbers)
            _check_mlp(x, norm_weight, projections, attended, dtype)
            groups = groups_of(projections, dtype)
            out, total, rstd, gate, up = mlp_forward(x, attended, norm_weight, eps, groups, biases_of(projections))
            saved = [t for group in groups for t in group.saved()]
        else:
            groups = [None] * (attended is None) + layouts
            whole = groups[1].whole_of(tensors[-3 * OF_ONE : -OF_ONE])
            out, total, rstd, gate, up, *made = _mlp(x, attended, norm_weight, eps, *groups, whole, *tensors)
            total = x.reshape(-1, x.shape[-1]) if total is None else total
            saved, start = [], 0
            for layout in layouts:
                of_group, made = layout.saved_of(tensors[start : start + layout.tensors], made)
                saved += of_group
                start += layout.tensors
        biases = None, None
        if recompute:
            gate = up = None
            biases = tensors[-2 * OF_ONE - 1], tensors[-OF_ONE - 1]
        ctx.save_for_backward(total, attended, norm_weight, rstd, gate, up, *biases, *saved)
        ctx.groups, ctx.shape = groups, x.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        total, attended, norm_weight, rstd, gate, up, gate_bias, up_bias, *tensors = ctx.saved_tensors
        needs, groups = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[8:]), ctx.groups
        saved = total, attended, norm_weight, rstd, gate, up
        if type(groups[-1]) is Layout:
            o, inner, _ = groups
            whole = inner.whole_of_saved(tensors if o is None else tensors[o.kept :])
            found = _mlp_gradients(dout, *saved, gate_bias, up_bias, *groups, whole, needs, *tensors)
        else:
            loaded = []
            for group in groups:
                group, tensors = group.loaded(tensors)
                loaded.append(group)
            found = mlp_backward(dout, *saved, (gate_bias, up_bias), loaded, needs)
        dx, dattended, dnorm, *dprojections = found
        return (None if dx is None else dx.view(ctx.shape), dattended, dnorm, None, None, None, None, None, *dprojections)


def projected_attention_inputs(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    projections: Sequence[Projection],
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    shape: Tuple[int, int],
    eps: float = 1e-6,
    head_eps: float = 1e-6,
    dtype: Optional[torch.dtype] = None,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`norm_attention_inputs` of projections that may have adapters, with products in a dtype of their own.

    x: [tokens, hidden]; dtype: of the products and of q, k and v, x's by default; x may be of it or float32. norm_weight, q_norm,
    k_norm, cos and sin are of x's dtype, the projections' tensors of `dtype` or float32. The rest is as in `norm_attention_inputs`,
    differentiable in the projections' tensors too. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    dtype = dtype or x.dtype
    by_formula = needs_formula(x, norm_weight, q_norm, k_norm, cos, sin, *_dense_tensors(projections))
    traced = torch.compiler.is_compiling()
    if by_formula or traced:
        _check_attention_inputs(x, norm_weight, projections, q_norm, k_norm, cos, sin, shape, dtype)
    if by_formula:
        return projected_attention_inputs_reference(x, norm_weight, projections, q_norm, k_norm, cos, sin, shape, eps, head_eps, dtype)
    arguments = x, norm_weight, float(eps), q_norm, k_norm, float(head_eps), cos, sin, tuple(shape), dtype
    if traced:
        return traced_attention_inputs(*arguments, tensors_of(projections), scalings_without_dropout(projections))
    layout = layout_of(projections, dtype)
    numbers = numbers_of(projections) if layout is None else None
    return apply_function(_ProjectedAttentionInputs, *arguments, layout, numbers, *tensors_of(projections))


def _check_attention_inputs(x, norm_weight, projections, q_norm, k_norm, cos, sin, shape, dtype) -> None:
    """Raises ValueError when shapes, dtypes or devices do not fit. A node does it where its forward pass is not replayed: one that is has
    arguments like those of one that was not."""
    if x.dim() != 2 or x.shape[0] != shape[0] * shape[1]:
        fail("x", describe(x), f"[tokens, hidden] with {shape[0]} * {shape[1]} tokens")
    if q_norm.dim() != 1:
        fail("q_norm", describe(q_norm), "[head_dim]")
    head_dim = q_norm.shape[0]
    _check(x, norm_weight, dtype)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm.shape != (head_dim,) or norm.dtype != x.dtype or norm.device != x.device:
            fail(name, describe(norm), f"{x.dtype} [{head_dim}] on {x.device}")
    for i, projection in enumerate(projections):
        check_projection(f"projections[{i}]", projection, None, x.shape[-1], dtype, x.device)
        if projection.weight.shape[0] % head_dim:
            fail(f"projections[{i}].weight", list(projection.weight.shape), f"a multiple of head_dim {head_dim} rows")
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 3 and table.shape[0] in (1, shape[0]) and table.shape[1] == shape[1]
        fits = fits and table.shape[2] in (head_dim, head_dim // 2)
        if not fits or table.shape != cos.shape or table.dtype != x.dtype or table.device != x.device:
            fail(name, describe(table), f"{x.dtype} [{shape[0]} or 1, {shape[1]}, {head_dim} or {head_dim // 2}] on {x.device}")


def projected_mlp(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    projections: Sequence[Projection],
    eps: float = 1e-6,
    attended: Optional[torch.Tensor] = None,
    dtype: Optional[torch.dtype] = None,
    recompute: bool = False,
) -> torch.Tensor:
    """`norm_mlp` of projections that may have adapters, with products in a dtype of their own.

    x: [..., hidden]; projections: to gate, up and down, and in front of them attention's output projection where `attended` [tokens,
    features] is given; dtype: of the products and of `attended`, x's by default; x may be of it or float32; norm_weight: [hidden] of x's
    dtype; recompute: as of `norm_mlp`. Returns [..., hidden] of x's dtype. Differentiable in all tensors. Raises ValueError when shapes,
    dtypes or devices do not fit.
    """
    dtype = dtype or x.dtype
    expected = 3 if attended is None else 4
    if len(projections) != expected:
        fail("projections", f"{len(projections)} of them", f"{expected}, as attended is {'' if attended is None else 'not '}None")
    by_formula, traced = needs_formula(x, norm_weight, attended, *_dense_tensors(projections)), torch.compiler.is_compiling()
    if by_formula or traced:
        _check_mlp(x, norm_weight, projections, attended, dtype)
    if by_formula:
        return projected_mlp_reference(x, norm_weight, projections, eps, attended, dtype)
    if traced:
        tensors, scalings = tensors_of(projections), scalings_without_dropout(projections)
        return traced_mlp(x, attended, norm_weight, float(eps), dtype, tensors, scalings, recompute)
    layouts = layouts_of(split_groups(projections), dtype)
    numbers = numbers_of(projections) if layouts is None else None
    arguments = x, attended, norm_weight, float(eps), dtype, bool(recompute), layouts, numbers
    return apply_function(_ProjectedMLP, *arguments, *tensors_of(projections))


def _check_mlp(x, norm_weight, projections, attended, dtype) -> None:
    """As `_check_attention_inputs`."""
    _check(x, norm_weight, dtype)
    hidden, intermediate = x.shape[-1], projections[-3].weight.shape[0]
    for name, projection, rows, columns in zip(
        ("gate", "up", "down"), projections[-3:], (intermediate, intermediate, hidden), (hidden, hidden, intermediate)
    ):
        check_projection(name, projection, rows, columns, dtype, x.device)
    if attended is not None:
        features = projections[0].weight.shape[-1]
        check_projection("o", projections[0], hidden, features, dtype, x.device)
        if attended.shape != (x.numel() // hidden if hidden else 0, features) or attended.dtype != dtype or attended.device != x.device:
            fail("attended", describe(attended), f"{dtype} [tokens, {features}] on {x.device}")


def _dense_tensors(projections: Sequence[Projection]) -> list:
    return [part for part in tensors_of(projections) if not isinstance(part, FourBitWeight)]


def _check(x: torch.Tensor, norm_weight: torch.Tensor, dtype: torch.dtype) -> None:
    need_floats(x=x)
    if x.dim() == 0 or x.dtype not in (dtype, torch.float32):
        fail("x", describe(x), f"[..., hidden] of {dtype} or torch.float32")
    if norm_weight.shape != x.shape[-1:] or norm_weight.dtype != x.dtype or norm_weight.device != x.device:
        fail("norm_weight", describe(norm_weight), f"{x.dtype} [{x.shape[-1]}] on {x.device}")


def check_projection(name: str, projection: Projection, rows: Optional[int], columns: int, dtype: torch.dtype, device) -> None:
    weight, a, b, bias, *_ = projection
    if len(weight.shape) != 2 or rows not in (None, weight.shape[0]) or weight.shape[1] != columns or weight.device != device:
        fail(f"{name}.weight", f"{list(weight.shape)} on {weight.device}", f"[{rows or 'any'}, {columns}] on {device}")
    if not isinstance(weight, FourBitWeight) and weight.dtype not in (dtype, torch.float32):
        fail(f"{name}.weight", describe(weight), f"{dtype} or torch.float32")
    if (a is None) != (b is None) or (a is None and bias is not None):
        fail(name, "half of an adapter", "a and b, or neither")
    if a is None:
        return
    rank = a.shape[0]
    for part, tensor, shape in (("a", a, (rank, columns)), ("b", b, (weight.shape[0], rank)), ("bias", bias, (weight.shape[0],))):
        if tensor is not None and (tensor.shape != shape or tensor.dtype not in (dtype, torch.float32) or tensor.device != device):
            fail(f"{name}.{part}", describe(tensor), f"{dtype} or torch.float32 {list(shape)} on {device}")
