"""The residual's addition and RMSNorm with an offset and a choice of casts, as the families of Liger's models have them."""

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import eager, providers
from .benchmark_add_rms_norm import of_package, of_torch
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, LigerConvention, Limit, Operation, bytes_moved
from .suites import LIGER


def inputs(size, tokens, random) -> Inputs:
    shape = (tokens, size.hidden)
    leaves = (random.normal(*shape), random.normal(*shape), random.normal(size.hidden, scale=0.1, shift=1.0))
    return Inputs(leaves, output_gradients=(random.normal(*shape), random.normal(*shape)))


def of_liger():
    function = providers.liger("ops", "LigerFusedAddRMSNormFunction")
    return lambda x, residual, weight: function.apply(x, residual, weight, eager.EPS, 0.0, "llama", False)


FUSED_ADD_RMS_NORM = Operation(
    name="fused_add_rms_norm",
    title="residual + RMSNorm",
    suite=LIGER,
    position=2,
    outputs=("y", "sum"),
    gradients=("dx", "dresidual", "dweight"),
    inputs=inputs,
    formula=eager.add_rms_norm,
    bastile=of_package,
    peers={"torch": of_torch, "liger": of_liger},
    work=bytes_moved(4, 4),  # x, residual, y, sum; dy, dsum, sum and one gradient for both x and residual
    limits=(Limit(8192, 0.88, peer=1.15),),
    liger=LigerConvention(x_name="BT", x_label="B * T", differentiated=1),
)


class FusedAddRMSNormBenchmark(OperationBenchmark):
    operation = FUSED_ADD_RMS_NORM


if __name__ == "__main__":
    main(FUSED_ADD_RMS_NORM)
