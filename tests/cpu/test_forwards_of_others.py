"""Forwards that a subclass, accelerate, TRL or the user has put on a model before ours, or puts there afterwards."""

import pytest
from transformers.models.qwen3 import modeling_qwen3

from tests.models import Step, random_tokens, tiny_model
from tests.patched import install
from tests.qwen3_steps import OPERATIONS, TOKENS, own_forwards, uses_layers


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


def test_kernelize_with_another_attention(qwen3, monkeypatch):
    original = modeling_qwen3.Qwen3Attention.forward
    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    model = tiny_model()
    with pytest.raises(RuntimeError, match=r"rope cannot be put on one model: .*test_forwards_of_others.* Use apply\(\)"):
        qwen3.kernelize(model)
    with pytest.warns(RuntimeWarning, match="Qwen3Attention.forward is .*test_forwards_of_others.*, not transformers' own"):
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
    hooked = [module for layer in model.model.layers for module in (layer.mlp, layer.input_layernorm, layer.self_attn)]
    for module in hooked:
        add_hook_to_module(module, Count())
    install(qwen3, model, how)
    assert uses_layers(qwen3, model) == set(OPERATIONS)
    assert Count.calls == 6
    qwen3.reset()
    assert uses_layers(qwen3, model) == set() and Count.calls == 12
    for module in hooked:
        remove_hook_from_module(module)
    assert uses_layers(qwen3, model) == set()


@pytest.fixture
def prepare():
    """accelerate and TRL's trainers give a model a forward of their own, which calls the one that they find."""
    from accelerate import Accelerator
    from trl.trainer.utils import add_fused_lm_head

    models = []

    def prepared(library, model):
        models.append(model)
        if library == "TRL":
            add_fused_lm_head(model)
        else:
            assert Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model) is model
        return model.forward

    yield prepared
    for model in models:  # or the apply() of the next test warns of them too
        for name in ("forward", "_original_forward"):
            vars(model).pop(name, None)


PREPARED = {"accelerate": r"before Accelerator.prepare\(\)",
            "TRL": "this Qwen3ForCausalLM has a forward that trl.trainer.utils gave it. .* a TRL trainer"}  # fmt: skip


@pytest.mark.parametrize("library", PREPARED)
def test_a_model_that_was_prepared_before(qwen3, prepare, library):
    model = tiny_model()
    theirs = prepare(library, model)
    with pytest.raises(RuntimeError, match=PREPARED[library]):
        qwen3.kernelize(model)
    assert own_forwards(model) == {""}
    with pytest.warns(RuntimeWarning, match="keeps the forward"):
        qwen3.apply()
    assert model.forward == theirs and uses_layers(qwen3, model) == {"rms_norm", "swiglu", "rope"}
    qwen3.reset()
    assert model.forward == theirs and uses_layers(qwen3, model) == set()


@pytest.mark.parametrize("how", ["apply", "kernelize", "mapping"])
def test_a_model_that_accelerate_prepares_afterwards(qwen3, how, prepare, recwarn):
    """accelerate keeps the forward that it found, also after reset(); it then does what the class's own does."""
    model = tiny_model()
    install(qwen3, model, how)
    prepare("accelerate", model)
    assert uses_layers(qwen3, model) >= {"fused_linear_cross_entropy"}
    qwen3.reset()
    assert uses_layers(qwen3, model) == set()
    qwen3.apply()
    assert uses_layers(qwen3, model) == set(OPERATIONS)
    qwen3.apply(fused_linear_cross_entropy=False)
    assert uses_layers(qwen3, model) == {"rms_norm", "swiglu", "rope"}
    assert not [warning for warning in recwarn if "accelerate" in str(warning.message)]


@pytest.mark.parametrize("how", ["apply", "kernelize", "mapping"])
def test_a_model_that_trl_prepares_afterwards(qwen3, how, prepare, recwarn):
    """TRL's forward stays whatever is done, and calls what is in force."""
    model = tiny_model()
    install(qwen3, model, how)
    trls = prepare("TRL", model)
    assert uses_layers(qwen3, model) == set(OPERATIONS)
    assert model(input_ids=TOKENS, labels=TOKENS, fused_lm_head=True).log_probs is not None
    qwen3.reset()
    assert model.forward == trls
    if how != "mapping":  # `kernels` leaves no trace of what TRL then found
        assert uses_layers(qwen3, model) == set()
    if how != "apply":
        del model.forward
    qwen3.apply()
    assert uses_layers(qwen3, model) == set(OPERATIONS)
    if how == "apply":
        assert model.forward == trls
    assert not [warning for warning in recwarn if "keeps the forward" in str(warning.message)]


def test_a_part_whose_forward_someone_replaced(qwen3):
    """It keeps it, as a subclass keeps its own, and whoever installs the layers is told."""
    model = tiny_model()
    norm = model.model.layers[0].self_attn.q_norm
    own = norm.forward = lambda x, forward=norm.forward: forward(x)
    for put_on in (qwen3.apply, lambda: qwen3.kernelize(model)):
        with pytest.warns(RuntimeWarning, match=rf"Qwen3RMSNorm keeps the forward that {__name__} gave it \(1 in this process\)"):
            put_on()
        assert norm.forward is own and uses_layers(qwen3, model) == set(OPERATIONS)
        qwen3.reset()
        assert norm.forward is own
    del norm.forward


def test_a_forward_that_was_taken_stays_what_it_was(qwen3):
    """As a bound method does, whatever the module's class is later; the module's own follows its class."""
    found = []
    for ours in (False, True):
        model = tiny_model()
        mlp, norm = model.model.layers[0].mlp, model.model.norm
        if ours:
            qwen3.kernelize(model)
        taken = mlp.forward
        mlp.forward = lambda *args, taken=taken, **kwargs: taken(*args, **kwargs) * 1.05
        for module in (mlp, norm):
            cls = type(module)
            twice = lambda self, *args, of=cls.forward, **kwargs: 2 * of(self, *args, **kwargs)  # noqa: E731
            module.__class__ = type(cls.__name__, (cls,), {"forward": twice})
        found.append(Step(model, input_ids=random_tokens(2, 9), labels=random_tokens(2, 9), use_cache=False))
    found[1].assert_same(found[0])
