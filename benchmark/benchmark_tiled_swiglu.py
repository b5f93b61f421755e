"""A SwiGLU MLP over four shards of its tokens."""

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import eager
from .harness import main
from .kernels_cli import OperationBenchmark
from .suites import LIGER
from .tiled_mlps import tiled_mlp

TILED_SWIGLU = tiled_mlp(LIGER, "tiled_swiglu", "tiled SwiGLU MLP", 32, eager.swiglu, "silu", "LigerTiledSwiGLUMLP")


class TiledSwiGLUBenchmark(OperationBenchmark):
    operation = TILED_SWIGLU


if __name__ == "__main__":
    main(TILED_SWIGLU)
