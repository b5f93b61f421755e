"""Passes of a training that need no gradients, as DPO's reference between a pass and its backward pass, are replayed, too."""

import contextlib
import copy
import importlib
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.capturing import LAYERS, SHAPE, Rerun, assert_equal, batch, captured, gradients, loss_of, one_family, replays_of, whole

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
@pytest.mark.parametrize("with_gradients", (False, True))
def test_a_weight_that_is_written_to_between_two_layers(package, tiny_model, with_gradients):
    """As a loop does that loads or prunes one layer after the other."""
    model, plain = captured(package, tiny_model())

    def call(m):
        def prune(weight=m.model.layers[1].mlp.up_proj.weight):
            with torch.no_grad():
                weight.mul_(0.9)

        m.zero_grad()
        with torch.set_grad_enabled(with_gradients):
            first, second = m.model.layers[:2]
            forward = vars(second)["forward"]
            vars(second)["forward"] = lambda *args, **kwargs: (prune(), forward(*args, **kwargs))[1]
            loss = loss_of(m)
            vars(second)["forward"] = forward
        return loss

    for _ in range(2):
        with torch.set_grad_enabled(with_gradients):
            loss_of(model)
    assert all(torch.equal(call(model), call(plain)) for _ in range(3))


class Kept(Rerun):
    """A graph that goes on calling the hooks of its recording, as a real one goes on doing what they did."""

    def record(self, function):
        self.hooks = [dict(module._forward_hooks) for module in Kept.modules]
        return super().record(function)

    def replay(self):
        now = [dict(module._forward_hooks) for module in Kept.modules]
        for module, hooks in zip(Kept.modules, self.hooks):
            module._forward_hooks.update(hooks)
        super().replay()
        for module, hooks in zip(Kept.modules, now):
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)


@one_family
@pytest.mark.parametrize("with_gradients", (False, True))
def test_a_hook_that_is_there_for_one_pass(package, tiny_model, monkeypatch, with_gradients):
    """The pass in which it would be recorded runs as before."""
    model, plain = tiny_model(), tiny_model()
    for m in (model, plain):
        package.kernelize(m)
    package.capture(model, *SHAPE)
    if not with_gradients:
        gradients(model), gradients(model)
    monkeypatch.setattr(Kept, "modules", list(model.modules()), raising=False)
    monkeypatch.setattr(importlib.import_module(f"{package.__name__}.shared.hf.capture.capture").GraphPool, "graph", staticmethod(Kept))

    def call(m, steered):
        hook = m.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2) if steered else None
        with torch.set_grad_enabled(with_gradients):
            loss = loss_of(m)
        if hook is not None:
            hook.remove()
        if with_gradients:
            loss.backward()
        return loss.detach()

    for steered in (False, True, False, False):
        with pytest.warns(RuntimeWarning, match="hooks on parts") if steered and with_gradients else contextlib.nullcontext():
            assert torch.equal(call(model, steered), call(plain, steered))


@one_family
def test_layers_without_a_gradient(package, tiny_model):
    """No backward pass comes to them, up to which a second forward pass would run as before."""
    model, plain = tiny_model(), tiny_model()
    for m in (model, plain):
        m.model.requires_grad_(False)
        m.model.norm.requires_grad_(True)
    model, plain = captured(package, model)
    for seed in range(2):
        assert_equal(gradients(model, seed), gradients(plain, seed))
    for m in (model, plain):
        m.zero_grad()
        sum(loss_of(m, seed) for seed in (5, 6)).backward()
    assert torch.equal(model.model.norm.weight.grad, plain.model.norm.weight.grad)


class Doubled(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.mm.default else result


@one_family
def test_within_a_mode(package, tiny_model):
    model, plain = captured(package, tiny_model())
    with torch.no_grad():
        for _ in range(3):
            loss_of(model)
        before = Rerun.replays
        with Doubled():
            found, expected = loss_of(model), loss_of(plain)
    assert torch.equal(found, expected) and Rerun.replays == before, "a graph would run without the mode"


@one_family
def test_their_graphs_are_the_first_to_go(package, tiny_model, monkeypatch):
    """Where the graphs of all sizes take more memory than they may, those of training stay."""
    module = importlib.import_module(f"{package.__name__}.shared.hf.capture.capture")

    class Pool(module.GraphPool):
        def __init__(self, device):
            self.device, self.nbytes = device, 0

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
