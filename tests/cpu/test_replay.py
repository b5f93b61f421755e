"""An operator that is run again by what it did the last time: the same results, and never for a call that differs."""

import contextlib
import gc
import importlib
import weakref
from math import copysign

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark import registry
from benchmark.operation import Limit, Random, timed_call
from benchmark.suites import LIGER
from interpreter.backend import InterpreterBackend
from tests.compile_checks import custom_operators, operator_arguments
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


COUNTED = ("softmax: softmax_slabs", "softmax: softmax_spread_launches")  # count launches, of which there are twice as many here


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in COUNTED])
def test_every_check_holds_for_results_of_a_replay(package, replay, monkeypatch, name):
    """The first call is recorded, and what it returns comes from the plan."""
    record = replay.record

    def run_again(function, args, computes):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        result, plan = record(function, args, computes)
        if plan is None:
            return result, plan
        for tensor, values in zip(tensors, before, strict=True):
            if not torch.equal(tensor.nan_to_num(), values.nan_to_num()):  # written in place
                tensor.copy_(values)
        return plan.run(tensors, [tensor.data_ptr() for tensor in tensors]), plan

    monkeypatch.setattr(replay, "RECORDED", 0)
    monkeypatch.setattr(replay, "record", run_again)
    next(iter(runtime_of(package).launch.tuner.kernels)).forget()  # else a call could be one that another check has recorded
    CHECKS[name](package)


OF_NODES = [name for name in CHECKS if name.startswith(("decoder_nodes: ", "projected_nodes: ", "traced_nodes: traced_"))]
NODES = [name for name in OF_NODES if "mlp" in name or "replayed" in name if "dropout" not in name]


@pytest.mark.parametrize("name", NODES)
def test_the_nodes_of_a_layer_are_replayed_as_a_whole(package, replay, monkeypatch, name):
    """What computes with PyTorch between the launches, too."""
    plans, record = [], replay.record

    def seen(function, args, computes):
        result, plan = record(function, args, computes)
        if computes:
            plans.append((function.__name__, plan))
        return result, plan

    next(iter(runtime_of(package).launch.tuner.kernels)).forget()
    monkeypatch.setattr(replay, "ATTEMPTS", 0)
    CHECKS[name](package)  # prepares the launches
    monkeypatch.setattr(replay, "ATTEMPTS", 9)
    monkeypatch.setattr(replay, "record", seen)
    CHECKS[name](package)
    assert len({function for function, _ in plans}) == 2, "a forward and a backward pass"
    assert all(plan is not None for _, plan in plans), plans


@pytest.mark.parametrize("name", ("norm_attention_inputs", "norm_attention_inputs_backward", "norm_mlp", "norm_mlp_backward"))
def test_the_operators_of_a_graph_are_replayed_as_a_whole(package, replay, monkeypatch, name):
    """Called as a graph calls them: below autograd, where linear and reshape are one operation, and not the ones that they are made of."""
    plans, record = [], replay.record

    def seen(function, args, computes):
        result, plan = record(function, args, computes)
        plans.extend([plan] if computes else [])
        return result, plan

    operator, calls = custom_operators(package)[name], operator_arguments("cpu", torch.bfloat16)[name]
    monkeypatch.setattr(replay, "record", seen)
    for call in calls:
        wanted = operator(*call)
        with torch._C._AutoDispatchBelowAutograd():
            for _ in range(CALLS):
                assert all(map(torch.equal, operator(*call), wanted))
    # The kernel behind q and k copies gradients of these shapes first, which no plan does.
    assert name == "norm_attention_inputs_backward" or (len(plans) == len(calls) and all(plan is not None for plan in plans))


class Counted:
    """A function as an operator, and how often it is called. computes: with PyTorch too."""

    def __init__(self, replay, function, computes=False):
        self.calls, self.function = 0, function
        self.operator = (replay.replayed_with_products if computes else replay.replayed)(self._call)

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


@pytest.fixture(params=("inductor's functions", "those of every day"))
def functions(request, replay, monkeypatch):
    """A plan makes and views tensors by functions that this torch has, and by those that every torch has."""
    assert replay._ALLOCATORS["cpu"] and replay._reinterpreted
    if request.param == "those of every day":
        monkeypatch.setattr(replay, "_ALLOCATORS", {})
        monkeypatch.setattr(replay, "_reinterpreted", None)


def test_a_result_may_be_a_part_of_what_is_made(replay, column_sum, functions):
    operator = Counted(replay, sums_of_two(column_sum))
    for number in range(CALLS):
        x, y = rows(start=number), rows(start=7 * number)
        both, second = operator(x, y)
        assert torch.equal(both, torch.stack((x.sum(0), y.sum(0)))) and torch.equal(second, y.sum(0))
        assert second.data_ptr() == both[1].data_ptr()
        version = both._version
        second.mul_(2)
        assert both._version == version + 1, "autograd would not notice that what it keeps was written to"
    assert operator.calls == 2


STRIDED = lambda x: x.t().contiguous().t()  # noqa: E731


@pytest.mark.parametrize("computes", (False, True))
@pytest.mark.parametrize("context", (torch._C._AutoDispatchBelowAutograd, torch.inference_mode), ids=("in a graph", "in inference mode"))
@pytest.mark.parametrize(
    ("look", "other"),
    (
        (lambda x: x.contiguous(), STRIDED),
        (lambda x: x.reshape(4, 8), STRIDED),
        (lambda x: x.to(torch.float32), lambda x: x.half()),
    ),
    ids=("contiguous", "reshape", "to"),
)
def test_what_may_be_a_view_or_a_copy_is_done_again_as_what_it_was(replay, column_sum, look, other, context, computes):
    operator = Counted(replay, lambda x: column_sum(look(x), torch.float32), computes=computes)
    with context():  # in which each is one operation that may be either, not the ones that it is made of
        for number in range(CALLS):
            x = rows(8, 4, start=number)
            for source in (x, other(x)):
                assert torch.equal(operator(source), look(source).sum(0))
    assert operator.calls == (4 if computes else 2 + CALLS), "a copy computes"


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


def test_what_cannot_be_replayed_holds_no_memory_while_it_is_recorded(replay):
    """A loss over chunks makes more logits than fit at a time."""
    alive = []

    def function(x):
        x @ x.t()
        for _ in range(3):
            made = torch.empty_like(x)
            alive.append(weakref.ref(made))
            del made
            assert not any(tensor() is not None for tensor in alive)
        return torch.empty_like(x)

    operator = Counted(replay, function)
    for _ in range(CALLS):
        operator(rows())
    assert operator.calls == CALLS and len(alive) == 3 * CALLS


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


# ---------------------------------------------------------------- what computes with PyTorch
def product_of(column_sum):
    """An operator with products in and out of place, copies, sums, views of each kind and a launch on a result of PyTorch."""

    def function(x, w, b, flag, numbers):
        first = torch.mm(x, w.t())
        first.addmm_(x[:, :4], w[:, 2:6].t(), beta=0.5, alpha=numbers[0])
        wide = torch.empty((x.shape[0], 2 * w.shape[0]))
        left, right = wide.split(w.shape[0], 1)
        torch.mm(x, w.t(), out=left)
        right.copy_(first)
        torch._foreach_copy_([left], [right])
        total = torch.addmm(wide, x, torch.cat if flag is None else b.view(x.shape[1], -1))
        sums = column_sum(total, torch.float32)
        heads = total.view(x.shape[0], 2, -1).transpose(0, 1).reshape(2, -1)
        return total.to(torch.float64), None, sums, heads, right, total.sum(0, dtype=torch.float64) * 2.0

    return function


def products(start, rows_=3):
    g = torch.Generator().manual_seed(start)
    return torch.randn(rows_, 8, generator=g), torch.randn(4, 8, generator=g), torch.randn(64, generator=g)


def test_products_are_made_again(replay, column_sum, functions):
    function = product_of(column_sum)
    operator = Counted(replay, function, computes=True)
    for number in range(2 * CALLS):
        args = (*products(number, 3 + number % 2), True, (0.25, 2))
        for found, wanted in zip(operator(*args), function(*args), strict=True):
            assert found is wanted is None or (torch.equal(found, wanted) and found.stride() == wanted.stride())
    assert operator.calls == 4, "two for each number of rows"
    x, w, b = products(9)
    numbers = True, (0.25, 2)
    for args in ((x, w, b, True, (0.5, 2)), (x.t().contiguous().t(), w, b, *numbers), (x, torch.randn(5, 8)[:4], b, *numbers)):
        for found, wanted in zip(operator(*args), function(*args), strict=True):
            assert found is wanted is None or torch.equal(found, wanted)
    assert operator.calls == 6, "one for each that differs: rows of a larger matrix are no other"


def test_arguments_may_start_anywhere_in_their_memory(replay, functions):
    def function(x):
        return torch.mm(x[1:], x[:, 1:4].t().contiguous().view(3, -1)[:, : x.shape[1]].t())

    operator, memory = Counted(replay, function, computes=True), torch.randn(9, 4)
    for start in (0, 1, 2, 3, 4, 0):
        x = memory[start : start + 4]
        assert torch.equal(operator(x), function(x))
    assert operator.calls == 2


def test_functions_that_a_torch_does_not_have_or_has_otherwise_are_left_alone(replay):
    def of_zeros(shape, stride, dtype):
        return torch.zeros(shape, dtype=dtype)

    assert replay.of_compiled_graphs("_no_such_function", callable) is None
    assert not replay._allocates(of_zeros) and not replay._reinterprets(torch.as_strided)


def test_tensors_are_made_on_the_device_of_the_call(replay, monkeypatch):
    """The allocator makes them on the current one."""
    current, seen = [1], []

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(replay.driver, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    plan = replay.Plan(lambda tensors, addresses: seen.append(current[0]) or tensors[0], [], torch.device("cuda", 0))
    x = rows()
    assert plan.run([x], [x.data_ptr()]) is x and seen == [0] and current == [1]


def test_memory_goes_behind_its_last_use(replay, monkeypatch):
    """While the last product is made, no more is alive than it needs."""
    alive, seen = [], []

    def watched(*args, **kwargs):
        result = product(*args, **kwargs)
        seen.append(sum(tensor() is not None for tensor in alive))
        alive.append(weakref.ref(result))
        return result

    product = torch.mm
    monkeypatch.setitem(replay.COMPUTATIONS, torch.ops.aten.mm.default, watched)
    operator = Counted(replay, lambda x: torch.mm(torch.mm(torch.mm(torch.mm(x, x), x), x), x), computes=True)
    x = torch.randn(4, 4)
    for _ in range(CALLS):
        alive.clear()
        seen.clear()
        assert torch.equal(operator(x), x @ x @ x @ x @ x)
    assert operator.calls == 2 and seen == [0, 1, 1, 1]


def test_recording_holds_no_memory(replay):
    def function(x):
        made = weakref.ref(torch.mm(x, x))
        assert made() is None
        return torch.mm(x, x)

    operator = Counted(replay, function, computes=True)
    for _ in range(CALLS):
        operator(torch.randn(4, 4))
    assert operator.calls == 2


def test_nothing_is_kept_of_a_call_that_was_recorded(replay):
    """Not until Python looks for cycles either: what a graph's memory pool has to have free by then is counted."""

    def function(x, y):
        found = torch.cat([x, y], out=torch.empty(8, 4))
        return torch.mm(found, torch.mm(x, y))

    operator, gone = Counted(replay, function, computes=True), []
    gc.collect()
    gc.disable()
    try:
        for _ in range(CALLS):
            x, y = torch.randn(4, 4), torch.randn(4, 4)
            found = operator(x, y)
            gone += map(weakref.ref, (x, y, found))
            del x, y, found
        assert [tensor() for tensor in gone] == [None] * len(gone)
    finally:
        gc.enable()
    assert operator.calls == 2


@pytest.mark.parametrize(
    "function",
    (
        lambda x: torch.mm(x, x).relu(),
        lambda x: torch.empty_like(x).random_(),
        lambda x: torch.mm(x, x) if x[0, 0].item() else x,
        lambda x: torch.mm(x.add_(0), x),
        lambda x: torch.empty_like(x).copy_(x).mul_(x[0].zero_().sum() == 0),
        lambda x: torch.mm(x, OUTSIDE),
        lambda x: (x, torch.mm(x, x)),
        lambda x: (torch.mm(x, x), 3),
        lambda x: torch.mm(x, x).view(torch.int32),
    ),
    ids=("another operation", "random", "number", "in place", "in place of a part", "of someone else", "an argument", "no tensor", "dtype"),
)
def test_what_else_an_operator_does_is_never_left_out(replay, function):
    operator = Counted(replay, function, computes=True)
    for _ in range(CALLS + 2):
        operator(torch.randn(4, 4))
    assert operator.calls == CALLS + 2


OUTSIDE = torch.ones(4, 4)


def test_a_tensor_at_an_odd_address_makes_the_call_in_full(replay, column_sum, monkeypatch):
    """One that is made, and the result of a product."""
    kinds, at, odd_ones = (replay._ALLOCATORS, replay.COMPUTATIONS), ("cpu", torch.ops.aten.mm.default), [False, False]

    def sometimes_odd(number, make):
        return lambda *args: odd(make(*args)) if odd_ones[number] else make(*args)

    for number in range(2):
        monkeypatch.setitem(kinds[number], at[number], sometimes_odd(number, kinds[number][at[number]]))
    operator = Counted(replay, lambda x: column_sum(torch.mm(x, x), torch.float32), computes=True)
    x = torch.randn(4, 4)
    for _ in range(CALLS):
        operator(x)
    for calls, odd_ones[:] in (2, (False, False)), (3, (True, False)), (4, (False, True)), (4, (False, False)):
        assert torch.equal(operator(x), (x @ x).sum(0)) and operator.calls == calls


def test_a_call_that_differs_from_the_likely_one_is_looked_up(replay, column_sum):
    """Behind many calls of one kind, and between others."""
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
    """Of every likely call that was asked about, whether it was the one."""
    found, run = [], replay._Likely.run

    def asked(self, *args):
        result = run(self, *args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(replay._Likely, "run", asked)
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
    """As the forward and the backward pass of one operator do."""
    operator = Counted(replay, lambda x, backward: column_sum(x[int(backward) :], torch.float32))
    for number in range(9):
        for backward in (False, True):
            x = rows(start=number)
            assert torch.equal(operator(x, backward), x[int(backward) :].sum(0))
    assert operator.calls == 4 and likely[-3:] == [False, True, True]


def test_results_that_share_no_element_know_nothing_of_each_other(replay, column_sum):
    """And one that is a view of what was made alone is made as what it is."""

    def function(x):
        both, sums = torch.empty(2, x.shape[1]), torch.empty(x.shape[1])
        launch_sum = importlib.import_module(column_sum.__module__).column_sum_kernel
        launch_sum(x, sums)
        for part in both:
            launch_sum(x, part)
        return (*both, both[1, 2:], sums.view(2, -1))

    operator, x = Counted(replay, function), rows()
    for _ in range(CALLS):
        first, second, part, square = operator(x)
        assert torch.equal(first, x.sum(0)) and torch.equal(square.view(-1), first) and torch.equal(part, second[2:])
    assert operator.calls == 2
    assert [result._is_view() for result in (first, second, part, square)] == [False, True, True, False]
    version = part._version
    first.add_(1)
    assert torch.equal(second, x.sum(0)) and part._version == version
    second.add_(1)
    assert torch.equal(part, x.sum(0)[2:] + 1) and part._version == version + 1


@pytest.fixture(scope="module")
def ligers(tmp_path_factory):
    """A build of the package for Liger's users, as `package`."""
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


def test_autocast_is_another_call(replay):
    operator = Counted(replay, lambda x: torch.mm(x, x), computes=True)
    x = torch.randn(4, 4)
    for dtype in (torch.bfloat16, torch.float16, None):
        for _ in range(CALLS):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                assert operator(x).dtype == (dtype or torch.float32)
    assert operator.calls == 6
