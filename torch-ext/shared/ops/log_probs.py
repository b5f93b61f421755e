"""Log-probabilities of labels, entropies and more of a chunk of logits, and their gradient over the logits: in kernels and in PyTorch.

The formulas are those of kernel_src/log_probs.py.
"""

import math
from typing import Any, NamedTuple, Optional, Tuple, Type

import torch

from ..runtime.launch import Kernel, ships
from .arrays import accumulation_dtype
from .cross_entropy import CrossEntropyOptions, KernelChunk, is_counted, shift_of
from .linear_head import fp16_factor
from .operators import constant
from .rows import blocks_of_pieces, one_block_a_row

__all__ = [
    "OUTPUTS", "KernelPiece", "LikelihoodPiece", "Piece", "ScoreOptions", "TokenLogProbs", "Upstream", "checked_scores", "of_logits",
    "piece_of",
]  # fmt: skip

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
SUMS = 6  # of a piece of a row, as kernel_src/log_probs.py keeps them
BITS = {"entropy": 1, "log_sum_sq_probs": 2, "mean_logits": 4, "is_top1": 8}  # of what it calls `more`
SMALLEST = 1e-30  # a factor of scores with which fp32 computes


def _forms(name: str) -> dict:
    """(whether more than log_probs is computed, whether there is a softcap) -> the kernel's form."""
    forms = {form: Kernel(name, grid=blocks_of_pieces, where={"MORE": form[0], "CAPPED": form[1]}) for form in ((0, 0), (1, 0), (1, 1))}
    return {**forms, (0, 1): forms[1, 1]}


_statistics_kernels = _forms("log_probs_statistics")
_combine_kernel = Kernel("log_probs_combine", grid=one_block_a_row)
_gradient_kernels = _forms("log_probs_gradient")


class ScoreOptions(NamedTuple):
    """How logits become scores: softcap * tanh(scale * logits / softcap) / temperature; softcap 0 for none."""

    temperature: float = 1.0
    softcap: float = 0.0
    scale: float = 1.0

    def numbers(self) -> Tuple[float, float, float]:
        """scale, softcap and what a score is multiplied by in the end, as the kernels take them: without a softcap scale is 1."""
        if self.softcap:
            return self.scale, self.softcap, 1 / self.temperature
        return 1.0, 0.0, self.scale / self.temperature

    @property
    def vanish(self) -> bool:
        """Whether all scores are 0, or too small for fp32: a class is not ruled out by -inf then, as the kernels do past a row's end."""
        scale, _, after = self.numbers()
        return abs(scale * after) < SMALLEST

    def values(self, logits: torch.Tensor) -> torch.Tensor:
        """What becomes scores when it is multiplied by the last factor: logits or capped ones, in a tensor of their own, in float32 or
        float64."""
        z = logits.to(accumulation_dtype(logits.dtype), copy=True)
        scale, softcap, after = self.numbers()
        if softcap:
            z.mul_(scale / softcap).tanh_().mul_(softcap)
        return z if after else z.zero_()

    def derived(self, logits: torch.Tensor) -> torch.Tensor:
        """`values` in operations that PyTorch differentiates."""
        z = logits.to(accumulation_dtype(logits.dtype))
        scale, softcap, after = self.numbers()
        if softcap:
            z = softcap * torch.tanh(z * (scale / softcap))
        return z if after else torch.zeros_like(z)

    def top_of(self, values: torch.Tensor) -> torch.Tensor:
        """The value of each row's largest score, [rows], 0 where that is infinite."""
        return -shift_of(-values) if self.numbers()[2] < 0 else shift_of(values)

    def log_p(self, values: torch.Tensor) -> torch.Tensor:
        """The logarithms of probabilities. Scores themselves may be beyond the largest number, their differences to the largest are not."""
        return ((values - self.top_of(values)[:, None]) * self.numbers()[2]).log_softmax(1)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of each row's scores. The sum of the values may be beyond the largest number, and by rounding their mean."""
        half, largest = (values / (2 * values.shape[1])).sum(1), torch.finfo(values.dtype).max
        return torch.where(half.isinf(), half, (2 * half).clamp(-largest, largest)) * self.numbers()[2]

    def first_of_largest(self, values: torch.Tensor) -> torch.Tensor:
        return values.argmin(1) if self.numbers()[2] < 0 else values.argmax(1)

    def slope(self, values: torch.Tensor):
        """The derivative of scores by their logits."""
        scale, softcap, after = self.numbers()
        if not softcap:
            return scale * after
        return (1 - (values / softcap).square()) * (scale * after)


class TokenLogProbs(NamedTuple):
    """Results of every token, [tokens] in float32 (float64 where the logits are); what was not asked for is None."""

    log_probs: Optional[torch.Tensor] = None
    entropy: Optional[torch.Tensor] = None
    log_sum_sq_probs: Optional[torch.Tensor] = None
    mean_logits: Optional[torch.Tensor] = None
    is_top1: Optional[torch.Tensor] = None


class Upstream(NamedTuple):
    """The gradients of log_probs, entropy and mean_logits, [tokens] each, None for zero."""

    log_probs: Optional[torch.Tensor] = None
    entropy: Optional[torch.Tensor] = None
    mean_logits: Optional[torch.Tensor] = None

    def at(self, rows: slice) -> "Upstream":
        return Upstream(*(None if t is None else t[rows] for t in self))


class Piece:
    """A chunk of logits [chunk, classes], whose labels are target [chunk]: `rows()`, then `write_gradient(...)`."""

    def __init__(self, logits, target, scores: ScoreOptions, outputs: Tuple[str, ...], ignore_index: int):
        self.logits, self.target, self.scores, self.ignore_index = logits, target, scores, ignore_index
        self.outputs, self.more = outputs, outputs != ("log_probs",)
        self.entropy: torch.Tensor = logits  # what `rows` finds in its place where there is `more`
        self.lse: torch.Tensor = logits  # [chunk, 2], as `rows` finds it: the largest value, and what lse is beyond its score

    @property
    def counted(self) -> torch.Tensor:
        return is_counted(self.target, self.logits.shape[1], self.ignore_index)

    def rows(self) -> TokenLogProbs:
        raise NotImplementedError

    def write_columns(self, first: int, lse: torch.Tensor, hit: torch.Tensor) -> None:
        """Writes the gradient of the sum of hit * log_probs over the logits, where these are columns of a vocabulary's, from `first` on.

        lse: what `rows` left of whole rows. hit: [chunk], 0 for a row that does not count."""
        raise NotImplementedError

    def coefficients(self, upstream: Upstream):
        """hit, alpha, beta and flat of kernel_src/log_probs.py, [chunk] or 0.0 each; those of a row that does not count are 0."""
        counted = self.counted
        g, u, w = (None if t is None else torch.where(counted, t, 0.0) for t in upstream)
        hit: Any = 0.0
        alpha, beta, flat = hit, hit, hit
        if g is not None:
            hit, alpha = g, -g
        if u is not None:
            alpha, beta = alpha - u * self.entropy, -u
        if w is not None:
            flat = w / self.logits.shape[1]
        return hit, alpha, beta, flat

    def in_range(self, *coefficients):
        """(factor, coefficients times it), where fp16 holds what becomes of them; factor is None in other dtypes. The gradient is below
        their sum, because p * log p is above -1/e."""
        if self.logits.dtype != torch.float16:
            return (None, *coefficients)
        scale, _, after = self.scores.numbers()
        largest = torch.stack([c.abs().amax() for c in coefficients if isinstance(c, torch.Tensor)]).sum()
        factor = fp16_factor(largest * abs(scale * after))
        return (factor, *(c * factor if isinstance(c, torch.Tensor) else c for c in coefficients))

    def write_gradient(self, upstream: Upstream, entropy_to: Optional[torch.Tensor] = None):
        """Writes the gradient of the sum of upstream * results over the logits, and that of the sum of the entropies to `entropy_to`, like
        the logits, where it is given. Returns the powers of two that both were multiplied by in fp16, else (None, None)."""
        factor, *first = self.in_range(*self.coefficients(upstream))
        other_factor, second = None, (0.0, 0.0)
        if entropy_to is not None:
            ones = torch.ones_like(self.entropy)
            other_factor, *second = self.in_range(*self.coefficients(Upstream(entropy=ones))[1:3])
        self._write(first, second, entropy_to)
        return factor, other_factor

    def _write(self, first, second, entropy_to):
        raise NotImplementedError


class KernelPiece(Piece):
    """Computes it in kernels."""

    def rows(self) -> TokenLogProbs:
        logits, numbers = self.logits, self.scores.numbers()
        tokens, new = logits.shape[0], {"dtype": torch.float32, "device": logits.device}
        more = sum(bit for name, bit in BITS.items() if name in self.outputs)
        statistics = _statistics_kernels[int(more > 0), int(numbers[1] > 0)]
        partial = torch.empty((tokens, SUMS, -(-logits.shape[1] // statistics.constant("TILE"))), **new)
        statistics(logits, partial, *numbers, more)
        self.lse, log_probs = torch.empty((tokens, 2), **new), torch.empty(tokens, **new)
        rest = [torch.empty(tokens if name in self.outputs else 1, **new) for name in OUTPUTS[1:]]
        _combine_kernel(logits, self.target, partial, self.lse, log_probs, *rest, *numbers, self.ignore_index, more)
        self.entropy = rest[0]
        found = (log_probs, *rest[:-1], rest[-1] != 0)
        return TokenLogProbs(*(row if name in self.outputs else None for name, row in zip(OUTPUTS, found)))

    def write_columns(self, first: int, lse: torch.Tensor, hit: torch.Tensor) -> None:
        self.lse, self.target = lse, self.target - first  # a label elsewhere is in no block of these columns
        self._write((hit, -hit, 0.0, 0.0), (0.0, 0.0), None)

    def _write(self, first, second, entropy_to):
        zeros = torch.zeros_like(self.target, dtype=torch.float32)
        columns = [c if isinstance(c, torch.Tensor) else zeros for c in (*first, *second)]
        both, numbers = int(entropy_to is not None), self.scores.numbers()
        more = both or any(isinstance(c, torch.Tensor) for c in first[2:])
        other = entropy_to if both else self.logits.new_empty((1, self.logits.shape[1]))
        gradient = _gradient_kernels[int(more), int(numbers[1] > 0)]
        gradient(self.logits, other, self.target, self.lse, torch.stack(columns, 1), *numbers, both)


class TorchPiece(Piece):
    """Computes it in PyTorch, for CPUs and GPUs without kernels."""

    def rows(self) -> TokenLogProbs:
        counted = self.counted
        self.label = torch.where(counted, self.target, 0)
        z, found = self.scores.values(self.logits), {}
        if "mean_logits" in self.outputs:
            found["mean_logits"] = self.scores.mean(z)
        if "is_top1" in self.outputs:
            found["is_top1"] = self.scores.first_of_largest(z) == self.label
        # lse in two steps: of logits around -1e9, as a mask leaves them, the rounded sum has lost the second.
        top, after = self.scores.top_of(z), self.scores.numbers()[2]
        z.sub_(top[:, None])
        if after != 1.0:
            z.mul_(after)
        log_sum = z.logsumexp(1)
        self.lse = torch.stack((top, log_sum), 1)
        self.log_p = z.sub_(log_sum[:, None])  # what the chunk keeps
        found["log_probs"] = self.log_p.gather(1, self.label[:, None])[:, 0]
        if self.more:
            p = self.log_p.exp()
            if "log_sum_sq_probs" in self.outputs:
                found["log_sum_sq_probs"] = p.square().sum(1).log()
            self.entropy = -_times(p, self.log_p).sum(1)
            found["entropy"] = self.entropy = self.entropy.masked_fill(~counted, 0.0)
        return TokenLogProbs(*(found[name].masked_fill(~counted, 0) if name in self.outputs else None for name in OUTPUTS))

    def write_columns(self, first: int, lse: torch.Tensor, hit: torch.Tensor) -> None:
        z = self.scores.values(self.logits)
        slope = self.scores.slope(z)
        p = z.sub_(lse[:, :1]).mul_(self.scores.numbers()[2]).sub_(lse[:, 1:]).exp_()
        column = self.target - first
        inside = (column >= 0) & (column < self.logits.shape[1])
        dx = p.mul_(-hit[:, None])
        dx.scatter_add_(1, torch.where(inside, column, 0)[:, None], torch.where(inside, hit, 0.0)[:, None])
        self.logits.copy_(dx.mul_(slope).masked_fill_((hit == 0)[:, None], 0.0))

    def _write(self, first, second, entropy_to):
        slope = self.scores.slope(self.scores.values(self.logits) if self.scores.softcap else self.logits)
        p = self.log_p.exp()
        if entropy_to is not None:
            entropy_to.copy_(self._gradient(p, (0.0, *second, 0.0), slope))
        self.logits.copy_(self._gradient(p, first, slope))

    def _gradient(self, p, coefficients, slope):
        hit, alpha, beta, flat = coefficients
        alpha, beta, flat = (c[:, None] if isinstance(c, torch.Tensor) else c for c in (alpha, beta, flat))
        dx = p * alpha
        if isinstance(beta, torch.Tensor):
            dx.addcmul_(_times(p, self.log_p), beta)
        dx.add_(flat)
        if isinstance(hit, torch.Tensor):
            dx.scatter_add_(1, self.label[:, None], hit[:, None].to(dx.dtype))
        return dx.mul_(slope).masked_fill_(~self.counted[:, None], 0.0)


class LikelihoodPiece(Piece):
    """log_probs alone, by the kernels of the cross entropy, for packages that have no others. The logits come multiplied by `factor`."""

    @staticmethod
    def factor(scores: ScoreOptions) -> float:
        """What logits are multiplied by where they are made, in float32 before they are rounded."""
        return 1.0 if scores.softcap else scores.numbers()[2]

    @staticmethod
    def fits(scores: ScoreOptions, outputs: Tuple[str, ...], upstream: Upstream) -> bool:
        capped_only = not scores.softcap or (scores.scale == 1.0 and scores.temperature == 1.0)
        return capped_only and outputs == ("log_probs",) and upstream.entropy is None and upstream.mean_logits is None

    def rows(self) -> TokenLogProbs:
        options = CrossEntropyOptions(self.ignore_index, softcap=self.scores.softcap)
        self.chunk = KernelChunk(self.logits, self.target, None, options)
        return TokenLogProbs(self.chunk.rows().loss.neg())

    def write_gradient(self, upstream: Upstream, entropy_to: Optional[torch.Tensor] = None):
        assert upstream.log_probs is not None
        return self.chunk.gradient(upstream.log_probs * -self.factor(self.scores)), None


def piece_of(kernels: bool, scores: ScoreOptions, outputs: Tuple[str, ...], upstream: Upstream) -> Tuple[Type[Piece], float]:
    """(what computes a chunk, what its logits are to be multiplied by). kernels: whether this package's kernels run on it."""
    kernels = kernels and not scores.vanish
    if kernels and ships("log_probs"):
        return KernelPiece, 1.0
    if kernels and LikelihoodPiece.fits(scores, outputs, upstream):
        return LikelihoodPiece, LikelihoodPiece.factor(scores)
    return TorchPiece, 1.0


def _times(p: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """p * log p, 0 where p is."""
    return torch.where(p == 0, 0.0, p * log_p)


def of_logits(logits, target, scores: ScoreOptions, outputs: Tuple[str, ...], ignore_index: int) -> TokenLogProbs:
    """The results in operations that PyTorch differentiates, for every kind of tensor; nothing is written over."""
    counted = is_counted(target, logits.shape[1], ignore_index)
    label = torch.where(counted, target, 0)
    values = scores.derived(logits)
    log_p = scores.log_p(values)
    found = {"log_probs": log_p.gather(1, label[:, None])[:, 0]}
    if "entropy" in outputs:
        found["entropy"] = -_times(log_p.exp(), log_p).sum(1)
    if "log_sum_sq_probs" in outputs:
        found["log_sum_sq_probs"] = (2 * log_p.detach()).logsumexp(1)
    if "mean_logits" in outputs:
        found["mean_logits"] = scores.mean(values)
    if "is_top1" in outputs:
        found["is_top1"] = scores.first_of_largest(values.detach()) == label
    return TokenLogProbs(*(found[name].masked_fill(~counted, 0) if name in outputs else None for name in OUTPUTS))


def checked_scores(temperature, softcap, scale, fail) -> ScoreOptions:
    """The numbers as floats. Raises ValueError by `fail` for those that make no sense."""
    temperature, softcap, scale = constant(temperature), constant(softcap), constant(scale)
    if not (0.0 < temperature < math.inf):
        fail("temperature", temperature, "a positive number")
    if softcap is not None and not 0.0 < softcap < math.inf:
        fail("softcap", softcap, "a positive number, or None for no cap")
    if not math.isfinite(scale):
        fail("scale", scale, "a finite number")
    return ScoreOptions(float(temperature), float(softcap or 0.0), float(scale))
