"""Losses of preferences, of reinforcement learning and of distillation, called by Liger's own modules and functions."""

import importlib

import pytest
import torch

from tests.cpu.test_chunked_losses import LOSSES, run, same, tensors, theirs  # noqa: F401


@pytest.fixture
def taken(liger, theirs):  # noqa: F811
    """Whatever a test takes over is given back."""
    yield theirs
    liger.restore_liger()


def test_liger_runs_them(liger, taken):
    """Modules that were made before and after, and its functions; and its own are back afterwards."""
    functional_ = importlib.import_module(f"{taken.__name__}.functional")
    before = {name: getattr(functional_, f"liger_fused_linear_{name}") for name in ("dpo", "grpo", "cosine")}
    early = taken.LigerFusedLinearCPOLoss(compiled=False, beta=0.3)
    hidden, weight, target, bias = tensors()
    own = run(early, weight, hidden, target, bias)
    found = liger.use_in_liger()
    assert [name for name in found if name.startswith("chunked_loss.")] == [f"chunked_loss.LigerFusedLinear{n}Function" for n in LOSSES]
    calls = []
    module = importlib.import_module(f"{taken.__name__}.cpo_loss")
    assert module.LigerFusedLinearCPOFunction is liger.chunked_loss.LigerFusedLinearCPOFunction
    for short in (f"liger_fused_linear_{name}" for name in before):
        assert getattr(functional_, short) is getattr(liger.chunked_loss, short)
    kept = liger.chunked_loss.LigerFusedLinearCPOFunction.apply
    liger.chunked_loss.LigerFusedLinearCPOFunction.apply = staticmethod(lambda *a: calls.append(1) or kept(*a))
    try:
        for loss in (early, taken.LigerFusedLinearCPOLoss(beta=0.3)):
            same(run(loss, weight, hidden, target, bias), own)
    finally:
        liger.chunked_loss.LigerFusedLinearCPOFunction.apply = staticmethod(kept)
    assert len(calls) == 2 and liger.use_in_liger() == found
    liger.restore_liger()
    assert all(getattr(functional_, f"liger_fused_linear_{name}") == function for name, function in before.items())
    assert module.LigerFusedLinearCPOFunction is not liger.chunked_loss.LigerFusedLinearCPOFunction


def test_a_chunked_loss_with_other_arguments_stays_ligers(liger, taken, monkeypatch):
    class LigerFusedLinearDPOFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            raise NotImplementedError

    module = importlib.import_module(f"{taken.__name__}.dpo_loss")
    monkeypatch.setattr(module, "LigerFusedLinearDPOFunction", LigerFusedLinearDPOFunction)
    with pytest.warns(RuntimeWarning, match="it keeps its own chunked_loss.LigerFusedLinearDPOFunction"):
        found = liger.use_in_liger()
    assert module.LigerFusedLinearDPOFunction is LigerFusedLinearDPOFunction
    assert "chunked_loss.LigerFusedLinearDPOFunction" not in found and "chunked_loss.LigerFusedLinearCPOFunction" in found
