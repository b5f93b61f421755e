"""The operations of Qwen3.5's gated delta nets.

The rule with the L2 norm of queries and keys, over documents packed into one row; the short causal convolution before it, 4 taps of each
channel, then SiLU, of queries, keys and values together; and the norm behind it. Hugging Face is transformers' PyTorch code. Its rule is
called for one document after the other, with a key head for each head; its convolution has the channels before the tokens, and gets and
gives views, as in its layer. With fla they are flash-linear-attention's, whose rule takes the documents' bounds and groups of heads.
causal-conv1d, which transformers takes where it is installed, has no wheels for current versions of torch. The rule's floor is a copy of
what has to be read and written, without the states between chunks: no implementation that goes over the tokens twice comes near it.
"""

import functools
import importlib
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from . import eager, providers
from .markdown import comparison, milliseconds, select
from .operation import MODE_TITLES, Case, Inputs, Operation, Random, Reference, Work, bytes_moved, over_tokens
from .operations_attention import lengths_of
from .providers import NotInstalled
from .suites import QWEN3_5

DOCUMENTS = ("1", "4", "32")
TAPS, CHUNK = 4, 64


@dataclass(frozen=True)
class DeltaNet:
    """Heads of keys, heads of values, and the length of each."""

    key_heads: int
    heads: int
    width: int

    @property
    def channels(self) -> int:
        """Return those of the short convolution: queries, keys and values."""
        return (2 * self.key_heads + self.heads) * self.width


SIZES = {"qwen3.5_9b": DeltaNet(16, 32, 128), "qwen3.5_27b": DeltaNet(16, 48, 128), "qwen3.5_tiny": DeltaNet(1, 2, 16)}


def size(model: str) -> DeltaNet:
    """Return the dimensions of a model's delta nets. Raise ValueError for one without."""
    if model not in SIZES:
        raise ValueError(f"--model is {model}, expected one of {', '.join(SIZES)}")
    return SIZES[model]


LIBRARIES = ("fla", "causal_conv1d")  # whose functions transformers takes where they are installed
SWEEPS = dict.fromkeys(("token_length", "model_config"), partial(over_tokens, size=size))


@functools.cache
def in_pytorch(name: str):
    """Return a function of transformers' PyTorch code, which its module has under the same name as a library's."""
    here = {library: sys.modules.pop(library) for library in LIBRARIES if library in sys.modules}
    sys.modules.update(dict.fromkeys(LIBRARIES))  # type: ignore[arg-type]
    try:
        return getattr(importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5"), name)
    finally:
        for library in LIBRARIES:
            del sys.modules[library]
        sys.modules.update(here)


def of_fla(module: str, name: str):
    """Load a function of flash-linear-attention."""
    providers.require_modules("fla")
    return getattr(importlib.import_module(f"fla.{module}"), name)


def rule_inputs(net: DeltaNet, tokens: int, documents: str, random: Random) -> Inputs:
    """Draw q, k, v, g and beta, [tokens, heads, width] and [tokens, heads]; the others are cu_seqlens."""
    q, k, v = (random.normal(tokens, n, net.width) for n in (net.key_heads, net.key_heads, net.heads))
    g, beta = random.normal(tokens, net.heads).float().abs() * -0.1, random.normal(tokens, net.heads).sigmoid()
    ends = torch.tensor([0, *lengths_of(tokens, documents)]).cumsum(0).to(random.device, torch.int32)
    return Inputs((q, k, v, g, beta), (ends,), (random.normal(tokens, net.heads, net.width),))


def apart(cu_seqlens: torch.Tensor, *tensors: torch.Tensor):
    """Yield the rows of each document."""
    lengths = cu_seqlens.diff().tolist()
    yield from zip(*(x.split(lengths) for x in tensors), strict=True)


def transformers_rule(q, k, v, g, beta, cu_seqlens):
    """Call transformers' own rule for one document after the other."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    parts = ([x[None] for x in rows] for rows in apart(cu_seqlens, q, k, v, g, beta))
    rule = in_pytorch("torch_chunk_gated_delta_rule")
    return torch.cat([rule(*rows, use_qk_l2norm_in_kernel=True)[0][0] for rows in parts])


def rule_of_fla():
    rule = of_fla("ops.gated_delta_rule", "chunk_gated_delta_rule")

    def call(q, k, v, g, beta, cu_seqlens):
        rows = (x[None] for x in (q, k, v, g, beta))
        return rule(*rows, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens.long())[0][0]

    return call


def rule_of_package(package):
    """Return the package's rule."""
    if not hasattr(package, "gated_delta_rule"):
        raise NotInstalled("this build has no gated delta rule")

    def call(q, k, v, g, beta, cu_seqlens):
        rows = (x[None] for x in (q, k, v, g, beta))
        return package.gated_delta_rule(*rows, cu_seqlens=cu_seqlens, l2_norm=True)[0][0]

    return call


def exact_rule(q, k, v, g, beta):
    """Compute the rule of one document in the inputs' dtype, a chunk after the other; the formulas are those of arXiv 2412.06464."""
    group, missing = v.shape[1] // q.shape[1], -len(q) % CHUNK
    q, k = (F.normalize(x, dim=-1).repeat_interleave(group, 1) for x in (q, k))
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, CHUNK)).transpose(1, 2) for x in (q, k, v))
    g, beta = (F.pad(x, (0, 0, 0, missing)).unflatten(0, (-1, CHUNK)).transpose(1, 2) for x in (g, beta))
    gamma = g.cumsum(-1)
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (gamma[..., :, None] - gamma[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    lower = (decay * beta[..., None] * (k @ k.mT)).tril(-1) + torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    sides = beta[..., None] * torch.cat([gamma.exp()[..., None] * k, v], -1)
    w, u = torch.linalg.solve_triangular(lower, sides, upper=False).split([k.shape[-1], v.shape[-1]], -1)
    scale, state, results = q.shape[-1] ** -0.5, q.new_zeros(q.shape[1], q.shape[-1], v.shape[-1]), []
    for i in range(len(q)):
        new = u[i] - w[i] @ state
        results.append(scale * (gamma[i].exp()[..., None] * (q[i] @ state) + (decay[i] * (q[i] @ k[i].mT)) @ new))
        kept = (gamma[i, :, -1:] - gamma[i]).exp()[..., None] * k[i]
        state = gamma[i, :, -1].exp()[:, None, None] * state + kept.mT @ new
    out = torch.stack(results).transpose(1, 2).flatten(0, 1)
    return out[: len(out) - missing]


def reference(given: Inputs) -> Reference:
    """Compute one document after the other in float64."""
    exact = given.to_float64()
    found, gradients = [], []
    for *leaves, grad in apart(exact.others[0], *exact.leaves, exact.output_gradients[0]):
        rows = [x.detach().requires_grad_() for x in leaves]
        out = exact_rule(*rows)
        found.append(out.detach())
        gradients.append(torch.autograd.grad(out, rows, grad))
    return Reference((torch.cat(found),), tuple(torch.cat(parts) for parts in zip(*gradients, strict=True)))


def rule_work(given: Inputs, mode: str) -> Work:
    """Count the bytes: the inputs read and the output written, and in the backward pass both read again and a gradient written of each
    input."""
    read, written = sum(x.nbytes for x in given.leaves), given.output_gradients[0].nbytes
    forward, backward = read + written, 2 * read + written
    return Work(nbytes={"forward": forward, "backward": backward, "full": forward + backward}[mode])


def over_documents(operation: Operation, args) -> list[Case]:
    """Return a case for each number of tokens and of documents."""
    cases = [(case, parts) for case in over_tokens(operation, args, size) for parts in DOCUMENTS]
    return [Case(("documents", "documents", parts), case.config, (*case.arguments, parts)) for case, parts in cases]


RULE = Operation(
    "gated_delta_rule", "gated delta rule", QWEN3_5, position=1,
    outputs=("out",), gradients=("dq", "dk", "dv", "dg", "dbeta"),
    inputs=rule_inputs,
    formula=transformers_rule,
    bastile=rule_of_package,
    peers={"huggingface_fla": rule_of_fla},
    compiled=False,
    work=rule_work,
    reference=reference,
    modes=("forward", "backward", "full"),
    writes_inputs=False,
    tokens=(8192,),
    sweeps={"token_length": over_documents, "model_config": over_documents},
    shown=("documents", "1"),
)


def rule_table(rows: list) -> str:
    """Return the rule by the documents of a row."""
    found = select(rows, kernel_name=RULE.name, metric_name="speed", dtype="bf16", timing="device", model=RULE.suite.model)
    cases = []
    for mode in RULE.modes:
        mine = select(found, kernel_operation_mode=mode)
        for documents, tokens in dict.fromkeys((r.x_value, r.config["tokens"]) for r in mine):
            title = MODE_TITLES.get(mode, mode)
            cases.append(((title, documents, str(tokens)), select(mine, x_value=documents, tokens=tokens)))
    return comparison(("", "documents", "tokens"), cases, {"speed": milliseconds}, ("floor",))


TABLES = {"gated_delta_rule": rule_table}


def norm_inputs(net: DeltaNet, tokens: int, random: Random) -> Inputs:
    """Draw x and its gate, [tokens * heads, width], and a weight."""
    x, gate, dy = (random.normal(tokens * net.heads, net.width) for _ in range(3))
    return Inputs((x, gate, random.normal(net.width, scale=0.1, shift=1.0)), output_gradients=(dy,))


def gated_rms_norm(x, gate, weight):
    """Compute Qwen3_5RMSNormGated."""
    return (eager.rms_norm(x, weight) * F.silu(eager.to_float32(gate))).to(x.dtype)


def norm_of_fla():
    rms_norm_gated = of_fla("modules.fused_norm_gate", "rms_norm_gated")
    return lambda x, gate, weight: rms_norm_gated(x, gate, weight, None, activation="swish", eps=eager.EPS)


GATED_RMS_NORM = Operation(
    "gated_rms_norm", "gated RMSNorm (rows of 128)", QWEN3_5, position=2,
    outputs=("y",), gradients=("dx", "dgate", "dweight"),
    inputs=norm_inputs,
    formula=gated_rms_norm,
    bastile=lambda package: partial(providers.operation(package, "gated_rms_norm"), eps=eager.EPS),
    peers={"huggingface_fla": norm_of_fla},
    work=bytes_moved(3, 5),  # x, gate, y; dy, x, gate, dx, dgate
    sweeps=SWEEPS,
)


def conv_inputs(net: DeltaNet, tokens: int, random: Random) -> Inputs:
    """Draw x, [1, tokens, channels], and a weight."""
    x, dy = (random.normal(1, tokens, net.channels) for _ in range(2))
    return Inputs((x, random.normal(net.channels, TAPS, scale=0.5)), output_gradients=(dy,))


def short_conv(x, weight):
    """Compute what Qwen3_5GatedDeltaNet does between its projections and the rule."""
    return in_pytorch("causal_conv1d_fn")(x.transpose(1, 2), weight, None, activation="silu").transpose(1, 2)


def conv_of_fla():
    causal_conv1d = of_fla("modules.causal_conv1d", "causal_conv1d")
    return lambda x, weight: causal_conv1d(x, weight, activation="silu", backend="triton")[0]


SHORT_CONV = Operation(
    "short_conv", "short convolution + SiLU", QWEN3_5, position=3,
    outputs=("y",), gradients=("dx", "dweight"),
    inputs=conv_inputs,
    formula=short_conv,
    peers={"huggingface_fla": conv_of_fla},
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
    sweeps=SWEEPS,
)
