"""GeGLU, gelu(gate) * up, between the projections of the MLP."""

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
    shape = (tokens, size.intermediate)
    return Inputs((random.normal(*shape), random.normal(*shape)), output_gradients=(random.normal(*shape),))


GEGLU = Operation(
    name="geglu",
    title="GeGLU",
    suite=LIGER,
    position=13,
    outputs=("y",),
    gradients=("dgate", "dup",),
    inputs=inputs,
    formula=lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    formula_provider="torch",
    peers={"liger": lambda: providers.liger("ops", "LigerGELUMulFunction").apply},
    work=bytes_moved(3, 5),  # gate, up, y; dy, gate, up, dgate, dup
    limits=(Limit(8192, 0.98, peer=0.97, liger=1.3),),
    liger=LigerConvention(x_name="T", x_label="sequence length"),
)


class GeGLUBenchmark(OperationBenchmark):
    operation = GEGLU


if __name__ == "__main__":
    main(GEGLU)
