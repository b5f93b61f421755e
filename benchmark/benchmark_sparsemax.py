"""Sparsemax over the hidden states."""

import torch

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import providers
from .benchmark_softmax import inputs
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import LigerConvention, Limit, Operation, bytes_moved
from .suites import LIGER


def formula(x):
    """Sort; the support is decided by whole multiples."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    z = wide.detach().sort(-1, descending=True).values
    total = z.cumsum(-1)
    size = (1 + torch.arange(1, x.shape[-1] + 1, device=x.device) * z > total).sum(-1, keepdim=True)
    inside = wide.detach() * size + 1 > total.gather(-1, size - 1)
    tau = (torch.where(inside, wide, 0.0).sum(-1, keepdim=True) - 1) / size
    return torch.where(inside, wide - tau, 0.0).to(x.dtype)


def of_liger():
    function = providers.liger("ops", "LigerSparsemaxFunction")
    return lambda x: function.apply(x, -1)


SPARSEMAX = Operation(
    name="sparsemax",
    title="sparsemax",
    suite=LIGER,
    position=21,
    outputs=("y",),
    gradients=("dx",),
    inputs=inputs,
    formula=formula,
    formula_provider="torch",
    peers={"liger": of_liger},
    work=bytes_moved(2, 3),  # x, y; dy, y, dx
    bounds={"dx": 0.3},  # Liger decides ties with tau by a rounded division
    limits=(
        Limit(8192, 0.65, peer=9.0),
        Limit(2048, 0.50, {"hidden": 32768}, peer=15.0),
        Limit(1024, 0.40, {"hidden": 128256}, peer=20.0),
    ),
    liger=LigerConvention(x_name="T", x_label="sequence length"),
)


class SparsemaxBenchmark(OperationBenchmark):
    operation = SPARSEMAX


if __name__ == "__main__":
    main(SPARSEMAX)
