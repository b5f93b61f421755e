"""The operations that the files of this folder declare, and their own tables."""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from .operation import Operation
from .suites import SUITES, Suite


@functools.cache
def modules() -> list[ModuleType]:
    """Return those that declare something: operations_*.py, and each benchmark_*.py that is no link to one_operation.py."""
    folder = Path(__file__).absolute().parent
    shared = (folder / "one_operation.py").read_bytes()
    paths = [*folder.glob("operations_*.py"), *folder.glob("benchmark_*.py")]
    return [importlib.import_module(f".{path.stem}", __package__) for path in sorted(paths) if path.read_bytes() != shared]


@functools.cache
def operations() -> dict[str, Operation]:
    """Return all operations by name, by suite and in the order of its table. Raise ValueError for two of one name."""
    found: dict[str, Operation] = {}
    for module in modules():
        for operation in vars(module).values():
            if isinstance(operation, Operation) and found.setdefault(operation.name, operation) is not operation:
                raise ValueError(f"{module.__name__} declares {operation.name}, which another file declares as well")
    return dict(sorted(found.items(), key=lambda item: (SUITES.index(item[1].suite), item[1].position, item[0])))


def of_suite(suite: Suite) -> list[Operation]:
    """Return the operations of a suite, in the order of its table."""
    return [operation for operation in operations().values() if operation.suite == suite]


def of_script(name: str) -> list[Operation]:
    """Return the operations that benchmark_<name>.py runs, at least one. Raise ValueError for none."""
    found = [operation for operation in operations().values() if (operation.script or operation.name) == name]
    if not found:
        raise ValueError(f"benchmark_{name}.py is of no operation; expected one of {', '.join(operations())}, or a `script` of theirs")
    return found


def tables() -> dict[str, Callable]:
    """Return the tables that files declare as TABLES: by name, functions of rows that return Markdown, or "" for no rows."""
    return {name: table for module in modules() for name, table in getattr(module, "TABLES", {}).items()}
