"""Implementations of ours among those that transformers chooses from by name. Several loaded packages may offer one under the same name:
the last one's is in force, and when a package takes its own back, another's takes its place."""

import sys
from typing import Any, Callable

from .lookups import SAVED

__all__ = ["offer", "withdraw"]


OFFERED = SAVED + "offered"  # on an interface of transformers: by package, the function that it offers there under our name


def offer(module: str, interface: str, name: str, function: Callable, package: str) -> None:
    """Registers a package's implementation with an interface of transformers; nowhere while its module is not imported."""
    cls: Any = getattr(sys.modules.get(module), interface, None)
    if cls is not None:
        setattr(cls, OFFERED, {**vars(cls).get(OFFERED, {}), package: function})
        cls.register(name, function)


def withdraw(module: str, interface: str, name: str, package: str, is_asked_for: Callable[[], bool]) -> None:
    """Takes a package's implementation back. The last one stays while a model asks for it by name."""
    cls: Any = getattr(sys.modules.get(module), interface, None)
    offered = {} if cls is None else dict(vars(cls).get(OFFERED, {}))
    if offered.pop(package, None) is None or (not offered and is_asked_for()):
        return
    if offered:
        setattr(cls, OFFERED, offered)
        cls.register(name, list(offered.values())[-1])
    else:
        delattr(cls, OFFERED)
        cls._global_mapping.pop(name, None)
