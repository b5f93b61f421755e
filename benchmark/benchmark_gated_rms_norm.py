"""The norm behind the gated delta rule: RMSNorm of every head, times silu of a gate."""

import torch.nn.functional as F

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import delta_nets, eager, providers
from .delta_nets import DeltaNet
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, Operation, Random, bytes_moved
from .suites import QWEN3_5


def inputs(net: DeltaNet, tokens: int, random: Random) -> Inputs:
    """Draw x and its gate, [tokens * heads, width], and a weight."""
    x, gate, dy = (random.normal(tokens * net.heads, net.width) for _ in range(3))
    return Inputs((x, gate, random.normal(net.width, scale=0.1, shift=1.0)), output_gradients=(dy,))


def formula(x, gate, weight):
    """Compute Qwen3_5RMSNormGated."""
    return (eager.rms_norm(x, weight) * F.silu(eager.to_float32(gate))).to(x.dtype)


def of_fla():
    """Return flash-linear-attention's norm."""
    providers.require_modules("fla")
    from fla.modules.fused_norm_gate import rms_norm_gated

    return lambda x, gate, weight: rms_norm_gated(x, gate, weight, None, activation="swish", eps=eager.EPS)


def of_package(package):
    function = providers.operation(package, "gated_rms_norm")
    return lambda x, gate, weight: function(x, gate, weight, eager.EPS)


GATED_RMS_NORM = Operation(
    name="gated_rms_norm",
    title="gated RMSNorm (rows of 128)",
    suite=QWEN3_5,
    position=2,
    outputs=("y",),
    gradients=("dx", "dgate", "dweight"),
    inputs=inputs,
    formula=formula,
    bastile=of_package,
    peers={"huggingface_fla": of_fla},
    work=bytes_moved(3, 5),  # x, gate, y; dy, x, gate, dx, dgate
    sweeps=delta_nets.SWEEPS,
)


class GatedRMSNormBenchmark(OperationBenchmark):
    operation = GATED_RMS_NORM

    def shape(self, gpu: bool) -> tuple:
        return delta_nets.measured(gpu), 4096 if gpu else 32


if __name__ == "__main__":
    main(GATED_RMS_NORM)
