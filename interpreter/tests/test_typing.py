"""The typing rules of the interpreter, which are those of the compiler."""

import io

import cuda.tile as ct
import pytest
import torch
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, export_kernel

from interpreter import InterpreterError, interpret
from interpreter.tests.helpers import ANY_ARRAY, INF, NAN, floats, import_source, ints, observe, values


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


def typed_cases():
    for expression in TYPED_EXPRESSIONS:
        for a in TYPED_DTYPES:
            for b in TYPED_DTYPES if "b" in expression.replace("abs", "") else [a]:
                yield expression, a, b


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
