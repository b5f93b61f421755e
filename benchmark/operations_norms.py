"""Norms of the hidden states and of queries, Qwen3's and Liger's, and dynamic tanh, which takes the place of one; and what one eager call
costs the host."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from . import eager, models, providers, rows
from .eager import EPS
from .harness import draw_inputs
from .liger_operations import declare, implementations, with_eps
from .markdown import comparison, select
from .operation import Case, Inputs, Limit, Operation, bytes_moved
from .report import log, message
from .suites import QWEN3

HOST_TOKENS = 128  # so few that the device always waits
POSITIONS = 512  # of one sequence of GroupNorm, as in Liger-Kernel's script


def scale_of(random, n: int) -> torch.Tensor:
    """Draw the weight of a norm."""
    return random.normal(n, scale=0.1, shift=1.0)


def rows_and_scale(random, *shape: int) -> Inputs:
    """Draw x of a shape, a weight of its last dimension, and the gradient."""
    return Inputs((random.normal(*shape), scale_of(random, shape[-1])), output_gradients=(random.normal(*shape),))


def norm_of_torch():
    return lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)


def host_cost(settings, args) -> list:
    """Return rows for the host's microseconds in one eager call, on a tensor so small that the device always waits."""
    model = models.full_name(args.model or QWEN3.model)
    config = {"model": model, "tokens": HOST_TOKENS}
    case = Case(("tokens", "tokens", str(HOST_TOKENS)), config, (models.size(model), HOST_TOKENS))
    inputs, found = draw_inputs(RMS_NORM, case, settings), []
    for provider in ("torch", "huggingface", "liger", "bastile"):
        if provider not in settings.providers:
            continue
        for mode, working in (("forward", inputs.copy()), ("no_grad_forward", inputs)):
            try:
                function = RMS_NORM.load(provider)
                value = settings.clock.host_microseconds(lambda f=function, w=working: f(*w.leaves))
            except (providers.NotInstalled, ModuleNotFoundError):
                continue
            except Exception as error:
                value = error.with_traceback(None)
            found.append(rows.case_row(RMS_NORM, case, settings, provider, mode, "host_time", "us", value))
            text = message(value) if isinstance(value, Exception) else f"{value:.1f} us a call"
            log(f"  host, {mode:<16}{provider:<16}{text}")
    rows.save(settings.results, RMS_NORM.csv_name, found)
    return found


RMS_NORM = Operation(
    "rms_norm", "RMSNorm", QWEN3, position=1,
    outputs=("y",), gradients=("dx", "dweight"),
    inputs=lambda size, tokens, random: rows_and_scale(random, 1, tokens, size.hidden),
    formula=eager.rms_norm,
    bastile=lambda package: with_eps(providers.operation(package, "rms_norm")),
    peers={"torch": norm_of_torch, **implementations("rms_norm", "LigerRMSNormFunction", with_eps)},
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    extra=host_cost,
)
Q_NORM = replace(
    RMS_NORM,
    name="q_norm",
    title="RMSNorm of queries (rows of 128)",
    position=2,
    inputs=lambda size, tokens, random: rows_and_scale(random, 1, tokens, size.heads, size.head_dim),
    file="rms_norm",
    script="rms_norm",
    extra=None,
)


def host_table(found: list) -> str:
    """Return the table of the host's microseconds in one eager RMSNorm."""
    found = select(found, kernel_name=RMS_NORM.name, metric_name="host_time", dtype="bf16")
    modes = {"with gradients": "forward", "without": "no_grad_forward"}
    cases = [((title,), select(found, kernel_operation_mode=mode)) for title, mode in modes.items()]
    return comparison(("µs of host time",), cases, {"host_time": lambda us: f"{us:.1f}"}, compares="speed vs best peer")


TABLES = {"host": host_table}
LIGER_RMS_NORM = declare(
    "liger_rms_norm", "RMSNorm", 1, "LigerRMSNormFunction", x="BT", convention={"name": "rms_norm"}, ours="rms_norm",
    outputs=("y",), gradients=("dx", "dweight"),
    inputs=lambda size, tokens, random: rows_and_scale(random, tokens, size.hidden),
    formula=eager.rms_norm, formula_provider="huggingface",
    call=with_eps,
    call_theirs=lambda function: lambda x, weight: function(x, weight, EPS, 0.0, "llama", True, None),
    peers={"torch": norm_of_torch},
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    limits=(Limit(8192, 0.86, peer=1.3), Limit(262144, 0.80, {"hidden": 128}, peer=1.05, liger=2.3)),
)


def two_streams(random, *shape: int) -> Inputs:
    """Draw x and the residual of a shape, a weight, and the gradients of the norm and of the sum."""
    leaves = (random.normal(*shape), random.normal(*shape), scale_of(random, shape[-1]))
    return Inputs(leaves, output_gradients=(random.normal(*shape), random.normal(*shape)))


def add_and_norm_of_torch():
    """Return the addition and PyTorch's own RMSNorm."""

    def call(x, residual, weight):
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, EPS), total

    return call


ADD_RMS_NORM = Operation(
    "add_rms_norm", "residual + RMSNorm", QWEN3, position=3,
    outputs=("y", "sum"), gradients=("dx", "dresidual", "dweight"),
    inputs=lambda size, tokens, random: two_streams(random, 1, tokens, size.hidden),
    formula=eager.add_rms_norm,
    bastile=lambda package: with_eps(providers.operation(package, "add_rms_norm")),
    peers={"torch": add_and_norm_of_torch, **implementations("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", with_eps)},
    work=bytes_moved(4, 4),  # x, residual, y, sum; dy, dsum, sum and one gradient for both x and residual
)
LIGER_ADD_RMS_NORM = declare(
    "fused_add_rms_norm", "residual + RMSNorm", 2, "LigerFusedAddRMSNormFunction", x="BT", convention={"differentiated": 1},
    ours="add_rms_norm",
    outputs=("y", "sum"), gradients=("dx", "dresidual", "dweight"),
    inputs=lambda size, tokens, random: two_streams(random, tokens, size.hidden),
    formula=eager.add_rms_norm, formula_provider="huggingface",
    call=with_eps,
    call_theirs=lambda function: lambda x, residual, weight: function(x, residual, weight, EPS, 0.0, "llama", False),
    peers={"torch": add_and_norm_of_torch},
    work=ADD_RMS_NORM.work,
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
    call=with_eps,
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
