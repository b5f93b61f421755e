"""The Kullback-Leibler divergence of two distributions over the vocabulary."""

import torch
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
    """Draw the distributions of a student and of a teacher."""
    student, teacher = (random.normal(tokens, size.vocab).float() for _ in range(2))
    return Inputs((student.log_softmax(-1).to(random.dtype),), others=(teacher.softmax(-1).to(random.dtype),))


def before(x):
    """Stand in for the softmax that Liger's script differentiates through."""
    return x.log_softmax(-1)


def formula(x, y):
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.kl_div(x.to(wide), y.to(wide), reduction="batchmean")


def of_package(package):
    function = providers.operation(package, "kl_div")
    return lambda x, y: function(x, y, "batchmean")


KL_DIV = Operation(
    name="kl_div",
    title="KL divergence",
    suite=LIGER,
    position=22,
    outputs=("loss",),
    gradients=("dx",),
    inputs=inputs,
    formula=formula,
    bastile=of_package,
    formula_provider="torch",
    peers={"liger": lambda: providers.liger("ops", "LigerKLDivLossFunction").apply},
    work=bytes_moved(2, 1),  # x, y; dx
    limits=(Limit(4096, 0.88, peer=1.15, dtype="fp32"), Limit(2048, 0.85, {"vocab": 151936}, liger=2.1)),
    liger=LigerConvention(name="kl_div", x_name="BT", x_label="B * T", dtype="fp32", before=before),
)


class KLDivBenchmark(OperationBenchmark):
    operation = KL_DIV


if __name__ == "__main__":
    main(KL_DIV)
