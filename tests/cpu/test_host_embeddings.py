"""Embeddings that stay in the host's memory: the same losses and gradients, saved and loaded as before, and what is refused."""

import copy
import importlib
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.capturing import check_replayed, stand_in
from tests.models import Step, are_equal, mesh_of_one, random_tokens, tiny_gpt_oss, tiny_model
from tests.patched import lora

BF16 = torch.bfloat16
TOKENS = random_tokens(2, 12)
MAKES = {"gpt_oss": lambda: tiny_gpt_oss(BF16), "qwen3": lambda: tiny_model(BF16, tie_word_embeddings=False)}


@pytest.fixture(params=MAKES)
def name(request):
    return request.param


@pytest.fixture
def package(request, name):
    return request.getfixturevalue(name)


def adapted(name):
    return lora(MAKES[name](), target_modules=["q_proj", "o_proj"]).train()


def step_of(model, run=None, **inputs):
    return Step(model, *([] if run is None else [run]), **{"input_ids": TOKENS, "labels": TOKENS, "use_cache": False, **inputs})


def table_of(model):
    return next(module for module in model.modules() if type(module).__name__ == "HostEmbedding")


@pytest.mark.parametrize("checkpoints", (False, True))
@pytest.mark.parametrize("first", ("host", "adapters", "layers"))
def test_the_same_bits(package, name, first, checkpoints):
    expected = step_of(package.kernelize(adapted(name)))
    model = package.host_embeddings(MAKES[name]().requires_grad_(False)) if first == "host" else None
    model = adapted(name) if model is None else lora(model, target_modules=["q_proj", "o_proj"]).train()
    model.load_state_dict(adapted(name).state_dict())
    if first == "adapters":
        package.host_embeddings(model)
    package.kernelize(model)
    assert package.host_embeddings(model) is model
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    assert are_equal(step_of(model), expected)
    assert not any(each is table_of(model).table for each in (*model.parameters(), *model.buffers()))
    (row,) = [row for row in package.explain(model).rows if row.part.startswith("embedding in the host's memory")]
    assert row.fused and row.count == 1
    with pytest.raises(IndexError):
        model(input_ids=TOKENS + 10**6)


def test_where_a_model_is_moved(package, name):
    """The table stays, and what it gives goes along: to another dtype here, to a device without numbers."""
    model = package.host_embeddings(MAKES[name]().requires_grad_(False))
    module = table_of(model)
    assert model.float().device == torch.device("cpu") and module(TOKENS).dtype == torch.float32
    assert module.table.dtype == BF16 and torch.equal(module(TOKENS), module.table[TOKENS].float())
    model.to("meta")
    assert model.device.type == "meta" and module(TOKENS).is_meta and not module.table.is_meta


def test_in_parts(package, name, monkeypatch):
    model = package.host_embeddings(MAKES[name]().requires_grad_(False))
    monkeypatch.setattr(importlib.import_module(f"{package.__name__}.shared.hf.parts.host_embedding"), "ROWS", 5)
    module = table_of(model)
    for ids in (TOKENS, TOKENS.int(), TOKENS[:, :0], TOKENS[0]):
        assert torch.equal(module(ids), nn.functional.embedding(ids, module.table))


def test_saved_as_before(package, name, tmp_path):
    model = MAKES[name]().requires_grad_(False)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    package.host_embeddings(model)
    state = model.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=BF16)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in expected.items())
    other = package.host_embeddings(copy.deepcopy(loaded).requires_grad_(False))
    table_of(other).table.zero_()
    for options in ({}, {"assign": True}):
        other.load_state_dict(expected, **options)
        assert torch.equal(table_of(other).table, table_of(model).table)
    with pytest.raises(RuntimeError, match="Missing key.*embed_tokens.weight"):
        other.load_state_dict({name: tensor for name, tensor in expected.items() if "embed_tokens" not in name})
    with pytest.raises(RuntimeError, match="embed_tokens.weight is"):
        other.load_state_dict({**expected, "model.embed_tokens.weight": torch.zeros(3, 64)})


def test_captured_and_padded(package, name, monkeypatch):
    """Graphs hold decoder layers alone, and padding is left out as before."""
    stand_in(package, monkeypatch)
    model = package.kernelize(package.host_embeddings(adapted(name)))
    plain = package.kernelize(copy.deepcopy(model))
    package.capture(model, *TOKENS.shape)
    check_replayed(model, plain, [step_of] * 4)
    padding = importlib.import_module(f"{package.__name__}.shared.hf.model.padding")
    assert not padding._may_see_padding(plain.get_base_model().model, table_of(plain))
    assert padding.weight_within(table_of(plain)).is_set_to(table_of(plain).home)


def test_ddp_and_a_graph(package, name):
    model = package.kernelize(package.host_embeddings(adapted(name)))
    expected = step_of(model)
    with mesh_of_one():
        assert are_equal(step_of(model, nn.parallel.DistributedDataParallel(model)), expected)
    torch._dynamo.reset()
    step_of(model, torch.compile(model, backend="aot_eager")).assert_same(expected, 1e6)


# ---------------------------------------------------------------- what is refused
def _tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def _trained(model):
    model.model.embed_tokens.weight.requires_grad_(True)


def _scaled(model):
    model.model.embed_tokens = type("Scaled", (nn.Embedding,), {})(9, 64).requires_grad_(False)


def _replaced(model):
    model.model.embed_tokens.forward = lambda ids: ids


REFUSED = (
    (lambda model: model.to("meta"), "model.embed_tokens.weight is on the meta device, expected a table with numbers"),
    (_tied, "model.embed_tokens.weight is tied to lm_head.weight"),
    (_trained, "model.embed_tokens.weight is to be trained (requires_grad), expected a frozen one"),
    (_scaled, "model.embed_tokens is a Scaled with more than a look-up"),
    (_replaced, "model.embed_tokens is a Embedding with more than a look-up"),
)


@pytest.mark.parametrize(("change", "expected"), REFUSED)
def test_what_is_refused_by_name(package, name, change, expected):
    model = MAKES[name]().requires_grad_(False)
    change(model)
    with pytest.raises(ValueError, match=re.escape(expected)):
        package.host_embeddings(model)
    assert "HostEmbedding" not in {type(module).__name__ for module in model.modules()}


def test_what_would_train_it_is_refused(package, name):
    """PEFT's `modules_to_save` trains a copy of the module, whose table nothing would train."""
    advice = "to be trained .*expected a frozen one"
    model = package.host_embeddings(MAKES[name]().requires_grad_(False))
    with pytest.raises(ValueError, match=advice):
        table_of(model).requires_grad_(True)
    assert table_of(model).requires_grad_(False) is table_of(model)
    with pytest.raises(ValueError, match=advice):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]))


@pytest.mark.parametrize("wrong", (-1, 10**6))
def test_ids_of_no_token_raise_in_a_graph_too(package, name, wrong):
    model = package.host_embeddings(MAKES[name]().requires_grad_(False))
    for module in (table_of(model), torch.compile(table_of(model), backend="eager")):
        with pytest.raises(IndexError):
            module(torch.tensor([[wrong, 2]]))


def test_adapters_and_other_sizes_are_refused(package, name):
    model = get_peft_model(MAKES[name](), LoraConfig(target_modules=["embed_tokens"]))
    with pytest.raises(ValueError, match="embed_tokens is a Embedding with more than a look-up"):
        package.host_embeddings(model)
    model = package.host_embeddings(MAKES[name]().requires_grad_(False))
    with pytest.raises(ValueError, match="not supported"):
        get_peft_model(model, LoraConfig(target_modules=["embed_tokens"]))
    with pytest.raises(TypeError):
        model.resize_token_embeddings(500)
    with pytest.raises((KeyError, AttributeError)):
        table_of(model).weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(TypeError, match="expected a model of transformers"):
        package.host_embeddings(nn.Linear(2, 2))
