"""Log-probabilities of labels from the hidden states, with a trained head and with a frozen one (LoRA): speed and memory.

    python -m benchmark.benchmark_linear_log_probs [--models qwen3_8b,qwen3_0.6b] [--bt 8192]
    python -m benchmark.benchmark_linear_log_probs --sweep-mode token_length --tokens 2048,8192

The gradients of the log-probabilities are numbers a token that are unknown in the forward pass, as in preference and reinforcement
learning; "known coefficients" are those of supervised learning, which follow from the labels. Entropies are computed as trainers log them,
without a gradient. "Logits kept" is recompute=False, beside what the peers do with the same inputs. The floor is the bare cuBLAS products:
the logits, dhidden and dweight; where the backward pass makes the logits again, those once more; with a frozen head the logits once and
dhidden.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F

from . import models, providers
from .correctness import relative_error
from .markdown import Table, by_provider, columns_of, gibibytes, in_order, joined, milliseconds, of_floor, select, times_faster
from .operation import SWEEPS, Case, Inputs, Operation, Reference, Work
from .suites import QWEN3

HEADS = ("qwen3_0.6b", "qwen3_8b", "qwen3.5_9b")
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
def reference(inputs: Inputs, rounding: bool = False) -> Reference:
    """Compute in float64, some tokens at a time. rounding: whether to say what is unavoidable in dweight, the error of one product of
    rounded dlogits and hidden."""
    hidden, weight, target = (t.detach() for t in (*inputs.leaves, *inputs.others))
    hidden, weight, upstream = hidden.double(), weight.double(), inputs.output_gradients[0].double()
    found, dhidden, dweight = hidden.new_empty(len(target)), torch.empty_like(hidden), torch.zeros_like(weight)
    rounded = torch.empty(len(target) if rounding else 0, len(weight), dtype=inputs.leaves[0].dtype, device=hidden.device)
    for start in range(0, len(target), CHUNK):
        rows = slice(start, start + CHUNK)
        log_p, label = (hidden[rows] @ weight.t()).log_softmax(1), target[rows, None]
        found[rows] = log_p.gather(1, label)[:, 0]
        dlogits = log_p.exp_().neg_().scatter_add_(1, label, torch.ones_like(label, dtype=log_p.dtype)).mul_(upstream[rows, None])
        dhidden[rows] = dlogits @ weight
        dweight.addmm_(dlogits.t(), hidden[rows])
        if rounding:
            rounded[rows] = dlogits
    one_product = {"dweight": relative_error(rounded.t() @ inputs.leaves[0].detach(), dweight)} if rounding else {}
    return Reference((found,), (dhidden, dweight)[: len(inputs.leaves)], one_product)


def known_inputs(size, tokens, random) -> Inputs:
    hidden, weight, target, coefficients = draw(size, tokens, random)
    return Inputs(leaves=(hidden, weight), others=(target, coefficients))


def known_formula(hidden, weight, target, coefficients):
    return (formula(hidden, weight, target) * coefficients).sum()


def known_reference(inputs: Inputs) -> Reference:
    target, coefficients = inputs.others
    found = reference(Inputs(inputs.leaves, (target,), (coefficients,)))
    return Reference(((found.outputs[0] * coefficients).sum(),), found.gradients)


def over_heads(operation, args) -> list[Case]:
    """Return a case for the head of each model, all with `args.bt` tokens."""
    tokens = args.bt or QWEN3.tokens
    names = map(models.full_name, args.models or HEADS)
    return [Case(("head", "the model whose head it is", n), {"model": n, "tokens": tokens}, (models.size(n), tokens)) for n in names]


def parts(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return hidden states and weight, and whether the weight is trained."""
    hidden, weight = (t.detach() for t in (*inputs.leaves, *inputs.others)[:2])
    return hidden, weight, len(inputs.leaves) > 1


def products(inputs: Inputs, mode: str, again: bool):
    """Return the bare products of a mode, each into memory of its own. again: are the logits of a trained head made twice?"""
    hidden, weight, trained = parts(inputs)
    logits = (hidden @ weight.t()).normal_()
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)

    def forward():
        torch.mm(hidden, weight.t(), out=logits)

    def full():
        forward()
        torch.mm(logits, weight, out=dhidden)
        if trained and again:
            forward()
        if trained:
            torch.mm(logits.t(), hidden, out=dweight)

    return full if mode == "full" else forward


def work(inputs: Inputs, mode: str, again: bool) -> Work:
    hidden, weight, trained = parts(inputs)
    count = (3 + again if trained else 2) if mode == "full" else 1
    return Work(flops=2 * hidden.numel() * weight.shape[0] * count)


def of_package(outputs: tuple[str, ...], recompute: bool = True):
    def load(kernel):
        found = providers.operation(kernel, "linear_log_probs")
        return lambda hidden, weight, target: found(hidden, weight, target, outputs=outputs, recompute=recompute).log_probs

    return load


def of_trl(outputs: tuple[str, ...]):
    def load():
        providers.require_modules("trl.kernels.chunked_logprob")
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        return lambda *tensors: ChunkedLogProbFunction.apply(*tensors[:2], None, tensors[2], 1.0, 32768, None, 1.0, outputs)[0]

    return load


def of_liger(outputs: tuple[str, ...]):
    def load():
        apply = providers.liger("ops.fused_linear_scaled_cross_entropy", "LigerFusedLinearScaledCrossEntropyFunction").apply
        if "entropy" in outputs:
            return lambda *tensors: -apply(*tensors, 1.0, -100, 1, True)[0]
        return lambda *tensors: -apply(*tensors)

    return load


def summed(load):
    """Return the loader of a function's sum over all tokens, each times its coefficient."""

    def loaded():
        function = load()
        return lambda hidden, weight, target, coefficients: (function(hidden, weight, target) * coefficients).sum()

    return loaded


def known_of_package(kernel):
    found = providers.operation(kernel, "linear_log_probs")
    return lambda hidden, weight, target, coefficients: found(hidden, weight, target, coefficients=coefficients).weighted_sum


def declared(
    name: str, title: str, position: int, frozen: bool = False, computed: tuple[str, ...] = ("log_probs",), again: bool = True, **others
) -> Operation:
    """Return the operation with a trained head or a frozen one.

    computed: what is, of which log_probs is checked and has a gradient. again: are the logits of a trained head made twice?
    """
    settings: dict[str, Any] = {
        "outputs": ("log_probs",),
        "formula": formula,
        "inputs": frozen_inputs if frozen else inputs,
        "peers": {"trl": of_trl(computed), "liger": of_liger(computed)},
        "bastile": of_package(computed),
        "reference": reference,
        "modes": ("full", "forward", "no_grad_forward"),
        **others,
    }
    return Operation(
        name, title, QWEN3, position=position, file="linear_log_probs", script="linear_log_probs",
        gradients=("dhidden",) if frozen else ("dhidden", "dweight"),
        work=functools.partial(work, again=again),
        floor=functools.partial(products, again=again), floor_title="bare cuBLAS GEMMs",
        writes_inputs=False,
        tokens=(2048, 8192),
        sweeps={"heads": over_heads, **SWEEPS},
        **settings,
    )


ENTROPY = ("log_probs", "entropy")
LINEAR_LOG_PROBS = declared("linear_log_probs", "linear + log-probabilities", 8)
FROZEN = declared("linear_log_probs_frozen", "frozen linear + log-probabilities", 9, True)
WITH_ENTROPY = declared("linear_log_probs_entropy", "linear + log-probabilities, entropies", 10, False, ENTROPY)
FROZEN_ENTROPY = declared("linear_log_probs_entropy_frozen", "frozen linear + log-probabilities, entropies", 11, True, ENTROPY)
KNOWN = declared(
    "linear_log_probs_known",
    "linear + log-probabilities, known coefficients",
    12,
    again=False,
    outputs=("sum",),
    formula=known_formula,
    inputs=known_inputs,
    peers={"trl": summed(of_trl(("log_probs",))), "liger": summed(of_liger(("log_probs",)))},
    bastile=known_of_package,
    reference=known_reference,
)
KEPT = declared(
    "linear_log_probs_kept",
    "linear + log-probabilities, logits kept",
    13,
    again=False,
    bastile=of_package(("log_probs",), recompute=False),
    modes=("full",),
)
NOT_YET = "not measured yet"
OPERATIONS = (LINEAR_LOG_PROBS, FROZEN, WITH_ENTROPY, FROZEN_ENTROPY, KNOWN, KEPT)
# What a line of the table is called: of which operation, in which mode.
LINES = {
    "a frozen head": (FROZEN, "full"),
    "a frozen head, entropies": (FROZEN_ENTROPY, "full"),
    "a trained head": (LINEAR_LOG_PROBS, "full"),
    "a trained head, entropies": (WITH_ENTROPY, "full"),
    "a trained head, known coefficients": (KNOWN, "full"),
    "a trained head, logits kept": (KEPT, "full"),
    "no gradients": (LINEAR_LOG_PROBS, "no_grad_forward"),
}


def table(rows: list) -> str:
    """Return time and memory of log-probabilities by head, and of which gradients are made."""
    rows = select(rows, x_name="head", dtype="bf16", tokens=QWEN3.tokens)
    mine = {name: select(rows, kernel_name=operation.name, kernel_operation_mode=mode) for name, (operation, mode) in LINES.items()}
    speed = {name: select(found, metric_name="speed", timing="device") for name, found in mine.items()}
    names = columns_of(row for found in speed.values() for row in found)
    table = Table("", "head", *map(providers.title, names), "the GEMMs alone", "Bastile: of the GEMMs", "speed vs best peer")
    for name, found in speed.items():
        if names and not found:
            table.add([name, "", *(NOT_YET if p == "bastile" else "" for p in names), "", "", ""], [])
        for head in in_order(row.x_value for row in found):
            times = by_provider(select(found, x_value=head))
            memory = by_provider(select(mine[name], metric_name="memory", x_value=head))
            cells = [joined(table.notes.cell(times.get(p), milliseconds), table.notes.cell(memory.get(p), gibibytes)) for p in names]
            line = [name, models.title(head), *cells, table.notes.cell(times.get(providers.FLOOR), milliseconds)]
            table.add([*line, of_floor(times), times_faster(times)], [*times.values(), *memory.values()])
    return table.text(f"{QWEN3.tokens} tokens: time, and peak memory beyond the inputs.")


TABLES = {"linear_log_probs": table}
