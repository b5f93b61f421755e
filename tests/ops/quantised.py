"""Operands of products in eight bits: codes and scales, bit for bit."""

import importlib

import torch

from tests.ops.common import BF16, CPU, FP16, FP32, errors_in, on_cpu, randn
from tests.ops.generated import generated


def codes_of(x: torch.Tensor) -> torch.Tensor:
    """The e4m3 code of each number in float64, by looking for the nearest one: of two at one distance the even one."""
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    middles = (table[1:] + table[:-1]) / 2
    size = x.abs().nan_to_num(0.0, posinf=0.0).contiguous()
    below, above = torch.searchsorted(middles, size), torch.searchsorted(middles, size, right=True)
    found = torch.where(below % 2 == 0, below, above)  # they differ at a middle alone
    return torch.where(x.isnan() | x.isinf(), 127, found).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 7)


def scales_of(x: torch.Tensor) -> torch.Tensor:
    """The scale of each row of float64 numbers."""
    largest = x.abs().nan_to_num(0.0, posinf=torch.inf).amax(1)
    part, exponent = torch.frexp(largest.clamp(min=2.0**-1000))  # of zero it is 0
    power = torch.where(part <= 448 / 512, exponent - 9, exponent - 8).clamp(min=-126)
    return torch.where(part.isinf() | (power > 119), torch.inf, torch.exp2(power.double()))


def divided(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x / scales, NaN for infinities."""
    return torch.where(x.isinf(), torch.nan, torch.where(scales.isinf(), x * 0.0, x / scales))


def same_codes(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """NaN may have either sign."""
    found = found.cpu().view(torch.uint8)
    nan = (found & 127) == 127
    assert torch.equal(nan, (expected & 127) == 127), f"{what}: not the same NaN"
    wrong = (found != expected) & ~nan
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} codes are wrong, the first at {wrong.nonzero()[0].tolist()}"


def drawn(rows, columns, dtype, device, seed=0):
    """Rows of sizes over many decades; one of zeros, one with a single number, and numbers at the edge of a scale."""
    sizes = torch.exp2(torch.randint(-40, 20, (rows, 1), generator=torch.Generator().manual_seed(seed)).double())
    x = (randn(rows, columns, dtype=torch.float64, device=CPU, seed=seed) * (sizes if dtype != FP16 else 1.0)).to(dtype)
    if rows > 3:
        x[1], x[2] = 0.0, 0.0
        x[2, columns // 2] = -448.0
        x[3, columns - 1] = 448.0 if dtype == FP16 else 2.0**30 * 1.75
    return x.to(device)


def with_odd_numbers(x):
    """A NaN in the first row, an infinity in the last, and the largest and the smallest numbers of the dtype."""
    x = x.clone()
    x[0, x.shape[1] // 2], x[-1, 3] = torch.nan, -torch.inf
    if x.shape[0] > 6:
        x[4, 0], x[5] = torch.finfo(x.dtype).max, 0.0
        x[5, 1], x[6] = torch.finfo(x.dtype).tiny, torch.nan
    return x


def check_rows(ops, device, dtype, rows, columns, odd=False, view=lambda x: x):
    module = importlib.import_module(f"{ops.__name__}.shared.ops.quantised")
    x = view(drawn(rows, columns, dtype, device))
    x = with_odd_numbers(x) if odd else x
    exact = x.double().cpu()
    expected = scales_of(exact)
    found = module.quantise_rows(x)
    assert found.codes.dtype == torch.float8_e4m3fn and found.codes.is_contiguous() and found.scales.dtype == torch.float32
    assert torch.equal(found.scales.double().cpu(), expected), "the scales of rows"
    same_codes(found.codes, codes_of(divided(exact, expected[:, None])), "rows")
    if not odd:
        error = (module.restored(found).double().cpu() - exact).abs()
        least = torch.maximum(exact.abs() * 2.0**-4, expected[:, None] * 2.0**-10)
        assert (error <= least).all(), "more than half of the last bit is lost"


def check_rows_into(ops, device, dtype, rows, columns):
    """Rows of several matrices in one, and nothing written beside them."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.quantised")
    parts = [drawn(rows, columns, dtype, device, seed) for seed in range(2)]
    whole = module.Quantised.empty(4 * rows, columns, torch.device(device))
    whole.codes.view(torch.uint8).fill_(0x55)
    whole.scales.fill_(-1.0)
    for i, part in enumerate(parts):
        module.quantise_rows(part, whole.rows((1 + i) * rows, (2 + i) * rows))
    together = module.quantise_rows(torch.cat(parts))
    inside = slice(rows, 3 * rows)
    assert torch.equal(whole.codes[inside].view(torch.uint8), together.codes.view(torch.uint8))
    assert torch.equal(whole.scales[inside], together.scales)
    for outside in (slice(0, rows), slice(3 * rows, None)):
        assert (whole.codes[outside].view(torch.uint8) == 0x55).all() and (whole.scales[outside] == -1).all(), "written beside"


def check_transposed(ops, device, dtype, rows, columns, odd=False, view=lambda x: x):
    """With the largest of the rows' scales, as the gradient of a weight has it, and a larger one."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.quantised")
    x = view(drawn(rows, columns, dtype, device))
    x = with_odd_numbers(x) if odd else x
    exact = x.double().cpu()
    rows, columns = x.shape
    tail = -rows % 16
    for more in (1.0, 4.0):
        scale = module.quantise_rows(x).scales.amax(0, keepdim=True) * more
        assert torch.equal(scale.double().cpu(), scales_of(exact).amax(0, keepdim=True) * more)
        found = module.quantise_transposed(x, scale)
        assert found.codes.shape == (columns, rows + tail) and found.codes.is_contiguous()
        assert torch.equal(found.scales, scale.expand(columns)), "the scales of what was transposed"
        same_codes(found.codes[:, :rows], codes_of(divided(exact, scale.double().cpu())).t(), "transposed")
        assert not found.codes[:, rows:].view(torch.uint8).any(), "what lies behind the rows is not zero"


def check_transposed_into(ops, device, dtype, rows, columns, odd=0):
    """Several matrices side by side, and nothing written beside them. odd: a number more a column, of which no four are a word."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.quantised")
    x = drawn(rows, columns, dtype, device)
    scale = module.quantise_rows(x).scales.amax(0, keepdim=True)
    whole = module.Quantised.empty(columns, 3 * rows + odd, torch.device(device))
    whole.codes.view(torch.uint8).fill_(0x55)
    module.quantise_transposed(x, scale, module.Quantised(whole.codes[:, rows : 2 * rows], whole.scales))
    alone = module.quantise_transposed(x, scale)
    assert torch.equal(whole.codes[:, rows : 2 * rows].view(torch.uint8), alone.codes.view(torch.uint8))
    beside = whole.codes.view(torch.uint8)
    assert (beside[:, :rows] == 0x55).all() and (beside[:, 2 * rows :] == 0x55).all(), "written beside"


def check_recoded(ops, device, dtype, rows, columns, odd=False):
    """Codes of rows, transposed: the codes of what they stand for."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.quantised")
    x = drawn(rows, columns, dtype, device)
    found = module.quantise_rows(with_odd_numbers(x) if odd else x)
    exact = found.codes.double().cpu() * found.scales.double().cpu()[:, None]
    tail = -rows % 16
    for more in (1.0, 4.0):
        scale = found.scales.amax(0, keepdim=True) * more
        transposed = module.quantise_transposed(found, scale)
        assert transposed.codes.shape == (columns, rows + tail) and torch.equal(transposed.scales, scale.expand(columns))
        same_codes(transposed.codes[:, :rows], codes_of(divided(exact, scale.double().cpu())).t(), "recoded")
        assert not transposed.codes[:, rows:].view(torch.uint8).any(), "what lies behind the rows is not zero"


def check_swiglu(ops, device, dtype, rows, columns, odd=False, joined=False):
    """SwiGLU and its gradients in codes have the bits of what is quantised after it. joined: gate and up are halves of one matrix."""
    module, swiglu = (importlib.import_module(f"{ops.__name__}.shared.ops.{name}") for name in ("quantised", "swiglu"))
    gate = (4 * randn(rows, columns, dtype=torch.float64, device=CPU, seed=1)).to(device, dtype)
    up, dout = (drawn(rows, columns, dtype, device, seed) for seed in (2, 3))
    if odd:
        gate, up, dout = with_odd_numbers(gate), with_odd_numbers(up.flip(0)), with_odd_numbers(dout)
    if joined:
        gate, up = torch.cat((gate, up), 1).chunk(2, 1)
    hidden = swiglu.swiglu_forward(gate, up)
    expected = dout.clone()
    both = swiglu.backward_in_place(expected, gate, up)[0]
    for keep in (False, True):
        of_backward = module.swiglu_backward_quantised(written := dout.clone(), gate, up, keep)
        check_kept(module, module.swiglu_quantised(gate, up, keep), hidden, keep)
        check_kept(module, of_backward, both, keep)
        assert torch.equal(written.nan_to_num(), expected.nan_to_num()), "what is written over dout"


def check_kept(module, found, of, keep):
    """What a function returned: the codes of a matrix, and with `keep` the matrix itself."""
    (codes, scales), kept = found
    wanted = module.quantise_rows(of)
    assert codes.shape == of.shape and codes.is_contiguous() and torch.equal(scales, wanted.scales)
    same_codes(codes, wanted.codes.cpu().view(torch.uint8), "SwiGLU")
    assert (kept is not None) == keep and (not keep or torch.equal(kept.nan_to_num(), of.nan_to_num())), "what is kept"


def check_largest_of_swiglu(ops, device, dtype, columns):
    """The largest number of a row, of each kind and sign and in each piece of the row, is what its scale follows from."""
    pieces = columns // (2048 if columns % 2048 == 0 else 1024)
    module, swiglu = (importlib.import_module(f"{ops.__name__}.shared.ops.{name}") for name in ("quantised", "swiglu"))
    rows = [(kind, sign, piece) for kind in range(3) for sign in (1, -1) for piece in range(pieces)]
    gate, up, dout = (drawn(len(rows), columns, dtype, device, seed) for seed in (1, 2, 3))
    for row, (kind, sign, piece) in enumerate(rows):
        # silu(0) is 0: of up's gradient and of the product nothing is left then, and of gate's nothing where up is 0.
        gate[row, piece * columns // pieces + 5] = 0.0 if kind == 0 else 8.0
        up[row, piece * columns // pieces + 5] = (sign * 2.0**20, 0.0, sign * 2.0**20)[kind]
        dout[row, piece * columns // pieces + 5] = (2.0**20, sign * 2.0**20, 0.0)[kind]
    hidden, both = swiglu.swiglu_forward(gate, up), swiglu.backward_in_place(dout.clone(), gate, up)[0]
    for keep in (False, True):
        check_kept(module, module.swiglu_quantised(gate, up, keep), hidden, keep)
        check_kept(module, module.swiglu_backward_quantised(dout.clone(), gate, up, keep), both, keep)
    assert all(len(set(module.quantise_rows(of).scales.tolist())) > 1 for of in (hidden, both))


# Rows that are read once and in pieces, of each tile, and those that no tile divides.
COLUMNS = (16, 80, 512, 1024, 1536, 2048, 3072, 4096, 6144, 12288, 1040)
TRANSPOSED = ((7, 16), (128, 128), (130, 144), (16, 272), (300, 64))
SWIGLU = (3072, 6144, 8192, 12288, 14336)  # rows that have a kernel of their own
VIEWS = (lambda x: x[:, 16:-16], lambda x: x[:, 1:-15], lambda x: x.t().contiguous().t(), lambda x: x[:1].expand(4, -1))


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "quantise_rows": on_cpu(check_rows, BF16, 9, 1024),
    "quantise_long_rows": on_cpu(check_rows, BF16, 9, 1536),
    "quantise_any_rows": on_cpu(check_rows, BF16, 9, 1040),
    "quantise_odd": on_cpu(check_rows, BF16, 9, 1024, True),
    "quantise_odd_long_rows": on_cpu(check_rows, BF16, 9, 1536, True),
    "quantise_odd_any_rows": on_cpu(check_rows, BF16, 9, 1040, True),
    "quantise_transposed": on_cpu(check_transposed, BF16, 130, 272),
    "quantise_odd_transposed": on_cpu(check_transposed, BF16, 130, 144, True),
    "quantise_into": on_cpu(check_rows_into, BF16, 5, 512),
    "quantise_transposed_into": on_cpu(check_transposed_into, BF16, 160, 144),
    "recode_transposed": on_cpu(check_recoded, BF16, 130, 272),
    "recode_odd_transposed": on_cpu(check_recoded, BF16, 130, 144, True),
    "swiglu_quantised": on_cpu(check_swiglu, BF16, 7, 3072, False, True),
    "swiglu_long_quantised": on_cpu(check_swiglu, BF16, 3, 14336),  # read ahead in part
    "swiglu_odd_quantised": on_cpu(check_swiglu, BF16, 7, 3072, True),
    "swiglu_largest_quantised": on_cpu(check_largest_of_swiglu, BF16, 3072),
    "swiglu_quantised_apart": on_cpu(check_swiglu, BF16, 7, 1040),
    "quantise_fp32": on_cpu(check_rows, FP32, 9, 80, True),
}
MUTANTS = [
    *generated("kernel_src/quantise.py", "quantise_transposed", "byte quantise_transposed write_words"),
    *generated("kernel_src/quantise.py", "quantise_any_rows", "read_row"),
    *generated("kernel_src/quantise.py", "recode_transposed", "recode_transposed"),
    *generated("kernel_src/quantise.py", "quantise_rows", "scale_of size"),
    *generated("kernel_src/quantise.py", "swiglu_quantised", "codes_in forward_row gradients inputs_of"),
    *generated("kernel_src/quantise.py", "swiglu_long_quantised", "backward_row"),
    *generated("shared/ops/quantised.py", "quantise_transposed", "_blocks"),
    *generated("shared/ops/quantised.py", "quantise_rows", "_coded _scale_of quantise_rows", kernels=False),
    *errors_in("kernel_src/quantise.py", "quantise_rows", "quantise_rows",
         ("ct.astype(values * ct.truediv(1.0, scale), codes.dtype)", "ct.astype(values, codes.dtype)"),
         ("ct.scatter(scales, row, scale", "ct.scatter(scales, row, scale * 2.0"),
         ("for i in range(pieces):\n            largest", "for i in range(pieces - 1):\n            largest", "quantise_long_rows"),
         ("largest = ct.maximum(largest, size(read_row(x, (row, i * TILE + columns), CHECK)))",
          "largest = size(read_row(x, (row, i * TILE + columns), CHECK))", "quantise_long_rows"),
         ("read_row(x, place, CHECK) * inverse", "read_row(x, (row, columns), CHECK) * inverse", "quantise_long_rows"),
         ("pieces - 1 - i", "i % 2", "quantise_long_rows"),
         ("ct.cdiv(x.shape[1], TILE)", "x.shape[1] // TILE", "quantise_any_rows"),
         ("inverse, codes.dtype), check_bounds=CHECK == 1", "inverse, codes.dtype), check_bounds=False", "quantise_any_rows")),
    *errors_in("kernel_src/quantise.py", "quantise_transposed", "write_words",
         ("(2, 1, 0)", "(1, 2, 0)"),
         ("check_bounds=True", "check_bounds=False")),
    *errors_in("kernel_src/quantise.py", "quantise_transposed", "quantise_transposed",
         ("ct.cdiv(x.shape[1], TILE)", "ct.cdiv(x.shape[0], TILE)"),
         ("ct.truediv(1.0, scale)", "scale"),
         ("if i == 0", "if i == 2"),
         ("dtype=ct.float32), check_bounds=True", "dtype=ct.float32), check_bounds=False")),
    *errors_in("kernel_src/quantise.py", "recode_transposed", "recode_transposed",
         ("ct.cdiv(x.shape[1], TILE)", "ct.cdiv(x.shape[0], TILE)"),
         ("ct.truediv(1.0, scale)", "scale"),
         ("if i == 0", "if i == 2"),
         ("ROWS, TILE, 16", "ROWS, TILE * 2, 16")),
    *errors_in("kernel_src/quantise.py", "swiglu_quantised", "forward_row",
         ("read(up, place)", "read(gate, place)"),
         ("largest = ct.maximum(largest, size(ct.astype(out, ct.float32)))", "largest = size(ct.astype(out, ct.float32))"),
         ("held[i], ct.float32", "held[0], ct.float32"),
         ("held[i], check", "held[0], check"),
         ("row, scale, check", "row, inverse, check")),
    *errors_in("kernel_src/quantise.py", "swiglu_quantised", "backward_row",
         ("inputs[3 * i],", "inputs[0],"),
         ("inputs[3 * i + 1], inputs[3 * i + 2]", "inputs[3 * i + 2], inputs[3 * i + 1]"),
         ("ct.maximum(largest, ct.maximum(dg, du))", "ct.maximum(dg, du)", "swiglu_largest_quantised"),
         ("ct.minimum(least, ct.minimum(dg, du))", "ct.minimum(dg, du)", "swiglu_largest_quantised"),
         ("ct.maximum(largest, ct.maximum(dg, du))", "ct.maximum(largest, dg)", "swiglu_largest_quantised"),
         ("ct.maximum(largest, ct.maximum(dg, du))", "ct.maximum(largest, du)", "swiglu_largest_quantised"),
         ("ct.minimum(least, ct.minimum(dg, du))", "ct.minimum(least, dg)", "swiglu_largest_quantised"),
         ("ct.minimum(least, ct.minimum(dg, du))", "ct.minimum(least, du)", "swiglu_largest_quantised"),
         ("-least", "least", "swiglu_largest_quantised"),
         ("ct.maximum(largest, -least)", "largest", "swiglu_largest_quantised"),
         ("columns), dg, check", "columns), du, check"),
         ("(row, (PIECES + i) * TILE + columns), du, check", "(row, i * TILE + columns), du, check"),
         ("dups[i]", "dups[0]"),
         ("row, scale, check", "row, inverse, check")),
    *errors_in("kernel_src/quantise.py", "swiglu_quantised", "gradients", ("g * sigmoid(g)", "u * sigmoid(g)")),
    *errors_in("shared/ops/quantised.py", "swiglu_quantised_apart", "swiglu_backward_quantised",
         ("backward_in_place(dout, gate, up)[0]", "backward_in_place(dout.clone(), gate, up)[0]")),
    *errors_in("shared/ops/quantised.py", "recode_transposed", "quantise_transposed",
         ("restored(x) if", "x.codes.float() if"), kernels=False),
    *errors_in("shared/ops/quantised.py", "quantise_rows", "quantise_rows",
         ("amax(1)", "amin(1)"),
         (".where(~wide.isnan(), 0)", "", "quantise_odd"), kernels=False),
    *errors_in("shared/ops/quantised.py", "quantise_transposed", "quantise_transposed",
         ("found.codes[:, rows:].copy_(torch.zeros((), dtype=E4M3, device=scale.device))", "pass"),
         ("found.scales.copy_(scale.expand(columns))", "pass"), kernels=False),
    *errors_in("shared/ops/quantised.py", "quantise_transposed", "quantise_transposed", ("-(-rows // STEP) * STEP", "rows // STEP * STEP")),
    *errors_in("shared/ops/quantised.py", "quantise_into", "Quantised.rows", ("self.scales[start:stop]", "self.scales[: stop - start]")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
GPU_TESTS = {"quantise": ("test_ops.py::test_quantised",)}
