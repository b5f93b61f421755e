"""RMSNorm of the hidden states and of queries; and what one eager call costs the host."""

from dataclasses import replace

import torch.nn.functional as F

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import eager, models, providers, rows
from .harness import draw_inputs, main
from .kernels_cli import OperationBenchmark
from .markdown import Table, by_provider, columns_of, select, times_faster
from .operation import Case, Inputs, Operation, Random, bytes_moved
from .report import log, message
from .suites import QWEN3

HOST_TOKENS = 128  # so few that the device always waits


def norm_inputs(*shape: int, random: Random) -> Inputs:
    """Draw x of a shape, a weight of its last dimension, and the gradient."""
    return Inputs(
        leaves=(random.normal(*shape), random.normal(shape[-1], scale=0.1, shift=1.0)),
        output_gradients=(random.normal(*shape),),
    )


def of_liger():
    function = providers.liger("ops.rms_norm", "LigerRMSNormFunction")
    return lambda x, weight: function.apply(x, weight, eager.EPS)


def of_liger_cutedsl():
    function = providers.liger_cutedsl("rms_norm")
    return lambda x, weight: function(x, weight, eager.EPS)


def of_liger_cutile():
    function = providers.liger_cutile("LigerRMSNormFunction")
    return lambda x, weight: function.apply(x, weight, eager.EPS)


def of_torch():
    return lambda x, weight: F.rms_norm(x, weight.shape, weight, eager.EPS)


def of_package(package):
    function = providers.operation(package, "rms_norm")
    return lambda x, weight: function(x, weight, eager.EPS)


def host_cost(settings, args) -> list:
    """Return rows for the host's microseconds in one eager call, on a tensor so small that the device always waits."""
    model = models.full_name(args.model or QWEN3.model)
    config = {"model": model, "tokens": HOST_TOKENS}
    case = Case(("tokens", "tokens", str(HOST_TOKENS)), config, (models.size(model), HOST_TOKENS))
    inputs, found = draw_inputs(RMS_NORM, case, settings), []
    for provider in ("torch", "huggingface", "liger", "bastile"):
        if provider not in settings.providers:
            continue
        for mode, working in (("forward", inputs.copy()), ("no_grad_forward", inputs)):
            try:
                function = RMS_NORM.load(provider)
                value = settings.clock.host_microseconds(lambda f=function, w=working: f(*w.leaves))
            except (providers.NotInstalled, ModuleNotFoundError):
                continue
            except Exception as error:
                value = error.with_traceback(None)
            found.append(rows.case_row(RMS_NORM, case, settings, provider, mode, "host_time", "us", value))
            text = message(value) if isinstance(value, Exception) else f"{value:.1f} us a call"
            log(f"  host, {mode:<16}{provider:<16}{text}")
    rows.save(settings.results, RMS_NORM.csv_name, found)
    return found


RMS_NORM = Operation(
    name="rms_norm",
    title="RMSNorm",
    suite=QWEN3,
    position=1,
    outputs=("y",),
    gradients=("dx", "dweight"),
    inputs=lambda size, tokens, random: norm_inputs(1, tokens, size.hidden, random=random),
    formula=eager.rms_norm,
    bastile=of_package,
    peers={"torch": of_torch, "liger": of_liger, "liger_cutedsl": of_liger_cutedsl, "liger_cutile": of_liger_cutile},
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    extra=host_cost,
)
Q_NORM = replace(
    RMS_NORM,
    name="q_norm",
    title="RMSNorm of queries (rows of 128)",
    position=2,
    inputs=lambda size, tokens, random: norm_inputs(1, tokens, size.heads, size.head_dim, random=random),
    file="rms_norm",
    extra=None,
)


def host_table(found: list) -> str:
    """Return the table of the host's microseconds in one eager RMSNorm."""
    found = select(found, kernel_name=RMS_NORM.name, metric_name="host_time", dtype="bf16")
    names = columns_of(found)
    table = Table("µs of host time", *map(providers.title, names), "speed vs best peer")
    for mode, title in (("forward", "with gradients"), ("no_grad_forward", "without")):
        mine = by_provider(select(found, kernel_operation_mode=mode))
        if mine:
            cells = [table.notes.cell(mine.get(p), lambda us: f"{us:.1f}") for p in names]
            table.add([title, *cells, times_faster(mine)], mine.values())
    return table.text()


TABLES = {"host": host_table}


class RMSNormBenchmark(OperationBenchmark):
    operation = RMS_NORM


if __name__ == "__main__":
    main(RMS_NORM, Q_NORM)
