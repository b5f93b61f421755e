"""A plan is followed for arguments that lie to each other as those did that it was recorded of, on their device, and at addresses that are
aligned as theirs were, each by itself."""

import importlib

import pytest
import torch

from tests.ops.layouts import misaligned
from tests.replaying import CALLS, Counted, rows, sums_of_two


def sum_of_neighbours(column_sum):
    """An operator that adds up the rows of all its arguments, in one launch where each begins after the one before."""

    def function(*tensors):
        count, columns = tensors[0].shape
        starts = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors]
        if starts == [i * tensors[0].nbytes for i in range(len(tensors))]:
            return column_sum(tensors[0].as_strided((count * len(tensors), columns), (columns, 1)), torch.float32)
        return torch.cat(tensors).sum(0)

    return function


@pytest.mark.parametrize("count", (2, 3))
def test_a_plan_is_for_arguments_that_lie_so_to_each_other(replay, column_sum, count):
    """Neighbours in one piece of memory, then one of them elsewhere: in it, in front of the others, or in memory of its own."""
    operator = Counted(replay, sum_of_neighbours(column_sum))
    memory = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    neighbours = [memory[3 * i : 3 * i + 3] for i in range(count)]
    for _ in range(CALLS):
        torch.testing.assert_close(operator(*neighbours), memory[: 3 * count].sum(0))
    calls = operator.calls
    assert calls == 2, "neighbours are not replayed"
    others = [memory[3 * i + 3 : 3 * i + 6] for i in range(count)]
    torch.testing.assert_close(operator(*others), memory[3 : 3 * count + 3].sum(0))
    assert operator.calls == calls, "neighbours elsewhere are not replayed"
    for place in range(count):
        for other in (memory[9:], memory[6:9], memory[:3], rows(start=5)):
            if other.data_ptr() == neighbours[place].data_ptr():
                continue
            moved = [*neighbours[:place], other, *neighbours[place + 1 :]]
            torch.testing.assert_close(operator(*moved), torch.cat(moved).sum(0))


def test_a_plan_is_for_the_alignment_of_each_argument(replay, column_sum):
    """One argument at an odd address, then the other: the variant that a plan launches was promised the first."""
    operator = Counted(replay, sums_of_two(column_sum))

    def check(x, y):
        assert torch.equal(operator(x, y)[0], torch.stack((x.sum(0), y.sum(0))))

    for _ in range(CALLS):
        check(misaligned(rows()), rows(start=4))
    calls = operator.calls
    assert calls == 2
    for number, (x, y) in enumerate(((rows(), misaligned(rows(start=4))), (misaligned(rows()), misaligned(rows(start=4)))), 1):
        check(x, y)
        assert operator.calls == calls + number, "the plan of another alignment was followed"


def elsewhere(x):
    return torch.empty_like(x, device="meta")


def test_a_plan_is_for_one_device(replay):
    """Replays the function on a tensor like those recorded, on another device."""
    operator = Counted(replay, lambda x: torch.empty_like(x))
    for _ in range(CALLS):
        assert operator(rows()).is_cpu
    assert operator.calls == 2
    assert operator(elsewhere(rows())).is_meta and operator(rows()).is_cpu
    assert operator.calls == 3


@pytest.mark.parametrize(
    ("function", "others"),
    (
        (lambda x, y: torch.empty_like(x), elsewhere),
        (lambda x, y: torch.empty_like(y), elsewhere),
        (lambda x, y: torch.empty_like(x, device="meta"), lambda x: x),
        (lambda x, y: (torch.empty_like(x), torch.empty_like(x, device="meta")), lambda x: x),
    ),
    ids=("an argument that is not used", "an argument", "the result", "one of the results"),
)
def test_nothing_on_two_devices_is_replayed(replay, function, others):
    operator = Counted(replay, function)
    for _ in range(CALLS):
        x, y = rows(), others(rows())
        found, wanted = operator(x, y), function(x, y)
        one, other = ([t] if isinstance(t, torch.Tensor) else t for t in (found, wanted))
        assert [t.device for t in one] == [t.device for t in other]
    assert operator.calls == CALLS


@pytest.mark.parametrize("current", (0, 1))
def test_a_plan_makes_its_tensors_on_the_device_of_its_arguments(interpreted, monkeypatch, current):
    """Whichever is current: the allocator takes that one."""
    plan = importlib.import_module(f"{interpreted.__name__}.shared.runtime.plan")
    devices = [current]

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            devices.append(self.index)

        def __exit__(self, *_):
            devices.pop()

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(plan.driver, "current_device", lambda: devices[-1])
    ran_on = []
    made = plan.Plan(lambda tensors, addresses: ran_on.append(devices[-1]) or "results", (), torch.device("cuda", 1))
    assert made.run([], []) == "results" and ran_on == [1] and devices == [current]
