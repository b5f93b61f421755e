"""An operator that is run again by what it did the last time: the same results, and never for a call that differs."""

import importlib
from math import copysign

import pytest
import torch

from benchmark import registry
from benchmark.operation import Limit, Random, timed_call
from benchmark.suites import LIGER
from interpreter.backend import InterpreterBackend
from tests.compile_checks import calls_of, custom_operators
from tests.cpu.conftest import assemble_cpu, load
from tests.modes import Operators
from tests.mutants import CHECKS, OPERATIONS
from tests.ops.common import runtime_of
from tests.replaying import CALLS, Counted, odd, rows, sums_of_two

COUNTED = ("softmax: softmax_slabs", "softmax: softmax_spread_launches")  # count launches, of which there are twice as many here
# Kernels that are interpreted without an operation, an optimizer's step, GEMMs of groups, what records a CUDA graph: nothing is replayed.
NEVER_REPLAYED = ("attention_kernels: ", "adamw: ", "grouped_gemm: grouped", "linear_cross_entropy: loss_in_a_graph")
REPLAYED = [name for name in CHECKS if name not in COUNTED and not name.startswith(NEVER_REPLAYED)]


@pytest.mark.parametrize("name", REPLAYED)
def test_every_check_holds_for_results_of_a_replay(interpreted, replay, monkeypatch, name):
    """The first call is recorded, and what it returns comes from the plan."""
    record = replay.record

    def run_again(function, args, computes):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        result, plan = record(function, args, computes)
        if not isinstance(plan, replay.Plan):
            return result, plan
        for tensor, values in zip(tensors, before, strict=True):
            if not torch.equal(tensor.nan_to_num(), values.nan_to_num()):  # written in place
                tensor.copy_(values)
        return plan.run(tensors, [tensor.data_ptr() for tensor in tensors]), plan

    monkeypatch.setattr(replay, "RECORD_AT", 0)
    monkeypatch.setattr(replay, "record", run_again)
    CHECKS[name](interpreted)


FILES = "decoder_nodes: ", "projected_nodes: ", "norm_projections: ", "traced_nodes: traced_"
OF_NODES = [name for name in CHECKS if name.startswith(FILES)]
NODES = [name for name in OF_NODES if "mlp" in name or "replayed" in name if not ("dropout" in name or "tiles" in name)]


@pytest.mark.parametrize("name", NODES)
def test_the_nodes_of_a_layer_are_replayed_as_a_whole(interpreted, replay, monkeypatch, name):
    """What computes with PyTorch between the launches, too."""
    plans, record = [], replay.record

    def seen(function, args, computes):
        result, plan = record(function, args, computes)
        if computes:
            plans.append((function.__name__, plan))
        return result, plan

    monkeypatch.setattr(replay, "ATTEMPTS", 0)
    CHECKS[name](interpreted)  # prepares the launches
    monkeypatch.setattr(replay, "ATTEMPTS", 9)
    monkeypatch.setattr(replay, "record", seen)
    CHECKS[name](interpreted)
    assert len({function for function, _ in plans}) == 2, "a forward and a backward pass"
    assert all(isinstance(plan, replay.Plan) for _, plan in plans), plans


@pytest.mark.parametrize("name", ("norm_attention_inputs", "norm_mlp", "norm_projections"))
@pytest.mark.parametrize("end", ("", "_backward"))
def test_the_operators_of_a_graph_are_replayed_as_a_whole(interpreted, replay, monkeypatch, name, end):
    """Called as a graph calls them: below autograd, where linear and reshape are one operation, and not the ones that they are made of."""
    plans, record = [], replay.record

    def seen(function, args, computes):
        result, plan = record(function, args, computes)
        plans.extend([plan] if computes else [])
        return result, plan

    operator, calls = custom_operators(interpreted)[name + end], calls_of(interpreted, name + end, "cpu", torch.bfloat16)
    monkeypatch.setattr(replay, "record", seen)
    for call in calls:
        wanted = operator(*call)
        with torch._C._AutoDispatchBelowAutograd():
            for _ in range(CALLS):
                assert all(map(torch.equal, operator(*call), wanted))
    assert len(plans) == len(calls) and all(isinstance(plan, replay.Plan) for plan in plans)


def test_a_call_that_comes_again_is_replayed(replay, column_sum):
    operator = Counted(replay, lambda x: column_sum(x, torch.float32))
    for number in range(CALLS):
        x = rows(start=number)
        assert torch.equal(operator(x), x.sum(0))
    assert operator.calls == 2


@pytest.mark.parametrize(
    "other",
    (lambda x: x[:2], lambda x: x.half(), odd, lambda x: torch.cat((x, x), 1)[:, :8], lambda x: x.t().contiguous().t(), lambda x: -x),
    ids=("rows", "dtype", "address", "row stride", "strides", "numbers"),
)
def test_a_call_that_differs_is_another(replay, column_sum, other):
    operator = Counted(replay, lambda x: column_sum(x.float().contiguous(), torch.float32))
    x = rows()
    for case in (x, x, x, other(x), x, other(x), other(x), x):
        assert torch.equal(operator(case), case.float().sum(0))


VALUES = ((1, 2), (0.0, -0.0), (0.5, 0.25), (True, False), (None, 3), ("a", "b"), (torch.half, torch.float))


@pytest.mark.parametrize(("one", "another"), VALUES)
def test_a_value_that_differs_is_another_call(replay, one, another):
    operator = Counted(replay, lambda x, value: torch.empty_like(x))
    for value in (one, one, one):
        operator(rows(), value)
    assert operator.calls == 2
    operator(rows(), another)
    assert operator.calls == 3


def test_arguments_in_one_piece_of_memory_are_told_apart(replay, column_sum):
    operator = Counted(replay, sums_of_two(column_sum))
    memory = torch.randn(12, 8)

    def check(x, y):
        assert torch.equal(operator(x, y)[0], torch.stack((x.sum(0), y.sum(0))))

    for _ in range(CALLS):
        check(memory[:3], memory[3:6])
    assert operator.calls == 2
    for x, y in ((memory[:3], memory[6:9]), (memory[6:9], memory[:3]), (rows(), rows(start=4)), (memory[:3], memory[:3])):
        check(x, y)
        check(x, y)


def test_a_mode_and_a_transform_see_the_operations(replay):
    operator = Counted(replay, lambda x: torch.empty_like(x))
    for _ in range(CALLS):
        operator(rows())
    with Operators():
        operator(rows())
    torch.func.vmap(lambda x: operator(x) * 0)(rows())
    with torch.autograd.forward_ad.dual_level():
        operator(rows())
    assert operator.calls == 2 + 3


def test_tensors_that_are_more_than_numbers_in_memory_are_called_in_full(replay):
    class Other(torch.Tensor):
        pass

    operator = Counted(replay, lambda x, *_: torch.empty(1))
    turned = torch._neg_view(rows())
    for args in ((turned,), (rows(), turned), (rows().as_subclass(Other),), (rows(), [1]), (rows(), torch.zeros(3, dtype=torch.complex64))):
        before = operator.calls
        for _ in range(CALLS + 2):
            operator(*args)
        assert operator.calls == before + CALLS + 2


def test_other_choices_and_another_backend_prepare_it_anew(interpreted, replay, monkeypatch):
    launch = runtime_of(interpreted).launch
    operator = Counted(replay, lambda x: torch.empty_like(x))
    for _ in range(CALLS):
        operator(rows())
    next(iter(launch.tuner.kernels)).forget()
    for _ in range(CALLS):
        operator(rows())
    assert operator.calls == 4
    monkeypatch.setattr(launch, "backend", InterpreterBackend(runtime_of(interpreted), ("column_sum",)))
    operator(rows())
    assert operator.calls == 5


def test_few_combinations_are_kept(replay, monkeypatch):
    monkeypatch.setattr(replay, "KEPT", 3)
    operator = Counted(replay, lambda x: torch.empty_like(x))
    for _ in range(3):
        for count in range(1, 9):
            assert operator(rows(count)).shape == (count, 8)
    assert operator.calls == 24


def test_an_error_is_an_error_each_time(replay):
    def fails(x):
        raise ValueError("no")

    operator = Counted(replay, fails)
    for _ in range(CALLS):
        with pytest.raises(ValueError):
            operator(rows())
    assert replay.launch.recorder is None and not replay._recording.locked()


def test_a_call_that_differs_from_the_likely_one_is_looked_up(replay, column_sum):
    """After many calls of one kind, and between others."""
    operator = Counted(replay, lambda x, *rest: column_sum(x.resolve_neg().float().contiguous(), torch.float32))
    x, memory = rows(), torch.randn(64)
    others = [[other, 2, None] for other in (x.half(), torch._neg_view(x), odd(x), x[:2], x.t().contiguous().t())]
    others += [x, 2, None, (1, 2)], [x, 2, 3], [x, 2]
    for _ in range(3):
        for _ in range(9):
            assert torch.equal(operator(x, 2, None), x.sum(0))
        calls = operator.calls
        with pytest.raises(AssertionError, match="starts at address 0"):
            operator(x.to("meta"), 2, None)  # whose device has the number of the CPU's
        assert operator.calls == calls + 1
        for args in others:
            assert torch.equal(operator(*args), args[0].float().sum(0))
    for start in (0, 24, 8, 24, 40):
        part = memory[start : start + 24].view(3, 8)
        assert torch.equal(operator(part, 2, None), part.sum(0))
    assert torch.equal(torch.nn.Parameter(x).sum(0), operator(torch.nn.Parameter(x), 2, None))


@pytest.fixture
def likely(replay, monkeypatch) -> list:
    """Whether each likely call that was asked about was the one."""
    found, run = [], replay._GuardedPlan.run

    def asked(self, *args):
        result = run(self, *args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(replay._GuardedPlan, "run", asked)
    return found


def test_zero_is_expected_and_minus_zero_is_another_number(replay, column_sum, likely):
    operator = Counted(replay, lambda x, zero, one: column_sum(x[: 3 if copysign(1.0, zero) > 0 else 2], torch.float32))
    x = rows()
    for _ in range(3):
        for _ in range(9):
            assert torch.equal(operator(x, 0.0, 1.0), x.sum(0))
        assert likely[-1]
        for _ in range(9):
            assert torch.equal(operator(x, -0.0, 1.0), x[:2].sum(0))
        assert not likely[-1]


def test_calls_that_take_turns_are_all_expected(replay, column_sum, likely):
    """The forward and the backward pass of one operator take turns so."""
    operator = Counted(replay, lambda x, backward: column_sum(x[int(backward) :], torch.float32))
    for number in range(9):
        for backward in (False, True):
            x = rows(start=number)
            assert torch.equal(operator(x, backward), x[int(backward) :].sum(0))
    assert operator.calls == 4 and likely[-3:] == [False, True, True]


@pytest.fixture(scope="module")
def ligers(tmp_path_factory):
    """A build of the package for Liger's users whose kernels the interpreter runs."""
    found = load(assemble_cpu(tmp_path_factory.mktemp("ligers"), "\n# replayed\n", "packages/liger"))
    runtime = runtime_of(found)
    runtime.launch.backend = InterpreterBackend(runtime, OPERATIONS)
    return found


WALKS = ("fused_linear_", "tiled_")  # over products of PyTorch, with steps that are replayed one by one
SIZES = {"hidden": 1024, "intermediate": 128, "vocab": 512, "heads": 4, "kv_heads": 2}


@pytest.mark.parametrize("name", [operation.name for operation in registry.of_suite(LIGER) if not operation.name.startswith(WALKS)])
def test_each_pass_of_an_operation_is_one_replay(ligers, monkeypatch, name):
    """Which costs the host as little as may be, and nothing is launched on the way there."""
    runtime, operation = runtime_of(ligers), registry.operations()[name]
    replay = importlib.import_module(f"{ligers.__name__}.shared.runtime.replay")
    inputs = Limit(4, 1.0, SIZES).draw(operation, 4, Random("cpu", torch.bfloat16, 0)).copy()
    call = timed_call(operation.of_package(ligers), inputs, "full")
    wanted, kinds, run = call(), [], replay.Plan.run
    for _ in range(CALLS):
        call()
    monkeypatch.setattr(replay.Plan, "run", lambda *args: kinds.append("replay") or run(*args))
    monkeypatch.setattr(runtime.launch.Kernel, "__call__", lambda *args: kinds.append("launch"))
    assert all(map(torch.equal, call(), wanted)) and kinds == ["replay", "replay"]


def test_the_report_says_why_a_call_is_not_replayed(replay):
    cases = (
        (lambda x: x + 1, "no plan after 8 calls: it calls aten.add.Tensor"),
        (lambda x: x.view(-1), "it returns an argument"),
        (lambda x: torch.empty_like(x.view(torch.int32)), "views a tensor as torch.int32"),
        (lambda x: torch.empty_like(OUTSIDE.view(-1)), "views a tensor from outside of the call"),
    )
    for function, reason in cases:
        operator = Counted(replay, function)
        for _ in range(2 * CALLS):
            operator(rows())
        assert operator.calls == 2 * CALLS
        text = str(replay.operators[-1])
        assert reason in text and "  torch.float32, cpu, [3, 8], (8, 1)" in text, text
        assert text in replay.report()
    with Operators():
        operator(rows())
    operator(torch._neg_view(rows()))
    report = str(replay.operators[-1])
    assert "1 calls ran: a transform" in report and "1 calls ran: a tensor holds its numbers with the sign turned" in report


OUTSIDE = torch.ones(4, 4)


def test_autocast_is_another_call(replay):
    operator = Counted(replay, lambda x: torch.mm(x, x), computes=True)
    x = torch.randn(4, 4)
    for dtype in (torch.bfloat16, torch.float16, None):
        for _ in range(CALLS):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                assert operator(x).dtype == (dtype or torch.float32)
    assert operator.calls == 6
