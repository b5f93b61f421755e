"""Cross entropy of a linear layer's output without ever holding all its logits.

The tokens are taken in chunks (linear_head.py), and of each the cross entropy's kernels turn the logits into their own gradient in place
(cross_entropy.py). So the forward pass already has both gradients, and the backward pass only multiplies them by the incoming gradient.

Without gradients no logits are stored at all (loss_without_logits.py).
"""

from functools import partial
from typing import List, Optional, Sequence, Tuple, Union

import torch

from ..runtime.device import kernels_run_on
from .arguments import describe, fail, need_device
from .arrays import accumulation_dtype
from .autocast import as_autocast
from .autograd import Function, autocasts, needs_formula
from .cross_entropy import (
    CrossEntropyOptions,
    KernelChunk,
    LinearCrossEntropyOutput,
    TokenLosses,
    TorchChunk,
    check_labels,
    check_one_value_a_class,
    check_reduction,
    checked_options,
    output_of,
    reduced,
    reduction_scale,
)
from .linear_head import LARGE_CHUNK, HeadGradients, scaled, walk
from .loss_without_logits import LossWithoutLogits
from .operators import traceable
from .token_sums import sum_over_tokens
from .traced_sizes import holds_for_all_sizes

__all__ = ["linear_cross_entropy"]


def _run(
    hidden, weight, bias, target, class_weight, scale, options: CrossEntropyOptions, needs, kept: Optional[list] = None
) -> Tuple[TokenLosses, HeadGradients]:  # fmt: skip
    """The loss of every token, and the gradients of sum(loss * scale) that `needs` asks for (hidden, weight, bias).

    scale: fp32 [1] or [tokens]; None for no gradients. kept: a list for the gradient of the logits, as of `walk`.
    """
    tokens, acc = hidden.shape[0], accumulation_dtype(hidden.dtype)
    needs = needs if scale is not None else (False, False, False)
    has_kernels = hidden.dtype != torch.float64 and kernels_run_on(hidden, weight, bias, target, class_weight, scale)
    if has_kernels and not any(needs):
        whole = LossWithoutLogits(hidden, weight, bias, target, class_weight, options)
        if whole.fits():
            return whole.rows(), HeadGradients()
    empty = partial(torch.empty, tokens, device=hidden.device)
    predicted = empty(dtype=torch.int64) if options.predicts else None
    found = TokenLosses(empty(dtype=acc), empty(dtype=acc) if options.return_z_loss else None, predicted)
    chunk = KernelChunk if has_kernels else TorchChunk

    def loss_of(logits, rows, _):
        return chunk(logits, target[rows], class_weight, options)

    return found, walk(hidden, weight, bias, loss_of, found, scale, needs, options.accum_dtype, gradient_kept=kept)


def _reduced(hidden, weight, bias, target, class_weight, scale, options: CrossEntropyOptions, needs):
    """sum(loss * scale) over the tokens, the other rows and the gradients; scale: fp32 [1] on the device, known before the loss is."""
    rows, gradients = _run(hidden, weight, bias, target, class_weight, scale, options, needs)
    return rows.loss.sum() * scale.view(()), [row for row in rows[1:] if row is not None], gradients


_Reduced = sum_over_tokens("_Reduced", _reduced)


# ---------------------------------------------------------------- for tracers
# One operator, whose results are a list without gaps: a tracer sees neither the chunks nor the logits. What is absent is empty.
def _run_whole(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    target: torch.Tensor,
    class_weight: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    needs: List[bool],
    ignore_index: int,
    numbers: List[float],
    switches: List[bool],
    accum_dtype: Optional[torch.dtype],
    of_logits: bool = False,
) -> List[torch.Tensor]:
    """The rows, the gradients and the factors that those are still to be multiplied by, of `_run`. of_logits: whether the gradient of the
    logits takes the place of the weight's."""
    options = _options(ignore_index, numbers, switches, accum_dtype)
    kept: Optional[list] = [] if of_logits else None
    need_hidden, need_weight, need_bias = needs
    of = need_hidden, need_weight and not of_logits, need_bias
    rows, gradients = _run(hidden, weight, bias, target, class_weight, scale, options, of, kept)
    if kept:
        gradients = gradients._replace(weight=kept[0])
    factors = [factor if gradient is not None else None for gradient, factor in zip(gradients[:3], gradients.factors)]
    return [hidden.new_empty(0) if t is None else t for t in (*rows, *gradients[:3], *factors)]


def _options(ignore_index, numbers, switches, accum_dtype) -> CrossEntropyOptions:
    (smoothing, softcap, square), (scaling, z_loss, accuracy, predicted) = numbers, switches
    return CrossEntropyOptions(ignore_index, smoothing, softcap, square, scaling, accum_dtype, z_loss, accuracy, predicted)


def _operator_options(options: CrossEntropyOptions) -> tuple:
    """The last arguments of the operator: `_options` makes the options of them again."""
    numbers = [options.label_smoothing, options.softcap, options.lse_square_scale]
    switches = [options.use_token_scaling, options.return_z_loss, options.return_token_accuracy, options.return_predicted_tokens]
    return options.ignore_index, numbers, switches, options.accum_dtype


def _fake_run(hidden, weight, bias, target, class_weight, scale, needs, ignore_index, numbers, switches, accum_dtype, of_logits=False):
    tokens, acc, options = hidden.shape[0], accumulation_dtype(hidden.dtype), _options(ignore_index, numbers, switches, accum_dtype)

    def new(wanted, shape, dtype):
        return hidden.new_empty(shape, dtype=dtype) if wanted else hidden.new_empty(0)

    need_hidden, need_weight, need_bias = needs if scale is not None else (False, False, False)
    fp16 = hidden.dtype == torch.float16 and tokens > 0
    return [
        new(True, (tokens,), acc),
        new(options.return_z_loss, (tokens,), acc),
        new(options.predicts, (tokens,), torch.int64),
        new(need_hidden, hidden.shape, hidden.dtype),
        new(need_weight, (tokens, weight.shape[0]) if of_logits else weight.shape, weight.dtype),
        new(need_bias, (weight.shape[0],), hidden.dtype),
        new(fp16 and need_hidden, (tokens, 1), acc),
        new(fp16 and need_weight, (), acc),
        new(fp16 and need_bias, (), acc),
    ]


_traced_run = traceable("linear_cross_entropy_run", _run_whole, _fake_run, computes=True)


def _traced_rows(found, options: CrossEntropyOptions) -> TokenLosses:
    return TokenLosses(found[0], found[1] if options.return_z_loss else None, found[2] if options.predicts else None)


def _keeps_gradient_of_logits(hidden, weight) -> bool:
    """Tells whether a graph keeps the gradient of the logits, of which its backward pass makes the weight's; of few tokens it is smaller.
    The incoming gradient meets hidden then, and not the weight's gradient: unlike eager mode a graph makes a new one of that, at 512 tokens
    of Qwen3-8B with four layers a twelfth of the device's time."""
    (tokens, features), classes = hidden.shape, weight.shape[0]
    sizes = 0 < tokens, tokens <= features, tokens <= 2048, tokens * classes * hidden.itemsize <= LARGE_CHUNK
    return hidden.dtype != torch.float16 and holds_for_all_sizes(*sizes)


class _TracedReduced(Function):
    """`_Reduced` in a graph, which cannot write over what it saved. needs: as of `_run`."""

    def forward(ctx, hidden, weight, bias, target, class_weight, scale, options, needs):
        late = needs[1] and (needs[0] or needs[2]) and _keeps_gradient_of_logits(hidden, weight)  # one of the weight alone is not kept
        found = _traced_run(hidden, weight, bias, target, class_weight, scale, list(needs), *_operator_options(options), late)
        ctx.save_for_backward(*found[3:], *((hidden,) if late else ()))
        ctx.needs, ctx.late = needs, late
        rows = _traced_rows(found, options)
        others = [row for row in rows[1:] if row is not None]
        ctx.mark_non_differentiable(*others)
        return (rows.loss.sum() * scale.view(()), *others)

    def backward(ctx, dloss, *_):
        saved = ctx.saved_tensors
        gradients = [scaled(*pair, dloss) if need else None for need, pair in zip(ctx.needs, zip(saved[:3], saved[3:6]))]
        if ctx.late:
            gradients[1] = torch.mm(saved[1].t(), scaled(saved[6], saved[4], dloss))
        return (*gradients, None, None, None, None, None)


# ---------------------------------------------------------------- for both
def _called(hidden, weight, bias, target, class_weight, scale, options: CrossEntropyOptions, needs) -> Tuple[TokenLosses, Sequence]:
    """The rows of `_run`, and the gradients with all that they are multiplied by."""
    tensors = hidden, weight, bias, target, class_weight, scale
    if not torch.compiler.is_compiling():
        rows, gradients = _run(*tensors, options, needs)
        return rows, gradients.times()
    found = _traced_run(*tensors, list(needs), *_operator_options(options))
    pairs = zip(needs, zip(found[3:6], found[6:]))
    return _traced_rows(found, options), [scaled(*pair, None) if need else None for need, pair in pairs]


class _PerToken(Function):
    """The rows. What the gradient of their losses is multiplied by is known only in the backward pass, which does the work. needs: as of
    `_run`."""

    def forward(ctx, hidden, weight, bias, target, class_weight, options, needs):
        ctx.save_for_backward(hidden, weight, bias, target, class_weight)
        ctx.options, ctx.needs = options, needs
        rows, _ = _called(hidden, weight, bias, target, class_weight, None, options, (False,) * 3)
        others = [row for row in rows[1:] if row is not None]
        ctx.mark_non_differentiable(*others)
        return (rows.loss, *others)

    def backward(ctx, dlosses, *_):
        hidden, weight, bias, target, class_weight = ctx.saved_tensors
        scale = dlosses.to(accumulation_dtype(hidden.dtype)).contiguous()
        options = ctx.options._replace(return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False)
        _, gradients = _called(hidden, weight, bias, target, class_weight, scale, options, ctx.needs)
        return (*gradients, None, None, None, None)


def _rows_of(found: Sequence[torch.Tensor], options: CrossEntropyOptions) -> TokenLosses:
    """The loss, and the other rows that were asked for."""
    return TokenLosses(found[0], found[1] if options.return_z_loss else None, found[-1] if options.predicts else None)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    *,
    class_weight: Optional[torch.Tensor] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: Optional[float] = None,
    lse_square_scale: float = 0.0,
    num_items: Union[int, float, torch.Tensor, None] = None,
    use_token_scaling: bool = False,
    accum_dtype: Optional[torch.dtype] = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Union[torch.Tensor, LinearCrossEntropyOutput]:
    """cross_entropy(hidden @ weight.T + bias, target), one chunk of logits at a time: beyond the inputs and their gradients the memory
    grows neither with the tokens nor with the classes, but for 4 bytes an element of the weight where `plan_chunks` says so.

    hidden: [..., features]; weight: [classes, features]; bias: [classes]; one dtype (bf16, fp16, fp32; float64 runs in
    PyTorch) and device; under autocast cast to its dtype. target: [...] int64, hidden's leading dimensions. Logits are rounded to that
    dtype, as the layer would do it, and everything after them is float32; where no gradient is asked for, no logits are stored and none
    are rounded. class_weight: [classes], of any dtype. ignore_index, reduction ("mean", "sum", "none"), label_smoothing and class_weight as
    in torch.nn.functional.cross_entropy, except that "mean" over no counted token is 0 with zero gradients. softcap: logits become
    softcap * tanh(logits / softcap). lse_square_scale: adds lse_square_scale * logsumexp(logits)^2 to each counted token's loss
    (z-loss). num_items: with it the loss is the sum divided by num_items, whatever `reduction` says (gradient accumulation).
    use_token_scaling: each token's loss is multiplied by the probability that the model gives its label, through which no
    gradient flows; "mean" still divides by the counted tokens (arXiv:2508.05629); fp16 is computed in fp32 with it, in copies. accum_dtype:
    what the weight's gradient is added up in over the chunks: torch.float32, which takes 4 bytes an element of the weight, or by default
    weight.dtype, as long as that rounds four times at most (`plan_chunks`), and else torch.float32.

    Returns a float32 scalar (float64 where hidden is), or [tokens] for "none". With return_z_loss, return_token_accuracy or
    return_predicted_tokens a LinearCrossEntropyOutput: z_loss, the part of the loss that lse_square_scale adds, reduced as the loss is;
    token_accuracy, the part of the counted tokens whose label is the most probable class, for "none" 1.0 or 0.0 a token; predicted_tokens,
    [tokens] int64, that class, -1 for a token that does not count.

    Differentiable in hidden, weight and bias; no gradient is computed for one that does not require it. A label outside
    [0, classes) raises ValueError on a CPU (compiled, RuntimeError); on a GPU, where looking would wait for the device, it counts like
    ignore_index. Raises ValueError when shapes, dtypes, devices or options do not fit.
    """
    if autocasts(hidden.device):
        hidden, weight, bias = as_autocast(hidden.device, hidden, weight, bias)
    _check(hidden, weight, target, bias, class_weight, reduction, ignore_index)
    options = checked_options(
        weight.dtype,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        lse_square_scale=lse_square_scale,
        use_token_scaling=use_token_scaling,
        accum_dtype=accum_dtype,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
    )
    if use_token_scaling and hidden.dtype == torch.float16:
        # The probability of a label times that of another class is below fp16's smallest number where there are many classes.
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    hidden = hidden.reshape(-1, hidden.shape[-1])
    target = target.reshape(-1).contiguous()
    if class_weight is not None:
        class_weight = class_weight.to(accumulation_dtype(hidden.dtype)).contiguous()
    scale = reduction_scale(target, weight.shape[0], class_weight, options, reduction, num_items, accumulation_dtype(hidden.dtype))
    tensors = hidden, weight, bias, target, class_weight
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias))
    if needs_formula(hidden, weight, target, bias, class_weight):  # there are no chunks of tensors that are not ordinary
        logits = torch.nn.functional.linear(hidden, weight, bias)
        rows = TorchChunk(logits, target, class_weight, options).rows()
    elif not any(needs):
        rows, _ = _called(*tensors, None, options, needs)
    elif scale is None:
        rows = _rows_of(_PerToken.apply(*tensors, options, needs), options)
    else:
        graph = torch.compiler.is_compiling()
        found = _TracedReduced.apply(*tensors, scale, options, needs) if graph else _Reduced.apply(*tensors, scale, options)
        rows = _rows_of(found, options)
        return output_of(rows.loss, rows, scale, target, options)
    return output_of(reduced(rows.loss, scale), rows, scale, target, options)


def _check(hidden, weight, target, bias, class_weight, reduction, ignore_index):
    if hidden.dim() == 0:
        fail("hidden", describe(hidden), "[..., features]")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        fail("weight", describe(weight), f"[classes, {hidden.shape[-1]}] for hidden, which is {describe(hidden)}")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        fail("weight", describe(weight), f"of hidden's dtype; hidden is {describe(hidden)}")
    if target.shape != hidden.shape[:-1] or target.dtype != torch.int64:
        fail("target", describe(target), f"torch.int64 {list(hidden.shape[:-1])}, one label a token")
    classes = weight.shape[0]
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        check_one_value_a_class(name, vector, classes)
    if bias is not None and bias.dtype != hidden.dtype:
        fail("bias", describe(bias), f"of hidden's dtype, {hidden.dtype}")
    need_device("hidden", hidden.device, weight=weight, target=target, bias=bias, class_weight=class_weight)
    check_reduction(reduction)
    check_labels(target, classes, ignore_index)


SELF_CHECKS = {
    "linear_cross_entropy": lambda i: i.call(linear_cross_entropy, *i.head()),
    "linear_cross_entropy (weighted classes)": lambda i: i.call(linear_cross_entropy, *i.head(), class_weight=i.class_weight()),
    "linear_cross_entropy (evaluation)": lambda i: i.call(linear_cross_entropy, *[x.detach() for x in i.head()]),
}
