"""What `make test-all` has beyond `make test`, and why: the tests that are marked `whole`.

`make test` leaves those out, with `-m "not whole"`; pytest by itself runs everything that it is given. `python -m tests.whole --write` puts
the table of these into docs/maintainers.md.
"""

import argparse
import ast
import fnmatch
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/maintainers.md"
BLOCK = re.compile(r"(<!-- whole -->\n)(.*?)(<!-- /whole -->)", re.DOTALL)


class Group(NamedTuple):
    """Tests of one kind. stays: what of them `make test` has, and `each`, whether that is a selection in which each value of each parameter
    occurs; tests: "file::function", or "file" for all of its functions, below tests/cpu, with a pattern of ids in brackets for some
    cases."""

    what: str
    reason: str
    stays: str
    each: bool
    tests: tuple[str, ...]


GROUPS: tuple[Group, ...] = ()


def group_of(nodeid: str) -> Group | None:
    """The group of a test, by what pytest calls it."""
    name, _, case = nodeid.removeprefix("tests/cpu/").partition("[")
    file = name.partition("::")[0]
    return next((g for g in GROUPS for test in g.tests if _matches(test, file, name, case.removesuffix("]"))), None)


def _matches(test: str, file: str, name: str, case: str) -> bool:
    test, _, pattern = test.partition("[")
    return test in (file, name) and (not pattern or fnmatch.fnmatchcase(case, pattern.removesuffix("]")))


def values_of(item: pytest.Item) -> frozenset:
    """(parameter, value) of each parameter of a test."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return frozenset((name, value if isinstance(value, (str, int, float, tuple)) else id(value)) for name, value in parameters.items())


def each_value_once(cases: list[frozenset]) -> set[int]:
    """The numbers of a few cases in which every value of every parameter occurs: again and again the one with most that are still missing."""
    chosen: set[int] = set()
    missing = set().union(*cases)
    while missing or not chosen:
        best = max(range(len(cases)), key=lambda i: (len(cases[i] & missing), -i))
        chosen.add(best)
        missing -= cases[best]
    return chosen


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks the tests that are for `make test-all` alone."""
    functions: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        group = group_of(item.nodeid)
        if group is not None:
            functions.setdefault((item.nodeid.partition("[")[0], group), []).append(item)
    for (_, group), cases in functions.items():
        run = [case for case in cases if not any(case.iter_markers("skip"))]
        stay = {id(run[i]) for i in each_value_once([values_of(case) for case in run])} if group.each and run else set()
        for case in cases:
            if id(case) not in stay:
                case.add_marker(pytest.mark.whole)


# ---------------------------------------------------------------- the table of docs/maintainers.md
def unknown() -> list[str]:
    """What the groups name and tests/cpu has not."""
    found = []
    for test in (test for group in GROUPS for test in group.tests):
        file, _, function = test.partition("[")[0].partition("::")
        path = ROOT / "tests/cpu" / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        if function not in {"", *(node.name for node in tree.body if isinstance(node, ast.FunctionDef))} or not tree.body:
            found.append(test)
    return found


def table() -> str:
    rows = ["| tests | of these, `make test` has | why not all | where |", "|---|---|---|---|"]
    for group in GROUPS:
        files = dict.fromkeys(test.partition("::")[0].partition("[")[0] for test in group.tests)
        links = ", ".join(f"[{Path(file).stem.removeprefix('test_')}](../tests/cpu/{file})" for file in files)
        rows.append(f"| {group.what} | {group.stays} | {group.reason} | {links} |")
    return "\n".join(rows) + "\n"


def main(arguments=None) -> int:
    p = argparse.ArgumentParser(prog="python -m tests.whole", description="The table of what `make test-all` has beyond `make test`.")
    p.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    if not p.parse_args(arguments).write:
        print(table(), end="")
        return 0
    PAGE.write_text(BLOCK.sub(lambda match: match[1] + table() + match[3], PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
