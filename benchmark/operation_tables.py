"""The table of a suite: its operations against their peers and the floor."""

from . import providers, registry
from .markdown import Notes, by_provider, columns_of, markdown, number, origin, select, share, times_faster
from .operation import MODE_TITLES, MODES, Operation
from .providers import FLOOR
from .records import Row
from .suites import LIGER, Suite


def shown_rows(operation: Operation, rows: list[Row]) -> list[Row]:
    """Return the rows of the one case that the table shows."""
    x_name, x_value = operation.shown or ("tokens", str(operation.suite.tokens))
    wanted = {"metric_name": "speed", "x_name": x_name, "x_value": x_value, "dtype": "bf16", "timing": operation.suite.timing}
    if x_name == "tokens":
        wanted["model"] = operation.suite.model
    return select(rows, kernel_name=operation.name, **wanted)


def suite_table(suite: Suite, rows: list[Row]) -> str:
    """Return the microseconds of each operation of a suite."""
    mine = {operation: shown_rows(operation, rows) for operation in registry.of_suite(suite)}
    rows = [row for found in mine.values() for row in found]
    names, notes, body = columns_of(rows), Notes(), []
    for operation, shown in mine.items():
        case = f", {operation.shown[0]} {operation.shown[1]}" if operation.shown else ""
        for mode in MODES:
            found = by_provider(select(shown, kernel_operation_mode=mode))
            if not found:
                continue
            line = [f"{operation.title}{case}, {MODE_TITLES.get(mode, mode)}", *(notes.cell(found.get(p), number) for p in names)]
            floor = found.get(FLOOR)
            body.append([*line, notes.cell(floor, number), share(floor, found.get("bastile")), times_faster(found)])
    head = [f"µs, {suite.tokens} tokens", *map(providers.title, names), "floor", "Bastile: of the floor", "vs best peer"]
    return markdown(head, body) + str(notes) + origin(rows) if rows else ""


LEVEL = 0.03  # a difference of times that is none


def _beside_liger(ours: Row, liger: Row | None) -> str:
    """Return Liger's time over ours, or that they are level."""
    if liger is None or not (liger.y_value_50 and ours.y_value_50):
        return ""
    ratio = liger.y_value_50 / ours.y_value_50
    return "level" if abs(ratio - 1) <= LEVEL else f"{ratio:.2f} ×"


def limits_table(rows: list[Row]) -> str:
    """Return forward + backward of Liger's operations at the shapes whose limits they declare, beside one copy of the bytes that they have
    to move, or the products alone, and beside Liger."""
    shown, body, notes = [], [], Notes()
    for operation in registry.of_suite(LIGER):
        for limit in operation.limits:
            wanted = {"metric_name": "speed", "kernel_operation_mode": "full", "x_name": "shape", "x_value": limit.title}
            found = by_provider(select(rows, kernel_name=operation.name, **wanted))
            floor, ours, liger = found.get(FLOOR), found.get("bastile"), found.get("liger")
            if floor and ours:
                times = [number(row.y_value_50 or 0) for row in (floor, ours)]
                peer = notes.cell(liger, number), _beside_liger(ours, liger)
                body.append([operation.title, limit.title, *times, share(floor, ours), *peer])
                shown.append(ours)
    head = ["µs, forward + backward", "", "floor", "Bastile", "of the floor", "Liger", "vs Liger"]
    return markdown(head, body) + str(notes) + origin(shown) if body else ""


def suite_tables() -> dict:
    """Return the tables of all suites that have operations, by name."""
    found = {suite.table: lambda rows, suite=suite: suite_table(suite, rows) for suite in registry.suites()}
    return found | {"liger_limits": limits_table}
