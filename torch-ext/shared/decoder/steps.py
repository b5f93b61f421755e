"""The computations behind a decoder layer's two autograd nodes, forward and backward, as plain functions, of which `nodes` makes nodes. The
MLP is in `mlp_steps`, and the experts are in `sparse`.

What is saved is small: the residual stream, one number a row, and the projections' outputs. The normalised input and act(gate) * up are
computed again in the backward pass, bit for bit. Input gradients of several projections are added by the GEMMs, or by one GEMM where the
weights lie side by side in memory (`pack`), and the residual's gradient by the RMSNorm's backward kernel.
"""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ..ops.autograd import always
from ..ops.swiglu import are_few
from .heads import Heads, heads_backward, heads_forward
from .norms import add_norm_backward, add_norm_forward, norm_add_forward, norm_add_norm_forward, norm_backward, norm_forward
from .projection import PartNeeds, Parts
from .projections import NormedInput, NormedInputGradients, Projections, normed_input_backward
from .spec import Inputs, Outputs, is_there

__all__ = [
    "InputSaved", "InputTensors", "Joined", "JoinedGradients", "Optionals", "OutputTensors", "branch_beside", "flat_heads", "in_heads",
    "inputs_backward", "inputs_forward", "join_backward", "join_forward", "need_join", "needs_any", "scaled", "shaped", "wanted",
]  # fmt: skip

Optionals = Optional[torch.Tensor]


def shaped(flat: Optionals, like: torch.Tensor) -> torch.Tensor:
    """A gradient, or None, in the shape of another tensor."""
    found: Any = None if flat is None else flat.view(like.shape)
    return found


def wanted(need: bool, gradient: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return gradient if need else None


# ---------------------------------------------------------------- in front of attention
class InputTensors(NamedTuple):
    """What the first node reads beside its projections: x [tokens, hidden]; the norms' weights, None for those that are absent; the angles,
    None where nothing is turned; and the bias of `norm`, which only a LayerNorm may have."""

    x: torch.Tensor
    norm: Optionals
    q_norm: Optionals
    k_norm: Optionals
    cos: Optionals
    sin: Optionals
    norm_bias: Optionals = None


class InputSaved(NamedTuple):
    """q, k: as projected, [batch, tokens, heads, head_dim], None where the backward pass does not need them. rstd, q_rstd, k_rstd: of the
    norms, None likewise. made: `Projections.made`."""

    q: Optionals
    k: Optionals
    rstd: Optionals
    q_rstd: Optionals
    k_rstd: Optionals
    made: Sequence[torch.Tensor] = ()


def in_heads(spec: Inputs, projected: Sequence[torch.Tensor], shape: Sequence[int]) -> List[torch.Tensor]:
    """q, k and v [batch, tokens, heads, head_dim] of what was projected, by three projections or a packed one."""
    if len(projected) == 1:
        projected = projected[0].split(spec.rows, 1)
    return [p.view(*shape, p.shape[1] // spec.head_dim, spec.head_dim) for p in projected]


def inputs_forward(
    spec: Inputs, tensors: InputTensors, shape: Sequence[int], group: Projections, out: Optionals = None
) -> Tuple[List[torch.Tensor], InputSaved]:
    """(q, k and v as attention takes them, [batch, heads, tokens, head_dim]; what the backward pass reads). shape: (batch, tokens of one
    sequence). out: as of `Projections.forward`."""
    x, norm, q_norm, k_norm, cos, sin, bias = tensors
    rstd: Optionals
    y, rstd = norm_forward(spec.norm, x, norm, group.group.dtype, bias) if is_there(spec.norm, norm) else (x.to(group.group.dtype), None)
    # Without norms q and k as projected are not needed any more; v, a part of what they are in, would keep them.
    in_one = q_norm is not None or are_few(x.shape[0])
    projected = group.forward(y, in_one, out=out)
    del y
    q: Optionals
    k: Optionals
    q, k, v = in_heads(spec, projected, shape)
    q_out, k_out, q_rstd, k_rstd = heads_forward(spec, Heads(q, k, q_norm, k_norm, cos, sin))
    if q_norm is None:
        if out is None and len(projected) == 1:
            v = v.contiguous()
        q = k = None
    return [q_out, k_out, v.transpose(1, 2)], InputSaved(q, k, rstd, q_rstd, k_rstd, group.made())


def inputs_backward(spec: Inputs, grads: Sequence[torch.Tensor], tensors: InputTensors, saved: InputSaved, group: Projections,
                    need: Any, needs: Sequence[PartNeeds]) -> Tuple[InputTensors, List[Parts]]:
    """The gradients, None for those that are not needed. grads: of q_out, k_out, v and the residual; need: whether each of the tensors
    needs one; needs: the projections'."""
    x, norm, q_norm, k_norm, cos, sin, bias = tensors
    dq_out, dk_out, dv, dresidual = grads
    tokens, rows, dv = x.shape[0], spec.rows or group.group.rows, dv.transpose(1, 2)
    heads, rstds = Heads(saved.q, saved.k, q_norm, k_norm, cos, sin), (saved.q_rstd, saved.k_rstd)
    need_heads, packed = (need.q_norm, need.k_norm), spec.rows is not None
    together = None
    if group.whole is None and not packed and not group.group.eight:
        dq, dk, dq_norm, dk_norm = heads_backward(spec, dq_out, dk_out, heads, rstds, need_heads)
        grads = [grad.reshape(tokens, count) for grad, count in zip((dq, dk, dv), rows)]
    else:
        together = torch.empty((tokens, sum(rows)), dtype=group.group.dtype, device=x.device)
        grads = together.split(rows, 1)
        shapes = (t.shape for t in (dq_out.transpose(1, 2), dk_out.transpose(1, 2), dv))
        dq, dk, dv_place = [grad.view(shape) for grad, shape in zip(grads, shapes)]
        dv_place.copy_(dv)
        _, _, dq_norm, dk_norm = heads_backward(spec, dq_out, dk_out, heads, rstds, need_heads, (dq, dk))
        grads = (together,) if packed else grads
    normed = NormedInput(spec.norm, x, norm, saved.rstd, dresidual, bias)
    of_input = NormedInputGradients(need.x, need.norm, need.norm_bias)
    dx, dnorm, dbias, dprojections = normed_input_backward(grads, normed, group, of_input, needs, together)
    found: Sequence = (dx, dnorm, wanted(need.q_norm, dq_norm), wanted(need.k_norm, dk_norm), None, None, dbias)
    return InputTensors._make(found), list(dprojections)


# ---------------------------------------------------------------- after attention: the first residual connection
class OutputTensors(NamedTuple):
    """What the second node reads beside its projections: x [..., hidden], flat in a backward pass, where it is the residual stream after
    attention; attention's output [tokens, features] or [batch, tokens, heads, head_dim], None where x has it already; the norms' weights,
    None for those that are absent; and the bias of `before`, which only a LayerNorm may have."""

    x: torch.Tensor
    attended: Optionals
    after: Optionals
    before: Optionals
    behind: Optionals
    before_bias: Optionals = None


class Joined(NamedTuple):
    """total: the residual stream after attention, flat. y: normalised, in the dtype of the products. o: attention's branch before its
    norm, None where there is none. rstd, o_rstd: of the norms."""

    total: torch.Tensor
    y: torch.Tensor
    o: Optionals
    rstd: Optionals
    o_rstd: Optionals


class JoinedGradients(NamedTuple):
    """total: of the residual stream in front of the branch."""

    total: Optionals
    attended: Optionals
    after: Optionals
    before: Optionals
    o: List[Parts]
    before_bias: Optionals = None


def flat_heads(attended: torch.Tensor) -> torch.Tensor:
    """Attention's output as [tokens, features]."""
    return attended if attended.dim() == 2 else attended.flatten(0, 1).flatten(1)


def scaled(branch: torch.Tensor, multiplier: float) -> torch.Tensor:
    return branch if multiplier == 1 else branch * multiplier


def join_forward(spec: Outputs, tensors: OutputTensors, o: Optional[Projections], dtype: torch.dtype) -> Joined:
    """Attention's branch, added to the residual stream, and the norm of the sum. Of an MLP beside attention that branch only begins
    (`branch_beside`), and the norm is of the stream itself. dtype: of the products."""
    x, norm, bias = tensors.x.reshape(-1, tensors.x.shape[-1]), tensors.before, tensors.before_bias
    branch = kept = o_rstd = rstd = None
    normed = is_there(spec.before, norm)
    if o is not None and tensors.attended is not None and spec.parallel:
        o.begin(flat_heads(tensors.attended))
    elif o is not None and tensors.attended is not None:
        (branch,) = o.forward(flat_heads(tensors.attended))
        if tensors.after is not None and spec.multiplier == 1 and (not normed or spec.after == spec.before):
            if norm is None:
                total, o_rstd = norm_add_forward(spec.after, branch, x, tensors.after)
                return Joined(total, total.to(dtype), branch, None, o_rstd)
            total, y, o_rstd, rstd = norm_add_norm_forward(spec.after, branch, x, tensors.after, norm)
            return Joined(total, y, branch, rstd, o_rstd)
        if tensors.after is not None:
            kept = branch
            branch, o_rstd = norm_forward(spec.after, kept, tensors.after, dtype)
    if branch is not None and normed:  # a GEMM that adds would first copy what it adds to
        total, y, rstd = add_norm_forward(spec.before, branch, x, norm, spec.multiplier, bias)
        return Joined(total, y, kept, rstd, o_rstd)
    total = x if branch is None else torch.add(x, branch, alpha=spec.multiplier)
    if normed:
        y, rstd = norm_forward(spec.before, total, norm, dtype, bias)
    else:
        y = total.to(dtype)
    return Joined(total, y, kept, rstd, o_rstd)


def branch_beside(spec: Outputs, attended: Optionals, o: Optional[Projections]) -> Optionals:
    """Returns attention's branch of an MLP beside attention, which `join_forward` began, and None of any other MLP. Both branches are added
    before they are added to the stream: their sum is small, and rounds less than the stream's."""
    if not spec.parallel or o is None or attended is None:
        return None
    return o.again(flat_heads(attended))[0]


def join_backward(spec: Outputs, dy: torch.Tensor, dtotal: torch.Tensor, tensors: OutputTensors, joined: Joined, o: Optional[Projections],
                  need: Any, need_o: Sequence[PartNeeds]) -> JoinedGradients:
    """dy: of `Joined.y`; dtotal: what else arrives at the residual stream, flat. joined: y is not read. need:
    whether each of the tensors needs a gradient; None for what does not."""
    dbefore = dbias = dafter = dattended = None
    do, dbranch = [Parts()] * len(need_o), dtotal
    if joined.rstd is None:
        dtotal = dtotal + dy
    else:
        need_norm = need.before or need.before_bias
        dtotal, dbefore, dbias = add_norm_backward(spec.before, dy, dtotal, joined.total, tensors.before, joined.rstd, need_norm)
    if o is not None and tensors.attended is not None and (need.attended or need.after or needs_any(need_o)):
        branch = scaled(dbranch if spec.parallel else dtotal, spec.multiplier).to(o.group.dtype)
        if tensors.after is not None and joined.o is not None and joined.o_rstd is not None:
            branch, dafter = norm_backward(spec.after, branch, joined.o, tensors.after, joined.o_rstd, need.after)
        dlow = o.low_gradient((branch,))
        do = o.gradients((branch,), dlow, always(flat_heads(tensors.attended)), need_o)
        dattended = o.input_gradient((branch,), dlow).view(tensors.attended.shape) if need.attended else None
    of_norms = wanted(need.after, dafter), wanted(need.before, dbefore), do, wanted(need.before_bias, dbias)
    return JoinedGradients(wanted(need.x, dtotal), dattended, *of_norms)


def needs_any(needs: Sequence[PartNeeds]) -> bool:
    return any(any(need) for need in needs)


def need_join(need: Any, need_o: Sequence[PartNeeds]) -> bool:
    """Tells whether anything in front of the MLP or the experts needs a gradient. need: whether each of the tensors does."""
    return bool(need.x or need.attended or need.after or need.before or need.before_bias or needs_any(need_o))
