"""Planted errors that are generated: one of each statement of a function. A term, a factor, a mask or a case is dropped, a sign is turned,
a bound moves by one, or two saved tensors change places. A seed chooses which, so nobody chooses those that a check is known to notice."""

import ast
import functools
import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED = 20261128
STATEMENTS = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)
TURNED = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
             ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "==")}  # fmt: skip


class Source:
    """A file's text, in bytes, as ast counts columns, and its tree. file: as of a planted error."""

    def __init__(self, file: str):
        self.text = (ROOT / (file if file.startswith("kernel_src/") else f"torch-ext/{file}")).read_bytes()
        self.tree, self.starts = ast.parse(self.text), [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node, operand: bool = False) -> str:
        """The text of a node; of an operand in parentheses where it is more than a name, a number or a call."""
        first, last = self.span(node)
        text = self.text[first:last].decode()
        return f"({text})" if operand and not isinstance(node, (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript)) else text

    def errors(self, statement: ast.stmt, node: ast.AST) -> Iterator[str]:
        """The text of a statement with each error that a node in it can have."""
        start, stop = self.span(statement)

        def replaced(first: int, last: int, new: str) -> str:
            return self.text[start:first].decode() + new + self.text[last:stop].decode()

        kept, pair, swapped = errors_at(node)
        for each in kept:
            yield replaced(*self.span(node), self.of(each, operand=True))
        if pair is not None and type(pair[1]) in TURNED:
            begin, end = self.span(pair[0])[1], self.span(pair[2])[0]
            yield replaced(begin, end, self.text[begin:end].decode().replace(*TURNED[type(pair[1])], 1))
        for left, right in zip(swapped, swapped[1:]):
            (begin, one), (two, end) = self.span(left), self.span(right)
            yield replaced(begin, end, (self.text[two:end] + self.text[one:two] + self.text[begin:one]).decode())


def errors_at(node: ast.AST) -> tuple[list, tuple | None, list]:
    """(nodes each of which can stand for a node; left, operator, right, where the operator can be another; nodes that can be swapped)."""
    match node:
        case ast.BinOp(left, ast.Add() | ast.Mult(), right):
            return [left, right], (left, node.op, right), []
        case ast.BinOp(left, ast.BitAnd() | ast.BitOr(), right):
            return [left, right], None, []
        case ast.BinOp(left, ast.Sub() | ast.Div(), right):
            return [left], (left, node.op, right), []
        case ast.UnaryOp(ast.USub() | ast.Not(), operand) if not isinstance(operand, ast.Constant):
            return [operand], None, []
        case ast.Call(ast.Attribute(attr="where"), [_, chosen, _]):
            return [chosen], None, []
        case ast.Call(ast.Attribute(attr="save_for_backward"), saved):
            return [], None, saved
        case ast.IfExp(test, body, orelse):
            # What nothing needs, made all the same, would be dropped.
            return [orelse] if "need" in ast.unparse(test) else [body, orelse], None, []
        case ast.BoolOp(_, [left, right]):
            return [left, right], (left, node.op, right), []
        case ast.Compare(left, [operator], [right]):
            return [], (left, operator, right), []
    return [], None, []


source_of = functools.cache(Source)


@functools.cache
def errors_of(file: str, function: str) -> dict[str, list[str]]:
    """By statement of a function, each that occurs once in it: its text with each error."""
    source = source_of(file)
    place: ast.AST = source.tree
    for name in function.split("."):
        place = next(node for node in place.body if getattr(node, "name", "") == name)
    whole, found = source.of(place), {}
    for statement in ast.walk(place):
        if isinstance(statement, STATEMENTS):
            old = source.of(statement)
            if whole.count(old) == 1 and not old.startswith("fail("):
                found[old] = sorted({new for node in ast.walk(statement) for new in source.errors(statement, node)} - {old})
    return {old: new for old, new in found.items() if new}


def generated(file: str, check: str, functions: str, kernels: bool = True, same: dict[str, str] | None = None) -> list[tuple]:
    """Planted errors in the form of `MUTANTS`, one of each statement of some functions of a file.

    check: one, or several with "or" between them, one of which must fail. same: texts with an error that changes no result, and why.
    """
    rows = []
    for function in functions.split():
        for old, errors in errors_of(file, function).items():
            left = [new for new in errors if new not in (same or ())]
            if left:
                rows.append((file, function, old, random.Random(f"{SEED} {file} {function} {old}").choice(left), check, kernels))
    return rows
