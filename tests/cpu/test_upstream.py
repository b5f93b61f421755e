"""The comparison of another project's tests with and without a package, on a checkout of three tests."""

import importlib.util
import json
from collections import Counter

import pytest

from tests.upstream import __main__ as upstream

TESTS = {
    "tests/__init__.py": "",
    "tests/helper.py": """
import torch
from transformers import Qwen3Config, Qwen3Model


_TEXT_MODEL_TESTER_DEFAULTS = {"hidden_act": "gelu"}


def model(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= _TEXT_MODEL_TESTER_DEFAULTS | changes
    return Qwen3Model(Qwen3Config(vocab_size=20, num_hidden_layers=1, **sizes))


def in_a_process(rank, expected):
    torch.testing.assert_close(model()(torch.arange(4)[None]).last_hidden_state, expected)
""",
    "tests/test_theirs.py": """
import unittest

import pytest
import torch
import torch.multiprocessing as mp
from transformers import Qwen3NextConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.helper import in_a_process, model


class Theirs(unittest.TestCase):
    def test_result(self):
        self.assertEqual(model()(torch.arange(4)[None]).last_hidden_state.shape, (1, 4, 16))

    def test_process(self):
        mp.spawn(in_a_process, args=(model()(torch.arange(4)[None]).last_hidden_state.detach(),), nprocs=1)

    def test_sizes(self):
        self.assertEqual(model().config.hidden_act, "silu")
        self.assertEqual([Qwen3NextConfig(linear_conv_kernel_dim=taps).linear_conv_kernel_dim for taps in (2, 3)], [4, 3])

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
    "tests/test_layers.py": """
import torch

from tests.helper import model


def test_unfused():
    made = model(hidden_act="relu")
    made(torch.arange(4)[None])


def test_fsdp2():
    made = model()
    made(torch.arange(4)[None])
""",
    "tests/test_uncollected.py": "import nothing_of_this_name\n",
}


@pytest.fixture
def compare(tmp_path, package_folder, monkeypatch, capfd):
    """Runs the comparison with options of pytest; returns its status and what it printed after pytest's own lines."""
    for name, text in TESTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(upstream, "built", lambda *_: (str(package_folder), "cpu"))

    def run(*options, tests=("tests/test_theirs.py",)):
        status = upstream.main([str(tmp_path), "--package", ".", "--tests", *tests, "--", *options])
        return status, capfd.readouterr().out.rpartition(f"\n{tests[-1]}\n")[2]

    return run


def test_the_same_results(compare):
    status, found = compare("-k", "not source")
    assert status == 0, found
    assert found.count("3 passed, 1 skipped, 1 xfailed") == 2
    assert "decoder_layer_forward 3," in found  # two models in the process of the tests, one in the process that they start
    assert "in 2 processes" in found and "left to transformers" not in found


def test_a_suite_that_nothing_of_ours_ran_in_says_nothing(compare):
    """Its tests end the same; that every layer was entered is not that one was fused."""
    status, found = compare("-k", "unfused", tests=("tests/test_layers.py",))
    assert status == 1
    assert "left to transformers: decoder_layer_forward 1" in found and "BLIND    each of 1 calls of decoder_layer_forward" in found
    assert "1 x decoder_layer_forward: " in found and "is not SiLU" in found


def test_what_cannot_be_collected_is_named_and_the_others_run(compare, capfd):
    with pytest.raises(SystemExit, match="pytest ended with 2 in .*: tests/test_uncollected.py"):
        compare("-k", "fsdp2", tests=("tests/test_uncollected.py", "tests/test_layers.py"))
    found = capfd.readouterr().out
    assert found.count("NOT RUN  pytest ended with 2") == 1 and "with:    1 passed" in found and "BLIND" not in found
    assert "ALONE    tests of parallel training passed" in found


@pytest.mark.parametrize(
    ("calls", "left", "path", "blind"),
    (
        ({"norm_forward": 4, "decoder_layer_forward": 0}, {"decoder_layer_forward": 2}, "tests/models/llama/test.py", 1),
        ({"norm_forward": 4}, {"decoder_layer_forward": 2}, "tests/models/granitemoehybrid/test.py", 0),
        ({"decoder_layer_forward": 2}, {"delta_net_forward": 2}, "", 1),
        ({"decoder_layer_forward": 2}, {"decoder_layer_forward": 5, "experts_forward": 1}, "", 0),
        ({"norm_forward": 4}, {}, "", 0),
        ({"norm_forward": 0}, {}, "", 1),
        ({}, {}, "tests/models/granitemoehybrid/test.py", 1),
    ),
)
def test_what_says_nothing(calls, left, path, blind):
    assert len(upstream.Run(layer_calls=Counter(calls), left=Counter(left)).blind(path)) == blind


def test_the_short_form_leaves_out_what_takes_hours(tmp_path, monkeypatch):
    """And a user's own choice of tests goes before it."""
    seen = []
    monkeypatch.setattr(upstream, "built", lambda *_: ("", "cpu"))
    monkeypatch.setattr(upstream, "compare", lambda checkout, tests, options, task: seen.append(options) or True)
    for arguments in ((), ("--short",), ("--short", "--", "-k", "rope")):
        assert upstream.main([str(tmp_path), "--package", "packages/gpt-oss", *arguments]) == 0
    short = "not test_tp_ and not tensor_parallel and not expert_parallel and not fsdp and not hsdp and not compil"
    assert seen == [[], ["-k", short], ["-k", short, "-k", "rope"]]


def test_a_test_that_differs_is_named(compare):
    status, found = compare("-k", "source or skipped")
    assert status == 1
    assert "DIFFERS tests/test_theirs.py::Theirs::test_source: passed -> failed AssertionError" in found


def test_tests_that_nobody_ran_are_no_success(compare):
    with pytest.raises(SystemExit, match="pytest ended with 5"):
        compare("-k", "nobody")


@pytest.mark.parametrize(
    ("checkout", "arguments", "why"),
    (
        (".", ["--tests", "tests"], "needs"),
        (".", ["--package", "packages/liger"], "needs"),
        ("checkout", [], "checkout is no folder; give a clone"),
    ),
)
def test_arguments_that_do_not_fit(checkout, arguments, why, capsys):
    with pytest.raises(SystemExit):
        upstream.main([checkout, *arguments])
    assert why in capsys.readouterr().err


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
