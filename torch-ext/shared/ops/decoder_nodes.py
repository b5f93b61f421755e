"""The two halves of a decoder layer around attention, each one autograd node: RMSNorm, the projections to queries, keys and values,
their RMSNorm and rotary embedding; and the output projection, RMSNorm and the MLP, with both residual connections.

What is saved is small: the residual stream, one number a row, and the projections' outputs. The normalised input and
silu(gate) * up are computed again in the backward pass, bit for bit. Input gradients of several projections are added by the
GEMMs, or by one GEMM where the weights lie side by side in memory (`pack`), and the residual's gradient by the RMSNorm's backward
kernel, so no separate addition is left.
"""

import functools
from typing import Dict, Optional, Sequence, Tuple

import torch
from torch import split_with_sizes  # Tensor.split is a function in Python around it
from torch.nn.functional import linear

from ..runtime.replay import replayed_with_products
from .autocast import casts_products_of, outside_autocast
from .common import always, apply_function, describe, fail, need_floats, needs_formula, once_differentiable, side_by_side
from .projection import Projection, tensors_of
from .rms_norm import add_rms_norm_backward, add_rms_norm_forward, rms_norm_forward, rms_norm_recompute, rms_norm_reference
from .rotary import norm_backward_into, qk_norm_rotary_backward, qk_norm_rotary_forward, qk_norm_rotary_reference
from .swiglu import gate_and_up, mlp_backward, mlp_reference, swiglu_forward
from .traced_nodes import traced_attention_inputs, traced_mlp


def _input_gradient(grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """sum of grad @ weight: the first GEMM writes, the others add."""
    total = torch.mm(grads[0], weights[0])
    for grad, weight in zip(grads[1:], weights[1:]):
        total.addmm_(grad, weight)
    return total


def _weight_gradients(grads: Sequence[torch.Tensor], y: torch.Tensor, needs: Sequence[bool]) -> list:
    """grad.T @ y for each one that is needed, None for the others. One GEMM for all would give parts of one storage: see `gate_and_up`."""
    return [torch.mm(grad.t(), y) if need else None for grad, need in zip(grads, needs)]


def norm_attention_inputs_reference(x, norm_weight, weights, q_norm, k_norm, cos, sin, shape, eps, head_eps):
    """What `norm_attention_inputs` returns, in PyTorch."""
    y = rms_norm_reference(x, norm_weight, eps)[0]
    q, k, v = (linear(y, weight).view(*shape, -1, q_norm.shape[0]) for weight in weights)
    return (*qk_norm_rotary_reference(q, k, q_norm, k_norm, cos, sin, head_eps), v.transpose(1, 2), x)


def norm_mlp_reference(x, norm_weight, gate_weight, up_weight, down_weight, eps, attended, o_weight) -> torch.Tensor:
    """What `norm_mlp` returns, in PyTorch."""
    if o_weight is not None:
        x = x + linear(attended, o_weight).view(x.shape)
    return x + mlp_reference(rms_norm_reference(x, norm_weight, eps)[0], gate_weight, up_weight, down_weight)


@replayed_with_products
def _attention_inputs(x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin, batch, length, whole, *weights):
    """q, k and v as attention takes them, q and k as projected, and rstd. whole: what `side_by_side` finds of the weights."""
    _check_attention_inputs(x, norm_weight, weights, q_norm, k_norm, cos, sin, (batch, length))
    y, rstd = rms_norm_forward(x, norm_weight, eps)
    if whole is None:
        projected = [linear(y, weight) for weight in weights]
    else:
        projected = split_with_sizes(linear(y, whole), [weight.shape[0] for weight in weights], 1)
    head_dim = q_norm.shape[0]
    q, k, v = [p.view(batch, length, p.shape[1] // head_dim, head_dim) for p in projected]
    return (*qk_norm_rotary_forward(q, k, q_norm, k_norm, cos, sin, head_eps), v.transpose(1, 2), q, k, rstd)


@replayed_with_products
def _attention_inputs_gradients(dq_out, dk_out, dv, dresidual, x, norm_weight, rstd, q, k, q_norm, k_norm, cos, sin, head_eps, whole, needs,
                                *weights):
    """The gradients of x, norm_weight, q_norm, k_norm and the weights, None where `needs`, a boolean for each, says so."""
    tokens, rows = x.shape[0], [weight.shape[0] for weight in weights]
    dv = dv.transpose(1, 2)
    saved = dq_out, dk_out, q, k, q_norm, k_norm, cos, sin, head_eps, needs[2], needs[3]
    if whole is None:
        dq, dk, dq_norm, dk_norm = qk_norm_rotary_backward(*saved)
        grads = [grad.reshape(tokens, count) for grad, count in zip((dq, dk, dv), rows)]
    else:
        together = torch.empty((tokens, whole.shape[0]), dtype=x.dtype, device=x.device)
        grads = split_with_sizes(together, rows, 1)
        dq, dk, dv_place = [grad.view(t.shape) for grad, t in zip(grads, (q, k, dv))]
        dv_place.copy_(dv)
        dq_norm, dk_norm = norm_backward_into((dq, dk), *saved)
    dweights = [None] * len(weights)
    if any(needs[4:]):
        y = rms_norm_recompute(x, norm_weight, rstd)
        dweights = _weight_gradients(grads, y, needs[4:])
        del y
    dx = dnorm = None
    if needs[0] or needs[1]:
        dy = torch.mm(together, whole) if whole is not None else _input_gradient(grads, weights)
        dx, dnorm = add_rms_norm_backward(dy, dresidual, x, norm_weight, rstd, needs[1])
    return (dx, *[grad if need else None for grad, need in zip((dnorm, dq_norm, dk_norm), needs[1:])], *dweights)


class _NormAttentionInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin, shape, *weights):
        arguments = x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin
        q_out, k_out, v, q, k, rstd = _attention_inputs(*arguments, *shape, side_by_side(weights), *weights)
        ctx.save_for_backward(x, norm_weight, rstd, q, k, q_norm, k_norm, cos, sin, *weights)
        ctx.head_eps = head_eps
        return q_out, k_out, v, x.view_as(x)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx, *grads):
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad
        weights, needs = saved[9:], (*needs[:2], *needs[3:5], *needs[9:])
        found = _attention_inputs_gradients(*grads, *saved[:9], ctx.head_eps, side_by_side(weights), needs, *weights)
        dx, dnorm, dq_norm, dk_norm, *dweights = found
        return (dx, dnorm, None, dq_norm, dk_norm, None, None, None, None, *dweights)


@replayed_with_products
def _mlp(x, attended, o_weight, norm_weight, eps, gate_weight, up_weight, down_weight, whole):
    """The result, the residual stream behind attention where this adds to it, flat, its rstd, gate and up. whole: what `side_by_side`
    finds of gate's and up's weights."""
    _check_mlp(x, norm_weight, gate_weight, up_weight, down_weight, attended, o_weight)
    total = x.reshape(-1, x.shape[-1])
    if o_weight is None:
        y, rstd = rms_norm_forward(total, norm_weight, eps)
    else:  # a GEMM that adds would first copy what it adds to
        total, y, rstd = add_rms_norm_forward(linear(attended, o_weight), total, norm_weight, eps)
    gate, up = gate_and_up(y, gate_weight, up_weight, whole)
    del y
    # Not a view of the flat result: FSDP's hooks warn of a module that returns a view.
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.addmm(total, swiglu_forward(gate, up), down_weight.t(), out=out.view(total.shape))
    return out, None if o_weight is None else total, rstd, gate, up


@replayed_with_products
def _mlp_gradients(dout, x, attended, o_weight, norm_weight, rstd, gate, up, gate_weight, up_weight, down_weight, whole, needs):
    """The gradients of x [tokens, hidden], attended, o_weight, norm_weight and the MLP's weights, None where `needs`, a boolean for each,
    says so. gate, up: None for both where they are to be made again."""
    dout = dout.reshape(x.shape)
    need_x, need_attended, need_o, need_norm, *need_weights = needs
    need_total = need_x or need_attended or need_o or need_norm
    normed = functools.partial(rms_norm_recompute, x, norm_weight, rstd)
    if gate is None:
        normed = always(normed())
        gate, up = gate_and_up(normed(), gate_weight, up_weight, whole)
    weights = gate_weight, up_weight, down_weight, whole
    dy, *dweights = mlp_backward(dout, normed, gate, up, *weights, (need_total, *need_weights))
    if not need_total:
        return (None, None, None, None, *dweights)
    dx, dnorm = add_rms_norm_backward(dy, dout, x, norm_weight, rstd, need_norm)
    dattended = torch.mm(dx, o_weight) if need_attended else None
    do_weight = torch.mm(dx.t(), attended) if need_o else None
    return (dx, dattended, do_weight, dnorm if need_norm else None, *dweights)


class _NormMLP(torch.autograd.Function):
    """With attention's output and its projection, when there are these, in front: x is the residual stream before or behind it."""

    @staticmethod
    def forward(ctx, x, attended, o_weight, norm_weight, eps, recompute, *weights):
        ctx.shape, whole = x.shape, side_by_side(weights[:2])
        out, total, rstd, gate, up = _mlp(x, attended, o_weight, norm_weight, eps, *weights, whole)
        total = x.reshape(-1, x.shape[-1]) if total is None else total
        if recompute:
            gate = up = None
        ctx.save_for_backward(total, attended, o_weight, norm_weight, rstd, gate, up, *weights)
        return out

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx, dout):
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad
        found = _mlp_gradients(dout, *saved, side_by_side(saved[7:9]), (*needs[:4], *needs[6:]))
        dx, dattended, do_weight, dnorm, *dweights = found
        return (None if dx is None else dx.view(ctx.shape), dattended, do_weight, dnorm, None, None, *dweights)


def norm_attention_inputs(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weights: Sequence[torch.Tensor],
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    shape: Tuple[int, int],
    eps: float = 1e-6,
    head_eps: float = 1e-6,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as attention takes them, of RMSNorm(x), and x itself for the residual connection.

    x: [tokens, hidden], of `shape` (batch, tokens of one sequence); norm_weight: [hidden]; weights: of the projections to q, k and v,
    [heads * head_dim, hidden] each; q_norm, k_norm: [head_dim], with the epsilon head_eps; cos, sin: as in `qk_norm_rotary`; all of
    one dtype and device. Returns q, k, v [batch, heads, tokens, head_dim] and x. Use the x that is returned behind the projections:
    its gradient is then added for nothing. Differentiable in all but cos and sin. Raises ValueError when shapes, dtypes or devices
    do not fit.
    """
    by_formula = casts_products_of(x) or needs_formula(x, norm_weight, *weights, q_norm, k_norm, cos, sin)
    traced = torch.compiler.is_compiling()
    if by_formula or traced:
        _check_attention_inputs(x, norm_weight, weights, q_norm, k_norm, cos, sin, shape)
    if by_formula:
        return norm_attention_inputs_reference(x, norm_weight, weights, q_norm, k_norm, cos, sin, shape, eps, head_eps)
    if traced:
        arguments = x, norm_weight, float(eps), q_norm, k_norm, float(head_eps), cos, sin, tuple(shape), x.dtype
        return traced_attention_inputs(*arguments, _without_adapters(weights), [1.0] * len(weights))
    return apply_function(_NormAttentionInputs, x, norm_weight, float(eps), q_norm, k_norm, float(head_eps), cos, sin, tuple(shape),
                          *weights)


def norm_mlp(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    eps: float = 1e-6,
    attended: Optional[torch.Tensor] = None,
    o_weight: Optional[torch.Tensor] = None,
    recompute: bool = False,
) -> torch.Tensor:
    """x + down(silu(gate(n)) * up(n)) with n = RMSNorm(x), of x + attended @ o_weight.T in x's place where these are given.

    x: [..., hidden]; norm_weight: [hidden]; gate_weight, up_weight: [intermediate, hidden]; down_weight: [hidden, intermediate];
    attended: [tokens, features], attention's output; o_weight: [hidden, features]; all of one dtype and device. recompute: gate(n) and
    up(n) are made again in the backward pass, bit for bit, instead of kept. Returns [..., hidden].
    Differentiable in all of them. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    mlp_weights = gate_weight, up_weight, down_weight
    by_formula = casts_products_of(x) or needs_formula(x, norm_weight, *mlp_weights, attended, o_weight)
    traced = torch.compiler.is_compiling()
    if by_formula or traced:
        _check_mlp(x, norm_weight, *mlp_weights, attended, o_weight)
    if by_formula:
        return norm_mlp_reference(x, norm_weight, gate_weight, up_weight, down_weight, eps, attended, o_weight)
    if traced:
        weights = [*([] if o_weight is None else [o_weight]), gate_weight, up_weight, down_weight]
        arguments = x, attended, norm_weight, float(eps), x.dtype, _without_adapters(weights), [1.0] * len(weights)
        return traced_mlp(*arguments, recompute)
    return apply_function(_NormMLP, x, attended, o_weight, norm_weight, float(eps), bool(recompute), gate_weight, up_weight, down_weight)


def _check_attention_inputs(x, norm_weight, weights, q_norm, k_norm, cos, sin, shape) -> None:
    """Raises ValueError when shapes, dtypes or devices do not fit. A node does it where its forward pass is not replayed: one that is has
    arguments like those of one that was not."""
    if x.dim() != 2 or x.shape[0] != shape[0] * shape[1]:
        fail("x", describe(x), f"[tokens, hidden] with {shape[0]} * {shape[1]} tokens")
    if q_norm.dim() != 1:
        fail("q_norm", describe(q_norm), "[head_dim]")
    head_dim = q_norm.shape[0]
    known = {"norm_weight": norm_weight, "q_norm": q_norm, "k_norm": k_norm, "cos": cos, "sin": sin}
    _check_like(x, {**known, **{f"weights[{i}]": weight for i, weight in enumerate(weights)}})
    hidden = x.shape[1]
    _check_shape("norm_weight", norm_weight, (hidden,))
    _check_shape("k_norm", k_norm, (head_dim,))
    for i, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[1] != hidden or weight.shape[0] % head_dim:
            fail(f"weights[{i}]", describe(weight), f"[a multiple of head_dim {head_dim}, {hidden}]")
    check_angles(cos, sin, shape, head_dim)


def _check_mlp(x, norm_weight, gate_weight, up_weight, down_weight, attended, o_weight) -> None:
    """As `_check_attention_inputs`."""
    if x.dim() == 0 or gate_weight.dim() != 2:
        fail("gate_weight", describe(gate_weight), f"[intermediate, hidden] for x, which is {describe(x)}")
    hidden, intermediate = x.shape[-1], gate_weight.shape[0]
    known = {"norm_weight": norm_weight, "gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    if o_weight is not None:
        known.update(attended=attended, o_weight=o_weight)
    _check_like(x, known)
    _check_shape("norm_weight", norm_weight, (hidden,))
    _check_shape("gate_weight", gate_weight, (intermediate, hidden))
    _check_shape("up_weight", up_weight, (intermediate, hidden))
    _check_shape("down_weight", down_weight, (hidden, intermediate))
    if o_weight is not None:
        features = o_weight.shape[-1]
        _check_shape("attended", attended, (x.numel() // hidden if hidden else 0, features))
        _check_shape("o_weight", o_weight, (hidden, features))


def _without_adapters(weights: Sequence[torch.Tensor]) -> list:
    """Weights as `tensors_of` lists the tensors of projections."""
    return tensors_of([Projection(weight) for weight in weights])


def _check_like(x: torch.Tensor, tensors: Dict[str, torch.Tensor]) -> None:
    """Raises ValueError for a tensor of another dtype or device than x."""
    need_floats(x=x)
    dtype, device = x.dtype, x.device
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.device != device:
            fail(name, describe(tensor), f"{dtype} on {device}")


def _check_shape(name: str, tensor: torch.Tensor, shape: Tuple[int, ...]) -> None:
    if tensor.shape != shape:
        fail(name, describe(tensor), f"{list(shape)}")


def check_angles(cos: torch.Tensor, sin: torch.Tensor, shape: Tuple[int, int], head_dim: int) -> None:
    """Raises ValueError for angles that are not those of tokens of a shape (batch, tokens of one sequence)."""
    found = cos.shape
    fits = len(found) == 3 and found[0] in (1, shape[0]) and found[1] == shape[1] and found[2] in (head_dim, head_dim // 2)
    if not fits or sin.shape != found:
        name, table = ("sin", sin) if fits else ("cos", cos)
        fail(name, describe(table), f"[{shape[0]} or 1, {shape[1]}, {head_dim} or {head_dim // 2}], cos and sin alike")
