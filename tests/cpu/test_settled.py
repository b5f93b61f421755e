"""Which tests of what lies below hf/ are left out, and when they are not."""

import re
import shutil
import types

import pytest

from tests import settled
from tests.cpu.conftest import REPOSITORY as ROOT
from tests.cpu.test_whole import Item
from tests.verdicts import WHOLE

KINDS = (
    "interpreter/races.py",
    "kernel_src/rms_norm.py",
    "torch-ext/shared/runtime/launch.py",
    "torch-ext/shared/ops/swiglu.py",
    "torch-ext/shared/decoder/node.py",
    "torch-ext/qwen3/__init__.py",
    "tests/ops/rms_norm.py",
    "tests/cpu/test_kernels.py",
)


@pytest.mark.parametrize("file", settled.SETTLED)
def test_every_test_is_there(file):
    text = (ROOT / "tests/cpu" / file).read_text()
    for function in settled.SETTLED[file].split():
        assert re.search(rf"^def test_{function}\(", text, re.M), function


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of all files that count."""
    folder = tmp_path_factory.mktemp("tree")
    named = [path.relative_to(ROOT) for pattern in settled.NAMED for path in ROOT.glob(pattern)]
    for path in [*(part.removesuffix(f":{WHOLE}") for part in settled.parts()), *named]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    return folder


@pytest.mark.parametrize("path", (*KINDS, "packages/liger/kernels.toml"))
def test_a_change_of_any_kind_of_file_runs_the_tests_again(tree, path):
    before, text = settled.digest(tree), (tree / path).read_text()
    assert before == settled.digest()
    try:
        (tree / path).write_text(f"{text}\nADDED = 1\n")
        assert settled.digest(tree) != before
        if path.endswith(".py"):
            (tree / path).write_text(f"{text}\n# a remark\n")
            assert settled.digest(tree) == before
    finally:
        (tree / path).write_text(text)


@pytest.mark.parametrize("recorded", (True, False))
def test_only_settled_tests_are_left_out_and_only_while_nothing_has_changed(recorded, monkeypatch, tmp_path):
    settled.is_current.cache_clear()
    monkeypatch.setattr(settled, "RECORD", tmp_path / "settled.txt")
    (tmp_path / "settled.txt").write_text(f"{settled.digest() if recorded else 'another'}\n")
    names = "kernels.py::test_rotary", "operations.py::test_operation", "operations.py::test_a_gpu_runs", "saving.py::test_a"
    items = [Item(f"tests/cpu/test_{name}", dtype=dtype) for name in names for dtype in ("bf16", "fp32")]
    settled.mark(items)
    settled.is_current.cache_clear()
    left_out = [["whole"], ["known"]] * 2 if recorded else [[]] * 4
    assert [[mark.name for mark in item.marks] for item in items] == [*left_out, [], [], [], []]


@pytest.mark.parametrize("path", sorted(settled.SELECTS))
def test_what_only_selects_tests_does_not_count(path):
    assert (ROOT / path).exists() and f"{path}:{WHOLE}" not in settled.parts()


@pytest.mark.parametrize("options", (["--help"], ["-k", "nothing"], ["--collect-only"]))
def test_no_option_records_tests_that_did_not_run(monkeypatch, tmp_path, options):
    monkeypatch.setattr(settled, "RECORD", tmp_path / "settled.txt")
    monkeypatch.setattr(settled.subprocess, "run", lambda *command, **rest: types.SimpleNamespace(returncode=0))
    with pytest.raises(SystemExit):
        settled.main(options)
    assert not settled.RECORD.exists() and settled.main([]) == 0 and settled.RECORD.read_text().strip() == settled.digest()
