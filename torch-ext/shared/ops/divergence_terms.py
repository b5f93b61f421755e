"""Divergences of distributions in PyTorch, term by term, and what their reductions need."""

from typing import NamedTuple, Optional, Tuple

import torch

from .arrays import accumulation_dtype
from .cross_entropy import shift_of
from .sums import inverse_count

__all__ = ["DivergenceOptions", "inverse_of_count", "losses_of", "reference"]

LEAST_LOG = -1000.0  # stands in for log2(0), as in kernel_src/divergence.py


class DivergenceOptions(NamedTuple):
    """kind: "kl" (target: probabilities), "js" (target: log-probabilities) or "tv". scale: what the sum of the losses is multiplied
    by, beside one over the counted rows if `averages`. parameter: beta of "js", eps of "kl". temperature: of logits; None for
    distributions."""

    kind: str
    scale: float
    averages: bool
    parameter: float
    ignore_index: int
    temperature: Optional[float]

    @property
    def of_distributions(self) -> tuple:
        return self[:-1]

    def numbers(self, labels: Optional[torch.Tensor]) -> tuple:
        """The last arguments of the kernels of logits."""
        assert self.temperature is not None
        return self.parameter, 1 / self.temperature, self.ignore_index, int(labels is not None)


def _finite(log2):
    return torch.where(log2 == -float("inf"), LEAST_LOG, log2)


def _terms(kind: str, x: torch.Tensor, y: torch.Tensor, parameter: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """(loss, its derivative by x), elementwise and in float32 or wider. The loss can be differentiated in both x and y."""
    x, y = x.to(accumulation_dtype(x.dtype)), y.to(accumulation_dtype(y.dtype))
    if kind == "tv":
        d = x - y
        return 0.5 * d.abs(), 0.5 * torch.where(d.isnan(), d, d.sign())
    if kind == "kl":
        some = y != 0
        p = torch.where(some, y, 1.0)
        loss = p * (p.clamp(min=parameter).log() - x) if parameter else p * (p.log() - x)
        return torch.where(some, loss, 0.0), -y
    p, q = y.exp(), x.exp()
    if parameter in (0.0, 1.0):
        weight, mine, other = (p, y, x) if parameter == 0.0 else (q, x, y)
        some = weight != 0
        loss = torch.where(some, torch.where(some, weight, 0.0) * (torch.where(some, mine, 0.0) - torch.where(some, other, 0.0)), 0.0)
        return loss, -p if parameter == 0.0 else loss + q
    p, q = parameter * p, (1 - parameter) * q
    log_m = (p + q).clamp(min=torch.finfo(x.dtype).tiny).log()
    loss = p * (_finite(y) - log_m) + q * (_finite(x) - log_m)
    return loss, q * (_finite(x) - log_m)


def _distributions(kind: str, x, y, temperature):
    """The student's and the teacher's distributions of logits as `_terms` takes them."""
    softmax = torch.softmax if kind == "tv" else torch.log_softmax
    both = [z.to(accumulation_dtype(z.dtype)) for z in (x, y)]
    if temperature != 1:  # a quotient of large logits would be rounded more than their differences
        both = [(z - shift_of(z)[:, None]) / temperature for z in both]
    return tuple(softmax(z, -1) for z in both)


def _counted(labels, ignore_index) -> torch.Tensor:
    return labels != ignore_index


def inverse_of_count(labels, ignore_index, dtype: torch.dtype, kernels: bool = False) -> torch.Tensor:
    """One over the number of counted rows, or 1 where there are none; [1]. kernels: whether one counts them, in fp32."""
    return inverse_count(labels, ignore_index) if kernels else 1.0 / _counted(labels, ignore_index).sum().clamp(min=1).to(dtype).view(1)


def losses_of(x, y, labels, options: DivergenceOptions) -> torch.Tensor:
    """Elementwise losses, differentiable in x and y; rows that do not count are 0, whatever they hold."""
    if labels is not None:
        counted = _counted(labels, options.ignore_index)[:, None]
        x, y = torch.where(counted, x, 0.0), torch.where(counted, y, 0.0)
    if options.temperature is not None:
        x, y = _distributions(options.kind, x, y, options.temperature)
    loss = _terms(options.kind, x, y, options.parameter)[0]
    return loss if labels is None else torch.where(counted, loss, 0.0)


def reference(x, y, labels, options: DivergenceOptions, factor) -> Tuple[torch.Tensor, torch.Tensor]:
    """(sum of the losses * scale * factor, its gradient by x)."""
    u, v = (x, y) if options.temperature is None else _distributions(options.kind, x, y, options.temperature)
    loss, slope = _terms(options.kind, u, v, options.parameter)
    if options.temperature is not None:
        q = u if options.kind == "tv" else u.exp()
        g = slope * q if options.kind == "tv" else slope
        slope = (g - q * g.sum(-1, keepdim=True)) / options.temperature
    scale = options.scale if factor is None else factor.to(loss.dtype) * options.scale
    if labels is not None:
        counted = _counted(labels, options.ignore_index)[:, None]
        loss, slope = torch.where(counted, loss, 0.0), torch.where(counted, slope, 0.0)
    return (loss.sum() * scale).view(()), (slope * scale).to(x.dtype)
