"""Training steps inside a measuring process, which prints one line of JSON for everything that it finds out."""

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import records
from .memory import GiB
from .providers import NotInstalled
from .report import message

MARK = "@result "
LOSSES = 5  # of the first steps, compared between providers


def training_step(model, optimizer, ids) -> torch.Tensor:
    """Do one step of next-token prediction, and return the loss."""
    # Only the loss is kept, so that logits that a provider returns do not live until the end of the backward pass.
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@dataclass
class Stepper:
    """A model in training, and the means to measure it."""

    model: object
    optimizer: object
    device: str
    vocab: int
    rank: int = 0

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def ids(self, tokens: int) -> torch.Tensor:
        """Return the token ids of a sequence, other ones on each rank."""
        generator = torch.Generator().manual_seed(1000 * self.rank + tokens)
        return torch.randint(self.vocab, (1, tokens), generator=generator).to(self.device)

    def timed(self, ids) -> tuple[float, torch.Tensor]:
        """Return the milliseconds of one step from an idle device to an idle device, and its loss."""
        self.synchronize()
        start = time.perf_counter()
        loss = training_step(self.model, self.optimizer, ids)
        self.synchronize()
        return (time.perf_counter() - start) * 1e3, loss

    def run(self, tokens: int, warmup: int, steps: int) -> dict:
        """Do steps at one length, and return the milliseconds of each, those of the first, losses, peak memory in GiB."""
        gc.collect()
        cuda = self.device.startswith("cuda")
        if cuda:
            torch.cuda.empty_cache()
        ids = self.ids(tokens)
        timed = [self.timed(ids) for _ in range(warmup)]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        timed += [self.timed(ids) for _ in range(steps)]
        peak = torch.cuda.max_memory_allocated() / GiB if cuda else None
        milliseconds, losses = zip(*timed, strict=True)
        return {
            "tokens": tokens,
            "ms": milliseconds[warmup:],
            "first_ms": milliseconds[0],
            "peak_gib": peak,
            "losses": [loss.item() for loss in losses[:LOSSES]],
        }


def emit(kind: str, **content) -> None:
    """Report something to the parent."""
    print(MARK + json.dumps({"kind": kind, **content}), flush=True)


def measure(stepper: Stepper, args, started: float, report=emit) -> bool:
    """Measure all lengths, shortest first, until one does not fit; tell whether all did. started: when the process began to prepare its
    provider."""
    report("ready", gpu=records.gpu_name(args.device), environment=records.environment(), seconds=time.perf_counter() - started)
    for tokens in sorted(args.tokens):
        try:
            found = stepper.run(tokens, args.warmup, args.steps)
        except Exception as error:
            report("failed", tokens=tokens, error=message(error))
            print(message(error), file=sys.stderr, flush=True)  # of a process that reports nothing else
            return False
        report("result", **found)
    return True


def child(args, build: Callable[..., Stepper], prepare: Callable[[str], None]) -> bool:
    """Run a measuring process, and tell whether everything was measured. prepare(provider) puts it into transformers, build(args) makes
    what is measured; what keeps that from being made is reported."""
    started = time.perf_counter()
    try:
        prepare(args.child)
        stepper = build(args)
    except NotInstalled as error:
        emit("absent", error=str(error))
        return True
    except Exception as error:
        emit("failed", tokens=0, error=message(error))
        return False
    return measure(stepper, args, started, emit if stepper.rank == 0 else lambda *_, **__: None)
