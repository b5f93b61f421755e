"""Liger-Kernel's own kernels beside ours, where it is installed."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.gpu.conftest import ROOT
from tests.liger_families import FAMILIES, check_family

pytestmark = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")


@pytest.mark.parametrize("family", FAMILIES)
def test_training_a_model_of_each_family(liger, family):
    """Unmodified Liger on our kernels, in float32, beside transformers."""
    try:
        check_family(liger, family, "cuda", 1e-3)
    finally:
        liger.restore_liger()


def test_where_liger_is_wrong():
    command = [sys.executable, "-m", "tests.liger_reference", str(ROOT / "packages/liger"), "cuda"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(results["ours"] is True for results in found.values()), found
    assert {name for name,
            results in found.items() if results["liger"] is True} == {name for name in found if name.startswith("both_")}, found
