"""Options that change little or nothing at the sizes of the other checks: each reaches what it is for, in both passes."""

import importlib

import torch

from tests.ops.common import BF16, CPU, FP32, leaf, limit, randn
from tests.ops.suite import suite


def dtypes_of_sums(package, call) -> list:
    """The dtypes in which a call has the weight's gradient added up, of each walk over its chunks."""
    linear_head, found = importlib.import_module(f"{package.__name__}.shared.ops.linear_head"), []
    plan = linear_head.plan_chunks

    def noted(*args, **options):
        chunks = plan(*args, **options)
        found.append(chunks.accum_dtype)
        return chunks

    with limit(package, "linear_head", "plan_chunks", noted):
        call()
    return found


def heads(dtype=BF16):
    return [leaf(randn(*shape, dtype=dtype, device=CPU, seed=i)) for i, shape in enumerate(((6, 16), (40, 16)))]


def both_passes(loss, leaves):
    """Two backward passes: the second one of some losses computes everything anew."""
    upstream = torch.ones_like(loss)
    torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
    torch.autograd.grad(loss, leaves, upstream)


def check_sums_of_the_loss(package):
    for reduction, walks in (("mean", 2), ("none", 3)):
        for wanted in (FP32, None):
            hidden, weight = heads()

            def call():
                loss = suite(package).linear_cross_entropy(hidden, weight, torch.arange(6), reduction=reduction, accum_dtype=wanted)  # noqa: B023
                both_passes(loss, (hidden, weight))  # noqa: B023

            found = [dtype for dtype in dtypes_of_sums(package, call) if dtype is not None]
            assert len(found) == walks, found
            # The forward pass of losses that are not reduced adds nothing up.
            assert set(found[-2:]) == {wanted or BF16}, f"accum_dtype={wanted} of {reduction}: added up in {found}"


def check_sums_of_jsd(package):
    for wanted in (FP32, None):
        (hidden, weight), (teacher, teacher_weight) = heads(), [t.detach().neg() for t in heads()]

        def call():
            loss = suite(package).linear_jsd(hidden, weight, teacher, teacher_weight, accum_dtype=wanted)  # noqa: B023
            both_passes(loss, (hidden, weight))  # noqa: B023

        found = dtypes_of_sums(package, call)
        assert found == [wanted or BF16] * 2, f"accum_dtype={wanted}: added up in {found}"


def check_options_of_the_operator(package):
    """What the operator of a graph is given stands for the very same options."""
    lce = importlib.import_module(f"{package.__name__}.shared.ops.linear_cross_entropy")
    defaults = lce.CrossEntropyOptions()
    for name, value in {"ignore_index": 3, "label_smoothing": 0.1, "softcap": 2.0, "lse_square_scale": 0.5, "use_token_scaling": True,
                        "accum_dtype": FP32, "return_z_loss": True, "return_token_accuracy": True,
                        "return_predicted_tokens": True}.items():  # fmt: skip
        options = defaults._replace(**{name: value})
        assert lce._options(*lce._operator_options(options)) == options, name


def check_eps(package):
    """Takes probabilities below it, above it and 0, where each has another weight; in torch's words."""
    y = torch.tensor([[0.0, 1e-6, 0.05, 0.2, 0.749999]]).repeat(3, 1)
    x = leaf(torch.full((3, 5), 0.2).log())
    for eps in (0.0, 0.1, 0.3):
        found = suite(package).kl_div(x, y, "sum", eps=eps)
        wanted = torch.where(y == 0, 0.0, y * (y.clamp(min=max(eps, 1e-30)).log() - x)).sum()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def _losses(package):
    ops = suite(package)
    x, y = (randn(4, 9, dtype=FP32, device=CPU, seed=i) for i in range(2))
    log_x, log_y = x.log_softmax(-1), y.log_softmax(-1)
    return {
        "jsd": (log_x, lambda x, *a, **o: ops.jsd(x, log_y, *a, **o)),
        "tvd": (log_x.exp(), lambda x, *a, **o: ops.tvd(x, log_y.exp(), *a, **o)),
        "kl_div": (log_x, lambda x, labels, **o: ops.kl_div(x, log_y.exp(), "batchmean", labels=labels, **o)),
        "jsd of logits": (x, lambda x, *a, **o: ops.jsd(x, y, *a, from_logits=True, **o)),
        "tvd of logits": (x, lambda x, *a, **o: ops.tvd(x, y, *a, from_logits=True, **o)),
        "linear_jsd": (x, lambda x, *a, **o: ops.linear_jsd(x, torch.eye(9), y, torch.eye(9), *a, **o)),
        "cross_entropy": (x, lambda x, *a, **o: ops.cross_entropy(x, *a, **o)),
    }


def check_ignored(name):
    """Rows with the label, and no other rows, are left out of the loss and have no gradient, in a second backward pass too."""

    def check(package):
        x, call = _losses(package)[name]
        for ignored in (3, 0, -7):
            labels = torch.tensor([3, 0, 5, 8])
            labels[3] = ignored
            one = leaf(x)
            loss = call(one, labels, ignore_index=ignored)
            (gradient,) = torch.autograd.grad(loss, one, retain_graph=True)
            kept = gradient.clone()
            (again,) = torch.autograd.grad(loss, one)
            out = labels == ignored
            other = leaf(x[~out])
            wanted = _of_rows(package, name, other, labels, ~out)
            (expected,) = torch.autograd.grad(wanted, other)
            torch.testing.assert_close(loss, wanted)
            assert not kept[out].any() and torch.equal(kept, again), f"{name}: rows that do not count have a gradient"
            torch.testing.assert_close(kept[~out], expected)

    return check


def _of_rows(package, name, x, labels, counted):
    """The loss of the rows that count alone, with labels that all do."""
    ops = suite(package)
    y = randn(4, 9, dtype=FP32, device=CPU, seed=1)[counted]
    log_y = y.log_softmax(-1)
    if name == "cross_entropy":
        return ops.cross_entropy(x, labels[counted])
    if name == "linear_jsd":
        return ops.linear_jsd(x, torch.eye(9), y, torch.eye(9))
    if "logits" in name:
        return getattr(ops, name[:3])(x, y, from_logits=True)
    return ops.kl_div(x, log_y.exp(), "batchmean") if name == "kl_div" else getattr(ops, name)(x, log_y if name == "jsd" else log_y.exp())


LOSSES = ("jsd", "tvd", "kl_div", "jsd of logits", "tvd of logits", "linear_jsd", "cross_entropy")
CHECKS = {
    "sums of the loss": check_sums_of_the_loss,
    "sums of jsd": check_sums_of_jsd,
    "options of the operator": check_options_of_the_operator,
    "eps": check_eps,
    **{f"ignored by {name}": check_ignored(name) for name in LOSSES},
}
_DIVERGENCE, _LOSS, _JSD, _SUM = (f"shared/ops/{name}.py" for name in ("divergence", "linear_cross_entropy", "linear_jsd", "token_sums"))
MUTANTS = (
    (_JSD, "_run", "needs, accum_dtype, logits_of_token", "needs, None, logits_of_token", "sums of jsd"),
    (_JSD, "_pair", "loss, needs, accum_dtype)", "loss, needs, None)", "sums of jsd"),
    (_SUM, "sum_over_tokens", "run(*tensors, ctx.options,", "run(*tensors, (ctx.options[0], None),", "sums of jsd"),
    (_JSD, "reduced_loss", "(loss, accum_dtype))", "(loss, None))", "sums of jsd"),
    (_LOSS, "_run", "needs, options.accum_dtype", "needs, None", "sums of the loss"),
    (_LOSS, "linear_cross_entropy", "accum_dtype=accum_dtype", "accum_dtype=None", "sums of the loss"),
    (_LOSS, "_PerToken.backward", "ctx.options._replace(return_z_loss=False", "ctx.options._replace(accum_dtype=None, return_z_loss=False",
     "sums of the loss"),
    (_LOSS, "_options", "scaling, accum_dtype", "scaling, None", "options of the operator"),
    (_LOSS, "_operator_options", "switches, options.accum_dtype", "switches, None", "options of the operator"),
    (_DIVERGENCE, "kl_div", "float(eps) if", "0.0 if", "eps"),
    (_DIVERGENCE, "kl_div", "float(eps) if", "0.0 if", "eps", False),
    ("shared/ops/divergence_terms.py", "_terms", "p.clamp(min=parameter).log()", "p.log()", "eps", False),
    (_DIVERGENCE, "tvd", "labels, ignore_index", "labels, -100", "ignored by tvd"),
    (_DIVERGENCE, "tvd", "labels, ignore_index", "labels, -100", "ignored by tvd of logits"),
    (_DIVERGENCE, "tvd", "labels, ignore_index", "labels, -100", "ignored by tvd", False),
    (_DIVERGENCE, "jsd", "labels, ignore_index", "labels, -100", "ignored by jsd"),
    (_DIVERGENCE, "kl_div", "labels, ignore_index", "labels, -100", "ignored by kl_div"),
    ("shared/ops/divergence_terms.py", "DivergenceOptions.numbers", "self.ignore_index", "-100", "ignored by jsd of logits"),
    (_JSD, "linear_jsd", "float(beta), ignore_index", "float(beta), -100", "ignored by linear_jsd"),
)
