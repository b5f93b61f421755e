"""What logits_flow.py knows of the values in a forward while it reads it, and what follows from that of values made of them."""

import dataclasses
from typing import Any, Dict, Optional, Tuple

from torch import nn

Path = Tuple[str, ...]  # the attributes that lead from a causal LM to something that it holds
CALLS = "<calls of the loss>"  # in an environment: the numbers of calls that there may have been
Environment = Dict[str, Any]  # the values of a forward's names
CALL = "()"  # at the end of an attribute's name: of a method without arguments


class Unknown:
    """A value of which only this name is known."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


OTHER: Any = Unknown("no logits")
GIVEN: Any = Unknown("no logits, and not None")
LOSS_FUNCTION: Any = Unknown("the loss")
MIXED: Any = Unknown("logits or something else")


@dataclasses.dataclass(frozen=True)
class Fact:
    """A value that the model holds, or a constant of the text. path: to it from the causal LM, () for a constant."""

    value: Any
    path: Path = ()


@dataclasses.dataclass(frozen=True)
class Module:
    module: nn.Module
    path: Path


@dataclasses.dataclass(frozen=True)
class Logits:
    capped: bool = False


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of logits."""

    logits: Logits
    name: str


@dataclasses.dataclass(frozen=True)
class Global:
    """What stands under a global name, or is an attribute of that."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Output:
    """A model's output, with logits in the field of that name."""

    cls: type


def has_logits(value) -> bool:
    """Whether a value is made of logits, or may be."""
    return isinstance(value, (Logits, Method, Output)) or value is MIXED


def truth_of(value) -> Optional[bool]:
    """Whether a value is true, None where that is not known."""
    if isinstance(value, Fact):
        return bool(value.value)
    return True if isinstance(value, Module) else None


def joined(first, last) -> Any:
    """A value that is one of two."""
    if first == last:
        return first
    if isinstance(first, Logits) and isinstance(last, Logits):
        return Logits(capped=True)
    if has_logits(first) or has_logits(last) or isinstance(first, Module) or isinstance(last, Module):  # a module may be the head
        return MIXED
    return OTHER


def merge(env: Environment, first: Environment, last: Environment) -> None:
    """Makes an environment that of two ways which meet."""
    env.clear()
    env.update({name: joined(first.get(name, OTHER), last.get(name, OTHER)) for name in {**first, **last}})
    env[CALLS] = tuple(sorted({*first[CALLS], *last[CALLS]}))


def fact_of(value, path: Path) -> Any:
    """What is known of a value that the model holds: numbers, texts and configurations."""
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


def is_output(cls) -> bool:
    """Tells whether a class is of a model's outputs, has a field for logits, and does nothing of its own when it is made."""
    bases = [base for base in getattr(cls, "__mro__", ()) if base.__name__ == "ModelOutput" and base.__module__.startswith("transformers.")]
    if not bases or not dataclasses.is_dataclass(cls) or getattr(cls, "__post_init__", None) is not bases[0].__post_init__:
        return False
    return "logits" in {field.name for field in dataclasses.fields(cls)}



def follow(module, path: Path) -> Any:
    """What a path of attributes leads to, or None."""
    for name in path:
        module = getattr(module, name[: -len(CALL)])() if name.endswith(CALL) else getattr(module, name, None)
    return module
