"""The layer of experts of Qwen3-MoE: 128 experts of 768, of which each token goes to 8, in the sizes of Qwen3-30B-A3B.

transformers' `grouped_mm` (its default), Liger's fused experts, Bastile, and as the floor the six grouped GEMMs alone; the experts are
chosen uniformly, or so that the first ones get most tokens.
"""

from functools import partial

import torch

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import models, providers
from .benchmark_experts import choice, floor, of_huggingface, work
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, Operation, Random, Reference
from .suites import QWEN3_MOE


def inputs(size: models.Size, tokens: int, random: Random, skew: float = 0.0) -> Inputs:
    """Draw hidden, scores, the weights, and which experts. skew: of `choice`."""
    hidden, width = size.hidden, size.intermediate
    expert = choice(size, tokens, random, skew)
    leaves = (
        random.normal(tokens, hidden),
        random.normal(tokens, size.top_k).softmax(-1),
        random.normal(size.experts, 2 * width, hidden, scale=hidden**-0.5),
        random.normal(size.experts, hidden, width, scale=width**-0.5),
    )
    return Inputs(leaves, (expert,), (random.normal(tokens, hidden),))


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute what Qwen3MoeExperts does between its projections."""
    g, u = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(g) * u


def huggingface(hidden, scores, gate_up, down, expert):
    return of_huggingface(hidden, expert, scores, gate, gate_up_proj=gate_up, down_proj=down, is_transposed=False)


def liger():
    """Load the function of Liger-Kernel's fused experts."""
    function = providers.liger("ops.fused_moe", "LigerFusedMoEFunction")
    return lambda hidden, scores, gate_up, down, expert: function.apply(hidden, gate_up, down, expert.int(), scores)


def reference(given: Inputs) -> Reference:
    """Compute one expert after the other in float64."""
    exact = given.to_float64()
    hidden, scores, gate_up, down = exact.leaves
    (expert,) = exact.others
    out = torch.zeros_like(hidden)
    for e in range(gate_up.shape[0]):
        token, k = torch.where(expert == e)
        out = out.index_add(0, token, scores[token, k, None] * (gate(hidden[token] @ gate_up[e].T) @ down[e].T))
    return Reference((out.detach(),), torch.autograd.grad(out, exact.leaves, exact.output_gradients))


def of_package(package):
    """Return the package's function for Qwen3-MoE's gate and layouts."""

    def experts(hidden, scores, gate_up, down, expert):
        return package.experts(hidden, expert, scores, gate_up, down)

    return experts


def operation(position: int, routing: str, skew: float) -> Operation:
    """Declare the layer with one routing."""
    return Operation(
        name=f"qwen3_experts_{routing}",
        title=f"experts, {routing} routing",
        suite=QWEN3_MOE,
        position=position,
        outputs=("y",),
        gradients=("dhidden", "dscores", "dgate_up", "ddown"),
        inputs=partial(inputs, skew=skew),
        formula=huggingface,
        peers={"liger": liger},
        bastile=of_package,
        compiled=False,
        work=work,
        floor=partial(floor, transposed=False),
        floor_title="bare grouped GEMMs",
        reference=reference,
        modes=("forward", "full"),  # a second backward pass over one forward pass has to do a GEMM again
        writes_inputs=False,
        file="qwen3_moe_experts",
        tokens=(2048, 4096, 8192, 16384),
    )


UNIFORM = operation(1, "uniform", 0.0)
SKEWED = operation(2, "skewed", 1.0)


class Qwen3ExpertsBenchmark(OperationBenchmark):
    """For `kernels benchmark`."""

    operation = UNIFORM

    def setup(self) -> None:
        gpu = self.device.startswith("cuda")
        random = Random(self.device, torch.bfloat16, self.seed or 0)
        given = inputs(models.size("qwen3_moe_30b_a3b" if gpu else "qwen3_moe_tiny"), 4096 if gpu else 32, random)
        hidden, scores, gate_up, down = given.leaves
        small = (hidden, scores, gate_up, 0.01 * down)  # small results, of gates of the usual size
        self.inputs = Inputs(small, given.others, tuple(0.01 * t for t in given.output_gradients)).copy()
        self.reference_inputs = self.inputs.copy()
        self.function = self.load()


if __name__ == "__main__":
    main(UNIFORM, SKEWED)
