"""Gates between the projections of the MLP, Qwen3's and Liger's, and Liger's softmaxes over the hidden states."""

import torch
import torch.nn.functional as F

from . import eager
from .liger_operations import declare, implementations
from .operation import Inputs, Limit, Operation, bytes_moved
from .suites import QWEN3


def rows(size, tokens, random) -> Inputs:
    shape = (tokens, size.hidden)
    return Inputs((random.normal(*shape),), output_gradients=(random.normal(*shape),))


SOFTMAX = declare(
    "softmax", "softmax", 12, "LigerSoftmaxFunction",
    outputs=("y",), gradients=("dx",),
    inputs=rows,
    formula=lambda x: x.softmax(-1),
    work=bytes_moved(2, 3),  # x, y; dy, y, dx
    limits=(
        Limit(8192, 0.95, peer=0.98),
        Limit(2048, 0.95, {"hidden": 32768}, peer=0.98),
        Limit(2048, 0.75, {"hidden": 151936}, peer=1.7),
    ),
)


def sparsemax(x):
    """Sort; the support is decided by whole multiples."""
    wide = eager.to_float32(x)
    z = wide.detach().sort(-1, descending=True).values
    total = z.cumsum(-1)
    size = (1 + torch.arange(1, x.shape[-1] + 1, device=x.device) * z > total).sum(-1, keepdim=True)
    inside = wide.detach() * size + 1 > total.gather(-1, size - 1)
    tau = (torch.where(inside, wide, 0.0).sum(-1, keepdim=True) - 1) / size
    return torch.where(inside, wide - tau, 0.0).to(x.dtype)


SPARSEMAX = declare(
    "sparsemax", "sparsemax", 21, "LigerSparsemaxFunction",
    outputs=("y",), gradients=("dx",),
    inputs=rows,
    formula=sparsemax,
    call_theirs=lambda function: lambda x: function(x, -1),
    work=bytes_moved(2, 3),  # x, y; dy, y, dx
    bounds={"dx": 0.3},  # Liger decides ties with tau by a rounded division
    limits=(
        Limit(8192, 0.65, peer=9.0),
        Limit(2048, 0.50, {"hidden": 32768}, peer=15.0),
        Limit(1024, 0.40, {"hidden": 128256}, peer=20.0),
    ),
)


def two_of(random, *shape: int) -> Inputs:
    """Draw gate and up of a shape, and the gradient."""
    return Inputs((random.normal(*shape), random.normal(*shape)), output_gradients=(random.normal(*shape),))


def gate_and_up(size, tokens, random) -> Inputs:
    return two_of(random, tokens, size.intermediate)


SWIGLU = Operation(
    "swiglu", "SwiGLU", QWEN3, position=6,
    outputs=("y",), gradients=("dgate", "dup"),
    inputs=lambda size, tokens, random: two_of(random, 1, tokens, size.intermediate),
    formula=eager.swiglu,
    peers=implementations("swiglu", "LigerSiLUMulFunction"),
    work=bytes_moved(3, 5),  # gate, up, y; dy, gate, up, dgate, dup
)


def geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


GEGLU = declare(
    "geglu", "GeGLU", 13, "LigerGELUMulFunction",
    outputs=("y",), gradients=("dgate", "dup"),
    inputs=gate_and_up,
    formula=geglu,
    work=bytes_moved(3, 5),  # gate, up, y; dy, gate, up, dgate, dup
    limits=(Limit(8192, 0.98, peer=0.97, liger=1.3),),
)
LIGER_SWIGLU = declare(
    "liger_swiglu", "SwiGLU", 14, "LigerSiLUMulFunction", convention={"name": "swiglu"}, ours="swiglu",
    outputs=("y",), gradients=("dgate", "dup"),
    inputs=gate_and_up,
    formula=eager.swiglu,
    work=bytes_moved(3, 5),  # gate, up, y; dy, gate, up, dgate, dup
    limits=(Limit(8192, 0.98, peer=0.97),),
)
