"""The operations of the package for Liger's users with the real cubins, against float64; and what only a GPU shows."""

import importlib

import pytest
import torch

from tests.ops.common import BF16, FLOATS, leaf, randn
from tests.ops.suite import cases_with, check_all_cases, module_of, names, run, sample

pytestmark = pytest.mark.usefixtures("poisoned")
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", names())
def test_operation(suite_ops, name, dtype):
    check_all_cases(suite_ops, name, DEVICE, dtype)


@pytest.mark.parametrize("name", [name for name in names() if hasattr(module_of(name), "check_large")])
def test_large_shapes(suite_ops, name):
    """Many blocks for each multiprocessor, and a last one that is not full."""
    module_of(name).check_large(suite_ops, DEVICE)


@pytest.mark.parametrize("name", cases_with("sample"))
def test_the_host_never_waits_and_every_run_gives_the_same_bits(suite_ops, name):
    call, leaves = sample(suite_ops, name, DEVICE)
    first = run(call, leaves)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run(call, leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


def test_kernels_that_start_early_find_what_the_one_before_wrote(suite_ops, liger, monkeypatch):
    """Has the bits of one after the other, on one input after the other without a pause, in memory that the allocator gives again."""
    launch, driver = (importlib.import_module(f"{liger.__name__}.shared.runtime.{name}") for name in ("launch", "driver"))
    images = [randn(8, 320, 64, 64, dtype=BF16, device=DEVICE, seed=i) * (1 + i) + i for i in range(12)]
    rows = [image.view(-1, 4096)[:2049] for image in images]
    weight, bias = (randn(320, dtype=BF16, device=DEVICE, seed=i) + 1 for i in (20, 21))
    wide, alpha = randn(4096, dtype=BF16, device=DEVICE, seed=22) + 1, torch.ones(1, dtype=BF16, device=DEVICE)
    heads = [image.view(-1)[: 4 * 640 * 4 * 128].view(4, 640, 4, 128).transpose(1, 2) for image in images]
    angles = [randn(3, 4, 640, 128, dtype=BF16, device=DEVICE, seed=i) for i in (23, 24)]

    def rotate(q, k):
        return sum(suite_ops.rotary_multimodal(q, k, *angles, (16, 24, 24)))

    def group_norm(x, weight, bias):
        return suite_ops.group_norm(x, 32, weight, bias)

    def results():
        found = []
        for x in images:
            found += run(group_norm, [leaf(t) for t in (x, weight, bias)])
        for x in rows:
            found += run(suite_ops.layer_norm, [leaf(t) for t in (x, wide, wide)])
            found += run(suite_ops.dyt, [leaf(t) for t in (x, alpha, wide, wide)])
            found += run(suite_ops.general_rms_norm, [leaf(t) for t in (x, wide)])
            found += run(suite_ops.softmax, [leaf(x * 0.5)])  # what it takes has just been written
            found += run(suite_ops.softmax, [leaf(x.reshape(-1)[: 256 * 24576].view(256, 24576) * 0.5)])
            found += run(suite_ops.sparsemax, [leaf(x * 0.5)])
        for q, k in zip(heads, heads[1:]):
            found += run(rotate, [leaf(q * 0.5), leaf(k * 0.5)])
            found += run(suite_ops.neighborhood_attention, [leaf(t * 0.5) for t in (q, k, q)])
        return [t.detach() for t in found]

    early = results()
    for from_architecture in (10**6, driver.EARLY_FROM):
        monkeypatch.setattr(driver, "EARLY_FROM", from_architecture)
        for kernel in launch.tuner.kernels:
            kernel.forget()
        for a, b in zip(early, results(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("before", ("copy", "memset", "another stream"))
def test_a_kernel_starts_early_behind_what_is_no_kernel(suite_ops, before):
    """In a graph and without one, the first kernel of a backward pass waits for whatever wrote its gradient."""
    x, source = (randn(513, 4096, dtype=BF16, device=DEVICE, seed=i) for i in (0, 1))
    x.requires_grad_()
    dy, other = torch.empty_like(source), torch.cuda.Stream()

    def step():
        y = suite_ops.softmax(x)
        if before == "copy":
            dy.copy_(source)
        elif before == "memset":
            dy.zero_()
        else:
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                dy.zero_()
                dy.add_(source)
            torch.cuda.current_stream().wait_stream(other)
        return torch.autograd.grad(y, x, dy)[0]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    y = torch.softmax(x.detach().double(), -1)
    for i in range(20):
        source.copy_(randn(513, 4096, dtype=BF16, device=DEVICE, seed=2 + i))
        d = torch.zeros_like(y) if before == "memset" else source.double()
        wanted = y * (d - (y * d).sum(-1, keepdim=True))
        found = [step()]
        graph.replay()
        for result in (*found, captured):
            assert (result.double() - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.parametrize("name", cases_with("sample"))
def test_a_cuda_graph(suite_ops, name):
    call, leaves = sample(suite_ops, name, DEVICE)
    wanted = [t.detach() for t in run(call, leaves)]  # without its graph, whose leaves would have the backward pass on the default stream
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(call, leaves)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(call, leaves)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", cases_with("sample"))
def test_torch_compile(suite_ops, name):
    """One graph, without a break, and the same numbers but for rounding."""
    call, leaves = sample(suite_ops, name, DEVICE)
    wanted = run(call, leaves)
    torch._dynamo.reset()
    found = run(torch.compile(call, fullgraph=True, backend="aot_eager"), leaves)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
