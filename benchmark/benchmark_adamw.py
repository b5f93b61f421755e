"""The step of AdamW on all parameters of a Qwen3, with which every training step ends.

Each provider has the model of few layers (the step's time is in proportion to the parameters), the same gradients, and its own state.
The floor is copy_ of as many bytes as the step reads and writes: parameters, both averages, and the gradients once.
"""

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


def optimizer_of(provider: str, params):
    if provider == "bastile":
        return providers.package().AdamW(params, **OPTIONS)
    return torch.optim.AdamW(params, **OPTIONS, fused=True if provider == "torch_fused" else None)


def gradients(params) -> None:
    for number, param in enumerate(params):
        generator = torch.Generator(param.device).manual_seed(number)
        param.grad = torch.empty_like(param).normal_(0.0, 1e-3, generator=generator)


@torch.no_grad()
def exact(param, lr, betas, eps, weight_decay) -> torch.Tensor:
    """A parameter after its first step, in float64."""
    wide, grad = param.double(), param.grad.double()
    return wide * (1 - lr * weight_decay) - lr * grad / (grad.abs() + eps)


def check(provider: str, params) -> None:
    """Raises ArithmeticError when a first step does not do what AdamW does, of a few parameters with a learning rate that shows."""
    options = OPTIONS | {"lr": 0.05}
    few = [torch.nn.Parameter(p.detach()[: 2**10].clone()) for p in params[:6]]
    gradients(few)
    wanted = [exact(p, **options) for p in few]
    optimizer = optimizer_of(provider, few)
    optimizer.param_groups[0]["lr"] = options["lr"]
    optimizer.step()
    error = max(relative_error(p.detach(), w) for p, w in zip(few, wanted, strict=True))
    if not error <= WRONG[few[0].dtype]:
        raise ArithmeticError(f"wrong result: param is off by {error:.1e}, expected at most {WRONG[few[0].dtype]:.0e}")


def measure(args, dtype: str, clock: Clock) -> list[Row]:
    model = training.make_model(args.model, args.layers, args.device, DTYPES[dtype])
    params = list(model.parameters())
    gradients(params)
    nbytes = 7 * sum(p.nbytes for p in params)
    results: dict[str, Quantiles | Exception] = {}
    floor = clock.measure({"floor": [copy_call(nbytes, args.device)]}, rounds=args.rounds)
    results |= floor
    clock.clean()
    for provider in args.providers:  # one after the other: each has a state as large as two models
        failure = None
        try:
            check(provider, params)
            optimizer = optimizer_of(provider, params)
            results |= clock.measure({provider: [optimizer.step]}, rounds=args.rounds)
        except Exception as error:
            failure = error.with_traceback(None)
        optimizer = None
        if failure is not None:
            results[provider] = failure
        clock.clean()
    for provider, value in results.items():
        if isinstance(value, Quantiles):
            share = f", {results['floor'].median / value.median:.1%} of the floor" if isinstance(results["floor"], Quantiles) else ""
            say(f"  {dtype}, {provider}: {value.median / 1e3:.2f} ms, {nbytes / value.median * 1e-6:.2f} TB/s{share}")
        else:
            say(f"  {dtype}, {provider}: {message(value)}")
    x = ("dtype", "parameters", dtype)
    return [speed_row(args, "adamw", provider, "full", x, value, dtype=dtype, nbytes=nbytes) for provider, value in results.items()]


class AdamWBenchmark(Benchmark):
    """For `kernels benchmark`."""

    seed = 0

    def setup(self) -> None:
        count = 2**24 if self.device.startswith("cuda") else 2**12
        mine, other = (torch.nn.Parameter(torch.full((count,), 0.1, device=self.device)) for _ in range(2))
        for param in (mine, other):
            param.grad = torch.linspace(-1.0, 1.0, count, device=self.device)
        self.param, self.reference = mine, other
        self.optimizer, self.plain = self.kernel.AdamW([mine], **OPTIONS), torch.optim.AdamW([other], **OPTIONS)

    def benchmark_step(self) -> None:
        self.optimizer.step()
        self.out = self.param.detach()

    def verify_step(self) -> torch.Tensor:
        self.plain.step()
        return self.reference.detach()


def main(arguments=None) -> list[Row]:
    p = model_parser(__doc__.partition("\n")[0], "adamw", "device", 300.0)
    p.add_argument("--dtypes", type=some_of(*DTYPES), default=("bf16", "fp32"), help=f"of {', '.join(DTYPES)}")
    p.add_argument("--providers", type=some_of(*PROVIDERS), default=PROVIDERS, help=f"of {', '.join(PROVIDERS)}")
    args = p.parse_args(arguments)
    say(f"{models.title(args.model)}, {args.layers} layers, on {records.gpu_name(args.device)}")
    clock, rows = Clock(args.device, args.timing, args.ms), []
    for dtype in args.dtypes:
        found = measure(args, dtype, clock)
        save_rows(args, "adamw", found)
        rows += found
        clock.clean()
    return rows


if __name__ == "__main__":
    main()
