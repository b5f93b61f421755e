"""The MLP of a decoder layer with both residual connections, forward and backward: what the layer's second autograd node computes.

The forward pass has its last product in a function of its own, `mlp_finish`, because the backward pass does not read it unless a norm
follows.
"""

from functools import partial
from typing import Any, Callable, NamedTuple, Sequence, Tuple

import torch

from ..ops.common import always
from ..ops.quantised import Operand
from ..ops.swiglu import are_few
from .activation import gated_backward_in_place, gated_backward_quantised, gated_forward, gated_quantised
from .norms import norm_add_forward, norm_backward, norm_forward, normed_again
from .projection import Parts
from .projections import Projections
from .spec import Outputs
from .steps import (
    Joined,
    JoinedGradients,
    Optionals,
    OutputTensors,
    join_backward,
    join_forward,
    need_join,
    needs_any,
    scaled,
    wanted,
)


class OutputGroups(NamedTuple):
    """One thing for each group of the second node's projections: those that read attention's output, where it is given, the norm's, and
    the activation's. It is `Projections`, or a list for each of these: of `PartNeeds`, or of the gradients as `Parts`."""

    o: Any
    inner: Any
    down: Any


class MLPSaved(NamedTuple):
    """The tensors that the backward pass reads.

    total: the residual stream after attention, flattened to rows; o, rstd, o_rstd: as in `Joined`; gate, up: None if the backward pass
    recomputes them; branch: the MLP's output before the norm behind it, and branch_rstd: that norm's, both None without such a norm; made:
    `all_made` of the projections.
    """

    total: torch.Tensor
    o: Optionals
    rstd: Optionals
    o_rstd: Optionals
    gate: Optionals
    up: Optionals
    branch: Optionals
    branch_rstd: Optionals
    made: Sequence[torch.Tensor] = ()


def _gate_and_up(products: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
    gate, up = products if len(products) == 2 else products[0].chunk(2, 1)
    return gate, up


def mlp_start(spec: Outputs, tensors: OutputTensors, groups: OutputGroups, both: Optionals = None) -> Tuple[torch.Tensor, MLPSaved]:
    """The input of the MLP's last product, in codes where nothing else reads it, and what is saved, without the branch.

    both: [tokens, gate's and up's rows], where these products go.
    """
    inner = groups.inner
    total, y, o, rstd, o_rstd = join_forward(spec, tensors, groups.o, inner.group.dtype)
    gate, up = _gate_and_up(inner.forward(y, are_few(total.shape[0]), out=both))
    del y
    if groups.down.reads_codes:
        eight = gated_quantised(gate, up, spec.activation)
        groups.down.begin(eight)
        hidden = eight.codes
    else:
        hidden = gated_forward(gate, up, spec.activation)
        groups.down.begin(hidden)
    return hidden, MLPSaved(total, o, rstd, o_rstd, gate, up, None, None)


def add_branch(
    spec: Outputs, shape: Sequence[int], behind: Optionals, total: torch.Tensor, branch: torch.Tensor
) -> Tuple[torch.Tensor, Optionals, Optionals]:
    """The result, and what the backward pass reads: the branch and the rstd of its norm, None where it has no norm.

    shape: of the result; behind: the weight of the norm; total, branch: [tokens, hidden].
    """
    if behind is not None and spec.multiplier == 1:
        out, rstd = norm_add_forward(spec.behind, branch, total.view(shape), behind)
        return out, branch, rstd
    kept: Optionals = None
    kept_rstd: Optionals = None
    if behind is not None:
        kept = branch
        branch, kept_rstd = norm_forward(spec.behind, kept, behind, branch.dtype)
    # Not a view of the flat result: FSDP's hooks warn of a module that returns a view.
    out = torch.empty(shape, dtype=total.dtype, device=total.device)
    torch.add(total, branch, alpha=spec.multiplier, out=out.view(total.shape))
    return out, kept, kept_rstd


def add_branch_backward(
    spec: Outputs, dout: torch.Tensor, behind: Optionals, branch: Optionals, branch_rstd: Optionals, dtype: torch.dtype, need: bool
) -> Tuple[torch.Tensor, Optionals]:
    """The gradients of the branch, in a dtype, and of its norm's weight. branch, branch_rstd: of `add_branch`; need: of the weight."""
    dbranch = scaled(dout, spec.multiplier).to(dtype)
    if behind is None or branch is None or branch_rstd is None:
        return dbranch, None
    dbranch, dbehind = norm_backward(spec.behind, dbranch, branch, behind, branch_rstd, need)
    return dbranch, wanted(need, dbehind)


def mlp_finish(
    spec: Outputs, shape: Sequence[int], behind: Optionals, total: torch.Tensor, hidden: torch.Tensor, down: Projections
) -> Tuple[torch.Tensor, Optionals, Optionals]:
    """The result, and `branch` and `branch_rstd` of `MLPSaved`.

    shape: of the result; behind: the weight of the branch's norm; total, hidden: of `mlp_start`; down: begun.
    """
    if behind is None and spec.multiplier == 1 and total.dtype == down.group.dtype and not down.group.eight:  # those add to nothing
        out = torch.empty(shape, dtype=total.dtype, device=total.device)
        down.again(hidden, onto=total, out=out.view(total.shape))
        return out, None, None
    (branch,) = down.again(hidden)
    return add_branch(spec, shape, behind, total, branch)


def mlp_forward(spec: Outputs, tensors: OutputTensors, groups: OutputGroups, both: Optionals = None) -> Tuple[torch.Tensor, MLPSaved]:
    """The result and what is saved. both: as of `mlp_start`."""
    hidden, saved = mlp_start(spec, tensors, groups, both)
    out, branch, branch_rstd = mlp_finish(spec, tensors.x.shape, tensors.behind, saved.total, hidden, groups.down)
    return out, saved._replace(branch=branch, branch_rstd=branch_rstd)


def mlp_backward(spec: Outputs, dout: torch.Tensor, tensors: OutputTensors, saved: MLPSaved, groups: OutputGroups, need: Any,
                 needs: OutputGroups, both: Optionals = None) -> Tuple[OutputTensors, OutputGroups]:
    """The gradients, None for those that are not needed; that of x is flat. need, needs: whether each needs one. both: where gate and up
    are recomputed, as of `mlp_forward`."""
    inner, down, total = groups.inner, groups.down, saved.total
    dtype, dout = inner.group.dtype, dout.reshape(total.shape)
    normed: Callable[[], torch.Tensor] = partial(normed_again, spec.before, total, tensors.before, saved.rstd, dtype)
    gate, up = saved.gate, saved.up
    if gate is None or up is None:
        normed = always(normed())
        gate, up = _gate_and_up(inner.again(normed(), are_few(total.shape[0]), out=both))
    need_total = need_join(need, needs.o or ())
    dbranch, dbehind = add_branch_backward(spec, dout, tensors.behind, saved.branch, saved.branch_rstd, dtype, need.behind)
    dlow = down.low_gradient((dbranch,))
    found = OutputGroups([Parts()] * len(needs.o or ()), [Parts()] * len(needs.inner), [])
    need_inner = need_total or needs_any(needs.inner)
    together: Operand
    if need_inner:
        follow = any(each.weight for each in needs.down)
        hidden = down.input_gradient((dbranch,), dlow, weights_follow=follow)  # its gradient, and after the next lines itself
        if inner.reads_codes and not any(each.bias for each in needs.inner):
            together = gated_backward_quantised(hidden, gate, up, spec.activation)
            grads = together.codes.split(inner.group.rows, 1)
        else:
            together, *pair = gated_backward_in_place(hidden, gate, up, spec.activation)
            grads = pair if len(needs.inner) == 2 else (together,)
    else:
        hidden = gated_forward(gate, up, spec.activation)
    found = found._replace(down=down.gradients((dbranch,), dlow, always(hidden), needs.down))
    del hidden
    join = JoinedGradients(None, None, None, None, found.o)
    if need_inner:
        dlow = inner.low_gradient(grads)
        found = found._replace(inner=inner.gradients(grads, dlow, normed, needs.inner, together))
    if need_total:
        dy = inner.input_gradient(grads, dlow, together)
        joined = Joined(total, total, saved.o, saved.rstd, saved.o_rstd)
        join = join_backward(spec, dy, dout, tensors, joined, groups.o, need, needs.o or ())
    return OutputTensors._make([*join[:-1], dbehind]), found._replace(o=join.o)
