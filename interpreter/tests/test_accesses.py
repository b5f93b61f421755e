"""Reading and writing: bounds, padding, views, gathers."""

import cuda.tile as ct
import pytest
import torch

from interpreter import InterpreterError, interpret
from interpreter.tests.helpers import INF, NAN, Const, copy_checked, copy_tiles, floats, ints, values


@ct.kernel
def copy_unchecked(x, y, SIZE: Const):
    i = ct.bid(0) * SIZE + ct.arange(SIZE, dtype=ct.int32)
    ct.scatter(y, i, ct.gather(x, i, check_bounds=False), check_bounds=False)


class TestMemory:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.uint16, torch.bool])
    def test_dtypes_survive_a_copy(self, dtype):
        x = torch.randint(0, 100, (16,)).to(dtype)
        y = torch.zeros(16, dtype=dtype)
        interpret(copy_checked, (4,), (x, y, 4))
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))

    def test_tails(self):
        x = torch.randn(5, 7)
        y = torch.full((5, 7), NAN)
        interpret(copy_tiles, (3, 2), (x, y, 2, 4))
        assert torch.equal(x, y)

    def test_any_strides(self):
        x = torch.randn(7, 2, 5).transpose(0, 2)[:, 1]
        y = torch.full((7, 5), NAN).T
        interpret(copy_tiles, (3, 2), (x, y, 2, 4))
        assert torch.equal(x, y)

    @pytest.mark.parametrize("mode, wanted", [("ZERO", 0.0), ("NEG_INF", -INF), ("UNDETERMINED", NAN)])
    def test_padding(self, mode, wanted):
        seen = []

        @ct.kernel
        def kernel(x):
            seen.append(ct.load(x, 1, 4, padding_mode=ct.PaddingMode[mode]))

        interpret(kernel, (1,), (torch.ones(6),))
        torch.testing.assert_close(seen[0].data, floats(1, 1, wanted, wanted), equal_nan=True)

    def test_undetermined_integers_are_poison(self):
        seen = []

        @ct.kernel
        def kernel(x):
            seen.append(ct.load(x, 0, 4))

        interpret(kernel, (1,), (ints(1, 2, 3),))
        assert values(seen[0]) == [1, 2, 3, -(2**31)]

    def test_order(self):
        seen = []

        @ct.kernel
        def kernel(x):
            seen.append(ct.load(x, (1, 0), (2, 4), order="F"))
            seen.append(ct.num_tiles(x, 0, (2, 4), order=(1, 0)))

        x = torch.arange(32.0).reshape(4, 8)
        interpret(kernel, (1,), (x,))
        assert torch.equal(seen[0].data, x.T[2:4, 0:4])
        assert seen[1].value() == 4

    def test_gather_broadcasts_and_masks(self):
        seen = []

        @ct.kernel
        def kernel(x):
            rows, cols = ct.arange(2, dtype=ct.int32), ct.arange(4, dtype=ct.int32)
            seen.append(ct.gather(x, (rows[:, None], cols[None, :])))
            seen.append(ct.gather(x, (1, cols - 1), padding_value=-1))
            seen.append(ct.gather(x, (rows + 2, 0), padding_value=7.0))
            seen.append(ct.gather(x, (0, cols), mask=cols < 2, padding_value=9, check_bounds=False))

        x = torch.arange(12.0).reshape(3, 4)
        interpret(kernel, (1,), (x,))
        assert torch.equal(seen[0].data, x[:2])
        assert values(seen[1]) == [-1, 4, 5, 6]
        assert values(seen[2]) == [8, 7]
        assert values(seen[3]) == [0, 1, 9, 9]

    def test_scatter_broadcasts_its_value(self):
        @ct.kernel
        def kernel(y):
            rows, cols = ct.arange(4, dtype=ct.int32), ct.arange(2, dtype=ct.int32)
            ct.scatter(y, (rows[:, None], cols), cols + 1, mask=(rows != 1)[:, None])

        y = torch.zeros(3, 2, dtype=torch.int32)
        interpret(kernel, (1,), (y,))
        assert y.tolist() == [[1, 2], [0, 0], [1, 2]]

    def test_views(self):
        @ct.kernel
        def kernel(x, y):
            part = x.slice(axis=1, start=ct.bid(0) + 1, stop=x.shape[1])
            view = part.tiled_view((2, 2), padding_mode=ct.PaddingMode.ZERO)
            total = ct.zeros((2, 2), ct.float32)
            for i in range(view.num_tiles(1)):
                total = total + view.load((0, i))
            y.tiled_view((2, 2)).store((0, 0), total)

        x, y = torch.arange(12.0).reshape(2, 6), torch.zeros(2, 2)
        interpret(kernel, (1,), (x, y))
        assert y.tolist() == [[1 + 3 + 5, 2 + 4], [7 + 9 + 11, 8 + 10]]

    def test_overlapping_view_and_raw_memory(self):
        seen = []

        @ct.kernel
        def kernel(x):
            seen.append(x.tiled_view(4, traversal_steps=2).load(1))
            raw = x.get_raw_memory()
            seen.append(raw.load_offset(ct.arange(4, dtype=ct.int32) * 2, mask=ct.arange(4, dtype=ct.int32) < 3))
            raw.store_offset(7, 70)

        x = torch.arange(8, dtype=torch.int32)
        interpret(kernel, (1,), (x,))
        assert values(seen[0]) == [2, 3, 4, 5]
        assert values(seen[1]) == [0, 2, 4, 0]
        assert x[7] == 70

    def test_advanced_indexing(self):
        @ct.kernel
        def kernel(x, rows, y):
            tile = ct.load_advanced_indexing(x, (ct.load(rows, 0, 2), ct.Slice(2, 4)), padding_mode=ct.PaddingMode.ZERO)
            ct.store_advanced_indexing(y, (ct.arange(2, dtype=ct.int32), ct.Slice(0, 4)), tile)

        x, y = torch.arange(20.0).reshape(4, 5), torch.zeros(2, 4)
        interpret(kernel, (1,), (x, ints(3, 1), y))
        assert y.tolist() == [[17, 18, 19, 0], [7, 8, 9, 0]]

    def test_a_list_of_arrays(self):
        @ct.kernel
        def kernel(xs, y):
            total = ct.zeros((4,), ct.float32)
            for i in range(len(xs)):
                total = total + ct.load(xs[i], 0, 4)
            ct.store(y, 0, total)

        y = torch.zeros(4)
        interpret(kernel, (1,), ([torch.ones(4), torch.ones(4) * 2], y))
        assert y.tolist() == [3] * 4

    def test_0d_arrays(self):
        @ct.kernel
        def kernel(x, y):
            ct.scatter(y, (), ct.gather(x, ()) * 2)

        y = torch.zeros(())
        interpret(kernel, (1,), (torch.tensor(4.0), y))
        assert y == 8


class TestBounds:
    def test_unchecked_access(self):
        with pytest.raises(InterpreterError, match=r"kernel copy_unchecked, block \(2,\): x\[10\] is out of bounds for shape \(10,\)"):
            interpret(copy_unchecked, (3,), (torch.zeros(10), torch.zeros(12), 4))
        with pytest.raises(InterpreterError, match=r"y\[10\] is out of bounds"):
            interpret(copy_unchecked, (3,), (torch.zeros(12), torch.zeros(10), 4))

    def test_inside_the_storage_but_outside_the_array(self):
        whole = torch.zeros(2, 16)
        with pytest.raises(InterpreterError, match=r"x\[5\] is out of bounds"):
            interpret(copy_unchecked, (2,), (whole[0, :5], torch.zeros(8), 4))

    def test_negative_indices_are_outside(self):
        @ct.kernel
        def kernel(x):
            ct.gather(x, ct.arange(4, dtype=ct.int32) - 1, check_bounds=False)

        with pytest.raises(InterpreterError, match=r"x\[-1\] is out of bounds"):
            interpret(kernel, (1,), (torch.zeros(4),))

    def test_a_mask_keeps_an_unchecked_access_inside(self):
        @ct.kernel
        def kernel(x, LIMIT: Const):
            i = ct.arange(8, dtype=ct.int32)
            ct.gather(x, i, mask=i < LIMIT, check_bounds=False)

        interpret(kernel, (1,), (torch.zeros(5), 5))
        with pytest.raises(InterpreterError, match=r"x\[5\]"):
            interpret(kernel, (1,), (torch.zeros(5), 6))

    def test_unchecked_tile(self):
        @ct.kernel
        def kernel(x):
            ct.load(x, (0, 1), (2, 4), check_bounds=False)

        interpret(kernel, (1,), (torch.zeros(2, 8),))
        with pytest.raises(InterpreterError, match=r"leaves \(check_bounds=False\) x of shape \(2, 7\): indices 4 to 7 in dimension 1"):
            interpret(kernel, (1,), (torch.zeros(2, 7),))

    def test_a_tile_entirely_outside_is_undefined_even_when_checked(self):
        with pytest.raises(InterpreterError, match="lies entirely outside x"):
            interpret(copy_tiles, (1, 3), (torch.zeros(2, 8), torch.zeros(2, 8), 2, 4))

    def test_slices_stay_inside(self):
        @ct.kernel
        def kernel(x, stop: int):
            x.slice(0, 2, stop)

        interpret(kernel, (1,), (torch.zeros(4), 4))
        with pytest.raises(InterpreterError, match="slice 2:5 leaves dimension 0 of x"):
            interpret(kernel, (1,), (torch.zeros(4), 5))
