"""What changes in a model is captured anew, and only that."""

import copy
import importlib
import sys

import pytest
import torch

from tests.capturing import SHAPE, Rerun, assert_equal, captured, compare, gradients, graphs_of, loss_of, one_family, whole
from tests.cpu.test_lookups import FunctionMode
from tests.ops.common import mesh_of_one


def first_norm(layer):
    """The norm of q, or the first one of a layer whose heads have none."""
    return next(module for name, module in layer.named_modules() if name.endswith("norm"))


def replace_weight(norm):
    norm.weight = torch.nn.Parameter(torch.full_like(norm.weight, 3.0))


def halve_attention(model):
    """Sets an implementation of the user's, for which transformers makes the same mask, or none, as for the one before."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def halved(*args, **kwargs):
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return output * 0.5, weights

    AttentionInterface.register("halved", halved)
    AttentionMaskInterface.register("halved", sdpa_mask)
    model.set_attn_implementation("halved")


def subclass(module):
    """Gives a module another class whose forward is twice the one before."""
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"forward": doubled(cls.forward)})


def another_dictionary(module, name, **held):
    """Gives a module another dictionary by a name, with something else in it. The one before stays as it was."""
    setattr(module, name, {**getattr(module, name), **held})


def renamed(module, **names):
    """Gives what a module holds other names, in the same order."""
    held = [(names.get(name, name), each) for name, each in module._modules.items()]
    module._modules.clear()
    module._modules.update(held)


def doubled(function):
    def twice(*args, **kwargs):
        found = function(*args, **kwargs)
        return (found[0] * 2, *found[1:]) if isinstance(found, tuple) else found * 2

    return twice


CHANGES = {
    "another class": lambda model: subclass(model.model.layers[0].mlp.up_proj),
    "another class of attention": lambda model: subclass(model.model.layers[1].self_attn),
    "another attention": halve_attention,
    "weights that moved": lambda model: setattr(
        model.model.layers[0].mlp.up_proj.weight, "data", model.model.layers[0].mlp.up_proj.weight * 2
    ),
    "another weight": lambda model: replace_weight(first_norm(model.model.layers[1])),
    "another epsilon": lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 0.5),
    "a frozen weight": lambda model: model.model.layers[0].mlp.up_proj.weight.requires_grad_(False),
    "another layer": lambda model: setattr(
        model.model.layers[0].mlp, "up_proj", torch.nn.Linear(model.config.hidden_size, model.config.intermediate_size)
    ),
    "another dictionary of weights": lambda model: another_dictionary(
        model.model.layers[0].mlp.up_proj, "_parameters", weight=torch.nn.Parameter(model.model.layers[0].mlp.up_proj.weight * 2)
    ),
    "another dictionary of modules": lambda model: another_dictionary(
        model.model.layers[1].mlp, "_modules", up_proj=copy.deepcopy(model.model.layers[0].mlp.up_proj)
    ),
    "names that are exchanged": lambda model: renamed(model.model.layers[0].mlp, gate_proj="up_proj", up_proj="gate_proj"),
    "a loaded state": lambda model: model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_recorded_anew(package, tiny_model, change):
    model, plain = captured(package, tiny_model())
    for m in (model, plain):
        torch.manual_seed(2)
        CHANGES[change](m)
    counts = [compare(model, plain, seed) for seed in range(4)]
    assert 0 in counts[:2], "a pass is looked at: this one, or the next where graphs in front of the changed layer were replayed"
    assert counts[0] < whole() and counts[2:] == [whole()] * 2


@pytest.mark.parametrize("what", ("a class's forward", "the attention of that name", "PyTorch's SDPA", "the rotary embedding", "silu"))
def test_a_function_that_is_replaced_is_recorded_anew(package, tiny_model, what, monkeypatch):
    """By the user, behind a name that stays."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, plain = captured(package, tiny_model(attn_implementation="sdpa"))
    modeling = sys.modules[type(model).__module__]
    before = gradients(plain)
    if what == "a class's forward":
        cls = type(model.model.layers[1].mlp)
        monkeypatch.setattr(cls, "forward", doubled(cls.forward))
    elif what == "PyTorch's SDPA":  # as SageAttention's users do
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", doubled(torch.nn.functional.scaled_dot_product_attention))
    elif what == "silu":
        monkeypatch.setattr(torch.nn.functional, "silu", doubled(torch.nn.functional.silu))
    elif what == "the rotary embedding":
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", doubled(modeling.apply_rotary_pos_emb))
    else:
        monkeypatch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "sdpa", doubled(ALL_ATTENTION_FUNCTIONS["sdpa"]))
    counts = [compare(model, plain, seed) for seed in range(4)]
    assert counts[0] < whole() and counts[2:] == [whole()] * 2
    assert not torch.equal(*(found["model.embed_tokens.weight"] for found in (before, gradients(plain))))


def test_a_mode_of_the_user_s_is_no_graph_s(package, tiny_model):
    """It sees every call of the function that it changes; behind it the same graphs are replayed."""
    model, plain = captured(package, tiny_model())
    calls = []
    with pytest.warns(RuntimeWarning, match="is in force"), FunctionMode(torch.nn.functional.linear, calls):
        assert compare(model, plain) == 0 and calls
    assert compare(model, plain) == whole()


def test_weights_that_are_written_in_place_need_no_new_graphs(package, tiny_model):
    model, plain = captured(package, tiny_model())
    for m in (model, plain):
        m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()})
    assert compare(model, plain) == whole()


def test_lora(package, tiny_model):
    from peft import LoraConfig, get_peft_model

    def adapted(model):
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, 0, 0.1)
        return model

    model, plain = captured(package, adapted(tiny_model()))
    assert compare(model, plain) == whole()
    for m in (model, plain):
        m.base_model.disable_adapter_layers()
        for parameter in m.parameters():
            parameter.requires_grad_(True)
    for seed in range(3):
        assert_equal(gradients(model, seed), gradients(plain, seed))


def in_place_of(module, gone, **new):
    """Gives a module as many attributes as it had before."""
    delattr(module, gone)
    vars(module).update(new)


@pytest.mark.parametrize("change", (
    lambda adapter: renamed(adapter.lora_A, default="parked"),
    lambda adapter: renamed(adapter.lora_dropout, default="parked"),
    lambda adapter: setattr(adapter.lora_A, "top_k", 1),
    lambda adapter: setattr(adapter.lora_B, "forward", len),
    lambda adapter: in_place_of(adapter.base_layer, "more", forward=len),
    lambda adapter: in_place_of(adapter.base_layer, "_is_full_backward_hook", forward=len),
    lambda adapter: adapter.box.register_forward_hook(print),
), ids=("an adapter by another name", "its dropout", "an attribute", "a forward", "for another", "for one of torch's", "a hook"))
def test_a_container_that_changes_is_noticed(package, tiny_model, change):
    """PEFT looks for each adapter by its name, and what nobody calls may still be read."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(package.kernelize(tiny_model()), peft.LoraConfig(r=2, target_modules="all-linear")).train()
    layer = model.get_base_model().model.layers[0]
    layer.mlp.up_proj.base_layer.more = None
    layer.mlp.up_proj.box = torch.nn.ModuleList([torch.nn.Identity()])
    layer.mlp.up_proj.box.forward = len  # so that it may be called
    watch = importlib.import_module(f"{package.__name__}.shared.hf.parts.watch").Watch([layer])
    assert watch.same()
    change(layer.mlp.up_proj)
    assert not watch.same()


@pytest.mark.parametrize("change", (
    lambda layer: layer.scaling.update(default=3.0), lambda layer: layer.scaling.__setitem__("default", 0.0),
    lambda layer: layer.merged_adapters.append("default"),
), ids=("update", "zero", "merged"))
def test_a_container_that_is_changed_in_place(package, tiny_model, change):
    """PEFT keeps the scaling of each adapter in a dictionary, and the names of the merged ones in a list."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model, plain = captured(package, model)
    assert compare(model, plain) == whole()
    for m in (model, plain):
        m.base_model.model.requires_grad_(True)
    for seed in range(2):
        compare(model, plain, seed)
    assert compare(model, plain) == whole()
    for m in (model, plain):
        change(m.base_model.model.model.layers[-1].self_attn.q_proj)
    counts = [compare(model, plain, seed) for seed in range(4)]
    assert counts[0] < whole() == counts[-1]


def test_frozen_layers(package, tiny_model):
    def frozen():
        model = tiny_model()
        for module in (model.model.embed_tokens, model.model.layers[0]):
            module.requires_grad_(False)
        return model

    model, plain = captured(package, frozen())
    assert compare(model, plain) == whole() - (Rerun.together == 1), "a frozen layer alone has no backward pass"


@one_family
@pytest.mark.parametrize("flat", (False, True), ids=("original parameters", "flat"))
@pytest.mark.parametrize("first", ("capture", "FSDP1"))
def test_under_fsdp1(package, tiny_model, first, flat):
    """FSDP1 lays weights elsewhere in each pass: nothing is replayed, and it is said."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = package.kernelize(tiny_model())
    expected = loss_of(package.kernelize(tiny_model()))
    if first == "capture":
        package.capture(model, *SHAPE)
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    with mesh_of_one():
        parallel = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=not flat)
        if first == "FSDP1":
            with pytest.raises(RuntimeError, match="under FSDP, which moves their weights"):
                package.capture(model, *SHAPE)
            return
        before = Rerun.replays
        with pytest.warns(RuntimeWarning, match="cannot be captured"):
            for _ in range(3):
                loss = loss_of(parallel)
                loss.backward()
                torch.testing.assert_close(loss, expected)
        assert Rerun.replays == before


@pytest.mark.parametrize("products", ("bf16", "fp8"))
def test_layers_over_weights_in_eight_bits_are_captured(package, tiny_model, family, monkeypatch, products):
    if family[0] not in ("qwen3", "llama", "qwen2"):
        pytest.skip("it has no dense layers that are fused whole")
    monkeypatch.setattr(importlib.import_module(f"{package.__name__}.shared.decoder.eight_bits"), "FEWEST", 8)
    models = [tiny_model(torch.bfloat16, hidden_size=64, intermediate_size=96, head_dim=16).requires_grad_(False) for _ in range(2)]
    for model in models:
        package.eight_bits(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        package.kernelize(model, products=products)
    package.capture(models[0], *SHAPE)
    for seed, graphs in enumerate((0, whole(), whole())):
        assert compare(*models, seed) == graphs
    package.sixteen_bits(models[0])
    for seed, graphs in enumerate((0, whole(), whole())):
        assert compare(*models, seed) == graphs or products == "fp8"


def test_products_in_eight_bits_are_captured_and_other_products_are_recorded_anew(package, tiny_model, family, monkeypatch):
    if family[0] not in ("qwen3", "llama", "qwen2"):
        pytest.skip("it has no dense layers that are fused whole")
    monkeypatch.setattr(importlib.import_module(f"{package.__name__}.shared.decoder.eight_bits"), "FEWEST", 16)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    models = [tiny_model(torch.bfloat16, **sizes) for _ in range(3)]
    for model, products in zip(models, ("fp8", "fp8", "bf16"), strict=True):
        package.kernelize(model, products=products)
    model, plain, in_bf16 = models
    package.capture(model, *SHAPE)
    for seed, graphs in enumerate((0, whole(), whole())):
        assert compare(model, plain, seed) == graphs
    with pytest.raises(AssertionError):
        compare(plain, in_bf16)
    for layer in model.model.layers:
        vars(layer)["_bastile_products"] = "bf16"
    for seed, graphs in enumerate((0, whole(), whole())):
        assert compare(model, in_bf16, seed) == graphs


@one_family
@pytest.mark.parametrize("has_graphs", (True, False))
def test_a_model_that_was_moved_to_another_device(package, tiny_model, monkeypatch, has_graphs):
    """Its graphs are recorded there, in another pool; where a device has none, layers run as before."""
    model, plain = captured(package, tiny_model())
    graphs = graphs_of(package, model)
    before, graphs._pool.device = graphs._pool, torch.device("cuda", 1)  # where it was
    if not has_graphs:
        monkeypatch.setattr(sys.modules[type(graphs).__module__], "can_record", lambda device: False)
    mask = torch.ones(SHAPE, dtype=torch.int64)  # of passes of a kind that is recorded only now
    mask[1, 6:] = 0
    for seed in range(3):
        counts = compare(model, plain, seed, attention_mask=mask)
    assert (counts, graphs._pool is not before) == ((whole(), True) if has_graphs else (0, False))


# ---------------------------------------------------------------- what puts layers on again
def told_again(package, model):
    package.kernelize(model)


def on_the_classes(package, model):
    package.apply()


def off_the_classes(package, model):
    package.apply(decoder_layer=False, rms_norm=False)


AGAIN = told_again, on_the_classes, off_the_classes


@one_family
@pytest.mark.parametrize("again", AGAIN, ids=lambda function: function.__name__)
@pytest.mark.parametrize("before", (None, *AGAIN[:2]), ids=lambda function: getattr(function, "__name__", "plain"))
def test_layers_that_are_put_on_a_captured_model(package, tiny_model, before, again):
    """They are replayed: with the same results as if they had been put on first. `reset` takes all of it off."""
    model, plain = tiny_model(), tiny_model()
    for each in (model, plain) if before is not None else ():
        before(package, each)
    package.capture(model, *SHAPE)
    for seed in range(3):
        compare(model, plain, seed=seed)
    for each in (model, plain):
        again(package, each)
    assert [compare(model, plain, seed=seed) > 0 for seed in range(3)][1:] == [True, True]
    rows = {row.part: row.fused for row in package.explain(model).rows}
    assert rows["captured [2, 9]"] and rows == {"captured [2, 9]": True, **{row.part: row.fused for row in package.explain(plain).rows}}
    package.reset()
    assert not any(name.startswith("_bastile") or name == "forward" for layer in model.model.layers for name in vars(layer))
    before_it = Rerun.replays
    assert_equal(gradients(model), gradients(tiny_model()))
    assert Rerun.replays == before_it


@one_family
def test_a_forward_of_the_users_beneath_the_graphs(package, tiny_model):
    """It is neither lost nor said to be ours."""
    model = package.kernelize(tiny_model())
    layer = model.model.layers[1]
    forward, calls = type(layer).forward, []

    def mine(*args, **kwargs):
        calls.append(1)
        return forward(layer, *args, **kwargs)

    layer.forward = mine
    package.capture(model, *SHAPE)
    with pytest.warns(RuntimeWarning, match="keeps the forward"):
        package.kernelize(model)
    loss_of(model).backward()
    assert calls
    assert next(row.count for row in package.explain(model).rows if row.part == "decoder layer" and not row.fused) == 1
    package.reset()
    assert layer.forward is mine
