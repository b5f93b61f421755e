"""The `modules` of a captured model yields what PyTorch's does, also where a loop changes the model on its way."""

import copy
import inspect
import operator
import sys

import pytest
from torch import nn

from tests.capturing import one_family

pytestmark = one_family


def test_a_reference_pass_takes_no_walk_of_torchs(package, adapted, monkeypatch):
    """What PEFT, transformers and accelerate do to a model before and after it."""
    from accelerate.utils import extract_model_from_parallel

    (model, causal_lm), calls, original = adapted, [], nn.Module.named_modules

    def counted(self, *args, **kwargs):
        calls.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    monkeypatch.setattr(sys.modules[f"{package.__name__}.shared.hf.parts.tree"], "_NAMED_MODULES", counted)
    assert len(list(model.modules())) == 2 + len(list(causal_lm.modules())) and not calls
    extract_model_from_parallel(model)
    causal_lm.gradient_checkpointing_disable()
    with model.disable_adapter():
        pass
    causal_lm.gradient_checkpointing_enable()
    assert max((len(list(each.children())) for each in calls), default=0) < 2, "of adapters' parts alone"


@pytest.mark.parametrize("change", ("none", "added", "shared", "absent", "removed"))
def test_the_modules_are_torchs(adapted, change):
    for model in adapted:
        layers = adapted[1].model.layers
        if change == "added":
            layers[0].mlp.more = nn.Sequential(nn.Linear(2, 2))
        if change == "shared":
            layers[1].mlp = layers[0].mlp
        if change == "absent":
            layers[0].register_module("absent", None)
        if change == "removed" and "mlp" in layers[1]._modules:
            del layers[1].mlp
        for _ in range(2):
            found, expected = list(model.modules()), list(nn.Module.modules(model))
            assert len(found) == len(expected) and all(map(operator.is_, found, expected))
        assert "modules" in vars(model)


def below_itself(model, layer):
    layer.mlp.more = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def a_later_one(model, layer):
    layer.post_attention_layernorm = nn.Sequential(nn.Linear(2, 2), layer.input_layernorm)


def one_that_held_others(model, layer):
    model.model.layers[1].mlp = nn.Linear(2, 2)


def none_any_more(model, layer):
    model.model.layers[1].mlp = None


def a_shared_one(model, layer):
    model.model.layers[1].self_attn = nn.Linear(2, 2)


def before_it(model, layer):
    layer.self_attn = nn.Linear(2, 2)


def at_the_root(model, layer):
    model.lm_head = nn.Sequential(nn.Linear(2, 2))


def what_holds_it(model, layer):
    model.model.layers[0] = nn.Linear(2, 2)
    layer.input_layernorm = nn.Linear(2, 2)


def below_the_root(model, layer):
    model.more = nn.Linear(2, 2)


def among_its_siblings(model, layer):
    layer.more = nn.Linear(2, 2)


def one_before_it_of_another_name(model, layer):
    del layer.self_attn
    layer.more = nn.Linear(2, 2)


def a_later_one_moves_to_the_end(model, layer):
    norm = layer.input_layernorm
    del layer.input_layernorm
    layer.input_layernorm = norm


def none_of_another_name(model, layer):
    del model.model.layers[1].absent
    model.model.layers[1].more = nn.Linear(2, 2)


def its_own_way(model, layer):
    layer.input_layernorm.named_modules = lambda memo, prefix, remove_duplicate: iter([("one", nn.SiLU())])


AT = "model.layers.0.mlp"
CHANGES = [(AT, below_itself), (AT, a_later_one), (AT, one_that_held_others), (AT, none_any_more), (AT, a_shared_one), (AT, before_it),
           (AT, at_the_root), (AT, what_holds_it), (AT, among_its_siblings), (AT, one_before_it_of_another_name),
           (AT, a_later_one_moves_to_the_end), (AT, none_of_another_name), (AT, its_own_way), ("", below_the_root)]  # fmt: skip


@pytest.mark.parametrize("at, change", CHANGES, ids=lambda each: getattr(each, "__name__", ""))
def test_what_the_caller_changes_on_its_way_is_seen_as_by_torch(package, tiny_model, at, change):
    """A loop that replaces modules sees what it would see without `capture`, from the first walk on and in the next one."""
    model = package.kernelize(tiny_model(num_hidden_layers=3))
    model.model.layers[1].register_module("absent", None)
    model.model.layers[1].self_attn = model.model.layers[2].self_attn
    plain = copy.deepcopy(model)
    package.capture(model)
    for turn in range(2):
        seen = {}
        for each, walk in ((model, model.modules), (plain, lambda: nn.Module.modules(plain))):
            names, seen[each] = {module: name for name, module in each.named_modules()}, []
            try:
                for module in walk():
                    seen[each].append(names.get(module, type(module).__name__))
                    if seen[each][-1] == at and not turn:
                        change(each, each.model.layers[0])
            except RuntimeError as error:
                seen[each].append(str(error))
        assert seen[model] == seen[plain]


def test_modules_that_are_held_twice(adapted):
    model, causal_lm = adapted
    causal_lm.model.layers[1].mlp = causal_lm.model.layers[0].mlp
    signature, error = inspect.signature(nn.Module().modules), None
    assert inspect.signature(model.modules) == signature
    if "remove_duplicate" in signature.parameters:  # newer torch
        assert len(list(model.modules(False))) == len(list(model.modules(remove_duplicate=False))) > len(list(model.modules()))
    try:
        list(nn.Module().modules(1, 2))
    except TypeError as raised:
        error = type(raised)
    with pytest.raises(error):
        list(model.modules(1, 2))


def test_a_walk_sees_what_came_before_its_first_module(adapted):
    for model in adapted:
        list(model.modules())
        walk = model.modules()
        model.late = nn.Linear(2, 2)
        assert model.late in list(walk)
        del model.late


@pytest.mark.parametrize("owner", ("class", "module", "child's class"))
def test_how_a_user_finds_modules_is_kept(adapted, monkeypatch, owner):
    model, found = adapted[0], nn.Linear(1, 1)
    norm = adapted[1].model.norm
    if owner == "class":
        monkeypatch.setattr(type(model), "modules", lambda self: iter([found]), raising=False)
        assert list(model.modules()) == [found]
        return
    holder = norm if owner == "module" else type(norm)
    monkeypatch.setattr(holder, "named_modules", lambda *args, **kwargs: iter([("one", found)]), raising=False)
    assert found in list(model.modules()) and norm not in list(model.modules())
