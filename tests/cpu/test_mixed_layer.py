"""Layers that mix their tokens by a delta net, or by attention with a gate: their projections are in the nodes around it."""

import contextlib
import copy
import sys
from statistics import median

import pytest
import torch

from tests.cpu.test_qwen3_5 import ADAPTED, FACTOR, LUCK, TOKENS, TWO_LAYERS, every_family, inputs_of, step_of, tiny
from tests.models import random_tokens
from tests.patched import lora
from tests.tolerances import relative_error


@contextlib.contextmanager
def linears_called():
    """The linear layers whose forward runs. A hook on them, or a forward in the place of theirs, would be heeded."""
    called, code = set(), torch.nn.Linear.forward.__code__
    sys.setprofile(lambda frame, event, _: called.add(frame.f_locals["self"]) if event == "call" and frame.f_code is code else None)
    try:
        yield called
    finally:
        sys.setprofile(None)


def saved_bytes(model):
    """The bytes that a forward pass keeps for the backward pass, each storage once, without parameters."""
    kept, own = {}, {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False)
    return sum(kept.values())


@every_family
@pytest.mark.parametrize("adapted", (False, True), ids=("plain", "lora"))
def test_projections_are_in_the_nodes(qwen3_5, name, adapted):
    """No module that a node stands in for is called, and less is kept than where they are."""
    model = lora(tiny(name), target_modules=ADAPTED) if adapted else tiny(name)
    expected = step_of(model)
    qwen3_5.kernelize(model)
    parts = {*inputs_of(name), "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"}
    with linears_called() as called:
        found = step_of(model)
    found.assert_same(expected, FACTOR)
    assert not [path for path, module in model.named_modules() if module in called and parts.intersection(path.split("."))]
    ours = saved_bytes(model)
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in parts:
            module.register_forward_hook(lambda *args: None)
    assert ours < saved_bytes(model)


@every_family
@pytest.mark.parametrize("part", ("net", "first", "last", "self_attn", "q_proj", "o_proj"))
def test_what_something_listens_to_is_called(qwen3_5, name, part):
    model = tiny(name)
    expected = step_of(model)
    qwen3_5.kernelize(model)
    net, attention = model.model.layers[0].linear_attn, model.model.layers[3].self_attn
    modules = {"net": net, "first": getattr(net, inputs_of(name)[0]), "last": net.out_proj, "self_attn": attention}
    called = []
    modules.get(part, getattr(attention, part, None)).register_forward_hook(lambda *args: called.append(part))
    found = step_of(model)
    found.assert_same(expected, FACTOR)
    assert called == [part]
    rows = [row for row in qwen3_5.explain(model).rows if not row.fused and "hook" in row.reason]
    assert [row.count for row in rows] == [1], rows


@every_family
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_autocast(qwen3_5, name, dtype):
    model = tiny(name, dtype, **TWO_LAYERS, **({} if name == "qwen3_5" else {"num_experts_per_tok": 4}))
    batches = random_tokens(12, 2, 80)

    def steps(model):
        return [step_of(model, input_ids=tokens, labels=tokens) for tokens in batches]

    exact = steps(copy.deepcopy(model).float())
    with torch.autocast("cpu", torch.bfloat16):
        before = steps(model)
        qwen3_5.kernelize(model)
        found = steps(model)
    for name, gradient in exact[0].gradients.items():
        if gradient.numel() <= 64 or LUCK.intersection(name.split(".")):  # numbers of a head, and gates of which little is left
            continue
        mine, others = ([relative_error(step.gradients[name], right.gradients[name]) for step, right in zip(ran, exact, strict=True)]
                        for ran in (found, before))  # fmt: skip
        # In which batch errors add up, up to three times the usual, is a matter of luck.
        assert median(mine) <= 1.25 * median(others) + 1e-3, f"{name}: {mine}, without the layers {others}"


SILUS = {
    "class": lambda patch, activations: patch.setattr(activations.SiLUActivation, "forward", lambda self, x: 2 * torch.relu(x)),
    "table": lambda patch, activations: patch.setitem(activations.ACT2FN, "silu", torch.nn.ReLU),
}


@every_family
@pytest.mark.parametrize("where", SILUS)
def test_a_users_silu_is_that_of_nets_and_of_their_norms(qwen3_5, name, where, monkeypatch):
    model = qwen3_5.kernelize(tiny(name, **TWO_LAYERS))
    ours = step_of(model)
    SILUS[where](monkeypatch, sys.modules["transformers.activations"])
    found = step_of(model)
    assert any(row.part == "delta net" and "ACT2FN['silu'] computes" in row.reason for row in qwen3_5.explain(model).rows)
    qwen3_5.reset()
    found.assert_same(step_of(model), FACTOR)
    assert relative_error(found.loss, ours.loss) > 1e-5
