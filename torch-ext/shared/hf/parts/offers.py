"""Implementations of ours among those that transformers chooses from by name. Several loaded packages may offer one under the same name:
the last one's is in force, and when a package takes its own back, another's takes its place."""

from typing import Callable

__all__ = ["offer", "withdraw"]


def offer(interface, attribute: str, name: str, function: Callable, package: str) -> None:
    """Registers a package's implementation. attribute: where the interface keeps what is offered, by package."""
    setattr(interface, attribute, {**vars(interface).get(attribute, {}), package: function})
    interface.register(name, function)


def withdraw(interface, attribute: str, name: str, package: str, is_asked_for: Callable[[], bool]) -> None:
    """Takes a package's implementation back. The last one stays while a model asks for it by name."""
    offered = dict(vars(interface).get(attribute, {}))
    if offered.pop(package, None) is None or (not offered and is_asked_for()):
        return
    if offered:
        setattr(interface, attribute, offered)
        interface.register(name, list(offered.values())[-1])
    else:
        delattr(interface, attribute)
        interface._global_mapping.pop(name, None)
