"""Python in a kernel: loops, conditions, helpers, containers."""

from typing import Annotated

import cuda.tile as ct
import pytest
import torch

from interpreter import InterpreterError, interpret
from interpreter.tests.helpers import Const, floats, ints, observe, values


class TestPython:
    def test_range_over_runtime_values(self):
        @ct.kernel
        def kernel(x, y):
            total = ct.zeros((4,), ct.float32)
            for i in range(ct.bid(0), x.shape[0], ct.num_blocks(0)):
                total = total + ct.gather(x, (i, ct.arange(4, dtype=ct.int32)))
            ct.store(y, (ct.bid(0), 0), total[None, :])

        x = torch.randn(7, 4)
        y = torch.zeros(3, 4)
        interpret(kernel, (3,), (x, y))
        torch.testing.assert_close(y, torch.stack([x[i::3].sum(0) for i in range(3)]))

    def test_the_loop_variable_is_an_int32_scalar(self):
        """Not a Python number: with an int8 tile it gives int32."""
        seen = []

        @ct.kernel
        def kernel(x):
            for i in range(2):
                seen.append((ct.load(x, 0, 4) + i).dtype)
            for j in ct.static_iter(range(2)):
                seen.append((ct.load(x, 0, 4) + j).dtype)

        interpret(kernel, (1,), (torch.zeros(4, dtype=torch.int8),))
        assert seen == [ct.int32, ct.int32, ct.int8, ct.int8]

    def test_if_and_while_on_scalars(self):
        @ct.kernel
        def kernel(x, y):
            n = ct.gather(x, ct.bid(0))
            steps = ct.full((), 0, ct.int32)
            while n != 1:
                if n % 2 == 0:
                    n = n // 2
                else:
                    n = 3 * n + 1
                steps = steps + 1
            ct.scatter(y, ct.bid(0), steps)

        y = torch.zeros(4, dtype=torch.int32)
        interpret(kernel, (4,), (ints(1, 2, 6, 27), y))
        assert y.tolist() == [0, 1, 8, 111]

    def test_conditions_are_bool_scalars(self):
        @ct.kernel
        def kernel(n: int):
            if n:
                pass

        with pytest.raises(InterpreterError, match="0-d bool tile"):
            interpret(kernel, (1,), (3,))

    def test_min_max_and_helpers(self):
        def clamp(x, low, high):  # a plain function becomes a tile function where a kernel calls it
            return max(min(x, high), low)

        @ct.function
        def doubled(x):
            return clamp(x, 0.0, 2.0) * 2.0

        assert values(observe(lambda x: doubled(x), floats(-1.0, 0.5, 1.0, 9.0))) == [0.0, 1.0, 2.0, 4.0]

    def test_scalar_parameters(self):
        seen = []

        @ct.kernel
        def kernel(eps: float, n: int, wide: ct.ScalarInt64[int], flag, N: Const):
            seen.extend([eps, n, wide, flag, N])

        interpret(kernel, (1,), (0.1, 3, 2**40, True, 5))
        assert [x.dtype for x in seen[:4]] == [ct.float32, ct.int32, ct.int64, ct.bool_]
        assert seen[0].value() == torch.tensor(0.1).item() != 0.1
        assert type(seen[4]) is int
        with pytest.raises(InterpreterError, match="argument n: .* out of range of int32"):
            interpret(kernel, (1,), (0.1, 2**31, 0, True, 5))

    def test_array_sizes_are_runtime_values_unless_promised(self):
        seen = []

        @ct.kernel
        def kernel(x, y: Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(-1,))]):
            seen.append((x.shape, x.strides, y.shape, x.ndim, x.dtype))

        x = torch.zeros(4, 8)
        interpret(kernel, (1,), (x, x.clone()))
        shape, strides, static, ndim, dtype = seen[0]
        assert [n.value() for n in shape] == [4, 8] and shape[0].dtype is ct.int32
        assert [n.value() for n in strides] == [8, 1]
        assert not isinstance(static[0], int) and static[1] == 8
        assert (ndim, dtype) == (2, ct.float32)

    def test_shapes_are_powers_of_two_and_constant(self):
        with pytest.raises(InterpreterError, match="power of two"):
            observe(lambda x: ct.arange(3, dtype=ct.int32), ints(1, 2))
        with pytest.raises(InterpreterError, match="compile-time"):
            observe(lambda x: ct.zeros((ct.bid(0) + 1,), ct.float32), ints(1, 2))

    def test_static_checks(self):
        @ct.kernel
        def kernel(x, N: Const):
            ct.static_assert(x.dtype == ct.float32, "float32 only")
            ct.static_assert(ct.static_eval(N % 2 == 0), "even only")
            ct.assume_divisible_by(x.shape[0], 4)
            ct.assert_(ct.load(x, 0, 4) >= 0.0, "no negatives")

        interpret(kernel, (1,), (torch.zeros(8), 2))
        for args, what in (
            ((torch.zeros(8).half(), 2), "float32 only"),
            ((torch.zeros(8), 3), "even only"),
            ((torch.zeros(6), 2), "6 is not divisible by 4"),
            ((-torch.ones(8), 2), "no negatives"),
        ):
            with pytest.raises(InterpreterError, match=what):
                interpret(kernel, (1,), args)
        with pytest.raises(InterpreterError, match="compile-time"):
            observe(lambda x: ct.static_assert(ct.bid(0) == 0), ints(1))
        with pytest.raises(InterpreterError, match="compile-time constant"):
            observe(lambda x: ct.ensure_constant(ct.bid(0)), ints(1))

    def test_static_exception(self):
        def fail(x):
            raise ct.static_exception(ValueError("not this dtype"))

        with pytest.raises(InterpreterError, match="ValueError: not this dtype"):
            observe(fail, ints(1))

    def test_printing(self, capsys):
        @ct.kernel
        def kernel(x):
            ct.printf("%d\n", ct.bid(0))
            print(f"{ct.load(x, 0, 2):.1f}", ct.load(x, 0, 2) > 1)

        interpret(kernel, (1,), (floats(1, 2),))
        assert capsys.readouterr().out == "0\n[1.0, 2.0] [0, 1]\n"

    def test_what_is_not_implemented_says_so(self):
        with pytest.raises(InterpreterError, match="ct.mma_scaled is not implemented"):
            observe(lambda x: ct.mma_scaled(x, x, x, x, x), ints(1))
