"""What Trainer asks a captured model in each pass is what the model's class says, without a walk over all modules."""

import collections
import copy
import functools
import gc
import itertools
import operator
import sys
import weakref

import peft
import pytest
import torch
from torch import nn

from tests.capturing import functions_called, one_family

pytestmark = one_family
NAMES = "train", "num_parameters", "parameters", "modules"


class Counting(nn.Module):
    """Counts the calls of its `train`."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def train(self, mode=True):
        self.calls.append(mode)
        return super().train(mode)


def asked(model, arguments):
    return type(model).num_parameters(model, *arguments)


@pytest.mark.parametrize("change", ("none", "frozen", "added", "shared", "embedding"))
def test_the_number_of_parameters_is_transformers(adapted, change):
    _, causal_lm = adapted
    if change == "frozen":
        causal_lm.model.norm.weight.requires_grad_(False)
    if change == "added":
        causal_lm.model.layers[0].mlp.bias = nn.Parameter(torch.zeros(3))
    if change == "shared":
        causal_lm.model.layers[1].mlp = causal_lm.model.layers[0].mlp
    if change == "embedding":
        causal_lm.model.more = nn.Embedding(5, 7)
    found = [causal_lm.num_parameters(*arguments) for arguments in itertools.product((False, True), repeat=2)]
    assert found == [asked(causal_lm, arguments) for arguments in itertools.product((False, True), repeat=2)]
    assert len(set(found)) >= 3


def test_none_walks_over_all_modules(adapted):
    model, causal_lm = adapted
    expected, parameters = asked(causal_lm, (False, True)), list(model.parameters())
    assert model.num_parameters(exclude_embeddings=True) == expected and model.train() is model
    assert len(list(model.parameters())) == len(parameters)
    for call in (lambda: causal_lm.num_parameters(exclude_embeddings=True), causal_lm.train, lambda: list(causal_lm.parameters())):
        assert not functions_called(call) & {"named_modules", "named_children", "walk"}


@pytest.mark.parametrize("kind", ("modules", "parameters"))
def test_a_dictionary_that_is_another_one(adapted, kind):
    """As PyTorch's lists have after some were deleted, be it none: what comes into it is found."""
    model, causal_lm = adapted
    assert model.train() is model and list(model.parameters())
    if kind == "modules":
        layers = causal_lm.model.layers
        del layers[len(layers) :]
        layers.append(nn.Linear(3, 3).eval())
    else:
        norm = causal_lm.model.norm
        norm._parameters = dict(norm._parameters)
        norm.more = nn.Parameter(torch.ones(3))
    found, expected = list(model.parameters()), list(nn.Module.parameters(model))
    assert len(found) == len(expected) and all(map(operator.is_, found, expected))
    assert all(module.training for module in model.train().modules())


def test_a_hook_in_another_dictionary_is_noticed(package, adapted):
    """Some remove hooks by giving a module new dictionaries. Padding stays in a batch whose modules are listened to."""
    decoder = adapted[1].model
    sees = functools.partial(sys.modules[f"{package.__name__}.shared.hf.model.padding"]._may_see_padding, decoder, decoder.embed_tokens)
    assert not sees()
    decoder.norm._forward_hooks = collections.OrderedDict()
    assert not sees()
    decoder.norm.register_forward_hook(lambda *given: None)
    assert sees()


@pytest.mark.parametrize("change", ("none", "frozen", "added", "shared", "absent"))
def test_the_parameters_are_torchs(adapted, change):
    for model in adapted:
        if change == "frozen":
            model.requires_grad_(False)
        if change == "added":
            adapted[1].model.layers[0].mlp.bias = nn.Parameter(torch.zeros(3))
        if change == "shared":
            adapted[1].model.layers[1].mlp = adapted[1].model.layers[0].mlp
        if change == "absent":
            adapted[1].model.layers[0].register_parameter("absent", None)
        for recurse in (True, False):
            found, expected = list(model.parameters(recurse)), list(nn.Module.parameters(model, recurse))
            assert len(found) == len(expected) and all(map(operator.is_, found, expected))
        model.zero_grad()
        assert "parameters" in vars(model)


@pytest.mark.parametrize("place", ("class", "model"))
def test_how_a_user_finds_parameters_is_kept(adapted, monkeypatch, place):
    model, found = adapted[0], [nn.Parameter(torch.zeros(1))]
    owner = {"class": type(model), "model": model}[place]
    monkeypatch.setattr(owner, "named_parameters", lambda *args, **kwargs: iter([("one", found[0])]), raising=False)
    assert list(model.parameters()) == found


@pytest.mark.parametrize("change", ("exchanged", "removed", "emptied", "added below a leaf", "parameter", "a list's"))
def test_what_changes_between_two_questions_is_noticed(adapted, change):
    model, causal_lm = adapted
    layer, norm = causal_lm.model.layers[0], causal_lm.model.norm
    assert model.train() is model and list(model.parameters())
    if change == "exchanged":
        layer.mlp = nn.Linear(3, 3).eval()
    if change == "removed":
        del layer.mlp.down_proj
    if change == "emptied":
        del norm.weight
    if change == "added below a leaf":
        norm.more = nn.Sequential(nn.Linear(2, 2).eval())
    if change == "parameter":
        norm.weight = nn.Parameter(torch.ones(5))
    if change == "a list's":
        del causal_lm.model.layers[1]
    found, expected = list(model.parameters()), list(nn.Module.parameters(model))
    assert len(found) == len(expected) and all(map(operator.is_, found, expected))
    assert causal_lm.num_parameters(exclude_embeddings=True) == asked(causal_lm, (False, True))
    assert all(module.training for module in model.train().modules())


def test_a_captured_model_goes_with_its_last_user(package, tiny_model):
    """What was found of it refers to no module that holds it."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        model = package.kernelize(tiny_model())
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
        causal_lm = model.get_base_model()
        package.capture(model)
        model.train()
        assert list(model.parameters()) and model.num_parameters() and list(model.modules()) and list(causal_lm.modules())
        with model.disable_adapter():
            pass
        gone = [weakref.ref(each) for each in (model, causal_lm)]
        del model, causal_lm
        assert [each() for each in gone] == [None, None]
    finally:
        if enabled:
            gc.enable()


def test_the_mode_changes_where_it_is_another(adapted):
    model, causal_lm = adapted
    for mode in (False, True):
        assert model.train(mode) is model
        assert {module.training for module in model.modules()} == {mode}
    causal_lm.model.layers[0].mlp.down_proj.eval()  # one of many
    model.train()
    assert all(module.training for module in model.modules())
    with pytest.raises(ValueError, match="boolean"):
        causal_lm.train("yes")


def test_a_module_with_a_method_of_its_own_is_asked(adapted):
    model, causal_lm = adapted
    counting, calls = Counting(), []
    causal_lm.model.counting = counting
    model.train()
    assert counting.calls == [True]
    del causal_lm.model.counting
    norm = causal_lm.model.norm
    norm.train = lambda mode=True: calls.append(mode) or norm
    model.train()
    assert calls == [True]


def test_a_function_that_is_replaced_is_called(adapted, monkeypatch):
    model, calls, train = adapted[0], [], nn.Module.train
    monkeypatch.setattr(nn.Module, "train", lambda self, mode=True: calls.append(self) or train(self, mode))
    model.train()
    assert len(calls) == len(list(model.modules()))


@pytest.mark.parametrize("name", ("train", "modules", "named_modules"))
def test_what_was_in_torchs_place_when_the_package_was_read_is_not_torchs(package, name, monkeypatch):
    torchs_own = sys.modules[f"{package.__name__}.shared.hf.parts.modules"].torchs_own
    original = getattr(nn.Module, name)
    assert torchs_own(name) is original
    monkeypatch.setattr(nn.Module, name, functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs)))
    assert torchs_own(name) is None


def test_a_copy_answers_for_itself(package, tiny_model):
    model = package.kernelize(tiny_model())
    package.capture(model)
    made = copy.deepcopy(model)
    made.model.more = nn.Linear(2, 2)
    made.eval()
    assert made.num_parameters() == model.num_parameters() + 6 and model.training and not made.model.norm.training


def test_what_is_put_on_a_model_comes_off(package, tiny_model):
    model, other = package.kernelize(tiny_model()), package.kernelize(tiny_model())
    other.train = own = lambda mode=True: other
    for each in (model, other):
        package.capture(each)
    assert set(NAMES) < set(vars(model)) and other.train is own
    package.reset()
    assert not set(NAMES) & set(vars(model)) and other.train is own


@pytest.mark.parametrize("change", ("a method of the class", "a class", "no embedding any more", "what it shows", "a traced module"))
def test_what_is_the_users_after_capture(adapted, monkeypatch, change):
    _, causal_lm = adapted
    found = causal_lm.num_parameters(exclude_embeddings=True)
    if change == "a method of the class":
        monkeypatch.setattr(type(causal_lm), "num_parameters", lambda self, *args, **kwargs: 5)
    if change == "a class":
        causal_lm.__class__ = type("Theirs", (type(causal_lm),), {"num_parameters": lambda self, *args, **kwargs: 5})
    if change == "no embedding any more":
        causal_lm.model.embed_tokens.__class__ = type("Table", (nn.Module,), {})
    if change == "what it shows":
        causal_lm.model.layers[0].named_modules = lambda *args, **kwargs: iter(())
    if change == "a traced module":
        causal_lm.model.more = torch.jit.trace(nn.Sequential(nn.Linear(2, 2)), torch.zeros(1, 2))
        assert causal_lm.train() is causal_lm
    expected = asked(causal_lm, (False, True))
    assert causal_lm.num_parameters(exclude_embeddings=True) == expected != found
    assert len(list(causal_lm.parameters())) == len(list(nn.Module.parameters(causal_lm)))


def test_capture_of_a_model_with_a_traced_module(package, tiny_model):
    model = package.kernelize(tiny_model()).train()
    model.model.more = torch.jit.trace(nn.Sequential(nn.Linear(2, 2)), torch.zeros(1, 2))
    assert package.capture(model, 2, 9) is model
