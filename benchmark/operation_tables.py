"""The table of a suite: its operations against their peers and the floor."""

from . import providers, registry
from .markdown import Table, by_provider, columns_of, comparison, number, of_floor, peers_of, select
from .operation import MODE_TITLES, MODES, Operation
from .providers import FLOOR
from .records import Row
from .suites import LIGER, SUITES, Suite


def shown_rows(operation: Operation, rows: list[Row]) -> list[Row]:
    """Return the rows of the one case that the table shows."""
    x_name, x_value = operation.shown or ("tokens", str(operation.suite.tokens))
    wanted = {"metric_name": "speed", "x_name": x_name, "x_value": x_value, "dtype": "bf16", "timing": operation.suite.timing}
    if x_name == "tokens":
        wanted["model"] = operation.suite.model
    found = select(rows, kernel_name=operation.name, **wanted)
    return [row for row in found if x_name == "tokens" or row.config.get("tokens") in (None, operation.suite.tokens)]


def suite_table(suite: Suite, rows: list[Row]) -> str:
    """Return the microseconds of each operation of a suite."""
    cases = []
    for operation in registry.of_suite(suite):
        shown, case = shown_rows(operation, rows), f", {operation.shown[0]} {operation.shown[1]}" if operation.shown else ""
        for mode in MODES:
            title = f"{operation.title}{case}, {MODE_TITLES.get(mode, mode)}"
            cases.append(((title,), select(shown, kernel_operation_mode=mode)))
    return comparison((f"µs, {suite.tokens} tokens",), cases, {"speed": number}, ("floor", "Bastile: of the floor"))


LEVEL = 0.03  # a difference of times that is none


def _beside(peers: dict[str, float], ours: Row) -> str:
    """Return the fastest peer's time over ours, and whose it is; or that they are level."""
    if not peers or not ours.y_value_50:
        return ""
    best, us = next(iter(peers.items()))
    ratio = us / ours.y_value_50
    return f"{'level' if abs(ratio - 1) <= LEVEL else f'{ratio:.2f} ×'} ({providers.title(best)})"


def _unmeasured(table: Table, mine: dict[str, Row]) -> str:
    """Return a reference to a note where PyTorch itself has no row: then the fastest peer is only the fastest of those that have."""
    if any(p.startswith(("torch", "huggingface")) for p in mine):
        return ""
    return f" {table.notes.reference('Beside Liger alone: PyTorch and torch.compile were not measured at this shape.')}"


def limits_table(rows: list[Row]) -> str:
    """Return forward + backward of Liger's operations at the shapes whose limits they declare, beside one copy of the bytes that they have
    to move, or the products alone, and beside every peer that was measured there."""
    found = []
    for operation in registry.of_suite(LIGER):
        for limit in operation.limits:
            wanted = {"metric_name": "speed", "kernel_operation_mode": "full", "x_name": "shape", "x_value": limit.title}
            mine = by_provider(select(rows, kernel_name=operation.name, **wanted))
            if mine.get("bastile"):
                found.append((operation, limit, mine))
    names = [p for p in columns_of(row for *_, mine in found for row in mine.values()) if p != "bastile"]
    table = Table("µs, forward + backward", "", "floor", "Bastile", "of the floor", *map(providers.title, names), "vs best peer")
    for operation, limit, mine in found:
        ours = mine["bastile"]
        cells = [table.notes.cell(mine.get(p), number) for p in (FLOOR, "bastile")]
        peers = [table.notes.cell(mine.get(p), number) for p in names]
        line = [operation.title, limit.title, *cells, of_floor(mine), *peers, f"{_beside(peers_of(mine), ours)}{_unmeasured(table, mine)}"]
        table.add(line, mine.values())
    return table.text()


def suite_tables() -> dict:
    """Return the tables of all suites, by name."""
    found = {suite.table: lambda rows, suite=suite: suite_table(suite, rows) for suite in SUITES}
    return found | {"liger_limits": limits_table}
