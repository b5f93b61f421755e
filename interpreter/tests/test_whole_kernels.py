"""Whole kernels in the interpreter, beside PyTorch."""

import cuda.tile as ct
import pytest
import torch

from interpreter import interpret
from interpreter.tests.helpers import INF, NAN, Const


@ct.function
def read(array, index):
    return ct.astype(ct.gather(array, index, check_bounds=False), ct.float32)


@ct.kernel
def rms_norm(x, weight, y, eps: float, SIZE: Const):
    row, cols = ct.bid(0), ct.arange(SIZE, dtype=ct.int32)
    xf = read(x, (row, cols))
    rstd = ct.rsqrt(ct.sum(xf * xf, axis=0) * (1.0 / SIZE) + eps)
    n = ct.astype(ct.astype(xf * rstd, x.dtype), ct.float32)
    ct.scatter(y, (row, cols), ct.astype(n * read(weight, cols), y.dtype), check_bounds=False)


@ct.kernel
def softmax(x, y, TILE: Const):
    row = ct.bid(0)
    m, s = ct.full((), -INF, ct.float32), ct.full((), 0.0, ct.float32)
    for i in range(ct.cdiv(x.shape[1], TILE)):
        v = ct.gather(x, (row, ct.arange(TILE, dtype=ct.int32) + i * TILE), padding_value=-INF)
        new = max(m, ct.max(v))
        s = s * ct.exp(m - new) + ct.sum(ct.exp(v - new))
        m = new
    for i in range(ct.cdiv(x.shape[1], TILE)):
        cols = ct.arange(TILE, dtype=ct.int32) + i * TILE
        ct.scatter(y, (row, cols), ct.exp(ct.gather(x, (row, cols)) - m) / s)


@ct.kernel
def matmul(a, b, c, M: Const, N: Const, K: Const):
    i, j = ct.bid(0), ct.bid(1)
    acc = ct.zeros((M, N), ct.float32)
    for k in range(ct.num_tiles(a, 1, (M, K))):
        x = ct.load(a, (i, k), (M, K), padding_mode=ct.PaddingMode.ZERO)
        y = ct.load(b, (k, j), (K, N), padding_mode=ct.PaddingMode.ZERO)
        acc = ct.mma(x, y, acc)
    ct.store(c, (i, j), ct.astype(acc, c.dtype))


class TestKernels:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_rms_norm(self, dtype):
        x, weight = torch.randn(5, 256).to(dtype), torch.randn(256).to(dtype)
        y = torch.full_like(x, NAN)
        interpret(rms_norm, (5,), (x, weight, y, 1e-6, 256))
        n = (x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(dtype)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y.double(), n.double() * weight.double(), rtol=2 * eps, atol=eps)

    @pytest.mark.parametrize("length", [1, 63, 64, 200])
    @pytest.mark.parametrize("order", ["forward", "random"])
    def test_softmax(self, length, order):
        x = torch.randn(4, length) * 5
        y = torch.full_like(x, NAN)
        interpret(softmax, (4,), (x, y, 64), order=order)
        torch.testing.assert_close(y.double(), torch.softmax(x.double(), -1), rtol=1e-5, atol=1e-7)

    def test_matmul(self):
        a, b = torch.randn(37, 50).bfloat16(), torch.randn(50, 21).bfloat16()
        c = torch.full((37, 21), NAN)
        interpret(matmul, (3, 2), (a, b, c, 16, 16, 16))
        torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)

    def test_a_forgotten_mask_shows(self):
        """The padding of a checked load is undetermined: without padding_mode the tail of K spoils the product."""

        @ct.kernel
        def row_sum(x, y):
            ct.store(y, 0, ct.sum(ct.load(x, 0, 8), keepdims=True))

        y = torch.zeros(1)
        interpret(row_sum, (1,), (torch.ones(5), y))
        assert y.isnan().all()
