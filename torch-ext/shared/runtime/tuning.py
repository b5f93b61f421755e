"""Which of several prebuilt variants of a kernel runs on this GPU, where no table of ours decides.

Variants that take the same arguments and make the very same promises are candidates of each other; the one listed first is the
default. A process launches defaults until `warmup_all_kernels` is called in it. From then on it launches what was the fastest by the
cache file, which holds measurements by GPU, driver and build of the package; the warm-up times what is not there yet. Nothing is
timed at any other moment. So the same calls, with the same file, launch the same kernels: two runs give the same bits.
"""

import contextlib
import json
import os
import threading
import uuid
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence

import torch

from .artifacts import BuiltVariant

__all__ = ["DTYPES", "TOKENS", "clear_autotune_cache", "measure", "run_backward", "tuner", "warm_up_models"]

FORMAT = 1
ROUNDS = 9
WORKING_SET = 2**28  # bytes that a round goes through, so that nothing is found in a cache: the largest L2 (B200) has 126 MB
GAIN = 0.02  # a candidate that is faster by less does not displace the default: measurements of one kernel differ by 1 %
LONGEST = 1e12  # microseconds: no launch takes eleven days, and what is longer is no time
MACHINES = 32  # that the file keeps, the latest ones
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # for which there are kernels
TOKENS = 256  # enough to load every kernel
# So many that a launch takes tens of microseconds, as in training; where the memory is short, fewer. For Qwen3-8B: 1.5 and 0.4 GiB.
TIMED_TOKENS = (4096, 1024)

Times = Dict[str, float]  # candidate -> microseconds of a launch


def cache_file() -> Path:
    """Returns the file in which measurements are remembered: in BASTILE_CACHE, else in `bastile` under XDG_CACHE_HOME or ~/.cache.

    Raises RuntimeError when there is no home directory.
    """
    folder = os.environ.get("BASTILE_CACHE")
    if folder:
        return Path(folder).expanduser() / "tuning.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bastile" / "tuning.json"


def _valid(times: object) -> bool:
    return isinstance(times, dict) and all(type(us) in (int, float) and 0 < us < LONGEST for us in times.values())


def _read(path: Path) -> Dict[str, Dict[str, Times]]:
    """machine -> default -> times. Raises OSError, or ValueError when it is no file of this format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    machines = content.get("machines")
    if not isinstance(machines, dict) or not all(isinstance(found, dict) for found in machines.values()):
        raise ValueError("it holds no measurements")
    if not all(_valid(times) for found in machines.values() for times in found.values()):
        raise ValueError("a measurement is not a time")
    return machines


def _write(path: Path, machines: Dict[str, Dict[str, Times]]) -> None:
    """All at once: a reader sees the old file or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with new.open("x", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "machines": dict(list(machines.items())[-MACHINES:])}, file, indent=1)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def measure(
    launches: Sequence[Callable], tensors: Sequence[torch.Tensor], floats: Sequence[float], elapsed: Callable
) -> List[float]:
    """Microseconds of one launch of each of them, the median of rounds in which they take turns.

    They work on copies of the tensors, so many that no launch finds its data in a cache. elapsed: seconds of some launches.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    copies = []
    for _ in range(min(16, -(-WORKING_SET // max(size, 1)))):
        copies.append([torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in tensors])
    addresses = [[tensor.data_ptr() for tensor in copy] for copy in copies]
    times: List[List[float]] = [[] for _ in launches]
    for _ in range(1 + ROUNDS):  # the first of them warms up
        for launch, found in zip(launches, times):
            seconds = elapsed(lambda launch=launch: [launch(places, floats) for places in addresses])
            found.append(1e6 * seconds / len(addresses))
    return [sorted(found[1:])[len(found[1:]) // 2] for found in times]


class Tuner:
    """The choices of this process. Thread-safe. kernels: what forgets its launches when the choices change."""

    def __init__(self):
        self.kernels: weakref.WeakSet = weakref.WeakSet()
        self._lock = threading.RLock()
        self._file: Dict[str, Dict[str, Times]] = {}  # what it held at `start`
        self._measured: Dict[str, Dict[str, Times]] = {}  # of this process's GPUs
        self._active = self._measuring = self._warned = False
        self._missing: set = set()

    def choose(self, candidates: Sequence[BuiltVariant], machine: Callable[[], str], times: Callable[[], List[float]]) -> BuiltVariant:
        """The candidate to launch; candidates: the default first. machine: names what a measurement holds for.
        times: measures the candidates; called in `measuring` only."""
        default = candidates[0]
        if not self._active:
            return default
        with self._lock:
            name = machine()
            found = self._measured.setdefault(name, self._file.get(name, {}))
            known = found.get(default.name)
            if known is not None and set(known) != {candidate.name for candidate in candidates}:
                self._warn(f"its measurement of {default.name} is of other candidates")
                known = None
            if known is None:
                if not self._measuring:
                    self._missing.add(default.name)
                    return default
                known = found[default.name] = dict(zip([candidate.name for candidate in candidates], times()))
                self._missing.discard(default.name)
            best = min(candidates, key=lambda candidate: known[candidate.name])
            return best if known[best.name] <= (1 - GAIN) * known[default.name] else default

    @property
    def incomplete(self) -> bool:
        """True when a launch since `start` had candidates without a measurement."""
        return bool(self._missing)

    def start(self) -> None:
        """Chooses by measurements from now on: those of the cache file, and what this process measured itself."""
        with self._lock:
            self._active = True
            self._missing.clear()
            self._file = self._load()
            for machine, found in self._measured.items():
                found.update(self._file.get(machine, {}))
        self._changed()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Launches inside that have candidates without a measurement time them; at the end the cache file gets what was new."""
        self._measuring = True
        self._changed()
        try:
            yield
        finally:
            self._measuring = False
            self._missing.clear()
            self._save()
            self._changed()

    def forget(self) -> None:
        """Back to the defaults, here and in the cache file. Raises OSError when there is a file that cannot be removed."""
        with self._lock:
            for known in (self._file, self._measured, self._missing):
                known.clear()
            self._active = self._warned = False
        self._changed()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, RuntimeError):
            cache_file().unlink()

    def _changed(self) -> None:
        for kernel in list(self.kernels):
            kernel.forget()

    def _load(self) -> Dict[str, Dict[str, Times]]:
        try:
            return _read(cache_file())
        except (OSError, RuntimeError, ValueError) as error:
            self._warn(error)
            return {}

    def _save(self) -> None:
        """What another process has written meanwhile stays, and counts here too: so all of them choose alike."""
        with self._lock:
            machines, new = self._load(), False
            for machine, found in self._measured.items():
                theirs = machines.pop(machine, {})
                for default, times in theirs.items():
                    if default not in found or set(found[default]) == set(times):
                        found[default] = times
                if found:
                    machines[machine] = found
                    new = new or found != theirs
            if not new:
                return
            try:
                _write(cache_file(), machines)
            except (OSError, RuntimeError) as error:
                self._warn(error)

    def _warn(self, reason) -> None:
        """Once in a process."""
        if self._warned:
            return
        self._warned = True
        with contextlib.suppress(RuntimeError):
            reason = f"{cache_file()}: {reason}"
        warnings.warn(
            f"Bastile's cache of measured kernels is not used ({reason}), and they are measured again. A file that is damaged is "
            "replaced. Where none can be written, set the environment variable BASTILE_CACHE to a folder where it can",
            RuntimeWarning,
            stacklevel=2,
        )


tuner = Tuner()


def warm_up_models(run: Callable, model, sizes_of: Callable, family: Sequence) -> None:
    """`warm_up` for a model on each of its GPUs and in each of its dtypes, or without one for the sizes of a family, in bf16 on the
    current GPU. On a CPU there is nothing to load.

    run: called with device, dtype, sizes and tokens=...; sizes_of: the sizes of a model.
    """
    if model is None:
        if not torch.cuda.is_available():
            return
        cases = [(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, sizes) for sizes in family]
    else:
        sizes = sizes_of(model)
        found = {(parameter.device, parameter.dtype) for parameter in model.parameters()}
        cases = [(device, dtype, sizes) for device, dtype in found if device.type == "cuda" and dtype in DTYPES]
    with torch.enable_grad():
        for device, dtype, sizes in cases:
            warm_up(partial(run, device, dtype, sizes), device)


def warm_up(run: Callable[[int], object], device) -> None:
    """Loads the kernels that run(tokens) launches on a device, and times candidates that were not measured on this GPU.

    run: works through a model's operations, forward and backward, and keeps nothing.
    """
    tuner.start()
    run(TOKENS)
    if tuner.incomplete:
        with tuner.measuring():
            _run_timed(run, torch.device(device))


def _run_timed(run, device: torch.device) -> None:
    for tokens in TIMED_TOKENS:
        try:
            run(tokens)
            return
        except torch.cuda.OutOfMemoryError:
            pass
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
    warnings.warn(
        f"{device} has too little free memory to measure which kernels are the fastest: the default ones run", RuntimeWarning, stacklevel=4
    )


def clear_autotune_cache() -> None:
    """Forgets which kernels were measured to be the fastest, in this process and on disk. From then on the default ones run, until
    the next `warmup_all_kernels`. Raises OSError when the cache file cannot be removed."""
    tuner.forget()


def run_backward(*results: Any) -> None:
    """Runs the backward pass of an operation's results, each with a gradient of ones."""
    torch.autograd.backward([result.sum() for result in results])
