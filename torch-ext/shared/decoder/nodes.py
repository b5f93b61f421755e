"""The two halves of a decoder layer around attention, each one autograd node: what a description (`spec`) says of it, for projections that
may have a low-rank adapter, be in four bits, or be wider than the dtype of the products.

Under autocast over an fp32 model the residual stream stays in fp32: the norms read it and write the dtype of the products, and each weight
is rounded to that once a forward pass, whose result the backward pass uses again. Gradients are of their parameters' own dtypes.
"""

from functools import partial
from typing import List, Optional, Sequence, Tuple

import torch

from ..ops.autocast import casts_products_of, outside_autocast
from ..ops.common import apply_function, once_differentiable
from ..ops.second_run import Rest, apply_in_parts, unfinished
from ..runtime.device import is_ordinary
from ..runtime.replay import replayed_with_products
from . import traced
from .activation import gated_reference
from .checks import check_inputs, check_mlp, dense_parts, split_groups
from .heads import Heads, heads_reference
from .mlp_steps import GroupNeeds, MLPSaved, OutputGroups, mlp_backward, mlp_finish, mlp_forward, mlp_start, three_of
from .norms import norm_reference
from .projection import (
    Layout,
    Projection,
    by_projection,
    flat_parts,
    layout_of,
    needs_in_parts,
    present_of,
    projection_reference,
    scalings_without_dropout,
    tensors_of,
)
from .projections import Copies, Projections, all_made, of_second_half, of_second_half_loaded
from .spec import Inputs, Norm, Outputs
from .steps import InputNeeds, InputSaved, InputTensors, OutputNeeds, OutputTensors, flat_heads, inputs_backward, inputs_forward

Tensors = Sequence[Projection]


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which linear layers multiply x: autocast's, where it is on."""
    return torch.get_autocast_dtype(x.device.type) if casts_products_of(x) else x.dtype


# ---------------------------------------------------------------- in PyTorch
def norm_attention_inputs_reference(spec: Inputs, tensors: InputTensors, projections: Tensors, shape, dtype):
    """Computes `norm_attention_inputs` with PyTorch's operations."""
    x, norm, q_norm, k_norm, cos, sin = tensors
    y = (x if norm is None else norm_reference(spec.norm, x, norm)).to(dtype)
    projected = [projection_reference(y, projection) for projection in projections]
    q, k, v = (p.view(*shape, -1, spec.head_dim) for p in (projected if spec.rows is None else projected[0].split(spec.rows, -1)))
    return (*heads_reference(spec, Heads(q, k, q_norm, k_norm, cos, sin)), v.transpose(1, 2), x)


def add_branch_reference(
    x: torch.Tensor, branch: torch.Tensor, norm: Norm, weight: Optional[torch.Tensor], multiplier: float
) -> torch.Tensor:
    """x plus a branch, which may be normalised first, in PyTorch."""
    branch = branch if weight is None else norm_reference(norm, branch, weight)
    return x + (branch if multiplier == 1 else branch * multiplier).view(x.shape)


def norm_mlp_reference(spec: Outputs, tensors: OutputTensors, projections: Tensors, dtype) -> torch.Tensor:
    """Computes `norm_mlp` with PyTorch's operations."""
    x, attended, after, before, behind = tensors
    if attended is not None:
        o, *projections = projections
        x = add_branch_reference(x, projection_reference(flat_heads(attended), o), spec.after, after, spec.multiplier)
    y = (x if before is None else norm_reference(spec.before, x, before)).to(dtype)
    *inner, down = projections
    products = [projection_reference(y, projection) for projection in inner]
    gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
    branch = projection_reference(gated_reference(gate, up, spec.activation), down)
    return add_branch_reference(x, branch, spec.behind, behind, spec.multiplier)


# ---------------------------------------------------------------- in front of attention
def _attention_inputs(x, norm, q_norm, k_norm, cos, sin, layout: Layout, batch: int, length: int, whole, *parts):
    """`InputResults`, and `Projections.made`. parts: of `tensors_of`; whole: what `side_by_side` finds of the weights."""
    tensors, (group,), found = InputTensors(x, norm, q_norm, k_norm, cos, sin), layout.groups, layout.all_of(parts)
    check_inputs(layout.spec, tensors, [Projection(*each) for each in by_projection(found)], (batch, length), layout.dtype)
    projections, tensors = Projections(group, found, whole), tensors._replace(x=x.reshape(-1, x.shape[-1]))
    return (*inputs_forward(layout.spec, tensors, (batch, length), projections), *projections.made())


def _attention_inputs_gradients(dq, dk, dv, dresidual, layout: Layout, whole, needs: tuple, count: int, *saved):
    """The gradients of `InputTensors` but for the angles, and of the projections' tensors. needs: of `InputTensors` and of these.

    saved: `InputTensors`, `InputSaved`, `count` tensors of projections, and what was made.
    """
    of_tensors, of_results, parts, made = _pieces(saved, len(InputTensors._fields), INPUTS_SAVED, INPUTS_SAVED + count)
    tensors, results = InputTensors(*of_tensors), InputSaved(*of_results)
    projections, _ = Projections.loaded(layout.groups[0], layout.all_of(parts), made, whole)
    need, of_parts = InputNeeds(*needs[: len(tensors)]), needs_in_parts(layout.all_of(needs[len(tensors) :]))
    x, dresidual = tensors.x.reshape(-1, tensors.x.shape[-1]), dresidual.reshape(-1, tensors.x.shape[-1])
    found = inputs_backward(layout.spec, (dq, dk, dv, dresidual), tensors._replace(x=x), results, projections, need, of_parts)
    dx = None if found.x is None else found.x.view(tensors.x.shape)
    return (dx, *found[1:-1], *layout.present(flat_parts(found.projections)))


INPUTS_SAVED = len(InputTensors._fields) + len(InputSaved._fields)  # in front of the projections' tensors
MLP_SAVED = len(OutputTensors._fields) + len(MLPSaved._fields)


def _pieces(saved: Sequence, *ends: int) -> List[Sequence]:
    """Splits the tensors that a node saved at the given positions."""
    return [saved[start:end] for start, end in zip((0, *ends), (*ends, len(saved)))]


_replayed_inputs = replayed_with_products(_attention_inputs)
_replayed_inputs_gradients = replayed_with_products(_attention_inputs_gradients)


class _NormAttentionInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layout, shape, x, norm, q_norm, k_norm, cos, sin, *parts):
        run = _replayed_inputs if layout.replayable else _attention_inputs
        results = run(x, norm, q_norm, k_norm, cos, sin, layout, *shape, layout.whole_of(parts), *parts)
        q_out, k_out, v, q, k, rstd, q_rstd, k_rstd, *made = results
        ctx.save_for_backward(x, norm, q_norm, k_norm, cos, sin, q, k, rstd, q_rstd, k_rstd, *layout.to_save(parts), *made)
        ctx.layout, ctx.count = layout, len(parts)
        return q_out, k_out, v, x.view_as(x)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx, *grads):
        layout, saved, (_, _, *needs) = ctx.layout, ctx.saved_tensors, ctx.needs_input_grad
        run = _replayed_inputs_gradients if layout.replayable else _attention_inputs_gradients
        whole = layout.whole_of(saved[INPUTS_SAVED : INPUTS_SAVED + ctx.count])
        dx, dnorm, dq_norm, dk_norm, *dparts = run(*grads, layout, whole, tuple(needs), ctx.count, *saved)
        return (None, None, dx, dnorm, dq_norm, dk_norm, None, None, *dparts)


def norm_attention_inputs(
    x: torch.Tensor,
    norm_weight: Optional[torch.Tensor],
    projections: Sequence[Projection],
    q_norm: Optional[torch.Tensor],
    k_norm: Optional[torch.Tensor],
    cos: Optional[torch.Tensor],
    sin: Optional[torch.Tensor],
    shape: Tuple[int, int],
    spec: Inputs,
    dtype: Optional[torch.dtype] = None,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes queries, keys and values as attention takes them from norm(x), and returns x for the residual connection.

    Use the returned x for the residual connection: its gradient is then added for free. Differentiable in all but the angles.

    Args:
        x: [..., hidden], of `dtype` or float32.
        norm_weight: [hidden], of x's dtype, or None for no norm.
        projections: to q, k and v, [heads * head_dim, hidden] each; or a packed one, whose rows the description tells apart.
        q_norm, k_norm: weights of the norms of queries and keys, of x's dtype: [head_dim], or as long as the projection; or None for both.
        cos, sin: [batch or 1, tokens, width], of x's dtype or float32, width all elements that are turned, or half of them; None where none
            is.
        shape: (batch, tokens of one sequence).
        spec: the description.
        dtype: of the products and of q, k and v; by default that of PyTorch's products of x.

    Returns:
        q, k, v [batch, heads, tokens, head_dim] and x.

    Raises:
        ValueError: when shapes, dtypes or devices do not fit.
    """
    dtype = dtype or product_dtype(x)
    graph, present = torch.compiler.is_compiling(), present_of(projections)
    if graph or not is_ordinary(x, norm_weight, q_norm, k_norm, cos, sin, *dense_parts(present)):
        tensors = InputTensors(x, norm_weight, q_norm, k_norm, cos, sin)
        check_inputs(spec, tensors, projections, shape, dtype)
        if not graph:
            return norm_attention_inputs_reference(spec, tensors, projections, shape, dtype)
        parts, scalings, flat = tensors_of(projections), scalings_without_dropout(projections), tensors._replace(x=x.flatten(0, -2))
        q, k, v, residual = traced.norm_attention_inputs(spec, flat, tuple(shape), dtype, parts, scalings)
        return q, k, v, residual.view(x.shape)
    layout = layout_of(spec, (projections,), dtype)
    return apply_function(_NormAttentionInputs, layout, tuple(shape), x, norm_weight, q_norm, k_norm, cos, sin, *present)


# ---------------------------------------------------------------- after attention
def _mlp(x, attended, after, before, behind, layout: Layout, whole, finish: bool, *parts):
    """Returns the result, `MLPSaved`, with None for a total that is x itself, and `all_made`.

    parts: of `tensors_of`; whole: of gate's and up's weights; finish: False to get the last product's input instead of the result.
    """
    tensors, copies, all_parts = OutputTensors(x, attended, after, before, behind), Copies(), layout.all_of(parts)
    check_mlp(tensors, [Projection(*each) for each in by_projection(all_parts)], layout.dtype)
    found = of_second_half(list(zip(layout.groups, layout.by_group(all_parts))), whole, copies)
    copies.make()
    groups = OutputGroups(*three_of(found))
    first, saved = (mlp_forward if finish else mlp_start)(layout.spec, tensors, groups)
    return (first, None if groups.o is None else saved.total, *saved[1:], *all_made(found))


def _loaded(layout: Layout, whole, parts: Sequence, made: Sequence) -> List[Projections]:
    """Restores the projections of `_mlp` from what they made."""
    return of_second_half_loaded(list(zip(layout.groups, layout.by_group(layout.all_of(parts)))), made, whole)


def _mlp_gradients(dout, layout: Layout, whole, needs: tuple, count: int, *saved):
    """The gradients of `OutputTensors` and of the projections' tensors. needs: of both.

    saved: `OutputTensors`, `MLPSaved`, `count` tensors of projections, and what was made.
    """
    of_tensors, of_results, parts, made = _pieces(saved, len(OutputTensors._fields), MLP_SAVED, MLP_SAVED + count)
    tensors, results = OutputTensors(*of_tensors), MLPSaved(*of_results)
    found = _loaded(layout, whole, parts, made)
    need, of_parts = OutputNeeds(*needs[: len(tensors)]), layout.all_of(needs[len(tensors) :])
    of_groups = GroupNeeds(*three_of([needs_in_parts(each) for each in layout.by_group(of_parts)]))
    gradients = mlp_backward(layout.spec, dout, tensors, results, OutputGroups(*three_of(found)), need, of_groups)
    dx = None if gradients.x is None else gradients.x.view(dout.shape)
    return (dx, *gradients[1:-1], *layout.present(flat_parts(*gradients.projections)))


_replayed_mlp = replayed_with_products(_mlp)
_replayed_mlp_gradients = replayed_with_products(_mlp_gradients)


def _finish_mlp(layout: Layout, shape, total, hidden, parts: Sequence, made: Sequence) -> torch.Tensor:
    """Computes the result from what `_mlp` returned without it."""
    *_, down = _loaded(layout, None, parts, made)
    return mlp_finish(layout.spec, shape, None, total, hidden, down)[0]


class _NormMLP(torch.autograd.Function):
    """rest: as of `apply_in_parts`, None with a norm of the branch, whose gradient needs the last product."""

    @staticmethod
    def forward(ctx, rest: Rest, layout, recompute, x, attended, after, before, behind, *parts):
        run, whole = _replayed_mlp if layout.replayable else _mlp, layout.whole_of(parts)
        first, total, *found = run(x, attended, after, before, behind, layout, whole, rest is None, *parts)
        of_saved, made = _pieces(found, len(MLPSaved._fields) - 1)
        saved = MLPSaved(x.reshape(-1, x.shape[-1]) if total is None else total, *of_saved)
        if recompute:
            saved = saved._replace(gate=None, up=None)
        ctx.save_for_backward(None, attended, after, before, behind, *saved, *layout.to_save(parts), *made)
        ctx.layout, ctx.count = layout, len(parts)
        if rest is None:
            return first
        return unfinished(rest, partial(_finish_mlp, layout, x.shape, saved.total, first, parts, made), x.shape, saved.total)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx, dout):
        layout, saved, (_, _, _, *needs) = ctx.layout, ctx.saved_tensors, ctx.needs_input_grad
        run = _replayed_mlp_gradients if layout.replayable else _mlp_gradients
        whole = layout.whole_of(saved[MLP_SAVED : MLP_SAVED + ctx.count])
        return (None, None, None, *run(dout, layout, whole, tuple(needs), ctx.count, *saved))


def norm_mlp(
    x: torch.Tensor,
    before: Optional[torch.Tensor],
    projections: Sequence[Projection],
    spec: Outputs,
    attended: Optional[torch.Tensor] = None,
    after: Optional[torch.Tensor] = None,
    behind: Optional[torch.Tensor] = None,
    dtype: Optional[torch.dtype] = None,
    recompute: bool = False,
) -> torch.Tensor:
    """Computes total + behind(down(act(gate(n)) * up(n))) with n = before(total), total = x or, with `attended`, x + after(o(attended)).

    Both branches are multiplied by the description's multiplier. Differentiable in all tensors.

    Args:
        x: [..., hidden], of `dtype` or float32.
        before, after, behind: [hidden], weights of the norms, of x's dtype, or None for no norm.
        projections: to gate, up and down, or to both and down; in front of them attention's output projection, with `attended`.
        spec: the description.
        attended: [tokens, features] or [batch, tokens, heads, head_dim] of `dtype`, attention's output.
        dtype: of the products; by default that of PyTorch's products of x.
        recompute: whether gate and up are made again in the backward pass, bit for bit, instead of kept.

    Returns:
        [..., hidden], of x's dtype.

    Raises:
        ValueError: when shapes, dtypes or devices do not fit.
    """
    dtype = dtype or product_dtype(x)
    graph, present = torch.compiler.is_compiling(), present_of(projections)
    if graph or not is_ordinary(x, attended, after, before, behind, *dense_parts(present)):
        tensors = OutputTensors(x, attended, after, before, behind)
        check_mlp(tensors, projections, dtype)
        if not graph:
            return norm_mlp_reference(spec, tensors, projections, dtype)
        parts, scalings = tensors_of(projections), scalings_without_dropout(projections)
        return traced.norm_mlp(spec, tensors, dtype, parts, scalings, recompute)
    layout = layout_of(spec, split_groups(projections, attended is not None), dtype)
    of_node = x, attended, after, before, behind
    if behind is not None:
        return apply_function(_NormMLP, None, layout, bool(recompute), *of_node, *present)
    return apply_in_parts(_NormMLP, layout, bool(recompute), *of_node, *present)
