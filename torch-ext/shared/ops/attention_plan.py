"""Which tokens of a batch see which: the tables that the attention kernels walk, for all layers of a batch."""

from typing import Optional

import torch

from ..runtime.device import kernels_run_on
from ..runtime.launch import INT32_MAX, Kernel
from .arguments import describe, fail
from .arrays import Pair
from .operators import traceable

__all__ = ["AttentionPlan"]

LIMITS, WALKS = 4, 10  # rows of a plan's tables
BLOCK = 64  # rows of a block of every kernel

_plan_kernel = Kernel("attention_plan", grid=lambda c, documents, limits, walks: (-(-limits.shape[1] // c["TILE"]), 3))


def plan_reference(documents: torch.Tensor, tokens: int, left: int, right: int) -> Pair:
    """The tables of a plan in PyTorch. The walks are there too: kernels may read a plan that no kernel made."""
    padded = -(-tokens // BLOCK) * BLOCK
    t = torch.arange(padded, dtype=torch.int32, device=documents.device)
    starts, ends = documents[0], documents[1].clamp(max=tokens)
    number = torch.searchsorted(starts.contiguous(), t, right=True) - 1
    at = number.clamp(min=0)
    inside = (number >= 0) & (t < ends[at])
    rows = []
    for before, after in ((left, right), (right, left)):
        rows += [torch.maximum(starts[at], t - before), torch.minimum(ends[at], t + after + 1)]
    walks = [_walks_reference(first, last, inside) for first, last in (rows[:2], rows[2:])]
    return torch.where(inside, torch.stack(rows), 0).to(torch.int32), torch.cat(walks).to(torch.int32)


def _walks_reference(first: torch.Tensor, behind: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """[5, blocks]: each block of tokens, the longest walk first, and where its walk and the part of it without a mask start and end. first,
    behind, inside: [tokens in whole blocks], what each token sees and whether it lies in a document."""
    first, behind, inside = (x.view(-1, BLOCK) for x in (first, behind, inside))
    some = inside.any(1)
    start = torch.where(some, first.masked_fill(~inside, INT32_MAX).amin(1), 0)
    end = behind.masked_fill(~inside, 0).amax(1)
    full, full_end = first.amax(1), behind.amin(1)
    whole = inside.all(1) & (full < full_end)
    number = torch.arange(inside.shape[0], dtype=torch.int32, device=inside.device)
    table = torch.stack((number, start, torch.where(whole, full, end), torch.where(whole, full_end, end), end))
    return table[:, (start - end).argsort(stable=True)]


def _plan(documents: torch.Tensor, tokens: int, left: int, right: int) -> Pair:
    """(limits [4, tokens in whole blocks], walks [10, blocks]), int32, as kernel_src/attention_plan.py describes them."""
    if not kernels_run_on(documents):
        return plan_reference(documents, tokens, left, right)
    blocks = -(-tokens // BLOCK)
    limits, walks = documents.new_empty((LIMITS, blocks * BLOCK)), documents.new_empty((WALKS, blocks))
    _plan_kernel(documents, limits, walks, left, right, documents.shape[1].bit_length(), tokens)
    return limits, walks


make_plan = traceable("attention_plan", _plan)


class AttentionPlan:
    """Which tokens of a batch see which: made once, used by the attention of every layer.

    tokens: of the whole batch, one row after the other. documents: [2, documents] int32 on the device of the batch, the first token of each
    and the one after its last; ascending, none reaches into the next, empty ones are allowed, and what lies past the last token does not
    count. A token of no document is padding: it sees nothing, and nothing sees it. causal: a query sees no key after itself. window:
    how many keys a query sees at most to its left, itself among them (and to its right where it is not causal); None for
    all of its document.

    `from_cu_seqlens`, `from_position_ids` and `from_padding_mask` make one from what models pass around.
    """

    __slots__ = ("tokens", "causal", "window", "limits", "walks")

    def __init__(self, documents: torch.Tensor, tokens: int, causal: bool = True, window: Optional[int] = None):
        if documents.dim() != 2 or documents.shape[0] != 2 or documents.dtype != torch.int32 or documents.shape[1] == 0:
            fail("documents", describe(documents), "torch.int32 [2, documents]")
        if not 0 < tokens <= INT32_MAX // 2:
            fail("tokens", tokens, "1 to 2^30")
        if window is not None and window < 1:
            fail("window", window, "None or at least 1, the query's own key")
        self.tokens, self.causal, self.window = tokens, bool(causal), window
        left = tokens if window is None else min(window - 1, tokens)
        self.limits, self.walks = make_plan(documents, tokens, left, 0 if causal else left)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor, tokens: int, causal: bool = True, window: Optional[int] = None) -> "AttentionPlan":
        """cu_seqlens: [documents + 1], ascending: document i is made of the tokens from cu_seqlens[i] to cu_seqlens[i + 1]. Tokens before
        the first and after the last one are padding."""
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            fail("cu_seqlens", describe(cu_seqlens), "int32 or int64 [documents + 1]")
        return cls(torch.stack((cu_seqlens[:-1], cu_seqlens[1:])).to(torch.int32), tokens, causal, window)

    @classmethod
    def from_position_ids(
        cls,
        position_ids: torch.Tensor,
        padding_mask: Optional[torch.Tensor] = None,
        causal: bool = True,
        window: Optional[int] = None,
    ) -> "AttentionPlan":
        """position_ids: [batch, tokens] integers; a document starts with each row, and wherever a position is not the one before it plus
        1. padding_mask: [batch, tokens], zero (False) where a token is padding; None for none."""
        return cls._from_numbers("position_ids", position_ids, 1, padding_mask, causal, window)

    @classmethod
    def from_document_ids(
        cls,
        document_ids: torch.Tensor,
        padding_mask: Optional[torch.Tensor] = None,
        causal: bool = True,
        window: Optional[int] = None,
    ) -> "AttentionPlan":
        """document_ids: [batch, tokens] integers; a document starts with each row, and wherever the number is another one.
        padding_mask: as in `from_position_ids`."""
        return cls._from_numbers("document_ids", document_ids, 0, padding_mask, causal, window)

    @classmethod
    def from_padding_mask(cls, padding_mask: torch.Tensor, causal: bool = True, window: Optional[int] = None) -> "AttentionPlan":
        """padding_mask: [batch, tokens], zero (False) where a token is padding, to the left or to the right of its row's tokens. Padding
        between tokens of a row would part it in two documents; on the CPU, where that can be seen at no cost, it raises ValueError."""
        if padding_mask.dim() != 2:
            fail("padding_mask", describe(padding_mask), "[batch, tokens]")
        real = padding_mask != 0
        if not real.is_cuda and (real[:, 1:] & ~real[:, :-1]).sum(1).add(real[:, 0]).gt(1).any():
            fail("padding_mask", "padding between tokens of a row", "padding to the left or to the right of a row's tokens")
        new = torch.zeros_like(real)
        new[:, 0] = True
        return cls._from_starts(new.flatten(), real.flatten(), causal, window)

    @classmethod
    def with_padding_that_sees(cls, padding_mask: torch.Tensor, window: Optional[int] = None) -> "AttentionPlan":
        """A causal plan for padding_mask as in `from_padding_mask`, in which padding behind a row's tokens sees these, as in transformers'
        masks. No token sees padding. Made in PyTorch's operations."""
        real, (batch, length) = padding_mask != 0, padding_mask.shape
        tokens, device = batch * length, padding_mask.device
        padded = -(-tokens // BLOCK) * BLOCK
        t = torch.arange(padded, device=device)
        left = tokens if window is None else min(window - 1, tokens)
        some, start, behind = real.any(1), real.int().argmax(1), length - real.flip(1).int().argmax(1)
        rows = torch.arange(0, tokens, length, device=device)
        of_row = torch.stack((rows + start, torch.where(some, rows + behind, 0), rows + length))[:, (t // length).clamp(max=batch - 1)]
        seen = torch.nn.functional.pad(real.flatten(), (0, padded - tokens))
        queries = torch.maximum(of_row[0], t - left), torch.minimum(of_row[1], t + 1)
        keys = t, torch.minimum(of_row[2], t + left + 1)
        sees = (queries[0] < queries[1]) & (t < tokens)
        inside = torch.stack((sees, sees, seen, seen))
        plan = cls.__new__(cls)
        plan.tokens, plan.causal, plan.window = tokens, True, window
        plan.limits = torch.where(inside, torch.stack((*queries, *keys)), 0).to(torch.int32)
        plan.walks = torch.cat([_walks_reference(*queries, sees), _walks_reference(*keys, seen)]).to(torch.int32)
        return plan

    @classmethod
    def _from_numbers(cls, name: str, numbers, step: int, padding_mask, causal: bool, window: Optional[int]) -> "AttentionPlan":
        """name: of the argument. numbers: [batch, tokens]; a document starts with each row, and wherever one is not the one before it plus
        `step`."""
        if numbers.dim() != 2 or numbers.is_floating_point():
            fail(name, describe(numbers), "integers [batch, tokens]")
        if padding_mask is not None and padding_mask.shape != numbers.shape:
            fail("padding_mask", describe(padding_mask), f"{list(numbers.shape)}, the shape of {name}")
        new, before = torch.ones_like(numbers, dtype=torch.bool), numbers[:, :-1]
        new[:, 1:] = numbers[:, 1:] != (before + step if step else before)
        return cls._from_starts(new.flatten(), None if padding_mask is None else padding_mask.flatten() != 0, causal, window)

    @classmethod
    def _from_starts(cls, new: torch.Tensor, real: Optional[torch.Tensor], causal: bool, window: Optional[int]) -> "AttentionPlan":
        """new: [tokens], where a document starts; real: [tokens], what is no padding. There is room for a document a token: how many there
        are is known to the device alone."""
        tokens = new.shape[0]
        if real is not None:
            before = torch.nn.functional.pad(real[:-1], (1, 0))
            new = torch.where(real, new | ~before, before)  # a run of padding is one document, without tokens
            new[:1] = True
        t = torch.arange(tokens, dtype=torch.int32, device=new.device)
        place = torch.where(new, new.cumsum(0) - 1, tokens + 1)
        starts = torch.full((tokens + 2,), tokens, dtype=torch.int32, device=new.device).scatter_(0, place, t)
        starts, ends = starts[:tokens], starts[1 : tokens + 1]
        if real is not None:
            ends = torch.where(real[starts.clamp(max=tokens - 1)], ends, starts)
        return cls(torch.stack((starts, ends)), tokens, causal, window)
