"""Operations against float64, one test for each place where they run.

tests/cpu/test_kernels.py ("interpreter"), tests/cpu/test_ops.py ("pytorch") and tests/gpu ("gpu") import the tests from here. Each says in
`PLACE` which of these it is, and gives them the fixtures `ops`, the package, `device`, and `launched`, a function that compares the names
of the kernels that ran with those that it is given, where they are known.
"""

from collections.abc import Callable, Iterable


def cases(names: str, everywhere: Iterable, ids=str, **elsewhere: Iterable) -> Callable:
    """Parametrizes a test, as pytest.mark.parametrize does. elsewhere: by place, the cases that it has besides those of every place."""

    def parametrized(test):
        test.cases = (*getattr(test, "cases", ()), (names, tuple(everywhere), ids, elsewhere))
        return test

    return parametrized


def parametrize(metafunc) -> None:
    """Gives a test the cases of the place of the file that it is collected in."""
    for names, everywhere, ids, elsewhere in getattr(metafunc.function, "cases", ()):
        metafunc.parametrize(names, (*everywhere, *elsewhere.get(metafunc.module.PLACE, ())), ids=ids)
