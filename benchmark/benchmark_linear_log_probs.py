"""Log-probabilities of labels from the hidden states, with a trained head and with a frozen one (LoRA): speed and memory.

The gradients of the log-probabilities are numbers a token that nobody knows in the forward pass, as in preference and reinforcement
learning. The floor is the bare cuBLAS products: the logits twice, dhidden and dweight; with a frozen head the logits once and dhidden.
"""

from typing import Any

import torch
import torch.nn.functional as F

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import providers
from .harness import main
from .kernels_cli import OperationBenchmark
from .operation import Inputs, Operation, Reference, Work
from .suites import QWEN3

CHUNK = 1024  # tokens at a time in float64: 1.2 GB of logits


def draw(size, tokens, random):
    """Draw hidden states and a weight that give logits of order 1, labels, and the gradient of each log-probability."""
    hidden, weight = random.normal(tokens, size.hidden), random.normal(size.vocab, size.hidden, scale=size.hidden**-0.5)
    return hidden, weight, random.integers(size.vocab, tokens), random.normal(tokens).float() / tokens


def inputs(size, tokens, random) -> Inputs:
    hidden, weight, target, upstream = draw(size, tokens, random)
    return Inputs(leaves=(hidden, weight), others=(target,), output_gradients=(upstream,))


def frozen_inputs(size, tokens, random) -> Inputs:
    hidden, weight, target, upstream = draw(size, tokens, random)
    return Inputs(leaves=(hidden,), others=(weight, target), output_gradients=(upstream,))


def formula(hidden, weight, target):
    """Compute all logits, and their log-softmax in fp32."""
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]


@torch.no_grad()
def reference(inputs: Inputs) -> Reference:
    """Compute in float64, some tokens at a time."""
    hidden, weight, target = (t.detach() for t in (*inputs.leaves, *inputs.others))
    hidden, weight, upstream = hidden.double(), weight.double(), inputs.output_gradients[0].double()
    found, dhidden, dweight = hidden.new_empty(len(target)), torch.empty_like(hidden), torch.zeros_like(weight)
    for start in range(0, len(target), CHUNK):
        rows = slice(start, start + CHUNK)
        log_p, label = (hidden[rows] @ weight.t()).log_softmax(1), target[rows, None]
        found[rows] = log_p.gather(1, label)[:, 0]
        dlogits = log_p.exp_().neg_().scatter_add_(1, label, torch.ones_like(label, dtype=log_p.dtype)).mul_(upstream[rows, None])
        dhidden[rows] = dlogits @ weight
        dweight.addmm_(dlogits.t(), hidden[rows])
    return Reference((found,), (dhidden, dweight)[: len(inputs.leaves)])


def products(inputs: Inputs, mode: str):
    """Return the bare products of a mode, each into memory of its own."""
    hidden, weight = (t.detach() for t in (*inputs.leaves, *inputs.others)[:2])
    logits = (hidden @ weight.t()).normal_()
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)
    trained = len(inputs.leaves) > 1

    def forward():
        torch.mm(hidden, weight.t(), out=logits)

    def full():
        forward()
        torch.mm(logits, weight, out=dhidden)
        if trained:
            forward()
            torch.mm(logits.t(), hidden, out=dweight)

    return full if mode == "full" else forward


def work(inputs: Inputs, mode: str) -> Work:
    hidden, weight = (*inputs.leaves, *inputs.others)[:2]
    return Work(flops=2 * hidden.numel() * weight.shape[0] * (2 * len(inputs.leaves) if mode == "full" else 1))


def of_package(kernel):
    found = providers.operation(kernel, "linear_log_probs")
    return lambda hidden, weight, target: found(hidden, weight, target).log_probs


def of_trl():
    providers.require_modules("trl.kernels.chunked_logprob")
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    return lambda hidden, weight, target: ChunkedLogProbFunction.apply(
        hidden, weight, None, target, 1.0, 32768, None, 1.0, ("log_probs",)
    )[0]


COMMON: dict[str, Any] = {
    "suite": QWEN3,
    "outputs": ("log_probs",),
    "formula": formula,
    "peers": {"trl": of_trl},
    "bastile": of_package,
    "work": work,
    "floor": products,
    "floor_title": "bare cuBLAS GEMMs",
    "reference": reference,
    "modes": ("full", "forward", "no_grad_forward"),
    "writes_inputs": False,
    "tokens": (2048, 8192),
}
LINEAR_LOG_PROBS = Operation(
    name="linear_log_probs",
    title="linear + log-probabilities",
    position=8,
    gradients=("dhidden", "dweight"),
    inputs=inputs,
    **COMMON,
)
FROZEN = Operation(
    name="linear_log_probs_frozen",
    title="frozen linear + log-probabilities",
    position=9,
    gradients=("dhidden",),
    inputs=frozen_inputs,
    **COMMON,
)


class LinearLogProbsBenchmark(OperationBenchmark):
    operation = LINEAR_LOG_PROBS


if __name__ == "__main__":
    main(LINEAR_LOG_PROBS, FROZEN)
