"""What `make test` leaves out is what tests/README.md says, `make test-rest` has it, and each group keeps what it says."""

import re
import types

import pytest

from tests import whole
from tests.cpu.conftest import REPOSITORY as ROOT


class Item:
    """As much of a test as `whole.mark` looks at. cases: its parameters by name."""

    def __init__(self, name, **parameters):
        self.marks, case = [], "-".join(map(str, parameters.values()))
        self.nodeid = f"{name}[{case}]" if parameters else name
        if parameters:
            self.callspec = types.SimpleNamespace(id=case, params=parameters)

    def iter_markers(self, name):
        return [mark for mark in self.marks if mark.name == name]

    def add_marker(self, mark):
        self.marks.append(mark.mark)


@pytest.mark.parametrize("name", whole.groups(), ids=lambda name: name.removeprefix("tests/cpu/"))
def test_every_test_of_a_group_is_there(name):
    file, _, function = name.partition("::")
    texts = [(ROOT / file).read_text(encoding="utf-8")]
    texts += [(ROOT / f"{module.replace('.', '/')}.py").read_text() for module in re.findall(r"^from (\S+) import \*", texts[0], re.M)]
    assert any(re.search(rf"^def {function}\(", text, re.M) for text in texts)


def test_the_two_commands_of_test_all_run_every_test_once():
    makefile = (ROOT / "Makefile").read_text()
    first, rest = (re.search(rf"^{name}: .*\n\t(.*)", makefile, re.M)[1] for name in ("test", "test-rest"))
    assert first.replace("-m 'not whole", "-m 'whole") == rest and "-m 'whole and not known'" in rest
    assert re.search(r"^test-all: test test-rest\b", makefile, re.M)
    assert "make test\nmake test-rest\n" in (ROOT / ".ci/run").read_text()


PRODUCT = [Item("t", family=family, way=way) for family in ("a", "b", "c") for way in (1, 2)]


@pytest.mark.parametrize(
    ("keep", "stays"),
    (
        (whole.each_value, ["a-1", "b-2", "c-1"]),
        (whole.first, ["a-1"]),
        (whole.none, []),
        (whole.one_of(r"^\w"), ["a-1", "b-1", "c-1"]),
        (whole.matching("2$"), ["a-2", "b-2", "c-2"]),
    ),
    ids=("each value", "first", "none", "one of", "matching"),
)
def test_what_a_group_keeps(keep, stays):
    assert [PRODUCT[i].callspec.id for i in sorted(keep(PRODUCT))] == stays


def marked(items) -> list[bool]:
    whole.mark(items)
    return [bool(item.iter_markers("whole")) for item in items]


def test_others_than_those_of_a_group_are_marked(monkeypatch):
    group = whole.Group("products", "each value", whole.each_value, "because", {})
    monkeypatch.setattr(whole, "groups", lambda: {"t": group, "alone": group})
    others = [Item("u", family="a"), Item("v"), Item("alone")]
    assert marked([*PRODUCT, *others]) == [False, True, True, False, False, True, False, False, True]


def test_a_case_that_is_skipped_stands_for_no_value(monkeypatch):
    monkeypatch.setattr(whole, "groups", lambda: {"t": whole.Group("a", "", whole.first, "", {})})
    items = [Item("t", family=family) for family in "ab"]
    items[0].add_marker(pytest.mark.skip)
    assert marked(items) == [True, False]


def test_a_test_is_in_one_group(monkeypatch):
    whole.groups.cache_clear()
    monkeypatch.setattr(whole, "GROUPS", whole.GROUPS + whole.GROUPS[:1])
    with pytest.raises(ValueError, match="is in two groups"):
        whole.groups()
