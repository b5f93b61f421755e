"""The phrases that `make check` refuses."""

import pytest

from tools import prose


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Says what of the model runs.", ["what of the"]),
        ("The sum is made again, and the bound is looked at.", ["is made again", "is looked at"]),
        ("documents that lie behind each other", ["lie behind each other"]),
        ("The gradients that there are.", ["gradients that there are"]),
        ("You know that there are 3 rows; it is none of ours.", []),
    ],
)
def test_a_phrase_is_found(text, found):
    assert sorted(phrase for _, phrase, _ in prose.phrases(text)) == sorted(found)


def test_a_line_is_named(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("Fine.\nIt runs as ever.\n")
    monkeypatch.setattr(prose, "files", lambda: [page])
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert prose.main() == 1 and capsys.readouterr().out == "page.md:2: 'as ever', write: as usual\n"


def test_nothing_of_the_tree_has_one(capsys):
    assert prose.main() == 0, capsys.readouterr().out
    assert {path.suffix for path in prose.files()} == set(prose.KINDS) and len(prose.files()) > 300
