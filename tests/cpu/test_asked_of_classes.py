"""What Trainer asks a model in each pass after `apply()` is what transformers says, without a walk over all modules, whatever a user has
changed."""

import functools
import itertools
import pickle
import sys
from unittest import mock

import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from tests.capturing import functions_called
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


class Frozen(nn.Sequential):
    """Stays in evaluation, as a frozen tower."""

    def train(self, mode=True):
        return super().train(False)


class Noting(nn.Module):
    """Notes the calls of `train` that come to it."""

    def train(self, mode=True):
        self.noted = [*getattr(self, "noted", ()), mode]
        return super().train(mode)


class Mixed(Qwen3ForCausalLM, Noting):
    pass


class Beside(nn.Sequential):
    """Shows a module that stands elsewhere as its child."""

    def children(self):
        return (*super().children(), *self.elsewhere)


class Strict(nn.Linear):
    """Counts how often it is told its mode."""

    def __setattr__(self, name, value):
        if name == "training":
            vars(self)["told"] = vars(self).get("told", 0) + 1
        super().__setattr__(name, value)


class Hiding(nn.Sequential):
    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self


def beside(model):
    """Its mode is set by what shows it."""
    model.model.more = Beside(nn.Linear(2, 2))
    model.model.more.elsewhere = (nn.Dropout(0.1).eval(),)


def shown(model, by):
    """One of a model's own methods shows another module alone."""
    model.model.more = nn.Linear(2, 2)
    model.model.more.elsewhere = (nn.Dropout(0.1).eval(),)
    names = {"children": lambda: iter(model.model.more.elsewhere), "named_children": lambda: iter([("0", *model.model.more.elsewhere)])}
    vars(model.model)[by] = names[by]


def before(model, name, held):
    """Puts a module before all others of a model."""
    others = dict(model._modules)
    model._modules.clear()
    model._modules.update({name: held, **others})


def tied_before(model):
    linear = nn.Linear(*reversed(model.model.embed_tokens.weight.shape), bias=False)
    linear.weight = model.model.embed_tokens.weight
    before(model, "tied", linear)


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
    "traced": lambda model: setattr(model.model, "more", torch.jit.trace(nn.Sequential(nn.Linear(2, 2)), torch.zeros(1, 2))),
    "frozen tower": lambda model: setattr(model.model, "more", Frozen(nn.Linear(2, 2), nn.Dropout(0.5))),
    "mixin": lambda model: of_class(model, Mixed),
    "beside": beside,
    "own children": lambda model: shown(model, "children"),
    "own named children": lambda model: shown(model, "named_children"),
    "strict": lambda model: setattr(model.model, "more", Strict(2, 2)),
    "embedding of the model's own": lambda model: setattr(model, "first", model.model.embed_tokens.weight),
    "tied before": tied_before,
    "hidden embedding": lambda model: setattr(model.model, "more", Hiding(nn.Embedding(3, 7))),
    "named otherwise": lambda model: of_class(model, Filtered),
    "told": lambda model: of_class(model, Told),
    "stubborn": lambda model: setattr(model.model.layers[0], "more", Stubborn(2, 2)),
    "one in evaluation": lambda model: model.model.layers[1].eval(),
    "an own train": lambda model: setattr(model.model.norm, "train", Stubborn.train.__get__(model.model.norm)),
}


MODES = True, True, False, False, True


def seen(model):
    """The modes of what is in a model, and what was told to whom."""
    each = [*model.modules(), *getattr(getattr(model.model, "more", None), "elsewhere", ())]
    return [(module.training, vars(module).get("told"), vars(module).get("noted")) for module in each]


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_what_transformers_says(qwen3, change):
    plain, model = tiny_model(), tiny_model()
    for each in (plain, model):
        CHANGES[change](each)
    numbers = [plain.num_parameters(*arguments) for arguments in ARGUMENTS]
    modes = [seen(plain.train(mode)) for mode in MODES]
    qwen3.apply()
    assert all(name in vars(Qwen3ForCausalLM) for name in NAMES)
    assert [model.num_parameters(*arguments) for arguments in ARGUMENTS] == numbers
    for mode, expected in zip(MODES, modes):
        assert model.train(mode) is model and seen(model) == expected
    qwen3.reset()
    assert not any(name in vars(Qwen3ForCausalLM) for name in NAMES)


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


@pytest.mark.parametrize("made", ("wrapper", "mock"))
@pytest.mark.parametrize("name", NAMES)
def test_what_is_made_of_our_method_is_its_users(qwen3, monkeypatch, name, made):
    """`functools.wraps` copies what ours says of itself, and a mock says anything."""
    model, calls = tiny_model().train(), []
    qwen3.apply()
    ours = getattr(Qwen3ForCausalLM, name)

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        calls.append(name)
        return ours(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Qwen3ForCausalLM, name, theirs if made == "wrapper" else mock.Mock(side_effect=lambda *args: calls.append(name)))
        for action in (lambda: None, qwen3.reset, qwen3.apply, qwen3.reset):
            action()
            calls.clear()
            getattr(model, name)()
            assert calls == [name]
    qwen3.apply()
    qwen3.reset()
    assert name not in vars(Qwen3ForCausalLM)


def test_what_is_put_back_after_reset_answers_nothing(qwen3, monkeypatch):
    with monkeypatch.context() as patch:
        qwen3.apply()
        patch.setattr(Qwen3ForCausalLM, "num_parameters", lambda self: 1)
        qwen3.reset()
    model = tiny_model()
    assert "num_parameters" in vars(Qwen3ForCausalLM)
    assert functions_called(lambda: model.num_parameters(exclude_embeddings=True)) & {"named_modules"}
    qwen3.apply()
    qwen3.reset()
    assert "num_parameters" not in vars(Qwen3ForCausalLM)


def test_a_method_of_the_class_for_another_object(qwen3):
    class Duck(nn.Linear):
        num_parameters = None

    duck = Duck(2, 3)
    qwen3.apply()
    Duck.num_parameters = Qwen3ForCausalLM.num_parameters
    assert duck.num_parameters() == 9
    assert pickle.loads(pickle.dumps(Qwen3ForCausalLM.train)) is Qwen3ForCausalLM.train


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


@pytest.mark.parametrize("first", (True, False), ids=("the first", "the second"))
def test_adapters_of_two_packages(qwen3, decoders, first):
    """Whichever is taken back last puts PEFT's method back; one that a user put away meanwhile answers nothing more."""
    plain, packages = peft.PeftModel.disable_adapter, (qwen3, decoders) if first else (decoders, qwen3)
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj"]))

    def asks(method):
        def call():
            with method(model):
                pass

        return "get_layer_status" in functions_called(call)

    for package in (qwen3, decoders):
        package.apply()
    ours, within = peft.PeftModel.disable_adapter, []

    @functools.wraps(ours)
    def theirs(self):
        within.append(1)
        return ours(self)

    for package in packages:
        assert peft.PeftModel.disable_adapter is ours is not plain and not asks(ours)
        package.reset()
    assert peft.PeftModel.disable_adapter is plain and asks(ours) and asks(plain)
    qwen3.apply()
    ours = peft.PeftModel.disable_adapter
    with mock.patch.object(peft.PeftModel, "disable_adapter", theirs):
        assert not asks(theirs)
        qwen3.reset()
        assert asks(theirs) and within == [1, 1]
    assert asks(peft.PeftModel.disable_adapter)
    decoders.apply()
    decoders.reset()
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
