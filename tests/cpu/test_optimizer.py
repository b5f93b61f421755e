"""AdamW as an optimizer: what PyTorch's one promises beside its results, which tests/ops/adamw.py compares."""

import inspect
import io
import sys

import pytest
import torch
from torch import nn

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
from tests.optimizing import FP32, in_both_ways, parameter  # noqa: F401
from tests.tolerances import assert_close


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
    optimizer = package.AdamW([parameter(512)], 0.1, (0.8, 0.9), 1e-6, 0.3, foreach=None, fused=True)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.8, 0.9), 1e-6, 0.3)
    assert isinstance(optimizer, torch.optim.AdamW) and not group["fused"]


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


def test_two_runs_give_the_same_bits(package):
    found = []
    for _ in range(2):
        param = parameter(1501, dtype=torch.bfloat16)
        optimizer = package.AdamW([param], lr=0.1)
        for _ in range(2):
            optimizer.step()
        found.append(param)
    assert torch.equal(*found)
