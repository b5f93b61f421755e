"""GroupNorm: sequences with four channels a group, and images with 32 groups."""

import torch.nn.functional as F

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import providers
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, LigerConvention, Limit, Operation, bytes_moved
from .suites import LIGER

POSITIONS = 512  # of one sequence, as in Liger-Kernel's script
EPS = 1e-6


def drawn(random, *shape: int) -> Inputs:
    channels = shape[1]
    leaves = (random.normal(*shape, shift=1.0), random.normal(channels, scale=0.1, shift=1.0), random.normal(channels))
    return Inputs(leaves, output_gradients=(random.normal(*shape),))


def inputs(size, tokens, random) -> Inputs:
    """Draw sequences that have the model's hidden size as channels."""
    return drawn(random, max(1, tokens // POSITIONS), size.hidden, POSITIONS)


def images(*shape: int):
    """Return inputs of images [batch, channels, height, width]. Of `tokens`, a check's, nothing is taken: they are small enough."""
    return lambda size, tokens, random: drawn(random, *shape)


def groups_of(x) -> int:
    return x.shape[1] // 4 if x.dim() == 3 else 32


def of_liger():
    function = providers.liger("ops", "LigerGroupNormFunction")
    return lambda x, weight, bias: function.apply(x, weight, bias, x.shape[1], groups_of(x), EPS)


def of_package(package):
    function = providers.operation(package, "group_norm")
    return lambda x, weight, bias: function(x, groups_of(x), weight, bias, EPS)


GROUP_NORM = Operation(
    name="group_norm",
    title="GroupNorm",
    suite=LIGER,
    position=5,
    outputs=("y",),
    gradients=("dx", "dweight", "dbias"),
    inputs=inputs,
    formula=lambda x, weight, bias: F.group_norm(x, groups_of(x), weight, bias, EPS),
    bastile=of_package,
    formula_provider="torch",
    peers={"liger": of_liger},
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    limits=(
        Limit(8192, 0.75, peer=1.5, checked=512),
        Limit(8 * 64 * 64, 0.65, peer=3.5, label="8x320x64x64", inputs=images(8, 320, 64, 64)),
        Limit(2 * 128 * 128, 0.65, peer=3.5, label="2x512x128x128", inputs=images(2, 512, 128, 128)),
    ),
    liger=LigerConvention(x_name="BT", x_label="B * T"),
)


class GroupNormBenchmark(OperationBenchmark):
    operation = GROUP_NORM


if __name__ == "__main__":
    main(GROUP_NORM)
