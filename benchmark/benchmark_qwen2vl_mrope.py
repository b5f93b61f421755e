"""Rotary position embedding by time, height and width, as Qwen2-VL has it."""

import torch

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

SHARES = (2, 3, 3)  # of eight parts of the frequencies: time, height, width


def sections_of(cos) -> list[int]:
    """Return how many frequencies belong to time, height and width, of tables that are as wide as a head."""
    return [share * cos.shape[-1] // 16 for share in SHARES]


def inputs(size, tokens, random) -> Inputs:
    """Lay leaves as the projections write them, gradients as attention leaves them; each token has three positions of its own."""
    shapes = [(1, tokens, heads, size.head_dim) for heads in (size.heads, size.kv_heads)]
    angle = random.normal(3, 1, tokens, size.head_dim // 2).float()
    angle = torch.cat((angle, angle), -1)
    return Inputs(
        leaves=tuple(random.normal(*shape) for shape in shapes),
        others=(angle.cos().to(random.dtype), angle.sin().to(random.dtype)),
        output_gradients=tuple(random.normal(*shape).transpose(1, 2) for shape in shapes),
    )


def formula(q, k, cos, sin):
    """Compute apply_multimodal_rotary_pos_emb."""
    parts = sections_of(cos) * 2
    cos, sin = (torch.cat([part[i % 3] for i, part in enumerate(t.split(parts, -1))], -1) for t in (cos, sin))
    return eager.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def of_liger():
    function = providers.liger("ops", "LigerQwen2VLMRopeFunction")
    return lambda q, k, cos, sin: function.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin, sections_of(cos))


def of_package(package):
    function = providers.operation(package, "rotary_multimodal")
    return lambda q, k, cos, sin: function(q.transpose(1, 2), k.transpose(1, 2), cos, sin, sections_of(cos))


def bytes_of_q_and_k(inputs: Inputs) -> int:
    """Return the bytes of q and k together."""
    return sum(t.nbytes for t in inputs.output_gradients)


QWEN2VL_MROPE = Operation(
    name="qwen2vl_mrope",
    title="multimodal rotary",
    suite=LIGER,
    position=17,
    outputs=("q", "k"),
    gradients=("dq", "dk"),
    inputs=inputs,
    formula=formula,
    bastile=of_package,
    formula_provider="torch",
    peers={"liger": of_liger},
    work=bytes_moved(2, 2, bytes_of_q_and_k),
    limits=(Limit(8192, 0.88, {"heads": 28, "kv_heads": 4}, peer=0.97),),
    liger=LigerConvention(x_name="T", x_label="sequence length"),
)


class Qwen2VLMRopeBenchmark(OperationBenchmark):
    operation = QWEN2VL_MROPE


if __name__ == "__main__":
    main(QWEN2VL_MROPE)
