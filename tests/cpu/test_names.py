"""Names of what ships: a class has a name of its own, so that a name in a docstring or a search says which one is meant."""

import ast
from collections import defaultdict
from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "torch-ext" / "shared"


def test_each_class_has_a_name_of_its_own():
    defined = defaultdict(set)
    for path in SHARED.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].add(path.relative_to(SHARED).as_posix())
    assert len(defined) > 200
    assert not {name: sorted(files) for name, files in defined.items() if len(files) > 1}
