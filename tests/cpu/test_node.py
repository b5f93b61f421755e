"""A half layer is a forward function, a backward function and a description: one that no file of the package knows."""

import importlib
import itertools
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.utils import counters

from tests import compile_checks as checks
from tests.versions import needs_compiler

NUMBERS = itertools.count()  # of the toys, whose operators have a name each


class Spec(NamedTuple):
    factor: float


class Tensors(NamedTuple):
    """Of stream + factor * (stream @ weight.T + bias) ** 2."""

    stream: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


class Saved(NamedTuple):
    nothing: torch.Tensor | None
    several: list
    last: torch.Tensor


def reference(spec, tensors, projections, sizes, dtype):
    return (tensors.stream + spec.factor * torch.nn.functional.linear(*tensors).square(), tensors.stream)


def toy(package, calls, **options):
    node = importlib.import_module(f"{package.__name__}.shared.decoder.node")
    in_graph = node.InGraph(f"toy_{next(NUMBERS)}", Spec, Tensors, Saved, **options)

    def check(spec, tensors, projections, sizes, dtype):
        if tensors.weight.shape[1] != tensors.stream.shape[-1]:
            raise ValueError("weight does not fit")

    def forward(given):
        calls.append("forward")
        branch = torch.nn.functional.linear(*given.tensors)
        return [given.tensors.stream + given.layout.spec.factor * (branch * branch)], Saved(None, [branch, branch + branch], branch + 1)

    def backward(given, grads, saved, need):
        calls.append(need.tensors)
        dout, dstream = grads
        assert saved.nothing is None
        dbranch = given.layout.spec.factor * dout * (saved.several[1] * 2 + saved.several[0] * -1 + saved.last * -1 + 1)
        dweight = dbranch.t() @ given.tensors.stream if need.tensors.weight else None
        dbias = dbranch.sum(0) if need.tensors.bias else None
        return node.Gradients(Tensors(dstream + dout + dbranch @ given.tensors.weight, dweight, dbias), [])

    return node.Node("_Toy", check, reference, forward, backward, in_graph=in_graph, passes_on=True)


def arguments(biased=True, frozen=False):
    torch.manual_seed(0)
    shapes = (5, 4), (4, 4), (4,)
    found = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    found[1].requires_grad_(not frozen)
    return Tensors(found[0], found[1], found[2] if biased else None)


@pytest.mark.parametrize("options", ({}, {"biased": False}, {"frozen": True}), ids=("", "without a bias", "frozen"))
def test_a_half_layer_that_no_file_knows(qwen3, options):
    calls = []
    node, mine, expected = toy(qwen3, calls), arguments(**options), arguments(**options)
    for spec in (Spec(0.5), Spec(2.0)):
        results, wanted = node(spec, mine, (), (), torch.float64), reference(spec, expected, (), (), torch.float64)
        for found in (results, wanted):
            (found[0].square().sum() + found[1].sum()).backward()
        assert torch.equal(results[0], wanted[0]) and torch.equal(results[1], mine.stream)
        for one, other in zip(mine, expected, strict=True):
            assert one is None or other.grad is None or torch.allclose(one.grad, other.grad)
    assert calls[1] == Tensors(True, "frozen" not in options, "biased" not in options)
    assert type(results[0].grad_fn).__name__ == "_ToyBackward" and (mine.weight.grad is None) == ("frozen" in options)


def test_what_it_refuses_and_leaves_to_pytorch(qwen3):
    calls = []
    node, given = toy(qwen3, calls), arguments()
    with pytest.raises(ValueError, match="weight does not fit"):
        node(Spec(1.0), given._replace(weight=given.weight[:, :2]), (), (), torch.float64)
    out, _ = node(Spec(1.0), given, (), (), torch.float64)
    (grad,) = torch.autograd.grad(out.sum(), given.stream, create_graph=True)
    with pytest.raises(RuntimeError, match="twice: .*Toy"):
        grad.sum().backward()
    calls.clear()
    hessian = torch.func.hessian(lambda x: node(Spec(1.0), given._replace(stream=x), (), (), torch.float64)[0].sum())(given.stream.detach())
    assert hessian.abs().max() > 0 and not calls


@pytest.mark.parametrize("biased", (True, False))
def test_its_calls_are_replayed(interpreted, biased):
    """The third pass is a plan's: neither function runs."""
    calls = []
    node, given = toy(interpreted, calls), arguments(biased)
    given = Tensors(*[None if tensor is None else tensor.detach().float().requires_grad_() for tensor in given])
    found = []
    for _ in range(4):
        out, stream = node(Spec(0.5), given, (), (), torch.float32)
        found.append(torch.autograd.grad(out.sum() + stream.sum(), [tensor for tensor in given if tensor is not None]))
    assert len(calls) == 4, "twice forward and backward"
    for grads in found[1:]:
        assert all(map(torch.equal, grads, found[0]))


@needs_compiler
@pytest.mark.parametrize("options", ({}, {"biased": False}, {"frozen": True}), ids=("", "without a bias", "frozen"))
def test_it_is_two_operators_in_a_graph(qwen3, options):
    """With gradients and without, each in one graph more than one for all lengths."""
    node = toy(qwen3, [])
    called, compiled = checks.operators_of(qwen3, lambda given: node(Spec(0.5), given, (), (), torch.float64))
    counters.clear()
    for tokens in (1, 2, 3):
        given, expected = arguments(**options), arguments(**options)
        given, expected = (each._replace(stream=each.stream.detach().repeat(tokens, 1).requires_grad_()) for each in (given, expected))
        for results in (compiled(given), reference(Spec(0.5), expected, (), (), torch.float64)):
            (results[0].square().sum() + results[1].sum()).backward()
        for one, other in zip(given, expected, strict=True):
            assert one is None or (one.grad is other.grad is None if other.grad is None else torch.allclose(one.grad, other.grad))
        with torch.no_grad():
            assert torch.allclose(compiled(given)[0], results[0])
    assert counters["stats"]["unique_graphs"] == 4
    assert [name.removeprefix("toy_").lstrip("0123456789") for name in called].count("_backward") == 2 and len(called) == 6
