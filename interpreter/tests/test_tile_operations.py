"""What the functions on tiles compute."""

import math

import cuda.tile as ct
import pytest
import torch

from interpreter import InterpreterError
from interpreter.tests.helpers import INF, NAN, floats, ints, observe, values


class TestOperations:
    def test_shapes(self):
        x = torch.arange(16, dtype=torch.int32)
        grid = x.reshape(4, 4)

        def check(expression, wanted):
            assert torch.equal(observe(expression, x).data, wanted.to(torch.int64))

        check(lambda t: t.reshape((4, -1)), grid)
        check(lambda t: ct.transpose(t.reshape((4, 4))), grid.T)
        check(lambda t: ct.permute(t.reshape((2, 2, 4)), (2, 0, 1)), x.reshape(2, 2, 4).permute(2, 0, 1))
        check(lambda t: t[:, None], x[:, None])
        check(lambda t: ct.expand_dims(t, 0), x[None])
        check(lambda t: ct.broadcast_to(t, (2, 16)), x.expand(2, 16))
        check(lambda t: ct.cat((t, t), 0), torch.cat([x, x]))
        check(lambda t: ct.extract(t.reshape((4, 4)), (1, 0), (2, 2)), grid[2:, :2])
        check(lambda t: ct.extract(t, (3,), ()), x[3])
        check(lambda t: ct.extract(t, 3, 1).item(), x[3])
        check(lambda t: ct.insert(t, (1,), ct.full((8,), 5, ct.int32)), torch.cat([x[:8], torch.full((8,), 5)]))
        check(lambda t: ct.arange(4, start=7, step=-1, dtype=ct.int32), torch.tensor([7, 6, 5, 4]))
        check(lambda t: ct.astile(((1, 2), (3, 4)), dtype=ct.int32), torch.tensor([[1, 2], [3, 4]]))
        with pytest.raises(InterpreterError, match="outside"):
            observe(lambda t: ct.extract(t, (16,), (1,)), x)

    @pytest.mark.parametrize("name", ["exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh", "floor", "ceil", "abs"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_functions(self, name, dtype):
        x = torch.rand(64).to(dtype) + 0.5
        wanted = getattr(torch, name)(x.double())
        tile = observe(lambda t: getattr(ct, name)(t), x)
        assert tile.data.dtype is dtype
        torch.testing.assert_close(tile.data.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=0)

    def test_approximate_division_and_powers(self):
        def sigmoid(x):
            return ct.truediv(1.0, 1.0 + ct.exp2(x * -1.4426950408889634, flush_to_zero=True), rounding_mode=ct.RoundingMode.APPROX)

        x = torch.randn(64)
        torch.testing.assert_close(observe(sigmoid, x).data, torch.sigmoid(x))
        assert values(observe(lambda x: x**2, floats(3, -3, dtype=torch.bfloat16))) == [9, 9]

    def test_nan(self):
        a, b = floats(NAN, 1, NAN, 3), floats(2, NAN, NAN, 4)
        torch.testing.assert_close(observe(lambda a, b: ct.maximum(a, b), a, b).data, floats(2, 1, NAN, 4), equal_nan=True)
        propagated = observe(lambda a, b: ct.minimum(a, b, propagate_nan=True), a, b).data
        torch.testing.assert_close(propagated, floats(NAN, NAN, NAN, 3), equal_nan=True)
        assert values(observe(lambda a: ct.max(a, 0), a)) == 3
        assert math.isnan(values(observe(lambda a: ct.max(a, 0, propagate_nan=True), a)))
        assert values(observe(lambda a: ct.argmax(a, 0), a)) == 3
        assert values(observe(ct.isnan, a)) == [True, False, True, False]

    def test_reductions(self):
        x = torch.randn(64)
        grid = x.reshape(2, 4, 8)

        def check(expression, wanted):
            torch.testing.assert_close(observe(expression, x).data, wanted, check_dtype=False)

        check(lambda t: ct.sum(t.reshape((2, 4, 8)), (0, 2)), grid.sum((0, 2)))
        check(lambda t: ct.sum(t.reshape((2, 4, 8)), -1, keepdims=True), grid.sum(-1, keepdim=True))
        check(lambda t: ct.sum(t), x.sum())
        check(lambda t: ct.max(t.reshape((2, 4, 8)), 1), grid.amax(1))
        check(lambda t: ct.min(t), x.amin())
        check(lambda t: ct.prod(t.reshape((8, 8)), 0), x.reshape(8, 8).prod(0))
        check(lambda t: ct.argmin(t.reshape((8, 8)), 1), x.reshape(8, 8).argmin(1))
        check(lambda t: ct.cumsum(t.reshape((8, 8)), 1), x.reshape(8, 8).cumsum(1))
        check(lambda t: ct.cumsum(t, 0, reverse=True), x.flip(0).cumsum(0).flip(0))
        check(lambda t: ct.reduce(t, 0, lambda a, b: ct.maximum(a, b), -INF), x.amax())
        check(lambda t: ct.scan(t, 0, lambda a, b: ct.maximum(a, b), -INF), x.cummax(0).values)

    def test_reduction_of_pairs(self):
        """Online softmax: (max, sum of exp2 relative to it), combined associatively."""

        def combine(m1, s1, m2, s2):
            m = max(m1, m2)
            return m, s1 * ct.exp2(m1 - m) + s2 * ct.exp2(m2 - m)

        x = torch.randn(256)
        tile = observe(lambda t: ct.reduce((t, ct.ones((1,), ct.float32)), 0, combine, (-INF, 0.0))[1], x)
        torch.testing.assert_close(tile.data, torch.exp2(x - x.amax()).sum())

    def test_matrix_products(self):
        x = torch.randn(4 * 8).bfloat16()
        product = x.reshape(4, 8).float() @ x.reshape(8, 4).float()
        out = observe(lambda t: ct.mma(t.reshape((4, 8)), t.reshape((8, 4)), ct.ones((4, 4), ct.float32)), x)
        torch.testing.assert_close(out.data, product + 1)
        assert observe(lambda t: t.reshape((4, 8)) @ t.reshape((8, 4)), x).dtype is ct.bfloat16
        eights = ints(*range(-8, 8), dtype=torch.int8)
        out = observe(lambda t: ct.mma(t.reshape((4, 4)), t.reshape((4, 4)), ct.zeros((4, 4), ct.int32)), eights)
        assert torch.equal(out.data, eights.reshape(4, 4).long() @ eights.reshape(4, 4).long())
        with pytest.raises(InterpreterError, match="accumulate"):
            observe(lambda t: ct.mma(t.reshape((4, 8)), t.reshape((8, 4)), ct.ones((4, 4), ct.bfloat16)), x)
