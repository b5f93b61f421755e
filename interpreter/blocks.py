"""The ct.* functions about the block, those that check, and those that print."""

import cuda.tile as ct
from cuda.tile._datatype import is_boolean
from cuda.tile._dispatch_mode import DispatchMode

from .tiles import (
    InterpreterError,
    Tile,
    constant_int,
    scalar,
    tile_of,
)


def bid(axis):
    return scalar(_of_axis(DispatchMode.get_current().launch.block, axis), ct.int32)


def num_blocks(axis):
    return scalar(_of_axis(DispatchMode.get_current().launch.grid, axis), ct.int32)


def _of_axis(triple: tuple[int, int, int], axis) -> int:
    if constant_int(axis, "axis") not in (0, 1, 2):
        raise InterpreterError(f"axis must be 0, 1 or 2, got {axis}")
    return triple[axis]


def assume_divisible_by(x, divisor):
    if constant_int(divisor, "divisor") < 1:
        raise InterpreterError(f"the divisor must be positive, got {divisor}")
    value = tile_of(x).value()
    if value % divisor:
        raise InterpreterError(f"assume_divisible_by: {value} is not divisible by {divisor}")
    return x


def static_eval(expr, /):
    return expr


def static_assert(condition, message=None, /):
    if not isinstance(condition, bool):
        raise InterpreterError(f"static_assert needs a compile-time bool, got {condition!r}")
    if not condition:
        raise InterpreterError(f"static assertion failed: {message or ''}")


def ensure_constant(value, /):
    if isinstance(value, Tile):
        raise InterpreterError(f"{value.describe()} is not a compile-time constant")
    return value


def assert_(cond, /, message=None):
    cond = tile_of(cond)
    if not is_boolean(cond.dtype):
        raise InterpreterError(f"assert_ takes a bool tile, got {cond.describe()}")
    if not bool(cond.data.all()):
        raise InterpreterError(f"assertion failed: {message or ''}")


def printf(format, *args):
    print(format % tuple(tile_of(a).value() if tile_of(a).ndim == 0 else str(a) for a in args), end="")


def print_(*args, sep=" ", end="\n"):
    print(*args, sep=sep, end=end)


def no_op():
    """Programmatic dependent launch orders kernels, not blocks."""


OPS = {
    ct.bid: bid,
    ct.num_blocks: num_blocks,
    ct.assume_divisible_by: assume_divisible_by,
    ct.static_eval: static_eval,
    ct.static_assert: static_assert,
    ct.ensure_constant: ensure_constant,
    ct.assert_: assert_,
    ct.printf: printf,
    ct.print: print_,
    ct.grid_dependency_control_wait: no_op,
    ct.grid_dependency_control_launch_dependents: no_op,
}
