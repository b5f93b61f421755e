"""Blocks among each other: races, atomics and their orders."""

import cuda.tile as ct
import pytest
import torch

from interpreter import InterpreterError, interpret
from interpreter.backend import tensor_at
from interpreter.tests.helpers import NAN, Const, copy_tiles, values


class TestRaces:
    def test_two_blocks_write_different_values(self):
        @ct.kernel
        def kernel(y):
            ct.scatter(y, 0, ct.bid(0))

        with pytest.raises(InterpreterError, match=r"block \(1,\): race: another block wrote y\[0\], which this block writes"):
            interpret(kernel, (2,), (torch.zeros(1, dtype=torch.int32),))
        interpret(kernel, (2,), (torch.zeros(1, dtype=torch.int32),), races=False)

    def test_the_same_value_is_no_race(self):
        @ct.kernel
        def kernel(y):
            ct.scatter(y, ct.minimum(ct.bid(0) * 2 + ct.arange(2, dtype=ct.int32), 2), 5.0)

        y = torch.zeros(3)
        interpret(kernel, (3,), (y,))
        assert y.tolist() == [5] * 3

    def test_the_same_value_and_then_another(self):
        @ct.kernel
        def kernel(y):
            ct.scatter(y, 0, 5.0)
            if ct.bid(0) == 1:
                ct.scatter(y, 0, 6.0)

        with pytest.raises(InterpreterError, match="race"):
            interpret(kernel, (2,), (torch.zeros(1),))

    @pytest.mark.parametrize("order", ["forward", "reverse", "random"])
    def test_reading_what_another_block_writes(self, order):
        """Found in every order, whichever of the two blocks comes first."""

        @ct.kernel
        def shift(x):
            ct.scatter(x, ct.bid(0) + 1, ct.gather(x, ct.bid(0)))

        with pytest.raises(InterpreterError, match="race: another block (wrote|read)"):
            interpret(shift, (4,), (torch.arange(5.0),), order=order)

    def test_a_race_between_arguments_whose_storages_start_at_different_addresses(self, monkeypatch):
        """Where they may share memory, and each block reads what the one before it writes."""
        monkeypatch.setattr("interpreter.launch.overlap", lambda a, b: False)

        @ct.kernel
        def shift(x, y):
            ct.scatter(y, ct.bid(0), ct.gather(x, ct.bid(0)))

        whole = torch.arange(6.0)
        x, y = (tensor_at(whole.data_ptr() + 4 * first, torch.float32, (5,), (1,)) for first in (0, 1))
        with pytest.raises(InterpreterError, match="race: another block (wrote|read)"):
            interpret(shift, (5,), (x, y))

    def test_in_place_is_no_race(self):
        @ct.kernel
        def double(x):
            i = ct.bid(0) * 4 + ct.arange(4, dtype=ct.int32)
            ct.scatter(x, i, ct.gather(x, i) * 2)
            ct.scatter(x, i, ct.gather(x, i) + 1)

        x = torch.arange(10.0)
        interpret(double, (3,), (x,))
        assert torch.equal(x, torch.arange(10.0) * 2 + 1)
        with pytest.raises(InterpreterError, match=r"block \(0,\): this block reads x\[0\], which it wrote itself and has not released"):
            interpret(double, (3,), (x,), read_back=False)

    def test_one_store_with_two_values_for_one_place(self):
        @ct.kernel
        def kernel(y):
            ct.scatter(y, ct.arange(4, dtype=ct.int32) // 2, ct.arange(4, dtype=ct.int32))

        with pytest.raises(InterpreterError, match=r"two different values to y\[0\]"):
            interpret(kernel, (1,), (torch.zeros(2, dtype=torch.int32),))

    @pytest.mark.parametrize("order", ["forward", "reverse", "random"])
    def test_results_in_every_order(self, order):
        x, y = torch.randn(6, 8), torch.full((6, 8), NAN)
        interpret(copy_tiles, (3, 2), (x, y, 2, 4), order=order)
        assert torch.equal(x, y)

    def test_atomics(self):
        @ct.kernel
        def histogram(x, counts, most):
            i = ct.bid(0) * 4 + ct.arange(4, dtype=ct.int32)
            v = ct.gather(x, i, padding_value=-1)
            ct.atomic_add(counts, v, 1)  # the padding lies outside, where nothing happens
            ct.atomic_max(most, 0, ct.max(v, 0))

        x = torch.randint(0, 5, (19,), dtype=torch.int32)
        counts, most = torch.zeros(5, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        interpret(histogram, (5,), (x, counts, most))
        assert torch.equal(counts, torch.bincount(x, minlength=5).int())
        assert most[0] == x.max()

    def test_atomics_return_what_was_there(self):
        seen = []

        @ct.kernel
        def kernel(x):
            i = ct.arange(4, dtype=ct.int32)
            seen.append(ct.atomic_add(x, i // 2, i + 1))
            seen.append(ct.atomic_xchg(x, 0, 9))
            seen.append(ct.atomic_cas(x, i, ct.full((4,), 9, ct.int32), 0))
            x.tiled_view(2).atomic_store_add(0, ct.ones((2,), ct.int32))

        x = torch.zeros(2, dtype=torch.int32)
        interpret(kernel, (1,), (x,))
        assert values(seen[0]) == [0, 1, 0, 3]
        assert values(seen[1]) == 3
        assert values(seen[2]) == [9, 7, 9, 9]
        assert x.tolist() == [1, 8]

    def test_a_plain_read_of_an_atomic_is_a_race(self):
        @ct.kernel
        def kernel(x, y):
            ct.atomic_add(x, 0, 1, memory_order=ct.MemoryOrder.RELAXED)
            ct.scatter(y, ct.bid(0), ct.gather(x, 0))

        with pytest.raises(InterpreterError, match=r"race: another block read x\[0\], which this block writes"):
            interpret(kernel, (2,), (torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)))

    @pytest.mark.parametrize("order", ["forward", "reverse", "random"])
    def test_the_last_block_may_read_what_the_others_released(self, order):
        x, part, count, total = torch.randn(32), torch.zeros(8), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        interpret(last_block_sums, (8,), (x, part, count, total, 1), order=order, read_back=False)
        torch.testing.assert_close(total[0], x.sum())

    def test_without_the_release_it_is_a_race(self):
        x, part, count, total = torch.randn(32), torch.zeros(8), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        with pytest.raises(InterpreterError, match="race: another block wrote part"):
            interpret(last_block_sums, (8,), (x, part, count, total, 0))

    def test_a_block_that_waits_for_a_later_one(self, monkeypatch):
        monkeypatch.setattr("interpreter.races.ATOMICS_A_BLOCK", 50)

        @ct.kernel
        def kernel(flag):
            while ct.atomic_cas(flag, 0, 1, 1) == 0:
                pass

        with pytest.raises(InterpreterError, match="wait"):
            interpret(kernel, (1,), (torch.zeros(1, dtype=torch.int32),))


@ct.kernel
def last_block_sums(x, part, count, total, RELEASE: Const):
    block = ct.bid(0)
    ct.scatter(part, block, ct.sum(ct.load(x, block, 4)))
    order = ct.MemoryOrder.ACQ_REL if RELEASE else ct.MemoryOrder.ACQUIRE
    if ct.atomic_add(count, 0, 1, memory_order=order) == ct.num_blocks(0) - 1:
        ct.scatter(total, 0, ct.sum(ct.load(part, 0, 8)))
