"""Cross entropy of a linear layer's output without ever holding all its logits.

The tokens are taken in chunks. For each chunk: one GEMM makes the logits in a buffer, the cross entropy's kernels turn them
into their own gradient in place, and two GEMMs carry that on to the hidden states and the weight. So the forward pass leaves
both gradients behind, and the backward pass only multiplies them by what arrives from above.

Without gradients one kernel multiplies and joins, and no logits are stored at all (kernel_src/linear_cross_entropy.py).
"""

from typing import Dict, NamedTuple, Optional, Tuple, Union

import torch
from torch.autograd.function import once_differentiable

from ..runtime.device import kernels_run_on, multiprocessors
from ..runtime.launch import Kernel
from .common import SLAB, describe, fail, look, wide

STATISTICS_TILE = 4096  # of `cross_entropy_statistics`: how many pieces a row of logits has
LINEAR_TILE = 256  # of `linear_cross_entropy_statistics`: the classes of a tile
LINEAR_TOKENS = 1024  # and the tokens that share one reading of the weight
LINEAR_BYTES = 48 * 2**20  # of what it leaves of the logits: 10240 tokens at once at Qwen3's vocabulary
LN2 = 0.6931471805599453


def _pieces_grid(c, logits, *_):
    return (logits.shape[0] * -(-logits.shape[1] // c["TILE"]),)


_statistics_kernel = Kernel("cross_entropy_statistics", grid=_pieces_grid)
_statistics_weighted_kernel = Kernel("cross_entropy_statistics_weighted", grid=_pieces_grid)
_combine_kernel = Kernel("cross_entropy_combine", grid=lambda c, logits, *_: (logits.shape[0],))
_gradient_kernel = Kernel("cross_entropy_gradient", grid=_pieces_grid)
_gradient_weighted_kernel = Kernel("cross_entropy_gradient_weighted", grid=_pieces_grid)
_linear_kernel = Kernel(
    "linear_cross_entropy_statistics",
    grid=lambda c, hidden, weight, *_: (-(-hidden.shape[0] // c["TILE_M"]) * -(-weight.shape[0] // c["TILE_N"]),),
)
_linear_combine_kernel = Kernel("linear_cross_entropy_combine", grid=lambda c, hidden, *_: (hidden.shape[0],))
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
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False

    @property
    def predicts(self) -> bool:
        return self.return_token_accuracy or self.return_predicted_tokens

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


class _Chunk:
    """Cross entropy of one chunk of logits: `rows()`, then `gradient(scale)`, which writes over the logits.

    `loss()` of a class gives the loss without token scaling, and leaves lse (base e) and the negative log likelihood behind.
    """

    def __init__(self, logits, target, class_weight, options):
        self.logits, self.classes, self.dtype = logits, logits.shape[1], wide(logits.dtype)
        self.target, self.class_weight, self.options = target, class_weight, options
        self.plain = options.plain and class_weight is None
        self.scaling = None

    def look_up(self):
        """Per token: is it counted, the weight of its label; and the weights of all classes and their sum."""
        self.counted = _counted(self.target, self.classes, self.options.ignore_index)
        self.weights = self.class_weight
        if self.weights is None:
            self.weights = torch.ones(self.classes, dtype=self.dtype, device=self.target.device)
        self.target_weight = self.weights[torch.where(self.counted, self.target, 0)]
        self.weight_sum = self.weights.sum()

    def weighted(self, total):
        """The loss with every option but token scaling. total: per token, the sum of class_weight * logits."""
        options = self.options
        loss = (1 - options.label_smoothing) * self.target_weight * self.likelihood
        if options.label_smoothing:
            loss = loss + options.label_smoothing / self.classes * (self.weight_sum * self.lse - total)
        return torch.where(self.counted, loss + options.lse_square_scale * self.lse.square(), 0.0)

    def rows(self) -> Rows:
        options = self.options
        loss, z_loss, predicted = self.loss(), None, None
        if options.return_z_loss or options.predicts:
            counted = _counted(self.target, self.classes, options.ignore_index)
        if options.return_z_loss:
            z_loss = torch.where(counted, options.lse_square_scale * self.lse.detach().square(), 0.0)
        if options.predicts:
            predicted = torch.where(counted, self.logits.detach().argmax(1), -1)
        if options.use_token_scaling:
            self.scaling = torch.exp(-self.likelihood.detach())
            loss, z_loss = loss * self.scaling, None if z_loss is None else z_loss * self.scaling
        return Rows(loss, z_loss, predicted)

    def coefficients(self, scale):
        """a, b, c of kernel_src/cross_entropy.py, times the scale, which is that of the reduction or of every token."""
        options = self.options
        smooth = options.label_smoothing / self.classes
        b = (1 - options.label_smoothing) * self.target_weight
        a = b + smooth * self.weight_sum + 2 * options.lse_square_scale * self.lse
        return tuple(torch.where(self.counted, t, 0.0) * scale for t in (a, b, torch.full_like(a, smooth)))

    def scaled(self, scale):
        """What the gradients are multiplied by, with token scaling."""
        return scale if self.scaling is None else scale * self.scaling


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
            _statistics_weighted_kernel((logits, self.weights, part_max, part_sum, part_total), options.softcap)
        _combine_kernel((logits, self.target, part_max, part_sum, self.lse2, self.likelihood), options.ignore_index, options.softcap)
        if self.plain:
            return self.likelihood
        return self.weighted(part_total.sum(1))

    @property
    def lse(self):
        return self.lse2 * LN2

    def gradient(self, scale):
        scale = self.scaled(scale)
        if self.plain and scale.numel() == 1:
            return _gradient_kernel((self.logits, self.target, self.lse2, scale.view(1)), self.options.ignore_index)
        if self.plain:
            self.look_up()
        a, b, c = (t.contiguous() for t in self.coefficients(scale))
        _gradient_weighted_kernel((self.logits, self.weights, self.target, self.lse2, a, b, c), self.options.softcap)


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
        return self.weighted(z @ self.weights if self.options.label_smoothing else 0.0)

    def gradient(self, scale):
        scale = self.scaled(scale)
        a, b, c = self.coefficients(scale)
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


class _WithoutLogits(_Chunk):
    """All tokens at once, by the kernel that stores no logits: `rows()`, where `fits()` says that it can.

    It takes bf16 and fp16, features in multiples of 64, and what follows from lse and the label's logit: no bias, softcap or
    label smoothing, and no predictions.
    """

    taken: Dict[tuple, bool] = {}  # the manifest is not looked through at every call

    def __init__(self, hidden, weight, bias, target, class_weight, options):
        super().__init__(weight.t(), target, class_weight, options)
        self.hidden, self.weight, self.bias = hidden, weight, bias
        parts = -(-self.classes // LINEAR_TILE)
        self.step = min(hidden.shape[0], max(LINEAR_BYTES // (8 * parts) // LINEAR_TOKENS, 1) * LINEAR_TOKENS)
        self.shape = (self.step, parts)

    def fits(self) -> bool:
        options = self.options
        if self.bias is not None or options.softcap or options.label_smoothing or options.predicts or not self.step:
            return False
        new = {"dtype": torch.float32, "device": self.hidden.device}
        self.partials = torch.empty(self.shape, **new), torch.empty(self.shape, **new)
        first = self.hidden[:2]  # whether the kernel takes them does not depend on how many they are
        key = (*look(first, self.weight), (self.hidden.data_ptr() | self.weight.data_ptr()) & 15)
        if key not in self.taken:
            self.taken[key] = _linear_kernel.takes((first, self.weight, *self.partials))
        return self.taken[key]

    def loss(self):
        tokens = self.hidden.shape[0]
        self.lse, self.likelihood = (torch.empty(tokens, dtype=torch.float32, device=self.hidden.device) for _ in range(2))
        for start in range(0, tokens, self.step):
            rows = slice(start, min(start + self.step, tokens))
            operands = self.hidden[rows], self.weight
            partials = tuple(partial[: rows.stop - start] for partial in self.partials)
            _linear_kernel((*operands, *partials))
            results = self.lse[rows], self.likelihood[rows]
            _linear_combine_kernel((*operands, self.target[rows], *partials, *results), self.options.ignore_index)
        if self.plain:
            return self.likelihood
        self.look_up()
        return self.weighted(0.0)


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
        whole = _WithoutLogits(hidden, weight, bias, target, class_weight, options)
        if whole.fits():
            return whole.rows(), Gradients(None, None, None)
    new = {"dtype": hidden.dtype, "device": hidden.device}
    dhidden = torch.empty(hidden.shape, **new) if needs[0] else None
    dweight = torch.empty(weight.shape, dtype=options.accum_dtype or hidden.dtype, device=hidden.device) if needs[1] else None
    dbias = torch.zeros(classes, dtype=acc, device=hidden.device) if needs[2] else None
    found = Rows(
        torch.empty(tokens, dtype=acc, device=hidden.device),
        torch.empty(tokens, dtype=acc, device=hidden.device) if options.return_z_loss else None,
        torch.empty(tokens, dtype=torch.int64, device=hidden.device) if options.predicts else None,
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
        ctx.mark_non_differentiable(*[row for row in rows[1:] if row is not None])
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
        ctx.mark_non_differentiable(*[row for row in rows[1:] if row is not None])
        return tuple(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dlosses, *_):
        hidden, weight, bias, target, class_weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        scale = dlosses.to(wide(hidden.dtype)).contiguous()
        options = ctx.options._replace(return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False)
        gradients = _run(hidden, weight, bias, target, class_weight, scale, options, needs)[1]
        return (*gradients, None, None, None)


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
    gradient flows; "mean" still divides by the counted tokens (arXiv:2508.05629); fp16 is computed in fp32 with it, in copies. accum_dtype: what the weight's gradient is
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
    options = _options(
        weight.dtype, ignore_index, label_smoothing, softcap, lse_square_scale, use_token_scaling, accum_dtype, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    if use_token_scaling and hidden.dtype == torch.float16:
        # The probability of a label times that of another class is below fp16's smallest number where there are many classes.
        hidden, weight, bias = (None if tensor is None else tensor.float() for tensor in (hidden, weight, bias))
    hidden = hidden.reshape(-1, hidden.shape[-1])
    target = target.reshape(-1).contiguous()
    if class_weight is not None:
        class_weight = class_weight.to(wide(hidden.dtype)).contiguous()
    scale = _scale(target, weight.shape[0], class_weight, options, reduction, num_items, wide(hidden.dtype))
    if torch.compiler.is_compiling():  # chunks do not exist for a tracer
        logits = torch.nn.functional.linear(hidden, weight, bias)
        rows = _TorchChunk(logits, target, class_weight, options).rows()
    elif not torch.is_grad_enabled():
        rows = _run(hidden, weight, bias, target, class_weight, None, options, (False,) * 3)[0]
    elif scale is None:
        rows = Rows(*_PerToken.apply(hidden, weight, bias, target, class_weight, options))
    else:
        loss, *others = _Reduced.apply(hidden, weight, bias, target, class_weight, scale, options)
        return _output(loss, Rows(loss, *others), scale, target, options)
    return _output(_reduced(rows.loss, scale), rows, scale, target, options)


def cross_entropy_of_logits(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: Optional[torch.Tensor] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: Union[int, float, torch.Tensor, None] = None,
    accum_dtype: Optional[torch.dtype] = None,
    **options,
) -> Union[torch.Tensor, LinearCrossEntropyOutput]:
    """What `linear_cross_entropy` returns, of logits [tokens, classes] that are there, in PyTorch. There is no gradient of a weight
    to accumulate, so accum_dtype is for nothing."""
    _check_reduction(reduction)
    options = _options(logits.dtype, ignore_index, **options)
    scale = _scale(target, logits.shape[1], class_weight, options, reduction, num_items, wide(logits.dtype))
    rows = _TorchChunk(logits, target, class_weight, options).rows()
    return _output(_reduced(rows.loss, scale), rows, scale, target, options)


def _reduced(rows, scale):
    return rows if scale is None else rows.sum() * scale.view(())


def _output(loss, rows: Rows, scale, target, options) -> Union[torch.Tensor, LinearCrossEntropyOutput]:
    """What is returned of a reduced loss and of the rows, whose own loss is not looked at."""
    if not (options.return_z_loss or options.predicts):
        return loss
    z_loss = _reduced(rows.z_loss, scale) if options.return_z_loss else None
    accuracy = None
    if options.return_token_accuracy:
        accuracy = (rows.predicted == target).to(loss.dtype)
        if scale is not None:
            accuracy = accuracy.sum() / (rows.predicted >= 0).sum().clamp(min=1)
    return LinearCrossEntropyOutput(loss, z_loss, accuracy, rows.predicted if options.return_predicted_tokens else None)


def _scale(target, classes, class_weight, options, reduction, num_items, dtype) -> Optional[torch.Tensor]:
    """What the sum of the losses is multiplied by, [1] on the device; None where they are not summed."""
    if num_items is not None:
        items = torch.as_tensor(num_items, device=target.device).to(dtype)
    elif reduction == "none":
        return None
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
    _check_reduction(reduction)
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
        if wrong.any():
            fail("target", f"{int(target[wrong][0])} at one of its places", f"labels from 0 to {classes - 1}, or {ignore_index}")


def _check_reduction(reduction):
    if reduction not in ("mean", "sum", "none"):
        fail("reduction", repr(reduction), "'mean', 'sum' or 'none'")


def _options(
    dtype,
    ignore_index=-100,
    label_smoothing=0.0,
    softcap=None,
    lse_square_scale=0.0,
    use_token_scaling=False,
    accum_dtype=None,
    return_z_loss=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
) -> Options:
    """dtype: of the weight. Raises ValueError for a number or dtype that makes no sense."""
    if not 0.0 <= label_smoothing <= 1.0:
        fail("label_smoothing", label_smoothing, "a number from 0 to 1")
    if softcap is not None and not 0.0 <= softcap < float("inf"):
        fail("softcap", softcap, "a positive number, or None for no cap")
    if accum_dtype not in (None, dtype) and (accum_dtype != torch.float32 or dtype == torch.float64):
        fail("accum_dtype", accum_dtype, f"None, the weight's dtype {dtype}, or torch.float32")
    return Options(
        int(ignore_index),
        float(label_smoothing),
        float(softcap or 0.0),
        float(lse_square_scale),
        bool(use_token_scaling),
        accum_dtype,
        bool(return_z_loss),
        bool(return_token_accuracy),
        bool(return_predicted_tokens),
    )
