"""What Trainer asks a captured model in each pass is what the model's class says, without a walk over all modules."""

import collections
import contextlib
import copy
import functools
import gc
import inspect
import itertools
import operator
import sys
import warnings
import weakref

import peft
import pytest
import torch
from torch import nn

from tests.capturing import one_family

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


@pytest.fixture
def adapted(package, tiny_model):
    """A captured model with adapters, and the causal LM in it."""
    model = peft.get_peft_model(package.kernelize(tiny_model()), peft.LoraConfig(r=2, target_modules="all-linear")).train()
    package.capture(model)
    return model, model.get_base_model()


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
    with pytest.MonkeyPatch.context() as patch:
        for name in ("named_modules", "children"):
            patch.setattr(causal_lm.model, name, None)
        assert model.num_parameters(exclude_embeddings=True) == expected and model.train() is model
        assert len(list(model.parameters())) == len(parameters)


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
    for captured in (False, True):
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
        if captured:
            package.capture(model)
        texts = written_out(monkeypatch)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            with model.disable_adapter() as nothing:
                with model.disable_adapter():
                    within = [switches(model)]
                within.append(switches(model))
        said = [str(warning.message) for warning in given]
        assert nothing is None and bool(texts) is not captured
        found[captured] = within, switches(model), said
        with pytest.raises(KeyError), model.disable_adapter():
            raise KeyError
        assert switches(model) == found[captured][1]
        package.reset()
        assert "disable_adapter" not in vars(model)
    assert found[True] == found[False]


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
    assert "disable_adapter" not in vars(model)
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
