"""The short causal convolution against float64."""

import importlib

import torch
from torch.nn.functional import conv1d, pad, silu

from tests.ops.common import BF16, FLOATS, FP32, assert_rows_close, backward_twice, errors_in, exact, leaf, randn, unchanged
from tests.ops.generated import generated


def module_of(package):
    return importlib.import_module(f"{package.__name__}.shared.ops.short_conv")


def conv_exact(x, weight, bias, lengths):
    """x: [tokens, channels] of documents that lie one after another."""
    parts = [conv1d(pad(part.t()[None], (3, 0)), weight[:, None], bias, groups=x.shape[1])[0].t() for part in x.split(lengths)]
    return silu(torch.cat(parts))


def check_conv(package, device, dtype, lengths, channels, *, bias=False, view=lambda x: x, weights=lambda x: x):
    """view, weights: lay out x, and the weight and the bias."""
    ops, tokens = module_of(package), sum(lengths)
    base = leaf(view(randn(1, tokens, channels, dtype=FP32, device=device).to(dtype)))
    weight = leaf(weights(randn(base.shape[-1], 4, dtype=dtype, device=device, seed=1, scale=0.5)))
    shift = leaf(weights(randn(base.shape[-1], dtype=dtype, device=device, seed=2))) if bias else None
    leaves = [t for t in (base, weight, shift) if t is not None]
    leaves64 = [exact(t) for t in leaves]
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0) if len(lengths) > 1 else None
    dy = randn(*base.shape, dtype=dtype, device=device, seed=3)
    untouched = unchanged(*leaves, dy)
    y = ops.short_conv(base, weight, shift, cu_seqlens=ends)
    y64 = conv_exact(leaves64[0][0], leaves64[1], leaves64[2] if bias else None, lengths)
    what = f"convolution {lengths} of {channels}"
    assert_rows_close(y[0], y64, dtype, f"{what} y", floor=0.3)
    found = backward_twice(y, dy, leaves)
    expected = torch.autograd.grad(y64, leaves64, dy[0].double().cpu())
    for name, a, b in zip(("dx", "dweight", "dbias"), found, expected, strict=False):
        assert_rows_close(a.view(b.shape) if name == "dx" else a, b, dtype, f"{what} {name}", floor=0.3)
    untouched()


def check_batch(package, device, dtype):
    """Rows of a batch are documents, as documents in one row are: the same bits, forward and backward."""
    ops = module_of(package)
    x, weight = leaf(randn(2, 9, 512, dtype=dtype, device=device)), randn(512, 4, dtype=dtype, device=device, seed=1)
    packed = ops.short_conv(x.view(1, 18, 512), weight, cu_seqlens=torch.tensor([0, 9, 18], device=device)).view_as(x)
    rows = ops.short_conv(x, weight)
    assert torch.equal(rows, packed)
    dy = randn(2, 9, 512, dtype=dtype, device=device, seed=3)
    alone = [torch.autograd.grad(ops.short_conv(x[i : i + 1], weight), x, dy[i : i + 1])[0][i] for i in range(2)]
    for grad in (torch.autograd.grad(rows, x, dy)[0], torch.autograd.grad(packed, x, dy)[0]):
        assert torch.equal(grad, torch.stack(alone))


def every_other(x):
    """The same numbers, each two after the one before."""
    return torch.stack((x, x), -1)[..., 0]


def transposed(x):
    return x.t().contiguous().t()


def half_of_rows(x):
    return torch.cat((x, x), -1)[..., : x.shape[-1]]


def one_further(x):
    """The same numbers at an odd address."""
    return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)


LAYOUTS = every_other, transposed, half_of_rows, one_further


# Steps without masks in the middle of spans, documents that start in some, and last blocks that find no tokens: with the two SMs of the
# interpreter and the hundred of a GPU.
LONG = {"cpu": ((100, 1, 156), 512), "cuda": ((3000, 1, 2, 5000, 188), 1032)}


def all_cases(package, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        yield f"whole {dtype}", lambda d=dtype: check_conv(package, device, d, (37,), 512)
        yield f"documents {dtype}", lambda d=dtype: check_conv(package, device, d, (1, 2, 3, 20, 5), 776)
        yield f"long {dtype}", lambda d=dtype: check_conv(package, device, d, *LONG[device])
    yield "bias", lambda: check_conv(package, device, BF16, (5, 30), 512, bias=True)
    yield "odd", lambda: check_conv(package, device, BF16, (20,), 33)
    yield "view", lambda: check_conv(package, device, BF16, (20,), 1024, view=lambda x: x[..., 256:])
    for layout in LAYOUTS:
        yield f"weights {layout.__name__}", lambda f=layout: check_conv(package, device, BF16, (20,), 512, bias=True, weights=f)
    yield "batch", lambda: check_batch(package, device, BF16)


CHECKS = {
    "documents": lambda ops: check_conv(ops, "cpu", BF16, (19, 32), 512, bias=True),  # a span starts at the second token of a document
    "long": lambda ops: check_conv(ops, "cpu", BF16, *LONG["cpu"]),
}
KERNELS = "kernel_src/short_conv.py"
MUTANTS = (
    *generated(KERNELS, "documents or long", "backward_step forward_step"),
    *generated("shared/ops/short_conv.py", "documents", "_ShortConv.backward _ShortConv.forward"),
    *errors_in(KERNELS, "documents", "counts_of", ("least == 3", "least >= 0")),
    *errors_in(KERNELS, "documents", "before_walk", ("count >= 2, x2", "count >= 1, x2"), ("start - 3", "start - 2")),
    *errors_in(KERNELS, "documents", "walk_of", ("(group + 1) * span", "(group + 2) * span")),
    *errors_in(KERNELS, "documents", "short_conv_backward", ("inside & (i > 0)", "inside")),
    *errors_in(KERNELS, "long", "short_conv_backward", ("t + STEP <= end", "t <= end")),
)


# ---------------------------------------------------------------- in the tests of every operation
MORE_CALLS = {
    "short_conv (bias)": lambda package, i: module_of(package).short_conv(i.leaf(1, i.tokens, 512), i.leaf(512, 4), i.leaf(512)),
}
GPU_TESTS = {"short_conv": ("test_operations_of_gated_delta_nets[short_conv]",)}


def _of_conv(new):
    since = new.integers([0, 1, 2, 3, 3, 3, 0, 1, 2], torch.int32)
    return [(new(9, 512), new(512, 4), bias, since) for bias in (None, new(512))]


OPERATORS = {
    "short_conv_forward": _of_conv,
    "short_conv_backward": lambda new: [(new(9, 512, seed=2), *call) for call in _of_conv(new)],
}
