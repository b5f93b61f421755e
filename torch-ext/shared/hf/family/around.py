"""Reads which linear layers stand at both ends of an attention that no row describes: those that get exactly what attention gets, and the
one that makes its first result. The nodes around attention can make these products, with their adapters, whatever is done in between."""

import ast
import inspect
from types import CodeType
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from torch import nn

from ..parts.facts import NotServed, arguments_of, attribute_of, forward_text
from ..parts.texts import text_that_runs
from .calls import kind_of

__all__ = ["Around", "around_of"]

ASKED = "shape", "dtype", "device", "size"  # of attention's input, as of the residual stream, whose shape and dtype it has


class Around(NamedTuple):
    """inputs: the projections of an attention's input, by their attributes, in the order of their calls; output: its last projection.
    code: of the forward that was read, without transformers' decorators."""

    inputs: Tuple[str, ...]
    output: str
    code: CodeType


def around_of(modules: Sequence[nn.Module], argument: str) -> Optional[Around]:
    """Return what stands at both ends of attention modules of one class. argument: what their forward calls its input. None where the text
    uses the input otherwise than in such projections, reads one of these twice, does more to its first result, or writes to the module."""
    try:
        text = forward_text(modules[0])
        me, *_ = arguments_of(text.node, text.name)
    except NotServed:
        return None
    nodes = sorted(_expressions(text.node), key=lambda node: (node.lineno, node.col_offset))
    calls = [node for node in nodes if isinstance(node, ast.Call) and attribute_of(node.func, me)]
    output = _last(text.node, me)
    held = {name: part for module in modules for name, part in module._modules.items() if part is not None}
    inputs = [attribute_of(node.func, me) for node in calls if [*map(ast.unparse, node.args)] == [argument] and not node.keywords]
    mine = tuple(name for name in inputs if name in held)  # of what no module has, the call is in a branch that is never taken
    if not mine or output not in held or any(kind_of(held[name]) != "linear" for name in (*mine, output)):
        return None
    asked = sum(isinstance(node, ast.Attribute) and _is(node.value, argument) and node.attr in ASKED for node in nodes)
    absent = [node.left for node in nodes if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot))]
    read = [attribute_of(node, me) for node in nodes if attribute_of(node, me) and node not in absent]
    if sum(_is(node, argument) for node in nodes) != len(inputs) + asked or any(read.count(name) != 1 for name in (*mine, output)):
        return None
    methods = {name for name in read if hasattr(type(modules[0]), name) and name not in held}
    texts = [text.node, *(_method(type(modules[0]), name) for name in methods)]
    alone = all(each is not None and _leaves_alone(each, (*mine, output)) for each in texts)
    return Around(mine, output, text.function.__code__) if alone else None


def _expressions(node) -> Iterator[Any]:
    return (part for part in ast.walk(node) if isinstance(part, ast.expr))


def _is(node, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _method(cls: type, name: str) -> Any:
    """The syntax tree of a method, or of a property; None where that is not known."""
    found = inspect.getattr_static(cls, name)
    text = text_that_runs(getattr(found, "fget", found), name)
    return text and text.node


def _leaves_alone(node, names: Sequence[str]) -> bool:
    """Tell whether a method writes nothing to its module, and, other than the forward, reads none of some attributes."""
    me = node.args.args[0].arg
    found: List[Any] = [part for part in _expressions(node) if attribute_of(part, me) or _is(part, me)]
    reads = node.name != "forward" and any(attribute_of(part, me) in names for part in found)
    return not reads and all(isinstance(part.ctx, ast.Load) for part in found)


def _last(node, me: str) -> str:
    """The module that makes the first result, where a forward has one return and does nothing with that after the call; "" for all else."""
    *body, last = node.body
    if [part for part in ast.walk(node) if isinstance(part, ast.Return)] != [last] or last.value is None:
        return ""
    value = last.value.elts[0] if isinstance(last.value, ast.Tuple) else last.value
    if isinstance(value, ast.Name):
        named = next((part for part in reversed(body) if any(_is(each, value.id) for each in ast.walk(part))), None)
        plain = isinstance(named, ast.Assign) and [*map(ast.unparse, named.targets)] == [value.id]
        value = named.value if plain else None  # type: ignore[union-attr]
    return attribute_of(value.func, me) if isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords else ""
