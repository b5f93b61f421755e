"""Time and memory of a call on one device.

Three ways to time, all after an untimed restoring of the buffers that providers write over, and over an L2 that holds none of them:
- "device" (the default): device events, with a head start for the host, so that what it needs for launching is hidden;
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
TIMINGS = ("device", "wall", "graph")
FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU
CYCLES_PER_US = 2000  # of an H200 at its 1.98 GHz; a lower clock makes the head start longer, which does no harm
HEAD_START_MAX_US = 5000  # a call that waits for the device hides nothing behind a longer one


class DeviceLost(RuntimeError):
    """The device does not answer any more; nothing after this can be measured in this process."""


@dataclass(frozen=True)
class Quantiles:
    median: float
    low: float  # 20 %
    high: float  # 80 %

    @classmethod
    def of(cls, samples: list[float]) -> "Quantiles":
        found = torch.tensor(samples, dtype=torch.float64).quantile(torch.tensor((0.5, 0.2, 0.8), dtype=torch.float64))
        return cls(*found.tolist())


@dataclass(frozen=True)
class Plan:
    count: int
    head_start_us: float = 0.0


def nothing() -> None:
    pass


class Clock:
    """Times calls on a GPU, or on a CPU for smoke runs."""

    def __init__(self, device: str, timing: str = "device", milliseconds: float = 50.0):
        self.cuda = device.startswith("cuda")
        self.timing, self.milliseconds = timing, milliseconds
        self.flushed = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device) if self.cuda else None
        if self.cuda and timing == "graph":
            # Autograd runs a backward pass on the stream of its forward pass, and only one stream is captured.
            torch.cuda.set_stream(torch.cuda.Stream())

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def clean(self) -> None:
        """Gives memory back after a failure. Raises DeviceLost when the device does not answer."""
        gc.collect()
        if not self.cuda:
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error

    def plan(self, calls: list[Call], before: Call, rounds: int) -> Plan:
        """Warms up, and decides how often to call."""
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
        """Microseconds of each of `plan.count` calls."""
        if not self.cuda:
            return [self._host_sample(calls[0], before) for _ in range(plan.count)]
        if self.timing == "graph":
            return self._graph_samples(calls, plan.count)
        pairs = [self._event_pair(calls[0], before, plan) for _ in range(plan.count)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def _host_sample(self, call: Call, before: Call) -> float:
        before()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def _event_pair(self, call: Call, before: Call, plan: Plan):
        before()
        self.flushed.zero_()
        if self.timing == "device":
            torch.cuda._sleep(int(plan.head_start_us * CYCLES_PER_US))
        else:
            torch.cuda.synchronize()
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
        """Quantiles of the microseconds of every provider's call, taken in turns so that a drift of the clocks meets all of them.

        calls: for each provider the same call on every set of buffers (one set unless graphs are timed).
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

    def peak_bytes(self, call: Call) -> int | None:
        """The most memory that a call holds beyond what was held before it."""
        if not self.cuda:
            return None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        held = call()
        torch.cuda.synchronize()
        del held
        return torch.cuda.max_memory_allocated() - before

    def host_microseconds(self, call: Call, calls: int = 200, repeats: int = 8) -> float:
        """Host time of one call: the best of several runs of so few calls that the device's queue never fills."""
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
        return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size if self.cuda else 0


def copy_call(nbytes: int, device: str) -> Call:
    """copy_ between two buffers that moves `nbytes`: half of them read, half written."""
    source = torch.empty(max(nbytes // 2, 1), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """||found - exact|| / ||exact|| in float64; infinite for a wrong shape or a value that is not finite."""
    if found.shape != exact.shape or not torch.isfinite(found).all():
        return float("inf")
    scale = exact.norm()
    difference = (found.detach().double() - exact).norm()
    return float(difference / scale) if scale > 0 else float(difference)
