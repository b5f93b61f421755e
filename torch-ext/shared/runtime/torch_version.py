"""The version of torch."""

import re
from typing import Tuple

__all__ = ["TORCH_MIN", "check_torch", "numbers_in"]

TORCH_MIN = (2, 6)


def numbers_in(version: str, count: int = 2) -> Tuple[int, ...]:
    """The first numbers of a version, before what a plus adds to it."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:count])


def check_torch(version: str) -> None:
    """Raises ImportError for a torch that is older than any that the package was tested with."""
    if numbers_in(version) < TORCH_MIN:
        expected = ".".join(map(str, TORCH_MIN))
        raise ImportError(f"torch is {version}, expected torch>={expected}. Run: pip install 'torch>={expected}'")
