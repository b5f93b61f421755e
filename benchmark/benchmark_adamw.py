"""The step of AdamW, with which every training step ends, on parameters of Qwen3.

Of a large model with few of its layers, in bf16 and fp32, where the memory sets the pace (the time is in proportion to the parameters);
and, from an idle device, of Qwen3-0.6B and of LoRA of rank 16 on all projections of the large model, where the host does. The floor is
copy_ of as many bytes as the step reads and writes: parameters, both averages, and the gradients once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = Path(__file__).resolve().parent.name

from . import models, providers, records, training
from .harness import DTYPES, WRONG, Benchmark, message, model_parser, save_rows, say, some_of, speed_row
from .records import Row
from .timing import Clock, Quantiles, copy_call, relative_error

PROVIDERS = ("torch", "torch_fused", "bastile")
OPTIONS = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
RANK = 16


def of_model(args, dtype: str) -> list[torch.nn.Parameter]:
    return list(training.make_model(args.model, args.layers, args.device, DTYPES[dtype]).parameters())


def of_small_model(args, dtype: str) -> list[torch.nn.Parameter]:
    name = "qwen3_tiny" if args.model.endswith("tiny") else "qwen3_0.6b"
    return list(training.make_model(name, None, args.device, DTYPES[dtype]).parameters())


def of_lora(args, dtype: str) -> list[torch.nn.Parameter]:
    """Both factors of each projection of every layer."""
    size = models.size(args.model)
    q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    hidden, inner = size.hidden, size.intermediate
    projections = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, inner), (hidden, inner), (inner, hidden)]
    shapes = [shape for i, o in projections * size.layers for shape in ((RANK, i), (o, RANK))]
    return [torch.nn.Parameter(torch.randn(shape, device=args.device).to(DTYPES[dtype])) for shape in shapes]


@dataclass(frozen=True)
class Case:
    """parameters: makes them from the command line and the dtype; dtype: of `DTYPES`; timing: see timing.py."""

    parameters: Callable
    dtype: str
    timing: str


CASES = {
    "bf16": Case(of_model, "bf16", "device"),
    "fp32": Case(of_model, "fp32", "device"),
    "small": Case(of_small_model, "bf16", "wall"),
    "lora": Case(of_lora, "fp32", "wall"),  # fp32 as PEFT has them
}


def optimizer_of(provider: str, params, **changes):
    options = OPTIONS | changes
    if provider == "bastile":
        return providers.package().AdamW(params, **options)
    return torch.optim.AdamW(params, **options, fused=True if provider == "torch_fused" else None)


def set_gradients(params, seed: int = 0) -> None:
    for number, param in enumerate(params):
        generator = torch.Generator(param.device).manual_seed(1000 * seed + number)
        param.grad = torch.empty_like(param).normal_(0.0, 1e-3, generator=generator)


def check(provider: str, dtype: torch.dtype, device: str) -> None:
    """Raises ArithmeticError when three steps with options that show do not do what AdamW does, on a parameter of each kind of size."""
    changes = {"lr": 0.05, "betas": (0.7, 0.9), "weight_decay": 0.5}
    params = [torch.nn.Parameter(torch.randn(n, device=device).to(dtype)) for n in (2**20, 2**20 + 3, 1000)]
    optimizer = optimizer_of(provider, params, **changes)
    exact = [{"param": p.detach().double(), "exp_avg": 0.0, "exp_avg_sq": 0.0} for p in params]
    for step in (1, 2, 3):
        set_gradients(params, step)
        for param, wide in zip(params, exact, strict=True):
            exact_step(wide, param.grad.double(), step, **OPTIONS | changes)
        optimizer.step()
    for param, wide in zip(params, exact, strict=True):
        for name, found in {"param": param.detach(), **optimizer.state[param]}.items():
            if name in wide and not (error := relative_error(found, wide[name])) <= WRONG[dtype]:
                raise ArithmeticError(f"wrong result: {name} is off by {error:.1e}, expected at most {WRONG[dtype]:.0e}")


@torch.no_grad()
def exact_step(wide: dict, grad: torch.Tensor, step: int, lr, betas, eps, weight_decay) -> None:
    """In float64, in place."""
    wide["exp_avg"] = betas[0] * wide["exp_avg"] + (1 - betas[0]) * grad
    wide["exp_avg_sq"] = betas[1] * wide["exp_avg_sq"] + (1 - betas[1]) * grad.square()
    change = wide["exp_avg"] / (1 - betas[0] ** step) / ((wide["exp_avg_sq"] / (1 - betas[1] ** step)).sqrt() + eps)
    wide["param"] = wide["param"] * (1 - lr * weight_decay) - lr * change


def measure(args, name: str) -> list[Row]:
    case = CASES[name]
    clock = Clock(args.device, case.timing, args.ms)
    params = case.parameters(args, case.dtype)
    set_gradients(params)
    nbytes = 7 * sum(p.nbytes for p in params)
    results = clock.measure({"floor": [copy_call(nbytes, args.device)]}, rounds=args.rounds)
    clock.clean()
    for provider in args.providers:  # one after the other: each has a state as large as two models
        optimizer = failure = None
        try:
            check(provider, DTYPES[case.dtype], args.device)
            optimizer = optimizer_of(provider, params)
            results |= clock.measure({provider: [optimizer.step]}, rounds=args.rounds)
        except Exception as error:
            failure = error.with_traceback(None)
        if failure is not None:
            results[provider] = failure
        del optimizer
        clock.clean()
    floor = results["floor"]
    for provider, value in results.items():
        if isinstance(value, Quantiles):
            share = f", {floor.median / value.median:.1%} of the floor" if isinstance(floor, Quantiles) else ""
            say(f"  {name}, {provider}: {value.median / 1e3:.2f} ms, {nbytes / value.median * 1e-6:.2f} TB/s{share}")
        else:
            say(f"  {name}, {provider}: {message(value)}")
    x = ("parameters", "parameters", name)
    known = {"dtype": case.dtype, "timing": case.timing, "nbytes": nbytes, "tensors": len(params)}
    return [speed_row(args, "adamw", provider, "full", x, value, **known) for provider, value in results.items()]


class AdamWBenchmark(Benchmark):
    """For `kernels benchmark`."""

    seed = 0

    def setup(self) -> None:
        count = 2**24 if self.device.startswith("cuda") else 2**12
        mine, other = (torch.nn.Parameter(torch.full((count,), 0.1, device=self.device)) for _ in range(2))
        for param in (mine, other):
            param.grad = torch.linspace(-1.0, 1.0, count, device=self.device)
        options = OPTIONS | {"lr": 0.05}  # so that a wrong step shows in results that are compared by an absolute tolerance
        self.param, self.reference = mine, other
        self.optimizer, self.plain = self.kernel.AdamW([mine], **options), torch.optim.AdamW([other], **options)

    def benchmark_step(self) -> None:
        self.optimizer.step()
        self.out = self.param.detach()

    def verify_step(self) -> torch.Tensor:
        self.plain.step()
        return self.reference.detach()


def main(arguments=None) -> list[Row]:
    p = model_parser(__doc__.partition("\n")[0], "adamw", 300.0)
    p.add_argument("--cases", type=some_of(*CASES), default=tuple(CASES), help=f"of {', '.join(CASES)}")
    p.add_argument("--providers", type=some_of(*PROVIDERS), default=PROVIDERS, help=f"of {', '.join(PROVIDERS)}")
    args = p.parse_args(arguments)
    say(f"{models.title(args.model)}, {args.layers} layers, on {records.gpu_name(args.device)}")
    rows: list[Row] = []
    for name in args.cases:
        found = measure(args, name)
        save_rows(args, "adamw", found)
        rows += found
    return rows


if __name__ == "__main__":
    main()
