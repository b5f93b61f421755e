"""Keeps the garbage collector's list of objects short: a reset() of the package looks at every object there is, and PyTorch, transformers
and their caches are a million that the tests of hundreds of files never let go."""

import contextlib
import gc
import sys
from collections.abc import Iterator

_modules_when_settled = 0


def settle(always: bool = False) -> None:
    """Takes what is there to stay out of the collector's sight, where libraries were imported since the last time, or always."""
    global _modules_when_settled
    if always or len(sys.modules) > _modules_when_settled + 50:
        gc.collect()
        gc.freeze()
        _modules_when_settled = len(sys.modules)


def unsettle() -> None:
    """Lets the interpreter end as it does without this."""
    gc.unfreeze()


@contextlib.contextmanager
def growing() -> Iterator[None]:
    """Nothing is let go in here, so nothing is looked for: the collection of 18 000 tests takes 26 seconds instead of 32."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
