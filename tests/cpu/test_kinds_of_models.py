"""Models on meta, under a fake mode and in transforms of functions: the right shapes, or what the plain model gives."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models import random_tokens, tiny_gpt_oss, tiny_model
from tests.tolerances import relative_error

MODELS = {"qwen3": tiny_model, "gpt_oss": tiny_gpt_oss}


@pytest.fixture(params=("apply", "kernelize"))
def place(request):
    """Puts a package on a model."""
    return lambda package, model: package.apply() or model if request.param == "apply" else package.kernelize(model)


def trained(model, tokens):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_meta_trains(name, request, place):
    package = request.getfixturevalue(name)
    model = place(package, MODELS[name]().to("meta"))
    loss, gradients = trained(model, torch.zeros(2, 8, dtype=torch.int64, device="meta"))
    assert loss.is_meta and loss.shape == () and all(g.is_meta for g in gradients.values())


def test_a_qwen3_under_a_fake_mode_trains(qwen3, place):
    """With real weights, as memory estimators run it."""
    model = place(qwen3, tiny_model())
    with FakeTensorMode(allow_non_fake_inputs=True):
        loss, gradients = trained(model, torch.zeros(2, 8, dtype=torch.int64))
    assert loss.shape == () and all(g is not None for g in gradients.values())


def functional_loss(model, tokens):
    """(the loss as a function of the parameters, the parameters)"""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, kwargs={"input_ids": tokens, "labels": tokens, "use_cache": False}).loss

    return loss, parameters


def model_by_grad(loss, parameters):
    return torch.func.grad(loss)(parameters)


def model_by_jvp(loss, parameters):
    tangents = {name: torch.full_like(p, 0.01) for name, p in parameters.items()}
    return dict(zip(("loss", "change"), torch.func.jvp(loss, (parameters,), (tangents,)), strict=True))


def model_by_vmap(loss, parameters):
    return {"loss": torch.func.vmap(loss)({name: torch.stack((p, 2 * p)) for name, p in parameters.items()})}


@pytest.mark.parametrize("transform", (model_by_grad, model_by_jvp, model_by_vmap), ids=lambda f: f.__name__)
def test_transforms_of_a_model_are_those_of_the_plain_one(interpreted_qwen3, transform):
    model, tokens = tiny_model(attn_implementation="eager"), random_tokens(2, 8)
    expected = transform(*functional_loss(copy.deepcopy(model), tokens))
    mine = transform(*functional_loss(interpreted_qwen3.kernelize(model), tokens))
    assert mine.keys() == expected.keys()
    for name in expected:
        assert relative_error(mine[name], expected[name]) <= 1e-4, name
