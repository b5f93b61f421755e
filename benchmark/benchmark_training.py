"""A small training in bf16 beside the same in eight bits: does the rounding of its products change what is learnt?

    python -m benchmark.benchmark_training [--steps 1000] [--rounds 3] [--providers huggingface,bastile,bastile_fp8]

Layers of a Qwen3 learn Python's standard library, byte by byte, from random weights, all in bf16. A round has a seed of its own, of which
weights and batches are drawn: the same ones for every provider. What two rounds of one provider differ by says what a difference between
two providers is worth. Every twentieth file is held out, and its loss is what is reported.
"""

import contextlib
import gc
import hashlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import families, models, providers, published, records, rows
from .benchmark_qwen3 import Qwen3StepBenchmark
from .command_line import default_device, new_parser, results_folder, some_of
from .markdown import Table, select
from .providers import EIGHT_BITS, is_ours
from .records import Row
from .report import log, message

KERNEL, BASE, EIGHT = "training", "bastile", "bastile_fp8"
PROVIDERS = ("huggingface", BASE, EIGHT)
LIBRARY = Path(json.__file__).absolute().parents[1]  # Python's
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}  # of the library's folders
HELD_OUT = 20  # one file in so many
TIMES = 5  # that a training's losses are reported
LEARNING_RATE, WARMUP, LAST = 6e-4, 0.05, 0.1  # the highest rate, the share of steps before it, and the share of it at the end


class Text(NamedTuple):
    """The bytes of the library, [count] uint8 each. digest: of both, which differs with the version of Python."""

    training: torch.Tensor
    validation: torch.Tensor
    digest: str


def read_text(folder: Path = LIBRARY) -> Text:
    """Return the sources below a folder, in the order of their paths."""
    paths = sorted(path for path in folder.rglob("*.py") if not LEFT_OUT & set(path.relative_to(folder).parts))
    files = [path.read_bytes() for path in paths]
    held = b"".join(files[HELD_OUT - 1 :: HELD_OUT])
    rest = b"".join(file for place, file in enumerate(files) if (place + 1) % HELD_OUT)
    digest = hashlib.sha256(rest + b"\0" + held).hexdigest()[:12]
    training, validation = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (rest, held))
    return Text(training, validation, digest)


def pieces(text: torch.Tensor, starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return rows of text as token ids, [rows, tokens]. starts: [rows]."""
    return text[starts[:, None] + torch.arange(tokens)].long()


def batches(text: torch.Tensor, args, seed: int) -> Iterator[torch.Tensor]:
    """Yield the batch of each step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(args.steps):
        yield pieces(text, torch.randint(len(text) - args.length, (args.batch,), generator=generator), args.length).to(args.device)


@torch.no_grad()
def validate(model, text: torch.Tensor, args) -> float:
    """Return the mean loss of rows that lie evenly in the text, in nats a byte."""
    starts = torch.arange(args.validation * args.batch) * ((len(text) - args.length) // (args.validation * args.batch))
    model.eval()
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in
              (pieces(text, some, args.length).to(args.device) for some in starts.split(args.batch))]  # fmt: skip
    model.train()
    return torch.stack(losses).double().mean().item()


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, as a share of the highest: up in a line, down in a cosine."""
    rising = max(round(steps * WARMUP), 1)
    if step < rising:
        return (step + 1) / rising
    return LAST + (1 - LAST) * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1))) / 2


class Reached(NamedTuple):
    """Losses at one step of a training, in nats. training: the mean since the last report; validation: of the held-out text."""

    step: int
    training: float
    validation: float


def new_model(provider: str, args, seed: int):
    """Return a causal LM as a provider trains it, its weights drawn from a seed."""
    torch.manual_seed(seed)
    model = published.new_model(args.model, args.layers, args.device)
    if is_ours(provider):
        package = providers.package()
        package.pack(package.kernelize(model, **families.OPTIONS.get(provider, {})))
    return model


def products_in_eight_bits(seen: torch.profiler.profile) -> int:
    """Return how many products in eight bits ran, those that a plan of the host's calls repeats included."""
    return sum(event.count for event in seen.key_averages() if event.key == "aten::_scaled_mm")


def train(provider: str, args, seed: int, text: Text) -> Iterator[Reached]:
    """Train a model, and yield what it had reached `TIMES` times. Raise RuntimeError where products are not in the bits that they should
    have, which the first step shows, and ArithmeticError where a loss is not finite."""
    model = new_model(provider, args, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=args.device.startswith("cuda"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.steps))
    losses = []
    for step, ids in enumerate(batches(text.training, args, seed), 1):
        first = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if step == 1 else None
        with first or contextlib.nullcontext():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        if first is not None and ((count := products_in_eight_bits(first)) > 0) != (provider in EIGHT_BITS):
            raise RuntimeError(f"{count} products in eight bits in the first step, of {ids.numel()} tokens; explain(model) says why")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % max(args.steps // TIMES, 1) == 0:
            found = Reached(step, torch.stack(losses).double().mean().item(), validate(model, text.validation, args))
            if not math.isfinite(found.training + found.validation):
                raise ArithmeticError(f"the loss is {found.training} after {step} steps, {found.validation} of the held-out text")
            losses.clear()
            yield found


def rows_of(args, provider: str, seed: int, reached: list[Reached] | Exception, text: Text) -> list[Row]:
    """Return the rows of a training, or of why there is none."""
    known = {"model": args.model, "layers": args.layers, "dtype": "bf16", "tokens": args.batch * args.length, "rounds": args.rounds,
             "steps": args.steps, "rows": args.batch, "learning_rate": LEARNING_RATE, "text": text.digest}  # fmt: skip
    if isinstance(reached, Exception):
        found: list[tuple[str, int, rows.Value]] = [("validation_loss", args.steps, reached)]
    else:
        found = [(f"{name}_loss", each.step, getattr(each, name)) for each in reached for name in ("training", "validation")]
    gpu = records.gpu_name(args.device)
    return [rows.row(Row, (KERNEL, provider, f"seed {seed}", metric, "nats"), ("step", "steps", str(step)), value, gpu, known)
            for metric, step, value in found]  # fmt: skip


def verdict(last: dict[str, list[Row]], steps: str) -> str:
    """Return in a sentence whether eight bits end within the spread of bf16's rounds. last: the final losses of each provider."""
    base, eight = ([row.y_value_50 for row in last.get(name, ()) if row.y_value_50] for name in (BASE, EIGHT))
    if not base or len(base) != len(eight):
        return ""
    apart, spread = mean(eight) / mean(base) - 1, (max(base) - min(base)) / mean(base)
    within = "within" if abs(apart) <= spread else "outside"
    return (f"After {steps} steps the mean loss in eight bits is {apart:+.2%} from that in bf16, whose {len(base)} rounds lie {spread:.2%} "
            f"apart: eight bits are {within} bf16's spread.")  # fmt: skip


def table(found: list[Row]) -> str:
    """Return the loss of the held-out text by steps: the mean of the rounds, and the lowest and highest of them."""
    found = select(found, kernel_name=KERNEL, metric_name="validation_loss")
    names = [name for name in PROVIDERS if any(row.kernel_provider == name for row in found)]
    shown, last, steps = Table("nats a byte, of held-out text", *map(providers.title, names), "eight bits beside bf16"), {}, ""
    for steps in sorted({row.x_value for row in found}, key=int):
        mine = select(found, x_value=steps)
        last = {name: select(mine, kernel_provider=name) for name in names}
        cells, means = [], {}
        for name, each in last.items():
            losses = [row.y_value_50 for row in each if row.y_value_50]
            if losses:
                means[name] = mean(losses)
            whole = f"{mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})" if losses else ""
            cells.append(whole or shown.notes.cell(next(iter(each), None), str))
        beside = f"{means[EIGHT] / means[BASE] - 1:+.2%}" if {BASE, EIGHT} <= means.keys() else ""
        shown.add([f"after {steps} steps", *cells, beside], mine)
    return shown.text(verdict(last, steps))


TABLES = {"training": table}


class Qwen3EightBitsStepBenchmark(Qwen3StepBenchmark):
    """The step of a model whose products are in eight bits, for `kernels benchmark`."""

    def setup(self) -> None:
        super().setup()
        self.kernel.kernelize(self.model, products="fp8")


def main(arguments=None) -> list[Row]:
    p = new_parser(__doc__.partition("\n\n")[0])
    p.add_argument("--model", default="qwen3_0.6b", help=f"sizes: {', '.join(models.QWEN3)}")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--batch", type=int, default=8, help="rows of a step")
    p.add_argument("--length", type=int, default=512, help="bytes of a row; products in eight bits want 2048 in a step")
    p.add_argument("--validation", type=int, default=16, help="batches of held-out text")
    p.add_argument("--rounds", type=int, default=3, help="trainings of each provider, with a seed each")
    p.add_argument("--providers", type=some_of(*PROVIDERS), default=(BASE, EIGHT), help=f"of {', '.join(PROVIDERS)}")
    p.add_argument("--device", default=default_device())
    p.add_argument("--results", type=Path, help=f"folder for <gpu>/{KERNEL}.csv; on a CPU nothing is written without it")
    args = p.parse_args(arguments)
    args.model = models.full_name(args.model)
    text, found = read_text(), []
    log(f"{models.title(args.model, args.layers)}, {len(text.training) / 1e6:.1f} MB of text ({text.digest}), "
        f"on {records.gpu_name(args.device)}")  # fmt: skip
    for seed in range(args.rounds):
        for provider in args.providers:
            started, reached = time.perf_counter(), list[Reached]()
            try:
                for each in train(provider, args, seed, text):
                    reached.append(each)
                    log(f"  {provider}, seed {seed}, {each.step} steps: {each.training:.4f}, held out {each.validation:.4f}")
                mine = rows_of(args, provider, seed, reached, text)
            except Exception as error:
                mine = rows_of(args, provider, seed, error, text)
                log(f"  {provider}, seed {seed}: {message(error)}")
            log(f"  {provider}, seed {seed}: {time.perf_counter() - started:.1f} s")
            found += mine
            rows.save(results_folder(args), KERNEL, mine)
            gc.collect()
    log(f"\n{table(found)}")
    return found


if __name__ == "__main__":
    main()
