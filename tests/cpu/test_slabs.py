"""No launch reaches further than its 32-bit offsets, whichever of its tensors has the longest strides, and none has more blocks than a
grid: at a small size, with the limits as small. What came of the parts is what one launch gives."""

import importlib
import pkgutil

import pytest
import torch

from tests.ops.common import FP32, leaf, randn
from tests.ops.suite import cases_with, suite

LIMIT = 1600  # elements
CASES = cases_with("slabs")


def wide(tensor):
    """Copies the numbers into rows that begin LIMIT / 4 elements apart."""
    if tensor.dim() < 2:
        return tensor
    memory = torch.zeros(*tensor.shape[:-1], LIMIT // 4)
    return memory[..., : tensor.shape[-1]].copy_(tensor)


@pytest.fixture
def limited(interpreted, monkeypatch):
    """The operations with launches that reach over LIMIT elements alone, and that fail where one reaches further."""
    launch = importlib.import_module(f"{interpreted.__name__}.shared.runtime.launch")
    folder = importlib.import_module(f"{interpreted.__name__}.shared.ops")
    for info in pkgutil.iter_modules(folder.__path__):
        module = importlib.import_module(f"{folder.__name__}.{info.name}")
        if hasattr(module, "SLAB"):
            monkeypatch.setattr(module, "SLAB", LIMIT)
    monkeypatch.setattr(launch.Kernel, "__call__", watched(launch.Kernel.__call__))
    return suite(interpreted)


def watched(call):
    def checked(kernel, *arguments):
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                reach = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
                row = 1 + sum((length - 1) * step for length, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
                assert reach <= LIMIT + row, f"{kernel.names[0]} reaches over {reach} elements: {list(tensor.shape)}, {tensor.stride()}"
        return call(kernel, *arguments)

    return checked


def results(call, ops, tensors, place):
    leaves = [leaf(wide(t) if i == place else t) for i, t in enumerate(tensors)]
    y = call(ops, *leaves)
    dy = randn(*y.shape, dtype=FP32, device="cpu", seed=20)
    gradients = torch.autograd.grad(y, leaves, wide(dy) if place == len(tensors) else dy, allow_unused=True)
    return [y.detach(), *[g for g in gradients if g is not None]]


@pytest.mark.parametrize("name", CASES)
def test_launches_reach_as_far_as_their_offsets(limited, all_operations, name):
    call, shapes = CASES[name].call, CASES[name].slabs
    tensors = [randn(*shape, dtype=FP32, device="cpu", seed=i) for i, shape in enumerate(shapes)]
    wanted = results(call, suite(all_operations), tensors, None)
    for place in (None, *(i for i, shape in enumerate(shapes) if len(shape) > 1), len(tensors)):
        for found, mine in zip(results(call, limited, tensors, place), wanted, strict=True):
            torch.testing.assert_close(found, mine, rtol=1e-4, atol=1e-5, msg=lambda text, place=place: f"place {place}: {text}")


@pytest.mark.parametrize("dilation", (1, 2, 3))
def test_blocks_of_neighborhood_attention_fit_into_a_grid(interpreted, all_operations, monkeypatch, dilation):
    """One of its dimensions is the batch times the dilation."""
    ops, most, grids = suite(interpreted), 7, []
    module = ops.neighborhood_attention_module
    launch = importlib.import_module(module.Kernel.__module__)
    blocks = launch.Kernel._blocks
    monkeypatch.setattr(module, "GRID_YZ", most)
    monkeypatch.setattr(launch.Kernel, "_blocks", lambda *args: grids.append(blocks(*args)) or grids[-1])
    for kernel in list(launch.tuner.kernels):  # a launch that was prepared has its grid already
        kernel.forget()
    tensors = [randn(5, 2, 8, 16, dtype=FP32, device="cpu", seed=i) for i in range(3)]

    def call(ops, q, k, v):
        return ops.neighborhood_attention(q, k, v, 3, dilation)

    for one, other in zip(results(call, ops, tensors, None), results(call, suite(all_operations), tensors, None), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert grids and all(max(grid[1:]) <= most for grid in grids), grids
