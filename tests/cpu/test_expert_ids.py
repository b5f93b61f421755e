"""The numbers of experts, in every integer dtype and outside of the experts that there are."""

import pytest
import torch

from tests.ops.experts import experts_exact
from tests.tolerances import assert_close

TOKENS, HIDDEN, WIDTH = 9, 16, 8
ABSENT = {
    torch.uint8: (200, 255),
    torch.int8: (-1, -128),
    torch.int16: (-1, 2**15 - 1),
    torch.int32: (-1, 2**31 - 1, -(2**31)),
    torch.int64: (-1, 2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63)),
    torch.uint16: (2**16 - 1,),
    torch.uint32: (2**32 - 1,),
    torch.uint64: (2**63 - 1,),
}


def layer(experts):
    torch.manual_seed(0)
    shapes = (TOKENS, HIDDEN), (TOKENS, 2), (experts, 2 * WIDTH, HIDDEN), (experts, HIDDEN, WIDTH), (experts, 2 * WIDTH), (experts, HIDDEN)
    return [torch.randn(shape) for shape in shapes]


def compare(ops, ids, experts):
    """The result and the gradients against a loop over the experts that exist."""
    made = layer(experts)
    found, exact = ([tensor.to(dtype).requires_grad_() for tensor in made] for dtype in (torch.float32, torch.float64))
    wide = torch.tensor([[number if -(2**63) <= number < 2**63 else -1 for number in row] for row in ids.tolist()])
    out = ops.experts(found[0], ids, *found[1:])
    expected = experts_exact(exact[0], wide, *exact[1:])
    assert_close(out, expected, torch.float32, "experts")
    grads = zip(torch.autograd.grad(out.sum(), found), torch.autograd.grad(expected.sum(), exact), strict=True)
    for a, b in grads:
        assert_close(a, b, torch.float32, "gradient")


@pytest.mark.parametrize("dtype", ABSENT, ids=str)
def test_every_integer_dtype(ops, dtype):
    ids = torch.stack((torch.arange(TOKENS) % 5, (torch.arange(TOKENS) + 2) % 5), 1).to(dtype)
    compare(ops, ids, 5)
    for number in ABSENT[dtype]:
        absent = torch.where(torch.arange(TOKENS)[:, None] == torch.tensor([[3, 4]]), number, ids.to(torch.int64)).to(dtype)
        compare(ops, absent, 5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_more_experts_than_one_byte_numbers(ops, dtype):
    ids = torch.arange(2 * TOKENS).view(TOKENS, 2).mul(7).to(dtype)
    for experts in (127, 128, 129, 255, 256, 300):
        compare(ops, ids, experts)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64], ids=str)
def test_what_is_no_integer(ops, dtype):
    hidden, *others = layer(5)
    with pytest.raises(ValueError, match="expert is .*expected .* of an integer dtype"):
        ops.experts(hidden, torch.zeros(TOKENS, 2, dtype=dtype), *others)
