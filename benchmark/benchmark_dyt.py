"""Dynamic tanh of the hidden states, instead of a norm."""

import torch

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
    return Inputs((random.normal(*shape), random.normal(1, scale=0.1, shift=0.5), random.normal(size.hidden, scale=0.1, shift=1.0),
                   random.normal(size.hidden)), output_gradients=(random.normal(*shape),))


DYT = Operation(
    name="dyt",
    title="DyT",
    suite=LIGER,
    position=11,
    outputs=("y",),
    gradients=("dx", "dalpha", "dgamma", "dbeta",),
    inputs=inputs,
    formula=lambda x, alpha, gamma, beta: torch.tanh(alpha * x) * gamma + beta,
    formula_provider="torch",
    peers={"liger": lambda: providers.liger("ops", "LigerDyTFunction").apply},
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    bounds={"y": 1e-2, "dx": 1e-2, "dalpha": 5e-2, "dgamma": 1e-2},  # PyTorch rounds the tanh and each product
    limits=(Limit(8192, 0.84, peer=1.9),),
    liger=LigerConvention(x_name="T", x_label="sequence length"),
)


class DyTBenchmark(OperationBenchmark):
    operation = DYT


if __name__ == "__main__":
    main(DYT)
