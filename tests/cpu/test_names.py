"""Names of what ships: each file of `shared` says which of its names are for other files, and a class has a name of its own, so that a
name in a docstring or a search says which one is meant."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

from tests.cpu.test_imports import PACKAGES, SHARED, modules_of

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for path in SHARED.rglob("*.py") if path.name != "__init__.py")
# What a file of the tree may take from `shared` without being shipped; tests look into whatever they test.
BESIDE = [path for folder in ("tools", "benchmark", "interpreter") for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def public_names(path: Path) -> list:
    """`__all__` of a file."""
    [found] = [node.value for node in tree_of(path).body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    return ast.literal_eval(found)


def defined_in(path: Path) -> set:
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def taken_by(path: Path, here: tuple) -> dict:
    """{file of shared: the names that a file takes from it}. here: the folder of the file inside its package."""
    found, modules = defaultdict(set), {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) + 1 - node.level] if node.level else ()
            parts = (*base, *(node.module.split(".") if node.module else ()))
            if "shared" not in parts:
                continue
            folder = SHARED.joinpath(*parts[parts.index("shared") + 1 :])
            for alias in node.names:
                if folder.with_suffix(".py").is_file():
                    found[folder.with_suffix(".py")].add(alias.name)
                elif (folder / f"{alias.name}.py").is_file():
                    modules[alias.asname or alias.name] = folder / f"{alias.name}.py"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found[modules[node.value.id]].add(node.attr)
    return found


def test_each_file_says_its_public_names():
    """They are those that other files take, and no file takes another one: what no file takes is the file's own, whatever its name."""
    places = {path: tuple(name.split(".")[:-1]) for package in PACKAGES for name, path in modules_of(package).items()}
    taken, wrong = defaultdict(set), {}
    for path, here in [*places.items(), *((path, ()) for path in BESIDE)]:
        for other, names in taken_by(path, here).items():
            if other != path:
                taken[other] |= names
    for path in FILES:
        said, names = public_names(path), defined_in(path)
        expected = taken[path] & names
        if len(said) != len(expected) or {*said} != expected:
            wrong[path.relative_to(SHARED).as_posix()] = {"not taken": {*said} - expected, "not said": expected - {*said}}
    assert len(FILES) > 150 and not wrong


def test_each_class_has_a_name_of_its_own():
    defined = defaultdict(set)
    for path in SHARED.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].add(path.relative_to(SHARED).as_posix())
    assert len(defined) > 200
    assert not {name: sorted(files) for name, files in defined.items() if len(files) > 1}
