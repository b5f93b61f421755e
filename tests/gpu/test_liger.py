"""Liger-Kernel's own kernels beside ours, where it is installed."""

import copy
import importlib.util

import pytest
import torch
from torch import nn

from tests.gpu.conftest import ROOT
from tests.liger_families import FAMILIES, check_family, compared
from tests.ops.common import FLOATS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")


@pytest.mark.parametrize("family", FAMILIES)
def test_training_a_model_of_each_family(liger, family):
    """Unmodified Liger on our kernels, in float32, beside transformers."""
    try:
        check_family(liger, family, "cuda", 1e-3)
    finally:
        liger.restore_liger()


def test_where_liger_is_wrong():
    compared(ROOT / "packages/liger", "cuda")


def network(dtype):
    torch.manual_seed(0)
    blocks = nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU(), nn.LayerNorm((32, 32)), nn.RMSNorm(32, eps=1e-5)
    model = nn.Sequential(*blocks).to("cuda", dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5, 0.1)
    return model


def step(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y.float().square().mean(), (x, *model.parameters()))]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_norms_of_torch_nn(liger, dtype):
    """Against float64, no worse than torch's own by more than a rounding. The gradient of the convolution's bias is next to nothing, for
    GroupNorm takes the mean away: in bf16 a tenth of it is an error, with either."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        model, x = network(dtype), torch.randn(4, 3, 32, 32, device="cuda", dtype=dtype)
        exact, before = step(copy.deepcopy(model).double(), x.double()), step(model, x)
        found = step(liger.kernelize(model), x)
    assert {row.part for row in liger.explain(model).rows if row.fused} >= {"GroupNorm", "LayerNorm", "RMSNorm", "kernels on cuda:0"}
    for a, b, c in zip(found, before, exact, strict=True):
        assert (a.double() - c).norm() <= 1.25 * (b.double() - c).norm() + 2 * torch.finfo(dtype).eps * c.norm()


def test_autocast_computes_the_norms_as_torch_does(liger):
    model, x = network(torch.float32), torch.randn(4, 3, 32, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        wanted = model(x)
        found = liger.kernelize(model)(x)
    assert torch.equal(found, wanted) and found.dtype == wanted.dtype


def test_warm_up_loads_the_kernels_of_a_language_model(liger):
    before = torch.cuda.get_rng_state()
    liger.warmup_all_kernels()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert all(finding.fits for finding in liger.report().findings if finding.name.startswith("cuda:"))
