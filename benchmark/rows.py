"""The rows that a run makes, and the CSV files that it puts them into."""

import json
from pathlib import Path

from . import models, records
from .command_line import Settings, results_folder
from .operation import Case, Operation
from .records import LigerRow, Measurement, Row
from .report import message
from .timing import Quantiles

Value = Quantiles | float | Exception | None
Numbers = tuple[float | None, float | None, float | None]


def numbers_and_error(value: Value) -> tuple[Numbers, dict[str, str]]:
    """Return a row's three numbers, and for its configuration why it has none."""
    if isinstance(value, Exception):
        return (None, None, None), {"error": message(value)}
    if isinstance(value, Quantiles):
        return (value.median, value.low, value.high), {}
    return (value, value, value), {}


def case_row(
    operation: Operation, case: Case, settings: Settings, provider: str, mode: str, metric: str, unit: str, value: Value, **config
) -> Row:
    """Return the row of one metric of a provider."""
    numbers, error = numbers_and_error(value)
    known = {**case.config, "dtype": settings.dtype_name, "timing": settings.timing, "rounds": settings.rounds}
    extra = json.dumps({**known, **config, **error, **records.environment()}, sort_keys=True)
    return Row(operation.name, provider, mode, metric, unit, *case.x, *numbers, extra, records.gpu_name(settings.device))


def liger_row(
    operation: Operation, case: Case, settings: Settings, provider: str, mode: str, metric: str, value: Value, **config
) -> LigerRow:
    """Return a row of Liger-Kernel's schema: "speed" in ms, "memory" in MB."""
    numbers, error = numbers_and_error(value)
    unit = {"speed": "ms", "memory": "MB"}[metric]
    known = {**case.config, "rounds": settings.rounds, "bastile": records.package_version()}
    extra = json.dumps({**known, **config, **error, **records.environment()}, sort_keys=True)
    kernel = (operation.liger and operation.liger.name) or operation.name
    mode = mode.replace("_", "-")
    return LigerRow(kernel, provider, mode, metric, unit, *case.x, *numbers, extra, records.gpu_name(settings.device))


def speed_row(args, kernel: str, provider: str, mode: str, x: tuple[str, str, str], value: Value, **config) -> Row:
    """Return the microseconds of what is no `Operation`. args: of `layers_parser`; x: name, label and value."""
    numbers, error = numbers_and_error(value)
    known = {"model": models.full_name(args.model), "layers": args.layers, "rounds": args.rounds}
    extra = json.dumps({**known, **config, **error, **records.environment()}, sort_keys=True)
    return Row(kernel, provider, mode, "speed", "us", *x, *numbers, extra, records.gpu_name(args.device))


def save(results: Path | None, name: str | Path, rows: list) -> None:
    """Write rows into <gpu>/<name> of a folder of results, where there is one. name: with or without ".csv"."""
    if results and rows:
        first: Measurement = rows[0]
        records.write((results / records.slug(first.gpu_name) / name).with_suffix(".csv"), rows)


def save_speeds(args, name: str, rows: list[Row]) -> None:
    """Write the rows of a benchmark with the command line of `layers_parser`."""
    save(results_folder(args), name, rows)
