"""AdamW beside PyTorch's fused one on the same GPU."""

import copy
import sys

import pytest
import torch
from torch.optim.adamw import adamw

from tests.ops.adamw import small_parameters_too
from tests.ops.common import FLOATS, randn
from tests.tolerances import RELATIVE_ERROR, assert_close, relative_error

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
SHAPES = ((4096, 1024), (4096,), (128,), (1501,), (3, 77))


@pytest.fixture(autouse=True)
def kernels_run(ops, monkeypatch):
    """Small parameters too, and PyTorch's step must not be what was tested."""

    def fail(*args, **options):
        raise AssertionError("the step ran in PyTorch")

    monkeypatch.setattr(sys.modules[f"{ops.__name__}.shared.hf.optimizer"], "adamw", fail)
    with small_parameters_too(ops):
        yield


def parameters(dtype):
    return [torch.nn.Parameter(randn(*shape, dtype=dtype, device="cuda", seed=i)) for i, shape in enumerate(SHAPES)]


def train(optimizer, params, steps, seed):
    for step in range(steps):
        for i, param in enumerate(params):
            param.grad = torch.empty_like(param).copy_(randn(*param.shape, dtype=param.dtype, device="cuda", seed=seed + 10 * step + i))
        optimizer.step()


@dtypes
def test_steps_of_the_fused_one(ops, dtype):
    """Two steps from nothing: of what is rounded to half precision a few percent differ, by the last bit. The fused one takes 1 - beta in
    float32, which is off by 1.3e-5 for 0.999."""
    found = []
    for maker in (ops.AdamW, torch.optim.AdamW):
        params = parameters(dtype)
        optimizer = maker(params, lr=0.01, weight_decay=0.1, fused=True)
        train(optimizer, params, 2, 100)
        found.append([t for p in params for t in (p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])])
    for ours, theirs in zip(*found, strict=True):
        assert relative_error(ours, theirs) <= RELATIVE_ERROR[dtype] + 2e-5
        if dtype != torch.float32:
            assert (ours != theirs).float().mean() < 0.1


def test_a_checkpoint_of_the_fused_one(ops):
    """It counts its steps on the device."""
    params, expected = parameters(torch.float32), parameters(torch.float32)
    fused = torch.optim.AdamW(expected, lr=0.01, fused=True)
    train(fused, expected, 2, 100)
    with torch.no_grad():
        for param, done in zip(params, expected, strict=True):
            param.copy_(done)
    optimizer = ops.AdamW(params, lr=0.01)
    optimizer.load_state_dict(copy.deepcopy(fused.state_dict()))  # which would hand the very tensors on
    train(optimizer, params, 2, 500)
    train(fused, expected, 2, 500)
    assert optimizer.state[params[0]]["step"].device.type == "cpu" and optimizer.state[params[0]]["step"] == 4
    for param, wanted in zip(params, expected, strict=True):
        assert relative_error(param, wanted) <= 1e-4
    back = torch.optim.AdamW(params, lr=0.01, fused=True)
    back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(back, params, 1, 900)
    train(fused, expected, 1, 900)
    for param, wanted in zip(params, expected, strict=True):
        assert relative_error(param, wanted) <= 1e-4


@pytest.mark.parametrize("smallest", (0, 2**20), ids=("in kernels", "small ones in PyTorch"))
def test_it_does_not_wait_for_the_device(ops, monkeypatch, smallest):
    monkeypatch.setattr(sys.modules[f"{ops.__name__}.shared.ops.adamw"], "SMALLEST", smallest)
    monkeypatch.setattr(sys.modules[f"{ops.__name__}.shared.hf.optimizer"], "adamw", adamw)
    params = parameters(torch.bfloat16)
    optimizer = ops.AdamW(params)
    train(optimizer, params, 1, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@dtypes
def test_small_parameters_and_what_no_kernel_takes_go_through_the_fused_one(ops, monkeypatch, dtype):
    """Bit for bit; one parameter is large, one is not contiguous."""
    monkeypatch.setattr(sys.modules[f"{ops.__name__}.shared.ops.adamw"], "SMALLEST", 2**20)
    monkeypatch.setattr(sys.modules[f"{ops.__name__}.shared.hf.optimizer"], "adamw", adamw)
    found = []
    for maker in (ops.AdamW, torch.optim.AdamW):
        params = [*parameters(dtype), torch.nn.Parameter(randn(2048, 1024, dtype=dtype, device="cuda").t())]
        params.append(torch.nn.Parameter(torch.ones(7, device="cuda", dtype=torch.float64)))
        optimizer = maker(params, lr=0.01, weight_decay=0.1, fused=True)
        train(optimizer, params, 3, 100)
        found.append(params)
        if maker is ops.AdamW:
            assert [optimizer.state[p]["step"].is_cuda for p in params] == [False, *[True] * (len(params) - 1)]
    for ours, theirs in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.equal(ours, theirs)
    assert relative_error(found[0][0], found[1][0]) <= RELATIVE_ERROR[dtype] + 2e-5


def test_a_compiled_step_runs_the_kernels(ops):
    torch._dynamo.reset()
    params = parameters(torch.float32)
    optimizer, before = ops.AdamW(params), [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    torch.compile(lambda: optimizer.step())()
    assert not optimizer.param_groups[0]["capturable"] and not any(map(torch.equal, params, before))


def test_a_gradient_scaler_skips_steps_that_overflow(ops):
    params = parameters(torch.float32)
    optimizer, scaler = ops.AdamW(params, lr=0.1), torch.amp.GradScaler("cuda", init_scale=8.0)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.full_like(p, float("inf"))
    scaler.scale(torch.ones((), device="cuda"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0 and all(map(torch.equal, params, before))
    for p in params:
        p.grad = torch.full_like(p, 4.0)
    scaler.step(optimizer)
    for p, was in zip(params, before, strict=True):
        assert_close(p, was.double() * (1 - 0.1 * 0.01) - 0.1, torch.float32, "the step after it")


def test_it_cannot_be_captured(ops):
    params = parameters(torch.float32)
    optimizer = ops.AdamW(params)
    train(optimizer, params, 1, 0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph: it counts its steps on the host"):
        with torch.cuda.graph(graph):
            optimizer.step()


def test_a_full_step_of_several_gpus_in_one_process(ops):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    params = [torch.nn.Parameter(torch.ones(1024, device=f"cuda:{i}")) for i in range(2)]
    for p in params:
        p.grad = torch.ones_like(p)
    ops.AdamW(params, lr=0.1, weight_decay=0.0).step()
    for p in params:
        assert_close(p, torch.full((1024,), 0.9, dtype=torch.float64), torch.float32, str(p.device))
