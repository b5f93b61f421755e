"""An unmodified Liger-Kernel 0.8.5 on our operations, and back. On a CPU Liger's own kernels cannot run, so what runs there is ours."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.cpu.conftest import REPOSITORY, assemble_cpu, load

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture
def ops(liger):
    """`liger_kernel.ops`. Whatever a test takes over is given back."""
    yield importlib.import_module("liger_kernel.ops")
    liger.restore_liger()


def holders(name):
    """Where Liger holds a name that models use."""
    importlib.import_module("liger_kernel.transformers")
    modules = [m for key, m in sorted(sys.modules.items()) if key == "liger_kernel.ops" or key.startswith("liger_kernel.transformers")]
    return [m for m in modules if name in vars(m)]


def own(name):
    """Liger's, from the module that defines it."""
    ops = importlib.import_module("liger_kernel.ops")
    return getattr(importlib.import_module(vars(ops).get("_bastile_takes", {}).get(name, getattr(ops, name)).__module__), name)


def test_everything_is_taken_and_given_back(liger, ops, capsys):
    before = {name: own(name) for name in liger.back_end.NAMES}
    defining = {name: importlib.import_module(function.__module__) for name, function in before.items()}
    taken = liger.use_in_liger()
    assert taken == list(liger.back_end.NAMES)
    assert "Liger 0.8.5 runs on the kernels of bastile/liger: LigerRMSNormFunction, " in capsys.readouterr().out
    for name in taken:
        assert len(holders(name)) >= 1
        assert all(vars(m)[name] is getattr(liger.liger_names, name) for m in holders(name)), name
        assert vars(defining[name])[name] is before[name]
    held = vars(importlib.import_module("liger_kernel.transformers.rms_norm"))
    assert held["LigerRMSNormFunction"] is liger.liger_names.LigerRMSNormFunction
    liger.restore_liger()
    for name in taken:
        assert all(vars(m)[name] is before[name] for m in holders(name)), name
    liger.restore_liger()


def test_twice_is_once(liger, ops):
    first = liger.use_in_liger()
    assert liger.use_in_liger() == first
    liger.restore_liger()
    assert ops.LigerRMSNormFunction is own("LigerRMSNormFunction")
    assert ops.LigerRMSNormFunction is not liger.liger_names.LigerRMSNormFunction


def test_modules_imported_later(liger, ops):
    sys.modules.pop("liger_kernel.transformers.dyt", None)
    liger.use_in_liger()
    late = importlib.import_module("liger_kernel.transformers.dyt")
    assert late.LigerDyTFunction is liger.liger_names.LigerDyTFunction
    liger.restore_liger()
    assert late.LigerDyTFunction is own("LigerDyTFunction")


def test_the_dispatcher_chooses_it(liger, ops):
    functional = importlib.import_module("liger_kernel.functional")
    backends = importlib.import_module("liger_kernel.backends")
    liger.use_in_liger()
    for operation in liger.back_end.DISPATCHED:
        assert backends.available_impls(operation)[0] == "nvidia-bastile", operation
    x, w = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(functional.rms_norm(x, w, 1e-6), torch.nn.functional.rms_norm(x, (8,), w, 1e-6))
    torch.testing.assert_close(functional.layer_norm(x, w, w, 1e-6), torch.nn.functional.layer_norm(x, (8,), w, w, 1e-6))
    torch.testing.assert_close(functional.softmax(x), x.softmax(-1))
    target = torch.tensor([0, 3, 7])
    loss, *others = functional.cross_entropy(x, target, label_smoothing=0.1)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x, target, label_smoothing=0.1))
    assert others == [None] * 3
    liger.restore_liger()
    for operation in liger.back_end.DISPATCHED:
        assert "nvidia-bastile" not in backends.all_impls(operation), operation


def step(model):
    tokens = torch.arange(24).view(2, 12) % 64
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def small():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, **SIZES)).train()


@pytest.mark.parametrize("order", ("before", "after", "after the model"))
def test_a_model_that_liger_patched(liger, ops, order):
    """Patched by Liger as it documents it, before or after ours: the numbers of transformers, and every operation ours."""
    plain = small()
    wanted = step(plain)
    if order == "before":
        liger.use_in_liger()
    patch = importlib.import_module("liger_kernel.transformers")
    model = small()
    if order == "after the model":
        patch._apply_liger_kernel_to_instance(model=model)
        liger.use_in_liger()
    else:
        modeling = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
        saved = dict(vars(modeling)), Qwen3ForCausalLM.forward
        patch.apply_liger_kernel_to_qwen3()
        try:
            if order == "after":
                liger.use_in_liger()
            model = small()
            assert type(model.model.norm).__name__ == "LigerRMSNorm"
        finally:
            vars(modeling).update(saved[0])
        forward, Qwen3ForCausalLM.forward = Qwen3ForCausalLM.forward, saved[1]
        model.forward = forward.__get__(model)
    loss, gradients = step(model)
    torch.testing.assert_close(loss, wanted[0])
    for found, expected in zip(gradients, wanted[1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_another_version(liger, ops, monkeypatch):
    """What has other arguments there stays Liger's, and what is missing is passed by, with one warning that names both."""
    monkeypatch.setattr(liger.back_end.metadata, "version", lambda name: "0.9.0")
    original = ops.LigerDyTFunction

    class LigerDyTFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, alpha, gamma, beta, epsilon):
            raise NotImplementedError

    monkeypatch.setattr(ops, "LigerDyTFunction", LigerDyTFunction)
    monkeypatch.delattr(ops, "LigerTVDLossFunction")
    with pytest.warns(RuntimeWarning, match=r"liger-kernel is 0.9.0, expected 0.8.5: .* LigerDyTFunction, LigerTVDLossFunction") as warned:
        taken = liger.use_in_liger()
    assert len(warned) == 1
    assert "LigerRMSNormFunction" in taken and "LigerDyTFunction" not in taken and "LigerTVDLossFunction" not in taken
    assert ops.LigerDyTFunction is LigerDyTFunction is not original
    liger.restore_liger()


def test_without_liger(liger, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    with pytest.raises(ImportError, match="pip install liger-kernel==0.8.5"):
        liger.use_in_liger()
    liger.restore_liger()


def test_a_gpu_without_kernels_leaves_liger_alone(liger, ops, monkeypatch):
    monkeypatch.setattr(liger.back_end.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(liger.back_end.torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(liger.back_end, "kernels_run_on", lambda _: False)
    with pytest.warns(RuntimeWarning, match="Liger keeps its own"):
        assert liger.use_in_liger() == []
    assert ops.LigerRMSNormFunction is own("LigerRMSNormFunction")


def test_two_builds_of_the_package(liger, ops, tmp_path):
    """The one that was called last; either gives everything back."""
    other = load(assemble_cpu(tmp_path, "\n# another build\n", "packages/liger"))
    liger.use_in_liger()
    other.use_in_liger()
    assert ops.LigerRMSNormFunction is other.liger_names.LigerRMSNormFunction
    liger.restore_liger()
    assert all(vars(m)["LigerRMSNormFunction"] is own("LigerRMSNormFunction") for m in holders("LigerRMSNormFunction"))


def test_where_liger_is_wrong(tmp_path):
    """Liger's own kernels in Triton's interpreter beside ours: cases that the card names, and some that both have right."""
    folder = assemble_cpu(tmp_path, package="packages/liger")
    command = [sys.executable, "-m", "tests.liger_reference", str(folder), "cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 10 and all(results["ours"] is True for results in found.values()), found
    assert {name for name, results in found.items() if results["liger"] is True} == {name for name in found if name.startswith("both_")}
