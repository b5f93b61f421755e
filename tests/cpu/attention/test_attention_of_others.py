"""Decoders whose layers or attentions are another's, wrapped or listened to: nobody is handed a mask that only our attention can read."""

import copy
import sys
import types

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.attention_batches import assert_same, module_of, packed, padded, step
from tests.models import random_tokens, tiny_qwen3_5

BATCHES = {"plain": {"input_ids": random_tokens(2, 13)}, "padded": padded("right"), "packed": packed()}
NAMED = "bastile"  # the name of our attention, which a decoder has where it is chosen


class Around(nn.Module):
    """A user's wrapper, which looks at what it is called with."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.seen = inner, set()

    def __getattr__(self, name):
        return super().__getattr__(name) if name in ("inner", "seen") else getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        self.seen.add(type(kwargs["attention_mask"]).__name__)
        return self.inner(*args, **kwargs)


def own(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    """An attention as users write it for Qwen3."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
    k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
    v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    q, k = sys.modules["transformers.models.qwen3.modeling_qwen3"].apply_rotary_pos_emb(q, k, *position_embeddings)
    causal = attention_mask is None
    attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=causal, enable_gqa=True)
    return self.o_proj(attended.transpose(1, 2).flatten(2)), None


def around_a_copied_attention(layers):
    layers[1].self_attn = Around(copy.deepcopy(layers[1].self_attn))


def around_a_copied_layer(layers):
    layers[1] = Around(copy.deepcopy(layers[1]))


def around_the_attention(layers):
    layers[0].self_attn = Around(layers[0].self_attn)


def own_forward(layers):
    layers[0].self_attn.forward = types.MethodType(own, layers[0].self_attn)


def own_module(layers):
    attention = layers[0].self_attn
    attention.__class__ = type("Mine", (type(attention),), {"forward": own})


def own_call(layers):
    """Of a class whose forward is transformers'."""
    attention = layers[0].self_attn

    class Mine(type(attention)):
        def __call__(self, *args, attention_mask=None, **kwargs):
            assert attention_mask is None or isinstance(attention_mask, torch.Tensor)
            return super().__call__(*args, attention_mask=attention_mask, **kwargs)

    attention.__class__ = Mine


OF_OTHERS = (around_a_copied_attention, around_a_copied_layer, around_the_attention)
WRITTEN = (own_forward, own_module, own_call)
CASES = [
    *((family, change) for family in ("qwen3", "llama", "mistral", "gpt_oss") for change in OF_OTHERS),
    *(("qwen3", change) for change in WRITTEN),
]


def expected_of(make, change, batch):
    model = make()
    change(model.model.layers)
    return found_of(model, batch)


def found_of(model, batch):
    """What `step` returns of the tokens that are no padding."""
    return step(model, batch, batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool())


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("when", ("before", "after", "after a step"))
@pytest.mark.parametrize("family, change", CASES, ids=lambda value: getattr(value, "__name__", value))
def test_what_is_a_users_own_gets_masks_of_transformers(chosen, family, change, when, batch):
    package, make = chosen(family)
    expected, model = expected_of(make, change, batch), make()
    if when == "before":
        change(model.model.layers)
    package.kernelize(model)
    if when == "after a step":
        found_of(model, batch)
        assert model.model.config._attn_implementation == NAMED
    if when != "before":
        change(model.model.layers)
    for _ in range(2):
        assert_same(found_of(model, batch), expected)
    assert "Visible" not in set().union(*(module.seen for module in model.modules() if isinstance(module, Around)))
    assert model.model.config._attn_implementation == model.config._attn_implementation != NAMED


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_class_that_is_patched_afterwards(chosen, monkeypatch, batch):
    package, make = chosen("qwen3")
    model = make()
    expected = found_of(model, batch)
    package.kernelize(model)
    found_of(model, batch)
    monkeypatch.setattr(sys.modules["transformers.models.qwen3.modeling_qwen3"].Qwen3Attention, "forward", own)
    assert_same(found_of(model, batch), expected)
    monkeypatch.undo()
    found_of(model, batch)


@pytest.mark.parametrize("after", (False, True), ids=("pre hook", "hook"))
@pytest.mark.parametrize("where", ("self_attn", "layer", "everywhere"))
def test_a_hook_sees_the_mask_that_it_would_see_without_us(chosen, where, after):
    if where == "everywhere" and not after:
        pytest.skip("PyTorch has no such hook")
    package, make = chosen("qwen3")
    model, batch, seen = make(), BATCHES["padded"], []

    def hook(module, args, kwargs, *output):
        if "attention_mask" in kwargs and hasattr(module, "layer_idx"):
            seen.append(kwargs["attention_mask"])

    package.kernelize(model)
    found_of(model, batch)
    assert model.model.config._attn_implementation == NAMED
    layer = model.model.layers[1]
    module = layer.self_attn if where == "self_attn" else layer
    if where == "everywhere":
        handle = nn.modules.module.register_module_forward_hook(hook, with_kwargs=True)
    else:
        handle = (module.register_forward_hook if after else module.register_forward_pre_hook)(hook, with_kwargs=True)
    try:
        found_of(model, batch)
    finally:
        handle.remove()
    assert where == "layer" or (seen and all(isinstance(mask, torch.Tensor) for mask in seen))
    assert model.model.config._attn_implementation == "sdpa"
    found_of(model, batch)
    assert model.model.config._attn_implementation == NAMED, "the hook is gone"


def saved_by_peft(model):
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "target_modules": ["lm_head"], "modules_to_save": ["self_attn"], "task_type": "CAUSAL_LM"}
    return get_peft_model(model, LoraConfig(**options)).train()


def checkpointed(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    return model


def moved_by_accelerate(model):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for layer in model.model.layers:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    return model


def hooked_by_fsdp(model):
    def hook(module, args, kwargs):
        return args, kwargs

    hook.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    for layer in model.model.layers:
        layer.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def with_a_subclass(model):
    attention = model.model.layers[0].self_attn
    attention.__class__ = type("Mine", (type(attention),), {})
    return model


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("when", ("before", "after"))
@pytest.mark.parametrize("prepare", (saved_by_peft, checkpointed, moved_by_accelerate, hooked_by_fsdp, with_a_subclass))
@pytest.mark.parametrize("family", ("qwen3", "llama", "mistral", "gpt_oss"))
def test_libraries_that_hand_on_what_they_are_called_with_leave_a_model_its_attention(chosen, family, prepare, when, batch):
    if (family, prepare) == ("gpt_oss", with_a_subclass):
        pytest.skip("sinks need the function of the module that defines the class")
    if family == "gpt_oss" and "position_ids" in batch:
        pytest.skip("the masks that transformers makes for GPT-OSS do not part documents")
    package, make = chosen(family)
    expected = found_of(prepare(make()), batch)
    model = make()
    decoder = model.model
    if when == "after":
        package.kernelize(model)
        found_of(model, batch)
        model = prepare(model)
    else:
        model = prepare(model)
        package.kernelize(model)
    assert_same(found_of(model, batch), expected, bound=1e-4)
    assert decoder.config._attn_implementation == NAMED
    attentions = [module for module in decoder.modules() if type(module).__name__.endswith("Attention")]
    assert attentions and all(attention.config is decoder.config for attention in attentions)
    package.reset()
    assert all(attention.config._attn_implementation != NAMED for attention in attentions)


def test_a_hook_of_the_users_among_those_of_accelerate(chosen):
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Looks(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            assert isinstance(kwargs["attention_mask"], torch.Tensor)
            return args, kwargs

    package, make = chosen("qwen3")
    model = package.kernelize(moved_by_accelerate(make()))
    add_hook_to_module(model.model.layers[1], Looks(), append=True)
    found_of(model, BATCHES["padded"])


def test_an_attention_of_another_kind_of_model(chosen):
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

    package, make = chosen("qwen3")
    config = make().config
    sizes = {name: getattr(config, name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")}
    other = LlamaAttention(LlamaConfig(**sizes, attn_implementation="sdpa"), 0).train()
    held = other.config
    expected = expected_of(make, lambda layers: setattr(layers[0], "self_attn", other), BATCHES["packed"])
    model = package.kernelize(make())
    model.model.layers[0].self_attn = other
    assert_same(found_of(model, BATCHES["packed"]), expected)
    assert other.config is held


def test_layers_that_mix_their_tokens_otherwise_are_no_obstacle(request, monkeypatch):
    package = request.getfixturevalue("qwen3_5")
    for name in ("kernels_run_on", "takes_heads"):
        monkeypatch.setattr(module_of(package, "attention_choice"), name, lambda *tensors, **options: True)
    model = tiny_qwen3_5()
    expected = found_of(model, BATCHES["plain"])
    package.kernelize(model)
    assert_same(found_of(model, BATCHES["plain"]), expected)
    assert model.model.config._attn_implementation == NAMED


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("family, change", CASES, ids=lambda value: getattr(value, "__name__", value))
def test_ours_that_was_asked_for_by_name_gives_way_with_a_warning(chosen, family, change, batch):
    package, make = chosen(family)
    expected, model = expected_of(make, change, batch), make()
    package.kernelize(model)
    model.set_attn_implementation(NAMED)
    found_of(model, batch)
    kept = list(model.model.layers)
    change(model.model.layers)
    with pytest.warns(RuntimeWarning, match="attn_implementation='bastile' is left for"):
        found = found_of(model, batch)
    assert_same(found, expected)
    assert_same(found_of(model, batch), expected)
    assert model.config._attn_implementation == NAMED != model.model.config._attn_implementation
    assert "may need masks" in str(package.explain(model)) and "by name" not in str(package.explain(model))
    if change is around_a_copied_layer:
        model.model.layers[1] = kept[1]
        found_of(model, batch)
        assert model.model.config._attn_implementation == NAMED


def test_what_is_said_of_it(chosen):
    package, make = chosen("qwen3")
    model = package.kernelize(make())
    assert "masks" not in str(package.explain(model))
    own_forward(model.model.layers)
    said = {row.part: row.reason for row in package.explain(model).rows}
    assert said["attention"].startswith("Qwen3Attention is not transformers' own, or has hooks that see its arguments")
    package.kernelize(model, attention=False)
    assert "attention" not in {row.part for row in package.explain(model).rows}
