"""The gated delta rule in the interpreted kernels and in PyTorch."""

import itertools

import pytest
import torch

from tests.ops import gated_delta_rule as rule
from tests.ops.common import BF16, FP32, launched, runtime_of

DEVICE = "cpu"


@pytest.mark.parametrize("name, check", [pytest.param(name, check, id=name) for name, check in rule.all_cases(None, DEVICE)])
def test_kernels(interpreted, name, check):
    before = len(launched(interpreted))
    dict(rule.all_cases(interpreted, DEVICE))[name]()
    assert name == "empty" or len(launched(interpreted)) > before, "the operation ran in PyTorch, not in kernels"


def test_the_fewer_the_documents_the_narrower_the_blocks(interpreted, monkeypatch):
    """On eight multiprocessors one document of two heads has blocks of 32 columns, two of 64, three of 128; the bits are the same."""
    before = len(launched(interpreted))
    monkeypatch.setitem(runtime_of(interpreted).device._multiprocessors, -1, 8)
    rule.check_packed_is_separate(interpreted, DEVICE, BF16)
    rule.check_rule(interpreted, DEVICE, BF16, (70, 5), key_heads=2, heads=2)
    walks = {name for name in launched(interpreted)[before:] if "CARRY" in name}
    for kernel, columns in itertools.product(("delta_walk", "delta_states", "delta_reverse"), ("-BV32-", "-BV64-", "-BV128-")):
        assert any(name.startswith(f"{kernel}-") and columns in name for name in walks), walks


WHOLE, IN_PARTS = {"delta_scores", "delta_inverse"}, {"delta_scores", "delta_gates", "delta_keys"}
KERNELS_OF = {"sm_80": (IN_PARTS, "-BV64-", "-SPLIT1-"), "sm_100": (WHOLE, "-BV64-", "-SPLIT0-"), "sm_90": (WHOLE, "-BV128-", "-SPLIT0-")}
OPTIONS = {
    "of two documents": {},
    "of two key heads": {"lengths": (40,), "key_heads": 2, "heads": 4},
    "of long memory": {"lengths": (20, 140), "decay": 0.03},
    "carried": {"lengths": (30, 70), "decay": 0.03, "carry": True},
    "without a norm": {"lengths": (70,), "l2_norm": False},
    "alike": {"lengths": (100,), "alike": 0.7},
    "of no decay": {"lengths": (70,), "decay": 0.0, "alike": 1.0, "rows": 8.0, "of_g": 4 * rule.OF_G},
}
CASES_OF = [(gpu, name) for gpu in KERNELS_OF for name in (OPTIONS if gpu == "sm_80" else ("of two documents",))]


@pytest.mark.parametrize("gpu, name", CASES_OF)
def test_kernels_of_other_architectures(interpreted, gpu, name):
    """On sm_80, whose sums are made in parts, all that the others run by themselves."""
    before, (kernels, columns, split) = len(launched(interpreted)), KERNELS_OF[gpu]
    rule.check_on(interpreted, gpu, **OPTIONS[name])
    last = [name for name in launched(interpreted)[before:] if name.split("-")[0] in WHOLE | IN_PARTS]
    assert {name.split("-")[0] for name in last} == kernels
    assert all(columns in name and (split in name or "-SPLIT" not in name) for name in last), last


@pytest.mark.parametrize("dtype", (FP32, torch.float64), ids=str)
def test_pytorch(all_operations, dtype):
    for lengths in rule.LENGTHS:
        rule.check_rule(all_operations, DEVICE, dtype, lengths, key_heads=2, heads=4, width=16)
    rule.check_rule(all_operations, DEVICE, dtype, (70,), key_heads=2, heads=4, width=16, carry=True, l2_norm=False, alike=0.7)


def test_half_precision_in_pytorch(all_operations):
    rule.check_rule(all_operations, DEVICE, torch.float16, (37, 64))
    for check in ("(37, 64, 1, 70) torch.bfloat16", "carried", "packed", "batch", "views", "empty", "step torch.bfloat16"):
        dict(rule.all_cases(all_operations, DEVICE))[check]()


def test_a_step_with_gradients_is_refused(all_operations):
    q, k, v, g, beta = (x[None].requires_grad_() for x in rule.inputs_of(FP32, DEVICE, 2, 1, 2, 16))
    with pytest.raises(RuntimeError, match="gated_delta_step has no backward pass"):
        rule.step_of(all_operations)(q, k, v, g, beta)


WRONG = {
    "q": {"q": lambda x: x[0]},
    "k": {"k": lambda x: x[:, :, :, :8]},
    "v": {"v": lambda x: x.expand(-1, -1, 3, -1)[:, :, :3], "q": lambda x: x.expand(-1, -1, 2, -1), "k": lambda x: x.expand(-1, -1, 2, -1)},
    "g": {"g": lambda x: x[:, :1]},
    "beta": {"beta": lambda x: x.int()},
    "cu_seqlens": {"cu_seqlens": lambda x: torch.tensor([0.0, 2.0])},
    "initial_state": {"initial_state": lambda x: torch.zeros(3, 2, 16, 16)},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(all_operations, name):
    given = dict(zip(("q", "k", "v", "g", "beta"), (x[None] for x in rule.inputs_of(FP32, DEVICE, 2, 1, 1, 16)), strict=True))
    for changed, change in WRONG[name].items():
        given[changed] = change(given.get(changed))
    with pytest.raises(ValueError, match=f"^{name} is "):
        rule.module_of(all_operations).gated_delta_rule(**given)
