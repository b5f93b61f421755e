"""After `apply()`, and of a captured model, `disable_adapter` does what PEFT's does, without the status of all adapters."""

import contextlib
import copy
import warnings

import peft
import pytest
import torch
from torch import nn

from tests.capturing import one_family

pytestmark = one_family
PEFTS = peft.PeftModel.disable_adapter
ADAPTERS = {
    "lora": peft.LoraConfig(r=2, target_modules="all-linear"),
    "saved": peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "tokens": peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 2]}),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "vera": peft.VeraConfig(r=2, target_modules=["q_proj"]),
}


def adapter_layers(model):
    kinds = peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.AuxiliaryTrainingWrapper
    return [module for module in nn.Module.modules(model) if isinstance(module, kinds)]


def switches(model):
    """What a pass may see of a model's adapters."""
    off, trained = [layer.disable_adapters for layer in adapter_layers(model)], [p.requires_grad for p in model.parameters()]
    return off, trained, model._adapters_disabled


def written_out(monkeypatch):
    """Notes how often a module is written out, as PEFT does for the status of all adapters."""
    found, original = [], nn.Module.__repr__
    monkeypatch.setattr(nn.Module, "__repr__", lambda self: found.append(self) or original(self))
    return found


@pytest.mark.parametrize("state", ("on", "off", "some", "last", "wrappers off"))
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_are_switched_off_as_by_peft(package, tiny_model, kind, state, monkeypatch):
    """A reference pass of DPO asks for no status of adapters that nobody reads."""
    found = {}
    for way in ("plain", "capture", "apply"):
        model = peft.get_peft_model(package.kernelize(tiny_model()), copy.deepcopy(ADAPTERS[kind])).train()
        if state == "off":
            model.base_model.disable_adapter_layers()
        if state == "some":
            adapter_layers(model)[0].enable_adapters(False)
        if state == "last":  # of what is saved whole, say
            adapter_layers(model)[-1].enable_adapters(False)
        if state == "wrappers off":  # around tokens that are trained, of which PEFT asks what is in them alone
            for wrapper in (each for each in adapter_layers(model) if isinstance(each, peft.utils.other.TrainableTokensWrapper)):
                wrapper._disable_adapters = True
        if way != "plain":
            package.capture(model) if way == "capture" else package.apply()
        texts = written_out(monkeypatch)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            with model.disable_adapter() as nothing:
                with model.disable_adapter():
                    within = [switches(model)]
                within.append(switches(model))
        said = [str(warning.message) for warning in given]
        assert nothing is None and bool(texts) is (way == "plain")
        found[way] = within, switches(model), said
        with pytest.raises(KeyError), model.disable_adapter():
            raise KeyError
        assert switches(model) == found[way][1]
        package.reset()
        assert peft.PeftModel.disable_adapter is PEFTS
    assert found["capture"] == found["apply"] == found["plain"]


def beside(model):
    model.base_model.disable_adapter_layers()
    other = nn.Sequential(nn.Linear(2, 2))
    model.critic = peft.get_peft_model(other, peft.LoraConfig(target_modules=["0"]))


def hidden(model):
    model.base_model.disable_adapter_layers()
    first, second = adapter_layers(model)
    first.enable_adapters(True)
    model.base_model.named_modules = lambda *args, **kwargs: iter([("one", second)])


def unloaded(model):
    model.unload()


def compiled(model):
    model.base_model = torch.compile(model.base_model)


@pytest.mark.parametrize("change", (beside, hidden, unloaded, compiled), ids=lambda change: change.__name__)
def test_whose_status_is_asked(package, tiny_model, change):
    """That of the adapters in the base model alone, as it shows them; where there are none, PEFT's own error."""
    found = {}
    for captured in (False, True):
        model = peft.get_peft_model(package.kernelize(tiny_model()), peft.LoraConfig(r=2, target_modules=["q_proj"])).train()
        if captured:
            package.capture(model)
        layers = adapter_layers(model)
        change(model)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            try:
                with model.disable_adapter():
                    pass
                found[captured] = [layer.disable_adapters for layer in layers], [str(warning.message) for warning in given]
            except (TypeError, ValueError) as error:
                found[captured] = type(error), str(error)
        package.reset()
    assert found[True] == found[False]


def test_a_status_of_the_users_that_comes_late(adapted):
    model, asked = adapted[0], []
    manager, status = model.disable_adapter(), model.get_model_status()
    model.get_model_status = lambda: asked.append(1) or status
    with manager:
        assert asked == [1]


def test_adapters_of_several_kinds_are_switched_off(package, tiny_model):
    """A mixed model has no status."""
    model = peft.get_peft_model(package.kernelize(tiny_model()), peft.LoraConfig(r=2, target_modules=["q_proj"]), mixed=True).train()
    package.capture(model)
    with model.disable_adapter():
        assert all(layer.disable_adapters for layer in adapter_layers(model))
    assert not any(layer.disable_adapters for layer in adapter_layers(model))


@pytest.mark.parametrize("owner", ("model", "class", "function", "whole"))
def test_how_a_user_finds_the_status_of_adapters_is_kept(adapted, monkeypatch, owner):
    model, asked = adapted[0], []
    status = model.get_model_status()
    if owner == "model":
        monkeypatch.setattr(model, "get_model_status", lambda: asked.append(1) or status, raising=False)
    elif owner == "class":
        monkeypatch.setattr(type(model), "get_model_status", lambda self: asked.append(1) or status)
    elif owner == "function":
        monkeypatch.setattr(peft.peft_model, "get_layer_status", lambda of: asked.append(1) or [])
    else:
        monkeypatch.setattr(type(model), "disable_adapter", contextlib.contextmanager(lambda self: iter([asked.append(1)])))
    try:
        with model.disable_adapter():
            pass
    except AttributeError:  # of a status without layers
        assert owner == "function"
    assert asked == [1]
