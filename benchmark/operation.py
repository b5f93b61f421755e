"""How an operation is declared, and the calls that are made of it.

    RMS_NORM = Operation(name="rms_norm", title="RMSNorm", suite=QWEN3, inputs=..., formula=..., peers=..., work=...)

Such a declaration, in a file operations_*.py, is all that a new operation needs: registry.py finds it, and the command line, the CSV files,
the tables and the plots take everything from it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import models, providers
from .providers import PROVIDERS, NotInstalled
from .suites import Suite

Tensors = tuple[torch.Tensor, ...]
MODES = ("forward", "backward", "full", "no_grad_forward")
MODE_TITLES = {"full": "forward + backward", "no_grad_forward": "evaluation"}
TOKENS = (1024, 4096, 8192, 16384)


class Random:
    """Draws inputs."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        """Return a tensor of the run's dtype with mean `shift` and standard deviation `scale`."""
        drawn = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
        return drawn.mul_(scale).add_(shift) if (scale, shift) != (1.0, 0.0) else drawn

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Return an int64 tensor of values from 0 to high - 1."""
        return torch.randint(high, shape, generator=self.generator, device=self.device)


@dataclass
class Inputs:
    """The arguments of an operation, and the gradients of its outputs.

    leaves: what it is differentiated in, the first one an activation; others: the rest of its arguments; output_gradients: one an
    output, none for a loss.
    """

    leaves: Tensors
    others: Tensors = ()
    output_gradients: Tensors = ()

    def copy(self) -> "Inputs":
        """Return leaves that require gradients, in memory of their own."""
        leaves = tuple(t.detach().clone().requires_grad_() for t in self.leaves)
        return Inputs(leaves, self.others, tuple(t.clone() for t in self.output_gradients))

    def restore(self, original: "Inputs") -> None:
        """Undo what a provider wrote into them, without autograd noticing."""
        for mine, theirs in zip(self.leaves + self.output_gradients, original.leaves + original.output_gradients, strict=True):
            mine.data.copy_(theirs.data)

    def to_float64(self) -> "Inputs":
        """Return a copy in float64; integers stay what they are."""
        leaves = tuple(t.detach().double().requires_grad_() for t in self.leaves)
        others = tuple(t.double() if t.is_floating_point() else t for t in self.others)
        return Inputs(leaves, others, tuple(t.double() for t in self.output_gradients))

    def scaled(self, factor: float) -> "Inputs":
        """Return leaves and gradients times a factor."""
        leaves = tuple((t.detach() * factor).requires_grad_() for t in self.leaves)
        return Inputs(leaves, self.others, tuple(t * factor for t in self.output_gradients))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.leaves + self.output_gradients)


@dataclass(frozen=True)
class Work:
    """The least that a call can do: bytes through memory, or floating-point operations of matrix products."""

    nbytes: int = 0
    flops: int = 0

    def rate(self, microseconds: float) -> str:
        """Return what a call of this duration reaches, with its unit."""
        if self.flops:
            return f"{self.flops / microseconds * 1e-6:.0f} TFLOP/s"
        return f"{self.nbytes / microseconds * 1e-3:.0f} GB/s"

    @classmethod
    def of_products(cls, products: Iterable[tuple[int, int, int]]) -> "Work":
        """Return the work of matrix products [m, k] x [k, n], given as (m, n, k)."""
        return cls(flops=sum(2 * m * n * k for m, n, k in products))


def bytes_moved(forward: int, backward: int, tensor: Callable[[Inputs], int] | None = None) -> Callable[[Inputs, str], Work]:
    """Return the work of an operation that reads or writes each of some equally large tensors once.

    forward, backward: how many tensors that is in each pass; tensor(inputs): bytes of one, by default of the first leaf. Weights, cos, sin
    and statistics, together a few percent at most, are left out, so the floor is a little low.
    """

    def work(inputs: Inputs, mode: str) -> Work:
        one = tensor(inputs) if tensor else inputs.leaves[0].nbytes
        return Work(nbytes={"backward": backward, "full": forward + backward}.get(mode, forward) * one)

    return work


@dataclass
class Reference:
    """Results in float64. rounding: the errors that cannot be avoided, by the name of the gradient."""

    outputs: Tensors
    gradients: Tensors
    rounding: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One shape. x: the columns x_name, x_label and x_value of its rows; config: what else they say of it; arguments: what
    `Operation.inputs` takes in front of `random`."""

    x: tuple[str, str, str]
    config: Mapping[str, object]
    arguments: tuple

    @property
    def title(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in ({self.x[0]: self.x[2]} | dict(self.config)).items())


def over_tokens(operation: "Operation", args, size: Callable = models.size) -> list[Case]:
    """Return a case for each number of tokens of one model. size(model): what `Operation.inputs` takes of it."""
    model = models.full_name(args.model or operation.suite.model)
    tokens = args.tokens or operation.tokens
    return [Case(("tokens", "tokens", str(t)), {"model": model, "tokens": t}, (size(model), t)) for t in tokens]


def over_models(operation: "Operation", args) -> list[Case]:
    """Return a case for each model, all with `args.bt` tokens or the last of those of the other sweep."""
    tokens = args.bt or (args.tokens or operation.tokens)[-1]
    names = map(models.full_name, args.models or operation.suite.models)
    return [Case(("model", "model", name), {"model": name, "tokens": tokens}, (models.size(name), tokens)) for name in names]


SWEEPS = {"token_length": over_tokens, "model_config": over_models}


@dataclass(frozen=True)
class LigerConvention:
    """What Liger-Kernel's own script of an operation does otherwise than its declaration says (liger_convention.py measures so).

    name: in Liger's file, if not the operation's. x_name, x_label: of the sweep over tokens. dtype: None is that of the command line.
    inputs: instead of the operation's.
    before(*leaves): made once, outside the timed part, and differentiated through (a softmax in front of a loss). around(function): what is
    called instead of each provider's function (the MLP around an activation). differentiated: so many of the outputs, None for all.
    """

    name: str = ""
    x_name: str = "T"
    x_label: str = "sequence length"
    dtype: str | None = None
    inputs: Callable | None = None
    before: Callable | None = None
    around: Callable | None = None
    differentiated: int | None = None


@dataclass(frozen=True)
class Limit:
    """What an operation should reach at one shape, forward and backward (limits.py measures it).

    tokens, and size, the dimensions that differ from those of the suite's model; or inputs, instead of the operation's, and a label for
    them. share: of the floor; peer, liger: how many times as fast as the fastest peer and as Liger. checked: tokens of the inputs that are
    checked against float64, few where float64 of the whole would not fit.
    """

    tokens: int
    share: float
    size: Mapping[str, Any] = field(default_factory=dict)
    peer: float = 0.0
    liger: float = 0.0
    dtype: str = "bf16"
    checked: int = 64
    label: str = ""
    inputs: Callable | None = None

    @property
    def title(self) -> str:
        found = self.label or ", ".join([f"{self.tokens} tokens", *(f"{name} {number}" for name, number in self.size.items())])
        return f"{found}, {self.dtype}"

    def draw(self, operation: "Operation", tokens: int, random: Random) -> Inputs:
        """Return inputs of this shape with so many tokens."""
        size = dataclasses.replace(models.size(operation.suite.model), **self.size)
        return (self.inputs or operation.inputs)(size, tokens, random)


@dataclass(frozen=True, eq=False)
class Operation:
    """What is compared.

    name: of the rows, and of the package's function. title: in tables and plots. suite: suites.py. position: in the suite's table.
    outputs, gradients: the names of the results.
    inputs(*case.arguments, random) -> Inputs: (size, tokens, random) unless `sweeps` says otherwise. formula: in PyTorch, in any dtype;
    formula_provider: whose it is. peers: loaders of the other providers (providers.py), by name. bastile(package) -> function, where
    the package's does not take leaves and others as they are. compiled: does torch.compile of the formula take part?
    work(inputs, mode) -> Work. floor(inputs, mode) -> a call that does only that, where it is not a copy of the bytes; floor_title says
    what.
    reference(inputs) -> Reference where differentiating the formula in float64 would take too much memory. bounds: the errors of results
    that the model's own code has less exact than correctness.BOUNDS allows, by name.
    writes_inputs: does some provider write into its inputs or into the gradients of the outputs? file: the CSV file, if not `name`; script:
    benchmark_<script>.py runs it, if not `name` does.
    sweeps: by --sweep-mode, functions (operation, args) -> [Case]. shown: x_name and x_value of the suite's table, if not its tokens.
    extra(settings, args) -> rows of a measurement of the operation's own. liger: how Liger's script measures it; None: not at all.
    limits: what it should reach.
    """

    name: str
    title: str
    suite: Suite
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    inputs: Callable[..., Inputs]
    formula: Callable
    work: Callable[[Inputs, str], Work]
    peers: Mapping[str, Callable[[], Callable]] = field(default_factory=dict)
    bastile: Callable | None = None
    formula_provider: str = "huggingface"
    compiled: bool = True
    floor: Callable[[Inputs, str], Callable] | None = None
    floor_title: str = "copy_ of the same bytes"
    reference: Callable[[Inputs], Reference] | None = None
    modes: tuple[str, ...] = ("forward", "backward", "full")
    bounds: Mapping[str, float] = field(default_factory=dict)
    writes_inputs: bool = True
    file: str = ""
    script: str = ""
    position: int = 100
    tokens: tuple[int, ...] = TOKENS
    sweeps: Mapping[str, Callable] = field(default_factory=lambda: SWEEPS)
    shown: tuple[str, str] | None = None
    extra: Callable | None = None
    liger: LigerConvention | None = None
    limits: tuple[Limit, ...] = ()

    def __post_init__(self):
        for what, names, known in (
            ("peers", self.peers, PROVIDERS),
            ("formula_provider", [self.formula_provider], PROVIDERS),
            ("modes", self.modes, MODES),
            ("bounds", self.bounds, self.outputs + self.gradients),
        ):
            if unknown := [name for name in names if name not in known]:
                raise ValueError(f"{what} of {self.name}: {', '.join(unknown)}, expected some of {', '.join(known)}")

    @property
    def csv_name(self) -> str:
        return self.file or self.name

    @property
    def providers(self) -> list[str]:
        """Those that can take part, in the order in which they are measured."""
        compiled = ["torch_compile"] if self.compiled else []
        return sorted(providers.in_order({self.formula_provider, "bastile", *compiled, *self.peers}), key=lambda p: PROVIDERS[p].last)

    def of_package(self, kernel) -> Callable:
        """Return the function of a loaded package. Raise NotInstalled where it has none."""
        return self.bastile(kernel) if self.bastile else providers.operation(kernel, self.name)

    def load(self, provider: str) -> Callable:
        """Return the function of a provider. Raise NotInstalled where it is not here."""
        if provider == "bastile":
            return self.of_package(providers.package(self.suite.package))
        if provider in self.peers:
            return self.peers[provider]()
        if provider == self.formula_provider:
            return self.formula
        if provider == "torch_compile":
            return providers.compiled(self.formula)
        raise NotInstalled(f"{self.name} has no provider {provider}")

    def cases(self, args) -> list[Case]:
        """Return what the command line asks for."""
        return self.sweeps[args.sweep_mode](self, args)


def as_tuple(result) -> Tensors:
    """Return the results of an operation, be it one or many."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def timed_call(function: Callable, inputs: Inputs, mode: str) -> Callable:
    """Return the call that is timed; for "backward" the forward pass is done here."""
    arguments = (*inputs.leaves, *inputs.others)
    output_gradients = inputs.output_gradients or None

    def forward():
        return function(*arguments)

    def full():
        return torch.autograd.grad(as_tuple(function(*arguments)), inputs.leaves, output_gradients)

    def no_grad_forward():
        # As in an evaluation: activations carry no history, weights still say that they want gradients.
        with torch.no_grad():
            return function(arguments[0].detach(), *arguments[1:])

    def backward():
        return torch.autograd.grad(outputs, inputs.leaves, output_gradients, retain_graph=True)

    if mode == "backward":
        outputs = as_tuple(function(*arguments))
    return {"forward": forward, "full": full, "no_grad_forward": no_grad_forward, "backward": backward}[mode]
