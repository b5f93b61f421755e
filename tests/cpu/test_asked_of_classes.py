"""What Trainer asks a model in each pass after `apply()` is what transformers says, without a walk over all modules, whatever a user has
changed."""

import itertools
import sys

import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from tests.models import tiny_model

ARGUMENTS = tuple(itertools.product((False, True), repeat=2))
NAMES = "train", "num_parameters"


class Filtered(Qwen3ForCausalLM):
    """Hides a parameter."""

    def named_parameters(self, *args, **kwargs):
        return (found for found in super().named_parameters(*args, **kwargs) if "q_norm" not in found[0])


class Told(Qwen3ForCausalLM):
    """Notes what its `train` gets."""

    def train(self, mode=True):
        self.told = [*getattr(self, "told", ()), mode]
        return super().train(mode)


class Stubborn(nn.Linear):
    """Stays in training."""

    def train(self, mode=True):
        self.training = True
        return self


def of_class(model, cls):
    model.__class__ = cls
    return model


CHANGES = {
    "none": lambda model: model,
    "frozen": lambda model: model.model.norm.weight.requires_grad_(False),
    "shared": lambda model: setattr(model.model.layers[1], "mlp", model.model.layers[0].mlp),
    "tied": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
    "another embedding": lambda model: setattr(model.model, "more", nn.Embedding(5, 7)),
    "scripted": lambda model: setattr(model.model, "more", torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))),
    "named otherwise": lambda model: of_class(model, Filtered),
    "told": lambda model: of_class(model, Told),
    "stubborn": lambda model: setattr(model.model.layers[0], "more", Stubborn(2, 2)),
    "one in evaluation": lambda model: model.model.layers[1].eval(),
    "an own train": lambda model: setattr(model.model.norm, "train", Stubborn.train.__get__(model.model.norm)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_what_transformers_says(qwen3, change):
    plain, model = tiny_model(), tiny_model()
    for each in (plain, model):
        CHANGES[change](each)
    numbers = [plain.num_parameters(*arguments) for arguments in ARGUMENTS]
    modes = {mode: [module.training for module in plain.train(mode).modules()] for mode in (True, True, False, False, True)}
    qwen3.apply()
    assert all(name in vars(Qwen3ForCausalLM) for name in NAMES)
    assert [model.num_parameters(*arguments) for arguments in ARGUMENTS] == numbers
    for mode in (True, True, False, False, True):
        assert model.train(mode) is model
        assert [module.training for module in model.modules()] == modes[mode]
    assert getattr(model, "told", None) == getattr(plain, "told", None)
    qwen3.reset()
    assert not any(name in vars(Qwen3ForCausalLM) for name in NAMES)


def functions_called(call):
    """The names of the functions that run during a call."""
    found = set()
    sys.setprofile(lambda frame, event, argument: found.add(frame.f_code.co_name))
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_no_walk_of_torchs(qwen3):
    model = tiny_model().train()
    walks = {"named_modules", "named_children"}
    for call in (lambda: model.train(), lambda: model.num_parameters(exclude_embeddings=True)):
        assert functions_called(call) & walks
        qwen3.apply()
        assert not functions_called(call) & walks
        qwen3.reset()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("owner", (Qwen3ForCausalLM, PreTrainedModel))
@pytest.mark.parametrize("first", (True, False), ids=("before", "after"))
def test_a_users_method_is_called(qwen3, monkeypatch, name, owner, first):
    original, calls = getattr(owner, name), []

    def theirs(self, *args, **kwargs):
        calls.append(name)
        return original(self, *args, **kwargs)

    model = tiny_model().train()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, theirs)
        getattr(model, name)()
    expected = calls.copy()
    if not first:
        qwen3.apply()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, theirs)
        if first:
            qwen3.apply()
        for reset in (lambda: None, qwen3.reset):
            reset()
            calls.clear()
            getattr(model, name)()
            assert calls == expected


def test_weights_of_four_bits_count_twice(qwen3):
    """Which transformers knows."""
    qwen3.apply()
    model = tiny_model()
    model.is_loaded_in_4bit = True
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model.lm_head.weight = bitsandbytes.nn.Params4bit(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False, quant_storage=torch.uint8)
    found = model.num_parameters()
    qwen3.reset()
    assert found == model.num_parameters() == sum(p.numel() for p in model.parameters()) + 8


def test_adapters_of_a_peft_that_is_loaded_late(qwen3, monkeypatch):
    """A trainer of TRL's calls `add_fused_lm_head` when it is made."""
    utils, plain = pytest.importorskip("trl.trainer.utils"), peft.PeftModel.disable_adapter
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "peft.peft_model")
        qwen3.apply()
    assert peft.PeftModel.disable_adapter is plain
    utils.add_fused_lm_head(tiny_model())
    assert peft.PeftModel.disable_adapter is not plain
    qwen3.reset()
    assert peft.PeftModel.disable_adapter is plain


def test_inside_of_one_graph(qwen3):
    qwen3.apply()
    model = tiny_model()

    def step(x):
        return x * model.train().num_parameters()

    assert torch.compile(step, backend="eager", fullgraph=True)(torch.ones(())) == model.num_parameters()


def test_reset_with_a_scripted_module_somewhere(qwen3):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    qwen3.apply()
    qwen3.reset()
    assert scripted(torch.zeros(2)).shape == (2,)
