"""SwiGLU, silu(gate) * up, between the projections of the MLP."""

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = Path(__file__).resolve().parent.name

from . import eager, providers
from .harness import Inputs, Operation, OperationBenchmark, main, passes


def inputs(size, tokens, random) -> Inputs:
    shape = (1, tokens, size.intermediate)
    return Inputs(leaves=(random.normal(*shape), random.normal(*shape)), gradients=(random.normal(*shape),))


SWIGLU = Operation(
    name="swiglu",
    title="SwiGLU",
    outputs=("y",),
    gradients=("dgate", "dup"),
    inputs=inputs,
    formula=eager.swiglu,
    ours=lambda kernel: providers.operation(kernel, "swiglu"),
    loaders={
        "liger": lambda: providers.liger("ops.swiglu", "LigerSiLUMulFunction").apply,
        "liger_cutedsl": lambda: providers.liger_cutedsl("swiglu"),
        "liger_cutile": lambda: providers.liger_cutile("LigerSiLUMulFunction").apply,
    },
    work=passes(3, 5, of=lambda inputs: inputs.leaves[0].nbytes),  # gate, up, y; dy, gate, up, dgate, dup
)


class SwiGLUBenchmark(OperationBenchmark):
    operation = SWIGLU


if __name__ == "__main__":
    main(SWIGLU)
