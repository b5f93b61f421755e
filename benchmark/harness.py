"""The runs of the operations' benchmarks: declarations say what is computed, this compares it.

For every case: inputs are drawn afresh, each provider's results and gradients are checked against float64, those that are right
are timed in turns with the floor (what the device needs for the bytes or FLOPs alone, measured in the same run), and everything
goes into a CSV file under benchmark/results/<gpu>/. A provider that fails or refuses has a row that says why.
"""

import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial

from . import liger_convention, records, rows
from .command_line import OutOfTime, Settings, operation_parser
from .correctness import check, errors, reference
from .floors import floor_call
from .memory import MiB, peak_bytes
from .operation import Case, Inputs, Operation, Random, timed_call
from .providers import FLOOR, NotInstalled
from .report import log, message, print_speeds
from .timing import ROTATED, DeviceLost, nothing

MAX_SETS = 16


def draw_inputs(operation: Operation, case: Case, settings: Settings) -> Inputs:
    """Return the inputs of a case, the same in every run."""
    seed = zlib.crc32(" ".join(map(str, (operation.name, *case.config.values()))).encode())
    return operation.inputs(*case.arguments, Random(settings.device, settings.dtype, seed))


def load_checked(operation: Operation, case: Case, settings: Settings, inputs: Inputs, found_rows: list) -> dict[str, Callable]:
    """Return the functions of the providers that are here and right. Add rows for their errors, and for those that fail."""
    work = inputs.copy()
    exact = reference(operation, inputs)
    row = partial(rows.case_row, operation, case, settings)
    right = {}

    def attempt(provider: str) -> None:
        function = operation.load(provider)
        work.restore(inputs)
        found = errors(operation, function, work, exact)
        for name, error in found.items():
            found_rows.append(row(provider, "full", f"error_{name}", "relative", error))
            if name in exact.rounding:
                found_rows.append(row(provider, "full", f"error_{name}_ratio", "of one GEMM's", error / exact.rounding[name]))
        check(found, settings.dtype, operation.bounds)
        right[provider] = function

    for provider in settings.providers_of(operation, case):
        settings.check_time()
        failure = failure_of(provider, attempt)
        if failure is not None:
            found_rows += [row(provider, mode, "speed", "us", failure) for mode in settings.modes_of(operation)]
            settings.clock.clean()
    return right


def failure_of(provider: str, attempt: Callable[[str], None]) -> Exception | None:
    """Attempt something with a provider, and return what it fails with; None where it succeeds or is not installed."""
    try:
        attempt(provider)
    except (NotInstalled, ModuleNotFoundError) as error:
        log(f"  {provider} is left out: {error}")
    except Exception as error:
        log(f"  {provider} fails: {message(error)}")
        return error.with_traceback(None)  # whose frames hold tensors
    return None


def buffer_sets(inputs: Inputs, settings: Settings) -> list[Inputs]:
    """Return copies of the inputs to work on: one, or so many that the L2 holds none of them until its next turn."""
    count = 1
    if settings.timing in ROTATED:
        count = min(max(2, 4 * settings.clock.l2_bytes() // inputs.nbytes + 1), MAX_SETS)
    return [inputs.copy() for _ in range(count)]


def time_mode(operation: Operation, case: Case, settings: Settings, functions: dict[str, Callable], inputs: Inputs, mode: str) -> list:
    """Return rows for speed and memory of all providers in one mode."""
    clock, row = settings.clock, partial(rows.case_row, operation, case, settings)
    sets = buffer_sets(inputs, settings)

    def restore() -> None:
        for each in sets:
            each.restore(inputs)

    before = restore if operation.writes_inputs else nothing
    calls, found_rows = {}, []
    makers = {p: partial(timed_call, f, mode=mode) for p, f in functions.items()}
    makers[FLOOR] = partial(floor_call, operation, mode=mode)
    for provider, make in makers.items():
        failure = None
        try:
            calls[provider] = [make(inputs=each) for each in sets]
        except Exception as error:
            failure = error.with_traceback(None)
        if failure is not None:
            found_rows.append(row(provider, mode, "speed", "us", failure))
            clock.clean()
    for provider, found in clock.measure(calls, before, settings.rounds).items():
        work = operation.work(inputs, mode)
        found_rows.append(row(provider, mode, "speed", "us", found, nbytes=work.nbytes, flops=work.flops))
        if provider == FLOOR or isinstance(found, Exception):
            continue
        before()
        peak = peak_bytes(calls[provider][0], clock.cuda)
        if peak is not None:
            found_rows.append(row(provider, mode, "memory", "MiB", peak / MiB))
    return found_rows


def run_case(operation: Operation, case: Case, settings: Settings) -> list:
    """Measure one operation at one shape by its conventions, print and save everything, and return the rows."""
    log(f"\n{operation.title}: {case.title}, {settings.dtype_name}")
    found_rows: list = []
    inputs = draw_inputs(operation, case, settings)
    try:
        functions = load_checked(operation, case, settings, inputs, found_rows)
    finally:
        rows.save(settings.results, operation.csv_name, found_rows)
    conventions = settings.conventions_of(operation)
    for mode in settings.modes_of(operation) if "alone" in conventions else ():
        settings.check_time()
        timed = time_mode(operation, case, settings, functions, inputs, mode)
        print_speeds(operation.work(inputs, mode), mode, timed)
        rows.save(settings.results, operation.csv_name, timed)
        found_rows += timed
    del inputs
    settings.clock.clean()
    if "liger" in conventions:
        found_rows += liger_convention.run_case(operation, case, settings, functions)
    return found_rows


def run_case_or_report(operation: Operation, case: Case, settings: Settings) -> list:
    """Measure a case. One that cannot be run at all, for want of memory, say, does not end the run."""
    try:
        return run_case(operation, case, settings)
    except (OutOfTime, DeviceLost):
        raise
    except Exception as error:
        log(f"  cannot be measured: {message(error)}")
    settings.clock.clean()
    return []


def run_operation(operation: Operation, settings: Settings, args) -> list:
    """Measure all cases of an operation that the command line names."""
    found: list = []
    conventions = settings.conventions_of(operation)
    if "liger" in settings.conventions and "liger" not in conventions:
        log(f"\n{operation.title} does not say how Liger-Kernel measures it, so it is left out there")
    for case in operation.cases(args) if conventions else ():
        settings.check_time()
        found += run_case_or_report(operation, case, settings)
    if operation.extra and "alone" in conventions:
        found += operation.extra(settings, args)
    return found


def run(operations: Iterable[Operation], args) -> list:
    """Measure operations, and return all rows. A slow one does not take the time of those after it."""
    operations, found = list(operations), []
    settings_of = {suite: Settings.of(args, suite) for suite in dict.fromkeys(operation.suite for operation in operations)}
    log(f"{records.gpu_name(args.device)}, {records.package_version()}, {records.environment()}")
    end = time.monotonic() + args.budget_s
    for done, operation in enumerate(operations):
        settings, now = settings_of[operation.suite], time.monotonic()
        settings.deadline = now + (end - now) / (len(operations) - done)
        try:
            found += run_operation(operation, settings, args)
        except OutOfTime:
            log(f"  {operation.title}: the rest is skipped, the time budget is spent")
        except DeviceLost as error:
            log(f"  the device does not answer any more, nothing after this is measured: {error}")
            break
    return found


def main(*operations: Operation, arguments=None) -> list:
    """Run the command line of an operation's file."""
    p = operation_parser(f"Benchmark of {', '.join(o.title for o in operations)}.", *operations)
    return run(operations, p.parse_args(arguments))
