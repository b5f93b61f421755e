"""The gated delta rule against its definition, token by token, in float64."""

import contextlib
import copy
import importlib

import torch

from tests.ops.common import BF16, FP32, assert_rows_close, backward_twice, errors_in, leaf, randn, runtime_of, unchanged
from tests.ops.generated import generated
from tests.tolerances import relative_error

WIDTH, CHUNK = 128, 64
# Beside the bound of one rounding: W, U, P, N and the states are rounded to half precision on the way, and keys that are alike make the
# entries of the inverse cancel in what follows. dg is a sum over all later tokens of terms that cancel.
FACTOR, ALIKE, OF_G = 1.6, 3.2, 4.0
FLOOR = 0.5  # a row is a product with q and k, which may be small by chance while what is rounded is not


def module_of(package):
    return importlib.import_module(f"{package.__name__}.shared.ops.gated_delta_rule")


def step_of(package):
    return importlib.import_module(f"{package.__name__}.shared.ops.gated_delta_step").gated_delta_step


def recurrence(q, k, v, g, beta, starts, initial=None, l2_norm=True):
    """(output, final states) of flat tokens, in the dtype of the arguments; the definition, with one state a document."""
    tokens, heads = g.shape
    if l2_norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    ends, out, finals = [*starts[1:], tokens], [], []
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        state = v.new_zeros(heads, k.shape[-1], v.shape[-1]) if initial is None else initial[i]
        for t in range(start, end):
            state = state * g[t].exp()[:, None, None]
            delta = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + torch.einsum("hk,hv->hkv", k[t], delta)
            out.append(torch.einsum("hk,hkv->hv", q[t], state) * q.shape[-1] ** -0.5)
        finals.append(state)
    return torch.stack(out), torch.stack(finals)


def inputs_of(dtype, device, tokens, key_heads, heads, width, *, alike=0.0, decay=0.3, seed=0):
    """q, k, v, g, beta of flat tokens. alike: how much of each key is the same in all tokens of a head."""
    accumulated = torch.promote_types(dtype, FP32)
    numbers = [randn(tokens, n, width, dtype=FP32, device=device, seed=seed + i) for i, n in enumerate((key_heads, key_heads, heads))]
    common = randn(1, key_heads, width, dtype=FP32, device=device, seed=seed + 5)
    numbers[1] = numbers[1] * (1 - alike) + alike * 3 * common
    uniform = [torch.rand(tokens, heads, generator=torch.Generator().manual_seed(seed + i)).to(device) for i in (3, 4)]
    return [*(x.to(dtype) for x in numbers), -decay * uniform[0].to(accumulated), uniform[1].to(dtype)]


def check_rule(package, device, dtype, lengths, *, key_heads=1, heads=2, width=WIDTH, alike=0.0, decay=0.3, carry=False, l2_norm=True,
               of_g=OF_G, rows=2.0):
    """lengths: of the documents, which lie one after another in one row."""
    ops = module_of(package)
    tokens, starts = sum(lengths), [sum(lengths[:i]) for i in range(len(lengths))]
    given = inputs_of(dtype, device, tokens, key_heads, heads, width, alike=alike, decay=decay)
    if not l2_norm:
        given[:2] = [torch.nn.functional.normalize(x.float(), dim=-1).to(dtype) for x in given[:2]]
    states = randn(len(lengths), heads, width, width, dtype=torch.promote_types(dtype, FP32), device=device, seed=7, scale=0.3)
    leaves = [leaf(x[None]) for x in given] + ([leaf(states)] if carry else [])
    exact = [leaf(x.detach().double().cpu()) for x in (*(x[0] for x in leaves[:5]), *leaves[5:])]
    cu_seqlens = torch.tensor([*starts, tokens], dtype=torch.int32, device=device) if len(lengths) > 1 else None
    untouched = unchanged(*leaves)
    options = {"cu_seqlens": cu_seqlens, "l2_norm": l2_norm, "output_final_state": carry, "initial_state": leaves[5] if carry else None}
    out, final = ops.gated_delta_rule(*leaves[:5], **options)
    out64, final64 = recurrence(*exact[:5], starts, exact[5] if carry else None, l2_norm)
    what, factor = f"gated delta rule {lengths}", ALIKE if alike else FACTOR
    assert_rows_close(out[0], out64, dtype, f"{what} output", factor, FLOOR, rows)
    dout = randn(*out.shape, dtype=dtype, device=device, seed=8)
    result, grad = out, dout
    result64, grad64 = (out64,), (dout[0].double().cpu(),)
    if carry:
        assert_rows_close(final.to(dtype), final64, dtype, f"{what} final state", factor, FLOOR)
        dfinal = randn(*final.shape, dtype=FP32, device=device, seed=9)
        result, grad = (out, final), (dout, dfinal)
        result64, grad64 = (out64, final64), (*grad64, dfinal.double().cpu())
    found = backward_twice(result, grad, leaves)
    expected = torch.autograd.grad(result64, exact, grad64)
    for name, a, b in zip(("dq", "dk", "dv", "dg", "dbeta", "dinitial"), found, expected, strict=False):
        if name in ("dg", "dbeta"):  # numbers whose terms cancel: judged as one vector
            a, b = a.flatten(), b.flatten()
        more = of_g if name == "dg" else 1.5
        assert_rows_close(a.to(dtype).view(b.shape), b, dtype, f"{what} {name}", factor * more, FLOOR, rows)
    untouched()


# One chunk that is not full, several documents (one of a single token, one of a whole chunk), a chunk's edge.
LENGTHS = ((40,), (37, 64, 1, 70), (64, 65))


def check_inverses(package, device):
    """The inverse that a forward pass saves, of keys that are alike. Where every beta is 2, sums of its terms cancel."""
    ops = module_of(package)
    for alike, twice, norm in ((0.0, False, True), (0.7, False, True), (0.7, False, False), (1.0, False, True), (0.7, True, True)):
        q, k, v, g, beta = inputs_of(BF16, device, CHUNK, 1, 2, WIDTH, alike=alike, decay=0.01)
        k, beta = torch.nn.functional.normalize(k.float(), dim=-1).to(BF16), torch.full_like(g, 2.0) if twice else beta.float()
        chunks = ops.chunks_of_rows(1, CHUNK, k.device)
        found = ops.rule_forward(q, k, v, g, beta, chunks.table, chunks.bounds, None, chunks.longest, 1.0, norm, False)[2]
        keys, gamma, rows = k[:, 0].double().cpu(), g.double().cpu().cumsum(0).T, beta.double().cpu().T[:, :, None]
        triangle = (rows * (gamma[:, :, None] - gamma[:, None]).exp() * (keys @ keys.T)).tril(-1)
        exact = torch.linalg.inv(torch.eye(CHUNK, dtype=torch.float64) + triangle)
        error, bound = relative_error(found.transpose(0, 1), exact), 2e-2 if twice else 2e-3
        assert error <= bound, f"inverses, keys alike by {alike}, beta 2: {twice}, norm {norm}: {error:.1e}, expected at most {bound}"


def check_packed_is_separate(package, device, dtype, key_heads=1, heads=2):
    """Documents in one row and each alone: the same bits, forward and backward."""
    ops = module_of(package)
    lengths = (20, 64, 45)
    given = inputs_of(dtype, device, sum(lengths), key_heads, heads, WIDTH)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    packed = [leaf(x[None]) for x in given]
    out, _ = ops.gated_delta_rule(*packed, cu_seqlens=ends, l2_norm=True)
    dout = randn(*out.shape, dtype=dtype, device=device, seed=8)
    together = torch.autograd.grad(out, packed, dout)
    for start, length in zip(ends.tolist(), lengths, strict=False):
        part = slice(start, start + length)
        alone = [leaf(x[None, part]) for x in given]
        of_part, _ = ops.gated_delta_rule(*alone, l2_norm=True)
        assert torch.equal(of_part, out[:, part]), f"document {part} differs in a packed row"
        for a, b in zip(torch.autograd.grad(of_part, alone, dout[:, part]), together, strict=True):
            assert torch.equal(a, b[:, part]), f"a gradient of document {part} differs in a packed row"


@contextlib.contextmanager
def kernels_of(package, gpu: str):
    """The kernels that another architecture gets, in the interpreter. None is left prepared, before and after."""
    launch = runtime_of(package).launch
    before, launch.backend = launch.backend, copy.copy(launch.backend)
    launch.backend.gpu = gpu
    kernels = list(launch.tuner.kernels)
    try:
        for kernel in kernels:
            kernel.forget()
        yield
    finally:
        launch.backend = before
        for kernel in kernels:
            kernel.forget()


def check_on(package, gpu: str, lengths=(70, 5), **options):
    with kernels_of(package, gpu):
        check_rule(package, "cpu", BF16, lengths, **options)


def check_batch(package, device, dtype):
    """Rows of a batch are documents."""
    ops = module_of(package)
    given = [x.view(2, 33, *x.shape[1:]) for x in inputs_of(dtype, device, 66, 1, 2, WIDTH)]
    out, _ = ops.gated_delta_rule(*given)
    rows = [ops.gated_delta_rule(*[x[i : i + 1] for x in given])[0] for i in range(2)]
    assert torch.equal(out, torch.cat(rows))


def check_views(package, device, dtype):
    """q, k and v as parts of one projection's rows, and a gradient that is a view."""
    ops = module_of(package)
    q, k, v, g, beta = inputs_of(dtype, device, 40, 1, 2, WIDTH)
    mixed = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), 1)[None]
    parts = [t.unflatten(-1, (-1, WIDTH)) for t in mixed.split((WIDTH, WIDTH, 2 * WIDTH), -1)]
    plain, _ = ops.gated_delta_rule(q[None], k[None], v[None], g[None], beta[None])
    assert torch.equal(ops.gated_delta_rule(*parts, g[None], beta[None])[0], plain)
    leaves = [leaf(x[None]) for x in (q, k, v, g, beta)]
    out, _ = ops.gated_delta_rule(*leaves)
    dout = randn(*out.shape, dtype=dtype, device=device, seed=8)
    strided = torch.stack((dout, dout), -1)[..., 0]
    for a, b in zip(torch.autograd.grad(out, leaves, dout, retain_graph=True), torch.autograd.grad(out, leaves, strided), strict=True):
        assert torch.equal(a, b)


def check_extremes(package, device, dtype):
    """No decay, a decay that forgets everything, beta 0 and 1, and the very same keys."""
    check_rule(package, device, dtype, (70,), decay=0.0)
    check_rule(package, device, dtype, (70,), decay=0.0, alike=1.0, rows=8.0, of_g=4 * OF_G)  # of some rows nearly all cancels
    # Few tokens keep anything of the state then, and rounding the normalised q and k alone changes dg by 3.7e-2.
    check_rule(package, device, dtype, (70,), decay=200.0, of_g=4 * OF_G)
    ops = module_of(package)
    q, k, v, g, beta = (x[None] for x in inputs_of(dtype, device, 70, 1, 2, WIDTH))
    nothing, _ = ops.gated_delta_rule(q, k, v, g, torch.zeros_like(beta), l2_norm=True)
    assert not nothing.any()


def check_empty(package, device):
    ops = module_of(package)
    leaves = [leaf(x[None]) for x in inputs_of(BF16, device, 0, 1, 2, WIDTH)]
    state = randn(1, 2, WIDTH, WIDTH, dtype=FP32, device=device)
    out, final = ops.gated_delta_rule(*leaves, initial_state=state, output_final_state=True)
    assert out.shape == (1, 0, 2, WIDTH) and torch.equal(final, state)
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), leaves))


def check_step(package, device, dtype, tokens=3):
    """Token by token, after a prefill."""
    given = inputs_of(dtype, device, 2 * tokens, 1, 2, WIDTH)
    batch = [x.view(2, tokens, *x.shape[1:]) for x in given]
    states = randn(2, 2, WIDTH, WIDTH, dtype=FP32, device=device, seed=7)
    with torch.no_grad():
        out, final = step_of(package)(*batch, initial_state=states, l2_norm=True)
    out64, final64 = recurrence(*[x.double().cpu() for x in given], [0, tokens], states.double().cpu())
    assert_rows_close(out.flatten(0, 1), out64, dtype, "a step's output", floor=FLOOR)
    assert_rows_close(final, final64, FP32, "a step's state", 3.0)


def all_cases(package, device, dtypes=(BF16,)):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for lengths in LENGTHS:
            yield f"{lengths} {dtype}", lambda d=dtype, n=lengths: check_rule(package, device, d, n, key_heads=2 if n == (40,) else 1)
    yield "alike", lambda: check_rule(package, device, BF16, (100,), alike=0.7)
    yield "inverses", lambda: check_inverses(package, device)
    yield "carried", lambda: check_rule(package, device, BF16, (30, 70), carry=True)
    yield "without a norm", lambda: check_rule(package, device, BF16, (70,), l2_norm=False)
    yield "packed", lambda: check_packed_is_separate(package, device, BF16)
    yield "batch", lambda: check_batch(package, device, BF16)
    yield "views", lambda: check_views(package, device, BF16)
    yield "extremes", lambda: check_extremes(package, device, BF16)
    yield "empty", lambda: check_empty(package, device)
    for dtype in dtypes:
        yield f"step {dtype}", lambda d=dtype: check_step(package, device, d)


def check_kept(package):
    """Chunks are kept on the package's own bounds alone, and made again where these were written to or are of other tokens."""
    chunks = importlib.import_module(f"{package.__name__}.shared.ops.delta_chunks")
    bounds, own = torch.tensor([0, 20, 160]), chunks.keeping_chunks(torch.tensor([0, 20, 160]))
    chunks.chunks_of(bounds, 160), chunks.chunks_of(own, 160)
    assert chunks.chunks_of(own, 160) is chunks.chunks_of(own, 160)
    for tokens, second in ((160, 90), (128, 90)):
        bounds.numpy()[1] = second  # which no version counts
        own[1] = second
        expected = chunks.chunks_of(bounds.clone(), tokens)
        assert torch.equal(chunks.chunks_of(bounds, tokens).table, expected.table)
        assert torch.equal(chunks.chunks_of(own, tokens).table, expected.table)
        assert torch.equal(chunks.chunks_of(own, 40).bounds, chunks.chunks_of(own.clone(), 40).bounds)


CHECKS = {
    "kept": check_kept,
    "two": lambda ops: check_rule(ops, "cpu", BF16, (20, 140), decay=0.03),
    "alike": lambda ops: check_rule(ops, "cpu", BF16, (64,), alike=0.7),
    "inverses": lambda ops: check_inverses(ops, "cpu"),
    "carried": lambda ops: check_rule(ops, "cpu", BF16, (70,), decay=0.03, carry=True),
    "packed": lambda ops: check_packed_is_separate(ops, "cpu", BF16),
    "extremes": lambda ops: check_extremes(ops, "cpu", BF16),
    "step": lambda ops: check_step(ops, "cpu", BF16),
    "narrow": lambda ops: check_on(ops, "sm_100"),
    "split": lambda ops: check_on(ops, "sm_80", (20, 140), decay=0.03),
}
FORWARD, BACKWARD = "kernel_src/gated_delta.py", "kernel_src/gated_delta_backward.py"
HALVES = "kernel_src/gated_delta_halves.py"  # of a chunk, for kernels of BACKWARD
MUTANTS = (
    *generated(FORWARD, "two or inverses",
               "bounded_inverse_of decay_of delta_invert delta_prepare delta_walk merged strictly_lower tokens_of"),
    *generated(BACKWARD, "split or two", "delta_gates delta_keys delta_states of_inverse put_values"),
    *generated(HALVES, "split or two", "norm_backward put_keys_of_half tokens_of_half"),
    *generated("shared/ops/gated_delta_rule.py", "two", "_GatedDeltaRule.forward"),
    *errors_in(FORWARD, "inverses", "bounded_inverse_of", ("(1, 6)", "(1, 5)")),
    *errors_in(FORWARD, "inverses", "inverse_of", ("square_of(m, 1, 0, 32)", "square_of(m, 0, 0, 32)")),
    *errors_in(FORWARD, "two", "delta_place_keys", ("y * y_rstd[:, None]", "y * x_rstd[:, None]")),
    *errors_in(FORWARD, "carried", "delta_walk", ("state = state_of(initial", "initial_ = state_of(initial")),
    *errors_in(FORWARD, "step", "delta_step", ("state * ct.exp(", "state * (")),
    *errors_in(FORWARD, "two", "delta_invert_bounded", ("b[:, None] *", "b[None, :] *")),
    *errors_in(FORWARD, "two", "delta_place_values", ("ct.gather(beta, (tokens, head)", "ct.gather(g, (tokens, head)")),
    *errors_in("shared/ops/gated_delta_rule.py", "two", "_GatedDeltaRule.backward",
               ("(*found, None if", "(*found[1::-1], *found[2:], None if")),
    *errors_in(BACKWARD, "two", "delta_reverse", ("end - 1 - i", "first + i"), ("ct.exp(last - g)", "ct.exp(-g)")),
    *errors_in(BACKWARD, "two", "delta_scores", ("dgam = ct.sum(found *", "dgam = ct.sum(of_queries *")),
    *errors_in(BACKWARD, "two", "delta_scores", ("row == 63", "row == 0"), ("ct.transpose(inner), q", "inner, q")),
    *errors_in(BACKWARD, "narrow", "delta_scores", ("head, part * BV, BV)", "head, 0, BV)")),
    *errors_in(BACKWARD, "narrow", "delta_scores", ("state_of(dstates, chunk, head, part", "state_of(dstates, chunk, head, 0")),
    *generated(BACKWARD, "two or narrow", "delta_inverse delta_reverse"),
    *errors_in(BACKWARD, "two", "delta_inverse", ("reverse=True", "reverse=False")),
    *errors_in(HALVES, "split", "rows_of_half", ("(half, head, part)", "(half, head, 0)")),
    *errors_in(HALVES, "split", "numbers_of_half", ("(head, half)", "(head, half * 0)")),
    *errors_in(HALVES, "split", "put_numbers_of_half", ("(head, half)", "(head, half // 2 * 2)")),
    *errors_in(HALVES, "split", "columns_of_half", ("(chunk, head, half)", "(chunk, head, 0)")),
    *errors_in(HALVES, "split", "rows_of_state", ("quarter, part)", "part, part)")),
    *errors_in(HALVES, "split", "put_queries_of_half", ("rows[:, None] >= row", "rows[:, None] > row"), ("head, part * BV", "head, 0")),
    *errors_in(HALVES, "split", "put_queries_of_half", ("ct.sum(found * q", "ct.sum(of_queries * q"), ("of_queries + found", "found")),
    *errors_in(HALVES, "split", "put_queries_of_half", ("- g[None, :]", ""), ("ct.exp(own)", "ct.exp(0.0 * own)")),
    *errors_in(HALVES, "split", "put_keys_of_half", ("half == 0", "half >= 0")),
    *errors_in(BACKWARD, "split", "delta_gates", ("reverse=True", "reverse=False")),
    *errors_in(BACKWARD, "split", "delta_keys", ("= rows_of_half(partial", "= 0 * rows_of_half(partial")),
    *errors_in(BACKWARD, "split", "delta_keys", ("columns_of_half(squares", "-columns_of_half(squares"), ("norm_backward(total", "(total")),
    *errors_in(BACKWARD, "carried", "delta_reverse", ("dstate = state_of(dfinal", "dfinal_ = state_of(dfinal")),
    *errors_in("shared/ops/gated_delta_rule.py", "carried", "_GatedDeltaRule.backward",
               ("dfinal.numel() == 0 else", "dfinal.numel() else")),
    *errors_in("shared/ops/delta_chunks.py", "packed", "chunks_of", ("(chunk - start[document]) * CHUNK", "chunk * CHUNK")),
    *errors_in("shared/ops/delta_chunks.py", "kept", "chunks_of", ("version_of(cu_seqlens), tokens", "tokens"),
               ("version_of(cu_seqlens), tokens", "version_of(cu_seqlens)"), ("KEPT_ON, None)", "KEPT_ON, ())")),
)


# ---------------------------------------------------------------- in the tests of every operation
def call_with_states(package, i):
    """With the states before and after it, and g and beta in float32, which no cast makes anew."""
    q, k = (i.leaf(1, i.tokens, 1, WIDTH) for _ in range(2))
    g, beta = i.in_float32(i.leaf, 1, i.tokens, 2, of=lambda x: -0.1 * x.abs()), i.in_float32(i.leaf, 1, i.tokens, 2, of=torch.sigmoid)
    states = i.in_float32(i.leaf, 1, 2, WIDTH, WIDTH, scale=0.3)
    rest = {"initial_state": states, "output_final_state": True, "l2_norm": True}
    return module_of(package).gated_delta_rule(q, k, i.leaf(1, i.tokens, 2, WIDTH), g, beta, **rest)


@torch.no_grad()
def call_of_step(package, i):
    q, k, v = (i.constant(2, 3, heads, WIDTH) for heads in (1, 1, 2))
    g, beta = (i.in_float32(i.constant, 2, 3, 2, of=of) for of in (lambda x: -0.1 * x.abs(), torch.sigmoid))
    states = i.in_float32(i.constant, 2, 2, WIDTH, WIDTH, scale=0.3)
    return step_of(package)(q, k, v, g, beta, initial_state=states, l2_norm=True)


MORE_CALLS = {"gated_delta_rule (states)": call_with_states, "gated_delta_step": call_of_step}
GPU_TESTS = {
    "gated_delta": ("test_operations_of_gated_delta_nets[gated_delta_rule]", "test_the_delta_rule"),
    "gated_delta_backward": ("test_operations_of_gated_delta_nets[gated_delta_rule]", "test_the_delta_rule"),
}


def _of_rule(new):
    """Documents of 70 and 5 tokens in chunks of 64, without and with states before and after them."""
    q, k, v = new(75, 1, WIDTH), new(75, 1, WIDTH, seed=1), new(75, 2, WIDTH, seed=2)
    g, beta = -0.1 * new.exact(75, 2).abs(), new.exact(75, 2, seed=1).sigmoid()
    table, bounds = new.integers([[0, 64, 70], [64, 6, 5]], torch.int32), new.integers([[0, 2], [2, 3]], torch.int32)
    states = new.exact(2, 2, WIDTH, WIDTH)
    return [(q, k, v, g, beta, table, bounds, initial, 2, 0.1, True) for initial in (None, states)]


def _of_rule_backward(new):
    inverses = torch.eye(CHUNK, dtype=new.dtype, device=new.device)[:, None].expand(CHUNK, 2, CHUNK).repeat(3, 1, 1)
    dfinal = new.exact(2, 2, WIDTH, WIDTH, seed=4)
    return [
        (new(75, 2, WIDTH, seed=3), None if call[7] is None else dfinal, *call[:8], inverses, *call[8:]) for call in _of_rule(new)
    ]


def _of_step(new):
    q, k, v = new(2, 3, 1, WIDTH), new(2, 3, 1, WIDTH, seed=1), new(2, 3, 2, WIDTH, seed=2)
    g, beta = -0.1 * new.exact(2, 3, 2).abs(), new.exact(2, 3, 2, seed=1).sigmoid()
    return [(q, k, v, g, beta, new.exact(2, 2, WIDTH, WIDTH), 0.1, norm) for norm in (True, False)]


OPERATORS = {
    "gated_delta_rule_forward": lambda new: [(*call, call[7] is not None) for call in _of_rule(new)],
    "gated_delta_rule_backward": _of_rule_backward,
    "gated_delta_step": _of_step,
}
