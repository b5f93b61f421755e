"""Tokens that do not count: what other models, or the user, say of them may be anything, infinite or no number, and changes no bit."""

import importlib
import multiprocessing

import pytest
import torch
import torch.distributed as dist

from tests.cpu.conftest import kernels_of

ANSWERS, TOKENS, HIDDEN, CLASSES = 5, 4, 16, 40
ANYTHING = (float("nan"), -float("inf"), -1e6, 1e6)
COUNTED = torch.ones(ANSWERS, TOKENS, dtype=torch.bool)
COUNTED[0, 3:] = COUNTED[1, 1:3] = COUNTED[2] = COUNTED[4, 2:] = False
KERNELS = [*kernels_of("packages/liger"), "log_probs", "head_divergence"]
TEACHERS = {
    "jsd": ("linear_jsd", {"beta": 0.3}), "kl": ("linear_jsd", {"beta": 0.0}),
    "reverse kl": ("linear_jsd", {"beta": 1.0, "temperature": 2.0}), "cosine": ("distillation_losses", {}),
}  # fmt: skip
POLICIES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")


@pytest.fixture(params=("pytorch", "kernels"))
def module(request, all_operations, interpret):
    """A function of the name of a file of operations, which returns it."""
    if request.param == "kernels":
        interpret(all_operations, KERNELS)
    return lambda name: importlib.import_module(f"{all_operations.__name__}.shared.ops.{name}")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spoiled(tensor, value, counted=COUNTED):
    """A tensor with a value in the rows that do not count."""
    return tensor.masked_fill(~counted.view(*counted.shape, *[1] * (tensor.dim() - counted.dim())), value)


def same_bits(run, *spoil):
    """run: called with a function of a tensor; what it returns and the gradients are those of tensors that nothing was done to."""
    expected = run(lambda tensor, *_: tensor)
    assert all(tensor.isfinite().all() for tensor in expected)
    for value in ANYTHING:
        for one, other in zip(run(lambda tensor, *counted: spoiled(tensor, value, *counted)), expected):  # noqa: B023
            assert torch.equal(one, other), value


def student():
    return [normal(ANSWERS, TOKENS, HIDDEN), normal(CLASSES, HIDDEN, seed=1), normal(CLASSES, seed=2)]


def gradients(loss, leaves):
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("frozen", (False, True), ids=("", "frozen"))
@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher(module, name, frozen):
    file, options = TEACHERS[name]
    function = module(file).linear_jsd if file == "linear_jsd" else module(file).linear_cosine
    labels = torch.where(COUNTED, 3, -100).flatten()

    def run(change):
        hidden, weight, bias = student()
        leaves = [each.requires_grad_() for each in ([hidden] if frozen else [hidden, weight, bias])]
        of_teacher = change(normal(ANSWERS, TOKENS, HIDDEN, seed=3)).flatten(0, 1)
        heads = hidden.flatten(0, 1), weight, of_teacher, normal(CLASSES, HIDDEN, seed=4)
        return gradients(function(*heads, labels, bias=bias, **options), leaves)

    same_bits(run)


@pytest.mark.parametrize("of_logits", (False, True), ids=("", "of logits"))
@pytest.mark.parametrize("name", ("jsd", "tvd"))
def test_a_teachers_logits(module, name, of_logits):
    labels = torch.where(COUNTED, 3, -100)

    def run(change):
        own, others = normal(ANSWERS, TOKENS, CLASSES).log_softmax(-1), normal(ANSWERS, TOKENS, CLASSES, seed=3).log_softmax(-1)
        own = own.exp() if name == "tvd" and not of_logits else own
        own.requires_grad_()
        return gradients(getattr(module("divergence"), name)(own, change(others), labels, from_logits=of_logits), [own])

    same_bits(run)


@pytest.mark.parametrize("frozen", (False, True), ids=("", "frozen"))
@pytest.mark.parametrize("beta", (0.0, 0.4, 1.0))
@pytest.mark.parametrize("module", ("pytorch",), indirect=True)  # kernels: tests/ops/linear_divergence.py
def test_a_teacher_of_tokens_that_the_user_masks(module, beta, frozen):
    """The gradient that comes back for these tokens is 0."""
    def run(change):
        leaves = [each.requires_grad_(i == 0 or not frozen) for i, each in enumerate(student())]
        hidden, weight, bias = leaves
        of_teacher = change(normal(ANSWERS, TOKENS, HIDDEN, seed=3))
        found = module("linear_divergence").linear_divergence(hidden, weight, of_teacher, normal(CLASSES, HIDDEN, seed=4), bias, beta=beta)
        return gradients(torch.where(COUNTED, found.divergence, 0.0).sum(), [each for each in leaves if each.requires_grad])

    same_bits(run)


@pytest.mark.parametrize("skip", (False, True), ids=("", "skipped"))
@pytest.mark.parametrize("trained", (False, True), ids=("", "trained"))
def test_coefficients(module, skip, trained):
    target = torch.where(COUNTED, 3, -100)

    def run(change):
        hidden, weight, bias = student()
        hidden.requires_grad_(trained)
        function = module("linear_log_probs").linear_log_probs
        found = function(hidden, weight, target, bias, coefficients=change(normal(ANSWERS, TOKENS, seed=5)), skip_ignored=skip)
        return gradients(found.weighted_sum, [hidden]) if trained else [found.weighted_sum]

    same_bits(run)


def test_states_of_a_frozen_head_that_the_user_masks(module):
    def run(change):
        hidden, weight, bias = student()
        hidden = change(hidden).requires_grad_()
        found = module("linear_log_probs").linear_log_probs(hidden, weight, torch.full((ANSWERS, TOKENS), 3), bias)
        return gradients(torch.where(COUNTED, found.log_probs, 0.0).sum(), [hidden])

    same_bits(run)


@pytest.mark.parametrize(("loss", "level"), [*((loss, "token") for loss in POLICIES), *((loss, "sequence") for loss in POLICIES[:5])])
@pytest.mark.parametrize("module", ("pytorch",), indirect=True)
def test_policies(module, loss, level):
    policy = module("policy_losses")
    of_answers = COUNTED.any(1)

    def run(change):
        hidden, weight, bias = leaves = [each.requires_grad_() for each in student()]
        tokens = torch.full((ANSWERS, TOKENS), 3)
        found = []
        for each in (COUNTED, of_answers):
            shape, signs = each.shape, torch.tensor([1.0, -1.0, -1.0, 1.0, -2.0])
            signs = signs[:, None] if each.dim() == 2 else signs
            given = {"advantages": signs * (1 + normal(*shape, seed=6).abs()), "correction": 1 + 0.1 * normal(*shape, seed=7).sigmoid()}
            given = {name: change(tensor, each) for name, tensor in given.items()}
            others = {name: change(normal(ANSWERS, TOKENS, seed=8) - 4) for name in ("old_log_probs", "ref_log_probs")}
            options = {"loss": loss, "importance_sampling_level": level, "max_completion_length": 9, "bias": bias}
            result = policy.linear_grpo_loss(hidden, weight, tokens, COUNTED.float(), **given, **others, **options)
            found += [result.kl, result.clip_ratio, *gradients(result.loss, leaves)]
        return found

    same_bits(run)


@pytest.mark.parametrize("average", (False, True))
@pytest.mark.parametrize("module", ("pytorch",), indirect=True)
def test_a_reference_model(module, average):
    target, hidden_of = torch.where(COUNTED, 3, -100), (4, TOKENS, HIDDEN)
    preference, losses = torch.tensor([True, False, True, False]), module("preference_losses")

    def run(change):
        leaves = [each.requires_grad_() for each in (normal(*hidden_of), *student()[1:])]
        reference = {"ref_hidden": change(normal(*hidden_of, seed=9), COUNTED[:4]), "ref_weight": normal(CLASSES, HIDDEN, seed=10)}
        given = leaves[0], leaves[1], target[:4]
        options = {**reference, "average_log_prob": average}
        found = losses.linear_preference_loss(*given, leaves[2], nll_weight=0.5, **options)
        kto = losses.linear_kto_loss(*given, preference, leaves[2], **options)
        return [*gradients(found.loss + kto.loss, leaves), found.chosen_rewards, kto.rejected_rewards]

    same_bits(run)


def _loss_of_process(rank, folder, package, queue):
    dist.init_process_group("gloo", store=dist.FileStore(folder, 2), rank=rank, world_size=2)
    policy = importlib.import_module(f"{package}.shared.ops.policy_losses")
    mask = COUNTED.float() if rank else (torch.arange(TOKENS) < 2).float().expand(ANSWERS, -1)
    found = [float(policy.items_of_process(mask, items)) for items in (None, 31, torch.tensor(31))]
    queue.put(found)
    dist.destroy_process_group()


def test_tokens_of_all_processes(all_operations, tmp_path):
    """Each process divides by the mean of what the processes count, so that the mean of its gradients is that of one process with all."""
    forked = multiprocessing.get_context("fork")
    queue = forked.SimpleQueue()
    given = str(tmp_path / "store"), all_operations.__name__, queue
    processes = [forked.Process(target=_loss_of_process, args=(rank, *given)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    counted = (2 * ANSWERS + int(COUNTED.sum())) / 2
    assert [queue.get() for _ in processes] == [[counted, 15.5, 15.5]] * 2
