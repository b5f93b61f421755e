"""Plants errors in the kernels and in the operations, and runs the cheapest check that must notice each; tests/ops has both.

A mutant replaces one piece of text inside one function of the package, imported under a name of its own, or of a kernel. The package runs
with the interpreter in the driver's place, or in plain PyTorch, and the check compares it with float64. A mutant that survives is a hole
in the checks. tests/verdicts.py plants them all and records which are noticed.
"""

import ast
import compileall
import contextlib
import functools
import importlib
import importlib.util
import itertools
import py_compile
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple

import torch

import kernel_src
from interpreter.backend import interpreting
from tests import ops
from tests.ops.common import runtime_of

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "torch-ext" / "qwen3"
# Every file of kernel_src that lists what to prebuild.
KERNEL_FILES = sorted((ROOT / "kernel_src").glob("*.py"))
OPERATIONS = tuple(path.stem for path in KERNEL_FILES if "\ndef variants(" in path.read_text(encoding="utf-8"))


class Mutant(NamedTuple):
    """file: `kernel_src/x.py`, or a file of the package; function: where `old`, which must occur there once, becomes `new`.
    check: of `CHECKS`, as "operation: check", or "operation: one or another"; kernels: False to run in PyTorch."""

    file: str
    function: str
    old: str
    new: str
    check: str
    kernels: bool = True

    def __str__(self):
        return f"{self.file}:{self.function}: {self.old} -> {self.new}"


# ---------------------------------------------------------------- planting
def functions_of(tree: ast.AST, prefix: str = ""):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name, node
            yield from functions_of(node, f"{prefix}{node.name}.")


def plant(source: str, mutant: Mutant) -> str:
    """The source with the error in it. Raises ValueError when the mutant does not fit the source any more."""
    nodes = dict(functions_of(ast.parse(source)))
    if mutant.function not in nodes:
        raise ValueError(f"{mutant}: there is no such function")
    lines = source.splitlines(keepends=True)
    first, last = nodes[mutant.function].lineno - 1, nodes[mutant.function].end_lineno
    text = "".join(lines[first:last])
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant}: the text occurs {text.count(mutant.old)} times, expected once")
    return "".join([*lines[:first], text.replace(mutant.old, mutant.new), *lines[last:]])


def kernel_module(mutant: Mutant) -> types.ModuleType:
    """The module of kernel_src with the error in it."""
    path = ROOT / mutant.file
    module = types.ModuleType(f"kernel_src.{path.stem}")
    exec(compile(plant(path.read_text(encoding="utf-8"), mutant), str(path), "exec"), module.__dict__)
    return module


@functools.cache
def importers(module: str) -> frozenset[str]:
    """The modules of kernel_src that import something of another one, directly or through others: they hold its functions."""
    found: set[str] = set()
    for path in KERNEL_FILES:
        if f"from kernel_src.{module} import" in path.read_text(encoding="utf-8"):
            found |= {f"kernel_src.{path.stem}", *importers(path.stem)}
    return frozenset(found)


@functools.cache
def compiled_copy() -> tempfile.TemporaryDirectory:
    """A copy of the package with its bytecode, which is only read: most of what importing the package costs is compiling it."""
    folder = tempfile.TemporaryDirectory()
    leave_out = shutil.ignore_patterns("__pycache__", "cubins")
    shutil.copytree(SOURCES, folder.name, ignore=leave_out, dirs_exist_ok=True)
    compileall.compile_dir(folder.name, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return folder


class PlantedFile(SourceFileLoader):
    """Finds and loads one module of a package from a text in the place of its file."""

    def __init__(self, name: str, path: Path, text: str):
        super().__init__(name, str(path))
        self.text = text

    def find_spec(self, fullname, path=None, target=None):
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None

    def get_code(self, fullname):
        return compile(self.text, self.path, "exec")


_names = (f"planted_{number}" for number in itertools.count())
# What a check uses of these is imported when it is: what is above them, the greater part of the package, it does without.
PARTS = ("shared/runtime/", "shared/ops/", "shared/decoder/")


@functools.cache
def exports() -> dict[str, tuple[str, str]]:
    """Where the package has what it offers by name: (module, name there)."""
    package = import_whole_package()
    start, found = len(package.__name__), {}
    for name, value in vars(package).items():
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        if module is not None and module.__name__.startswith(package.__name__ + ".") and getattr(module, name, None) is value:
            found[name] = (module.__name__[start:], name)
    forget_package(package)
    return found


class PackageInParts(types.ModuleType):
    """The package, which imports what is asked for. exports: where it has what it offers."""

    def __init__(self, name: str, folder: str, exports: dict[str, tuple[str, str]]):
        super().__init__(name)
        self.__path__, self.__package__, self.__exports__ = [folder], name, exports

    def __getattr__(self, name):
        if name not in self.__dict__.get("__exports__", ()):
            raise AttributeError(f"{self.__name__} offers no {name}")
        module, there = self.__exports__[name]
        return getattr(importlib.import_module(self.__name__ + module), there)


def import_package(mutant: Mutant | None = None) -> types.ModuleType:
    """The package, under a name that no other one has, with the error in it; in parts where the error is in one of these, or in none."""
    if mutant is not None and not mutant.file.startswith(PARTS):
        return import_whole_package(mutant)
    name, folder = next(_names), Path(compiled_copy().name)
    package = sys.modules[name] = PackageInParts(name, str(folder), exports())
    if mutant is not None:
        path, module = folder / mutant.file, ".".join((name, *Path(mutant.file).with_suffix("").parts))
        file = PlantedFile(module, path, plant(path.read_text(encoding="utf-8"), mutant))
        sys.meta_path.insert(0, file)
        try:
            importlib.import_module(module)
        except BaseException:
            forget_package(package)
            raise
        finally:
            sys.meta_path.remove(file)
    return package


def import_whole_package(mutant: Mutant | None = None) -> types.ModuleType:
    """The package with all that it imports by itself, under a name that no other one has, with the error in it."""
    name, folder, planted_files = next(_names), Path(compiled_copy().name), []
    if mutant is not None:
        path = folder / mutant.file
        module = ".".join((name, *Path(mutant.file).with_suffix("").parts))
        planted_files.append(PlantedFile(module, path, plant(path.read_text(encoding="utf-8"), mutant)))
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.meta_path[:0] = planted_files
    try:
        spec.loader.exec_module(package)
        if mutant is not None:
            importlib.import_module(module)  # which the package itself may leave for later
    except BaseException:
        forget_package(package)
        raise
    finally:
        for file in planted_files:
            sys.meta_path.remove(file)
    return package


def forget_package(package: types.ModuleType) -> None:
    """Takes a package out of what is imported."""
    name = package.__name__
    for module in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
        del sys.modules[module]


_shared: dict[str, types.ModuleType] = {}  # the last kernel file that had an error, and a package whose kernels it is one of


@contextlib.contextmanager
def package_of(mutant: Mutant | None) -> Iterator[types.ModuleType]:
    """A package for one mutant. Those of one kernel file follow each other in one package, whose own files are as they should be: what it
    remembers follows from what is prebuilt, which an error in a kernel's code leaves alone, and `planted` has it forget its launches."""
    if mutant is None or not mutant.file.startswith("kernel_src/"):
        package = import_package(mutant)
        try:
            yield package
        finally:
            forget_package(package)
        return
    if mutant.file not in _shared:
        while _shared:
            forget_package(_shared.popitem()[1])
        _shared[mutant.file] = import_package()
    yield _shared[mutant.file]


class CurrentKernels:
    """Kernels as kernel_src has them now, by name: what is prebuilt of one follows from none of the errors."""

    @staticmethod
    def get(name: str, kernel):
        return getattr(sys.modules.get(kernel._pyfunc.__module__) or importlib.import_module(kernel._pyfunc.__module__), name)


@contextlib.contextmanager
def planted_kernels(mutant: Mutant | None) -> Iterator[None]:
    """kernel_src with the error in it."""
    if mutant is None or not mutant.file.startswith("kernel_src/"):
        yield
        return
    module = kernel_module(mutant)
    replaced = {name: sys.modules.pop(name, None) for name in (module.__name__, *importers(Path(mutant.file).stem))}
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        for name, original in replaced.items():
            sys.modules.pop(name, None)
            if original is not None:
                sys.modules[name] = original
                setattr(kernel_src, name.rpartition(".")[2], original)


@contextlib.contextmanager
def planted(mutant: Mutant | None, kernels: bool = True) -> Iterator[types.ModuleType]:
    """The package with the error in it, or in its kernels. kernels: whether the interpreter runs them."""
    # A result that was never written must not be what an earlier test left in memory: new memory is NaN.
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with package_of(mutant) as package:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            interpreter = interpreting(runtime_of(package), OPERATIONS, CurrentKernels()) if kernels else contextlib.nullcontext()
            with interpreter, planted_kernels(mutant):  # what is prebuilt is listed once, from the sources as they should be
                yield package
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# ---------------------------------------------------------------- what tests/ops has
CHECKS = {f"{name}: {check}": function for name, module in ops.modules().items() for check, function in module.CHECKS.items()}
MUTANTS = [
    Mutant(file, function, old, new, f"{name}: {check}", *kernels)
    for name, module in ops.modules().items()
    for file, function, old, new, check, *kernels in module.MUTANTS
]
KERNEL_MUTANTS = [mutant for mutant in MUTANTS if mutant.file.startswith("kernel_src/")]
OPERATION_MUTANTS = [mutant for mutant in MUTANTS if not mutant.file.startswith("kernel_src/")]


def checks_of(check: str) -> list[str]:
    """The names in `CHECKS` of an error's check, which may be several."""
    operation, _, names = check.partition(": ")
    return [f"{operation}: {name}" for name in names.split(" or ")]


def notices(package: types.ModuleType, check: str) -> bool:
    """Whether a check fails, or what it runs raises an error or is refused by the interpreter or the launcher."""
    try:
        for name in checks_of(check):
            CHECKS[name](package)
    except NameError:  # the error's text is wrong, not what it says
        raise
    except Exception:
        return True
    return False


def fits(mutant: Mutant) -> bool:
    """Whether the source still has the text that the error replaces."""
    folder = ROOT if mutant.file.startswith("kernel_src/") else SOURCES.parent if mutant.file.startswith("shared/") else SOURCES
    try:
        plant((folder / mutant.file).read_text(encoding="utf-8"), mutant)
    except ValueError:
        return False
    return True
