"""Low-rank adapters inside the grouped GEMMs of experts. No weight is changed, and nothing as large as one is made:

    y[r] = x[r] @ weight[e] + (x[r] @ a[e].T) @ b[e].T             for the rows r of each expert e      (LoRA, arXiv 2106.09685)

The narrow products are grouped GEMMs as well. Their sum with the wide one is a pass over y: no grouped GEMM here adds to its result.
"""

from typing import Any, NamedTuple, Optional

import torch
from torch.nn.functional import pad

from .four_bits import Weight
from .grouped_gemm import Groups, coded_mm, grouped_mm, grouped_outer
from .second_run import are_watched

__all__ = [
    "NO_ADAPTERS", "NO_FACTORS", "ExpertAdapter", "ExpertAdapters", "ExpertFactors", "Factors", "adapted_mm", "adapted_reference",
    "adapter_gradients", "narrow_mm",
]  # fmt: skip

WHOLE = 8  # numbers of half precision in 16 bytes, of which a row of a grouped GEMM's matrix is made


class Factors(NamedTuple):
    """An adapter of all experts, in the dtype of the products. a: [experts, rank, in]; b: [experts, out, rank], times the scaling. The rank
    is a multiple of `WHOLE`. Or the gradients of both, None for one that is not needed; or whether they are needed."""

    a: Any
    b: Any

    @property
    def turned(self) -> "Factors":
        """The adapter of the product that makes x's gradient: dy @ weight[e].T + (dy @ b[e]) @ a[e]."""
        return Factors(self.b.transpose(1, 2), self.a.transpose(1, 2))


class ExpertFactors(NamedTuple):
    """The `Factors` of both projections of experts, None for one without an adapter."""

    gate_up: Any = None
    down: Any = None


NO_FACTORS = ExpertFactors()


class ExpertAdapter(NamedTuple):
    """An adapter of one projection of all experts, as PEFT keeps it.

    a: [experts * rank, in], one expert after the other. b: [out, rank * experts], in which the expert is the innermost index. Each is of
    the dtype of the products or wider, and so is its gradient. scaling: of the product of both.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float = 1.0

    def factors(self, experts: int, dtype: torch.dtype) -> Factors:
        """Prepares a and b for products of a dtype."""
        rank = self.a.shape[0] // experts
        missing = -rank % WHOLE
        a = self.a.reshape(experts, rank, -1).to(dtype)
        b = self.b if self.scaling == 1 else self.b * self.scaling
        b = b.reshape(-1, rank, experts).permute(2, 0, 1).to(dtype)
        if missing:
            a, b = pad(a, (0, 0, 0, missing)), pad(b, (0, missing))
        return Factors(a, b.contiguous())

    def gradients(self, found: Factors) -> Factors:
        """The gradients of a and b, of those of `factors`."""
        experts = next(each.shape[0] for each in found if each is not None)
        rank, da, db = self.a.shape[0] // experts, found.a, found.b
        if da is not None:
            da = da[:, :rank].reshape(self.a.shape).to(self.a.dtype)
        if db is not None:
            db = db[:, :, :rank].permute(1, 2, 0).reshape(self.b.shape).to(self.b.dtype)
            db = db if self.scaling == 1 else db.mul_(self.scaling)
        return Factors(da, db)


class ExpertAdapters(NamedTuple):
    """The adapters of experts, None for a projection without."""

    gate_up: Optional[ExpertAdapter] = None
    down: Optional[ExpertAdapter] = None


NO_ADAPTERS = ExpertAdapters()


def narrow_mm(x: torch.Tensor, factors: Factors, groups: Groups) -> torch.Tensor:
    """[rows, rank]: the rows of each expert of x times its a.T."""
    return grouped_mm(x, factors.a.transpose(1, 2), groups)


def adapted_mm(
    x: torch.Tensor, weight: Weight, factors: Optional[Factors], groups: Groups, low: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """`grouped_mm` with an adapter, if there is one. weight: a tensor or `CodedExperts`. low: of `narrow_mm`, where it has been made."""
    y = coded_mm(x, weight, groups)
    if factors is None:
        return y
    low = narrow_mm(x, factors, groups) if low is None else low
    more = grouped_mm(low, factors.b.transpose(1, 2), groups)
    return y + more if are_watched() else y.add_(more)


def adapter_gradients(factors: Optional[Factors], x, dy, dlow: Any, groups: Groups, need: Optional[Factors]) -> Optional[Factors]:
    """The gradients of an adapter's factors; None where none is needed. x: what the product read; dy: the gradient of its result; dlow: of
    `narrow_mm` for dy and `Factors.turned`."""
    if factors is None or need is None or not any(need):
        return None
    da = grouped_outer(dlow, x, groups) if need.a else None
    return Factors(da, grouped_outer(dy, narrow_mm(x, factors, groups), groups) if need.b else None)


def adapted_reference(x: torch.Tensor, weight: torch.Tensor, factors: Optional[Factors]) -> torch.Tensor:
    """Every row of x [..., in] times the weight of every expert [experts, in, out], with its adapter."""
    y = torch.matmul(x, weight)
    return y if factors is None else y + torch.matmul(torch.matmul(x, factors.a.transpose(1, 2)), factors.b.transpose(1, 2))
