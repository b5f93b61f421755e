"""Every operation on every kind of tensor: the right result, or an error that says what does not fit, and never a launch on a tensor
that is not an ordinary one. An operation takes part by being in tests/op_cases.py."""

import contextlib
import importlib
import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.op_cases import BF16, CASES, FP32, arguments, differentiable, exact_arguments, operations, plain, run
from tests.ops.common import mesh_of_one, randn, runtime_of
from tests.ops.layouts import LAYOUTS
from tests.tolerances import RELATIVE_ERROR, relative_error

ARGUMENTS = [(operation, argument) for operation, shapes in CASES.items() for argument in shapes]
each_argument = pytest.mark.parametrize(("operation", "argument"), ARGUMENTS, ids=["-".join(pair) for pair in ARGUMENTS])
each_operation = pytest.mark.parametrize("operation", CASES)


class Subclass(torch.Tensor):
    """One that adds nothing."""


@pytest.fixture
def kernels(interpreted):
    """Every operation in the interpreted kernels, and `launched`: the names of those that ran."""
    found = operations(interpreted)
    found.launched = runtime_of(interpreted).launch.backend.launched
    found.launched.clear()
    return found


@pytest.fixture(scope="module")
def mesh():
    with mesh_of_one() as found:
        yield found


def upstream_of(results):
    """Numbers that vmap does not call random."""
    return [torch.sin(torch.arange(r.numel()) * 0.7 + i).view(r.shape) for i, r in enumerate(results)]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_near(found, expected, what, dtype=FP32):
    assert len(found) == len(expected), what
    for i, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        mine = whole(mine)
        assert mine.shape == wanted.shape, f"{what} {i}"
        assert relative_error(mine, wanted) <= 6 * RELATIVE_ERROR[dtype], f"{what} {i}"


def leaves_of(operation, found, change, needed):
    """The arguments as `change` makes them, leaves of which those named in `needed` require a gradient."""
    made = {name: change(name, tensor) for name, tensor in found.items()}
    return {name: t if t.requires_grad == (name in needed) else t.detach().requires_grad_(name in needed) for name, t in made.items()}


def step(call, operation, found, change=lambda name, tensor: tensor, needed=None, upstream=lambda tensor: tensor):
    """(results, gradients of the arguments named in `needed`, by default of all that can have one)."""
    needed = differentiable(operation, found) if needed is None else needed
    leaves = leaves_of(operation, found, change, needed)
    results = call(leaves)
    if needed:
        pairs = [(r, g) for r, g in zip(results, upstream_of(results), strict=True) if r.requires_grad]
        torch.autograd.backward([r for r, _ in pairs], [upstream(g.to(r.dtype)) for r, g in pairs])
    return list(results), [leaves[name].grad for name in needed]


def exact_step(operation, found, **options):
    return step(lambda leaves: plain(operation, leaves), operation, exact_arguments(found), **options)


# ---------------------------------------------------------------- kinds that all arguments are of
def parameters(name, tensor):
    return nn.Parameter(tensor, requires_grad=tensor.is_floating_point())


def overlapping(tensor):
    """Rows that begin in the middle of the one before."""
    if tensor.dim() == 1:
        return tensor
    strides = [1]
    for length in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * length if len(strides) > 1 else length // 2)
    return tensor.flatten().as_strided(tensor.shape, strides)


def negated(tensor):
    """Stores the numbers with the other sign in memory."""
    return torch._neg_view(-tensor) if tensor.is_floating_point() else tensor


KINDS = {
    "parameter": parameters,
    "subclass": lambda name, tensor: tensor.as_subclass(Subclass),
    "overlapping": lambda name, tensor: overlapping(tensor) if tensor.is_floating_point() else tensor,
    "negated": lambda name, tensor: negated(tensor),
}
ORDINARY = ("parameter", "overlapping")


@pytest.mark.parametrize("needed", ("all", "none"))
@pytest.mark.parametrize("kind", KINDS)
@each_operation
def test_every_kind_with_numbers_in_memory(kernels, operation, kind, needed):
    found = arguments(operation, FP32)
    needed = differentiable(operation, found) if needed == "all" else []
    results, gradients = step(lambda leaves: run(kernels, operation, leaves), operation, found, KINDS[kind], needed)
    assert kernels.launched or kind not in ORDINARY
    if kind == "subclass":
        assert not kernels.launched and all(type(result) is Subclass for result in results)
    same = {name: KINDS[kind](name, tensor).detach().clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}
    expected, expected_gradients = exact_step(operation, same, needed=needed)
    assert_near(results, expected, "result")
    assert_near(gradients, expected_gradients, "gradient")


@pytest.mark.parametrize("kind", KINDS)
@each_argument
def test_one_argument_of_another_kind(kernels, operation, argument, kind):
    found = arguments(operation, FP32)

    def change(name, tensor):
        return KINDS[kind](name, tensor) if name == argument else tensor

    results, gradients = step(lambda leaves: run(kernels, operation, leaves), operation, found, change)
    found[argument] = change(argument, found[argument]).detach().clone(memory_format=torch.contiguous_format)
    expected, expected_gradients = exact_step(operation, found)
    assert_near(results, expected, "result")
    assert_near(gradients, expected_gradients, "gradient")


@each_operation
def test_an_upstream_gradient_with_its_sign_turned(kernels, operation):
    found = arguments(operation, FP32)
    _, gradients = step(lambda leaves: run(kernels, operation, leaves), operation, found, upstream=negated)
    assert_near(gradients, exact_step(operation, found)[1], "gradient")


# ---------------------------------------------------------------- DTensor
@pytest.mark.parametrize("placement", (Replicate(), Shard(0)), ids=str)
@each_operation
def test_distributed_tensors(kernels, mesh, operation, placement):
    """Where PyTorch's own operations can: a shard of a flat dimension has no view of its parts."""
    found = arguments(operation, FP32)

    def distributed(call):
        change = {"change": lambda name, t: distribute_tensor(t, mesh, [placement]),
                  "upstream": lambda g: distribute_tensor(g, mesh, [Replicate()])}
        return step(call, operation, found, **change)

    try:
        results, gradients = distributed(lambda leaves: run(kernels, operation, leaves))
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):
            distributed(lambda leaves: plain(operation, leaves))
        return
    assert not kernels.launched and all(isinstance(result, DTensor) for result in results)
    expected, expected_gradients = exact_step(operation, found)
    assert_near(results, expected, "result")
    assert_near(gradients, expected_gradients, "gradient")


@each_argument
def test_a_distributed_tensor_beside_others_is_refused_by_torch(kernels, mesh, operation, argument):
    found = arguments(operation, FP32)
    found[argument] = distribute_tensor(found[argument], mesh, [Replicate()])
    with contextlib.suppress(RuntimeError):
        results = run(kernels, operation, found)
        assert_near(results, exact_step(operation, arguments(operation, FP32), needed=[])[0], "result")  # torch may also take it
    assert not kernels.launched


# ---------------------------------------------------------------- tensors without numbers
def assert_alike(found, expected, device):
    for mine, wanted in zip(found, expected, strict=True):
        assert (mine.shape, mine.dtype, mine.device.type) == (wanted.shape, wanted.dtype, device)


@pytest.mark.parametrize("needed", ("all", "none"))
@each_operation
def test_meta_tensors(kernels, loaded_ops, operation, needed):
    found = arguments(operation)
    needed = differentiable(operation, found) if needed == "all" else []

    def to_meta(tensor):
        return tensor.to("meta")

    made = step(lambda leaves: run(kernels, operation, leaves), operation, found, lambda name, t: to_meta(t), needed, to_meta)
    expected = step(lambda leaves: run(loaded_ops, operation, leaves), operation, found, needed=needed)
    assert not kernels.launched
    for mine, wanted in zip(made, expected, strict=True):
        assert_alike(mine, wanted, "meta")


@each_argument
def test_a_meta_tensor_beside_others_is_refused_by_name(kernels, operation, argument):
    found = arguments(operation)
    found[argument] = found[argument].to("meta")
    with pytest.raises(ValueError, match=r" is .+, expected .+") as error:
        run(kernels, operation, found)
    assert re.match("|".join(map(re.escape, CASES[operation])), str(error.value)) and "meta" in str(error.value)
    assert not kernels.launched


@pytest.mark.parametrize("needed", ("all", "none"))
@pytest.mark.parametrize("arguments_are", ("fake", "real", "both"))
@each_operation
def test_fake_tensors(kernels, loaded_ops, operation, needed, arguments_are):
    """Arguments that are fake, real ones under the mode, and some of each, as inputs are beside real weights."""
    found = arguments(operation)
    needed = differentiable(operation, found) if needed == "all" else []
    expected = step(lambda leaves: run(loaded_ops, operation, leaves), operation, found, needed=needed)
    mode, first = FakeTensorMode(allow_non_fake_inputs=True), next(iter(found))

    def change(name, tensor):
        fake = arguments_are == "fake" or (arguments_are == "both" and name == first)
        return mode.from_tensor(tensor) if fake else tensor

    leaves = leaves_of(operation, found, change, needed)
    with mode:
        results = run(kernels, operation, leaves)
        if needed:
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    assert not kernels.launched
    assert_alike(results, expected[0], "cpu")
    assert_alike([leaves[name].grad for name in needed], expected[1], "cpu")


# ---------------------------------------------------------------- transforms
def of_named(call, operation, found):
    """(function of the tensors that can have a gradient, those)"""
    names = differentiable(operation, found)

    def function(*tensors):
        return tuple(call({**found, **dict(zip(names, tensors, strict=True))}))

    return function, tuple(found[name] for name in names)


def by_vjp(function, tensors):
    results, pull = torch.func.vjp(function, *tensors)
    return [*results, *pull(tuple(g.to(r.dtype) for g, r in zip(upstream_of(results), results, strict=True)))]


def by_grad(function, tensors):
    def total(*tensors):
        results = function(*tensors)
        return sum((r * g.to(r.dtype)).sum() for r, g in zip(results, upstream_of(results), strict=True))

    return torch.func.grad(total, tuple(range(len(tensors))))(*tensors)


def tangents_of(tensors):
    return tuple(randn(*t.shape, dtype=t.dtype, device="cpu", seed=30 + i) for i, t in enumerate(tensors))


def by_jvp(function, tensors):
    results, changes = torch.func.jvp(function, tensors, tangents_of(tensors))
    return [*results, *changes]


def by_dual_numbers(function, tensors):
    with forward_ad.dual_level():
        results = function(*map(forward_ad.make_dual, tensors, tangents_of(tensors)))
        unpacked = [forward_ad.unpack_dual(result) for result in results]
        return [*[u.primal for u in unpacked], *[u.tangent for u in unpacked]]


def by_vmap(function, tensors):
    first, *others = tensors
    return torch.func.vmap(function, in_dims=(0, *(None for _ in others)))(torch.stack((first, 2 * first)), *others)


def by_vmap_of_gradients(function, tensors):
    first, *others = tensors
    return torch.func.vmap(lambda *t: by_grad(function, t), in_dims=(0, *(None for _ in others)))(torch.stack((first, 2 * first)), *others)


@pytest.mark.parametrize("transform", (by_vjp, by_grad, by_jvp, by_dual_numbers, by_vmap, by_vmap_of_gradients), ids=lambda f: f.__name__)
@each_operation
def test_transforms_of_functions(kernels, operation, transform):
    found = arguments(operation, FP32)
    mine = transform(*of_named(lambda leaves: run(kernels, operation, leaves), operation, found))
    assert not kernels.launched
    assert_near(mine, transform(*of_named(lambda leaves: plain(operation, leaves), operation, exact_arguments(found))), transform.__name__)


@each_operation
def test_after_a_transform_the_kernels_run_again(kernels, operation):
    found = arguments(operation)
    by_grad(*of_named(lambda leaves: run(kernels, operation, leaves), operation, found))
    assert not kernels.launched
    run(kernels, operation, found)
    assert kernels.launched


# ---------------------------------------------------------------- experts, whose ids decide what is computed
def experts_call(package, gpt_oss: bool):
    """(function of hidden, scores and the weights, those in float64): GPT-OSS's experts, or Qwen3's; some ids are no expert's."""
    tokens, hidden, width, experts, top_k = 5, 32, 16, 6, 3
    ids = torch.arange(tokens * top_k).view(tokens, top_k) * 5 % (experts + 1)
    first, second = (experts, 2 * width, hidden), (experts, hidden, width)
    if gpt_oss:
        first, second = (experts, hidden, 2 * width), (experts, width, hidden)
    shapes = [(tokens, hidden), (tokens, top_k), first, second] + gpt_oss * [(experts, 2 * width), (experts, hidden)]
    options = {"transposed": gpt_oss, "interleaved": gpt_oss, "alpha": 1.702 * gpt_oss, "limit": 7.0}

    def call(hidden, scores, *weights):
        return (package.experts(hidden, ids.to(hidden.device), scores, *weights, **options),)

    return call, tuple(randn(*shape, dtype=torch.float64, device="cpu", seed=i) for i, shape in enumerate(shapes))


@pytest.mark.parametrize("gpt_oss", (True, False), ids=("gpt_oss", "qwen3"))
def test_experts_under_transforms_give_the_gradients_of_the_eager_ones(loaded, gpt_oss):
    call, tensors = experts_call(loaded, gpt_oss)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    results = call(*leaves)
    torch.autograd.backward(results, [g.double() for g in upstream_of(results)])
    assert_near(by_vjp(call, tensors), [*results, *[leaf.grad for leaf in leaves]], "by_vjp")
    primal, change = by_jvp(call, tensors)
    assert_near([primal], results, "by_jvp")
    small = 1e-6
    moved = [tensor + small * tangent for tensor, tangent in zip(tensors, tangents_of(tensors), strict=True)]
    assert relative_error(change, (call(*moved)[0] - results[0]) / small) <= 1e-3
    assert_near(by_vmap(call, tensors)[0].unbind(), [results[0], call(2 * tensors[0], *tensors[1:])[0]], "by_vmap")


@pytest.mark.parametrize("gpt_oss", (True, False), ids=("gpt_oss", "qwen3"))
def test_experts_of_tensors_without_numbers(loaded, gpt_oss):
    call, tensors = experts_call(loaded, gpt_oss)
    leaves = [tensor.to("meta").requires_grad_() for tensor in tensors]
    call(*leaves)[0].sum().backward()
    assert_alike([leaf.grad for leaf in leaves], tensors, "meta")
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    with FakeTensorMode(allow_non_fake_inputs=True):
        call(*leaves)[0].sum().backward()
    assert_alike([leaf.grad for leaf in leaves], tensors, "cpu")


# ---------------------------------------------------------------- the column sum, which takes what operations have made
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", (0, 1, 600))
def test_a_column_sum_of_any_layout_is_right_or_refused(interpreted, rows, layout):
    arrays = importlib.import_module(f"{interpreted.__name__}.shared.ops.arrays")
    partial = layout(randn(rows, 37, dtype=FP32, device="cpu"))
    for dtype in (FP32, BF16, torch.float16):
        try:
            found = arrays.column_sum(partial, dtype)
        except runtime_of(interpreted).launch.PromiseError as error:
            assert re.search("partial (has stride|is expanded|has length 0 in dimension 0, expected at least 1)", str(error))
            assert rows == 0 or not partial.is_contiguous()
        else:
            assert_near([found], [partial.double().sum(0)], f"{rows} rows", dtype)
