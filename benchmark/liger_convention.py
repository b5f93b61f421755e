"""Operations as Liger-Kernel's own benchmarks measure them, for rows that can lie beside theirs.

One set of inputs, the L2 flushed before each call, 10 ms of calls, median with the 20 % and 80 % quantiles, in ms; backward passes by
`backward` over one graph that is kept, the `.grad` of the first leaf cleared before each call and those of the others added up; memory
is all that is allocated at the peak of a call, inputs included, in MB of 2**20 bytes. Results go to <gpu>/liger/all_benchmark_data.csv
with the columns of Liger-Kernel's file of that name. What is measured was checked against float64 at the operation's own inputs.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from . import records, rows
from .command_line import DTYPES, OutOfTime, Settings
from .memory import MiB, peak_bytes
from .operation import Case, Inputs, LigerConvention, Operation, Random, as_tuple
from .report import log, message
from .timing import Quantiles

WARMUP_MS, CALLS_MS = 25.0, 10.0


def convention_of(operation: Operation) -> LigerConvention:
    """Return what the operation declares. Raise ValueError where it declares nothing."""
    if operation.liger is None:
        raise ValueError(f"{operation.name} does not say how Liger-Kernel measures it; its declaration has no liger=LigerConvention(...)")
    return operation.liger


def draw_inputs(operation: Operation, case: Case, settings: Settings) -> Inputs:
    """Return the inputs of Liger's script: its own where it has some, in its dtype."""
    convention = convention_of(operation)
    dtype = DTYPES[convention.dtype or settings.dtype_name]
    make = convention.inputs or operation.inputs
    return make(*case.arguments, Random(settings.device, dtype, 0)).copy()


def calls_of(operation: Operation, function: Callable, inputs: Inputs) -> dict[str, Callable]:
    """Return the call of each mode. What lies before the operation is done here, once."""
    convention = convention_of(operation)
    function = convention.around(function) if convention.around else function
    arguments = as_tuple(convention.before(*inputs.leaves)) if convention.before else inputs.leaves

    def forward():
        return function(*arguments, *inputs.others)

    def differentiate(outputs):
        outputs = as_tuple(outputs)[: convention.differentiated]
        gradients = inputs.output_gradients[: len(outputs)] or None
        torch.autograd.backward(outputs, gradients, retain_graph=True)

    def no_grad_forward():
        with torch.no_grad():
            return forward()

    kept: list = []  # the outputs of the one forward pass

    def backward():
        if not kept:
            kept.append(forward())
        differentiate(kept[0])

    return {"forward": forward, "backward": backward, "full": lambda: differentiate(forward()), "no_grad_forward": no_grad_forward}


def milliseconds(call: Callable, leaf: torch.Tensor, settings: Settings) -> Quantiles:
    """Return the quantiles of the milliseconds of a call. leaf: whose `.grad` is cleared before each."""
    clock = settings.clock

    def sample() -> float:
        leaf.grad = None
        clock.flush_cache()
        return clock.unhidden_microseconds(call) / 1e3

    call()
    one = max(sum(sample() for _ in range(3)) / 3, 1e-4)
    for _ in range(int(min(WARMUP_MS / one, 1000))):
        call()
    return Quantiles.of([sample() for _ in range(max(1, int(min(CALLS_MS / one, 1000))))])


def measure(operation: Operation, case: Case, settings: Settings, provider: str, function: Callable) -> list:
    """Return the rows of one provider: speed and memory of each mode."""
    row = partial(rows.liger_row, operation, case, settings, provider, dtype=convention_of(operation).dtype or settings.dtype_name)
    inputs = draw_inputs(operation, case, settings)
    calls, found = calls_of(operation, function, inputs), []
    for mode in settings.modes_of(operation):
        settings.check_time()
        speed = milliseconds(calls[mode], inputs.leaves[0], settings)
        found.append(row(mode=mode, metric="speed", value=speed))
        peak = peak_bytes(calls[mode], settings.clock.cuda, inputs_included=True)
        if peak is not None:
            found.append(row(mode=mode, metric="memory", value=peak / MiB))
        log(f"  {provider:<16}{mode:<16}{speed.median:>10.3f} ms{'' if peak is None else f'{peak / MiB:>10.0f} MB'}")
    return found


def run_case(operation: Operation, case: Case, settings: Settings, functions: dict[str, Callable]) -> list:
    """Measure providers at one shape, one after the other, save everything, and return the rows. functions: of those that are right."""
    convention = convention_of(operation)
    if case.x[0] == "tokens":
        case = dataclasses.replace(case, x=(convention.x_name, convention.x_label, case.x[2]))
    log(f"  by Liger-Kernel's convention, {case.title}")
    row, found = partial(rows.liger_row, operation, case, settings), []
    for provider, function in functions.items():
        failure, mine = None, []
        try:
            mine = measure(operation, case, settings, provider, function)
        except OutOfTime:
            raise
        except Exception as error:
            failure = error.with_traceback(None)  # whose frames hold tensors
        if failure is not None:
            log(f"  {provider} fails: {message(failure)}")
            mine = [row(provider, mode, "speed", failure) for mode in settings.modes_of(operation)]
        settings.clock.clean()
        rows.save(settings.results, records.LIGER_FILE.with_suffix(""), mine)
        found += mine
    return found
