"""Rotary position embedding of queries and keys, in the layouts that attention passes."""

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import eager, providers
from .benchmark_rotary import bytes_of_q_and_k, inputs, of_views
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import LigerConvention, Limit, Operation, bytes_moved
from .suites import LIGER

ROPE = Operation(
    name="rope",
    title="rotary",
    suite=LIGER,
    position=16,
    outputs=("q", "k"),
    gradients=("dq", "dk"),
    inputs=inputs,
    formula=of_views(eager.rotary),
    bastile=lambda package: of_views(providers.operation(package, "rotary")),
    formula_provider="torch",
    peers={"liger": lambda: of_views(providers.liger("ops", "LigerRopeFunction").apply)},
    work=bytes_moved(2, 2, bytes_of_q_and_k),
    limits=(Limit(8192, 0.88, peer=0.97),),
    liger=LigerConvention(x_name="T", x_label="sequence length"),
)


class RopeBenchmark(OperationBenchmark):
    operation = ROPE


if __name__ == "__main__":
    main(ROPE)
