"""Checkpointed layers are captured: the forward graph keeps their inputs, and the backward graph runs them again, in the same bits."""

import functools
import importlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmark.nf4 import in_nf4
from tests.capturing import (
    LAYERS,
    SHAPE,
    assert_equal,
    batch,
    captured,
    check_two_forward_passes,
    compare,
    gradients,
    loss_of,
    one_family,
    replays_of,
    whole,
)

NOT_REENTRANT = {"use_reentrant": False}


def enable(*models, **options):
    for model in models:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={**NOT_REENTRANT, **options})


@pytest.mark.parametrize("kernelized", (True, False))
def test_checkpointed_layers_have_the_same_bits(package, tiny_model, kernelized):
    model, plain = tiny_model(), tiny_model()
    enable(model, plain)
    if kernelized:
        package.kernelize(model), package.kernelize(plain)
    package.capture(model, *SHAPE)
    for seed, graphs in enumerate((0, whole(), whole(), whole())):
        assert compare(model, plain, seed) == graphs
    for m in (model, plain):  # accumulated
        m.zero_grad()
        for seed in range(3):
            loss_of(m, seed).backward()
    assert_equal(*({name: parameter.grad for name, parameter in m.named_parameters()} for m in (model, plain)))


@one_family
@pytest.mark.parametrize("kept", (False, True))
def test_kept_attention(package, tiny_model, kept):
    model, plain = tiny_model(attn_implementation="sdpa"), tiny_model(attn_implementation="sdpa")
    for m in (model, plain):
        package.kernelize(m, keep_attention=kept).set_attn_implementation("bastile")
    enable(model, plain)
    package.capture(model, *SHAPE)
    mask = torch.ones(SHAPE, dtype=torch.int64)
    for seed in range(4):
        mask[1, 4 + seed :] = 0
        for options in ({}, {"attention_mask": mask.clone()}):
            assert compare(model, plain, seed, **options) == (0 if seed == 0 else whole())


@one_family
def test_attention_that_is_kept_runs_once(package, tiny_model, monkeypatch):
    """In graphs, too: the forward graph keeps what it returned for the backward graph."""
    module = importlib.import_module(f"{package.__name__}.shared.ops.attention")
    name, counts = "attention_forward", []
    original = getattr(module, name)
    mask = torch.ones(SHAPE, dtype=torch.int64)
    mask[1, 4:] = 0
    for kept in (False, True):
        model, calls = tiny_model(attn_implementation="sdpa"), []
        package.kernelize(model, keep_attention=kept).set_attn_implementation("bastile")
        enable(model)
        package.capture(model, *SHAPE)
        gradients(model, 0, attention_mask=mask)
        gradients(model, 1, attention_mask=mask)
        monkeypatch.setattr(module, name, lambda *args, calls=calls: (calls.append(1), original(*args))[1])
        gradients(model, 2, attention_mask=mask)
        counts.append(len(calls))
    assert counts == [2 * LAYERS, LAYERS]


@one_family
@pytest.mark.parametrize("bits", (16, 4))
def test_lora_without_dropout(package, tiny_model, bits):
    from peft import LoraConfig, get_peft_model

    def adapted():
        torch.manual_seed(3)
        model = tiny_model()
        if bits == 4:
            pytest.importorskip("bitsandbytes")
            model = in_nf4(model, "cpu")
        enable(model)
        return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0))

    model, plain = adapted(), adapted()
    package.kernelize(model), package.kernelize(plain)
    package.capture(model, *SHAPE)
    for seed, graphs in enumerate((0, whole(), whole())):
        assert compare(model, plain, seed) == graphs


@one_family
def test_dropout_is_refused_aloud(package, tiny_model):
    """The second run would draw other numbers than the first."""
    model = tiny_model(attention_dropout=0.5)
    enable(model)
    package.capture(package.kernelize(model), *SHAPE)
    gradients(model)
    with pytest.warns(RuntimeWarning, match="checkpointed layer draws random numbers"):
        assert replays_of(lambda: gradients(model)) == 0
    row = next(row for row in package.explain(model).rows if "captured" in row.part)
    assert not row.fused and "draws random numbers" in row.reason


def offloading(function, *args, **kwargs):
    return checkpoint(function, *args, **kwargs)


@one_family
@pytest.mark.parametrize(("functions", "match"), (
    (functools.partial(checkpoint, use_reentrant=True), "is reentrant"),
    (functools.partial(offloading, use_reentrant=False), "not PyTorch's alone"),
    (functools.partial(checkpoint, use_reentrant=False, context_fn=torch.utils.checkpoint.noop_context_fn), "the option context_fn"),
), ids=("reentrant", "another function", "selective"))
def test_other_checkpoints_are_refused_aloud(package, tiny_model, functions, match):
    model, plain = captured(package, tiny_model())
    for m in (model, plain):
        m.enable_input_require_grads()
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs=NOT_REENTRANT)
        for layer in m.model.layers:
            layer._gradient_checkpointing_func = functions
    with pytest.warns(RuntimeWarning, match=match):
        assert [compare(model, plain, seed) for seed in range(3)] == [0, 0, 0]
    row = next(row for row in package.explain(model).rows if "captured" in row.part)
    assert not row.fused or row.reason == ""


@one_family
def test_checkpoints_in_host_memory_are_refused_aloud(package, tiny_model):
    model, plain = (package.kernelize(tiny_model(), offload=True) for _ in range(2))
    enable(model, plain)
    package.capture(model, *SHAPE)
    with pytest.warns(RuntimeWarning, match=r"checkpoints go to the host's memory \(offload\)"):
        assert [compare(model, plain, seed) for seed in range(3)] == [0, 0, 0]
    row = next(row for row in package.explain(model).rows if "captured" in row.part)
    assert not row.fused and row.code == "checkpointing" and "offload" in row.advice


@one_family
def test_checkpoints_that_are_switched_on_and_off(package, tiny_model):
    model, plain = captured(package, tiny_model())
    for switch in (enable, lambda *models: [model.gradient_checkpointing_disable() for model in models]) * 2:
        switch(model, plain)
        assert [compare(model, plain, seed) for seed in range(20)][-1] == whole()


@one_family
def test_checkpoints_that_are_off_between_two_passes(package, tiny_model):
    """As in the reference pass of TRL's trainers: transformers makes another function for the same checkpoints, and nothing is recorded."""
    model, plain = tiny_model(), tiny_model()
    enable(model, plain)
    package.capture(package.kernelize(model), *SHAPE), package.kernelize(plain)
    for seed in range(10):
        assert compare(model, plain, seed) == (whole() if seed else 0)
        for m in (model, plain):
            m.gradient_checkpointing_disable()
            with torch.no_grad():
                loss_of(m, seed)
        enable(model, plain)
    enable(model, plain, determinism_check="none")  # other checkpoints, which are recorded
    assert [compare(model, plain, seed) for seed in range(3)] == [0, whole(), whole()]


@one_family
def test_every_second_layer_is_checkpointed(package, tiny_model):
    model, plain = (package.kernelize(tiny_model(num_hidden_layers=4)) for _ in range(2))
    enable(model, plain)
    for m in (model, plain):
        for number, layer in enumerate(m.model.layers):
            layer.gradient_checkpointing = number % 2 == 0
    package.capture(model, *SHAPE)
    for seed, graphs in enumerate((0, whole(4), whole(4))):
        assert compare(model, plain, seed) == graphs


@one_family
@pytest.mark.parametrize("layers", (False, True))
def test_a_checkpoint_around_the_model_keeps_it_off(package, tiny_model, layers):
    """Its second run saves what a replay in its first one did not save."""
    model, plain = captured(package, tiny_model())
    if layers:
        enable(model, plain)

    def run(m):
        m.zero_grad()
        embedded = m.model.embed_tokens(batch(5))
        hidden = checkpoint(lambda x: m.model(inputs_embeds=x, use_cache=False).last_hidden_state, embedded, use_reentrant=False)
        hidden.square().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in m.named_parameters() if parameter.grad is not None}

    with pytest.warns(RuntimeWarning, match="packed by hooks"):
        assert replays_of(lambda: assert_equal(run(model), run(plain))) == 0


@one_family
def test_evaluation_between_steps(package, tiny_model):
    model, plain = tiny_model(), tiny_model()
    enable(model, plain)
    package.kernelize(model), package.kernelize(plain)
    package.capture(model, *SHAPE)
    for seed in range(4):
        assert compare(model, plain, seed) == (0 if seed == 0 else whole())
        for m in (model, plain):
            m.eval()
        with torch.no_grad():
            assert replays_of(lambda: torch.equal(loss_of(model), loss_of(plain))) == 0
        for m in (model, plain):
            m.train()
        with torch.no_grad():  # of a trainer's reference, the same model
            assert torch.equal(loss_of(model), loss_of(plain))


@one_family
def test_two_forward_passes_before_their_backward_passes(package, tiny_model):
    model, plain = tiny_model(), tiny_model()
    enable(model, plain)
    model, plain = captured(package, model)
    check_two_forward_passes(model, plain)
