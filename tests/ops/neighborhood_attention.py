"""Neighborhood attention: softmax with a mask in float64, what must hold, and errors that must be noticed."""

import math
from functools import partial

import torch

from tests.ops.common import FLOATS, assert_rows_close, exact, leaf, randn
from tests.ops.generated import generated
from tests.ops.suite import Case, of_suite


def neighborhood_exact(q, k, v, kernel_size, dilation, scale, causal):
    places = torch.arange(q.shape[2])
    apart = places[None, :] - places[:, None]
    seen = (apart.abs() <= kernel_size // 2 * dilation) & (apart % dilation == 0)
    if causal:
        seen &= apart <= 0
    return torch.softmax((q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -math.inf), -1) @ v


def check_neighborhood_attention(
    ops, device, dtype, shape=(2, 2, 37, 16), kernel_size=7, dilation=1, scale=None, causal=False, view=lambda x: x, same_memory=False
):
    """view: makes q, k and v out of contiguous tensors; same_memory: the result lies in memory as q does."""
    base = [leaf(randn(*shape, dtype=dtype, device=device, seed=i)) for i in range(3)]
    q, k, v = map(view, base)
    out = ops.neighborhood_attention(q, k, v, kernel_size, dilation, scale, causal)
    dout = randn(*out.shape, dtype=dtype, device=device, seed=4)
    given = [t.detach().clone() for t in (*base, dout)]
    out.backward(dout)
    base64 = [exact(x) for x in base]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out64 = neighborhood_exact(*map(view, base64), kernel_size, dilation, scale, causal)
    out64.backward(dout.double().cpu())
    what = f"neighborhood attention {shape}"
    assert out.dtype == dtype and (not same_memory or out.stride() == q.stride())
    assert_rows_close(out, out64, dtype, f"{what} out")
    largest_q, largest_k, largest_v, largest_dout = (float(t.detach().abs().max()) if t.numel() else 0.0 for t in (*base, dout))
    size = scale * q.shape[-1] ** 0.5 * largest_dout * largest_v
    terms = {"q": size * largest_k, "k": size * largest_q, "v": 0.0}
    for name, found, wanted in zip("qkv", base, base64):
        # The terms of one token's gradient cancel where it sees few others; where all see themselves alone, dq and dk are 0.
        assert_rows_close(found.grad, wanted.grad, dtype, f"{what} d{name}", floor=2.0, terms=terms[name])
    assert all(map(torch.equal, given, (*base, dout))), f"{what} overwrites what is the caller's"


transposed = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
CASES = (
    {},
    {"shape": (1, 2, 50, 64), "dilation": 3},
    {"shape": (1, 1, 33, 72), "kernel_size": 13, "causal": True},
    {"shape": (1, 1, 40, 128), "kernel_size": 17, "scale": 0.3},
    {"shape": (2, 1, 45, 128)},
    {"shape": (1, 2, 40, 64), "kernel_size": 11},
    {"shape": (1, 1, 30, 128), "kernel_size": 7, "dilation": 2, "causal": True},
    {"shape": (1, 1, 60, 128), "kernel_size": 29, "dilation": 2, "causal": True},
    {"shape": (1, 2, 50, 64), "kernel_size": 21, "causal": True},
    {"shape": (1, 2, 90, 32), "kernel_size": 65},
    {"shape": (1, 1, 90, 80), "kernel_size": 41, "dilation": 2, "causal": True},
    {"shape": (1, 1, 21, 5), "kernel_size": 3, "dilation": 2},
    {"shape": (1, 1, 19, 136), "kernel_size": 5},
    {"shape": (1, 2, 5, 8), "kernel_size": 7, "dilation": 9},
    {"shape": (2, 1, 1, 8), "kernel_size": 1},
    {"shape": (1, 2, 20, 16), "view": transposed, "same_memory": True},
    {"shape": (1, 2, 20, 16), "view": lambda x: x[..., 1:9]},
    {"shape": (1, 2, 20, 16), "view": lambda x: x.transpose(2, 3)},
    {"shape": (0, 2, 20, 16)},
    {"shape": (1, 2, 0, 16)},
)
KERNEL, ROWS = "kernel_src/neighborhood_attention.py", "kernel_src/neighborhood_rows.py"
OPERATION = "shared/ops/neighborhood_attention.py"
MUTANTS = (
    *generated(KERNEL, "once", "neighborhood_backward neighborhood_forward", same={
        f"ot = read_rows_of(out, at, places, (places < first) | (places >= first{more}), residue, dilation, count, D)": "nothing uses them"
        for more in ("", " - M")
    }),
    *generated(KERNEL, "two kernels or causal", "neighborhood_backward_keys neighborhood_backward_queries", same={
        f"keys, queries = positions(first, M), positions(first{right}, N)": "right is 0 in causal windows, which these are for"
        for right in ("", " + right")
    }),
    *generated(KERNEL, "wide", "wide_neighborhood_backward_keys wide_neighborhood_backward_queries wide_neighborhood_forward"),
    *generated(KERNEL, "fp32 or fp32 causal",
               "rowwise_neighborhood_backward_keys rowwise_neighborhood_backward_queries rowwise_neighborhood_forward"),
    *generated(ROWS, "once", "seen tile_of"),
    *generated(OPERATION, "once", "_NeighborhoodAttention.backward _NeighborhoodAttention.forward"),
    (ROWS, "tile_of", "ct.bid(2) % dilation", "0", "once"),
    (KERNEL, "neighborhood_backward_keys", "first - right", "first - left", "causal"),
    (KERNEL, "wide_neighborhood_forward", "first + M + right", "first + right", "wide"),
    (KERNEL, "wide_neighborhood_backward_keys", "first + M + left", "first + left", "wide"),
    (KERNEL, "rowwise_neighborhood_forward", "range(left + right + 1)", "range(left + right)", "fp32"),
    (OPERATION, "neighborhood_attention", "0 if causal else left", "left", "causal"),
    (OPERATION, "backward_reference", "dk[:, :, keys]", "dk[:, :, queries]", "PyTorch", False),
    (OPERATION, "neighborhood_attention", "min(dilation, tokens)", "dilation", "far"),
)
CHECKS = of_suite({
    "once": lambda ops: check_neighborhood_attention(ops, "cpu", torch.bfloat16, (1, 2, 83, 16), dilation=2),
    "two kernels": lambda ops: check_neighborhood_attention(ops, "cpu", torch.bfloat16, kernel_size=25, causal=True),
    "causal": lambda ops: check_neighborhood_attention(ops, "cpu", torch.bfloat16, kernel_size=33, causal=True),
    "wide": lambda ops: check_neighborhood_attention(ops, "cpu", torch.bfloat16, (1, 1, 150, 16), 81),
    "fp32": lambda ops: check_neighborhood_attention(ops, "cpu", torch.float32),
    "fp32 causal": lambda ops: check_neighborhood_attention(ops, "cpu", torch.float32, causal=True),
    "far": lambda ops: check_neighborhood_attention(ops, "cpu", torch.float32, (1, 1, 5, 8), dilation=9),
    "PyTorch": lambda ops: check_neighborhood_attention(ops, "cpu", torch.float32),
})


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for i, options in enumerate(CASES):
            yield f"case {i} {dtype}", partial(check_neighborhood_attention, ops, device, dtype, **options)


# ---------------------------------------------------------------- in the tests of every operation
def apart(x):
    """Lays the numbers out with batch rows that begin 800 elements apart."""
    flat = x.flatten(1)
    return torch.nn.functional.pad(flat, (0, 800 - flat.shape[1]))[:, : flat.shape[1]].unflatten(1, x.shape[1:])


OPERATIONS = {
    "neighborhood_attention": Case(
        lambda ops, q, k, v: ops.neighborhood_attention(q, k, v, 3),
        aligned=lambda n: ((1, 2, 5, n),) * 3,
        slabs=((4, 2, 8, 16),) * 3,
        sample=lambda ops, new: (ops.neighborhood_attention, tuple(new.normal(2, 4, 16, 128, seed=i) for i in (4, 5, 6))),
    ),
    "neighborhood_attention, k's batch rows apart": Case(
        lambda ops, q, k, v: ops.neighborhood_attention(q, apart(k), v, 3), slabs=((4, 2, 8, 16),) * 3
    ),
}


def check_large(ops, device):
    check_neighborhood_attention(ops, device, torch.bfloat16, (2, 4, 1030, 128))


def _of_window(new):
    return new(1, 2, 70, 64), new(1, 2, 70, 64, seed=1), new(1, 2, 70, 64, seed=2)


OPERATORS = {
    "neighborhood_attention_forward": lambda new: [(*_of_window(new), 3, 3, dilation, 0.125) for dilation in (1, 2)],
    "neighborhood_attention_backward": lambda new: [
        (*_of_window(new), new(1, 2, 70, 64, seed=3), new(1, 2, 70, 64, seed=4), 9 + new.exact(2, 70).abs(), 3, 3, 1, 0.125)
    ],
}
