"""Rotary position embedding of queries and keys, in the layouts that attention passes."""

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import eager, providers
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, LigerConvention, Limit, Operation, bytes_moved
from .suites import LIGER


def inputs(size, tokens, random) -> Inputs:
    """Lay leaves as the projections write them, gradients as attention leaves them: [batch, tokens, heads, head_dim]."""
    shapes = [(1, tokens, heads, size.head_dim) for heads in (size.heads, size.kv_heads)]
    return Inputs(
        leaves=tuple(random.normal(*shape) for shape in shapes),
        others=tuple(t.to(random.device, random.dtype) for t in eager.angles(tokens, size.head_dim)),
        output_gradients=tuple(random.normal(*shape).transpose(1, 2) for shape in shapes),
    )


def of_views(rotate):
    """Call `rotate` with the views that attention makes of what the projections wrote."""
    return lambda q, k, cos, sin: rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def bytes_of_q_and_k(inputs: Inputs) -> int:
    """Return the bytes of q and k together."""
    return sum(t.nbytes for t in inputs.output_gradients)


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
