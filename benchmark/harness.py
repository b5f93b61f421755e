"""The harness of the operations' benchmarks: one file an operation says what is computed, this says how it is compared.

For every size: inputs are drawn afresh, each provider's results and gradients are checked against float64, those that are right
are timed in turns with the floor (what the device needs for the bytes or FLOPs alone, measured in the same run), and everything
goes into a CSV file under benchmark/results/<gpu>/. A provider that fails or refuses has a row that says why.
"""

import argparse
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from . import models, providers, records
from .records import Row
from .timing import TIMINGS, Clock, DeviceLost, Quantiles, copy_call, nothing, relative_error

try:
    from kernels.benchmark import Benchmark
except ImportError:  # only `kernels benchmark` needs it

    class Benchmark:  # type: ignore[no-redef]
        seed: int | None = None
        device: str = "cpu"


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# A provider beyond this computes something else. How well it rounds is what the error rows say.
WRONG = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}
ORDER = ("huggingface", "torch", "torch_compile", "liger", "liger_cutedsl", "bastile", "liger_cutile")
MODES = ("forward", "backward", "full", "no_grad_forward")
MiB = 2**20

Tensors = tuple[torch.Tensor, ...]


class OutOfTime(Exception):
    """The run's time budget is spent."""


class Random:
    """Draws inputs."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
        return drawn.mul_(scale).add_(shift) if (scale, shift) != (1.0, 0.0) else drawn

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)


@dataclass
class Inputs:
    """Arguments of an operation, and the gradients that arrive at its outputs (none for a loss).

    leaves: what it is differentiated in; the first is an activation. others: the rest of its arguments.
    """

    leaves: Tensors
    others: Tensors = ()
    gradients: Tensors = ()

    def copy(self) -> "Inputs":
        leaves = tuple(t.detach().clone().requires_grad_() for t in self.leaves)
        return Inputs(leaves, self.others, tuple(t.clone() for t in self.gradients))

    def restore(self, original: "Inputs") -> None:
        """Undoes what a provider wrote into them, without autograd noticing."""
        for mine, theirs in zip(self.leaves + self.gradients, original.leaves + original.gradients, strict=True):
            mine.data.copy_(theirs.data)

    def exact(self) -> "Inputs":
        leaves = tuple(t.detach().double().requires_grad_() for t in self.leaves)
        others = tuple(t.double() if t.is_floating_point() else t for t in self.others)
        return Inputs(leaves, others, tuple(t.double() for t in self.gradients))

    def scaled(self, factor: float) -> "Inputs":
        leaves = tuple((t.detach() * factor).requires_grad_() for t in self.leaves)
        return Inputs(leaves, self.others, tuple(t * factor for t in self.gradients))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.leaves + self.gradients)


@dataclass(frozen=True)
class Work:
    """The least that a call can do: bytes through memory, or floating-point operations of matrix products."""

    nbytes: int = 0
    flops: int = 0

    def rate(self, microseconds: float) -> str:
        if self.flops:
            return f"{self.flops / microseconds * 1e-6:.0f} TFLOP/s"
        return f"{self.nbytes / microseconds * 1e-3:.0f} GB/s"


@dataclass
class Exact:
    """Results in float64. baseline: the errors that cannot be avoided, by the name of the gradient."""

    outputs: Tensors
    gradients: Tensors
    baseline: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """What is compared.

    inputs(size, tokens, random) -> Inputs; formula: in PyTorch, in any dtype; ours(kernel): the function of a loaded package;
    loaders: of the other providers (providers.py); work(inputs, mode) -> Work; floor(inputs, mode) -> a call that does only that.
    exact(inputs) -> Exact where differentiating the formula in float64 would take too much memory. bounds: the errors of results that
    the model's own code has less exact than `WRONG` allows, by name.
    """

    name: str
    title: str
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    inputs: Callable[[models.Size, int, Random], Inputs]
    formula: Callable
    ours: Callable
    loaders: dict[str, Callable[[], Callable]]
    work: Callable[[Inputs, str], Work]
    floor: Callable[[Inputs, str], Callable] | None = None
    exact: Callable[[Inputs], Exact] | None = None
    modes: tuple[str, ...] = ("forward", "backward", "full")
    bounds: dict[str, float] = field(default_factory=dict)
    writes_inputs: bool = True  # some provider writes into its inputs or into the gradients that arrive
    file: str = ""

    def load(self, provider: str) -> Callable:
        if provider == "bastile":
            return self.ours(providers.package())
        if provider == "huggingface":
            return self.formula
        if provider == "torch_compile":
            return providers.compiled(self.formula)
        return self.loaders[provider]()

    @property
    def providers(self) -> tuple[str, ...]:
        return tuple(p for p in ORDER if p in ("huggingface", "torch_compile", "bastile") or p in self.loaders)

    def floor_call(self, inputs: Inputs, mode: str) -> Callable:
        if self.floor:
            return self.floor(inputs, mode)
        return copy_call(self.work(inputs, mode).nbytes, str(inputs.leaves[0].device))

    def reference(self, inputs: Inputs) -> Exact:
        if self.exact:
            return self.exact(inputs)
        exact = inputs.exact()
        outputs = as_tuple(self.formula(*exact.leaves, *exact.others))
        gradients = torch.autograd.grad(outputs, exact.leaves, exact.gradients or None)
        return Exact(tuple(t.detach() for t in outputs), gradients)


def as_tuple(result) -> Tensors:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def passes(forward: int, backward: int, of: Callable[[Inputs], int]) -> Callable[[Inputs, str], Work]:
    """Work of an operation that reads or writes each of some equally large tensors once; of(inputs): bytes of one.

    Weights, cos, sin and statistics, together a few percent at most, are left out, so the floor is a little low.
    """

    def work(inputs: Inputs, mode: str) -> Work:
        return Work(nbytes={"forward": forward, "backward": backward, "full": forward + backward}[mode] * of(inputs))

    return work


def bind(function: Callable, inputs: Inputs, mode: str) -> Callable:
    """The call that is timed."""
    arguments = (*inputs.leaves, *inputs.others)
    arriving = inputs.gradients or None

    def forward():
        return function(*arguments)

    def full():
        return torch.autograd.grad(as_tuple(function(*arguments)), inputs.leaves, arriving)

    def no_grad_forward():
        # As in an evaluation: activations carry no history, weights still say that they want gradients.
        with torch.no_grad():
            return function(arguments[0].detach(), *arguments[1:])

    def backward():
        return torch.autograd.grad(outputs, inputs.leaves, arriving, retain_graph=True)

    if mode == "backward":
        outputs = as_tuple(function(*arguments))
    return {"forward": forward, "full": full, "no_grad_forward": no_grad_forward, "backward": backward}[mode]


def errors(operation: Operation, function: Callable, inputs: Inputs, exact: Exact) -> dict[str, float]:
    """Relative errors of a provider's outputs and gradients, by name."""
    outputs = as_tuple(function(*inputs.leaves, *inputs.others))
    found = {n: relative_error(o.detach(), e) for n, o, e in zip(operation.outputs, outputs, exact.outputs, strict=True)}
    gradients = torch.autograd.grad(outputs, inputs.leaves, inputs.gradients or None)
    return found | {n: relative_error(g, e) for n, g, e in zip(operation.gradients, gradients, exact.gradients, strict=True)}


def message(error: BaseException) -> str:
    """An exception in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}".rstrip(": ")


def split(value: Quantiles | float | Exception | None) -> tuple[tuple[float | None, ...], dict[str, str]]:
    """A row's three numbers, and in its configuration why it has none."""
    if isinstance(value, Exception):
        return (None, None, None), {"error": message(value)}
    if isinstance(value, Quantiles):
        return (value.median, value.low, value.high), {}
    return (value, value, value), {}


@dataclass
class Case:
    """One operation at one size."""

    operation: Operation
    model: str
    tokens: int
    by_model: bool  # is the model what the sweep varies

    def inputs(self, settings: "Settings") -> Inputs:
        seed = zlib.crc32(f"{self.operation.name} {self.model} {self.tokens}".encode())
        return self.operation.inputs(models.size(self.model), self.tokens, Random(settings.device, settings.dtype, seed))

    def row(self, settings: "Settings", provider: str, mode: str, metric: str, unit: str, value=None, **config) -> Row:
        """value: Quantiles, a number, an exception, or None for nothing."""
        numbers, error = split(value)
        x = ("model", "Qwen3 model", self.model) if self.by_model else ("tokens", "tokens", str(self.tokens))
        known = {"model": self.model, "tokens": self.tokens, "dtype": settings.dtype_name, "timing": settings.timing}
        extra = json.dumps({**known, **config, **error, **records.environment()}, sort_keys=True)
        return Row(self.operation.name, provider, mode, metric, unit, *x, *numbers, extra, records.gpu_name(settings.device))


@dataclass
class Settings:
    device: str = "cpu"
    dtype_name: str = "bf16"
    timing: str = "device"
    milliseconds: float = 50.0
    rounds: int = 2
    providers: tuple[str, ...] = ORDER
    modes: tuple[str, ...] = ()
    compile_tokens: tuple[int, ...] = ()
    results: Path | None = None
    deadline: float = float("inf")

    def __post_init__(self):
        self.clock = Clock(self.device, self.timing, self.milliseconds)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


def say(text: str = "") -> None:
    print(text, flush=True)


def wanted(case: Case, settings: Settings) -> list[str]:
    """Providers of a case. torch.compile takes seconds a size, so it has sizes of its own."""
    compiles = case.tokens in settings.compile_tokens
    return [p for p in case.operation.providers if p in settings.providers and (p != "torch_compile" or compiles)]


def load_checked(case: Case, settings: Settings, inputs: Inputs, rows: list[Row]) -> dict[str, Callable]:
    """The providers that are here and right. Adds rows for their errors, and for those that fail."""
    operation, work = case.operation, inputs.copy()
    exact = operation.reference(inputs)
    right = {}

    def attempt(provider: str) -> None:
        function = operation.load(provider)
        work.restore(inputs)
        found = errors(operation, function, work, exact)
        for name, error in found.items():
            rows.append(case.row(settings, provider, "full", f"error_{name}", "relative", error))
            if name in exact.baseline:
                ratio = error / exact.baseline[name]
                rows.append(case.row(settings, provider, "full", f"error_{name}_ratio", "of one GEMM's", ratio))
        bounds = {name: operation.bounds.get(name, WRONG[settings.dtype]) for name in found}
        worst = max(found, key=lambda name: found[name] / bounds[name])
        if not found[worst] <= bounds[worst]:
            raise ArithmeticError(f"wrong result: {worst} is off by {found[worst]:.1e}, expected at most {bounds[worst]:.0e}")
        right[provider] = function

    for provider in wanted(case, settings):
        settings.check_time()
        failure = None
        try:
            attempt(provider)
        except (providers.NotInstalled, ModuleNotFoundError) as error:
            say(f"  {provider} is left out: {error}")
        except Exception as error:
            failure = error.with_traceback(None)
        if failure is not None:
            say(f"  {provider} fails: {message(failure)}")
            rows += [case.row(settings, provider, mode, "speed", "us", failure) for mode in case_modes(case, settings)]
            settings.clock.clean()
    return right


def case_modes(case: Case, settings: Settings) -> list[str]:
    return [mode for mode in case.operation.modes if not settings.modes or mode in settings.modes]


def buffer_sets(inputs: Inputs, settings: Settings) -> list[Inputs]:
    """Copies of the inputs to work on: one, or for graphs so many that the L2 holds none of them until its next turn."""
    count = 1
    if settings.timing == "graph":
        count = min(max(2, 4 * settings.clock.l2_bytes() // inputs.nbytes + 1), 16)
    return [inputs.copy() for _ in range(count)]


def time_mode(case: Case, settings: Settings, functions: dict[str, Callable], inputs: Inputs, mode: str) -> list[Row]:
    """Speed and memory of all providers in one mode."""
    operation, clock = case.operation, settings.clock
    sets = buffer_sets(inputs, settings)
    restore = (lambda: sets[0].restore(inputs)) if operation.writes_inputs else nothing
    calls, rows = {}, []
    makers = {p: partial(bind, f, mode=mode) for p, f in functions.items()}
    makers["floor"] = partial(operation.floor_call, mode=mode)
    for provider, make in makers.items():
        failure = None
        try:
            calls[provider] = [make(each) for each in sets]
        except Exception as error:
            failure = error.with_traceback(None)
        if failure is not None:
            rows.append(case.row(settings, provider, mode, "speed", "us", failure))
            clock.clean()
    for provider, found in clock.measure(calls, restore, settings.rounds).items():
        work = operation.work(inputs, mode)
        rows.append(case.row(settings, provider, mode, "speed", "us", found, nbytes=work.nbytes, flops=work.flops))
        if provider == "floor" or isinstance(found, Exception):
            continue
        restore()
        peak = clock.peak_bytes(calls[provider][0])
        if peak is not None:
            rows.append(case.row(settings, provider, mode, "memory", "MiB", peak / MiB))
    return rows


def run_case(case: Case, settings: Settings) -> list[Row]:
    """Everything about one operation at one size, printed and saved."""
    operation = case.operation
    rows: list[Row] = []
    say(f"\n{operation.title}: {case.model}, {case.tokens} tokens, {settings.dtype_name}")
    inputs = case.inputs(settings)
    try:
        functions = load_checked(case, settings, inputs, rows)
    finally:
        save(operation, settings, rows)
    for mode in case_modes(case, settings):
        settings.check_time()
        timed = time_mode(case, settings, functions, inputs, mode)
        print_table(operation.work(inputs, mode), mode, timed)
        save(operation, settings, timed)
        rows += timed
    settings.clock.clean()
    return rows


def run_case_or_say(case: Case, settings: Settings) -> list[Row]:
    """A case that cannot be run at all, for want of memory, say, does not end the run."""
    try:
        return run_case(case, settings)
    except (OutOfTime, DeviceLost):
        raise
    except Exception as error:
        say(f"  cannot be measured: {message(error)}")
    settings.clock.clean()
    return []


def speed_row(args, kernel: str, provider: str, mode: str, x: tuple[str, str, str], value: Quantiles | Exception, **config) -> Row:
    """Microseconds of what is no `Operation`. args: of `model_parser`; x: name, label and value."""
    numbers, error = split(value)
    known = {"model": models.full_name(args.model), "layers": args.layers}
    extra = json.dumps({**known, **config, **error, **records.environment()}, sort_keys=True)
    return Row(kernel, provider, mode, "speed", "us", *x, *numbers, extra, records.gpu_name(args.device))


def model_parser(description: str, name: str, milliseconds: float) -> argparse.ArgumentParser:
    """The command line of a benchmark of few layers of a model. name: of its CSV file; milliseconds: unless told otherwise."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--model", default="qwen3_8b", help=f"sizes: {', '.join(models.SIZES)}")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--device", default=default_device())
    p.add_argument("--ms", type=float, default=milliseconds, help="milliseconds of calls for each number")
    p.add_argument("--rounds", type=int, default=2, help="turns that the providers take")
    p.add_argument("--results", type=Path, help=f"folder for <gpu>/{name}.csv; on a CPU nothing is written without it")
    return p


def save_rows(args, name: str, rows: list[Row]) -> None:
    """Of a benchmark with the command line of `model_parser`."""
    write(results_of(args), name, rows)


def save(operation: Operation, settings: Settings, rows: list[Row]) -> None:
    write(settings.results, operation.file or operation.name, rows)


def write(results: Path | None, name: str, rows: list[Row]) -> None:
    """Into <gpu>/<name>.csv of a folder of results, where there is one."""
    if results and rows:
        records.write(results / records.slug(rows[0].gpu_name) / f"{name}.csv", rows)


def results_of(args) -> Path | None:
    """The folder that the command line names, or on a GPU the repository's."""
    return args.results or (records.RESULTS if args.device.startswith("cuda") else None)


def print_table(work: Work, mode: str, rows: list[Row]) -> None:
    """One line a provider: time, rate, share of the floor, how many times faster than the best of the others, memory."""
    speed = {r.kernel_provider: r for r in rows if r.metric_name == "speed"}
    memory = {r.kernel_provider: r.y_value_50 for r in rows if r.metric_name == "memory"}
    floor = speed["floor"].y_value_50 if "floor" in speed else None
    peers = [r.y_value_50 for p, r in speed.items() if p not in ("bastile", "floor") and r.y_value_50]
    say(f"  {mode:<16}{'us':>10}{'20%':>10}{'80%':>10}{'rate':>14}{'of floor':>10}{'vs best peer':>14}{'MiB':>9}")
    for provider, row in speed.items():
        if row.y_value_50 is None:
            say(f"  {provider:<16}{row.error}")
            continue
        us = row.y_value_50
        share = f"{floor / us:.1%}" if floor else ""
        versus = f"{min(peers) / us:.2f} x" if peers and provider != "floor" else ""
        mib = f"{memory[provider]:.0f}" if provider in memory else ""
        say(f"  {provider:<16}{us:>10.1f}{row.y_value_20:>10.1f}{row.y_value_80:>10.1f}{work.rate(us):>14}{share:>10}{versus:>14}{mib:>9}")


def cases(operation: Operation, args) -> list[Case]:
    if args.sweep_mode == "model_config":
        return [Case(operation, models.full_name(name), args.tokens[-1], True) for name in args.models]
    return [Case(operation, models.full_name(args.model), tokens, False) for tokens in args.tokens]


def run(operations, args, extras=()) -> list[Row]:
    """All cases of all operations. extras: functions of the settings that make rows of their own, by operation."""
    settings = make_settings(args)
    say(f"{records.gpu_name(settings.device)}, {records.package_version()}, {records.environment()}")
    rows: list[Row] = []
    end = settings.deadline
    for done, operation in enumerate(operations):
        # A slow operation must not take the time of those behind it.
        now = time.monotonic()
        settings.deadline = now + (end - now) / (len(operations) - done)
        try:
            for case in cases(operation, args):
                settings.check_time()
                rows += run_case_or_say(case, settings)
            for extra in extras:
                rows += extra(operation, settings, args)
        except OutOfTime:
            say(f"  {operation.title}: the rest is skipped, the time budget is spent")
        except DeviceLost as error:
            say(f"  the device does not answer any more, nothing after this is measured: {error}")
            break
    return rows


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def some_of(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    """An argument that lists names: a misspelt one must not cost a run."""

    def parse(text: str) -> tuple[str, ...]:
        found = names(text)
        if unknown := [name for name in found if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}, expected some of {', '.join(allowed)}")
        return found

    return parse


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def parser(description: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--model", default="qwen3_8b", help=f"sizes: {', '.join(models.SIZES)}")
    p.add_argument("--models", type=names, default=tuple(models.SIZES), help="of --sweep-mode model_config")
    p.add_argument("--sweep-mode", choices=("token_length", "model_config"), default="token_length")
    p.add_argument("--tokens", type=integers, help="comma-separated; model_config takes the last")
    p.add_argument("--dtype", choices=DTYPES, default="bf16")
    p.add_argument("--device", default=default_device())
    p.add_argument("--providers", type=some_of(*ORDER), default=ORDER)
    p.add_argument("--modes", type=some_of(*MODES), default=(), help="without it, all that an operation has")
    p.add_argument("--timing", choices=TIMINGS, default="device", help="see timing.py")
    p.add_argument("--ms", type=float, default=50.0, help="milliseconds of calls for each number")
    p.add_argument("--rounds", type=int, default=2, help="turns that the providers take")
    p.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    p.add_argument("--compile-tokens", type=integers, default=(8192,), help="token counts at which torch.compile takes part")
    p.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which nothing new is started")
    p.add_argument("--results", type=Path, help="folder for <gpu>/<operation>.csv; on a CPU nothing is written without it")
    return p


def make_settings(args) -> Settings:
    return Settings(
        device=args.device,
        dtype_name=args.dtype,
        timing=args.timing,
        milliseconds=args.ms,
        rounds=args.rounds,
        providers=args.providers,
        modes=args.modes,
        compile_tokens=() if args.no_compile else args.compile_tokens,
        results=results_of(args),
        deadline=time.monotonic() + args.budget_s,
    )


def main(*operations: Operation, tokens=(1024, 4096, 8192, 16384), extras=(), arguments=None) -> list[Row]:
    """The command line of an operation's file."""
    p = parser(f"Benchmark of {', '.join(o.title for o in operations)}.")
    p.set_defaults(tokens=tokens)
    return run(operations, p.parse_args(arguments), extras)


class OperationBenchmark(Benchmark):
    """What `kernels benchmark` runs. A subclass names its operation.

    Results are small (inputs are scaled), because it compares them by an absolute tolerance.
    """

    seed = 0
    operation: Operation

    def setup(self) -> None:
        gpu = self.device.startswith("cuda")
        random = Random(self.device, torch.bfloat16, self.seed or 0)
        size = models.size("qwen3_8b" if gpu else "qwen3_tiny")
        self.inputs = self.operation.inputs(size, 4096 if gpu else 32, random).scaled(0.1)
        self.reference_inputs = self.inputs.copy()
        self.function = self.operation.ours(self.kernel)

    def benchmark_forward(self) -> None:
        self.out = as_tuple(bind(self.function, self.inputs, "forward")())[0]

    def verify_forward(self) -> torch.Tensor:
        return as_tuple(bind(self.operation.formula, self.reference_inputs, "forward")())[0]

    def benchmark_full(self) -> None:
        self.out = bind(self.function, self.inputs, "full")()[0]

    def verify_full(self) -> torch.Tensor:
        return bind(self.operation.formula, self.reference_inputs, "full")()[0]
