"""TensorFloat-32: tiles that are rounded to 10 bits after the point, for products on tensor cores."""

import cuda.tile as ct
import torch

from interpreter import interpret


@ct.kernel
def product(x, y, z):
    a, b = (ct.astype(ct.load(t, (0, 0), (16, 16)), ct.tfloat32) for t in (x, y))
    ct.store(z, (0, 0), ct.mma(a, b, ct.zeros((16, 16), dtype=ct.float32)))


def test_a_product_rounds_its_factors_to_ten_bits_and_adds_in_float32():
    torch.manual_seed(0)
    x, y, z = torch.randn(16, 16), torch.eye(16), torch.empty(16, 16)
    interpret(product, (1,), (x, y, z))
    assert not torch.equal(z, x)
    step = torch.exp2(x.abs().log2().floor() - 10)
    assert ((z - x).abs() <= step / 2).all()
    assert torch.equal(z / step, (z / step).round())


def test_what_ten_bits_hold_stays_as_it_is():
    x, z = torch.full((16, 16), 1.0 + 2.0**-10), torch.empty(16, 16)
    x[0] = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, *range(12)])
    interpret(product, (1,), (x.T.contiguous().clamp(-1e30, 1e30), torch.eye(16), z))
    assert torch.equal(z[1:, 1:], x.T[1:, 1:])
