"""Cross entropy of logits that the caller keeps: nothing is written over them, and their gradient takes memory in the backward pass only.

The forward pass reads the logits once and leaves two numbers of a token, its lse; the backward pass reads them again and writes the
gradient. So it may run twice, and what arrives from above is multiplied in before the gradient is rounded.
"""

from typing import Optional, Tuple, Union

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel
from ..runtime.replay import replayed
from .arguments import describe, fail
from .arrays import accumulation_dtype, flat_rows, kernels_compute, new_like
from .autograd import Function, apply_function, needs_formula
from .cross_entropy import (
    Chunk,
    CrossEntropyOptions,
    LinearCrossEntropyOutput,
    TokenLosses,
    TorchChunk,
    check_labels,
    check_one_value_a_class,
    check_reduction,
    checked_options,
    distance_of,
    is_counted,
    output_of,
    reduced,
    reduction_scale,
    shares_of,
    z_loss_of,
)
from .operators import traceable
from .rows import blocks_of_pieces, one_block_a_row
from .softmax import as_rows, most_pieces, pieces, slabs
from .sums import counted_mean, inverse_count, total

__all__ = ["cross_entropy"]

_statistics = Kernel("cross_entropy_statistics", grid=blocks_of_pieces)
_statistics_weighted = Kernel("cross_entropy_statistics_weighted", grid=blocks_of_pieces)
_combine = Kernel("cross_entropy_combine", grid=one_block_a_row)
_gradient = Kernel("cross_entropy_backward", grid=blocks_of_pieces)
_gradient_weighted = Kernel("cross_entropy_backward_weighted", grid=blocks_of_pieces)


def _plain(options: CrossEntropyOptions, class_weight) -> bool:
    return options.plain and class_weight is None


class _Chunk(Chunk):
    """The losses of logits whose statistics kernels have found."""

    def __init__(self, logits, target, class_weight, options, lse, likelihood):
        super().__init__(logits, target, class_weight, options)
        self.lse, self.likelihood = lse, likelihood
        self.look_up()


def _forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: Optional[torch.Tensor],
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    lse_square_scale: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """(losses [tokens], lse [tokens, 2])."""
    options = CrossEntropyOptions(ignore_index, label_smoothing, softcap, lse_square_scale)
    if not kernels_compute(logits, target, class_weight):
        in_torch = TorchChunk(logits, target, class_weight, options)
        return in_torch.loss(), in_torch.lse
    rows = as_rows(logits)
    new: dict = {"dtype": torch.float32, "device": logits.device}
    plain = _plain(options, class_weight)
    shape = (rows.shape[0], pieces(_statistics if plain else _statistics_weighted, rows.shape[1]))
    part_max, part_sum = torch.empty(shape, **new), torch.empty(shape, **new)
    lse, likelihood = torch.empty((shape[0], 2), **new), torch.empty(shape[0], **new)
    if plain:
        for slab in slabs(shape[1], rows, part_max, part_sum):
            _statistics(*slab)
    else:
        shares = shares_of(torch.ones(rows.shape[1], **new) if class_weight is None else class_weight)
        part_total = torch.empty(shape, **new)
        for z, *partials in slabs(shape[1], rows, part_max, part_sum, part_total):
            _statistics_weighted(z, shares, *partials, softcap)
    for slab in slabs(1, rows, target, part_max, part_sum, lse, likelihood):
        _combine(*slab, ignore_index, softcap)
    if plain:
        return likelihood, lse
    tile = _statistics_weighted.constant("TILE")
    distance = distance_of(lse, part_max, part_total, shares, tile) if label_smoothing else 0.0
    return _Chunk(logits, target, class_weight, options, lse, likelihood).weighted(distance), lse


def _backward(
    dloss: torch.Tensor,
    scale: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: Optional[torch.Tensor],
    lse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    lse_square_scale: float,
) -> torch.Tensor:
    """The gradient of sum(losses * dloss * scale). dloss: [], [1] or [tokens]; scale: [1]."""
    dloss = dloss.view(1) if dloss.dim() == 0 else dloss
    options = CrossEntropyOptions(ignore_index, label_smoothing, softcap, lse_square_scale)
    if not kernels_compute(logits, target, class_weight, dloss, scale, lse):
        # A copy, which becomes the gradient; in float32, where TorchChunk does not bring it into fp16's range.
        in_torch = TorchChunk(logits.to(accumulation_dtype(logits.dtype), copy=True), target, class_weight, options)
        in_torch.loss()
        in_torch.gradient(dloss * scale)
        return in_torch.logits.to(logits.dtype)
    rows, out = as_rows(logits), new_like(logits)
    dlogits = out.view(rows.shape)
    if _plain(options, class_weight):
        per_token = dloss.shape[0] > 1
        most = most_pieces(_gradient, rows.shape[1])
        for z, t, row_lse, dz, *d in slabs(most, rows, target, lse, dlogits, *((dloss,) if per_token else ())):
            _gradient(z, t, row_lse, d[0] if per_token else dloss, scale, dz, ignore_index)
        return out
    chunk = _Chunk(logits, target, class_weight, options, lse, lse)
    coefficients = [t.contiguous() for t in chunk.coefficients(dloss * scale)]
    for z, dz, t, row_lse, a, b, c in slabs(pieces(_gradient_weighted, rows.shape[1]), rows, dlogits, target, lse, *coefficients):
        _gradient_weighted(z, chunk.weights, t, row_lse, a, b, c, dz, softcap)
    return out


def _forward_fake(logits, *_):
    losses = logits.new_empty(logits.shape[0], dtype=accumulation_dtype(logits.dtype))
    return losses, losses.new_empty((logits.shape[0], 2))


cross_entropy_forward = traceable("cross_entropy_forward", _forward, _forward_fake)
cross_entropy_backward = traceable("cross_entropy_backward", _backward, lambda dloss, scale, logits, *_: logits.new_empty(logits.shape))


class _CrossEntropy(Function):
    """The losses and lse of every token; or with scale, [1], the sum of the losses times scale, and lse; or with averages, the mean over
    the tokens that count, by kernels, and lse."""

    def forward(ctx, logits, target, class_weight, scale, averages: bool, options: CrossEntropyOptions):
        ctx.options = options[:4]
        losses, lse, scale = _forward_and_sum(logits, target, class_weight, scale, averages, ctx.options)
        ctx.save_for_backward(logits, target, class_weight, lse, lse.new_ones(1) if scale is None else scale)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return losses, lse

    def backward(ctx, dloss, _):
        if dloss is None:
            return None, None, None, None, None, None
        logits, target, class_weight, lse, scale = ctx.saved_tensors
        dlogits = cross_entropy_backward(dloss.contiguous(), scale, logits, target, class_weight, lse, *ctx.options)
        return dlogits, None, None, None, None, None


def _forward_and_sum(logits, target, class_weight, scale, averages: bool, options: tuple):
    """(what `_CrossEntropy` returns, and what the sum of the losses was multiplied by, None where they were not added up). options: the
    first four."""
    if averages:
        return _forward_and_mean(logits, target, class_weight, *options)
    losses, lse = cross_entropy_forward(logits, target, class_weight, *options)
    return (losses if scale is None else _sum(losses, scale)), lse, scale


@replayed
def _forward_and_mean(logits, target, class_weight, ignore_index, *options):
    losses, lse = _forward(logits, target, class_weight, ignore_index, *options)
    mean, scale = counted_mean(losses, target, ignore_index, logits.shape[1])
    return mean, lse, scale


def _sum(losses: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    kernels = not torch.compiler.is_compiling() and losses.dtype == torch.float32 and losses.numel() > 0 and kernels_run_on(losses)
    return (total(losses) if kernels else losses.sum()) * scale.view(())


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: Optional[float] = None,
    lse_square_scale: float = 0.0,
    num_items: Union[int, float, torch.Tensor, None] = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Union[torch.Tensor, LinearCrossEntropyOutput]:
    """Computes the cross entropy of logits and labels as torch.nn.functional.cross_entropy does, and leaves the logits as they are.

    input: logits [..., classes], bf16, fp16 or fp32 (float64 runs in PyTorch), of any row stride; target: [...] int64, input's
    leading dimensions. weight: [classes], of the classes. ignore_index, reduction ("mean", "sum", "none") and label_smoothing as
    in torch, except that "mean" over no counted token is 0 with zero gradients. softcap: logits become
    softcap * tanh(logits / softcap). lse_square_scale: adds lse_square_scale * logsumexp(logits)^2 to each counted token's loss
    (z-loss). num_items: with it the loss is the sum divided by num_items, whatever `reduction` says.

    Returns a float32 scalar, or [tokens] for "none". With return_z_loss, return_token_accuracy or return_predicted_tokens a
    LinearCrossEntropyOutput, as `linear_cross_entropy` describes it.

    Differentiable in input. A label outside [0, classes) raises ValueError on a CPU; on a GPU, where looking would wait for the
    device, it counts like ignore_index. Raises ValueError where shapes, dtypes, devices or options do not fit.
    """
    _check(input, target, weight, reduction, ignore_index)
    classes = input.shape[-1]
    options = checked_options(
        input.dtype, ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, lse_square_scale=lse_square_scale,
        return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens,
    )  # fmt: skip
    logits, target = flat_rows(input), target if target.dim() == 1 else target.reshape(-1)
    target = target.contiguous()
    weight = None if weight is None else weight.detach().to(accumulation_dtype(input.dtype)).contiguous()
    more = return_z_loss or options.predicts
    plain_mean = reduction == "mean" and weight is None and num_items is None
    kernels = plain_mean and not torch.compiler.is_compiling() and kernels_compute(logits, target)
    averages = kernels and not more  # what else is returned is scaled too
    if averages:
        scale = None
    elif kernels:
        scale = inverse_count(target, options.ignore_index, classes)
    else:
        scale = reduction_scale(target, classes, weight, options, reduction, num_items, accumulation_dtype(input.dtype))
    if needs_formula(logits, target, weight):
        rows = TorchChunk(logits, target, weight, options).rows()
        return output_of(reduced(rows.loss, scale), rows, scale, target, options)
    if torch.is_grad_enabled() and logits.requires_grad:
        loss, lse = apply_function(_CrossEntropy, logits, target, weight, scale, averages, options)
    else:
        loss, lse, _ = _forward_and_sum(logits, target, weight, scale, averages, options[:4])
    if not more:
        return loss
    counted = is_counted(target, classes, options.ignore_index)
    z_loss = torch.where(counted, z_loss_of(lse, options), 0.0) if return_z_loss else None
    predicted = torch.where(counted, logits.detach().argmax(1), -1) if options.predicts else None
    return output_of(loss, TokenLosses(loss, z_loss, predicted), scale, target, options)


def _check(logits, target, weight, reduction, ignore_index):
    if logits.dim() == 0 or not logits.is_floating_point():
        fail("input", describe(logits), "a floating point tensor [..., classes]")
    if target.shape != logits.shape[:-1] or target.dtype != torch.int64 or target.device != logits.device:
        fail("target", describe(target), f"torch.int64 {list(logits.shape[:-1])} on {logits.device}, one label a token")
    classes = logits.shape[-1]
    check_one_value_a_class("weight", weight, classes)
    if weight is not None and weight.device != logits.device:
        fail("weight", describe(weight), f"on the device of input, {logits.device}")
    check_reduction(reduction)
    check_labels(target, classes, ignore_index)


SELF_CHECKS = {
    "cross_entropy": lambda i: i.call(cross_entropy, i.logits(), i.labels()),
    "cross_entropy (weighted classes)": lambda i: i.call(cross_entropy, i.logits(), i.labels(), weight=i.class_weight()),
}
