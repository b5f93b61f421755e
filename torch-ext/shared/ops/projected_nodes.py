"""The two autograd nodes of `decoder_nodes` for projections that are more than a weight: with a low-rank adapter, in four bits, or wider
than the dtype of the products, as autocast over an fp32 model has them.

Under autocast over fp32 the residual stream stays in fp32: the norms read it and write the dtype of the products, and each weight is
rounded to that once a forward pass, whose result the backward pass uses again. Gradients are of their parameters' own dtypes.
"""

import functools
from typing import Optional, Sequence, Tuple

import torch
from torch.autograd.function import once_differentiable

from .common import apply_function, describe, fail, need_floats, needs_formula
from .projection import OF_ONE, FourBitWeight, Projection, Projections, from_parts, numbers_of, projection_reference, tensors_of
from .rms_norm import add_rms_norm_backward, add_rms_norm_forward, rms_norm_forward, rms_norm_recompute, rms_norm_reference
from .rotary import norm_backward_into, qk_norm_rotary_backward, qk_norm_rotary_forward, qk_norm_rotary_reference
from .swiglu import ONE_GEMM_FORWARD, backward_in_place, swiglu_forward, swiglu_reference


def projected_attention_inputs_reference(x, norm_weight, projections, q_norm, k_norm, cos, sin, shape, eps, head_eps, dtype):
    """What `projected_attention_inputs` returns, in PyTorch."""
    y = rms_norm_reference(x, norm_weight, eps)[0].to(dtype)
    q, k, v = (projection_reference(y, p).view(*shape, -1, q_norm.shape[0]) for p in projections)
    q, k = qk_norm_rotary_reference(q, k, q_norm, k_norm, cos, sin, head_eps)
    return q.to(dtype), k.to(dtype), v.transpose(1, 2), x


def projected_mlp_reference(x, norm_weight, projections, eps, attended, dtype) -> torch.Tensor:
    """What `projected_mlp` returns, in PyTorch."""
    *before, gate, up, down = projections
    if before:
        x = x + projection_reference(attended, before[0]).view(x.shape)
    y = rms_norm_reference(x, norm_weight, eps)[0].to(dtype)
    return x + projection_reference(swiglu_reference(projection_reference(y, gate), projection_reference(y, up)), down)


def _biases(projections: Sequence[Projection]) -> list:
    return [projection.bias for projection in projections]


def _always(tensor: torch.Tensor):
    """A function that gives the tensor."""
    return lambda: tensor


class _ProjectedAttentionInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, eps, q_norm, k_norm, head_eps, cos, sin, shape, dtype, numbers, *tensors):
        y, rstd = rms_norm_forward(x, norm_weight, eps, dtype)
        projections = from_parts(tensors, numbers)
        group = Projections(projections, dtype)
        head_dim = q_norm.shape[0]
        q, k, v = [p.view(*shape, p.shape[1] // head_dim, head_dim) for p in group.forward(y, _biases(projections))]
        ctx.save_for_backward(x, norm_weight, rstd, q, k, q_norm, k_norm, cos, sin, *group.saved())
        ctx.group, ctx.head_eps, ctx.dtype = group, head_eps, dtype
        return (*qk_norm_rotary_forward(q, k, q_norm, k_norm, cos, sin, head_eps), v.transpose(1, 2), x.view_as(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, dq_out, dk_out, dv, dresidual):
        x, norm_weight, rstd, q, k, q_norm, k_norm, cos, sin, *tensors = ctx.saved_tensors
        group, _ = ctx.group.loaded(tensors)
        needs, tokens = ctx.needs_input_grad, x.shape[0]
        dv = dv.transpose(1, 2)
        of_heads = dq_out, dk_out, q, k, q_norm, k_norm, cos, sin, ctx.head_eps, needs[3], needs[4]
        together = None
        if group.whole is None:
            dq, dk, dq_norm, dk_norm = qk_norm_rotary_backward(*of_heads)
            grads = [grad.reshape(tokens, count) for grad, count in zip((dq, dk, dv), group.rows)]
        else:
            together = torch.empty((tokens, group.whole.shape[0]), dtype=ctx.dtype, device=x.device)
            grads = together.split(group.rows, 1)
            dq, dk, dv_place = [grad.view(t.shape) for grad, t in zip(grads, (q, k, dv))]
            dv_place.copy_(dv)
            dq_norm, dk_norm = norm_backward_into((dq, dk), *of_heads)
        dlow = group.low_gradient(grads)
        dprojections = group.gradients(grads, dlow, lambda: rms_norm_recompute(x, norm_weight, rstd, ctx.dtype), needs[11:])
        dx = dnorm = None
        if needs[0] or needs[1]:
            dy = group.input_gradient(grads, dlow, together)
            dx, dnorm = add_rms_norm_backward(dy, dresidual, x, norm_weight, rstd, needs[1])
        dnorms = [grad if need else None for grad, need in zip((dnorm, dq_norm, dk_norm), (needs[1], needs[3], needs[4]))]
        return (dx, dnorms[0], None, *dnorms[1:], None, None, None, None, None, None, *dprojections)


class _ProjectedMLP(torch.autograd.Function):
    """With attention's output and its projection, when there are these, in front: x is the residual stream before or behind it."""

    @staticmethod
    def forward(ctx, x, attended, norm_weight, eps, dtype, numbers, *tensors):
        projections = from_parts(tensors, numbers)
        *before, gate_proj, up_proj, down_proj = projections
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        saved: list = []
        ctx.groups = []

        def keep(group):
            saved.extend(group.saved())
            ctx.groups.append(group)

        if before:
            o_group = Projections(before, dtype)
            if x.dtype == dtype:
                (x,) = o_group.forward(attended, _biases(before), onto=x)
                y, rstd = rms_norm_forward(x, norm_weight, eps, dtype)
            else:
                x, y, rstd = add_rms_norm_forward(o_group.forward(attended, _biases(before))[0], x, norm_weight, eps)
            keep(o_group)
        else:
            y, rstd = rms_norm_forward(x, norm_weight, eps, dtype)
        inner = Projections((gate_proj, up_proj), dtype)
        gate, up = inner.forward(y, (gate_proj.bias, up_proj.bias), x.shape[0] <= ONE_GEMM_FORWARD)
        del y
        keep(inner)
        down = Projections((down_proj,), dtype)
        # Not a view of the flat result: FSDP's hooks warn of a module that returns a view.
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        if x.dtype == dtype:
            down.forward(swiglu_forward(gate, up), (down_proj.bias,), onto=x, out=out.view(x.shape))
        else:
            torch.add(x, down.forward(swiglu_forward(gate, up), (down_proj.bias,))[0], out=out.view(x.shape))
        keep(down)
        ctx.save_for_backward(x, attended, norm_weight, rstd, gate, up, *saved)
        ctx.dtype, ctx.shape = dtype, shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, attended, norm_weight, rstd, gate, up, *tensors = ctx.saved_tensors
        groups = []
        for group in ctx.groups:
            group, tensors = group.loaded(tensors)
            groups.append(group)
        *before, inner, down = groups
        need_x, need_attended, need_norm, _, _, _, *needs = ctx.needs_input_grad
        o_needs, inner_needs, down_needs = needs[: -3 * OF_ONE], needs[-3 * OF_ONE : -OF_ONE], needs[-OF_ONE:]
        need_total = need_x or need_attended or need_norm or any(o_needs)
        dout = dout.reshape(x.shape)
        found: list = [None] * len(inner_needs)
        grads = (dout.to(ctx.dtype),)
        dlow = down.low_gradient(grads)
        if need_total or any(inner_needs):
            hidden = down.input_gradient(grads, dlow)  # its gradient, and behind the next line itself
            both, *inner_grads = backward_in_place(hidden, gate, up)
        else:
            hidden = swiglu_forward(gate, up)
        ddown = down.gradients(grads, dlow, _always(hidden), down_needs)
        del hidden
        dx = dattended = dnorm = None
        do: list = [None] * len(o_needs)
        if need_total or any(inner_needs):
            dlow = inner.low_gradient(inner_grads)
            normed = functools.partial(rms_norm_recompute, x, norm_weight, rstd, ctx.dtype)
            found = inner.gradients(inner_grads, dlow, normed, inner_needs)
        if need_total:
            dy = inner.input_gradient(inner_grads, dlow, both)
            dx, dnorm = add_rms_norm_backward(dy, dout, x, norm_weight, rstd, need_norm)
            if before:
                grads = (dx.to(ctx.dtype),)
                dlow = before[0].low_gradient(grads)
                do = before[0].gradients(grads, dlow, _always(attended), o_needs)
                dattended = before[0].input_gradient(grads, dlow) if need_attended else None
        return (
            dx.view(ctx.shape) if need_x else None, dattended, dnorm if need_norm else None, None, None, None, *do, *found, *ddown
        )  # fmt: skip


def projected_attention_inputs(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    projections: Sequence[Projection],
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    shape: Tuple[int, int],
    eps: float = 1e-6,
    head_eps: float = 1e-6,
    dtype: Optional[torch.dtype] = None,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`norm_attention_inputs` of projections that may have adapters, with products in a dtype of their own.

    x: [tokens, hidden]; dtype: of the products and of q, k and v, x's by default; x may be of it or float32. norm_weight, q_norm,
    k_norm, cos and sin are of x's dtype, the projections' tensors of `dtype` or float32. The rest is as in `norm_attention_inputs`,
    differentiable in the projections' tensors too. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    dtype = dtype or x.dtype
    if x.dim() != 2 or x.shape[0] != shape[0] * shape[1]:
        fail("x", describe(x), f"[tokens, hidden] with {shape[0]} * {shape[1]} tokens")
    if q_norm.dim() != 1:
        fail("q_norm", describe(q_norm), "[head_dim]")
    head_dim = q_norm.shape[0]
    _check(x, norm_weight, dtype)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm.shape != (head_dim,) or norm.dtype != x.dtype or norm.device != x.device:
            fail(name, describe(norm), f"{x.dtype} [{head_dim}] on {x.device}")
    for i, projection in enumerate(projections):
        _check_projection(f"projections[{i}]", projection, None, x.shape[-1], dtype, x.device)
        if projection.weight.shape[0] % head_dim:
            fail(f"projections[{i}].weight", list(projection.weight.shape), f"a multiple of head_dim {head_dim} rows")
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 3 and table.shape[0] in (1, shape[0]) and table.shape[1] == shape[1]
        fits = fits and table.shape[2] in (head_dim, head_dim // 2)
        if not fits or table.shape != cos.shape or table.dtype != x.dtype or table.device != x.device:
            fail(name, describe(table), f"{x.dtype} [{shape[0]} or 1, {shape[1]}, {head_dim} or {head_dim // 2}] on {x.device}")
    if needs_formula(x, norm_weight, q_norm, k_norm, cos, sin, *_dense_tensors(projections)):
        return projected_attention_inputs_reference(x, norm_weight, projections, q_norm, k_norm, cos, sin, shape, eps, head_eps, dtype)
    arguments = x, norm_weight, float(eps), q_norm, k_norm, float(head_eps), cos, sin, tuple(shape), dtype
    return apply_function(_ProjectedAttentionInputs, *arguments, numbers_of(projections), *tensors_of(projections))


def projected_mlp(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    projections: Sequence[Projection],
    eps: float = 1e-6,
    attended: Optional[torch.Tensor] = None,
    dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """`norm_mlp` of projections that may have adapters, with products in a dtype of their own.

    x: [..., hidden]; projections: to gate, up and down, and in front of them attention's output projection where `attended` [tokens,
    features] is given; dtype: of the products and of `attended`, x's by default; x may be of it or float32; norm_weight: [hidden] of x's
    dtype. Returns [..., hidden] of x's dtype. Differentiable in all tensors. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    dtype = dtype or x.dtype
    expected = 3 if attended is None else 4
    if len(projections) != expected:
        fail("projections", f"{len(projections)} of them", f"{expected}, as attended is {'' if attended is None else 'not '}None")
    _check(x, norm_weight, dtype)
    hidden, intermediate = x.shape[-1], projections[-3].weight.shape[0]
    for name, projection, rows, columns in zip(
        ("gate", "up", "down"), projections[-3:], (intermediate, intermediate, hidden), (hidden, hidden, intermediate)
    ):
        _check_projection(name, projection, rows, columns, dtype, x.device)
    if attended is not None:
        features = projections[0].weight.shape[-1]
        _check_projection("o", projections[0], hidden, features, dtype, x.device)
        if attended.shape != (x.numel() // hidden if hidden else 0, features) or attended.dtype != dtype or attended.device != x.device:
            fail("attended", describe(attended), f"{dtype} [tokens, {features}] on {x.device}")
    if needs_formula(x, norm_weight, attended, *_dense_tensors(projections)):
        return projected_mlp_reference(x, norm_weight, projections, eps, attended, dtype)
    return apply_function(
        _ProjectedMLP, x, attended, norm_weight, float(eps), dtype, numbers_of(projections), *tensors_of(projections)
    )


def _dense_tensors(projections: Sequence[Projection]) -> list:
    return [part for part in tensors_of(projections) if not isinstance(part, FourBitWeight)]


def _check(x: torch.Tensor, norm_weight: torch.Tensor, dtype: torch.dtype) -> None:
    need_floats(x=x)
    if x.dim() == 0 or x.dtype not in (dtype, torch.float32):
        fail("x", describe(x), f"[..., hidden] of {dtype} or torch.float32")
    if norm_weight.shape != x.shape[-1:] or norm_weight.dtype != x.dtype or norm_weight.device != x.device:
        fail("norm_weight", describe(norm_weight), f"{x.dtype} [{x.shape[-1]}] on {x.device}")


def _check_projection(name: str, projection: Projection, rows: Optional[int], columns: int, dtype: torch.dtype, device) -> None:
    weight, a, b, bias, *_ = projection
    if len(weight.shape) != 2 or rows not in (None, weight.shape[0]) or weight.shape[1] != columns or weight.device != device:
        fail(f"{name}.weight", f"{list(weight.shape)} on {weight.device}", f"[{rows or 'any'}, {columns}] on {device}")
    if not isinstance(weight, FourBitWeight) and weight.dtype not in (dtype, torch.float32):
        fail(f"{name}.weight", describe(weight), f"{dtype} or torch.float32")
    if (a is None) != (b is None) or (a is None and bias is not None):
        fail(name, "half of an adapter", "a and b, or neither")
    if a is None:
        return
    rank = a.shape[0]
    for part, tensor, shape in (("a", a, (rank, columns)), ("b", b, (weight.shape[0], rank)), ("bias", bias, (weight.shape[0],))):
        if tensor is not None and (tensor.shape != shape or tensor.dtype not in (dtype, torch.float32) or tensor.device != device):
            fail(f"{name}.{part}", describe(tensor), f"{dtype} or torch.float32 {list(shape)} on {device}")
