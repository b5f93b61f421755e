"""The time of a call on one device.

Four ways to time, all after an untimed restoring of the buffers that providers write over, and over an L2 that holds none of them:
- "device" (the default): device events, with a head start for the host, so that what it needs for launching is hidden;
- "rotated": the same, but over several sets of buffers in turns, larger together than the L2, which is not flushed;
- "wall": device events around a call that finds the device idle: short operations show what their launches cost;
- "graph": replays of a CUDA graph over several sets of buffers, larger together than the L2.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

Call = Callable[[], object]
TIMINGS = ("device", "rotated", "wall", "graph")
ROTATED = ("rotated", "graph")  # these need several sets of buffers
FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU
CYCLES_PER_US = 2000  # of an H200 at its 1.98 GHz; a lower clock makes the head start longer, which does no harm
HEAD_START_MAX_US = 5000  # a call that waits for the device hides nothing under a longer one


class DeviceLost(RuntimeError):
    """The device does not answer any more; nothing after this can be measured in this process."""


@dataclass(frozen=True)
class Quantiles:
    """Return the median of samples, and their 20 % and 80 % quantiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> "Quantiles":
        """Return the quantiles of samples. Raise RuntimeError where there are none."""
        found = torch.tensor(samples, dtype=torch.float64).quantile(torch.tensor((0.5, 0.2, 0.8), dtype=torch.float64))
        return cls(*found.tolist())


@dataclass(frozen=True)
class Plan:
    """How often to call, and how long the device sleeps before each call so that the host is ahead of it."""

    count: int
    head_start_us: float = 0.0


def nothing() -> None:
    """Do nothing between two calls."""


class Clock:
    """Times calls on a GPU, or on a CPU for smoke runs. milliseconds: of calls for each number."""

    def __init__(self, device: str, timing: str = "device", milliseconds: float = 50.0):
        self.cuda = device.startswith("cuda")
        self.timing, self.milliseconds = timing, milliseconds
        self.flushed = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device) if self.cuda else None
        if self.cuda and timing == "graph":
            # Autograd runs a backward pass on the stream of its forward pass, and only one stream is captured.
            torch.cuda.set_stream(torch.cuda.Stream())

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def flush_cache(self) -> None:
        """Write so much that the L2 holds nothing else."""
        if self.flushed is not None:
            self.flushed.zero_()

    def clean(self) -> None:
        """Give memory back after a failure. Raise DeviceLost when the device does not answer."""
        gc.collect()
        if not self.cuda:
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error

    def plan(self, calls: list[Call], before: Call, rounds: int) -> Plan:
        """Warm up, and decide how often to call."""
        for call in calls:
            before()
            call()
        before()
        self.synchronize()
        start = time.perf_counter()
        calls[0]()
        issued = time.perf_counter() - start
        self.synchronize()
        whole = max(time.perf_counter() - start, 1e-6)
        count = int(self.milliseconds * 1e-3 / whole / rounds)
        return Plan(min(max(count, 3), 50), min(issued * 1.5e6 + 50, HEAD_START_MAX_US))

    def samples(self, calls: list[Call], before: Call, plan: Plan) -> list[float]:
        """Return the microseconds of each of `plan.count` calls, which take the sets of buffers in turns."""
        in_turns = [calls[number % len(calls)] for number in range(plan.count)]
        if self.timing == "rotated":
            # Restoring would leave the last buffers in the L2, so they are what providers made of them but for the first time.
            before()
            before = nothing
        if not self.cuda:
            return [self._host_sample(call, before) for call in in_turns]
        if self.timing == "graph":
            return self._graph_samples(calls, plan.count)
        pairs = [self._event_pair(call, before, plan) for call in in_turns]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def unhidden_microseconds(self, call: Call) -> float:
        """Return the time of one call, with whatever part of the host's time the device waits for."""
        if not self.cuda:
            return self._host_sample(call, nothing)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def _host_sample(self, call: Call, before: Call) -> float:
        before()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def _event_pair(self, call: Call, before: Call, plan: Plan):
        before()
        if self.timing != "rotated":
            self.flush_cache()
        if self.timing == "wall":
            torch.cuda.synchronize()
        else:
            torch.cuda._sleep(int(plan.head_start_us * CYCLES_PER_US))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        return start, end

    def _graph_samples(self, calls: list[Call], count: int) -> list[float]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        many = calls * max(1, 8 // len(calls))
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for call in many:
                call()
        graph.replay()
        found = []
        for _ in range(max(3, count // len(many))):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / len(many))
        return found

    def measure(self, calls: dict[str, list[Call]], before: Call = nothing, rounds: int = 2) -> dict[str, Quantiles | Exception]:
        """Return quantiles of the microseconds of every provider's call, taken in turns so that a drift of the clocks meets all of them.

        calls: for each provider the same call on every set of buffers (one set unless the timing is one of ROTATED).
        A provider that raises has its exception in place of a result.
        """
        failed: dict[str, Exception] = {}
        plans: dict[str, Plan] = {}
        samples: dict[str, list[float]] = {name: [] for name in calls}

        def attempt(name: str, step: Call) -> None:
            try:
                step()
                return
            except Exception as error:
                failed[name] = error.with_traceback(None)  # whose frames hold tensors
            self.clean()

        def make_plan(name: str) -> None:
            plans[name] = self.plan(calls[name], before, rounds)

        def take_samples(name: str) -> None:
            samples[name] += self.samples(calls[name], before, plans[name])

        for name in calls:
            attempt(name, partial(make_plan, name))
        for _ in range(rounds):
            for name in calls:
                if name not in failed:
                    attempt(name, partial(take_samples, name))
        return {name: failed.get(name) or Quantiles.of(samples[name]) for name in calls}

    def host_microseconds(self, call: Call, calls: int = 200, repeats: int = 8) -> float:
        """Return the host time of one call: the best of several runs of so few calls that the device's queue never fills."""
        for _ in range(20):
            call()
        best = float("inf")
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            best = min(best, (time.perf_counter() - start) / calls * 1e6)
        self.synchronize()
        return best

    def l2_bytes(self) -> int:
        """Return the size of the device's L2; 0 on a CPU."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size if self.cuda else 0
