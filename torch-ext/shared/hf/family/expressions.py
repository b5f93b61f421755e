"""What a forward computes, as an expression: how it came of the module's input, and the shape that it has."""

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, Union

from ..parts.facts import Fact, NotServed

__all__ = ["INPUT", "Op", "Tensor", "columns_of", "commutes", "method_of", "sizes_of"]

Axis = Union[int, str]  # a number, or the names of axes whose size a call decides, such as "B" and "S" for rows and their tokens, or "BS"
Shape = Tuple[Axis, ...]


class Op(NamedTuple):
    """One operation. kind: what is done; name: with which module, attribute, function or columns; of: to what."""

    kind: str
    name: Any = None
    of: Tuple["Op", ...] = ()

    def __str__(self) -> str:
        parts = [str(getattr(self.name, "__name__", self.name))] if self.name is not None else []
        return f"{self.kind}({', '.join([*parts, *map(str, self.of)])})" if parts or self.of else self.kind


class Tensor(NamedTuple):
    op: Op
    shape: Shape


INPUT = Op("x")


def commutes(kind: str, *of: Op) -> Op:
    """A sum or a product, whose terms have no order."""
    return Op(kind, None, tuple(sorted(of, key=repr)))


def _counted(axes) -> Tuple[int, List[str]]:
    """(product of the numbers, the names in order of their letters) of axes."""
    number, names = 1, []
    for axis in axes:
        if isinstance(axis, int):
            number *= axis
        else:
            names += list(axis)
    return number, sorted(names)


def reshaped(shape: Shape, wanted: Shape) -> Shape:
    """The shape that `view` and `reshape` give. Only neighbouring axes may be merged or split, or elements would change places. Raises
    `NotServed`."""
    error = NotServed(f"reshapes {shape} to {wanted}")
    found = list(wanted)
    if -1 in found:
        (number, names), (rest, taken) = _counted(shape), _counted(axis for axis in found if axis != -1)
        if any(names.count(name) < taken.count(name) for name in taken) or number % rest:
            raise error
        for name in taken:
            names.remove(name)
        if names and number != rest:
            raise error
        found[found.index(-1)] = "".join(names) if names else number // rest
    left, right = list(shape), list(found)
    while left or right:
        before, after = left[:1], right[:1]
        del left[:1], right[:1]
        while _counted(before) != _counted(after):
            (number, names), (other, others) = _counted(before), _counted(after)
            if left and (number < other or len(names) < len(others)):
                before.append(left.pop(0))
            elif right and (number > other or len(names) > len(others)):
                after.append(right.pop(0))
            else:
                raise error
        if len(before) > 1 and len(after) > 1:
            raise error
    return tuple(found)


def sizes_of(tensor: Tensor) -> Tuple[Any, ...]:
    """A tensor's shape as a forward reads it: what is no number stays the name of the axis."""
    return tuple(axis if isinstance(axis, str) else Fact(axis) for axis in tensor.shape)


def columns_of(tensor: Tensor, first: int, last: int) -> Tensor:
    """Some of the last axis."""
    return Tensor(Op("columns", (first, last), (tensor.op,)), (*tensor.shape[:-1], last - first))


def method_of(x: Tensor, name: str, args: Sequence[Any], kwargs: Dict[str, Any]) -> Any:
    """What a method of a tensor returns, None where that is not known. Raises `NotServed`."""
    flat = [each for arg in args for each in (arg if type(arg) is tuple else (arg,))]
    sizes: List[Any] = [each.value if isinstance(each, Fact) else each for each in flat]
    if name in ("to", "type_as"):
        return x if flat and all(each in (Op("dtype"), Op("device")) or isinstance(each, Tensor) for each in flat) else None
    if name == "float" and not flat:
        return Tensor(Op("in fp32", None, (x.op,)), x.shape)
    if name in ("view", "reshape") and not kwargs:
        return Tensor(x.op, reshaped(x.shape, tuple(sizes)))
    if name == "flatten" and not kwargs and len(sizes) < 2:
        return Tensor(x.op, reshaped(x.shape, (*x.shape[: sizes[0] if sizes else 0], -1)))
    if name == "contiguous" and not flat:
        return x
    if name == "size" and len(sizes) < 2:
        return sizes_of(x)[sizes[0]] if sizes else sizes_of(x)
    if name == "transpose" and len(sizes) == 2:
        shape, (one, two) = list(x.shape), sizes
        shape[one], shape[two] = shape[two], shape[one]
        return Tensor(x.op, tuple(shape))
    last = sizes[-1] if len(sizes) > 1 else getattr(kwargs.get("dim"), "value", None)
    if name in ("chunk", "split") and last in (-1, len(x.shape) - 1):
        width: Any = x.shape[-1]
        first = args[0].value if isinstance(args[0], Fact) else [each.value for each in args[0]]
        each = width // first if name == "chunk" else first
        widths = each if isinstance(each, (list, tuple)) else [each] * (width // each)
        ends = [sum(widths[:i]) for i in range(len(widths) + 1)]
        return tuple(columns_of(x, *pair) for pair in zip(ends, ends[1:]))
    return None
