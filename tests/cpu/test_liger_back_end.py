"""An unmodified Liger-Kernel 0.8.5 on our operations, and back. On a CPU Liger's own kernels cannot run, so what runs there is ours."""

import importlib
import json
import math
import os
import subprocess
import sys
import types

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.cpu.conftest import assemble_cpu, load
from tests.liger_families import FAMILIES, SIZES, check_family, compared, kept


@pytest.fixture(autouse=True)
def liger_kernel():
    reason = "liger-kernel 0.8.5 is not installed, so there is nothing to run inside (pip install -e '.[dev]')"
    return pytest.importorskip("liger_kernel", reason=reason)


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
    *taken, _, _, _, _, _, _, _, _ = liger.use_in_liger()  # the last are the chunked losses: test_chunked_losses.py
    assert taken == list(liger.back_end.NAMES)
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


CHOSEN_BY_THE_ENVIRONMENT = """
import json, sys
from pathlib import Path
from kernels import get_local_kernel

ours = get_local_kernel(Path(sys.argv[1]), backend="cpu")
assert not any(name.startswith("liger_kernel.ops") and "registry" not in name for name in sys.modules)
import torch
import liger_kernel.ops.backends.registry
from liger_kernel import functional
from liger_kernel.transformers import LigerCrossEntropyLoss, LigerRMSNorm

loss = LigerCrossEntropyLoss()(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
print(json.dumps({
    "registered": sorted(liger_kernel.ops.backends.registry.IMPL_REGISTRY),
    "taken": liger_kernel.ops.LigerRMSNormFunction is ours.liger_names.LigerRMSNormFunction,
    "norm": LigerRMSNorm(8)(torch.ones(2, 8)).tolist(),
    "loss": float(loss),
    "softmax": functional.softmax(torch.zeros(1, 4)).tolist(),
    "again": len(ours.use_in_liger()),
}))
"""


def liger_in(environment, code, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("name", ("bastile", "nvidia-bastile", "BASTILE"))
def test_chosen_by_the_environment(liger_folder, name):
    """LIGER_KERNEL_IMPL, for a package that is loaded before Liger: Liger then imports it by itself, and says so once."""
    done = liger_in({"LIGER_KERNEL_IMPL": name}, CHOSEN_BY_THE_ENVIRONMENT, str(liger_folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("runs on the kernels of bastile/liger") == 1
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["registered"] == sorted(["ascend", "cute", "cutedsl", "cutile", name.lower()])
    assert found["taken"] and found["again"] == 31
    assert found["loss"] == pytest.approx(math.log(4))
    assert torch.tensor(found["norm"]).allclose(torch.ones(2, 8)) and torch.tensor(found["softmax"]).allclose(torch.full((1, 4), 0.25))


def test_the_environment_alone_is_refused_by_liger():
    """What the card says: Liger looks for implementations in its own folders, so this package must be loaded first."""
    done = liger_in({"LIGER_KERNEL_IMPL": "bastile"}, "import liger_kernel.ops")
    assert "Unknown LIGER_KERNEL_IMPL='bastile'" in done.stderr


def test_another_implementation_that_the_user_chose_is_named(liger, ops, monkeypatch):
    monkeypatch.setenv("LIGER_KERNEL_IMPL_ROPE", "triton")
    with pytest.warns(RuntimeWarning, match="another implementation of Liger's dispatcher for rope: unset it, or make it bastile"):
        liger.use_in_liger()
    monkeypatch.setenv("LIGER_KERNEL_IMPL_ROPE", "bastile")
    backends = importlib.import_module("liger_kernel.backends")
    backends.set_impl("nvidia-triton")
    try:
        with pytest.warns(RuntimeWarning, match="for rms_norm, fused_add_rms_norm, layer_norm, softmax, swiglu, geglu, cross_entropy, "):
            liger.use_in_liger()
    finally:
        backends.set_impl(None)


def test_the_shorter_way_to_the_dispatcher(liger, ops, monkeypatch):
    """No graph break, and none of Liger's looking around; but what is asked for by name, or chosen meanwhile, goes to Liger's."""
    transformers = importlib.import_module("liger_kernel.transformers")
    backends, functional = (importlib.import_module(f"liger_kernel.{name}") for name in ("backends", "functional"))
    rope = sys.modules["liger_kernel.transformers.rope"]
    before = rope.dispatch
    liger.use_in_liger()
    assert rope.dispatch is not before and functional.dispatch is not before and backends.dispatch is before
    q, k, angle = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 4).repeat(1, 1, 2)
    loss, norm = transformers.LigerCrossEntropyLoss(), transformers.LigerLayerNorm(8)

    def step(q, k):
        q, k = transformers.liger_rotary_pos_emb(q, k, angle.cos(), angle.sin())
        return loss(norm(q).view(6, 8), torch.arange(6)), k

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for found, wanted in zip(compiled(q, k), step(q, k), strict=True):
        torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError, match="No 'none-such' implementation registered for op 'softmax'"):
        functional.softmax(q, impl="none-such")
    backends.set_impl("none-such")
    try:
        with pytest.raises(RuntimeError, match="No 'none-such' implementation registered for op 'rope'"):
            step(q, k)
    finally:
        backends.set_impl(None)
    monkeypatch.setenv("LIGER_KERNEL_BACKEND", "none-such")
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "bastile")  # comes first
    torch.testing.assert_close(functional.softmax(q), q.softmax(-1))
    monkeypatch.setenv("LIGER_KERNEL_IMPL_SOFTMAX", "none-such")
    with pytest.raises(RuntimeError, match="No 'none-such' implementation registered for op 'softmax'"):
        functional.softmax(q)
    liger.restore_liger()
    assert rope.dispatch is before and functional.dispatch is before


def pieces_by_name(name):
    backends = importlib.import_module("liger_kernel.backends")
    importlib.import_module("liger_kernel.functional")
    return lambda *arguments: backends.dispatch(name, *arguments, impl="nvidia-bastile")


def logits_of(rows, classes, seed, dtype=torch.float32):
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_a_chunk_of_cross_entropy(liger, ops, reduction, weighted):
    """Two chunks of one loss beside the formula in float64, with every option; the logits stay as they are."""
    liger.use_in_liger()
    chunk = pieces_by_name("cross_entropy_loss_and_grad")
    logits, target = logits_of(6, 10, 0), torch.tensor([3, -100, 0, 9, 9, 1])
    weight = torch.rand(10, generator=torch.Generator().manual_seed(1)) + 0.5 if weighted else None
    counted, of_classes = int((target != -100).sum()), float(weight[target[target != -100]].sum()) if weighted else 5
    kept = logits.clone()
    found = [
        chunk(logits[a:b], target[a:b], weight, -100, 1e-2, 0.1, reduction, 3.0, counted, of_classes, 0.0, True, True, True, True)
        for a, b in ((0, 4), (4, 6))
    ]
    losses, z_losses, hits, predicted, gradients = (torch.cat(parts) for parts in zip(*found))
    leaf = logits.double().requires_grad_()
    capped = 3 * torch.tanh(leaf / 3)
    wide = None if weight is None else weight.double()
    z = torch.where(target != -100, 1e-2 * capped.logsumexp(-1).square(), 0.0).sum() / (counted if reduction == "mean" else 1)
    wanted = torch.nn.functional.cross_entropy(capped, target, wide, label_smoothing=0.1, reduction=reduction) + z
    torch.testing.assert_close(losses.sum().double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(z_losses.sum().double(), z.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients.double(), torch.autograd.grad(wanted, leaf)[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(predicted, torch.where(target != -100, kept.argmax(-1), -1)) and torch.equal(logits, kept)
    assert torch.equal(hits, (predicted == target).float())


def test_a_chunk_of_jsd(liger, ops):
    liger.use_in_liger()
    student, teacher = (logits_of(5, 12, i).log_softmax(-1) for i in range(2))
    labels = torch.tensor([1, -100, 2, 0, -100], dtype=torch.int32)
    loss, gradient = pieces_by_name("jsd_loss_and_grad")(student, teacher, labels, 0.3, -100, 3.0)
    leaf = student.double().requires_grad_()
    p, q = teacher.double().exp(), leaf.exp()
    m = (0.3 * p + 0.7 * q).log()
    wanted = ((0.3 * p * (teacher.double() - m) + 0.7 * q * (leaf - m)).sum(-1) * (labels != -100)).sum() / 3
    torch.testing.assert_close(loss.sum().double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), torch.autograd.grad(wanted, leaf)[0], rtol=1e-4, atol=1e-6)


def test_what_is_only_called_by_name(liger, ops, monkeypatch):
    """Liger's own losses keep their own pieces unless this back end is named."""
    liger.use_in_liger()
    backends = importlib.import_module("liger_kernel.backends")
    for operation in liger.back_end.PIECES:
        assert set(backends.all_impls(operation)) >= {"nvidia-bastile", "bastile"}
        assert backends.available_impls(operation)[0] not in ("nvidia-bastile", "bastile")
        assert backends.available_impls(operation)[-2:] == ["nvidia-bastile", "bastile"]
    liger.restore_liger()
    assert not any("bastile" in name for operation in liger.back_end.PIECES for name in backends.all_impls(operation))
    monkeypatch.setattr(backends, "dispatch", lambda *arguments, **options: (arguments, options))
    found = liger.back_end.liger_pieces.kl_loss_and_grad(1, 2, 3)
    assert found == (("kl_loss_and_grad", 1, 2, 3), {"impl": "nvidia-triton", "mode": None})


@pytest.mark.parametrize("how", ("LIGER_KERNEL_IMPL", "LIGER_KERNEL_IMPL_SOFTMAX", "LIGER_KERNEL_BACKEND", "set_impl", "_GLOBAL_BACKEND"))
@pytest.mark.parametrize("spelled", ("bastile", "BASTILE", " Nvidia-Bastile"))
def test_a_name_that_is_still_asked_for_after_restore_means_ligers_own_choice(liger, ops, monkeypatch, how, spelled):
    backends, functional = (importlib.import_module(f"liger_kernel.{name}") for name in ("backends", "functional"))
    if not how.startswith("LIGER") and spelled != "bastile":
        pytest.skip("set_impl takes names as they are")
    if how == "set_impl":
        backends.set_impl(spelled)
    elif how == "_GLOBAL_BACKEND":  # which Liger reads too: its older users set it
        monkeypatch.setattr(sys.modules["liger_kernel.backends.dispatch"], how, spelled)
    else:
        monkeypatch.setenv(how, spelled)
    try:
        x = torch.randn(2, 5)
        liger.use_in_liger()
        torch.testing.assert_close(functional.softmax(x), x.softmax(-1))
        torch.testing.assert_close(backends.dispatch("softmax", x), x.softmax(-1))
        if how != "LIGER_KERNEL_IMPL_SOFTMAX":
            assert backends.resolve_impl("kl_loss_and_grad").forward is liger.back_end.liger_pieces.kl_loss_and_grad
        with pytest.warns(RuntimeWarning, match=r"chooses \s*\w.*, which restore_liger\(\) took out of Liger's dispatcher"):
            liger.restore_liger()

        @backends.register_impl("softmax", impl_name="theirs", preference_rank=-1)
        def softmax(x, mode=None):
            return "Liger's own"

        assert functional.softmax(x) == backends.dispatch("softmax", x) == "Liger's own"
        liger.use_in_liger()
        torch.testing.assert_close(functional.softmax(x), x.softmax(-1))
    finally:
        backends.set_impl(None)
        monkeypatch.undo()
        liger.restore_liger()
        backends.registry._REGISTRY.pop(("softmax", "theirs"), None)
        backends.clear_available_cache()
    assert not [name for operation in liger.back_end.DISPATCHED for name in backends.all_impls(operation) if "bastile" in name.lower()]


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
