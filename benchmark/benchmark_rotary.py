"""Rotary position embedding of queries and keys, in the layouts that Qwen3's attention passes."""

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = Path(__file__).resolve().parent.name

from . import eager, providers
from .harness import Inputs, Operation, OperationBenchmark, main, passes


def inputs(size, tokens, random) -> Inputs:
    """Leaves lie as the projections write them, gradients as attention leaves them: [batch, tokens, heads, head_dim]."""
    shapes = [(1, tokens, heads, size.head_dim) for heads in (size.heads, size.kv_heads)]
    return Inputs(
        leaves=tuple(random.normal(*shape) for shape in shapes),
        others=tuple(t.to(random.device, random.dtype) for t in eager.angles(tokens, size.head_dim)),
        gradients=tuple(random.normal(*shape).transpose(1, 2) for shape in shapes),
    )


def of_views(rotate):
    """The views that attention makes of what the projections wrote."""
    return lambda q, k, cos, sin: rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def bytes_of_q_and_k(inputs: Inputs) -> int:
    return sum(t.nbytes for t in inputs.gradients)


ROTARY = Operation(
    name="rotary",
    title="Rotary embedding",
    outputs=("q", "k"),
    gradients=("dq", "dk"),
    inputs=inputs,
    formula=of_views(eager.rotary),
    ours=lambda kernel: of_views(providers.operation(kernel, "rotary")),
    loaders={
        "liger": lambda: of_views(providers.liger("ops.rope", "LigerRopeFunction").apply),
        "liger_cutedsl": lambda: of_views(providers.liger_cutedsl("rope")),
        "liger_cutile": lambda: of_views(providers.liger_cutile("LigerRopeFunction").apply),
    },
    work=passes(2, 2, of=bytes_of_q_and_k),
)


class RotaryBenchmark(OperationBenchmark):
    operation = ROTARY


if __name__ == "__main__":
    main(ROTARY)
