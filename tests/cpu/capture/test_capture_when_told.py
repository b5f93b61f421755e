"""`capture` as an option of `apply` and `kernelize`: the first training pass captures the layers, whoever made the model."""

import copy
import importlib
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.capturing import SHAPE, Rerun, graphs_of, loss_of, one_family, replays_of, stand_in, whole
from tests.cpu.capture.test_capture_read import WHY, mine  # noqa: F401
from tests.cpu.capture.test_capture_sizes import compare, padded, row_of
from tests.own_file import source_of_other

QWEN3 = pytest.mark.parametrize("family", (("qwen3", 2),), ids=("qwen3",), indirect=True)


def adapted(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def pair(package, model):
    """A model that is to be captured, with adapters that it got after it was told, and the same without graphs."""
    plain = adapted(package.kernelize(copy.deepcopy(model)))
    model = adapted(package.kernelize(model, capture=True))
    for each in (model, plain):
        each.get_base_model().set_attn_implementation("bastile")
    return model, plain


@one_family
def test_the_first_training_pass_captures(package, tiny_model):
    model, plain = pair(package, tiny_model())
    unrecorded = next(row for row in package.explain(model).rows if row.part == "captured")
    assert (unrecorded.fused, unrecorded.code) == (False, "unrecorded") and "no training pass" in unrecorded.reason
    with torch.no_grad():
        loss_of(model)
    loss_of(model.eval())
    assert graphs_of(package, model.get_base_model()) is None, "no passes of training"
    model.train()
    for seed, graphs in enumerate((0, whole(), whole(), whole())):
        assert compare(model, plain, padded(seed)) == graphs
    assert row_of(package, model).part == "captured: 1 of 1 sizes, 100% of the passes, 0.0 GiB"
    assert not any(row.part == "captured" for row in package.explain(model).rows)


@QWEN3
def test_models_of_classes_that_were_told(package, tiny_model):
    """Until they are told otherwise; what `capture` was called for stays."""
    before, asked = tiny_model(), tiny_model()
    package.apply(capture=True)
    package.capture(asked)
    after = tiny_model()
    for model in (before, after, asked):
        for seed in range(3):
            loss_of(model, seed).backward()
        assert replays_of(loss_of(model).backward) == whole() // 2, "of the backward pass"
    package.apply()
    for model, stays in ((before, False), (after, False), (asked, True)):
        for seed in range(3):
            loss_of(model, seed).backward()
        assert (replays_of(loss_of(model).backward) > 0, graphs_of(package, model) is not None) == (stays, stays)
    package.reset()
    assert not any(name.startswith("_bastile") for model in (before, after, asked) for layer in model.model.layers for name in vars(layer))


@QWEN3
def test_the_memory_that_was_named_last(package, tiny_model):
    model = tiny_model()
    for put_on in (package.apply, lambda **told: package.kernelize(model, **told)):
        for gib in (8, 0.5):
            put_on(capture=gib)
            loss_of(model).backward()
            assert graphs_of(package, model).sizes.nbytes == gib * 2**30
        put_on(attention=False)
        assert graphs_of(package, model) is None


@QWEN3
def test_a_model_that_capture_was_called_for_besides(package, tiny_model):
    """It stays captured when the option is off."""
    model = tiny_model()
    package.apply(capture=True)
    loss_of(model).backward()
    package.capture(model, *SHAPE)
    package.apply()
    assert graphs_of(package, model).shapes == {SHAPE}
    copied = copy.deepcopy(model)
    loss_of(copied).backward()
    assert graphs_of(package, copied) is None


@QWEN3
@pytest.mark.parametrize("call", ("apply", "kernelize"))
def test_what_the_option_cannot_be(package, tiny_model, call):
    told = {"apply": package.apply, "kernelize": lambda **given: package.kernelize(tiny_model(), **given)}[call]
    with pytest.raises(ValueError, match="capture is -1, expected True, False, or the GiB that the graphs may take"):
        told(capture=-1)
    with pytest.raises(ValueError, match="capture is True, expected False without attention"):
        told(capture=True, attention=False)
    told(capture=False, attention=False)


@QWEN3
def test_what_cannot_be_captured_runs_as_before(package, tiny_model, monkeypatch):
    """It is not tried again before the weights are elsewhere, or it is told again."""
    module, tried = importlib.import_module(f"{package.__name__}.shared.hf.capture.capture"), []
    monkeypatch.setattr(module, "can_record", lambda device: tried.append(device))
    model, plain = package.kernelize(tiny_model(), capture=True), package.kernelize(tiny_model())
    for each in (model, plain):
        each.set_attn_implementation("bastile")
    for seed in range(3):
        assert compare(model, plain, padded(seed)) == 0
    assert len(tried) == 1
    row = next(row for row in package.explain(model).rows if row.part == "captured")
    assert row.code == "uncaptured" and "expected one CUDA device" in row.reason and not row.fused
    (left,) = [value for name, value in vars(model.model.layers[0]).items() if name.endswith("not_captured")]
    assert pickle.loads(pickle.dumps(left)) is None, "a file of the model holds nothing of a package"
    monkeypatch.setattr(module, "can_record", lambda device: True)
    assert compare(model, plain, padded(0)) == 0, "the same weights on the same device"
    package.kernelize(model, capture=True)
    assert [compare(model, plain, padded(seed)) > 0 for seed in range(3)] == [False, True, True]


@QWEN3
@pytest.mark.parametrize("change", ("first", "last", "fewer", "turned"))
def test_other_layers_are_captured_anew(package, tiny_model, change):
    model = package.kernelize(tiny_model(), capture=True)
    plain = package.kernelize(copy.deepcopy(model), capture=False)
    for each in (model, plain):
        each.set_attn_implementation("bastile")
    for seed in range(2):
        compare(model, plain, padded(seed))
    old = [*model.model.layers]
    taken = model.model.layers.pop(1)  # before it is told otherwise
    package.kernelize(model)
    assert not any("graphs" in name for name in vars(taken))
    model.model.layers.insert(1, taken)
    package.kernelize(model, capture=True)
    for seed in range(2):
        compare(model, plain, padded(seed))
    for each in (model, plain):
        torch.manual_seed(5)
        layers = each.model.layers
        fresh = package.kernelize(type(each)(each.config), capture=True).model.layers
        if change in ("first", "last"):
            layers[0 if change == "first" else len(layers) - 1] = fresh[0 if change == "first" else len(layers) - 1]
        elif change == "fewer":
            del layers[-1]
        else:
            each.model.layers = torch.nn.ModuleList(reversed(layers))
    package.kernelize(plain)
    assert [compare(model, plain, padded(seed)) > 0 for seed in range(3)] == [False, True, True]
    assert graphs_of(package, model).layers == [*model.model.layers]
    left = [layer for layer in old if layer not in model.model.layers]
    assert not any("graphs" in name for layer in left for name in vars(layer))


@QWEN3
def test_layers_that_another_capture_took_over(package, tiny_model):
    """Their graphs stay when the option's are taken back."""
    model, other = (package.kernelize(tiny_model(), capture=True) for _ in range(2))
    loss_of(model).backward()
    other.model.layers = torch.nn.ModuleList([*model.model.layers][:1])
    package.capture(other, *SHAPE)
    graphs = graphs_of(package, other)
    package.kernelize(model)
    assert graphs_of(package, other) is graphs and graphs.shapes == {SHAPE}


@QWEN3
def test_two_threads_first_passes(package, tiny_model, monkeypatch):
    module, began = importlib.import_module(f"{package.__name__}.shared.hf.capture.when_told"), []
    capture, model = module.capture, package.kernelize(tiny_model(), capture=True)

    def slow(*told):
        began.append(told)
        time.sleep(0.2)  # the other thread comes meanwhile
        return capture(*told)

    monkeypatch.setattr(module, "capture", slow)
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(module.capture_as_told, [model.model] * 2)] == [None, None]
    assert len(began) == 1


@one_family
@pytest.mark.parametrize("way", ("told", "called"))
def test_a_copy_is_captured_on_its_own(package, tiny_model, way):
    package.apply(capture=way == "told")
    model = tiny_model()
    for _ in range(2):
        if way == "called":
            package.capture(model, *SHAPE)
        replays = []
        for seed in range(3):
            replays.append(replays_of(lambda model=model, seed=seed: loss_of(model, seed).backward()))
        assert replays == [0, whole(), whole()]
        model = copy.deepcopy(model)
    package.reset()


class Counting(torch.nn.Module):
    """What stands around a layer, and does more than a graph would repeat."""

    calls = 0

    def __init__(self, layer):
        super().__init__()
        self.layer, self.attention_type = layer, getattr(layer, "attention_type", None)

    def forward(self, *args, **kwargs):
        Counting.calls += 1
        return self.layer(*args, **kwargs)


@QWEN3
def test_layers_of_anothers_class_run_as_before(package, tiny_model):
    model = tiny_model()
    model.model.layers[1] = Counting(model.model.layers[1])
    package.kernelize(model, capture=True)
    before = Counting.calls
    for seed in range(3):
        assert replays_of(lambda seed=seed: loss_of(model, seed).backward()) == 0
    assert Counting.calls == before + 3
    row = next(row for row in package.explain(model).rows if row.part == "captured")
    assert row.code == "uncaptured" and "Counting is no decoder layer" in row.reason


@QWEN3
@pytest.mark.parametrize("way", ("told", "called"))
def test_a_hook_of_accelerates_on_one_layer(package, tiny_model, way):
    """None of the layers gets graphs, those before it neither."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = package.kernelize(tiny_model(), capture=way == "told")
    hooks.add_hook_to_module(model.model.layers[1], hooks.ModelHook())
    if way == "called":
        with pytest.raises(RuntimeError, match="accelerate has put a hook"):
            package.capture(model)
    for seed in range(3):
        loss_of(model, seed).backward()
    assert graphs_of(package, model) is None


def test_layers_without_a_row(decoders, monkeypatch, mine):  # noqa: F811
    monkeypatch.setattr(stand_in(decoders, monkeypatch), "memory_of", lambda device: 4)
    model = decoders.kernelize(mine(source=source_of_other()), capture=True)
    for seed in range(3):
        loss_of(model, seed).backward()
    assert graphs_of(decoders, model) is not None
    changes, why = WHY["parts that are called"]
    model = decoders.kernelize(mine(*changes, source=source_of_other()), capture=True)
    loss_of(model).backward()
    row = next(row for row in decoders.explain(model).rows if row.part == "captured")
    assert row.code == "uncaptured" and why in row.reason
    decoders.reset()


@QWEN3
def test_a_trainer_that_makes_the_trained_model_itself(package, tiny_model, tmp_path, monkeypatch):
    """Its losses are those without, and most passes are replayed."""
    from tests.integrations.preference import make

    peft = pytest.importorskip("peft")

    logs = []
    for told in (False, True):
        package.apply(capture=told)
        before = Rerun.replays
        adapters = peft.LoraConfig(r=4, target_modules="all-linear")
        trainer = make("DPO", tiny_model(), tmp_path, "cpu", [], gradient_checkpointing=True, max_steps=6, peft_config=adapters)
        trainer.train()
        logs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert logs[1] == pytest.approx(logs[0], rel=1e-5) and len(logs[0]) == 6
    assert Rerun.replays - before >= 2 * whole()
    package.reset()
