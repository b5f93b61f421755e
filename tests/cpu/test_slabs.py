"""No launch reaches further than its 32-bit offsets, whichever of its tensors has the longest strides, and none has more blocks than a
grid: at a small size, with the limits as small. What came of the parts is what one launch gives."""

import importlib
import pkgutil

import pytest
import torch

from tests.ops.common import FP32, leaf, randn
from tests.ops.suite import suite

LIMIT = 1600  # elements
ROWS, N = 9, 40
TABLES = (3, 2, 4, 16)
LABELS = torch.tensor([1, -100, 3, 0, 39, 7, 2, -100, 5])


def rotated(found, dim):
    return torch.cat(found, dim)


def apart(x):
    """The same numbers, whose batch rows begin LIMIT / 2 elements behind each other."""
    flat = x.flatten(1)
    padded = torch.nn.functional.pad(flat, (0, LIMIT // 2 - flat.shape[1]))
    return padded[:, : flat.shape[1]].unflatten(1, x.shape[1:])


# The operation, the shapes of its tensors, those that are differentiated first.
CASES = {
    "general_rms_norm": (lambda ops, x, w: ops.general_rms_norm(x, w, offset=1.0), ((ROWS, N), (N,))),
    "general_add_rms_norm": (lambda ops, x, r, w: sum(ops.general_add_rms_norm(x, r, w, offset=1.0)), ((ROWS, 64), (ROWS, 64), (64,))),
    "layer_norm": (lambda ops, x, w, b: ops.layer_norm(x, w, b), ((ROWS, N), (N,), (N,))),
    "dyt": (lambda ops, x, a, w, b: ops.dyt(x, a, w, b), ((ROWS, N), (1,), (N,), (N,))),
    "poly_norm": (lambda ops, x, w, b: ops.poly_norm(x, w, b), ((ROWS, N), (3,), (1,))),
    "softmax": (lambda ops, x: ops.softmax(x), ((ROWS, N),)),
    "sparsemax": (lambda ops, x: ops.sparsemax(x), ((ROWS, N),)),
    "swiglu": (lambda ops, a, b: ops.swiglu(a, b), ((ROWS, N), (ROWS, N))),
    "geglu": (lambda ops, a, b: ops.geglu(a, b), ((ROWS, N), (ROWS, N))),
    "swiglu_packed": (lambda ops, x: ops.swiglu_packed(x), ((ROWS, 2 * N),)),
    "cross_entropy": (lambda ops, x: ops.cross_entropy(x, LABELS), ((ROWS, N),)),
    "cross_entropy, none": (lambda ops, x: ops.cross_entropy(x, LABELS, reduction="none"), ((ROWS, N),)),
    "cross_entropy, smooth": (lambda ops, x: ops.cross_entropy(x, LABELS, label_smoothing=0.1, lse_square_scale=0.1), ((ROWS, N),)),
    "kl_div": (lambda ops, x, y: ops.kl_div(x, y.detach().abs(), labels=LABELS), ((ROWS, N), (ROWS, N))),
    "jsd": (lambda ops, x, y: ops.jsd(x, y.detach(), LABELS), ((ROWS, N), (ROWS, N))),
    "jsd of logits": (lambda ops, x, y: ops.jsd(x, y.detach(), LABELS, from_logits=True), ((ROWS, N), (ROWS, N))),
    "tvd of logits": (lambda ops, x, y: ops.tvd(x, y.detach(), from_logits=True), ((ROWS, N), (ROWS, N))),
    "partial_rotary": (
        lambda ops, q, k, cos, sin: rotated(ops.partial_rotary(q, k, cos.detach(), sin.detach()), 1),
        ((2, 2, 4, 24), (2, 1, 4, 24), (2, 4, 16), (2, 4, 16)),
    ),
    "rotary_multimodal": (
        lambda ops, q, k, cos, sin: rotated(ops.rotary_multimodal(q, k, cos.detach(), sin.detach(), (2, 3, 3)), 1),
        ((2, 2, 4, 24), (2, 1, 4, 24), TABLES, TABLES),
    ),
    "rotary_complex": (
        lambda ops, q, k, f: rotated(ops.rotary_complex(q, k, torch.polar(torch.ones_like(f), f.detach())), 2),
        ((2, 4, 2, 24), (2, 4, 1, 24), (2, 4, 12)),
    ),
    "neighborhood_attention, k's batch rows apart": (
        lambda ops, q, k, v: ops.neighborhood_attention(q, apart(k), v, 3), ((4, 2, 8, 16),) * 3
    ),
    "neighborhood_attention": (lambda ops, q, k, v: ops.neighborhood_attention(q, k, v, 3), ((4, 2, 8, 16),) * 3),
}


def wide(tensor):
    """The same numbers in rows of which each begins LIMIT / 4 elements behind the one before."""
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
    call, shapes = CASES[name]
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
