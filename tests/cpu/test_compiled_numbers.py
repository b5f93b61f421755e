"""Numbers that torch.compile holds as symbols: all of them with dynamic=True, and without it those that have changed once."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests import compile_checks as checks
from tests.models import random_tokens, tiny_model
from tests.op_cases import CASES
from tests.ops.common import leaf, randn
from tests.ops.suite import suite
from tests.tolerances import assert_close
from tests.versions import needs_compiler

OF_NUMBERS = ("linear_cross_entropy", "linear_log_probs", "norm_attention_inputs", "norm_mlp", "rms_norm", "gated_activation")
DYNAMIC = {"dynamic": True}
pytestmark = needs_compiler


@pytest.mark.parametrize("operation", [name for name in CASES if name in OF_NUMBERS])
def test_operations_with_symbols_for_their_numbers(loaded_ops, operation):
    checks.check_compiled_operation(loaded_ops, operation, "cpu", "aot_eager", tokens=(3, 6), **DYNAMIC)


LABELS = torch.arange(4)
# Operations of the suite, with a number among their arguments, and the shapes of the tensors.
OF_SUITE = {
    "group_norm": (lambda op, n, x, w, b: op(x, 2, w, b, eps=n), ((4, 4, 64), (4,), (4,))),
    "cross_entropy": (lambda op, n, x: op(x, LABELS, label_smoothing=n, softcap=10 * n, lse_square_scale=n, num_items=n), ((4, 64),)),
    "jsd": (lambda op, n, x, y: op(x, y.detach(), beta=n, from_logits=True, temperature=n), ((4, 64), (4, 64))),
    "neighborhood_attention": (lambda op, n, q, k, v: op(q, k, v, 3, scale=n), ((1, 2, 5, 64),) * 3),
}


@pytest.mark.parametrize("name", OF_SUITE)
def test_numbers_of_the_suite_that_change(all_operations, name):
    call, shapes = OF_SUITE[name]
    operation = getattr(suite(all_operations), name)
    tensors = [leaf(randn(*shape, dtype=torch.float32, device="cpu", seed=i)) for i, shape in enumerate(shapes)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda n, *tensors: call(operation, n, *tensors), backend="aot_eager", fullgraph=True)
    for number in (0.25, 0.5, 0.125):  # the second makes it a symbol
        for found, wanted in zip(*(
            (y.detach(), *torch.autograd.grad(y.sum(), tensors, allow_unused=True))
            for y in (compiled(number, *tensors), call(operation, number, *tensors))
        ), strict=True):  # fmt: skip
            torch.testing.assert_close(found, wanted)


def scaled(model, factor):
    """Multiplies the scaling of every adapter, as PEFT's `set_scale` does."""
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling = {name: value * factor for name, value in module.scaling.items()}


@pytest.mark.parametrize(
    ("options", "steps", "graphs"),
    ((DYNAMIC, ((17, 1.0), (18, 1.0), (33, 1.7)), [1, 1, 2]), ({}, ((17, 1.0), (17, 1.7), (17, 0.3)), [1, 2, 3])),
    ids=("dynamic", "changed"),
)
def test_a_model_with_symbols_for_its_numbers(qwen3, options, steps, graphs):
    """Epsilons and scalings are constants of a graph; each other scaling has a graph of its own. steps: (length, what scalings are
    multiplied by before it)."""
    model = qwen3.kernelize(checks.with_adapters(tiny_model(num_hidden_layers=1), r=8, lora_alpha=13))
    called, compiled = checks.operators_of(qwen3, model, **options)
    counters.clear()
    made = []
    for length, factor in steps:
        scaled(model, factor)
        ids, found = random_tokens(2, length), []
        for run in (model, compiled):
            model.zero_grad()
            loss = run(input_ids=ids, labels=ids).loss
            loss.backward()
            found.append((loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
        (expected, wanted), (loss, gradients) = found
        assert_close(loss, expected, torch.float32, f"loss of {length} tokens")
        for mine, theirs in zip(gradients, wanted, strict=True):
            assert_close(mine, theirs, torch.float32, f"a gradient of {length} tokens", 10)
        made.append(counters["stats"]["unique_graphs"])
    assert made == graphs
    assert sum(name.startswith("norm_") for name in called) == 4 * graphs[-1], "two fused operators, forward and backward"


@needs_compiler
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_a_loss_without_tokens(qwen3, dtype):
    """A graph gives no loss and gradients of zeros, as eager mode does."""
    hidden, weight = torch.randn(0, 64).to(dtype).requires_grad_(), torch.randn(37, 64).to(dtype).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(qwen3.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    compiled(hidden, weight, torch.zeros(0, dtype=torch.int64), reduction="sum").backward()
    assert hidden.grad.shape == hidden.shape and torch.equal(weight.grad, torch.zeros_like(weight))
