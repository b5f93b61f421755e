"""What linear_log_probs computes, in float64, and the check of one call."""

import torch

from tests.ops.common import CPU, assert_close, assert_rows_close, check_kept, exact, leaf, randn
from tests.ops.linear_jsd import chunks_of, logits_of

ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
DIFFERENTIABLE = ("log_probs", "entropy", "mean_logits")
ABSOLUTE_ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of a logarithm, where the largest logit is 1 or less
CAPPED = {"temperature": 0.7, "softcap": 4.0, "scale": 1.3}


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
        target = torch.where(torch.arange(tokens) % 2 == 0, (scale * found).argmax(-1).cpu(), target)
    target[:ignored] = -1
    counted = target != -1
    numbers = {"temperature": temperature, "softcap": softcap, "scale": scale}
    given = {"ignore_index": -1, "skip_ignored": skip_ignored, **numbers, **options}
    weights = randn(*shape, dtype=torch.float32, device=device, seed=7) if coefficients else None
    before = [t.detach().clone() for t in head if t is not None]
    what = f"log probs {tuple(shape)} {outputs} {given}"

    def call():
        tensors = head[0], head[1], target.view(shape).to(device), head[2]
        return ops.linear_log_probs(*tensors, outputs=outputs, coefficients=weights, **given)

    with chunks_of(ops, tokens=chunk, first=first):
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
    expected = torch.autograd.grad(losses64, leaves64, [g.double().cpu().view(t.shape) for g, t in zip(upstream, losses64)])
    for i, (a, b, gradient, t) in enumerate(zip(gradients, again, expected, leaves, strict=True)):
        assert a.dtype == t.dtype and torch.equal(a, b), f"{what}: gradient {i} of a second backward pass"
        assert_rows_close(a.to(dtype), gradient, dtype, f"{what} gradient {i}", 2 if chunk or len(losses) > 1 or size > 1 else 1.5,
                          floor=0.3, row_factor=3)
    check_kept([t for t in head if t is not None], before, what)
