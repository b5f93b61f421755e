"""Losses over a vocabulary, Liger's and Qwen3's: cross entropy, divergences of two distributions, and losses of a head's output from the
hidden states, whose floor is whole cuBLAS products (logits, dhidden, dweight; of an evaluation the first of them).

Of cross entropy a seventh of the labels do not count. Two passes are the least that any form needs: one reads the logits, one writes their
gradient. A form that leaves the logits alone and makes the gradient in the backward pass reads them twice.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from . import eager
from .eager import to_float32
from .floors import product_calls
from .liger_operations import declare, implementations
from .markdown import comparison, gibibytes, in_order, milliseconds, select
from .operation import Inputs, Limit, Operation, Reference, Work, bytes_moved
from .operations_log_probs import draw
from .operations_log_probs import products as head_products
from .operations_log_probs import reference as reference_of_log_probs
from .operations_log_probs import work as head_work
from .suites import QWEN3

IGNORED = -100
TWICE = 2 / 3  # of the floor: what a form that reads the logits twice can reach


def logits_and_target(size, tokens, random) -> Inputs:
    target = random.integers(size.vocab, tokens)
    target[::7] = IGNORED
    return Inputs((random.normal(tokens, size.vocab),), others=(target,))


def cross_entropy_of_liger(function):
    return lambda x, target: function(x, target, None, IGNORED, 0.0, 0.0, "mean", None, False, False, False)[0]


CROSS_ENTROPY = declare(
    "cross_entropy", "cross entropy", 20, "LigerCrossEntropyFunction", x="V",
    outputs=("loss",), gradients=("dx",),
    inputs=logits_and_target,
    formula=lambda x, target: F.cross_entropy(to_float32(x), target),
    call_theirs=cross_entropy_of_liger,
    work=bytes_moved(1, 1),  # x; dx
    limits=(
        Limit(8192, 0.92 * TWICE, liger=1.2),
        Limit(4096, 0.92 * TWICE, liger=1.2, dtype="fp32"),
        Limit(1024, 0.92 * TWICE, {"vocab": 151936}, liger=1.2),
    ),
)


def distributions(size, tokens, random, student: Callable, teacher: Callable) -> Inputs:
    """Draw two distributions over the vocabulary. student, teacher: softmax or log_softmax, as the function takes them."""
    x, y = (random.normal(tokens, size.vocab).float() for _ in range(2))
    return Inputs((student(x, -1).to(random.dtype),), others=(teacher(y, -1).to(random.dtype),))


def divergence(name: str, title: str, position: int, theirs: str, student: Callable, teacher: Callable, **declared) -> Operation:
    """Return the operation. Liger's script differentiates through the student's softmax, and has logits in fp32."""
    convention = {"name": name, "dtype": "fp32", "before": lambda x: student(x, -1)}
    return declare(
        name, title, position, theirs, x="BT", convention=convention,
        outputs=("loss",), gradients=("dx",),
        inputs=partial(distributions, student=student, teacher=teacher),
        work=bytes_moved(2, 1),  # x, y; dx
        **declared,
    )


KL_DIV = divergence(
    "kl_div", "KL divergence", 22, "LigerKLDivLossFunction", F.log_softmax, F.softmax,
    formula=lambda x, y: F.kl_div(to_float32(x), to_float32(y), reduction="batchmean"),
    call=lambda function: lambda x, y: function(x, y, "batchmean"), call_theirs=lambda function: function,
    limits=(Limit(4096, 0.88, peer=1.15, dtype="fp32"), Limit(2048, 0.85, {"vocab": 151936}, liger=2.1)),
)


def jsd(x, y):
    x, y = to_float32(x), to_float32(y)
    log_m = torch.log((x.exp() + y.exp()) / 2)
    return (y.exp() * (y - log_m) + x.exp() * (x - log_m)).sum() / (2 * x.shape[0])


JSD = divergence(
    "jsd", "JSD", 23, "LigerJSDFunction", F.log_softmax, F.log_softmax,
    formula=jsd,
    limits=(Limit(4096, 0.88, peer=1.4, dtype="fp32"), Limit(2048, 0.75, {"vocab": 151936}, liger=3.5)),
)
TVD = divergence(
    "tvd", "TVD", 24, "LigerTVDLossFunction", F.softmax, F.softmax,
    formula=lambda x, y: (to_float32(x) - to_float32(y)).abs().sum() / (2 * x.shape[0]),
    limits=(Limit(4096, 0.88, peer=1.1, dtype="fp32"), Limit(2048, 0.85, {"vocab": 151936}, liger=1.4)),
)


def inputs(size, tokens, random) -> Inputs:
    hidden, weight, target, _ = draw(size, tokens, random)
    return Inputs(leaves=(hidden, weight), others=(target,))


def reference(inputs: Inputs) -> Reference:
    """Compute in float64, from the log-probabilities, whose gradients are all the same."""
    (target,) = inputs.others
    each = torch.full((len(target),), -1 / len(target), dtype=torch.float64, device=target.device)
    found = reference_of_log_probs(Inputs(inputs.leaves, (target,), (each,)), rounding=True)
    return Reference((-found.outputs[0].mean(),), found.gradients, found.rounding)


def of_torch():
    if hasattr(F, "linear_cross_entropy"):
        return F.linear_cross_entropy
    return lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight), target)


def loss_only(function):
    """Keep the loss of a function that returns more."""
    return lambda *arguments: function(*arguments)[0]


LINEAR_CROSS_ENTROPY = Operation(
    "linear_cross_entropy", "linear + cross entropy", QWEN3, position=7,
    outputs=("loss",), gradients=("dhidden", "dweight"),
    inputs=inputs,
    formula=eager.linear_cross_entropy,
    peers={
        "torch": of_torch,
        **implementations("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", loss_only),
    },
    work=partial(head_work, again=False),
    floor=partial(head_products, again=False), floor_title="bare cuBLAS GEMMs",
    reference=reference,
    modes=("full", "forward", "no_grad_forward"),
    writes_inputs=False,
    tokens=(2048, 8192, 16384, 32768),  # one chunk, and so many that adding their gradients up shows what it costs in precision
)


def table(rows: list) -> str:
    """Return time and memory of the loss with both gradients by tokens, and the error of the weight's gradient."""
    wanted = {"kernel_operation_mode": "full", "model": QWEN3.model, "x_name": "tokens", "dtype": "bf16"}
    rows = select(rows, kernel_name=LINEAR_CROSS_ENTROPY.name, **wanted)
    rows = [row for row in rows if row.metric_name != "speed" or row.config.get("timing") == "device"]
    cases = [((tokens,), select(rows, x_value=tokens)) for tokens in in_order(row.x_value for row in select(rows, metric_name="speed"))]
    shows = {"speed": milliseconds, "memory": gibibytes, "error_dweight_ratio": lambda ratio: f"{ratio:.2f}"}
    remark = "Time, peak memory beyond the inputs, and the error of the weight's gradient relative to that of one bf16 GEMM."
    return comparison(("tokens",), cases, shows, ("three GEMMs", "Bastile: of the GEMMs"), "speed vs best peer", remark)


TABLES = {"linear_cross_entropy": table}


def products(inputs: Inputs, mode: str, heads: int) -> list[tuple[int, int, int]]:
    """Return the (m, n, k) of the matrix products: the logits of each head, dhidden and dweight."""
    (tokens, hidden), vocab = inputs.leaves[0].shape, inputs.leaves[1].shape[0]
    back = [(tokens, hidden, vocab), (vocab, hidden, tokens)]
    return {"forward": [], "backward": back}.get(mode, back) + ([(tokens, vocab, hidden)] * heads if mode != "backward" else [])


def of_hidden(name: str, title: str, position: int, theirs: str, heads: int, **declared) -> Operation:
    """Return the operation of a loss from the hidden states, whose floor is its bare cuBLAS products."""
    mine = partial(products, heads=heads)
    return declare(
        name, title, position, theirs, x="BT",
        outputs=("loss",), gradients=("dhidden", "dweight"),
        work=lambda inputs, mode: Work.of_products(mine(inputs, mode)),
        floor=product_calls(mine), floor_title="bare cuBLAS GEMMs",
        modes=("full", "forward"),
        writes_inputs=False,
        **declared,
    )


LIGER_LINEAR_CROSS_ENTROPY = of_hidden(
    "fused_linear_cross_entropy", "linear + cross entropy", 30, "LigerFusedLinearCrossEntropyFunction", 1, ours="linear_cross_entropy",
    inputs=inputs,
    formula=eager.linear_cross_entropy,
    call_theirs=loss_only,
    reference=reference,
    tokens=(1024, 4096, 8192),
    limits=(Limit(8192, 0.97, peer=0.96), Limit(1024, 0.93, liger=9.0)),
)


def student_and_teacher(size, tokens, random) -> Inputs:
    """Draw hidden states and weights of both that give logits of order 1."""
    hidden, scale = size.hidden, size.hidden**-0.5
    student, teacher = ((random.normal(tokens, hidden), random.normal(size.vocab, hidden, scale=scale)) for _ in range(2))
    return Inputs(student, others=teacher)


def linear_jsd(x, weight, teacher, teacher_weight):
    return jsd(*(F.log_softmax(to_float32(z), -1) for z in (F.linear(x, weight), F.linear(teacher, teacher_weight))))


LINEAR_JSD = of_hidden(
    "fused_linear_jsd", "linear + JSD", 31, "LigerFusedLinearJSDFunction", 2, ours="linear_jsd",
    inputs=student_and_teacher,
    formula=linear_jsd,
    tokens=(1024, 4096),
    limits=(Limit(4096, 0.92, peer=1.05), Limit(1024, 0.85, liger=9.0)),
)
