"""Kullback-Leibler divergence, Jensen-Shannon divergence and total variation distance, of distributions or of logits.

The gradient by the student is written by the forward pass and handed over to the first backward pass, which multiplies it in place by
what arrives from above. A second backward pass finds it gone and computes it anew; so does every one in fp16, where a gradient that is
not yet multiplied by the loss scale would be rounded to 0. Of logits nothing is kept but one number or two a row.
"""

from typing import Iterator, Optional, Tuple

import torch

from ..runtime.launch import Kernel
from .arguments import checked_index, describe, fail, need_alike
from .arrays import accumulation_dtype, flat_rows, kernels_compute, new_like
from .autograd import Function, apply_function, needs_formula
from .divergence_terms import DivergenceOptions, inverse_of_count, losses_of, reference
from .linear_head import multiply
from .operators import traceable
from .rows import blocks_of_pieces
from .softmax import as_rows, log_sum_exp, pieces, row_sum, slabs
from .sums import inverse_count, nothing, total

__all__ = [
    "KINDS", "check_numbers", "check_reduction", "divergence_forward", "jsd", "kl_div", "labelled_slabs", "sums_of_logits", "tvd",
]  # fmt: skip

_kernels = {
    kind: Kernel(name, grid=lambda c, x, y, labels, factor, gradient, partial, *_: (partial.numel(),))
    for kind, name in (("kl", "kl_divergence"), ("js", "js_divergence"), ("tv", "tv_distance"))
}

KINDS = {"js": 0, "tv": 1}

_logits_loss = {kind: Kernel("divergence_of_logits", grid=blocks_of_pieces, where={"KIND": n}) for kind, n in KINDS.items()}

_logits_gradient = {kind: Kernel("divergence_of_logits_gradient", grid=blocks_of_pieces, where={"KIND": n}) for kind, n in KINDS.items()}

REDUCTIONS = ("none", "mean", "batchmean", "sum")


def _with_kernels(x, y, labels, options: DivergenceOptions, factor, writes: bool) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Computes what `reference` does, of rows; the gradient only if `writes`."""
    x, y = as_rows(x), as_rows(y)
    kernel = _kernels[options.kind]
    parts = -(-x.shape[1] // kernel.constant("SPAN"))
    partial = torch.empty((x.shape[0], parts), dtype=torch.float32, device=x.device)
    gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device) if writes else nothing(x.device, x.dtype, 2)
    parameter = () if options.kind == "tv" else (options.parameter,)
    numbers = (options.scale, *parameter, options.ignore_index, int(labels is not None), int(factor is not None), int(writes))
    factor = nothing(x.device, torch.float32) if factor is None else factor
    for slab in slabs(parts, x, y, partial, *(() if labels is None else (labels,)), *((gradient,) if writes else ())):
        a, b, c, *rest = slab
        of_labels = nothing(x.device, torch.int64) if labels is None else rest[0]
        kernel(a, b, of_labels, factor, rest[-1] if writes else gradient, c, *numbers)
    return total(partial), gradient if writes else None


def _forward(
    x: torch.Tensor, y: torch.Tensor, labels: Optional[torch.Tensor], kind: str, scale: float, averages: bool, parameter: float,
    ignore_index: int, writes: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient or nothing) of distributions."""
    options, kernels = DivergenceOptions(kind, scale, averages, parameter, ignore_index, None), kernels_compute(x, y, labels)
    factor = inverse_of_count(labels, ignore_index, accumulation_dtype(x.dtype), kernels) if averages else None
    if not kernels:
        loss, gradient = reference(x, y, labels, options, factor)
        return loss, gradient if writes else x.new_empty(0)
    loss, written = _with_kernels(x, y, labels, options, factor, writes)
    return loss, x.new_empty(0) if written is None else written.view(x.shape)


def _backward(
    dloss: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    labels: Optional[torch.Tensor],
    kind: str,
    scale: float,
    averages: bool,
    parameter: float,
    ignore_index: int,
) -> torch.Tensor:
    """The gradient, multiplied by dloss before it is rounded."""
    options = DivergenceOptions(kind, scale, averages, parameter, ignore_index, None)
    factor = dloss.to(accumulation_dtype(x.dtype)).view(1)
    kernels = kernels_compute(x, y, labels, dloss)
    if averages:
        factor = factor * inverse_of_count(labels, ignore_index, factor.dtype, kernels)
    gradient = (_with_kernels(x, y, labels, options, factor, True) if kernels else reference(x, y, labels, options, factor))[1]
    assert gradient is not None
    return gradient.view(x.shape)


divergence_forward = traceable("divergence_forward", _forward)
divergence_backward = traceable("divergence_backward", _backward)


class _Divergence(Function):
    """Hands the forward pass's gradient over once; see the head of this file."""

    def forward(ctx, x, y, labels, options: DivergenceOptions):
        ctx.options, ctx.gradient = options.of_distributions, None
        keeps = x.dtype != torch.float16 and not torch.compiler.is_compiling()
        ctx.save_for_backward(x, y, labels)
        loss, gradient = divergence_forward(x, y, labels, *ctx.options, keeps)
        if keeps:
            ctx.gradient = gradient
        return loss

    def backward(ctx, dloss):
        x, y, labels = ctx.saved_tensors
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            gradient = divergence_backward(dloss, x, y, labels, *ctx.options)
        else:
            multiply(gradient, dloss)
        return gradient, None, None, None


def _rows_of_logits(x):
    """What `_logits_forward` returns of rows."""
    return tuple(x.new_zeros((x.shape[0], *more), dtype=accumulation_dtype(x.dtype)) for more in ((2,), (2,), ()))


def labelled_slabs(kernel: Kernel, labels: Optional[torch.Tensor], *rows: torch.Tensor) -> Iterator[tuple]:
    """Yields the rows of each launch of a kernel, logits first, followed by their labels, or by an empty tensor where there are none."""
    given = () if labels is None else (labels,)
    none = () if given else (nothing(rows[0].device, torch.int64),)
    for slab in slabs(pieces(kernel, rows[0].shape[1]), *rows, *given):
        yield (*slab, *none)


def sums_of_logits(x, y, labels, options: DivergenceOptions) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the loss of each piece of a row, its sum of g, lse of x, lse of y), by kernels. x, y: rows of logits."""
    numbers, kernel = options.numbers(labels), _logits_loss[options.kind]
    lse = [log_sum_exp(z, numbers[1]) for z in (x, y)]
    shape = x.shape[0], pieces(kernel, x.shape[1])
    part_loss, part_slope = (torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(2))
    for *logits, loss, slope, of_labels in labelled_slabs(kernel, labels, x, y, *lse, part_loss, part_slope):
        kernel(*logits, of_labels, loss, slope, *numbers)
    return part_loss, part_slope, lse[0], lse[1]


def _logits_forward(
    x: torch.Tensor,
    y: torch.Tensor,
    labels: Optional[torch.Tensor],
    kind: str,
    scale: float,
    averages: bool,
    parameter: float,
    ignore_index: int,
    temperature: float,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, lse of x, lse of y, sum of g): a number, and two, two and one of a row; see kernel_src/divergence.py."""
    options = DivergenceOptions(kind, scale, averages, parameter, ignore_index, temperature)
    if not kernels_compute(x, y, labels):
        factor = inverse_of_count(labels, ignore_index, accumulation_dtype(x.dtype)) if averages else None
        *lse, slope = _rows_of_logits(x)  # unused
        return reference(x, y, labels, options, factor)[0], *lse, slope
    part_loss, part_slope, lse_x, lse_y = sums_of_logits(as_rows(x), as_rows(y), labels, options)
    loss = total(part_loss) * scale
    if averages:
        loss = loss * inverse_count(labels, ignore_index).view(())
    return loss, lse_x, lse_y, row_sum(part_slope)


def _logits_backward(
    dloss: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    labels: Optional[torch.Tensor],
    lse_x: torch.Tensor,
    lse_y: torch.Tensor,
    slope: torch.Tensor,
    kind: str,
    scale: float,
    averages: bool,
    parameter: float,
    ignore_index: int,
    temperature: float,
) -> torch.Tensor:
    options = DivergenceOptions(kind, scale, averages, parameter, ignore_index, temperature)
    factor, kernels = dloss.to(accumulation_dtype(x.dtype)).view(1), kernels_compute(x, y, labels, dloss)
    if averages:
        factor = factor * inverse_of_count(labels, ignore_index, factor.dtype, kernels)
    if not kernels:
        return reference(x, y, labels, options, factor)[1]
    factor = factor * scale
    a, b, dx, kernel = as_rows(x), as_rows(y), new_like(x), _logits_gradient[kind]
    for *rows, g, d, of_labels in labelled_slabs(kernel, labels, a, b, lse_x, lse_y, slope, dx.view(a.shape)):
        kernel(*rows, of_labels, g, factor, d, *options.numbers(labels))
    return dx


def _logits_forward_fake(x, *_):
    return (x.new_empty((), dtype=accumulation_dtype(x.dtype)), *_rows_of_logits(x))


divergence_of_logits_forward = traceable("divergence_of_logits_forward", _logits_forward, _logits_forward_fake)
divergence_of_logits_backward = traceable("divergence_of_logits_backward", _logits_backward, lambda dloss, x, *_: x.new_empty(x.shape))


class _DivergenceOfLogits(Function):
    def forward(ctx, x, y, labels, options: DivergenceOptions):
        ctx.options = tuple(options)
        loss, *rows = divergence_of_logits_forward(x, y, labels, *options)
        ctx.save_for_backward(x, y, labels, *rows)
        return loss

    def backward(ctx, dloss):
        return divergence_of_logits_backward(dloss, *ctx.saved_tensors, *ctx.options), None, None, None


def kl_div(
    input: torch.Tensor,
    target: torch.Tensor,
    reduction: str = "mean",
    log_target: bool = False,
    *,
    eps: float = 0.0,
    labels: Optional[torch.Tensor] = None,
    ignore_index: int = -100,
    from_logits: bool = False,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Computes the Kullback-Leibler divergence of input from target, target * (log(target) - input), as torch.nn.functional.kl_div.

    input: log-probabilities [..., classes]; target: probabilities like it, or with `log_target` log-probabilities. A probability of
    0 contributes nothing. eps: the logarithm is taken of max(target, eps).
    The rest as in `jsd`, except that "batchmean" divides by input.shape[0], where there are no labels.
    """
    if from_logits and (log_target or eps):
        fail("log_target" if log_target else "eps", log_target or eps, "its default for logits: both distributions come from them")
    check_numbers(eps=eps)
    kind = "js" if log_target or from_logits else "kl"  # KL is the JSD of beta = 0
    batch = input.shape[0] if input.dim() > 1 and labels is None else None
    return _divergence(kind, input, target, reduction, float(eps) if kind == "kl" else 0.0, labels, ignore_index, from_logits, temperature,
                       batch)


def jsd(
    input: torch.Tensor,
    target: torch.Tensor,
    labels: Optional[torch.Tensor] = None,
    *,
    beta: float = 0.5,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    from_logits: bool = False,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Computes the generalised Jensen-Shannon divergence of a student and a teacher (arXiv 2306.13649).

    beta * KL(P || M) + (1 - beta) * KL(Q || M), M = beta * P + (1 - beta) * Q; beta 0 gives KL(P || Q) and 1 KL(Q || P).

    input: the student's log-probabilities log Q, [..., classes]; target: the teacher's, log P, like it: one shape, dtype (bf16, fp16
    or fp32; float64 runs in PyTorch) and device. -inf is the logarithm of 0, which contributes nothing. from_logits: both are
    logits, of which log_softmax(logits / temperature) is taken.
    labels: input's leading dimensions, int64; rows whose label is ignore_index are ignored.
    reduction: "batchmean" divides the sum by the number of rows, or of those that count; "mean" also by classes; "sum"; "none"
    gives a loss for every element, and is computed by PyTorch.

    Returns a float32 scalar, the same bits on every run; 0 where no row counts. Differentiable in input; in target too, by
    PyTorch's own operators, where it requires a gradient. Raises ValueError where shapes, dtypes, devices or options do not fit.
    """
    check_numbers(beta=beta)
    return _divergence("js", input, target, reduction, float(beta), labels, ignore_index, from_logits, temperature)


def tvd(
    input: torch.Tensor,
    target: torch.Tensor,
    labels: Optional[torch.Tensor] = None,
    *,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    from_logits: bool = False,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Computes the total variation distance, half the sum of |input - target|, of probabilities; where they are equal the gradient is 0.

    input, target: probabilities [..., classes], or with `from_logits` logits. The rest as in `jsd`.
    """
    return _divergence("tv", input, target, reduction, 0.0, labels, ignore_index, from_logits, temperature)


def _divergence(kind, x, y, reduction, parameter, labels, ignore_index, from_logits, temperature, batch=None) -> torch.Tensor:
    """batch: what "batchmean" divides by; by default the rows."""
    _check(x, y, labels, reduction, from_logits, temperature)
    ignore_index = checked_index(ignore_index)
    shape, classes = x.shape, x.shape[-1]
    x, y = flat_rows(x), flat_rows(y)
    labels = None if labels is None else labels.reshape(-1).contiguous()
    rows = 1 if labels is not None else batch or x.shape[0]
    scale = {"mean": 1.0 / max(rows * classes if batch is None else x.numel(), 1), "batchmean": 1.0 / max(rows, 1)}.get(reduction, 1.0)
    averages = labels is not None and reduction != "sum"
    options = DivergenceOptions(kind, scale, averages, parameter, ignore_index, float(temperature) if from_logits else None)
    differentiable = torch.is_grad_enabled()
    if reduction == "none" or (differentiable and y.requires_grad) or needs_formula(x, y, labels):
        losses = losses_of(x, y, labels, options)
        if reduction == "none":
            return losses.view(shape)
        return losses.sum() * scale * (inverse_of_count(labels, options.ignore_index, losses.dtype).view(()) if averages else 1.0)
    if differentiable and x.requires_grad:
        return apply_function(_DivergenceOfLogits if from_logits else _Divergence, x, y, labels, options)
    if from_logits:
        return divergence_of_logits_forward(x, y, labels, *options)[0]
    return divergence_forward(x, y, labels, *options.of_distributions, False)[0]


def _check(x, y, labels, reduction, from_logits, temperature):
    if not x.is_floating_point() or x.dim() == 0:
        fail("input", describe(x), "a floating point tensor [..., classes]")
    need_alike("target", y, "input", x)
    if labels is not None and (labels.shape != x.shape[:-1] or labels.dtype != torch.int64 or labels.device != x.device):
        fail("labels", describe(labels), f"torch.int64 {list(x.shape[:-1])} on {x.device}, one a row")
    check_reduction(reduction)
    check_numbers(temperature=temperature)
    if temperature != 1 and not from_logits:
        fail("temperature", temperature, "1 without from_logits: it divides logits")


def check_reduction(reduction):
    if reduction not in REDUCTIONS:
        fail("reduction", repr(reduction), "'none', 'mean', 'batchmean' or 'sum'")


def check_numbers(beta=0.5, eps=0.0, temperature=1.0):
    if not 0.0 <= beta <= 1.0:
        fail("beta", beta, "a number from 0 to 1")
    if not 0.0 <= eps < 1.0:
        fail("eps", eps, "a number from 0 to 1")
    if not 0.0 < temperature < float("inf"):
        fail("temperature", temperature, "a positive number")


SELF_CHECKS = {
    "kl_div": lambda i: i.call(kl_div, i.log_probs(), i.probs().detach(), reduction="sum"),
    "jsd": lambda i: i.call(jsd, i.log_probs(), i.log_probs().detach(), reduction="sum"),
    "tvd": lambda i: i.call(tvd, i.probs(), i.probs().detach(), reduction="sum"),
}
