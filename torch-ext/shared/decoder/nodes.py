"""The two halves of a decoder layer around attention, each one autograd node: what a description (`spec`) says of it, for projections that
may have a low-rank adapter, be in four bits, or be wider than the dtype of the products.

Under autocast over an fp32 model the residual stream stays in fp32: the norms read it and write the dtype of the products, and each weight
is rounded to that once a forward pass, whose result the backward pass uses again. Gradients are of their parameters' own dtypes.
"""

from typing import Any, NamedTuple, Optional, Sequence, Tuple

import torch

from ..ops.autocast import casts_products_of
from .activation import gated_reference
from .checks import check_inputs, check_mlp, split_groups
from .graph import InGraph
from .heads import Heads, heads_reference
from .mlp_steps import (
    MLPSaved,
    OutputGroups,
    gate_and_up,
    mlp_backward,
    mlp_finish,
    mlp_forward,
    mlp_start,
)
from .node import Given, Gradients, Node
from .norms import norm_reference
from .projection import Group, Projection, flat_parts, needs_in_parts, projection_reference
from .projections import Copies, Projections, all_made, of_second_half, of_second_half_loaded
from .spec import Inputs, Norm, Outputs, is_there
from .steps import InputSaved, InputTensors, OutputTensors, flat_heads, in_heads, inputs_backward, inputs_forward, shaped

__all__ = [
    "AFTER_ATTENTION", "TILE_OF", "add_branch_reference", "groups_of", "named", "norm_attention_inputs", "norm_mlp", "product_dtype",
    "stream_of", "why_not_tiled",
]  # fmt: skip

Tensors = Sequence[Projection]


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which linear layers multiply x: autocast's, where it is on."""
    return torch.get_autocast_dtype(x.device.type) if casts_products_of(x) else x.dtype


# ---------------------------------------------------------------- in PyTorch
def norm_attention_inputs_reference(spec: Inputs, tensors: InputTensors, projections: Tensors, sizes: Sequence[int], dtype):
    """Computes `norm_attention_inputs` with PyTorch's operations."""
    x, norm, q_norm, k_norm, cos, sin, bias = tensors
    y = (norm_reference(spec.norm, x, norm, bias) if is_there(spec.norm, norm) else x).to(dtype)
    projected = [projection_reference(y, projection) for projection in projections]
    q, k, v = (p.view(*sizes, -1, spec.head_dim) for p in (projected if spec.rows is None else projected[0].split(spec.rows, -1)))
    return (*heads_reference(spec, Heads(q, k, q_norm, k_norm, cos, sin)), v.transpose(1, 2), x)


def add_branch_reference(
    x: torch.Tensor, branch: torch.Tensor, norm: Norm, weight: Optional[torch.Tensor], multiplier: float
) -> torch.Tensor:
    """x plus a branch, which may be normalised first, in PyTorch."""
    branch = branch if weight is None else norm_reference(norm, branch, weight)
    return x + (branch if multiplier == 1 else branch * multiplier).view(x.shape)


def norm_mlp_reference(spec: "MLPSpec", tensors: OutputTensors, projections: Tensors, sizes, dtype) -> torch.Tensor:
    """Computes `norm_mlp` with PyTorch's operations."""
    outputs = spec.outputs
    x, attended, after, before, behind, bias = tensors
    read = x
    if attended is not None:
        o, *projections = projections
        x = add_branch_reference(x, projection_reference(flat_heads(attended), o), outputs.after, after, outputs.multiplier)
    read = read if outputs.parallel else x
    y = (norm_reference(outputs.before, read, before, bias) if is_there(outputs.before, before) else read).to(dtype)
    *inner, down = projections
    products = [projection_reference(y, projection) for projection in inner]
    branch = projection_reference(gated_reference(*gate_and_up(products, outputs.gated), outputs.activation), down)
    return add_branch_reference(x, branch, outputs.behind, behind, outputs.multiplier)


# ---------------------------------------------------------------- before attention
def _inputs(given: Given) -> Tuple[list, InputSaved]:
    (group,), tensors = given.layout.groups, given.tensors
    projections, stream = Projections(group, given.parts, given.whole), tensors.x.reshape(-1, tensors.x.shape[-1])
    projected = _side_by_side(given, tensors.x, group)
    heads, found = inputs_forward(given.layout.spec, tensors._replace(x=stream), given.sizes, projections, projected)
    if projected is None:
        return heads, found
    q, k, v = (each.transpose(1, 2) for each in heads)
    return ([q, k, v], found) if found.q is None else ([q, k, projected], found._replace(q=projected, k=None))


def _side_by_side(given: Given, x: torch.Tensor, group: Group) -> Optional[torch.Tensor]:
    """In a graph, the matrix for a group's products, which must not share memory there only where weights lie side by side."""
    if not given.in_graph:
        return None
    return x.new_empty((x.reshape(-1, x.shape[-1]).shape[0], sum(group.rows)), dtype=group.dtype)


def _in_heads(found: Sequence[torch.Tensor]) -> list:
    """q, k and v as attention takes them, of what the operator gives: v may be the last columns of all that was projected."""
    q, k, v = found
    if v.dim() == 2:
        v = v[:, (q.shape[2] + k.shape[2]) * q.shape[3] :]
        v = v.view(*q.shape[:2], v.shape[1] // q.shape[3], q.shape[3])
    return [heads.transpose(1, 2) for heads in (q, k, v)]


def _inputs_gradients(given: Given, grads: Sequence[torch.Tensor], saved: InputSaved, need: Gradients) -> Gradients:
    (dq, dk, dv, dstream), tensors = grads, given.tensors
    projections, _ = Projections.loaded(given.layout.groups[0], given.parts, saved.made, given.whole)
    stream, dstream = (tensor.reshape(-1, tensors.x.shape[-1]) for tensor in (tensors.x, dstream))
    if saved.q is not None and saved.k is None:  # all that was projected
        spec = given.layout.spec
        q, k, _ = in_heads(spec, saved.q.split(spec.rows or projections.group.rows, 1), (dq.shape[0], dq.shape[2]))
        saved = saved._replace(q=q, k=k)
    grads, needs = (dq, dk, dv, dstream), needs_in_parts(need.parts)
    found, dparts = inputs_backward(given.layout.spec, grads, tensors._replace(x=stream), saved, projections, need.tensors, needs)
    return Gradients(found._replace(x=shaped(found.x, tensors.x)), flat_parts(dparts))


_inputs_node = Node(
    "_NormAttentionInputs", check_inputs, norm_attention_inputs_reference, _inputs, _inputs_gradients,
    in_graph=InGraph("norm_attention_inputs", Inputs, InputTensors, InputSaved, ("cos", "sin"), _in_heads), passes_on=True,
)  # fmt: skip


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
    products: str = "bf16",
    norm_bias: Optional[torch.Tensor] = None,
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
        products: as of `Node.__call__`.
        norm_bias: [hidden], of x's dtype, the bias of a LayerNorm, or None.

    Returns:
        q, k, v [batch, heads, tokens, head_dim] and x.

    Raises:
        ValueError: when shapes, dtypes or devices do not fit.
    """
    tensors = InputTensors(x, norm_weight, q_norm, k_norm, cos, sin, norm_bias)
    return _inputs_node(spec, tensors, (projections,), tuple(shape), dtype or product_dtype(x), products)


# ---------------------------------------------------------------- after attention
TILE_OF = 16  # tokens: a number a row, such as the norm's, then begins where kernels expect it to


class MLPSpec(NamedTuple):
    """Describes the node. recompute: whether the backward pass computes gate and up again. tile: the tokens for which they exist at a time,
    0 for all."""

    outputs: Outputs
    recompute: bool
    tile: int = 0


def groups_of(given: Given) -> list:
    """Each group of projections with its tensors."""
    return list(zip(given.layout.groups, given.layout.by_group(given.parts)))


def named(given: Given, found: Sequence) -> OutputGroups:
    """Names what was found for each group of projections: o's, if there is one, and the MLP's or the shared expert's two, if there are."""
    has_o = given.tensors.attended is not None
    return OutputGroups(found[0] if has_o else None, *(found[has_o:] or (None, None)))


def stream_of(given: Given, saved: Any) -> torch.Tensor:
    """The residual stream that the norm read, after attention or beside it, flat. saved: with a `total`, as `MLPSaved`."""
    return given.tensors.x.reshape(-1, given.tensors.x.shape[-1]) if saved.total is None else saved.total


AFTER_ATTENTION: dict = {  # options of both nodes
    "in_parts": lambda tensors: tensors.behind is None,  # its gradient needs the last product
    "dropped": lambda spec, tensors: () if tensors.attended is None or spec.outputs.parallel else ("x",),
}


def _saved(given: Given, saved: MLPSaved, found: Sequence[Projections], both: Optional[torch.Tensor]) -> MLPSaved:
    """Keeps only what the backward pass reads. Without attention's branch, or beside it, the norm read x, which is kept anyway."""
    total: Any = None if given.tensors.attended is None or given.layout.spec.outputs.parallel else saved.total
    saved = saved._replace(total=total, made=all_made(found))
    if given.layout.spec.recompute:
        return saved._replace(gate=None, up=None)
    return saved if both is None else saved._replace(gate=both, up=None)


def why_not_tiled(groups: Sequence[Group]) -> str:
    """Why an MLP is not computed in tiles of tokens; "" where it can be. groups: of its projections."""
    if any(group.eight for group in groups):
        return "its products are in eight bits"
    return "its adapters have dropout" if any(group.drops for group in groups) else ""


def _tile_of(given: Given) -> int:
    layout = given.layout
    return layout.spec.tile if layout.spec.tile and not why_not_tiled(layout.groups[-2:]) else 0


def _mlp(given: Given, finish: bool = True) -> Tuple[list, MLPSaved]:
    copies, tile, spec = Copies(), _tile_of(given), given.layout.spec.outputs
    found = of_second_half(groups_of(given), given.whole, copies)
    copies.make()
    groups, both = named(given, found), None if tile else _side_by_side(given, given.tensors.x, found[-2].group)
    first, saved = (mlp_forward if finish else mlp_start)(spec, given.tensors, groups, both, tile)
    return [first], _saved(given, saved, found, both)


def _start_mlp(given: Given) -> Tuple[list, MLPSaved]:
    return _mlp(given, finish=False)


def _finish_mlp(given: Given, started: list, saved: MLPSaved) -> torch.Tensor:
    """Computes the result from the last product's input, or in tiles from that of gate and up."""
    groups, tile = named(given, of_second_half_loaded(groups_of(given), saved.made, given.whole)), _tile_of(given)
    return mlp_finish(given.layout.spec.outputs, given.tensors, stream_of(given, saved), groups, started[0], tile)[0]


def _mlp_gradients(given: Given, grads: Sequence[torch.Tensor], saved: MLPSaved, need: Gradients) -> Gradients:
    (dout,), layout = grads, given.layout
    found = named(given, of_second_half_loaded(groups_of(given), saved.made, given.whole))
    needs = named(given, [needs_in_parts(each) for each in layout.by_group(need.parts)])
    saved, both, tile = saved._replace(total=stream_of(given, saved)), None, _tile_of(given)
    if tile:
        pass
    elif saved.gate is None:
        both = _side_by_side(given, saved.total, found.inner.group)
    elif saved.up is None:
        gate, up = gate_and_up((saved.gate,), layout.spec.outputs.gated)
        saved = saved._replace(gate=gate, up=up)
    gradients, dparts = mlp_backward(layout.spec.outputs, dout, given.tensors, saved, found, need.tensors, needs, both, tile)
    return Gradients(gradients._replace(x=shaped(gradients.x, dout)), flat_parts(*dparts))


_mlp_node = Node(
    "_NormMLP", check_mlp, norm_mlp_reference, _mlp, _mlp_gradients, _start_mlp, _finish_mlp,
    in_graph=InGraph("norm_mlp", MLPSpec, OutputTensors, MLPSaved), **AFTER_ATTENTION,
)  # fmt: skip


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
    products: str = "bf16",
    tile: int = 0,
    before_bias: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Computes total + behind(down(act(gate(n)) * up(n))) with n = before(total), total = x or, with `attended`, x + after(o(attended)).

    Both branches are multiplied by the description's multiplier. Differentiable in all tensors.

    Args:
        x: [..., hidden], of `dtype` or float32.
        before, after, behind: [hidden], weights of the norms, of x's dtype, or None for no norm.
        projections: to gate, up and down, or to both and down, or, where the description has no gate, to what the activation reads and
            down; in front of them attention's output projection, with `attended`.
        spec: the description.
        attended: [tokens, features] or [batch, tokens, heads, head_dim] of `dtype`, attention's output.
        dtype: of the products; by default that of PyTorch's products of x.
        recompute: whether gate and up are recomputed in the backward pass, bit for bit, instead of kept.
        products: as of `Node.__call__`.
        tile: the tokens for which gate and up exist at a time, in both passes, a multiple of `TILE_OF`, or 0 for all; more than x has is
            as 0. With dropout in adapters, or in eight bits, it is ignored (`why_not_tiled`).
        before_bias: [hidden], of x's dtype, the bias of a LayerNorm before, or None.

    Returns:
        [..., hidden], of x's dtype.

    Raises:
        ValueError: when shapes, dtypes or devices do not fit.
    """
    tensors = OutputTensors(x, attended, after, before, behind, before_bias)
    groups = split_groups(projections, attended is not None)
    tile = tile if 0 < tile < x.numel() // max(x.shape[-1], 1) else 0
    return _mlp_node(MLPSpec(spec, bool(recompute), tile), tensors, groups, (), dtype or product_dtype(x), products)
