"""The sum of a weight gradient's parts."""

import importlib

from tests.ops.common import CPU, FP32, errors_in, randn
from tests.ops.generated import generated
from tests.tolerances import assert_close


def check_column_sum(ops):
    """More rows than a block takes in one step, columns that fill no tile; then other rows."""
    arrays = importlib.import_module(f"{ops.__name__}.shared.ops.arrays")
    for rows in (600, 3):
        partial = randn(rows, 37, dtype=FP32, device=CPU)
        assert_close(arrays.column_sum(partial, FP32), partial.double().sum(0), FP32, f"column sum of {rows} rows")


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "column_sum": check_column_sum,
}
MUTANTS = [
    *generated("kernel_src/column_sum.py", "column_sum", "sum_columns"),
    *errors_in("kernel_src/column_sum.py", "column_sum", "sum_columns",
         ("out.dtype), check_bounds=True", "out.dtype), check_bounds=False")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
GPU_TESTS = {"column_sum": ("test_ops.py::test_rms_norm", "test_operation[layer_norm")}
