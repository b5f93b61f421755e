"""AdamW step after step: from the fourth on, what the third one launched is launched again (see optimizer.py), and what happens in between
must be noticed."""

import copy
import pickle
import sys

import pytest
import torch
from torch.optim.adamw import adamw

from tests.ops.adamw import small_parameters_too
from tests.ops.common import randn, runtime_of
from tests.optimizing import FP32, in_both_ways, parameter  # noqa: F401
from tests.tolerances import assert_close

SIZES = ((2, 512), (512,), (3, 77), (4, 512), (1024,), (1501,))
BEFORE, AFTER = 5, 5
CAPTURABLE = pytest.mark.parametrize("capturable", (False, True), ids=("counted on the host", "capturable"))


def parameters():
    return [parameter(*shape, seed=i) for i, shape in enumerate(SIZES)]


def stepped(optimizer):
    """The optimizer after as many steps as are needed to repeat one."""
    for _ in range(BEFORE):
        optimizer.step()
    return optimizer


def new_gradients(params, step):
    for i, param in enumerate(params):
        if param.requires_grad:
            param.grad = randn(*param.shape, dtype=param.dtype, device="cpu", seed=1000 + 100 * step + i)


def swapped(tensor, new):
    tensor.data = new
    return tensor


def averages(optimizer, param):
    return [optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq")]


def moved(tensor, by):
    """Copies the numbers to an address `by` elements after an aligned one."""
    room = torch.empty(tensor.numel() + by, dtype=tensor.dtype)
    return room[by:].view(tensor.shape).copy_(tensor.detach())


def all_in_float64(optimizer, params):
    for tensor in (params[0], *averages(optimizer, params[0])):
        tensor.data = tensor.data.double()


def shrunk(optimizer, params):
    """To its first row, at the same address."""
    for tensor in (params[3], *averages(optimizer, params[3])):
        tensor.data = tensor.data[:1]


def another_group(optimizer, params):
    params.append(parameter(512, seed=77))
    optimizer.add_param_group({"params": params[-1:], "lr": 0.2})


def frozen(optimizer, params):
    params[1].requires_grad_(False)
    params[1].grad = None


def without_a_gradient(optimizer, params):
    """One step without those of every second parameter."""
    for param in params[::2]:
        param.grad = None
    optimizer.step()


def another_order(optimizer, params):
    optimizer.param_groups[0]["params"].reverse()


def state_of(optimizer, param, **changes):
    optimizer.state[param].update(changes)


EVENTS = {
    "nothing": lambda o, p: None,
    "its own checkpoint": lambda o, p: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "its own checkpoint, not copied": lambda o, p: o.load_state_dict(o.state_dict()),
    "a step replaced": lambda o, p: state_of(o, p[0], step=torch.tensor(9.0)),
    "a step written": lambda o, p: o.state[p[0]]["step"].fill_(40.0),
    "an average replaced": lambda o, p: state_of(o, p[1], exp_avg=torch.ones(512)),
    "an average's memory replaced": lambda o, p: swapped(o.state[p[1]]["exp_avg"], torch.ones(512)),
    "averages transposed": lambda o, p: state_of(o, p[0], exp_avg=o.state[p[0]]["exp_avg"].t().contiguous().t()),
    "an average in float64": lambda o, p: state_of(o, p[0], exp_avg_sq=o.state[p[0]]["exp_avg_sq"].double()),
    "a state emptied": lambda o, p: o.state[p[3]].clear(),
    "all states emptied": lambda o, p: o.state.clear(),
    "a parameter's memory replaced": lambda o, p: swapped(p[0], p[0].data.clone()),
    "a parameter elsewhere": lambda o, p: swapped(p[3], moved(p[3], 3)),
    "a parameter transposed": lambda o, p: swapped(p[0], p[0].data.t().contiguous().t()),
    "another dtype": all_in_float64,
    "a smaller parameter": shrunk,
    "another group": another_group,
    "frozen": frozen,
    "a step without some gradients": without_a_gradient,
    "another order": another_order,
    "another learning rate": lambda o, p: o.param_groups[0].update(lr=0.3),
    "other options": lambda o, p: o.param_groups[0].update(betas=(0.5, 0.6), eps=1e-2, weight_decay=0.4),
    "copied": None,
    "pickled": None,
}


@pytest.mark.parametrize("event", EVENTS)
@CAPTURABLE
def test_what_happens_between_steps_is_noticed(package, event, capturable):
    found = []
    for maker in (package.AdamW, torch.optim.AdamW):
        params = parameters()
        optimizer = maker(params, lr=0.05, weight_decay=0.1, **({"capturable": True} if capturable and maker is package.AdamW else {}))
        for step in range(BEFORE):
            new_gradients(params, step)
            optimizer.step()
        if EVENTS[event] is not None:
            EVENTS[event](optimizer, params)
        else:
            again = copy.deepcopy(optimizer) if event == "copied" else pickle.loads(pickle.dumps(optimizer))
            new_gradients(params, 0)
            optimizer.step()  # which must not change the copy
            optimizer, params = again, again.param_groups[0]["params"]
        for step in range(BEFORE, BEFORE + AFTER):
            new_gradients(params, step)
            optimizer.step()
        found.append((params, optimizer))
    (ours, mine), (expected, theirs) = found
    for param, wanted in zip(ours, expected, strict=True):
        assert param.dtype == wanted.dtype and param.shape == wanted.shape
        assert_close(param, wanted.double(), FP32, f"a parameter {list(param.shape)} after: {event}")
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert_close(mine.state[param][name], theirs.state[wanted][name].double(), FP32, f"{name} after: {event}")


@CAPTURABLE
def test_steps_on_the_same_parameters_prepare_nothing(interpreted, monkeypatch, capturable):
    """And two of them are not put together anew: also where gradients are new ones at other addresses."""
    launch = runtime_of(interpreted).launch
    params = parameters()
    optimizer = interpreted.AdamW(params, capturable=capturable)
    with small_parameters_too(interpreted):
        for _ in range(3):
            optimizer.step()
        launch.backend.launched.clear()
        optimizer.step()
        names = list(launch.backend.launched)
        monkeypatch.setattr(launch.Kernel, "__call__", None)
        launch.backend.launched.clear()
        kept = [param.grad for param in params]  # so that their memory is not taken again
        new_gradients(params, 1)
        optimizer.step()
    assert launch.backend.launched == names and len(names) == len(params) - 3 and kept
    assert [name.partition("-")[0].replace("capturable_", "") for name in names].count("adamw_of_four") == 1


@pytest.mark.parametrize("capturable", (False, True), ids=("switched on", "switched off"))
def test_capturable_after_steps(interpreted, capturable):
    """The next step counts where it should: a graph that held one which counts on the host would count no further."""
    launched = runtime_of(interpreted).launch.backend.launched
    params, expected = parameters(), parameters()
    optimizer, theirs = interpreted.AdamW(params, lr=0.05, capturable=capturable), torch.optim.AdamW(expected, lr=0.05)
    with small_parameters_too(interpreted):
        for step in range(9):
            optimizer.param_groups[0]["capturable"] = capturable != (3 <= step < 6)
            for mine in (params, expected):
                new_gradients(mine, step)
            launched.clear()
            optimizer.step(), theirs.step()
            assert {"capturable" in name for name in launched} == {optimizer.param_groups[0]["capturable"]}, step
    for param, wanted in zip(params, expected, strict=True):
        assert_close(param, wanted.double(), FP32)


def test_a_state_of_another_size_is_never_written_over(package):
    """After steps that are repeated, with the memory of the old size still in its place."""
    param = parameter(4, 512)
    room = param.data
    optimizer = stepped(package.AdamW([param]))
    param.data = room[:1]
    param.grad = None
    param.grad = torch.ones(1, 512)
    before = room.clone(), *[average.clone() for average in averages(optimizer, param)]
    with pytest.raises(ValueError, match=r"the exp_avg of a parameter is of shape \[4, 512\], expected the parameter's shape \[1, 512\]"):
        optimizer.step()
    assert all(map(torch.equal, before, (room, *averages(optimizer, param))))


@pytest.mark.parametrize("name", ("exp_avg", "exp_avg_sq", "gradient"))
def test_what_was_resized_is_noticed(package, name):
    """In its memory, which is where it was."""
    param = parameter(4, 512)
    optimizer = stepped(package.AdamW([param]))
    (param.grad if name == "gradient" else optimizer.state[param][name]).resize_(2, 512)
    before = param.detach().clone()
    with pytest.raises(ValueError, match=rf"the {name} of a parameter is of shape \[2, 512\], expected the parameter's shape \[4, 512\]"):
        optimizer.step()
    assert torch.equal(param, before)


def test_steps_are_counted_apart(package):
    """Though they are counted by one addition: whoever writes one writes no other, and a checkpoint holds each."""
    params = [parameter(512, seed=i) for i in (0, 2)]
    optimizer = stepped(package.AdamW(params))
    optimizer.state[params[0]]["step"] += 3
    saved = optimizer.state_dict()["state"]
    assert [saved[i]["step"].item() for i in (0, 1)] == [BEFORE + 3.0, BEFORE]
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(optimizer.state_dict())  # which takes the very tensors
    theirs.step()
    assert [theirs.state[param]["step"].item() for param in params] == [BEFORE + 4.0, BEFORE + 1]
    optimizer.load_state_dict(theirs.state_dict())
    optimizer.step()
    assert [optimizer.state[param]["step"].item() for param in params] == [BEFORE + 5.0, BEFORE + 2]


def test_a_learning_rate_that_is_a_tensor_may_be_written(package):
    """By what runs in a graph too; the optimizer reads it at each step."""
    lr, found = torch.tensor(0.1), []
    for maker, capturable in ((package.AdamW, True), (package.AdamW, False), (torch.optim.AdamW, False)):
        param = parameter(3, 512)
        optimizer = maker([param], lr=lr.fill_(0.1), capturable=capturable)
        for _ in range(BEFORE):
            lr.mul_(0.5)
            optimizer.step()
        found.append(param)
    assert_close(found[0], found[2].double(), FP32, "capturable")
    assert_close(found[1], found[2].double(), FP32, "counted on the host")


@pytest.mark.parametrize("capturing", (False, True))
def test_the_fused_step_is_that_of_pytorch(loaded, capturing):
    """Bit for bit; on a GPU it takes small parameters. capturing: as while a CUDA graph is captured."""
    module, found = sys.modules[f"{loaded.__name__}.shared.hf.optimizer"], []
    for ours in (True, False):
        params = parameters()
        rows = [(p.data, p.grad, torch.zeros_like(p.data), torch.zeros_like(p.data)) for p in params]
        states = [{"step": torch.tensor(float(i))} for i in range(len(rows))]
        together = module._Fused(range(len(rows)), torch.device("cpu"))
        for _ in range(3):
            if ours:
                together.step([t for row in rows for t in row], states, (0.1, 0.9, 0.99, 1e-3, 0.1), capturing)
            else:
                adamw(
                    *map(list, zip(*rows, strict=True)), [], [state["step"] for state in states], fused=True, amsgrad=False, maximize=False,
                    lr=0.1, beta1=0.9, beta2=0.99, eps=1e-3, weight_decay=0.1,
                )  # fmt: skip
        found.append([*(t for row in rows for t in row), *(state["step"] for state in states)])
    assert all(map(torch.equal, *found))
