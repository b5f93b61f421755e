"""Every operation that a package ships, on this machine and in float64 on the CPU: do they agree?

In float64 an operation runs in PyTorch, so the same function is its own reference. What is compared are its results and the gradients of
all its arguments, in each dtype that has kernels.
"""

import importlib
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from ..runtime import launch
from ..runtime.artifacts import ArtifactError
from ..runtime.device import why_no_kernels
from ..runtime.tuning import tuner

# The largest relative error ||found - exact|| / ||exact||: a few roundings in a row. A kernel that computes something else is far beyond.
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-4}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TOKENS, HIDDEN, WIDTH, CLASSES, LONG = 130, 1024, 128, 2000, 40000
SUM = {"reduction": "sum"}  # of a mean's gradients fp16 would hold few digits
GPT_OSS = {"transposed": True, "interleaved": True, "alpha": 1.702, "limit": 7.0}


class Inputs:
    """Draws the same arguments in one dtype on a device and, as these round to, in float64 on the CPU."""

    def __init__(self, device: torch.device, dtype: torch.dtype, exact: bool, seed: int = 0):
        self.device = torch.device("cpu") if exact else device
        self.dtype, self.exact = dtype, exact
        self.generator = torch.Generator().manual_seed(seed)
        self.leaves: List[torch.Tensor] = []

    def constant(self, *shape: int, scale: float = 1.0, shift: float = 0.0, of: Optional[Callable] = None) -> torch.Tensor:
        """Returns normal numbers, or a function of them, that need no gradient."""
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale + shift
        rounded = (of(drawn) if of else drawn).to(self.dtype)
        return rounded.double() if self.exact else rounded.to(self.device)

    def leaf(self, *shape: int, scale: float = 1.0, shift: float = 0.0, of: Optional[Callable] = None) -> torch.Tensor:
        """Returns numbers like `constant`, whose gradient is compared."""
        drawn = self.constant(*shape, scale=scale, shift=shift, of=of)
        self.leaves.append(drawn.requires_grad_())
        return drawn

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Returns int64 numbers from 0 to high - 1."""
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def row(self, *values: int) -> torch.Tensor:
        """Returns int32 numbers."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def turns(self, *shape: int) -> torch.Tensor:
        """Returns complex numbers of length 1, in single or double precision."""
        angles = torch.randn(shape, generator=self.generator)
        found = torch.polar(torch.ones_like(angles), angles)
        return found.to(torch.complex128) if self.exact else found.to(self.device)


class Case(NamedTuple):
    """module: beside this one's folder; name: of its function; arguments(inputs) -> (positional, by name); what: of several cases of a
    function; call(function, ...): instead of the function, for one that is no function of its arguments."""

    module: str
    name: str
    arguments: Callable[[Inputs], Tuple[tuple, Dict[str, Any]]]
    what: str = ""
    call: Optional[Callable] = None


def _norm(width: int, added: bool, **options) -> Callable:
    def arguments(i: Inputs):
        rows = [i.leaf(TOKENS, width) for _ in range(1 + added)]
        return (*rows, i.leaf(width)), options

    return arguments


def _heads(i: Inputs, *counts: int, last: bool = False, width: int = WIDTH, batch: Tuple[int, ...] = (1,)) -> List[torch.Tensor]:
    return [i.leaf(*batch, TOKENS, n, width) if last else i.leaf(*batch, n, TOKENS, width) for n in counts]


def _linear(i: Inputs, out: int, inner: int) -> torch.Tensor:
    return i.leaf(out, inner, scale=inner**-0.5)


def _experts(i: Inputs, biases: bool = False, **options):
    count, inner, width = 4, 256, 128
    shapes = ((count, inner, 2 * width), (count, width, inner)) if biases else ((count, 2 * width, inner), (count, inner, width))
    hidden, expert, scores = i.leaf(TOKENS, inner), i.integers(count, TOKENS, 2), i.leaf(TOKENS, 2)
    weights = [i.leaf(*shape, scale=shape[-2 if biases else -1] ** -0.5) for shape in shapes]
    more = (i.leaf(count, 2 * width), i.leaf(count, inner)) if biases else ()
    return (hidden, expert, scores, *weights, *more), options


def _attention(i: Inputs, width: int, sinks: bool = False, window: Optional[int] = None):
    heads = [i.leaf(TOKENS, n, width) for n in (8, 2, 2)]
    options = {"cu_seqlens": i.row(0, 50, TOKENS), "window": window}
    return tuple(heads), {**options, "sinks": i.leaf(8)} if sinks else options


def _mlp(i: Inputs):
    return (i.leaf(TOKENS, 256), _linear(i, 512, 256), _linear(i, 512, 256), _linear(i, 256, 512)), {}


def _tiled(i: Inputs):
    x, *weights = _mlp(i)[0]
    return (x, *weights), {"shards": 2}


def _angles(i: Inputs, *shape: int) -> Tuple[torch.Tensor, torch.Tensor]:
    return i.constant(*shape), i.constant(*shape)


def _adamw_step(kind: Callable, values: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns parameters after two steps, which are large enough to be all that is compared."""
    parameter = torch.nn.Parameter(values.detach().clone())
    optimizer = kind([parameter], lr=0.5, eps=1e-3)  # which fp16 can hold
    for _ in range(2):
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def _far_from_zero(x: torch.Tensor) -> torch.Tensor:
    return x + 8 * x.sign()  # whose squares fp16 can hold


def _low_rank_sum(function: Callable, y: torch.Tensor, low: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    function(y, low, b)
    return y


def _without_gradients(function: Callable, *arguments, **options) -> torch.Tensor:
    with torch.no_grad():
        return function(*arguments, **options)


def _delta(i: Inputs):
    heads = [i.leaf(1, TOKENS, n, WIDTH, of=_unit) for n in (2, 2)]
    decay = i.leaf(1, TOKENS, 4, of=lambda x: -0.1 * x.abs())
    return (*heads, i.leaf(1, TOKENS, 4, WIDTH), decay, i.leaf(1, TOKENS, 4, of=torch.sigmoid)), {}


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def _weighted(i: Inputs, *logits: torch.Tensor):
    return (*logits, i.integers(CLASSES, TOKENS)), {"weight" if len(logits) == 1 else "class_weight": i.constant(CLASSES, of=torch.sigmoid)}


def _logits(i: Inputs, of: Optional[Callable] = None) -> torch.Tensor:
    return i.leaf(TOKENS, CLASSES, of=of)


def _log_softmax(x: torch.Tensor) -> torch.Tensor:
    return x.log_softmax(-1)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


CASES: Tuple[Case, ...] = (
    Case("ops.rms_norm", "rms_norm", _norm(HIDDEN, False)),
    Case("ops.rms_norm", "rms_norm", _norm(777, False, offset=1.0, rounds="last"), "offset, odd width"),
    Case("ops.rms_norm", "add_rms_norm", _norm(HIDDEN, True)),
    Case("ops.rms_norm", "add_rms_norm", _norm(2880, True, rounds="last"), "rounded last"),
    Case("ops.rotary", "rotary", lambda i: ((*_heads(i, 8, 2), *_angles(i, 1, TOKENS, WIDTH)), {})),
    Case("ops.rotary", "qk_norm_rotary", lambda i: ((*_heads(i, 8, 4, last=True), i.leaf(WIDTH), i.leaf(WIDTH),
                                                 *_angles(i, 1, TOKENS, WIDTH)), {})),
    Case("ops.swiglu", "swiglu", lambda i: ((i.leaf(TOKENS, HIDDEN), i.leaf(TOKENS, HIDDEN)), {})),
    Case("ops.swiglu", "mlp", _mlp),
    Case("ops.linear_cross_entropy", "linear_cross_entropy",
         lambda i: ((i.leaf(TOKENS, HIDDEN), _linear(i, CLASSES, HIDDEN), i.integers(CLASSES, TOKENS)), {})),
    Case("ops.linear_cross_entropy", "linear_cross_entropy", lambda i: _weighted(i, i.leaf(TOKENS, HIDDEN), _linear(i, CLASSES, HIDDEN)),
         "weighted classes"),
    Case("ops.linear_cross_entropy", "linear_cross_entropy",
         lambda i: ((i.leaf(TOKENS, HIDDEN), _linear(i, CLASSES, HIDDEN), i.integers(CLASSES, TOKENS)), {}), "evaluation",
         _without_gradients),
    Case("ops.low_rank", "low_rank_add", lambda i: ((i.constant(TOKENS, HIDDEN), i.constant(TOKENS, 16), i.constant(16, HIDDEN)), {}), "",
         _low_rank_sum),
    Case("ops.linear_log_probs", "linear_log_probs", lambda i: ((i.leaf(TOKENS, HIDDEN), _linear(i, CLASSES, HIDDEN),
                                                             i.integers(CLASSES, TOKENS)), {"outputs": ("log_probs", "entropy")})),
    Case("ops.experts", "experts", _experts),
    Case("ops.experts", "experts", lambda i: _experts(i, True, **GPT_OSS), "of GPT-OSS"),
    Case("ops.attention", "attention", lambda i: _attention(i, 128), "two documents"),
    Case("ops.attention", "attention", lambda i: _attention(i, 64, True, 32), "sinks and window"),
    Case("ops.gated_delta_rule", "gated_delta_rule", _delta),
    Case("ops.gated_rms_norm", "gated_rms_norm", lambda i: ((i.leaf(TOKENS, 4, WIDTH), i.leaf(TOKENS, 4, WIDTH), i.leaf(WIDTH)), {})),
    Case("ops.short_conv", "short_conv", lambda i: ((i.leaf(1, TOKENS, 512), i.leaf(512, 4)), {})),
    Case("ops.layer_norm", "layer_norm", lambda i: ((i.leaf(TOKENS, HIDDEN), i.leaf(HIDDEN), i.leaf(HIDDEN)), {})),
    Case("ops.group_norm", "group_norm", lambda i: ((i.leaf(2, 64, 16, 16), 8, i.leaf(64), i.leaf(64)), {})),
    Case("ops.group_norm", "group_norm", lambda i: ((i.leaf(2, 64, 96, 96), 4, i.leaf(64), i.leaf(64)), {}), "large groups"),
    Case("ops.poly_norm", "poly_norm", lambda i: ((i.leaf(TOKENS, HIDDEN), i.leaf(3), i.leaf(1)), {})),
    Case("ops.dyt", "dyt", lambda i: ((i.leaf(TOKENS, HIDDEN), i.leaf(1, shift=1.0), i.leaf(HIDDEN), i.leaf(HIDDEN)), {})),
    Case("ops.softmax", "softmax", lambda i: ((_logits(i),), {})),
    Case("ops.softmax", "softmax", lambda i: ((i.leaf(8, LONG),), {}), "long rows"),
    Case("ops.sparsemax", "sparsemax", lambda i: ((_logits(i),), {})),
    Case("ops.sparsemax", "sparsemax", lambda i: ((i.leaf(8, LONG),), {}), "long rows"),
    Case("ops.gated_activation", "swiglu", lambda i: ((i.leaf(TOKENS, HIDDEN), i.leaf(TOKENS, HIDDEN)), {}), "Liger's"),
    Case("ops.gated_activation", "geglu", lambda i: ((i.leaf(TOKENS, HIDDEN), i.leaf(TOKENS, HIDDEN)), {})),
    Case("ops.llama4_rope", "rotary_complex", lambda i: ((*_heads(i, 8, 2, last=True), i.turns(TOKENS, WIDTH // 2)), {})),
    Case("ops.mrope", "rotary_multimodal", lambda i: ((*_heads(i, 8, 2), *_angles(i, 3, 1, TOKENS, WIDTH), (16, 24, 24)), {})),
    Case("ops.mrope", "partial_rotary", lambda i: ((*_heads(i, 8, 2), *_angles(i, 1, TOKENS, WIDTH // 2)), {})),
    Case("ops.cross_entropy_of_logits", "cross_entropy", lambda i: ((_logits(i), i.integers(CLASSES, TOKENS)), {})),
    Case("ops.cross_entropy_of_logits", "cross_entropy", lambda i: _weighted(i, _logits(i)), "weighted classes"),
    Case("ops.divergence", "kl_div", lambda i: ((_logits(i, _log_softmax), _logits(i, _softmax).detach()), SUM)),
    Case("ops.divergence", "jsd", lambda i: ((_logits(i, _log_softmax), _logits(i, _log_softmax).detach()), SUM)),
    Case("ops.divergence", "tvd", lambda i: ((_logits(i, _softmax), _logits(i, _softmax).detach()), SUM)),
    Case("ops.linear_jsd", "linear_jsd",
         lambda i: ((i.leaf(TOKENS, 256), _linear(i, CLASSES, 256), i.constant(TOKENS, 128), i.constant(CLASSES, 128, scale=0.1)), SUM)),
    Case("ops.tiled_mlp", "tiled_swiglu", _tiled),
    Case("ops.tiled_mlp", "tiled_geglu", _tiled),
    Case("hf.optimizer", "AdamW", lambda i: ((i.constant(2**20), i.constant(2**20, of=_far_from_zero)), {}), "a step", _adamw_step),
    Case("ops.neighborhood_attention", "neighborhood_attention", lambda i: (tuple(_heads(i, 2, 2, 2, width=64)), {"kernel_size": 7})),
)


class Outcome(NamedTuple):
    """title: of the case; errors: the largest relative error of its results and gradients, by dtype; failures: what went wrong."""

    title: str
    errors: Dict[torch.dtype, float]
    failures: Tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join([*(f"{NAMES[dtype]} {error:.1e}" for dtype, error in self.errors.items()), *self.failures])


class Outcomes(NamedTuple):
    """cases: one each; where: the device; kernels: how many kernels of how many of this build were launched; seconds: that it took."""

    cases: Tuple[Outcome, ...]
    where: str
    kernels: Tuple[int, int]
    seconds: float


def function_of(case: Case) -> Optional[Callable]:
    """Returns the function of a case, None where this package does not ship it."""
    try:
        return getattr(importlib.import_module(f"..{case.module}", __package__), case.name)
    except ModuleNotFoundError:
        return None


def results_of(case: Case, function: Callable, inputs: Inputs) -> List[torch.Tensor]:
    """Returns the results of a case and the gradients of its arguments, in float64 on the CPU."""
    positional, named = case.arguments(inputs)
    found = case.call(function, *positional, **named) if case.call else function(*positional, **named)
    outputs = [x for x in ([found] if isinstance(found, torch.Tensor) else found) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    inputs.generator.manual_seed(1)
    differentiable = [x for x in outputs if x.requires_grad]
    gradients = [inputs.constant(*x.shape).to(x.dtype) for x in differentiable]
    if differentiable:
        torch.autograd.backward(differentiable, gradients)
    parts = outputs + [leaf.grad for leaf in inputs.leaves if leaf.grad is not None]
    return [part.detach().double().cpu() for part in parts]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns ||found - exact|| / ||exact||; infinite for another shape or a value that is not finite."""
    if found.shape != exact.shape or not torch.isfinite(found).all():
        return float("inf")
    scale = exact.norm().item()
    return (found - exact).norm().item() / scale if scale else (found - exact).norm().item()


def outcome_of(case: Case, function: Callable, device: torch.device) -> Outcome:
    """Returns what a case gives in every dtype."""
    errors, failures = {}, []
    for dtype, bound in BOUNDS.items():
        try:
            found = results_of(case, function, Inputs(device, dtype, False))
            exact = results_of(case, function, Inputs(device, dtype, True))
            error = max(relative_error(*pair) for pair in zip(found, exact)) if len(found) == len(exact) else float("inf")
        except Exception as wrong:  # one that fails takes no other along
            text = (str(wrong).splitlines() or [""])[0][:200]
            failures.append(f"{NAMES[dtype]} fails with {type(wrong).__name__}: {text}")
            continue
        errors[dtype] = error
        if not error <= bound:
            failures.append(f"{NAMES[dtype]} is off by {error:.1e}, expected at most {bound:.0e}")
    return Outcome(f"{case.name} ({case.what})" if case.what else case.name, errors, tuple(failures))


def kernels_launched() -> Tuple[int, int]:
    """Returns how many of this build's kernels were launched in this process, and how many the loaded operations know."""
    known, used = set(), set()
    for kernel in tuner.kernels:
        for name in kernel.names:
            try:
                built = bool(launch.backend.artifacts.variants(name))
            except ArtifactError:
                built = False
            if built:
                known.add(name)
        used |= known.intersection(kernel.names) if kernel.was_launched() else set()
    return len(used), len(known)


def run(device: Optional[torch.device] = None) -> Outcomes:
    """Compares every operation of this package on a device, by default the current GPU or the CPU, with float64."""
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    started, done = time.perf_counter(), []
    for case in CASES:
        function = function_of(case)
        if function is not None:
            done.append(outcome_of(case, function, device))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    reason = why_no_kernels(device)
    return Outcomes(tuple(done), f"{where} ({reason})" if reason else where, kernels_launched(), time.perf_counter() - started)
