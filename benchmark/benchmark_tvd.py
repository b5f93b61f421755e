"""The total variation distance of two distributions over the vocabulary."""

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
    """Draw the distributions of a student and of a teacher."""
    student, teacher = (random.normal(tokens, size.vocab).float() for _ in range(2))
    return Inputs((student.softmax(-1).to(random.dtype),), others=(teacher.softmax(-1).to(random.dtype),))


def before(x):
    """Stand in for the softmax that Liger's script differentiates through."""
    return x.softmax(-1)


def formula(x, y):
    x, y = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, y))
    return (x - y).abs().sum() / (2 * x.shape[0])


TVD = Operation(
    name="tvd",
    title="TVD",
    suite=LIGER,
    position=24,
    outputs=("loss",),
    gradients=("dx",),
    inputs=inputs,
    formula=formula,
    formula_provider="torch",
    peers={"liger": lambda: providers.liger("ops", "LigerTVDLossFunction").apply},
    work=bytes_moved(2, 1),  # x, y; dx
    limits=(Limit(4096, 0.88, peer=1.1, dtype="fp32"), Limit(2048, 0.85, {"vocab": 151936}, liger=1.4)),
    liger=LigerConvention(x_name="BT", x_label="B * T", dtype="fp32", before=before),
)


class TVDBenchmark(OperationBenchmark):
    operation = TVD


if __name__ == "__main__":
    main(TVD)
