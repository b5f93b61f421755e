"""Cross entropy of a linear layer's output without ever holding all its logits.

The tokens are taken in chunks. For each chunk: one GEMM makes the logits in a buffer, the cross entropy's kernels turn them
into their own gradient in place, and two GEMMs carry that on to the hidden states and the weight. So the forward pass leaves
both gradients behind, and the backward pass only multiplies them by what arrives from above.

Without gradients one kernel multiplies and joins, and no logits are stored at all (kernel_src/linear_cross_entropy.py).
"""

from typing import NamedTuple, Optional, Tuple, Union

import torch
from torch.autograd.function import once_differentiable

from ..runtime.device import kernels_run_on, multiprocessors
from ..runtime.launch import Kernel
from .common import describe, fail, wide

SLAB = 2**30  # elements of one launch over a flat array: its offsets are 32-bit
STATISTICS_TILE = 4096  # of `cross_entropy_statistics`: how many pieces a row of logits has
LINEAR_TILE = 256  # of `linear_cross_entropy_statistics`: the classes of a tile
LINEAR_TOKENS = 1024  # and the tokens that share one reading of the weight
LINEAR_BYTES = 48 * 2**20  # of what it leaves of the logits: 10240 tokens at once at Qwen3's vocabulary
LN2 = 0.6931471805599453


def _pieces_grid(c, logits, *_):
    return (-(-logits.shape[1] // c["TILE"]), logits.shape[0])


_statistics_kernel = Kernel("cross_entropy_statistics", grid=_pieces_grid)
_statistics_weighted_kernel = Kernel("cross_entropy_statistics_weighted", grid=_pieces_grid)
_combine_kernel = Kernel("cross_entropy_combine", grid=lambda c, logits, *_: (logits.shape[0],))
_gradient_kernel = Kernel("cross_entropy_gradient", grid=_pieces_grid)
_gradient_weighted_kernel = Kernel("cross_entropy_gradient_weighted", grid=_pieces_grid)
_linear_kernel = Kernel(
    "linear_cross_entropy_statistics",
    grid=lambda c, hidden, weight, *_: (-(-hidden.shape[0] // c["TILE_M"]) * -(-weight.shape[0] // c["TILE_N"]),),
)
_linear_combine_kernel = Kernel("linear_cross_entropy_combine", grid=lambda c, target, *_: (target.shape[0],))
_scale_kernel = Kernel("scale_in_place", grid=lambda c, x, factor: (min(-(-x.shape[0] // c["TILE"]), 8 * multiprocessors(x)),))


class Options(NamedTuple):
    """What the loss is beside plain cross entropy; see `linear_cross_entropy`."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0
    lse_square_scale: float = 0.0
    use_token_scaling: bool = False
    accum_dtype: Optional[torch.dtype] = None
    return_z_loss: bool = False
    return_predicted: bool = False

    @property
    def plain(self) -> bool:
        return not (self.label_smoothing or self.softcap or self.lse_square_scale)


class LinearCrossEntropyOutput(NamedTuple):
    """What `linear_cross_entropy` returns when more than the loss is asked for. What was not asked for is None, and only the loss
    is differentiable."""

    loss: torch.Tensor
    z_loss: Optional[torch.Tensor] = None
    token_accuracy: Optional[torch.Tensor] = None
    predicted_tokens: Optional[torch.Tensor] = None


class Rows(NamedTuple):
    """Of every token: the loss, and where it was asked for the z-loss that is a part of it, and the most probable class."""

    loss: torch.Tensor
    z_loss: Optional[torch.Tensor] = None
    predicted: Optional[torch.Tensor] = None


class Gradients(NamedTuple):
    hidden: Optional[torch.Tensor]
    weight: Optional[torch.Tensor]
    bias: Optional[torch.Tensor]


def chunk_tokens(tokens: int) -> int:
    """Tokens in a chunk: 2048, whose logits take 0.6 GB at Qwen3's vocabulary in bf16, and more from 6554 tokens on. Multiples of
    512 fill the GEMMs' tiles.

    The gradient of the weight is added up in the model's dtype, and each addition rounds, so there are never more than four
    chunks, and a smaller one comes first (`_chunks`). Measured on an H200 against float64, at Qwen3's vocabulary: 1.13 times
    the error of one GEMM at 8192 tokens and 1.24 times at 16384; up to 2 times (four roundings) where rows hold large
    numbers when the small sums of later chunks arrive.
    """
    return min(tokens, max(2048, -(-5 * tokens // (16 * 512)) * 512))


def _chunks(tokens: int, step: int):
    """Slices that cover the tokens: the rest first, then whole steps. A partial sum that is small has a small rounding error."""
    stop = tokens - (-(-tokens // step) - 1) * step if tokens else 0
    start = 0
    while start < tokens:
        yield slice(start, stop)
        start, stop = stop, stop + step


def _counted(target: torch.Tensor, classes: int, ignore_index: int) -> torch.Tensor:
    return (target != ignore_index) & (target >= 0) & (target < classes)


def _row_coefficients(lse, counted, target_weight, weight_sum, classes, options):
    """a, b, c of kernel_src/cross_entropy.py, before the reduction's scale."""
    smooth = options.label_smoothing / classes
    b = (1 - options.label_smoothing) * target_weight
    a = b + smooth * weight_sum + 2 * options.lse_square_scale * lse
    return tuple(torch.where(counted, t, 0.0) for t in (a, b, torch.full_like(lse, smooth)))


def _row_loss(lse, negative_log_likelihood, total, counted, target_weight, weight_sum, classes, options):
    loss = (1 - options.label_smoothing) * target_weight * negative_log_likelihood
    if options.label_smoothing:
        loss = loss + options.label_smoothing / classes * (weight_sum * lse - total)
    return torch.where(counted, loss + options.lse_square_scale * lse.square(), 0.0)


def _weights_of(target, classes, class_weight, options, dtype):
    """Per token: is it counted, the weight of its label; and the weights of all classes and their sum."""
    counted = _counted(target, classes, options.ignore_index)
    if class_weight is None:
        class_weight = torch.ones(classes, dtype=dtype, device=target.device)
    return counted, class_weight[torch.where(counted, target, 0)], class_weight, class_weight.sum()


def _finished(loss, lse, negative_log_likelihood, counted, options) -> Tuple[Rows, Optional[torch.Tensor]]:
    """The rows, without predictions, and what token scaling multiplies their losses and gradients by (None for 1)."""
    scaling = None
    if options.use_token_scaling:
        scaling = torch.exp(-negative_log_likelihood.detach())
        loss = loss * scaling
    z_loss = None
    if options.return_z_loss:
        z_loss = torch.where(counted, options.lse_square_scale * lse.detach().square(), 0.0)
        z_loss = z_loss if scaling is None else z_loss * scaling
    return Rows(loss, z_loss), scaling


class _Chunk:
    """Cross entropy of one chunk of logits: `rows()`, then `gradient(scale)`, which writes over the logits.

    `loss()` of a class leaves lse (base e) and the negative log likelihood behind, each [tokens].
    """

    def __init__(self, logits, target, class_weight, options):
        self.logits, self.target, self.options = logits, target, options
        self.class_weight = class_weight
        self.plain = options.plain and class_weight is None

    def look_up(self):
        classes, dtype = self.logits.shape[1], wide(self.logits.dtype)
        found = _weights_of(self.target, classes, self.class_weight, self.options, dtype)
        self.counted, self.target_weight, self.weights, self.weight_sum = found

    def rows(self) -> Rows:
        options = self.options
        loss = self.loss()
        counted = _counted(self.target, self.logits.shape[1], options.ignore_index) if options.return_z_loss or options.return_predicted else None
        rows, self.scaling = _finished(loss, self.lse, self.likelihood, counted, options)
        if options.return_predicted:
            rows = rows._replace(predicted=torch.where(counted, self.logits.detach().argmax(1), -1))
        return rows


class _KernelChunk(_Chunk):
    def loss(self):
        logits, options = self.logits, self.options
        shape = (logits.shape[0], -(-logits.shape[1] // STATISTICS_TILE))
        new = {"dtype": torch.float32, "device": logits.device}
        part_max, part_sum = torch.empty(shape, **new), torch.empty(shape, **new)
        self.lse2, self.likelihood = torch.empty(shape[0], **new), torch.empty(shape[0], **new)  # lse2: in base 2
        if self.plain:
            _statistics_kernel((logits, part_max, part_sum))
        else:
            self.look_up()
            part_total = torch.empty(shape, **new)
            _statistics_weighted_kernel(
                (logits, self.weights, part_max, part_sum, part_total), float(options.softcap)
            )
        _combine_kernel(
            (logits, self.target, part_max, part_sum, self.lse2, self.likelihood), options.ignore_index, float(options.softcap)
        )
        if self.plain:
            return self.likelihood
        return _row_loss(
            self.lse, self.likelihood, part_total.sum(1), self.counted, self.target_weight, self.weight_sum, logits.shape[1], options
        )

    @property
    def lse(self):
        return self.lse2 * LN2

    def gradient(self, scale):
        if self.scaling is not None:
            scale = scale * self.scaling
        if self.plain and scale.numel() == 1:
            return _gradient_kernel(
                (self.logits, self.target, self.lse2, scale.view(1)), self.options.ignore_index
            )
        if self.plain:
            self.look_up()
        rows = _row_coefficients(
            self.lse, self.counted, self.target_weight, self.weight_sum, self.logits.shape[1], self.options
        )
        a, b, c = ((t * scale).contiguous() for t in rows)
        _gradient_weighted_kernel(
            (self.logits, self.weights, self.target, self.lse2, a, b, c), float(self.options.softcap)
        )


class _TorchChunk(_Chunk):
    """The same in PyTorch, for CPUs and GPUs without kernels."""

    def loss(self):
        self.look_up()
        z = self.logits.to(wide(self.logits.dtype))
        if self.options.softcap:
            z = self.options.softcap * torch.tanh(z / self.options.softcap)
        self.z = z
        self.lse = torch.logsumexp(z, 1)
        label = torch.where(self.counted, self.target, 0)
        self.likelihood = self.lse - z.gather(1, label[:, None])[:, 0]
        total = z @ self.weights if self.options.label_smoothing else 0.0
        return _row_loss(
            self.lse, self.likelihood, total, self.counted, self.target_weight, self.weight_sum, z.shape[1], self.options
        )

    def gradient(self, scale):
        if self.scaling is not None:
            scale = scale * self.scaling
        a, b, c = _row_coefficients(
            self.lse, self.counted, self.target_weight, self.weight_sum, self.z.shape[1], self.options
        )
        a, b, c = (t * scale for t in (a, b, c))
        slope = 1 - (self.z / self.options.softcap).square() if self.options.softcap else None
        # Written over z, which is the largest thing here, and in fp32 the logits themselves.
        gradient = self.z.sub_(self.lse[:, None]).exp_().mul_(a[:, None])
        label = torch.where(self.counted, self.target, 0)
        gradient.scatter_add_(1, label[:, None], -b[:, None])
        if self.options.label_smoothing:
            gradient.addcmul_(c[:, None], self.weights, value=-1)
        if slope is not None:
            gradient.mul_(slope)
        gradient.masked_fill_(~self.counted[:, None], 0.0)
        if gradient is not self.logits:
            self.logits.copy_(gradient)


def _without_logits(hidden, weight, bias, target, class_weight, options: Options) -> Optional[Rows]:
    """The rows by the kernel that stores no logits; None where it does not take these arguments.

    It takes bf16 and fp16, features in multiples of 64, and what follows from lse and the label's logit: no bias, softcap or
    label smoothing, no predictions.
    """
    if bias is not None or options.softcap or options.label_smoothing or options.return_predicted:
        return None
    tokens, classes = hidden.shape[0], weight.shape[0]
    parts = -(-classes // LINEAR_TILE)
    step = min(tokens, max(LINEAR_BYTES // (8 * parts) // LINEAR_TOKENS, 1) * LINEAR_TOKENS)
    new = {"dtype": torch.float32, "device": hidden.device}
    part_max, part_sum = (torch.empty((step, parts), **new) for _ in range(2))
    label_logit = torch.empty(step, **new)
    if not tokens or not _linear_kernel.takes((hidden[:step], weight, target[:step], part_max, part_sum, label_logit)):
        return None
    lse, likelihood = torch.empty(tokens, **new), torch.empty(tokens, **new)
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        count = rows.stop - start
        statistics = (target[rows], part_max[:count], part_sum[:count], label_logit[:count])
        _linear_kernel((hidden[rows], weight, *statistics))
        _linear_combine_kernel((*statistics, lse[rows], likelihood[rows]), options.ignore_index, classes)
    counted, target_weight, _, weight_sum = _weights_of(target, classes, class_weight, options, torch.float32)
    loss = _row_loss(lse, likelihood, 0.0, counted, target_weight, weight_sum, classes, options)
    return _finished(loss, lse, likelihood, counted, options)[0]


def _add_product(total, x, y, first: bool, alpha: float) -> None:
    """total += alpha * x @ y, accumulated in total's dtype; for the first product whatever is in total is forgotten."""
    beta = 0.0 if first else 1.0
    if total.dtype == x.dtype and first and alpha == 1.0:
        torch.mm(x, y, out=total)
    elif total.dtype == x.dtype:
        total.addmm_(x, y, beta=beta, alpha=alpha)
    elif x.is_cuda and "dtype_out" in torch.ops.aten.addmm.overloads():
        torch.ops.aten.addmm.dtype_out(total, x, y, total.dtype, beta=beta, alpha=alpha, out=total)
    else:
        total.addmm_(x.to(total.dtype), y.to(total.dtype), beta=beta, alpha=alpha)


def _run(hidden, weight, bias, target, class_weight, scale, options: Options, needs, alpha=1.0) -> Tuple[Rows, Gradients]:
    """The loss of every token, and the gradients of sum(loss * scale) that `needs` asks for (hidden, weight, bias).

    scale: fp32 [1] or [tokens]; None for no gradients. alpha: what the gradients of weight and bias, sums over all tokens, are
    multiplied by before they are rounded.
    """
    tokens, classes = hidden.shape[0], weight.shape[0]
    acc = wide(hidden.dtype)
    needs = needs if scale is not None else (False, False, False)
    has_kernels = hidden.dtype != torch.float64 and kernels_run_on(hidden)
    if has_kernels and not any(needs):
        rows = _without_logits(hidden, weight, bias, target, class_weight, options)
        if rows is not None:
            return rows, Gradients(None, None, None)
    new = {"dtype": hidden.dtype, "device": hidden.device}
    dhidden = torch.empty(hidden.shape, **new) if needs[0] else None
    dweight = torch.empty(weight.shape, dtype=options.accum_dtype or hidden.dtype, device=hidden.device) if needs[1] else None
    dbias = torch.zeros(classes, dtype=acc, device=hidden.device) if needs[2] else None
    found = Rows(
        torch.empty(tokens, dtype=acc, device=hidden.device),
        torch.empty(tokens, dtype=acc, device=hidden.device) if options.return_z_loss else None,
        torch.empty(tokens, dtype=torch.int64, device=hidden.device) if options.return_predicted else None,
    )
    chunk = _KernelChunk if has_kernels else _TorchChunk
    step = chunk_tokens(tokens)
    buffer = torch.empty((step, classes), dtype=hidden.dtype, device=hidden.device)
    for rows in _chunks(tokens, step):
        part = hidden[rows]
        logits = buffer[: part.shape[0]]
        if bias is None:
            torch.mm(part, weight.t(), out=logits)
        else:
            torch.addmm(bias, part, weight.t(), out=logits)
        piece = chunk(logits, target[rows], class_weight, options)
        for whole, mine in zip(found, piece.rows()):
            if whole is not None:
                whole[rows] = mine
        if not any(needs):
            continue
        piece.gradient(scale if scale.numel() == 1 else scale[rows])
        if needs[0]:
            torch.mm(logits, weight, out=dhidden[rows])
        if needs[1]:
            _add_product(dweight, logits.t(), part, rows.start == 0, alpha)
        if needs[2]:
            dbias.add_(logits.sum(0, dtype=acc), alpha=alpha)
    if needs[1] and tokens == 0:
        dweight.zero_()
    return found, Gradients(
        dhidden, None if dweight is None else dweight.to(weight.dtype), None if dbias is None else dbias.to(bias.dtype)
    )


def _multiply(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    """gradient *= factor, in place; a factor of 1 costs nothing."""
    if gradient.numel() == 0:
        return
    if gradient.dtype != torch.float64 and kernels_run_on(gradient):
        flat, factor = gradient.view(-1), factor.to(torch.float32).view(1)
        for start in range(0, flat.shape[0], SLAB):
            _scale_kernel((flat[start : start + SLAB], factor))
    else:
        gradient.mul_(factor.to(gradient.dtype) if factor.dim() == 0 else factor.view(()).to(gradient.dtype))


# fp16 gradients on their way: the loss's scale is brought to this order by a power of two, so that probabilities of 1e-6 stay
# normal numbers, and sums over tokens are divided by a power of two, so that they do not overflow. The backward pass makes up
# for both, exactly, where a loss scale (GradScaler) brings the results into fp16's range.
FP16_HEADROOM = 64.0


def _fp16_factor(scale: torch.Tensor) -> torch.Tensor:
    """The power of two that brings `scale` to between half of FP16_HEADROOM and all of it; computed on the device."""
    factor = torch.exp2(torch.floor(torch.log2(FP16_HEADROOM / scale)))
    return torch.where(scale == 0, 1.0, factor)


def _fp16_tokens(tokens: int) -> float:
    """A power of two that is at least the number of tokens."""
    return 2.0 ** max(tokens - 1, 1).bit_length()


class _Reduced(torch.autograd.Function):
    """sum(loss * scale) over the tokens, and the other rows; scale: fp32 [1] on the device, known before the loss is."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, class_weight, scale, options):
        ctx.save_for_backward(hidden, weight, bias, target, class_weight, scale)
        ctx.options = options
        rows, ctx.gradients = _Reduced.run(ctx, hidden, weight, bias, target, class_weight, scale)
        _only_the_loss_is_differentiable(ctx, rows)
        return (rows.loss.sum() * scale.view(()), *rows[1:])

    @staticmethod
    def run(ctx, hidden, weight, bias, target, class_weight, scale):
        alpha = 1.0
        if hidden.dtype == torch.float16:
            scale, alpha = scale * _fp16_factor(scale), 1 / _fp16_tokens(hidden.shape[0])
        return _run(hidden, weight, bias, target, class_weight, scale, ctx.options, ctx.needs_input_grad[:3], alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, *_):
        hidden, weight, bias, target, class_weight, scale = ctx.saved_tensors
        gradients = ctx.gradients
        # They are scaled in place and given away; a second backward pass (retain_graph) computes them anew.
        ctx.gradients = None
        if gradients is None:
            gradients = _Reduced.run(ctx, hidden, weight, bias, target, class_weight, scale)[1]
        factors = (dloss, dloss, dloss)
        if hidden.dtype == torch.float16:
            one = dloss / _fp16_factor(scale).view(())
            summed = one * _fp16_tokens(hidden.shape[0])
            factors = (one, summed, summed)
        for gradient, factor in zip(gradients, factors):
            if gradient is not None:
                _multiply(gradient, factor)
        return (*gradients, None, None, None, None)


class _PerToken(torch.autograd.Function):
    """The rows. What the gradient of their losses is multiplied by is known only in the backward pass, which does the work."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, class_weight, options):
        ctx.save_for_backward(hidden, weight, bias, target, class_weight)
        ctx.options = options
        rows = _run(hidden, weight, bias, target, class_weight, None, options, (False,) * 3)[0]
        _only_the_loss_is_differentiable(ctx, rows)
        return tuple(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dlosses, *_):
        hidden, weight, bias, target, class_weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        scale = dlosses.to(wide(hidden.dtype)).contiguous()
        options = ctx.options._replace(return_z_loss=False, return_predicted=False)
        gradients = _run(hidden, weight, bias, target, class_weight, scale, options, needs)[1]
        return (*gradients, None, None, None)


def _only_the_loss_is_differentiable(ctx, rows: Rows) -> None:
    ctx.mark_non_differentiable(*[row for row in rows[1:] if row is not None])
    ctx.set_materialize_grads(False)


def cross_entropy_rows(logits, target, class_weight, options: Options) -> Rows:
    """The same of logits [tokens, classes] in PyTorch operations that autograd and tracers see through."""
    return _TorchChunk(logits, target, class_weight, options).rows()


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
    """cross_entropy(hidden @ weight.T + bias, target), one chunk of logits at a time.

    hidden: [..., features]; weight: [classes, features]; bias: [classes]; one dtype (bf16, fp16, fp32; float64 runs in
    PyTorch) and device. target: [...] int64, hidden's leading dimensions. Logits are rounded to that dtype, as the layer would
    do it, and everything behind them is float32; where no gradient is asked for, no logits are stored and none are rounded.
    class_weight: [classes] fp32. ignore_index, reduction ("mean", "sum", "none"), label_smoothing and class_weight as in
    torch.nn.functional.cross_entropy, except that "mean" over no counted token is 0 with zero gradients. softcap: logits become
    softcap * tanh(logits / softcap). lse_square_scale: adds lse_square_scale * logsumexp(logits)^2 to each counted token's loss
    (z-loss). num_items: with it the loss is the sum divided by num_items, whatever `reduction` says (gradient accumulation).
    use_token_scaling: each token's loss is multiplied by the probability that the model gives its label, through which no
    gradient flows; "mean" still divides by the counted tokens (arXiv:2508.05629). accum_dtype: what the weight's gradient is
    added up in over the chunks, weight.dtype (by default) or torch.float32, which takes 4 bytes an element of the weight.

    Returns a float32 scalar, or [tokens] for "none". With return_z_loss, return_token_accuracy or return_predicted_tokens a
    LinearCrossEntropyOutput: z_loss, the part of the loss that lse_square_scale adds, reduced as the loss is; token_accuracy,
    the part of the counted tokens whose label is the most probable class, for "none" 1.0 or 0.0 a token; predicted_tokens,
    [tokens] int64, that class, -1 for a token that does not count.

    Differentiable in hidden, weight and bias; no gradient is computed for one that does not require it. A label outside
    [0, classes) raises ValueError on a CPU; on a GPU, where looking would wait for the device, it counts like ignore_index.
    Raises ValueError when shapes, dtypes, devices or options do not fit.
    """
    _check(hidden, weight, target, bias, class_weight, reduction, ignore_index)
    _check_options(weight, label_smoothing, softcap, accum_dtype)
    options = Options(
        int(ignore_index),
        float(label_smoothing),
        float(softcap or 0.0),
        float(lse_square_scale),
        bool(use_token_scaling),
        accum_dtype,
        bool(return_z_loss),
        bool(return_token_accuracy or return_predicted_tokens),
    )
    hidden = hidden.reshape(-1, hidden.shape[-1])
    target = target.reshape(-1).contiguous()
    if class_weight is not None:
        class_weight = class_weight.to(wide(hidden.dtype)).contiguous()
    scale = None
    if reduction != "none" or num_items is not None:
        scale = _scale(target, weight.shape[0], class_weight, options, reduction, num_items, wide(hidden.dtype))
    if torch.compiler.is_compiling():
        # Chunks do not exist for a tracer.
        rows = cross_entropy_rows(torch.nn.functional.linear(hidden, weight, bias), target, class_weight, options)
        if scale is not None:
            rows = rows._replace(loss=rows.loss.sum() * scale.view(()))
    elif not torch.is_grad_enabled():
        rows = _run(hidden, weight, bias, target, class_weight, None, options, (False,) * 3)[0]
        if scale is not None:
            rows = rows._replace(loss=rows.loss.sum() * scale.view(()))
    elif scale is None:
        rows = Rows(*_PerToken.apply(hidden, weight, bias, target, class_weight, options))
    else:
        rows = Rows(*_Reduced.apply(hidden, weight, bias, target, class_weight, scale, options))
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens):
        return rows.loss
    return _output(rows, scale, target, return_token_accuracy, return_predicted_tokens)


def _output(rows: Rows, scale, target, return_token_accuracy, return_predicted_tokens) -> LinearCrossEntropyOutput:
    z_loss, accuracy = rows.z_loss, None
    if z_loss is not None and scale is not None:
        z_loss = z_loss.sum() * scale.view(())
    if return_token_accuracy:
        accuracy = (rows.predicted == target).to(rows.loss.dtype)
        if scale is not None:
            accuracy = accuracy.sum() / (rows.predicted >= 0).sum().clamp(min=1)
    return LinearCrossEntropyOutput(rows.loss, z_loss, accuracy, rows.predicted if return_predicted_tokens else None)


def _scale(target, classes, class_weight, options, reduction, num_items, dtype) -> torch.Tensor:
    """What the sum of the losses is multiplied by, [1] on the device."""
    if num_items is not None:
        items = torch.as_tensor(num_items, device=target.device).to(dtype)
    elif reduction == "sum":
        items = torch.ones((), dtype=dtype, device=target.device)
    else:
        counted = _counted(target, classes, options.ignore_index)
        if class_weight is None:
            items = counted.sum().to(dtype)
        else:
            items = torch.where(counted, class_weight[torch.where(counted, target, 0)], 0.0).sum()
    return torch.where(items == 0, 0.0, 1.0 / items).to(dtype).view(1)


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
        if vector is not None and vector.shape != (classes,):
            fail(name, describe(vector), f"[{classes}], one value a class")
    if bias is not None and bias.dtype != hidden.dtype:
        fail("bias", describe(bias), f"of hidden's dtype, {hidden.dtype}")
    for name, tensor in (("weight", weight), ("target", target), ("bias", bias), ("class_weight", class_weight)):
        if tensor is not None and tensor.device != hidden.device:
            fail(name, describe(tensor), f"on the device of hidden, {hidden.device}")
    if reduction not in ("mean", "sum", "none"):
        fail("reduction", repr(reduction), "'mean', 'sum' or 'none'")
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
        if wrong.any():
            fail("target", f"{int(target[wrong][0])} at one of its places", f"labels from 0 to {classes - 1}, or {ignore_index}")


def _check_options(weight, label_smoothing, softcap, accum_dtype):
    if not 0.0 <= label_smoothing <= 1.0:
        fail("label_smoothing", label_smoothing, "a number from 0 to 1")
    if softcap is not None and not 0.0 <= softcap < float("inf"):
        fail("softcap", softcap, "a positive number, or None for no cap")
    if accum_dtype not in (None, weight.dtype, torch.float32) or (accum_dtype is torch.float32 and weight.dtype is torch.float64):
        fail("accum_dtype", accum_dtype, f"None, weight's dtype {weight.dtype}, or torch.float32")
