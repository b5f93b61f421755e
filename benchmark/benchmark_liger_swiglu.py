"""SwiGLU with multipliers, silu(gate) * up, as the families of Liger's models have it."""

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import eager, providers
from .benchmark_geglu import inputs
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import LigerConvention, Limit, Operation, bytes_moved
from .suites import LIGER

LIGER_SWIGLU = Operation(
    name="liger_swiglu",
    title="SwiGLU",
    suite=LIGER,
    position=14,
    outputs=("y",),
    gradients=("dgate", "dup"),
    inputs=inputs,
    formula=eager.swiglu,
    bastile=lambda package: providers.operation(package, "swiglu"),
    formula_provider="torch",
    peers={"liger": lambda: providers.liger("ops", "LigerSiLUMulFunction").apply},
    work=bytes_moved(3, 5),  # gate, up, y; dy, gate, up, dgate, dup
    limits=(Limit(8192, 0.98, peer=0.97),),
    liger=LigerConvention(name="swiglu", x_name="T", x_label="sequence length"),
)


class LigerSwiGLUBenchmark(OperationBenchmark):
    operation = LIGER_SWIGLU


if __name__ == "__main__":
    main(LIGER_SWIGLU)
