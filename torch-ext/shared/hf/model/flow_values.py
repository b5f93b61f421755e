"""What logits_flow.py knows of the values in a forward while it reads it, and what follows from that of values made of them."""

import dataclasses
from typing import Any, Dict, NamedTuple, Tuple

from ..parts.facts import OTHER, Module, Path, Unknown

__all__ = [
    "CALLS", "GIVEN", "LOSS_FUNCTION", "MIXED", "Environment", "Logits", "LogitsMethod", "Output", "Step", "has_logits", "is_output",
    "joined", "merge",
]  # fmt: skip

CALLS = "<calls of the loss>"  # in an environment: the numbers of calls that there may have been
Environment = Dict[str, Any]  # the values of a forward's names
GIVEN: Any = Unknown("no logits, and not None")
LOSS_FUNCTION: Any = Unknown("the loss")
MIXED: Any = Unknown("logits or something else")


class Step(NamedTuple):
    """What a forward does to its logits. kind: "times" or "over" a number, "tanh", or "either" of several things. path: to the number."""

    kind: str
    path: Path = ()


@dataclasses.dataclass(frozen=True)
class Logits:
    """capped: whether a tanh is among the steps, or may be."""

    capped: bool = False
    steps: Tuple[Step, ...] = ()

    def after(self, step: Step) -> "Logits":
        return Logits(self.capped or step.kind == "tanh", (*self.steps, step))


@dataclasses.dataclass(frozen=True)
class LogitsMethod:
    """A method of logits."""

    logits: Logits
    name: str


@dataclasses.dataclass(frozen=True)
class Output:
    """A model's output, with logits in the field of that name."""

    cls: type


def has_logits(value) -> bool:
    """Whether a value is made of logits, or may be."""
    return isinstance(value, (Logits, LogitsMethod, Output)) or value is MIXED


def joined(first, last) -> Any:
    """A value that is one of two."""
    if first == last:
        return first
    if isinstance(first, Logits) and isinstance(last, Logits):
        return Logits(True, (Step("either"),))
    if has_logits(first) or has_logits(last) or isinstance(first, Module) or isinstance(last, Module):  # a module may be the head
        return MIXED
    return OTHER


def merge(env: Environment, first: Environment, last: Environment) -> None:
    """Makes an environment that of two ways which meet."""
    env.clear()
    env.update({name: joined(first.get(name, OTHER), last.get(name, OTHER)) for name in {**first, **last}})
    env[CALLS] = tuple(sorted({*first[CALLS], *last[CALLS]}))


def is_output(cls) -> bool:
    """Tells whether a class is of a model's outputs, has a field for logits, and does nothing of its own when it is made."""
    bases = [base for base in getattr(cls, "__mro__", ()) if base.__name__ == "ModelOutput" and base.__module__.startswith("transformers.")]
    if not bases or not dataclasses.is_dataclass(cls) or getattr(cls, "__post_init__", None) is not bases[0].__post_init__:
        return False
    return "logits" in {field.name for field in dataclasses.fields(cls)}
