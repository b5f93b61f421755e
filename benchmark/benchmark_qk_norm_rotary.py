"""RMSNorm of queries and keys, followed by the rotary embedding: what Qwen3's attention does before the attention itself."""

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import eager, providers
from .benchmark_rotary import bytes_of_q_and_k
from .benchmark_rotary import inputs as rotary_inputs
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, Operation, bytes_moved
from .suites import QWEN3


def inputs(size, tokens, random) -> Inputs:
    made = rotary_inputs(size, tokens, random)
    weights = tuple(random.normal(size.head_dim, scale=0.1, shift=1.0) for _ in range(2))
    return Inputs(made.leaves + weights, made.others, made.output_gradients)


def in_turn(norm, rotate):
    """Run the two operations one after the other, as a library without the fusion does."""

    def call(q, k, q_weight, k_weight, cos, sin):
        return rotate(norm(q, q_weight).transpose(1, 2), norm(k, k_weight).transpose(1, 2), cos, sin)

    return call


def of_liger():
    norm, rotary = providers.liger("ops.rms_norm", "LigerRMSNormFunction"), providers.liger("ops.rope", "LigerRopeFunction")
    return in_turn(lambda x, weight: norm.apply(x, weight, eager.EPS), rotary.apply)


def of_liger_cutedsl():
    norm, rotary = providers.liger_cutedsl("rms_norm"), providers.liger_cutedsl("rope")
    return in_turn(lambda x, weight: norm(x, weight, eager.EPS), rotary)


def of_liger_cutile():
    norm, rotary = providers.liger_cutile("LigerRMSNormFunction"), providers.liger_cutile("LigerRopeFunction")
    return in_turn(lambda x, weight: norm.apply(x, weight, eager.EPS), rotary.apply)


def of_package(package):
    function = providers.operation(package, "qk_norm_rotary")
    return lambda q, k, q_weight, k_weight, cos, sin: function(q, k, q_weight, k_weight, cos, sin, eager.EPS)


QK_NORM_ROTARY = Operation(
    name="qk_norm_rotary",
    title="q/k-norm + rotary",
    suite=QWEN3,
    position=5,
    outputs=("q", "k"),
    gradients=("dq", "dk", "dq_weight", "dk_weight"),
    inputs=inputs,
    formula=eager.qk_norm_rotary,
    bastile=of_package,
    peers={"liger": of_liger, "liger_cutedsl": of_liger_cutedsl, "liger_cutile": of_liger_cutile},
    work=bytes_moved(2, 3, bytes_of_q_and_k),  # in, out; gradients in, in, gradients out
)


class QKNormRotaryBenchmark(OperationBenchmark):
    operation = QK_NORM_ROTARY


if __name__ == "__main__":
    main(QK_NORM_ROTARY)
