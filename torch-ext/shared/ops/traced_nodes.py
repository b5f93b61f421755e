"""The two autograd nodes of a decoder layer in a graph of torch.compile or torch.export: an operator for each forward and each backward
pass, which allocates and keeps what the node does in eager mode.

What such an operator returns shares no memory with its arguments or among each other, as a compiler expects it: what is projected from
one input is one matrix, of which the graph takes the parts. Whether weights lie side by side in memory is known when it runs.
"""

import inspect
from typing import Callable, List, Optional, Sequence, Tuple

import torch

from ..runtime.replay import replayed_with_products
from .common import once_differentiable, operator_of, side_by_side
from .projected_steps import (
    attention_inputs_backward,
    attention_inputs_forward,
    biases_of,
    groups_of,
    mlp_backward,
    mlp_forward,
    split_groups,
)
from .projection import OF_ONE, Projection, Projections, from_parts, shapes_made

LISTS_OF_TENSORS = (List[torch.Tensor], List[Optional[torch.Tensor]])
ALONE, OF_NUMBERS = -1, -2


def _replayed(together: slice) -> Callable:
    """Makes the function of an operator of one that has `whole` behind the operator's arguments: what `side_by_side` finds of the weights
    of these projections. It is replayed where it can be; the replay gets the tensors of a list one by one, and numbers as a tuple."""

    def operator_function(function):
        *parameters, _ = inspect.signature(function).parameters.values()
        lists = [parameter.annotation in LISTS_OF_TENSORS for parameter in parameters]
        tensors = [parameter.name for parameter in parameters].index("tensors")

        def from_parts(*parts):
            left, arguments = iter(parts), []
            for form in parts[-1]:
                if form == ALONE:
                    arguments.append(next(left))
                else:
                    arguments.append(list(next(left)) if form == OF_NUMBERS else [next(left) for _ in range(form)])
            return function(*arguments)

        from_parts.__name__ = function.__name__
        again = replayed_with_products(from_parts)

        def call(*args):
            if torch.is_grad_enabled():  # never in a graph of torch.compile
                with torch.no_grad():
                    return call(*args)
            parts, forms = [], []
            for arg, of_tensors in zip(args, lists):
                if of_tensors:
                    parts += arg
                    forms.append(len(arg))
                elif type(arg) is list:
                    parts.append(tuple(arg))
                    forms.append(OF_NUMBERS)
                else:
                    parts.append(arg)
                    forms.append(ALONE)
            whole = side_by_side(args[tensors][::OF_ONE][together])
            return list(again(*parts, whole, (*forms, ALONE)))

        call.__signature__ = inspect.signature(function).replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return operator_function


ATTENTION_INPUTS, GATE_AND_UP = slice(0, 3), slice(-3, -1)


def _projections(tensors: Sequence[Optional[torch.Tensor]], scalings: Sequence[float]) -> List[Projection]:
    return from_parts(tensors, [(scaling, 0.0) for scaling in scalings])


def _needed(gradients: Sequence[Optional[torch.Tensor]]) -> List[torch.Tensor]:
    """Those that were computed, as the fake functions promise them."""
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


def _place(found: Sequence[torch.Tensor], needs: Sequence[bool]) -> list:
    """The gradients that an operator returned, each in its argument's place, None in the others."""
    left = iter(found)
    return [next(left) if need else None for need in needs]


def _heads_last(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, head_dim], in memory [batch, tokens, heads, head_dim]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# ---------------------------------------------------------------- attention's inputs
def _rows(tensors) -> List[int]:
    return [weight.shape[0] for weight in tensors[::OF_ONE]]


def _parts(projected: torch.Tensor, rows: Sequence[int], shape: Sequence[int], head_dim: int) -> List[torch.Tensor]:
    """q, k and v [batch, tokens, heads, head_dim] of [tokens, all rows]."""
    return [part.view(*shape, part.shape[1] // head_dim, head_dim) for part in projected.split(list(rows), 1)]


@_replayed(ATTENTION_INPUTS)
def _attention_inputs(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    head_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    shape: List[int],
    dtype: torch.dtype,
    tensors: List[Optional[torch.Tensor]],
    scalings: List[float],
    whole,
) -> List[torch.Tensor]:
    """q and k as attention takes them, what was projected [tokens, all rows], rstd, and `Projections.made`."""
    projections = _projections(tensors, scalings)
    group = Projections(projections, dtype, whole=whole)
    projected = torch.empty((x.shape[0], sum(group.rows)), dtype=dtype, device=x.device)
    arguments = x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin, shape
    q, k, _, rstd = attention_inputs_forward(*arguments, group, biases_of(projections), projected)
    return [_heads_last(q), _heads_last(k), projected, rstd, *group.made(projections)]


def _fake_attention_inputs(x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin, shape, dtype, tensors, scalings):
    tokens, head_dim, rows = x.shape[0], q_norm.shape[0], _rows(tensors)
    heads = [x.new_empty((*shape, count // head_dim, head_dim), dtype=dtype).transpose(1, 2) for count in rows[:2]]
    made = shapes_made(_projections(tensors, scalings), dtype, tokens)
    rstd = x.new_empty((tokens,), dtype=torch.promote_types(x.dtype, torch.float32))
    return [*heads, x.new_empty((tokens, sum(rows)), dtype=dtype), rstd, *(x.new_empty(of, dtype=dtype) for of in made)]


@_replayed(ATTENTION_INPUTS)
def _attention_inputs_gradients(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dresidual: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    head_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dtype: torch.dtype,
    tensors: List[Optional[torch.Tensor]],
    scalings: List[float],
    projected: torch.Tensor,
    rstd: torch.Tensor,
    made: List[torch.Tensor],
    needs: List[bool],
    whole,
) -> List[torch.Tensor]:
    """Those of the gradients of `attention_inputs_backward` that are needed."""
    group = Projections(_projections(tensors, scalings), dtype, made, whole)
    q, k, _ = _parts(projected, group.rows, (dq.shape[0], dq.shape[2]), q_norm.shape[0])
    saved = x, norm_weight, rstd, q, k, q_norm, k_norm, head_eps, cos, sin
    return _needed(attention_inputs_backward((dq, dk, dv, dresidual), *saved, group, needs))


def _fake_attention_inputs_gradients(dq, dk, dv, dresidual, x, norm_weight, q_norm, k_norm, head_eps, cos, sin, dtype, tensors, *rest):
    wanted = x, norm_weight, q_norm, k_norm, *tensors
    return [tensor.new_empty(tensor.shape) for tensor, need in zip(wanted, rest[-1]) if need]


attention_inputs_operator = operator_of("norm_attention_inputs", _attention_inputs, _fake_attention_inputs)
attention_inputs_gradients_operator = operator_of(
    "norm_attention_inputs_backward", _attention_inputs_gradients, _fake_attention_inputs_gradients
)


class _AttentionInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin, shape, dtype, scalings, needs, *tensors):
        arguments = x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin, list(shape), dtype
        q, k, projected, rstd, *made = attention_inputs_operator(*arguments, list(tensors), list(scalings))
        ctx.save_for_backward(x, norm_weight, q_norm, k_norm, cos, sin, *tensors, projected, rstd, *made)
        ctx.head_eps, ctx.dtype, ctx.scalings, ctx.needs, ctx.count = head_eps, dtype, scalings, needs, len(tensors)
        v = _parts(projected, _rows(tensors), shape, q_norm.shape[0])[2]
        return q, k, v.transpose(1, 2), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv, dresidual):
        x, norm_weight, q_norm, k_norm, cos, sin, *saved = ctx.saved_tensors
        tensors, (projected, rstd, *made) = saved[: ctx.count], saved[ctx.count :]
        arguments = dq, dk, dv, dresidual, x, norm_weight, q_norm, k_norm, ctx.head_eps, cos, sin, ctx.dtype
        found = attention_inputs_gradients_operator(
            *arguments, list(tensors), list(ctx.scalings), projected, rstd, list(made), list(ctx.needs)
        )
        dx, dnorm, dq_norm, dk_norm, *dtensors = _place(found, ctx.needs)
        return (dx, dnorm, None, dq_norm, dk_norm, None, None, None, None, None, None, None, *dtensors)


def _needs(*tensors: Optional[torch.Tensor]) -> Tuple[bool, ...]:
    return tuple(torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors)


def traced_attention_inputs(x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin, shape, dtype, tensors, scalings):
    """`projected_attention_inputs` in a graph. tensors, scalings: of the projections, which have no dropout."""
    needs = _needs(x, norm_weight, q_norm, k_norm, *tensors)
    arguments = x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin
    if any(needs):
        return _AttentionInputs.apply(*arguments, tuple(shape), dtype, tuple(scalings), needs, *tensors)
    q, k, projected, *_ = attention_inputs_operator(*arguments, list(shape), dtype, list(tensors), list(scalings))
    return q, k, _parts(projected, _rows(tensors), shape, q_norm.shape[0])[2].transpose(1, 2), x


# ---------------------------------------------------------------- the MLP
@_replayed(GATE_AND_UP)
def _mlp(
    x: torch.Tensor,
    attended: Optional[torch.Tensor],
    norm_weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    tensors: List[Optional[torch.Tensor]],
    scalings: List[float],
    whole,
) -> List[torch.Tensor]:
    """The result, rstd, gate and up [tokens, both], where there is `attended` the residual stream behind it, and `Projections.made`."""
    projections = _projections(tensors, scalings)
    groups = groups_of(projections, dtype, whole=whole)
    tokens = x.numel() // x.shape[-1]
    both = torch.empty((tokens, sum(groups[-2].rows)), dtype=dtype, device=x.device)
    out, total, rstd, *_ = mlp_forward(x, attended, norm_weight, eps, groups, biases_of(projections), both)
    behind = [] if attended is None else [total]
    made = [tensor for group, of in zip(groups, split_groups(projections)) for tensor in group.made(of)]
    return [out, rstd, both, *behind, *made]


def _made_of(projections: Sequence[Projection], dtype: torch.dtype, tokens: int) -> List[List[Sequence[int]]]:
    return [shapes_made(group, dtype, tokens) for group in split_groups(projections)]


def _fake_mlp(x, attended, norm_weight, eps, dtype, tensors, scalings):
    hidden = x.shape[-1]
    tokens = x.numel() // hidden
    rows = _rows(tensors)
    behind = [] if attended is None else [x.new_empty((tokens, hidden))]
    made = [shape for group in _made_of(_projections(tensors, scalings), dtype, tokens) for shape in group]
    rstd = x.new_empty((tokens,), dtype=torch.promote_types(x.dtype, torch.float32))
    both = x.new_empty((tokens, rows[-3] + rows[-2]), dtype=dtype)
    return [x.new_empty(x.shape), rstd, both, *behind, *(x.new_empty(shape, dtype=dtype) for shape in made)]


@_replayed(GATE_AND_UP)
def _mlp_gradients(
    dout: torch.Tensor,
    total: torch.Tensor,
    attended: Optional[torch.Tensor],
    norm_weight: torch.Tensor,
    dtype: torch.dtype,
    tensors: List[Optional[torch.Tensor]],
    scalings: List[float],
    rstd: torch.Tensor,
    both: Optional[torch.Tensor],
    made: List[torch.Tensor],
    needs: List[bool],
    whole,
) -> List[torch.Tensor]:
    """Those of the gradients of `mlp_backward` that are needed; that of x in dout's shape. total: [..., hidden]; both: None where
    gate and up are to be made again."""
    projections = _projections(tensors, scalings)
    flat = total.reshape(-1, total.shape[-1])
    left, of_groups = iter(made), []
    for shapes in _made_of(projections, dtype, flat.shape[0]):
        of_groups.append([next(left) for _ in shapes])
    groups = groups_of(projections, dtype, of_groups, whole)
    gate = up = again = None
    if both is None:
        again = torch.empty((flat.shape[0], sum(groups[-2].rows)), dtype=dtype, device=flat.device)
    else:
        gate, up = both.split(groups[-2].rows, 1)
    biases = biases_of(projections[-3:-1])
    dx, *found = mlp_backward(dout, flat, attended, norm_weight, rstd, gate, up, biases, groups, needs, again)
    return _needed((None if dx is None else dx.view(dout.shape), *found))


def _fake_mlp_gradients(dout, total, attended, norm_weight, dtype, tensors, *rest):
    wanted = dout, attended, norm_weight, *tensors
    return [tensor.new_empty(tensor.shape) for tensor, need in zip(wanted, rest[-1]) if need]


mlp_operator = operator_of("norm_mlp", _mlp, _fake_mlp)
mlp_gradients_operator = operator_of("norm_mlp_backward", _mlp_gradients, _fake_mlp_gradients)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, attended, norm_weight, eps, dtype, scalings, needs, recompute, *tensors):
        out, rstd, both, *rest = mlp_operator(x, attended, norm_weight, eps, dtype, list(tensors), list(scalings))
        both = None if recompute else both
        total, made = (x, rest) if attended is None else (rest[0], rest[1:])
        ctx.save_for_backward(total, attended, norm_weight, *tensors, rstd, both, *made)
        ctx.dtype, ctx.scalings, ctx.needs, ctx.count = dtype, scalings, needs, len(tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        total, attended, norm_weight, *saved = ctx.saved_tensors
        tensors, (rstd, both, *made) = saved[: ctx.count], saved[ctx.count :]
        arguments = dout, total, attended, norm_weight, ctx.dtype, list(tensors), list(ctx.scalings), rstd, both, list(made)
        dx, dattended, dnorm, *dtensors = _place(mlp_gradients_operator(*arguments, list(ctx.needs)), ctx.needs)
        return (dx, dattended, dnorm, None, None, None, None, None, *dtensors)


def traced_mlp(x, attended, norm_weight, eps, dtype, tensors, scalings, recompute) -> torch.Tensor:
    """`projected_mlp` in a graph. tensors, scalings: of the projections, which have no dropout."""
    needs = _needs(x, attended, norm_weight, *tensors)
    if any(needs):
        return _MLP.apply(x, attended, norm_weight, eps, dtype, tuple(scalings), needs, bool(recompute), *tensors)
    return mlp_operator(x, attended, norm_weight, eps, dtype, list(tensors), list(scalings))[0]
