"""The experts of a mixture of experts: for each token the weighted sum of what its top-k experts make of it.

The (token, expert) pairs are sorted by expert, so each of the six matrix products of a training step is one grouped GEMM, and
nothing of the routing is known to the host: torch's where that is one kernel, else that of kernel_src/grouped_gemm.py; where
neither takes the tensors, a loop over the experts. The routing weights multiply the gated rows between the two GEMMs, so the results
of the second one are only added up, by the token that they belong to, in both directions; its output is not kept. Saved is
the output of the first GEMM, and its gradient is written over it.
"""

import functools
from typing import Any, List, NamedTuple, Optional, Tuple

import torch

from .arguments import describe, fail, need_device, need_floats
from .arrays import accumulation_dtype, unit_stride
from .autocast import outside_autocast, without_autocast
from .autograd import Function, needs_formula
from .expert_adapters import NO_FACTORS, ExpertFactors, Factors, adapted_mm, adapted_reference, adapter_gradients, narrow_mm
from .expert_gate import Gate, dense, gate_backward, gate_forward, token_rows, token_sum
from .grouped_gemm import Groups, grouped_outer
from .operators import traceable
from .routing import Routing, route
from .second_run import Rest, apply_in_parts, unfinished

__all__ = ["ExpertGradients", "experts", "experts_backward", "experts_finish", "experts_reference", "experts_start", "first_gemm"]

Five = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

Six = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class ExpertGradients(NamedTuple):
    """What `experts_backward` returns: a tensor each, empty where it is not needed. factors: the gradients of the adapters'."""

    hidden: torch.Tensor
    scores: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: Any
    down_bias: Any
    factors: ExpertFactors


def experts_reference(
    hidden, expert, scores, gate_up_weight, down_weight, gate_up_bias, down_bias, transposed, interleaved, alpha, limit,
    factors: ExpertFactors = NO_FACTORS,
) -> torch.Tensor:  # fmt: skip
    """What `experts` returns, in PyTorch operations whose sizes do not depend on the routing: every expert sees every token, and what
    it makes of those that do not go to it is left out."""
    if not transposed:
        gate_up_weight, down_weight = gate_up_weight.transpose(1, 2), down_weight.transpose(1, 2)
    acc, count = accumulation_dtype(hidden.dtype), gate_up_weight.shape[0]
    chosen = torch.stack([expert == number for number in range(count)])  # [experts, tokens, top-k]
    weight = torch.where(chosen, scores.to(acc), 0.0).sum(2)[..., None]
    gate_up = adapted_reference(hidden, gate_up_weight, factors.gate_up).to(acc)
    if gate_up_bias is not None:
        gate_up = gate_up + gate_up_bias[:, None]
    gate_up = torch.where(chosen.any(2)[..., None], gate_up, 0.0)  # so that no expert's overflow reaches another's tokens
    gated = Gate(interleaved, alpha, limit).apply(gate_up) * weight
    out = adapted_reference(gated.to(hidden.dtype), down_weight, factors.down).to(acc)
    if down_bias is not None:
        out = out + weight * down_bias[:, None]
    return out.sum(0).to(hidden.dtype)


def first_gemm(
    hidden, gate_up_weight, order, position, groups: Groups, transposed: bool, factors: Optional[Factors] = None
) -> torch.Tensor:
    """The output of the first GEMM. factors: of its adapter."""
    weight = gate_up_weight if transposed else gate_up_weight.transpose(1, 2)
    return adapted_mm(token_rows(hidden, order, position), weight, factors, groups)


def _forward(
    hidden: torch.Tensor,
    expert: torch.Tensor,
    scores: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_up_bias: Optional[torch.Tensor],
    down_bias: Optional[torch.Tensor],
    transposed: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> Five:
    """(result, output of the first GEMM, and the routing: order, position, ends)"""
    gate_up, routing, groups = experts_start(hidden, expert, gate_up_weight, transposed)
    options = routing, groups, transposed, Gate(interleaved, alpha, limit)
    return experts_finish(gate_up, expert, scores, down_weight, gate_up_bias, down_bias, *options), gate_up, *routing


def experts_start(
    hidden, expert, gate_up_weight, transposed: bool, factors: Optional[Factors] = None
) -> Tuple[torch.Tensor, Routing, Groups]:
    """The part of the forward pass that the backward pass needs: the output of the first GEMM, the routing, and the same for GEMMs."""
    routing = route(expert, gate_up_weight.shape[0])
    groups = Groups(routing.ends, expert.numel())
    return first_gemm(hidden, gate_up_weight, routing.order, routing.position, groups, transposed, factors), routing, groups


def experts_finish(
    gate_up, expert, scores, down_weight, gate_up_bias, down_bias, routing: Routing, groups: Groups, transposed: bool, gate: Gate,
    factors: Optional[Factors] = None,
) -> torch.Tensor:  # fmt: skip
    """The result, with what `experts_start` returned. factors: of the second GEMM's adapter."""
    if expert.shape[0] == 0:
        return gate_up.new_empty((0, down_weight.shape[2 if transposed else 1]))
    row_scores = scores.reshape(-1)[routing.order].to(accumulation_dtype(gate_up.dtype))
    gated = gate_forward(gate_up, gate_up_bias, row_scores, routing.ends, gate)
    y = adapted_mm(gated, down_weight if transposed else down_weight.transpose(1, 2), factors, groups)
    del gated
    return token_sum(y, routing.position, expert, scores, down_bias)


def experts_backward(
    dout: torch.Tensor, inputs: tuple, gate_up: torch.Tensor, routing: Routing, options: tuple, needs: List[bool],
    factors: ExpertFactors = NO_FACTORS, need_factors: ExpertFactors = NO_FACTORS,
) -> ExpertGradients:  # fmt: skip
    """Gradients of hidden, scores, the two weights and the two biases, empty where `needs` says that they are not needed, and of the
    adapters' factors. Writes over gate_up, the output of the first GEMM.

    inputs: hidden, expert, scores, the weights and the biases; options: transposed, and what `Gate` holds.
    """
    hidden, expert, scores, gate_up_weight, down_weight, gate_up_bias, down_bias = inputs
    order, position, ends = routing
    transposed, gate = options[0], Gate(*options[1:])
    need_hidden, need_scores, need_gate_up, need_down, need_gate_up_bias, need_down_bias = needs
    experts, groups = gate_up_weight.shape[0], Groups(ends, expert.numel())
    nothing = hidden.new_empty(0)
    dhidden = dscores = dgate_up_weight = ddown_weight = dgate_up_bias = ddown_bias = nothing
    dout = unit_stride(dout)
    if need_down_bias:
        ddown_bias = torch.mm(dense(expert, scores, experts, dout.dtype).t(), dout)
    turned = ExpertFactors(*[None if each is None else each.turned for each in factors])
    rows = token_rows(dout, order, position)
    dlow = None if turned.down is None else narrow_mm(rows, turned.down, groups)
    dgated = adapted_mm(rows, down_weight.transpose(1, 2) if transposed else down_weight, turned.down, groups, dlow)
    row_scores = scores.reshape(-1)[order].to(accumulation_dtype(hidden.dtype))
    weights = need_down or need_gate_up_bias or any(need_factors.down or ())
    if hidden.shape[0]:
        dgate_up, gated, row_dscores, dbias = gate_backward(dgated, gate_up, gate_up_bias, row_scores, ends, gate, weights)
    else:
        dgate_up, gated, row_dscores = gate_up, dgated, row_scores
        dbias = None if gate_up_bias is None else torch.zeros_like(gate_up_bias)
    del dgated
    if need_gate_up_bias:
        dgate_up_bias = dbias
    if need_down:
        ddown_weight = grouped_outer(gated, rows, groups) if transposed else grouped_outer(rows, gated, groups)
    of_down = adapter_gradients(factors.down, gated, rows, dlow, groups, need_factors.down)
    del gated, rows
    if need_scores:
        dscores = row_dscores[torch.where(position < order.shape[0], position, 0)]
        if down_bias is not None:
            # What the second GEMM's bias adds to a row's result, times the gradient that arrives there.
            of_bias = torch.mm(dout, down_bias.t())
            dscores = dscores + of_bias.gather(1, expert.clamp(0, experts - 1).to(torch.int64))
        dscores = torch.where(position < order.shape[0], dscores, 0.0).to(scores.dtype)
    of_gate_up, trained = None, any(need_factors.gate_up or ())
    dlow = None if turned.gate_up is None or not (need_hidden or trained) else narrow_mm(dgate_up, turned.gate_up, groups)
    if need_gate_up or trained:
        rows = token_rows(hidden, order, position)
        if need_gate_up:
            dgate_up_weight = grouped_outer(rows, dgate_up, groups) if transposed else grouped_outer(dgate_up, rows, groups)
        of_gate_up = adapter_gradients(factors.gate_up, rows, dgate_up, dlow, groups, need_factors.gate_up)
        del rows
    if need_hidden:
        if hidden.shape[0]:
            weight = gate_up_weight.transpose(1, 2) if transposed else gate_up_weight
            dx = adapted_mm(dgate_up, weight, turned.gate_up, groups, dlow)
            dhidden = token_sum(dx, position)
        else:
            dhidden = torch.zeros_like(hidden)
    dweights = dgate_up_weight, ddown_weight, dgate_up_bias, ddown_bias
    return ExpertGradients(dhidden, dscores, *dweights, ExpertFactors(of_gate_up, of_down))


def _functional_backward(
    dout: torch.Tensor,
    hidden: torch.Tensor,
    expert: torch.Tensor,
    scores: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_up_bias: Optional[torch.Tensor],
    down_bias: Optional[torch.Tensor],
    gate_up: torch.Tensor,
    order: torch.Tensor,
    position: torch.Tensor,
    ends: torch.Tensor,
    transposed: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
    needs: List[bool],
) -> Six:
    """`experts_backward` that writes over nothing and returns nothing twice, as a tracer wants it."""
    inputs = hidden, expert, scores, gate_up_weight, down_weight, gate_up_bias, down_bias
    options = transposed, interleaved, alpha, limit
    grads = experts_backward(dout, inputs, gate_up.clone(), Routing(order, position, ends), options, needs)
    a, b, c, d, e, f = (grad if need else hidden.new_empty(0) for grad, need in zip(grads, needs))
    return a, b, c, d, e, f


def _fake_forward(hidden, expert, scores, gate_up_weight, down_weight, gate_up_bias, down_bias, transposed, interleaved, alpha, limit):
    rows = expert.numel()
    width = gate_up_weight.shape[2 if transposed else 1]
    integers = {"dtype": torch.int32, "device": hidden.device}
    order = torch.empty(rows, dtype=torch.int64, device=hidden.device)
    position, ends = torch.empty(expert.shape, **integers), torch.empty(gate_up_weight.shape[0], **integers)
    return hidden.new_empty(hidden.shape), hidden.new_empty((rows, width)), order, position, ends


def _fake_backward(
    dout, hidden, expert, scores, gate_up_weight, down_weight, gate_up_bias, down_bias,
    gate_up, order, position, ends, transposed, interleaved, alpha, limit, needs
):  # fmt: skip
    tensors = hidden, scores, gate_up_weight, down_weight, gate_up_bias, down_bias
    return tuple(t.new_empty(t.shape) if need else hidden.new_empty(0) for t, need in zip(tensors, needs))


experts_forward = traceable("experts_forward", _forward, _fake_forward)

_traced_backward = traceable("experts_backward", _functional_backward, _fake_backward)


class _Experts(Function):
    def forward(ctx, rest: Rest, hidden, expert, scores, gate_up_weight, down_weight, gate_up_bias, down_bias, *options):
        inputs = (hidden, expert, scores, gate_up_weight, down_weight, gate_up_bias, down_bias)
        ctx.options, ctx.written_over = options, False
        if rest is None:
            out, *saved = experts_forward(*inputs, *options)
            ctx.save_for_backward(*inputs, *saved)
            return out
        gate_up, routing, groups = experts_start(hidden, expert, gate_up_weight, options[0])
        ctx.save_for_backward(*inputs, gate_up, *routing)
        left = gate_up, expert, scores, down_weight, gate_up_bias, down_bias, routing, groups, options[0], Gate(*options[1:])
        return unfinished(rest, functools.partial(experts_finish, *left), hidden.shape, hidden)

    @outside_autocast
    def backward(ctx, dout):
        *inputs, gate_up, order, position, ends = ctx.saved_tensors
        needed = ctx.needs_input_grad
        needs = [needed[i] for i in (1, 3, 4, 5, 6, 7)]
        if torch.compiler.is_compiling():
            found = _traced_backward(dout, *inputs, gate_up, order, position, ends, *ctx.options, needs)
        else:
            if ctx.written_over:  # a second backward pass (retain_graph)
                hidden, expert, _, weight, *_ = inputs
                gate_up = first_gemm(hidden, weight, order, position, Groups(ends, expert.numel()), ctx.options[0])
            ctx.written_over = True
            found = experts_backward(dout, inputs, gate_up, Routing(order, position, ends), ctx.options, needs)
        dhidden, dscores, *dweights = [gradient if need else None for gradient, need in zip(found, needs)]
        return (None, dhidden, None, dscores, *dweights, None, None, None, None)


def experts(
    hidden: torch.Tensor,
    expert: torch.Tensor,
    scores: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_up_bias: Optional[torch.Tensor] = None,
    down_bias: Optional[torch.Tensor] = None,
    *,
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 0.0,
    limit: float = float("inf"),
) -> torch.Tensor:
    """sum over k of scores[:, k] * down(gate(gate_up(hidden))), each with the weights of the expert expert[:, k].

    hidden: [tokens, hidden], bf16, fp16 or fp32 (float64 runs in PyTorch). expert: [tokens, top-k] of an integer dtype; an id
    outside [0, experts), however far, is no expert: nothing is added for it, and its score has no gradient (transformers' expert
    parallelism marks the experts of other processes so). scores: [tokens, top-k], the routing weights, of any floating point dtype.
    gate_up_weight: [experts, 2 * width, hidden] and down_weight: [experts, hidden, width], or with `transposed` [experts,
    hidden, 2 * width] and [experts, width, hidden]; gate_up_bias: [experts, 2 * width]; down_bias: [experts, hidden]; all of
    hidden's dtype and device. interleaved: the columns of gate_up alternate between gate and up; else gate comes before up.

    The gate is silu(gate) * up, or with alpha > 0 GPT-OSS's: (up + 1) * gate * sigmoid(alpha * gate), gate clamped to at most
    `limit` and up to [-limit, limit] before; bastile/gpt-oss has kernels for it, elsewhere it runs in PyTorch. Returns [tokens, hidden].
    Differentiable in all but `expert`; nothing is computed for a weight that does not require a gradient. In bf16 and fp16, where hidden
    and width are multiples of 8, the host does not wait for the device, and autocast changes nothing, as with torch's grouped GEMMs: the
    GEMMs are torch._grouped_mm where that is a kernel, else our own. Otherwise there is one GEMM an expert. Raises ValueError when shapes,
    dtypes or devices do not fit.
    """
    _check(hidden, expert, scores, gate_up_weight, down_weight, gate_up_bias, down_bias, transposed, alpha, limit)
    options = (bool(transposed), bool(interleaved), float(alpha), float(limit))
    expert = expert.to(torch.int64)  # one byte holds neither -1 and 255 nor the number of experts
    tensors = (hidden, expert, scores, gate_up_weight, down_weight, gate_up_bias, down_bias)
    with without_autocast(hidden.device):
        return experts_reference(*tensors, *options) if needs_formula(*tensors) else apply_in_parts(_Experts, *tensors, *options)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _check(hidden, expert, scores, gate_up_weight, down_weight, gate_up_bias, down_bias, transposed, alpha, limit):
    need_floats(hidden=hidden, scores=scores)
    if hidden.dim() != 2:
        fail("hidden", describe(hidden), "[tokens, hidden]")
    if expert.dim() != 2 or expert.shape[0] != hidden.shape[0] or expert.shape[1] == 0 or not _is_integer(expert.dtype):
        fail("expert", describe(expert), f"[{hidden.shape[0]}, top-k] of an integer dtype")
    if scores.shape != expert.shape:
        fail("scores", describe(scores), f"{list(expert.shape)}, one for each entry of expert")
    if gate_up_weight.dim() != 3 or down_weight.dim() != 3:
        wrong = "gate_up_weight" if gate_up_weight.dim() != 3 else "down_weight"
        fail(wrong, describe(gate_up_weight if gate_up_weight.dim() != 3 else down_weight), "three dimensions, the experts first")
    columns, width = hidden.shape[1], down_weight.shape[1 if transposed else 2]
    count = gate_up_weight.shape[0]
    shapes = {
        "gate_up_weight": (gate_up_weight, (count, columns, 2 * width) if transposed else (count, 2 * width, columns)),
        "down_weight": (down_weight, (count, width, columns) if transposed else (count, columns, width)),
        "gate_up_bias": (gate_up_bias, (count, 2 * width)),
        "down_bias": (down_bias, (count, columns)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and (tensor.shape != shape or tensor.dtype != hidden.dtype or tensor.device != hidden.device):
            fail(name, describe(tensor), f"{hidden.dtype} {list(shape)} on {hidden.device}")
    need_device("hidden", hidden.device, expert=expert, scores=scores)
    if alpha and not limit > 0:
        fail("limit", limit, "a positive number")


def _self_check(i, biases: bool = False, **options) -> torch.Tensor:
    count, inner, width = 4, 256, 128
    shapes = ((count, inner, 2 * width), (count, width, inner)) if biases else ((count, 2 * width, inner), (count, inner, width))
    hidden, expert, scores = i.leaf(i.tokens, inner), i.integers(count, i.tokens, 2), i.leaf(i.tokens, 2)
    weights = [i.leaf(*shape, scale=inner**-0.5 if place == 0 else width**-0.5) for place, shape in enumerate(shapes)]
    more = (i.leaf(count, 2 * width), i.leaf(count, inner)) if biases else ()
    return experts(hidden, expert, scores, *weights, *more, **options)


SELF_CHECKS = {
    "experts": _self_check,
    "experts (of GPT-OSS)": lambda i: _self_check(i, True, transposed=True, interleaved=True, alpha=1.702, limit=7.0),
}
