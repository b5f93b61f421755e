"""The benchmark of one operation, or of a few that are measured together. Files of this folder lead here, and their names say of which:
`python benchmark_layer_norm.py --model llama_3_8b`, or `python -m benchmark.benchmark_layer_norm`."""

import sys
from pathlib import Path

if not __package__:  # run as a file, or by `kernels benchmark`
    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the name of a link is what counts, not where it leads
    __package__ = Path(__file__).absolute().parent.name

from . import registry
from .harness import main
from .kernels_cli import OperationBenchmark

OPERATIONS = registry.of_script(Path(__file__).stem.removeprefix("benchmark_"))


class OneOperationBenchmark(OperationBenchmark):
    operation = OPERATIONS[0]


if __name__ == "__main__":
    main(*OPERATIONS)
