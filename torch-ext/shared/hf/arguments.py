"""The arguments of the forwards that take the place of transformers': its own, in its order, under the names that they have in the
installed release. The Hub replaces a class by a layer only where both forwards take as many, a trainer drops the columns that a forward
does not name, and a caller may pass them by position."""

import inspect
import warnings
from typing import Any, Callable, Dict, Sequence

import torch

from .versions import installed

# What is called otherwise from transformers 5.24 on. It takes the former names by keyword, with a warning.
RENAMED = {"past_key_values": "cache", "cache_params": "cache"} if installed() >= (5, 24) else {}
DEFAULTS = {"use_cache": False, "logits_to_keep": 0}  # of those that are not None


def named(argument: str) -> str:
    """What the installed transformers calls an argument. argument: its name in transformers 5.17."""
    return RENAMED.get(argument, argument)


CACHE = named("past_key_values")  # of decoders, their layers and attention
NET_CACHE = named("cache_params")  # of delta nets


def forward_of(names: Sequence[str], run: Callable[[Any, Dict[str, Any]], Any], rest: str = "kwargs") -> Callable[..., Any]:
    """Makes the forward that returns run(module, arguments by name); those that the caller left out are not among these.

    Args:
        names: of the arguments, in transformers' order and under its names of 5.17. Others may be passed by keyword.
        rest: what the signature calls those others.
    """
    current = tuple(map(named, names))
    former = [(name, named(name)) for name in names if named(name) != name]

    def forward(self, *args, **kwargs):
        for before, now in former:
            if before in kwargs:
                _rename(self, kwargs, before, now)
        if len(args) > len(current):
            raise _misplaced(self, current, f"{len(args)} by position")
        for name, value in zip(current, args):
            if name in kwargs:
                raise _misplaced(self, current, f"{name} by position and by name")
            kwargs[name] = value
        return run(self, kwargs)

    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [inspect.Parameter(name, either, default=DEFAULTS.get(name)) for name in current]
    if current[0] == "hidden_states":
        given[0] = given[0].replace(default=inspect.Parameter.empty)
    others = inspect.Parameter(rest, inspect.Parameter.VAR_KEYWORD)
    forward.__signature__ = inspect.Signature([inspect.Parameter("self", either), *given, others])  # type: ignore[attr-defined]
    return forward


def _rename(module, kwargs: Dict[str, Any], before: str, now: str) -> None:
    """Gives an argument its name of today, as transformers does: with a warning, and ignored where it is there under both."""
    value = kwargs.pop(before)
    kwargs.setdefault(now, value)
    if not torch.compiler.is_compiling():
        warnings.warn(f"`{before}` is deprecated for `{type(module).__name__}.forward`. Use `{now}` instead", FutureWarning, stacklevel=3)


def _misplaced(module, names: Sequence[str], found: str) -> TypeError:
    """What to raise for an argument that was given twice, or for more than there are."""
    return TypeError(f"{type(module).__name__}.forward got arguments {found}, expected each of {', '.join(names)} at most once")
