"""The operations of Qwen3's package, for `kernels benchmark`; `python -m benchmark` measures them beside their peers."""

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import (
    models,
    operations_attention,
    operations_experts,
    operations_log_probs,
    operations_losses,
    operations_norms,
    operations_rotary,
    operations_rows,
)
from .__main__ import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs


class RMSNormBenchmark(OperationBenchmark):
    operation = operations_norms.RMS_NORM


class AddRMSNormBenchmark(OperationBenchmark):
    operation = operations_norms.ADD_RMS_NORM


class RotaryBenchmark(OperationBenchmark):
    operation = operations_rotary.ROTARY


class QKNormRotaryBenchmark(OperationBenchmark):
    operation = operations_rotary.QK_NORM_ROTARY


class SwiGLUBenchmark(OperationBenchmark):
    operation = operations_rows.SWIGLU


class LinearCrossEntropyBenchmark(OperationBenchmark):
    operation = operations_losses.LINEAR_CROSS_ENTROPY


class LinearLogProbsBenchmark(OperationBenchmark):
    operation = operations_log_probs.LINEAR_LOG_PROBS


class AttentionBenchmark(OperationBenchmark):
    operation = operations_attention.ATTENTION

    def shape(self, gpu: bool) -> tuple:
        return models.size("qwen3_8b" if gpu else "qwen3_tiny"), 4096 if gpu else 32, "8", "none"


class ExpertsBenchmark(OperationBenchmark):
    operation = operations_experts.UNIFORM

    def small(self, inputs: Inputs) -> Inputs:
        """Scale what comes after the gates, which have their usual size."""
        hidden, scores, gate_up, down, *biases = inputs.leaves
        leaves = (hidden, scores, gate_up, 0.01 * down, *biases[:1], *(0.01 * bias for bias in biases[1:]))
        return Inputs(leaves, inputs.others, tuple(0.01 * t for t in inputs.output_gradients)).copy()


class Qwen3ExpertsBenchmark(ExpertsBenchmark):
    operation = operations_experts.QWEN3_UNIFORM


if __name__ == "__main__":
    main()
