"""Rotary position embedding of neighbouring pairs, as Llama 4 has it."""

import torch

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
    """Lay everything as [batch, tokens, heads, head_dim]; angles, one a pair, are of the drawn dtype until `frequencies`."""
    shapes = [(1, tokens, heads, size.head_dim) for heads in (size.heads, size.kv_heads)]
    angle = random.normal(1, tokens, size.head_dim // 2).float()
    return Inputs(
        leaves=tuple(random.normal(*shape) for shape in shapes),
        others=(torch.stack((angle.cos(), angle.sin()), -1),),
        output_gradients=tuple(random.normal(*shape) for shape in shapes),
    )


def of_pairs(rotate):
    """Call `rotate` with the table as complex numbers, which a float64 copy of the inputs widens as it is."""
    return lambda q, k, table: rotate(q, k, torch.view_as_complex(table))


def formula(q, k, frequencies):
    wide = torch.promote_types(q.dtype, torch.float32)
    turned = (torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2))) * frequencies[:, :, None] for x in (q, k))
    return tuple(torch.view_as_real(x).flatten(-2).to(q.dtype) for x in turned)


def bytes_of_q_and_k(inputs: Inputs) -> int:
    """Return the bytes of q and k together."""
    return sum(t.nbytes for t in inputs.output_gradients)


LLAMA4_ROPE = Operation(
    name="llama4_rope",
    title="rotary of pairs",
    suite=LIGER,
    position=18,
    outputs=("q", "k"),
    gradients=("dq", "dk"),
    inputs=inputs,
    formula=of_pairs(formula),
    bastile=lambda package: of_pairs(providers.operation(package, "rotary_complex")),
    formula_provider="torch",
    peers={"liger": lambda: of_pairs(providers.liger("ops", "LigerLlama4RopeFunction").apply)},
    work=bytes_moved(2, 2, bytes_of_q_and_k),
    limits=(Limit(8192, 0.85, peer=3.7),),
    liger=LigerConvention(x_name="T", x_label="sequence length"),
)


class Llama4RopeBenchmark(OperationBenchmark):
    operation = LLAMA4_ROPE


if __name__ == "__main__":
    main(LLAMA4_ROPE)
