"""Every operation with a signature in tests/ops, by name: its arguments at a size where kernels exist, what it computes in plain PyTorch,
and what autograd may rely on."""

import torch
from torch.utils.checkpoint import checkpoint

from tests.ops import collected
from tests.ops.common import randn
from tests.ops.second_runs import selective
from tests.ops.signature import CLASSES, EXPERTS, TOKENS, TOP_K, Operations
from tests.tolerances import RELATIVE_ERROR, relative_error

BF16, FP32 = torch.bfloat16, torch.float32
SIGNATURES = collected("SIGNATURES")
CASES = {name: signature.sized() for name, signature in SIGNATURES.items()}
# Those that the packages for Qwen3 and GPT-OSS have: what their builds are asked for on a GPU.
OF_QWEN3_AND_GPT_OSS = tuple(name for name, signature in SIGNATURES.items() if signature.package is None)


def operations(*packages) -> Operations:
    return Operations(*packages)


# ---------------------------------------------------------------- running them
def arguments(operation, dtype=BF16, tokens=TOKENS, device="cpu"):
    """Tensors for every argument, of order 1, products of order 1."""
    found = {}
    for i, (name, shape) in enumerate(SIGNATURES[operation].sized(tokens).items()):
        scale = shape[1] ** -0.5 if len(shape) > 1 and "weight" in name else 1.0
        found[name] = randn(*shape, dtype=dtype, device=device, seed=i, scale=scale)
    if "target" in found:
        found["target"] = torch.arange(tokens, device=device) % CLASSES
    if "class_weight" in found:
        found["class_weight"] = found["class_weight"].float().abs() + 0.5
    if "expert" in found:
        found["expert"] = expert_ids(tokens, device)
    return found


def expert_ids(tokens, device):
    """[tokens, TOP_K]: different experts for each token; every fifth entry is no expert."""
    number = torch.arange(tokens * TOP_K, device=device).view(tokens, TOP_K)
    return torch.where(number % 5 == 4, EXPERTS, number * 3 % EXPERTS)


def run(ops, operation, found, **options):
    """The results of an operation as a tuple. ops: of `operations`; options: what is no tensor."""
    results = SIGNATURES[operation].call(getattr(ops, operation), found, **options)
    return results if isinstance(results, tuple) else (results,)


def total(operation, ops, *tensors):
    """The sum of an operation's results, of its arguments one after another."""
    return sum(run(ops, operation, dict(zip(CASES[operation], tensors, strict=True))))


def plain(operation, found, **options):
    results = SIGNATURES[operation].formula(**found, **options)
    return results if isinstance(results, tuple) else (results,)


def assert_right(results, expected, dtype, what, factor=3):
    """factor: how many roundings more than one the operations have."""
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert result.shape == wanted.shape, what
        assert relative_error(result, wanted) <= factor * RELATIVE_ERROR[dtype], what


def exact_arguments(found):
    return {name: t.double() if t.is_floating_point() else t for name, t in found.items()}


def differentiable(operation, found) -> list:
    """The names of the arguments that an operation has gradients for."""
    return [name for name in found if name not in SIGNATURES[operation].constant]


def gradients(ops, operation, found, change=lambda name, tensor: tensor):
    """Results, and the gradient of every argument, of tensors that `change` has laid out otherwise."""
    passed = {name: change(name, tensor) for name, tensor in found.items()}
    passed = {name: t.detach().requires_grad_(name not in SIGNATURES[operation].constant) for name, t in passed.items()}
    results = run(ops, operation, passed)
    upstream = [randn(*r.shape, dtype=r.dtype, device=r.device, seed=20 + i) for i, r in enumerate(results)]
    torch.autograd.backward(results, [change("upstream", g) for g in upstream])
    return [*results, *[tensor.grad for tensor in passed.values() if tensor.requires_grad]]


# ---------------------------------------------------------------- what autograd may rely on
def step(ops, operation, found, needed=None, **options):
    """(results, their upstream gradients, gradients by name) of one forward and backward pass. needed: the names of the arguments
    that require a gradient; by default all that can have one."""
    needed = differentiable(operation, found) if needed is None else needed
    leaves = {name: tensor.detach().requires_grad_(name in needed) for name, tensor in found.items()}
    results = run(ops, operation, leaves, **options)
    upstream = [randn(*r.shape, dtype=r.dtype, device=r.device, seed=20 + i) for i, r in enumerate(results)]
    torch.autograd.backward(results, upstream, inputs=[leaves[name] for name in needed])
    return results, upstream, {name: leaf.grad for name, leaf in leaves.items()}


def check_nothing_is_overwritten(ops, operation, dtype, device):
    """Inputs and incoming gradients keep their numbers, and no two results or gradients share memory."""
    found = arguments(operation, dtype, device=device)
    before = {name: tensor.clone() for name, tensor in found.items()}
    leaves = {name: tensor.requires_grad_(name not in SIGNATURES[operation].constant) for name, tensor in found.items()}
    results = run(ops, operation, leaves)
    kept = [result.detach().clone() for result in results]
    upstream = [randn(*r.shape, dtype=r.dtype, device=device, seed=20 + i) for i, r in enumerate(results)]
    given = [gradient.clone() for gradient in upstream]
    torch.autograd.backward(results, upstream, retain_graph=True)
    first = {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}
    torch.autograd.backward(results, upstream)  # adds to what is there
    for name in first:
        assert torch.equal(leaves[name].grad, first[name] + first[name]), f"{operation}: the second gradient of {name}"
    assert all(torch.equal(leaf, before[name]) for name, leaf in leaves.items()), f"{operation} writes into an input"
    assert all(map(torch.equal, upstream, given)), f"{operation} writes into an incoming gradient"
    assert all(map(torch.equal, results, kept)), f"{operation}'s backward writes into its results"
    passed_on = SIGNATURES[operation].passes_on * [results[-1]]
    own = [r for r in results if not any(r is p for p in passed_on)] + [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
    memory = [t.untyped_storage().data_ptr() for t in (*own, *upstream, *leaves.values())]
    assert len(set(memory)) == len(memory), f"{operation}: two tensors share memory"


def check_a_second_backward_pass(ops, operation, dtype, device):
    """With retain_graph the same bits again, and what the first pass gave stays."""
    found = arguments(operation, dtype, device=device)
    leaves = {name: tensor.requires_grad_(name not in SIGNATURES[operation].constant) for name, tensor in found.items()}
    needed = [leaves[name] for name in differentiable(operation, found)]
    results = run(ops, operation, leaves)
    upstream = [randn(*r.shape, dtype=r.dtype, device=device, seed=20 + i) for i, r in enumerate(results)]
    first = torch.autograd.grad(results, needed, upstream, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(results, needed, upstream, retain_graph=True)
    third = torch.autograd.grad(results, needed, upstream)
    assert all(map(torch.equal, first, kept)) and all(map(torch.equal, second, kept)) and all(map(torch.equal, third, kept))


def check_that_one_gradient_alone_is_the_same(ops, operation, dtype, device):
    """Each gradient asked for alone is, but for rounding, what it is among all, and the others are None."""
    found = arguments(operation, dtype, device=device)
    _, _, all_of_them = step(ops, operation, found)
    for name in differentiable(operation, found):
        _, _, alone = step(ops, operation, found, [name])
        found_alone = alone.pop(name)
        assert found_alone is not None, f"{operation}: no gradient of {name} alone"
        error = relative_error(found_alone, all_of_them[name])
        bound = RELATIVE_ERROR[dtype] * SIGNATURES[operation].alone.get(name, 1)
        assert error <= bound, f"{operation}: the gradient of {name} alone has an error of {error:.2e}"
        assert all(gradient is None for gradient in alone.values())


def check_the_same_bits_on_every_run(ops, operation, dtype, device):
    """In memory that is NaN before it is written."""
    found = arguments(operation, dtype, device=device)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        runs = [step(ops, operation, found) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(before)
    for results, _, gradients in runs:
        found = [*results, *filter(lambda g: g is not None, gradients.values())]
        expected = [*runs[0][0], *filter(lambda g: g is not None, runs[0][2].values())]
        assert all(torch.equal(a, b) and torch.isfinite(a).all() for a, b in zip(found, expected, strict=True)), operation


def check_that_a_second_derivative_is_refused(ops, operation, dtype, device):
    """With an incoming gradient that depends on the results, and with one that does not; the gradients are what they are without it."""
    found = arguments(operation, dtype, device=device)
    needed = [found[name].requires_grad_() for name in differentiable(operation, found)]
    results = run(ops, operation, found)
    for total in (sum(result.float().square().sum() for result in results), sum(result.float().sum() for result in results)):
        plain_gradients = torch.autograd.grad(total, needed, retain_graph=True)
        check_first_and_no_second_derivative(operation, torch.autograd.grad(total, needed, create_graph=True), plain_gradients)


def check_first_and_no_second_derivative(operation, gradients, wanted):
    """gradients: of a pass with create_graph=True, each of which has the bits of one without and cannot be differentiated."""
    for gradient, mine in zip(gradients, wanted, strict=True):
        assert torch.equal(gradient, mine), operation
        try:
            gradient.float().sum().backward(retain_graph=True)
        except RuntimeError as error:
            assert "trying to differentiate twice: " in str(error) and "torch.func" in str(error), error
        else:
            raise AssertionError(f"{operation} has a second derivative")


def check_inside_a_selective_checkpoint(ops, operation, dtype, device):
    """The same bits as without one: a result that was kept is not written to, and one that is not computed again is read."""
    found = arguments(operation, dtype, device=device)

    def squares(function):
        leaves = {name: tensor.detach().requires_grad_(name in differentiable(operation, found)) for name, tensor in found.items()}
        results = function(lambda: [result * result for result in run(ops, operation, leaves)])  # which reads every result again
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        return [*results, *[leaves[name].grad for name in differentiable(operation, found)]]

    kept = squares(lambda call: checkpoint(call, use_reentrant=False, context_fn=selective))
    assert all(map(torch.equal, kept, squares(lambda call: call()))), operation


AUTOGRAD_CHECKS = (
    check_inside_a_selective_checkpoint,
    check_nothing_is_overwritten,
    check_a_second_backward_pass,
    check_that_one_gradient_alone_is_the_same,
    check_the_same_bits_on_every_run,
    check_that_a_second_derivative_is_refused,
)
