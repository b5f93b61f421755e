"""linear_log_probs against float64: the oracle, shapes, checks and planted errors."""

from contextlib import contextmanager
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.common import CPU, FLOATS, RELATIVE_ERROR, assert_close, assert_rows_close, check_kept, errors_in, exact, leaf, randn
from tests.ops.linear_jsd import logits_of
from tests.ops.signature import Signature
from tests.ops.suite import Case, of_suite

TILE = 8192  # the most columns that a block of the statistics has
ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
DIFFERENTIABLE = ("log_probs", "entropy", "mean_logits")
ABSOLUTE_ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of a logarithm, where the largest logit is 1 or less
CAPPED = {"temperature": 0.7, "softcap": 4.0, "scale": 1.3}
# Heads whose backward pass finds some columns of the logits in the memory of the weight's gradient: the tokens, and options.
COLUMNS = (
    (11, {"outputs": ("entropy", "is_top1"), "without": ("entropy",), "bias": True}),  # all of them: a gradient larger than the logits
    (16, {"features": 16, "classes": 60, "temperature": 0.7, "scale": -1.3}),  # all: products go where the last of their logits are
    (24, {"features": 5, "classes": 120, "chunk": 2, "bias": True, **CAPPED}),  # of 24 slices 5 there, one apart, 18 made again
    (24, {"features": 5, "classes": 67, "weight_dtype": torch.float32}),
    (24, {"features": 1, "classes": 12, "size": 5.0}),  # none
)
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


def log_probs_exact(z, target, counted, temperature=1.0, softcap=None, scale=1.0):
    """Computes every row's results from the logits z, by name, differentiable."""
    z = z * scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p, label = z.log_softmax(-1), torch.where(counted, target, 0)
    found = {
        "log_probs": log_p.gather(-1, label[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "mean_logits": z.mean(-1),
        "is_top1": z.argmax(-1) == label,
    }
    return {name: torch.where(counted, row, torch.zeros((), dtype=row.dtype)) for name, row in found.items()}


def check_linear_log_probs(
    ops, device, dtype, shape=(9,), features=64, classes=300, outputs=("log_probs",), bias=False, frozen=False, ignored=2, size=1.0,
    without=(), coefficients=False, chunk=None, first=0, skip_ignored=False, needs=(True, True, True), temperature=1.0, softcap=None,
    scale=1.0, weight_dtype=None, is_rounded_scaled=None, **options,
):  # fmt: skip
    """frozen: weight and bias require no gradient. ignored: how many tokens are. size: of the logits. without: what gets no gradient.
    needs: whether the gradients of hidden, weight and bias are asked for. chunk, first: as in `check_linear_jsd`. is_rounded_scaled: says
    of the call before whether the logits were rounded after they were multiplied by scale and temperature, not before."""
    weight_dtype = weight_dtype or dtype
    hidden = randn(*shape, features, dtype=dtype, device=device, scale=size)
    weight = randn(classes, features, dtype=dtype, device=device, seed=1, scale=0.2).to(weight_dtype)  # the numbers that are computed with
    vector = randn(classes, dtype=dtype, device=device, seed=4).to(weight_dtype) if bias else None
    needs = (needs[0], needs[1] and not frozen, needs[2] and not frozen)
    head = [leaf(t).requires_grad_(need) if t is not None else None for t, need in zip((hidden, weight, vector), needs)]
    tokens = hidden[..., 0].numel()
    target = torch.randint(0, classes, (tokens,), generator=torch.Generator().manual_seed(2))
    computed = [None if t is None else t.detach().to(dtype) for t in head]
    found = torch.nn.functional.linear(*computed).view(tokens, -1)
    if tokens:  # every other one is predicted right
        target = torch.where(torch.arange(tokens) % 2 == 0, found.argmax(-1).cpu(), target)
    target[:ignored] = -1
    counted = target != -1
    numbers = {"temperature": temperature, "softcap": softcap, "scale": scale}
    given = {"ignore_index": -1, "skip_ignored": skip_ignored, **numbers, **options}
    weights = randn(*shape, dtype=torch.float32, device=device, seed=7) if coefficients else None
    before = [t.detach().clone() for t in head if t is not None]
    module = ops.linear_head_module
    kept = module.plan_chunks
    if chunk is not None:
        module.plan_chunks = lambda *a: kept(*a)._replace(tokens=chunk, first=first)
    what = f"log probs {tuple(shape)} {outputs} {given}"

    def call():
        tensors = head[0], head[1], target.view(shape).to(device), head[2]
        return ops.linear_log_probs(*tensors, outputs=outputs, coefficients=weights, **given)

    try:
        result = call()
        with torch.no_grad():
            alone = call()
        wanted = ("log_probs", *outputs)
        for name, row, row_alone in zip(ALL, result, alone):
            assert (row is not None) == (name in wanted), f"{what}: {name} is {row}"
            if row is not None:
                # A GPU's products may be another kernel's for another number of rows, and round their logits in another way.
                alike = torch.equal(row, row_alone) if device == CPU else name == "is_top1" or torch.allclose(row, row_alone, 1e-2, 5e-2)
                assert row.shape == tuple(shape) and alike, f"{what}: {name} without gradients is another"
        head64 = [None if t is None else exact(t) for t in head]
        rounded_scaled = is_rounded_scaled is not None and is_rounded_scaled()
        if rounded_scaled:
            z = torch.nn.functional.linear(*head64) * (scale / temperature)
            z = z + (z.detach().to(dtype).double() - z.detach())
        else:
            z = logits_of(computed, head64)
        exactly = log_probs_exact(z.view(tokens, -1), target, counted, **({} if rounded_scaled else numbers))
        # Chunks, and a bias in the GEMM, may be added up in another way than the layer's own logits.
        bound = dtype if chunk or bias or skip_ignored or rounded_scaled else torch.float32
        for name, row in zip(ALL, result):
            if name == "is_top1" and row is not None:
                assert row.dtype == torch.bool and torch.equal(row.flatten().cpu(), exactly[name]), f"{what}: is_top1 is {row}"
            elif row is not None:
                assert row.dtype == torch.float32
                error = (row.flatten().double().cpu() - exactly[name]).abs().max() if tokens else 0.0
                size_of = max(1.0, float(z.detach().abs().max())) if tokens else 1.0
                assert error <= ABSOLUTE_ERROR[bound] * size_of, f"{what}: {name} has an error of {error:.2e}"
        if coefficients:
            total64 = (exactly["log_probs"] * weights.flatten().double().cpu()).sum()
            assert_close(result.weighted_sum, total64, bound, f"{what} weighted sum")
            losses, losses64 = [result.weighted_sum], [total64]
            assert not result.log_probs.requires_grad
        else:
            names = [name for name in DIFFERENTIABLE if name in wanted and name not in without]
            losses, losses64 = [getattr(result, name) for name in names], [exactly[name] for name in names]
        upstream = [randn(*t.shape, dtype=torch.float32, device=device, seed=20 + i) for i, t in enumerate(losses)]
        leaves, leaves64 = ([t for t, need in zip(tensors, needs) if t is not None and need] for tensors in (head, head64))
        gradients = torch.autograd.grad(losses, leaves, upstream, retain_graph=True)
        again = torch.autograd.grad(losses, leaves, upstream)
    finally:
        module.plan_chunks = kept
    expected = torch.autograd.grad(losses64, leaves64, [g.double().cpu().view(t.shape) for g, t in zip(upstream, losses64)])
    for i, (a, b, gradient, t) in enumerate(zip(gradients, again, expected, leaves, strict=True)):
        assert a.dtype == t.dtype and torch.equal(a, b), f"{what}: gradient {i} of a second backward pass"
        assert_rows_close(a.to(dtype), gradient, dtype, f"{what} gradient {i}", 2 if chunk or len(losses) > 1 or size > 1 else 1.5,
                          floor=0.3, row_factor=3)
    check_kept([t for t in head if t is not None], before, what)


def check_columns(ops, device, dtype):
    for tokens, options in COLUMNS:
        with columns_of_small_heads(ops):
            check_linear_log_probs(ops, device, dtype, (tokens,), **{"chunk": 4, **options})


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


class Products(TorchDispatchMode):
    """Counts the products with the vocabulary, which may come in parts, by their multiplications."""

    def __init__(self, tokens, features, classes):
        super().__init__()
        self.whole, self.multiplications = tokens * features * classes, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            x, y = args[-2:]
            self.multiplications += x.shape[0] * x.shape[1] * y.shape[1]
        return function(*args, **(kwargs or {}))

    @property
    def count(self):
        return self.multiplications / self.whole


# (options, whether the head is trained, what gets a gradient) -> products with the vocabulary
PRODUCTS = (
    ({}, False, (), 1),
    ({}, False, ("log_probs",), 2),
    ({"outputs": ("entropy",), "entropy_gradient": False}, False, ("log_probs",), 2),
    ({"outputs": ("entropy",), "entropy_gradient": True}, False, ("log_probs", "entropy"), 3),
    ({"outputs": ("entropy",), "entropy_gradient": False}, False, ("log_probs", "entropy"), 4),
    ({}, True, ("log_probs",), 3),  # the logits of 6 tokens fit into the memory of a gradient of 32 features
    ({}, True, (), 1),
    ({"outputs": ALL}, True, DIFFERENTIABLE, 4),
    ({"outputs": ("entropy",), "entropy_gradient": True}, True, ("log_probs", "entropy"), 4),
    ({"outputs": ("entropy",), "entropy_gradient": False}, True, ("log_probs", "entropy"), 5),
    ({"tokens": 64}, True, ("log_probs",), 4 - 128 / 301),  # of a gradient that is half as large as the logits
    ({"recompute": False}, True, ("log_probs",), 3),
    ({"outputs": ALL, "recompute": False}, True, DIFFERENTIABLE, 3),
    ({"recompute": False}, False, ("log_probs",), 2),
    ({"recompute": False}, True, (), 1),
    ({"coefficients": True, "recompute": False}, True, ("weighted_sum",), 3),
    ({"coefficients": True}, True, ("weighted_sum",), 3),
    ({"coefficients": True}, False, ("weighted_sum",), 2),
)


@contextmanager
def columns_of_small_heads(ops):
    """Keeps columns of heads with few features too, whose backward pass otherwise makes all logits again."""
    module = ops.log_prob_columns_module
    least, module.LEAST = module.LEAST, 0
    try:
        yield
    finally:
        module.LEAST = least


def count_products(ops, device, options, trained, differentiated) -> float:
    tokens = options.get("tokens", 6)
    hidden, weight = (randn(n, 32, dtype=torch.float32, device=device, seed=i) for i, n in enumerate((tokens, 301)))
    hidden.requires_grad_(bool(differentiated))
    weight.requires_grad_(trained)
    options = {**options, "coefficients": torch.ones(6, device=device)} if "coefficients" in options else dict(options)
    options.pop("tokens", None)
    with Products(tokens, 32, 301) as products:
        found = ops.linear_log_probs(hidden, weight, torch.arange(tokens, device=device), **options)
        if differentiated:
            sum(getattr(found, name).sum() for name in differentiated).backward()
    return products.count


def check_products(ops, device):
    assert count_products(ops, device, {}, True, ("log_probs",)) == 4, "a head of few features keeps columns"
    for options, trained, differentiated, expected in PRODUCTS:
        with columns_of_small_heads(ops):
            found = count_products(ops, device, options, trained, differentiated)
        assert found == expected, f"{options}, trained {trained}, gradients of {differentiated}: {found} products, expected {expected}"


def check_kept_logits(ops, device, dtype):
    """Whatever is kept from the forward pass, a second backward pass gives the bits of the first one, and so do logits that are packed and
    unpacked like all that is saved. All logits, kept, give those of logits that are all made again; columns of them, of which the weight's
    gradient is one product, not four, do within rounding."""
    module = ops.linear_head_module
    plan = module.plan_chunks
    module.plan_chunks = lambda *a: plan(*a)._replace(tokens=4, first=0)
    target = torch.tensor([5, 7, -100, 3, 299, 2, 1, 0, 8, 9, 4], device=device)
    try:
        for options in ({"outputs": ALL, **CAPPED}, {"temperature": 0.7}):
            gradients = []
            for recompute, copied in ((True, False), (True, True), (False, False), (False, True)):
                shapes = (11, 32), (300, 32), (300,)
                leaves = [randn(*shape, dtype=dtype, device=device, seed=i, scale=0.3).requires_grad_() for i, shape in enumerate(shapes)]
                hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone() if copied else t, lambda t: t)  # noqa: B023
                with hooks, columns_of_small_heads(ops):
                    found = ops.linear_log_probs(*leaves[:2], target, leaves[2], recompute=recompute, skip_ignored=False, **options)
                losses = [getattr(found, name) for name in DIFFERENTIABLE if getattr(found, name) is not None]
                upstream = [randn(11, dtype=torch.float32, device=device, seed=9 + i) for i in range(len(losses))]
                gradients += [torch.autograd.grad(losses, leaves, upstream, retain_graph=True) for _ in range(2)]
            columns = "outputs" not in options
            for i, other in enumerate(gradients):
                first = gradients[4 if columns and i >= 4 else 0]
                assert all(map(torch.equal, first, other)), f"{options}: gradients {i}"
            for made, kept in zip(gradients[0], gradients[4]):
                assert_rows_close(made, kept.double().cpu(), dtype, f"{options}: what is kept", 3, floor=0.3, row_factor=3)
    finally:
        module.plan_chunks = plan


def check_guess(ops, device):
    """What the last backward pass brought decides what the next forward pass makes, where nothing is said."""
    options, both = {"outputs": ("entropy",)}, ("log_probs", "entropy")
    ops.linear_log_probs_module._entropy_had_gradient.clear()
    found = [count_products(ops, device, options, False, names) for names in (both, both, both[:1], both[:1], both)]
    assert found == [4, 3, 3, 2, 4], f"{found} products"


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


OPERATION, PIECES, KERNELS = "shared/ops/linear_log_probs.py", "shared/ops/log_probs.py", "kernel_src/log_probs.py"
HEAD, CHUNKS, KEPT = "shared/ops/linear_head.py", "shared/ops/log_prob_chunks.py", "shared/ops/log_prob_columns.py"
SAVED = "ctx.save_for_backward(found[5], found[8], found[11], found[12]"
MUTANTS = [
    *errors_in(KERNELS, "results", "capped", ("scale / softcap", "1.0 / softcap"), ("t * softcap", "t")),
    *errors_in(KERNELS, "results", "log_probs_statistics",
         ("part * TILE +", "", "ramp"),
         ("i * STEP +", "", "ramp"),
         ("-MINUS_INFINITY, MINUS_INFINITY", "MINUS_INFINITY, MINUS_INFINITY", "falling"),
         ("ct.minimum(largest", "ct.maximum(largest", "falling"),
         ("ct.min(largest", "ct.max(largest", "falling"),
         ("ct.maximum(largest", "ct.minimum(largest", "large"),
         ("m * sign, check", "m, check", "falling"),
         ("shift_of(m * sign) * sign", "shift_of(m * sign)", "falling"),
         ("shift, _ = capped(m, scale, softcap)", "pass", "large"),
         ("ct.where(inside, values, MINUS_INFINITY)", "values"),
         ("total = total + e", "total = e"),
         ("dot = dot + ", "dot = "),
         ("squares + e * e", "squares + e"),
         ("ct.where(inside, values * share, 0.0)", "values * share"),
         ("largest_here | (values >= shift)", "largest_here", "large"),
         ("ct.minimum(first,", "ct.maximum(first,")),
    *errors_in(KERNELS, "results", "rising_values", ("ct.abs(scale)", "scale", "falling_capped")),
    *errors_in(KERNELS, "results", "log_probs_combine",
         ("ct.abs(after)", "after", "falling"),
         ("old * dot + times_bits(old, old_bits) * s", "old * dot", "pieces"),
         ("old * old * sq", "old * sq", "pieces"),
         ("+ times_bits(ours, bits) * ps", "", "ramp"),
         ("ours * ours * read_partials", "ours * read_partials", "ramp"),
         ("total = total + ct.sum", "total = ct.sum", "pieces"),
         ("ct.where((pm == new) | (tops >= top),", "ct.where(pm <= new,", "ramp"),
         ("ct.where(top > old_top, first, ct.minimum(best, first))", "first", "pieces"),
         ("s = old * s +", "s = s +", "pieces"),
         ("i * PARTS +", "", "pieces"),
         ("(t != ignore_index) & ", "", "ramp"),
         ("m * sign_of(scale * after)", "m", "falling"),
         ("(value - top) * after", "(value - top)"),
         ("(bits_of_sum - dot / s) * LN2", "(bits_of_sum - dot) * LN2"),
         ("2.0 * bits_of_sum", "bits_of_sum"),
         ("ct.where(counted, whole * after, 0.0)", "whole * after"),
         ("ct.minimum(ct.maximum(2.0 * total, -LARGEST), LARGEST)", "2.0 * total", "large"),
         ("counted & (best", "(best", "ramp")),
    *errors_in(KERNELS, "results", "log_probs_gradient",
         ("part * TILE + lanes", "lanes"),
         ("beta * factor * LN2", "0.0"),
         ("+ flat * factor", ""),
         ("lanes == lane", "lanes >= lane"),
         ("dx = dx * slope\n        ct.scatter(logits", "ct.scatter(logits"),
         ("factor = scale * after", "factor = scale"),
         ("- log_sum * LOG2E", "")),
    *errors_in(KERNELS, "alone", "log_probs_gradient", ("alpha * factor", "alpha"), ("hit * factor", "hit"), ("- log_sum * LOG2E", "")),
    *errors_in(KERNELS, "frozen", "log_probs_gradient",
         ("row_number(coefficients, row, 5)", "row_number(coefficients, row, 4)"),
         ("ct.scatter(other, (row, cols), nothing, check_bounds=True)", "pass")),
    (KERNELS, "times_bits", "e * ct.maximum(bits, LEAST)", "e * bits", "results"),
    *errors_in(PIECES, "results", "Piece.coefficients",
         ("torch.where(counted, t, 0.0)", "t"),
         ("alpha - u * self.entropy", "alpha"),
         ("w / self.logits.shape[1]", "w")),
    *errors_in(PIECES, "fp16", "Piece.in_range", ("c * factor if", "c if"), ("abs(scale * after)", "1e-4")),
    *errors_in(PIECES, "results", "TorchPiece.rows",
         ("p.square()", "p"),
         ("self.entropy.masked_fill(~counted, 0.0)", "self.entropy * 1.01"), kernels=False),
    *errors_in(PIECES, "results", "TorchPiece._gradient", (".mul_(slope)", ""), ("dx.add_(flat)", "pass"), kernels=False),
    *errors_in(PIECES, "likelihoods", "LikelihoodPiece.rows",
               (".neg()", ""), ("softcap=self.scores.softcap", "softcap=0.0"), ("(self.ignore_index, ", "(0, ")),
    *errors_in(PIECES, "likelihoods", "LikelihoodPiece.write_gradient", ("-self.factor(self.scores)", "-1.0")),
    *errors_in(PIECES, "likelihoods", "LikelihoodPiece.fits", ("capped_only and ", "")),
    *errors_in(HEAD, "likelihoods", "write_logits", ("alpha=factor", "alpha=1.0"), ("(bias, factor)", "(bias, 1.0)")),
    *errors_in(OPERATION, "frozen", "_LogProbs.forward", (SAVED, "ctx.save_for_backward(found[5], found[8], found[5], found[12]")),
    *errors_in(OPERATION, "fp16_frozen", "_LogProbs.forward", (SAVED, "ctx.save_for_backward(found[5], found[12], found[11], found[8]")),
    *errors_in(OPERATION, "guess", "_LogProbs.backward", ("] = upstream.entropy is not None", "] = True")),
    *errors_in(OPERATION, "kept_logits", "_LogProbs.backward", ("[] if spent else [t.data", "[t.data")),
    *errors_in(OPERATION, "columns", "_LogProbs.backward", ("if not spent else None", "")),
    *errors_in(OPERATION, "products", "_what_is_kept", ("return COLUMNS", "return NOTHING")),
    *errors_in(KEPT, "columns", "Columns.kept", ("memory.numel() - (self.plan.slices[within - 1].stop - part.start)", "part.start")),
    *errors_in(KEPT, "columns", "Columns.keep", ("self.lse[rows] = lse", "self.lse[rows] = lse + 1")),
    *errors_in(KEPT, "columns", "Columns.weight_gradients",
               ("piece(logits, target", "piece(logits, target + 1"),
               ("else bias[part]", "else bias[: part.stop - part.start]"),
               ("logits = logits.clone()", "pass"),
               ("dbias[part] = ", "dbias[part] = 2 * "),
               ("torch.where(is_counted(target, weight.shape[0], options.ignore_index), upstream, 0.0)", "upstream")),
    *errors_in(PIECES, "columns", "KernelPiece.write_columns", ("self.target - first", "self.target")),
    *errors_in(PIECES, "columns", "TorchPiece.write_columns", ("self.target - first", "self.target"), ("dx.mul_(slope)", "dx"),
               (".mul_(self.scores.numbers()[2])", ""), kernels=False),
    *errors_in(CHUNKS, "products", "run", ("[] if keep else", "None if keep else")),
    *errors_in(HEAD, "products", "walk", ("next(made, None)", "None")),
    *errors_in(CHUNKS, "chunks", "run", ("target[rows]", "target[: logits.shape[0]]"),
               ("upstream.at(rows), None", "upstream.at(slice(0, logits.shape[0])), None"),
               ("of_entropy[rows]", "of_entropy[: logits.shape[0]]")),
    *errors_in(OPERATION, "weighted_sum", "_WeightedSum.forward", ("bias, target, coefficients)\n", "bias, target, -coefficients)\n")),
    *errors_in(OPERATION, "weighted_sum", "_WeightedSum.backward", ("gradients.times(dsum)", "gradients.times()"),
               ("gradients, ctx.gradients = ctx.gradients, None", "gradients = ctx.gradients")),
    *errors_in(OPERATION, "skipped", "linear_log_probs", ("coefficients[kept]", "coefficients[: len(kept)]"),
               ("index_copy(0, kept, row)", "index_copy(0, kept - kept[0], row)")),
]  # fmt: skip
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
    "guess": lambda ops: check_guess(ops, "cpu"),
    "products": lambda ops: check_products(ops, "cpu"),
    "kept_logits": lambda ops: check_kept_logits(ops, "cpu", F32),
    "columns": lambda ops: check_columns(ops, "cpu", F32),
    "alone": _checks((F32, {"temperature": 0.7, "scale": 1.3})),
    "large": lambda ops: [check_large_logits(ops, "cpu", F32, **LARGE[i]) for i in (0, 3)],
    "falling": lambda ops: check_large_logits(ops, "cpu", F32, **LARGE[2]),
    "falling_capped": _checks((F32, {"outputs": ALL, "softcap": 4.0, "scale": -1.3, "classes": 8201})),
    "likelihoods": lambda ops: check_without_own_kernels(ops, "cpu", F32, (*LIKELIHOODS[:6], CAPPED), {"LikelihoodPiece", "TorchPiece"}),
    "weighted_sum": _checks((F32, {"coefficients": True})),
    "skipped": _checks((F32, {"coefficients": True, "skip_ignored": True, "ignored": 3})),
})


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
