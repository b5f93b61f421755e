"""linear_log_probs against float64: the oracle, shapes, checks and planted errors."""

from functools import partial

import torch

from tests.ops.common import CPU, FLOATS, RELATIVE_ERROR, errors_in, leaf, randn
from tests.ops.generated import generated
from tests.ops.linear_log_probs_kept import check_columns, check_guess, check_kept_logits, check_products
from tests.ops.log_probs_exact import ALL, CAPPED, DIFFERENTIABLE, check_linear_log_probs, log_probs_exact
from tests.ops.signature import Signature
from tests.ops.suite import Case, of_suite

TILE = 8192  # the most columns that a block of the statistics has
LARGE = ({}, {"temperature": 0.7, "scale": 1.3}, {"scale": -0.5}, {"softcap": 30.0, "temperature": 1.5})
CASES = (
    {},
    {"shape": (2, 5), "outputs": ALL},
    {"outputs": ALL, "bias": True, "temperature": 0.7, "scale": 1.3},
    {"outputs": ALL, "bias": True, **CAPPED},
    {"frozen": True},
    {"frozen": True, **CAPPED},
    {"outputs": ALL, "scale": -1.3, "temperature": 0.7},
    {"outputs": ALL, "scale": -1.3, "softcap": 4.0, "classes": 301},
    {"outputs": ALL, "scale": 0.0, "bias": True},
    {"frozen": True, "outputs": ("entropy",), "entropy_gradient": True},
    {"frozen": True, "outputs": ("entropy",), "entropy_gradient": False, "bias": True},
    {"frozen": True, "outputs": ALL, "entropy_gradient": True, "bias": True, **CAPPED},
    {"frozen": True, "outputs": ALL, "entropy_gradient": True, "without": ("mean_logits",), "temperature": 0.7},
    {"outputs": ("entropy",), "without": ("log_probs",)},
    {"frozen": True, "outputs": ("entropy",), "without": ("entropy",), "entropy_gradient": True},
    {"shape": (1,), "outputs": ALL, "classes": 1},
    {"classes": 77, "outputs": ALL, "bias": True},
    {"size": 300.0, "outputs": ALL},
    {"coefficients": True},
    {"coefficients": True, "frozen": True, "outputs": ALL, "bias": True, **CAPPED},
    {"recompute": False},
    {"outputs": ALL, "bias": True, "recompute": False, "skip_ignored": True, **CAPPED},
    {"outputs": ALL, "skip_ignored": True},
    {"outputs": ALL, "skip_ignored": True, "frozen": True, "ignored": 9},
)


def check_needs(ops, device, dtype):
    for needs in ((True, False, False), (False, True, False), (False, False, True), (True, True, False)):
        check_linear_log_probs(ops, device, dtype, bias=True, needs=needs, outputs=ALL)


def check_all_ignored(ops, device, dtype, skip_ignored=False, coefficients=False):
    """Nothing counts, and there are no tokens at all: results and gradients are zero."""
    for tokens in (4, 0):
        hidden, weight = leaf(randn(tokens, 32, dtype=dtype, device=device)), leaf(randn(50, 32, dtype=dtype, device=device))
        weights = torch.ones(tokens, device=device) if coefficients else None
        target = torch.full((tokens,), -100, device=device)
        found = ops.linear_log_probs(hidden, weight, target, outputs=ALL, coefficients=weights, skip_ignored=skip_ignored)
        assert all(not row.any() for row in found[:5])
        (found.weighted_sum if coefficients else found.log_probs.sum() + found.entropy.sum()).backward()
        assert hidden.grad.shape == hidden.shape and not hidden.grad.any() and weight.grad.shape == weight.shape and not weight.grad.any()


def check_not_a_number(ops, device, dtype, value=float("nan")):
    """One row is no number, or its label outside the vocabulary on a GPU: the others do not know. A row that is ignored is 0."""
    hidden, weight = randn(4, 32, dtype=dtype, device=device), randn(300, 32, dtype=dtype, device=device, seed=1)
    target = torch.tensor([3, 4, -100, 6], device=device)
    for requires in (False, True):
        results = []
        for bad in (False, True):
            x = hidden.clone()
            if bad:
                x[1] = x[2] = value
            x, w = leaf(x), weight.clone().requires_grad_(requires)
            found = ops.linear_log_probs(x, w, target, outputs=ALL, entropy_gradient=True, skip_ignored=False)
            (found.log_probs.sum() + found.entropy.sum()).backward()
            results.append((*found[:5], x.grad))
        for good, bad in zip(*results):
            assert torch.equal(good[[0, 3]], bad[[0, 3]]), "a row that is no number changes others"
            assert not bad[2].any(), "a row that is ignored is not 0"
        assert results[1][0][1].isnan() and results[1][5][1].isnan().all()


def check_ramp(ops, device, dtype, classes, ignore_index=-100):
    """Logits that rise or fall along the whole row, so that each piece has another maximum; class ignore_index is ignored."""
    slope = torch.linspace(-2, 11, classes, device=device)
    target = torch.tensor([0, classes - 1, 5], device=device)
    for ramp in (slope, slope.flip(0)):
        hidden, weight = torch.ones(3, 1, dtype=dtype, device=device), ramp[:, None].to(dtype)
        found = ops.linear_log_probs(hidden, weight, target, outputs=ALL, ignore_index=ignore_index, skip_ignored=False)
        z = (hidden @ weight.t()).double().cpu()
        wanted = log_probs_exact(z, target.cpu(), target.cpu() != ignore_index)
        for name, row in zip(ALL, found):
            torch.testing.assert_close(row.cpu().double(), wanted[name].double(), rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023


def check_ties(ops, device, dtype):
    """Logits whose scores a cap makes equal, in one piece of a row and in another: the first of them is the largest."""
    weight = torch.zeros(3 * TILE, 1, dtype=dtype, device=device)
    weight[[5000, 5001, 9000], 0] = torch.tensor([100.0, 110.0, 120.0], dtype=dtype, device=device)
    target = torch.tensor([5000, 5001, 9000], device=device)
    found = ops.linear_log_probs(torch.ones(3, 1, dtype=dtype, device=device), weight, target, outputs=("is_top1",), softcap=2.0)
    assert found.is_top1.tolist() == [True, False, False]


def large_rows(dtype, classes):
    """Name -> a row of logits that are finite and large; class 0 is the label."""
    top, plain = torch.finfo(dtype).max, randn(classes, dtype=torch.float32, device=CPU)
    one, large = torch.tensor([5]), min(1e9, top)
    return {
        "a large number everywhere": torch.full((classes,), large),
        "a mask's number everywhere": torch.full((classes,), -large),
        "the largest everywhere": torch.full((classes,), top),
        "the smallest everywhere": torch.full((classes,), -top),
        "one is the largest": plain.index_fill(0, one, top),
        "a third is the smallest": plain.masked_fill(torch.arange(classes) % 3 == 1, -top),
        "two neighbours": torch.full((classes,), -top).index_fill(0, one, large).index_fill(0, torch.tensor([0]), 0.99 * large),
        "a piece is large": torch.where(torch.arange(classes) < TILE, plain, plain + 1e4),
    }


def check_large_logits(ops, device, dtype, classes=TILE + 11, **scores):
    """Logits that are large, and of one size: results and gradients as float64 has them of the same logits."""
    rows = {name: row.to(dtype) for name, row in large_rows(dtype, classes).items()}
    weight = leaf(torch.stack(list(rows.values()), 1).to(device))  # the logits of hidden states that are the unit vectors
    target = torch.zeros(len(rows), dtype=torch.int64, device=device)
    found = ops.linear_log_probs(torch.eye(len(rows), dtype=dtype, device=device), weight, target, outputs=ALL, **scores)
    exactly = weight.detach().cpu().double().t().requires_grad_()
    wanted = log_probs_exact(exactly, target.cpu(), target.cpu() == 0, **scores)
    for names in (("log_probs", "entropy"),) if scores else (("log_probs",), ("entropy",)):
        (gradient,) = torch.autograd.grad(sum(getattr(found, name).sum() for name in names), weight, retain_graph=True)
        (expected,) = torch.autograd.grad(sum(wanted[name].sum() for name in names), exactly, retain_graph=True)
        for i, what in enumerate(rows):
            bound = RELATIVE_ERROR[dtype] * float(expected[i].abs().max())
            error = (gradient[:, i].cpu().double() - expected[i]).abs().max()
            assert error <= 2 * bound + 1e-7, f"{what} {scores}: the gradient of {names} has an error of {error:.2e}, {bound:.2e} is one"
    for i, what in enumerate(rows):
        for name, row in zip(ALL, found):
            value, expected = row[i].detach().cpu().double(), wanted[name][i].detach().float().double()  # infinite where fp32 is
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=lambda m: f"{what} {scores} {name}: {m}")  # noqa: B023


# What the kernels of the cross entropy compute where a package has none of log-probabilities, and what it leaves to PyTorch.
LIKELIHOODS = (
    {},
    {"bias": True, "temperature": 0.7, "scale": 1.3},
    {"softcap": 4.0, "frozen": True},
    {"frozen": True, "bias": True, "temperature": 0.7},
    {"coefficients": True, "temperature": 1.3, "frozen": True},
    {"shape": (11,), "chunk": 4, "temperature": 0.7},
    {"shape": (1,), "temperature": 2.0},
    {"ignored": 9, "temperature": 0.7},
    CAPPED,
    {"outputs": ALL, "temperature": 0.7},
    {"outputs": ALL, "temperature": 0.7, "without": DIFFERENTIABLE[1:], "recompute": False},
    {"shape": (11,), "chunk": 4, "temperature": 0.7, "recompute": False},
    {"outputs": ("entropy",), "frozen": True, "entropy_gradient": True},
)


def check_without_own_kernels(ops, device, dtype, cases=LIKELIHOODS, expected=None):
    """expected: the classes that compute the chunks."""
    module, found, last = ops.log_probs_module, set(), set()
    kept, choose = module.ships, ops.log_prob_chunks_module.piece_of
    module.ships = lambda operation: operation != "log_probs" and kept(operation)

    def piece_of(*given):
        chosen = choose(*given)
        last.add(chosen[0].__name__)
        return chosen

    ops.log_prob_chunks_module.piece_of = piece_of
    try:
        for options in cases:
            last.clear()
            scaled = "softcap" not in options
            check_linear_log_probs(ops, device, dtype, is_rounded_scaled=lambda: scaled and "LikelihoodPiece" in last, **options)  # noqa: B023
            found |= last
    finally:
        module.ships, ops.log_prob_chunks_module.piece_of = kept, choose
    assert expected is None or found == expected, f"{found} compute the chunks, expected {expected}"


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    check = partial(check_linear_log_probs, ops, device)
    for dtype in dtypes:
        for i, options in enumerate(CASES):
            yield f"case {i} {dtype}", partial(check, dtype, **options)
        yield f"a wide vocabulary {dtype}", partial(check, dtype, (3,), 16, TILE * 2 + 22, outputs=ALL)
        yield f"chunks {dtype}", partial(check, dtype, (11,), chunk=4, outputs=ALL, bias=True)
        yield f"chunks of a frozen head {dtype}", partial(check, dtype, (11,), chunk=4, outputs=ALL, frozen=True, entropy_gradient=True)
        yield f"chunks behind a larger one {dtype}", partial(check, dtype, (11,), chunk=4, first=8, bias=True)
        for classes in (100, TILE * 3 + 9):
            yield f"a ramp {classes} {dtype}", partial(check_ramp, ops, device, dtype, classes, ignore_index=0)
        yield f"ties {dtype}", partial(check_ties, ops, device, dtype)
        yield f"columns {dtype}", partial(check_columns, ops, device, dtype)
        yield f"needs {dtype}", partial(check_needs, ops, device, dtype)
        for skip in (False, True):
            for coefficients in (False, True):
                yield f"all ignored {skip} {coefficients} {dtype}", partial(check_all_ignored, ops, device, dtype, skip, coefficients)
        yield f"kept logits {dtype}", partial(check_kept_logits, ops, device, dtype)
        yield f"without kernels of its own {dtype}", partial(check_without_own_kernels, ops, device, dtype)
        yield f"not a number {dtype}", partial(check_not_a_number, ops, device, dtype)
        for scores in LARGE if dtype == torch.float32 else LARGE[:1]:
            yield f"large logits {scores} {dtype}", partial(check_large_logits, ops, device, dtype, **scores)
        if dtype != torch.float32:
            yield f"a wider weight {dtype}", partial(check, dtype, weight_dtype=torch.float32, outputs=ALL, bias=True)
            yield f"many sums {dtype}", partial(check, dtype, (11,), chunk=4, weight_dtype=torch.float32, bias=True)
        else:
            yield "products", partial(check_products, ops, device)
            yield "guess", partial(check_guess, ops, device)


F32, FP16 = torch.float32, torch.float16
BOTH = {"outputs": ALL, "frozen": True, "entropy_gradient": True, "without": ("mean_logits",)}


def _checks(*cases):
    """A function that makes `check_linear_log_probs` on the CPU of all of these: (dtype, options)."""
    return lambda ops: [check_linear_log_probs(ops, "cpu", dtype, **options) for dtype, options in cases]


CHECKS = of_suite({
    "results": _checks((F32, {"outputs": ALL}), (F32, {"outputs": ALL, "bias": True, "classes": 5000, "size": 30.0, **CAPPED})),
    "ramp": lambda ops: [check_ramp(ops, "cpu", F32, TILE * 3 + 9, ignored) for ignored in (-100, 0)],
    "pieces": lambda ops: check_ramp(ops, "cpu", F32, 64 * TILE + 77),
    "frozen": _checks((F32, {**BOTH, **CAPPED})),
    "fp16": _checks((FP16, {"outputs": ALL, "temperature": 0.001, "size": 0.001})),
    "fp16_frozen": _checks((FP16, BOTH)),
    "chunks": _checks((F32, {"shape": (11,), "chunk": 4, **BOTH}), (F32, {"shape": (11,), "chunk": 4, "outputs": ALL})),
    "ties": lambda ops: check_ties(ops, "cpu", F32),
    "not_a_number": lambda ops: check_not_a_number(ops, "cpu", F32),
    "alone": _checks((F32, {"temperature": 0.7, "scale": 1.3})),
    "large": lambda ops: [check_large_logits(ops, "cpu", F32, **LARGE[i]) for i in (0, 3)],
    "falling": lambda ops: check_large_logits(ops, "cpu", F32, **LARGE[2]),
    "falling_capped": _checks((F32, {"outputs": ALL, "softcap": 4.0, "scale": -1.3, "classes": 8201})),
    "likelihoods": lambda ops: check_without_own_kernels(ops, "cpu", F32, (*LIKELIHOODS[:6], CAPPED), {"LikelihoodPiece", "TorchPiece"}),
    "weighted_sum": _checks((F32, {"coefficients": True})),
    "skipped": _checks((F32, {"coefficients": True, "skip_ignored": True, "ignored": 3})),
})
OPERATION, PIECES, KERNELS = "shared/ops/linear_log_probs.py", "shared/ops/log_probs.py", "kernel_src/log_probs.py"
HEAD, CHUNKS = "shared/ops/linear_head.py", "shared/ops/log_prob_chunks.py"
SAVED = "ctx.save_for_backward(found[5], found[8], found[11], found[12]"
MUTANTS = [
    *generated(KERNELS, "results or frozen or falling or falling_capped or ties or ramp or large or not_a_number or pieces",
               "capped log_probs_statistics log_probs_combine log_probs_gradient times_bits",
               same={"largest_here = (values >= shift)": "the largest logit has the largest score",
                     "silent = (alpha == 0.0)": "alpha is -hit where nothing comes from the entropy"}),
    *errors_in(KERNELS, "falling", "log_probs_statistics",
         ("ct.minimum(largest", "ct.maximum(largest"),
         ("ct.min(largest", "ct.max(largest"),
         ("ct.maximum(largest", "ct.minimum(largest", "large"),
         ("shift, _ = capped(m, scale, softcap)", "pass", "large")),
    *errors_in(KERNELS, "falling_capped", "rising_values", ("ct.abs(scale)", "scale")),
    *errors_in(KERNELS, "falling", "log_probs_combine",
         ("ct.abs(after)", "after")),
    *errors_in(KERNELS, "results", "log_probs_gradient",
         ("lanes == lane", "lanes >= lane"),
         ("dx = dx * slope\n        ct.scatter(logits", "ct.scatter(logits"),
         ("ct.scatter(other, (row, cols), nothing, check_bounds=True)", "pass", "frozen")),
    *generated(PIECES, "results or fp16 or frozen", "Piece.coefficients Piece.in_range"),
    *generated(PIECES, "results", "TorchPiece.rows TorchPiece._gradient", kernels=False),
    *errors_in(PIECES, "results", "TorchPiece.rows", ("p.square()", "p"), kernels=False),
    *errors_in(PIECES, "results", "TorchPiece._gradient", (".mul_(slope)", ""), ("dx.add_(flat)", "pass"), kernels=False),
    *errors_in(PIECES, "likelihoods", "LikelihoodPiece.rows",
               (".neg()", ""), ("softcap=self.scores.softcap", "softcap=0.0"), ("(self.ignore_index, ", "(0, ")),
    *generated(PIECES, "likelihoods", "LikelihoodPiece.write_gradient"),
    *errors_in(PIECES, "likelihoods", "LikelihoodPiece.fits", ("capped_only and ", "")),
    *errors_in(HEAD, "likelihoods", "write_logits", ("alpha=factor", "alpha=1.0"), ("(bias, factor)", "(bias, 1.0)")),
    *errors_in(OPERATION, "frozen", "_LogProbs.forward", (SAVED, "ctx.save_for_backward(found[5], found[8], found[5], found[12]")),
    *errors_in(OPERATION, "fp16_frozen", "_LogProbs.forward", (SAVED, "ctx.save_for_backward(found[5], found[12], found[11], found[8]")),
    *errors_in(CHUNKS, "chunks", "run", ("target[rows]", "target[: logits.shape[0]]"),
               ("upstream.at(rows), None", "upstream.at(slice(0, logits.shape[0])), None"),
               ("of_entropy[rows]", "of_entropy[: logits.shape[0]]")),
    *generated(OPERATION, "weighted_sum", "_weighted_sum"),
    *errors_in("shared/ops/token_sums.py", "weighted_sum", "sum_over_tokens", ("(*tensors)", "(*tensors[:-1], -tensors[-1])"),
               ("gradients.times(dsum)", "gradients.times()"), ("ctx.gradients = None", "pass")),
    *errors_in(OPERATION, "skipped", "linear_log_probs", ("coefficients[kept]", "coefficients[: len(kept)]"),
               ("index_copy(0, kept, row)", "index_copy(0, kept - kept[0], row)")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
def _sample(ops, new):
    target, leaves = torch.arange(48, device=new.device), (new.normal(48, 1024), new.normal(96, 1024, scale=0.03))
    return lambda x, w: sum(ops.linear_log_probs(x, w, target, outputs=("entropy",), skip_ignored=False)[:2]), leaves


OPERATIONS = {"linear_log_probs": Case(None, sample=_sample)}


def check_large(ops, device):
    for frozen in (False, True):
        check_linear_log_probs(ops, device, torch.bfloat16, (515,), 512, 20000, outputs=ALL, frozen=frozen)


def _log_probs(hidden, weight, target, bias=None, rounded=False, temperature=1.0, softcap=None, scale=1.0, skip_ignored=None):
    """rounded: as `cross_entropy_exact`."""
    z = torch.nn.functional.linear(hidden, weight, bias)
    z = (z.double() if rounded else z) * scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    chosen = z.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(target == -100, 0.0)


SIGNATURES = {
    "linear_log_probs": Signature(
        lambda s: {"hidden": (*s.rows, s.features), "weight": (s.classes, s.features), "target": s.rows, **s.optional(bias=(s.classes,))},
        _log_probs,
        constant=("target",),
        options={"temperature": (0.5, 2.0), "softcap": (2.0, 30.0), "scale": (0.25, 3.0), "skip_ignored": (False, True)},
        call=lambda function, found, **options: function(**found, **options).log_probs,
        # With a frozen head hidden's gradient is made in the forward pass and multiplied afterwards.
        alone={"hidden": 1.5},
    )
}


def _calls(new):
    hidden, weight, target = new(5, 64, seed=14), new(40, 64, seed=15), new.integers([3, 39, -100, 0, 7])
    bias, of_rows = new(40, seed=17).float(), new.exact(5, seed=20)
    head, plain, every = (hidden, weight, None, target), [1.0, 0.0, 1.0], [True] * 5
    return [
        (*head, *[None] * 3, [False] * 3, plain, [True] + [False] * 4, -100, None, False),
        (*head, of_rows, None, None, [True, False, False], [0.7, 20.0, 1.3], every, -100, None, True),
        (hidden, weight.float(), bias, target, *[of_rows] * 3, [True] * 3, plain, every, -100, None, False),
    ]


OPERATORS = {"linear_log_probs_run": _calls}
GPU_TESTS = {"log_probs": ("test_operation[linear_log_probs",)}
