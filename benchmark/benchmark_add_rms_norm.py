"""Residual addition and RMSNorm as one operation."""

import torch.nn.functional as F

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import eager, providers
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, Operation, bytes_moved
from .suites import QWEN3


def inputs(size, tokens, random) -> Inputs:
    shape = (1, tokens, size.hidden)
    return Inputs(
        leaves=(random.normal(*shape), random.normal(*shape), random.normal(size.hidden, scale=0.1, shift=1.0)),
        output_gradients=(random.normal(*shape), random.normal(*shape)),
    )


def of_torch():
    """Return the addition and PyTorch's own RMSNorm."""

    def call(x, residual, weight):
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, eager.EPS), total

    return call


def of_liger():
    function = providers.liger("ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    return lambda x, residual, weight: function.apply(x, residual, weight, eager.EPS)


def of_liger_cutedsl():
    function = providers.liger_cutedsl("fused_add_rms_norm")
    return lambda x, residual, weight: function(x, residual, weight, eager.EPS)


def of_liger_cutile():
    function = providers.liger_cutile("LigerFusedAddRMSNormFunction")
    return lambda x, residual, weight: function.apply(x, residual, weight, eager.EPS)


def of_package(package):
    function = providers.operation(package, "add_rms_norm")
    return lambda x, residual, weight: function(x, residual, weight, eager.EPS)


ADD_RMS_NORM = Operation(
    name="add_rms_norm",
    title="residual + RMSNorm",
    suite=QWEN3,
    position=3,
    outputs=("y", "sum"),
    gradients=("dx", "dresidual", "dweight"),
    inputs=inputs,
    formula=eager.add_rms_norm,
    bastile=of_package,
    peers={"torch": of_torch, "liger": of_liger, "liger_cutedsl": of_liger_cutedsl, "liger_cutile": of_liger_cutile},
    # x, residual, y, sum; dy, dsum, sum and one gradient for both x and residual.
    work=bytes_moved(4, 4),
)


class AddRMSNormBenchmark(OperationBenchmark):
    operation = ADD_RMS_NORM


if __name__ == "__main__":
    main(ADD_RMS_NORM)
