"""An operator that is run again by what it did the last time: the same results, and never for a call that differs."""

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from interpreter.backend import InterpreterBackend
from tests.cpu.conftest import ALL_OPERATIONS, assemble_cpu, load
from tests.mutants import CHECKS, OPERATIONS
from tests.ops.common import runtime_of

CALLS = 4  # after which a call that can be replayed is


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A build of its own whose kernels the interpreter runs."""
    found = load(assemble_cpu(tmp_path_factory.mktemp("replayed"), "\n# replayed\n" + ALL_OPERATIONS))
    runtime = runtime_of(found)
    runtime.launch.backend = InterpreterBackend(runtime, OPERATIONS)
    return found


@pytest.fixture
def replay(package):
    return importlib.import_module(f"{package.__name__}.shared.runtime.replay")


@pytest.fixture
def column_sum(package):
    return importlib.import_module(f"{package.__name__}.shared.ops.common").column_sum


COUNTED = ("softmax: softmax_slabs",)  # counts launches, of which there are twice as many here


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in COUNTED])
def test_every_check_holds_for_results_of_a_replay(package, replay, monkeypatch, name):
    """The first call is recorded, and what it returns comes from the plan."""
    record = replay.record

    def run_again(function, args):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        result, plan = record(function, args)
        if plan is None:
            return result, plan
        for tensor, values in zip(tensors, before, strict=True):
            if not torch.equal(tensor.nan_to_num(), values.nan_to_num()):  # written in place
                tensor.copy_(values)
        return plan.run(args, [tensor.data_ptr() for tensor in tensors]), plan

    monkeypatch.setattr(replay, "RECORDED", 0)
    monkeypatch.setattr(replay, "record", run_again)
    next(iter(runtime_of(package).launch.tuner.kernels)).forget()  # else a call could be one that another check has recorded
    CHECKS[name](package)


class Counted:
    """A function as an operator, and how often it is called."""

    def __init__(self, replay, function):
        self.calls, self.function = 0, function
        self.operator = replay.replayed(self._call)

    def _call(self, *args):
        self.calls += 1
        return self.function(*args)

    def __call__(self, *args):
        return self.operator(*args)


def rows(count=3, columns=8, start=0.0) -> torch.Tensor:
    return torch.arange(count * columns, dtype=torch.float32).view(count, columns) + start


def sums_of_two(column_sum):
    """An operator of two arguments, with a result that is a part of what it makes."""

    def function(x, y):
        both = torch.empty(2, x.shape[1])
        both_kernels = importlib.import_module(column_sum.__module__).column_sum_kernel
        both_kernels(x, both[0])
        both_kernels(y, both[1])
        return both, both[1]

    return function


def test_a_call_that_comes_again_is_replayed(replay, column_sum):
    operator = Counted(replay, lambda x: column_sum(x, torch.float32))
    for number in range(CALLS):
        x = rows(start=number)
        assert torch.equal(operator(x), x.sum(0))
    assert operator.calls == 2


def test_a_result_may_be_a_part_of_what_is_made(replay, column_sum):
    operator = Counted(replay, sums_of_two(column_sum))
    for number in range(CALLS):
        x, y = rows(start=number), rows(start=7 * number)
        both, second = operator(x, y)
        assert torch.equal(both, torch.stack((x.sum(0), y.sum(0)))) and torch.equal(second, y.sum(0))
        assert second.data_ptr() == both[1].data_ptr()
    assert operator.calls == 2


def odd(x: torch.Tensor) -> torch.Tensor:
    """The same numbers at an address that is no multiple of 16."""
    return torch.empty(x.numel() + 8)[1 : x.numel() + 1].view(x.shape).copy_(x)


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


@pytest.mark.parametrize(
    "function",
    (
        lambda x: x + 1,
        lambda x: torch.zeros_like(x),
        lambda x: torch.empty_like(x).copy_(x),
        lambda x: torch.empty_like(x) if x[0, 0].item() == 0 else x.new_empty(1),
        lambda x: torch.empty_like(x) if torch.equal(x, x) else x,
        lambda x: x.view(-1),
        lambda x: x.add_(1) and torch.empty_like(x) if x.numel() == 0 else torch.empty_like(x.add_(0)),
    ),
    ids=("product", "fill", "copy", "number", "comparison", "view of an argument", "in place"),
)
def test_what_does_more_than_make_tensors_and_launch_is_called_in_full(replay, function):
    operator = Counted(replay, function)
    for _ in range(9):
        operator(rows())
    assert operator.calls == 9


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


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_a_mode_and_a_transform_see_the_operations(replay):
    operator = Counted(replay, lambda x: torch.empty_like(x))
    for _ in range(CALLS):
        operator(rows())
    with Watching():
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


def test_other_choices_and_another_backend_prepare_it_anew(package, replay, monkeypatch):
    launch = runtime_of(package).launch
    operator = Counted(replay, lambda x: torch.empty_like(x))
    for _ in range(CALLS):
        operator(rows())
    next(iter(launch.tuner.kernels)).forget()
    for _ in range(CALLS):
        operator(rows())
    assert operator.calls == 4
    monkeypatch.setattr(launch, "backend", InterpreterBackend(runtime_of(package), ("column_sum",)))
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
