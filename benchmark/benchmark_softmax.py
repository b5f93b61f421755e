"""Softmax over the hidden states."""

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
    return Inputs((random.normal(*shape),), output_gradients=(random.normal(*shape),))


SOFTMAX = Operation(
    name="softmax",
    title="softmax",
    suite=LIGER,
    position=12,
    outputs=("y",),
    gradients=("dx",),
    inputs=inputs,
    formula=lambda x: x.softmax(-1),
    formula_provider="torch",
    peers={"liger": lambda: providers.liger("ops", "LigerSoftmaxFunction").apply},
    work=bytes_moved(2, 3),  # x, y; dy, y, dx
    limits=(
        Limit(8192, 0.95, peer=0.98),
        Limit(2048, 0.95, {"hidden": 32768}, peer=0.98),
        Limit(2048, 0.75, {"hidden": 151936}, peer=1.7),
    ),
    liger=LigerConvention(x_name="T", x_label="sequence length"),
)


class SoftmaxBenchmark(OperationBenchmark):
    operation = SOFTMAX


if __name__ == "__main__":
    main(SOFTMAX)
