"""Every operation at lengths that are or are not multiples of 16 bytes and of 64 elements, with each argument in turn, and the incoming
gradient, one element after a multiple of 16 bytes, or with its sign turned among transposed ones: the same numbers as of plain ones."""

import functools

import pytest
import torch

from tests.op_cases import SIGNATURES, total
from tests.ops.common import BF16, FP16, FP32, leaf, randn
from tests.ops.layouts import misaligned, transposed
from tests.ops.suite import cases_with, suite

CLOSE = {FP32: {"rtol": 1e-5, "atol": 1e-4}}  # products are added up in another order where a matrix lies otherwise
LENGTHS = {BF16: (8, 12, 72), FP32: (6, 40)}
OF_SUITE = cases_with("aligned")
# The operation, and the shapes of its arguments for rows of n.
CASES = {
    name: (functools.partial(total, name), functools.partial(signature.of_length, 2))
    for name, signature in SIGNATURES.items()
    if signature.rows
}


def results(call, ops, tensors, place, change=misaligned, others=lambda tensor: tensor):
    """The result and the gradients, with the argument, or after them the incoming gradient, at one place changed."""
    leaves = [leaf(change(t) if i == place else others(t)) for i, t in enumerate(tensors)]
    y = call(ops, *leaves)
    dy = randn(*y.shape, dtype=y.dtype, device="cpu", seed=20)
    dy = change(dy) if place == len(tensors) else dy
    return [y.detach(), *torch.autograd.grad(y, leaves, dy, allow_unused=True)]


def check(ops, case, dtype, lengths, *changes):
    call, shapes = case
    for n in lengths:
        tensors = [randn(*shape, dtype=dtype, device="cpu", seed=i) for i, shape in enumerate(shapes(n))]
        wanted = results(call, ops, tensors, None)
        for place in range(len(tensors) + 1):
            for found, mine in zip(results(call, ops, tensors, place, *changes), wanted, strict=True):
                where = f"length {n}, place {place}"
                torch.testing.assert_close(found, mine, **CLOSE.get(dtype, {}), msg=lambda text, where=where: f"{where}: {text}")


def negated(tensor):
    """Stores the numbers with the other sign in memory."""
    return torch._neg_view(-tensor)


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_odd_addresses(ops, name, dtype):
    check(ops, CASES[name], dtype, LENGTHS[dtype])


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("name", OF_SUITE)
def test_odd_addresses_in_the_suite(suite_ops, name, dtype):
    check(suite_ops, (OF_SUITE[name].call, OF_SUITE[name].aligned), dtype, LENGTHS[dtype])


@pytest.mark.parametrize("name", CASES)
def test_a_turned_sign_among_transposed_tensors(ops, name):
    check(ops, CASES[name], FP32, (40, 64), negated, transposed)


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in OF_SUITE for dtype in (FP32, FP16)[: 1 + OF_SUITE[name].half]],
                         ids=str)
def test_a_turned_sign_among_transposed_tensors_in_the_suite(suite_ops, name, dtype):
    check(suite_ops, (OF_SUITE[name].call, OF_SUITE[name].aligned), dtype, (40, 64), negated, transposed)


@pytest.mark.parametrize("change", (misaligned, negated), ids=lambda change: change.__name__)
@pytest.mark.parametrize("length", (1344, 4096), ids=("parts", "tiles"))
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
def test_odd_addresses_in_groups_that_are_cut(suite_ops, dtype, length, change):
    """Other kernels take the parts of groups that no block holds, and others again where a channel is whole tiles."""
    case = lambda ops, x, w, b: ops.group_norm(x, 1, w, b), lambda n: ((2, 4, n), (4,), (4,))
    check(suite_ops, case, dtype, (length,), change, transposed if change is negated else lambda tensor: tensor)


TARGET = torch.arange(4)
HEADS = tuple(randn(*shape, dtype=FP32, device="cpu", seed=i) for i, shape in enumerate(((4, 16), (40, 16), (40,))))
LOSSES = {
    "linear_cross_entropy": lambda ops, *head: ops.linear_cross_entropy(*head[:2], TARGET, head[2]),
    "linear_cross_entropy, none": lambda ops, *head: ops.linear_cross_entropy(*head[:2], TARGET, head[2], reduction="none"),
    "linear_jsd": lambda ops, *head: ops.linear_jsd(*head[:2], -head[0].detach(), head[1].detach(), TARGET, bias=head[2]),
}


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_odd_addresses_in_a_linear_loss(interpreted, name, dtype):
    """The second of two stacked losses has an incoming gradient that lies after the first one's."""
    head = [leaf(t.to(dtype)) for t in HEADS]

    def losses():
        return [LOSSES[name](suite(interpreted), *head) for _ in range(2)]

    stacked, apart = torch.stack(losses()), losses()
    weights = randn(*stacked.shape, dtype=stacked.dtype, device="cpu", seed=5)
    found = torch.autograd.grad(stacked, head, weights)
    parts = [torch.autograd.grad(loss, head, weight.clone()) for loss, weight in zip(apart, weights, strict=True)]
    for gradient, *mine in zip(found, *parts, strict=True):
        torch.testing.assert_close(gradient, sum(mine))
