"""Keeps columns of a trained head's logits from the forward pass to the backward pass, in the memory of the weight's gradient.

Where a head is trained and the gradient of its log-probabilities is not known in advance, the backward pass needs the logits again, to make
the weight's gradient of them: a fourth product with the vocabulary. That gradient, [classes, features], is a tensor that the backward pass
allocates in any case, and tokens x columns logits fit into it. So the forward pass allocates it, and leaves as many of the logits' columns
in it as it holds. The backward pass takes the vocabulary in slices: it turns a slice's logits into their gradient, multiplies this by the
hidden states, and writes the product, the gradient of the slice's weights, where it is to be, in front of the columns that it has not
read yet. Some more columns have memory of their own; those for which there is none are recomputed. For 8192 tokens of 4096 features 62 %
are kept, which is 3.4 products instead of four, for no more memory than the chunks of a backward pass take otherwise; and the gradient of
every slice is one GEMM over all tokens, which rounds once.

The gradient of the hidden states is made in the forward pass, as with a frozen head.
"""

from typing import List, NamedTuple, Optional, Tuple

import torch

from . import linear_head
from .arrays import accumulation_dtype
from .cross_entropy import is_counted

__all__ = ["Columns", "is_worth_it"]

# The least features times the share of columns that is kept. Making the hidden states' gradient in the forward pass is one more reading and
# writing of the logits. Measured on an H200 with 8192 tokens and 151936 classes, as parts of TRL's time in the same run: with 4096
# features, 62 % kept, 0.85, where recomputing all logits took 1.01; with 1024 features, 12 % kept, 1.04 instead of 1.01.
LEAST = 768
APART = 4  # the weight's gradient is so many times as large as the memory of the columns that do not lie in it


class ColumnPlan(NamedTuple):
    """The slices of the vocabulary, in order: so many of them are kept in the gradient's memory, so many after them apart."""

    slices: Tuple[slice, ...]
    in_gradient: int
    apart: int


def plan_columns(hidden: torch.Tensor, weight: torch.Tensor) -> ColumnPlan:
    """Chooses slices with half as many logits as a chunk of the forward pass has: the backward pass may need memory for two of them."""
    tokens, (classes, features) = hidden.shape[0], weight.shape
    room = classes * features * weight.element_size() // hidden.element_size()
    chunk = linear_head.plan_chunks(tokens, classes, hidden.dtype, None, False, features).tokens
    width = max(1, min(classes, chunk * classes // (2 * tokens)))
    width = width // linear_head.ALIGNED * linear_head.ALIGNED or width
    slices = tuple(slice(start, min(start + width, classes)) for start in range(0, classes, width))
    in_gradient = sum(part.stop * tokens <= room for part in slices)
    begin = slices[in_gradient].start if in_gradient < len(slices) else classes
    apart = sum((part.stop - begin) * tokens <= room // APART for part in slices[in_gradient:])
    return ColumnPlan(slices, in_gradient, apart)


def is_worth_it(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Tells whether what is kept saves more than it costs."""
    plan, (classes, features) = plan_columns(hidden, weight), weight.shape
    kept = plan.in_gradient + plan.apart
    return kept > 0 and plan.slices[kept - 1].stop * features >= LEAST * classes


class Columns(NamedTuple):
    """Columns of logits. gradient: the memory of the weight's gradient, flat. apart: [tokens, slice] each. lse: [tokens, 2], what pieces
    of log_probs.py know of the rows."""

    plan: ColumnPlan
    lse: torch.Tensor
    gradient: torch.Tensor
    apart: List[torch.Tensor]

    @classmethod
    def new(cls, hidden: torch.Tensor, weight: torch.Tensor) -> "Columns":
        plan, tokens = plan_columns(hidden, weight), hidden.shape[0]
        lse = torch.empty((tokens, 2), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
        slices = plan.slices[plan.in_gradient : plan.in_gradient + plan.apart]
        apart = [torch.empty((tokens, part.stop - part.start), dtype=hidden.dtype, device=hidden.device) for part in slices]
        return cls(plan, lse, torch.empty(weight.numel(), dtype=weight.dtype, device=hidden.device), apart)

    def kept(self, i: int, dtype: torch.dtype) -> Optional[torch.Tensor]:
        """The logits of a slice, [tokens, slice], None where they are not kept. Those in the gradient's memory lie at its end."""
        tokens, part, within = self.lse.shape[0], self.plan.slices[i], self.plan.in_gradient
        if i >= within:
            return self.apart[i - within] if i - within < len(self.apart) else None
        memory = self.gradient.view(dtype)
        start = memory.numel() - (self.plan.slices[within - 1].stop - part.start) * tokens
        return memory[start : start + (part.stop - part.start) * tokens].view(tokens, -1)

    def keep(self, rows: slice, logits: torch.Tensor, lse: torch.Tensor) -> None:
        """Keeps what there is room for of the logits of some tokens, [rows, classes]."""
        self.lse[rows] = lse
        for i in range(self.plan.in_gradient + self.plan.apart):
            self.kept(i, logits.dtype)[rows] = logits[:, self.plan.slices[i]]  # type: ignore[index]

    def weight_gradients(
        self, hidden, weight, bias, of_bias: bool, target, upstream, piece, options
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """The gradients of weight and, with of_bias, of bias of sum(upstream * log_probs), the first in the memory that it has had all
        along. piece: the class that computed the rows."""
        dweight = self.gradient.view(weight.shape)
        hit = torch.where(is_counted(target, weight.shape[0], options.ignore_index), upstream, 0.0)
        dbias = torch.empty(bias.shape, dtype=hit.dtype, device=bias.device) if of_bias else None
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        buffer = None
        for i, part in enumerate(self.plan.slices):
            logits = self.kept(i, hidden.dtype)
            if logits is None:
                buffer = self._buffer(hidden) if buffer is None else buffer
                logits = buffer[: hidden.shape[0] * (part.stop - part.start)].view(hidden.shape[0], -1)
                linear_head.write_logits(logits, hidden, weight[part], None if bias is None else bias[part])
            piece(logits, target, options.scores, ("log_probs",), options.ignore_index).write_columns(part.start, self.lse, hit)
            if dbias is not None:
                dbias[part] = logits.sum(0, dtype=dbias.dtype)
            out = dweight[part]
            if i < self.plan.in_gradient and out.data_ptr() + out.numel() * out.element_size() > logits.data_ptr():
                logits = logits.clone()  # the product goes where they are
            linear_head.add_product(out, logits.t(), hidden, True)
        return dweight, dbias

    def _buffer(self, hidden: torch.Tensor) -> torch.Tensor:
        """Memory for the logits of a slice, flat: that of columns that have been read, or other."""
        part = self.plan.slices[0]
        if self.apart:
            return self.apart[0].view(-1)
        return torch.empty(hidden.shape[0] * (part.stop - part.start), dtype=hidden.dtype, device=hidden.device)
