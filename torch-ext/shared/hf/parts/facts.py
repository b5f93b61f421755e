"""What is known of the values in a forward whose text is read: what a module holds, constants, and what follows from these."""

import ast
import dataclasses
import operator
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import nn

from .modules import original_forward, without_decorators
from .texts import text_that_runs

__all__ = [
    "CALL", "COMPARED", "COMPUTED", "OTHER", "Fact", "ForwardText", "Global", "Module", "NotServed", "Path", "Unknown", "arguments_of",
    "attribute_of", "computed", "fact_of", "follow", "forward_text", "held_at", "is_config", "is_number", "refused", "truth_of",
]  # fmt: skip

Path = Tuple[str, ...]  # the attributes that lead from a module to something that it holds
CALL = "()"  # at the end of an attribute's name: of a method without arguments
WRAPPING = ("can_return_tuple", "merge_with_config_defaults", "deprecate_kwarg")  # decorators that call the forward with what they got
DOCUMENTING = ("auto_docstring", "add_start_docstrings", "add_start_docstrings_to_model_forward", "replace_return_docstrings")
COMPARED = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
            ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b}  # fmt: skip
COMPUTED = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
            ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow}  # fmt: skip


class NotServed(Exception):
    """A forward does something, or in a way, that ours cannot do."""


class Unknown:
    """A value of which only this name is known."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


OTHER: Any = Unknown("no logits")


@dataclasses.dataclass(frozen=True)
class Fact:
    """A value that a module holds, or a constant of the text. path: to it from the module, () for a constant."""

    value: Any
    path: Path = ()


@dataclasses.dataclass(frozen=True)
class Module:
    module: nn.Module
    path: Path


@dataclasses.dataclass(frozen=True)
class Global:
    """What stands under a global name, or is an attribute of that."""

    value: Any


class ForwardText(NamedTuple):
    """function: a forward without transformers' decorators. name: of the class and the forward; node: its syntax tree; decorators: the
    names of all that are in its file."""

    function: Any
    name: str
    node: Any
    decorators: Tuple[str, ...]


def forward_text(module: nn.Module) -> ForwardText:
    """The text of a module's forward. Raises `NotServed` where another one runs than its file says, or another decorator than one of
    transformers' that hand on what they get is around it."""
    forward, name = original_forward(module), f"{type(module).__name__}.forward"
    function = without_decorators(forward)
    text = text_that_runs(function, "forward")
    if text is None:
        raise NotServed(f"{name} is not what its file says, or has no file")
    around = 0
    while forward is not function:
        around, forward = around + 1, forward.__wrapped__
    names = tuple(map(_name_of, text.node.decorator_list))
    unknown = ", ".join(each for each in names if each not in WRAPPING + DOCUMENTING)
    if unknown or sum(each in WRAPPING for each in names) != around:
        raise NotServed(f"{name} has {unknown or 'other decorators than in its file'} around it")
    return ForwardText(function, name, text.node, names)


def arguments_of(node, name: str) -> Dict[str, Any]:
    """The arguments of a function by name, each with the node of its default or None. node: of the function; name: for messages. Raises
    `NotServed` where it takes any number of them by position."""
    args = node.args
    if args.vararg is not None:
        raise NotServed(f"{name} takes *{args.vararg.arg}")
    positional = [*args.posonlyargs, *args.args]
    defaults = [*[None] * (len(positional) - len(args.defaults)), *args.defaults, *args.kw_defaults]
    return {each.arg: default for each, default in zip([*positional, *args.kwonlyargs], defaults)}


def refused(text: ForwardText, node, why: str) -> NotServed:
    """The error for a node of a forward. why: goes on from the forward's name."""
    said = ast.unparse(node).strip().partition("\n")[0]
    return NotServed(f"{text.name} {why} in line {node.lineno}: {said if len(said) <= 100 else said[:97] + '...'}")


def _name_of(node) -> str:
    """The name of a decorator."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def attribute_of(node, me: Optional[str]) -> str:
    """The name of an attribute that a node of a text reads of the module itself, which is called `me` there; "" for all else."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me
    return node.attr if own else ""


def truth_of(value) -> Optional[bool]:
    """Whether a value is true, None where that is not known."""
    if isinstance(value, Fact):
        return bool(value.value)
    return True if isinstance(value, Module) else None


def fact_of(value, path: Path) -> Any:
    """What is known of a value that a module holds: numbers, texts and configurations."""
    known = value is None or type(value) in (bool, int, float, str) or is_config(value)
    return Fact(value, path) if known and value is not OTHER else OTHER


def is_config(value) -> bool:
    return any(cls.__name__ in ("PreTrainedConfig", "PretrainedConfig") for cls in type(value).__mro__)


def is_number(value) -> bool:
    return isinstance(value, Fact) and type(value.value) in (int, float)


def computed(function, left, right) -> Any:
    """What a function of two values returns, where both are known."""
    if function is None or not (isinstance(left, Fact) and isinstance(right, Fact)):
        return OTHER
    try:
        return Fact(function(left.value, right.value))
    except Exception:
        return OTHER


def held_at(module, path: Path) -> Any:
    """What a path leads to, for comparing: of a module or a tensor its class."""
    value = follow(module, path)
    return type(value) if isinstance(value, (nn.Module, torch.Tensor)) else value


def follow(module, path: Path) -> Any:
    """What a path of attributes, and of entries in brackets, leads to, or None."""
    for name in path:
        if name.startswith("["):
            key = name[1:-1]
            try:
                module = module[int(key) if isinstance(module, (list, tuple)) else key]
            except (LookupError, TypeError):
                return None
        else:
            module = getattr(module, name[: -len(CALL)])() if name.endswith(CALL) else getattr(module, name, None)
    return module
