"""Where the layers go, and that everything can be put back."""

import copy
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

from tests.models import Step, are_equal, tiny_model
from tests.patched import install
from tests.qwen3_steps import CLASSES, OPERATIONS, TOKENS, everything, own_forwards, uses_layers
from tests.versions import DECORATORS, forward_of

LAYERS = {"rms_norm": "RMSNorm", "swiglu": "MLP", "rope": "RotaryPosEmb", "fused_linear_cross_entropy": "CausalLM"}


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


SEQUENCES = (
    "apply", "apply apply", "apply some none apply", "kernelize", "kernelize apply", "apply kernelize kernelize", "mapping",
    "mapping apply some", "apply mapping kernelize", "kernelize none", "kernelize fallback apply none", "fallback apply", "apply fallback",
    "apply reset kernelize reset mapping",
)  # fmt: skip


@pytest.mark.parametrize("sequence", [sequence.split() for sequence in SEQUENCES], ids=SEQUENCES)
def test_reset_leaves_no_trace(qwen3, sequence):
    model = tiny_model()
    before = everything()
    expected = Step(model, input_ids=TOKENS, labels=TOKENS)

    def fall_back():
        with kernels.use_kernel_mapping({}):  # `kernels` then binds the class's forward to each module
            kernels.kernelize(model, mode=Mode.TRAINING)

    steps = {
        "apply": qwen3.apply,
        "some": lambda: qwen3.apply(rope=False, fused_linear_cross_entropy=False),
        "none": lambda: qwen3.apply(**dict.fromkeys(OPERATIONS, False)),
        "kernelize": lambda: qwen3.kernelize(model),
        "mapping": lambda: install(qwen3, model, "mapping"),
        "fallback": fall_back,
        "reset": qwen3.reset,
    }
    for step in sequence:
        steps[step]()
    if sequence[-1] in ("apply", "kernelize", "mapping"):
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


def test_modules_that_were_never_finished_are_left_alone(qwen3):
    """A copy that fails leaves an empty module behind for as long as its traceback is kept, as in a notebook."""
    model = qwen3.kernelize(tiny_model())
    model.late = model.lm_head.weight * 1  # a tensor with a graph cannot be copied
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    unfinished = [type(each).__new__(type(each)) for each in (model, model.model, model.model.layers[0], model.lm_head)]
    qwen3.apply()
    qwen3.reset()
    assert all(not vars(each) for each in unfinished)


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


def test_kernelize_stays_when_the_mode_changes(qwen3):
    """transformers kernelizes anew in train() and eval() when a model was loaded with use_kernels=True."""
    model = tiny_model()
    model._use_kernels = True
    qwen3.kernelize(model)
    model.eval()
    assert uses_layers(qwen3, model) == set(OPERATIONS)
    qwen3.reset()
    assert model._use_kernels


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
    command = [sys.executable, "-c", textwrap.dedent(script), str(package_folder / "build/torch-cpu")]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr


