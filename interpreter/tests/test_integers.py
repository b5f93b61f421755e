"""Integers in the interpreter: overflow, casts and bits."""

import cuda.tile as ct
import pytest
import torch

from interpreter import InterpreterError, interpret
from interpreter.tests.helpers import NAN, Const, floats, ints, observe, values


class TestIntegers:
    def test_signed_overflow_is_an_error(self):
        big = ints(2**31 - 1, 0)
        for expression in (lambda x: x + 1, lambda x: x * 2, lambda x: -2 - x, lambda x: x << 1, lambda x: ct.sum(x + 0 * x + x // 1)):
            with pytest.raises(InterpreterError, match="overflows int32"):
                observe(expression, big)
        with pytest.raises(InterpreterError, match="overflows int64"):
            observe(lambda x: x + x, ints(2**62, 0, dtype=torch.int64))
        with pytest.raises(InterpreterError, match="overflows int64"):
            observe(lambda x: x * x, ints(2**32, 0, dtype=torch.int64))

    def test_an_index_that_overflows_is_found_where_it_happens(self):
        @ct.kernel
        def kernel(x, row: int, LENGTH: Const):
            ct.gather(x, row * LENGTH + ct.arange(4, dtype=ct.int32))

        with pytest.raises(InterpreterError, match=r"kernel kernel, block \(0,\): mul overflows int32: 6077440000"):
            interpret(kernel, (1,), (torch.zeros(4), 40_000, 151_936))

    def test_unsigned_wraps(self):
        x = torch.tensor([2**32 - 1, 1], dtype=torch.uint32)
        assert values(observe(lambda x: x + 1, x)) == [0, 2]
        assert values(observe(lambda x: x * x, x)) == [1, 1]
        assert values(observe(lambda x: ~x, x)) == [0, 2**32 - 2]
        assert values(observe(lambda x: x >> 31, x)) == [1, 0]
        wide = torch.tensor([2**64 - 1, 1], dtype=torch.uint64)
        assert values(observe(lambda x: x > 1, wide)) == [True, False]
        assert values(observe(lambda x: ct.astype(x + 1, ct.float32), wide)) == [0.0, 2.0]
        assert values(observe(lambda x: ct.max(x, 0) == x, wide)) == [True, False]

    def test_casts(self):
        assert values(observe(lambda x: ct.astype(x, ct.int32), floats(1.9, -1.9, 3e9, NAN))) == [1, -1, 2**31 - 1, -(2**31)]
        assert values(observe(lambda x: ct.astype(x, ct.bool_), ints(0, 5))) == [False, True]
        assert values(observe(lambda x: ct.astype(x, ct.uint8), ints(-1, 300))) == [255, 44]
        assert values(observe(lambda x: ct.astype(x, ct.int32), ints(-100, 7, dtype=torch.int64))) == [-100, 7]
        with pytest.raises(InterpreterError, match="overflows int32"):
            observe(lambda x: ct.astype(x, ct.int32), ints(2**31, 0, dtype=torch.int64))

    def test_bitcast(self):
        assert values(observe(lambda x: ct.bitcast(x, ct.uint32), floats(1.0, -0.0))) == [0x3F800000, 0x80000000]
        assert values(observe(lambda x: ct.bitcast(x, ct.float32), ints(0x40000000, 0))) == [2.0, 0.0]
        assert values(observe(ct.pack_to_bytes, ints(0x04030201))) == [1, 2, 3, 4]
        assert values(observe(lambda x: ct.unpack_from_bytes(x, ct.int32), ints(1, 2, 3, 4, dtype=torch.uint8))) == [0x04030201]

    def test_shifts_by_the_width_are_undefined(self):
        with pytest.raises(InterpreterError, match="by 32 bits"):
            observe(lambda x: x >> 32, ints(1, 2))
