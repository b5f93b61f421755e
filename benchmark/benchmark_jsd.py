"""The Jensen-Shannon divergence of two distributions over the vocabulary."""

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
    """Draw the log-probabilities of a student and of a teacher."""
    student, teacher = (random.normal(tokens, size.vocab).float() for _ in range(2))
    return Inputs((student.log_softmax(-1).to(random.dtype),), others=(teacher.log_softmax(-1).to(random.dtype),))


def before(x):
    """Stand in for the softmax that Liger's script differentiates through."""
    return x.log_softmax(-1)


def wide(t):
    """Return t in float32, or as it is if that is narrower."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def formula(x, y):
    x, y = wide(x), wide(y)
    log_m = torch.log((x.exp() + y.exp()) / 2)
    return (y.exp() * (y - log_m) + x.exp() * (x - log_m)).sum() / (2 * x.shape[0])


JSD = Operation(
    name="jsd",
    title="JSD",
    suite=LIGER,
    position=23,
    outputs=("loss",),
    gradients=("dx",),
    inputs=inputs,
    formula=formula,
    formula_provider="torch",
    peers={"liger": lambda: providers.liger("ops", "LigerJSDFunction").apply},
    work=bytes_moved(2, 1),  # x, y; dx
    limits=(Limit(4096, 0.88, peer=1.4, dtype="fp32"), Limit(2048, 0.75, {"vocab": 151936}, liger=3.5)),
    liger=LigerConvention(x_name="BT", x_label="B * T", dtype="fp32", before=before),
)


class JSDBenchmark(OperationBenchmark):
    operation = JSD


if __name__ == "__main__":
    main(JSD)
