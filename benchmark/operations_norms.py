"""Liger's norms of the hidden states, and dynamic tanh, which takes the place of one."""

import torch
import torch.nn.functional as F

from . import benchmark_add_rms_norm, eager
from .eager import EPS
from .liger_operations import declare
from .operation import Inputs, Limit, bytes_moved

POSITIONS = 512  # of one sequence of GroupNorm, as in Liger-Kernel's script


def scale_of(random, n: int) -> torch.Tensor:
    """Draw the weight of a norm."""
    return random.normal(n, scale=0.1, shift=1.0)


def rms_norm_inputs(size, tokens, random) -> Inputs:
    shape = (tokens, size.hidden)
    return Inputs((random.normal(*shape), scale_of(random, size.hidden)), output_gradients=(random.normal(*shape),))


RMS_NORM = declare(
    "liger_rms_norm", "RMSNorm", 1, "LigerRMSNormFunction", x="BT", convention={"name": "rms_norm"}, ours="rms_norm",
    outputs=("y",), gradients=("dx", "dweight"),
    inputs=rms_norm_inputs,
    formula=eager.rms_norm, formula_provider="huggingface",
    call=lambda function: lambda x, weight: function(x, weight, EPS),
    call_theirs=lambda function: lambda x, weight: function(x, weight, EPS, 0.0, "llama", True, None),
    peers={"torch": lambda: lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)},
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    limits=(Limit(8192, 0.86, peer=1.3), Limit(262144, 0.80, {"hidden": 128}, peer=1.05, liger=2.3)),
)


def add_rms_norm_inputs(size, tokens, random) -> Inputs:
    shape = (tokens, size.hidden)
    leaves = (random.normal(*shape), random.normal(*shape), scale_of(random, size.hidden))
    return Inputs(leaves, output_gradients=(random.normal(*shape), random.normal(*shape)))


ADD_RMS_NORM = declare(
    "fused_add_rms_norm", "residual + RMSNorm", 2, "LigerFusedAddRMSNormFunction", x="BT", convention={"differentiated": 1},
    ours="add_rms_norm",
    outputs=("y", "sum"), gradients=("dx", "dresidual", "dweight"),
    inputs=add_rms_norm_inputs,
    formula=eager.add_rms_norm, formula_provider="huggingface",
    call=lambda function: lambda x, residual, weight: function(x, residual, weight, EPS),
    call_theirs=lambda function: lambda x, residual, weight: function(x, residual, weight, EPS, 0.0, "llama", False),
    peers={"torch": benchmark_add_rms_norm.of_torch},
    work=bytes_moved(4, 4),  # x, residual, y, sum; dy, dsum, sum and one gradient for both x and residual
    limits=(Limit(8192, 0.88, peer=1.15),),
)


def shifted(random, *shape: int, channels: int) -> Inputs:
    """Draw x of a mean that is not 0, a weight and a bias of its channels, and the gradient."""
    leaves = (random.normal(*shape, shift=1.0), scale_of(random, channels), random.normal(channels))
    return Inputs(leaves, output_gradients=(random.normal(*shape),))


LAYER_NORM = declare(
    "layer_norm", "LayerNorm", 10, "LigerLayerNormFunction",
    outputs=("y",), gradients=("dx", "dweight", "dbias"),
    inputs=lambda size, tokens, random: shifted(random, tokens, size.hidden, channels=size.hidden),
    formula=lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS),
    call=lambda function: lambda x, weight, bias: function(x, weight, bias, EPS),
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    limits=(Limit(8192, 0.84, peer=1.55),),
)


def sequences(size, tokens, random) -> Inputs:
    """Draw sequences that have the model's hidden size as channels."""
    return shifted(random, max(1, tokens // POSITIONS), size.hidden, POSITIONS, channels=size.hidden)


def images(*shape: int):
    """Return inputs of images [batch, channels, height, width]. Of `tokens`, a check's, nothing is taken: they are small enough."""
    return lambda size, tokens, random: shifted(random, *shape, channels=shape[1])


def groups_of(x) -> int:
    """Return the groups of channels: of four each in a sequence, 32 of them in an image."""
    return x.shape[1] // 4 if x.dim() == 3 else 32


GROUP_NORM = declare(
    "group_norm", "GroupNorm", 5, "LigerGroupNormFunction", x="BT",
    outputs=("y",), gradients=("dx", "dweight", "dbias"),
    inputs=sequences,
    formula=lambda x, weight, bias: F.group_norm(x, groups_of(x), weight, bias, EPS),
    call=lambda function: lambda x, weight, bias: function(x, groups_of(x), weight, bias, EPS),
    call_theirs=lambda function: lambda x, weight, bias: function(x, weight, bias, x.shape[1], groups_of(x), EPS),
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    limits=(
        Limit(8192, 0.75, peer=1.5, checked=512),
        Limit(8 * 64 * 64, 0.65, peer=3.5, label="8x320x64x64", inputs=images(8, 320, 64, 64)),
        Limit(2 * 128 * 128, 0.65, peer=3.5, label="2x512x128x128", inputs=images(2, 512, 128, 128)),
    ),
)


def poly_norm_inputs(size, tokens, random) -> Inputs:
    shape = (tokens, size.hidden)
    leaves = (random.normal(*shape), random.normal(3, scale=0.1, shift=0.3), random.normal(1))
    return Inputs(leaves, output_gradients=(random.normal(*shape),))


def poly_norm(x, weight, bias):
    wide = eager.to_float32(x)
    powers = [wide**p for p in (3, 2, 1)]
    return (sum(w * p * torch.rsqrt(p.square().mean(-1, keepdim=True) + EPS) for w, p in zip(weight, powers)) + bias).to(x.dtype)


POLY_NORM = declare(
    "poly_norm", "PolyNorm", 20, "LigerPolyNormFunction",
    outputs=("y",), gradients=("dx", "dweight", "dbias"),
    inputs=poly_norm_inputs,
    formula=poly_norm,
    call_theirs=lambda function: lambda x, weight, bias: function(x, weight, bias.reshape(()), EPS),
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    limits=(Limit(8192, 0.84, peer=2.0),),
)


def dyt_inputs(size, tokens, random) -> Inputs:
    shape, n = (tokens, size.hidden), size.hidden
    leaves = (random.normal(*shape), random.normal(1, scale=0.1, shift=0.5), scale_of(random, n), random.normal(n))
    return Inputs(leaves, output_gradients=(random.normal(*shape),))


DYT = declare(
    "dyt", "DyT", 11, "LigerDyTFunction",
    outputs=("y",), gradients=("dx", "dalpha", "dgamma", "dbeta"),
    inputs=dyt_inputs,
    formula=lambda x, alpha, gamma, beta: torch.tanh(alpha * x) * gamma + beta,
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    bounds={"y": 1e-2, "dx": 1e-2, "dalpha": 5e-2, "dgamma": 1e-2},  # PyTorch rounds the tanh and each product
    limits=(Limit(8192, 0.84, peer=1.9),),
)
