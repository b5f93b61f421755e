"""Inference of Qwen3: the prefill of a prompt and the step of one more token, as transformers has them and with Bastile.

Random weights, bf16, SDPA, a dynamic cache, no compilation; the sizes of the model with few of its layers, for a step's time is
that of a layer times their number. Timed from an idle device, so short steps show what their launches cost.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import models, providers, records, rows
from .command_line import integers, layers_parser
from .correctness import BOUNDS, relative_error
from .families import make_model
from .kernels_cli import Benchmark
from .markdown import comparison, in_order, number, select
from .records import Row
from .report import log
from .suites import QWEN3
from .timing import Call, Clock, Quantiles

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
        """Return the logits of one more token. It makes the cache longer; `forget` makes it as it was."""
        return self.model(input_ids=self.ids[:, -1:], past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits

    def forget(self) -> None:
        if more := self.cache.get_seq_length() - self.ids.shape[1]:
            self.cache.crop(-more)

    def call(self, mode: str) -> Callable[[], torch.Tensor]:
        return {"prefill": self.prefill, "decode": self.decode}[mode]


def generations(args, batch: int) -> dict[str, Generation]:
    """Return a model of each provider, with the same weights and prompt."""
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(models.size(args.model).vocab, (batch, args.tokens), generator=generator).to(args.device)
    found = {}
    for provider in PROVIDERS:
        model = make_model(args.model, args.layers, args.device)
        found[provider] = Generation(providers.package().kernelize(model) if provider == "bastile" else model, ids)
    return found


def check(found: dict[str, Generation]) -> None:
    """Raise ArithmeticError when the logits are not the same up to rounding."""
    for mode in MODES:
        expected, ours = (found[provider].call(mode)() for provider in PROVIDERS)
        error = relative_error(ours, expected)
        if not error <= BOUNDS[torch.bfloat16]:
            raise ArithmeticError(f"wrong result: logits of {mode} are off by {error:.1e}, expected at most {BOUNDS[torch.bfloat16]:.0e}")
    for generation in found.values():
        generation.forget()


def measure(args, batch: int, clock: Clock) -> list[Row]:
    """Return the rows of one number of sequences."""
    found = generations(args, batch)
    check(found)

    def forget_all() -> None:
        for generation in found.values():
            generation.forget()

    made = []
    for mode in MODES:
        calls: dict[str, list[Call]] = {provider: [generation.call(mode)] for provider, generation in found.items()}
        timed = clock.measure(calls, forget_all, args.rounds)
        x, known = ("batch", "sequences in a batch", str(batch)), {"tokens": args.tokens, "dtype": "bf16"}
        made += [rows.speed_row(args, "generate", p, mode, x, value, timing=args.timing, **known) for p, value in timed.items()]
        speed = {p: value.median for p, value in timed.items() if isinstance(value, Quantiles)}
        shown = ", ".join(f"{p} {us / 1e3:.3f} ms" for p, us in speed.items())
        log(f"  batch {batch}, {mode}: {shown}" + (f", {speed['huggingface'] / speed['bastile']:.2f} x" if len(speed) == 2 else ""))
    return made


def table(found: list[Row]) -> str:
    """Return the milliseconds of a prefill and of one more token, by the number of sequences."""
    found = select(found, kernel_name="generate", model=QWEN3.model, metric_name="speed")
    if not found:
        return ""
    config = found[-1].config
    cases = [
        ((f"{title}, batch {batch}",), select(found, kernel_operation_mode=mode, x_value=batch))
        for mode, title in (("prefill", "prefill"), ("decode", "one token"))
        for batch in in_order(row.x_value for row in found)
    ]
    head = (f"ms, {config['tokens']} tokens, {config['layers']} layers",)
    return comparison(head, cases, {"speed": lambda us: number(us / 1e3)}, compares="speed vs best peer")


TABLES = {"generate": table}


class Qwen3GenerateBenchmark(Benchmark):
    """For `kernels benchmark`."""

    seed = 0

    def setup(self) -> None:
        name, tokens = ("8b", 2048) if self.device.startswith("cuda") else ("tiny", 32)
        args = argparse.Namespace(model=name, layers=2, tokens=tokens, device=self.device)
        ids = torch.randint(models.size(name).vocab, (1, tokens), device=self.device)
        make = partial(make_model, args.model, args.layers, args.device)
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
    p = layers_parser(__doc__.partition("\n")[0], "generate", 1000.0)
    p.add_argument("--timing", choices=("device", "wall"), default="wall", help="see timing.py")
    p.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    p.add_argument("--batches", type=integers, default=(1, 8), help="comma-separated")
    args = p.parse_args(arguments)
    log(f"{models.title(args.model)}, {args.layers} layers, {args.tokens} tokens, on {records.gpu_name(args.device)}")
    clock, found = Clock(args.device, args.timing, args.ms), []
    for batch in args.batches:
        mine = measure(args, batch, clock)
        rows.save_speeds(args, "generate", mine)
        found += mine
        clock.clean()
    return found


if __name__ == "__main__":
    main()
