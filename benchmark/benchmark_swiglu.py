"""SwiGLU, silu(gate) * up, between the projections of the MLP."""

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import eager, providers
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, Operation, bytes_moved
from .suites import QWEN3


def inputs(size, tokens, random) -> Inputs:
    shape = (1, tokens, size.intermediate)
    return Inputs(leaves=(random.normal(*shape), random.normal(*shape)), output_gradients=(random.normal(*shape),))


SWIGLU = Operation(
    name="swiglu",
    title="SwiGLU",
    suite=QWEN3,
    position=6,
    outputs=("y",),
    gradients=("dgate", "dup"),
    inputs=inputs,
    formula=eager.swiglu,
    peers={
        "liger": lambda: providers.liger("ops.swiglu", "LigerSiLUMulFunction").apply,
        "liger_cutedsl": lambda: providers.liger_cutedsl("swiglu"),
        "liger_cutile": lambda: providers.liger_cutile("LigerSiLUMulFunction").apply,
    },
    work=bytes_moved(3, 5),  # gate, up, y; dy, gate, up, dgate, dup
)


class SwiGLUBenchmark(OperationBenchmark):
    operation = SWIGLU


if __name__ == "__main__":
    main(SWIGLU)
