"""Plants errors in the kernels and in the operations, and runs the cheapest check that must notice each; tests/ops has both.

A mutant replaces one piece of text inside one function of a copy of the package. The copy runs with the interpreter in the
driver's place, or in plain PyTorch, and the check compares it with float64. A mutant that survives is a hole in the checks.
"""

import argparse
import ast
import compileall
import concurrent.futures
import contextlib
import functools
import importlib
import py_compile
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import torch

import kernel_src
from interpreter import InterpreterError
from interpreter.backend import InterpreterBackend
from tests import ops
from tests.ops.common import runtime_of

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "torch-ext" / "qwen3"
# Every file of kernel_src that lists what to prebuild.
KERNEL_FILES = sorted((ROOT / "kernel_src").glob("*.py"))
OPERATIONS = tuple(path.stem for path in KERNEL_FILES if "\ndef variants(" in path.read_text(encoding="utf-8"))


class Mutant(NamedTuple):
    """file: `kernel_src/x.py`, or a file of the package; function: where `old`, which must occur there once, becomes `new`.
    check: of `CHECKS`, as "operation: check"; kernels: False to run in PyTorch."""

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
    """A copy of the package with its bytecode, which Python takes for every source that is still the same: most of what importing a copy
    costs is compiling it."""
    folder = tempfile.TemporaryDirectory()
    leave_out = shutil.ignore_patterns("__pycache__", "cubins")
    shutil.copytree(SOURCES, folder.name, ignore=leave_out, dirs_exist_ok=True)
    shutil.copytree(SOURCES.parent / "shared", Path(folder.name) / "shared", ignore=leave_out)
    compileall.compile_dir(folder.name, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return folder


@contextlib.contextmanager
def planted(folder: Path, name: str, mutant: Mutant | None, kernels: bool = True):
    """A copy of the package, imported from `folder` as `name`, with the error in it. kernels: whether the interpreter runs them."""
    shutil.copytree(compiled_copy().name, folder / name)
    replaced = {}
    if mutant is not None and mutant.file.startswith("kernel_src/"):
        module = kernel_module(mutant)
        replaced = {name: sys.modules.pop(name, None) for name in (module.__name__, *importers(Path(mutant.file).stem))}
        sys.modules[module.__name__] = module
    elif mutant is not None:
        path = folder / name / mutant.file
        path.write_text(plant(path.read_text(encoding="utf-8"), mutant), encoding="utf-8")
    sys.path.insert(0, str(folder))
    # A result that was never written must not be what an earlier test left in memory: new memory is NaN.
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        package = importlib.import_module(name)
        if kernels:
            runtime = runtime_of(package)
            runtime.launch.backend = InterpreterBackend(runtime, OPERATIONS)
        yield package
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        sys.path.remove(str(folder))
        for module in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            del sys.modules[module]
        for module, original in replaced.items():
            sys.modules.pop(module, None)
            if original is not None:
                sys.modules[module] = original
                setattr(kernel_src, module.rpartition(".")[2], original)


# ---------------------------------------------------------------- what tests/ops has
CHECKS = {f"{name}: {check}": function for name, module in ops.modules().items() for check, function in module.CHECKS.items()}
MUTANTS = [
    Mutant(file, function, old, new, f"{name}: {check}", *kernels)
    for name, module in ops.modules().items()
    for file, function, old, new, check, *kernels in module.MUTANTS
]
KERNEL_MUTANTS = [mutant for mutant in MUTANTS if mutant.file.startswith("kernel_src/")]
OPERATION_MUTANTS = [mutant for mutant in MUTANTS if not mutant.file.startswith("kernel_src/")]


# ---------------------------------------------------------------- python -m tests.mutants
def fits(mutant: Mutant) -> bool:
    """Whether the source still has the text that the error replaces."""
    folder = ROOT if mutant.file.startswith("kernel_src/") else SOURCES.parent if mutant.file.startswith("shared/") else SOURCES
    try:
        plant((folder / mutant.file).read_text(encoding="utf-8"), mutant)
    except ValueError:
        return False
    return True


def caught(number: int) -> bool:
    """Plants one of `MUTANTS` and says whether its check notices. False where the error does not fit the source any more."""
    mutant = MUTANTS[number]
    if not fits(mutant):
        return False
    with tempfile.TemporaryDirectory() as folder, planted(Path(folder), f"mutant_{number}", mutant, mutant.kernels) as package:
        try:
            CHECKS[mutant.check](package)
        except (AssertionError, InterpreterError):
            return True
    return False


def main(arguments=None) -> int:
    """Plants those of some files, or all, on all cores, and prints how many were caught and which were not."""
    p = argparse.ArgumentParser(prog="python -m tests.mutants", description="Plants errors and counts those that the tests catch.")
    p.add_argument("files", nargs="*", metavar="file", help="files with these words in their paths; without any, all")
    files = p.parse_args(arguments).files
    wanted = [i for i, mutant in enumerate(MUTANTS) if not files or any(word in mutant.file for word in files)]
    if not wanted:
        p.error(f"no planted error is in {', '.join(files)}")
    with concurrent.futures.ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = list(pool.map(caught, wanted, chunksize=4))
    places: dict[str, list[bool]] = {}
    for mutant, was_caught in zip((MUTANTS[i] for i in wanted), found, strict=True):
        places.setdefault(mutant.file, []).append(was_caught)
        if not was_caught:
            print(f"{'survived' if fits(mutant) else 'not in the source'}: {mutant} (check {mutant.check})")
    for place, results in places.items():
        print(f"{place:40} {sum(results):4} of {len(results)} caught")
    print(f"{sum(found)} of {len(found)} planted errors caught: {'all of them' if all(found) else 'the others are holes in the tests'}")
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
