"""The memory of a call on one device."""

import gc
from collections.abc import Callable

import torch

MiB, GiB = 2**20, 2**30


def peak_bytes(call: Callable[[], object], cuda: bool, inputs_included: bool = False) -> int | None:
    """Return the most memory that is allocated during a call: beyond what was before it, or all of it. None on a CPU."""
    if not cuda:
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = 0 if inputs_included else torch.cuda.memory_allocated()
    held = call()
    torch.cuda.synchronize()
    del held
    return torch.cuda.max_memory_allocated() - before


def held_by_graphs() -> int:
    """Return the bytes of CUDA graphs' pools that no tensor is in: a replay writes there, and nothing counts them as allocated."""
    segments = torch.cuda.memory_snapshot()
    return sum(found["total_size"] - found["allocated_size"] for found in segments if tuple(found["segment_pool_id"]) != (0, 0))
