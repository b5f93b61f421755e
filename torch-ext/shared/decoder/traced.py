"""The two autograd nodes of a decoder layer in a graph of torch.compile or torch.export: an operator for each forward and each backward
pass, which allocates and keeps what the node does in eager mode.

What such an operator returns shares no memory with its arguments or among each other, as a compiler expects it: what is projected from
one input is one matrix, of which the graph takes the parts. Whether weights lie side by side in memory is known when it runs. A description
goes into a graph as text (`spec.encoded`), so that a stored graph means the same in another process.
"""

from typing import List, Optional, Sequence, Tuple

import torch

from ..ops.common import once_differentiable
from .heads import is_fused
from .mlp_steps import GroupNeeds, MLPSaved, OutputGroups, mlp_backward, mlp_forward, three_of
from .operators import packed_operator
from .projection import SIZE, Group, flat_parts, needs_in_parts, with_numbers
from .projections import Projections, all_made, of_second_half, of_second_half_loaded
from .spec import Inputs, Outputs, encoded, inputs_of, outputs_of
from .steps import InputNeeds, InputSaved, InputTensors, OutputNeeds, OutputTensors, inputs_backward, inputs_forward


def _needed(gradients: Sequence[Optional[torch.Tensor]]) -> List[torch.Tensor]:
    """The gradients that were computed, as the fake functions promise them."""
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


def _place(found: Sequence[torch.Tensor], needs: Sequence[bool]) -> list:
    """The gradients that an operator returned, each in its argument's place, None in the others."""
    left = iter(found)
    return [next(left) if need else None for need in needs]


def _heads_last(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, head_dim], in memory [batch, tokens, heads, head_dim]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _needs(*tensors: Optional[torch.Tensor]) -> Tuple[bool, ...]:
    return tuple(torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors)


def _there(*tensors: Optional[torch.Tensor]) -> List[torch.Tensor]:
    """An operator returns no None."""
    return [tensor for tensor in tensors if tensor is not None]


def _rstd_of(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_empty((rows,), dtype=torch.promote_types(x.dtype, torch.float32))


# ---------------------------------------------------------------- attention's inputs
def _rows(spec: Inputs, parts: Sequence) -> List[int]:
    return list(spec.rows or [weight.shape[0] for weight in parts[::SIZE]])


def _kept_rows(rows: Sequence[int], q_norm) -> List[int]:
    """The ones of q, k and v that an operator returns as projected: v alone where no norm's backward pass reads q and k."""
    return list(rows) if q_norm is not None else list(rows[2:])


def _in_heads(spec: Inputs, projected: torch.Tensor, rows: Sequence[int], shape: Sequence[int]) -> List[torch.Tensor]:
    """What there is of q, k and v, [batch, tokens, heads, head_dim], of [tokens, those rows]."""
    return [part.view(*shape, part.shape[1] // spec.head_dim, spec.head_dim) for part in projected.split(list(rows), 1)]


def _input_kept(spec: Inputs, norm, q_norm, found: Sequence[torch.Tensor]) -> Tuple[list, Sequence[torch.Tensor]]:
    """([rstd, q_rstd, k_rstd], None for what there is not, and what was made) of what the first operator returns after `projected`."""
    left = list(found)
    rstd = None if norm is None else left.pop(0)
    pair = [left.pop(0), left.pop(0)] if _keeps_rstds(spec, q_norm) else [None, None]
    return [rstd, *pair], left


def _keeps_rstds(spec: Inputs, q_norm) -> bool:
    """Whether the backward pass reads what the norms of q and k gave."""
    return q_norm is not None and not is_fused(spec)


def _attention_inputs(
    x: torch.Tensor,
    norm: Optional[torch.Tensor],
    q_norm: Optional[torch.Tensor],
    k_norm: Optional[torch.Tensor],
    cos: Optional[torch.Tensor],
    sin: Optional[torch.Tensor],
    spec: str,
    shape: List[int],
    dtype: torch.dtype,
    parts: List[Optional[torch.Tensor]],
    scalings: List[float],
    whole,
) -> List[torch.Tensor]:
    """q and k as attention takes them, what was projected and is read again [tokens, `_kept_rows`], the norms' rstd, `Projections.made`."""
    group = Group(with_numbers(parts, scalings), dtype)
    projections = Projections(group, parts, whole)
    projected = torch.empty((x.shape[0], sum(group.rows)), dtype=dtype, device=x.device)
    tensors = InputTensors(x, norm, q_norm, k_norm, cos, sin)
    found = inputs_forward(inputs_of(spec), tensors, shape, projections, projected)
    kept = _there(found.rstd, found.q_rstd, found.k_rstd)
    if q_norm is None:
        projected = projected[:, -_rows(inputs_of(spec), parts)[2] :].contiguous()
    return [_heads_last(found.q_out), _heads_last(found.k_out), projected, *kept, *projections.made()]


def _fake_attention_inputs(x, norm, q_norm, k_norm, cos, sin, spec, shape, dtype, parts, scalings):
    spec, tokens = inputs_of(spec), x.shape[0]
    rows = _rows(spec, parts)
    heads = [x.new_empty((*shape, count // spec.head_dim, spec.head_dim), dtype=dtype).transpose(1, 2) for count in rows[:2]]
    made = Group(with_numbers(parts, scalings), dtype).shapes_made(parts, tokens)
    rstds = [] if norm is None else [_rstd_of(x, tokens)]
    if _keeps_rstds(spec, q_norm):
        rstds += [_rstd_of(x, tokens if spec.whole else tokens * (count // spec.head_dim)) for count in rows[:2]]
    projected = x.new_empty((tokens, sum(_kept_rows(rows, q_norm))), dtype=dtype)
    return [*heads, projected, *rstds, *(x.new_empty(of, dtype=dtype) for of in made)]


def _attention_inputs_gradients(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dresidual: torch.Tensor,
    x: torch.Tensor,
    norm: Optional[torch.Tensor],
    q_norm: Optional[torch.Tensor],
    k_norm: Optional[torch.Tensor],
    cos: Optional[torch.Tensor],
    sin: Optional[torch.Tensor],
    spec: str,
    dtype: torch.dtype,
    parts: List[Optional[torch.Tensor]],
    scalings: List[float],
    projected: torch.Tensor,
    kept: List[torch.Tensor],
    needs: List[bool],
    whole,
) -> List[torch.Tensor]:
    """The needed gradients of `InputTensors` and the projections' tensors."""
    description = inputs_of(spec)
    group, tensors = Group(with_numbers(parts, scalings), dtype), InputTensors(x, norm, q_norm, k_norm, cos, sin)
    rstds, made = _input_kept(description, norm, q_norm, kept)
    projections, _ = Projections.loaded(group, parts, made, whole)
    q = k = None
    if q_norm is not None:
        q, k, _ = _in_heads(description, projected, description.rows or group.rows, (dq.shape[0], dq.shape[2]))
    saved = InputSaved(q, k, *rstds)
    need, of_parts = InputNeeds(*needs[: len(tensors)]), needs_in_parts(needs[len(tensors) :])
    found = inputs_backward(description, (dq, dk, dv, dresidual), tensors, saved, projections, need, of_parts)
    return _needed((*found[:-1], *flat_parts(found.projections)))


def _fake_attention_inputs_gradients(dq, dk, dv, dresidual, x, norm, q_norm, k_norm, cos, sin, spec, dtype, parts, *rest):
    wanted = x, norm, q_norm, k_norm, cos, sin, *parts
    return [tensor.new_empty(tensor.shape) for tensor, need in zip(wanted, rest[-1]) if need]


ATTENTION_INPUTS = packed_operator("norm_attention_inputs", _attention_inputs, _fake_attention_inputs)
ATTENTION_INPUTS_GRADIENTS = packed_operator(
    "norm_attention_inputs_backward", _attention_inputs_gradients, _fake_attention_inputs_gradients
)
attention_inputs_operator, attention_inputs_gradients_operator = ATTENTION_INPUTS.call, ATTENTION_INPUTS_GRADIENTS.call


class _AttentionInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, text, shape, dtype, scalings, needs, x, norm, q_norm, k_norm, cos, sin, *parts):
        tensors = x, norm, q_norm, k_norm, cos, sin
        q, k, projected, *kept = attention_inputs_operator(*tensors, text, list(shape), dtype, list(parts), list(scalings))
        ctx.save_for_backward(*tensors, *parts, projected, *kept)
        ctx.text, ctx.dtype, ctx.scalings, ctx.needs, ctx.count = text, dtype, scalings, needs, len(parts)
        v = _in_heads(spec, projected, _kept_rows(_rows(spec, parts), q_norm), shape)[-1]
        return q, k, v.transpose(1, 2), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv, dresidual):
        x, norm, q_norm, k_norm, cos, sin, *saved = ctx.saved_tensors
        parts, (projected, *kept) = saved[: ctx.count], saved[ctx.count :]
        found = attention_inputs_gradients_operator(
            *(dq, dk, dv, dresidual, x, norm, q_norm, k_norm, cos, sin, ctx.text, ctx.dtype, list(parts)),
            *(list(ctx.scalings), projected, list(kept), list(ctx.needs)),
        )
        return (None, None, None, None, None, None, *_place(found, ctx.needs))


def norm_attention_inputs(spec: Inputs, tensors: InputTensors, shape: tuple, dtype: torch.dtype, parts: list, scalings: List[float]):
    """`nodes.norm_attention_inputs` in a graph. parts, scalings: of the projections, which have no dropout."""
    text, needs = encoded(spec), _needs(*tensors._replace(cos=None, sin=None), *parts)
    if any(needs):
        return _AttentionInputs.apply(spec, text, shape, dtype, tuple(scalings), needs, *tensors, *parts)
    q, k, projected, *_ = attention_inputs_operator(*tensors, text, list(shape), dtype, list(parts), list(scalings))
    v = _in_heads(spec, projected, _kept_rows(_rows(spec, parts), tensors.q_norm), shape)[-1]
    return q, k, v.transpose(1, 2), tensors.x


# ---------------------------------------------------------------- the MLP
def _groups(parts: Sequence, scalings: Sequence[float], dtype: torch.dtype, has_o: bool) -> List[Tuple[Group, Sequence]]:
    """The groups of `norm_mlp`'s projections, each with its tensors."""
    found, start = [], 0
    projections = with_numbers(parts, scalings)
    for count in ((1,) if has_o else ()) + (len(projections) - 1 - has_o, 1):
        end = start + count
        found.append((Group(projections[start:end], dtype), parts[SIZE * start : SIZE * end]))
        start = end
    return found


def _mlp(
    x: torch.Tensor,
    attended: Optional[torch.Tensor],
    after: Optional[torch.Tensor],
    before: Optional[torch.Tensor],
    behind: Optional[torch.Tensor],
    spec: str,
    dtype: torch.dtype,
    parts: List[Optional[torch.Tensor]],
    scalings: List[float],
    whole,
) -> List[torch.Tensor]:
    """The result, gate and up [tokens, both], what of `MLPSaved` there is beside them, in its order, and `all_made`."""
    has_o, tensors = attended is not None, OutputTensors(x, attended, after, before, behind)
    groups = _groups(parts, scalings, dtype, has_o)
    found = of_second_half(groups, whole)
    both = torch.empty((x.numel() // x.shape[-1], sum(groups[-2][0].rows)), dtype=dtype, device=x.device)
    out, saved = mlp_forward(outputs_of(spec), tensors, OutputGroups(*three_of(found)), both)
    kept = _there(saved.total if has_o else None, saved.o, saved.rstd, saved.o_rstd, saved.branch, saved.branch_rstd)
    return [out, both, *kept, *all_made(found)]


def _mlp_kept(tensors: OutputTensors, found: Sequence[torch.Tensor]) -> Tuple[MLPSaved, Sequence[torch.Tensor]]:
    """(`MLPSaved` without gate and up, what was made) of what the operator returns after `both`."""
    left, has_o, has_after = list(found), tensors.attended is not None, tensors.after is not None and tensors.attended is not None

    def next_of(there: bool):
        return left.pop(0) if there else None

    total = left.pop(0) if has_o else tensors.x.reshape(-1, tensors.x.shape[-1])
    o, rstd, o_rstd = next_of(has_after), next_of(tensors.before is not None), next_of(has_after)
    branch, branch_rstd = next_of(tensors.behind is not None), next_of(tensors.behind is not None)
    return MLPSaved(total, o, rstd, o_rstd, None, None, branch, branch_rstd), left


def _fake_mlp(x, attended, after, before, behind, spec, dtype, parts, scalings):
    hidden, has_o = x.shape[-1], attended is not None
    tokens = x.numel() // hidden
    groups = _groups(parts, scalings, dtype, has_o)
    made = [shape for group, of_group in groups for shape in group.shapes_made(of_group, tokens)]
    both = x.new_empty((tokens, sum(groups[-2][0].rows)), dtype=dtype)
    kept = [
        x.new_empty((tokens, hidden)) if has_o else None,
        x.new_empty((tokens, hidden), dtype=dtype) if has_o and after is not None else None,
        None if before is None else _rstd_of(x, tokens),
        _rstd_of(x, tokens) if has_o and after is not None else None,
        None if behind is None else x.new_empty((tokens, hidden), dtype=dtype),
        None if behind is None else _rstd_of(x, tokens),
    ]
    return [x.new_empty(x.shape), both, *_there(*kept), *(x.new_empty(shape, dtype=dtype) for shape in made)]


def _mlp_gradients(
    dout: torch.Tensor,
    x: Optional[torch.Tensor],
    attended: Optional[torch.Tensor],
    after: Optional[torch.Tensor],
    before: Optional[torch.Tensor],
    behind: Optional[torch.Tensor],
    spec: str,
    dtype: torch.dtype,
    parts: List[Optional[torch.Tensor]],
    scalings: List[float],
    both: Optional[torch.Tensor],
    kept: List[torch.Tensor],
    needs: List[bool],
    whole,
) -> List[torch.Tensor]:
    """The needed gradients of `OutputTensors` and the projections' tensors; that of x in dout's shape. x: where there is
    no `attended`; both: None where gate and up are to be made again."""
    tensors = OutputTensors(dout if x is None else x, attended, after, before, behind)  # x is read only without `attended`
    saved, made = _mlp_kept(tensors, kept)
    groups = _groups(parts, scalings, dtype, attended is not None)
    found = of_second_half_loaded(groups, made, whole)
    gate = up = again = None
    if both is None:
        again = torch.empty((saved.total.shape[0], sum(groups[-2][0].rows)), dtype=dtype, device=saved.total.device)
    else:
        gate, up = both.chunk(2, 1)
    need, of_parts = OutputNeeds(*needs[: len(tensors)]), needs_in_parts(needs[len(tensors) :])
    left = iter(of_parts)
    of_groups = GroupNeeds(*three_of([[next(left) for _ in group.rows] for group, _ in groups]))
    saved, projected = saved._replace(gate=gate, up=up), OutputGroups(*three_of(found))
    gradients = mlp_backward(outputs_of(spec), dout, tensors, saved, projected, need, of_groups, again)
    dx = None if gradients.x is None else gradients.x.view(dout.shape)
    return _needed((dx, *gradients[1:-1], *flat_parts(*gradients.projections)))


def _fake_mlp_gradients(dout, x, attended, after, before, behind, spec, dtype, parts, *rest):
    wanted = dout, attended, after, before, behind, *parts
    return [tensor.new_empty(tensor.shape) for tensor, need in zip(wanted, rest[-1]) if need]


MLP = packed_operator("norm_mlp", _mlp, _fake_mlp)
MLP_GRADIENTS = packed_operator("norm_mlp_backward", _mlp_gradients, _fake_mlp_gradients)
mlp_operator, mlp_gradients_operator = MLP.call, MLP_GRADIENTS.call


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, text, dtype, scalings, needs, recompute, x, attended, after, before, behind, *parts):
        tensors = attended, after, before, behind
        out, both, *kept = mlp_operator(x, *tensors, text, dtype, list(parts), list(scalings))
        ctx.save_for_backward(x if attended is None else None, *tensors, *parts, None if recompute else both, *kept)
        ctx.text, ctx.dtype, ctx.scalings, ctx.needs, ctx.count = text, dtype, scalings, needs, len(parts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, attended, after, before, behind, *saved = ctx.saved_tensors
        parts, (both, *kept) = saved[: ctx.count], saved[ctx.count :]
        found = mlp_gradients_operator(
            *(dout, x, attended, after, before, behind, ctx.text, ctx.dtype, list(parts), list(ctx.scalings), both),
            *(list(kept), list(ctx.needs)),
        )
        return (None, None, None, None, None, *_place(found, ctx.needs))


def norm_mlp(spec: Outputs, tensors: OutputTensors, dtype: torch.dtype, parts: list, scalings: list, recompute: bool) -> torch.Tensor:
    """`nodes.norm_mlp` in a graph. parts, scalings: of the projections, which have no dropout."""
    text, needs = encoded(spec), _needs(*tensors, *parts)
    if any(needs):
        return _MLP.apply(text, dtype, tuple(scalings), needs, bool(recompute), *tensors, *parts)
    return mlp_operator(*tensors, text, dtype, list(parts), list(scalings))[0]
