"""PyTorch's own attention over rows of any lengths (torch.nn.attention.varlen, FlashAttention inside), for any model of transformers.

transformers has no name for it, so it gets one here: the documents of a packed batch and the tokens of padded rows are all that it
computes. What says where they lie is made once a step, not once a layer.
"""

import functools
import inspect
from dataclasses import dataclass

import torch

from .providers import NotInstalled

NAME = "torch_varlen"


@dataclass
class Rows:
    """Where the tokens are. places: of the real tokens among all of [batch * tokens], None for all; ends: [rows + 1]; longest: of a row."""

    places: torch.Tensor | None
    ends: torch.Tensor
    longest: int

    @classmethod
    def of(cls, lengths: torch.Tensor, places: torch.Tensor | None = None) -> "Rows":
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        return cls(places, ends, int(lengths.max()))

    @classmethod
    def of_padding(cls, mask: torch.Tensor) -> "Rows":
        """Return the rows of a padded batch. mask: [batch, tokens], true for real tokens."""
        return cls.of(mask.sum(1), mask.flatten().nonzero().squeeze(1))

    @classmethod
    def of_documents(cls, position_ids: torch.Tensor, batch: int) -> "Rows":
        """Return the documents of packed rows. position_ids: [batch or 1, tokens], from 0 again with each document."""
        starts = (position_ids.expand(batch, -1).flatten() == 0).nonzero().squeeze(1)
        return cls.of(torch.diff(starts, append=starts.new_tensor([batch * position_ids.shape[-1]])))


def make_mask(*, attention_mask=None, **_) -> Rows | None:
    """Return the rows of a padded batch instead of a mask, None for a batch without padding. Called by transformers once a step."""
    return Rows.of_padding(attention_mask.bool()) if attention_mask is not None and not attention_mask.all() else None


@functools.cache
def varlen():
    """Return PyTorch's function as call(q, k, v, rows, scale), causal. Raise NotInstalled where this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise NotInstalled("torch.nn.attention.varlen is not in this torch") from error
    known = inspect.signature(varlen_attn).parameters
    options: dict = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    grouped = "enable_gqa" in known
    if grouped:
        options["enable_gqa"] = True

    def call(q, k, v, rows: Rows, scale: float):
        if not grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if "scale" not in known:
            q = q * (scale * q.shape[-1] ** 0.5)
        given = options | ({"scale": scale} if "scale" in known else {})
        return varlen_attn(q, k, v, rows.ends, rows.ends, rows.longest, rows.longest, **given)

    return call


class Documents:
    """The rows of the position_ids that were seen last: all layers of a step have the same."""

    def __init__(self):
        self.seen: torch.Tensor | None = None
        self.rows: Rows | None = None

    def of(self, position_ids: torch.Tensor, batch: int) -> Rows:
        if self.seen is not position_ids or self.rows is None:
            self.seen, self.rows = position_ids, Rows.of_documents(position_ids, batch)
        return self.rows


DOCUMENTS = Documents()


def attention(_module, query, key, value, attention_mask, scaling=None, position_ids=None, **_):
    """Compute attention as transformers' table of implementations wants it. query, key, value: [batch, heads, tokens, head_dim]."""
    batch, heads, tokens, head_dim = query.shape
    rows = attention_mask or DOCUMENTS.of(position_ids, batch)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if rows.places is not None:
        q, k, v = (x[rows.places] for x in (q, k, v))
    out = varlen()(q, k, v, rows, scaling if scaling is not None else head_dim**-0.5)
    if rows.places is not None:
        out = out.new_zeros(batch * tokens, heads, head_dim).index_copy(0, rows.places, out)
    return out.view(batch, tokens, heads, head_dim), None


def prepare() -> None:
    """Give transformers this attention. Raise NotInstalled where this torch has none."""
    varlen()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
