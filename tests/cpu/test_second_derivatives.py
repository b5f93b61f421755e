"""A second derivative through what has none is an error, and everything else that makes a graph of a backward pass, or runs a forward
pass inside of one, goes on as ever."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.models import random_tokens, tiny_model
from tests.ops.common import FP32, leaf, randn

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for folder in (ROOT / "torch-ext", *ROOT.glob("packages/*/torch-ext")) for path in sorted(folder.rglob("*.py"))]
# Made and differentiated by the package itself; and a linear layer, whose backward pass consists of PyTorch's operations.
OTHERS = {"_AskForHandle", "_Product"}


def functions_of(path):
    """The autograd functions that a file defines: (its tree, the class)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in ("Function", "torch.autograd.Function") for base in node.bases):
            yield tree, node


def test_every_autograd_function_is_of_the_class_that_refuses():
    """torch's own decorator lets a backward pass through whose incoming gradient needs no derivative."""
    found = [(path, tree, node) for path in SOURCES for tree, node in functions_of(path) if node.name not in OTHERS]
    assert len(found) > 35
    for path, tree, node in found:
        assert [ast.unparse(base) for base in node.bases] == ["Function"], f"{path}: {node.name}"
        imported = [part for part in ast.walk(tree) if isinstance(part, ast.ImportFrom) and "Function" in
                    [alias.name for alias in part.names]]  # fmt: skip
        assert [(part.level > 0, part.module.split(".")[-1]) for part in imported] == [(True, "autograd")], path


def penalty(model, tokens):
    """The loss, and the squared norm of its gradient by the embedded tokens."""
    embedded = leaf(model.get_input_embeddings()(tokens))
    loss = model(inputs_embeds=embedded, labels=tokens).loss
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + gradient.square().sum()


def test_a_layer_in_eight_bits_has_a_second_derivative(qwen3):
    linear = torch.nn.Linear(8, 6, dtype=torch.float64).requires_grad_(False)
    inside = qwen3.eight_bits(tiny_model(torch.bfloat16).requires_grad_(False)).model.layers[0].mlp.gate_proj
    linear.bias.requires_grad_()
    assert type(inside).__name__ == "EightBitLinear"
    (codes,), scale = sys.modules[type(inside).__module__].quantise_together([linear.weight.detach()])
    type(inside).take(linear, codes, scale, torch.float64)
    assert torch.autograd.gradgradcheck(linear, leaf(torch.randn(3, 8, dtype=torch.float64)))


def test_a_gradient_penalty_of_a_model(qwen3):
    tokens, model = random_tokens(2, 9), tiny_model()
    total = penalty(qwen3.kernelize(model), tokens)
    with pytest.raises(RuntimeError, match="trying to differentiate twice: .* has no second derivative. Leave this operation to PyTorch"):
        total.backward()


@pytest.mark.parametrize("asked", ("lm_head", "embed_tokens", "layers.0.mlp.up_proj"))
def test_a_second_derivative_is_never_taken_for_zero(qwen3, asked):
    """torch.autograd.grad goes no other way than to what it is asked for, and allow_unused makes None of what it does not reach."""
    tokens, model = random_tokens(2, 9), qwen3.kernelize(tiny_model())
    loss = model(input_ids=tokens, labels=tokens).loss
    squares = sum(g.square().sum() for g in torch.autograd.grad(loss, list(model.parameters()), create_graph=True))
    parameter = next(p for name, p in model.named_parameters() if asked in name)
    with pytest.raises(RuntimeError, match="trying to differentiate twice"):
        torch.autograd.grad(squares, parameter, allow_unused=True)


def test_a_derivative_by_two_backward_passes_is_never_taken_for_zero(loaded_ops):
    x, w = (randn(64, dtype=FP32, device="cpu", seed=i) for i in range(2))
    with pytest.raises(RuntimeError, match="trying to differentiate twice"):
        torch.autograd.functional.jvp(lambda x: loaded_ops.rms_norm(x, w), x[None], torch.ones(1, 64))


@pytest.mark.parametrize("options", ({}, {"gradient_checkpointing": True}), ids=("plain", "checkpointing"))
def test_a_graph_of_the_backward_pass_that_nothing_is_differentiated_through(qwen3, options):
    """create_graph=True gives the bits of a pass without it."""
    tokens, model = random_tokens(2, 9), qwen3.kernelize(tiny_model())
    if options:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parameters = list(model.parameters())
    wanted, found = (
        torch.autograd.grad(model(input_ids=tokens, labels=tokens).loss, parameters, create_graph=graph) for graph in (False, True)
    )
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("reentrant", (False, True))
def test_recomputing_inside_of_a_backward_pass(loaded_ops, reentrant):
    x, w = leaf(randn(3, 64, dtype=FP32, device="cpu")), leaf(randn(64, dtype=FP32, device="cpu", seed=1))

    def run(x):
        return loaded_ops.rms_norm(loaded_ops.swiglu(x, x), w)

    wanted = torch.autograd.grad(run(x).square().sum(), (x, w))
    checkpoint(run, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(x.grad, wanted[0]) and torch.equal(w.grad, wanted[1])


def test_what_the_error_recommends(loaded_ops):
    """torch.func differentiates PyTorch's operations, as often as one likes."""
    x, w = (randn(4, dtype=torch.float64, device="cpu", seed=i) for i in range(2))

    def of_formula(x):
        return (w * x * torch.rsqrt(x.square().mean() + 1e-6)).square().sum()

    found = torch.func.hessian(lambda x: loaded_ops.rms_norm(x, w).square().sum())(x)
    torch.testing.assert_close(found, torch.func.hessian(of_formula)(x))


def test_a_compiled_operation_has_no_second_derivative_either(loaded_ops):
    x, w = leaf(randn(3, 64, dtype=FP32, device="cpu")), randn(64, dtype=FP32, device="cpu", seed=1)
    rms_norm = loaded_ops.rms_norm
    torch._dynamo.reset()
    y = torch.compile(lambda x: rms_norm(x, w), fullgraph=True, backend="aot_eager")(x)
    with pytest.raises(RuntimeError, match="double backward|differentiate twice"):
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gradient.sum().backward()


@pytest.mark.parametrize("partial", (False, True))
def test_gradients_that_nobody_asked_for(loaded_ops, partial):
    """None stays None, and a single gradient is no tuple."""
    x, w = randn(3, 64, dtype=FP32, device="cpu"), leaf(randn(64, dtype=FP32, device="cpu", seed=1))
    x = x if partial else leaf(x)
    loss = loaded_ops.rms_norm(x, w).square().sum()
    needed = [w] if partial else [x, w]
    found = torch.autograd.grad(loss, needed, retain_graph=True, create_graph=True)
    assert all(g.requires_grad for g in found) and all(map(torch.equal, found, torch.autograd.grad(loss, needed)))
