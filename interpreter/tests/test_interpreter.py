"""The tile interpreter itself: what it computes, what it refuses, and that its typing rules are those of the compiler.

The kernels here are small on purpose: each shows one rule.
"""

import importlib.util
import io
import math
from typing import Annotated

import cuda.tile as ct
import pytest
import torch
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, ScalarConstraint, export_kernel

from interpreter import InterpreterError, interpret
from interpreter.backend import tensor_at

Const = ct.Constant[int]
NAN, INF = math.nan, math.inf


def observe(expression, *inputs):
    """The tile that `expression` makes of tiles with the values of `inputs`, 1-d tensors of one power-of-two size."""
    size = inputs[0].numel()
    seen = []

    def record(tile):
        seen.append(tile)

    @ct.kernel
    def of_one(a):
        record(expression(ct.load(a, 0, size)))

    @ct.kernel
    def of_two(a, b):
        record(expression(ct.load(a, 0, size), ct.load(b, 0, size)))

    interpret((of_one, of_two)[len(inputs) - 1], (1,), inputs)
    return seen[0]


def values(tile):
    return tile.data.tolist()


def ints(*xs, dtype=torch.int32):
    return torch.tensor(xs, dtype=dtype)


def floats(*xs, dtype=torch.float32):
    return torch.tensor(xs, dtype=dtype)


# ---------------------------------------------------------------- dtypes
class TestPromotion:
    @pytest.mark.parametrize(
        "a, b, dtype",
        [
            (torch.bfloat16, torch.float32, ct.float32),
            (torch.float16, torch.float32, ct.float32),
            (torch.int32, torch.bfloat16, ct.bfloat16),
            (torch.int64, torch.float16, ct.float16),
            (torch.int32, torch.int64, ct.int64),
            (torch.int8, torch.int32, ct.int32),
            (torch.bool, torch.int32, ct.int32),
            (torch.uint8, torch.uint32, ct.uint32),
        ],
    )
    def test_tile_with_tile(self, a, b, dtype):
        one = torch.ones(4)
        assert observe(lambda x, y: x + y, one.to(a), one.to(b)).dtype is dtype

    @pytest.mark.parametrize("a, b", [(torch.float16, torch.bfloat16), (torch.int32, torch.uint32)])
    def test_dtypes_without_a_common_one(self, a, b):
        with pytest.raises(InterpreterError, match="Implicit promotion"):
            observe(lambda x, y: x + y, torch.ones(4).to(a), torch.ones(4).to(b))

    def test_a_python_number_takes_the_tile_s_dtype(self):
        x = floats(1, 2, dtype=torch.bfloat16)
        assert observe(lambda x: x * 1.1, x).dtype is ct.bfloat16
        assert observe(lambda x: x + 3, x).dtype is ct.bfloat16
        assert observe(lambda x: x + 1, ints(1, 2, dtype=torch.int8)).dtype is ct.int8
        assert observe(lambda x: x * 2.5, ints(1, 2)).dtype is ct.float32
        with pytest.raises(InterpreterError, match="out of range"):
            observe(lambda x: x + 1000, ints(1, 2, dtype=torch.int8))

    def test_a_runtime_scalar_does_not(self):
        """A float parameter is a float32 value: bf16 * float32 is float32, where bf16 * 1.5 is bf16."""
        seen = []

        @ct.kernel
        def kernel(x, scale: float):
            seen.append((ct.load(x, 0, 4) * scale).dtype)

        interpret(kernel, (1,), (torch.ones(4).bfloat16(), 1.5))
        assert seen == [ct.float32]

    def test_division(self):
        a, b = ints(7, -7), ints(2, 2)
        assert observe(lambda x, y: x / y, a, b).dtype is ct.float32
        assert values(observe(lambda x, y: x / y, a, b)) == [3.5, -3.5]
        assert values(observe(lambda x, y: x // y, a, b)) == [3, -4]
        assert values(observe(lambda x, y: x % y, a, b)) == [1, 1]
        assert values(observe(lambda x, y: ct.cdiv(x, y), a, b)) == [4, -3]
        assert values(observe(lambda x: x // 2.0, floats(5.5, -5.5))) == [2.0, -3.0]
        with pytest.raises(InterpreterError, match="division by zero"):
            observe(lambda x, y: x // y, a, ints(1, 0))

    def test_every_operation_rounds_to_the_tile_s_dtype(self):
        x = torch.randn(256).bfloat16()
        y = torch.randn(256).bfloat16()
        wanted = ((x * y).bfloat16() + x).bfloat16()
        assert torch.equal(observe(lambda x, y: x * y + x, x, y).data, wanted)
        assert observe(lambda x: x * 1.1, x).data.equal(x * torch.tensor(1.1).bfloat16())

    def test_sum_rounds_each_partial_sum(self):
        t = 2.0**-9
        x = floats(1, t, t, t, dtype=torch.bfloat16)
        assert values(observe(lambda x: ct.sum(x, 0), x)) == 1.0  # 1 + t and 1 + 2 * t both round back to 1
        assert values(observe(lambda x: ct.sum(ct.astype(x, ct.float32), 0), x)) == 1.0 + 3 * t

    def test_comparisons_are_bool_and_bits_need_one_dtype(self):
        assert observe(lambda x: x < 2, floats(1, 2)).dtype is ct.bool_
        assert values(observe(lambda x: x != x, floats(1, NAN))) == [False, True]
        assert values(observe(lambda x, y: (x < y) & (x > 0), ints(1, -1), ints(2, 2))) == [True, False]
        with pytest.raises(InterpreterError, match="one dtype"):
            observe(lambda x, y: x & y, ints(1, 2), ints(1, 2, dtype=torch.int64))
        with pytest.raises(InterpreterError, match="bool"):
            observe(lambda x: x + x, torch.ones(4, dtype=torch.bool))

    def test_where(self):
        x = ints(1, 2)
        assert observe(lambda x: ct.where(x == 1, 1.0, 0.0), x).dtype is ct.float32
        assert observe(lambda x: ct.where(x == 1, x, 0.5), x).dtype is ct.float32
        half = floats(1, 2, dtype=torch.bfloat16)
        assert observe(lambda x: ct.where(x == 1, x, -INF), half).dtype is ct.bfloat16

    def test_stores_only_widen(self):
        @ct.kernel
        def kernel(x, y):
            ct.store(y, 0, ct.load(x, 0, 4))

        y = torch.zeros(4)
        interpret(kernel, (1,), (torch.ones(4).bfloat16(), y))
        assert y.tolist() == [1] * 4
        with pytest.raises(InterpreterError, match="cannot implicitly cast float32 to bfloat16"):
            interpret(kernel, (1,), (torch.ones(4), torch.zeros(4).bfloat16()))


TYPED_EXPRESSIONS = [
    "a + b", "a / b", "a // b", "a % b", "a < b", "a & b", "a << b", "ct.maximum(a, b)", "ct.where(a > 0, a, b)",
    "-a", "abs(a)", "ct.exp(a)", "ct.rsqrt(a)", "ct.floor(a)", "ct.isnan(a)", "~a", "a + 3", "a + 1000", "a * 2.5", "a / 2",
    "3 / a", "a // 2", "a == 1", "a & 1", "ct.where(a > 0, 1.0, 0.0)", "ct.where(a > 0, a, 0.0)", "ct.sum(a, 0)",
    "ct.max(a, 0)", "ct.prod(a)", "ct.cumsum(a, 0)", "ct.argmax(a, 0)", "min(a, 1)", "ct.matmul(a, a)", "a ** 2.0",
    "ct.reduce(a, 0, lambda p, q: p + q, 0)", "ct.cdiv(a, 2)",
]  # fmt: skip
TYPED_DTYPES = ["bool_", "int32", "int64", "uint32", "float16", "bfloat16", "float32"]
ANY_ARRAY = {"index_dtype": ct.int32, "stride_lower_bound_incl": 0, "alias_groups": (), "may_alias_internally": False}


def typed_cases():
    for expression in TYPED_EXPRESSIONS:
        for a in TYPED_DTYPES:
            for b in TYPED_DTYPES if "b" in expression.replace("abs", "") else [a]:
                yield expression, a, b


def import_source(source, path):
    """The compiler reads a kernel's source from its file."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_compiler_infers_the_same_dtypes(tmp_path):
    """Every expression that the interpreter accepts has, for the compiler, the dtype that the interpreter found."""
    head = "import cuda.tile as ct\nseen = []\ndef record(v):\n    seen.append(v)\n\n"
    checks = []
    for i, (expression, a, b) in enumerate(typed_cases()):
        lines = f"    a = ct.full((4,), ct.gather(n, 0), ct.{a})\n    b = ct.full((4,), ct.gather(n, 0), ct.{b})\n    r = {expression}\n"
        checks.append((f"k{i}", lines))
    ours = import_source(head + "".join(f"@ct.kernel\ndef {k}(n):\n{lines}    record(r)\n\n" for k, lines in checks), tmp_path / "ours.py")
    accepted = []
    for name, lines in checks:
        ours.seen.clear()
        try:
            interpret(getattr(ours, name), (1,), (torch.ones(1),))
        except InterpreterError:
            continue
        accepted.append(f"{lines}    ct.static_assert(r.dtype == ct.{ours.seen[0].dtype}, f'{{r}} of {name}')\n")
    assert len(accepted) > 300

    signature = KernelSignature([ArrayConstraint(ct.float32, 1, **ANY_ARRAY)], CallingConvention.cutile_python_v2(), symbol="k")
    for i in range(0, len(accepted), 50):
        source = "import cuda.tile as ct\n\n@ct.kernel\ndef k(n):\n" + "".join(accepted[i : i + 50])
        theirs = import_source(source, tmp_path / f"theirs{i}.py")
        export_kernel(theirs.k, [signature], io.BytesIO(), gpu_code="sm_90", output_format="tileir_bytecode", bytecode_version="13.4")


# ---------------------------------------------------------------- integers
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


# ---------------------------------------------------------------- Python in a kernel
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


# ---------------------------------------------------------------- operations
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


# ---------------------------------------------------------------- reading and writing
@ct.kernel
def copy_tiles(x, y, ROWS: Const, COLS: Const):
    tile = ct.load(x, (ct.bid(0), ct.bid(1)), (ROWS, COLS), padding_mode=ct.PaddingMode.ZERO)
    ct.store(y, (ct.bid(0), ct.bid(1)), tile)


@ct.kernel
def copy_checked(x, y, SIZE: Const):
    i = ct.bid(0) * SIZE + ct.arange(SIZE, dtype=ct.int32)
    ct.scatter(y, i, ct.gather(x, i))


@ct.kernel
def copy_unchecked(x, y, SIZE: Const):
    i = ct.bid(0) * SIZE + ct.arange(SIZE, dtype=ct.int32)
    ct.scatter(y, i, ct.gather(x, i, check_bounds=False), check_bounds=False)


class TestMemory:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.uint16, torch.bool])
    def test_dtypes_survive_a_copy(self, dtype):
        x = torch.randint(0, 100, (16,)).to(dtype)
        y = torch.zeros(16, dtype=dtype)
        interpret(copy_checked, (4,), (x, y, 4))
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))

    def test_tails(self):
        x = torch.randn(5, 7)
        y = torch.full((5, 7), NAN)
        interpret(copy_tiles, (3, 2), (x, y, 2, 4))
        assert torch.equal(x, y)

    def test_any_strides(self):
        x = torch.randn(7, 2, 5).transpose(0, 2)[:, 1]
        y = torch.full((7, 5), NAN).T
        interpret(copy_tiles, (3, 2), (x, y, 2, 4))
        assert torch.equal(x, y)

    @pytest.mark.parametrize("mode, wanted", [("ZERO", 0.0), ("NEG_INF", -INF), ("UNDETERMINED", NAN)])
    def test_padding(self, mode, wanted):
        seen = []

        @ct.kernel
        def kernel(x):
            seen.append(ct.load(x, 1, 4, padding_mode=ct.PaddingMode[mode]))

        interpret(kernel, (1,), (torch.ones(6),))
        torch.testing.assert_close(seen[0].data, floats(1, 1, wanted, wanted), equal_nan=True)

    def test_undetermined_integers_are_poison(self):
        seen = []

        @ct.kernel
        def kernel(x):
            seen.append(ct.load(x, 0, 4))

        interpret(kernel, (1,), (ints(1, 2, 3),))
        assert values(seen[0]) == [1, 2, 3, -(2**31)]

    def test_order(self):
        seen = []

        @ct.kernel
        def kernel(x):
            seen.append(ct.load(x, (1, 0), (2, 4), order="F"))
            seen.append(ct.num_tiles(x, 0, (2, 4), order=(1, 0)))

        x = torch.arange(32.0).reshape(4, 8)
        interpret(kernel, (1,), (x,))
        assert torch.equal(seen[0].data, x.T[2:4, 0:4])
        assert seen[1].value() == 4

    def test_gather_broadcasts_and_masks(self):
        seen = []

        @ct.kernel
        def kernel(x):
            rows, cols = ct.arange(2, dtype=ct.int32), ct.arange(4, dtype=ct.int32)
            seen.append(ct.gather(x, (rows[:, None], cols[None, :])))
            seen.append(ct.gather(x, (1, cols - 1), padding_value=-1))
            seen.append(ct.gather(x, (rows + 2, 0), padding_value=7.0))
            seen.append(ct.gather(x, (0, cols), mask=cols < 2, padding_value=9, check_bounds=False))

        x = torch.arange(12.0).reshape(3, 4)
        interpret(kernel, (1,), (x,))
        assert torch.equal(seen[0].data, x[:2])
        assert values(seen[1]) == [-1, 4, 5, 6]
        assert values(seen[2]) == [8, 7]
        assert values(seen[3]) == [0, 1, 9, 9]

    def test_scatter_broadcasts_its_value(self):
        @ct.kernel
        def kernel(y):
            rows, cols = ct.arange(4, dtype=ct.int32), ct.arange(2, dtype=ct.int32)
            ct.scatter(y, (rows[:, None], cols), cols + 1, mask=(rows != 1)[:, None])

        y = torch.zeros(3, 2, dtype=torch.int32)
        interpret(kernel, (1,), (y,))
        assert y.tolist() == [[1, 2], [0, 0], [1, 2]]

    def test_views(self):
        @ct.kernel
        def kernel(x, y):
            part = x.slice(axis=1, start=ct.bid(0) + 1, stop=x.shape[1])
            view = part.tiled_view((2, 2), padding_mode=ct.PaddingMode.ZERO)
            total = ct.zeros((2, 2), ct.float32)
            for i in range(view.num_tiles(1)):
                total = total + view.load((0, i))
            y.tiled_view((2, 2)).store((0, 0), total)

        x, y = torch.arange(12.0).reshape(2, 6), torch.zeros(2, 2)
        interpret(kernel, (1,), (x, y))
        assert y.tolist() == [[1 + 3 + 5, 2 + 4], [7 + 9 + 11, 8 + 10]]

    def test_overlapping_view_and_raw_memory(self):
        seen = []

        @ct.kernel
        def kernel(x):
            seen.append(x.tiled_view(4, traversal_steps=2).load(1))
            raw = x.get_raw_memory()
            seen.append(raw.load_offset(ct.arange(4, dtype=ct.int32) * 2, mask=ct.arange(4, dtype=ct.int32) < 3))
            raw.store_offset(7, 70)

        x = torch.arange(8, dtype=torch.int32)
        interpret(kernel, (1,), (x,))
        assert values(seen[0]) == [2, 3, 4, 5]
        assert values(seen[1]) == [0, 2, 4, 0]
        assert x[7] == 70

    def test_advanced_indexing(self):
        @ct.kernel
        def kernel(x, rows, y):
            tile = ct.load_advanced_indexing(x, (ct.load(rows, 0, 2), ct.Slice(2, 4)), padding_mode=ct.PaddingMode.ZERO)
            ct.store_advanced_indexing(y, (ct.arange(2, dtype=ct.int32), ct.Slice(0, 4)), tile)

        x, y = torch.arange(20.0).reshape(4, 5), torch.zeros(2, 4)
        interpret(kernel, (1,), (x, ints(3, 1), y))
        assert y.tolist() == [[17, 18, 19, 0], [7, 8, 9, 0]]

    def test_a_list_of_arrays(self):
        @ct.kernel
        def kernel(xs, y):
            total = ct.zeros((4,), ct.float32)
            for i in range(len(xs)):
                total = total + ct.load(xs[i], 0, 4)
            ct.store(y, 0, total)

        y = torch.zeros(4)
        interpret(kernel, (1,), ([torch.ones(4), torch.ones(4) * 2], y))
        assert y.tolist() == [3] * 4

    def test_0d_arrays(self):
        @ct.kernel
        def kernel(x, y):
            ct.scatter(y, (), ct.gather(x, ()) * 2)

        y = torch.zeros(())
        interpret(kernel, (1,), (torch.tensor(4.0), y))
        assert y == 8


class TestBounds:
    def test_unchecked_access(self):
        with pytest.raises(InterpreterError, match=r"kernel copy_unchecked, block \(2,\): x\[10\] is out of bounds for shape \(10,\)"):
            interpret(copy_unchecked, (3,), (torch.zeros(10), torch.zeros(12), 4))
        with pytest.raises(InterpreterError, match=r"y\[10\] is out of bounds"):
            interpret(copy_unchecked, (3,), (torch.zeros(12), torch.zeros(10), 4))

    def test_inside_the_storage_but_outside_the_array(self):
        whole = torch.zeros(2, 16)
        with pytest.raises(InterpreterError, match=r"x\[5\] is out of bounds"):
            interpret(copy_unchecked, (2,), (whole[0, :5], torch.zeros(8), 4))

    def test_negative_indices_are_outside(self):
        @ct.kernel
        def kernel(x):
            ct.gather(x, ct.arange(4, dtype=ct.int32) - 1, check_bounds=False)

        with pytest.raises(InterpreterError, match=r"x\[-1\] is out of bounds"):
            interpret(kernel, (1,), (torch.zeros(4),))

    def test_a_mask_keeps_an_unchecked_access_inside(self):
        @ct.kernel
        def kernel(x, LIMIT: Const):
            i = ct.arange(8, dtype=ct.int32)
            ct.gather(x, i, mask=i < LIMIT, check_bounds=False)

        interpret(kernel, (1,), (torch.zeros(5), 5))
        with pytest.raises(InterpreterError, match=r"x\[5\]"):
            interpret(kernel, (1,), (torch.zeros(5), 6))

    def test_unchecked_tile(self):
        @ct.kernel
        def kernel(x):
            ct.load(x, (0, 1), (2, 4), check_bounds=False)

        interpret(kernel, (1,), (torch.zeros(2, 8),))
        with pytest.raises(InterpreterError, match=r"leaves \(check_bounds=False\) x of shape \(2, 7\): indices 4 to 7 in dimension 1"):
            interpret(kernel, (1,), (torch.zeros(2, 7),))

    def test_a_tile_entirely_outside_is_undefined_even_when_checked(self):
        with pytest.raises(InterpreterError, match="lies entirely outside x"):
            interpret(copy_tiles, (1, 3), (torch.zeros(2, 8), torch.zeros(2, 8), 2, 4))

    def test_slices_stay_inside(self):
        @ct.kernel
        def kernel(x, stop: int):
            x.slice(0, 2, stop)

        interpret(kernel, (1,), (torch.zeros(4), 4))
        with pytest.raises(InterpreterError, match="slice 2:5 leaves dimension 0 of x"):
            interpret(kernel, (1,), (torch.zeros(4), 5))


# ---------------------------------------------------------------- blocks among each other
class TestRaces:
    def test_two_blocks_write_different_values(self):
        @ct.kernel
        def kernel(y):
            ct.scatter(y, 0, ct.bid(0))

        with pytest.raises(InterpreterError, match=r"block \(1,\): race: another block wrote y\[0\], which this block writes"):
            interpret(kernel, (2,), (torch.zeros(1, dtype=torch.int32),))
        interpret(kernel, (2,), (torch.zeros(1, dtype=torch.int32),), races=False)

    def test_the_same_value_is_no_race(self):
        @ct.kernel
        def kernel(y):
            ct.scatter(y, ct.minimum(ct.bid(0) * 2 + ct.arange(2, dtype=ct.int32), 2), 5.0)

        y = torch.zeros(3)
        interpret(kernel, (3,), (y,))
        assert y.tolist() == [5] * 3

    def test_the_same_value_and_then_another(self):
        @ct.kernel
        def kernel(y):
            ct.scatter(y, 0, 5.0)
            if ct.bid(0) == 1:
                ct.scatter(y, 0, 6.0)

        with pytest.raises(InterpreterError, match="race"):
            interpret(kernel, (2,), (torch.zeros(1),))

    @pytest.mark.parametrize("order", ["forward", "reverse", "random"])
    def test_reading_what_another_block_writes(self, order):
        """Found in every order, whichever of the two blocks comes first."""

        @ct.kernel
        def shift(x):
            ct.scatter(x, ct.bid(0) + 1, ct.gather(x, ct.bid(0)))

        with pytest.raises(InterpreterError, match="race: another block (wrote|read)"):
            interpret(shift, (4,), (torch.arange(5.0),), order=order)

    def test_a_race_between_arguments_whose_storages_start_at_different_addresses(self, monkeypatch):
        """Where they may share memory, and each block reads what the one before it writes."""
        monkeypatch.setattr("interpreter.launch.overlap", lambda a, b: False)

        @ct.kernel
        def shift(x, y):
            ct.scatter(y, ct.bid(0), ct.gather(x, ct.bid(0)))

        whole = torch.arange(6.0)
        x, y = (tensor_at(whole.data_ptr() + 4 * first, torch.float32, (5,), (1,)) for first in (0, 1))
        with pytest.raises(InterpreterError, match="race: another block (wrote|read)"):
            interpret(shift, (5,), (x, y))

    def test_in_place_is_no_race(self):
        @ct.kernel
        def double(x):
            i = ct.bid(0) * 4 + ct.arange(4, dtype=ct.int32)
            ct.scatter(x, i, ct.gather(x, i) * 2)
            ct.scatter(x, i, ct.gather(x, i) + 1)

        x = torch.arange(10.0)
        interpret(double, (3,), (x,))
        assert torch.equal(x, torch.arange(10.0) * 2 + 1)
        with pytest.raises(InterpreterError, match=r"block \(0,\): this block reads x\[0\], which it wrote itself and has not released"):
            interpret(double, (3,), (x,), read_back=False)

    def test_one_store_with_two_values_for_one_place(self):
        @ct.kernel
        def kernel(y):
            ct.scatter(y, ct.arange(4, dtype=ct.int32) // 2, ct.arange(4, dtype=ct.int32))

        with pytest.raises(InterpreterError, match=r"two different values to y\[0\]"):
            interpret(kernel, (1,), (torch.zeros(2, dtype=torch.int32),))

    @pytest.mark.parametrize("order", ["forward", "reverse", "random"])
    def test_results_in_every_order(self, order):
        x, y = torch.randn(6, 8), torch.full((6, 8), NAN)
        interpret(copy_tiles, (3, 2), (x, y, 2, 4), order=order)
        assert torch.equal(x, y)

    def test_atomics(self):
        @ct.kernel
        def histogram(x, counts, most):
            i = ct.bid(0) * 4 + ct.arange(4, dtype=ct.int32)
            v = ct.gather(x, i, padding_value=-1)
            ct.atomic_add(counts, v, 1)  # the padding lies outside, where nothing happens
            ct.atomic_max(most, 0, ct.max(v, 0))

        x = torch.randint(0, 5, (19,), dtype=torch.int32)
        counts, most = torch.zeros(5, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        interpret(histogram, (5,), (x, counts, most))
        assert torch.equal(counts, torch.bincount(x, minlength=5).int())
        assert most[0] == x.max()

    def test_atomics_return_what_was_there(self):
        seen = []

        @ct.kernel
        def kernel(x):
            i = ct.arange(4, dtype=ct.int32)
            seen.append(ct.atomic_add(x, i // 2, i + 1))
            seen.append(ct.atomic_xchg(x, 0, 9))
            seen.append(ct.atomic_cas(x, i, ct.full((4,), 9, ct.int32), 0))
            x.tiled_view(2).atomic_store_add(0, ct.ones((2,), ct.int32))

        x = torch.zeros(2, dtype=torch.int32)
        interpret(kernel, (1,), (x,))
        assert values(seen[0]) == [0, 1, 0, 3]
        assert values(seen[1]) == 3
        assert values(seen[2]) == [9, 7, 9, 9]
        assert x.tolist() == [1, 8]

    def test_a_plain_read_of_an_atomic_is_a_race(self):
        @ct.kernel
        def kernel(x, y):
            ct.atomic_add(x, 0, 1, memory_order=ct.MemoryOrder.RELAXED)
            ct.scatter(y, ct.bid(0), ct.gather(x, 0))

        with pytest.raises(InterpreterError, match=r"race: another block read x\[0\], which this block writes"):
            interpret(kernel, (2,), (torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)))

    @pytest.mark.parametrize("order", ["forward", "reverse", "random"])
    def test_the_last_block_may_read_what_the_others_released(self, order):
        x, part, count, total = torch.randn(32), torch.zeros(8), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        interpret(last_block_sums, (8,), (x, part, count, total, 1), order=order, read_back=False)
        torch.testing.assert_close(total[0], x.sum())

    def test_without_the_release_it_is_a_race(self):
        x, part, count, total = torch.randn(32), torch.zeros(8), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        with pytest.raises(InterpreterError, match="race: another block wrote part"):
            interpret(last_block_sums, (8,), (x, part, count, total, 0))

    def test_a_block_that_waits_for_a_later_one(self, monkeypatch):
        monkeypatch.setattr("interpreter.memory.ATOMICS_A_BLOCK", 50)

        @ct.kernel
        def kernel(flag):
            while ct.atomic_cas(flag, 0, 1, 1) == 0:
                pass

        with pytest.raises(InterpreterError, match="wait"):
            interpret(kernel, (1,), (torch.zeros(1, dtype=torch.int32),))


@ct.kernel
def last_block_sums(x, part, count, total, RELEASE: Const):
    block = ct.bid(0)
    ct.scatter(part, block, ct.sum(ct.load(x, block, 4)))
    order = ct.MemoryOrder.ACQ_REL if RELEASE else ct.MemoryOrder.ACQUIRE
    if ct.atomic_add(count, 0, 1, memory_order=order) == ct.num_blocks(0) - 1:
        ct.scatter(total, 0, ct.sum(ct.load(part, 0, 8)))


# ---------------------------------------------------------------- arguments
class TestArguments:
    def test_aliases(self):
        x = torch.zeros(8)
        with pytest.raises(InterpreterError, match="y is written and shares memory with x"):
            interpret(copy_checked, (2,), (x, x, 4))
        with pytest.raises(InterpreterError, match="shares memory"):
            interpret(copy_checked, (1,), (x[:5], x[3:], 4))

    @pytest.mark.parametrize("start", [0, 1, 3, 4])
    def test_aliases_whose_storages_start_at_different_addresses(self, start):
        """Has what the runtime's arguments have, which the interpreter makes of addresses."""
        whole = torch.zeros(16)
        x, y = (tensor_at(whole.data_ptr() + 4 * first, torch.float32, (8,), (1,)) for first in (start, 5))
        with pytest.raises(InterpreterError, match="y is written and shares memory with x"):
            interpret(copy_checked, (2,), (x, y, 4))
        apart = tensor_at(whole.data_ptr() + 32, torch.float32, (8,), (1,))
        interpret(copy_checked, (2,), (tensor_at(whole.data_ptr(), torch.float32, (8,), (1,)), apart, 4))

    def test_arrays_that_interleave_share_nothing(self):
        whole = torch.arange(32.0)
        x, y = (tensor_at(whole.data_ptr() + 4 * first, torch.float32, (4, 4), (8, 1)) for first in (0, 4))
        interpret(copy_tiles, (2, 1), (x, y, 2, 4))
        assert torch.equal(x, y)

    def test_views_of_one_tensor_that_do_not_meet(self):
        whole = torch.randn(4, 8)
        gate, up = whole[:, :4], whole[:, 4:]
        interpret(copy_tiles, (2, 1), (gate, up, 2, 4))
        assert torch.equal(gate, up)

    def test_two_inputs_may_be_one_tensor(self):
        @ct.kernel
        def add(a, b, y):
            ct.store(y, 0, ct.load(a, 0, 4) + ct.load(b, 0, 4))

        x, y = torch.ones(4), torch.zeros(4)
        interpret(add, (1,), (x, x, y))
        assert y.tolist() == [2] * 4

    def test_refused(self):
        y = torch.zeros(4)
        for x, what in (
            (None, "x is None"),
            (torch.zeros(4, requires_grad=True), "x requires grad"),
            (torch.zeros(4, dtype=torch.complex64), "not implemented"),
            ("text", "type str"),
        ):
            with pytest.raises(InterpreterError, match=what):
                interpret(copy_checked, (1,), (x, y, 4))
        with pytest.raises(InterpreterError, match="expected 3 arguments"):
            interpret(copy_checked, (1,), (y, y))
        for grid in ((0,), (2**24,), (1, 2**16), (1, 1, 2**16)):
            with pytest.raises(InterpreterError, match="the grid must be"):
                interpret(copy_checked, grid, (y, y.clone(), 4))

    def test_string_annotations(self, tmp_path):
        source = "from __future__ import annotations\nimport cuda.tile as ct\n\n@ct.kernel\ndef kernel(N: ct.Constant[int]):\n    pass\n"
        with pytest.raises(InterpreterError, match="annotations are strings"):
            interpret(import_source(source, tmp_path / "late.py").kernel, (1,), (4,))


def signature(*constraints):
    return KernelSignature(constraints, CallingConvention.cutile_python_v2(), symbol="kernel")


class TestSignature:
    """copy_tiles(x, y, ROWS, COLS) with promises about x."""

    def launch(self, x, **promises):
        loose = ArrayConstraint(ct.float32, 2, **ANY_ARRAY)
        promised = ArrayConstraint(**{"dtype": ct.float32, "ndim": 2, **ANY_ARRAY, **promises})
        y = torch.zeros(x.shape)
        interpret(copy_tiles, (1, 1), (x, y, 2, 4), signature=signature(promised, loose, 2, 4))

    def test_kept(self):
        self.launch(
            torch.zeros(2, 8)[:, :4], stride_constant=(None, 1), stride_divisible_by=(8, 1), shape_divisible_by=(2, 4),
            shape_constant=(2, None), base_addr_divisible_by=16,
        )  # fmt: skip

    @pytest.mark.parametrize(
        "x, promises, what",
        [
            (torch.zeros(2, 4).half(), {}, "dtype float32"),
            (torch.zeros(2, 4, 1), {}, "2 dimensions"),
            (torch.zeros(9)[1:].view(2, 4), {"base_addr_divisible_by": 16}, "an address divisible by 16 bytes"),
            (torch.zeros(4, 2).T, {"stride_constant": (None, 1)}, "stride 1 in dimension 1"),
            (torch.zeros(2, 5)[:, :4], {"stride_divisible_by": (4, 1)}, "stride of dimension 0 divisible by 4, got 5"),
            (torch.zeros(2, 4), {"stride_lower_bound_incl": (8, 0)}, "stride of at least 8 in dimension 0"),
            (torch.zeros(3, 4), {"shape_constant": (2, None)}, "size 2 in dimension 0, got 3"),
            (torch.zeros(2, 6), {"shape_divisible_by": (1, 4)}, "size of dimension 1 divisible by 4"),
            (torch.zeros(1, 4).expand(2, 4), {}, "no two indices at one address"),
        ],
    )
    def test_broken(self, x, promises, what):
        with pytest.raises(InterpreterError, match=f"kernel copy_tiles: argument x breaks its signature: {what}"):
            self.launch(x, **promises)

    def test_constants_and_scalars(self):
        @ct.kernel
        def kernel(n, eps, SIZE: Const):
            ct.static_assert(n.dtype == ct.int64)

        promised = signature(ScalarConstraint(ct.int64), ScalarConstraint(ct.float32), 4)
        interpret(kernel, (1,), (2**40, 1e-6, 4), signature=promised)
        for args, what in (((1, 1e-6, 8), "SIZE breaks its signature: constant 4"), ((0.5, 1e-6, 4), "n breaks .* a scalar of int64")):
            with pytest.raises(InterpreterError, match=what):
                interpret(kernel, (1,), args, signature=promised)

    def test_constant_sizes_are_constants_in_the_kernel(self):
        @ct.kernel
        def kernel(x):
            ct.static_assert(x.shape[1] == 4)
            ct.zeros((x.shape[1],), ct.float32)

        constraint = ArrayConstraint(ct.float32, 2, **ANY_ARRAY, shape_constant=(None, 4))
        interpret(kernel, (1,), (torch.zeros(2, 4),), signature=signature(constraint))
        with pytest.raises(InterpreterError, match="compile-time"):
            interpret(kernel, (1,), (torch.zeros(2, 4),))

    def test_alias_groups(self):
        grouped = ArrayConstraint(ct.float32, 1, **{**ANY_ARRAY, "alias_groups": ("same",)})
        x = torch.zeros(8)
        interpret(copy_checked, (2,), (x, x, 4), signature=signature(grouped, grouped, 4))


# ---------------------------------------------------------------- whole kernels
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
