"""The Jensen-Shannon divergence of two heads' outputs, from the hidden states of a student and of a teacher.

The floor is four bare cuBLAS products: the logits of both, dhidden, dweight.
"""

import torch.nn.functional as F

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import benchmark_jsd, providers
from .floors import product_calls
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, LigerConvention, Limit, Operation, Work
from .suites import LIGER


def inputs(size, tokens, random) -> Inputs:
    """Draw hidden states and weights of both that give logits of order 1."""
    hidden, scale = size.hidden, size.hidden**-0.5
    student, teacher = ((random.normal(tokens, hidden), random.normal(size.vocab, hidden, scale=scale)) for _ in range(2))
    return Inputs(student, others=teacher)


def formula(x, weight, teacher, teacher_weight):
    logits = F.linear(x, weight), F.linear(teacher, teacher_weight)
    return benchmark_jsd.formula(*(F.log_softmax(benchmark_jsd.wide(z), -1) for z in logits))


def products(inputs: Inputs, mode: str) -> list[tuple[int, int, int]]:
    """Return the (m, n, k) of the matrix products."""
    (tokens, hidden), vocab = inputs.leaves[0].shape, inputs.leaves[1].shape[0]
    back = [(tokens, hidden, vocab), (vocab, hidden, tokens)]
    return {"forward": [], "backward": back}.get(mode, back) + ([(tokens, vocab, hidden)] * 2 if mode != "backward" else [])


FUSED_LINEAR_JSD = Operation(
    name="fused_linear_jsd",
    title="linear + JSD",
    suite=LIGER,
    position=31,
    outputs=("loss",),
    gradients=("dhidden", "dweight"),
    inputs=inputs,
    formula=formula,
    bastile=lambda package: providers.operation(package, "linear_jsd"),
    formula_provider="torch",
    peers={"liger": lambda: providers.liger("ops", "LigerFusedLinearJSDFunction").apply},
    work=lambda inputs, mode: Work.of_products(products(inputs, mode)),
    floor=product_calls(products),
    floor_title="bare cuBLAS GEMMs",
    modes=("full", "forward"),
    writes_inputs=False,
    tokens=(1024, 4096),
    limits=(Limit(4096, 0.92, peer=1.05), Limit(1024, 0.85, liger=9.0)),
    liger=LigerConvention(x_name="BT", x_label="B * T"),
)


class FusedLinearJSDBenchmark(OperationBenchmark):
    operation = FUSED_LINEAR_JSD


if __name__ == "__main__":
    main(FUSED_LINEAR_JSD)
