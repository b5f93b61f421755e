"""The MLP over shards of its tokens: the formula in float64, what must hold, and errors that must be noticed."""

from functools import partial

import torch

from tests.modes import Operators, is_product
from tests.ops.common import FLOATS, assert_rows_close, exact, leaf, randn
from tests.ops.gated_activation import gated_exact
from tests.ops.generated import generated
from tests.ops.suite import Case, of_suite

NAMES = ("x", "gate", "up", "down")


def inputs(dtype, device, tokens, hidden, intermediate):
    x = leaf(randn(*tokens, hidden, dtype=dtype, device=device))
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    return x, *[leaf(randn(*s, dtype=dtype, device=device, seed=1 + i, scale=s[1] ** -0.5)) for i, s in enumerate(shapes)]


def mlp_exact(x, gate, up, down, activation):
    return gated_exact(x @ gate.t(), x @ up.t(), activation) @ down.t()


def check_tiled_mlp(ops, device, dtype, tokens, hidden=64, intermediate=96, activation="silu", shards=None, needs=(True,) * 4):
    """The GEMMs round their results, and the weights' gradients are rounded once a shard. needs: whose gradients are asked for."""
    leaves = inputs(dtype, device, tokens, hidden, intermediate)
    for tensor, need in zip(leaves, needs):
        tensor.requires_grad_(need)
    if activation == "silu":
        y = ops.tiled_swiglu(*leaves, shards=shards)
    else:
        y = ops.tiled_geglu(*leaves, shards=shards, approximate=activation)
    dy = randn(*y.shape, dtype=dtype, device=device, seed=7)
    y.backward(dy, retain_graph=True)
    first = [t.grad.clone() if t.grad is not None else None for t in leaves]
    leaves64 = [exact(t) for t in leaves]
    y64 = mlp_exact(*leaves64, activation)
    y64.backward(dy.double().cpu())
    assert_rows_close(y, y64, dtype, "tiled MLP y", 1.25)
    for name, found, wanted, need in zip(NAMES, leaves, leaves64, needs):
        assert (found.grad is not None) == need, f"the gradient of {name}"
        if need:
            assert_rows_close(found.grad, wanted.grad, dtype, f"tiled MLP d{name}", 1.25 if name == "x" or shards == 1 else 2, floor=1.0)
    y.backward(dy)
    for name, tensor, once in zip(NAMES, leaves, first):
        assert once is None or torch.equal(tensor.grad, once + once), f"the second backward of {name}"


def check_lengths(ops):
    """Shards have as many tokens as asked for, but where a weight's gradient would be written more often than every `hidden` tokens."""
    for tokens, shards, trains, expected in (
        (40, 4, False, [10] * 4),
        (40, 4, True, [16, 16, 8]),
        (80, 4, True, [20] * 4),
        (12, 4, True, [12]),
        (40, None, False, [16, 16, 8]),
        (40, None, True, [16, 16, 8]),
        (3, 8, False, [1] * 3),
    ):
        x, *weights = inputs(torch.float32, "cpu", (tokens,), 16, 24)
        written, made = [], []

        def product(operator, args, written=written, made=made):
            if is_product(operator, args):
                anew = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
                (made if anew else written).append((args[-2].shape[0], args[-1].shape[1]))
            return 0

        with Operators(product):
            y = ops.tiled_swiglu(x, *[weight.requires_grad_(trains) for weight in weights], shards=shards)
            rows = [shape[0] for shape in written[::3]]
            assert rows == expected, f"{tokens} tokens, {shards} shards, weights {'trained' if trains else 'frozen'}: {rows}"
            y.backward(y.detach())
        wide = [shape for shape in made if shape[1] == 24]
        assert wide == [(16, 24)] * trains, f"{wide}: a shard's buffers serve all, and only down's gradient is made"


CASES = (
    {"tokens": (5,), "shards": 2},
    {"tokens": (2, 9), "shards": 3, "hidden": 8},
    {"tokens": (3,), "shards": 8},
    {"tokens": (1, 70)},
    {"tokens": (1, 70), "activation": "tanh", "shards": 4, "hidden": 16},
    {"tokens": (2, 9), "shards": 5, "needs": (True, False, False, False)},
    {"tokens": (6,), "activation": "none", "shards": 2},
    {"tokens": (0,)},
)
NEEDS = tuple(tuple(i != j for j in range(4)) for i in range(4)) + ((False, True, False, False), (True, False, False, False))

OPERATION = "shared/ops/tiled_mlp.py"
MUTANTS = (
    *generated(OPERATION, "shards or lengths", "_add_product _length _shards"),
    (OPERATION, "_backward", "dgate.t(), x[part]", "dup.t(), x[part]", "shards"),
    (OPERATION, "_backward", ".addmm_(dup, up_weight)", "", "shards"),
    (OPERATION, "_backward", "dy[part].t(), hidden", "dy[part].t(), dgate", "shards"),
    (OPERATION, "_TiledMLP.forward", "save_for_backward(x, gate_weight, up_weight,", "save_for_backward(x, up_weight, gate_weight,",
     "shards"),
    (OPERATION, "_TiledMLP.forward", "tiled_mlp_forward, x, gate_weight", "tiled_mlp_forward, 2 * x, gate_weight", "shards"),
    (OPERATION, "_TiledMLP.backward", "tiled_mlp_backward(dy, ", "tiled_mlp_backward(-dy, ", "shards"),
)
CHECKS = of_suite({
    "shards": lambda ops: check_tiled_mlp(ops, "cpu", torch.float32, (2, 9), hidden=8, shards=3),
    "lengths": lambda ops: check_lengths(ops),
})


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for i, options in enumerate(CASES):
            yield f"case {i} {dtype}", partial(check_tiled_mlp, ops, device, dtype, **options)
        for needs in NEEDS:
            yield f"gradients of {needs} {dtype}", partial(check_tiled_mlp, ops, device, dtype, (6,), shards=2, needs=needs)


# ---------------------------------------------------------------- in the tests of every operation
OPERATIONS = {
    "tiled_swiglu": Case(
        lambda ops, x, *weights: ops.tiled_swiglu(x, *weights, shards=2),
        aligned=lambda n: ((4, n), (8, n), (8, n), (n, 8)),
        sample=lambda ops, new: (
            lambda x, *weights: ops.tiled_swiglu(x, *weights, shards=2),
            (new.normal(48, 1024), *(new.normal(96, 1024, scale=0.03, seed=i) for i in range(2)), new.normal(1024, 96, scale=0.1)),
        ),
    ),
    "tiled_geglu": Case(
        lambda ops, x, *weights: ops.tiled_geglu(x, *weights, shards=2), aligned=lambda n: ((4, n), (8, n), (8, n), (n, 8))
    ),
}


def check_large(ops, device):
    check_tiled_mlp(ops, device, torch.bfloat16, (2, 515), 512, 1408, shards=4)


def _of_mlp(new):
    return new(6, 64), new(96, 64), new(96, 64, seed=1), new(64, 96)


OPERATORS = {
    "tiled_mlp_forward": lambda new: [(*_of_mlp(new), "silu", 4)],
    "tiled_mlp_backward": lambda new: [
        (new(6, 64, seed=2), *_of_mlp(new), "silu", 4, *needs) for needs in ((True,) * 4, (True, False, True, False))
    ],
}
