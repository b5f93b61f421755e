"""The order of imports: a package, shared.rows, the rooms of shared.hf, shared.decoder, shared.ops, shared.runtime; none back, and no
circles among modules."""

import ast
import functools
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tools.kernel_package import package_folders, read_package, whole_package

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT / "torch-ext" / "shared"
PACKAGES = [*(read_package(folder) for folder in package_folders(root=ROOT)), whole_package(ROOT)]
# From the first to the last: a module imports of its own layer and of those after it.
ROOMS = ("install", "say", "model", "capture", "layer", "attention", "family", "parts")
LAYERS = ("package", "shared.rows", *(f"shared.hf.{room}" for room in ROOMS), "shared.hf", "shared.decoder", "shared.ops", "shared.runtime")
TOP_LEVEL = {path.stem for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
# What the modules of a folder may import of this repository.
MAY_IMPORT = {
    "kernel_src": set(),
    "tools": {"kernel_src"},
    "interpreter": set(),
    "benchmark": {"tools"},
}
# One file a line: the interpreter's part that stands in for the driver knows the manifest's entries; and the host's time is measured
# without a GPU through that part.
ALSO = {"interpreter/backend.py": {"kernel_src"}, "benchmark/benchmark_host.py": {"interpreter"}}


def modules_of(package) -> dict:
    """The files of a package, and of what every package ships, by their dotted names inside it."""
    found = {path.relative_to(package.sources).with_suffix(""): path for path in package.sources.rglob("*.py")}
    found |= {Path("shared") / path.relative_to(SHARED).with_suffix(""): path for path in SHARED.rglob("*.py")}
    return {".".join(name.parts).removesuffix("__init__").rstrip("."): path for name, path in found.items()}


@functools.cache
def statements(path: Path) -> list:
    """(an import, whether it is at the top) of a file, of which several packages may consist."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(node, node in tree.body) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def first_names(node) -> set:
    """Returns the first names of what a statement imports, of absolute imports only."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [] if node.level else [node.module]
    return {name.partition(".")[0] for name in names}


def imports(path: Path, name: str, modules) -> tuple[set, set]:
    """(modules of the package, the first names of all others) that a file imports, anywhere in it."""
    here = name.split(".") if path.stem == "__init__" and name else name.split(".")[:-1]
    own, others = set(), set()
    for node, _ in statements(path):
        others |= first_names(node)
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) + 1 - node.level] + (node.module.split(".") if node.module else [])
            inside = {".".join([*base, alias.name]) for alias in node.names}
            own |= {found if found in modules else ".".join(base) for found in inside}
    return own, others


def layer(module: str) -> int:
    return next((i for i, name in enumerate(LAYERS) if f"{module}.".startswith(f"{name}.")), 0)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_import_runs_back(package):
    modules = modules_of(package)
    assert {layer(name) for name in modules} == set(range(len(LAYERS)))
    for name, path in modules.items():
        own, _ = imports(path, name, modules)
        for other in own - {"_ops"}:  # which a build generates
            assert other in modules, f"{name} imports {other}, which is no file"
            assert layer(name) <= layer(other), f"{name} imports {other}, which comes before it"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_import_leads_to_a_file_of_the_tree(package):
    """Through a link for what packages share, so that an editor and mypy can follow it. A build has the files themselves."""
    link = package.sources / "shared"
    assert link.is_symlink() and link.resolve() == SHARED
    assert not [path for path in package.sources.rglob("*") if path.is_relative_to(link) and path != link]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_there_are_no_circles(package):
    modules = modules_of(package)
    TopologicalSorter({name: imports(path, name, modules)[0] for name, path in modules.items()}).prepare()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_what_ships_imports_torch_and_the_standard_library(package):
    """Anywhere at the top of a file; inside of functions also what a patched model was made of."""
    for name, path in modules_of(package).items():
        found = set().union(*(first_names(node) for node, is_at_top in statements(path) if is_at_top)) - {"torch", *sys.stdlib_module_names}
        assert not found, f"{name} imports {found}"
        _, others = imports(path, name, ())
        assert not others & TOP_LEVEL, f"{name} imports {others & TOP_LEVEL} of this repository"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_tools_import_no_tests(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        allowed = MAY_IMPORT[folder] | {folder} | ALSO.get(path.relative_to(ROOT).as_posix(), set())
        _, others = imports(path, path.stem, ())
        assert not (others & TOP_LEVEL) - allowed, f"{path.relative_to(ROOT)} imports {(others & TOP_LEVEL) - allowed}"


def imported_at_the_top(path: Path) -> set:
    """The dotted names of what a test module imports when it is imported, absolute ones."""
    found = set()
    for node in [node for node, is_at_top in statements(path) if is_at_top]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_tests_on_a_gpu_need_no_compiler():
    """A machine with a GPU has neither cuda-tile nor what imports it, and that it works all the same is itself a test."""
    waiting, seen = [*(ROOT / "tests/gpu").glob("*.py"), *(ROOT / "tests/multigpu").glob("*.py")], set()
    while waiting:
        path = waiting.pop()
        for name in imported_at_the_top(path):
            assert name.partition(".")[0] not in ("interpreter", "kernel_src", "cuda"), f"{path.relative_to(ROOT)} imports {name}"
            inside = ROOT.joinpath(*name.split("."))
            for other in (inside.with_suffix(".py"), inside / "__init__.py"):
                if other.is_file() and name.startswith("tests") and other not in seen:
                    seen.add(other)
                    waiting.append(other)
    assert len(seen) > 10
