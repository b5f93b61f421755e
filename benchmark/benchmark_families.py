"""Training steps of families of this year that no table of Qwen3's or the dense ones shows: Gemma 4, Mixtral, GLM-4.5 and Qwen3-VL.

    python -m benchmark.benchmark_families [--cases gemma_4,mixtral] [--tokens 2048,8192] [--budget-s 300]

Gemma-4-E2B whole and the text of Qwen3-VL-8B with 12 of its layers, with adapters of rank 16 on all projections; of Mixtral-8x7B two layers
and of GLM-4.5-Air three, the first one dense, with all of their weights. Each as steps.py does it, whose rows these are. A provider whose
first losses are not transformers' has no times.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import steps
from .benchmark_qwen3 import Qwen3StepBenchmark
from .command_line import default_device, new_parser, some_of
from .records import Row
from .report import log
from .step_results import Measured, Results

APART = 0.02  # nats between two providers' losses of one step, in bf16


class Case(NamedTuple):
    """A model that is measured. arguments: of steps.py; shows: the table; seconds: what three rounds of two lengths take on an H200, for
    Mixtral most of them while Triton tries forms of Liger's experts."""

    arguments: tuple[str, ...]
    shows: str
    seconds: int


PEERS = ("--providers", "huggingface,liger,bastile")
CASES = {
    "gemma_4": Case(("--model", "gemma_4_e2b", "--lora", "16", *PEERS), "gemma_4_step_lora_16", 110),
    "mixtral": Case(("--model", "mixtral_8x7b", "--providers", "huggingface,liger,bastile,bastile_adamw"), "mixtral_step", 430),
    "glm": Case(("--model", "glm_4.5_air", "--providers", "huggingface,bastile,bastile_adamw"), "glm_step", 80),
    "qwen3_vl": Case(("--model", "qwen3_vl_8b", "--layers", "12", "--lora", "16", *PEERS), "dense_step_lora_16", 75),
}
SMALL = {"gemma_4": "gemma_4_tiny", "mixtral": "mixtral_tiny", "glm": "glm_4.5_tiny", "qwen3_vl": "qwen3_vl_tiny"}


@dataclass
class Compared(Results):
    """Results in which a provider whose losses are others than transformers' has an error instead of times: farther away than APART and
    what transformers' own rounds differ by, which in bf16 is several times as much for Gemma 4. theirs: its losses, by tokens."""

    theirs: dict[int, list[list[float]]] = field(default_factory=dict)

    def _add_steps(self, provider: str, report: dict) -> None:
        if provider == "huggingface":
            self.theirs.setdefault(report["tokens"], []).append(report["losses"])
        super()._add_steps(provider, report)

    def rows(self) -> list[Row]:
        measured = self.steps
        self.steps = {key: self._compared(*key, found) for key, found in measured.items()}
        try:
            return super().rows()
        finally:
            self.steps = measured  # of which rounds are still to come

    def _compared(self, provider: str, tokens: int, found: Measured) -> Measured:
        rounds = self.theirs.get(tokens, [])
        if provider == "huggingface" or found.error or not rounds:
            return found
        steps = list(zip(*rounds, strict=True))
        differ = max(max(losses) - min(losses) for losses in steps)
        apart = max(min(abs(loss - other) for other in losses) for loss, losses in zip(found.losses, steps, strict=False))
        if apart <= APART + differ:
            return found
        return Measured(error=f"its losses are up to {apart:.3f} from transformers', whose rounds are within {differ:.3f}")


@dataclass
class Whole:
    """The results of all cases, by name, and the cases that were left out."""

    found: dict[str, Results]
    left_out: list[str]

    @property
    def whole(self) -> bool:
        """Tell whether every case was measured, and whole."""
        return not self.left_out and all(each.whole for each in self.found.values())


class Qwen3PaddedStepBenchmark(Qwen3StepBenchmark):
    """The training step of rows that end in padding, for `kernels benchmark`, which brings a package for one family."""

    def run(self, model):
        ids = self.ids.view(4, -1)
        tokens = ids.shape[1]
        lengths = torch.tensor([[8], [7], [6], [5]], device=ids.device) * tokens // 8
        mask = (torch.arange(tokens, device=ids.device) < lengths).long()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()


def main(arguments=None) -> Whole:
    """Measure all cases, each while there is time for it."""
    p = new_parser(__doc__.partition("\n")[0])
    p.add_argument("--cases", type=some_of(*CASES), default=tuple(CASES), help=f"of {', '.join(CASES)}")
    p.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which everything ends")
    p.add_argument("--device", default=default_device())
    args, others = p.parse_known_args(arguments)
    end, done = time.monotonic() + args.budget_s, Whole({}, [])
    for name in args.cases:
        case, left = CASES[name], end - time.monotonic()
        if left <= 0:
            done.left_out.append(name)
            continue
        given = [*case.arguments, "--tokens", "2048,8192", "--warmup", "2", "--steps", "5", *others]
        if args.device == "cpu":
            given += ["--model", SMALL[name]]
        log(f"=== {name}, about {case.seconds} s of three rounds, {left:.0f} s left")
        done.found[name] = steps.main([*given, "--device", args.device, "--budget-s", f"{left:.0f}"], collect=Compared)
    if done.left_out:
        log(f"still owed: {', '.join(done.left_out)}")
    return done


if __name__ == "__main__":
    main()
