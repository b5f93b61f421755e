"""Cross entropy of the head's output, from the hidden states: speed, memory, and how well dweight is added up.

The floor is three whole cuBLAS products (logits, dhidden, dweight), of an evaluation the first of them.
"""

import torch
import torch.nn.functional as F

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = Path(__file__).resolve().parent.name

from . import eager, providers
from .harness import Exact, Inputs, Operation, OperationBenchmark, Work, main
from .timing import relative_error

CHUNK = 1024  # tokens at a time in float64: 1.2 GB of logits


def inputs(size, tokens, random) -> Inputs:
    """Logits of order 1."""
    return Inputs(
        leaves=(random.normal(tokens, size.hidden), random.normal(size.vocab, size.hidden, scale=size.hidden**-0.5)),
        others=(random.integers(size.vocab, tokens),),
    )


@torch.no_grad()
def exact(inputs: Inputs) -> Exact:
    """In float64, some tokens at a time. Unavoidable in dweight: the error of one product of rounded dlogits and hidden."""
    hidden, weight = (t.detach().double() for t in inputs.leaves)
    (target,) = inputs.others
    tokens, loss = len(target), hidden.new_zeros(())
    dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight)
    rounded = torch.empty(tokens, len(weight), dtype=inputs.leaves[0].dtype, device=hidden.device)
    for start in range(0, tokens, CHUNK):
        rows = slice(start, start + CHUNK)
        logits, label = hidden[rows] @ weight.t(), target[rows, None]
        lse = logits.logsumexp(1, keepdim=True)
        loss += (lse - logits.gather(1, label)).sum() / tokens
        dlogits = logits.sub_(lse).exp_().scatter_add_(1, label, -torch.ones_like(lse)).div_(tokens)
        dhidden[rows] = dlogits @ weight
        dweight.addmm_(dlogits.t(), hidden[rows])
        rounded[rows] = dlogits
    one_product = relative_error(rounded.t() @ inputs.leaves[0].detach(), dweight)
    return Exact((loss,), (dhidden, dweight), {"dweight": one_product})


def products(inputs: Inputs, mode: str):
    """The bare products of a mode, each into memory of its own."""
    hidden, weight = (t.detach() for t in inputs.leaves)
    logits = (hidden @ weight.t()).normal_()
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)

    def forward():
        torch.mm(hidden, weight.t(), out=logits)

    def full():
        forward()
        torch.mm(logits, weight, out=dhidden)
        torch.mm(logits.t(), hidden, out=dweight)

    return full if mode == "full" else forward


def work(inputs: Inputs, mode: str) -> Work:
    hidden, weight = inputs.leaves
    return Work(flops=2 * hidden.numel() * weight.shape[0] * (3 if mode == "full" else 1))


def of_torch():
    if hasattr(F, "linear_cross_entropy"):
        return F.linear_cross_entropy
    return lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight), target)


def first(function):
    """Of a function that returns the loss and more."""
    return lambda *arguments: function(*arguments)[0]


def ours(kernel):
    return providers.operation(kernel, "linear_cross_entropy")


LINEAR_CROSS_ENTROPY = Operation(
    name="linear_cross_entropy",
    title="Linear + cross entropy",
    outputs=("loss",),
    gradients=("dhidden", "dweight"),
    inputs=inputs,
    formula=eager.linear_cross_entropy,
    ours=ours,
    loaders={
        "torch": of_torch,
        "liger": lambda: first(providers.liger("ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction").apply),
        "liger_cutedsl": lambda: first(providers.liger_cutedsl("fused_linear_cross_entropy")),
        "liger_cutile": lambda: first(providers.liger_cutile("LigerFusedLinearCrossEntropyFunction").apply),
    },
    work=work,
    floor=products,
    exact=exact,
    modes=("full", "forward", "no_grad_forward"),
    writes_inputs=False,
)
TOKENS = (2048, 8192, 16384, 32768)  # one chunk, and so many that adding their gradients up shows what it costs in precision


class LinearCrossEntropyBenchmark(OperationBenchmark):
    operation = LINEAR_CROSS_ENTROPY


if __name__ == "__main__":
    main(LINEAR_CROSS_ENTROPY, tokens=TOKENS)
