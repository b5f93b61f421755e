"""pack(): weights side by side in memory, everything else as it was. What is saved and loaded: test_saving.py."""

import copy
import gc
import importlib
import weakref

import pytest
import torch

from tests.models import Step, packed_groups, random_tokens, tiny_model


def test_names_values_gradients_and_optimiser_state_stay(qwen3):
    model, tokens = tiny_model(), random_tokens(2, 17)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    before = {name: (parameter, parameter.detach().clone(), parameter.grad.clone()) for name, parameter in model.named_parameters()}
    states = {id(parameter): state["exp_avg"].clone() for parameter, state in optimizer.state.items()}
    assert qwen3.pack(model) is model
    assert all(all(packed_groups(qwen3, layer)) for layer in model.model.layers)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, (parameter, value, gradient) in before.items():
        assert after[name] is parameter and torch.equal(parameter, value) and torch.equal(parameter.grad, gradient)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], states[id(parameter)])


def test_a_packed_model_trains_as_before(qwen3):
    model, tokens = tiny_model(), random_tokens(2, 17)
    expected = Step(model, input_ids=tokens, labels=tokens)
    qwen3.kernelize(qwen3.pack(model))
    Step(model, input_ids=tokens, labels=tokens).assert_same(expected)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.requires_grad_(False)
        layer.mlp.up_proj.weight.requires_grad_(False)
    model.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == ("k_proj" in name or "up_proj" in name)


def of_one_group(qwen3, *rows, dtype=torch.float32):
    """(side_by_side, weights that lay_side_by_side placed)."""
    neighbours = importlib.import_module(f"{qwen3.__name__}.shared.ops.neighbours")
    weights = [torch.nn.Parameter(torch.randn(count, 8).to(dtype)) for count in rows]
    before = [weight.detach().clone() for weight in weights]
    neighbours.lay_side_by_side(weights)
    assert all(map(torch.equal, weights, before)) and torch.equal(neighbours.side_by_side(weights), torch.cat(before))
    return neighbours.side_by_side, weights


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_the_memory_lives_as_long_as_one_of_its_weights(qwen3, dtype):
    """And is freed without the garbage collector."""
    side_by_side, weights = of_one_group(qwen3, 6, 3, 3, dtype=dtype)
    whole = side_by_side(weights)
    block, expected = weakref.ref(whole), whole[6:9].clone()
    del whole
    gc.disable()
    try:
        weights = weights[1:2]
        assert block() is not None and torch.equal(weights[0], expected)
        storage = weights.pop().untyped_storage()
        assert block() is not None and storage.nbytes() == expected.nbytes
        del storage
        assert block() is None
    finally:
        gc.enable()


def test_what_is_read_as_one_outlives_the_weights(qwen3):
    side_by_side, weights = of_one_group(qwen3, 4, 4)
    whole = side_by_side(weights)
    expected = whole.clone()
    del weights
    gc.collect()
    noise = [torch.full((8, 8), torch.nan) for _ in range(100)]
    assert torch.equal(whole, expected) and len(noise) == 100


def test_a_write_into_one_weight_is_seen(qwen3):
    side_by_side, weights = of_one_group(qwen3, 4, 2)
    with torch.no_grad():
        weights[1].fill_(7)
    assert (side_by_side(weights)[4:] == 7).all()
    model, tokens = qwen3.kernelize(qwen3.pack(tiny_model())), random_tokens(1, 9)
    loss = model(input_ids=tokens, labels=tokens).loss
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def tie_a_weight(first, second):
    second.q_proj.weight = first.q_proj.weight


def share_a_layer(first, second):
    second.k_proj = first.k_proj


def one_layer_for_two(first, second):
    for attention in (first, second):
        attention.v_proj = attention.k_proj


@pytest.mark.parametrize("share", (tie_a_weight, share_a_layer, one_layer_for_two))
def test_what_two_modules_hold_stays_as_it_is(qwen3, share):
    """It cannot have two neighbours, and whatever was packed first would be laid apart again."""
    model = tiny_model()
    attentions = [layer.self_attn for layer in model.model.layers]
    share(*attentions)
    before = [(weight, weight.data_ptr(), weight.clone()) for attention in attentions for weight in attention.parameters()]
    qwen3.pack(model)
    for layer in model.model.layers:
        assert packed_groups(qwen3, layer) == [False, True]
    after = [weight for attention in attentions for weight in attention.parameters()]
    for (weight, place, value), found in zip(before, after, strict=True):
        assert found is weight and found.data_ptr() == place and torch.equal(found, value)


def test_a_wrapper_that_answers_for_what_it_stands_around(qwen3):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp = checkpoint_wrapper(layer.mlp)
    qwen3.pack(model)
    assert all(packed_groups(qwen3, layer) == [True, True] for layer in model.model.layers)


MOVES = {
    "new data": lambda weights: setattr(weights[1], "data", weights[1].detach().clone()),
    "other rows": lambda weights: setattr(weights[2], "data", weights[2].data[:2]),
    "other dtype": lambda weights: [setattr(weight, "data", weight.data.view(torch.int32)) for weight in weights],
    "other columns": lambda weights: [
        setattr(weight, "data", weight.data.view(shape)) for weight, shape in zip(weights, ((16, 4), (4, 16), (4, 16)), strict=True)
    ],
    "other strides": lambda weights: setattr(weights[0], "data", weights[0].data.t()),
    "shared with processes": lambda weights: weights[0].share_memory_(),
    "other order": lambda weights: weights.reverse(),
    "one less": lambda weights: weights.pop(),
    "the last ones": lambda weights: weights.pop(0),
    "a stranger": lambda weights: weights.append(torch.zeros(8, 8)),
    "a turned sign": lambda weights: weights.__setitem__(1, torch._neg_view(weights[1])),
}


@pytest.mark.parametrize("move", MOVES)
def test_what_was_moved_is_not_read_as_one(qwen3, move):
    side_by_side, weights = of_one_group(qwen3, 8, 8, 8)
    for weight in weights:
        weight.requires_grad_(False)
    MOVES[move](weights)
    assert side_by_side(weights) is None


def test_neighbours_by_chance_are_not_read_as_one(qwen3):
    side_by_side, _ = of_one_group(qwen3, 4, 4)
    block = torch.randn(8, 8)
    assert side_by_side(block.split(4)) is None
    memory = block.untyped_storage()
    apart = [torch.empty(0).set_(memory[start : start + 128], 0, (4, 8)) for start in (0, 128)]
    assert side_by_side(apart) is None and torch.equal(torch.cat(apart), block)


def test_packed_again_after_a_move(qwen3):
    model = qwen3.pack(tiny_model())
    for moved in (copy.deepcopy(model), copy.deepcopy(model).to(torch.float64), copy.deepcopy(qwen3.pack(model)).share_memory()):
        assert not any(any(packed_groups(qwen3, layer)) for layer in moved.model.layers)
        assert all(all(packed_groups(qwen3, layer)) for layer in qwen3.pack(moved).model.layers)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert [parameter.data_ptr() for parameter in qwen3.pack(model).parameters()] == addresses


def test_packed_under_inference_mode(qwen3):
    model, tokens = tiny_model(), random_tokens(2, 17)
    expected = Step(model, input_ids=tokens, labels=tokens)
    with torch.inference_mode():
        qwen3.kernelize(qwen3.pack(model))
    Step(model, input_ids=tokens, labels=tokens).assert_same(expected)


@pytest.mark.parametrize("how", ("ddp", "fully_shard"))
def test_packed_models_are_trained_in_parallel(qwen3, how):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, tokens = tiny_model(), random_tokens(2, 17)
    expected = Step(model, input_ids=tokens, labels=tokens)
    qwen3.kernelize(qwen3.pack(model))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if how == "ddp":
            for as_view in (False, True):
                model.zero_grad()
                parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
                found = Step(parallel, input_ids=tokens, labels=tokens)
                found.gradients = {name.removeprefix("module."): gradient for name, gradient in found.gradients.items()}
                found.assert_same(expected)
        else:
            mesh = init_device_mesh("cpu", (1,))
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=mesh)
            found = Step(model, input_ids=tokens, labels=tokens)
            found.gradients = {name: gradient.full_tensor() for name, gradient in found.gradients.items()}
            found.assert_same(expected)
    finally:
        dist.destroy_process_group()


def test_layers_that_are_not_plain_stay(qwen3):
    model = tiny_model()
    first, second = model.model.layers[:2]
    first.self_attn.q_proj = torch.nn.Sequential(first.self_attn.q_proj)
    second.self_attn.v_proj.weight = second.self_attn.k_proj.weight
    qwen3.pack(model)
    assert packed_groups(qwen3, first) == [False, True]
    assert second.self_attn.v_proj.weight is second.self_attn.k_proj.weight and packed_groups(qwen3, second) == [False, True]


def test_weights_in_a_buffer_of_somebody_else_stay(qwen3):
    """DeepSpeed and FSDP1 lay weights in one: what is written into the buffer must reach the layer."""
    model = tiny_model(num_hidden_layers=1)
    mlp = model.model.layers[0].mlp
    buffer = torch.cat([mlp.gate_proj.weight.detach().view(-1), mlp.up_proj.weight.detach().view(-1)])
    for linear, part in zip((mlp.gate_proj, mlp.up_proj), buffer.chunk(2), strict=True):
        linear.weight.data = part.view(linear.weight.shape)
    assert packed_groups(qwen3, qwen3.pack(model).model.layers[0]) == [True, False]
    buffer.zero_()
    assert not mlp.gate_proj.weight.any() and not mlp.up_proj.weight.any()
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight.data = torch.empty(0)  # as DeepSpeed's ZeRO-3 leaves it between two steps
    qwen3.pack(model)
    with torch.device("meta"):
        on_meta = tiny_model()
    assert not any(any(packed_groups(qwen3, layer)) for layer in qwen3.pack(on_meta).model.layers)


@pytest.mark.parametrize("wrong", (None, 3, torch.zeros(2)), ids=str)
def test_only_a_model_is_packed(qwen3, wrong):
    with pytest.raises(TypeError, match="model is .*expected a torch.nn.Module"):
        qwen3.pack(wrong)
