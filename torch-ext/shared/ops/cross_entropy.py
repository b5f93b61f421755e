"""Cross entropy of logits: what it may be beside the plain one, its statistics and its gradient, in the kernels and in PyTorch."""

from typing import NamedTuple, Optional, Union

import torch

from ..runtime.device import is_ordinary
from ..runtime.launch import Kernel
from .arguments import checked_index, describe, fail
from .arrays import accumulation_dtype
from .autocast import without_autocast
from .linear_head import check_accum_dtype, fp16_factor
from .rows import blocks_of_pieces, one_block_a_row

__all__ = [
    "Chunk", "CrossEntropyOptions", "KernelChunk", "LinearCrossEntropyOutput", "TokenLosses", "TorchChunk", "check_labels", "check_numbers",
    "check_one_value_a_class", "check_reduction", "checked_options", "cross_entropy_of_logits", "distance_of", "is_counted", "output_of",
    "reduced", "reduction_scale", "shares_of", "shift_of", "z_loss_of",
]  # fmt: skip


_statistics_kernel = Kernel("cross_entropy_statistics", grid=blocks_of_pieces)
_statistics_weighted_kernel = Kernel("cross_entropy_statistics_weighted", grid=blocks_of_pieces)
_combine_kernel = Kernel("cross_entropy_combine", grid=one_block_a_row)
_gradient_kernel = Kernel("cross_entropy_gradient", grid=blocks_of_pieces)
_gradient_weighted_kernel = Kernel("cross_entropy_gradient_weighted", grid=blocks_of_pieces)


class CrossEntropyOptions(NamedTuple):
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


_KINDS = [None if default is None else type(default) for default in CrossEntropyOptions._field_defaults.values()]


def checked_options(dtype: torch.dtype, **given) -> CrossEntropyOptions:
    """The options with numbers of one type each. dtype: of the weight. Raises ValueError for a number or dtype that makes no sense,
    TypeError for an option that does not exist."""
    options = CrossEntropyOptions(**given)
    check_numbers(options.label_smoothing, given.get("softcap"))
    check_accum_dtype(options.accum_dtype, dtype)
    options = options._replace(ignore_index=checked_index(options.ignore_index))
    values: list = [value if kind is None else kind(value or 0) for value, kind in zip(options, _KINDS)]
    return CrossEntropyOptions(*values)


class LinearCrossEntropyOutput(NamedTuple):
    """What `linear_cross_entropy` returns when more than the loss is asked for. What was not asked for is None, and only the loss
    is differentiable."""

    loss: torch.Tensor
    z_loss: Optional[torch.Tensor] = None
    token_accuracy: Optional[torch.Tensor] = None
    predicted_tokens: Optional[torch.Tensor] = None


class TokenLosses(NamedTuple):
    """Results for every token: the loss, and where they were asked for, the z-loss that is a part of it and the most probable class."""

    loss: torch.Tensor
    z_loss: Optional[torch.Tensor] = None
    predicted: Optional[torch.Tensor] = None


def is_counted(target: torch.Tensor, classes: int, ignore_index: int) -> torch.Tensor:
    return (target != ignore_index) & (target >= 0) & (target < classes)


def shares_of(weights: torch.Tensor) -> torch.Tensor:
    """Each class's share of the sum of the weights: the mean of logits that are weighted so is finite where they are."""
    total = weights.sum()
    return torch.where(total == 0, 0.0, weights / total)


def shift_of(z: torch.Tensor) -> torch.Tensor:
    """The largest of each row, to subtract before an exponential; 0 where that is infinite. Has no gradient."""
    if not z.numel():
        return z.detach().sum(1)
    top = z.detach().amax(1)
    return torch.where(top.isinf(), 0.0, top)


def joined(lse: torch.Tensor) -> torch.Tensor:
    """lse in one number. lse: [tokens, 2], the largest logit of a row and log(sum(exp(logit - largest))): of logits around -1e9, as a mask
    leaves them, the rounded sum has lost the second."""
    return lse.sum(1)


def z_loss_of(lse: torch.Tensor, options: CrossEntropyOptions) -> torch.Tensor:
    """lse_square_scale * lse^2; 0 without that option, also where the square is infinite. lse: as in `joined`."""
    return options.lse_square_scale * joined(lse).square() if options.lse_square_scale else torch.zeros_like(lse[:, 0])


def distance_of(lse, part_max, part_total, shares, tile: int) -> torch.Tensor:
    """lse minus the mean of the logits weighted by `shares`, per token, of what the kernels leave of pieces of `tile` classes: their maxima
    and half of the mean distances from these."""
    pieces = part_max.shape[1]
    share = torch.nn.functional.pad(shares, (0, pieces * tile - shares.shape[0])).view(pieces, tile).sum(1)
    top, log_sum = lse.unbind(1)
    half = part_total.sum(1) + ((top[:, None] * 0.5 - part_max * 0.5) * share).sum(1)
    return log_sum + 2 * half


class Chunk:
    """Cross entropy of one chunk of logits: `rows()`, then `gradient(scale)`, which writes over the logits, and returns the power of
    two by which the gradient was multiplied to be in fp16's range; None in other dtypes.

    `loss()` of a class gives the loss without token scaling, and keeps lse (in two parts, see `joined`) and the negative log likelihood.
    """

    lse: torch.Tensor
    likelihood: torch.Tensor

    def __init__(self, logits, target, class_weight, options):
        self.logits, self.classes, self.dtype = logits, logits.shape[1], accumulation_dtype(logits.dtype)
        self.target, self.class_weight, self.options = target, class_weight, options
        self.plain = options.plain and class_weight is None
        self.scaling = None

    def look_up(self):
        """Per token: is it counted, the weight of its label; and the weights of all classes and their sum."""
        self.counted = is_counted(self.target, self.classes, self.options.ignore_index)
        self.weights = self.class_weight
        if self.weights is None:
            self.weights = self.logits.new_ones(self.classes, dtype=self.dtype)
        self.target_weight = self.weights[torch.where(self.counted, self.target, 0)]
        self.weight_sum = self.weights.sum()

    def weighted(self, distance):
        """The loss with every option but token scaling. distance: per token, lse minus the mean of the logits weighted by `shares_of`."""
        options = self.options
        loss = (1 - options.label_smoothing) * self.target_weight * self.likelihood
        if options.label_smoothing:
            loss = loss + options.label_smoothing / self.classes * self.weight_sum * distance
        if options.lse_square_scale:
            loss = loss + z_loss_of(self.lse, options)
        return torch.where(self.counted, loss, 0.0)

    def loss(self) -> torch.Tensor:
        """The losses [tokens] without token scaling."""
        raise NotImplementedError

    def rows(self) -> TokenLosses:
        options = self.options
        loss, z_loss, predicted = self.loss(), None, None
        if options.return_z_loss or options.predicts:
            counted = is_counted(self.target, self.classes, options.ignore_index)
        if options.return_z_loss:
            z_loss = torch.where(counted, z_loss_of(self.lse.detach(), options), 0.0)
        if options.predicts:
            predicted = torch.where(counted, self.logits.detach().argmax(1), -1)
        if options.use_token_scaling:
            self.scaling = torch.exp(-self.likelihood.detach())
            loss, z_loss = loss * self.scaling, None if z_loss is None else z_loss * self.scaling
        return TokenLosses(loss, z_loss, predicted)

    def coefficients(self, scale):
        """a, b, c of kernel_src/cross_entropy.py, times the scale, which is that of the reduction or of every token."""
        options = self.options
        smooth = options.label_smoothing / self.classes
        b = (1 - options.label_smoothing) * self.target_weight
        a = b + smooth * self.weight_sum
        if options.lse_square_scale:
            a = a + 2 * options.lse_square_scale * joined(self.lse)
        return tuple(torch.where(self.counted, t, 0.0) * scale for t in (a, b, torch.full_like(a, smooth)))

    def in_range(self, *coefficients):
        """(factor, coefficients times factor), so that fp16 holds the gradient, which is not larger than their sum; factor is None in
        other dtypes."""
        if self.logits.dtype != torch.float16:
            return (None, *coefficients)
        factor = fp16_factor(sum(t.abs().amax() for t in coefficients))
        return (factor, *(t * factor for t in coefficients))

    def scaled(self, scale):
        """What the gradients are multiplied by, with token scaling."""
        return scale if self.scaling is None else scale * self.scaling


class KernelChunk(Chunk):
    def loss(self):
        logits, options = self.logits, self.options
        statistics = _statistics_kernel if self.plain else _statistics_weighted_kernel
        shape = (logits.shape[0], -(-logits.shape[1] // statistics.constant("TILE")))
        new = {"dtype": torch.float32, "device": logits.device}
        part_max, part_sum = torch.empty(shape, **new), torch.empty(shape, **new)
        self.lse, self.likelihood = torch.empty((shape[0], 2), **new), torch.empty(shape[0], **new)
        if self.plain:
            _statistics_kernel(logits, part_max, part_sum)
        else:
            self.look_up()
            part_total, shares = torch.empty(shape, **new), shares_of(self.weights)
            _statistics_weighted_kernel(logits, shares, part_max, part_sum, part_total, options.softcap)
        _combine_kernel(logits, self.target, part_max, part_sum, self.lse, self.likelihood, options.ignore_index, options.softcap)
        if self.plain:
            return self.likelihood
        if not options.label_smoothing:
            return self.weighted(0.0)
        return self.weighted(distance_of(self.lse, part_max, part_total, shares, statistics.constant("TILE")))

    def gradient(self, scale):
        scale = self.scaled(scale)
        if self.plain and scale.numel() == 1:
            factor, scale = self.in_range(scale)
            _gradient_kernel(self.logits, self.target, self.lse, scale.view(1), self.options.ignore_index)
            return factor
        if self.plain:
            self.look_up()
        factor, a, b, c = self.in_range(*self.coefficients(scale))
        a, b, c = a.contiguous(), b.contiguous(), c.contiguous()
        _gradient_weighted_kernel(self.logits, self.weights, self.target, self.lse, a, b, c, self.options.softcap)
        return factor


class TorchChunk(Chunk):
    """Computes it in PyTorch, for CPUs and GPUs without kernels."""

    def loss(self):
        self.look_up()
        z = self.logits.to(accumulation_dtype(self.logits.dtype))
        if self.options.softcap:
            z = self.options.softcap * torch.tanh(z / self.options.softcap)
        top = shift_of(z)
        centered = z - top[:, None]
        log_sum = torch.logsumexp(centered, 1)
        self.z, self.lse = z, torch.stack((top, log_sum), 1)
        label = torch.where(self.counted, self.target, 0)
        self.likelihood = log_sum - centered.gather(1, label[:, None])[:, 0]
        if not self.options.label_smoothing:
            return self.weighted(0.0)
        half = z * 0.5 - top[:, None] * 0.5  # finite where the whole difference is not
        with without_autocast(half.device):  # which would round both operands
            mean = half @ shares_of(self.weights)
        return self.weighted(log_sum - 2 * mean)

    def gradient(self, scale):
        scale = self.scaled(scale)
        factor, a, b, c = self.in_range(*self.coefficients(scale))
        slope = 1 - (self.z / self.options.softcap).square() if self.options.softcap else None
        # Written over z, which is the largest thing here, and in fp32 the logits themselves.
        top, log_sum = self.lse.split(1, 1)
        gradient = self.z.sub_(top).sub_(log_sum).exp_().mul_(a[:, None])
        label = torch.where(self.counted, self.target, 0)
        gradient.scatter_add_(1, label[:, None], -b[:, None])
        if self.options.label_smoothing:
            gradient.addcmul_(c[:, None], self.weights, value=-1)
        if slope is not None:
            gradient.mul_(slope)
        gradient.masked_fill_(~self.counted[:, None], 0.0)
        if gradient is not self.logits:
            self.logits.copy_(gradient)
        return factor


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
    to accumulate, so accum_dtype is ignored."""
    check_reduction(reduction)
    check_one_value_a_class("class_weight", class_weight, logits.shape[1])
    check_labels(target, logits.shape[1], ignore_index)
    checked = checked_options(logits.dtype, ignore_index=ignore_index, **options)
    if class_weight is not None:
        class_weight = class_weight.to(accumulation_dtype(logits.dtype))
    scale = reduction_scale(target, logits.shape[1], class_weight, checked, reduction, num_items, accumulation_dtype(logits.dtype))
    rows = TorchChunk(logits, target, class_weight, checked).rows()
    return output_of(reduced(rows.loss, scale), rows, scale, target, checked)


def reduced(rows, scale):
    return rows if scale is None else rows.sum() * scale.view(())


def output_of(loss, rows: TokenLosses, scale, target, options) -> Union[torch.Tensor, LinearCrossEntropyOutput]:
    """What is returned for a reduced loss and for the rows, whose own loss is ignored."""
    if not (options.return_z_loss or options.predicts):
        return loss
    z_loss = reduced(rows.z_loss, scale) if options.return_z_loss else None
    accuracy = None
    if options.return_token_accuracy and rows.predicted is not None:  # which it is not with that option
        # A token that does not count has the prediction -1, which its label may be too.
        accuracy = ((rows.predicted == target) & (rows.predicted >= 0)).to(loss.dtype)
        if scale is not None:
            accuracy = accuracy.sum() / (rows.predicted >= 0).sum().clamp(min=1)
    return LinearCrossEntropyOutput(loss, z_loss, accuracy, rows.predicted if options.return_predicted_tokens else None)


def reduction_scale(target, classes, class_weight, options, reduction, num_items, dtype) -> Optional[torch.Tensor]:
    """Returns the factor that turns the sum of the losses into the result, [1] on target's device, or None for reduction="none". The factor
    is 0 if no label counts for a mean, and infinite if num_items is 0 although labels count."""
    of_none: Union[float, torch.Tensor] = 0.0
    if num_items is not None:
        items = _on_device(num_items, target.device).to(dtype)
        if isinstance(num_items, torch.Tensor) or num_items == 0:
            of_none = torch.where((target != options.ignore_index).any(), float("inf"), 0.0).to(dtype)
    elif reduction == "none":
        return None
    elif reduction == "sum":
        items = target.new_ones((), dtype=dtype)
    else:
        counted = is_counted(target, classes, options.ignore_index)
        if class_weight is None:
            items = counted.sum().to(dtype)
        else:
            items = torch.where(counted, class_weight[torch.where(counted, target, 0)], 0.0).sum()
    return torch.where(items == 0, of_none, 1.0 / items).to(dtype).view(1)


def _on_device(number: Union[int, float, torch.Tensor], device) -> torch.Tensor:
    """The number as a tensor there. The host does not wait for the device, as it does to copy memory of its own."""
    if isinstance(number, torch.Tensor):
        return number.to(device, non_blocking=True)
    return torch.full((), number, dtype=torch.float64, device=device)


def check_labels(target, classes, ignore_index):
    """Checks the labels on a CPU, where that needs no synchronization."""
    ignore_index = checked_index(ignore_index)
    if not target.is_cpu or not (torch.compiler.is_compiling() or is_ordinary(target)):
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
    expected = f"labels from 0 to {classes - 1}, or {ignore_index}"
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), f"target is another label at one of its places, expected {expected}")
    elif wrong.any():
        fail("target", f"{int(target[wrong][0])} at one of its places", expected)


def check_one_value_a_class(name, vector, classes):
    if vector is not None and vector.shape != (classes,):
        fail(name, describe(vector), f"[{classes}], one value a class")


def check_numbers(label_smoothing, softcap):
    if not 0.0 <= label_smoothing <= 1.0:
        fail("label_smoothing", label_smoothing, "a number from 0 to 1")
    if softcap is not None and not 0.0 < softcap < float("inf"):
        fail("softcap", softcap, "a positive number, or None for no cap")


def check_reduction(reduction):
    if reduction not in ("mean", "sum", "none"):
        fail("reduction", repr(reduction), "'mean', 'sum' or 'none'")
