"""RMSNorm with an offset and a choice of casts, as the families of Liger's models have it."""

import torch.nn.functional as F

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import eager, providers
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, LigerConvention, Limit, Operation, bytes_moved
from .suites import LIGER


def inputs(size, tokens, random) -> Inputs:
    shape = (tokens, size.hidden)
    return Inputs((random.normal(*shape), random.normal(size.hidden, scale=0.1, shift=1.0)), output_gradients=(random.normal(*shape),))


def of_liger():
    function = providers.liger("ops", "LigerRMSNormFunction")
    return lambda x, weight: function.apply(x, weight, eager.EPS, 0.0, "llama", True, None)


def of_package(package):
    function = providers.operation(package, "rms_norm")
    return lambda x, weight: function(x, weight, eager.EPS)


LIGER_RMS_NORM = Operation(
    name="liger_rms_norm",
    title="RMSNorm",
    suite=LIGER,
    position=1,
    outputs=("y",),
    gradients=("dx", "dweight"),
    inputs=inputs,
    formula=eager.rms_norm,
    bastile=of_package,
    peers={"torch": lambda: lambda x, weight: F.rms_norm(x, weight.shape, weight, eager.EPS), "liger": of_liger},
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    limits=(Limit(8192, 0.86, peer=1.3), Limit(262144, 0.80, {"hidden": 128}, peer=1.05, liger=2.3)),
    liger=LigerConvention(name="rms_norm", x_name="BT", x_label="B * T"),
)


class LigerRMSNormBenchmark(OperationBenchmark):
    operation = LIGER_RMS_NORM


if __name__ == "__main__":
    main(LIGER_RMS_NORM)
