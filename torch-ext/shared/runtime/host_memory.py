"""Tensors that wait in the host's memory: copied out while the device goes on, and back before they are needed.

On a GPU the copies run on a stream of their own (`Lane`), one for each device, so that they are in order among themselves. Elsewhere the
same code copies at once. The host's memory is pinned as far as a limit allows, and pageable beyond it, whose copies the device waits for.
"""

import functools
import os
import threading
import warnings
from typing import Any, List, Optional, Sequence, Tuple

import torch

__all__ = ["Away"]

PIECE = 64 << 20  # bytes: torch rounds pinned blocks up to a power of two, so that only a tensor's last piece wastes anything
SHARE = 0.75  # of the host's free memory may be pinned: what is pinned the system cannot take back
Copy = Tuple[torch.Tensor, torch.Tensor]  # (to, from)


class Lane:
    """Runs copies: this one at once, on the stream that computes."""

    def mark(self) -> Any:
        """A point in what the current stream has been given."""

    def run(self, copies: Sequence[Copy], after: Any) -> Any:
        """Copies once the point `after` is reached. Returns the point at which they have ended."""
        for to, source in copies:
            to.copy_(source)

    def wait(self, point: Any) -> None:
        """Has the current stream wait for a point."""

    def stream(self) -> Any:
        """The current stream."""

    def hold(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor's memory from being used again before the copies that were asked for have ended."""


class CudaLane(Lane):
    """A stream for the copies of one GPU."""

    def __init__(self, device: torch.device):
        self.device, self.copies = device, torch.cuda.Stream(device)

    def mark(self) -> Any:
        return self.stream().record_event()

    def run(self, copies: Sequence[Copy], after: Any) -> Any:
        self.copies.wait_event(after)
        with torch.cuda.stream(self.copies):
            for to, source in copies:
                to.copy_(source, non_blocking=to.is_pinned() if source.is_cuda else source.is_pinned())
        return self.copies.record_event()

    def wait(self, point: Any) -> None:
        self.stream().wait_event(point)

    def stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def hold(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.copies)


@functools.lru_cache(maxsize=None)
def lane_of(device: torch.device) -> Lane:
    """The lane of a device."""
    return CudaLane(device) if device.type == "cuda" else Lane()


def _read(path: str, name: str = "") -> Optional[int]:
    """The first number of a file of the system's, or of its line that begins with a name; None where there is none."""
    try:
        with open(path, encoding="ascii") as lines:
            words = next((line.split() for line in lines if line.startswith(name)), [])
        return next((int(word) for word in words if word.isdigit()), None)
    except (OSError, ValueError):
        return None


def free_memory() -> Optional[int]:
    """Bytes of the host's memory that are free for this process: of the machine or its container, shared with the host's other ranks. None
    where the system does not say."""
    of_machine, most = _read("/proc/meminfo", "MemAvailable:"), _read("/sys/fs/cgroup/memory.max")
    found = [] if of_machine is None else [of_machine << 10]
    if most is not None:
        found.append(max(most - (_read("/sys/fs/cgroup/memory.current") or 0), 0))
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return min(found) // max(int(ranks) if ranks.isdigit() else 1, 1) if found else None


class Pinned:
    """Counts the bytes of pinned memory that tensors in `Away` take. limit: their most, None until the first is asked for without one."""

    def __init__(self) -> None:
        self.used, self.limit = 0, None  # type: Tuple[int, Optional[int]]
        self.said, self.lock = False, threading.Lock()

    def take(self, size: int, limit: Optional[int]) -> bool:
        """Whether a block may be pinned, which counts it."""
        if limit is None:
            if self.limit is None:
                free = free_memory()
                self.limit = -1 if free is None else int(free * SHARE)
            limit = self.limit if self.limit >= 0 else None
        with self.lock:
            fits = limit is None or self.used + size <= limit
            self.used += size * fits
        return fits or self.refuse(f"{self.used / 2**30:.1f} GiB are pinned already, and no more may be")

    def give(self, size: int) -> None:
        with self.lock:
            self.used -= size

    def refuse(self, why: str) -> bool:
        """Says once that memory is not pinned; False."""
        if not self.said:
            self.said = True
            what = f"offload: {why}, so what is left goes to pageable memory, and each copy waits for the GPU"
            warnings.warn(f"{what}. Free host memory, or pass offload=<GiB> to pin more", RuntimeWarning, stacklevel=4)
        return False


pinned = Pinned()


def _block(size: int, limit: Optional[int]) -> Tuple[torch.Tensor, int]:
    """(memory of some bytes, how many of them count as pinned)."""
    whole = 1 << (size - 1).bit_length()  # as torch rounds it
    if pinned.take(whole, limit):
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True), whole
        except RuntimeError as error:
            pinned.give(whole)
            pinned.refuse(f"the system pins no more memory ({str(error).splitlines()[0]})")
    return torch.empty(size, dtype=torch.uint8), 0


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with its dimensions in the order of memory, which for attention's output are [batch, tokens, heads, head_dim]."""
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda i: -strides[i]))


class Away:
    """One tensor in the host's memory. What it was made of stays on the device until `settle`.

    Args:
        tensor: of any shape and dtype; nothing may write to it before `settle`, which is found out.
        limit: bytes of all tensors together that may be in pinned memory; None for a share of what is free.
    """

    count = 0  # bytes of it that are pinned
    source: Optional[torch.Tensor] = None
    coming: Optional[torch.Tensor] = None

    @torch.no_grad()
    def __init__(self, tensor: torch.Tensor, limit: Optional[int] = None):
        self.lane = lane_of(tensor.device)
        self.source = tensor.detach()
        self.version, self.written = self.source._version, False
        numbers = self.source if _in_memory(self.source).is_contiguous() else self.source.contiguous()
        self.shape, self.stride, self.dtype, self.device = numbers.shape, numbers.stride(), tensor.dtype, tensor.device
        size = numbers.numel() * numbers.element_size()
        self.sizes = [min(PIECE, size - start) for start in range(0, size, PIECE)]
        self.blocks: List[torch.Tensor] = []
        for each in self.sizes:
            block, whole = _block(each, limit) if tensor.is_cuda else (torch.empty(each, dtype=torch.uint8), 0)
            self.blocks.append(block)
            self.count += whole
        self.home, self.left = self.lane.stream(), self.lane.run(self._copies(numbers, out=True), self.lane.mark())
        if numbers.data_ptr() != self.source.data_ptr():
            self.lane.hold(numbers)

    def _copies(self, numbers: torch.Tensor, out: bool) -> List[Copy]:
        pairs = zip(self.blocks, _in_memory(numbers).view(-1).view(torch.uint8).split_with_sizes(self.sizes)) if self.sizes else ()
        return [pair if out else pair[::-1] for pair in pairs]

    def settle(self) -> None:
        """Lets the tensor on the device go: what runs from now on does so after the copy."""
        if self.source is None:
            return
        self.written = self.written or self.source._version != self.version
        if self.home == self.lane.stream():
            self.lane.wait(self.left)
        else:
            self.lane.hold(self.source)
        self.source = None

    @torch.no_grad()
    def ask(self) -> None:
        """Begins to copy the tensor back."""
        if self.source is None and self.coming is None:
            self.home = self.lane.stream()
            self.coming = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
            self.back = self.lane.run(self._copies(self.coming, out=False), self.lane.mark())

    def forget(self) -> None:
        """Lets go of what comes back and has not been taken."""
        if self.coming is not None:
            self.lane.hold(self.coming)
            self.coming = None

    def take(self) -> torch.Tensor:
        """The tensor on its device: the one that it was made of as long as that is there, else a copy. Raises RuntimeError where that was
        written to in between."""
        there = self.source
        self.settle()
        if there is not None and not self.written:
            return there
        if self.written:
            what = "offload: the input of a checkpointed layer was written to in place while it was copied to the host"
            raise RuntimeError(f"{what}. Write to a clone of it, or leave offload out")
        if self.coming is not None and self.home != self.lane.stream():
            self.forget()
        self.ask()
        self.lane.wait(self.back)
        tensor, self.coming = self.coming, None
        assert tensor is not None
        return tensor

    def __del__(self) -> None:
        pinned.give(self.count)
        for tensor in (self.source, self.coming):
            if tensor is not None:
                self.lane.hold(tensor)

