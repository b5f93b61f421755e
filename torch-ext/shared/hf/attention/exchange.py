"""Attention of ours between the two exchanges of DeepSpeed's Ulysses, which spreads the tokens of a row over processes.

Each process has a part of every row. DeepSpeed gives it all tokens of the rows and a share of the heads, and turns what attention returns
back into all heads of its own tokens. Which tokens see which is said of whole rows: position_ids and padding are gathered once a batch.
"""

import sys
from typing import Any, Dict, Optional

import torch
import torch.distributed as dist

from ...ops.attention import AttentionPlan, attention
from ...ops.operators import constant_when_traced
from ..parts.explanation import Reason, warn_once
from .defaults import (
    ATTENTION,
    MASKING,
    MODELING,
    PARALLEL,
    STORED,
    exchange_in,
    exchange_of,
    look_up,
    sdpa_of_transformers,
    spread_by,
    why_not_own_defaults,
)
from .document_bounds import documents_in
from .masks import WINDOWS, Visible, kinds_of_layers
from .row_documents import spans_in_bounds

__all__ = ["attend_in_whole_rows", "warn_of_graphs", "why_left", "why_spread"]

CURE = "Packed documents see each other there; with DeepSpeed's Ulysses (sp_size) instead, attention of ours keeps them apart"
PADDING = -1  # the position that says so of a token


def why_spread(config) -> str:
    """Why a decoder's attention is not ours because its rows are spread over processes; "" where they are not, or ours runs there."""
    by = spread_by(config)
    if by:
        said = f"{by} spreads attention over processes, and attention of ours would see one process's tokens alone"
        rings = by == PARALLEL["torch.distributed."]
        return f"{said}. {CURE}" if rings else said
    others = () if exchange_of(config) is None else sorted(map(str, kinds_of_layers(config) - WINDOWS.keys()))
    said = f"DeepSpeed's Ulysses spreads attention over processes, and layers of kind {', '.join(others)} would see one's tokens alone"
    return said if others else ""


def why_left(config) -> Optional[Reason]:
    """Why a decoder's attention is left to transformers: it is spread, or a function of it was replaced. None where neither is so."""
    spread = why_spread(config)
    return Reason("parallel", spread) if spread else why_not_own_defaults(config)


@constant_when_traced
def warn_of_graphs() -> None:
    """Says once that a graph of torch.compile, which is being traced, has no attention of ours between DeepSpeed's exchanges."""
    text = "under torch.compile attention between the exchanges of DeepSpeed's Ulysses is the function that it was registered around"
    if exchange_in(sys.modules[MODELING].ALL_ATTENTION_FUNCTIONS.get("sdpa")) is not None:
        warn_once(f"{text}: SDPA lets packed documents see each other. Leave torch.compile out")


def attend_in_whole_rows(visible: Visible, module, query, key, value, scaling, dropout, sinks, kwargs: Dict[str, Any], said: bool):
    """Computes attention of rows whose tokens are spread over processes.

    Args:
        query, key, value: this process's tokens, [batch, heads, tokens, head_dim].
        sinks: of all heads, or None.
        kwargs: of the attention function. position_ids count in whole rows, and documents start where they do not go on; cu_seq_lens_q
            are the bounds of documents among all tokens of the whole rows.
        said: whether attention of ours does what the arguments ask for.

    Returns:
        ([batch, tokens, heads, head_dim], what DeepSpeed returns for the weights).

    Raises:
        ValueError: ours was asked for by name and cannot do that, or position_ids are missing or contradict another argument.
    """
    exchange, positions = visible.exchange, kwargs.get("position_ids")
    if positions is not None:
        kwargs["position_ids"] = positions.contiguous()  # NCCL gathers no other
    unknown = "" if said else "dropout, or another argument that it does not know"
    if visible.said is None or not query.shape[2] == visible.tokens == key.shape[2]:
        unknown = "a mask that is not causal with a window and documents, or keys of an earlier call"
    if unknown:
        _refuse(module.config, unknown)
        return exchange(module, query, key, value, None, dropout=dropout, scaling=scaling, **kwargs)
    softcap = kwargs.get("softcap")
    plan = _plan_of_whole_rows(visible, positions, kwargs, sinks is not None or softcap is not None)
    sdpa = sdpa_of_transformers()

    def core(module, query, key, value, mask, **_):
        if plan is None:
            return sdpa(module, query, key, value, None, dropout=0.0, scaling=scaling)
        heads = query.shape[1]
        first = dist.get_rank(exchange.process_group) * heads
        options = {"sinks": None if sinks is None else sinks[first : first + heads], "scale": scaling, "softcap": softcap}
        return attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), plan, **options), None

    registered, exchange.attn = exchange.attn, core
    groups = getattr(module, "num_key_value_groups", None)
    try:
        output, weights = exchange(module, query, key, value, None, position_ids=kwargs["position_ids"])
    finally:
        exchange.attn = registered
        if groups is not None:  # DeepSpeed leaves those of a process's share of the heads
            module.num_key_value_groups = groups
    return output.view(query.shape[0], query.shape[2], query.shape[1], -1), weights


def _refuse(config, what: str) -> None:
    """Raises ValueError where ours was asked for by name, else warns that the function that DeepSpeed was registered around runs."""
    text = f"attention of Bastile cannot run under DeepSpeed's Ulysses with {what}"
    if look_up(config, "__dict__").get(STORED) == ATTENTION:
        raise ValueError(f'{text}. Leave that out, or leave attn_implementation out and register "sdpa" with DeepSpeed')
    warn_once(f"{text}: the function that DeepSpeed was registered around runs instead", stacklevel=5)


def _plan_of_whole_rows(visible: Visible, positions, kwargs, always: bool) -> Optional[AttentionPlan]:
    """The plan of whole rows, made by the first layer that needs it; None where each row is one document that each query sees up to itself,
    unless `always`. Waits for the device, once a batch."""
    if positions is None or positions.dim() != 2:
        raise ValueError("position_ids are missing, expected [rows, tokens] with each token's position in its document of the whole row")
    kept = visible.whole
    if kept is None or kept[0] is not positions:
        kept = positions, _make_plan(visible, positions, kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"), always)
        visible.whole = kept
    return kept[1]


def _make_plan(visible, positions, bounds, bounds_of_keys, always: bool) -> Optional[AttentionPlan]:
    device, mask, window = positions.device, visible.arguments["attention_mask"], visible.said.window
    whole = _gathered(visible, positions, mask).cpu()
    real, tokens = whole >= 0, whole.numel()
    padding = None if bool(real.all()) else real
    if padding is not None:
        _refuse_padding_within(whole, real)
    if bounds is not None:
        given = {"position_ids": whole, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds_of_keys, "attention_mask": padding}
        documents, _ = spans_in_bounds(whole.shape, given)
    elif padding is not None:
        return AttentionPlan.from_position_ids(whole.to(device), real.to(device), window=window)
    else:
        documents = documents_in(whole)
    if documents is None:
        if not always and (window is None or window >= whole.shape[1]):
            return None
        starts = torch.arange(0, tokens + 1, whole.shape[1], dtype=torch.int32, device=device)
        return AttentionPlan.from_cu_seqlens(starts, tokens, window=window)
    return AttentionPlan(documents.to(device, non_blocking=True), tokens, window=window)


def _gathered(visible, positions: torch.Tensor, mask) -> torch.Tensor:
    """The positions of whole rows, [rows, tokens of all processes], `PADDING` where a token is some. All processes take part, whether they
    have padding or not."""
    group = visible.exchange.process_group
    positions = positions.expand(visible.batch, visible.tokens)
    if mask is not None:
        real = sys.modules[MASKING].prepare_padding_mask(mask, visible.tokens, 0)[:, : visible.tokens]
        positions = torch.where(real != 0, positions, PADDING)
    positions = positions.contiguous()
    parts = [torch.empty_like(positions) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, positions, group=group)
    return torch.cat(parts, 1)


def _refuse_padding_within(positions: torch.Tensor, real: torch.Tensor) -> None:
    """Raises ValueError where a document goes on behind padding. positions, real: [rows, tokens] of whole rows."""
    goes_on = real[:, 1:] & ~real[:, :-1] & (real.cumsum(1)[:, :-1] > 0) & (positions[:, 1:] > 0)
    if bool(goes_on.any()):
        raise ValueError("attention_mask has padding within a document, expected it before or behind the tokens of each document")
