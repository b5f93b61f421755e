"""What a recorded call does when it is done again: the same results from the same memory, and nothing left out."""

import contextlib
import gc
import importlib
import weakref

import pytest
import torch

from tests.replaying import CALLS, Counted, odd, rows, sums_of_two


@pytest.fixture
def plan(replay):
    """The module that makes plans."""
    return importlib.import_module(f"{replay.__package__}.plan")


@pytest.fixture
def recording(replay):
    """The module that records calls."""
    return importlib.import_module(f"{replay.__package__}.recording")


@pytest.fixture(params=("inductor's functions", "those of every day"))
def functions(request, plan, monkeypatch):
    """A plan makes and views tensors by functions that this torch has, and by those that every torch has."""
    assert plan._ALLOCATORS["cpu"] and plan._reinterpreted
    if request.param == "those of every day":
        monkeypatch.setattr(plan, "_ALLOCATORS", {})
        monkeypatch.setattr(plan, "_reinterpreted", None)


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


def test_layouts_that_share_an_element_overlap_and_neighbouring_columns_do_not(recording):
    matrix = torch.empty(6, 12)

    def layout(view):
        return recording.Layout(0, view.storage_offset(), tuple(view.shape), view.stride(), view.dtype, 0)

    heads = [part.view(1, 6, 2, 2) for part in matrix.split(4, 1)]
    views = [matrix, *heads, heads[1].transpose(1, 2), matrix[:, 3:5], matrix[2], matrix[:, 11], matrix[1:3, 7:]]
    views += [matrix[:, :1].expand(6, 3), matrix.view(-1)[5:50], matrix.view(-1)[3:30].view(9, 3), matrix.view(-1)[4::5]]
    views += [matrix.as_strided((5, 3), (12, 5), 3)]
    for view in views:
        for other in views:
            numbers = torch.arange(matrix.numel()).as_strided
            share = {*numbers(view.shape, view.stride(), view.storage_offset()).flatten().tolist()}
            share &= {*numbers(other.shape, other.stride(), other.storage_offset()).flatten().tolist()}
            assert layout(view).overlaps(layout(other)) or not share, (view.shape, other.shape)
    assert not any(layout(a).overlaps(layout(b)) for a in heads for b in heads if a is not b)
    assert not layout(heads[0]).overlaps(layout(views[4])) and layout(heads[1]).overlaps(layout(views[4]))


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


def test_functions_that_a_torch_does_not_have_or_has_otherwise_are_left_alone(plan):
    def of_zeros(shape, stride, dtype):
        return torch.zeros(shape, dtype=dtype)

    assert plan.of_compiled_graphs("_no_such_function", callable) is None
    assert not plan._allocates(of_zeros) and not plan._reinterprets(torch.as_strided)


def test_tensors_are_made_on_the_device_of_the_call(plan, monkeypatch):
    """The allocator makes them on the current one."""
    current, seen = [1], []

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(plan.driver, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    found = plan.Plan(lambda tensors, addresses: seen.append(current[0]) or tensors[0], [], torch.device("cuda", 0))
    x = rows()
    assert found.run([x], [x.data_ptr()]) is x and seen == [0] and current == [1]


def test_memory_is_freed_after_its_last_use(replay, recording, monkeypatch):
    """While the last product is made, no more is alive than it needs."""
    alive, seen = [], []

    def watched(*args, **kwargs):
        result = product(*args, **kwargs)
        seen.append(sum(tensor() is not None for tensor in alive))
        alive.append(weakref.ref(result))
        return result

    product = torch.mm
    monkeypatch.setitem(recording.COMPUTATIONS, torch.ops.aten.mm.default, watched)
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
        lambda x: torch.mm(x, x).tanh(),
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


def test_a_tensor_at_an_odd_address_makes_the_call_in_full(replay, plan, recording, column_sum, monkeypatch):
    """One that is made, and the result of a product."""
    kinds, at, odd_ones = (plan._ALLOCATORS, recording.COMPUTATIONS), ("cpu", torch.ops.aten.mm.default), [False, False]

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


def test_a_plan_can_be_read(replay, column_sum):
    """Its source, and what the names in it stand for."""
    operator, memory = Counted(replay, lambda x, y: column_sum(x, torch.float32)), torch.randn(9, 8)
    for _ in range(CALLS):
        operator(memory[:3], memory[3:6])
    assert "def body" in replay.report("_call") and "# argument 1 starts 96 bytes after argument 0" in replay.report("_call")
    found = [plan for plan in replay.operators[-1].signatures.values() if isinstance(plan, replay.Plan)]
    named = dict(line[2:].split(" = ", 1) for line in str(found[0]).splitlines() if line.startswith("# v"))
    assert "torch.float32" in named.values() and all(name in found[0].source for name in named)
