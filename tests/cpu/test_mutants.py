"""The checks notice planted errors: a dropped mask, a wrong stride, a sign, a gradient that is not summed. See tests/mutants.py.

Errors that a check is known to notice (tests/verdicts.py) are planted by `make test-mutants`, and where pytest is called without options.
"""

import ast

import pytest

from tests.mutants import CHECKS, KERNEL_FILES, KERNEL_MUTANTS, MUTANTS, OPERATION_MUTANTS, ROOT, checks_of, notices, planted
from tests.verdicts import Verdicts

VERDICTS = Verdicts()
BY_OPERATION = {mutant.check.partition(":")[0]: [] for mutant in MUTANTS}
for _mutant in MUTANTS:
    BY_OPERATION[_mutant.check.partition(":")[0]].append(_mutant)


def unless_known(value, mutants, id):
    """A parameter that is marked where the verdict on some errors is known."""
    return pytest.param(value, id=id, marks=[pytest.mark.known] if all(map(VERDICTS.knows, mutants)) else [])


@pytest.mark.parametrize("operation", [unless_known(name, mutants, name) for name, mutants in BY_OPERATION.items()])
def test_without_an_error_every_check_passes(operation):
    """Else what it says of a mutant means nothing."""
    for kernels in (True, False):
        used = dict.fromkeys(name for m in BY_OPERATION[operation] if m.kernels == kernels for name in checks_of(m.check))
        with planted(None, kernels) as package:
            for name in used:
                CHECKS[name](package)


@pytest.mark.parametrize("mutant", [unless_known(mutant, [mutant], str(mutant)) for mutant in MUTANTS])
def test_a_planted_error_is_caught(mutant):
    with planted(mutant, mutant.kernels) as package:
        assert notices(package, mutant.check)


def test_there_are_mutants_of_every_kernel():
    mutated = {(mutant.file, mutant.function) for mutant in KERNEL_MUTANTS}
    for path in KERNEL_FILES:
        file = f"kernel_src/{path.name}"
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any("kernel" in ast.unparse(d) for d in node.decorator_list):
                helpers = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
                assert any(f == file and (name == node.name or name in helpers) for f, name in mutated), f"{file}: {node.name}"


def test_there_are_mutants_of_every_autograd_function():
    """Each has mutants of what its forward pass saves, and of what its backward pass does with it, or calls."""
    mutated = {(mutant.file, mutant.function) for mutant in OPERATION_MUTANTS}
    for path in sorted([*(ROOT / "torch-ext/shared/ops").glob("*.py"), *(ROOT / "torch-ext/shared/decoder").glob("*.py")]):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any("Function" in ast.unparse(base) for base in node.bases):
                file = f"shared/{path.parent.name}/{path.name}"
                assert (file, f"{node.name}.forward") in mutated, f"{file}: {node.name}.forward"
                called = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} | {f"{node.name}.backward"}
                assert any(f == file and name in called for f, name in mutated), f"{file}: {node.name}.backward"
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "sum_over_tokens":
                file, run = f"shared/{path.parent.name}/{path.name}", ast.unparse(node.value.args[1])
                assert {(file, run), ("shared/ops/token_sums.py", "sum_over_tokens")} <= mutated, f"{file}: {run}"
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "Node":
                file, (_, _, _, *functions) = f"shared/{path.parent.name}/{path.name}", map(ast.unparse, node.value.args)
                assert {(file, function) for function in functions} <= mutated, f"{file}: {functions}"


def test_no_error_is_in_what_is_prebuilt():
    """The variants of a kernel are listed once for all errors: none is in a function that lists them, or in how a kernel is launched."""
    for file in {mutant.file for mutant in KERNEL_MUTANTS}:
        body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        lists, todo = set(), ["variants"]
        while todo:
            name = todo.pop()
            if name in functions and name not in lists and not any("kernel" in ast.unparse(d) for d in functions[name].decorator_list):
                lists.add(name)
                todo += [each.id for each in ast.walk(functions[name]) if isinstance(each, ast.Name)]
        wrong = [str(m) for m in KERNEL_MUTANTS if m.file == file and (m.function in lists or "dependency_control" in m.old + m.new)]
        assert not wrong, wrong
