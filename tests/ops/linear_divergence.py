"""linear_divergence against float64: the oracle, shapes, checks and planted errors."""

from functools import partial

import torch

from tests.ops.common import CPU, FLOATS, assert_rows_close, check_kept, errors_in, exact, leaf, randn
from tests.ops.generated import generated
from tests.ops.linear_jsd import chunks_of, jsd_exact
from tests.ops.suite import Case, of_suite

F32 = torch.float32
LARGE = {}, {"temperature": 0.7, "scale": 1.3, "teacher_scale": 0.8}, {"scale": -0.5, "teacher_scale": -0.5}
CAPPED = {"temperature": 0.7, "softcap": 4.0, "scale": 1.3, "teacher_softcap": 7.0, "teacher_scale": 0.6}
CASES = tuple(
    {"beta": beta, **options}
    for beta in (0.0, 0.3, 1.0)
    for options in (
        {}, {"frozen": True, "scale": -1.3, "teacher_scale": -0.7}, {"bias": True, **CAPPED},
        {"bias": True, "frozen": True, "shape": (2, 3), **CAPPED}, {"bias": True, "frozen": "weight"},
    )
)  # fmt: skip
ABSOLUTE_ERROR = 3e-5  # logits are not rounded, whatever the dtype


def check_linear_divergence(
    ops, device, dtype, shape=(7,), features=48, teacher_features=32, classes=300, beta=0.0, bias=False, frozen=False, temperature=1.0,
    softcap=None, scale=1.0, teacher_softcap=None, teacher_scale=1.0, chunk=None, weight_dtype=None, size=1.0,
):  # fmt: skip
    """size: of the student's logits. chunk: tokens of a chunk, instead of all. frozen: the head, or "weight" for all of it but its bias."""
    def head(width, seed, size=1.0):
        states = randn(*shape, width, dtype=dtype, device=device, seed=seed, scale=size)
        weight = randn(classes, width, dtype=dtype, device=device, seed=seed + 1, scale=0.2).to(weight_dtype or dtype)
        return states, weight, randn(classes, dtype=dtype, device=device, seed=seed + 2).to(weight_dtype or dtype) if bias else None

    trained = (0,) if frozen is True else (0, 2) if frozen else (0, 1, 2)
    student = [None if t is None else leaf(t).requires_grad_(i in trained) for i, t in enumerate(head(features, 0, size))]
    teacher = head(teacher_features, 5)
    given = [t for t in (*student, *teacher) if t is not None]
    before = [t.detach().clone() for t in given]
    options = {"beta": beta, "temperature": temperature, "softcap": softcap, "scale": scale, "teacher_softcap": teacher_softcap,
               "teacher_scale": teacher_scale}  # fmt: skip
    arguments = (student[0], student[1], teacher[0], teacher[1], student[2], teacher[2])
    with chunks_of(ops, tokens=chunk):
        found = ops.linear_divergence(*arguments, **options)
        with torch.no_grad():
            alone = ops.linear_divergence(*arguments, **options)
        upstream = randn(*shape, dtype=torch.float32, device=device, seed=9)
        leaves = [t for t in student if t is not None and t.requires_grad]
        gradients = torch.autograd.grad(found.divergence, leaves, upstream, retain_graph=True, materialize_grads=True)
        again = torch.autograd.grad(found.divergence, leaves, upstream, materialize_grads=True)
    student64 = [None if t is None else exact(t) for t in student]
    teacher64 = [None if t is None else t.double().cpu() for t in teacher]

    def scores(head, scale, softcap):
        z = torch.nn.functional.linear(*head).flatten(0, -2) * scale
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    z, t = scores(student64, scale, softcap), scores(teacher64, teacher_scale, teacher_softcap)
    wanted = jsd_exact(z, t, beta, temperature)
    log_p = (z / temperature).log_softmax(-1)
    what = f"linear divergence {tuple(shape)} {options}"
    assert not found.entropy.requires_grad
    for name, row, other, row64 in (("divergence", *(f.divergence for f in (found, alone)), wanted),
                                    ("entropy", *(f.entropy for f in (found, alone)), -(log_p.exp() * log_p).sum(-1))):
        assert row.shape == tuple(shape) and row.dtype == torch.float32 and torch.equal(row, other), f"{what}: {name} without gradients"
        error = (row.flatten().double().cpu() - row64).abs().max() if row.numel() else 0.0
        assert error <= ABSOLUTE_ERROR * size, f"{what}: {name} has an error of {error:.2e}"
    leaves64 = [t64 for t64, t in zip(student64, student) if t is not None and t.requires_grad]
    expected = torch.autograd.grad(wanted, leaves64, upstream.flatten().double().cpu())
    for i, (a, b, gradient, t) in enumerate(zip(gradients, again, expected, leaves, strict=True)):
        assert a.dtype == t.dtype and torch.equal(a, b), f"{what}: gradient {i} of a second backward pass"
        assert_rows_close(a.to(dtype), gradient, dtype, f"{what} gradient {i}", 2, floor=0.3, row_factor=3)
    check_kept(given, before, what)


def check_no_tokens(ops, device, dtype):
    hidden, weight = leaf(randn(0, 16, dtype=dtype, device=device)), leaf(randn(50, 16, dtype=dtype, device=device))
    found = ops.linear_divergence(hidden, weight, hidden.detach(), weight.detach())
    found.divergence.sum().backward()
    assert found.entropy.shape == (0,) and hidden.grad.shape == hidden.shape and not weight.grad.any()


def check_same_heads(ops, device, dtype):
    """A student that is its teacher: nothing, with a gradient of nothing, also where probabilities are 0."""
    hidden, weight = leaf(randn(4, 16, dtype=dtype, device=device, scale=30.0)), randn(90, 16, dtype=dtype, device=device)
    for beta in (0.0, 0.5, 1.0):
        found = ops.linear_divergence(hidden, weight, hidden.detach(), weight, beta=beta)
        (gradient,) = torch.autograd.grad(found.divergence.sum(), hidden)
        assert found.divergence.abs().max() < 1e-5 and gradient.abs().max() < 1e-3


def check_not_a_number(ops, device, dtype):
    hidden, weight = randn(4, 16, dtype=dtype, device=device), randn(90, 16, dtype=dtype, device=device, seed=1)
    teacher = randn(4, 16, dtype=dtype, device=device, seed=2)
    for beta in (0.0, 0.5, 1.0):
        results = []
        for bad in (False, True):
            x = hidden.clone()
            if bad:
                x[1] = float("nan")
            x = leaf(x)
            found = ops.linear_divergence(x, weight, teacher, weight, beta=beta)
            found.divergence.sum().backward()
            results.append((*found, x.grad))
        for good, bad in zip(*results):
            assert torch.equal(good[[0, 2, 3]], bad[[0, 2, 3]]) and bad[1].isnan().all(), "a row that is no number"


def check_silent_tokens(ops, device, dtype, frozen=False):
    """A token whose divergence gets a gradient of 0: nothing, though its teacher's logits are no numbers."""
    for beta in (0.0, 0.5, 1.0):
        results = []
        for bad in (False, True):
            leaves = [leaf(randn(*shape, dtype=dtype, device=device, seed=i)) for i, shape in enumerate(((4, 16), (90, 16), (90,)))]
            wanted = leaves[:1] if frozen else leaves
            hidden, weight, bias = (t if not frozen or t is leaves[0] else t.detach() for t in leaves)
            teacher = randn(4, 16, dtype=dtype, device=device, seed=5)
            if bad:
                teacher[1] = float("nan")
            found = ops.linear_divergence(hidden, weight, teacher, weight.detach(), bias, beta=beta)
            upstream = torch.tensor([1.0, 0.0, 0.5, -2.0], device=device)
            results.append(torch.autograd.grad(found.divergence, wanted, upstream))
        for good, bad in zip(*results):
            assert torch.equal(good, bad), f"beta {beta}: a token with a gradient of 0"


def check_large_logits(ops, device, classes=2500, **scores):
    """Logits that are one large number in every class, of the student or of the teacher: p or q is 1 / classes."""
    top, plain = torch.finfo(F32).max, randn(classes, dtype=F32, device=CPU)
    flat = torch.stack([torch.full((classes,), value) for value in (1e9, -1e9, top, -top)])
    other = plain.expand_as(flat)
    for beta in (0.3,) if scores else (0.0, 0.3, 1.0):
        for student, teacher in ((flat, other), (other, flat), (flat, flat.flip(0))):
            weight, units = leaf(student.t().contiguous().to(device)), torch.eye(len(flat), device=device)
            found = ops.linear_divergence(units, weight, units, teacher.t().contiguous().to(device), beta=beta, **scores)
            (gradient,) = torch.autograd.grad(found.divergence.sum(), weight)
            x, y = student.double().requires_grad_(), teacher.double()
            wanted = jsd_exact(x * scores.get("scale", 1.0), y * scores.get("teacher_scale", 1.0), beta, scores.get("temperature", 1.0))
            (expected,) = torch.autograd.grad(wanted.sum(), x)
            log_p = (x * scores.get("scale", 1.0) / scores.get("temperature", 1.0)).log_softmax(-1)
            what = f"beta {beta} {scores}"
            for name, row, row64 in (("divergence", found.divergence, wanted), ("entropy", found.entropy, -(log_p.exp() * log_p).sum(-1))):
                error = (row.detach().cpu().double() - row64.detach()).abs().max()
                assert error <= ABSOLUTE_ERROR, f"{what}: {name} has an error of {error:.2e}"
            error = (gradient.cpu().double().t() - expected).abs().max()
            assert error <= 2e-6 * expected.abs().max() + 1e-7, f"{what}: the gradient has an error of {error:.2e}"


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    check = partial(check_linear_divergence, ops, device)
    for dtype in dtypes:
        for i, options in enumerate(CASES if dtype == torch.float32 else CASES[1::2]):
            yield f"case {i} {dtype}", partial(check, dtype, **options)
        yield f"chunks {dtype}", partial(check, dtype, (9,), chunk=4, beta=0.5, bias=True)
        yield f"chunks of a frozen head {dtype}", partial(check, dtype, (9,), chunk=4, beta=0.5, frozen=True)
        yield f"pieces {dtype}", partial(check, dtype, (2,), 16, 16, 4107, beta=0.5)
        yield f"no tokens {dtype}", partial(check_no_tokens, ops, device, dtype)
        yield f"the same heads {dtype}", partial(check_same_heads, ops, device, dtype)
        yield f"not a number {dtype}", partial(check_not_a_number, ops, device, dtype)
        for frozen in (False, True):
            yield f"silent tokens {frozen} {dtype}", partial(check_silent_tokens, ops, device, dtype, frozen)
        if dtype == torch.float32:
            for scores in LARGE:
                yield f"large logits {scores}", partial(check_large_logits, ops, device, **scores)
        else:
            yield f"a wider weight {dtype}", partial(check, dtype, weight_dtype=torch.float32, bias=True)


OPERATION, KERNELS = "shared/ops/linear_divergence.py", "kernel_src/head_divergence.py"
MUTANTS = [
    *generated(KERNELS, "between", "log_mixture"),
    *generated(KERNELS, "forward or between", "head_divergence_sums head_divergence_gradient"),
    *generated(KERNELS, "between or falling", "log_p"),
    *generated(OPERATION, "a trained bias or frozen", "_LinearDivergence.forward"),
    *generated(OPERATION, "between or silent tokens or forward", "_TorchPiece.write", kernels=False),
    (KERNELS, "head_divergence_sums", "cols, teacher_scale, teacher_softcap, teacher_after)", "cols, scale, softcap, after)", "forward"),
    (KERNELS, "finite", "ct.where(bits < LEAST, LEAST, bits)", "ct.maximum(bits, LEAST)", "nan"),
    *errors_in(OPERATION, "frozen", "_LinearDivergence.forward", ("backward(gradients.hidden,", "backward(-gradients.hidden,")),
    *errors_in(OPERATION, "frozen", "_LinearDivergence.backward",
         ("upstream[:, None] if factor is None", "1.0 if factor is None"),
         ("torch.where(upstream[:, None] == 0, 0.0, gradient * number)", "(gradient * number)", "silent tokens, frozen")),
    *errors_in(OPERATION, "silent tokens", "_TorchPiece.write", ("torch.where(scale[:, None] == 0, 0.0, dz)", "dz"), kernels=False),
    *errors_in(OPERATION, "chunks", "_run", ("teacher_hidden[rows]", "teacher_hidden[: logits.shape[0]]")),
    *errors_in(OPERATION, "fp16", "_Piece.gradient", ("scale = scale * power", "pass")),
]  # fmt: skip
CHECKS = of_suite({
    "forward": lambda ops: check_linear_divergence(ops, "cpu", F32, classes=4107, **CAPPED),
    "between": lambda ops: check_linear_divergence(ops, "cpu", F32, classes=2500, beta=0.3, **CAPPED),
    "frozen": lambda ops: check_linear_divergence(ops, "cpu", F32, beta=0.3, frozen=True),
    "chunks": lambda ops: check_linear_divergence(ops, "cpu", F32, (9,), chunk=4),
    "fp16": lambda ops: check_linear_divergence(ops, "cpu", torch.float16),
    "falling": lambda ops: check_large_logits(ops, "cpu", **LARGE[2]),
    "nan": lambda ops: check_not_a_number(ops, "cpu", F32),
    "a trained bias": lambda ops: check_linear_divergence(ops, "cpu", F32, bias=True, frozen="weight"),
    "silent tokens": lambda ops: check_silent_tokens(ops, "cpu", F32),
    "silent tokens, frozen": lambda ops: check_silent_tokens(ops, "cpu", F32, frozen=True),
})


# ---------------------------------------------------------------- in the tests of every operation
def _sample(ops, new):
    teacher = new.normal(48, 1024, seed=1).detach(), new.normal(96, 1024, scale=0.03, seed=1).detach()
    leaves = new.normal(48, 1024), new.normal(96, 1024, scale=0.03)
    return lambda x, w: ops.linear_divergence(x, w, *teacher, beta=0.5).divergence, leaves


OPERATIONS = {"linear_divergence": Case(None, sample=_sample)}


def check_large(ops, device):
    for frozen in (False, True):
        check_linear_divergence(ops, device, torch.bfloat16, (515,), 512, 384, 20000, beta=0.3, frozen=frozen)


GPU_TESTS = {"head_divergence": ("test_operation[linear_divergence",)}
