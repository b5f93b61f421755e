"""The second half of a decoder layer with a mixture of experts as one autograd node: attention's output projection, RMSNorm, the router and
its top-k experts, with both residual connections.

    n = RMSNorm(x)      p = softmax(n @ router.T)      y = x + sum over the top-k experts e of p[e] * expert_e(n)

with the k probabilities divided by their sum where the router is `normalised`. As in `decoder_nodes`, what is saved is small: the residual
stream, one number a row, the experts that were chosen, and the output of the first grouped GEMM. The normalised input, the rows that
are gathered of it and the gated rows are computed again in the backward pass, bit for bit.
"""

import functools
from contextlib import nullcontext
from typing import NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn.functional import linear

from .autocast import outside_autocast, without_autocast
from .common import accumulation_dtype, apply_function, autocasts, describe, fail, need_floats, needs_formula, once_differentiable
from .experts import experts_backward, experts_forward, experts_reference, first_gemm
from .grouped_gemm import Groups
from .projected_nodes import check_projection
from .projection import Projection, Projections, from_parts, numbers_of, projection_reference, tensors_of
from .rms_norm import add_rms_norm_backward, add_rms_norm_forward, rms_norm_forward, rms_norm_recompute, rms_norm_reference
from .routing import Routing

SILU = (False, False, 0.0, float("inf"))  # of `experts`: weights as torch.nn.Linear has them, gate before up, silu(gate) * up


class Router(NamedTuple):
    """weight: [experts, hidden]. top_k: experts a token goes to. normalised: whether their probabilities are divided by their sum."""

    weight: torch.Tensor
    top_k: int
    normalised: bool


def choose_experts(logits: torch.Tensor, top_k: int, normalised: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """(scores, expert), [tokens, top-k] each, of a router's logits [tokens, experts]; scores are in the dtype of the arithmetic, and as
    exact as they would be in that of the logits."""
    scores, expert = torch.topk(torch.softmax(logits, -1, dtype=accumulation_dtype(logits.dtype)), top_k, -1)
    if normalised:
        scores = scores / scores.sum(-1, keepdim=True)
    return scores, expert


def _rounded(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scores with the exactness that the model gives them, in the dtype that they are in."""
    return scores.to(dtype).to(scores.dtype)


def router_backward(dscores, scores, expert, logits, shape, normalised, dtype) -> torch.Tensor:
    """The gradient of a router's logits [tokens, experts], in a dtype. dscores, scores: [tokens, top-k] in the dtype of the arithmetic,
    before rounding; logits: None where the router is `normalised`, whose scores are the softmax over the chosen experts alone."""
    of_scores = scores * dscores
    total = of_scores.sum(-1, keepdim=True)
    if normalised:
        return torch.zeros(shape, dtype=dtype, device=scores.device).scatter_(1, expert, (of_scores - scores * total).to(dtype))
    dlogits = torch.softmax(logits, -1, dtype=scores.dtype).mul_(-total)
    return dlogits.scatter_add_(1, expert, of_scores).to(dtype)


def norm_experts_reference(x, norm_weight, router, gate_up_weight, down_weight, eps, attended, o) -> torch.Tensor:
    """What `norm_experts` returns, in PyTorch."""
    if o is not None:
        x = x + projection_reference(attended, o).view(x.shape)
    y = rms_norm_reference(x, norm_weight, eps)[0].reshape(-1, x.shape[-1])
    scores, expert = choose_experts(linear(y, router.weight), router.top_k, router.normalised)
    out = experts_reference(y, expert, scores.to(y.dtype), gate_up_weight, down_weight, None, None, *SILU)
    return x + out.view(x.shape)


class _NormExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, attended, norm_weight, eps, router_weight, top_k, normalised, gate_up_weight, down_weight, recompute, numbers,
                *tensors):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        before, saved = from_parts(tensors, numbers), []
        ctx.o = None
        if before:
            ctx.o = Projections(before, x.dtype)
            (added,) = ctx.o.forward(attended, (before[0].bias,))
            saved = ctx.o.saved()
            x, y, rstd = add_rms_norm_forward(added, x, norm_weight, eps)
            del added
        else:
            y, rstd = rms_norm_forward(x, norm_weight, eps)
        logits = linear(y, router_weight)
        scores, expert = choose_experts(logits, top_k, normalised)
        weights = gate_up_weight, down_weight, None, None
        found, gate_up, *routing = experts_forward(y, expert, _rounded(scores, y.dtype), *weights, *SILU)
        del y
        if recompute:
            gate_up = None
        ctx.save_for_backward(
            *(x, attended, norm_weight, rstd, router_weight, scores, expert, None if normalised else logits),
            *(gate_up_weight, down_weight, gate_up, *routing, *saved),
        )
        ctx.normalised, ctx.shape, ctx.written_over = normalised, shape, False
        # Not a view of the flat result: FSDP's hooks warn of a module that returns a view.
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        torch.add(x, found, out=out.view(x.shape))
        return out

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx, dout):
        x, attended, norm_weight, rstd, router_weight, scores, expert, logits, *tensors = ctx.saved_tensors
        gate_up_weight, down_weight, gate_up, order, position, ends, *tensors = tensors
        need_x, need_attended, need_norm, _, need_router, _, _, need_gate_up, need_down, _, _, *need_o = ctx.needs_input_grad
        need_total = need_x or need_attended or need_norm or any(need_o)
        need_logits = need_total or need_router
        dout = dout.reshape(x.shape)
        normed = functools.partial(rms_norm_recompute, x, norm_weight, rstd)
        again = gate_up is None or ctx.written_over  # which it is in a second backward pass (retain_graph)
        y = normed() if need_gate_up or need_router or again else x  # of which `experts_backward` then reads the shape alone
        if again:
            gate_up = first_gemm(y, gate_up_weight, order, Groups(ends, expert.numel()), expert.shape[1], SILU[0])
        ctx.written_over = True
        dy, dscores, dgate_up, ddown, _, _ = experts_backward(
            dout,
            (y, expert, _rounded(scores, x.dtype), gate_up_weight, down_weight, None, None),
            gate_up,
            Routing(order, position, ends),
            SILU,
            [need_total, need_logits, need_gate_up, need_down, False, False],
        )
        del gate_up
        dx = dattended = dnorm = drouter = None
        if need_logits:
            shape = x.shape[0], router_weight.shape[0]
            dlogits = router_backward(dscores, scores, expert, logits, shape, ctx.normalised, x.dtype)
            drouter = torch.mm(dlogits.t(), y) if need_router else None
        del y
        do: list = [None] * len(need_o)
        if need_total:
            dy.addmm_(dlogits, router_weight)
            dx, dnorm = add_rms_norm_backward(dy, dout, x, norm_weight, rstd, need_norm)
            if ctx.o is not None:
                o, _ = ctx.o.loaded(tensors)
                dlow = o.low_gradient((dx,))
                do = o.gradients((dx,), dlow, lambda: attended, need_o)
                dattended = o.input_gradient((dx,), dlow) if need_attended else None
        return (
            *(dx.view(ctx.shape) if need_x else None, dattended, dnorm if need_norm else None, None, drouter, None, None),
            *(dgate_up if need_gate_up else None, ddown if need_down else None, None, None, *do),
        )


def norm_experts(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    router: Router,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    eps: float = 1e-6,
    attended: Optional[torch.Tensor] = None,
    o: Optional[Projection] = None,
    recompute: bool = False,
) -> torch.Tensor:
    """x + the weighted sum of what the experts that the router chooses make of RMSNorm(x), of x + o(attended) in x's place where these are
    given.

    x: [..., hidden]; norm_weight: [hidden]; router: its weight [experts, hidden]; gate_up_weight: [experts, 2 * width, hidden], gate before
    up; down_weight: [experts, hidden, width]; attended: [tokens, features], attention's output; all of one dtype and device. o: attention's
    output projection to hidden, whose tensors may be float32 where x is narrower. recompute: what the experts' first products give is
    made again in the backward pass, bit for bit, instead of kept. Returns [..., hidden]. Differentiable in all tensors;
    nothing is computed for a weight that does not require a gradient. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    _check(x, norm_weight, router, gate_up_weight, down_weight, attended, o)
    projections = () if o is None else (o,)
    dense = [part for part in tensors_of(projections) if isinstance(part, torch.Tensor)]
    with without_autocast(x.device) if autocasts(x.device) else nullcontext():
        if needs_formula(x, norm_weight, router.weight, gate_up_weight, down_weight, attended, *dense):
            return norm_experts_reference(x, norm_weight, router, gate_up_weight, down_weight, eps, attended, o)
        arguments = x, attended, norm_weight, float(eps), *router, gate_up_weight, down_weight
        return apply_function(_NormExperts, *arguments, bool(recompute), numbers_of(projections), *tensors_of(projections))


def _check(x, norm_weight, router: Router, gate_up_weight, down_weight, attended, o) -> None:
    need_floats(x=x)
    if x.dim() == 0 or down_weight.dim() != 3:
        fail("down_weight", describe(down_weight), f"[experts, hidden, width] for x, which is {describe(x)}")
    hidden, (experts, _, width) = x.shape[-1], down_weight.shape
    expected: Sequence = (
        ("norm_weight", norm_weight, (hidden,)),
        ("router.weight", router.weight, (experts, hidden)),
        ("gate_up_weight", gate_up_weight, (experts, 2 * width, hidden)),
        ("down_weight", down_weight, (experts, hidden, width)),
    )
    if (o is None) != (attended is None):
        fail("attended", "None" if attended is None else describe(attended), "it and o, or neither")
    if o is not None and attended is not None:
        features = o.weight.shape[-1]
        expected = (*expected, ("attended", attended, (x.numel() // hidden if hidden else 0, features)))
        check_projection("o", o, hidden, features, x.dtype, x.device)
    for name, tensor, shape in expected:
        if tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device:
            fail(name, describe(tensor), f"{x.dtype} {list(shape)} on {x.device}")
    if not 1 <= router.top_k <= experts:
        fail("router.top_k", router.top_k, f"from 1 to the {experts} experts")
