"""What the host does in a step of a trainer whose passes are replayed, while the device may wait for it: no walk over modules, one read of
what lies on the device, and few calls for a layer. Counted, not timed."""

import collections
import sys
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.capturing import Rerun, one_family, replays_of, whole
from tests.cpu.capture.test_capture_sizes import padded

pytestmark = one_family
WALKS = ("modules", "children", "named_modules", "named_children", "named_parameters", "_named_members", "apply")  # of torch
READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy")
# By the layers that share a graph: of a layer in a step, of this package's functions and torch's of modules, forward, backward, and what a
# trainer asks. Of 28 layers this is the host's work before the device gets any.
CALLS = {1: 330, 2: 280}


def module_of(package, name):
    return sys.modules[f"{package.__name__}.shared.hf.{name}"]


def recorded(package, tiny_model, layers=2):
    """A model with adapters and checkpoints whose padded batches of one length are recorded."""
    model = tiny_model(num_hidden_layers=layers)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = peft.get_peft_model(package.kernelize(model), peft.LoraConfig(r=2, target_modules="all-linear")).train()
    model.get_base_model().set_attn_implementation("bastile")
    package.capture(model)
    step(model, 0)
    return model


@pytest.fixture
def idle(monkeypatch):
    """From now on graphs compute nothing, as on the host of a device."""

    def begin():
        def replay(self):
            Rerun.replays += 1

        monkeypatch.setattr(Rerun, "replay", replay)

    return begin


def step(model, seed):
    """What Trainer does with a model in a step of two passes."""
    for number in range(2):
        model.train()
        model(**padded(2 * seed + number), use_cache=False).loss.backward()
        assert model.num_parameters(exclude_embeddings=True) > 0
    assert len(list(model.parameters())) > 10
    model.zero_grad()


@pytest.fixture
def walks(package, monkeypatch):
    """Counts walks over modules by their functions' names."""
    found = collections.Counter()

    def counting(owner, name):
        original = getattr(owner, name)

        def counted(module, *args, **kwargs):
            found[name] += bool(module._modules)  # the head alone is no walk
            return original(module, *args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for name in WALKS:
        counting(nn.Module, name)
    counting(module_of(package, "parts.tree"), "modules_of")
    return found


def test_no_walk_over_modules(package, tiny_model, walks, idle, monkeypatch):
    # Torch's own functions are told from a user's by what they were when the package was loaded.
    asked = module_of(package, "capture.asked_each_pass")
    for known, names in (("_OF_TORCH", asked._WALKS), ("_MODES", asked._OF_MODES)):
        monkeypatch.setattr(asked, known, tuple(getattr(nn.Module, name) for name in names))
    model = recorded(package, tiny_model)
    idle()
    step(model, 1)
    walks.clear()
    assert replays_of(lambda: step(model, 3)) == 2 * whole()
    assert not +walks
    model.get_base_model().model.norm.more = nn.Identity()
    model.train()
    assert +walks  # that is how they are noticed


class Reads(TorchFunctionMode):
    """Counts where this package reads what would lie on a device: all but what was copied from there, and what was made of that."""

    __module__ = "torch"  # it changes no result: what a user's mode could change would not run in the package

    def __init__(self, package):
        super().__init__()
        self.folder, self.found, self.on_host = Path(package.__file__).parent, collections.Counter(), {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [each for each in args if isinstance(each, torch.Tensor)]
        name = getattr(func, "__name__", "")
        host = bool(given) and all(id(each) in self.on_host for each in given)
        file = Path(sys._getframe(1).f_code.co_filename)
        if name in READS and given and not host and self.folder in file.parents:
            self.found[f"{file.stem}: {name}"] += 1
        if host or name == "cpu":
            parts = result if isinstance(result, (tuple, list)) else (result,)
            self.on_host.update((id(each), each) for each in parts if isinstance(each, torch.Tensor))
        return result


def test_a_padded_pass_waits_for_the_device_once(package, tiny_model, idle):
    model = recorded(package, tiny_model)
    idle()
    options = padded(9)
    with Reads(package) as reads:
        found = replays_of(lambda: model(**options, use_cache=False).loss.backward())
    assert found == whole()
    of_cpu = {name: n for name, n in reads.found.items() if not name.startswith(("linear_", "cross_entropy"))}  # asked of labels on CPUs
    assert of_cpu == {"padding: cpu": 1}


def calls_of(package, action):
    """How many calls of this package's functions, and of torch's of modules, an action makes."""
    folder, found = str(Path(package.__file__).parent), 0

    def note(frame, event, argument):
        nonlocal found
        if event == "call":
            file = frame.f_code.co_filename
            found += file.startswith(folder) or file == nn.modules.module.__file__

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


def test_few_calls_for_a_layer(package, tiny_model, idle):
    models = [recorded(package, tiny_model, layers) for layers in (2, 6)]
    idle()
    for model in models:
        step(model, 1)
    few, many = (calls_of(package, lambda model=model: step(model, 3)) for model in models)
    assert (many - few) / 4 <= CALLS[Rerun.together]


def test_gradients_that_accumulate_move_after_the_backward_pass(package, tiny_model, idle, monkeypatch):
    """Then the device still works; a forward pass would wait for it. Those that nothing adds to stay where they are."""
    model, moved = recorded(package, tiny_model), []
    multiply = torch._foreach_mul
    monkeypatch.setattr(torch, "_foreach_mul", lambda tensors, factor: moved.append(len(tensors)) or multiply(tensors, factor))
    idle()

    def moved_in(passes):
        """How many gradients each forward pass and each backward pass of a step moves."""
        found = []
        for number in range(passes):
            loss = model(**padded(number), use_cache=False).loss
            found.append(sum(moved))
            moved.clear()
            loss.backward()
            found.append(sum(moved))
            moved.clear()
        model.zero_grad()
        return found

    trained = sum(parameter.requires_grad for parameter in model.parameters())
    assert moved_in(2) == [0, 0, trained, 0]
    assert moved_in(2) == [0, trained, 0, 0]
    assert moved_in(1) == [0, trained]
    assert moved_in(1) == moved_in(1) == [0, 0]
    assert moved_in(2) == [0, 0, trained, 0]
    assert moved_in(3) == [0, trained, 0, 0, 0, 0]
