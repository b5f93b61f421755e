"""Our operations in Liger-Kernel's dispatcher: chosen by rank, by name or by the environment, and given back."""

import functools
import importlib
import json
import math
import os
import subprocess
import sys

import pytest
import torch

from tests.liger_support import liger_itself, ops_of_liger  # noqa: F401

pytestmark = pytest.mark.usefixtures("liger_kernel")


@pytest.fixture
def backends(ops):
    return importlib.import_module("liger_kernel.backends")


@pytest.fixture
def functional(ops):
    return importlib.import_module("liger_kernel.functional")


def test_the_dispatcher_chooses_it(liger, backends, functional):
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


def test_another_implementation_that_the_user_chose_is_named(liger, backends, monkeypatch):
    monkeypatch.setenv("LIGER_KERNEL_IMPL_ROPE", "triton")
    with pytest.warns(RuntimeWarning, match="another implementation of Liger's dispatcher for rope: unset it, or make it bastile"):
        liger.use_in_liger()
    monkeypatch.setenv("LIGER_KERNEL_IMPL_ROPE", "bastile")
    backends.set_impl("nvidia-triton")
    try:
        with pytest.warns(RuntimeWarning, match="for rms_norm, fused_add_rms_norm, layer_norm, softmax, swiglu, geglu, cross_entropy, "):
            liger.use_in_liger()
    finally:
        backends.set_impl(None)


def test_the_shorter_way_to_the_dispatcher(liger, backends, functional, monkeypatch):
    """No graph break, and none of Liger's looking around; but what is asked for by name, or chosen meanwhile, goes to Liger's."""
    transformers = importlib.import_module("liger_kernel.transformers")
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


@pytest.fixture
def piece(liger, backends, functional):
    """Calls one of ours by its name."""
    liger.use_in_liger()
    return functools.partial(backends.dispatch, impl="nvidia-bastile")


def logits_of(rows, classes, seed):
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_a_chunk_of_cross_entropy(piece, reduction, weighted):
    """Two chunks of one loss beside the formula in float64, with every option; the logits stay as they are."""
    logits, target = logits_of(6, 10, 0), torch.tensor([3, -100, 0, 9, 9, 1])
    weight = torch.rand(10, generator=torch.Generator().manual_seed(1)) + 0.5 if weighted else None
    counted, of_classes = int((target != -100).sum()), float(weight[target[target != -100]].sum()) if weighted else 5
    kept = logits.clone()
    options = weight, -100, 1e-2, 0.1, reduction, 3.0, counted, of_classes, 0.0, True, True, True, True
    found = [piece("cross_entropy_loss_and_grad", logits[a:b], target[a:b], *options) for a, b in ((0, 4), (4, 6))]
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


def test_a_chunk_of_jsd(piece):
    student, teacher = (logits_of(5, 12, i).log_softmax(-1) for i in range(2))
    labels = torch.tensor([1, -100, 2, 0, -100], dtype=torch.int32)
    loss, gradient = piece("jsd_loss_and_grad", student, teacher, labels, 0.3, -100, 3.0)
    leaf = student.double().requires_grad_()
    p, q = teacher.double().exp(), leaf.exp()
    m = (0.3 * p + 0.7 * q).log()
    wanted = ((0.3 * p * (teacher.double() - m) + 0.7 * q * (leaf - m)).sum(-1) * (labels != -100)).sum() / 3
    torch.testing.assert_close(loss.sum().double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), torch.autograd.grad(wanted, leaf)[0], rtol=1e-4, atol=1e-6)


def test_what_is_only_called_by_name(liger, backends, monkeypatch):
    """Liger's own losses keep their own pieces unless this back end is named."""
    liger.use_in_liger()
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
def test_a_name_that_is_still_asked_for_after_restore_means_ligers_own_choice(liger, backends, functional, monkeypatch, how, spelled):
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
