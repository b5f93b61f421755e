"""What is done around the recording of a CUDA graph, with stand-ins for torch's. Real graphs: tests/gpu/test_capture.py."""

import collections
import contextlib
import gc
import importlib
import itertools
from unittest import mock

import pytest
import torch


class Torch:
    """What torch keeps of recordings: the pools of those that go on, the references of all to pools, and whether the generator is in one.
    lost: pools that the allocator of pinned memory takes no other recording in. ends: whether a recording that CUDA gave up is over for the
    device's allocator, as it is for newer versions."""

    def __init__(self, ends):
        self.ends = ends
        self.pools, self.references, self.in_a_recording, self.given_up = [], collections.Counter(), False, False
        self.handles, self.lost = itertools.count(), set()

    def graph(self):
        return FakeGraph(self)

    def end(self, device, pool):
        if pool not in self.pools:
            raise RuntimeError("not currently recording to mempool_id")
        self.pools.remove(pool)

    def release(self, device, pool):
        self.references[pool] -= 1


class FakeGraph:
    def __init__(self, state):
        self.state = state

    def capture_begin(self, pool="its own", capture_error_mode="global"):
        self.pool = pool
        assert pool not in {*self.state.pools, *self.state.lost}, "already recording to mempool_id"
        self.state.pools.append(pool)
        self.state.references[pool] += 1
        self.state.in_a_recording = True

    def capture_end(self):
        given_up, self.state.given_up = self.state.given_up, False
        if self.state.ends or not given_up:
            self.state.pools.remove(self.pool)
        if given_up:
            self.state.lost.add(self.pool)
            raise RuntimeError("operation failed due to a previous error during capture")
        self.state.in_a_recording = False


@pytest.mark.parametrize("ends", (False, True))
def test_a_recording_that_cuda_gives_up_is_over(qwen3, monkeypatch, ends):
    """For the generator, which would not draw outside of it, and for the allocator, which would take no more of its pool."""
    state = Torch(ends)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(state.handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", state.graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", state.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", state.release, raising=False)
    pool = importlib.import_module(f"{qwen3.__name__}.shared.runtime.graphs").GraphPool(torch.device("cpu"))

    def waits():
        state.given_up = True
        raise RuntimeError("operation not permitted when stream is capturing")

    assert pool.graph().record(lambda: 7) == 7
    for _ in range(2):
        with pytest.raises(RuntimeError, match="previous error during capture"):
            pool.graph().record(waits)
        assert not state.pools and not state.in_a_recording
    assert ends or state.references[0] == 1, "of the graph that there is"
    assert pool.graph().record(lambda: 8) == 8


@pytest.mark.parametrize("enabled", (True, False), ids=("collecting", "not collecting"))
@pytest.mark.parametrize("error", (None, ValueError), ids=str)
def test_no_garbage_is_collected_while_graphs_are_recorded(qwen3, monkeypatch, error, enabled):
    """Some of it may be graphs, and where one is destroyed CUDA gives up the recording. Memory that is cached for others is given back
    where the device has less left than is reserved."""
    module, collecting, emptied = importlib.import_module(f"{qwen3.__name__}.shared.runtime.graphs"), [], []

    def function(**_):
        collecting.append(gc.isenabled())
        if error and len(collecting) == 2:
            raise error

    memory = {"mem_get_info": lambda device: (2**20 if enabled else 2**30, 2**31), "memory_reserved": lambda device: 2**29}
    monkeypatch.setattr(module.torch, "cuda", mock.MagicMock(**memory))
    module.torch.cuda.empty_cache.side_effect = lambda: emptied.append(True)
    pool = module.GraphPool(torch.device("cpu"))
    graph = pool.graph()
    graph.graph = mock.Mock(capture_begin=function)
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(error) if error else contextlib.nullcontext(), pool:
            graph.record(function)
        assert collecting == [False, False] and gc.isenabled() == enabled and bool(emptied) == enabled
    finally:
        gc.enable()
    assert graph.graph.capture_end.call_count == 1
