"""What other code put on transformers' classes, modules and models is kept, called and named in a warning. What is not needed is freed."""

import contextlib
import copy
import functools
import gc
import sys
import weakref
from types import MethodType

import pytest
import torch
from torch import nn
from transformers.integrations import moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3 import modeling_qwen3

from tests.models import Step, random_tokens, tiny_gpt_oss, tiny_model
from tests.versions import needs_decorators

TOKENS = random_tokens(2, 17)


def step(model):
    return Step(model, input_ids=TOKENS, labels=TOKENS)


class Calls:
    """Makes functions that count their calls and double the result."""

    def __init__(self):
        self.count = 0

    def around(self, forward):
        def doubled(module, *args, **kwargs):
            self.count += 1
            found = forward(module, *args, **kwargs)
            return (found[0] * 2, *found[1:]) if isinstance(found, tuple) else found * 2

        return doubled

    def subclass(self, cls):
        return type("Mine", (cls,), {"forward": self.around(cls.forward)})


def assert_kept(calls, model, expected):
    """A step still calls what the user put there, and gives what it gave before."""
    calls.count = 0
    found = step(model)
    assert calls.count
    found.assert_same(expected)


PARTS = ["Qwen3Attention", "Qwen3MLP", "Qwen3RMSNorm", "Qwen3DecoderLayer"]


@pytest.mark.parametrize("wraps", [False, True], ids=["bare", "functools.wraps"])
@pytest.mark.parametrize("name", PARTS)
def test_a_forward_that_a_user_put_on_a_class_before(qwen3, name, wraps, monkeypatch):
    cls, calls = getattr(modeling_qwen3, name), Calls()
    custom = calls.around(cls.forward)
    monkeypatch.setattr(cls, "forward", functools.wraps(cls.forward)(custom) if wraps else custom)
    model = tiny_model()
    expected = step(model)
    with pytest.warns(RuntimeWarning, match=rf"{name}.forward is .*Calls.around.*doubled"):
        qwen3.apply()
    assert_kept(calls, model, expected)
    qwen3.reset()
    assert_kept(calls, model, expected)


@pytest.mark.parametrize("name", PARTS)
def test_a_class_that_a_user_put_in_its_place_before(qwen3, name, monkeypatch):
    calls, older = Calls(), tiny_model()
    expected_of_older = step(older)
    monkeypatch.setattr(modeling_qwen3, name, calls.subclass(getattr(modeling_qwen3, name)))
    model = tiny_model()
    expected = step(model)
    with pytest.warns(RuntimeWarning, match=rf"{name} is .*Mine, not transformers' own"):
        qwen3.apply()
    assert_kept(calls, model, expected)
    step(older).assert_same(expected_of_older)
    qwen3.reset()
    assert_kept(calls, model, expected)


@pytest.mark.parametrize("name", PARTS)
def test_a_forward_that_a_user_put_on_a_class_afterwards(qwen3, name, monkeypatch):
    """Neither another apply() nor reset() takes it away."""
    cls, calls, model = getattr(modeling_qwen3, name), Calls(), tiny_model()
    original = cls.forward
    custom = calls.around(original)
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", custom)
        expected = step(model)
    qwen3.apply()
    step(model)
    ours = cls.forward
    cls.forward = custom
    try:
        assert_kept(calls, model, expected)
        with pytest.warns(RuntimeWarning, match=f"{name}.forward is .*doubled"):
            qwen3.apply()
        assert_kept(calls, model, expected)
        qwen3.reset()
        assert cls.forward is custom
        assert_kept(calls, model, expected)
    finally:
        cls.forward = ours
        qwen3.reset()
        cls.forward = original


def test_a_rotary_embedding_that_a_user_put_in_its_place(qwen3, monkeypatch):
    original, count = modeling_qwen3.apply_rotary_pos_emb, []

    def other(q, k, cos, sin, unsqueeze_dim=1):
        count.append(1)
        q, k = original(q, k, cos, sin, unsqueeze_dim)
        return q * 2, k

    model = tiny_model()
    for when in ("before", "after"):
        if when == "after":
            qwen3.apply()
        with monkeypatch.context() as patch:
            patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", other)
            if when == "before":
                expected = step(model)
                with pytest.warns(RuntimeWarning, match="apply_rotary_pos_emb is .*other"):
                    qwen3.apply()
            count.clear()
            step(model).assert_same(expected)
            assert count and modeling_qwen3.apply_rotary_pos_emb is other
            if when == "after":
                qwen3.reset()
                assert modeling_qwen3.apply_rotary_pos_emb is other
                step(model).assert_same(expected)
        qwen3.reset()
    assert modeling_qwen3.apply_rotary_pos_emb is original and qwen3.get_patched_ops() == []


@pytest.mark.parametrize("how", ["apply", "kernelize"])
@pytest.mark.parametrize("part", ["mlp", "self_attn", "input_layernorm"])
def test_a_forward_of_a_class_that_a_user_bound_to_one_module(qwen3, how, part):
    model, calls = tiny_model(), Calls()
    module = getattr(model.model.layers[0], part)
    mine = calls.subclass(type(module))
    own = module.forward = MethodType(mine.forward, module)
    sys.modules[__name__].Mine = mine  # where its name says that it is
    try:
        expected = step(model)
        silent = (how, part) == ("apply", "self_attn")
        warned = pytest.warns(RuntimeWarning, match="keeps the forward that .*test_keeping gave it")
        with contextlib.nullcontext() if silent else warned:
            qwen3.apply() if how == "apply" else qwen3.kernelize(model)
        assert module.forward is own
        assert_kept(calls, model, expected)
        qwen3.reset()
        assert module.forward is own
    finally:
        del module.forward, sys.modules[__name__].Mine


def test_what_a_user_puts_on_a_class_after_kernelize(qwen3, monkeypatch):
    """A forward of a module's own hides its class's, and ours must not."""
    model, plain, calls = tiny_model(), tiny_model(), Calls()
    qwen3.kernelize(model)
    for name in PARTS:
        cls = getattr(modeling_qwen3, name)
        with monkeypatch.context() as patch:
            patch.setattr(cls, "forward", calls.around(cls.forward))
            assert_kept(calls, model, step(plain))
    rotary = modeling_qwen3.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda q,
                        *args: calls.around(lambda _, *given: rotary(*given))(None, q, *args))
    for mode in ("fused", "attention alone"):
        if mode != "fused":
            model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
        assert_kept(calls, model, step(plain))
    with pytest.raises(RuntimeError, match="rope cannot be put on one model: apply_rotary_pos_emb is .*lambda"):
        qwen3.kernelize(tiny_model())


def test_kernelize_names_what_stands_on_a_class(qwen3, monkeypatch):
    model = tiny_model()
    with monkeypatch.context() as patch:
        patch.setattr(modeling_qwen3.Qwen3MLP, "forward", Calls().around(modeling_qwen3.Qwen3MLP.forward))
        with pytest.raises(RuntimeError, match="swiglu cannot be put on .*Qwen3MLP.forward is .*doubled"):
            qwen3.kernelize(model)
        patch.setattr(modeling_qwen3.Qwen3ForCausalLM, "forward", Calls().around(modeling_qwen3.Qwen3ForCausalLM.forward))
        with pytest.raises(RuntimeError, match="this Qwen3ForCausalLM has a forward that .*doubled gave it"):
            qwen3.kernelize(model)
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_a_norm_of_gpt_oss_that_a_user_put_in_its_place(gpt_oss, monkeypatch):
    calls = Calls()
    monkeypatch.setattr(modeling_gpt_oss, "GptOssRMSNorm", calls.subclass(modeling_gpt_oss.GptOssRMSNorm))
    model = tiny_gpt_oss()
    expected = step(model)
    with pytest.warns(RuntimeWarning, match="GptOssRMSNorm is .*Mine"):
        gpt_oss.apply()
    calls.count = 0
    step(model).assert_same(expected, 10)
    assert calls.count == 5


# ---------------------------------------------------------------- hooks
def fused_layers(qwen3, monkeypatch, run):
    """How many decoder layers a run computes in fused nodes."""
    decoder, count = sys.modules[f"{qwen3.__name__}.shared.hf.layer.decoder_layer"], []
    with monkeypatch.context() as patch:
        original = decoder.norm_mlp
        patch.setattr(decoder, "norm_mlp", lambda *args: count.append(1) or original(*args))
        run()
    return len(count)


def test_capturing_outputs_once_does_not_end_the_fusion(qwen3, monkeypatch):
    model = tiny_model(attn_implementation="eager").eval()
    plain = copy.deepcopy(model)
    qwen3.apply()
    count = functools.partial(fused_layers, qwen3, monkeypatch)
    model.generate(TOKENS[:, :5], max_new_tokens=2, output_hidden_states=True, output_attentions=True, return_dict_in_generate=True)
    assert model.model.layers[0].self_attn._forward_hooks
    assert count(lambda: model(input_ids=TOKENS)) == 2
    outputs = []
    assert count(lambda: outputs.append(model(input_ids=TOKENS, output_hidden_states=True))) == 2
    assert count(lambda: outputs.append(model(input_ids=TOKENS, output_attentions=True))) == 0
    qwen3.reset()
    for found, name in zip(outputs, ("hidden_states", "attentions")):
        expected = plain(input_ids=TOKENS, **{f"output_{name}": True})[name]
        for a, b in zip(found[name], expected, strict=True):
            torch.testing.assert_close(a, b)


def test_capturing_attentions_under_gradient_checkpointing(qwen3):
    """The forward pass that the backward pass runs again does what the first one did."""
    model = tiny_model(attn_implementation="eager")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    inputs = {"input_ids": TOKENS, "labels": TOKENS}
    expected = Step(model, **inputs, output_attentions=True)
    qwen3.apply()
    for captured in (True, False, True):
        Step(model, **inputs, output_attentions=captured).assert_same(expected)


def test_a_hook_or_a_forward_on_the_activation(qwen3, monkeypatch):
    model, seen = tiny_model(), []
    qwen3.apply()
    activation = model.model.layers[0].mlp.act_fn
    handle = activation.register_full_backward_hook(lambda *args: seen.append("backward"))
    step(model)
    assert seen == ["backward"]
    handle.remove()
    activation.forward = lambda x: seen.append("forward") or nn.functional.silu(x)
    step(model)
    assert seen == ["backward", "forward"]
    del activation.forward
    original = type(activation).forward
    with monkeypatch.context() as patch:
        patch.setattr(type(activation), "forward", lambda self, x: seen.append("class") or original(self, x))
        step(model)
        assert "class" in seen
    seen.clear()
    assert fused_layers(qwen3, monkeypatch, lambda: step(model)) == 2
    plain = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: seen.append("linear") or plain(self, x))
    step(model)
    assert len(seen) >= 14


# ---------------------------------------------------------------- experts
def test_a_model_that_asks_for_our_experts_survives_reset(gpt_oss, qwen3):
    table = moe.ExpertsInterface._global_mapping
    before = dict(table)
    gpt_oss.apply()
    qwen3.apply()
    qwen3.reset()
    assert "bastile" in table  # the other package offers it too
    model = tiny_gpt_oss()
    model.set_experts_implementation("bastile")
    expected = step(model)
    gpt_oss.reset()
    step(model).assert_same(expected, 10)
    model.set_experts_implementation("grouped_mm")
    gpt_oss.apply()
    gpt_oss.reset()
    assert table == before


def test_the_implementation_of_experts_that_a_user_chose(gpt_oss, monkeypatch):
    """transformers' default is what ours stands in for; every other choice wins, as does what other code put in its place."""
    model, called = tiny_gpt_oss(), []
    module = sys.modules[f"{gpt_oss.__name__}.shared.hf.family.experts"]
    original = module.experts
    monkeypatch.setattr(module, "experts", lambda *args, **kwargs: called.append("ours") or original(*args, **kwargs))
    layer = sys.modules[f"{gpt_oss.__name__}.shared.hf.layer.decoder_layer"]  # which calls them in a node
    fused = layer.norm_experts
    monkeypatch.setattr(layer, "norm_experts", lambda *args, **kwargs: called.append("ours") or fused(*args, **kwargs))
    table = moe.ExpertsInterface._global_mapping
    for name in ("batched_mm", "grouped_mm"):
        monkeypatch.setitem(table, f"my_{name}", lambda *args, name=name: called.append(name) or table[name](*args))
    gpt_oss.apply()
    for choice, expected in (("grouped_mm", "ours"), ("my_batched_mm", "batched_mm"), ("my_grouped_mm", "grouped_mm"), ("bastile", "ours")):
        model.set_experts_implementation(choice)
        called.clear()
        step(model)
        assert set(called) == {expected}, choice
    model.set_experts_implementation("eager")
    called.clear()
    step(model)
    assert not called
    model.set_experts_implementation("grouped_mm")
    grouped = table["grouped_mm"]
    monkeypatch.setitem(table, "grouped_mm", lambda *args: called.append("theirs") or grouped(*args))
    step(model)
    assert set(called) == {"theirs"}


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_forward_keeps_its_docstring_and_annotations(family, request):
    package = request.getfixturevalue(family)
    modeling = modeling_qwen3 if family == "qwen3" else modeling_gpt_oss
    model = tiny_model() if family == "qwen3" else tiny_gpt_oss()
    classes = [cls for cls in {type(module) for module in model.modules()} if cls.__module__ == modeling.__name__]
    before = {cls: (cls.forward.__doc__, cls.forward.__annotations__) for cls in classes}
    package.apply()
    assert {cls: (cls.forward.__doc__, cls.forward.__annotations__) for cls in classes} == before
    package.reset()
    package.kernelize(model)
    for module in model.modules():
        if "forward" in vars(module):
            assert (module.forward.__doc__, module.forward.__annotations__) == before[type(module)]


# ---------------------------------------------------------------- memory
@pytest.mark.parametrize("how", ["kernelize", "apply", "copy"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_model_goes_with_its_last_reference(family, how, request):
    """Not at the next run of Python's cyclic garbage collector: it holds a GPU's memory."""
    package = request.getfixturevalue(family)
    model = tiny_model() if family == "qwen3" else tiny_gpt_oss()
    if how == "apply":
        package.apply()
    else:
        package.kernelize(model)
    if how == "copy":
        model = copy.deepcopy(model)
    gc.collect()
    gc.disable()
    try:
        step(model)
        parts = [weakref.ref(module) for module in model.modules()] + [weakref.ref(parameter) for parameter in model.parameters()]
        del model
        assert not [part for part in parts if part() is not None]
    finally:
        gc.enable()


def test_a_forward_without_its_module_says_so(qwen3):
    model = qwen3.kernelize(tiny_model())
    forward = model.forward
    assert forward.__self__ is model and forward.__func__ is qwen3.layers.CausalLM.forward
    del model
    with pytest.raises(ReferenceError, match="keep the model"):
        forward(input_ids=TOKENS)


def test_reset_reaches_what_gc_froze(qwen3):
    model = qwen3.kernelize(tiny_model())
    gc.freeze()
    try:
        qwen3.reset()
        assert not [module for module in model.modules() if "forward" in vars(module)]
    finally:
        gc.unfreeze()


@needs_decorators
def test_the_rotary_embedding_is_reached_where_gc_froze_it(qwen3):
    """It is a module of transformers', made when that is imported, and `kernels` leaves it with a forward of its own."""
    rotary = modeling_qwen3.apply_rotary_pos_emb
    vars(rotary)["forward"] = MethodType(type(rotary).forward, rotary)
    gc.freeze()
    try:
        qwen3.apply()
        assert rotary.forward.__func__ is qwen3.layers.RotaryPosEmb.forward
        qwen3.reset()
        assert rotary.forward.__func__ is type(rotary).forward
    finally:
        gc.unfreeze()
        vars(rotary).pop("forward")
