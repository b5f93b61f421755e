"""What the two autograd nodes of a decoder layer compute forward and backward, without autograd: `nodes` makes nodes of it, `traced`
operators for a compiler, and `sparse` puts experts in the MLP's place.

What is saved is small: the residual stream, one number a row, and the projections' outputs. The normalised input and act(gate) * up are
computed again in the backward pass, bit for bit. Input gradients of several projections are added by the GEMMs, or by one GEMM where the
weights lie side by side in memory (`pack`), and the residual's gradient by the RMSNorm's backward kernel.
"""

from functools import partial
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ..ops.common import always
from ..ops.swiglu import ONE_GEMM_FORWARD
from .activation import gated_backward_in_place, gated_forward
from .heads import Heads, SavedHeads, heads_backward, heads_forward
from .norms import add_norm_backward, add_norm_forward, norm_add_forward, norm_add_norm_forward, norm_backward, norm_forward, normed_again
from .projection import PartNeeds, Parts
from .projections import NormedInput, Projections, normed_input_backward
from .spec import Inputs, Outputs

Optionals = Optional[torch.Tensor]


def _wanted(need: bool, gradient: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return gradient if need else None


# ---------------------------------------------------------------- in front of attention
class InputTensors(NamedTuple):
    """What the first node reads beside its projections: x [tokens, hidden]; the norms' weights, None for those that are absent; the angles,
    None where nothing is turned."""

    x: torch.Tensor
    norm: Optionals
    q_norm: Optionals
    k_norm: Optionals
    cos: Optionals
    sin: Optionals


class InputNeeds(NamedTuple):
    """Which of `InputTensors` need a gradient."""

    x: bool
    norm: bool
    q_norm: bool
    k_norm: bool
    cos: bool
    sin: bool


class InputResults(NamedTuple):
    """q_out, k_out, v: as attention takes them, [batch, heads, tokens, head_dim]. q, k: as projected, [batch, tokens, heads, head_dim],
    None where the backward pass does not need them. rstd, q_rstd, k_rstd: of the norms, None likewise."""

    q_out: torch.Tensor
    k_out: torch.Tensor
    v: torch.Tensor
    q: Optionals
    k: Optionals
    rstd: Optionals
    q_rstd: Optionals
    k_rstd: Optionals


class InputSaved(NamedTuple):
    """What of `InputResults` the backward pass needs."""

    q: Optionals
    k: Optionals
    rstd: Optionals
    q_rstd: Optionals
    k_rstd: Optionals


class InputGradients(NamedTuple):
    x: Optionals
    norm: Optionals
    q_norm: Optionals
    k_norm: Optionals
    projections: List[Parts]


def _in_heads(spec: Inputs, projected: Sequence[torch.Tensor], shape: Sequence[int]) -> List[torch.Tensor]:
    """q, k and v [batch, tokens, heads, head_dim] of what was projected, by three projections or a packed one."""
    if len(projected) == 1:
        projected = projected[0].split(spec.rows, 1)
    return [p.view(*shape, p.shape[1] // spec.head_dim, spec.head_dim) for p in projected]


def inputs_forward(spec: Inputs, tensors: InputTensors, shape: Sequence[int], group: Projections, out: Optionals = None) -> InputResults:
    """shape: (batch, tokens of one sequence). out: as of `Projections.forward`."""
    x, norm, q_norm, k_norm, cos, sin = tensors
    rstd: Optionals
    y, rstd = (x.to(group.group.dtype), None) if norm is None else norm_forward(spec.norm, x, norm, group.group.dtype)
    # Without norms q and k as projected are not needed any more; v, a part of what they are in, would keep them.
    in_one = q_norm is not None or x.shape[0] <= ONE_GEMM_FORWARD
    projected = group.forward(y, in_one, out=out)
    del y
    q: Optionals
    k: Optionals
    q, k, v = _in_heads(spec, projected, shape)
    q_out, k_out, q_rstd, k_rstd = heads_forward(spec, Heads(q, k, q_norm, k_norm, cos, sin))
    if q_norm is None:
        if out is None and len(projected) == 1:
            v = v.contiguous()
        q = k = None
    return InputResults(q_out, k_out, v.transpose(1, 2), q, k, rstd, q_rstd, k_rstd)


def inputs_backward(spec: Inputs, grads: Sequence[torch.Tensor], tensors: InputTensors, saved: InputSaved, group: Projections,
                    need: InputNeeds, needs: Sequence[PartNeeds]) -> InputGradients:
    """The gradients, None for those that are not needed. grads: of q_out, k_out, v and the residual; need: of the tensors, needs: of the
    projections'."""
    x, norm, q_norm, k_norm, cos, sin = tensors
    dq_out, dk_out, dv, dresidual = grads
    tokens, rows, dv = x.shape[0], spec.rows or group.group.rows, dv.transpose(1, 2)
    heads, rstds = SavedHeads(saved.q, saved.k, q_norm, k_norm, cos, sin), (saved.q_rstd, saved.k_rstd)
    need_heads, packed = (need.q_norm, need.k_norm), spec.rows is not None
    together = None
    if group.whole is None and not packed:
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
    normed = NormedInput(spec.norm, x, norm, saved.rstd, dresidual)
    dx, dnorm, dprojections = normed_input_backward(grads, normed, group, (need.x, need.norm), needs, together)
    return InputGradients(dx, dnorm, _wanted(need.q_norm, dq_norm), _wanted(need.k_norm, dk_norm), dprojections)


# ---------------------------------------------------------------- after attention: the first residual connection
class OutputTensors(NamedTuple):
    """What the second node reads beside its projections: x [..., hidden], flat in a backward pass, where it is the residual stream after
    attention; attention's output [tokens, features] or [batch, tokens, heads, head_dim], None where x has it already; the norms' weights,
    None for those that are absent."""

    x: torch.Tensor
    attended: Optionals
    after: Optionals
    before: Optionals
    behind: Optionals


class OutputNeeds(NamedTuple):
    """Which of `OutputTensors` need a gradient."""

    x: bool
    attended: bool
    after: bool
    before: bool
    behind: bool


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


def flat_heads(attended: torch.Tensor) -> torch.Tensor:
    """Attention's output as [tokens, features]."""
    return attended if attended.dim() == 2 else attended.flatten(0, 1).flatten(1)


def _scaled(branch: torch.Tensor, multiplier: float) -> torch.Tensor:
    return branch if multiplier == 1 else branch * multiplier


def join_forward(spec: Outputs, tensors: OutputTensors, o: Optional[Projections], dtype: torch.dtype) -> Joined:
    """Attention's branch, added to the residual stream, and the norm of the sum. dtype: of the products."""
    x, norm = tensors.x.reshape(-1, tensors.x.shape[-1]), tensors.before
    branch = kept = o_rstd = rstd = None
    if o is not None and tensors.attended is not None:
        (branch,) = o.forward(flat_heads(tensors.attended))
        if tensors.after is not None and spec.multiplier == 1 and (norm is None or spec.after == spec.before):
            if norm is None:
                total, o_rstd = norm_add_forward(spec.after, branch, x, tensors.after)
                return Joined(total, total.to(dtype), branch, None, o_rstd)
            total, y, o_rstd, rstd = norm_add_norm_forward(spec.after, branch, x, tensors.after, norm)
            return Joined(total, y, branch, rstd, o_rstd)
        if tensors.after is not None:
            kept = branch
            branch, o_rstd = norm_forward(spec.after, kept, tensors.after, dtype)
    if branch is not None and norm is not None:  # a GEMM that adds would first copy what it adds to
        total, y, rstd = add_norm_forward(spec.before, branch, x, norm, spec.multiplier)
        return Joined(total, y, kept, rstd, o_rstd)
    total = x if branch is None else torch.add(x, branch, alpha=spec.multiplier)
    if norm is None:
        y = total.to(dtype)
    else:
        y, rstd = norm_forward(spec.before, total, norm, dtype)
    return Joined(total, y, kept, rstd, o_rstd)


def join_backward(spec: Outputs, dy: torch.Tensor, dtotal: torch.Tensor, tensors: OutputTensors, joined: Joined, o: Optional[Projections],
                  need: OutputNeeds, need_o: Sequence[PartNeeds]) -> JoinedGradients:
    """dy: of `Joined.y`; dtotal: what else arrives at the residual stream, flat. joined: y is not read. None for what is not needed."""
    dbefore = dafter = dattended = None
    do = [Parts()] * len(need_o)
    if tensors.before is None or joined.rstd is None:
        dtotal = dtotal + dy
    else:
        dtotal, dbefore = add_norm_backward(spec.before, dy, dtotal, joined.total, tensors.before, joined.rstd, need.before)
    if o is not None and tensors.attended is not None and (need.attended or need.after or _any(need_o)):
        branch = _scaled(dtotal, spec.multiplier).to(o.group.dtype)
        if tensors.after is not None and joined.o is not None and joined.o_rstd is not None:
            branch, dafter = norm_backward(spec.after, branch, joined.o, tensors.after, joined.o_rstd, need.after)
        dlow = o.low_gradient((branch,))
        do = o.gradients((branch,), dlow, always(flat_heads(tensors.attended)), need_o)
        dattended = o.input_gradient((branch,), dlow).view(tensors.attended.shape) if need.attended else None
    return JoinedGradients(_wanted(need.x, dtotal), dattended, _wanted(need.after, dafter), _wanted(need.before, dbefore), do)


def _any(needs: Sequence[PartNeeds]) -> bool:
    return any(any(need) for need in needs)


def need_join(need: OutputNeeds, need_o: Sequence[PartNeeds]) -> bool:
    """Tells whether anything in front of the MLP or the experts needs a gradient."""
    return bool(need.x or need.attended or need.after or need.before or _any(need_o))


# ---------------------------------------------------------------- the MLP
class OutputGroups(NamedTuple):
    """The projections of the second node by what they read: attention's output, where it is given, the norm's, the activation's."""

    o: Optional[Projections]
    inner: Projections
    down: Projections


class GroupNeeds(NamedTuple):
    """Which tensors of `OutputGroups` need a gradient."""

    o: Optional[Sequence[PartNeeds]]
    inner: Sequence[PartNeeds]
    down: Sequence[PartNeeds]


class GroupGradients(NamedTuple):
    """The gradients of the tensors of `OutputGroups`; o's are empty where there is none."""

    o: List[Parts]
    inner: List[Parts]
    down: List[Parts]


def three_of(found: Sequence) -> Sequence:
    """Three of two or three groups: None in front where there is no o."""
    return found if len(found) == 3 else (None, *found)


class MLPResults(NamedTuple):
    """out: the result. total, o, rstd, o_rstd: of `Joined`, total None where it is x. gate, up: None where they are
    made again. branch: the MLP's, before its norm; branch_rstd: that norm's; None where there is none."""

    out: torch.Tensor
    total: Optionals
    o: Optionals
    rstd: Optionals
    o_rstd: Optionals
    gate: Optionals
    up: Optionals
    branch: Optionals
    branch_rstd: Optionals


class MLPSaved(NamedTuple):
    """What of `MLPResults` the backward pass needs; total in any case."""

    total: torch.Tensor
    o: Optionals
    rstd: Optionals
    o_rstd: Optionals
    gate: Optionals
    up: Optionals
    branch: Optionals
    branch_rstd: Optionals


class OutputGradients(NamedTuple):
    x: Optionals
    attended: Optionals
    after: Optionals
    before: Optionals
    behind: Optionals
    projections: GroupGradients


def _gate_and_up(products: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
    gate, up = products if len(products) == 2 else products[0].chunk(2, 1)
    return gate, up


def mlp_forward(spec: Outputs, tensors: OutputTensors, groups: OutputGroups, both: Optionals = None) -> MLPResults:
    """both: [tokens, gate's and up's rows], where these products go."""
    inner, down = groups.inner, groups.down
    dtype = inner.group.dtype
    joined = join_forward(spec, tensors, groups.o, dtype)
    total = joined.total
    gate, up = _gate_and_up(inner.forward(joined.y, total.shape[0] <= ONE_GEMM_FORWARD, out=both))
    total, _, o, rstd, o_rstd = joined
    del joined
    hidden, behind, branch_rstd = gated_forward(gate, up, spec.activation), tensors.behind, None
    branch, shape = None, tensors.x.shape
    if behind is not None and spec.multiplier == 1:
        (branch,) = down.forward(hidden)
        out, branch_rstd = norm_add_forward(spec.behind, branch, total.view(shape), behind)
        return MLPResults(out, None if groups.o is None else total, o, rstd, o_rstd, gate, up, branch, branch_rstd)
    # Not a view of the flat result: FSDP's hooks warn of a module that returns a view.
    out = torch.empty(shape, dtype=total.dtype, device=total.device)
    if behind is None and spec.multiplier == 1 and total.dtype == dtype:
        down.forward(hidden, onto=total, out=out.view(total.shape))
    else:
        (added,) = down.forward(hidden)
        if behind is not None:
            branch = added
            added, branch_rstd = norm_forward(spec.behind, branch, behind, dtype)
        torch.add(total, added, alpha=spec.multiplier, out=out.view(total.shape))
    return MLPResults(out, None if groups.o is None else total, o, rstd, o_rstd, gate, up, branch, branch_rstd)


def mlp_backward(spec: Outputs, dout: torch.Tensor, tensors: OutputTensors, saved: MLPSaved, groups: OutputGroups, need: OutputNeeds,
                 needs: GroupNeeds, both: Optionals = None) -> OutputGradients:
    """The gradients, None for those that are not needed; that of x is flat. both: where gate and up are made again, as of
    `mlp_forward`."""
    inner, down, total = groups.inner, groups.down, saved.total
    dtype, dout = inner.group.dtype, dout.reshape(total.shape)
    normed: Callable[[], torch.Tensor] = partial(normed_again, spec.before, total, tensors.before, saved.rstd, dtype)
    gate, up = saved.gate, saved.up
    if gate is None or up is None:
        normed = always(normed())
        gate, up = _gate_and_up(inner.again(normed(), total.shape[0] <= ONE_GEMM_FORWARD, out=both))
    need_total = need_join(need, needs.o or ())
    dbranch, dbehind = _scaled(dout, spec.multiplier).to(dtype), None
    if tensors.behind is not None and saved.branch is not None and saved.branch_rstd is not None:
        dbranch, dbehind = norm_backward(spec.behind, dbranch, saved.branch, tensors.behind, saved.branch_rstd, need.behind)
    dlow = down.low_gradient((dbranch,))
    found = GroupGradients([Parts()] * len(needs.o or ()), [Parts()] * len(needs.inner), [])
    need_inner = need_total or _any(needs.inner)
    if need_inner:
        hidden = down.input_gradient((dbranch,), dlow)  # its gradient, and after the next line itself
        together, dgate, dup = gated_backward_in_place(hidden, gate, up, spec.activation)
    else:
        hidden = gated_forward(gate, up, spec.activation)
    found = found._replace(down=down.gradients((dbranch,), dlow, always(hidden), needs.down))
    del hidden
    join = JoinedGradients(None, None, None, None, found.o)
    if need_inner:
        grads = (dgate, dup) if len(needs.inner) == 2 else (together,)
        dlow = inner.low_gradient(grads)
        found = found._replace(inner=inner.gradients(grads, dlow, normed, needs.inner))
    if need_total:
        dy = inner.input_gradient(grads, dlow, together)
        joined = Joined(total, total, saved.o, saved.rstd, saved.o_rstd)
        join = join_backward(spec, dy, dout, tensors, joined, groups.o, need, needs.o or ())
    return OutputGradients(*join[:-1], _wanted(need.behind, dbehind), found._replace(o=join.o))
