"""Fixtures for the tests within Liger-Kernel, and beside it."""

import importlib
import types

import pytest
import torch

from tests.ops.common import randn


@pytest.fixture(name="liger_kernel")
def liger_itself():
    """Liger-Kernel itself."""
    return pytest.importorskip("liger_kernel", reason="liger-kernel 0.8.5 is not installed (pip install -e '.[dev]')")


@pytest.fixture(name="ops")
def ops_of_liger(liger, liger_kernel):
    """`liger_kernel.ops`. Whatever a test takes over is given back."""
    yield importlib.import_module("liger_kernel.ops")
    liger.restore_liger()


def own(name):
    """Liger's, from the module that defines it."""
    ops = importlib.import_module("liger_kernel.ops")
    return getattr(importlib.import_module(vars(ops).get("_bastile_takes", {}).get(name, getattr(ops, name)).__module__), name)


@pytest.fixture(name="n")
def names(liger):
    """Liger's names over our operations."""
    return liger.liger_names


def config(**changes):
    """What an MLP of Liger's is made with."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    return types.SimpleNamespace(**{**sizes, "hidden_act": "silu", "mlp_multipliers": (0.5, 2.0), **changes})


def r(*shape, seed=0):
    return randn(*shape, dtype=torch.float64, device="cpu", seed=seed)
