"""LayerNorm of the hidden states."""

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


def inputs(size, tokens, random) -> Inputs:
    shape = (tokens, size.hidden)
    return Inputs((random.normal(*shape, shift=1.0), random.normal(size.hidden, scale=0.1, shift=1.0), random.normal(size.hidden)),
                  output_gradients=(random.normal(*shape),))


def of_liger():
    function = providers.liger("ops", "LigerLayerNormFunction")
    return lambda x, weight, bias: function.apply(x, weight, bias, 1e-6)


def of_package(package):
    function = providers.operation(package, "layer_norm")
    return lambda x, weight, bias: function(x, weight, bias, 1e-6)


LAYER_NORM = Operation(
    name="layer_norm",
    title="LayerNorm",
    suite=LIGER,
    position=10,
    outputs=("y",),
    gradients=("dx", "dweight", "dbias",),
    inputs=inputs,
    formula=lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, 1e-6),
    bastile=of_package,
    formula_provider="torch",
    peers={"liger": of_liger},
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    limits=(Limit(8192, 0.84, peer=1.55),),
    liger=LigerConvention(x_name="T", x_label="sequence length"),
)


class LayerNormBenchmark(OperationBenchmark):
    operation = LAYER_NORM


if __name__ == "__main__":
    main(LAYER_NORM)
