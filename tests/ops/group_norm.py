"""GroupNorm against float64."""

from functools import partial

import torch

from tests.ops.common import BF16, FLOATS, FP16, FP32, leaf, randn
from tests.ops.generated import generated
from tests.ops.layer_norm import check_norm
from tests.ops.suite import Case, of_suite


def group_norm_exact(x, groups, weight, bias, eps):
    grouped = x.reshape(x.shape[0], groups, -1)
    deviation = grouped - grouped.mean(-1, keepdim=True)
    n = (deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + eps)).view(x.shape)
    channels = (1, -1, *[1] * (x.dim() - 2))
    n = n if weight is None else n * weight.view(channels)
    return n if bias is None else n + bias.view(channels)


def check_group_norm(
    ops, device, dtype, shape, groups, *, parameters="both", weight_dtype=None, eps=1e-5, mean=0.5, trend=0.0, along=0.0,
    view=lambda x: x, factor=1.0
):  # fmt: skip
    """parameters, mean, view: as of LayerNorm. trend: how far x changes to either side along a sample. along: how
    much of x there is in dy, for means of gradients that are not small."""
    base = randn(*shape, dtype=FP32, device=device) + mean
    base = leaf((base + torch.linspace(-trend, trend, base[0].numel(), device=device).view(base.shape[1:])).to(dtype))
    samples, channels = view(base).shape[:2]
    check_norm(
        lambda x, w, b: ops.group_norm(x, groups, w, b, eps), lambda x, w, b: group_norm_exact(x, groups, w, b, eps), base, (channels,),
        dtype, f"GroupNorm {tuple(shape)} in {groups}", parameters=parameters, weight_dtype=weight_dtype, eps=eps, view=view, factor=factor,
        along=along, rows=lambda t: t.reshape(samples * groups, -1),
    )  # fmt: skip


# (shape, groups): groups in registers, groups held as they lie in memory or in parts, channels of whole tiles, positions that are no
# segments, 2-D to 5-D, one group, one channel a group.
CASES = (
    ((2, 8, 64), 2), ((2, 4, 512), 1), ((1, 6, 8, 8), 2), ((2, 12, 320), 3), ((2, 8, 16, 32), 2), ((1, 4, 40, 64), 2), ((2, 3, 2, 4, 8), 3),
    ((2, 6, 64, 64), 2), ((1, 2, 64, 128), 1), ((3, 10), 2), ((2, 6, 7, 7), 3), ((1, 2, 51, 53), 1), ((2, 5, 3, 2, 4), 1), ((4, 6, 1), 6),
    ((2, 20, 32, 32), 1), ((2, 10, 64, 64), 1), ((1, 11, 64, 64), 1), ((3, 40, 8, 24), 1),
    ((2, 14, 64, 64), 2),
)  # fmt: skip


def check_options(ops, device, dtype):
    for parameters in ("weight", "bias", "none"):
        check_group_norm(ops, device, dtype, (2, 4, 64), 2, parameters=parameters)
    if dtype != FP32:
        check_group_norm(ops, device, dtype, (2, 4, 64), 2, weight_dtype=FP32)
        check_group_norm(ops, device, dtype, (2, 4, 5, 5), 2, weight_dtype=FP32)
        check_group_norm(ops, device, dtype, (1, 4, 64, 64), 2, weight_dtype=FP32)
    check_group_norm(ops, device, dtype, (2, 8, 8, 4), 2, view=lambda x: x.permute(0, 3, 1, 2))  # channels_last
    check_group_norm(ops, device, dtype, (2, 4, 65), 2, view=lambda x: x[:, :, 1:])


def check_large_mean(ops, device):
    """As for LayerNorm, what fp32 can hold of the mean itself, 3e-5, shifts all of a group's n alike, and dweight adds that up."""
    for shape in ((2, 4, 512), (1, 4, 33, 64), (1, 4, 33, 33), (1, 4, 64, 64)):
        check_group_norm(ops, device, FP32, shape, 2, mean=1000.0, factor=30)


def check_empty(ops, device):
    for shape in ((0, 4, 8), (2, 4, 0)):
        x, weight = leaf(torch.zeros(shape, device=device, dtype=BF16)), leaf(torch.ones(4, device=device, dtype=BF16))
        y = ops.group_norm(x, 2, weight)
        dx, dweight = torch.autograd.grad(y, (x, weight), torch.zeros_like(y))
        assert y.shape == dx.shape == shape and not dweight.any()


# Errors that change no result: over all pieces, the sum of size * means is mu times that of size.
_SAME = {
    f"squares = ct.where(size > 0.0, squares, 0.0) + size * {product}": "the sums are equal"
    for product in ("(means - mu) * (means + mu)", "(means - mu) * (means)", "(means) * (means - mu)")
}
_KERNELS, _ROWS = "kernel_src/group_norm.py", "kernel_src/group_norm_rows.py"
MUTANTS = (
    *generated(_ROWS, "whole", "channels_of group_norm_backward group_norm_forward"),
    *generated(_KERNELS, "whole", "group_norm_parameter_sums"),
    *generated(_KERNELS, "odd", "group_means group_norm_apply_backward"),
    *generated(_KERNELS, "parts", "group_norm_apply group_norm_channel_sums group_norm_statistics"),
    *generated(_ROWS, "held", "group_norm_held_backward group_norm_held_forward held_channels"),
    *generated(_ROWS, "held tiles", "group_norm_held_tiles_backward group_norm_held_tiles_forward"),
    *generated(_KERNELS, "tiles", "group_norm_tile_apply group_norm_tile_statistics group_norm_tile_sums", same=_SAME),
    *generated(_KERNELS, "tile or tiles", "group_norm_tile_apply_backward"),
    *generated(_KERNELS, "odd or parts", "sum_parameters"),
    *generated("kernel_src/row_tiles.py", "tiles", "tile_columns"),
    *generated("shared/ops/group_norm.py", "whole or weight alone", "GroupNormFunction.backward"),
    *generated("shared/ops/group_norm.py", "whole", "GroupNormFunction.forward"),
    (_ROWS, "held_segments", "place(t, x.shape[1], PIECE)", "place(0, x.shape[1], PIECE)", "held"),
    (_KERNELS, "group_norm_channel_sums", "row // (channels // mean.shape[0])", "row * 0", "parts"),
    (_KERNELS, "group_norm_tile_apply", "if part == 0", "if part == 1", "tile"),
    (_KERNELS, "group_norm_tile_sums", "row // (channels // mean.shape[0])", "row * 0", "tiles"),
    (_KERNELS, "group_norm_parameter_sums", "(at // parts)[None, :]", "(at % parts)[None, :]", "whole"),
    (_KERNELS, "group_norm_parameter_sums", "ct.bid(0) // blocks", "0", "whole"),
)
CHECKS = of_suite({
    "whole": lambda ops: check_group_norm(ops, "cpu", BF16, (2, 12, 320), 3),
    "held": lambda ops: check_group_norm(ops, "cpu", BF16, (2, 6, 30, 64), 2, trend=6.0, eps=0.5),
    "held tiles": lambda ops: check_group_norm(ops, "cpu", BF16, (2, 6, 64, 128), 2, trend=2.0, along=0.5),
    "parts": lambda ops: check_group_norm(ops, "cpu", FP16, (2, 4, 33, 128), 2, trend=6.0, eps=0.5),
    "tiles": lambda ops: check_group_norm(ops, "cpu", BF16, (2, 20, 64, 128), 2, trend=6.0),
    "tile": lambda ops: check_group_norm(ops, "cpu", FP32, (2, 2, 64, 64), 2),
    "odd": lambda ops: check_group_norm(ops, "cpu", FP16, (2, 40, 7, 9), 4),
    "weight alone": lambda ops: check_group_norm(ops, "cpu", FP32, (2, 6, 16), 3, parameters="weight"),
    "no parameters": lambda ops: check_group_norm(ops, "cpu", FP32, (2, 6, 16), 3, parameters="none"),
})


def all_cases(ops, device, dtypes=FLOATS):
    """(name, function) of every check in some dtypes."""
    for dtype in dtypes:
        for shape, groups in CASES:
            yield f"{shape} in {groups} {dtype}", partial(check_group_norm, ops, device, dtype, shape, groups)
        yield f"options {dtype}", partial(check_options, ops, device, dtype)
    if FP32 in dtypes:
        yield "large mean", partial(check_large_mean, ops, device)
    yield "empty", partial(check_empty, ops, device)


# ---------------------------------------------------------------- in the tests of every operation
OPERATIONS = {
    "group_norm": Case(
        lambda ops, x, w, b: ops.group_norm(x, 2, w, b),
        aligned=lambda n: ((2, 4, n), (4,), (4,)),
        sample=lambda ops, new: (
            lambda x, w, b: ops.group_norm(x, 2, w, b), (new.normal(2, 8, 16, 16), new.normal(8, seed=2), new.normal(8, seed=3))
        ),
    ),
}


def check_large(ops, device):
    for case in (((4, 320, 64, 64), 32), ((9, 160, 64, 64), 16), ((9, 144, 64, 64), 16), ((9, 320, 32, 32), 16)):
        check_group_norm(ops, device, BF16, *case)


OPERATORS = {
    "group_norm_forward": lambda new: [(new(2, 64, 30), new(64), new(64, seed=1), 16, 1e-6)],
    "group_norm_backward": lambda new: [
        (new(2, 64, 30, seed=2), new(2, 64, 30), new(64), new.exact(32), 1 + new.exact(32).abs(), need) for need in (True, False)
    ],
}
