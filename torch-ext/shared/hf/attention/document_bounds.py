"""Where the documents of packed rows begin and end, by their positions or by the bounds that a caller gave."""

from typing import Optional

import torch

__all__ = ["PROMPTS", "bounds_of", "document_bounds", "documents_in", "given_bounds", "spans_of"]

PROMPTS = "PEFT's prompt tuning puts tokens in front of each row: with it, give each document a row of its own (no packing or padding_free)"


def document_bounds(position_ids: torch.Tensor) -> Optional[torch.Tensor]:
    """Finds where documents start in position_ids [batch, tokens], wherever a position is not the one before it plus 1.

    Returns:
        Their bounds among all tokens of the batch [documents + 1] int32, or None where each row is one document. Waits for the device.
    """
    if position_ids.shape[1] < 2:
        return None
    return bounds_of(position_ids[:, 1:] != position_ids[:, :-1] + 1)


def bounds_of(starts: torch.Tensor) -> Optional[torch.Tensor]:
    """Finds the bounds that `document_bounds` returns. starts: [batch, tokens - 1] bool, whether a document starts at each token of a row
    after the first one."""
    batch, length = starts.shape
    new = torch.nn.functional.pad(starts, (1, 0), value=True).flatten().nonzero().flatten()
    if new.numel() == batch:
        return None
    return torch.nn.functional.pad(new, (0, 1), value=batch * (length + 1)).to(torch.int32)


def documents_in(position_ids: torch.Tensor) -> Optional[torch.Tensor]:
    """[2, at least as many as documents] int32 in main memory: the first token of each document and the one after its last; the rest are
    empty. None where each row is one document. Waits for the device.

    position_ids: [batch, tokens]; a document starts with each row, and wherever a position is not the one before it plus 1. transformers
    looks for the same on the device, which loads a dozen operations for it alone in the first step.
    """
    found = document_bounds(position_ids.cpu())
    return None if found is None else spans_of(found)


def given_bounds(shape, cu_seq_lens_q, cu_seq_lens_k=None) -> Optional[torch.Tensor]:
    """Reads the bounds of documents that a caller gave. Waits for the device.

    Args:
        shape: (rows, tokens).
        cu_seq_lens_q: [documents + 1], among all tokens of the rows, one row behind the other; each row begins a document.
        cu_seq_lens_k: the same, or None.

    Returns:
        The bounds [documents + 1] int32 in main memory, or None where each row is one document.

    Raises:
        ValueError: they are no such bounds.
    """
    rows, tokens = shape
    if not isinstance(cu_seq_lens_q, torch.Tensor) or cu_seq_lens_q.dim() != 1:
        found_shape = list(getattr(cu_seq_lens_q, "shape", ()))
        raise ValueError(f"cu_seq_lens_q is a {type(cu_seq_lens_q).__name__} {found_shape}, expected a tensor [documents + 1]")
    found = cu_seq_lens_q.cpu().unique_consecutive()
    ends = torch.arange(0, rows * tokens + 1, tokens, dtype=found.dtype)
    rises = found.numel() > 0 and bool((found[1:] > found[:-1]).all())
    if not rises or found[0] != 0 or found[-1] != rows * tokens or not bool(torch.isin(ends, found).all()):
        expected = f"rising bounds from 0 to {rows * tokens}, among them those of the {rows} rows of {tokens} tokens, one behind the other"
        advice = f". {PROMPTS}" if found.numel() and found[-1] < rows * tokens else ""
        raise ValueError(f"cu_seq_lens_q is {found.tolist()[:8]} (the first eight), expected {expected}{advice}")
    if cu_seq_lens_k is not None and cu_seq_lens_k is not cu_seq_lens_q:
        if not torch.equal(cu_seq_lens_k.cpu().unique_consecutive().to(found.dtype), found):
            raise ValueError("cu_seq_lens_k and cu_seq_lens_q have different bounds, expected the same. Pass one tensor for both")
    return None if found.numel() == rows + 1 else found.to(torch.int32)


def spans_of(bounds: torch.Tensor) -> torch.Tensor:
    """Makes what `documents_in` returns of the bounds of all documents, [documents + 1] int32 in main memory."""
    room = 1 << (bounds.numel() - 2).bit_length()  # a launch is prepared for each number of them
    found = bounds[-1].repeat(room + 1)
    found[: bounds.numel()] = bounds
    return torch.stack((found[:-1], found[1:]))
