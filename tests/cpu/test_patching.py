"""Where the layers go, and that everything can be put back."""

import copy
import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import kernels
import pytest
import torch
from kernels import Mode
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from tests.models import Step, are_equal, random_tokens, tiny_model
from tests.patched import calls_of
from tests.versions import DECORATORS, forward_of, needs_decorators

TOKENS = random_tokens(2, 17)
OPERATIONS = ["rms_norm", "swiglu", "rope", "fused_linear_cross_entropy"]
CLASSES = {
    "rms_norm": modeling_qwen3.Qwen3RMSNorm,
    "swiglu": modeling_qwen3.Qwen3MLP,
    **({"rope": type(modeling_qwen3.apply_rotary_pos_emb)} if DECORATORS else {}),
    "fused_linear_cross_entropy": modeling_qwen3.Qwen3ForCausalLM,
}
LAYERS = {"rms_norm": "RMSNorm", "swiglu": "MLP", "rope": "RotaryPosEmb", "fused_linear_cross_entropy": "CausalLM"}


def everything():
    """All that can be found of transformers' Qwen3: the attributes of its module, of its classes and of its rotary embedding."""
    rotary = modeling_qwen3.apply_rotary_pos_emb
    classes = [*CLASSES.values(), modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3Attention, modeling_qwen3.Qwen3Model]
    forwards = {cls: forward_of(cls) for cls in classes}
    return [dict(vars(modeling_qwen3)), dict(vars(rotary)), *(dict(vars(cls)) for cls in classes), forwards]


def own_forwards(model):
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


def uses_layers(qwen3, model):
    """Which operations of ours a step of the model runs, seen where they are called."""
    called = set()
    alone = {
        "rms_norm": {"rms_norm"},
        "mlp": {"swiglu"},
        "swiglu": {"swiglu"},
        "rotary": {"rope"},
    }
    loss = {"linear_cross_entropy": {"fused_linear_cross_entropy"}}
    fused = {"norm_attention_inputs": {"rms_norm", "rope"}, "norm_mlp": {"rms_norm", "swiglu"}, "qk_norm_rotary": {"rms_norm", "rope"}}
    with pytest.MonkeyPatch.context() as patch:
        for module, names in (("family.forwards", alone), ("model.causal_lm", loss), ("layer.decoder_layer", fused)):
            functions = sys.modules[f"{qwen3.__name__}.shared.hf.{module}"]
            for name, operations in names.items():
                original = getattr(functions, name)

                def spy(*args, operations=operations, original=original, **kwargs):
                    called.update(operations)
                    return original(*args, **kwargs)

                patch.setattr(functions, name, spy)
        model.train()(input_ids=TOKENS, labels=TOKENS)
    return called


def test_apply_before_and_after_the_model_is_made(qwen3):
    before = tiny_model()
    expected = Step(before, input_ids=TOKENS, labels=TOKENS)
    qwen3.apply()
    for model in (before, tiny_model()):
        assert uses_layers(qwen3, model) == set(OPERATIONS)
        Step(model, input_ids=TOKENS, labels=TOKENS).assert_same(expected)


@pytest.mark.parametrize("chosen", [[], *[[operation] for operation in OPERATIONS], OPERATIONS[:2], OPERATIONS])
def test_subsets(qwen3, chosen):
    model = tiny_model()
    expected = Step(model, input_ids=TOKENS, labels=TOKENS)
    qwen3.apply(swiglu=False)  # a call says what is active after it, whatever was before
    qwen3.apply(**{operation: operation in chosen for operation in OPERATIONS}, decoder_layer=False, attention=False,
                experts=False)
    assert qwen3.get_patched_ops() == chosen
    for operation, cls in CLASSES.items():
        ours = getattr(qwen3.layers, LAYERS[operation]).forward
        assert (vars(cls)["forward"] is ours) == (operation in chosen)
    assert DECORATORS or (modeling_qwen3.apply_rotary_pos_emb.__module__ != modeling_qwen3.__name__) == ("rope" in chosen)
    assert uses_layers(qwen3, model) == set(chosen)
    Step(model, input_ids=TOKENS, labels=TOKENS).assert_same(expected)


def test_the_decoder_layer_is_fused_where_all_that_it_fuses_is_on(qwen3):
    layer = modeling_qwen3.Qwen3DecoderLayer
    qwen3.apply()
    assert qwen3.get_patched_ops() == [*OPERATIONS, "decoder_layer", "attention", "experts"]
    ours = qwen3.layers.DecoderLayer.forward.__wrapped__
    assert forward_of(layer) is ours
    for off in ("rms_norm", "swiglu", "rope", "decoder_layer"):
        qwen3.apply(**{off: False})
        assert "decoder_layer" not in qwen3.get_patched_ops() and forward_of(layer) is not ours


def hub_kernelize(qwen3, model, mapping=None):
    with kernels.use_kernel_mapping(mapping if mapping is not None else qwen3.mapping()):
        kernels.kernelize(model, mode=Mode.TRAINING)


@pytest.mark.parametrize("how", ["apply", "kernelize", "hub"])
def test_every_way_fuses_the_decoder_layer(qwen3, how, monkeypatch):
    model, layers = tiny_model(), []
    {"apply": lambda _: qwen3.apply(), "kernelize": qwen3.kernelize, "hub": functools.partial(hub_kernelize, qwen3)}[how](model)
    decoder = sys.modules[f"{qwen3.__name__}.shared.hf.layer.decoder_layer"]
    original = decoder.norm_mlp
    monkeypatch.setattr(decoder, "norm_mlp", lambda *args: layers.append(1) or original(*args))
    model(input_ids=TOKENS, labels=TOKENS)
    assert len(layers) == len(model.model.layers)


SEQUENCES = {
    "apply": ["apply"],
    "twice": ["apply", "apply"],
    "subsets": ["apply", "some", "none", "apply"],
    "kernelize": ["kernelize"],
    "kernelize, apply": ["kernelize", "apply"],
    "apply, kernelize": ["apply", "kernelize", "kernelize"],
    "hub": ["hub"],
    "hub, apply, some": ["hub", "apply", "some"],
    "apply, hub, kernelize": ["apply", "hub", "kernelize"],
    "kernelize, none": ["kernelize", "none"],
    "kernelize, fallback, none": ["kernelize", "fallback", "apply", "none"],
    "fallback, apply": ["fallback", "apply"],
    "apply, fallback": ["apply", "fallback"],
    "reset in between": ["apply", "reset", "kernelize", "reset", "hub"],
}


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_reset_leaves_no_trace(qwen3, sequence):
    model = tiny_model()
    before = everything()
    expected = Step(model, input_ids=TOKENS, labels=TOKENS)
    steps = {
        "apply": qwen3.apply,
        "some": lambda: qwen3.apply(rope=False, fused_linear_cross_entropy=False),
        "none": lambda: qwen3.apply(**dict.fromkeys(OPERATIONS, False)),
        "kernelize": lambda: qwen3.kernelize(model),
        "hub": lambda: hub_kernelize(qwen3, model),
        "fallback": lambda: hub_kernelize(qwen3, model, {}),  # `kernels` then binds the class's forward to each module
        "reset": qwen3.reset,
    }
    for step in sequence:
        steps[step]()
    if sequence[-1] in ("apply", "kernelize", "hub"):
        assert uses_layers(qwen3, model) == set(OPERATIONS)
    if sequence[-1] == "none":
        assert uses_layers(qwen3, model) == set()
    qwen3.reset()
    qwen3.reset()
    after = everything()
    after[1].pop("forward", None)  # of the rotary embedding: what `kernels` left there is the class's, as asserted here
    if DECORATORS:
        assert vars(modeling_qwen3.apply_rotary_pos_emb).get("forward", CLASSES["rope"].forward).__qualname__.endswith("Func.forward")
    before[1].pop("forward", None)
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert all(new[name] is old[name] for name in old)
    assert uses_layers(qwen3, model) == set() and qwen3.get_patched_ops() == []
    again = Step(model, input_ids=TOKENS, labels=TOKENS)
    assert are_equal(again, expected) and torch.equal(again.output.logits, expected.output.logits)


def test_reset_reaches_copies_of_a_kernelized_model(qwen3):
    model = qwen3.kernelize(tiny_model())
    other = copy.deepcopy(model)
    assert other.forward.__self__ is other and uses_layers(qwen3, other) == set(OPERATIONS)
    qwen3.reset()
    assert not own_forwards(model) and not own_forwards(other)


def test_kernelize_leaves_other_models_alone(qwen3):
    other, before = tiny_model(), everything()
    model = qwen3.kernelize(tiny_model())
    after = everything()
    assert all(new[name] is old[name] for old, new in zip(before, after, strict=True) for name in old)
    assert uses_layers(qwen3, other) == uses_layers(qwen3, tiny_model()) == set()
    assert uses_layers(qwen3, model) == set(OPERATIONS)


def test_kernelize_parts_and_wrappers(qwen3):
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3ForSequenceClassification, Qwen3Model

    for cls in (Qwen3Model, Qwen3ForSequenceClassification):
        model = tiny_model(cls=cls).eval()
        expected = model(input_ids=TOKENS[:1])[0]
        assert qwen3.kernelize(model) is model
        torch.testing.assert_close(model(input_ids=TOKENS[:1])[0], expected)
    wrapped = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    qwen3.kernelize(wrapped)
    assert uses_layers(qwen3, wrapped) == set(OPERATIONS)


def test_kernelize_says_what_it_cannot_do(qwen3):
    from transformers import LlamaConfig, LlamaForCausalLM

    class OtherMLP(modeling_qwen3.Qwen3MLP):
        def forward(self, x):
            return super().forward(x)

    llama = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
    with pytest.raises(TypeError, match="LlamaForCausalLM.*expected a Qwen3 or Qwen3-MoE model"):
        qwen3.kernelize(llama)
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp = OtherMLP(model.config)
    with pytest.raises(RuntimeError, match="swiglu cannot be put on this Qwen3ForCausalLM.*Qwen3MLP"):
        qwen3.kernelize(model)
    assert not own_forwards(model)
    with pytest.raises(ValueError, match="FALLBACK"):
        qwen3.kernelize(tiny_model(), mode=Mode.FALLBACK)


def test_a_subclass_keeps_its_forward(qwen3):
    class Own(modeling_qwen3.Qwen3MLP):
        def forward(self, x):
            return x

    model = tiny_model()
    model.model.layers[0].mlp = own = Own(model.config)
    qwen3.kernelize(model)
    qwen3.apply()
    assert own.forward.__func__ is Own.forward


@pytest.mark.parametrize("part", ("model", "mlp", "attention"))
def test_a_subclass_that_calls_super_is_for_apply(qwen3, part):
    name = {"model": "Qwen3ForCausalLM", "mlp": "Qwen3MLP", "attention": "Qwen3Attention"}[part]
    forward = lambda self, *args, **kwargs: super(mine, self).forward(*args, **kwargs)  # noqa: E731
    mine = type("Mine", (getattr(modeling_qwen3, name),), {"forward": forward})
    model = tiny_model(cls=mine) if part == "model" else tiny_model()
    for layer in model.model.layers:
        if part == "mlp":
            layer.mlp.__class__ = mine
        if part == "attention":
            layer.self_attn.__class__ = mine
    with pytest.raises(RuntimeError, match=r"Mine has a forward of its own. If that calls super\(\).forward\(\), use apply\(\)"):
        qwen3.kernelize(model)
    assert not own_forwards(model)
    qwen3.apply()
    used = uses_layers(qwen3, model)
    assert {"model": "fused_linear_cross_entropy", "mlp": "swiglu", "attention": "rope"}[part] in used


def test_kernelize_stays_when_the_mode_changes(qwen3):
    """transformers kernelizes anew in train() and eval() when a model was loaded with use_kernels=True."""
    model = tiny_model()
    model._use_kernels = True
    qwen3.kernelize(model)
    model.eval()
    assert uses_layers(qwen3, model) == set(OPERATIONS)
    qwen3.reset()
    assert model._use_kernels


def test_kernelize_with_another_attention(qwen3, monkeypatch):
    original = modeling_qwen3.Qwen3Attention.forward
    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    model = tiny_model()
    with pytest.raises(RuntimeError, match=r"rope cannot be put on one model: .*test_patching.* Use apply\(\)"):
        qwen3.kernelize(model)
    with pytest.warns(RuntimeWarning, match="Qwen3Attention.forward is .*test_patching.*, not transformers' own"):
        qwen3.apply()
    assert uses_layers(qwen3, model) == set(OPERATIONS)


@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_hooks_of_accelerate_stay(qwen3, how):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Count(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Count.calls += 1
            return args, kwargs

    model = tiny_model()
    for layer in model.model.layers:
        for module in (layer.mlp, layer.input_layernorm, layer.self_attn):
            add_hook_to_module(module, Count())
    qwen3.apply() if how == "apply" else qwen3.kernelize(model)
    assert uses_layers(qwen3, model) == set(OPERATIONS)
    assert Count.calls == 6
    qwen3.reset()
    assert uses_layers(qwen3, model) == set() and Count.calls == 12
    for layer in model.model.layers:
        for module in (layer.mlp, layer.input_layernorm, layer.self_attn):
            remove_hook_from_module(module)
    assert uses_layers(qwen3, model) == set()


def test_a_model_that_accelerate_prepared_before(qwen3):
    from accelerate import Accelerator

    model = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(tiny_model())
    with pytest.raises(RuntimeError, match=r"before Accelerator.prepare\(\)"):
        qwen3.kernelize(model)
    assert own_forwards(model) == {""}  # accelerate's
    with pytest.warns(RuntimeWarning, match="keeps the forward"):
        qwen3.apply()
    assert uses_layers(qwen3, model) == {"rms_norm", "swiglu", "rope"}
    del model._original_forward, model.forward  # or the apply() of the next test warns of it too


@pytest.mark.parametrize("how", ["apply", "kernelize", "hub"])
def test_a_model_that_accelerate_prepares_afterwards(qwen3, how, recwarn):
    """accelerate keeps the forward that it found, also after reset(); it then does what the class's own does."""
    from accelerate import Accelerator

    model = tiny_model()
    {"apply": lambda _: qwen3.apply(), "kernelize": qwen3.kernelize, "hub": functools.partial(hub_kernelize, qwen3)}[how](model)
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    assert uses_layers(qwen3, model) >= {"fused_linear_cross_entropy"}
    qwen3.reset()
    assert uses_layers(qwen3, model) == set()
    qwen3.apply()
    assert uses_layers(qwen3, model) == set(OPERATIONS)
    qwen3.apply(fused_linear_cross_entropy=False)
    assert uses_layers(qwen3, model) == {"rms_norm", "swiglu", "rope"}
    assert not [warning for warning in recwarn if "accelerate" in str(warning.message)]


@pytest.fixture
def add_trls_head():
    """TRL's trainers give the model a forward of its own, which calls the one that it finds."""
    from trl.trainer.utils import add_fused_lm_head

    models = []
    yield lambda model: models.append(model) or add_fused_lm_head(model) or model.forward
    for model in models:
        vars(model).pop("forward", None)  # or the apply() of the next test warns of it


@pytest.mark.parametrize("how", ["apply", "kernelize", "hub"])
def test_a_model_that_trl_prepares_afterwards(qwen3, how, add_trls_head, recwarn):
    """TRL's forward stays whatever is done, and calls what is in force."""
    model = tiny_model()
    {"apply": lambda _: qwen3.apply(), "kernelize": qwen3.kernelize, "hub": functools.partial(hub_kernelize, qwen3)}[how](model)
    trls = add_trls_head(model)
    assert uses_layers(qwen3, model) == set(OPERATIONS)
    assert model(input_ids=TOKENS, labels=TOKENS, fused_lm_head=True).log_probs is not None
    qwen3.reset()
    assert model.forward == trls
    if how != "hub":  # `kernels` leaves no trace of what TRL then found
        assert uses_layers(qwen3, model) == set()
    if how != "apply":
        del model.forward
    qwen3.apply()
    assert uses_layers(qwen3, model) == set(OPERATIONS)
    if how == "apply":
        assert model.forward == trls
    assert not [warning for warning in recwarn if "keeps the forward" in str(warning.message)]


def test_a_model_that_trl_prepared_before(qwen3, add_trls_head):
    model = tiny_model()
    trls = add_trls_head(model)
    with pytest.raises(RuntimeError, match="this Qwen3ForCausalLM has a forward that trl.trainer.utils gave it. .* a TRL trainer"):
        qwen3.kernelize(model)
    with pytest.warns(RuntimeWarning, match="keeps the forward"):
        qwen3.apply()
    assert model.forward == trls and uses_layers(qwen3, model) == {"rms_norm", "swiglu", "rope"}
    qwen3.reset()
    assert model.forward == trls and uses_layers(qwen3, model) == set()


def test_a_part_whose_forward_someone_replaced(qwen3):
    """It keeps it, as a subclass keeps its own, and whoever installs the layers is told."""
    model = tiny_model()
    norm = model.model.layers[0].self_attn.q_norm
    own = norm.forward = lambda x, forward=norm.forward: forward(x)
    for install in (qwen3.apply, lambda: qwen3.kernelize(model)):
        with pytest.warns(RuntimeWarning, match=rf"Qwen3RMSNorm keeps the forward that {__name__} gave it \(1 in this process\)"):
            install()
        assert norm.forward is own and uses_layers(qwen3, model) == set(OPERATIONS)
        qwen3.reset()
        assert norm.forward is own
    del norm.forward


def test_the_hubs_mapping(qwen3):
    """`kernels` takes every layer of ours for the class or function that it replaces."""
    from kernels.layer.layer import _validate_layer

    originals = {
        "RMSNorm": CLASSES["rms_norm"],
        **({"rotary_pos_emb": CLASSES["rope"]} if DECORATORS else {}),
        "Qwen3MLP": CLASSES["swiglu"],
        "Qwen3ForCausalLM": CLASSES["fused_linear_cross_entropy"],
        "SwiGLUMLP": CLASSES["swiglu"],
    }
    for name, devices in qwen3.mapping().items():
        for repository in devices.values():
            layer = repository.load()
            _validate_layer(check_cls=originals.get(name, layer), cls=layer, repo=repository)


@pytest.mark.parametrize("name", ["RMSNorm", "RotaryPosEmb", "MLP", "SwiGLUMLP", "CausalLM", "ForCausalLMLoss"])
def test_layers_load_from_a_folder(qwen3, package_folder, name, monkeypatch):
    load_here = functools.partial(kernels.get_local_kernel, backend="cpu")  # also where torch is built for CUDA
    monkeypatch.setattr("kernels.layer.layer.get_local_kernel", load_here)
    repository = kernels.LocalLayerRepository(package_folder, layer_name=name)
    assert repository.load() is getattr(qwen3.layers, name)


@pytest.mark.parametrize("given", [None, Mode.TRAINING, Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE])
@pytest.mark.parametrize("wanted", [Mode.TRAINING, Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE, Mode.INFERENCE | Mode.TORCH_COMPILE])
def test_modes(qwen3, given, wanted):
    """A mapping for one mode serves what `kernels` lets it serve; one for no mode serves all."""
    serves = {
        None: True,
        Mode.TRAINING: wanted in (Mode.TRAINING, Mode.INFERENCE),
        Mode.INFERENCE: wanted is Mode.INFERENCE,
        Mode.TRAINING | Mode.TORCH_COMPILE: True,
    }[given]
    model = tiny_model()
    with kernels.use_kernel_mapping(qwen3.mapping(given)):
        kernels.kernelize(model, mode=wanted)
    assert uses_layers(qwen3, model) == (set(OPERATIONS) if serves else set())


@pytest.mark.parametrize(("capability", "serves"), [(75, False), (80, True), (90, True), (100, True), (121, True), (130, False)])
def test_gpus_that_the_mapping_serves(qwen3, capability, serves, monkeypatch):
    monkeypatch.setattr("kernels.layer.repos._find_capability", lambda: capability)
    with kernels.use_kernel_mapping(qwen3.mapping(), inherit_mapping=False):
        from kernels.layer.globals import _KERNEL_MAPPING

        found = _KERNEL_MAPPING.get()["RMSNorm"]["cuda"].repos
        assert (found is not None) == serves
        if found:
            assert next(iter(found.values())).load() is qwen3.layers.RMSNorm


@needs_decorators
def test_kernel_config(qwen3, package_folder, monkeypatch):
    """transformers' own way, on a CPU: its list of devices has no CPU, for no reason that concerns us."""
    from kernels.layer.globals import _KERNEL_MAPPING
    from transformers import KernelConfig
    from transformers.utils import kernel_config

    if not hasattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES"):
        pytest.skip("this transformers has its list of devices elsewhere")
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", ["cpu"])
    monkeypatch.setattr("kernels.layer.layer.get_kernel", functools.partial(kernels.get_kernel, backend="cpu"))
    monkeypatch.setenv("LOCAL_KERNELS", f"bastile/qwen3={package_folder}")
    qwen3.mapping()  # gives the last two their names
    names = {"RMSNorm": "RMSNorm", "rotary_pos_emb": "RotaryPosEmb", "Qwen3MLP": "MLP", "Qwen3ForCausalLM": "CausalLM"}
    # With `version` the Hub is asked for the revision before the local copy is found.
    options = {"revision": "v1", "trust_remote_code": True}
    model = tiny_model()
    token = _KERNEL_MAPPING.set(copy.deepcopy(_KERNEL_MAPPING.get()))
    try:
        model.set_use_kernels(True, KernelConfig({name: (f"bastile/qwen3:{layer}", options) for name, layer in names.items()}))
    finally:
        _KERNEL_MAPPING.reset(token)
    assert uses_layers(qwen3, model) == set(OPERATIONS)


def test_two_builds_in_one_process(qwen3, other_build):
    """Either one puts back what the other one did, and neither mistakes the other's forward for transformers' own."""
    assert other_build is not qwen3
    before, model = everything(), tiny_model()
    expected = Step(model, input_ids=TOKENS, labels=TOKENS)
    for first, second in ((qwen3, other_build), (other_build, qwen3)):
        first.apply()
        second.apply()
        assert second.get_patched_ops() == [*OPERATIONS, "decoder_layer", "attention", "experts"] and first.get_patched_ops() == []
        Step(model, input_ids=TOKENS, labels=TOKENS).assert_same(expected)
        model.eval()(input_ids=TOKENS)
        model.train()
        first.reset()
        assert all(new[name] is old[name] for old, new in zip(before, everything(), strict=True) for name in old)
        first.kernelize(model)
        second.kernelize(model)
        Step(model, input_ids=TOKENS, labels=TOKENS).assert_same(expected)
        second.reset()
        first.reset()
        assert not own_forwards(model)


def test_absent_and_unfit_libraries(qwen3, monkeypatch):
    import transformers

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ImportError, match="transformers is not installed. Run: pip install"):
            qwen3.apply()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, modeling_qwen3.__name__)
        qwen3.reset()
        assert qwen3.get_patched_ops() == [] and modeling_qwen3.__name__ not in sys.modules
    with monkeypatch.context() as patch:
        patch.setattr(transformers, "__version__", "4.57.6")
        for call in (qwen3.apply, qwen3.mapping, lambda: qwen3.kernelize(nn.Linear(1, 1))):
            with pytest.raises(ImportError, match=r"transformers is 4.57.6, expected transformers>=5.17"):
                call()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "kernels", None)
        with pytest.raises(ImportError, match="kernels is not installed. Run: pip install"):
            qwen3.mapping()
        qwen3.apply()  # which does not need it


def test_without_active_decorators(package_folder):
    """transformers without a `kernels` that it knows: the rotary embedding is a function, and no class has a name for the Hub."""
    script = """
        import importlib.util, sys
        sys.modules["kernels"] = None
        from transformers.models.qwen3 import modeling_qwen3 as modeling
        function = modeling.apply_rotary_pos_emb
        assert type(function).__name__ == "function" and not hasattr(modeling.Qwen3RMSNorm, "kernel_layer_name")
        folder = sys.argv[1]
        spec = importlib.util.spec_from_file_location("package", folder + "/__init__.py", submodule_search_locations=[folder])
        qwen3 = sys.modules["package"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(qwen3)
        from tests.models import Step, random_tokens, tiny_model
        model, tokens = tiny_model(), random_tokens(2, 17)
        expected = Step(model, input_ids=tokens, labels=tokens)
        calls, rotary = [], sys.modules["package.shared.hf.family.forwards"].rotary
        sys.modules["package.shared.hf.family.forwards"].rotary = lambda *args: calls.append(1) or rotary(*args)
        fused = sys.modules["package.shared.hf.layer.decoder_layer"].norm_attention_inputs
        sys.modules["package.shared.hf.layer.decoder_layer"].norm_attention_inputs = lambda *args: calls.append(1) or fused(*args)
        for install in (qwen3.apply, lambda: qwen3.apply(decoder_layer=False), lambda: qwen3.kernelize(model)):
            install()
            found = Step(model, input_ids=tokens, labels=tokens)
            found.assert_same(expected)
            assert found.output.logits is None and len(calls) == 2, calls
            calls.clear()
            qwen3.reset()
            assert modeling.apply_rotary_pos_emb is function and not any("bastile" in name for name in vars(modeling))
            Step(model, input_ids=tokens, labels=tokens)
            assert not calls
        print("ok")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(package_folder / "build/torch-cpu")],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr


def test_mapping_warns_when_the_decorators_are_inactive(qwen3, monkeypatch):
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: (q, k))
    with pytest.warns(RuntimeWarning, match=r"apply\(\) or kernelize\(model\)"):
        qwen3.mapping()


def test_warm_up(qwen3):
    """On a CPU there is nothing to load; what it would run on a GPU runs here once, and touches nothing."""
    model = tiny_model()
    state = torch.random.get_rng_state()
    assert qwen3.warmup_all_kernels() is None and qwen3.warmup_all_kernels(model) is None
    warmup = calls_of(qwen3)
    warmup.warm_up("cpu", torch.float32, warmup.case_of(model))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(TypeError, match="Linear without a decoder layer and a configuration of Qwen3 or Qwen3-MoE"):
        qwen3.warmup_all_kernels(nn.Linear(1, 1))


def test_clear_autotune_cache(qwen3, tmp_path, monkeypatch):
    warmup = sys.modules[f"{qwen3.__name__}.shared.runtime.tuning"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("BASTILE_CACHE", raising=False)
    assert warmup.cache_file().parent == tmp_path / "cache/bastile"
    monkeypatch.setenv("BASTILE_CACHE", str(tmp_path / "mine"))
    qwen3.clear_autotune_cache()
    file = warmup.cache_file()
    assert file.parent == tmp_path / "mine"
    file.parent.mkdir()
    file.write_text("{}")
    qwen3.clear_autotune_cache()
    assert not file.exists() and tmp_path.exists()
