"""What lies below every operation: the key of a launch, copies, slabs, and rows beyond the grid."""

import importlib

import torch

from tests.ops.adamw import check_adamw_in_slabs, check_that_slabs_are_launches
from tests.ops.common import BF16, CPU, FP32, errors_in, leaf, on_cpu, randn, runtime_of
from tests.ops.generated import generated
from tests.ops.layouts import misaligned
from tests.ops.rms_norm import check_norm_in_parts, rms_norm_exact
from tests.ops.swiglu import check_swiglu
from tests.tolerances import assert_close


def check_elementwise_shapes(ops):
    """Tensors that differ are refused before anything is launched."""
    kernel = importlib.import_module(f"{ops.__name__}.shared.ops.swiglu")._forward_kernel
    for other in (torch.zeros(2, 512), torch.zeros(4, 512, dtype=BF16)):
        try:
            kernel(torch.zeros(4, 512), other, torch.zeros(4, 512))
        except ValueError:
            continue
        raise AssertionError("tensors of two shapes or dtypes were launched on")


def check_launch_keys(ops):
    """Calls that differ from the one before in a single thing that a launch follows from."""
    weight = randn(1024, dtype=FP32, device=CPU, seed=1)

    def check(x, eps=1e-6):
        w = weight.to(x.dtype)
        assert_close(ops.rms_norm(x, w, eps), rms_norm_exact(x.double(), w.double(), eps), x.dtype)

    x = randn(6, 1024, dtype=FP32, device=CPU)
    wide = randn(6, 2048, dtype=FP32, device=CPU, seed=2)
    odd = torch.empty(6 * 1024 + 8)[1 + (-x.data_ptr() % 16) // 4 :][: 6 * 1024].view(6, 1024)
    columns = randn(1024, 6, dtype=FP32, device=CPU, seed=4)
    for _ in range(4):  # prepared, recorded, replayed, and replayed after the others were
        for case in (x.bfloat16(), x.half(), x[:4], x, wide[:, :1024], wide[:, 1024:], odd.copy_(x), columns.t(), -columns.t()):
            check(case)
        check(x, 0.5)
    hidden, head, target = randn(5, 64, dtype=FP32, device=CPU), randn(9, 64, dtype=FP32, device=CPU, seed=3), torch.tensor([1, 2, 3, 4, 5])
    for ignored in (1, 2, 3):
        loss = ops.linear_cross_entropy(leaf(hidden), head, target, ignore_index=ignored)
        wanted = torch.nn.functional.cross_entropy(hidden.double() @ head.double().t(), target, ignore_index=ignored)
        assert_close(loss, wanted, FP32)


def check_that_alignments_are_told_apart(ops):
    """The numbers at an odd address and the factor at an even one, then the other way round: what takes the first wants the factor aligned,
    so of the second it is copied, and that is not remembered."""
    kernel = importlib.import_module(f"{ops.__name__}.shared.ops.linear_head")._scale_kernel
    x, factor = torch.ones(64), torch.ones(1)
    assert kernel(misaligned(x), factor) is not None, "a launch on an unaligned array is not remembered"
    assert kernel(x, misaligned(factor)) is None, "a factor that is not aligned was launched on"


def check_that_results_are_never_copies(ops):
    launch = runtime_of(ops).launch
    kernel = launch.Kernel("column_sum", grid=lambda c, partial, out: (1,), views=lambda partial, out: (partial, out.clone()),
                           reads=("partial",))
    try:
        kernel(torch.ones(2, 4), torch.zeros(4))
    except launch.PromiseError:
        return
    raise AssertionError("a result was written into a copy")


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "swiglu_odd": on_cpu(check_swiglu, FP32, (2, 1501)),
    "adamw_in_slabs": check_adamw_in_slabs,
    "adamw_counts_slabs": check_that_slabs_are_launches,
    "norm_in_parts": check_norm_in_parts,
    "elementwise_shapes": check_elementwise_shapes,
    "launch_keys": check_launch_keys,
    "launch_alignments": check_that_alignments_are_told_apart,
    "launch_copies": check_that_results_are_never_copies,
}
MUTANTS = [
    *generated("shared/ops/arrays.py", "norm_in_parts or swiglu_odd or adamw_in_slabs",
               "ElementwiseKernel.__init__ ElementwiseKernel._slabs split_rows"),
    *generated("shared/runtime/launch.py", "launch_alignments", "Kernel.__call__"),
    *errors_in("shared/ops/arrays.py", "adamw_in_slabs", "ElementwiseKernel._slabs",
         ("arrays[0].shape[0] <= rows", "True", "adamw_counts_slabs")),
    *errors_in("shared/ops/arrays.py", "norm_in_parts", "split_rows", ("0 < rows <= GRID_MAX[0]", "True")),
    *errors_in("shared/ops/arrays.py", "elementwise_shapes", "ElementwiseKernel._rows",
         ("tensor.shape != first.shape", "False")),
    *errors_in("shared/runtime/launch.py", "launch_keys", "Kernel.__call__",
         ("argument.shape, ", ""),
         (", argument.stride()", ""),
         ("argument.dtype, ", ""),
         ("if low_bits & 15:", "if False:"),
         ("parts.append(argument)", "pass")),
    *errors_in("shared/runtime/replay.py", "launch_keys", "Operator.call",
         ("arg.shape, ", ""),
         (", arg.stride()", ""),
         ("arg.dtype, ", ""),
         ("if low_bits & 15:", "if False:"),
         ("parts.append(arg or str(arg))", "pass")),
    *errors_in("shared/runtime/launch.py", "launch_keys", "Kernel._first",
         ("if places != addresses:", "if False:")),
    *errors_in("shared/runtime/launch.py", "launch_copies", "Kernel._arrays",
         ("if not self.reads.issuperset(moved):", "if False:")),
]  # fmt: skip
