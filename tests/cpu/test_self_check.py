"""`report`, and the check of all operations against float64 on a user's machine."""

import contextlib
import importlib
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.cpu.conftest import FOLDERS, kernels_of


def test_report(qwen3):
    found = {finding.name: finding for finding in qwen3.report().findings}
    assert found["torch"].found == torch.__version__ and found["torch"].fits
    assert found["transformers"].fits and found["kernels"].fits
    if not torch.cuda.is_available():
        assert not found["GPU"].fits
    assert all(name in str(qwen3.report()) for name in found)


@pytest.mark.parametrize(
    ("version", "fits"), (("5.16.9", False), ("5.17", True), ("5.22.2", True), ("5.23.0", False), ("6.0.0.dev0", False), ("5.17.0+cu130",
                                                                                                                          True))
)
def test_versions_that_fit(qwen3, version, fits):
    doctor = importlib.import_module(f"{qwen3.__name__}.shared.hf.say.doctor")
    assert doctor.version_fits(version, ">=5.17,<5.23") is fits


def test_it_runs_as_a_module(qwen3, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x"])
    runpy.run_module(f"{qwen3.__name__}.__main__", run_name="__main__")
    assert torch.__version__ in capsys.readouterr().out


def shared(package, name):
    return importlib.import_module(f"{package.__name__}.shared.{name}")


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a default device": lambda: torch.device("meta"), "a default dtype": lambda: default_dtype(torch.float16),
    "a wide default dtype": lambda: default_dtype(torch.float64),
}  # fmt: skip


class Tripled(torch.autograd.Function):
    """The identity, with a wrong gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad if grad.dtype == torch.float64 else 3 * grad


@pytest.mark.parametrize("mode", MODES)
def test_the_check_sets_its_own_modes(qwen3, mode, monkeypatch):
    module = shared(qwen3, "hf.say.self_check")
    chosen = {title: check for title, check in module.checks().items() if title in ("rms_norm", "linear_cross_entropy", "AdamW")}
    assert len(chosen) >= 2
    monkeypatch.setattr(module, "checks", lambda: {**chosen, "wrong": lambda i: Tripled.apply(i.leaf(3))})
    expected = module.run()
    with MODES[mode]():
        found = module.run()
    assert [outcome.failures != () for outcome in found.cases] == [outcome.title == "wrong" for outcome in found.cases]
    assert found.cases == expected.cases


@pytest.mark.parametrize("name", ("qwen3", "gpt_oss", "liger"))
def test_every_package_checks_its_operations_against_float64(name, request):
    package = request.getfixturevalue(name)
    done = shared(package, "hf.say.self_check").run()
    assert [str(case) for case in done.cases if case.failures] == []
    assert len(done.cases) >= {"qwen3": 12, "gpt_oss": 8, "liger": 18}[name] and "CPU" in done.where
    assert all(len(case.errors) == 3 and max(case.errors.values()) > 0 for case in done.cases), "one that is exact compares nothing"


# Operations whose files a package has for what else is in them, without their kernels.
EIGHT_BITS = {"quantise", "quantise, long rows", "quantise, any rows", "quantise, SwiGLU"}
NOT_SHIPPED = {"qwen3": set(), "gpt_oss": {"swiglu", "swiglu (Liger's)", "mlp", *EIGHT_BITS}, "liger": set(),
               "decoders": {"experts", "experts (of GPT-OSS)"}, "moe": set(),
               "qwen3_5": {"rotary", *EIGHT_BITS}}  # fmt: skip


@pytest.mark.parametrize("name", NOT_SHIPPED)
def test_every_package_checks_the_operations_whose_kernels_it_ships(name, request, interpret, monkeypatch):
    """As on a GPU, where nothing stands in for a kernel that a package does not have."""
    package = request.getfixturevalue(name)
    interpret(package, kernels_of(FOLDERS[name]))
    found = shared(package, "hf.say.self_check")
    for size, few in (("tokens", 8), ("classes", 100), ("long", 2100)):
        monkeypatch.setattr(found.CheckInputs, size, few)
    monkeypatch.setattr(found, "BOUNDS", {torch.bfloat16: found.BOUNDS[torch.bfloat16]})
    done = found.run()
    assert [str(case) for case in done.cases if case.failures] == []
    assert found.checks().keys() - {case.title for case in done.cases} == NOT_SHIPPED[name]
    assert done.kernels[0] > 0


@pytest.mark.parametrize("case", ("rms_norm", "swiglu", "softmax"))
def test_the_check_of_operations_runs_their_kernels(case, interpreted):
    found = shared(interpreted, "hf.say.self_check")
    launched = shared(interpreted, "runtime.launch").backend.launched
    before = len(launched)
    outcome = found.outcome_of(case, found.checks()[case], torch.device("cpu"))
    assert not outcome.failures and len(launched) > before and found.kernels_launched()[0] > 0


def test_a_wrong_operation_is_found(liger, monkeypatch, capsys):
    """Wrong numbers, another shape, NaN, and one that raises, each by itself; and the process says so."""
    found = shared(liger, "hf.say.self_check")
    wrong = {
        "off by": lambda x: x.softmax(-1) * (1.001 if x.dtype == torch.float32 else 1.0),
        "off by inf": lambda x: x.softmax(-1).double()[:1] if x.dtype != torch.float64 else x.softmax(-1),
        "fails with ValueError: no": lambda x: (_ for _ in ()).throw(ValueError("no")),
    }
    for text, function in wrong.items():
        monkeypatch.setattr(shared(liger, "ops.softmax"), "softmax", function)
        outcome = found.outcome_of("softmax", found.checks()["softmax"], torch.device("cpu"))
        assert outcome.failures and text in str(outcome)
    only = {"softmax": found.checks()["softmax"]}
    monkeypatch.setattr(found, "checks", lambda: only)
    monkeypatch.setattr(sys, "argv", ["x", "--check"])
    with pytest.raises(SystemExit, match="1"):
        runpy.run_module(f"{liger.__name__}.__main__", run_name="__main__")
    text = capsys.readouterr().out
    assert "NO  check softmax" in text and "0 of 1 operations agree with float64 on CPU" in text and "into an issue" in text


def test_every_operation_with_a_gradient_has_a_check_in_its_own_file(all_operations):
    """But for the embedding, which is an operation of ours in a graph alone, and what a second run leaves out, which is of other ones."""
    folder = Path(__file__).resolve().parents[2] / "torch-ext/shared/ops"
    files = {path.stem: path.read_text() for path in folder.glob("[a-z]*.py")}
    checks = {name: getattr(shared(all_operations, f"ops.{name}"), "SELF_CHECKS", {}) for name in files}
    assert {name for name, text in files.items() if "(Function):" in text and not checks[name]} == {"embedding", "second_run"}
    titles = [title for each in checks.values() for title in each]
    assert len(set(titles)) == len(titles) and set(titles) < shared(all_operations, "hf.say.self_check").checks().keys()
