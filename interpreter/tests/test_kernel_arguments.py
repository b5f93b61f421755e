"""The arguments of a kernel, and what it may be given."""

import cuda.tile as ct
import pytest
import torch
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, ScalarConstraint

from interpreter import InterpreterError, interpret
from interpreter.backend import tensor_at
from interpreter.tests.helpers import ANY_ARRAY, Const, copy_checked, copy_tiles, import_source


class TestArguments:
    def test_aliases(self):
        x = torch.zeros(8)
        with pytest.raises(InterpreterError, match="y is written and shares memory with x"):
            interpret(copy_checked, (2,), (x, x, 4))
        with pytest.raises(InterpreterError, match="shares memory"):
            interpret(copy_checked, (1,), (x[:5], x[3:], 4))

    @pytest.mark.parametrize("start", [0, 1, 3, 4])
    def test_aliases_whose_storages_start_at_different_addresses(self, start):
        """Has what the runtime's arguments have, which the interpreter makes of addresses."""
        whole = torch.zeros(16)
        x, y = (tensor_at(whole.data_ptr() + 4 * first, torch.float32, (8,), (1,)) for first in (start, 5))
        with pytest.raises(InterpreterError, match="y is written and shares memory with x"):
            interpret(copy_checked, (2,), (x, y, 4))
        apart = tensor_at(whole.data_ptr() + 32, torch.float32, (8,), (1,))
        interpret(copy_checked, (2,), (tensor_at(whole.data_ptr(), torch.float32, (8,), (1,)), apart, 4))

    def test_arrays_that_interleave_share_nothing(self):
        whole = torch.arange(32.0)
        x, y = (tensor_at(whole.data_ptr() + 4 * first, torch.float32, (4, 4), (8, 1)) for first in (0, 4))
        interpret(copy_tiles, (2, 1), (x, y, 2, 4))
        assert torch.equal(x, y)

    def test_views_of_one_tensor_that_do_not_meet(self):
        whole = torch.randn(4, 8)
        gate, up = whole[:, :4], whole[:, 4:]
        interpret(copy_tiles, (2, 1), (gate, up, 2, 4))
        assert torch.equal(gate, up)

    def test_two_inputs_may_be_one_tensor(self):
        @ct.kernel
        def add(a, b, y):
            ct.store(y, 0, ct.load(a, 0, 4) + ct.load(b, 0, 4))

        x, y = torch.ones(4), torch.zeros(4)
        interpret(add, (1,), (x, x, y))
        assert y.tolist() == [2] * 4

    def test_refused(self):
        y = torch.zeros(4)
        for x, what in (
            (None, "x is None"),
            (torch.zeros(4, requires_grad=True), "x requires grad"),
            (torch.zeros(4, dtype=torch.complex64), "not implemented"),
            ("text", "type str"),
        ):
            with pytest.raises(InterpreterError, match=what):
                interpret(copy_checked, (1,), (x, y, 4))
        with pytest.raises(InterpreterError, match="expected 3 arguments"):
            interpret(copy_checked, (1,), (y, y))
        for grid in ((0,), (2**24,), (1, 2**16), (1, 1, 2**16)):
            with pytest.raises(InterpreterError, match="the grid must be"):
                interpret(copy_checked, grid, (y, y.clone(), 4))

    def test_string_annotations(self, tmp_path):
        source = "from __future__ import annotations\nimport cuda.tile as ct\n\n@ct.kernel\ndef kernel(N: ct.Constant[int]):\n    pass\n"
        with pytest.raises(InterpreterError, match="annotations are strings"):
            interpret(import_source(source, tmp_path / "late.py").kernel, (1,), (4,))


def signature(*constraints):
    return KernelSignature(constraints, CallingConvention.cutile_python_v2(), symbol="kernel")


class TestSignature:
    """copy_tiles(x, y, ROWS, COLS) with promises about x."""

    def launch(self, x, **promises):
        loose = ArrayConstraint(ct.float32, 2, **ANY_ARRAY)
        promised = ArrayConstraint(**{"dtype": ct.float32, "ndim": 2, **ANY_ARRAY, **promises})
        y = torch.zeros(x.shape)
        interpret(copy_tiles, (1, 1), (x, y, 2, 4), signature=signature(promised, loose, 2, 4))

    def test_kept(self):
        self.launch(
            torch.zeros(2, 8)[:, :4], stride_constant=(None, 1), stride_divisible_by=(8, 1), shape_divisible_by=(2, 4),
            shape_constant=(2, None), base_addr_divisible_by=16,
        )  # fmt: skip

    @pytest.mark.parametrize(
        "x, promises, what",
        [
            (torch.zeros(2, 4).half(), {}, "dtype float32"),
            (torch.zeros(2, 4, 1), {}, "2 dimensions"),
            (torch.zeros(9)[1:].view(2, 4), {"base_addr_divisible_by": 16}, "an address divisible by 16 bytes"),
            (torch.zeros(4, 2).T, {"stride_constant": (None, 1)}, "stride 1 in dimension 1"),
            (torch.zeros(2, 5)[:, :4], {"stride_divisible_by": (4, 1)}, "stride of dimension 0 divisible by 4, got 5"),
            (torch.zeros(2, 4), {"stride_lower_bound_incl": (8, 0)}, "stride of at least 8 in dimension 0"),
            (torch.zeros(3, 4), {"shape_constant": (2, None)}, "size 2 in dimension 0, got 3"),
            (torch.zeros(2, 6), {"shape_divisible_by": (1, 4)}, "size of dimension 1 divisible by 4"),
            (torch.zeros(1, 4).expand(2, 4), {}, "no two indices at one address"),
        ],
    )
    def test_broken(self, x, promises, what):
        with pytest.raises(InterpreterError, match=f"kernel copy_tiles: argument x breaks its signature: {what}"):
            self.launch(x, **promises)

    def test_constants_and_scalars(self):
        @ct.kernel
        def kernel(n, eps, SIZE: Const):
            ct.static_assert(n.dtype == ct.int64)

        promised = signature(ScalarConstraint(ct.int64), ScalarConstraint(ct.float32), 4)
        interpret(kernel, (1,), (2**40, 1e-6, 4), signature=promised)
        for args, what in (((1, 1e-6, 8), "SIZE breaks its signature: constant 4"), ((0.5, 1e-6, 4), "n breaks .* a scalar of int64")):
            with pytest.raises(InterpreterError, match=what):
                interpret(kernel, (1,), args, signature=promised)

    def test_constant_sizes_are_constants_in_the_kernel(self):
        @ct.kernel
        def kernel(x):
            ct.static_assert(x.shape[1] == 4)
            ct.zeros((x.shape[1],), ct.float32)

        constraint = ArrayConstraint(ct.float32, 2, **ANY_ARRAY, shape_constant=(None, 4))
        interpret(kernel, (1,), (torch.zeros(2, 4),), signature=signature(constraint))
        with pytest.raises(InterpreterError, match="compile-time"):
            interpret(kernel, (1,), (torch.zeros(2, 4),))

    def test_alias_groups(self):
        grouped = ArrayConstraint(ct.float32, 1, **{**ANY_ARRAY, "alias_groups": ("same",)})
        x = torch.zeros(8)
        interpret(copy_checked, (2,), (x, x, 4), signature=signature(grouped, grouped, 4))
