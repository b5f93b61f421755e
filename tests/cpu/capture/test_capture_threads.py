"""A captured model that several threads train has the gradients of one that is not captured: graphs are replayed in one thread only."""

import importlib
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.capturing import SHAPE, Rerun, assert_equal, batch, captured, compare, gradients, loss_of, one_family, replays_of, whole


def started(function):
    """A thread that runs a function, and returns from `end()` what that returned."""
    found = []

    def run():
        try:
            found.append((function(), None))
        except BaseException as error:
            found.append((None, error))

    def end():
        thread.join()
        value, error = found[0]
        if error is not None:
            raise error
        return value

    thread = threading.Thread(target=run)
    thread.end = end
    thread.start()
    return thread


class Meeting(torch.nn.Module):
    """A decoder layer after which something happens once."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.happens = layer, None

    def forward(self, x, **kwargs):
        found, happens = self.layer(x, **kwargs), self.happens
        self.happens = None
        if happens is not None:
            happens()
        return found


@one_family
@pytest.mark.parametrize("state", ("observed", "recorded", "replayed"))
def test_a_second_thread_between_the_layers_of_a_pass(package, tiny_model, state):
    model, plain = (package.kernelize(tiny_model(num_hidden_layers=3)) for _ in range(2))
    package.capture(model, *SHAPE)
    for m in (model, plain):
        m.model.layers[1] = Meeting(m.model.layers[1])
        for seed in range(("observed", "recorded", "replayed").index(state)):
            gradients(m, seed)

    def trained(m):
        """The gradients of a batch of this thread and of one that another thread trains meanwhile."""
        m.model.layers[1].happens = lambda: started(lambda: loss_of(m, 7).backward()).end()
        return gradients(m, 8)

    with pytest.warns(RuntimeWarning, match="a second thread trains the model"):
        found = trained(model)
    assert_equal(found, trained(plain))
    for seed in range(3):
        assert compare(model, plain, seed) == 0
    rows = [row for row in package.explain(model).rows if "captured" in row.part]
    assert [(row.fused, row.reason) for row in rows] == [(False, "a second thread trains the model")] and "one thread" in rows[0].advice


def beside_a_recording(package, monkeypatch, call) -> list:
    """A list that gets the thread in which `call` begins while the next pass is recorded."""
    graphed_layers = importlib.import_module(f"{package.__name__}.shared.hf.capture.graphed_layers")
    run, threads = graphed_layers._run_all, []

    def run_beside_another(*args):
        if not threads:
            threads.append(started(call))
            threads[0].join(timeout=1)
        return run(*args)

    monkeypatch.setattr(graphed_layers, "_run_all", run_beside_another)
    return threads


@one_family
def test_a_second_thread_waits_while_a_pass_is_recorded(package, tiny_model, monkeypatch):
    """The layers hold other parameters then, and gradients of these would be lost."""
    model, plain = (package.kernelize(tiny_model()) for _ in range(2))
    package.capture(model, *SHAPE)
    gradients(model)
    replay, threads = Rerun.replay, beside_a_recording(package, monkeypatch, lambda: loss_of(model, 7).backward())
    monkeypatch.setattr(Rerun, "replay", lambda graph: threads[0].join() or replay(graph))  # which holds other parameters, unlike a graph
    with pytest.warns(RuntimeWarning, match="a second thread trains the model"):
        model.zero_grad()
        loss = loss_of(model, 8)
        threads[0].end()
        loss.backward()
    plain.zero_grad()
    for seed in (7, 8):
        loss_of(plain, seed).backward()
    assert_equal(*({name: parameter.grad for name, parameter in m.named_parameters()} for m in (model, plain)))


@one_family
def test_a_second_thread_waits_while_a_pass_without_gradients_is_recorded(package, tiny_model, monkeypatch):
    model, plain = captured(package, tiny_model())
    with torch.no_grad():
        loss_of(model, 8)
        threads = beside_a_recording(package, monkeypatch, lambda: loss_of(model, 7).backward())
        monkeypatch.setattr(Rerun, "replay", lambda graph: None)  # of that pass, which nothing reads
        model.zero_grad()
        with pytest.warns(RuntimeWarning, match="a second thread trains the model"):
            loss_of(model, 8)
            threads[0].end()
    plain.zero_grad()
    loss_of(plain, 7).backward()
    assert_equal(*({name: parameter.grad for name, parameter in m.named_parameters()} for m in (model, plain)))


@one_family
def test_a_thread_after_another_one(package, tiny_model):
    """Replays what that one has recorded, as it may train no more."""
    model, plain = (package.kernelize(tiny_model()) for _ in range(2))
    package.capture(model, *SHAPE)
    for seed in range(3):
        assert started(lambda seed=seed: compare(model, plain, seed)).end() == (whole() if seed else 0)


@one_family
def test_evaluation_in_a_second_thread_ends_nothing(package, tiny_model):
    model, plain = captured(package, tiny_model())
    with torch.no_grad():
        expected = loss_of(plain)

    def evaluate():
        with torch.no_grad():
            return loss_of(model)

    assert replays_of(lambda: torch.equal(started(evaluate).end(), expected)) == 0
    assert compare(model, plain) == whole()


@one_family
def test_a_pass_within_a_backward_pass(package, tiny_model):
    """Runs as before: gradients that are still to be added up lie where graphs write."""
    model, plain = captured(package, tiny_model())
    found = []
    for m in (model, plain):
        weight, inner = m.model.layers[0].mlp.up_proj.weight, []

        def train_another(gradient, m=m, inner=inner):
            if not inner:
                inner.append(None)
                with torch.enable_grad():
                    loss_of(m, 7).backward()

        handle = weight.register_hook(train_another)
        found.append(gradients(m, 8))
        handle.remove()
    assert_equal(*found)
    assert compare(model, plain) == whole()


@one_family
def test_a_checkpoints_second_run_in_another_thread_ends_nothing(package, tiny_model):
    """Autograd has a thread for each GPU, in which it runs a checkpoint's function again."""
    model, plain = captured(package, tiny_model())
    found = []
    for m in (model, plain):
        m.zero_grad()
        embedded = m.model.embed_tokens(batch(8))
        hidden = checkpoint(lambda x, m=m: m.model(inputs_embeds=x, use_cache=False).last_hidden_state, embedded, use_reentrant=True)
        started(hidden.sum().backward).end()
        found.append({name: parameter.grad for name, parameter in m.named_parameters() if parameter.grad is not None})
    assert_equal(*found)
    assert compare(model, plain) == whole()
