"""sparsemax against float64: the oracle, shapes, checks and planted errors."""

from functools import partial

import torch

from tests.ops.common import FLOATS, assert_rows_close, check_kept, exact, gradient_twice, leaf, randn
from tests.ops.generated import generated
from tests.ops.softmax import check_nothing
from tests.ops.suite import Case, of_suite

SHAPES = ((5, 128), (40, 96), (3, 7, 64), (2, 1024), (5, 1000), (3, 4096), (2, 3001), (2, 5008), (2, 8192), (2, 10000), (2, 16400),
          (2, 32768), (1, 32784), (2, 17001), (1, 40003), (3, 1), (7,))


def sparsemax_exact(x):
    """By sorting, in float64; differentiable. The support is decided by whole multiples, as the definition has it."""
    z = x.detach().sort(-1, descending=True).values
    k = torch.arange(1, x.shape[-1] + 1, dtype=z.dtype)
    size = (1 + k * z > z.cumsum(-1)).sum(-1, keepdim=True)
    inside = x.detach() * size + 1 > (z.cumsum(-1)).gather(-1, size - 1)
    tau = (torch.where(inside, x, 0.0).sum(-1, keepdim=True) - 1) / inside.sum(-1, keepdim=True)
    return torch.where(inside, x - tau, 0.0)


def check_sparsemax(ops, device, dtype, shape, dim=-1, scale=1.0, view=lambda x: x, x=None):
    base = leaf(randn(*shape, dtype=dtype, device=device, scale=scale) if x is None else x.to(device=device, dtype=dtype))
    given = view(base)
    before = base.detach().clone()
    y = ops.sparsemax(given, dim)
    assert y.dtype == dtype and y.shape == given.shape
    dy = randn(*y.shape, dtype=dtype, device=device, seed=1)
    kept = dy.clone()
    dx, again = gradient_twice(y, base, dy)
    base64 = exact(base)
    y64 = sparsemax_exact(view(base64).transpose(dim, -1)).transpose(dim, -1)
    (dx64,) = torch.autograd.grad(y64, base64, dy.double().cpu())
    what = f"sparsemax {tuple(shape)}"
    assert torch.equal(y.cpu() > 0, y64 > 0), f"{what}: the support differs"
    assert_rows_close(y, y64, dtype, f"{what} y")
    assert_rows_close(dx, dx64, dtype, f"{what} dx")
    assert torch.equal(dx, again)
    check_kept((base, dy), (before, kept), "sparsemax")


def hard_rows(columns):
    """Rows whose support is everything, one element, a tie with tau; a slow one for Newton's method; large, tiny and negative numbers;
    -inf."""
    rows = torch.zeros(10, columns)
    rows[1] = torch.linspace(0, 1e-6, columns)
    rows[2, columns // 2] = 5.0
    rows[3, :3] = torch.tensor([0.5, 0.0, -0.25])  # the sum of two is 0.5: tau = -0.25 is the third
    rows[3, 3:] = -4.0
    rows[4] = -torch.logspace(-6, 0, columns)
    rows[5] = torch.randn(columns, generator=torch.Generator().manual_seed(5)) * 1e-3 + 100
    rows[6] = torch.randn(columns, generator=torch.Generator().manual_seed(6)) * 100
    rows[7] = -float("inf")
    rows[7, 1 : columns // 2 : 3] = torch.linspace(-0.9, 0, len(range(1, columns // 2, 3)))
    rows[8] = -torch.arange(columns) / columns
    rows[9] = rows[6] / 100 - 50
    return rows


def check_sparsemax_hard_rows(ops, device, dtype, columns):
    x = hard_rows(columns)
    if dtype != torch.float32:
        x = x[[0, 2, 3, 6, 7]]  # 100 + 1e-3 is 100 there
    check_sparsemax(ops, device, dtype, x.shape, x=x)


def check_sparsemax_ties(ops, device, dtype, columns, rows=8):
    """Half precision, where an element that equals tau is common: the support must be exact."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).mul(8).round().div(8)
    check_sparsemax(ops, device, dtype, x.shape, x=x)


def check_sparsemax_nan(ops, device, dtype, columns):
    x = randn(2, columns, dtype=dtype, device=device)
    x[0, columns // 2] = float("nan")
    y = ops.sparsemax(x)
    assert y[0].isnan().any() and not y[1].isnan().any()


CHECKS = of_suite({
    "sparsemax": lambda ops: [check_sparsemax(ops, "cpu", torch.float32, shape) for shape in ((5, 128), (40, 96), (5, 1000))],
    "sparsemax_long": lambda ops: [check_sparsemax(ops, "cpu", torch.float32, shape) for shape in ((3, 10000), (2, 34001))],
    "sparsemax_held": lambda ops: [check_sparsemax(ops, "cpu", torch.bfloat16, (3, columns)) for columns in (5008, 9008, 30000)],
    "sparsemax_held_dense": lambda ops: check_sparsemax(ops, "cpu", torch.bfloat16, (2, 20000), scale=0.001),
    "sparsemax_row": lambda ops: check_sparsemax(ops, "cpu", torch.float32, (3, 3000)),
    "sparsemax_row_hard": lambda ops: check_sparsemax_hard_rows(ops, "cpu", torch.float32, 3000),
    "sparsemax_held_ties": lambda ops: check_sparsemax_ties(ops, "cpu", torch.bfloat16, 17008, 2),
    "sparsemax_hard": lambda ops: check_sparsemax_hard_rows(ops, "cpu", torch.float32, 500),
    "sparsemax_hard_long": lambda ops: check_sparsemax_hard_rows(ops, "cpu", torch.float32, 34001),
    "sparsemax_ties": lambda ops: check_sparsemax_ties(ops, "cpu", torch.bfloat16, 300),
    "sparsemax_nan": lambda ops: check_sparsemax_nan(ops, "cpu", torch.float32, 300),
    "sparsemax_fp16": lambda ops: check_sparsemax_fp16(ops, "cpu"),
    "sparsemax_layouts": lambda ops: check_sparsemax(ops, "cpu", torch.float32, (3, 5, 32), 1),
})


def check_sparsemax_fp16(ops, device, columns=64):
    """A probability below fp16's smallest number stays in the support, and so in the gradient's mean."""
    x = torch.full((1, columns), -2.0)
    x[0, :2] = torch.tensor([0.5, -0.5 + 2.0**-12])
    check_sparsemax(ops, device, torch.float16, x.shape, x=x)


_KERNELS, _OPERATION, _ROWS = "kernel_src/sparsemax.py", "shared/ops/sparsemax.py", "shared/ops/softmax.py"
MUTANTS = (
    *generated(_KERNELS, "sparsemax_held or sparsemax_long or sparsemax or sparsemax_ties or sparsemax_row_hard or "
               "sparsemax_row or sparsemax_hard_long",
               "bit count_elements count_places held_difference ones sparsemax_apply sparsemax_backward sparsemax_maxima "
               "sparsemax_row_backward support"),
    (_KERNELS, "probability", "(total - 1.0)", "total", "sparsemax"),
    (_KERNELS, "probability", "ct.where(ct.isnan(v), v, 0.0)", "0.0", "sparsemax_nan"),
    (_KERNELS, "sparsemax_forward", "v = v - ct.max(v, 1, keepdims=True)", "v = v", "sparsemax_hard"),
    (_KERNELS, "sparsemax_forward", "shrinks = ct.max(ct.where(smaller, 1, 0)) > 0", "shrinks = False", "sparsemax"),
    (_KERNELS, "sparsemax_forward", "ct.max(ct.where(smaller, 1, 0)) > 0", "ct.min(ct.where(smaller, 1, 0)) > 0", "sparsemax"),
    (_KERNELS, "count_held", "count = count +", "count =", "sparsemax_held"),
    (_KERNELS, "sparsemax_row_forward", "count_places(top, n, s, TILE)\n        shrinks = fewer < n",
     "count_places(top, n, s, TILE)\n        shrinks = False", "sparsemax_row"),
    (_KERNELS, "sparsemax_row_forward", "count_held(tiles, m, n, s, TILE, TILES)\n            shrinks = fewer < n",
     "count_held(tiles, m, n, s, TILE, TILES)\n            shrinks = False", "sparsemax_held_dense"),
    (_KERNELS, "sparsemax_row_forward", "count_places(top, 1.0, 0.0, TILE)", "count_places(top, 2.0, 0.0, TILE)", "sparsemax_row_hard"),
    (_KERNELS, "sparsemax_row_forward", "        n, s = count_held(tiles, m, n, s, TILE, TILES)\n", "", "sparsemax_held_dense"),
    (_KERNELS, "sparsemax_maxima", "ct.maximum(top, more)", "more", "sparsemax_long"),
    (_KERNELS, "count_maxima", "ct.where(inside, 1.0, 0.0)", "ct.where(inside, 2.0, 0.0)", "sparsemax_hard_long"),
    (_KERNELS, "sparsemax_sums", "ct.where(inside, read(dy, (row, cols), 0), 0.0)", "read(dy, (row, cols), 0)", "sparsemax_long"),
    (_KERNELS, "sparsemax_gradient", "- mean", "", "sparsemax_long"),
    (_OPERATION, "sparsemax", "sparsemax_backward, ", "lambda dy, y: sparsemax_backward(-dy, y), ", "sparsemax"),
)


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for shape in SHAPES:
            yield f"sparsemax {dtype} {shape}", partial(check_sparsemax, ops, device, dtype, shape)
        for columns in (3000, 9008, 30000):
            yield f"sparsemax, many in {dtype} {columns}", partial(check_sparsemax, ops, device, dtype, (2, columns), scale=0.001)
        for columns in (96, 3000, 9000, 9001, 17008):
            yield f"sparsemax, hard rows {dtype} {columns}", partial(check_sparsemax_hard_rows, ops, device, dtype, columns)
            yield f"sparsemax, NaN {dtype} {columns}", partial(check_sparsemax_nan, ops, device, dtype, columns)
        yield f"sparsemax, ties {dtype}", partial(check_sparsemax_ties, ops, device, dtype, 300)
        for columns in (9000, 9001, 17008):
            yield f"sparsemax, ties in long rows {dtype} {columns}", partial(check_sparsemax_ties, ops, device, dtype, columns, 2)
        yield f"sparsemax of nothing {dtype}", partial(check_nothing, ops.sparsemax, device, dtype)
    if torch.float16 in dtypes:
        for columns in (64, 9000, 17008):
            yield f"sparsemax, the smallest number {columns}", partial(check_sparsemax_fp16, ops, device, columns)


# ---------------------------------------------------------------- in the tests of every operation
OPERATIONS = {
    "sparsemax": Case(
        lambda ops, x: ops.sparsemax(x),
        aligned=lambda n: ((2, n),),
        slabs=((9, 40),),
        rows=1,
        sample=lambda ops, new: (ops.sparsemax, (new.normal(48, 1024),)),
    ),
}


def check_large(ops, device):
    check_sparsemax(ops, device, torch.bfloat16, (2049, 4096))
    check_sparsemax(ops, device, torch.bfloat16, (65, 128256))


OPERATORS = {
    "sparsemax_forward": lambda new: [(new(3, 1024),)],
    "sparsemax_backward": lambda new: [(new(3, 1024), new(3, 1024, seed=1).relu())],
}
