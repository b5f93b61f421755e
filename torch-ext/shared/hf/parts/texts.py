"""The text of a function that runs: its syntax tree in its file, where the running bytecode is what that text compiles to."""

import ast
import dis
import functools
import linecache
from types import FunctionType, ModuleType
from typing import Any, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from .fingerprint import fingerprint_of

__all__ = ["globals_in", "text_of", "text_that_runs"]

LIBRARIES = ("torch", "transformers")


class FunctionText(NamedTuple):
    """A function's text. node: its syntax tree; fingerprint: of it, under the name that the function has in transformers."""

    node: Any
    fingerprint: str


def text_of(function, name: str, others: Tuple[str, ...] = ()) -> Optional[FunctionText]:
    """The text of a plain function as if it were called `name`; None where there is none, where the bytecode is not what the text compiles
    to, or where a global name stands for something else than in transformers. others: names that the caller looks at itself."""
    text = text_that_runs(function, name)
    if text is None or not all(_is_known(function, used) for used in globals_in(function) if used not in others):
        return None
    return text


def text_that_runs(function, name: str) -> Optional[FunctionText]:
    """`text_of`, whatever the global names stand for."""
    if type(function) is not FunctionType or function.__closure__:
        return None
    return _text_of(function.__code__, name)


@functools.lru_cache(maxsize=1024)
def _text_of(code, name: str) -> Optional[FunctionText]:
    tree, compiled = _file("".join(linecache.getlines(code.co_filename)), code.co_filename)
    place = code.co_name, code.co_firstlineno
    if tree is None or all(_runs(again) != _runs(code) for again in _codes(compiled) if (again.co_name, again.co_firstlineno) == place):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and place == (node.name, min([node.lineno, *[one.lineno for one in node.decorator_list]])):
            return FunctionText(node, fingerprint_of(ast.FunctionDef(**{**dict(ast.iter_fields(node)), "name": name})))
    return None


@functools.lru_cache(maxsize=16)
def _file(source: str, path: str) -> tuple:
    """(syntax tree, code object) of a file, None for one that is no Python. What a function compiles to depends on the file's imports."""
    try:
        tree = ast.parse(source)
        return tree, compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None, None


def _codes(code) -> Iterator[Any]:
    for value in code.co_consts:
        if isinstance(value, type(code)):
            yield value
            yield from _codes(value)


def _runs(code) -> tuple:
    """The parts of a code object that say what it does."""
    consts = [(type(value), value) for value in code.co_consts if not isinstance(value, (type(code), str))]
    return code.co_code, code.co_names, code.co_varnames, code.co_argcount, code.co_kwonlyargcount, repr(consts)


def globals_in(function) -> List[str]:
    """The global names that a function looks up."""
    return _names_in(function.__code__)


@functools.lru_cache(maxsize=1024)
def _names_in(code) -> List[str]:
    return sorted({step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")})


def _is_known(function, name: str) -> bool:
    """Tells whether a global name of a function is a library, something of a library under its own name, or a builtin."""
    if name not in function.__globals__:
        return True
    value = function.__globals__[name]
    if isinstance(value, ModuleType):
        return value is {"torch": torch, "nn": nn, "F": nn.functional}.get(name)
    of_library = (getattr(value, "__module__", None) or "").split(".")[0] in LIBRARIES
    return of_library and getattr(value, "__name__", name) == name
