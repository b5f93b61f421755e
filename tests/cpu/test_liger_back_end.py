"""An unmodified Liger-Kernel 0.8.5 on our operations, and back. On a CPU Liger's own kernels cannot run, so what runs there is ours."""

import importlib
import sys
import types

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.cpu.conftest import assemble_cpu, load
from tests.liger_families import FAMILIES, SIZES, check_family, compared, kept
from tests.liger_support import liger_itself, ops_of_liger, own  # noqa: F401

pytestmark = pytest.mark.usefixtures("liger_kernel")


def holders(name):
    """Where Liger holds a name that models use."""
    importlib.import_module("liger_kernel.transformers")
    modules = [m for key, m in sorted(sys.modules.items()) if key == "liger_kernel.ops" or key.startswith("liger_kernel.transformers")]
    return [m for m in modules if name in vars(m)]


def test_everything_is_taken_and_given_back(liger, ops, capsys):
    before = {name: own(name) for name in liger.back_end.NAMES}
    defining = {name: importlib.import_module(function.__module__) for name, function in before.items()}
    *taken, _, _, _, _, _, _, _, _ = liger.use_in_liger()  # the last are the chunked losses: test_chunked_losses.py
    assert taken == list(liger.back_end.NAMES) and liger.use_in_liger()[: len(taken)] == taken, "twice is once"
    assert "Liger 0.8.5 runs on the kernels of bastile/liger: LigerRMSNormFunction, " in capsys.readouterr().out
    for name in taken:
        assert len(holders(name)) >= 1
        assert all(vars(m)[name] is getattr(liger.liger_names, name) for m in holders(name)), name
        at_its_source = name in liger.back_end.ASKED_AT_ITS_SOURCE.get(defining[name].__name__, ())
        assert vars(defining[name])[name] is (getattr(liger.liger_names, name) if at_its_source else before[name])
    held = vars(importlib.import_module("liger_kernel.transformers.rms_norm"))
    assert held["LigerRMSNormFunction"] is liger.liger_names.LigerRMSNormFunction
    liger.restore_liger()
    for name in taken:
        assert all(vars(m)[name] is before[name] for m in holders(name)), name
        assert vars(defining[name])[name] is before[name]
    liger.restore_liger()


@pytest.fixture
def megatron(monkeypatch):
    """Megatron's module of its SwiGLU, as far as Liger patches it."""
    names = "megatron", "megatron.core", "megatron.core.fusions", "megatron.core.fusions.fused_bias_swiglu"
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            setattr(modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    module.SwiGLUFunction = type("SwiGLUFunction", (), {"apply": staticmethod(lambda *args: pytest.fail("Megatron's own"))})
    return module


@pytest.mark.parametrize("order", ("before", "after"))
def test_the_swiglu_that_liger_puts_into_megatron(liger, ops, megatron, order, monkeypatch):
    """It asks for its function where that is defined, when Megatron is patched."""
    patch = importlib.import_module("liger_kernel.megatron").apply_liger_kernel_to_megatron
    if order == "before":
        liger.use_in_liger()
    patch(rms_norm=False, swiglu=True)
    if order == "after":
        liger.use_in_liger()
    x = torch.randn(3, 16, requires_grad=True)
    y = megatron.SwiGLUFunction.apply(x)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(y, torch.nn.functional.silu(gate) * up)
    liger.restore_liger()
    called = []
    theirs = own("LigerFusedGateUpSiLUMulFunction")
    monkeypatch.setattr(theirs, "apply", lambda *args: called.append(args))
    megatron.SwiGLUFunction.apply(x)
    assert called, "Liger's own again"


def test_modules_imported_later(liger, ops):
    sys.modules.pop("liger_kernel.transformers.dyt", None)
    liger.use_in_liger()
    late = importlib.import_module("liger_kernel.transformers.dyt")
    assert late.LigerDyTFunction is liger.liger_names.LigerDyTFunction
    liger.restore_liger()
    assert late.LigerDyTFunction is own("LigerDyTFunction")


def step(model):
    tokens = torch.arange(24).view(2, 12) % 64
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def small():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).train()


@pytest.mark.parametrize("order", ("before", "after", "after the model"))
def test_a_model_that_liger_patched(liger, ops, order):
    """Patched by Liger as it documents it, before or after ours: the numbers of transformers, and every operation ours."""
    plain = small()
    wanted = step(plain)
    if order == "before":
        liger.use_in_liger()
    patch = importlib.import_module("liger_kernel.transformers")
    with kept(importlib.import_module("transformers.models.qwen3.modeling_qwen3")):
        if order == "after the model":
            model = small()
            patch._apply_liger_kernel_to_instance(model=model)
        else:
            patch.apply_liger_kernel_to_qwen3()
        if order != "before":
            liger.use_in_liger()
        if order != "after the model":
            model = small()
        assert type(model.model.norm).__name__ == ("Qwen3RMSNorm" if order == "after the model" else "LigerRMSNorm")
        loss, gradients = step(model)
    torch.testing.assert_close(loss, wanted[0])
    for found, expected in zip(gradients, wanted[1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_a_model_of_each_family(liger, ops, family):
    check_family(liger, family, "cpu")


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


def test_one_build_loaded_twice(liger, tmp_path, monkeypatch):
    """From two folders: its modules are imported once, and each of the two packages has the modules that are its own."""
    monkeypatch.setitem(sys.modules, liger.__name__, liger)
    again = load(assemble_cpu(tmp_path, package="packages/liger"))
    assert again is not liger and again.back_end is liger.back_end and again.liger_names is liger.liger_names


def test_two_builds_of_the_package(liger, ops, tmp_path):
    """The one that was called last; either gives everything back."""
    other = load(assemble_cpu(tmp_path, "\n# another build\n", "packages/liger"))
    liger.use_in_liger()
    other.use_in_liger()
    assert ops.LigerRMSNormFunction is other.liger_names.LigerRMSNormFunction
    liger.restore_liger()
    assert all(vars(m)["LigerRMSNormFunction"] is own("LigerRMSNormFunction") for m in holders("LigerRMSNormFunction"))


def test_where_liger_is_wrong(liger_folder):
    """Liger's own kernels in Triton's interpreter beside ours: cases that the card names, and some that both have right."""
    assert len(compared(liger_folder, "cpu")) == 10
