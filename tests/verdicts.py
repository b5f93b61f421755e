"""Which planted errors their checks notice: `python -m tests.verdicts` plants those whose verdict is not known yet and records it.

A check's verdict follows from what it runs, so tests/verdicts.json names, by check, everything that ran while the check was run without an
error and with each of its errors, and a digest of all that:

- of the package, each function that was called, and what stands outside of functions in each module that was imported;
- the file of the check, tests/mutants.py and what they import of the tests, but without the tables of errors and other files' checks;
- each file of kernel_src whose kernels were launched or asked for, and what it imports;
- the interpreter, and the releases of PyTorch and cuda-tile.

`make test` plants only the errors whose verdict is not recorded, or whose check has another digest now; `make test-all` plants all of them.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests/verdicts.json"
FIRST_PARTY = ("tests", "kernel_src", "interpreter", "tools", "benchmark")
TABLES = ("MUTANTS", "CHECKS")  # of the files of tests/ops
WHOLE = "*"  # "path:*" is a file without these, "path:name" one function or table of it, and "path:" what is outside of functions


# ---------------------------------------------------------------- digests of sources
def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """A module and its statements, also those in others; a tenth of what ast.walk goes through."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, (ast.stmt, ast.excepthandler, ast.match_case))]


def _docstring_lines(tree: ast.AST) -> set[int]:
    found: set[int] = set()
    for node in _statements(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False) is not None:
            found.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def _pieces(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """(name, statement) of each function, method and table."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _pieces(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AugAssign)) and not prefix:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id in TABLES:
                yield target.id, node


@functools.cache
def pieces(text: str) -> dict[str, str]:
    """Digests of the parts of a source, by their names after the colon. Comments, docstrings and empty lines are left out. What is outside
    of functions has the names of methods with it: a new one may replace another class's."""
    tree = ast.parse(text)
    left_out, lines = _docstring_lines(tree), text.splitlines()
    lines = [line.rstrip() if number not in left_out and line.strip()[:1] not in ("", "#") else "" for number, line in enumerate(lines, 1)]
    outside, names, parts = lines[:], [], {}
    whole = lines[:]
    for name, node in _pieces(tree.body):
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]) - 1
        parts.setdefault(name, []).extend(lines[first : node.end_lineno])
        for number in range(first, node.end_lineno):
            outside[number] = ""
            if name in TABLES:
                whole[number] = ""
        if "." in name:
            names.append(name)
    parts |= {"": [*outside, *names], WHOLE: whole}
    return {name: hashlib.sha256("\n".join(filter(None, found)).encode()).hexdigest() for name, found in parts.items()}


class Sources:
    """Digests of parts of the tree at `root`."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self._files: dict[str, dict[str, str]] = {}

    def names(self, path: str) -> dict[str, str]:
        if path not in self._files:
            file = self.root / path
            self._files[path] = pieces(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return self._files[path]

    def digest(self, parts: Iterable[str], releases: dict[str, str]) -> str:
        """Digest of several parts; one that is not there any more counts as empty."""
        content = [f"{part} {self.names(part.partition(':')[0]).get(part.partition(':')[2], '')}" for part in sorted(parts)]
        return hashlib.sha256("\n".join([*map(str, sorted(releases.items())), *content]).encode()).hexdigest()[:16]


def releases() -> dict[str, str]:
    return {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "cuda-tile")}


@functools.cache
def _imports(path: str) -> frozenset[str]:
    """The first-party files that a file imports itself."""
    found: set[str] = set()
    for node in _statements(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.ImportFrom):
            names = [".".join((*Path(path).parent.parts, node.module or ""))]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.partition(".")[0] in FIRST_PARTY:
                file = Path(*name.strip(".").split("."))
                found |= {str(f) for f in (file.with_suffix(".py"), file / "__init__.py") if (ROOT / f).is_file()}
    return frozenset(found)


@functools.cache
def imported(path: str) -> frozenset[str]:
    """The first-party files that a file imports, directly or through others, and itself."""
    found, waiting = set(), {path}
    while waiting:
        each = waiting.pop()
        found.add(each)
        waiting |= _imports(each) - found
    return frozenset(found)


# ---------------------------------------------------------------- the record
def key(mutant) -> str:
    """The check of an error, and where it runs."""
    return mutant.check if mutant.kernels else f"{mutant.check}, in PyTorch"


def name_of(mutant) -> str:
    return hashlib.sha256(repr((mutant.file, mutant.function, mutant.old, mutant.new)).encode()).hexdigest()[:8]


def _packed(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as "1-3 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _unpacked(text: str) -> list[int]:
    runs = [tuple(map(int, run.split("-"))) for run in text.split()]
    return [number for run in runs for number in range(run[0], run[-1] + 1)]


class Verdicts:
    """By check: the parts that it follows from, their digest when it was recorded, and the errors that it noticed."""

    def __init__(self, path: Path = RECORD, root: Path = ROOT):
        self.path, self.sources, self.releases = path, Sources(root), releases()
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": [], "checks": {}}
        self.checks = {
            check: (frozenset(found["parts"][i] for i in _unpacked(parts)), digest, frozenset(caught.split()))
            for check, (parts, digest, caught) in found["checks"].items()
        }

    @functools.cache  # noqa: B019 - there is one a process, beside those of tests
    def is_current(self, check: str) -> bool:
        """Whether everything that the verdicts of a check follow from is as it was."""
        parts, digest, _ = self.checks.get(check, (frozenset(), "", frozenset()))
        return self.sources.digest(parts, self.releases) == digest

    def knows(self, mutant) -> bool:
        """Whether the check is known to notice an error."""
        return self.is_current(key(mutant)) and name_of(mutant) in self.checks[key(mutant)][2]

    def put(self, check: str, parts: Iterable[str], caught: Iterable[str]) -> None:
        self.checks[check] = (frozenset(parts), self.sources.digest(parts, self.releases), frozenset(caught))

    def write(self) -> None:
        numbers = {part: i for i, part in enumerate(sorted({part for parts, *_ in self.checks.values() for part in parts}))}
        lines = [
            f"{json.dumps(check)}: {json.dumps([_packed(map(numbers.get, parts)), digest, ' '.join(sorted(caught))])}"
            for check, (parts, digest, caught) in sorted(self.checks.items())
        ]
        parts, checks = ",\n  ".join(map(json.dumps, numbers)), ",\n  ".join(lines)
        self.path.write_text(f'{{"parts": [\n  {parts}],\n "checks": {{\n  {checks}}}}}\n', encoding="utf-8")


# ---------------------------------------------------------------- recording
@contextlib.contextmanager
def tracing() -> Iterator[set]:
    """The code that is called, and the kernels that the package asks for."""
    from interpreter.backend import InterpretedArtifacts

    seen: set = set()
    variants = InterpretedArtifacts.variants

    def note(frame, event, argument):
        seen.add(frame.f_code)

    def asked(self, kernel):
        seen.update(f"kernel_src/{operation}.py" for operation, _ in self._entries.get(kernel, ()))
        return variants(self, kernel)

    with mock.patch.object(InterpretedArtifacts, "variants", asked):
        threading.settrace(note)
        sys.settrace(note)
        try:
            yield seen
        finally:
            sys.settrace(None)
            threading.settrace(None)


def parts_of(seen: set, check: str, modules: Iterable[str]) -> set[str]:
    """What a check follows from. seen: of `tracing`; modules: the files of the package that were imported."""
    from tests.mutants import compiled_copy

    copy, sources, parts = f"{compiled_copy().name}/", Sources(), set()
    own = f"tests/ops/{check.partition(':')[0]}.py"
    files = {own, "tests/mutants.py", *(str(path.relative_to(ROOT)) for path in (ROOT / "interpreter").glob("*.py"))}
    for each in seen:
        if isinstance(each, str):
            files.add(each)
        elif each.co_filename.startswith(copy):
            path, name = in_repository(each.co_filename[len(copy) :]), each.co_qualname.partition(".<locals>")[0]
            parts |= {f"{path}:", f"{path}:{name}"} if name in sources.names(path) else {f"{path}:"}
        else:
            path = each.co_filename.removeprefix(f"{ROOT}/")
            if path.partition("/")[0] in FIRST_PARTY and path != "tests/verdicts.py":
                files.add(path)
    parts |= {f"{file}:{WHOLE}" for path in files for file in imported(path)}
    return parts | {f"{own}:CHECKS"} | {f"{in_repository(module[len(copy) :])}:" for module in modules}


def in_repository(path: str) -> str:
    """The file of the repository that is one of the copied package."""
    return f"torch-ext/{path}" if path.startswith("shared/") else f"torch-ext/qwen3/{path}"


def run(check: str) -> tuple[str, set[str], list[str], list[str]]:
    """(check, what it follows from, names of the errors that it notices, those that it does not notice)."""
    from tests import mutants

    wanted = [mutant for mutant in mutants.MUTANTS if key(mutant) == check]
    caught, missed, seen, modules = [], [], set(), set()
    for mutant in (None, *wanted):
        if mutant is not None and not mutants.fits(mutant):
            missed.append(f"not in the source: {mutant}")
            continue
        with tracing() as found:
            with mutants.planted(mutant, wanted[0].kernels) as package:
                noticed = mutants.notices(package, wanted[0].check)
                modules |= {m.__file__ for name, m in list(sys.modules.items()) if name.startswith(f"{package.__name__}.")}
        seen |= found
        if mutant is None and noticed:
            raise AssertionError(f"{check} fails without an error")
        if mutant is not None:
            (caught if noticed else missed).append(name_of(mutant) if noticed else str(mutant))
    parts = parts_of(seen, check, modules)
    for mutant in wanted:
        if not mutant.file.startswith("kernel_src/"):
            path = in_repository(mutant.file)
            parts |= {f"{path}:", f"{path}:{mutant.function}"}
    return check, parts, caught, missed


def prepare() -> None:
    """Lists what is prebuilt, and where the package has its names, before anything is traced: both are remembered."""
    from interpreter.backend import described
    from tests import mutants

    mutants.exports()
    for operation in mutants.OPERATIONS:
        described(importlib.import_module(f"kernel_src.{operation}"))


def main(arguments=None) -> int:
    """Runs the checks that have an error whose verdict is not known, and records the verdicts."""
    from tests.mutants import MUTANTS

    p = argparse.ArgumentParser(prog="python -m tests.verdicts", description="Plants errors, and records which of them the checks notice.")
    p.add_argument("--all", action="store_true", help="also errors whose verdict is known")
    p.add_argument("--processes", type=int, help="default: one a core")
    options = p.parse_args(arguments)
    verdicts = Verdicts()
    checks = dict.fromkeys(key(mutant) for mutant in MUTANTS if options.all or not verdicts.knows(mutant))
    verdicts.checks = {check: found for check, found in verdicts.checks.items() if check in set(map(key, MUTANTS))}
    missing: list[str] = []
    os.environ["OMP_NUM_THREADS"] = "1"  # of each process
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, context, prepare) as pool:
        for done in concurrent.futures.as_completed([pool.submit(run, check) for check in checks]):
            check, parts, caught, missed = done.result()
            verdicts.put(check, parts, caught)
            missing += missed
            print(f"{check}: {len(caught)} of {len(caught) + len(missed)} caught", *missed, sep="\n  ", flush=True)
            verdicts.write()
    verdicts.write()
    caught = sum(map(Verdicts().knows, MUTANTS))
    print(f"{len(checks)} checks were run; {caught} of {len(MUTANTS)} planted errors are known to be caught")
    print("\n".join(f"not caught: {each}" for each in missing))
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
