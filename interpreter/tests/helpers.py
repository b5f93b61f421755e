"""What the tests of the interpreter share: what an expression in a kernel computes, and kernels that copy."""

import importlib.util
import math

import cuda.tile as ct
import torch

from interpreter import interpret

Const = ct.Constant[int]
NAN, INF = math.nan, math.inf
ANY_ARRAY = {"index_dtype": ct.int32, "stride_lower_bound_incl": 0, "alias_groups": (), "may_alias_internally": False}


def observe(expression, *inputs):
    """The tile that `expression` makes of tiles with the values of `inputs`, 1-d tensors of one power-of-two size."""
    size = inputs[0].numel()
    seen = []

    def record(tile):
        seen.append(tile)

    @ct.kernel
    def of_one(a):
        record(expression(ct.load(a, 0, size)))

    @ct.kernel
    def of_two(a, b):
        record(expression(ct.load(a, 0, size), ct.load(b, 0, size)))

    interpret((of_one, of_two)[len(inputs) - 1], (1,), inputs)
    return seen[0]


def values(tile):
    return tile.data.tolist()


def ints(*xs, dtype=torch.int32):
    return torch.tensor(xs, dtype=dtype)


def floats(*xs, dtype=torch.float32):
    return torch.tensor(xs, dtype=dtype)


def import_source(source, path):
    """The compiler reads a kernel's source from its file."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@ct.kernel
def copy_tiles(x, y, ROWS: Const, COLS: Const):
    tile = ct.load(x, (ct.bid(0), ct.bid(1)), (ROWS, COLS), padding_mode=ct.PaddingMode.ZERO)
    ct.store(y, (ct.bid(0), ct.bid(1)), tile)


@ct.kernel
def copy_checked(x, y, SIZE: Const):
    i = ct.bid(0) * SIZE + ct.arange(SIZE, dtype=ct.int32)
    ct.scatter(y, i, ct.gather(x, i))
