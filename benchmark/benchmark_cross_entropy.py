"""Cross entropy of logits, a seventh of whose labels do not count. Two passes are the least that any form needs: one reads the
logits, one writes their gradient. A form that leaves the logits alone and makes the gradient in the backward pass reads them twice."""

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

IGNORED = -100
TWICE = 2 / 3  # of the floor: what a form that reads the logits twice can reach


def inputs(size, tokens, random) -> Inputs:
    target = random.integers(size.vocab, tokens)
    target[::7] = IGNORED
    return Inputs((random.normal(tokens, size.vocab),), others=(target,))


def formula(x, target):
    return F.cross_entropy(x.to(torch.promote_types(x.dtype, torch.float32)), target)


def of_liger():
    function = providers.liger("ops", "LigerCrossEntropyFunction")
    return lambda x, target: function.apply(x, target, None, IGNORED, 0.0, 0.0, "mean", None, False, False, False)[0]


CROSS_ENTROPY = Operation(
    name="cross_entropy",
    title="cross entropy",
    suite=LIGER,
    position=20,
    outputs=("loss",),
    gradients=("dx",),
    inputs=inputs,
    formula=formula,
    bastile=lambda package: providers.operation(package, "cross_entropy"),
    formula_provider="torch",
    peers={"liger": of_liger},
    work=bytes_moved(1, 1),  # x; dx
    limits=(
        Limit(8192, 0.92 * TWICE, liger=1.2),
        Limit(4096, 0.92 * TWICE, liger=1.2, dtype="fp32"),
        Limit(1024, 0.92 * TWICE, {"vocab": 151936}, liger=1.2),
    ),
    liger=LigerConvention(x_name="V", x_label="vocab size"),
)


class CrossEntropyBenchmark(OperationBenchmark):
    operation = CROSS_ENTROPY


if __name__ == "__main__":
    main(CROSS_ENTROPY)
