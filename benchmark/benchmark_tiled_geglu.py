"""A GEGLU MLP over four shards of its tokens."""

import torch.nn.functional as F

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from .harness import main
from .kernels_cli import OperationBenchmark
from .suites import LIGER
from .tiled_mlps import tiled_mlp


def geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


TILED_GEGLU = tiled_mlp(LIGER, "tiled_geglu", "tiled GEGLU MLP", 33, geglu, "gelu_pytorch_tanh", "LigerTiledGEGLUMLP")


class TiledGEGLUBenchmark(OperationBenchmark):
    operation = TILED_GEGLU


if __name__ == "__main__":
    main(TILED_GEGLU)
