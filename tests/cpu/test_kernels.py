"""Every kernel, run by the tile interpreter through its operation, against float64.

The interpreter also notices what a GPU would not say: an index outside an array, a race between blocks, a broken promise.
"""

import sys
from pathlib import Path

import pytest
import torch

from interpreter.backend import InterpreterBackend, forget_launches
from tests.cpu.conftest import assemble_cpu, load
from tests.modes import new_memory_is_nan
from tests.numerics.experts import *  # noqa: F403
from tests.numerics.experts import ROUTES
from tests.numerics.operations import *  # noqa: F403
from tests.numerics.operations import NO_LOGITS
from tests.ops import common, experts, grouped_gemm, linear_cross_entropy, low_rank, quantised, routing
from tests.ops.common import FLOATS, randn, runtime_of
from tests.ops.loss_without_logits import check_evaluation
from tools.kernel_package import package_folders
from tools.targets import operations

PLACE = "interpreter"
ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = {name for folder in package_folders(root=ROOT) for name in operations(folder)}
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
DEVICE = "cpu"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A build of its own, so that the package of the other tests keeps running in PyTorch."""
    return load(assemble_cpu(tmp_path_factory.mktemp("interpreted"), "\n# run by the interpreter\n"))


@pytest.fixture(scope="module")
def backend(package):
    runtime = runtime_of(package)
    runtime.launch.backend = InterpreterBackend(runtime, OPERATIONS)
    return runtime.launch.backend


@pytest.fixture(autouse=True)
def poisoned():
    with new_memory_is_nan():
        yield


@pytest.fixture
def ops(request, package, backend):
    backend.launched.clear()
    yield package
    assert backend.launched or "launched" in request.fixturenames, "the operation ran in PyTorch, not in a kernel"


@pytest.fixture
def own_gemms(ops):
    return ops


@pytest.fixture
def e4m3():
    """The interpreter has it."""


@pytest.fixture
def launched(backend):
    """Compares the kernels that ran, all of them or those of some names, and returns their names in full."""

    def compared(names, among=None):
        ran = {name.partition("-")[0] for name in backend.launched}
        assert names == (ran if among is None else ran & among)
        return backend.launched

    return compared


@pytest.fixture(params=("sm_90", "sm_80"))
def gpu(request, backend, package):
    """An architecture for each shape of the tiles."""
    backend.gpu = request.param
    forget_launches(runtime_of(package))
    yield
    backend.gpu = "sm_90"
    forget_launches(runtime_of(package))


def test_evaluation_of_more_tokens_than_share_a_tile_of_the_weight(ops, launched, gpu):
    """The last group is lower than the others."""
    check_evaluation(ops, DEVICE, torch.bfloat16, 1100, 64, 257)
    launched(NO_LOGITS)


def test_evaluation_in_steps(ops, launched, monkeypatch):
    """What is kept of the logits stays bounded, so many tokens take several launches."""
    loss = sys.modules[f"{ops.__name__}.shared.ops.loss_without_logits"]
    monkeypatch.setattr(loss, "PARTIALS_BYTES", 0)
    monkeypatch.setattr(loss, "TOKENS_A_READING", 64)
    check_evaluation(ops, DEVICE, torch.bfloat16, 150, 64, 300)
    assert len(launched(NO_LOGITS)) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("dtype", "features", "options"),
    (
        (torch.float32, 64, {}),
        (torch.bfloat16, 48, {}),
        (torch.bfloat16, 64, {"softcap": 3.0}),
        (torch.bfloat16, 64, {"label_smoothing": 0.1}),
    ),
    ids=str,
)
def test_evaluation_that_the_kernel_does_not_take(ops, backend, dtype, features, options):
    check_evaluation(ops, DEVICE, dtype, 3, features, 300, bound=dtype, **options)
    assert not any(name.startswith("linear_cross_entropy") for name in backend.launched)


def test_a_frozen_head_and_hidden_states_store_no_logits(ops, launched):
    hidden, weight = (randn(n, 64, dtype=torch.bfloat16, device=DEVICE, seed=n) for n in (5, 40))
    assert not ops.linear_cross_entropy(hidden, weight, torch.arange(5)).requires_grad
    launched(NO_LOGITS)


@dtypes
@pytest.mark.parametrize("classes", (17, 64), ids=str)
def test_gradients_of_the_loss_are_scaled_by_what_arrives(ops, dtype, classes):
    linear_cross_entropy.check_linear_cross_entropy(ops, DEVICE, dtype, 5, 32, classes, upstream=0.25)


def test_many_pairs_of_many_experts_are_sorted_by_pytorch(package, backend, monkeypatch):
    monkeypatch.setattr(sys.modules[f"{package.__name__}.shared.ops.routing"], "COMPARISONS", 43 * 3 * 100 - 1)
    backend.launched.clear()
    routing.check_route(package, DEVICE, 43, 100, 3)
    assert not backend.launched
    routing.check_route(package, DEVICE, 42, 100, 3)
    assert backend.launched


@pytest.mark.parametrize(
    ("dtype", "case"),
    ((torch.float32, low_rank.CASES[0]), (torch.bfloat16, low_rank.MANY), (torch.bfloat16, low_rank.ODD)),
    ids=str,
)
def test_low_rank_adds_that_are_left_to_pytorch(package, backend, dtype, case):
    backend.launched.clear()
    low_rank.check_low_rank_add(package, DEVICE, dtype, **case)
    assert not backend.launched


@pytest.mark.parametrize("view", quantised.VIEWS)
def test_quantised_views(ops, view):
    quantised.check_rows(ops, DEVICE, torch.bfloat16, 32, 96, view=view)
    quantised.check_transposed(ops, DEVICE, torch.bfloat16, 32, 96, view=view)


@pytest.mark.parametrize(("dtype", "columns"), ((torch.float16, 512), (torch.float32, 512), (torch.bfloat16, 20)), ids=str)
def test_what_is_quantised_by_pytorch(package, backend, dtype, columns):
    backend.launched.clear()
    quantised.check_rows(package, DEVICE, dtype, 9, columns, True)
    quantised.check_transposed(package, DEVICE, dtype, 9, columns, True)
    assert not backend.launched
    quantised.check_recoded(package, DEVICE, dtype, 9, columns, True)


@pytest.mark.parametrize(
    ("dtype", "k", "n"),
    ((torch.float32, 24, 40), (torch.bfloat16, 10, 40), (torch.float16, 24, 7), (torch.float64, 24, 40)),
    ids=str,
)
def test_grouped_gemms_that_the_kernels_do_not_take(package, backend, dtype, k, n):
    backend.launched.clear()
    grouped_gemm.check_grouped_gemm(package, DEVICE, dtype, [3, 0, 5, 1], k, n)
    assert not [name for name in backend.launched if name.startswith("grouped")]


def test_more_elements_than_a_kernel_counts_go_elsewhere(package, backend, monkeypatch):
    """The weight and the result of grouped_outer are the largest arrays of all."""
    monkeypatch.setattr(sys.modules[f"{package.__name__}.shared.ops.arrays"], "REACH", 4 * 24 * 40 - 1)
    backend.launched.clear()
    grouped_gemm.check_grouped_gemm(package, DEVICE, torch.bfloat16, [3, 0, 5, 1], 24, 40)
    assert not backend.launched


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("gpt_oss", (True, False))
def test_the_host_does_not_wait_for_the_routing(package, backend, monkeypatch, dtype, gpt_oss):
    """Kernels that do nothing, and an error where a number of a tensor is asked for."""

    def waits(*_):
        raise AssertionError("the host waits for the device")

    leaves, run = experts.experts_run(package, DEVICE, dtype, 37, 24, 64, 4, 2, gpt_oss=gpt_oss)
    launched = set()
    monkeypatch.setattr(backend, "prepare", lambda variant, *_: lambda *_: launched.add(variant.name.partition("-")[0]))
    for name, zeros in (("empty", torch.zeros), ("empty_like", torch.zeros_like)):  # PyTorch reads where rows are; nothing has written it
        monkeypatch.setattr(torch, name, zeros)
    forget_launches(runtime_of(package))
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "nonzero", "cpu", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, waits)
        run().backward(leaves["hidden"].detach())
    forget_launches(runtime_of(package))
    assert {"grouped_mm", "grouped_outer", "token_rows", "token_sum", *ROUTES} <= launched


def test_results_do_not_depend_on_the_order_of_blocks(ops, backend):
    """Blocks of a launch run in any order on a GPU."""
    x, weight = randn(9, 1024, dtype=torch.bfloat16, device=DEVICE), torch.ones(1024, dtype=torch.bfloat16)
    results = []
    for order in ("forward", "reverse", "random"):
        backend.order = order
        leaves = common.leaf(x), common.leaf(weight)
        ops.rms_norm(*leaves).backward(x)
        results.append([leaf.grad for leaf in leaves])
    backend.order = "forward"
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
