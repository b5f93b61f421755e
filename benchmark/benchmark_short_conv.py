"""A short causal convolution in front of the gated delta rule: 4 taps of each channel, then SiLU; queries, keys and values together.

Hugging Face is transformers' PyTorch code, which has the channels before the tokens: it gets and gives views, as in its layer.
causal-conv1d, which transformers takes where it is installed, has no wheels for current versions of torch.
"""

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import delta_nets, providers
from .delta_nets import DeltaNet
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, Operation, Random, bytes_moved
from .suites import QWEN3_5

TAPS = 4


def inputs(net: DeltaNet, tokens: int, random: Random) -> Inputs:
    """Draw x, [1, tokens, channels], and a weight."""
    x, dy = (random.normal(1, tokens, net.channels) for _ in range(2))
    return Inputs((x, random.normal(net.channels, TAPS, scale=0.5)), output_gradients=(dy,))


def formula(x, weight):
    """Compute what Qwen3_5GatedDeltaNet does between its projections and the rule."""
    return delta_nets.in_pytorch("causal_conv1d_fn")(x.transpose(1, 2), weight, None, activation="silu").transpose(1, 2)


def of_fla():
    """Return flash-linear-attention's convolution in Triton."""
    providers.require_modules("fla")
    from fla.modules.causal_conv1d import causal_conv1d

    return lambda x, weight: causal_conv1d(x, weight, activation="silu", backend="triton")[0]


SHORT_CONV = Operation(
    name="short_conv",
    title="short convolution + SiLU",
    suite=QWEN3_5,
    position=3,
    outputs=("y",),
    gradients=("dx", "dweight"),
    inputs=inputs,
    formula=formula,
    peers={"huggingface_fla": of_fla},
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    sweeps=delta_nets.SWEEPS,
)


class ShortConvBenchmark(OperationBenchmark):
    operation = SHORT_CONV

    def shape(self, gpu: bool) -> tuple:
        return delta_nets.measured(gpu), 4096 if gpu else 32


if __name__ == "__main__":
    main(SHORT_CONV)
