"""Planted errors of policy_losses.py: what masked tokens may be, and by what number of tokens a process divides. tests/cpu has the rest."""

import importlib

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ops.common import errors_in, randn

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


def check_items(ops):
    """The number of tokens of all processes over that of processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)  # what the others count is added up as nothing
    try:
        found = [float(_policy(ops).items_of_process(torch.ones(2, 6), items)) for items in (None, 24, torch.tensor(24))]
    finally:
        dist.destroy_process_group()
    assert found == [3.0, 6.0, 6.0], found


FILE = "shared/ops/policy_losses.py"
MUTANTS = [
    *errors_in(FILE, "masked", "linear_grpo_loss",
         ("log_ratio = torch.where(counted, log_p - old, 0.0)", "log_ratio = log_p - old"),
         ("distance = torch.where(counted, reference - log_p, 0.0)", "distance = reference - log_p"),
         ("advantages = _where_counted(counted, advantages, 0.0)", "pass"),
         ("_where_counted(counted, correction, 1.0)", "correction"), kernels=False),
    *errors_in(FILE, "masked answers", "_where_counted", ("counted.any(1, keepdim=True)", "torch.tensor(True)"), kernels=False),
    *errors_in(FILE, "masked vespo", "linear_grpo_loss", ("_where_counted(counted, correction, 1.0)", "correction"), kernels=False),
    *errors_in(FILE, "items", "items_of_process", ("torch.distributed.get_world_size() if distributed else 1", "1"), kernels=False),
]  # fmt: skip
CHECKS = {
    "masked": lambda ops: check_masked(ops, "grpo"),
    "masked answers": lambda ops: check_masked(ops, "grpo", of_answers=True),
    "masked vespo": lambda ops: check_masked(ops, "vespo"),
    "items": check_items,
}
