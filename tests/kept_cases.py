"""Which cases of a test `make test` keeps, of those that tests/whole.py leaves to `make test-rest`: functions of all cases of one function,
which return the places of those that stay."""

import re
from collections.abc import Callable

import pytest


def each_value(cases: list[pytest.Item]) -> set[int]:
    """A few cases in which every value of every parameter occurs: again and again the one with most that are still missing."""
    values = [
        {(name, value if isinstance(value, (str, int, float, tuple)) else id(value)) for name, value in case.callspec.params.items()}
        for case in cases
    ]
    chosen: set[int] = set()
    missing = set().union(*values)
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(values[i] & missing), -i))
        chosen.add(best)
        missing -= values[best]
    return chosen


def first(cases: list[pytest.Item]) -> set[int]:
    return {0}


def none(cases: list[pytest.Item]) -> set[int]:
    return set()


def one_of(pattern: str) -> Callable[[list[pytest.Item]], set[int]]:
    """The first case of each text that a pattern finds in the ids."""

    def keep(cases):
        found: dict[str, int] = {}
        for i, case in enumerate(cases):
            match = re.search(pattern, case.callspec.id)
            if match:
                found.setdefault(match[0], i)
        return set(found.values())

    return keep


def matching(pattern: str) -> Callable[[list[pytest.Item]], set[int]]:
    """The cases in whose ids a pattern is found."""
    return lambda cases: {i for i, case in enumerate(cases) if re.search(pattern, case.callspec.id)}
