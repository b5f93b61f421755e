"""Losses of distillation, from the hidden states and linear heads of a student and a teacher: the labels' cross entropy and a distance of
both models' logits, weighed and added.

The Jensen-Shannon divergence is `linear_jsd`. The cosine of the angle between two rows of logits, here in PyTorch, is walked over in chunks
like it: with unit vectors s and t of a student's and a teacher's row x and y,

    loss = 1 - s . t,   dx = (s * (s . t) - t) / |x|
"""

from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch.nn.functional import linear, normalize, pad

from .arguments import checked_index, fail
from .arrays import accumulation_dtype
from .autograd import needs_formula
from .divergence import check_numbers
from .linear_cross_entropy import linear_cross_entropy
from .linear_head import fp16_factor
from .linear_jsd import LossOfLogits, check_heads, linear_jsd, reduced_loss

__all__ = ["linear_cosine", "linear_distillation_loss"]

DISTANCES = ("jsd", "cosine")


class DistillationOutput(NamedTuple):
    """What `linear_distillation_loss` returns: scalars in float32 (float64 where hidden is), soft_loss the distance, hard_loss the cross
    entropy (0 where it was not asked for), and loss their weighted sum. All have a gradient."""

    loss: torch.Tensor
    soft_loss: torch.Tensor
    hard_loss: torch.Tensor


class _CosineOptions(NamedTuple):
    ignore_index: int


class _CosinePiece:
    """A chunk: what the walk asks for. x, y: the student's and the teacher's logits [chunk, classes]."""

    def __init__(self, x, y, labels, options: _CosineOptions):
        self.x, self.y = x, y
        self.counted = None if labels is None else labels != options.ignore_index

    def rows(self):
        acc = accumulation_dtype(self.x.dtype)
        x, self.t = self.x.to(acc), normalize(self.y.to(acc), dim=1)
        self.length = torch.linalg.vector_norm(x, dim=1)
        self.s = normalize(x, dim=1)
        self.cosine = (self.s * self.t).sum(1)
        loss = 1 - self.cosine
        return (loss if self.counted is None else torch.where(self.counted, loss, 0.0),)

    def gradient(self, scale):
        factor = scale / self.length
        wanted = self.length > 0
        factor = torch.where(wanted if self.counted is None else wanted & self.counted, factor, 0.0)
        power = None
        if self.x.dtype == torch.float16:
            power = fp16_factor(2 * factor.abs().max())
            factor = factor * power
        gradient = self.s.mul_(self.cosine[:, None]).sub_(self.t).mul_(factor[:, None])
        self.x.copy_(torch.where(factor[:, None] == 0, 0.0, gradient))
        return power


def linear_cosine(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: Optional[torch.Tensor] = None,
    *,
    bias: Optional[torch.Tensor] = None,
    teacher_bias: Optional[torch.Tensor] = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Computes the mean over the tokens of 1 - cos(student's logits, teacher's logits), one chunk of logits at a time.

    A row whose logits are all 0 has the loss 1 and no gradient. For the arguments see `linear_jsd`.

    Returns a scalar in float32. Differentiable in hidden, weight and bias; the teacher gets no gradient. Raises ValueError when shapes,
    dtypes, devices or options do not fit.
    """
    check_heads(hidden, weight, teacher_hidden, teacher_weight, labels, bias, teacher_bias)
    ignore_index = checked_index(ignore_index)
    teacher: Tuple[Any, ...] = teacher_hidden.detach(), teacher_weight.detach(), None if teacher_bias is None else teacher_bias.detach()
    if torch.compiler.is_compiling() or needs_formula(hidden, weight, *teacher, labels, bias):
        acc = accumulation_dtype(hidden.dtype)
        x, y = (linear(*given).to(acc) for given in ((hidden, weight, bias), teacher))
        counted = labels != ignore_index if labels is not None else None
        y = y if counted is None else torch.where(counted[..., None], y, 0.0)  # it may be anything elsewhere
        loss = 1 - (normalize(x, dim=-1) * normalize(y, dim=-1)).sum(-1)
        if counted is None:
            return loss.mean()
        return torch.where(counted, loss, 0.0).sum() / counted.sum().clamp(min=1)
    of_chunks = LossOfLogits(_CosineOptions(ignore_index), _CosinePiece, _CosinePiece)
    return reduced_loss((hidden, weight, bias), teacher, labels, of_chunks, ignore_index, "batchmean")


def linear_distillation_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    target: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    teacher_bias: Optional[torch.Tensor] = None,
    *,
    distance: str = "jsd",
    hard_weight: float = 0.5,
    soft_weight: float = 0.5,
    beta: float = 0.5,
    temperature: float = 1.0,
    compute_hard_loss: bool = True,
    ignore_index: int = -100,
) -> DistillationOutput:
    """Computes hard_weight * cross entropy + soft_weight * distance of two linear heads, one chunk of logits at a time.

    Args:
        hidden: the student's [tokens, features]; weight: [classes, features]; bias: [classes] or None.
        teacher_hidden: [tokens, other features]; teacher_weight: [classes, other features]; teacher_bias: [classes] or None. Where the
            teacher has more classes the student's logits of those are 0. Of any dtype: the teacher's are cast to hidden's.
        target: [tokens] int64. Tokens with the label ignore_index do not count; both losses are means over the others.
        distance: "jsd" with `beta` as in `linear_jsd`, or "cosine", beta * (1 - cos).
        temperature: of both distributions of the distance, not of the cross entropy. A cosine does not depend on it.
        compute_hard_loss: False leaves the cross entropy out and makes it 0.

    Returns:
        A DistillationOutput.

    Raises:
        ValueError: when shapes, dtypes, devices or options do not fit.
    """
    if distance not in DISTANCES:
        fail("distance", repr(distance), "'jsd' or 'cosine'")
    check_numbers(beta=beta if distance == "jsd" else 0.5, temperature=temperature)
    hard: Any = None
    if compute_hard_loss:
        hard = linear_cross_entropy(hidden, weight, target, bias, ignore_index=ignore_index)
    teacher_hidden, teacher_weight = teacher_hidden.to(hidden.dtype), teacher_weight.to(hidden.dtype)
    teacher_bias = None if teacher_bias is None else teacher_bias.to(hidden.dtype)
    more = teacher_weight.shape[0] - weight.shape[0]
    if more > 0:
        weight, bias = pad(weight, (0, 0, 0, more)), None if bias is None else pad(bias, (0, more))
    given: Dict[str, Any] = {"bias": bias, "teacher_bias": teacher_bias, "ignore_index": ignore_index}
    heads = hidden, weight, teacher_hidden, teacher_weight, target
    if distance == "jsd":
        soft = linear_jsd(*heads, beta=beta, temperature=temperature, **given)
    else:
        soft = beta * linear_cosine(*heads, **given)
    hard = soft.new_zeros(()) if hard is None else hard
    return DistillationOutput(hard_weight * hard + soft_weight * soft, soft, hard)
