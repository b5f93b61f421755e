"""What the two autograd nodes of a decoder layer compute forward and backward, without autograd: `projected_nodes` makes nodes of it,
`traced_nodes` operators for a compiler."""

import functools
from typing import Callable, List, Optional, Sequence

import torch

from .common import always
from .projection import LOOK, OF_ONE, Projection, Projections
from .rms_norm import add_rms_norm_backward, add_rms_norm_forward, rms_norm_forward, rms_norm_recompute
from .rotary import norm_backward_into, qk_norm_rotary_backward, qk_norm_rotary_forward
from .swiglu import ONE_GEMM_FORWARD, backward_in_place, swiglu_forward


def biases_of(projections: Sequence[Projection]) -> list:
    return [projection.bias for projection in projections]


def attention_inputs_forward(x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin, shape, group: Projections, biases, out=None):
    """(q and k as attention takes them, [q, k, v] as projected, rstd). out: as of `Projections.forward`."""
    y, rstd = rms_norm_forward(x, norm_weight, eps, group.dtype)
    head_dim = q_norm.shape[0]
    projected = [p.view(*shape, p.shape[1] // head_dim, head_dim) for p in group.forward(y, biases, out=out)]
    return (*qk_norm_rotary_forward(*projected[:2], q_norm, k_norm, cos, sin, head_eps), projected, rstd)


def attention_inputs_backward(grads, x, norm_weight, rstd, q, k, q_norm, k_norm, head_eps, cos, sin, group: Projections, needs) -> list:
    """The gradients of x, norm_weight, q_norm, k_norm and of what the projections are made of, None where `needs` says so.

    grads: of the four results; needs: a boolean for each gradient.
    """
    dq_out, dk_out, dv, dresidual = grads
    tokens, dv = x.shape[0], dv.transpose(1, 2)
    of_heads = dq_out, dk_out, q, k, q_norm, k_norm, cos, sin, head_eps, needs[2], needs[3]
    together = None
    if group.whole is None:
        dq, dk, dq_norm, dk_norm = qk_norm_rotary_backward(*of_heads)
        grads = [grad.reshape(tokens, count) for grad, count in zip((dq, dk, dv), group.rows)]
    else:
        together = torch.empty((tokens, group.whole.shape[0]), dtype=group.dtype, device=x.device)
        grads = together.split(group.rows, 1)
        dq, dk, dv_place = [grad.view(t.shape) for grad, t in zip(grads, (q, k, dv))]
        dv_place.copy_(dv)
        dq_norm, dk_norm = norm_backward_into((dq, dk), *of_heads)
    dlow = group.low_gradient(grads)
    dprojections = group.gradients(grads, dlow, lambda: rms_norm_recompute(x, norm_weight, rstd, group.dtype), needs[4:])
    dx = dnorm = None
    if needs[0] or needs[1]:
        dy = group.input_gradient(grads, dlow, together)
        dx, dnorm = add_rms_norm_backward(dy, dresidual, x, norm_weight, rstd, needs[1])
    return [grad if need else None for grad, need in zip((dx, dnorm, dq_norm, dk_norm, *dprojections), needs)]


def groups_of(projections: Sequence[Projection], dtype: torch.dtype, made: Optional[Sequence] = None, whole=LOOK) -> List[Projections]:
    """The projections of `projected_mlp` by what they read: attention's output, where it is given, the norm's, the activation's.

    made: of each group, as of `Projections`; whole: of gate and up.
    """
    groups = split_groups(projections)
    wholes = [*[LOOK] * (len(groups) - 2), whole, LOOK]
    return [Projections(group, dtype, None if made is None else made[i], wholes[i]) for i, group in enumerate(groups)]


def split_groups(projections: Sequence[Projection]) -> List[Sequence[Projection]]:
    """The projections of each of `groups_of`."""
    *before, gate, up, down = projections
    return [*([before] if before else []), (gate, up), (down,)]


def mlp_forward(x, attended, norm_weight, eps, groups: Sequence[Projections], biases, both=None):
    """(result, the residual stream behind attention, flat, its rstd, gate, up). both: [tokens, gate's and up's rows], where these go."""
    *before, inner, down = groups
    dtype, shape, x = inner.dtype, x.shape, x.reshape(-1, x.shape[-1])
    *o_bias, gate_bias, up_bias, down_bias = biases
    if before:  # a GEMM that adds would first copy what it adds to
        x, y, rstd = add_rms_norm_forward(before[0].forward(attended, o_bias)[0], x, norm_weight, eps)
    else:
        y, rstd = rms_norm_forward(x, norm_weight, eps, dtype)
    gate, up = inner.forward(y, (gate_bias, up_bias), x.shape[0] <= ONE_GEMM_FORWARD, out=both)
    del y
    # Not a view of the flat result: FSDP's hooks warn of a module that returns a view.
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if x.dtype == dtype:
        down.forward(swiglu_forward(gate, up), (down_bias,), onto=x, out=out.view(x.shape))
    else:
        torch.add(x, down.forward(swiglu_forward(gate, up), (down_bias,))[0], out=out.view(x.shape))
    return out, x, rstd, gate, up


def mlp_backward(dout, x, attended, norm_weight, rstd, gate, up, biases, groups: Sequence[Projections], needs, both=None) -> list:
    """The gradients of x, attended, norm_weight and of what the projections are made of, None where `needs` says so.

    x: the residual stream behind attention, flat; gate, up: None for both where they are to be made again, with these biases of their
    adapters, in `both` as of `mlp_forward`; needs: a boolean for each gradient. That of x is flat.
    """
    *before, inner, down = groups
    normed: Callable[[], torch.Tensor] = functools.partial(rms_norm_recompute, x, norm_weight, rstd, inner.dtype)
    if gate is None:
        normed = always(normed())
        gate, up = inner.again(normed(), biases, x.shape[0] <= ONE_GEMM_FORWARD, both)
    need_x, need_attended, need_norm, *needs = needs
    o_needs, inner_needs, down_needs = needs[: -3 * OF_ONE], needs[-3 * OF_ONE : -OF_ONE], needs[-OF_ONE:]
    need_total = need_x or need_attended or need_norm or any(o_needs)
    dtype, dout = inner.dtype, dout.reshape(x.shape)
    found: list = [None] * len(inner_needs)
    grads = (dout.to(dtype),)
    dlow = down.low_gradient(grads)
    if need_total or any(inner_needs):
        hidden = down.input_gradient(grads, dlow)  # its gradient, and behind the next line itself
        both, *inner_grads = backward_in_place(hidden, gate, up)
    else:
        hidden = swiglu_forward(gate, up)
    ddown = down.gradients(grads, dlow, always(hidden), down_needs)
    del hidden
    dx = dattended = dnorm = None
    do: list = [None] * len(o_needs)
    if need_total or any(inner_needs):
        dlow = inner.low_gradient(inner_grads)
        found = inner.gradients(inner_grads, dlow, normed, inner_needs)
    if need_total:
        dy = inner.input_gradient(inner_grads, dlow, both)
        dx, dnorm = add_rms_norm_backward(dy, dout, x, norm_weight, rstd, need_norm)
        if before:
            grads = (dx.to(dtype),)
            dlow = before[0].low_gradient(grads)
            do = before[0].gradients(grads, dlow, always(attended), o_needs)
            dattended = before[0].input_gradient(grads, dlow) if need_attended else None
    return [dx if need_x else None, dattended, dnorm if need_norm else None, *do, *found, *ddown]
