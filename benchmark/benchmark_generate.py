"""Inference of Qwen3: the prefill of a prompt and the step of one more token, as transformers has them and with Bastile.

Random weights, bf16, SDPA, a dynamic cache, no compilation; the sizes of the model with few of its layers, for a step's time is
that of a layer times their number. Timed from an idle device, so short steps show what their launches cost.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = Path(__file__).resolve().parent.name

from . import models, providers, records, training
from .harness import WRONG, Benchmark, default_device, integers, message, say
from .records import Row
from .timing import TIMINGS, Clock, Quantiles, relative_error

PROVIDERS = ("huggingface", "bastile")
MODES = ("prefill", "decode")


class Generation:
    """One model with a prompt [batch, tokens] and, for the steps after it, its cache."""

    def __init__(self, model, ids: torch.Tensor):
        self.model, self.ids = model.eval(), ids
        with torch.no_grad():
            self.cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    @torch.no_grad()
    def prefill(self) -> torch.Tensor:
        return self.model(input_ids=self.ids, use_cache=True, logits_to_keep=1).logits

    @torch.no_grad()
    def decode(self) -> torch.Tensor:
        """Makes the cache one token longer; `forget` makes it as it was."""
        return self.model(input_ids=self.ids[:, -1:], past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits

    def forget(self) -> None:
        if more := self.cache.get_seq_length() - self.ids.shape[1]:
            self.cache.crop(-more)

    def call(self, mode: str) -> Callable[[], torch.Tensor]:
        return {"prefill": self.prefill, "decode": self.decode}[mode]


def generations(args, batch: int) -> dict[str, Generation]:
    """The same weights and prompt for every provider."""
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(models.size(args.model).vocab, (batch, args.tokens), generator=generator).to(args.device)
    found = {}
    for provider in PROVIDERS:
        model = training.make_model(args.model, args.layers, args.device)
        found[provider] = Generation(providers.package().kernelize(model) if provider == "bastile" else model, ids)
    return found


def check(found: dict[str, Generation]) -> None:
    """Raises ArithmeticError when the logits are not the same up to rounding."""
    for mode in MODES:
        expected, ours = (found[provider].call(mode)() for provider in PROVIDERS)
        error = relative_error(ours, expected)
        if not error <= WRONG[torch.bfloat16]:
            raise ArithmeticError(f"wrong result: logits of {mode} are off by {error:.1e}, expected at most {WRONG[torch.bfloat16]:.0e}")
    for generation in found.values():
        generation.forget()


def measure(args, batch: int, clock: Clock) -> list[Row]:
    found = generations(args, batch)
    check(found)

    def before() -> None:
        for generation in found.values():
            generation.forget()

    rows = []
    for mode in MODES:
        calls = {provider: [generation.call(mode)] for provider, generation in found.items()}
        timed = clock.measure(calls, before, args.rounds)
        rows += [row(args, batch, provider, mode, value) for provider, value in timed.items()]
        speed = {p: value.median for p, value in timed.items() if isinstance(value, Quantiles)}
        shown = ", ".join(f"{p} {us / 1e3:.3f} ms" for p, us in speed.items())
        say(f"  batch {batch}, {mode}: {shown}" + (f", {speed['huggingface'] / speed['bastile']:.2f} x" if len(speed) == 2 else ""))
    return rows


def row(args, batch: int, provider: str, mode: str, value: Quantiles | Exception) -> Row:
    config = {"model": models.full_name(args.model), "layers": args.layers, "tokens": args.tokens, "dtype": "bf16", "timing": args.timing}
    numbers: tuple = (None, None, None)
    if isinstance(value, Quantiles):
        numbers = (value.median, value.low, value.high)
    else:
        config["error"] = message(value)
    extra = json.dumps(config | records.environment(), sort_keys=True)
    x = ("batch", "sequences in a batch", str(batch))
    return Row("generate", provider, mode, "speed", "us", *x, *numbers, extra, records.gpu_name(args.device))


class Qwen3GenerateBenchmark(Benchmark):
    """For `kernels benchmark`."""

    seed = 0

    def setup(self) -> None:
        name, tokens = ("8b", 2048) if self.device.startswith("cuda") else ("tiny", 32)
        args = argparse.Namespace(model=name, layers=2, tokens=tokens, device=self.device)
        ids = torch.randint(models.size(name).vocab, (1, tokens), device=self.device)
        make = partial(training.make_model, args.model, args.layers, args.device)
        self.generation, self.reference = Generation(self.kernel.kernelize(make()), ids), Generation(make(), ids)

    def benchmark_prefill(self) -> None:
        self.out = self.generation.prefill()

    def verify_prefill(self) -> torch.Tensor:
        return self.reference.prefill()

    def benchmark_decode(self) -> None:
        self.generation.forget()
        self.out = self.generation.decode()

    def verify_decode(self) -> torch.Tensor:
        self.reference.forget()
        return self.reference.decode()


def main(arguments=None) -> list[Row]:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--model", default="qwen3_8b", help=f"sizes: {', '.join(models.SIZES)}")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    p.add_argument("--batches", type=integers, default=(1, 8), help="comma-separated")
    p.add_argument("--device", default=default_device())
    p.add_argument("--timing", choices=TIMINGS[:2], default="wall", help="see timing.py")
    p.add_argument("--ms", type=float, default=1000.0, help="milliseconds of calls for each number")
    p.add_argument("--rounds", type=int, default=2, help="turns that the providers take")
    p.add_argument("--results", type=Path, help="folder for <gpu>/generate.csv; on a CPU nothing is written without it")
    args = p.parse_args(arguments)
    results = args.results or (records.RESULTS if args.device.startswith("cuda") else None)
    say(f"{models.title(args.model)}, {args.layers} layers, {args.tokens} tokens, on {records.gpu_name(args.device)}")
    clock, rows = Clock(args.device, args.timing, args.ms), []
    for batch in args.batches:
        found = measure(args, batch, clock)
        if results:
            records.write(results / records.slug(found[0].gpu_name) / "generate.csv", found)
        rows += found
        clock.clean()
    return rows


if __name__ == "__main__":
    main()
