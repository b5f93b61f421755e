"""CUDA graphs: what a function does on the GPU, recorded once and replayed, in pools of memory that several graphs share."""

import contextlib
import gc
from typing import Any, Callable

import torch

__all__ = ["GraphPool", "can_record", "is_recording", "memory_of"]


def _end_given_up(device: torch.device, pool) -> None:
    """Ends on the current stream what torch leaves behind of a recording that CUDA gave up.

    torch 2.11 does so (pytorch/pytorch#176752 and #180395 fixed it): the allocator still believes in the recording, and so does the random
    number generator, which then raises an error whenever numbers are drawn or another graph is replayed.
    """
    names = "_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"  # torch 2.6 and 2.7 have the second one
    end = next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))
    with contextlib.suppress(RuntimeError):  # raised by a torch that has ended it for the allocator
        end(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    # The generator leaves a recording at the end of one that succeeds. A new state (Generator.graphsafe_set_state) would only help what
    # draws outside of graphs: existing graphs keep the old one.
    graph, written = torch.cuda.CUDAGraph(), torch.empty(1, device=device)
    graph.capture_begin(capture_error_mode="thread_local")
    written.zero_()  # torch warns of a graph without any work
    graph.capture_end()


class Graph:
    """What a function does on the GPU, recorded in a pool of memory."""

    def __init__(self, pool: "GraphPool"):
        self.graph, self.pool = torch.cuda.CUDAGraph(), pool

    def record(self, function: Callable[[], Any]) -> Any:
        """Returns what the function returns, whose tensors have their values after each `replay`."""
        with torch.cuda.stream(self.pool.stream):
            # Other threads (a loader that pins memory) may go on meanwhile.
            self.graph.capture_begin(pool=self.pool.handle, capture_error_mode="thread_local")
            try:
                return function()
            finally:
                self._end()

    def _end(self) -> None:
        try:
            self.graph.capture_end()
        except Exception:
            _end_given_up(self.pool.device, self.pool.handle)
            self.pool.renew()
            raise

    def replay(self) -> None:
        self.graph.replay()


class GraphPool:
    """Makes graphs of one device that share a pool of memory. As a context it is ready to record, and no garbage is collected: a captured
    model that is garbage would take its graphs along, and CUDA gives up a recording during which another graph is destroyed."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.nbytes = 0  # of the memory that recordings took
        self.renew()

    def renew(self) -> None:
        """Gives the next graphs another pool. The allocator of pinned memory believes in a recording that CUDA gave up, and allows no other
        in its pool."""
        self.handle = torch.cuda.graph_pool_handle()

    def graph(self) -> Graph:
        return Graph(self)

    def __enter__(self):
        torch.cuda.synchronize(self.device)
        # A pool cannot take memory that is cached for others. It takes no more than the pass that is to be recorded took when it ran.
        if torch.cuda.mem_get_info(self.device)[0] < torch.cuda.memory_reserved(self.device):
            torch.cuda.empty_cache()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.nbytes -= torch.cuda.memory_reserved(self.device)
        self.collects = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, *error):
        if self.collects:
            gc.enable()
        self.nbytes += torch.cuda.memory_reserved(self.device)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


def can_record(device: torch.device) -> bool:
    """Tells whether a device has graphs."""
    return device.type == "cuda"


def memory_of(device: torch.device) -> int:
    """Returns the bytes of a device's memory."""
    return torch.cuda.get_device_properties(device).total_memory


def is_recording(x: torch.Tensor) -> bool:
    """Tells whether the work on a tensor is being recorded right now."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
