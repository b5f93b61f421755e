"""A recorded verdict on a planted error holds as long as everything that it follows from is as it was, and no longer."""

import ast
import shutil

import pytest

from tests import mutants, verdicts
from tests.verdicts import ROOT, Verdicts, key

CHECK = "low_rank: low_rank"
ERRORS = [mutant for mutant in mutants.MUTANTS if key(mutant) == CHECK]
OPERATION, KERNELS, TESTS = "torch-ext/shared/ops/low_rank.py", "kernel_src/low_rank.py", "tests/ops/low_rank.py"


@pytest.fixture(scope="module")
def recorded():
    """(what the check follows from, names of the errors that it notices)."""
    verdicts.prepare()
    check, parts, caught, missed = verdicts.run(CHECK)
    assert check == CHECK and len(caught) == len(ERRORS) and not missed
    return parts, caught


@pytest.fixture
def copied(recorded, tmp_path):
    """The folder of a copy of those files, with the record of that check."""
    parts, caught = recorded
    for path in {part.partition(":")[0] for part in parts}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    found = Verdicts(tmp_path / "verdicts.json", tmp_path)
    found.put(CHECK, parts, caught)
    found.write()
    return tmp_path


def known(folder) -> list[bool]:
    """Of each error, whether the check is known to notice it, with the files as they are now."""
    found = Verdicts(folder / "verdicts.json", folder)
    return [found.knows(error) for error in ERRORS]


def within(name, more):
    """Puts lines before the first statement of a function or class."""

    def edit(text):
        node = next(node for node in ast.walk(ast.parse(text)) if getattr(node, "name", "") == name)
        first = node.body[ast.get_docstring(node) is not None]
        lines = text.splitlines(keepends=True)
        begin = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))]) - 1
        return "".join([*lines[:begin], *(f"{' ' * first.col_offset}{line}\n" for line in more), *lines[begin:]])

    return edit


def at_the_end(more):
    return lambda text: f"{text}\n\n{more}\n"


def replaced(old, new):
    def edit(text):
        assert text.count(old) == 1
        return text.replace(old, new)

    return edit


def test_what_was_recorded_is_known(copied):
    assert all(known(copied))


@pytest.mark.parametrize(
    ("path", "edit"),
    (
        pytest.param(OPERATION, within("low_rank_gradients", ["assert True"]), id="a function that runs"),
        pytest.param(OPERATION, at_the_end("LIMIT = 1"), id="a constant beside it"),
        pytest.param("torch-ext/shared/ops/second_run.py", at_the_end("LIMIT = 1"), id="a constant of a module that is imported"),
        pytest.param("torch-ext/shared/runtime/launch.py", within("Kernel", ["def new(self):", "    pass"]), id="a new method"),
        pytest.param(KERNELS, within("transposed_product", ["assert True"]), id="a kernel"),
        pytest.param("kernel_src/prebuild.py", at_the_end("LIMIT = 1"), id="what kernels are prebuilt by"),
        pytest.param("interpreter/arithmetic.py", at_the_end("LIMIT = 1"), id="the interpreter"),
        pytest.param(TESTS, within("check_low_rank_gradients", ["assert True"]), id="the check"),
        pytest.param(TESTS, replaced("65, 136, 24, 264", "66, 136, 24, 264"), id="what the check is called with"),
        pytest.param("tests/tolerances.py", at_the_end("LIMIT = 1"), id="a tolerance"),
        pytest.param("tests/mutants.py", at_the_end("LIMIT = 1"), id="how errors are planted"),
        pytest.param("torch-ext/shared/ops/products.py", lambda text: "", id="a module that is gone"),
    ),
)
def test_a_verdict_ends_when_something_changes_that_it_follows_from(copied, path, edit):
    (copied / path).write_text(edit((copied / path).read_text(encoding="utf-8")), encoding="utf-8")
    assert not any(known(copied))


@pytest.mark.parametrize(
    ("path", "edit"),
    (
        pytest.param(OPERATION, lambda text: f"# a comment\n\n{text}", id="a comment"),
        pytest.param(OPERATION, within("low_rank_gradients", ["# a comment"]), id="a comment within"),
        pytest.param(OPERATION, at_the_end("def another():\n    pass"), id="a function that does not run"),
        pytest.param(TESTS, at_the_end("MUTANTS += [('a.py', 'f', 'x', 'y', 'low_rank')]"), id="another error"),
        pytest.param("tests/ops/common.py", at_the_end("CHECKS = {}"), id="another file's checks"),
    ),
)
def test_a_verdict_lasts_when_something_else_changes(copied, path, edit):
    (copied / path).write_text(edit((copied / path).read_text(encoding="utf-8")), encoding="utf-8")
    assert all(known(copied))


def test_another_error_is_not_known(copied):
    found = Verdicts(copied / "verdicts.json", copied)
    assert not any(found.knows(error._replace(new=f"{error.new} ")) for error in ERRORS)
    assert not any(found.knows(error._replace(kernels=False)) for error in ERRORS)


@pytest.mark.parametrize("name", ("torch", "cuda-tile"))
def test_a_verdict_ends_with_another_release(copied, monkeypatch, name):
    others = verdicts.releases() | {name: "0"}
    monkeypatch.setattr(verdicts, "releases", lambda: others)
    assert not any(known(copied))


def test_an_error_that_is_not_noticed_is_not_known(copied, recorded):
    parts, caught = recorded
    found = Verdicts(copied / "verdicts.json", copied)
    found.put(CHECK, parts, caught[1:])
    found.write()
    assert sorted(known(copied)) == [False] + [True] * (len(ERRORS) - 1)


def test_a_docstring_is_no_part_of_a_function():
    with_one, without = (verdicts.pieces(f"def f():\n{doc}    return 1\n") for doc in ('    """Something.\n\n    More."""\n', ""))
    assert with_one == without and verdicts.pieces("def f():\n    return 2\n")["f"] != without["f"]
