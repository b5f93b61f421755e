"""The step of AdamW, with which every training step ends, on parameters of Qwen3.

Of a large model with few of its layers, in bf16 and fp32, where the memory sets the pace (the time is in proportion to the parameters);
and, from an idle device, of Qwen3-0.6B and of LoRA of rank 16 on all projections of the large model, where the host does: its own time
stands beside those. The floor is copy_ of as many bytes as the step reads and writes: parameters, both averages, and the gradients once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import models, providers, records, rows
from .command_line import DTYPES, layers_parser, some_of
from .correctness import check
from .correctness import relative_error as error_of
from .families import make_model
from .floors import copy_call
from .kernels_cli import Benchmark
from .markdown import Table, by_provider, columns_of, milliseconds, of_floor, select, times_faster
from .providers import FLOOR
from .records import Row
from .report import log, message
from .suites import QWEN3
from .timing import Clock, Quantiles

PROVIDERS = ("torch", "torch_fused", "bastile")
OPTIONS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
RANK = 16


def of_model(args, dtype: str) -> list[torch.nn.Parameter]:
    """Return the parameters of some layers of the model, with its head and embedding."""
    return list(make_model(args.model, args.layers, args.device, DTYPES[dtype]).parameters())


def of_small_model(args, dtype: str) -> list[torch.nn.Parameter]:
    """Return the parameters of a whole small model."""
    name = "qwen3_tiny" if args.model.endswith("tiny") else "qwen3_0.6b"
    return list(make_model(name, None, args.device, DTYPES[dtype]).parameters())


def of_lora(args, dtype: str) -> list[torch.nn.Parameter]:
    """Return both factors of each projection of every layer."""
    size = models.size(args.model)
    q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    hidden, inner = size.hidden, size.intermediate
    projections = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, inner), (hidden, inner), (inner, hidden)]
    shapes = [shape for i, o in projections * size.layers for shape in ((RANK, i), (o, RANK))]
    return [torch.nn.Parameter(torch.randn(shape, device=args.device).to(DTYPES[dtype])) for shape in shapes]


@dataclass(frozen=True)
class Case:
    """What is stepped. title: of its row, with the {model} and the number of {layers}; parameters: makes them from the command line and the
    dtype; dtype: of `DTYPES`; timing: see timing.py."""

    title: str
    parameters: Callable
    dtype: str
    timing: str


CASES = {
    "bf16": Case("{model} with {layers} layers, bf16", of_model, "bf16", "device"),
    "fp32": Case("{model} with {layers} layers, fp32", of_model, "fp32", "device"),
    "small": Case("Qwen3-0.6B, bf16, from an idle GPU", of_small_model, "bf16", "wall"),
    # fp32 as PEFT has them.
    "lora": Case("LoRA of rank 16 on {model}, fp32, from an idle GPU", of_lora, "fp32", "wall"),
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


def check_steps(provider: str, dtype: torch.dtype, device: str) -> None:
    """Raise ArithmeticError when three steps with options that show do not do what AdamW does, on a parameter of each kind of size."""
    changes = {"lr": 0.05, "betas": (0.7, 0.9), "weight_decay": 0.5}
    params = [torch.nn.Parameter(torch.randn(n, device=device).to(dtype)) for n in (2**20, 2**20 + 3, 1000)]
    optimizer = optimizer_of(provider, params, **changes)
    references: list[dict[str, Any]] = [{"param": p.detach().double(), "exp_avg": 0.0, "exp_avg_sq": 0.0} for p in params]
    for step in (1, 2, 3):
        set_gradients(params, step)
        for param, reference in zip(params, references, strict=True):
            assert param.grad is not None
            step_in_float64(reference, param.grad.double(), step, **OPTIONS | changes)
        optimizer.step()
    for param, reference in zip(params, references, strict=True):
        found = {"param": param.detach(), **optimizer.state[param]}
        check({name: error_of(found[name], exact) for name, exact in reference.items()}, dtype)


@torch.no_grad()
def step_in_float64(reference: dict, grad: torch.Tensor, step: int, lr, betas, eps, weight_decay) -> None:
    """Do AdamW's step in float64, in place. reference: "param", "exp_avg" and "exp_avg_sq"."""
    reference["exp_avg"] = betas[0] * reference["exp_avg"] + (1 - betas[0]) * grad
    reference["exp_avg_sq"] = betas[1] * reference["exp_avg_sq"] + (1 - betas[1]) * grad.square()
    change = reference["exp_avg"] / (1 - betas[0] ** step) / ((reference["exp_avg_sq"] / (1 - betas[1] ** step)).sqrt() + eps)
    reference["param"] = reference["param"] * (1 - lr * weight_decay) - lr * change


def measure(args, name: str) -> list[Row]:
    """Return the rows of one case: the floor, and one provider after the other."""
    case = CASES[name]
    clock = Clock(args.device, case.timing, args.ms)
    params = case.parameters(args, case.dtype)
    set_gradients(params)
    nbytes = 7 * sum(p.nbytes for p in params)
    results = clock.measure({FLOOR: [copy_call(nbytes, args.device)]}, rounds=args.rounds)
    hosts: dict[str, dict[str, float]] = {}
    clock.clean()
    for provider in args.providers:  # one after the other: each has a state as large as two models
        optimizer = failure = None
        try:
            check_steps(provider, DTYPES[case.dtype], args.device)
            optimizer = optimizer_of(provider, params)
            results |= clock.measure({provider: [optimizer.step]}, rounds=args.rounds)
            if case.timing == "wall" and clock.cuda:
                hosts[provider] = {"host_us": clock.host_microseconds(optimizer.step, calls=2)}
        except Exception as error:
            failure = error.with_traceback(None)
        if failure is not None:
            results[provider] = failure
        del optimizer
        clock.clean()
    floor = results[FLOOR]
    for provider, value in results.items():
        if isinstance(value, Quantiles):
            share = f", {floor.median / value.median:.1%} of the floor" if isinstance(floor, Quantiles) else ""
            log(f"  {name}, {provider}: {value.median / 1e3:.2f} ms, {nbytes / value.median * 1e-6:.2f} TB/s{share}")
        else:
            log(f"  {name}, {provider}: {message(value)}")
    x = ("parameters", "parameters", name)
    known = {"dtype": case.dtype, "timing": case.timing, "nbytes": nbytes, "tensors": len(params)}
    found = []
    for provider, value in results.items():
        found.append(rows.speed_row(args, "adamw", provider, "full", x, value, **known, **hosts.get(provider, {})))
    return found


def of_host(row: Row | None) -> str:
    """Return what a step costs the host, where that was measured."""
    return f", host {milliseconds(row.config['host_us'])}" if row is not None and "host_us" in row.config else ""


def table(found: list[Row]) -> str:
    """Return the milliseconds of an optimizer step by what it steps."""
    found = select(found, kernel_name="adamw", model=QWEN3.model, metric_name="speed")
    names = columns_of(found)
    table = Table("parameters of", *map(providers.title, names), "floor", "Bastile: of the floor", "vs best peer")
    for name in dict.fromkeys(row.x_value for row in found):
        mine = by_provider(select(found, x_value=name))
        title = CASES[name].title.format(model=models.title(QWEN3.model), layers=found[-1].config["layers"])
        cells = [table.notes.cell(mine.get(p), milliseconds) + of_host(mine.get(p)) for p in (*names, FLOOR)]
        table.add([title, *cells, of_floor(mine), times_faster(mine)], mine.values())
    return table.text()


TABLES = {"adamw": table}


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
    p = layers_parser(__doc__.partition("\n")[0], "adamw", 300.0)
    p.add_argument("--cases", type=some_of(*CASES), default=tuple(CASES), help=f"of {', '.join(CASES)}")
    p.add_argument("--providers", type=some_of(*PROVIDERS), default=PROVIDERS, help=f"of {', '.join(PROVIDERS)}")
    args = p.parse_args(arguments)
    log(f"{models.title(args.model)}, {args.layers} layers, on {records.gpu_name(args.device)}")
    found: list[Row] = []
    for name in args.cases:
        mine = measure(args, name)
        rows.save_speeds(args, "adamw", mine)
        found += mine
    return found


if __name__ == "__main__":
    main()
