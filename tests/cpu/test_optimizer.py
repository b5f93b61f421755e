"""AdamW as an optimizer: what PyTorch's one promises beside its results, which tests/ops/adamw.py compares."""

import copy
import inspect
import io
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.optim.adamw import adamw

from tests.ops.adamw import (
    adamw_exact,
    check_adamw_in_slabs,
    check_adamw_of_a_checkpoint,
    check_adamw_of_shards,
    check_adamw_that_is_not_taken,
    check_that_autograd_notices_adamw,
    small_parameters_too,
)
from tests.ops.common import randn, runtime_of
from tests.tolerances import assert_close

FP32 = torch.float32


@pytest.fixture(params=("pytorch", "kernels"))
def package(request, loaded):
    """In PyTorch, and in the interpreted kernels, which then take parameters of any size."""
    package = loaded if request.param == "pytorch" else request.getfixturevalue("interpreted")
    with small_parameters_too(package):
        yield package


def parameter(*shape, dtype=FP32, seed=0, grad=True):
    found = nn.Parameter(randn(*shape, dtype=dtype, device="cpu", seed=seed))
    if grad:
        found.grad = randn(*shape, dtype=dtype, device="cpu", seed=seed + 1)
    return found


def test_what_no_kernel_takes(interpreted):
    check_adamw_that_is_not_taken(interpreted)


def test_more_elements_than_one_launch_reaches(interpreted):
    check_adamw_in_slabs(interpreted)


@pytest.mark.parametrize("replicated", (False, True), ids=("sharded alike", "gradient replicated"))
def test_shards_of_parameters(interpreted, replicated):
    check_adamw_of_shards(interpreted, replicated)


def test_small_parameters_are_not_worth_a_launch(interpreted):
    backend, module = runtime_of(interpreted).launch.backend, sys.modules[f"{interpreted.__name__}.shared.ops.adamw"]
    params = [parameter(module.SMALLEST // 512, 512), parameter(module.SMALLEST - 1)]
    backend.launched.clear()
    interpreted.AdamW(params).step()
    assert [name.partition("-")[0] for name in backend.launched] == ["adamw"]


def test_checkpoints_go_to_pytorch_and_back(package):
    check_adamw_of_a_checkpoint(package)


def test_a_saved_state_is_that_of_pytorch(package, tmp_path):
    mine, theirs = (maker([parameter(3, 512)]) for maker in (package.AdamW, torch.optim.AdamW))
    for optimizer in (mine, theirs):
        optimizer.step()
    ours, expected = mine.state_dict(), theirs.state_dict()
    assert ours["param_groups"] == expected["param_groups"]
    assert ours["state"].keys() == expected["state"].keys() and ours["state"][0].keys() == expected["state"][0].keys()
    for name, value in expected["state"][0].items():
        assert ours["state"][0][name].dtype == value.dtype and ours["state"][0][name].device == value.device
        assert_close(ours["state"][0][name], value, FP32, name)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    again = package.AdamW([parameter(3, 512)])
    again.load_state_dict(torch.load(buffer, weights_only=True))
    assert again.state_dict()["state"][0]["step"] == 1


@pytest.mark.parametrize("name", ("amsgrad", "maximize", "differentiable"))
def test_what_it_does_not_do_is_refused(package, name):
    """By the constructor, in a later group, and in a checkpoint, before anything is changed."""
    expected = rf"{name} is True, expected False: use torch.optim.AdamW"
    params = [parameter(512, seed=seed) for seed in (0, 2)]
    with pytest.raises(ValueError, match=expected):
        package.AdamW(params, **{name: True})
    with pytest.raises(ValueError, match=expected):
        package.AdamW([{"params": params[:1]}, {"params": params[1:], name: True}])
    optimizer, before = package.AdamW(params[:1]), [p.detach().clone() for p in params]
    optimizer.add_param_group({"params": params[1:]})
    optimizer.param_groups[1][name] = True  # as a checkpoint would set it
    with pytest.raises(ValueError, match=expected):
        optimizer.step()
    assert all(map(torch.equal, params, before))


def test_the_arguments_are_those_of_pytorch(package):
    ours, theirs = (inspect.signature(maker.__init__).parameters for maker in (package.AdamW, torch.optim.AdamW))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [(p.name, p.kind, p.default) for p in theirs.values()]
    defaults = torch.optim.AdamW([parameter(8)], lr=0.1).defaults
    defaults.pop("decoupled_weight_decay", None)  # no argument of PyTorch's either
    assert package.AdamW([parameter(8)], **defaults).defaults["lr"] == 0.1


@pytest.mark.parametrize("options", ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -1.0}), ids=str)
def test_wrong_options_are_refused_as_by_pytorch(package, options):
    with pytest.raises(ValueError, match="Invalid"):
        package.AdamW([parameter(8)], **options)


def test_sparse_gradients_are_refused(package):
    table = nn.Embedding(8, 4, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"\[8, 4\] is sparse, expected a dense one"):
        package.AdamW(table.parameters()).step()


def test_a_closure_is_called_with_gradients(package):
    param = parameter(512, grad=False)

    def closure():
        loss = param.square().sum()
        loss.backward()
        return loss.detach()

    expected = param.detach().square().sum()
    assert torch.equal(package.AdamW([param]).step(closure), expected)
    assert param.grad is not None


def test_autograd_notices_the_step(package):
    check_that_autograd_notices_adamw(package)


def test_the_step_is_left_out_of_a_compiled_function(interpreted):
    """A tracer that saw it would run PyTorch's step in the kernels' place, and mark the groups of a fresh optimizer as capturable."""
    torch._dynamo.reset()
    mine, theirs = parameter(3, 512), parameter(3, 512)
    optimizer, plain = interpreted.AdamW([mine], lr=0.1), torch.optim.AdamW([theirs], lr=0.1)
    backend = runtime_of(interpreted).launch.backend
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(2):
        backend.launched.clear()
        with small_parameters_too(interpreted):
            step()
        plain.step()
        assert len(backend.launched) == 1
    assert_close(mine, theirs, FP32, "compiled steps")
    assert not optimizer.param_groups[0]["capturable"]


def test_a_group_that_comes_later(package):
    found = []
    for maker in (package.AdamW, torch.optim.AdamW):
        params = [parameter(512, seed=seed) for seed in (0, 2)]
        optimizer = maker(params[:1], lr=0.1)
        optimizer.step()
        optimizer.add_param_group({"params": params[1:], "weight_decay": 0.5})
        optimizer.step()
        found.append(params)
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, FP32, "with another group")


def test_one_size_at_several_addresses(interpreted):
    """A launch that was prepared for an aligned parameter must not serve one that is not."""
    base = randn(5 * 1025, dtype=torch.bfloat16, device="cpu")
    params = [nn.Parameter(base[start : start + 1024]) for start in (0, 1025, 2056, 3081)]
    before = [p.detach().clone() for p in params]
    for seed, param in enumerate(params):
        param.grad = randn(1024, dtype=torch.bfloat16, device="cpu", seed=seed)
    zero = torch.zeros(1024)
    with small_parameters_too(interpreted):
        interpreted.AdamW(params, lr=0.1).step()
    for param, was in zip(params, before, strict=True):
        wanted = adamw_exact(was, param.grad, zero, zero, 1, 0.1, (0.9, 0.999), 1e-8, 0.01)
        assert_close(param, wanted[0], torch.bfloat16, "a parameter in the middle of others")


def test_a_schedule_and_hooks(package):
    makers = (package.AdamW, torch.optim.AdamW)
    params = [parameter(3, 512) for _ in makers]
    called = []
    for param, maker in zip(params, makers, strict=True):
        optimizer = maker([param], lr=torch.tensor(0.1), foreach=False)
        optimizer.register_step_post_hook(lambda *args: called.append(args[0]))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            optimizer.step()
            schedule.step()
    assert len(called) == 6
    assert_close(params[0], params[1], FP32, "after a schedule")


def test_parameters_of_several_dtypes_some_without_a_gradient(package):
    shapes = ((torch.bfloat16, (512,)), (FP32, (2, 512)), (torch.float64, (7,)), (torch.float16, (9,)), (FP32, ()))
    mine, theirs = ([parameter(*shape, dtype=dtype, seed=i) for i, (dtype, shape) in enumerate(shapes)] for _ in range(2))
    frozen = parameter(512, grad=False)
    before = frozen.detach().clone()
    package.AdamW([*mine, frozen], lr=0.01).step()
    torch.optim.AdamW(theirs, lr=0.01).step()
    for ours, expected in zip(mine, theirs, strict=True):
        assert_close(ours, expected.double(), ours.dtype, f"{ours.dtype}")
    assert torch.equal(frozen, before)


def test_what_the_optimizer_of_pytorch_is_made_with_is_taken(package):
    optimizer = package.AdamW([parameter(512)], 0.1, (0.8, 0.9), 1e-6, 0.3, foreach=None, fused=True)
    assert isinstance(optimizer, torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.8, 0.9), 1e-6, 0.3)
    assert not group["fused"]


def test_two_runs_give_the_same_bits(package):
    found = []
    for _ in range(2):
        param = parameter(1501, dtype=torch.bfloat16)
        optimizer = package.AdamW([param], lr=0.1)
        for _ in range(2):
            optimizer.step()
        found.append(param)
    assert torch.equal(*found)


@pytest.mark.parametrize("copied_by", (copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))), ids=("copied", "pickled"))
def test_a_copy_goes_on_alone(package, copied_by):
    param = parameter(512)
    optimizer = package.AdamW([param], lr=0.1)
    optimizer.step()
    copied = copied_by(optimizer)
    optimizer.step()
    other = copied.param_groups[0]["params"][0]
    other.grad = param.grad.clone()
    copied.step()
    assert torch.equal(other, param) and other is not param


# ---------------------------------------------------------------- step after step
# From the fourth step on, what the third one launched is launched again (see optimizer.py). What happens in between must be noticed.
SIZES = ((2, 512), (512,), (3, 77), (4, 512), (1024,), (1501,))
BEFORE, AFTER = 5, 5


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
@pytest.mark.parametrize("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_what_happens_between_steps_is_noticed(package, event, capturable):
    found = []
    for maker in (package.AdamW, torch.optim.AdamW):
        params = [parameter(*shape, seed=i) for i, shape in enumerate(SIZES)]
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


@pytest.mark.parametrize("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_steps_on_the_same_parameters_prepare_nothing(interpreted, monkeypatch, capturable):
    """And two of them are not put together anew: also where gradients are new ones at other addresses."""
    launch = runtime_of(interpreted).launch
    params = [parameter(*shape, seed=i) for i, shape in enumerate(SIZES)]
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
    params, expected = ([parameter(*shape, seed=i) for i, shape in enumerate(SIZES)] for _ in range(2))
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
    optimizer = package.AdamW([param])
    for _ in range(BEFORE):
        optimizer.step()
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
    optimizer = package.AdamW([param])
    for _ in range(BEFORE):
        optimizer.step()
    (param.grad if name == "gradient" else optimizer.state[param][name]).resize_(2, 512)
    before = param.detach().clone()
    with pytest.raises(ValueError, match=rf"the {name} of a parameter is of shape \[2, 512\], expected the parameter's shape \[4, 512\]"):
        optimizer.step()
    assert torch.equal(param, before)


def test_steps_are_counted_apart(package):
    """Though they are counted by one addition: whoever writes one writes no other, and a checkpoint holds each."""
    params = [parameter(512, seed=i) for i in (0, 2)]
    optimizer = package.AdamW(params)
    for _ in range(BEFORE):
        optimizer.step()
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
        params = [parameter(*shape, seed=i) for i, shape in enumerate(SIZES)]
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
