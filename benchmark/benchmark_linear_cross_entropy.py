"""Cross entropy of the head's output, from the hidden states: speed, memory, and how well dweight is added up.

The floor is three whole cuBLAS products (logits, dhidden, dweight), of an evaluation the first of them.
"""

import torch
import torch.nn.functional as F

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import eager, providers
from .correctness import relative_error
from .harness import main
from .kernels_cli import OperationBenchmark
from .markdown import Table, by_provider, columns_of, gibibytes, in_order, joined, milliseconds, of_floor, select, times_faster
from .operation import Inputs, Operation, Reference, Work
from .suites import QWEN3

CHUNK = 1024  # tokens at a time in float64: 1.2 GB of logits


def inputs(size, tokens, random) -> Inputs:
    """Draw hidden states and a weight that give logits of order 1."""
    return Inputs(
        leaves=(random.normal(tokens, size.hidden), random.normal(size.vocab, size.hidden, scale=size.hidden**-0.5)),
        others=(random.integers(size.vocab, tokens),),
    )


@torch.no_grad()
def reference(inputs: Inputs) -> Reference:
    """Compute in float64, some tokens at a time. Unavoidable in dweight: the error of one product of rounded dlogits and hidden."""
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
    return Reference((loss,), (dhidden, dweight), {"dweight": one_product})


def products(inputs: Inputs, mode: str):
    """Return the bare products of a mode, each into memory of its own."""
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


def loss_only(function):
    """Keep the loss of a function that returns more."""
    return lambda *arguments: function(*arguments)[0]


LINEAR_CROSS_ENTROPY = Operation(
    name="linear_cross_entropy",
    title="linear + cross entropy",
    suite=QWEN3,
    position=7,
    outputs=("loss",),
    gradients=("dhidden", "dweight"),
    inputs=inputs,
    formula=eager.linear_cross_entropy,
    peers={
        "torch": of_torch,
        "liger": lambda: loss_only(providers.liger("ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction").apply),
        "liger_cutedsl": lambda: loss_only(providers.liger_cutedsl("fused_linear_cross_entropy")),
        "liger_cutile": lambda: loss_only(providers.liger_cutile("LigerFusedLinearCrossEntropyFunction").apply),
    },
    work=work,
    floor=products,
    floor_title="bare cuBLAS GEMMs",
    reference=reference,
    modes=("full", "forward", "no_grad_forward"),
    writes_inputs=False,
    tokens=(2048, 8192, 16384, 32768),  # one chunk, and so many that adding their gradients up shows what it costs in precision
)


def table(rows: list) -> str:
    """Return time and memory of the loss with both gradients by tokens, and the error of the weight's gradient."""
    wanted = {"kernel_operation_mode": "full", "model": QWEN3.model, "x_name": "tokens", "dtype": "bf16"}
    rows = select(rows, kernel_name=LINEAR_CROSS_ENTROPY.name, **wanted)
    speed = select(rows, metric_name="speed", timing="device")
    names = columns_of(speed)
    table = Table("tokens", *map(providers.title, names), "three GEMMs", "Bastile: of the GEMMs", "speed vs best peer")
    notes = table.notes
    for tokens in in_order(row.x_value for row in speed):
        found = by_provider(select(speed, x_value=tokens))
        memory = by_provider(select(rows, metric_name="memory", x_value=tokens))
        errors = by_provider(select(rows, metric_name="error_dweight_ratio", x_value=tokens))
        line = [tokens]
        for p in names:
            cells = notes.cell(found.get(p), milliseconds), notes.cell(memory.get(p), gibibytes)
            line.append(joined(*cells, notes.cell(errors.get(p), lambda ratio: f"{ratio:.2f}")))
        line += [notes.cell(found.get(providers.FLOOR), milliseconds), of_floor(found), times_faster(found)]
        table.add(line, [*found.values(), *memory.values(), *errors.values()])
    return table.text("Time, peak memory beyond the inputs, and the error of the weight's gradient relative to that of one bf16 GEMM.")


TABLES = {"linear_cross_entropy": table}


class LinearCrossEntropyBenchmark(OperationBenchmark):
    operation = LINEAR_CROSS_ENTROPY


if __name__ == "__main__":
    main(LINEAR_CROSS_ENTROPY)
