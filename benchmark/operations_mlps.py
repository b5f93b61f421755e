"""Liger's MLPs over four shards of their tokens. The floor is the nine matrix products that any form needs; tiled ones compute two of them
again in the backward pass, so that they hold one tile's activations, and cannot reach it."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from . import eager, providers
from .floors import product_calls
from .liger_operations import declare
from .operation import Inputs, Limit, Operation, Work
from .operations_rows import geglu

SHARDS = 4
TILED = 9 / 11  # of the floor: what a form that computes two products again can reach


def inputs(size, tokens, random) -> Inputs:
    hidden, wide = size.hidden, size.intermediate
    shapes = (wide, hidden), (wide, hidden), (hidden, wide)
    weights = (random.normal(*shape, scale=shape[1] ** -0.5) for shape in shapes)
    return Inputs((random.normal(1, tokens, hidden), *weights), output_gradients=(random.normal(1, tokens, hidden),))


def products(inputs: Inputs, mode: str) -> list[tuple[int, int, int]]:
    """Return the (m, n, k) of the matrix products over all tokens at once."""
    (_, tokens, hidden), wide = inputs.leaves[0].shape, inputs.leaves[1].shape[0]
    up, down = (tokens, wide, hidden), (tokens, hidden, wide)
    back = [up] + [down] * 2 + [(wide, hidden, tokens)] * 2 + [(hidden, wide, tokens)]
    return {"backward": [], "full": back}.get(mode, []) + ([up, up, down] if mode != "backward" else back)


class OfModule(torch.autograd.Function):
    """A module whose parameters get their gradients in `.grad`, as a function of x and its weights."""

    @staticmethod
    def forward(ctx, x, module, *weights):
        ctx.module, ctx.x = module, x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.y = module(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, dy):
        parameters = list(ctx.module.parameters())
        for parameter in parameters:
            parameter.grad = None
        ctx.y.backward(dy)
        found = ctx.x.grad, None, *[parameter.grad for parameter in parameters]
        for parameter in parameters:  # what stays here until the next call would be counted as if it were an input
            parameter.grad = None
        return found


def of_liger(name: str, activation: str):
    """Return Liger's module as a function of x and the three weights. One module is kept for each set of weights."""
    kind, kept = providers.liger("transformers.tiled_mlp", name), {}

    def call(x, *weights):
        key = tuple(weight.data_ptr() for weight in weights)
        if key not in kept:
            config = SimpleNamespace(hidden_size=x.shape[-1], intermediate_size=weights[0].shape[0], hidden_act=activation)
            with torch.device("meta"):
                kept[key] = kind(config, num_shards=SHARDS)
            for linear, weight in zip(kept[key].children(), weights, strict=True):
                linear.weight = torch.nn.Parameter(weight.detach())
        return OfModule.apply(x, kept[key], *weights)

    return call


def tiled_mlp(name: str, title: str, position: int, gate: Callable, activation: str, theirs: str) -> Operation:
    """Return the operation. gate(gate, up): the activation; activation, theirs: its name and the module's in Liger-Kernel."""

    def formula(x, gate_weight, up_weight, down_weight):
        return F.linear(gate(F.linear(x, gate_weight), F.linear(x, up_weight)), down_weight)

    return declare(
        name, title, position, theirs,
        outputs=("y",), gradients=("dx", "dgate_weight", "dup_weight", "ddown_weight"),
        inputs=inputs,
        formula=formula,
        call=lambda function: lambda *leaves: function(*leaves, shards=SHARDS),
        peers={"liger": lambda: of_liger(theirs, activation)},
        work=lambda inputs, mode: Work.of_products(products(inputs, mode)),
        floor=product_calls(products), floor_title="bare cuBLAS GEMMs",
        modes=("full", "forward"),
        writes_inputs=False,
        tokens=(2048, 8192, 16384),
        limits=(Limit(16384, 0.94 * TILED, liger=1.02), Limit(2048, 0.94 * TILED, liger=1.4)),
    )


TILED_SWIGLU = tiled_mlp("tiled_swiglu", "tiled SwiGLU MLP", 32, eager.swiglu, "silu", "LigerTiledSwiGLUMLP")
TILED_GEGLU = tiled_mlp("tiled_geglu", "tiled GEGLU MLP", 33, geglu, "gelu_pytorch_tanh", "LigerTiledGEGLUMLP")
