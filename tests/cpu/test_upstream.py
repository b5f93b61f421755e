"""The comparison of another project's tests with and without a package, on a checkout of three tests."""

import importlib.util
import json

import pytest

from tests.upstream import __main__ as upstream

TESTS = {
    "tests/__init__.py": "",
    "tests/helper.py": """
import torch
from transformers import Qwen3Config, Qwen3Model


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    return Qwen3Model(Qwen3Config(vocab_size=20, num_hidden_layers=1, **sizes))


def in_a_process(rank, expected):
    torch.testing.assert_close(model()(torch.arange(4)[None]).last_hidden_state, expected)
""",
    "tests/test_theirs.py": """
import unittest

import pytest
import torch
import torch.multiprocessing as mp
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.helper import in_a_process, model


class Theirs(unittest.TestCase):
    def test_result(self):
        self.assertEqual(model()(torch.arange(4)[None]).last_hidden_state.shape, (1, 4, 16))

    def test_process(self):
        mp.spawn(in_a_process, args=(model()(torch.arange(4)[None]).last_hidden_state.detach(),), nprocs=1)

    def test_source(self):
        for index in range(2):
            with self.subTest(index=index):
                self.assertTrue(Qwen3RMSNorm.forward.__module__.startswith("transformers."))

    @unittest.skip("not here")
    def test_skipped(self):
        pass

    @pytest.mark.xfail
    def test_known(self):
        raise ValueError
""",
}


@pytest.fixture
def compare(tmp_path, package_folder, monkeypatch, capfd):
    """Runs the comparison with options of pytest; returns its status and what it printed after pytest's own lines."""
    for name, text in TESTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(upstream, "built", lambda *_: (str(package_folder), "cpu"))

    def run(*options):
        status = upstream.main([str(tmp_path), "--package", ".", "--tests", "tests", "--", *options])
        return status, capfd.readouterr().out.rpartition("\ntests\n")[2]

    return run


def test_the_same_results(compare):
    status, found = compare("-k", "not source")
    assert status == 0, found
    assert found.count("2 passed, 1 skipped, 1 xfailed") == 2
    assert "decoder_layer_forward 3," in found  # two models in the process of the tests, one in the process that they start


def test_a_test_that_differs_is_named(compare):
    status, found = compare("-k", "source or skipped")
    assert status == 1
    assert "DIFFERS tests/test_theirs.py::Theirs::test_source: passed -> failed AssertionError" in found


def test_tests_that_nobody_ran_are_no_success(compare):
    with pytest.raises(SystemExit, match="pytest ended with 5"):
        compare("-k", "nobody")


@pytest.mark.parametrize("arguments", [["--tests", "tests"], ["--package", "packages/liger"]])
def test_arguments_that_do_not_fit(arguments, capsys):
    with pytest.raises(SystemExit):
        upstream.main(["checkout", *arguments])
    assert "needs" in capsys.readouterr().err


def test_what_is_undone_meanwhile_counts(tmp_path):
    """A test may reset what was patched, and the rest would compare transformers with itself."""
    record = tmp_path / "record"
    lines = [
        {"test": "a", "when": "setup", "outcome": "passed", "error": ""},
        {"test": "a", "when": "call", "outcome": "failed", "error": "ValueError: 3"},
        {"test": "a", "when": "teardown", "outcome": "failed", "error": "OSError"},
        {"patched": [["rms_norm"], []], "layer_calls": {"rms_norm_forward": 2}},
        {"patched": [["rms_norm"], ["rms_norm"]], "layer_calls": {"rms_norm_forward": 3}},
    ]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = upstream.read_record(record)
    assert run.outcomes == {"a": "failed ValueError; failed OSError"} and run.layer_calls == {"rms_norm_forward": 5}
    assert upstream.differences(run, upstream.Run()) == {"a": ("failed ValueError; failed OSError", "did not run")}
    assert upstream.undone(run) == [[["rms_norm"], []]]


def test_every_family_has_its_tests_named():
    found = upstream.transformers_tests()
    assert {f"tests/models/{name}/test_modeling_{name}.py" for name in ("llama", "gemma3", "ernie4_5")} < set(found["packages/decoders"])
    assert found["packages/gpt-oss"] == ("tests/models/gpt_oss/test_modeling_gpt_oss.py",)
    modules = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for paths in found.values() for path in paths]
    assert all(importlib.util.find_spec(f"transformers.{name.replace('.test_', '.')}") for name in modules)
