"""PolyNorm of the hidden states."""

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
    shape = (tokens, size.hidden)
    leaves = (random.normal(*shape), random.normal(3, scale=0.1, shift=0.3), random.normal(1))
    return Inputs(leaves, output_gradients=(random.normal(*shape),))


def formula(x, weight, bias):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    powers = [wide**p for p in (3, 2, 1)]
    return (sum(w * p * torch.rsqrt(p.square().mean(-1, keepdim=True) + 1e-6) for w, p in zip(weight, powers)) + bias).to(x.dtype)


def of_liger():
    function = providers.liger("ops", "LigerPolyNormFunction")
    return lambda x, weight, bias: function.apply(x, weight, bias.reshape(()), 1e-6)


POLY_NORM = Operation(
    name="poly_norm",
    title="PolyNorm",
    suite=LIGER,
    position=20,
    outputs=("y",),
    gradients=("dx", "dweight", "dbias",),
    inputs=inputs,
    formula=formula,
    formula_provider="torch",
    peers={"liger": of_liger},
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    limits=(Limit(8192, 0.84, peer=2.0),),
    liger=LigerConvention(x_name="T", x_label="sequence length"),
)


class PolyNormBenchmark(OperationBenchmark):
    operation = POLY_NORM


if __name__ == "__main__":
    main(POLY_NORM)
