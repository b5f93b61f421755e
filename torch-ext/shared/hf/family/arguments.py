"""Makes forwards with the arguments of those of transformers that they replace: the same ones, in the same order, under the names that the
installed release uses. The Hub replaces a class with a layer only if both forwards take as many arguments, a trainer drops the columns that
a forward does not name, and callers may pass arguments by position."""

import inspect
import warnings
from typing import Any, Callable, Dict, Mapping, Sequence, Tuple

import torch

from .versions import installed

__all__ = ["CACHE", "NET_CACHE", "SINCE_5_24", "former", "forward_like", "forward_of", "named"]

SINCE_5_24 = installed() >= (5, 24)
# transformers 5.24 renamed these arguments. It still accepts the former names as keywords, with a warning.
RENAMED = {"past_key_values": "cache", "cache_params": "cache"} if SINCE_5_24 else {}
# The defaults in signatures that are not None.
DEFAULTS: Mapping[str, Any] = {"hidden_states": inspect.Parameter.empty, "use_cache": False, "logits_to_keep": 0}


def named(argument: str) -> str:
    """Returns the name that the installed transformers uses for an argument. argument: its name in transformers 5.17."""
    return RENAMED.get(argument, argument)


def former(argument: str) -> str:
    """Returns the name that transformers 5.17 used for an argument of the installed release."""
    return {now: before for before, now in RENAMED.items()}.get(argument, argument)


CACHE = named("past_key_values")  # of decoders, their layers and attention
NET_CACHE = named("cache_params")  # of delta nets


def forward_of(names: Sequence[str], run: Callable[[Any, Dict[str, Any]], Any], rest: str = "kwargs") -> Callable[..., Any]:
    """Makes a forward that returns run(module, arguments by name). Arguments that the caller left out are absent.

    Args:
        names: the arguments in transformers' order, by their names in transformers 5.17. The forward takes any others as keywords.
        rest: the name of these other keywords in the signature.
    """
    current = tuple(map(named, names))
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [inspect.Parameter(name, either, default=DEFAULTS.get(name)) for name in current]
    others = inspect.Parameter(rest, inspect.Parameter.VAR_KEYWORD)
    signature = inspect.Signature([inspect.Parameter("self", either), *given, others])
    return forward_like(signature, run, [(name, RENAMED[name]) for name in names if name in RENAMED])


def forward_like(
    signature: inspect.Signature, run: Callable[[Any, Dict[str, Any]], Any], former: Sequence[Tuple[str, str]] = ()
) -> Callable[..., Any]:
    """Makes the forward of `forward_of` with a signature, the module's own argument included. It takes any others as keywords, which `run`
    has to refuse. former: names that arguments had, and have now."""
    given = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD][1:]
    current = tuple(each.name for each in given)
    by_position = sum(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in given)
    required = [each.name for each in given if each.default is inspect.Parameter.empty]

    def forward(self, *args, **kwargs):
        for before, now in former:
            if before in kwargs:
                _rename(self, kwargs, before, now)
        if len(args) > by_position:
            raise _misplaced(self, current, f"{len(args)} by position")
        for name, value in zip(current, args):
            if name in kwargs:
                raise _misplaced(self, current, f"{name} by position and by name")
            kwargs[name] = value
        for name in required:
            if name not in kwargs:
                raise TypeError(f"{type(self).__name__}.forward got no {name}, expected one")
        return run(self, kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def _rename(module, kwargs: Dict[str, Any], before: str, now: str) -> None:
    """Moves an argument to its current name and warns, as transformers does. If both names were given, the current one counts."""
    value = kwargs.pop(before)
    kwargs.setdefault(now, value)
    if not torch.compiler.is_compiling():
        warnings.warn(f"`{before}` is deprecated for `{type(module).__name__}.forward`. Use `{now}` instead", FutureWarning, stacklevel=3)


def _misplaced(module, names: Sequence[str], found: str) -> TypeError:
    """Makes the error for an argument that was passed twice, or for too many arguments."""
    return TypeError(f"{type(module).__name__}.forward got arguments {found}, expected each of {', '.join(names)} at most once")
