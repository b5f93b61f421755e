"""The generalised Jensen-Shannon divergence of a student's and a teacher's linear heads for each token, and the student's entropy, without
ever holding all their logits: what distillation is made of.

Both heads' logits of a chunk of tokens are made in float32 and not rounded, because a divergence is the small difference of large numbers.
The divergence's gradient by a token's hidden state is one number, which arrives in the backward pass, times what the forward pass knows; so
with a frozen head the forward pass makes it, and the backward pass has no product with the vocabulary: three products. A trained head makes
both models' logits again: six.
"""

import math
from typing import NamedTuple, Optional, Tuple

import torch
from torch.nn.functional import linear

from ..runtime.device import kernels_run_on
from ..runtime.launch import Kernel, contiguous_copy
from .arguments import describe, fail, need_device
from .arrays import accumulation_dtype
from .autocast import as_autocast, outside_autocast, without_autocast
from .autograd import Function, autocasts, needs_formula
from .cross_entropy import check_one_value_a_class
from .linear_head import HeadGradients, fp16_factor, scaled, walk, write_wide_logits
from .log_probs import KernelPiece, ScoreOptions, checked_scores
from .rows import blocks_of_pieces

__all__ = ["linear_divergence"]

ROOM = 128.0  # as in linear_jsd.py


_sums_kernel = Kernel("head_divergence_sums", grid=blocks_of_pieces)
_gradient_kernel = Kernel("head_divergence_gradient", grid=blocks_of_pieces)


class LinearDivergenceOutput(NamedTuple):
    """What `linear_divergence` returns: [...] each in float32 (float64 where hidden is); entropy has no gradient."""

    divergence: torch.Tensor
    entropy: torch.Tensor


class LinearDivergenceOptions(NamedTuple):
    """How logits become scores, of both models, and what their mixture is."""

    student: ScoreOptions
    teacher: ScoreOptions
    beta: float


class _Piece:
    """A chunk, as `walk` asks for it. x, y: the student's and the teacher's logits [chunk, classes], in float32; half: the dtype in which
    the gradient goes on."""

    def __init__(self, x, y, options: LinearDivergenceOptions, half):
        self.x, self.y, self.options, self.half = x, y, options, half

    def write(self, scale):
        raise NotImplementedError

    def gradient(self, scale):
        """Writes the gradient over the student's logits; scale: [1] or [chunk]. Returns what fp16 was multiplied by, or None."""
        power = None
        if self.half == torch.float16:
            student_scale, _, after = self.options.student.numbers()
            power = fp16_factor(ROOM * scale.abs().max() * abs(student_scale * after))
            scale = scale * power
        self.write(scale)
        return power


class _KernelPiece(_Piece):
    def rows(self):
        x, y, options = self.x, self.y, self.options
        labels = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        student = KernelPiece(x, labels, options.student, ("log_probs", "entropy"), -100)
        teacher = KernelPiece(y, labels, options.teacher, ("log_probs",), -100)
        self.found = student.rows()
        teacher.rows()
        self.numbers = (*options.student.numbers(), *options.teacher.numbers(), options.beta)
        self.both = x, y, student.lse, teacher.lse
        shape = x.shape[0], -(-x.shape[1] // _sums_kernel.constant("TILE"))
        loss, own = (torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(2))
        _sums_kernel(*self.both, loss, own, *self.numbers)
        self.own = own.sum(1)
        return loss.sum(1), self.found.entropy

    def write(self, scale):
        _gradient_kernel(*self.both, self.own, scale.contiguous(), *self.numbers)


class _TorchPiece(_Piece):
    """Computes it in PyTorch, for CPUs and GPUs without kernels."""

    def rows(self):
        options = self.options
        self.log_p, self.log_q = (scores.log_p(scores.values(z)) for scores, z in ((options.student, self.x), (options.teacher, self.y)))
        loss, self.own = _terms(self.log_p, self.log_q, self.options.beta)
        return loss, -_weighted(self.log_p, self.log_p).sum(1)

    def write(self, scale):
        beta, p = self.options.beta, self.log_p.exp()
        if beta == 0.0:
            dz = p - self.log_q.exp()
        else:
            distance = _finite(self.log_p) - _log_mixture(self.log_p, self.log_q, beta)
            dz = (1 - beta if beta < 1.0 else 1.0) * p * (distance - self.own[:, None])
        student = self.options.student
        slope = student.slope(student.values(self.x) if student.softcap else p)
        dz = dz * slope * scale[:, None]
        self.x.copy_(torch.where(scale[:, None] == 0, 0.0, dz))


def _finite(log_p: torch.Tensor) -> torch.Tensor:
    return log_p.clamp(min=-1000.0)


def _weighted(log_p: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """p * other, 0 where p is and other may be infinite."""
    return log_p.exp() * _finite(other)


def _log_mixture(log_p, log_q, beta: float) -> torch.Tensor:
    if beta == 1.0:
        return _finite(log_q)
    return torch.logaddexp(_finite(log_p) + math.log(1 - beta), _finite(log_q) + math.log(beta))


def _terms(log_p, log_q, beta: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """D and K of kernel_src/head_divergence.py for each row, differentiable in log_p."""
    if beta == 0.0:
        loss = _weighted(log_q, _finite(log_q) - _finite(log_p)).sum(1)
        return loss, loss
    m = _log_mixture(log_p, log_q, beta)
    own = _weighted(log_p, _finite(log_p) - m).sum(1)
    return own if beta == 1.0 else beta * _weighted(log_q, _finite(log_q) - m).sum(1) + (1 - beta) * own, own


def _run(student, teacher, scale, options: LinearDivergenceOptions, needs) -> Tuple[Tuple[torch.Tensor, torch.Tensor], HeadGradients]:
    """(divergences and entropies of every token, the gradients of sum(divergence * scale)). student, teacher: (hidden, weight, bias)."""
    (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias) = student, teacher
    parameter_dtype, acc = weight.dtype, accumulation_dtype(hidden.dtype)
    weight, teacher_weight = weight.to(hidden.dtype), teacher_weight.to(teacher_hidden.dtype)
    bias, teacher_bias = (None if t is None else t.to(acc) for t in (bias, teacher_bias))  # added to logits of that dtype
    tensors = [t for t in (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias) if t is not None]
    kernels = acc == torch.float32 and weight.shape[0] > 0 and kernels_run_on(*tensors)
    kernels = kernels and not (options.student.vanish or options.teacher.vanish)
    found = hidden.new_empty(hidden.shape[0], dtype=acc), hidden.new_empty(hidden.shape[0], dtype=acc)
    piece, accum_dtype = _KernelPiece if kernels else _TorchPiece, acc if parameter_dtype == torch.float32 else None

    def loss_of(logits, rows, _):
        of_teacher = torch.empty_like(logits)
        write_wide_logits(of_teacher, teacher_hidden[rows], teacher_weight, teacher_bias)
        return piece(logits, of_teacher, options, hidden.dtype)

    logits_of_token = 2 * acc.itemsize // hidden.dtype.itemsize
    return found, walk(hidden, weight, bias, loss_of, found, scale, needs, accum_dtype, logits_of_token, parameter_dtype, wide=True)


class _LinearDivergence(Function):
    def forward(ctx, hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, options: LinearDivergenceOptions):
        needs = ctx.needs_input_grad[:3]
        ctx.options, ctx.early = options, not (needs[1] or needs[2])
        student, teacher = (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias)
        ones = hidden.new_ones(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype)) if ctx.early else None
        found, gradients = _run(student, teacher, ones, options, needs if ctx.early else (False,) * 3)
        if ctx.early:
            ctx.save_for_backward(gradients.hidden, gradients.factors[0])
        else:
            ctx.save_for_backward(*student, *teacher)
        ctx.mark_non_differentiable(found[1])
        ctx.set_materialize_grads(False)
        return found

    @outside_autocast
    def backward(ctx, upstream, _):
        if upstream is None:
            return (None,) * 7
        if ctx.early:
            gradient, factor = ctx.saved_tensors
            number = upstream[:, None] if factor is None else upstream[:, None] * factor
            return (torch.where(upstream[:, None] == 0, 0.0, gradient * number).to(gradient.dtype), *[None] * 6)
        tensors = ctx.saved_tensors
        scale = contiguous_copy(upstream.to(accumulation_dtype(tensors[0].dtype)))
        gradients = _run(tensors[:3], tensors[3:], scale, ctx.options, ctx.needs_input_grad[:3])[1]
        none = upstream.new_empty(0)
        pairs = zip(gradients[:3], (none if factor is None else factor for factor in gradients.factors))
        found = [None if gradient is None else scaled(gradient, factor, None) for gradient, factor in pairs]
        return (*(None if g is None else g.to(t.dtype) for g, t in zip(found, tensors)), *[None] * 4)


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    teacher_bias: Optional[torch.Tensor] = None,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: Optional[float] = None,
    scale: float = 1.0,
    teacher_softcap: Optional[float] = None,
    teacher_scale: float = 1.0,
) -> LinearDivergenceOutput:
    """Computes for each token the divergence of a teacher's and a student's distributions of the next, and the student's entropy, from
    hidden states and linear heads, one chunk of logits at a time.

    Args:
        hidden: the student's, [..., features], bf16, fp16 or fp32 (float64 runs in PyTorch); under autocast cast to its dtype.
        weight: [classes, features], of hidden's dtype, or another that is cast to it; its gradient has the weight's own dtype.
        teacher_hidden, teacher_weight: [..., other features], hidden's leading dimensions, and [classes, other features].
        bias, teacher_bias: [classes] or None.
        beta: 0 for KL(teacher || student), 1 for KL(student || teacher), between for beta * KL(teacher || m) + (1 - beta) *
            KL(student || m) with m = beta * teacher + (1 - beta) * student.
        temperature: of both distributions.
        softcap, scale, teacher_softcap, teacher_scale: of the logits, as in `linear_log_probs`.

    Returns:
        A LinearDivergenceOutput. Its divergence is differentiable in hidden, weight and bias; the teacher gets no gradient.

    Raises:
        ValueError: when shapes, dtypes, devices or options do not fit.
    """
    if autocasts(hidden.device):
        hidden, teacher_hidden = as_autocast(hidden.device, hidden, teacher_hidden)  # type: ignore[assignment]
    _check(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias)
    if not 0.0 <= beta <= 1.0:
        fail("beta", beta, "a number from 0 to 1")

    def fail_of_teacher(argument, *rest):
        fail(argument if argument == "temperature" else f"teacher_{argument}", *rest)

    of_teacher = checked_scores(temperature, teacher_softcap, teacher_scale, fail_of_teacher)
    options = LinearDivergenceOptions(checked_scores(temperature, softcap, scale, fail), of_teacher, float(beta))
    shape, tensors = hidden.shape[:-1], (teacher_hidden, teacher_weight, teacher_bias)
    teacher_hidden, teacher_weight, teacher_bias = (None if t is None else t.detach() for t in tensors)  # type: ignore[assignment]
    hidden, teacher_hidden = hidden.reshape(-1, hidden.shape[-1]), teacher_hidden.reshape(-1, teacher_hidden.shape[-1])
    student, teacher = (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias)
    if torch.compiler.is_compiling() or needs_formula(*student, *teacher):
        divergence, entropy = _of_whole_logits(student, teacher, options)
    elif torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in student):
        divergence, entropy = _LinearDivergence.apply(*student, *teacher, options)
    else:
        divergence, entropy = _run(student, teacher, None, options, (False,) * 3)[0]
    return LinearDivergenceOutput(divergence.view(shape), entropy.view(shape))


def _of_whole_logits(student, teacher, options: LinearDivergenceOptions):
    """Computes the same in operations that PyTorch differentiates and traces."""
    found = []
    for scores, (hidden, weight, bias) in ((options.student, student), (options.teacher, teacher)):
        acc = accumulation_dtype(hidden.dtype)
        with without_autocast(hidden.device):
            logits = linear(hidden.to(acc), weight.to(acc), None if bias is None else bias.to(acc))
        found.append(scores.log_p(scores.derived(logits)))
    return _terms(found[0], found[1], options.beta)[0], -_weighted(found[0], found[0]).sum(1).detach()


def _check(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias) -> None:
    for name, states, head in (("", hidden, weight), ("teacher_", teacher_hidden, teacher_weight)):
        if states.dim() == 0 or not states.is_floating_point() or states.shape[:-1] != hidden.shape[:-1]:
            fail(f"{name}hidden", describe(states), f"a floating point tensor {[*hidden.shape[:-1]]} and features")
        if head.dim() != 2 or head.shape != (weight.shape[0], states.shape[-1]) or not head.is_floating_point():
            classes = "classes" if head is weight else weight.shape[0]
            fail(f"{name}weight", describe(head), f"a floating point tensor [{classes}, {states.shape[-1]}]")
    for name, vector in (("bias", bias), ("teacher_bias", teacher_bias)):
        check_one_value_a_class(name, vector, weight.shape[0])
    teacher = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight, "teacher_bias": teacher_bias}
    need_device("hidden", hidden.device, weight=weight, bias=bias, **teacher)


SELF_CHECKS = {
    "linear_divergence": lambda i: i.call(
        linear_divergence, *i.head(256)[:2], i.constant(i.tokens, 128), i.constant(i.classes, 128, scale=0.1)
    )
}
