"""The wrapper that transformers puts around a decoder layer's forward from 5.23 on, where gradient checkpointing stands.

`GradientCheckpointingLayer.__init_subclass__` gives it to every subclass, also to those that FSDP2 makes, so wrappers lie around each
other; the outermost, told by its identity with the class's `forward`, checkpoints. To replace `forward` of such a class would lose that
without a word. What the innermost wrapper closes over is replaced instead: every class keeps its wrapper, whenever it was made.
Before 5.23 there are no such wrappers, and the layer's `__call__` checkpoints.
"""

from types import FunctionType
from typing import Any

from ...ops.operators import constant_when_traced

__all__ = ["WRAPPING", "inside", "is_wrapped", "put"]

WRAPPING = "transformers.modeling_layers"


def _cell(function):
    """The cell in which a wrapper of transformers keeps the forward inside; None for any other function."""
    if type(function) is not FunctionType or function.__closure__ is None or function.__globals__.get("__name__") != WRAPPING:
        return None
    return dict(zip(function.__code__.co_freevars, function.__closure__)).get("forward")


@constant_when_traced
def is_wrapped(function) -> bool:
    """Tells whether a function is transformers' wrapper for gradient checkpointing around another."""
    return _cell(function) is not None


def inside(function) -> Any:
    """The forward inside transformers' wrappers for gradient checkpointing; the same object where there are none."""
    cell = _cell(function)
    while cell is not None:
        function = cell.cell_contents
        cell = _cell(function)
    return function


def put(owner, attribute: str, value) -> None:
    """Sets an attribute of a class or module, inside transformers' wrappers where it has them."""
    cell, found = None, _cell(vars(owner)[attribute])
    while found is not None:
        cell, found = found, _cell(found.cell_contents)
    if cell is None:
        setattr(owner, attribute, value)
    else:
        cell.cell_contents = value
