"""The generalised Jensen-Shannon divergence of two linear heads, a student's and a teacher's, without ever holding all their logits.

The student's tokens are taken in chunks (linear_head.py); of each, the teacher's logits are made beside the student's, and the divergence's
kernels turn the student's into their own gradient in place (divergence.py). So the forward pass already has the gradients, and the
backward pass only multiplies them by the incoming gradient.
"""

from typing import Any, Callable, Dict, NamedTuple, Optional

import torch
from torch.nn.functional import linear

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel
from .arguments import checked_index, describe, fail
from .arrays import accumulation_dtype
from .autograd import needs_formula
from .divergence import KINDS, check_numbers, jsd, labelled_slabs, sums_of_logits
from .divergence_terms import DivergenceOptions, inverse_of_count, losses_of, reference
from .linear_head import check_accum_dtype, fp16_factor, walk, write_logits
from .rows import blocks_of_pieces
from .softmax import row_sum
from .token_sums import sum_over_tokens

__all__ = ["LossOfLogits", "check_heads", "linear_jsd", "reduced_loss"]

REDUCTIONS = ("batchmean", "sum")
# In fp16 the gradient of a chunk's logits is multiplied by a power of two. Where both distributions are far apart it is up to so many times
# as large as what the loss is multiplied by; fp16 has room for twice as much.
ROOM = 128.0

_in_place_kernel = Kernel("divergence_of_logits_in_place", grid=blocks_of_pieces, where={"KIND": KINDS["js"]})


class _Piece:
    """A chunk: what the walk asks for. x, y: the student's and the teacher's logits [chunk, classes]."""

    def __init__(self, x, y, labels, options: DivergenceOptions):
        self.x, self.y, self.labels, self.options = x, y, labels, options

    def factor(self, scale):
        """(what the gradient is multiplied by, the power of two in it or None)."""
        if self.x.dtype != torch.float16:
            return scale, None
        power = fp16_factor(ROOM * scale.abs().max())
        return scale * power, power


class _TorchPiece(_Piece):
    def rows(self):
        return (losses_of(self.x, self.y, self.labels, self.options).sum(-1),)

    def gradient(self, scale):
        factor, power = self.factor(scale)
        self.x.copy_(reference(self.x, self.y, self.labels, self.options, factor)[1])
        return power


class _KernelPiece(_Piece):
    def rows(self):
        part_loss, part_slope, *self.lse = sums_of_logits(self.x, self.y, self.labels, self.options)
        self.slope = row_sum(part_slope)
        return (row_sum(part_loss),)

    def gradient(self, scale):
        factor, power = self.factor(scale)
        rows = labelled_slabs(_in_place_kernel, self.labels, self.x, self.y, *self.lse, self.slope)
        for a, b, lse_x, lse_y, slope, labels in rows:
            _in_place_kernel(a, b, lse_x, lse_y, labels, slope, factor, *self.options.numbers(self.labels))
        return power


class LossOfLogits(NamedTuple):
    """A loss of a chunk's logits. torch_piece, kernel_piece: take the student's and the teacher's logits, the labels and the options."""

    options: Any
    torch_piece: Callable
    kernel_piece: Callable


def _run(student, teacher, labels, scale, loss: LossOfLogits, needs, accum_dtype):
    """(the loss of every token, the gradients of sum(loss * scale)). student, teacher: (hidden, weight, bias)."""
    (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias) = student, teacher
    tensors = [t for t in (*student, *teacher, labels) if t is not None]
    kernels = hidden.dtype != torch.float64 and weight.shape[0] > 0 and kernels_run_on(*tensors)
    losses = torch.empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    piece = loss.kernel_piece if kernels else loss.torch_piece

    def loss_of(logits, rows, room):
        of_teacher = torch.empty_like(logits) if room is None else room[: logits.numel()].view(logits.shape)
        write_logits(of_teacher, teacher_hidden[rows], teacher_weight, teacher_bias)
        return piece(logits, of_teacher, None if labels is None else labels[rows], loss.options)

    return losses, walk(hidden, weight, bias, loss_of, (losses,), scale, needs, accum_dtype, logits_of_token=2)


def _pair(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, labels, scale, options, needs):
    """(sum(loss * scale) over the tokens, nothing more, the gradients). options: the loss, and accum_dtype."""
    student, teacher, (loss, accum_dtype) = (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias), options
    losses, gradients = _run(student, teacher, labels, scale, loss, needs, accum_dtype)
    return losses.sum() * scale.view(()), (), gradients


_LinearPair = sum_over_tokens("_LinearPair", _pair)


def linear_jsd(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: Optional[torch.Tensor] = None,
    *,
    bias: Optional[torch.Tensor] = None,
    teacher_bias: Optional[torch.Tensor] = None,
    beta: float = 0.5,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """Computes `jsd` of the logits of two linear heads, one chunk of logits at a time.

    hidden: the student's [..., features]; weight: [classes, features]; bias: [classes] or None. teacher_hidden: [..., other features],
    hidden's leading dimensions; teacher_weight: [classes, other features]; teacher_bias: [classes] or None. All of one dtype (bf16, fp16 or
    fp32; float64 runs in PyTorch) and device. labels, beta, ignore_index, temperature: as in `jsd`. reduction: "batchmean" (the mean over
    the tokens that count) or "sum". accum_dtype: in which the weight's gradient is added up over the chunks, as in `linear_cross_entropy`.

    Returns a scalar in float32. Differentiable in hidden, weight and bias; the teacher gets no gradient. Raises ValueError when shapes,
    dtypes, devices or options do not fit.
    """
    check_heads(hidden, weight, teacher_hidden, teacher_weight, labels, bias, teacher_bias)
    check_numbers(beta=beta, temperature=temperature)
    ignore_index = checked_index(ignore_index)
    check_accum_dtype(accum_dtype, weight.dtype)
    if reduction not in REDUCTIONS:
        fail("reduction", repr(reduction), "'batchmean' or 'sum'")
    teacher_hidden, teacher_weight = teacher_hidden.detach(), teacher_weight.detach()
    teacher_bias = None if teacher_bias is None else teacher_bias.detach()
    if torch.compiler.is_compiling() or needs_formula(hidden, weight, teacher_hidden, teacher_weight, labels, bias, teacher_bias):
        logits, of_teacher = linear(hidden, weight, bias), linear(teacher_hidden, teacher_weight, teacher_bias)
        given: Dict[str, Any] = {"beta": beta, "reduction": reduction, "ignore_index": ignore_index, "temperature": temperature}
        return jsd(logits, of_teacher, labels, from_logits=True, **given)
    loss = LossOfLogits(DivergenceOptions("js", 1.0, False, float(beta), ignore_index, float(temperature)), _TorchPiece, _KernelPiece)
    student, teacher = (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias)
    return reduced_loss(student, teacher, labels, loss, ignore_index, reduction, accum_dtype)


def reduced_loss(student, teacher, labels, loss: LossOfLogits, ignore_index: int, reduction: str, accum_dtype=None) -> torch.Tensor:
    """The losses of all tokens, reduced. student, teacher: (hidden [..., features], weight, bias), the teacher's without gradient."""
    (hidden, *head), (teacher_hidden, *teacher_head) = student, teacher
    student = (hidden.reshape(-1, hidden.shape[-1]), *head)
    teacher = (teacher_hidden.reshape(-1, teacher_hidden.shape[-1]), *teacher_head)
    labels = None if labels is None else labels.reshape(-1).contiguous()
    scale = _scale(student[0], labels, ignore_index, reduction)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in student):
        return _LinearPair.apply(*student, *teacher, labels, scale, (loss, accum_dtype))[0]
    return _run(student, teacher, labels, None, loss, (False,) * 3, accum_dtype)[0].sum() * scale.view(())


def _scale(hidden, labels, ignore_index, reduction) -> torch.Tensor:
    """What the sum of the losses is multiplied by, [1], found without waiting for the device."""
    acc, tokens = accumulation_dtype(hidden.dtype), hidden.shape[0]
    if reduction == "sum" or labels is None:
        number = 1.0 if reduction == "sum" else 1.0 / max(tokens, 1)
        return torch.full((1,), number, dtype=acc, device=hidden.device)
    kernels = hidden.dtype != torch.float64 and tokens > 0 and kernels_run_on(hidden, labels)
    return inverse_of_count(labels, ignore_index, acc, kernels)


def check_heads(hidden, weight, teacher_hidden, teacher_weight, labels, bias, teacher_bias) -> None:
    if hidden.dim() == 0 or not hidden.is_floating_point():
        fail("hidden", describe(hidden), "a floating point tensor [..., features]")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        fail("weight", describe(weight), f"[classes, {hidden.shape[-1]}] for hidden, which is {describe(hidden)}")
    if teacher_hidden.dim() == 0 or teacher_hidden.shape[:-1] != hidden.shape[:-1]:
        fail("teacher_hidden", describe(teacher_hidden), f"{list(hidden.shape[:-1])} and features, as hidden, which is {describe(hidden)}")
    if teacher_weight.shape != (weight.shape[0], teacher_hidden.shape[-1]):
        fail("teacher_weight", describe(teacher_weight), f"{[weight.shape[0], teacher_hidden.shape[-1]]}")
    for name, vector in (("bias", bias), ("teacher_bias", teacher_bias)):
        if vector is not None and vector.shape != weight.shape[:1]:
            fail(name, describe(vector), f"[{weight.shape[0]}], one value a class")
    if labels is not None and (labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64):
        fail("labels", describe(labels), f"torch.int64 {list(hidden.shape[:-1])}, one label a token")
    others = {"weight": weight, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight, "bias": bias,
              "teacher_bias": teacher_bias}
    for name, tensor in others.items():
        if tensor is not None and (tensor.dtype != hidden.dtype or tensor.device != hidden.device):
            fail(name, describe(tensor), f"of the dtype and on the device of hidden, which is {describe(hidden)}")
    if labels is not None and labels.device != hidden.device:
        fail("labels", describe(labels), f"on the device of hidden, {hidden.device}")


SELF_CHECKS = {
    "linear_jsd": lambda i: i.call(
        linear_jsd, *i.head(256)[:2], i.constant(i.tokens, 128), i.constant(i.classes, 128, scale=0.1), reduction="sum"
    ),
}
