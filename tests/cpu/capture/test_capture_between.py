"""What a model does between its layers is not captured with them."""

import copy
import warnings

import pytest
import torch

from tests.capturing import (
    LAYERS,
    SHAPE,
    assert_equal,
    batch,
    compare,
    gradients,
    loss_of,
    one_family,
    replays_of,
    whole,
)
from tests.versions import set_checkpointing


class Between(torch.nn.Module):
    """A decoder layer that changes what it hands on, or keeps it, or is left out, as a model's own forward may between its layers."""

    def __init__(self, layer, what):
        super().__init__()
        self.layer, self.what, self.kept = layer, what, None

    def forward(self, x, **kwargs):
        if self.what == "left out":
            return x
        output = self.layer(x, **kwargs)
        self.kept = output if self.what == "kept" else None
        if self.what == "changed":
            return output * 2
        if self.what == "changed in place":
            return output.mul_(2)
        return output


def between(model, number, what):
    """Puts a `Between` in a layer's place, or tells the one that is there."""
    if isinstance(model.model.layers[number], Between):
        model.model.layers[number].what = what
    else:
        model.model.layers[number] = Between(model.model.layers[number], what)


def gradients_with_kept(model, seed):
    """Those of the loss and of what each `Between` keeps."""
    model.zero_grad()
    loss = loss_of(model, seed)
    for layer in model.model.layers:
        if isinstance(layer, Between) and layer.kept is not None:
            loss = loss + layer.kept.square().mean()
            layer.kept = None
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


WHATS = "changed", "changed in place", "kept", "left out"


@one_family
@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("number", range(4))
def test_what_stands_between_layers_when_they_are_looked_at(package, tiny_model, what, number):
    """Layers that do not follow each other at once share no graph."""
    model, plain = (package.kernelize(tiny_model(num_hidden_layers=5)) for _ in range(2))
    package.capture(model, *SHAPE)
    for m in (model, plain):
        between(m, number, what)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for seed in range(5):
            assert_equal(gradients_with_kept(model, seed), gradients_with_kept(plain, seed))


@one_family
@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("number", range(4))
def test_what_comes_between_captured_layers(package, tiny_model, what, number):
    """A model whose forward does something between its layers at some steps only: LayerDrop, say."""
    model, plain = (package.kernelize(tiny_model(num_hidden_layers=5)) for _ in range(2))
    package.capture(model, *SHAPE)
    for m in (model, plain):
        between(m, number, "")
    for seed in range(3):
        found = replays_of(lambda seed=seed: assert_equal(gradients_with_kept(model, seed), gradients_with_kept(plain, seed)))
    assert found == whole(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for seed, now in enumerate(("", what, "", "", what, what, "", "", "")):
            for m in (model, plain):
                between(m, number, now)
            assert_equal(gradients_with_kept(model, seed), gradients_with_kept(plain, seed))


def test_random_numbers_between_layers_share_no_graph(package, tiny_model):
    """With dropout in the attention a layer cannot run again to give the same."""
    model = package.capture(package.kernelize(tiny_model(attention_dropout=0.5)), *SHAPE)
    for seed in range(2):
        gradients(model, seed)
    assert replays_of(lambda: gradients(model)) == 2 * LAYERS


@pytest.mark.parametrize("name", ("position_embeddings", "attention_mask"))
def test_layers_with_arguments_of_their_own_share_no_graph(package, tiny_model, name):
    def own(model):
        class Own(torch.nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.layer = layer

            def forward(self, x, **kwargs):
                cos, sin = kwargs["position_embeddings"]
                mask = torch.zeros(SHAPE[0], 1, SHAPE[1], SHAPE[1])
                mask[..., 0, 1:] = -100.0
                kwargs[name] = {"position_embeddings": (cos * 0.5, sin), "attention_mask": mask}[name]
                return self.layer(x, **kwargs)

        model = package.kernelize(model)
        captured = package.capture(copy.deepcopy(model), *SHAPE)
        for m in (captured, model):
            m.model.layers[1] = Own(m.model.layers[1])
        return captured, model

    model, plain = own(tiny_model())
    for seed in range(3):
        assert_equal(gradients(model, seed), gradients(plain, seed))
    assert replays_of(lambda: gradients(model)) == 2 * LAYERS


@one_family
@pytest.mark.parametrize("number", range(5))
def test_a_change_of_a_later_layer(package, tiny_model, number):
    """The layers in front of it are replayed, those after it run as before, and the next passes are looked at and recorded anew."""
    model, plain = (package.kernelize(tiny_model(num_hidden_layers=5)) for _ in range(2))
    package.capture(model, *SHAPE)
    for seed in range(3):
        gradients(model, seed)
    for m in (model, plain):
        m.model.layers[number].input_layernorm.variance_epsilon = 0.5
    counts = [compare(model, plain, seed) for seed in range(4)]
    assert counts[0] < whole(5) and counts[-1] == whole(5)


def loss_and_change(model, change, checkpointing):
    """Returns the gradients of a pass in which a weight of each layer changes before the backward pass, or the text of the error."""
    set_checkpointing(model, use_reentrant=False) if checkpointing else model.gradient_checkpointing_disable()
    for seed in range(3):
        gradients(model, seed)
    model.zero_grad()
    loss = loss_of(model, 3)
    for layer in model.model.layers:
        change(layer.mlp.up_proj.weight)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def move(weight):
    """Moves the weight to other memory and overwrites the old, as FSDP and offloading do."""
    before = weight.data
    weight.data = before.clone()
    before.fill_(float("nan"))


def write(weight):
    with torch.no_grad():
        weight.mul_(1.25)


def replace(weight):
    weight.data = weight.data * 1.25


@one_family
@pytest.mark.parametrize("change", (move, write, replace))
@pytest.mark.parametrize("checkpointing", (False, True), ids=("kept", "checkpointed"))
def test_weights_that_change_before_the_backward_pass(package, tiny_model, change, checkpointing):
    """The gradients, or the error, are those without graphs; what autograd would compute from two states of a weight is refused."""
    model, plain = (package.kernelize(tiny_model()) for _ in range(2))
    package.capture(model, *SHAPE)
    found, expected = (loss_and_change(each, change, checkpointing) for each in (model, plain))
    if change is replace:
        assert "weights of a captured layer were replaced" in found
    elif isinstance(expected, str):
        assert "modified by an inplace operation" in expected and "modified by an inplace operation" in found
    else:
        assert_equal(found, expected)
    if change is move:
        assert [compare(model, plain, seed) > 0 for seed in range(4)][-1], "captured again"


@one_family
@pytest.mark.parametrize("frozen", (False, True), ids=("trained", "frozen"))
def test_gradients_that_autograd_hands_out(package, tiny_model, frozen):
    """The next backward pass leaves them as they are, also where some weights are asked for, or the input alone."""
    found = []
    for capture in (True, False):
        model = package.kernelize(tiny_model())
        model.requires_grad_(not frozen)
        if capture:
            package.capture(model, *SHAPE)
        for seed in range(4):
            several = []
            for more in range(3):
                ids = batch(seed + more)
                embeds = model.model.embed_tokens(ids).detach().requires_grad_()
                loss = model(inputs_embeds=embeds, labels=ids, use_cache=False).loss
                asked = [embeds] if frozen else [*model.model.layers.parameters()][-1 - more :]
                several += torch.autograd.grad(loss, asked)
        found.append(several)
    for ours, plain in zip(*found, strict=True):
        assert torch.equal(ours, plain)


@one_family
def test_a_frozen_layer_that_is_written_to(package, tiny_model):
    """Its input needs no gradient, so autograd saves none of its weights."""
    found = []
    for capture in (True, False):
        model = package.kernelize(tiny_model())
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        if capture:
            package.capture(model, *SHAPE)
        for seed in range(3):
            gradients(model, seed)
        model.zero_grad()
        loss = loss_of(model, 3)
        write(model.model.layers[0].mlp.up_proj.weight)
        loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None})
    assert_equal(*found)
