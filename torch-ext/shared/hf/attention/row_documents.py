"""The documents in the rows of a model: what the caller said of them, for attention of ours and for delta nets.

Delta nets hear of `cu_seq_lens_q` and `seq_idx`; attention, unless it is FlashAttention's or ours, of position_ids alone. Whatever the
caller gave, both get the same documents here; what contradicts another argument, or cannot be done, raises.
"""

from typing import Any, Dict, Optional, Tuple

import torch
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler

from ..family.arguments import CACHE
from ..parts.weights import is_plain
from .document_bounds import PROMPTS, bounds_of, document_bounds, given_bounds, spans_of

__all__ = ["DOCUMENTS", "bounds_in", "documents_for", "refuse_cache_of", "spans_in_bounds"]

DOCUMENTS = "delta_cu_seqlens"  # the argument in which a model's forward hands on the bounds that it found, in a tensor of its own


def documents_for(shape, given: Dict[str, Any]) -> Dict[str, Any]:
    """Makes the arguments by which attention and delta nets see the same documents; empty where each row is one document.

    A cache holds the states of one document a row. transformers makes one by default, so a row of documents gets none unless it is asked
    for; where it is, ValueError. While a graph is traced, cu_seq_lens_q decides and is not compared with the others; without it,
    position_ids and seq_idx are read outside of the graph, but for those of a step with a cache and those of a vision tower.

    Args:
        shape: (rows, tokens).
        given: the arguments of the model's forward by name.
    """
    names = "position_ids", "attention_mask", CACHE, "use_cache", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"
    position_ids, attention_mask, cache, use_cache, cu_seq_lens_q, cu_seq_lens_k, seq_idx = map(given.get, names)
    _refuse_bounds_of_keys_alone(cu_seq_lens_q, cu_seq_lens_k)
    cached = cache is not None or bool(use_cache)
    if cu_seq_lens_q is not None and torch.compiler.is_compiling():
        return _of_bounds_in_a_graph(shape, position_ids, attention_mask, cached, use_cache, cu_seq_lens_q)
    if seq_idx is None and cu_seq_lens_q is None:
        text = _text_positions(position_ids)
        unknown = text is None and not _has_three_rows(position_ids)
        if unknown or shape[1] < 2 or (attention_mask is not None and not _is_padding(attention_mask)):
            return {}
        if torch.compiler.is_compiling() and (cache is not None or text is None):  # a step of generate(), a vision tower's
            return {}
    return _read_documents(shape, position_ids, attention_mask, cached, use_cache, cu_seq_lens_q, cu_seq_lens_k, seq_idx)


def spans_in_bounds(shape, given: Dict[str, Any]) -> Tuple[Optional[torch.Tensor], Dict[str, Any]]:
    """Reads the documents of cu_seq_lens_q for attention of ours, by the rules of `documents_for`, but that position_ids stay as they are.
    Waits for the device.

    Returns:
        (what `spans_of` makes of them, or None where each row is one document; the arguments that change with it).
    """
    names = "position_ids", "attention_mask", "use_cache", "cu_seq_lens_q", "cu_seq_lens_k"
    position_ids, attention_mask, use_cache, cu_seq_lens_q, cu_seq_lens_k = map(given.get, names)
    _refuse_bounds_of_keys_alone(cu_seq_lens_q, cu_seq_lens_k)
    cached = given.get(CACHE) is not None or bool(use_cache)
    found, _, more = _read(shape, position_ids, attention_mask, cached, use_cache, cu_seq_lens_q, cu_seq_lens_k, None)
    return (None, {"cu_seq_lens_q": None, "cu_seq_lens_k": None}) if found is None else (spans_of(found), more)


def _refuse_bounds_of_keys_alone(cu_seq_lens_q, cu_seq_lens_k) -> None:
    if cu_seq_lens_q is None and cu_seq_lens_k is not None:
        raise ValueError("cu_seq_lens_k was given without cu_seq_lens_q, which is the one that is read. Pass both, with the same bounds")


@_disable_dynamo
def _read_documents(shape, position_ids, attention_mask, cached, use_cache, cu_seq_lens_q, cu_seq_lens_k, seq_idx):
    """What `documents_for` returns, of tensors that can be read. Waits for the device."""
    given = shape, position_ids, attention_mask, cached, use_cache, cu_seq_lens_q, cu_seq_lens_k, seq_idx
    found, of_positions, more = _read(*given)
    if found is None:  # nobody has to read that again
        said = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k, "seq_idx": seq_idx}
        return {**more, **{name: None for name, value in said.items() if value is not None}}
    device = next(tensor for tensor in (cu_seq_lens_q, seq_idx, position_ids) if tensor is not None).device
    more[DOCUMENTS] = found = found.to(device, non_blocking=True)
    if of_positions is None or _text_positions(position_ids) is None:
        more["position_ids"] = _positions_in(found, shape, position_ids)
    return more


def _read(shape, position_ids, attention_mask, cached, use_cache, cu_seq_lens_q, cu_seq_lens_k, seq_idx):
    """(the bounds of all documents [documents + 1] int32 in main memory, or None where each row is one; those that position_ids start, or
    None; the arguments of the model's forward that change). Raises ValueError for what contradicts itself. Waits for the device."""
    name, found = _named_bounds(shape, cu_seq_lens_q, cu_seq_lens_k, seq_idx)
    without_cache = {"use_cache": False} if name is not None and use_cache is None and not cached else {}
    kept = attention_mask.cpu()[:, -shape[1] :].bool() if _is_padding(attention_mask) else None
    padded = kept is not None and not bool(kept.all())
    of_positions, back = _bounds_in_positions(shape, position_ids, kept if padded else None)
    if name is None:
        if cached and not back:  # positions that only leave some out are those of one document, as transformers takes them
            return None, None, {}
        name, found = "position_ids", of_positions
    elif found is not None and of_positions is not None and not torch.equal(found, of_positions):
        starts = found[1:-1].tolist()[:8], of_positions[1:-1].tolist()[:8]
        text = f"{name} and position_ids start documents at different tokens, at {starts[0]} and {starts[1]} (the first eight)"
        raise ValueError(f"{text}, expected the same. Leave position_ids out, or let them restart where {name} starts a document")
    elif found is None and of_positions is not None and (back or not cached):
        others = of_positions[1:-1].tolist()[:8]
        text = f"{name} has one document a row, and position_ids start others at {others} (the first eight), expected the same"
        raise ValueError(f"{text}. Leave one of the two out")
    if found is None:
        return None, of_positions, without_cache
    if cached:
        refuse_cache_of(found, shape[0], name)
    if padded:
        text = f"{name} has {found.numel() - 1} documents in {shape[0]} rows, and attention_mask has padding, expected one of the two"
        raise ValueError(f"{text}. Leave attention_mask out and pack the documents without padding")
    if name == "position_ids" and _has_three_rows(position_ids):
        text = "position_ids [3, rows, tokens] go back within a row, which says nothing of documents to attention"
        raise ValueError(f"{text}. Pass [4, rows, tokens] with each token's position in its document first, or cu_seq_lens_q")
    more: Dict[str, Any] = {} if use_cache is not None else {"use_cache": False}
    if kept is not None:  # all of it is kept, and transformers looks for documents only without a mask
        more["attention_mask"] = None
    return found, of_positions, more


def _of_bounds_in_a_graph(shape, position_ids, attention_mask, cached, use_cache, cu_seq_lens_q):
    """What `documents_for` returns while a graph is traced: of the bounds, only their number is known."""
    more: Dict[str, Any] = {"use_cache": False} if use_cache is None and not cached else {}
    if cu_seq_lens_q.numel() - 1 <= shape[0]:
        return more
    if cached:
        refuse_cache_of(cu_seq_lens_q, shape[0])
    if _is_padding(attention_mask):
        raise ValueError("cu_seq_lens_q has documents, and there is an attention_mask inside torch.compile. Leave attention_mask out")
    if attention_mask is None:
        more["position_ids"] = _positions_in(cu_seq_lens_q, shape, position_ids)
    return more


def refuse_cache_of(documents, rows, name="cu_seq_lens_q") -> None:
    """Raises ValueError where a cache would have to hold more documents than there are rows. documents: [documents + 1]; name: the argument
    of the model that gave them."""
    if documents.numel() - 1 > rows:
        found = f"{name} has {documents.numel() - 1} documents, and there is a cache"
        advice = "Pass use_cache=False; with PEFT's prefix tuning, whose prefix is a cache, give each document a row (no packing)"
        raise ValueError(f"{found}, expected no cache: it has the states of one document a row. {advice}")


def bounds_in(seq_idx):
    """The bounds of the documents in seq_idx, the document of each token [batch, tokens]; None for None, or where each row is one."""
    return None if seq_idx is None else bounds_of(seq_idx[:, 1:] != seq_idx[:, :-1])


def _named_bounds(shape, cu_seq_lens_q, cu_seq_lens_k, seq_idx) -> Tuple[Optional[str], Optional[torch.Tensor]]:
    """(the argument, its bounds in main memory or None where each row is one document); (None, None) where neither was given."""
    rows, tokens = shape
    index = None
    if seq_idx is not None:
        if tuple(seq_idx.shape) != (rows, tokens):
            found = f"seq_idx has shape {tuple(seq_idx.shape)}, expected ({rows}, {tokens}): the document of each token"
            raise ValueError(f"{found}. {PROMPTS}" if seq_idx.shape[-1] < tokens else found)
        index = bounds_in(seq_idx.cpu())
    if cu_seq_lens_q is None:
        return (None if seq_idx is None else "seq_idx"), index
    bounds = given_bounds(shape, cu_seq_lens_q, cu_seq_lens_k)
    same = bounds is index if bounds is None or index is None else torch.equal(bounds, index)
    if seq_idx is not None and not same:
        raise ValueError("seq_idx and cu_seq_lens_q have documents with different bounds, expected the same. Leave one of the two out")
    return "cu_seq_lens_q", bounds


def _bounds_in_positions(shape, position_ids, kept) -> Tuple[Optional[torch.Tensor], bool]:
    """(the bounds of the documents that position_ids start, in main memory, or None; whether positions go back within a row). kept:
    [rows, tokens] bool, False for padding, or None."""
    text = _text_positions(position_ids)
    rows = text if text is not None else position_ids[0] if _has_three_rows(position_ids) else None
    if rows is None or shape[1] < 2 or not is_plain(rows):
        return None, False
    rows = rows.cpu().expand(shape)
    if text is None:  # an image's tokens share a temporal position
        back = (rows[:, 1:] < rows[:, :-1]) | (position_ids.cpu() == 0).all(0).expand(shape)[:, 1:]
    else:
        back = rows[:, 1:] <= rows[:, :-1]
    starts = back if text is None else rows[:, 1:] != rows[:, :-1] + 1
    if kept is not None:
        starts, back = (found & kept[:, 1:] & kept[:, :-1] for found in (starts, back))
    elif text is not None:
        return document_bounds(rows), bool(back.any())
    return bounds_of(starts), bool(back.any())


def _positions_in(bounds, shape, position_ids):
    """position_ids with each token's position in its document. bounds: [documents + 1]; position_ids: those of the caller, or None."""
    rows, tokens = shape
    numbers = torch.arange(rows * tokens, device=bounds.device)
    positions = (numbers - bounds[torch.bucketize(numbers, bounds[1:], right=True)]).view(rows, tokens)
    if position_ids is None or position_ids.dim() == 2:
        return positions
    return torch.cat((positions[None].to(position_ids), position_ids[-3:].expand(3, rows, tokens)))


def _text_positions(position_ids):
    """The positions of text [rows or 1, tokens] in a model's position_ids; None where there are none."""
    if not isinstance(position_ids, torch.Tensor):
        return None
    if position_ids.dim() == 3 and position_ids.shape[0] == 4:
        return position_ids[0]
    return position_ids if position_ids.dim() == 2 else None


def _has_three_rows(position_ids) -> bool:
    """True for the temporal, height and width positions of a model with a vision tower."""
    return isinstance(position_ids, torch.Tensor) and position_ids.dim() == 3 and position_ids.shape[0] == 3


def _is_padding(attention_mask) -> bool:
    return isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
