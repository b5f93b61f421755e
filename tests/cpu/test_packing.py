"""pack(): weights side by side in memory, everything else as it was."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models import Step, random_tokens, tiny_model


def is_packed(layer):
    """Whether each group of a decoder layer's weights lies in one piece."""
    attention, mlp = layer.self_attn, layer.mlp
    groups = [(attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)]
    return [len({next(linear.parameters()).untyped_storage().data_ptr() for linear in group}) == 1 for group in groups]


def test_names_values_gradients_and_optimiser_state_stay(qwen3):
    model, tokens = tiny_model(), random_tokens(2, 17)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    before = {name: (parameter, parameter.detach().clone(), parameter.grad.clone()) for name, parameter in model.named_parameters()}
    states = {id(parameter): state["exp_avg"].clone() for parameter, state in optimizer.state.items()}
    assert qwen3.pack(model) is model
    assert all(all(is_packed(layer)) for layer in model.model.layers)
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


def test_it_is_saved_and_copied_as_any_model(qwen3, tmp_path):
    model, tokens = qwen3.pack(tiny_model()), random_tokens(1, 9)
    expected = model(input_ids=tokens).logits
    model.save_pretrained(tmp_path / "checkpoint")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    again = tiny_model()
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    for other in (loaded, again, copy.deepcopy(model)):
        torch.testing.assert_close(other(input_ids=tokens).logits, expected)
    copied = copy.deepcopy(model).to(torch.float64)
    assert not any(any(is_packed(layer)) for layer in copied.model.layers)
    assert all(all(is_packed(layer)) for layer in qwen3.pack(copied).model.layers)


def test_layers_that_are_not_plain_stay(qwen3):
    model = tiny_model()
    first, second = model.model.layers[:2]
    first.self_attn.q_proj = torch.nn.Sequential(first.self_attn.q_proj)
    second.self_attn.v_proj.weight = second.self_attn.k_proj.weight
    qwen3.pack(model)
    assert is_packed(first) == [False, True]
    assert second.self_attn.v_proj.weight is second.self_attn.k_proj.weight and is_packed(second) == [False, True]


@pytest.mark.parametrize("wrong", (None, 3, torch.zeros(2)), ids=str)
def test_only_a_model_is_packed(qwen3, wrong):
    with pytest.raises(TypeError, match="model is .*expected a torch.nn.Module"):
        qwen3.pack(wrong)
