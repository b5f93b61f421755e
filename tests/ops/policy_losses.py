"""The losses of groups of answers against their formulas, what masked tokens may be, and by what number of tokens a process divides."""

import importlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ops.common import CPU, FP32, errors_in, exact, leaf, randn
from tests.ops.generated import generated
from tests.tolerances import assert_close

ANSWERS, TOKENS, CLASSES = 3, 4, 20


def _policy(ops):
    return importlib.import_module(f"{ops.__name__}.shared.ops.policy_losses")


def check_masked(ops, loss, level="token", of_answers=False):
    """Masked tokens, and an answer without any other, may be anything in all that is said of them. The advantages of these are negative,
    so that no bound of the ratio hides an infinite one."""
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0], [0.0] * TOKENS])
    counted, results = mask != 0, []
    for value in (None, float("nan"), -1e6):
        hidden = randn(ANSWERS, TOKENS, 8, dtype=torch.float32, device="cpu").requires_grad_()
        weight, ref, old = (randn(n, m, dtype=torch.float32, device="cpu", seed=n + m) for n, m in ((CLASSES, 8), *[(ANSWERS, TOKENS)] * 2))
        ref, old = ref - 3, old - 3  # about the policy's: ratios about 1
        shape = (ANSWERS,) if of_answers else (ANSWERS, TOKENS)
        said = {"advantages": -1 - torch.rand(shape, generator=torch.Generator().manual_seed(1)),
                "correction": 1 + torch.rand(shape, generator=torch.Generator().manual_seed(2))}  # fmt: skip
        if value is not None:
            said = {name: tensor.masked_fill(~(counted.any(1) if of_answers else counted), value) for name, tensor in said.items()}
            ref, old = (tensor.masked_fill(~counted, value) for tensor in (ref, old))
        found = _policy(ops).linear_grpo_loss(
            hidden, weight, torch.ones(ANSWERS, TOKENS, dtype=torch.int64), mask, **said, loss=loss, ref_log_probs=ref, old_log_probs=old,
            importance_sampling_level=level,
        )  # fmt: skip
        results.append((*found, *torch.autograd.grad(found.loss, hidden)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other)), f"{loss} {level}: masked tokens count"


class Case(NamedTuple):
    """options: of `linear_grpo_loss`, the numbers of the formulas among them. given: what is said beside the advantages; scores of old and
    reference are log-probabilities of another policy."""

    loss: str
    options: dict = {}
    given: str = "ref old"
    last: float = 0.6  # the last answer's advantage


def policy_exact(case, log_p, given, mask):
    """(loss, kl, clip_ratio) by the formulas of the papers, in float64. log_p: of the policy, with a gradient."""
    o = {"beta": 0.04, "epsilon_low": 0.2, "epsilon_high": 0.2, **case.options}
    a = given["advantages"].double().view(ANSWERS, -1).expand_as(log_p)
    c = given.get("correction", torch.ones(ANSWERS)).double().view(ANSWERS, -1)
    lengths, answers = mask.sum(1), len(mask)
    counted = torch.ones_like(mask) if case.loss == "luspo_of_all" else mask
    log_ratio = (log_p - given.get("old", log_p.detach())) * counted
    if o.get("importance_sampling_level") == "sequence":
        log_ratio = (log_ratio.sum(1) / lengths)[:, None].expand_as(log_p)
    ratio, clipped = log_ratio.exp(), torch.zeros_like(mask, dtype=torch.bool)
    if case.loss == "cispo":
        cost, clipped = -ratio.clamp(max=o["epsilon_high"]).detach() * a * log_p * c, (ratio > o["epsilon_high"]) & (a > 0)
    elif case.loss == "sapo":
        t = torch.where(a > 0, 0.5, 2.0).double()
        cost = -4 / t * torch.sigmoid(t * (ratio - 1)) * a * c
    elif case.loss == "vespo":
        k, rate = (torch.where(a >= 0, *numbers).double() for numbers in ((2.0, 3.0), (3.0, 2.0)))
        log_w = log_ratio.detach().sum(1, keepdim=True) + (c.log().sum(1, keepdim=True) if "correction" in given else 0)
        cost = -(rate + k * log_w - rate * log_w.exp()).exp() * a * log_p
    else:
        low, high = 1 - o["epsilon_low"], 1 + o["epsilon_high"]
        cost = -torch.minimum(ratio.clamp(max=o.get("delta", torch.inf)) * a, ratio.clamp(low, high) * a) * c
        clipped = ((ratio < low) & (a < 0)) | ((ratio > high) & (a > 0))
    distance = (given.get("ref", log_p.detach()) - log_p) * counted
    kl = (distance.exp() - 1 - distance) * (ratio if o.get("use_bias_correction_kl") else 1)
    cost = (cost + o["beta"] * kl) * counted
    total = {
        "dr_grpo": cost.sum() / (answers * 9), "luspo": cost.sum() / answers, "bnpo": cost.sum() / mask.sum(),
        **dict.fromkeys(("dapo", "cispo", "vespo"), cost.sum() / o.get("num_items_in_batch", mask.sum())),
        **dict.fromkeys(("grpo", "sapo"), (cost.sum(1) / lengths).mean()),
        "luspo_of_all": (cost * lengths[:, None]).sum() / cost.numel(),
    }[case.loss]  # fmt: skip
    return total, (kl * mask).sum() / mask.sum(), (clipped * mask).sum() / mask.sum()


def check_formula(ops, case):
    """The loss, what is said of it, and its gradient."""
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0], [1.0] * TOKENS])
    hidden, weight = (leaf(randn(*shape, dtype=FP32, device=CPU, seed=i)) for i, shape in enumerate(((ANSWERS, TOKENS, 8), (CLASSES, 8))))
    tokens = torch.arange(ANSWERS * TOKENS).view(ANSWERS, TOKENS) % CLASSES
    temperature = case.options.get("temperature", 1.0)
    hidden64, weight64 = exact(hidden), exact(weight)
    log_p = (hidden64 @ weight64.t() / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    near = [log_p.detach() + 0.3 * randn(ANSWERS, TOKENS, dtype=torch.float64, device=CPU, seed=i) for i in (3, 4)]
    said = {"ref": near[0], "old": near[1], "advantages": torch.tensor([1.3, -0.4, case.last]), "correction": torch.tensor([0.7, 1.2, 0.9])}
    given = {name: said[name] for name in ("advantages", *case.given.split())}
    names = {"ref": "ref_log_probs", "old": "old_log_probs"}
    found = _policy(ops).linear_grpo_loss(
        hidden, weight, tokens, mask, loss=case.loss, **{names.get(name, name): value.float() for name, value in given.items()},
        use_reference="ref" in given,
        **{**NUMBERS.get(case.loss, {}), **case.options},
    )  # fmt: skip
    wanted = policy_exact(case, log_p, given, mask)
    grads = torch.autograd.grad(found.loss, (hidden, weight)), torch.autograd.grad(wanted[0], (hidden64, weight64))
    for name, one, other in zip(("loss", "kl", "clip_ratio", "hidden", "weight"), (*found, *grads[0]), (*wanted, *grads[1]), strict=True):
        if one is not None:
            assert_close(one, other.detach(), FP32, f"{name} of {case}", 20)


NUMBERS = {"dr_grpo": {"max_completion_length": 9}, "sapo": {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0}}
CASES = [
    *map(Case, ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "luspo_of_all", "cispo", "sapo", "vespo")),
    Case("grpo", {"importance_sampling_level": "sequence", "temperature": 0.8}),
    Case("grpo", {"delta": 1.1, "epsilon_low": 0.1, "epsilon_high": 0.05}, "ref old correction"),
    Case("grpo", {"use_bias_correction_kl": True, "beta": 0.3}),
    Case("dapo", {"num_items_in_batch": 31.0}, "ref"),
    Case("cispo", {"epsilon_high": 0.7}, "ref old correction", last=0.0),
    Case("sapo", {}, "old correction"),
    Case("vespo", {}, "ref old correction"),
    Case("grpo", {"beta": 0.0}),
]


def check_formulas(ops):
    for case in CASES:
        check_formula(ops, case)


def check_items(ops):
    """The number of tokens of all processes over that of processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)  # what the others count is added up as nothing
    try:
        found = [float(_policy(ops).items_of_process(torch.ones(2, 6), items)) for items in (None, 24, torch.tensor(24))]
    finally:
        dist.destroy_process_group()
    assert found == [3.0, 6.0, 6.0], found


FILE = "shared/ops/policy_losses.py"
SAME = {
    "positive = t.advantage > 0": "an advantage of 0 costs nothing",
    "log_w = (t.log_ratio.detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)).sum(1, keepdim=True)": "it is 0 where the mask is",
}
MUTANTS = [
    *generated(FILE, "formula", "_clipped _cispo _sapo _vespo _mean_of_answers _mean_of_tokens _per_length _per_item _sum_of_answers "
               "_per_place", kernels=False, same=SAME),
    *generated(FILE, "formula or masked or masked vespo", "linear_grpo_loss", kernels=False),
    *generated(FILE, "masked answers or formula", "_where_counted", kernels=False),
    *generated(FILE, "items or formula", "items_of_process", kernels=False),
    *errors_in(FILE, "masked", "linear_grpo_loss", ("advantages = _where_counted(counted, advantages, 0.0)", "pass"), kernels=False),
    *errors_in(FILE, "masked vespo", "linear_grpo_loss", ("_where_counted(counted, correction, 1.0)", "correction"), kernels=False),
]  # fmt: skip
CHECKS = {
    "formula": check_formulas,
    "masked": lambda ops: check_masked(ops, "grpo"),
    "masked answers": lambda ops: check_masked(ops, "grpo", of_answers=True),
    "masked vespo": lambda ops: check_masked(ops, "vespo"),
    "items": check_items,
}
