"""Reads off a decoder without a row, and off attention that is called as the module that it is, whether they hand their masks on and do
nothing else with them: then attention of ours may get one that is no tensor.

| forward    | what it may do with masks                                                                                           |
|------------|---------------------------------------------------------------------------------------------------------------------|
| decoder's  | make them by functions of transformers called create_..._mask, give them names, hand them to its layers             |
| attention's| hand its `attention_mask` to the function that it takes from ALL_ATTENTION_FUNCTIONS                                |
"""

import ast
from typing import Any, Dict, Iterator, List, Optional, Set

from ..parts.modules import without_decorators
from ..parts.texts import text_that_runs

__all__ = ["FUNCTIONS", "why_masks_stay"]

FUNCTIONS, MASK = "ALL_ATTENTION_FUNCTIONS", "attention_mask"


def _parents(tree: Any) -> Dict[Any, Any]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _targets(node: Any) -> List[str]:
    """The names that a statement or an expression gives a value, or an entry."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    held = (each.value if isinstance(each, ast.Subscript) else each for each in targets)
    return [each.id for each in held if isinstance(each, ast.Name)]


def _given(tree: Any) -> List[Any]:
    """Lists the assignments."""
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None]


def _names(node: Any) -> Iterator[Any]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Name))


def _makes_masks(name: str) -> bool:
    return name.startswith("create_") and name.endswith("_mask")


def _is_entry(node: Any, masks: Any) -> bool:
    """Whether a node is an entry of `masks` by its key, and no part of a mask."""
    if not isinstance(node, ast.Subscript) or node.value is not masks:
        return False
    key = node.slice
    return isinstance(key.value, str) if isinstance(key, ast.Constant) else isinstance(key, (ast.Name, ast.Attribute, ast.Subscript))


def _is_handed(use: Any, parents: Dict[Any, Any], called: Set[str]) -> bool:
    """Whether a use of a name is, perhaps with a key, an argument of a call of one of `called`."""
    node = parents[use]
    while isinstance(node, ast.keyword) or _is_entry(node, use):
        use, node = node, parents[node]
    return isinstance(node, ast.Call) and use is not node.func and isinstance(node.func, ast.Name) and node.func.id in called


def _parts(node: Any) -> List[Any]:
    """What a mask may be in an expression whose value is one, or several by key."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.Dict):
        return node.values
    return [node.func] if isinstance(node, ast.Call) else [node.value] if isinstance(node, ast.Subscript) else []


def _is_mask(node: Any, names: Set[str]) -> bool:
    return node.id in names if isinstance(node, ast.Name) else any(_is_mask(each, names) for each in _parts(node))


def _decoder_does_more(tree: Any) -> bool:
    parents, masks = _parents(tree), {name.id for name in _names(tree) if _makes_masks(name.id)}
    layers = {name.id for node in ast.walk(tree) if isinstance(node, ast.For) for name in _names(node.target)}
    if not masks:
        return True
    for _ in range(3):  # a mask may have a second name
        masks.update(name for node in _given(tree) if _is_mask(node.value, masks) for name in _targets(node))
    for use in _names(tree):
        if use.id in masks and isinstance(use.ctx, ast.Load) and not _is_handed(use, parents, layers):
            inside, node = use, parents[use]
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                continue
            while any(each is inside for each in _parts(node)):
                inside, node = node, parents[node]
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or inside is not node.value or not _targets(node):
                return True
    return False


def _attention_does_more(tree: Any) -> bool:
    parents = _parents(tree)
    functions = {name for node in _given(tree) if FUNCTIONS in {each.id for each in _names(node.value)} for name in _targets(node)}
    uses = [name for name in _names(tree) if name.id == MASK]
    return not functions or not all(_is_handed(use, parents, functions) for use in uses)


def _text(cls: type) -> Any:
    function = without_decorators(cls.forward)  # type: ignore[attr-defined]
    text = text_that_runs(function, "forward")
    return None if text is None else text.node


def why_masks_stay(decoder: type, attentions: Set[type]) -> Optional[str]:
    """Says which forward does more with a mask than to hand it on, or has no text; None where none does. attentions: the classes of what is
    called as attention."""
    for does_more, classes in ((_decoder_does_more, {decoder}), (_attention_does_more, attentions)):
        for cls in classes:
            tree = _text(cls)
            if tree is None or does_more(tree):
                return f"{cls.__name__}.forward does more with its masks than to hand them on, or its text is not there"
    return None
