"""Passes of a training that need no gradients, as DPO's reference between a pass and its backward pass, are replayed, too."""

import copy
import importlib
import threading

import pytest
import torch

from tests.capturing import LAYERS, Rerun, assert_equal, batch, captured, gradients, loss_of, one_family, replays_of, whole

peft = pytest.importorskip("peft")


def forward_graphs() -> int:
    return whole() // 2


def with_adapters(model, **options):
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **options)
    return peft.get_peft_model(model, adapters)


def preference(model, seed: int):
    """A step of DPO: the gradients, and the loss of the reference, which has no adapters."""
    model.zero_grad()
    loss = loss_of(model, seed)
    with torch.no_grad(), model.disable_adapter():
        reference = loss_of(model, seed)
    (loss - reference).square().backward()
    return reference, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@one_family
def test_a_reference_before_the_backward_pass(package, tiny_model):
    model, plain = captured(package, with_adapters(tiny_model()))
    for seed in range(4):
        before = Rerun.replays
        (found, mine), (expected, theirs) = preference(model, seed), preference(plain, seed)
        assert torch.equal(found, expected)
        assert_equal(mine, theirs)
        assert Rerun.replays - before == whole() + (forward_graphs() if seed else 0)
    for m in (model, plain):
        with torch.no_grad():
            for parameter in m.parameters():
                parameter.mul_(1.01)
    assert torch.equal(preference(model, 5)[0], preference(plain, 5)[0])


@one_family
def test_adapters_are_switched_between_two_passes(package, tiny_model):
    """GRPO's old log-probabilities have the adapters of its training, and its reference none, or others."""
    model, plain = captured(package, with_adapters(tiny_model()))
    for m in (model, plain):
        torch.manual_seed(0)
        m.add_adapter("ref", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))

    def losses(m, seed):
        found = [loss_of(m, seed)]
        with m.disable_adapter():
            found.append(loss_of(m, seed))
        m.set_adapter("ref")
        found.append(loss_of(m, seed))
        m.set_adapter("default")
        return torch.stack(found)

    for m in (model, plain):
        gradients(m), gradients(m)
    with torch.no_grad():
        for seed in range(4):
            before = Rerun.replays
            assert torch.equal(losses(model, seed), losses(plain, seed))
            assert Rerun.replays - before == (3 * forward_graphs() if seed else 0)


@one_family
def test_a_result_is_not_overwritten_by_the_next_pass(package, tiny_model):
    """Without a norm after the layers, the caller gets the very tensor that the last one returned."""
    model = tiny_model()
    model.model.norm = torch.nn.Identity()
    model, plain = captured(package, model)
    before = Rerun.replays
    with torch.no_grad():
        kept = [[m.model(input_ids=batch(seed), use_cache=False).last_hidden_state for m in (model, plain)] for seed in range(4)]
    assert Rerun.replays - before == 3 * forward_graphs()
    for found, expected in kept:
        assert torch.equal(found, expected)


@one_family
@pytest.mark.parametrize("what", ("evaluated", "cached", "inference", "dropout", "another thread"))
def test_what_runs_as_before(package, tiny_model, what):
    model = tiny_model()
    if what == "dropout":
        model = with_adapters(model, lora_dropout=0.5)
    model, plain = captured(package, model)

    def call(m, seed):
        torch.manual_seed(seed)
        with torch.inference_mode() if what == "inference" else torch.no_grad():
            return m(input_ids=batch(seed), use_cache=what == "cached").logits

    def all_are_equal():
        for seed in range(3):
            found.append(torch.equal(call(model, seed), call(plain, seed)))

    found: list[bool] = []
    if what == "evaluated":
        model.eval(), plain.eval()
    if what == "another thread":
        other = threading.Thread(target=all_are_equal)
        assert replays_of(lambda: (other.start(), other.join())) == 0
    else:
        assert replays_of(all_are_equal) == 0
    assert found == [True] * 3
    model.train()
    assert replays_of(lambda: gradients(model)) == (2 * LAYERS if what == "dropout" else whole())  # layers that draw share no graph


@one_family
def test_their_graphs_are_the_first_to_go(package, tiny_model, monkeypatch):
    """Where the graphs of all sizes take more memory than they may, those of training stay."""
    module = importlib.import_module(f"{package.__name__}.shared.hf.capture.capture")

    class Pool(module.GraphPool):
        def __init__(self, device):
            self.nbytes = 0

        def __exit__(self, *error):
            self.nbytes += 2**28

    monkeypatch.setattr(module, "GraphPool", Pool)
    model = package.kernelize(tiny_model())
    plain = copy.deepcopy(model)
    package.capture(model, memory=0.6)

    def step(m, tokens):
        with torch.no_grad():
            reference = loss_of(m, 0, (2, tokens))
        m.zero_grad()
        loss_of(m, 0, (2, tokens)).backward()
        return reference, {name: p.grad.clone() for name, p in m.named_parameters()}

    def replays(tokens):
        before = Rerun.replays
        (reference, mine), (expected, theirs) = step(model, tokens), step(plain, tokens)
        assert torch.equal(reference, expected)
        assert_equal(mine, theirs)
        return Rerun.replays - before

    assert [replays(9) for _ in range(4)] == [0, whole(), whole() + forward_graphs(), whole() + forward_graphs()]
    assert [replays(7) for _ in range(3)] == [0, whole() + forward_graphs(), whole()]
    assert replays(9) == whole()
