"""The forwards of a modeling module of transformers without their names, to be compared with those of another family."""

import ast
import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from tools.transformers_texts import installed_source

PASSED = ("position_ids", "use_cache", "output_attentions")  # what a forward hands on by name or among its other keywords


class Text(NamedTuple):
    """A forward without its names. shape: of its body; names: of the attributes of self, in the order of the body; lines: to show."""

    shape: str
    names: tuple[str, ...]
    lines: tuple[str, ...]


class _Shape(ast.NodeTransformer):
    """Takes the names out of a forward. attributes: whether those of self, too."""

    def __init__(self, prefix: str, given: Sequence[str], attributes: bool):
        self.prefix, self.given, self.attributes = prefix, list(given), attributes
        self.names: dict[str, str] = {}
        self.locals: dict[str, str] = {name: f"given{i}" for i, name in enumerate(given[1:2])}

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == self.given[0]:
            name = self.names.setdefault(node.attr, f"a{len(self.names)}")
            return ast.Attribute(node.value, name if self.attributes else node.attr, node.ctx)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        if isinstance(node.ctx, ast.Store) and node.id not in self.given:
            self.locals.setdefault(node.id, f"v{len(self.locals)}")
        own = node.id.startswith(self.prefix) and node.id[len(self.prefix) :]
        return ast.Name(self.locals.get(node.id, f"X{own}" if own else node.id), node.ctx)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        return self.visit(ast.Assign([node.target], node.value, lineno=0)) if node.value else None

    def visit_Assign(self, node: ast.Assign) -> Any:  # the value comes first, as it runs
        node.value = self.visit(node.value)
        node.targets = [self.visit(target) for target in node.targets]
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        if any(each.arg is None for each in node.keywords):
            node.keywords = [each for each in node.keywords if each.arg not in PASSED]
        node.keywords.sort(key=lambda each: each.arg or "~")
        return self.generic_visit(node)


class Module:
    """A modeling module of the installed transformers."""

    def __init__(self, name: str):
        self.name, self.tree = name, ast.parse(installed_source(name))
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

    def method(self, cls: str, name: str = "forward") -> ast.FunctionDef | None:
        body = self.classes[cls].body if cls in self.classes else []
        return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)

    def arguments(self, cls: str) -> list[str]:
        forward = self.method(cls)
        return [] if forward is None else [each.arg for each in forward.args.args]

    def made(self, cls: str) -> dict[str, list[str]]:
        """The classes of this module that a class's __init__ makes, by attribute."""
        found: dict[str, list[str]] = {}
        for node in ast.walk(self.method(cls, "__init__") or ast.Pass()):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                names = [each.func.id for each in ast.walk(node.value) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]
                found.setdefault(node.targets[0].attr, []).extend(name for name in names if name[0].isupper())
        return found


def text_of(nodes: Sequence[ast.FunctionDef], prefix: str) -> Text:
    """The text of a forward, or of several functions. prefix: of the names of classes, which is ignored."""
    shapes: list[str] = []
    lines: list[str] = []
    names: list[str] = []
    for node in nodes:
        given = [each.arg for each in node.args.args]
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        without, shown = _Shape(prefix, given, True), _Shape(prefix, given, False)
        shapes += [ast.unparse(line) for line in map(without.visit, copy.deepcopy(body)) if line]
        lines += [ast.unparse(line) for line in map(shown.visit, copy.deepcopy(body)) if line]
        names += without.names
    return Text("\n".join(shapes), tuple(names), tuple("\n".join(lines).splitlines()))
