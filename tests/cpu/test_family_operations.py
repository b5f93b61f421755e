"""The operations that families other than Qwen3 and GPT-OSS need, against float64, in PyTorch and through the interpreter."""

import importlib

import pytest
import torch

from tests.ops.common import FLOATS, runtime_of

# The file in tests/ops -> the files of kernel_src whose kernels it runs.
OPERATIONS = {
    "residual_norm": ("residual_norm", "general_rms_norm", "column_sum"),
    "gated_rms_norm": ("gated_rms_norm", "column_sum"),
    "gated_output": ("gated_output",),
    "head_norm_rotary": ("head_norm_rotary", "column_sum"),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kernels", (False, True), ids=("pytorch", "kernels"))
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(all_operations, interpret, name, kernels, dtype):
    ran = interpret(all_operations, OPERATIONS[name]).launched if kernels else []
    failures = []
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is NaN
    try:
        for case, check in importlib.import_module(f"tests.ops.{name}").all_cases(all_operations, "cpu", (dtype,)):
            try:
                check()
            except AssertionError as error:
                failures.append(f"{case}: {error}")
    finally:
        torch.use_deterministic_algorithms(False)
    assert not failures, "\n".join(failures)
    if kernels:
        own = {k for k in runtime_of(all_operations).launch.backend.artifacts.kernels() if k in kernels_of(name)}
        assert own <= {variant.split("-")[0] for variant in ran}, "a kernel of this file did not run"


def kernels_of(name: str) -> set:
    """The kernels that a file of kernel_src prebuilds."""
    return {variant.kernel_name for variant in importlib.import_module(f"kernel_src.{name}").variants()}
