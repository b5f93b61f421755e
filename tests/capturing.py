"""Captured passes without a GPU: a stand-in runs the function again where a graph would replay it, on the same inputs, and writes the
results to where the first ones are."""

import copy
import importlib
import sys

import pytest
import torch

from tests.models import are_equal

SHAPE = 2, 9


class Rerun:
    """A graph on the CPU."""

    replays = 0
    together = 1

    def record(self, function):
        self.function, self.gradients_on = function, torch.is_grad_enabled()
        self.results = function()
        return self.results

    def replay(self):
        Rerun.replays += 1
        autograd = torch._C._autograd
        hooks = autograd._top_saved_tensors_default_hooks(False)  # of a checkpoint around the replay, which a graph does not know of
        if hooks is not None:
            autograd._pop_saved_tensors_default_hooks()
        with torch.set_grad_enabled(self.gradients_on):
            new = self.function()
        if hooks is not None:
            autograd._push_saved_tensors_default_hooks(*hooks)
        for old, result in zip(*(found if isinstance(found, tuple) else (found,) for found in (self.results, new)), strict=True):
            if old is not None:
                old.data.copy_(result)


class Pool:
    nbytes = 0

    def __init__(self, device):
        self.device = device

    graph = staticmethod(Rerun)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def stand_in(package, monkeypatch):
    """A package's file of captures, with these in the place of graphs."""
    module = importlib.import_module(f"{package.__name__}.shared.hf.capture.capture")
    monkeypatch.setattr(module, "GraphPool", Pool)
    monkeypatch.setattr(module, "can_record", lambda device: True)
    return module


def graphs_of(package, causal_lm):
    """What is captured of a causal LM."""
    return importlib.import_module(f"{package.__name__}.shared.hf.capture.capture").model_of(causal_lm.model.layers[0])


def check_replayed(model, plain, steps):
    """Each of several steps, functions of a model, has the bits of the model that is not captured; the last one is replayed."""
    for step in steps:
        before = Rerun.replays
        assert are_equal(step(model), step(plain))
    assert Rerun.replays > before


def id_of(family):
    return "{}-layers_a_graph={}".format(*family)


QWEN3 = ("qwen3", 1), ("qwen3", 2)
# For tests of what stands between layers, whatever is in them.
one_family = pytest.mark.parametrize("family", QWEN3, ids=id_of, indirect=True)


def replays_of(call):
    """How many graphs ran during a call."""
    before = Rerun.replays
    call()
    return Rerun.replays - before


def batch(seed, shape=SHAPE):
    return torch.randint(1, 199, shape, generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed=0, shape=SHAPE, **options):
    ids = batch(seed, shape)
    return model(input_ids=ids, labels=ids, use_cache=False, **options).loss


def gradients(model, seed=0, **options):
    model.zero_grad()
    loss_of(model, seed, **options).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and found
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def captured(package, model, shape=SHAPE):
    """Both, with their graphs recorded. The other is the same model without."""
    plain = copy.deepcopy(model)
    package.kernelize(plain)
    package.capture(package.kernelize(model), *shape)
    for seed in range(2):
        gradients(model, seed, shape=shape)
    return model, plain


def compare(model, plain, *args, **options):
    """How many graphs ran in a step of a model whose gradients are those of another one."""
    before = Rerun.replays
    assert_equal(gradients(model, *args, **options), gradients(plain, *args, **options))
    return Rerun.replays - before


LAYERS = 2


def whole(layers=LAYERS):
    """The number of graphs of a training step."""
    return 2 * -(-layers // Rerun.together)


def check_two_forward_passes(model, plain):
    """Before their backward passes: the gradients are those of the plain model, and the next pass is replayed."""
    for m in (model, plain):
        m.zero_grad()
        losses = [loss_of(m, seed) for seed in (5, 6)]
        sum(losses).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    assert replays_of(lambda: gradients(model)) == whole()


def functions_called(call):
    """The names of the functions that run during a call."""
    found = set()
    sys.setprofile(lambda frame, event, argument: found.add(frame.f_code.co_name))
    try:
        call()
    finally:
        sys.setprofile(None)
    return found
