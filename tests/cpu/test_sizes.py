"""Tensors that reach beyond what 32 bits can count, and more of them than one launch takes, in the interpreted kernels.

Memory that is never touched costs nothing, so rows may lie gigabytes apart. tests/gpu/test_sizes.py has tensors that are full.
"""

import functools
import importlib
import pkgutil

import pytest
import torch

from interpreter import backend
from tests.op_cases import operations
from tests.ops.common import leaf, randn, runtime_of

BF16, FP32 = torch.bfloat16, torch.float32
APART = 2**31 - 8  # elements: the longest stride that a launch takes, and a multiple of 8


def far_apart(tensor):
    """Lays the rows of the first dimension gigabytes apart."""
    rest = tensor[0].numel()
    try:
        memory = torch.empty((tensor.shape[0] - 1) * APART + rest, dtype=tensor.dtype)
    except RuntimeError:
        pytest.skip("this machine promises no more memory than it has")
    return memory.as_strided(tensor.shape, (APART, *tensor[0].contiguous().stride())).copy_(tensor)


@pytest.fixture(autouse=True)
def memory_that_is_not_filled():
    """In deterministic mode torch would write NaN into all of it."""
    assert not torch.are_deterministic_algorithms_enabled()


def numbers(*shape, seed=0, dtype=BF16):
    return randn(*shape, dtype=dtype, device="cpu", seed=seed)


def compare(function, *tensors):
    """The results and gradients of far-apart tensors are those of tensors without gaps, bit for bit."""
    found = []
    for layout in (far_apart, lambda tensor: tensor):
        leaves = [leaf(layout(tensor) if tensor.dim() > 1 else tensor) for tensor in tensors]
        results = function(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        upstream = [layout(numbers(*r.shape, seed=9 + i)) for i, r in enumerate(results)]
        found.append([*results, *torch.autograd.grad(results, leaves, upstream)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("length", (1024, 128, 1001))
def test_rows_of_rms_norm_beyond_2_31_elements(interpreted, length):
    ops = operations(interpreted)
    compare(ops.rms_norm, numbers(3, length), numbers(length, seed=1))


def test_rows_of_add_rms_norm_beyond_2_31_elements(interpreted):
    ops = operations(interpreted)
    compare(ops.add_rms_norm, numbers(3, 1024), numbers(3, 1024, seed=1), numbers(1024, seed=2))


@pytest.mark.parametrize("heads", (8, 3))
def test_tokens_of_rotary_beyond_2_31_elements(interpreted, heads):
    ops, cos, sin = operations(interpreted), numbers(1, 3, 128, seed=5), numbers(1, 3, 128, seed=6)

    def flat(q, k):  # tokens first
        return tuple(x[0] for x in ops.rotary(q[None], k[None], cos, sin, 2))

    compare(flat, numbers(3, heads, 128), numbers(3, heads, 128, seed=1))


def test_tokens_of_attention_beyond_2_31_elements(interpreted):
    """Copies of some heads, or of all, are within reach: the kernels compute it, and not PyTorch, which would take hours."""
    ops = operations(interpreted)
    compare(ops.attention, *(numbers(3, heads, 64, seed=heads) for heads in (4, 2, 2)))


def test_rows_of_experts_beyond_2_31_elements_go_to_pytorch(interpreted, monkeypatch):
    gates, arrays = (importlib.import_module(f"{interpreted.__name__}.shared.ops.{name}") for name in ("expert_gate", "arrays"))
    order, position = torch.tensor([0, 2, 1, 3]), torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)
    x, y, scores, launched = numbers(2, 64), numbers(4, 128), torch.ones(4), []
    for name in ("_rows_kernel", "_sum_kernel", "_swiglu_forward_kernel"):
        run = getattr(gates, name)
        monkeypatch.setattr(gates, name, lambda *arrays, run=run: launched.append(1) or run(*arrays))

    def results():
        gated = gates.gate_forward(y, None, scores, None, gates.Gate(False, 0.0, 0.0))
        return gates.token_rows(x, order, position), gates.token_sum(y, position), gated

    expected = results()
    assert len(launched) == 3
    monkeypatch.setattr(arrays, "REACH", 255)
    assert all(map(functools.partial(torch.allclose, rtol=1e-2, atol=1e-2), results(), expected)) and len(launched) == 3


@pytest.mark.parametrize("options", ({}, {"softcap": 3.0, "label_smoothing": 0.1}), ids=("plain", "options"))
def test_logits_beyond_2_31_elements(interpreted, options, monkeypatch):
    """The chunk's kernels, on a buffer of logits with gaps: the loss of every row, and the gradient in their place."""
    # To look for races it would keep a number for each element of the gaps.
    monkeypatch.setattr(backend, "interpret", functools.partial(backend.interpret, races=False))
    module = importlib.import_module(f"{interpreted.__name__}.shared.ops.cross_entropy")
    logits, target = numbers(3, 4099), torch.tensor([4098, -100, 7])
    found = []
    for layout in (far_apart, torch.clone):
        buffer = layout(logits)
        chunk = module.KernelChunk(buffer, target, None, module.CrossEntropyOptions(**options))
        loss = chunk.loss()
        chunk.gradient(torch.tensor([0.5]))
        found.append((loss, buffer))
    assert all(map(torch.equal, *found)) and not torch.equal(found[1][1], logits)


# ---------------------------------------------------------------- more than one launch takes
def in_parts(package, results_of, limits):
    """Checks that the same calls give the same bits in whole launches and in parts of them. limits: called with True for the parts."""
    launch, found, launches = importlib.import_module(f"{package.__name__}.shared.runtime.launch"), [], []
    for small in (False, True):
        limits(small)
        for kernel in list(launch.tuner.kernels):
            kernel.forget()  # what was prepared without parts
        before = len(launch.backend.launched)
        found.append(results_of())
        launches.append(len(launch.backend.launched) - before)
    for kernel in list(launch.tuner.kernels):
        kernel.forget()
    assert all(map(torch.equal, *found)) and launches[1] > launches[0], launches


def test_more_rows_than_the_largest_grid_go_in_several_launches(interpreted, monkeypatch):
    module, ops = importlib.import_module(f"{interpreted.__name__}.shared.ops.arrays"), operations(interpreted)
    x, weight = leaf(numbers(150, 1024)), leaf(numbers(1024, seed=1))
    projections, norm, tables = (numbers(128, 1024, seed=2),) * 3, numbers(128, seed=3), (numbers(1, 150, 128, seed=4),) * 2

    def results():
        y, total = ops.add_rms_norm(x, x, weight)
        first, *_ = ops.norm_attention_inputs(ops.rms_norm(x, weight), weight, projections, norm, norm, *tables, (1, 150))
        return y, total, first, *torch.autograd.grad((y.sum() + total.sum() + first.sum()), (x, weight))

    in_parts(interpreted, results, lambda small: monkeypatch.setattr(module, "GRID_MAX", (64 if small else 2**24 - 1,)))


def test_more_elements_than_a_flat_launch_takes_go_in_slabs(interpreted, monkeypatch):
    modules = [importlib.import_module(f"{interpreted.__name__}.shared.ops.{name}") for name in ("arrays", "linear_head")]
    ops, target = operations(interpreted), torch.tensor([1, 2, 0])
    gate, up, head = leaf(numbers(3, 1001)), leaf(numbers(3, 1001, seed=1)), leaf(numbers(9, 1001, seed=2))

    def results():
        hidden = ops.swiglu(gate, up)
        loss = 0.5 * ops.linear_cross_entropy(hidden, head, target)
        return hidden, loss, *torch.autograd.grad(loss, (gate, up, head))

    def limits(small):
        for module in modules:
            monkeypatch.setattr(module, "SLAB", 1000 if small else 2**30)

    in_parts(interpreted, results, limits)


TOKENS, EXPERTS, HEADS = 2**21, 1024, 256
LENGTHS = {  # of arrays whose first dimension does not count tokens, or a second one that does
    "blocks": (3, TOKENS),
    ("expert_bias_sum", "out"): (EXPERTS, 8192),
    ("grouped_mm", "weight"): (EXPERTS, 8192, 8192),
    ("grouped_outer", "out"): (EXPERTS, 8192, 8192),
    "bias": (EXPERTS, 8192),
    "logits": (TOKENS, 2**18),
}
# By the number of dimensions. Four are the partial sums of the norms on segments.
DEFAULT = {1: (TOKENS,), 2: (TOKENS, 8192), 3: (TOKENS, HEADS, 128), 4: (2, HEADS, 128, 64)}


def of_many_tokens(kernel, parameter):
    """An array of two million tokens as a parameter of a kernel takes it, without memory."""
    default = DEFAULT[len(parameter.shape)]
    lengths = LENGTHS.get((kernel, parameter.name), LENGTHS.get(parameter.name, default))
    shape = [constant or length for constant, length in zip(parameter.shape, lengths)]
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_two_million_tokens_lie_in_the_first_dimension_of_every_grid(interpreted):
    """The others end at 65535 blocks."""
    launch = runtime_of(interpreted).launch
    ops = importlib.import_module(f"{interpreted.__name__}.shared.ops")
    for module in pkgutil.iter_modules(ops.__path__):  # those of other packages too
        importlib.import_module(f"{ops.__name__}.{module.name}")
    routing = importlib.import_module(f"{ops.__name__}.routing")
    for room in routing._order_kernel.constants("EXPERTS"):  # made when they are first called
        routing._sorting_of(room)
    grids, kernels = [], set()
    # Those of neighborhood attention are made when they are called, and have heads and batch in the other dimensions, which it checks.
    for kernel in launch.tuner.kernels:
        for name in (name for name in kernel.names if "neighborhood" not in name):
            for variant in launch.backend.artifacts.variants(name):
                arrays = [of_many_tokens(name, parameter) for parameter in variant.parameters if parameter.kind == "array"]
                grids.append((variant.name, tuple(kernel.grid(variant.constants, *arrays))))
                kernels.add(name)
    assert kernels == {name for name in launch.backend.artifacts.kernels() if "neighborhood" not in name}
    assert [(name, grid) for name, grid in grids if max((*grid, 1, 1)[1:3]) > 65535] == []
    assert max(grid[0] for _, grid in grids) >= TOKENS


