"""softmax against float64: shapes, checks and planted errors."""

from functools import partial

import torch

from tests.ops.common import FLOATS, assert_rows_close, check_kept, exact, gradient_twice, leaf, randn
from tests.ops.generated import generated
from tests.ops.suite import Case, of_suite
from tests.tolerances import assert_close

# Every tile, whole and not; several rows a block that do not fill it; odd rows; rows in pieces, aligned and not.
SHAPES = ((5, 128), (17, 96), (3, 7, 64), (2, 1024), (5, 1000), (3, 4096), (2, 3001), (2, 8192), (1, 16000), (2, 20480), (2, 32768),
          (1, 32784), (2, 5001), (3, 1), (7,))
# In half precision: as they lie in memory, a row in two, in four and in eight tiles, whole and not. Of the longest a block has several:
# more rows than a GPU has SMs, and than the interpreter's two.
HELD_SHAPES = ((3, 4112), (2, 6000), (2, 12000), (3, 16384), (2, 16400))
WALKED, WALKED_ROWS = (20480, 32768), {"cuda": 300, "cpu": 5}


def check_softmax(ops, device, dtype, shape, dim=-1, scale=3.0, view=lambda x: x):
    """view: makes the operation's input out of a contiguous tensor."""
    base = leaf(randn(*shape, dtype=dtype, device=device, scale=scale))
    x = view(base)
    before = base.detach().clone()
    y = ops.softmax(x, dim)
    assert y.dtype == dtype and y.shape == x.shape
    dy = randn(*y.shape, dtype=dtype, device=device, seed=1)
    kept = dy.clone()
    dx, again = gradient_twice(y, base, dy)
    base64 = exact(base)
    y64 = torch.softmax(view(base64), dim)
    (dx64,) = torch.autograd.grad(y64, base64, dy.double().cpu(), retain_graph=True)
    # The gradient is made from y as it is rounded, as PyTorch's is; where dy - sum(dy * y) cancels, that is not the exact one.
    p, d = y.detach().double().cpu(), dy.double().cpu()
    (of_rounded,) = torch.autograd.grad(view(base64), base64, p * (d - (p * d).sum(dim, keepdim=True)))
    assert_rows_close(y, y64, dtype, f"softmax {tuple(shape)} y")
    assert_rows_close(dx, of_rounded, dtype, f"softmax {tuple(shape)} dx")
    assert_close(dx, dx64, dtype, f"softmax {tuple(shape)} dx", 4)
    assert torch.equal(dx, again)
    check_kept((base, dy), (before, kept), "softmax")


def check_softmax_infinities(ops, device, dtype, columns):
    """-inf is a probability of 0, whole pieces of it too; a row of nothing else is NaN, as in PyTorch; large numbers do not overflow, and
    their differences count as exactly as those of small ones."""
    x = randn(5, columns, dtype=dtype, device=device)
    x[0, : columns - 1] = -float("inf")
    x[1, columns // 3 :] = -float("inf")
    x[2] = -float("inf")
    x[3] *= 1e4
    x[4] += 1e4
    y = ops.softmax(x)
    y64 = torch.softmax(x.double().cpu(), -1)
    assert y[2].isnan().all()
    rows = [0, 1, 3, 4]
    assert_rows_close(y[rows], y64[rows], dtype, "softmax with -inf")
    assert (y[1, columns // 3 :] == 0).all()


def check_softmax_spread(ops, device, columns):
    """Rows that several SMs hold: a pass is one launch."""
    launched = ops.launched()
    check_softmax(ops, device, torch.bfloat16, (1, columns))
    assert ops.launched() - launched == 3, "a row is not held: it took more than one launch in a pass"


def check_nothing(operation, device, dtype):
    """A tensor without rows, rows without elements, and one number, which is all of its row."""
    for shape in ((0, 5), (3, 0), (0,)):
        x = leaf(torch.empty(shape, dtype=dtype, device=device))
        y = operation(x)
        assert y.shape == shape
        y.sum().backward()
        assert x.grad.shape == shape
    y = operation(leaf(torch.tensor(3.0, dtype=dtype, device=device)))
    assert y.shape == () and y == 1


CHECKS = of_suite({
    "softmax": lambda ops: [check_softmax(ops, "cpu", torch.float32, shape) for shape in ((5, 128), (40, 96), (5, 1000))],
    "softmax_long": lambda ops: [check_softmax(ops, "cpu", torch.float32, shape) for shape in ((2, 20480), (2, 5001))],
    "softmax_held": lambda ops: [check_softmax(ops, "cpu", torch.bfloat16, (3, columns)) for columns in (6000, 12000)],
    "softmax_walking": lambda ops: check_softmax(ops, "cpu", torch.bfloat16, (3, 16400)),
    "softmax_copied": lambda ops: check_softmax(ops, "cpu", torch.bfloat16, (3, 32768)),
    "softmax_held_infinities": lambda ops: check_softmax_infinities(ops, "cpu", torch.bfloat16, 17008),
    "softmax_spread": lambda ops: [check_softmax(ops, "cpu", torch.bfloat16, (2, columns)) for columns in (57344, 100016, 131088)],
    "softmax_spread_launches": lambda ops: [check_softmax_spread(ops, "cpu", columns) for columns in (57344, 100016, 131088)],
    "softmax_spread_infinities": lambda ops: check_softmax_infinities(ops, "cpu", torch.bfloat16, 57360),
    "softmax_infinities": lambda ops: [check_softmax_infinities(ops, "cpu", torch.float32, columns) for columns in (100, 17000)],
    "softmax_layouts": lambda ops: [
        check_softmax(ops, "cpu", torch.float32, (3, 5, 32), 1),
        check_softmax(ops, "cpu", torch.float32, (3, 64), view=lambda x: x[:, ::2]),
        check_softmax(ops, "cpu", torch.float32, (1, 64), view=lambda x: x.expand(3, 64)),
    ],
})
_KERNELS, _TILES, _OPERATION = "kernel_src/softmax.py", "kernel_src/row_tiles.py", "shared/ops/softmax.py"
# A product by 1, which only the compiler sees.
_SAME = {"return ct.astype(tile, ct.float32)": "the product is by 1"}
# file, function, its text, the error, the check that must notice
MUTANTS = (
    *generated("kernel_src/elements.py", "softmax", "block_from_last"),
    *generated(_TILES, "softmax_held", "converted_again tile_columns", same=_SAME),
    *generated(_TILES, "softmax_long", "piece"),
    *generated(_TILES, "softmax", "rows_of_block"),
    *generated(_KERNELS, "softmax_held", "held_dot softmax_held_backward softmax_held_forward"),
    *generated(_KERNELS, "softmax_infinities", "finite softmax_statistics"),
    *generated(_KERNELS, "softmax_many_parts", "join_partials"),
    *generated(_KERNELS, "softmax_spread", "joined sliced_tiles spread_backward"),
    *generated(_KERNELS, "softmax_long", "softmax_apply softmax_dot softmax_gradient"),
    *generated(_KERNELS, "softmax", "softmax_backward"),
    *generated(_KERNELS, "softmax_copied", "softmax_copied_backward"),
    *generated(_KERNELS, "softmax or softmax_infinities", "softmax_forward"),
    *generated(_KERNELS, "softmax_walking", "softmax_walking_backward"),
    *generated(_KERNELS, "softmax_spread_infinities", "spread_forward"),
    *generated("kernel_src/sums.py", "softmax_many_parts", "row_sum"),
    *generated(_OPERATION, "softmax_spread", "_spread"),
    (_KERNELS, "softmax_forward", "MINUS_INFINITY", "0", "softmax"),
    (_TILES, "held_maxima", "ct.maximum(highest, tiles[i])", "tiles[i]", "softmax_held_infinities"),
    (_KERNELS, "softmax_walking_backward", "p, d = next_p, next_d", "p, d = p, d", "softmax_walking"),
    (_KERNELS, "softmax_walking_backward", "ct.gather(dy, (following, cols)", "ct.gather(dy, (row, cols)", "softmax_walking"),
    (_KERNELS, "copied_tiles", "index=(row, i)", "index=(row, 0)", "softmax_copied"),
    (_KERNELS, "joined", "finite(high)", "high", "softmax_spread_infinities"),
    (_KERNELS, "spread_forward", "row, TILE, TILES, MINUS_INFINITY", "row, TILE, TILES, 0", "softmax_spread_infinities"),
    (_KERNELS, "spread_forward", "finite(highest)", "highest", "softmax_spread_infinities"),
    (_KERNELS, "softmax_spread_8_forward", "y5, y6, y7), TILE", "y5, y7, y6), TILE", "softmax_spread"),
    (_KERNELS, "softmax_spread_8_backward", "dx5, dx6, dx7), TILE", "dx5, dx7, dx6), TILE", "softmax_spread"),
    (_OPERATION, "_spread", "slabs(1, *arrays)", "[arrays][:0]", "softmax_spread"),
    (_KERNELS, "softmax_statistics", "MINUS_INFINITY", "0", "softmax_infinities"),
    (_KERNELS, "softmax_totals", "ct.bid(0)", "0", "softmax_long"),
    ("kernel_src/sums.py", "row_sum", "ct.bid(0)", "0", "softmax_long"),
    (_OPERATION, "FunctionOfRows.forward", "ctx.save_for_backward(y)", "ctx.save_for_backward(x)", "softmax"),
    (_OPERATION, "over_dimension", "y.transpose(dim, -1)", "y", "softmax_layouts"),
    (_OPERATION, "slabs", "min(SLAB // max(stride, 1), MOST_BLOCKS // blocks_a_row)", "SLAB", "softmax_slabs"),
    (_OPERATION, "FunctionOfRows.backward", "ctx.derivative(dy, ", "ctx.derivative(-dy, ", "softmax"),
)


def check_softmax_slabs(ops, elements=40):
    """More than a launch's 32-bit offsets reach over, at a small size."""
    before, ops.softmax_module.SLAB = ops.softmax_module.SLAB, elements
    launched = ops.launched()
    try:
        check_softmax(ops, "cpu", torch.float32, (7, 20))
        assert ops.launched() - launched == 3 * -(-7 * 20 // elements), "a pass is not launched slab by slab"
    finally:
        ops.softmax_module.SLAB = before


CHECKS |= of_suite({"softmax_many_parts": lambda ops: check_softmax(ops, "cpu", torch.float32, (1, 66 * 4096 + 5),
                                                                    view=lambda x: x.sort(-1).values)})
CHECKS |= of_suite({"softmax_slabs": check_softmax_slabs})


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for columns in (57344, 81920, 98304, 131072, 131088, 163840) if dtype != torch.float32 else ():
            yield f"softmax {dtype} {columns}", partial(check_softmax, ops, device, dtype, (3, columns))
        walked = [(WALKED_ROWS[device], columns) for columns in WALKED]
        for shape in [*SHAPES, *HELD_SHAPES, *walked] if dtype != torch.float32 else SHAPES:
            yield f"softmax {dtype} {shape}", partial(check_softmax, ops, device, dtype, shape)
        for columns in (100, 3000, 17000, 17008, 57360):
            yield f"softmax with -inf {dtype} {columns}", partial(check_softmax_infinities, ops, device, dtype, columns)
        yield f"softmax of nothing {dtype}", partial(check_nothing, ops.softmax, device, dtype)


# ---------------------------------------------------------------- in the tests of every operation
OPERATIONS = {
    "softmax": Case(
        lambda ops, x: ops.softmax(x),
        aligned=lambda n: ((2, n),),
        slabs=((9, 40),),
        rows=1,
        sample=lambda ops, new: (ops.softmax, (new.normal(48, 1024),)),
    ),
}


def check_large(ops, device):
    for shape in ((2049, 4096), (65, 151936), (397, 17008), (397, 32768), (397, 65536), (265, 128256)):
        check_softmax(ops, device, torch.bfloat16, shape)


OPERATORS = {
    "softmax_forward": lambda new: [(new(3, 1024),)],
    "softmax_backward": lambda new: [(new(3, 1024), new(3, 1024, seed=1).softmax(-1))],
}
