"""The rows that a run makes, and the CSV files that it puts them into."""

import json
from pathlib import Path
from typing import TypeVar

from . import models, records
from .command_line import Settings, results_folder
from .operation import Case, Operation
from .records import LigerRow, Measurement, Row
from .report import message
from .timing import Quantiles

Value = Quantiles | float | Exception | None
Numbers = tuple[float | None, float | None, float | None]
Schema = TypeVar("Schema", bound=Measurement)


def row(
    schema: type[Schema], names: tuple[str, str, str, str, str], x: tuple[str, str, str], value: Value, gpu: str, config: dict,
    environment: dict | None = None,
) -> Schema:  # fmt: skip
    """Return a row of a schema; its configuration has the environment, and where there is no number the reason.

    names: kernel, provider, mode, metric and unit; x: name, label and value; gpu: its name; environment: without it, this process's.
    """
    numbers: Numbers = (None, None, None)
    if isinstance(value, Exception):
        config = {**config, "error": message(value)}
    else:
        numbers = (value.median, value.low, value.high) if isinstance(value, Quantiles) else (value, value, value)
    extra = json.dumps({**config, **(environment or records.environment())}, sort_keys=True)
    return schema(*names, *x, *numbers, extra, gpu)


def case_row(
    operation: Operation, case: Case, settings: Settings, provider: str, mode: str, metric: str, unit: str, value: Value, **config
) -> Row:
    """Return the row of one metric of a provider."""
    known = {**case.config, "dtype": settings.dtype_name, "timing": settings.timing, "rounds": settings.rounds, **config}
    return row(Row, (operation.name, provider, mode, metric, unit), case.x, value, records.gpu_name(settings.device), known)


def liger_row(
    operation: Operation, case: Case, settings: Settings, provider: str, mode: str, metric: str, value: Value, **config
) -> LigerRow:
    """Return a row of Liger-Kernel's schema: "speed" in ms, "memory" in MB."""
    known = {**case.config, "rounds": settings.rounds, "bastile": records.package_version(), **config}
    kernel = (operation.liger and operation.liger.name) or operation.name
    names = (kernel, provider, mode.replace("_", "-"), metric, {"speed": "ms", "memory": "MB"}[metric])
    return row(LigerRow, names, case.x, value, records.gpu_name(settings.device), known)


def speed_row(args, kernel: str, provider: str, mode: str, x: tuple[str, str, str], value: Value, **config) -> Row:
    """Return the microseconds of what is no `Operation`. args: of `layers_parser`; x: name, label and value."""
    known = {"model": models.full_name(args.model), "layers": args.layers, "rounds": args.rounds, **config}
    return row(Row, (kernel, provider, mode, "speed", "us"), x, value, records.gpu_name(args.device), known)


def save(results: Path | None, name: str | Path, rows: list) -> None:
    """Write rows into <gpu>/<name>.csv of a folder of results, where there is one."""
    if results and rows:
        records.write(results / records.slug(rows[0].gpu_name) / f"{name}.csv", rows)


def save_speeds(args, name: str, rows: list[Row]) -> None:
    """Write the rows of a benchmark with the command line of `layers_parser`."""
    save(results_folder(args), name, rows)
