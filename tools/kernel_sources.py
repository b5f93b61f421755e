"""What the kernels of an operation are made of: a digest by which an assembly knows compiled kernels that are older than their source."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from pathlib import Path

PACKAGE = "kernel_src"


class SourceError(Exception):
    """A source of kernels is missing or is not Python; the text names it."""


def _source(module: str) -> tuple[str, str]:
    """(path, text) of a module of kernel_src."""
    spec = importlib.util.find_spec(f"{PACKAGE}.{module}")
    if spec is None or spec.origin is None:
        raise SourceError(f"{PACKAGE} has no {module}.py")
    try:
        return spec.origin, Path(spec.origin).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SourceError(f"{spec.origin}: {error}") from error


@functools.cache
def _read(path: str, source: str) -> tuple[frozenset[str], str]:
    """(the modules of kernel_src that a module imports, its syntax without docstrings, comments and line numbers, which are no part of a
    kernel)."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise SourceError(f"{path}: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return _imported(tree), _text(tree)


def _imported(tree: ast.Module) -> frozenset[str]:
    """The modules of kernel_src that a module imports, by their names there."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names if node.module == PACKAGE)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}.")}
    return frozenset(found)


def _text(node: object) -> str:
    """The syntax as text. ast.dump's differs between versions of Python, which name other fields that are empty."""
    if isinstance(node, ast.AST):
        fields = [f"{name}={_text(value)}" for name, value in ast.iter_fields(node) if value is not None and value != []]
        return f"{type(node).__name__}({', '.join(fields)})"
    return f"[{', '.join(map(_text, node))}]" if isinstance(node, list) else repr(node)


def source_digest(operation: str) -> str:
    """sha256 of the module of an operation and of what it imports of kernel_src, directly or through others.

    Raises:
        SourceError: if one of them cannot be read.
    """
    texts: dict[str, str] = {}
    waiting = {operation}
    while waiting:
        module = waiting.pop()
        imported, texts[module] = _read(*_source(module))
        waiting |= imported - texts.keys()
    content = "\0".join(f"{module}\0{text}" for module, text in sorted(texts.items()))
    return hashlib.sha256(content.encode()).hexdigest()
