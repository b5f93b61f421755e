"""A fingerprint of a function or class in a source text: of its syntax tree without annotations, docstrings and decorators, so that it
changes with what the code does, and is the same under every version of Python."""

import ast
import hashlib
from typing import Any, Dict, Iterable

__all__ = ["fingerprint_of", "fingerprints_in"]

ABSENT = "absent"  # the fingerprint of what a text does not define
IGNORED = ("annotation", "returns", "decorator_list", "type_comment", "type_params", "kind", "ctx")
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def fingerprints(source: str, names: Iterable[str]) -> Dict[str, str]:
    """Fingerprints of functions, classes and methods by their names, such as "rotate_half" or "Qwen3MLP.forward"; ABSENT for one that
    the source does not define at its top level. Raises SyntaxError when the source is no Python."""
    return fingerprints_in(ast.parse(source), names)


def fingerprints_in(module: ast.Module, names: Iterable[str]) -> Dict[str, str]:
    """`fingerprints` of a source that has been parsed."""
    return {name: fingerprint_of(_find(module, name)) for name in names}


def _find(node: Any, name: str) -> Any:
    for part in name.split("."):
        body = getattr(node, "body", ())
        node = next((child for child in reversed(body) if getattr(child, "name", None) == part), None)  # the last definition counts
    return node


def fingerprint_of(node: Any) -> str:
    """The fingerprint of the syntax tree of a function or class; ABSENT for None."""
    return ABSENT if node is None else hashlib.sha256(repr(_tree(node)).encode()).hexdigest()[:16]


def _tree(node: Any) -> Any:
    """A syntax tree as nested tuples."""
    if isinstance(node, list):
        return [_tree(child) for child in node if not (isinstance(child, ast.AnnAssign) and child.value is None)]
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, ast.AnnAssign):
        return "Assign", ("targets", [_tree(node.target)]), ("value", _tree(node.value))
    fields = dict(ast.iter_fields(node))
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    # Fields that are empty are left out: a newer Python has more of them.
    kept = [(name, _tree(value)) for name, value in fields.items() if name not in IGNORED and value is not None and value != []]
    return (type(node).__name__, *kept)
