"""Codes of weights that read one input lie side by side in memory: no pass joins them, and nothing else of them changes."""

import copy

import pytest
import torch

from interpreter.backend import interpreting
from tests.cpu.test_eight_bit_weights import adapted, frozen, in_sixteen, layers_of
from tests.cpu.test_eight_bits import ROOT, are_equal, few, gradients, part_of  # noqa: F401
from tests.models import random_tokens
from tests.ops.common import runtime_of
from tests.replaying import CALLS
from tools.targets import operations


def copies_in_plans(package, model, ids):
    """The copies of tensors in the plan of each node, which is what a step does that is not among the first, and what it computes."""
    replay = part_of(package, "runtime.replay")
    for operator in replay.operators:
        operator.signatures.clear()
        operator.expected.plans.clear()
    for _ in range(CALLS):
        found = gradients(model, ids)
    plans = {operator.function.__name__: str(plan) for operator in replay.operators for plan in operator.signatures.values()}
    return {name: source.count("<method 'copy_'") for name, source in plans.items() if "_scaled_mm" in source}, found


def together(package, model):
    """For each layer, whether the codes of q, k and v, and those of gate and up, are one matrix."""
    side_by_side = part_of(package, "ops.neighbours").side_by_side
    found = []
    for module in model.modules():
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            linears = [getattr(module, name) for name in names if hasattr(module, name)]
            if linears:
                codes = [getattr(linear, "base_layer", linear).in_codes().codes for linear in linears]
                found.append(side_by_side(codes) is not None)
    assert len(found) == 4
    return found


@pytest.mark.parametrize("options", ({}, {"recompute_mlp": True}), ids=("", "recomputed"))
@pytest.mark.parametrize("first", ("codes", "adapters"))
def test_no_pass_joins_codes(few, qwen3, monkeypatch, first, options):  # noqa: F811
    """Whichever is called first. Laid apart, as by a copy of the model, they are joined in each pass until `pack`, for the same bits."""
    module, joined, ids = part_of(few(qwen3), "decoder.eight_bits"), [], random_tokens(2, 40)
    write = module._write_rows
    monkeypatch.setattr(module, "_write_rows", lambda weight, out: joined.append(weight.shape) or write(weight, out))
    model = frozen()
    if first == "codes":
        qwen3.eight_bits(model)
    model = qwen3.eight_bits(adapted(model, checkpointed=False))
    apart = copy.deepcopy(model)
    models, results = (model, apart, qwen3.pack(copy.deepcopy(model))), []
    assert [together(qwen3, each) for each in models] == [4 * [True], 4 * [False], 4 * [True]]
    for each, count in zip(models, (0, 14 if options else 10, 0), strict=True):  # of q, k, v, gate and up in each layer
        joined.clear()
        results.append(gradients(qwen3.kernelize(each, products="fp8", **options), ids))
        assert len(joined) == count
    assert all(are_equal(found, results[0]) for found in results)


@pytest.mark.parametrize("options", ({}, {"recompute_mlp": True}), ids=("", "recomputed"))
def test_no_plan_copies_codes(few, qwen3, options):  # noqa: F811
    few(qwen3)
    ids, results = random_tokens(1, 16), []
    with interpreting(runtime_of(qwen3), operations(ROOT)):
        model = adapted(qwen3.eight_bits(frozen(num_hidden_layers=1, intermediate_size=512)), checkpointed=False)
        # Codes and scales of gate and up are copied where they are apart.
        for each, count in ((model, 0), (copy.deepcopy(model), 4), (qwen3.pack(copy.deepcopy(model)), 0)):
            copies, found = copies_in_plans(qwen3, qwen3.kernelize(each, products="fp8", **options), ids)
            assert copies == {"_mlp": count, "_mlp_gradients": count if options else 0}
            results.append(found)
    assert all(are_equal(found, results[0]) for found in results)


def test_names_values_and_storages_stay(qwen3, tmp_path):
    """A weight has a storage of its own, so it is saved whole and alone; weights of other layers stay where they are."""
    from safetensors.torch import load_file

    model = frozen()
    dense = [model.lm_head.weight.data_ptr(), *(layer.input_layernorm.weight.data_ptr() for layer in model.model.layers)]
    qwen3.eight_bits(model)
    assert dense == [model.lm_head.weight.data_ptr(), *(layer.input_layernorm.weight.data_ptr() for layer in model.model.layers)]
    for layer in layers_of(model).values():
        assert layer.codes.untyped_storage().nbytes() == layer.codes.nbytes and layer.codes.is_contiguous()
    model.save_pretrained(tmp_path)
    files = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for name, layer in layers_of(model).items():
        assert torch.equal(files[f"{name}.weight"].view(torch.uint8), layer.codes)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) < 1.2 * sum(each.nbytes for each in files.values())
    assert are_equal(in_sixteen(qwen3, model).state_dict().values(), qwen3.sixteen_bits(model).state_dict().values())


def assigned(model, other):
    model.load_state_dict({name: tensor.clone() for name, tensor in other.state_dict().items()}, assign=True)


def assigned_as_they_lie(model, other):
    model.load_state_dict(other.state_dict(), assign=True)


def swapped(model, other):
    for layer, new in zip(layers_of(model).values(), layers_of(other).values(), strict=True):
        torch.utils.swap_tensors(layer.codes, torch.nn.Parameter(new.codes.clone(), requires_grad=False))
        layer.scale_bits = new.scale_bits.clone()


def one_replaced(model, other):
    """As something that gives one layer alone other codes."""
    for layer, new in zip(layers_of(model).values(), layers_of(other).values(), strict=True):
        layer.codes.data, layer.scale_bits = new.codes.clone(), new.scale_bits.clone()


def loaded(model, other):
    model.load_state_dict(other.state_dict())


def written(model, other):
    for layer, new in zip(layers_of(model).values(), layers_of(other).values(), strict=True):
        layer.codes.data.copy_(new.codes)
        layer.scale_bits.copy_(new.scale_bits)


CHANGES = (assigned, assigned_as_they_lie, swapped, one_replaced, loaded, written)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("before", (False, True), ids=("", "after a step"))
def test_other_codes_are_what_is_multiplied(few, qwen3, change, before):  # noqa: F811
    """However they come into a layer. What is written into codes leaves them side by side; what stands in their place does not."""
    few(qwen3)
    ids = random_tokens(2, 40)
    other = qwen3.eight_bits(frozen())
    for layer in layers_of(other).values():
        layer.codes.data.copy_(layer.codes.flip(0))
        layer.scale_bits.copy_((layer.scale_bits.view(torch.float32) * 4).view(torch.int32))

    def step(model):
        model.train().enable_input_require_grads()
        return gradients(qwen3.kernelize(model, products="fp8"), ids)

    def with_trained_norms(model):
        for layer in model.model.layers:
            layer.input_layernorm.weight.requires_grad_(True)
        return model

    expected = step(with_trained_norms(copy.deepcopy(other)))
    model = with_trained_norms(qwen3.eight_bits(frozen()))
    if before:
        assert not are_equal(step(model), expected)
    change(model, other)
    assert all(together(qwen3, model)) == (change in (assigned_as_they_lie, loaded, written))
    assert are_equal(step(model), expected)


def test_half_of_them_moved(few, qwen3):  # noqa: F811
    """Codes beside a weight in sixteen bits, and codes of which one was moved."""
    few(qwen3)
    ids = random_tokens(2, 40)
    base = qwen3.eight_bits(frozen())
    expected = gradients(qwen3.kernelize(adapted(in_sixteen(qwen3, base)), products="fp8"), ids)
    for turn in (lambda linear: linear.give_back(), lambda linear: setattr(linear.codes, "data", linear.codes.clone())):
        model = copy.deepcopy(base)
        qwen3.pack(model)
        for layer in model.model.layers:
            turn(layer.self_attn.k_proj)
            turn(layer.mlp.up_proj)
        assert are_equal(gradients(qwen3.kernelize(adapted(model), products="fp8"), ids), expected)
