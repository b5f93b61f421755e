"""Losses of preferences, of reinforcement learning and of distillation: beside Liger 0.8.5, whose names and results they have, and where
Liger is wrong."""

import functools
import importlib
import inspect
import itertools

import pytest
import torch
from torch.nn import functional

from tests.ops import common

LOSSES = {
    "DPO": "dpo_loss", "ORPO": "orpo_loss", "CPO": "cpo_loss", "SimPO": "simpo_loss", "KTO": "kto_loss", "GRPO": "grpo_loss",
    "JSD": "jsd_loss", "CosineSimilarity": "cosine_similarity_loss",
}  # fmt: skip
ANSWERS, TOKENS, HIDDEN, CLASSES = 4, 5, 8, 13
F64 = torch.float64
randn = functools.partial(common.randn, device="cpu")


@pytest.fixture
def theirs():
    reason = "liger-kernel 0.8.5 is not installed, so nothing is compared with it (pip install -e '.[dev]')"
    pytest.importorskip("liger_kernel", reason=reason)
    return importlib.import_module("liger_kernel.chunked_loss")


def parameters(function):
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values() if p.name not in ("self", "ctx", "cls")]


@pytest.mark.parametrize("name", LOSSES)
def test_names_and_arguments_are_those_of_liger(liger, theirs, name):
    ours, module = liger.chunked_loss, importlib.import_module(f"{theirs.__name__}.{LOSSES[name]}")
    function, loss = f"LigerFusedLinear{name}Function", f"LigerFusedLinear{name}Loss"
    assert parameters(getattr(ours, function).apply) == parameters(getattr(module, function).forward)
    for method in ("__init__", "forward"):
        assert parameters(getattr(getattr(ours, loss), method)) == parameters(getattr(getattr(module, loss), method)), method
    one, other = getattr(ours, loss)(), getattr(module, loss)()
    assert {k: v for k, v in vars(one).items() if k[0] != "_"} == {k: v for k, v in vars(other).items() if k[0] != "_"}
    short = f"liger_fused_linear_{LOSSES[name].replace('_similarity', '').removesuffix('_loss')}"
    assert hasattr(importlib.import_module(f"{theirs.__name__}.functional"), short)
    assert getattr(ours, short) is getattr(ours, function).apply


def tensors(dtype=torch.float32, ignored=True, bias=True, seed=0):
    """hidden, weight, target, bias of answers, some of whose tokens do not count, and of a reference model."""
    hidden = randn(ANSWERS, TOKENS, HIDDEN, dtype=dtype, seed=seed)
    weight, vector = randn(CLASSES, HIDDEN, dtype=dtype, seed=seed + 1), randn(CLASSES, dtype=dtype, seed=seed + 2) if bias else None
    target = torch.randint(0, CLASSES, (ANSWERS, TOKENS), generator=torch.Generator().manual_seed(seed + 3))
    if ignored:
        target[0, 3:] = target[1, :1] = target[2, 1:] = -100
    return hidden, weight, target, vector


def run(function, *arguments, trained=range(5), **options):
    """(loss, metrics, gradients) of a function's call. trained: the places of floating point tensors that take a gradient."""
    trained = [i for i in trained if i < len(arguments) and isinstance(arguments[i], torch.Tensor) and arguments[i].is_floating_point()]
    arguments = [t.clone().requires_grad_() if i in trained else t for i, t in enumerate(arguments)]
    found = function(*arguments, **options)
    loss, *metrics = found if isinstance(found, tuple) else (found,)
    metrics = metrics[0] if metrics and isinstance(metrics[0], tuple) else metrics
    (loss * 1.7).backward()
    return loss.detach(), [m.detach() for m in metrics], [arguments[i].grad for i in trained]


OF_POLICY = (0, 1, 5)  # GRPO's hidden states, weight and bias


def same(one, other, **bounds):
    bounds = bounds or {"rtol": 1e-4, "atol": 1e-5}
    assert len(one[1]) == len(other[1])
    for a, b in [(one[0], other[0]), *zip(one[1], other[1])]:
        torch.testing.assert_close(a, b.to(a.dtype), **bounds)
    for a, b in zip(one[2], other[2], strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, **bounds)
        else:
            assert a is None and (b is None or not b.any())


DPO = "sigmoid hinge exo_pair nca_pair robust bco_pair sppo_hard apo_zero apo_down discopop".split()
SMOOTHED = {"exo_pair": {"label_smoothing": 0.1}, "robust": {"label_smoothing": 0.2}}
PAIRED = [
    *[("DPO", {"loss_type": kind, "beta": 0.3, **SMOOTHED.get(kind, {})}) for kind in DPO],
    ("DPO", {"average_log_prob": True, "compute_nll_loss": True, "alpha": 0.7}),
    ("DPO", {"use_ref_model": False, "discopop_tau": 0.2, "loss_type": "discopop"}),
    ("ORPO", {}),
    ("ORPO", {"beta": 0.4, "compute_nll_loss": False}),
    ("CPO", {"alpha": 0.5, "label_smoothing": 0.1}),
    ("CPO", {"average_log_prob": True, "compute_nll_loss": False}),
    ("SimPO", {"gamma": 0.3, "beta": 2.0}),
    ("SimPO", {"label_smoothing": 0.2, "compute_nll_loss": True, "alpha": 0.2}),
]


def of_liger(theirs, name):
    function = getattr(importlib.import_module(f"{theirs.__name__}.{LOSSES[name]}"), f"LigerFusedLinear{name}Function")
    arguments = [p for p, _ in parameters(function.forward)]

    def call(*given, **options):
        bound = inspect.signature(function.forward.__func__).bind(None, None, *given, compiled=False, **options)
        bound.apply_defaults()
        return function.apply(*(bound.arguments[name] for name in arguments))

    return call


@pytest.mark.parametrize(("name", "options"), PAIRED, ids=str)
def test_pairs_beside_liger(liger, theirs, name, options):
    reference = [t for i, t in enumerate(tensors(seed=40)) if i != 2] if name == "DPO" else []
    ours = getattr(liger.chunked_loss, f"LigerFusedLinear{name}Function").apply
    arguments = (*tensors(), *reference)
    one, other = run(ours, *arguments, **options), run(of_liger(theirs, name), *arguments, **options)
    same(one, other)


def test_orpo_with_other_labels_for_the_likelihood(liger, theirs):
    labels = tensors(seed=9)[2]
    one, other = (run(f, *tensors(), nll_target=labels) for f in (liger.chunked_loss.liger_fused_linear_orpo, of_liger(theirs, "ORPO")))
    same(one, other)
    assert not torch.equal(one[0], run(liger.chunked_loss.liger_fused_linear_orpo, *tensors())[0])


PREFERENCE = torch.tensor([True, False, True, True])


@pytest.mark.parametrize("options", ({}, {"average_log_prob": True, "beta": 0.5}, {"use_ref_model": False}), ids=str)
@pytest.mark.parametrize("kl", (None, 0.3, torch.tensor([0.1, 0.0, 0.4, 0.2])), ids=str)
def test_kto_beside_liger(liger, theirs, options, kl):
    hidden, weight, target, bias = tensors()
    reference = [t for i, t in enumerate(tensors(seed=40)) if i != 2]
    kl = torch.tensor(kl) if isinstance(kl, float) else kl
    arguments = (hidden, weight, target, PREFERENCE, bias, *reference)
    if kl is not None and kl.dim():  # Liger's chunks of one answer do not cut it
        options = {**options, "chunk_size": ANSWERS}
    one, other = (run(f, *arguments, kl=kl, **options) for f in (liger.chunked_loss.liger_fused_linear_kto, of_liger(theirs, "KTO")))
    same(one, other)


def group(dtype=torch.float32, seed=0, far=0.5):
    """What GRPO takes: hidden, weight, tokens, mask, advantages, bias, log-probabilities by the reference and by the old model."""
    hidden, weight, _, bias = tensors(dtype, seed=seed)
    tokens = torch.randint(0, CLASSES, (ANSWERS, TOKENS), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(ANSWERS, TOKENS)
    mask[0, 3:] = mask[2, 1:] = 0
    log_p = functional.linear(hidden, weight, bias).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    old, reference = (log_p + far * randn(ANSWERS, TOKENS, dtype=torch.float32, seed=seed + i) for i in (7, 8))
    return hidden, weight, tokens, mask, torch.tensor([1.3, -0.4, 0.6, -2.0]), bias, reference, old


VARIANTS = "grpo bnpo dr_grpo dapo luspo cispo sapo vespo".split()
GRPO = [
    *[{"loss_type": kind, "max_completion_length": 9} for kind in VARIANTS],
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    *[{"loss_type": kind, "importance_sampling_level": "sequence", "beta": beta, "max_completion_length": 9}
      for kind, beta in itertools.product(VARIANTS[:4], (0.04, 0.0))],
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0},
    {"delta": 1.2, "epsilon_low": 0.1, "epsilon_high": 0.3, "temperature": 0.8},
    {"use_bias_correction_kl": True, "beta": 0.3},
    {"use_bias_correction_kl": True, "beta": 0.3, "importance_sampling_level": "sequence", "loss_type": "grpo"},
    {"vllm_is_ratio": torch.linspace(0.5, 1.5, ANSWERS)},
    {"vllm_is_ratio": torch.linspace(0.5, 1.5, ANSWERS)[:, None], "loss_type": "vespo"},
    {"vllm_is_ratio": torch.linspace(0.5, 1.5, ANSWERS * TOKENS).view(ANSWERS, TOKENS)},
    {"num_items_in_batch": 31.0},
    {"num_items_in_batch": torch.tensor(31), "loss_type": "cispo", "epsilon_high": 1.4},
    {"loss_type": "sapo", "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0},
    {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0},
    {"use_ref_model": False},
]  # fmt: skip


@pytest.mark.parametrize("options", GRPO, ids=str)
def test_grpo_beside_liger(liger, theirs, options):
    functions = liger.chunked_loss.liger_fused_linear_grpo, of_liger(theirs, "GRPO")
    options = {"epsilon_low": 0.05, "epsilon_high": 0.05, **options}
    one, other = (run(function, *group(), trained=OF_POLICY, **options) for function in functions)
    same(one, other)
    if "importance_sampling_level" not in options:
        assert (one[1][-1] > 0) == (options.get("loss_type") not in ("sapo", "vespo"))


def test_grpo_by_the_policy_and_a_reference_model_as_they_are(liger, theirs):
    """Without old log-probabilities, and with a reference model instead of its log-probabilities."""
    hidden, weight, tokens, mask, advantages, bias, *_ = group()
    other_hidden, other_weight, _, other_bias = tensors(seed=70)
    arguments = hidden, weight, tokens, mask, advantages, bias, None, None, other_hidden, other_weight, other_bias
    ours = liger.chunked_loss.liger_fused_linear_grpo
    one, other = (run(f, *arguments, trained=OF_POLICY) for f in (ours, of_liger(theirs, "GRPO")))
    same(one, other)
    with pytest.warns(UserWarning, match="Using ref_per_token_logps"):
        both = run(ours, *arguments[:6], group()[6], None, other_hidden, other_weight, other_bias, trained=OF_POLICY)
    same(both, run(ours, *group()[:7], trained=OF_POLICY))


STUDENTS = [
    *[(name, {"beta": beta, "temperature": t}) for name in ("JSD", "CosineSimilarity") for beta in (0.0, 0.3, 1.0) for t in (1.0, 2.0)],
    ("JSD", {"weight_hard_loss": 0.0, "weight_soft_loss": 0.9}),
    ("CosineSimilarity", {"return_soft_hard_loss": True, "weight_hard_loss": 0.2}),
    ("JSD", {"return_soft_hard_loss": True, "weight_hard_loss": 0.0}),
]


@pytest.mark.parametrize("classes", (CLASSES, CLASSES + 3))
@pytest.mark.parametrize(("name", "options"), STUDENTS, ids=str)
def test_distillation_beside_liger(liger, theirs, name, options, classes):
    """classes: of the teacher, which may have more."""
    hidden, weight, target, bias = tensors()
    teacher = randn(ANSWERS * TOKENS, 6, dtype=torch.float32, seed=50), randn(classes, 6, dtype=torch.float32, seed=51)
    given = hidden.flatten(0, 1), weight, *teacher, target.flatten(), bias, randn(classes, dtype=torch.float32, seed=52)
    one = run(getattr(liger.chunked_loss, f"LigerFusedLinear{name}Function").apply, *given, **options)
    other = run(of_liger(theirs, name), *given, **options)
    same(one, other)


# ---------------------------------------------------------------- what is right where Liger is not
def test_an_answer_without_a_token(liger, theirs):
    """Counts as log p = 0; Liger's mean over no tokens is no number, and so is its likelihood of no tokens, which it adds even where it
    was told not to compute it."""
    hidden, weight, target, bias = tensors()
    target[0] = -100
    found = run(liger.chunked_loss.liger_fused_linear_orpo, hidden, weight, target, bias)
    assert all(t.isfinite().all() for t in (found[0], *found[1], *found[2])) and not found[2][0][0].any()
    assert run(of_liger(theirs, "ORPO"), hidden, weight, target, bias)[0].isnan()
    target[:2] = -100
    none = run(liger.chunked_loss.liger_fused_linear_cpo, hidden, weight, target, bias)
    assert none[0].isfinite() and none[1][4] == 0 and run(of_liger(theirs, "CPO"), hidden, weight, target, bias)[0].isnan()
    target[:] = -100
    nothing = run(liger.chunked_loss.liger_fused_linear_simpo, hidden, weight, target, bias)
    assert nothing[0].isfinite() and not any(t.any() for t in nothing[2])


def test_dpo_takes_the_label_smoothing_that_liger_drops(liger, theirs):
    arguments = (*tensors(), *[t for i, t in enumerate(tensors(seed=40)) if i != 2])
    plain, smooth = (run(liger.chunked_loss.liger_fused_linear_dpo, *arguments, label_smoothing=e) for e in (0.0, 0.1))
    same(plain, run(of_liger(theirs, "DPO"), *arguments, label_smoothing=0.1))
    m = plain[1][5] - plain[1][6]
    torch.testing.assert_close(smooth[0], (-0.9 * functional.logsigmoid(m) - 0.1 * functional.logsigmoid(-m)).mean())


def test_luspo_does_not_count_what_is_masked(liger):
    """Under Liger's names it does, as in Liger. Where nothing is masked, both are alike."""
    given, numbers = list(group()), {"trained": OF_POLICY, "beta": 0.04}

    def ours(loss):
        return lambda *a, **o: liger.linear_grpo_loss(*a[:6], ref_log_probs=a[6], old_log_probs=a[7], loss=loss, **o)[:1]

    one, other = (run(ours(loss), *given, **numbers) for loss in ("luspo", "luspo_of_all"))
    assert not one[2][0][0, 3:].any() and other[2][0][0, 3:].any()
    given[3] = torch.ones(ANSWERS, TOKENS)
    same(*(run(ours(loss), *given, **numbers) for loss in ("luspo", "luspo_of_all")))


@pytest.mark.parametrize("kind", [kind for kind in VARIANTS if kind != "luspo"])
def test_what_is_masked_may_be_anything(liger, kind):
    """Its tokens, and its log-probabilities by other models."""
    options = {"loss_type": kind, "max_completion_length": 9, "trained": OF_POLICY}
    given = list(group())
    one = run(liger.chunked_loss.liger_fused_linear_grpo, *given, **options)
    masked = given[3] == 0
    given[2] = given[2].masked_fill(masked, 1000)
    given[6], given[7] = (t.masked_fill(masked, value) for t, value in zip(given[6:], (float("nan"), -1e6)))
    same(one, run(liger.chunked_loss.liger_fused_linear_grpo, *given, **options), rtol=0, atol=0)


def test_squares_whose_mean_fp32_holds(liger):
    """SPPO's loss is the square of log-probabilities; of each of these, not of their sum."""
    weight, hidden, target = torch.tensor([[0.0], [-1.5e19]]), torch.ones(4, 1, 1), torch.tensor([[1], [1], [0], [0]])
    found = liger.linear_preference_loss(hidden, weight, target, loss="sppo_hard", use_reference=False, compute_nll_loss=False)
    torch.testing.assert_close(found.loss, torch.tensor(2.25e38))


def test_soft_and_hard_losses_have_gradients(liger):
    """Liger returns both, as if they had."""
    hidden, weight, target, _ = tensors()
    given = hidden.flatten(0, 1).requires_grad_(), weight, hidden.flatten(0, 1).roll(1, 0), weight, target.flatten()
    module = liger.chunked_loss.LigerFusedLinearJSDLoss(return_soft_hard_loss=True)
    loss, soft, hard = module(*given)
    whole, *parts = (torch.autograd.grad(t, given[0], retain_graph=True)[0] for t in (loss, soft, hard))
    torch.testing.assert_close(whole, 0.5 * parts[0] + 0.5 * parts[1])
    assert parts[0].any() and parts[1].any()


def test_a_second_backward_pass_and_a_frozen_head(liger):
    hidden, weight, target, bias = tensors()
    hidden.requires_grad_()
    loss = liger.linear_preference_loss(hidden, weight, target, bias, use_reference=False).loss
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and weight.grad is None
    found = liger.linear_grpo_loss(hidden, *group()[1:6], use_reference=False, beta=0.0)
    assert found.kl is None and found.loss.requires_grad and not found.clip_ratio.requires_grad


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, F64), ids=str)
def test_other_dtypes(liger, dtype):
    """Beside the same loss in float64 of the same numbers."""
    bounds = {"rtol": 3e-2, "atol": 2e-2} if dtype != F64 else {}
    found, exact = [], []
    for into, wide in ((found, dtype), (exact, F64)):
        hidden, weight, target, bias = (t if t.dtype == torch.int64 else t.to(dtype).to(wide) for t in tensors())
        into.append(run(liger.chunked_loss.liger_fused_linear_cpo, hidden, weight, target, bias))
        given = [t.to(dtype).to(wide) if t.is_floating_point() and i in (0, 1, 5) else t for i, t in enumerate(group())]
        into.append(run(liger.chunked_loss.liger_fused_linear_grpo, *given[:6], None, None, *given[:2], temperature=0.9, trained=OF_POLICY))
        flat = hidden.flatten(0, 1), weight, hidden.flatten(0, 1).roll(1, 0), weight, target.flatten(), bias, None
        into.extend(run(f, *flat) for f in (liger.chunked_loss.liger_fused_linear_jsd, liger.chunked_loss.liger_fused_linear_cosine))
    for one, other in zip(found, exact):
        same((one[0].double(), [m.double() for m in one[1]], [None if g is None else g.double() for g in one[2]]), other, **bounds)


# ---------------------------------------------------------------- wrong arguments
def grpo(**changed):
    names = "hidden weight tokens mask advantages bias ref_log_probs old_log_probs".split()
    return {**dict(zip(names, group())), **changed}


WRONG = [
    ("linear_preference_loss", {"loss": "ipo"}, "Unsupported loss_type: 'ipo', expected one of sigmoid, hinge"),
    ("linear_preference_loss", {"loss": "exo_pair"}, "label_smoothing must be > 0 for loss_type='exo_pair'"),
    ("linear_preference_loss", {"loss": "robust", "label_smoothing": 0.5}, r"must lie in \[0.0, 0.5\) for loss_type='robust'"),
    ("linear_preference_loss", {"label_smoothing": 1.5}, "label_smoothing is 1.5, expected a number from 0 to 1"),
    ("linear_preference_loss", {"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing is 0.1, expected 0"),
    ("linear_preference_loss", {"loss": "sppo_hard", "beta": 0}, "beta is 0, expected another number"),
    ("linear_preference_loss", {"use_reference": True}, "ref_hidden is None, expected the reference model's"),
    ("linear_preference_loss", {"target": torch.zeros(3, 5, dtype=torch.int64), "hidden": torch.zeros(3, 5, 8)}, "an even number of"),
    ("linear_preference_loss", {"target": torch.zeros(4, 6, dtype=torch.int64)}, r"target is .*\[4, 6\].* expected torch.int64 \[4, 5\]"),
    ("linear_preference_loss", {"hidden": torch.zeros(20, 8)}, r"hidden is .* expected \[answers, tokens, features\]"),
    ("linear_preference_loss", {"nll_target": torch.zeros(4, dtype=torch.int64)}, "nll_target is"),
    ("linear_preference_loss", {"target": torch.full((4, 5), 13)}, "target is 13 at one of its places"),
    ("linear_kto_loss", {"preference": torch.ones(4)}, r"preference is .* expected torch.bool \[4\]"),
    ("linear_kto_loss", {"preference": torch.ones(3, dtype=torch.bool)}, "preference is"),
    ("linear_kto_loss", {"ref_hidden": torch.zeros(4, 4, 8), "use_reference": True, "ref_weight": torch.zeros(13, 8)}, "ref_hidden is"),
    ("linear_grpo_loss", {"loss": "ppo"}, "loss_type is 'ppo', expected one of grpo, bnpo"),
    ("linear_grpo_loss", {"loss": "dr_grpo"}, "max_completion_length is None"),
    ("linear_grpo_loss", {"importance_sampling_level": "word"}, "importance_sampling_level is 'word', expected 'token' or 'sequence'"),
    ("linear_grpo_loss", {"loss": "sapo", "importance_sampling_level": "sequence"}, "Sequence-level importance sampling is not supported"),
    ("linear_grpo_loss", {"delta": 0.0}, "delta must be positive, got 0.0"),
    ("linear_grpo_loss", {"temperature": 0.0}, "temperature is 0.0, expected a positive number"),
    ("linear_grpo_loss", {"mask": torch.ones(4, 4)}, r"mask is .* expected \[4, 5\]"),
    ("linear_grpo_loss", {"advantages": torch.ones(5)}, r"advantages is .* expected \[4\] or \[4, 5\]"),
    ("linear_grpo_loss", {"correction": torch.ones(2, 5)}, "correction is"),
    ("linear_grpo_loss", {"ref_log_probs": None}, "ref_hidden is None, expected the reference model's, or ref_log_probs"),
    ("linear_grpo_loss", {"ref_log_probs": None, "ref_hidden": torch.zeros(4, 5, 8)}, "ref_weight is None"),
    ("linear_distillation_loss", {"distance": "l2"}, "distance is 'l2', expected 'jsd' or 'cosine'"),
    ("linear_distillation_loss", {"temperature": 0}, "temperature is 0, expected a positive number"),
    ("linear_distillation_loss", {"beta": 1.5}, "beta is 1.5, expected a number from 0 to 1"),
    ("linear_distillation_loss", {"teacher_hidden": torch.zeros(3, 8)}, "teacher_hidden is"),
    ("linear_cosine", {"teacher_weight": torch.zeros(14, 8)}, "teacher_weight is"),
]


@pytest.mark.parametrize(("name", "changed", "message"), WRONG, ids=lambda found: found if isinstance(found, str) else "")
def test_wrong_arguments(liger, name, changed, message):
    hidden, weight, target, bias = tensors()
    flat = {"hidden": hidden[0], "weight": weight, "teacher_hidden": hidden[1], "teacher_weight": weight}
    answers = {"hidden": hidden, "weight": weight, "target": target, "bias": bias, "use_reference": False}
    given = {
        "linear_preference_loss": answers, "linear_kto_loss": {**answers, "preference": PREFERENCE}, "linear_grpo_loss": grpo(),
        "linear_cosine": {**flat, "labels": target[0]}, "linear_distillation_loss": {**flat, "target": target[0]},
    }[name]  # fmt: skip
    getattr(liger, name)(**given)
    with pytest.raises(ValueError, match=message):
        getattr(liger, name)(**{**given, **changed})


def test_what_the_constructors_refuse(liger):
    for name, options in (("DPO", {"loss_type": "orpo"}), ("DPO", {"loss_type": "exo_pair"}), ("GRPO", {"sapo_temperature_pos": 0}),
                          ("JSD", {"temperature": 0})):  # fmt: skip
        with pytest.raises(ValueError):
            getattr(liger.chunked_loss, f"LigerFusedLinear{name}Loss")(**options)
