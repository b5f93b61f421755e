"""Errors that are generated: what is generated of a statement, and that a seed chooses one."""

import pytest

from tests.ops import generated as errors

TEXT = '''
def f(a, b, need, ctx):
    """Nothing of a docstring."""
    c = a * b + 1
    c = ct.where(a < b, c, 0)
    d = g(c) if need else None
    ctx.save_for_backward(a, b)
    if a:
        return -c
    fail("a", a - b)
    e = 1
    h = a and b
    h = a and b
'''
EXPECTED = {
    "c = a * b + 1": ["c = (a * b)", "c = 1", "c = a * b - 1", "c = a + 1", "c = b + 1"],
    "c = ct.where(a < b, c, 0)": ["c = c", "c = ct.where(a <= b, c, 0)"],
    "d = g(c) if need else None": ["d = None"],
    "ctx.save_for_backward(a, b)": ["ctx.save_for_backward(b, a)"],
    "return -c": ["return c"],
}


@pytest.fixture
def of_text(tmp_path, monkeypatch):
    (tmp_path / "kernel_src").mkdir()
    (tmp_path / "kernel_src/x.py").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(errors, "ROOT", tmp_path)
    for function in (errors.source_of, errors.errors_of):
        function.cache_clear()
    yield "kernel_src/x.py"
    for function in (errors.source_of, errors.errors_of):
        function.cache_clear()


def test_the_errors_of_a_function(of_text):
    assert {old: sorted(new) for old, new in errors.errors_of(of_text, "f").items()} == EXPECTED


def test_one_error_of_each_statement_is_planted(of_text):
    rows = errors.generated(of_text, "one or another", "f", kernels=False)
    assert {row[2] for row in rows} == set(EXPECTED)
    assert all(row[3] in EXPECTED[row[2]] and row[4:] == ("one or another", False) for row in rows)
    assert rows == errors.generated(of_text, "one or another", "f", kernels=False)


def test_an_error_that_changes_nothing_is_left_out(of_text):
    same = dict.fromkeys(["return c", *EXPECTED["c = a * b + 1"][1:]], "why")
    rows = {old: new for _, _, old, new, *_ in errors.generated(of_text, "one", "f", same=same)}
    assert "return -c" not in rows and rows["c = a * b + 1"] == "c = (a * b)"
