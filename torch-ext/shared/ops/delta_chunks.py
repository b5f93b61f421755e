"""Checks the arguments of the gated delta rule, and finds where the chunks of a batch's documents start, which its kernels walk over."""

from typing import NamedTuple, Optional

import torch
from torch.nn.functional import pad

from ..runtime.device import version_of
from .arguments import describe, fail, need_floats

__all__ = ["CHUNK", "DeltaChunks", "check_arguments", "chunks_of", "chunks_of_rows", "keeping_chunks"]

CHUNK = 64
KEPT_ON = "_bastile_delta_chunks"  # an attribute of bounds that this package made: what was made of them


class DeltaChunks(NamedTuple):
    """The chunks of all documents, one after another, made once a batch and used by every layer.

    table: [2, chunks] int32, the first token of each and how many it has; chunks at the end may have none, as their exact number is known
    to the device alone. bounds: [2, documents] int32, the first chunk of each document and the end of its chunks. longest: the chunks of
    the longest document, None where only the device knows it.
    """

    table: torch.Tensor
    bounds: torch.Tensor
    longest: Optional[int]


def chunks_of_rows(batch: int, length: int, device: torch.device) -> DeltaChunks:
    """Every row of a batch is a document."""
    each = -(-length // CHUNK)
    row = torch.arange(batch, dtype=torch.int32, device=device)
    offset = torch.arange(each, dtype=torch.int32, device=device) * CHUNK
    first = (row[:, None] * length + offset).flatten()
    count = (length - offset).clamp(max=CHUNK).repeat(batch)
    return DeltaChunks(torch.stack((first, count)), torch.stack((row * each, (row + 1) * each)), each)


def keeping_chunks(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Returns bounds on which `chunks_of` keeps what it makes, for the layers of a pass. They must have been made by this package: what
    torch.distributed, NumPy or `.data` write to a caller's tensor does not show in its version."""
    if not torch.compiler.is_compiling() and not hasattr(cu_seqlens, KEPT_ON):
        setattr(cu_seqlens, KEPT_ON, ())
    return cu_seqlens


def chunks_of(cu_seqlens: torch.Tensor, tokens: int) -> DeltaChunks:
    """Document i is made of the tokens from cu_seqlens[i] to cu_seqlens[i + 1].

    Args:
        cu_seqlens: [documents + 1] int32 or int64, ascending, from 0.
        tokens: of the whole batch. What lies past it does not count.

    Raises:
        ValueError: if the shape or the dtype does not fit.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        fail("cu_seqlens", describe(cu_seqlens), "int32 or int64 [documents + 1]")
    tracing = torch.compiler.is_compiling()
    kept = None if tracing else getattr(cu_seqlens, KEPT_ON, None)
    state = None if kept is None else (version_of(cu_seqlens), tokens)
    if kept and kept[0] == state:
        return kept[1]
    ends = cu_seqlens.to(torch.int32).clamp(max=tokens)
    lengths = ends[1:] - ends[:-1]
    last = ((lengths + (CHUNK - 1)) // CHUNK).cumsum(0, dtype=torch.int32)
    start = pad(last[:-1], (1, 0))
    chunk = torch.arange(tokens // CHUNK + lengths.shape[0], dtype=torch.int32, device=ends.device)
    document = torch.searchsorted(last, chunk, right=True).clamp(max=lengths.shape[0] - 1)
    offset = (chunk - start[document]) * CHUNK
    count = (lengths[document] - offset).clamp(0, CHUNK)
    first = torch.where(count > 0, ends[:-1][document] + offset, 0)
    longest = None if tracing or ends.is_cuda else int((last - start).max())
    made = DeltaChunks(torch.stack((first, count)).to(torch.int32), torch.stack((start, last)), longest)
    if kept is not None:
        setattr(cu_seqlens, KEPT_ON, (state, made))
    return made


def check_arguments(q, k, v, g, beta, cu_seqlens, initial) -> None:
    """Raises ValueError for arguments of the gated delta rule that do not fit."""
    need_floats(q=q, k=k, v=v, g=g, beta=beta)
    if q.dim() != 4:
        fail("q", describe(q), "[batch, tokens, key heads, K]")
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[:2] != q.shape[:2] or x.dtype != q.dtype or x.device != q.device:
            fail(name, describe(x), f"{q.dtype} [{q.shape[0]}, {q.shape[1]}, heads, width] on {q.device}, like q")
    if k.shape != q.shape:
        fail("k", describe(k), f"the shape of q, {list(q.shape)}")
    if k.shape[2] == 0 or v.shape[2] % k.shape[2]:
        fail("v", describe(v), f"a number of heads that the {k.shape[2]} key heads divide")
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != v.shape[:3] or x.device != q.device:
            fail(name, describe(x), f"[{', '.join(map(str, v.shape[:3]))}] on {q.device}")
    documents = q.shape[0]
    if cu_seqlens is not None:
        if q.shape[0] != 1 or cu_seqlens.device != q.device:
            fail("cu_seqlens", f"{describe(cu_seqlens)} with a batch of {q.shape[0]}", f"a batch of 1, and cu_seqlens on {q.device}")
        documents = cu_seqlens.shape[0] - 1
    if initial is not None and (initial.shape != (documents, v.shape[2], k.shape[3], v.shape[3]) or initial.device != q.device):
        fail("initial_state", describe(initial), f"[{documents}, {v.shape[2]}, {k.shape[3]}, {v.shape[3]}] on {q.device}")
