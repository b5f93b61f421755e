"""Measure what operations should reach, in one run: `python -m benchmark.limits [group_norm ...] --budget-s 280`, for Liger's by default.

Of every shape that a declaration names as a `Limit`, forward and backward: the share of the floor, the speed beside the fastest peer and
beside Liger, and what a call of a small size costs the host. Results and gradients are checked against float64 first, at fewer tokens.
torch.compile takes part at an operation's first shape, after all others have been measured, while there is time. The rows go to
<gpu>/limits.csv, and the table is printed last; in it, what is not reached has an exclamation mark.
"""

import dataclasses
import time
from functools import partial
from statistics import geometric_mean

import torch
from tabulate import tabulate

from . import harness, models, records, registry, rows
from .command_line import OutOfTime, Settings, operation_parser
from .correctness import check, errors, reference
from .operation import Case, Inputs, Limit, Operation, Random, timed_call
from .providers import FLOOR, is_ours
from .report import log, message
from .suites import LIGER
from .timing import DeviceLost

FILE = "limits"
HOST_CALLS, HOST_ROUNDS = 20, 8


def case_of(operation: Operation, limit: Limit) -> Case:
    """Return the case that stands in the rows."""
    config = {"model": models.full_name(operation.suite.model), "tokens": limit.tokens, **limit.size}
    return Case(("shape", "shape", limit.title), config, ())


def host_microseconds(function, inputs, settings: Settings) -> float:
    """Return what one call, forward and backward, costs the host, the least of a few rounds. The device is not waited for."""
    call = timed_call(function, inputs, "full")
    if settings.clock.cuda:
        return settings.clock.host_microseconds(call, HOST_CALLS, HOST_ROUNDS)
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


def log_smallest_host_time(settings: Settings) -> None:
    """Say what a call of an autograd function that does nothing costs the host: PyTorch's own part of every number."""
    x = torch.ones(64, 64, device=settings.device)
    found = host_microseconds(_Nothing.apply, Inputs((x,), (), (x,)).copy(), settings)
    log(f"an autograd function that does nothing: {found:.0f} us of the host's time, forward and backward")


class Run:
    """One run over operations. functions: of the providers that are right, by operation and dtype."""

    def __init__(self, args):
        self.settings = Settings.of(args, LIGER)
        self.found: list = []

    def of_dtype(self, dtype: str) -> Settings:
        settings = dataclasses.replace(self.settings, dtype_name=dtype)
        settings.clock = self.settings.clock
        return settings

    def save(self, new: list) -> None:
        self.found += new
        rows.save(self.settings.results, FILE, new)

    def right_functions(self, operation: Operation, limit: Limit, compiles: bool) -> dict:
        """Return the functions of the providers that are here and right at a small size, and say what each costs the host."""
        settings, case = self.of_dtype(limit.dtype), case_of(operation, limit)
        inputs = limit.draw(operation, limit.checked, Random(settings.device, settings.dtype, 0))
        exact, right = reference(operation, inputs), {}
        row = partial(rows.case_row, operation, case, settings)

        def attempt(provider: str) -> None:
            function = operation.load(provider)
            if not compiles:  # each shape is compiled anew
                check(errors(operation, function, inputs.copy(), exact), settings.dtype, operation.bounds)
                host = host_microseconds(function, inputs.copy(), settings)
                self.save([row(provider, "full", "host_time", "us", host, at_tokens=limit.checked)])
            right[provider] = function

        for provider in operation.providers:
            if provider not in settings.providers or (provider == "torch_compile") != compiles:
                continue
            failure = harness.failure_of(provider, attempt)
            if failure is not None:
                self.save([row(provider, "full", "speed", "us", failure)])
                settings.clock.clean()
        return right

    def measure(self, operation: Operation, compiles: bool = False) -> None:
        """Measure one operation at all its shapes; torch.compile alone, or all but it."""
        functions: dict = {}
        for limit in operation.limits[:1] if compiles else operation.limits:
            self.settings.check_time()
            log(f"\n{operation.title}: {limit.title}")
            if limit.dtype not in functions:
                functions[limit.dtype] = self.right_functions(operation, limit, compiles)
            settings = self.of_dtype(limit.dtype)
            if not functions[limit.dtype]:
                continue
            inputs = limit.draw(operation, limit.tokens, Random(settings.device, settings.dtype, 1))
            timed = harness.time_mode(operation, case_of(operation, limit), settings, functions[limit.dtype], inputs, "full")
            self.save([r for r in timed if not (compiles and r.kernel_provider == FLOOR)])
            del inputs, timed
            settings.clock.clean()

    def all(self, operations: list[Operation]) -> None:
        for compiles in (False, True) if self.settings.compile else (False,):
            for operation in operations:
                if compiles and "torch_compile" not in operation.providers:
                    continue
                try:
                    self.measure(operation, compiles)
                except OutOfTime:
                    log(f"  {operation.title}: skipped, the time budget is spent")
                except DeviceLost as error:
                    log(f"  the device does not answer any more, nothing after this is measured: {error}")
                    return
                except Exception as error:
                    log(f"  cannot be measured: {message(error)}")
                    self.settings.clock.clean()


def numbers(found: list, metric: str, operation: Operation, limit: Limit) -> dict[str, float]:
    """Return a metric by provider, of those that have it."""
    return {
        r.kernel_provider: r.y_value_50
        for r in found
        if (r.kernel_name, r.metric_name, r.x_value) == (operation.name, metric, limit.title) and r.y_value_50 is not None
    }


def cell(value: float | None, wanted: float = 0.0, percent: bool = False) -> str:
    if value is None:
        return "-"
    return (f"{value:.0%}" if percent else f"{value:.2f}") + ("!" if value < wanted else "")


def line(found: list, operation: Operation, limit: Limit) -> tuple[list[str], float | None]:
    """Return the cells of one shape, and the ratio to Liger."""
    us, host = numbers(found, "speed", operation, limit), numbers(found, "host_time", operation, limit)
    memory = numbers(found, "memory", operation, limit)
    ours = us.get("bastile")
    peers = {p: value for p, value in us.items() if p != FLOOR and not is_ours(p)}
    best = min(peers, key=lambda p: peers[p]) if peers else None
    of_floor = us[FLOOR] / ours if ours and FLOOR in us else None
    of_best = peers[best] / ours if ours and best else None
    of_liger = us["liger"] / ours if ours and "liger" in us else None
    times = [f"{us[p]:.1f}" if p in us else "-" for p in (FLOOR, "bastile", "liger")]
    both = [f"{table[p]:.0f}" if p in table else "-" for table in (host, memory) for p in ("bastile", "liger")]
    share = cell(of_floor, limit.share, percent=True)
    cells = [operation.name, limit.title, *times, share, cell(of_best, limit.peer), best or "-", cell(of_liger, limit.liger), *both]
    return cells, of_liger


def table(found: list, operations: list[Operation]) -> str:
    """Return all shapes, and the geometric mean of the operations' ratios to Liger (each the geometric mean of its shapes)."""
    head = ["operation", "shape", "floor us", "ours us", "Liger us", "of floor", "x best peer", "which", "x Liger"]
    head += ["host us", "Liger", "MiB", "Liger"]
    body, means = [], []
    for operation in operations:
        lines = [line(found, operation, limit) for limit in operation.limits]
        body += [cells for cells, _ in lines]
        if ratios := [ratio for _, ratio in lines if ratio]:
            means.append(geometric_mean(ratios))
    mean = f"{geometric_mean(means):.2f}" if means else "-"
    text = tabulate(body, head, tablefmt="plain", disable_numparse=True)
    return f"{text}\ngeometric mean over {len(means)} operations, times as fast as Liger: {mean}"


def main(arguments=None) -> list:
    known = {name: operation for name, operation in registry.operations().items() if operation.limits}
    p = operation_parser(__doc__.partition("\n")[0], *known.values())
    p.add_argument("operations", nargs="*", metavar="operation", help=f"of {', '.join(known)}; without any, all")
    p.set_defaults(ms=30.0)
    args = p.parse_args(arguments)
    unknown = set(args.operations) - set(known)
    if unknown:
        p.error(f"operation is {', '.join(sorted(unknown))}, expected some of {', '.join(known)}")
    operations = [known[name] for name in args.operations or known]
    log(f"{records.gpu_name(args.device)}, {records.package_version()}, {records.environment()}")
    run = Run(args)
    log_smallest_host_time(run.settings)
    run.all(operations)
    log("\n" + table(run.found, operations))
    return run.found


if __name__ == "__main__":
    main()
