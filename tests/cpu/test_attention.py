"""The operation `attention`, in PyTorch and through the interpreter, against float64."""

import importlib

import pytest
import torch

from interpreter.backend import InterpreterBackend
from tests.mutants import planted
from tests.ops import attention as checks
from tests.ops.common import runtime_of


@pytest.fixture(scope="module", params=("kernels", "pytorch"))
def ops(request):
    with planted(None, kernels=False) as package:
        if request.param == "kernels":
            runtime = runtime_of(package)
            runtime.launch.backend = InterpreterBackend(runtime, ("attention", "attention_plan"))
        module = importlib.import_module(f"{package.__name__}.shared.ops.attention")
        module.backend = runtime_of(package).launch.backend
        yield module


@pytest.mark.parametrize("case", checks.CASES, ids=str)
def test_attention(ops, case):
    launched = getattr(ops.backend, "launched", [])
    launched.clear()
    checks.check_operation(ops, case)
    assert len(launched) == (5 if case.sinks else 4) or not ops.backend.runs_on_cpu


@pytest.mark.parametrize("gpu", ("sm_90", "sm_80"))
@pytest.mark.parametrize("case", checks.WIDE, ids=str)
def test_heads_of_96_and_256_where_a_package_has_their_kernels(case, gpu):
    with planted(None, kernels=False) as package:
        runtime, module = runtime_of(package), importlib.import_module(f"{package.__name__}.shared.ops.attention")
        runtime.launch.backend = backend = InterpreterBackend(runtime, ("attention", "attention_wide", "attention_plan"), gpu=gpu)
        checks.check_operation(module, case)
        assert len(backend.launched) == 4
        in_parts = any("dkv_part" in name for name in backend.launched)
        assert in_parts == (gpu != "sm_90" and case.head_dim == 256)
        backend.launched.clear()
        checks.check_operation(module, case._replace(sinks=True))
        assert len(backend.launched) == 1, "with sinks such heads have the plan's kernel alone"


@pytest.mark.parametrize("gpu", ("sm_90", "sm_80"))
@pytest.mark.parametrize("case", checks.CAPPED, ids=str)
def test_capped_scores_where_a_package_has_their_kernels(case, gpu):
    with planted(None, kernels=False) as package:
        runtime, module = runtime_of(package), importlib.import_module(f"{package.__name__}.shared.ops.attention")
        runtime.launch.backend = backend = InterpreterBackend(runtime, ("attention", "attention_capped", "attention_plan"), gpu=gpu)
        checks.check_operation(module, case)
        launched = {name.split("-")[0] for name in backend.launched}
        last = "attention_capped_backward_dkv" + ("_part" if gpu != "sm_90" and case.head_dim == 256 else "")
        assert launched == {"attention_plan", "attention_capped_forward", "attention_capped_backward_dq", last}
        others = case._replace(sinks=True, dtype=torch.float32), case._replace(dtype=torch.float16), case._replace(head_dim=64)
        for other in others if case is checks.CAPPED[0] else ():
            backend.launched.clear()
            checks.check_operation(module, other)
            assert len(backend.launched) == 1, "such scores have the plan's kernel alone"


@pytest.mark.parametrize("case", checks.CAPPED, ids=str)
def test_capped_scores_in_pytorch(ops, case):
    checks.check_operation(ops, case)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_fp32_float64_and_other_heads_run_in_pytorch(ops, dtype):
    checks.check_operation(ops, checks.Case(70, checks.packed(30, 40), head_dim=16, dtype=dtype, sinks=True))
    checks.check_operation(ops, checks.Case(9, ((2, 7),), dtype=dtype))


def test_a_scale_below_zero_runs_in_pytorch(ops):
    checks.check_operation(ops, checks.Case(70, checks.packed(70), scale=-0.2))


@pytest.mark.parametrize("case", checks.CASES, ids=str)
def test_kernels_read_a_plan_of_the_pytorch_path(ops, case):
    checks.check_plan_reference(ops, case)


def test_plans(ops):
    checks.check_plans(ops)


def test_packed_equals_apart(ops):
    checks.check_packed_equals_apart(ops)


def test_gradients_by_finite_differences(ops):
    torch.manual_seed(0)
    q, k, v, sinks = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((7, 4, 3), (7, 2, 3), (7, 2, 3), (4,)))
    plan = ops.AttentionPlan.from_cu_seqlens(torch.tensor([0, 3, 7]), 7)
    torch.autograd.gradcheck(lambda *t: ops.attention(*t[:3], plan, sinks=t[3]), (q, k, v, sinks))


def test_only_what_is_needed_is_saved(ops):
    q, k, v = (torch.randn(128, n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))
    plan, saved = ops.AttentionPlan.from_cu_seqlens(torch.tensor([0, 128]), 128), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.attention(q, k, v, plan)
    q_k_v_out_lse = [(128, 4, 64), (128, 2, 64), (128, 2, 64), (128, 4, 64), (4, 128)]
    assert sorted(tuple(t.shape) for t in saved) == sorted([*q_k_v_out_lse, tuple(plan.limits.shape), tuple(plan.walks.shape)])


def test_compiles_as_one_operator(ops):
    q, k, v = (torch.randn(70, n, 64, dtype=torch.float32, requires_grad=True) for n in (4, 2, 2))
    plan = ops.AttentionPlan.from_cu_seqlens(torch.tensor([0, 30, 70]), 70)

    def twice(q, k, v):
        return ops.attention(q, k, v, plan) * 2

    def planned(q, k, v):
        return ops.attention(q, k, v, cu_seqlens=torch.tensor([0, 30, 70])) * 2

    for function in (twice, planned):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        found, wanted = (torch.autograd.grad((each(q, k, v) ** 2).sum(), (q, k, v)) for each in (compiled, function))
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"k": torch.zeros(8, 3, 64), "v": torch.zeros(8, 3, 64)}, "divides"),
        ({"v": torch.zeros(8, 1, 64)}, "as many heads"),
        ({"k": torch.zeros(9, 2, 64)}, "k is"),
        ({"q": torch.zeros(8, 64)}, "q is"),
        ({"q": torch.zeros(8, 4, 64, dtype=torch.int32)}, "floating"),
        ({"v": torch.zeros(8, 2, 64, dtype=torch.float64)}, "dtype"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"window": 0}, "window"),
        ({"cu_seqlens": torch.zeros(3)}, "cu_seqlens"),
        ({"position_ids": torch.zeros(1, 7, dtype=torch.long)}, "position_ids"),
        ({"padding_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1]])}, "between tokens"),
        ({"cu_seqlens": torch.tensor([0, 8]), "position_ids": torch.zeros(1, 8, dtype=torch.long)}, "beside cu_seqlens"),
    ),
)  # fmt: skip
def test_wrong_arguments_are_named(ops, change, message):
    arguments = {"q": torch.zeros(8, 4, 64), "k": torch.zeros(8, 2, 64), "v": torch.zeros(8, 2, 64), **change}
    with pytest.raises(ValueError, match=message):
        ops.attention(**arguments)


def test_a_plan_goes_with_nothing_that_it_is_made_of(ops):
    q = torch.zeros(8, 2, 64)
    plan = ops.AttentionPlan.from_cu_seqlens(torch.tensor([0, 8]), 8)
    for options in ({"window": 3}, {"causal": False}, {"cu_seqlens": torch.tensor([0, 8])}):
        with pytest.raises(ValueError, match="plan"):
            ops.attention(q, q, q, plan, **options)
    with pytest.raises(ValueError, match="one for 7 tokens"):
        ops.attention(q[:7], q[:7], q[:7], plan)


def test_no_tokens(ops):
    q = torch.zeros(0, 2, 64, requires_grad=True)
    ops.attention(q, q, q).sum().backward()
    assert q.grad.shape == q.shape
