"""AdamW beside PyTorch's fused one on the same GPU."""

import copy
import sys

import pytest
import torch

from tests.ops.adamw import small_parameters_too
from tests.ops.common import FLOATS, randn
from tests.tolerances import RELATIVE_ERROR, assert_close, relative_error

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
SHAPES = ((4096, 1024), (4096,), (128,), (1501,), (3, 77), (2, 512), (1024,), (5, 512))


@pytest.fixture
def pytorch_steps_too():
    """For a test in which PyTorch may step what no kernel takes."""


@pytest.fixture(autouse=True)
def kernels_run(ops, monkeypatch, request):
    """Small parameters too, and PyTorch's step must not be what was tested."""

    def fail(*args, **options):
        raise AssertionError("the step ran in PyTorch")

    if "pytorch_steps_too" not in request.fixturenames:
        module = sys.modules[f"{ops.__name__}.shared.hf.optimizer"]
        monkeypatch.setattr(module, "adamw", fail)
        monkeypatch.setattr(module._Fused, "step", fail)
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
@pytest.mark.parametrize("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_it_does_not_wait_for_the_device(ops, monkeypatch, pytorch_steps_too, smallest, capturable):
    monkeypatch.setattr(sys.modules[f"{ops.__name__}.shared.ops.adamw"], "SMALLEST", smallest)
    params = parameters(torch.bfloat16)
    optimizer = ops.AdamW(params, lr=torch.tensor(0.01, device="cuda") if capturable else 0.01, capturable=capturable)
    train(optimizer, params, 1, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@dtypes
def test_small_parameters_and_what_no_kernel_takes_go_through_the_fused_one(ops, monkeypatch, pytorch_steps_too, dtype):
    """Bit for bit; one parameter is large, one is not contiguous."""
    monkeypatch.setattr(sys.modules[f"{ops.__name__}.shared.ops.adamw"], "SMALLEST", 2**20)
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


def test_what_is_not_capturable_is_not_captured(ops):
    params = parameters(torch.float32)
    optimizer = ops.AdamW(params)
    train(optimizer, params, 1, 0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"it counts its steps on the host. Use AdamW\(capturable=True\)"):
        with torch.cuda.graph(graph):
            optimizer.step()


def test_the_first_step_is_not_captured(ops):
    """Each replay would begin with averages of zero."""
    params = parameters(torch.float32)
    optimizer = ops.AdamW(params, capturable=True)
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"no averages of a parameter yet, expected a step\(\) before"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


def state_of(optimizer, params):
    return [t for p in params for t in (p.detach(), *(optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq", "step")))]


@dtypes
@pytest.mark.parametrize("smallest", (0, 2**20), ids=("in kernels", "small ones in PyTorch"))
@pytest.mark.parametrize("of_tensor", (False, True), ids=("lr", "lr on the device"))
def test_replays_are_eager_steps(ops, monkeypatch, pytorch_steps_too, dtype, smallest, of_tensor):
    """Bit for bit, parameters, averages and counts, with eager steps before, between and after the replays; the learning rate of a tensor
    changes between them."""
    monkeypatch.setattr(sys.modules[f"{ops.__name__}.shared.ops.adamw"], "SMALLEST", smallest)
    found = []
    for captured in (False, True):
        params = [*parameters(dtype), torch.nn.Parameter(torch.ones(7, device="cuda", dtype=torch.float64))]
        grads = [torch.empty_like(p) for p in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        lr = torch.tensor(0.01, device="cuda") if of_tensor else 0.01
        optimizer = ops.AdamW(params, lr=lr, weight_decay=0.1, capturable=True)

        def new_gradients(seed, grads=grads):
            for i, grad in enumerate(grads):
                grad.copy_(randn(*grad.shape, dtype=grad.dtype, device="cuda", seed=seed + i))

        for step in range(4):
            new_gradients(20 * step)
            optimizer.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for step in range(4, 10):
            new_gradients(20 * step)
            if of_tensor:
                lr.mul_(0.7)
            graph.replay() if captured and step != 7 else optimizer.step()
        assert optimizer.state[params[0]]["step"].is_cuda and optimizer.state[params[0]]["step"] == 10
        found.append(state_of(optimizer, params))
    assert all(map(torch.equal, *found))


def trained(ops, captured):
    """The state after some steps of training, all of them eager, or the later ones replays of one graph with all of a step in it."""
    weight, head = (torch.nn.Parameter(randn(*shape, dtype=torch.bfloat16, device="cuda", scale=0.1)) for shape in ((1024,), (512, 1024)))
    x, target = torch.empty(64, 1024, dtype=torch.bfloat16, device="cuda"), torch.arange(64, device="cuda") * 7
    optimizer = ops.AdamW([weight, head], lr=1e-2, capturable=True)

    def step():
        optimizer.zero_grad()
        ops.linear_cross_entropy(ops.rms_norm(x, weight), head, target).backward()
        optimizer.step()

    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for number in range(9):
        if captured and number == 4:
            with torch.cuda.graph(graph):
                step()
        x.copy_(randn(64, 1024, dtype=torch.bfloat16, device="cuda", seed=number))
        if captured and number >= 4:
            graph.replay()
            continue
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
    return state_of(optimizer, (weight, head))


def test_a_whole_training_step_in_a_graph(ops):
    assert all(map(torch.equal, trained(ops, False), trained(ops, True)))


@dtypes
def test_capturable_steps_are_those_of_the_fused_one(ops, dtype):
    found = []
    for maker in (ops.AdamW, torch.optim.AdamW):
        params = parameters(dtype)
        optimizer = maker(params, lr=torch.tensor(0.01, device="cuda"), weight_decay=0.1, capturable=True, fused=True)
        train(optimizer, params, 2, 100)
        found.append(state_of(optimizer, params))
    for ours, theirs in zip(*found, strict=True):
        assert ours.device == theirs.device and ours.dtype == theirs.dtype
        assert relative_error(ours, theirs) <= RELATIVE_ERROR[dtype] + 2e-5


@pytest.mark.parametrize("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_steps_that_are_launched_together_are_steps_alone(ops, monkeypatch, capturable):
    """Bit for bit, on whatever stream."""
    found = []
    for batches in (True, False):
        if not batches:
            monkeypatch.setattr(sys.modules[f"{ops.__name__}.shared.ops.adamw"], "_in_fours", lambda rows: ([i] for i in range(len(rows))))
            monkeypatch.setattr(sys.modules[f"{ops.__name__}.shared.runtime.launch"].Batch, "__call__", lambda *arguments: False)
        params = [*parameters(torch.bfloat16), *parameters(torch.float32)]
        optimizer = ops.AdamW(params, lr=0.01, weight_decay=0.1, capturable=capturable)
        train(optimizer, params, 4, 100)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            train(optimizer, params, 2, 600)
            torch.cuda.current_stream().synchronize()
        train(optimizer, params, 1, 900)
        found.append(state_of(optimizer, params))
    assert all(map(torch.equal, *found))


def saved(optimizer, capturable):
    """A checkpoint to go on from with steps that are counted on the device or not; an optimizer takes that from it."""
    found = copy.deepcopy(optimizer.state_dict())
    for group in found["param_groups"]:
        group["capturable"] = capturable
    return found


@pytest.mark.parametrize("capturable", (False, True), ids=("to one that counts on the host", "to a capturable one"))
def test_a_checkpoint_of_a_capturable_one(ops, capturable):
    """It goes to PyTorch's and comes back."""
    params, expected = parameters(torch.float32), parameters(torch.float32)
    optimizer, theirs = (m(p, lr=0.01, capturable=True) for m, p in ((ops.AdamW, params), (torch.optim.AdamW, expected)))
    train(optimizer, params, 4, 100)
    train(theirs, expected, 4, 100)
    back = torch.optim.AdamW(params, lr=0.01)
    back.load_state_dict(saved(optimizer, capturable))
    train(back, params, 1, 500)
    train(theirs, expected, 1, 500)
    for again in (not capturable, capturable):
        optimizer.load_state_dict(saved(back if again != capturable else optimizer, again))
        train(optimizer, params, 4, 600)
        train(theirs, expected, 4, 600)
        assert optimizer.state[params[0]]["step"].is_cuda == again
    assert optimizer.state[params[0]]["step"] == 13
    for param, wanted in zip(params, expected, strict=True):
        assert relative_error(param, wanted) <= 1e-4


@pytest.mark.parametrize("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_parameters_that_move(ops, pytorch_steps_too, capturable):
    """To the CPU and back, as the same objects."""
    params, expected = parameters(torch.float32), parameters(torch.float32)
    optimizer, theirs = ops.AdamW(params, lr=0.01, capturable=capturable), torch.optim.AdamW(expected, lr=0.01)
    for device in ("cuda", "cpu", "cuda"):
        for mine, each in ((optimizer, params), (theirs, expected)):
            for param in each:
                param.data, param.grad = param.data.to(device), None
            mine.load_state_dict(mine.state_dict())  # which moves the averages
            for step in range(4):
                for i, param in enumerate(each):
                    param.grad = randn(*param.shape, dtype=param.dtype, device=device, seed=10 * step + i)
                mine.step()
    for param, wanted in zip(params, expected, strict=True):
        assert relative_error(param, wanted) <= 1e-4


def test_a_full_step_of_several_gpus_in_one_process(ops):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    params = [torch.nn.Parameter(torch.ones(1024, device=f"cuda:{i}")) for i in range(2)]
    for p in params:
        p.grad = torch.ones_like(p)
    ops.AdamW(params, lr=0.1, weight_decay=0.0).step()
    for p in params:
        assert_close(p, torch.full((1024,), 0.9, dtype=torch.float64), torch.float32, str(p.device))
