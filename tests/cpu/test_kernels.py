"""Every kernel, run by the tile interpreter through its operation, against float64.

The interpreter also notices what a GPU would not say: an index outside an array, a race between blocks, a broken promise.
"""

import sys
from pathlib import Path

import pytest
import torch

from interpreter.backend import InterpreterBackend, forget_launches
from tests.cpu.conftest import assemble_cpu, load
from tests.ops import adamw, common, experts, grouped_gemm, linear_cross_entropy, low_rank, quantised, rms_norm, rotary, routing, swiglu
from tests.ops.common import FLOATS, randn, runtime_of
from tests.ops.loss_without_logits import EVALUATION_CASES, EVALUATION_SHAPES, check_evaluation
from tools.kernel_package import package_folders
from tools.targets import operations

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
def new_memory_is_nan():
    """What a kernel leaves unwritten, or reads before it is written, is no number: PyTorch fills new memory so under this setting."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def ops(package, backend):
    backend.launched.clear()
    yield package
    assert backend.launched, "the operation ran in PyTorch, not in a kernel"


@dtypes
@pytest.mark.parametrize("shape", rms_norm.RMS_NORM_SHAPES, ids=str)
def test_rms_norm(ops, dtype, shape):
    rms_norm.check_rms_norm(ops, DEVICE, dtype, shape)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("shape", ((3, 5, 128), (4, 1000)), ids=str)
def test_rms_norm_with_an_fp32_weight(ops, dtype, shape):
    rms_norm.check_rms_norm(ops, DEVICE, dtype, shape, weight_dtype=torch.float32)


@pytest.mark.parametrize(
    "view",
    (lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[1:, 1:], lambda x: x[..., :-8], lambda x: x[..., 1:],
     lambda x: x[..., ::2]),
)
def test_rms_norm_of_views(ops, view):
    rms_norm.check_rms_norm(ops, DEVICE, torch.bfloat16, (3, 4, 1032), view=view)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("shape", rms_norm.ADD_RMS_NORM_SHAPES, ids=str)
def test_add_rms_norm(ops, dtype, shape):
    rms_norm.check_add_rms_norm(ops, DEVICE, dtype, shape)


@dtypes
@pytest.mark.parametrize("case", rotary.ROTARY_CASES, ids=str)
def test_rotary(ops, dtype, case):
    rotary.check_rotary(ops, DEVICE, dtype, **case)


@dtypes
@pytest.mark.parametrize("case",
                         [c for c in rotary.QK_NORM_ROTARY_CASES if c["heads"] % 4 == 0 and c["head_dim"] == 128 and not c.get("half")],
                         ids=str)
def test_qk_norm_rotary(ops, dtype, case):
    rotary.check_qk_norm_rotary(ops, DEVICE, dtype, **case)


@dtypes
@pytest.mark.parametrize("shape", swiglu.SWIGLU_SHAPES, ids=str)
def test_swiglu(ops, dtype, shape):
    swiglu.check_swiglu(ops, DEVICE, dtype, shape)


@dtypes
@pytest.mark.parametrize("offset", (0, 1, 8))
@pytest.mark.parametrize("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_adamw(ops, dtype, offset, capturable):
    adamw.check_adamw(ops, DEVICE, dtype, offset=offset, capturable=capturable)


@dtypes
@pytest.mark.parametrize("capturable", (False, True), ids=("counted on the host", "capturable"))
def test_adamw_of_four(ops, dtype, capturable):
    adamw.check_adamw_of_four(ops, DEVICE, dtype, capturable)


@dtypes
def test_mlp(ops, dtype):
    swiglu.check_mlp(ops, DEVICE, dtype, 33, 64, 160)


@dtypes
@pytest.mark.parametrize("case", linear_cross_entropy.LOSS_CASES, ids=str)
def test_linear_cross_entropy_options(ops, dtype, case):
    linear_cross_entropy.check_linear_cross_entropy(ops, DEVICE, dtype, 3, 16, 4107, upstream=1.0, **case)


@dtypes
@pytest.mark.parametrize("shape", linear_cross_entropy.LOSS_SHAPES, ids=str)
def test_linear_cross_entropy_sizes(ops, dtype, shape):
    linear_cross_entropy.check_linear_cross_entropy(ops, DEVICE, dtype, *shape, upstream=1.0)


@pytest.fixture(params=("sm_90", "sm_80"))
def gpu(request, backend, package):
    """An architecture for each shape of the tiles."""
    backend.gpu = request.param
    forget_launches(runtime_of(package))
    yield
    backend.gpu = "sm_90"
    forget_launches(runtime_of(package))


def assert_no_logits(backend):
    assert {name.split("-")[0] for name in backend.launched} == {"linear_cross_entropy_statistics", "linear_cross_entropy_combine"}


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("shape", EVALUATION_SHAPES, ids=str)
def test_evaluation_stores_no_logits(ops, backend, gpu, dtype, shape):
    check_evaluation(ops, DEVICE, dtype, *shape)
    assert_no_logits(backend)


@pytest.mark.parametrize("case", EVALUATION_CASES, ids=str)
def test_evaluation_options(ops, backend, case):
    check_evaluation(ops, DEVICE, torch.bfloat16, 7, 64, 300, **case)
    assert_no_logits(backend)


def test_evaluation_of_more_tokens_than_share_a_tile_of_the_weight(ops, backend, gpu):
    """The last group is lower than the others."""
    check_evaluation(ops, DEVICE, torch.bfloat16, 1100, 64, 257)
    assert_no_logits(backend)


def test_evaluation_in_steps(ops, backend, monkeypatch):
    """What is kept of the logits stays bounded, so many tokens take several launches."""
    loss = sys.modules[f"{ops.__name__}.shared.ops.loss_without_logits"]
    monkeypatch.setattr(loss, "PARTIALS_BYTES", 0)
    monkeypatch.setattr(loss, "TOKENS_A_READING", 64)
    check_evaluation(ops, DEVICE, torch.bfloat16, 150, 64, 300)
    assert_no_logits(backend)
    assert len(backend.launched) == 2 * 2 * 3


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


def test_a_frozen_head_and_hidden_states_store_no_logits(ops, backend):
    hidden, weight = (randn(n, 64, dtype=torch.bfloat16, device=DEVICE, seed=n) for n in (5, 40))
    assert not ops.linear_cross_entropy(hidden, weight, torch.arange(5)).requires_grad
    assert_no_logits(backend)


@dtypes
@pytest.mark.parametrize("classes", (17, 64), ids=str)
def test_gradients_of_the_loss_are_scaled_by_what_arrives(ops, dtype, classes):
    linear_cross_entropy.check_linear_cross_entropy(ops, DEVICE, dtype, 5, 32, classes, upstream=0.25)


@dtypes
@pytest.mark.parametrize("case", experts.EXPERTS_CASES, ids=str)
def test_experts(ops, dtype, case):
    experts.check_experts(ops, DEVICE, dtype, **case)


@pytest.mark.parametrize("frozen", experts.EXPERTS_FROZEN, ids="-".join)
def test_experts_with_frozen_parts(ops, frozen):
    experts.check_experts(ops, DEVICE, torch.bfloat16, 19, 24, 64, 4, 2, frozen=frozen)


@pytest.mark.parametrize("gpt_oss", (True, False))
def test_experts_that_are_not_here(ops, gpt_oss):
    experts.check_experts(ops, DEVICE, torch.float32, 7, 24, 64, 4, 2, absent=1.1, gpt_oss=gpt_oss)


@pytest.mark.parametrize("gpt_oss", (True, False))
def test_nan_reaches_the_result_of_the_experts(ops, gpt_oss):
    """NaN passes as through torch.clamp, and only to its token's result."""
    experts.check_nan_in_experts(ops, DEVICE, gpt_oss)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("case", grouped_gemm.GROUPED_CASES, ids=str)
def test_grouped_gemms(ops, backend, gpu, dtype, case):
    grouped_gemm.check_grouped_gemm(ops, DEVICE, dtype, **case)
    assert {name.partition("-")[0] for name in backend.launched} == {"grouped_mm", "grouped_outer", "expert_blocks"}


ROUTES = {"expert_counts", "expert_sums", "expert_order"}


@pytest.mark.parametrize("case", routing.CASES, ids=str)
def test_routes(package, backend, gpu, case):
    """There is no kernel with room for 600 experts."""
    backend.launched.clear()
    routing.check_route(package, DEVICE, **case)
    assert {name.partition("-")[0] for name in backend.launched} == (ROUTES if case["experts"] <= 512 else set())


def test_many_pairs_of_many_experts_are_sorted_by_pytorch(package, backend, monkeypatch):
    monkeypatch.setattr(sys.modules[f"{package.__name__}.shared.ops.routing"], "COMPARISONS", 43 * 3 * 100 - 1)
    backend.launched.clear()
    routing.check_route(package, DEVICE, 43, 100, 3)
    assert not backend.launched
    routing.check_route(package, DEVICE, 42, 100, 3)
    assert backend.launched


@pytest.mark.parametrize("case", routing.BLOCKS, ids=str)
def test_blocks_of_rows(package, backend, gpu, case):
    backend.launched.clear()
    routing.check_row_blocks(package, DEVICE, **case)
    assert {name.partition("-")[0] for name in backend.launched} == ({"expert_blocks"} if len(case["counts"]) <= 512 else set())


@pytest.mark.parametrize(("dtype", "result"), low_rank.DTYPES, ids=str)
@pytest.mark.parametrize("case", low_rank.CASES, ids=str)
def test_low_rank_gradients(ops, backend, gpu, dtype, result, case):
    low_rank.check_low_rank_gradients(ops, DEVICE, dtype, result, **case)
    assert {name.partition("-")[0] for name in backend.launched} == {"low_rank_gradients"}


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("case", low_rank.CASES, ids=str)
def test_low_rank_add(ops, backend, gpu, dtype, case):
    low_rank.check_low_rank_add(ops, DEVICE, dtype, **case)
    assert {name.partition("-")[0] for name in backend.launched} == {"low_rank_add"}


@pytest.mark.parametrize(
    ("dtype", "case"),
    ((torch.float32, low_rank.CASES[0]), (torch.bfloat16, low_rank.MANY), (torch.bfloat16, low_rank.ODD)),
    ids=str,
)
def test_low_rank_adds_that_are_left_to_pytorch(package, backend, dtype, case):
    backend.launched.clear()
    low_rank.check_low_rank_add(package, DEVICE, dtype, **case)
    assert not backend.launched


def test_low_rank_gradients_that_are_left_to_pytorch(ops, backend):
    low_rank.check_what_is_left_to_pytorch(ops, DEVICE)


@pytest.mark.parametrize("odd", (False, True), ids=("", "with NaN and infinity"))
@pytest.mark.parametrize("columns", quantised.COLUMNS)
def test_quantised_rows(ops, backend, columns, odd):
    quantised.check_rows(ops, DEVICE, torch.bfloat16, 9, columns, odd)
    exact = columns in (1024, 2048, 4096) or columns % 512 == 0
    [name] = backend.launched
    assert name.startswith("quantise_rows-") and f"CHECK{int(not exact)}" in name.split("-")


@pytest.mark.parametrize("odd", (False, True), ids=("", "with NaN and infinity"))
@pytest.mark.parametrize("shape", quantised.TRANSPOSED, ids=str)
def test_quantised_transposed(ops, shape, odd):
    quantised.check_transposed(ops, DEVICE, torch.bfloat16, *shape, odd)


@pytest.mark.parametrize("odd", (False, True), ids=("", "with NaN and infinity"))
@pytest.mark.parametrize("shape", quantised.TRANSPOSED, ids=str)
def test_recoded(ops, backend, shape, odd):
    quantised.check_recoded(ops, DEVICE, torch.bfloat16, *shape, odd)
    assert {name.partition("-")[0] for name in backend.launched} == {"quantise_rows", "recode_transposed"}


@pytest.mark.parametrize("joined", (False, True), ids=("", "joined"))
@pytest.mark.parametrize("columns", (*quantised.SWIGLU, 1040))
def test_swiglu_in_codes(ops, backend, columns, joined):
    quantised.check_swiglu(ops, DEVICE, torch.bfloat16, 5, columns, False, joined)
    launched = {name.partition("-")[0] for name in backend.launched}
    assert ({"swiglu_quantised", "swiglu_backward_quantised"} <= launched) == (columns in quantised.SWIGLU)


@pytest.mark.parametrize("view", quantised.VIEWS)
def test_quantised_views(ops, view):
    quantised.check_rows(ops, DEVICE, torch.bfloat16, 32, 96, view=view)
    quantised.check_transposed(ops, DEVICE, torch.bfloat16, 32, 96, view=view)


def test_quantised_parts(ops):
    quantised.check_rows_into(ops, DEVICE, torch.bfloat16, 5, 512)
    quantised.check_transposed_into(ops, DEVICE, torch.bfloat16, 160, 144)
    quantised.check_transposed_into(ops, DEVICE, torch.bfloat16, 160, 144, odd=1)


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
