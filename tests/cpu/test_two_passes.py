"""Two forward passes of one checkpointed model before the backward pass, of which transformers captures outputs of one: what the backward
pass runs again does what its own pass did, whatever the other one did."""

import pytest
import torch

from tests.models import Step, random_tokens, tiny_model, tiny_qwen3_moe

TOKENS = random_tokens(2, 17)
OUTPUTS = {"router_logits": "an MoE's router logits", "attentions": "attentions", "hidden_states": "hidden states"}
ORDERS = {(True, False): "captured first", (False, True): "captured second", (True, True): "captured in both"}


def checkpointed(model, reentrant=False):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def model_of(output, reentrant=False):
    if output == "router_logits":
        return checkpointed(tiny_qwen3_moe(router_aux_loss_coef=0.5), reentrant)
    return checkpointed(tiny_model(attn_implementation="eager"), reentrant)


def install(package, model, how):
    if how == "apply":
        package.apply()
        return model
    return package.kernelize(model)


class TwoPasses:
    """A model in whose place two forward passes of it are called, an output captured in those that `captured` says."""

    def __init__(self, model, output, captured, second_with_gradients):
        self.model, self.name, self.captured, self.with_gradients = model, f"output_{output}", captured, second_with_gradients

    def __call__(self, **inputs):
        first, second = ({self.name: captured, "use_cache": False, "labels": TOKENS} for captured in self.captured)
        output = self.model(**inputs, **first)
        with torch.set_grad_enabled(self.with_gradients):
            other = self.model(**inputs, **second)
        if self.with_gradients:
            output.loss = output.loss + 2 * other.loss
        return output


def two_passes(model, *options, **inputs):
    return Step(model, TwoPasses(model, *options), **inputs)


@pytest.mark.parametrize("how", ("apply", "kernelize"))
@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
@pytest.mark.parametrize("second_with_gradients", (False, True), ids=("second without gradients", "second with gradients"))
@pytest.mark.parametrize("captured", ORDERS, ids=ORDERS.get)
@pytest.mark.parametrize("output", OUTPUTS, ids=OUTPUTS.get)
def test_gradients_are_those_of_the_plain_model(qwen3, output, captured, second_with_gradients, reentrant, how):
    options = output, captured, second_with_gradients
    expected = two_passes(model_of(output, reentrant), *options, input_ids=TOKENS)
    found = two_passes(install(qwen3, model_of(output, reentrant), how), *options, input_ids=TOKENS)
    found.assert_same(expected, 10)
    assert len(found.gradients) > 10


@pytest.mark.parametrize("captured", ORDERS, ids=ORDERS.get)
@pytest.mark.parametrize("output", ("router_logits", "attentions"))
def test_passes_over_one_tensor(qwen3, output, captured):
    """The first layer's input is the same tensor in both."""
    steps = []
    for install_layers in (lambda model: model, qwen3.kernelize):
        model = install_layers(model_of(output))
        embedded = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
        steps.append(two_passes(model, output, captured, True, inputs_embeds=embedded))
        steps[-1].gradients["embedded"] = embedded.grad
    steps[1].assert_same(steps[0], 10)


@pytest.mark.parametrize("output", ("router_logits", "attentions"))
def test_a_layer_that_gets_copies_of_its_arguments(qwen3, output):
    """A layer on another device than the one before gets its own copies in each run."""

    def with_copies(module, args, kwargs):
        return args, {**kwargs, "position_embeddings": tuple(angle.clone() for angle in kwargs["position_embeddings"])}

    inputs = {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False, f"output_{output}": True}
    expected = Step(model_of(output), **inputs)
    model = qwen3.kernelize(model_of(output))
    for layer in model.model.layers:
        layer.register_forward_pre_hook(with_copies, with_kwargs=True)
    for captured in (True, False, True):
        found = Step(model, **{**inputs, f"output_{output}": captured})
    found.assert_same(expected, 10)
