"""The MLP of a decoder layer with both residual connections, forward and backward: what the layer's second autograd node computes.

The forward pass has its last product in a function of its own, `mlp_finish`, because the backward pass does not read it unless a norm
follows. In tiles of tokens, what is as wide as the intermediate layer exists for one tile at a time, in both passes: the backward pass
makes it again, and adds the gradients of weights up in fp32.
"""

import copy
from functools import partial
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ..ops.autograd import always
from ..ops.quantised import Operand
from ..ops.second_run import are_watched
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
    branch_beside,
    join_backward,
    join_forward,
    need_join,
    needs_any,
    scaled,
    wanted,
)

__all__ = [
    "MLPSaved", "OutputGroups", "Sums", "add_branch", "add_branch_backward", "gate_and_up", "mlp_backward", "mlp_finish", "mlp_forward",
    "mlp_start", "tiles_of",
]  # fmt: skip


class OutputGroups(NamedTuple):
    """One thing for each group of the second node's projections: those that read attention's output, where it is given, the norm's, and
    the activation's. It is `Projections`, or a list for each of these: of `PartNeeds`, or of the gradients as `Parts`."""

    o: Any
    inner: Any
    down: Any


class MLPSaved(NamedTuple):
    """The tensors that the backward pass reads.

    total: the residual stream that the norm read, flattened to rows; o, rstd, o_rstd: as in `Joined`; gate, up: None if the backward pass
    recomputes them, up also without a gate; branch: the MLP's output before the norm behind it, and branch_rstd: that norm's, both None
    without such a norm; made: `all_made` of the projections.
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


def gate_and_up(products: Sequence[torch.Tensor], gated: bool) -> Tuple[torch.Tensor, Optionals]:
    """gate and up of their products, which may be packed; None for up without a gate."""
    if not gated:
        return products[0], None
    gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
    return gate, up


def begin_down(spec: Outputs, down: Projections, gate: torch.Tensor, up: Optionals) -> torch.Tensor:
    """The input of the MLP's last product, which begins: in codes where that is made in eight bits."""
    if down.eight is None:
        hidden = gated_forward(gate, up, spec.activation)
        down.begin(hidden)
        return hidden
    eight, dense = gated_quantised(gate, up, spec.activation, not down.reads_codes)
    down.begin(eight, dense)
    return eight.codes


def mlp_start(spec: Outputs, tensors: OutputTensors, groups: OutputGroups, both: Optionals = None,
              tile: int = 0) -> Tuple[torch.Tensor, MLPSaved]:
    """Returns the input of the MLP's last product, begun, or in tiles that of gate and up, and what is saved, without the branch.

    both: [tokens, gate's and up's rows], where these products go. tile: of tokens, 0 for all at once.
    """
    inner = groups.inner
    total, y, o, rstd, o_rstd = join_forward(spec, tensors, groups.o, inner.group.dtype)
    if tile:
        for group in (inner, groups.down):
            if group.group.spans:  # the backward pass makes it again, a tile at a time
                group.low = y.new_empty((0, group.group.rank))
        return y, MLPSaved(total, o, rstd, o_rstd, None, None, None, None)
    gate, up = gate_and_up(inner.forward(y, are_few(total.shape[0]), out=both), spec.gated)
    del y
    return begin_down(spec, groups.down, gate, up), MLPSaved(total, o, rstd, o_rstd, gate, up, None, None)


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


def mlp_finish(spec: Outputs, tensors: OutputTensors, total: torch.Tensor, groups: OutputGroups, first: torch.Tensor,
               tile: int = 0) -> Tuple[torch.Tensor, Optionals, Optionals]:
    """Returns the result, and `branch` and `branch_rstd` of `MLPSaved`. total: the residual stream, [tokens, hidden]; first: of
    `mlp_start`, which has begun the last product."""
    down, beside = groups.down, branch_beside(spec, tensors.attended, groups.o)

    def multiply(onto: Optionals = None, out: Optionals = None) -> torch.Tensor:
        """The last product, added to `onto` and written to `out` where they are given."""
        if not tile:
            return down.again(first, onto=onto, out=out)[0]
        found = torch.empty(total.shape, dtype=down.group.dtype, device=total.device) if out is None else out
        for rows in tiles_of(total.shape[0], tile):
            mine, _, _, hidden = _hidden_of(spec, groups, first[rows])
            mine.down.again(hidden, onto=None if onto is None else onto[rows], out=found[rows])
        return found

    one = tensors.behind is None and down.is_one_product
    if one and beside is None and spec.multiplier == 1 and total.dtype == down.group.dtype:
        result = torch.empty(tensors.x.shape, dtype=total.dtype, device=total.device)
        multiply(total, result.view(total.shape))
        return result, None, None
    if one and beside is not None:
        branch = multiply(beside, torch.empty_like(beside) if are_watched() else beside)
    else:
        branch = multiply()
        branch = branch if beside is None else branch + beside
    return add_branch(spec, tensors.x.shape, tensors.behind, total, branch)


def mlp_forward(spec: Outputs, tensors: OutputTensors, groups: OutputGroups, both: Optionals = None,
                tile: int = 0) -> Tuple[torch.Tensor, MLPSaved]:
    """Returns the result and what is saved. both, tile: as of `mlp_start`."""
    first, saved = mlp_start(spec, tensors, groups, both, tile)
    out, branch, branch_rstd = mlp_finish(spec, tensors, saved.total, groups, first, tile)
    return out, saved._replace(branch=branch, branch_rstd=branch_rstd)


# ---------------------------------------------------------------- in tiles of tokens
def tiles_of(tokens: int, tile: int) -> List[slice]:
    """The tokens of each tile, the last of which may have fewer."""
    return [slice(start, min(start + tile, tokens)) for start in range(0, tokens, tile)]


def _hidden_of(spec: Outputs, groups: OutputGroups, y: torch.Tensor) -> Tuple[OutputGroups, torch.Tensor, Optionals, torch.Tensor]:
    """The groups with what they make of one tile, its gate and up, and the input of its last product. y: of the tile."""
    groups = groups._replace(inner=copy.copy(groups.inner), down=copy.copy(groups.down))
    gate, up = gate_and_up(groups.inner.forward(y, are_few(y.shape[0])), spec.gated)
    return groups, gate, up, begin_down(spec, groups.down, gate, up)


class Sums:
    """The gradients of projections, added up over tiles in fp32."""

    def __init__(self) -> None:
        self.dtypes: List[Parts] = []
        self.totals: List[Parts] = []

    def add(self, found: Sequence[Parts]) -> None:
        if not self.totals:
            self.dtypes = [Parts._make([None if part is None else part.dtype for part in parts]) for parts in found]
            self.totals = [Parts._make([None if part is None else part.float() for part in parts]) for parts in found]
            return
        for totals, parts in zip(self.totals, found):
            for total, part in zip(totals, parts):
                if total is not None and part is not None:
                    total.add_(part)

    def found(self) -> List[Parts]:
        pairs = zip(self.totals, self.dtypes)
        return [Parts._make([None if t is None else t.to(dtype) for t, dtype in zip(*pair)]) for pair in pairs]


# ---------------------------------------------------------------- backward
Inner = Tuple[Optional[torch.Tensor], List[Parts], List[Parts]]


def _inner_backward(spec: Outputs, dbranch: torch.Tensor, normed: Callable[[], torch.Tensor], gate: torch.Tensor, up: Optionals,
                    groups: OutputGroups, needs: OutputGroups, need_total: bool) -> Inner:
    """The gradients of the norm's output, None where nothing in front needs one, of the inner projections and of the last one. dbranch: of
    the last one's result; normed: returns the norm's output."""
    inner, down = groups.inner, groups.down
    dlow = down.low_gradient((dbranch,))
    found, dy = [Parts()] * len(needs.inner), None
    need_inner = need_total or needs_any(needs.inner)
    together: Operand
    if need_inner:
        follow = any(each.weight for each in needs.down)
        hidden = down.input_gradient((dbranch,), dlow, weights_follow=follow)  # its gradient, and after the next lines itself
        if inner.eight is not None:
            keep = not inner.reads_codes or any(each.bias for each in needs.inner)
            together, both = gated_backward_quantised(hidden, gate, up, spec.activation, keep)
            grads = (together.codes if both is None else both).split(inner.group.rows, 1)
        else:
            together, *pair = gated_backward_in_place(hidden, gate, up, spec.activation)
            grads = pair if len(needs.inner) == 2 else (together,)
    else:
        hidden = gated_forward(gate, up, spec.activation)
    of_down = down.gradients((dbranch,), dlow, always(hidden), needs.down)
    del hidden
    if need_inner:
        dlow = inner.low_gradient(grads)
        found = inner.gradients(grads, dlow, normed, needs.inner, together)
    if need_total:
        dy = inner.input_gradient(grads, dlow, together)
    return dy, found, of_down


def _tiled_backward(spec: Outputs, dbranch: torch.Tensor, normed: Callable[[slice], torch.Tensor], groups: OutputGroups,
                    needs: OutputGroups, need_total: bool, tile: int) -> Inner:
    """Computes the gradients of `_inner_backward` one tile at a time. normed: returns the norm's output for a range of rows."""
    tokens, of_inner, of_down = dbranch.shape[0], Sums(), Sums()
    dy: Optional[torch.Tensor] = None
    for rows in tiles_of(tokens, tile):
        y = normed(rows)
        mine, gate, up, hidden = _hidden_of(spec, groups, y)
        del hidden
        part, inner, down = _inner_backward(spec, dbranch[rows], always(y), gate, up, mine, needs, need_total)
        of_inner.add(inner)
        of_down.add(down)
        if part is not None:
            dy = part.new_empty((tokens, part.shape[1])) if dy is None else dy
            dy[rows] = part
    return dy, of_inner.found(), of_down.found()


def mlp_backward(spec: Outputs, dout: torch.Tensor, tensors: OutputTensors, saved: MLPSaved, groups: OutputGroups, need: Any,
                 needs: OutputGroups, both: Optionals = None, tile: int = 0) -> Tuple[OutputTensors, OutputGroups]:
    """The gradients, None for those that are not needed; that of x is flat. need, needs: whether each needs one. both: where gate and up
    are recomputed, as of `mlp_forward`. tile: of tokens, 0 for all at once."""
    inner, total = groups.inner, saved.total
    dtype, dout = inner.group.dtype, dout.reshape(total.shape)
    need_total = need_join(need, needs.o or ())
    dbranch, dbehind = add_branch_backward(spec, dout, tensors.behind, saved.branch, saved.branch_rstd, dtype, need.behind)
    if tile:

        def normed_rows(rows: slice) -> torch.Tensor:
            rstd = None if saved.rstd is None else saved.rstd[..., rows]
            return normed_again(spec.before, total[rows], tensors.before, rstd, dtype, tensors.before_bias)

        dy, of_inner, of_down = _tiled_backward(spec, dbranch, normed_rows, groups, needs, need_total, tile)
    else:
        of_norm = tensors.before, saved.rstd, dtype, tensors.before_bias
        normed: Callable[[], torch.Tensor] = partial(normed_again, spec.before, total, *of_norm)
        gate, up = saved.gate, saved.up
        if gate is None:
            normed = always(normed())
            gate, up = gate_and_up(inner.again(normed(), are_few(total.shape[0]), out=both), spec.gated)
        dy, of_inner, of_down = _inner_backward(spec, dbranch, normed, gate, up, groups, needs, need_total)
    join = JoinedGradients(None, None, None, None, [Parts()] * len(needs.o or ()))
    if dy is not None:
        joined = Joined(total, total, saved.o, saved.rstd, saved.o_rstd)
        join = join_backward(spec, dy, dout, tensors, joined, groups.o, need, needs.o or ())
    gradients = OutputTensors(join.total, join.attended, join.after, join.before, dbehind, join.before_bias)  # type: ignore[arg-type]
    return gradients, OutputGroups(join.o, of_inner, of_down)
