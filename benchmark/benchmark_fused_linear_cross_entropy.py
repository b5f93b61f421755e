"""Cross entropy of the head's output, from the hidden states, as Liger has it: no tuning of the chunks, one loss.

The floor is three bare cuBLAS products: logits, dhidden, dweight.
"""

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import eager, providers
from .benchmark_linear_cross_entropy import inputs, loss_only, reference
from .floors import product_calls
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, LigerConvention, Limit, Operation, Work
from .suites import LIGER


def products(inputs: Inputs, mode: str) -> list[tuple[int, int, int]]:
    """Return the (m, n, k) of the matrix products."""
    (tokens, hidden), vocab = inputs.leaves[0].shape, inputs.leaves[1].shape[0]
    back = [(tokens, hidden, vocab), (vocab, hidden, tokens)]
    return {"forward": [], "backward": back}.get(mode, back) + ([(tokens, vocab, hidden)] if mode != "backward" else [])


FUSED_LINEAR_CROSS_ENTROPY = Operation(
    name="fused_linear_cross_entropy",
    title="linear + cross entropy",
    suite=LIGER,
    position=30,
    outputs=("loss",),
    gradients=("dhidden", "dweight"),
    inputs=inputs,
    formula=eager.linear_cross_entropy,
    bastile=lambda package: providers.operation(package, "linear_cross_entropy"),
    formula_provider="torch",
    peers={"liger": lambda: loss_only(providers.liger("ops", "LigerFusedLinearCrossEntropyFunction").apply)},
    work=lambda inputs, mode: Work.of_products(products(inputs, mode)),
    floor=product_calls(products),
    floor_title="bare cuBLAS GEMMs",
    reference=reference,
    modes=("full", "forward"),
    writes_inputs=False,
    tokens=(1024, 4096, 8192),
    limits=(Limit(8192, 0.97, peer=0.96), Limit(1024, 0.93, liger=9.0)),
    liger=LigerConvention(x_name="BT", x_label="B * T"),
)


class FusedLinearCrossEntropyBenchmark(OperationBenchmark):
    operation = FUSED_LINEAR_CROSS_ENTROPY


if __name__ == "__main__":
    main(FUSED_LINEAR_CROSS_ENTROPY)
