"""Changes of a modeling file, each at one place: a term dropped, a constant changed, operands swapped, a call left out, another order."""

import ast
import copy
import random
from collections.abc import Iterator

KINDS = "Norm", "Scale", "MLP", "Feed", "Attention", "DecoderLayer"  # the ends of the names of classes whose forwards are changed
OF_EXPERTS = "Router", "MoE", "Moe", "MoeBlock", "Statics"  # and of those of layers with experts
OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}


def functions_in(tree: ast.Module, kinds: tuple[str, ...] = KINDS) -> list:
    """The functions whose change is one of what a decoder layer computes. kinds: the ends of the names of their classes."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith(kinds)]
    functions = [node for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef)]
    methods = [node for node in functions if node.name not in ("__init__", "extra_repr")]
    turning = ("apply_rotary_pos_emb", "rotate_half", "quarter_turn")
    return methods + [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in turning and kinds == KINDS]


def become(node, other) -> None:
    """Puts a node in another's place."""
    node.__class__, node.__dict__ = other.__class__, dict(vars(other))


def changes_of(node) -> list:
    """[(what, function that changes the node)]"""
    found = []
    if isinstance(node, ast.BinOp):
        found += [("left alone", lambda x: become(x, x.left)), ("right alone", lambda x: become(x, x.right))]
        if type(node.op) in OTHER:
            found.append(("another operator", lambda x: setattr(x, "op", OTHER[type(x.op)]())))
        if isinstance(node.op, (ast.Sub, ast.Div)):
            found.append(("swapped", lambda x: x.__dict__.update(left=x.right, right=x.left)))
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        found.append(("another constant", lambda x: setattr(x, "value", not x.value if type(x.value) is bool else x.value + 1)))
    elif isinstance(node, ast.UnaryOp):
        found.append(("no sign", lambda x: become(x, x.operand)))
    elif isinstance(node, ast.If):
        found.append(("negated", lambda x: setattr(x, "test", ast.UnaryOp(ast.Not(), x.test))))
    elif isinstance(node, ast.Call):
        if len(node.args) > 1:
            found.append(("swapped arguments", lambda x: x.args.__setitem__(slice(2), x.args[1::-1])))
        if len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred):
            found.append(("not called", lambda x: become(x, x.args[0])))
            found.append(("called twice", lambda x: setattr(x, "args", [copy.deepcopy(x)])))
        if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") not in ("self", "torch", "nn"):
            found.append(("no method", lambda x: become(x, x.func.value)))
        found += [(f"without {each.arg}", lambda x, i=i: x.keywords.pop(i)) for i, each in enumerate(node.keywords) if each.arg]
    if isinstance(getattr(node, "body", None), list) and len(node.body) > 1:
        for i in range(len(node.body) - 1):
            found.append(("another order", lambda x, i=i: x.body.__setitem__(slice(i, i + 2), x.body[i : i + 2][::-1])))
            found.append(("a statement less", lambda x, i=i: x.body.pop(i)))
    return found


def changed(source: str, seed: int, kinds: tuple[str, ...] = KINDS) -> Iterator[tuple[str, str]]:
    """(what was changed, the file) for every change, in the order that a seed gives. kinds: as of `functions_in`."""
    tree = ast.parse(source)
    sites = [
        (i, j, k)
        for i, function in enumerate(functions_in(tree, kinds))
        for j, node in enumerate(ast.walk(function))
        for k, _ in enumerate(changes_of(node))
    ]
    random.Random(seed).shuffle(sites)
    for i, j, k in sites:
        made = copy.deepcopy(tree)
        function = functions_in(made, kinds)[i]
        node = list(ast.walk(function))[j]
        line, before = getattr(node, "lineno", function.lineno), ast.unparse(node).splitlines()[0]
        what, change = changes_of(node)[k]
        change(node)
        yield f"{function.name}, line {line}: {what}: {before}", ast.unparse(ast.fix_missing_locations(made))
