"""Training as people run it: steps of TRL's SFTTrainer or DPOTrainer on one GPU, over texts of uneven length, with TRL's defaults.

    python -m benchmark.benchmark_trainers [--trainer sft] [--model qwen3_1.7b] [--lora 16] [--packing]

Random weights in bf16, batches of four rows, accumulated over two of them, gradient checkpointing. Padded batches, TRL's default, have a
length that hardly ever comes again; `--packing` fills rows of SFT up. DPO has two pairs of answers in a batch. Speed is in tokens of texts,
without padding. bastile_captured has lengths captured as they come, in 300 steps of other texts before; torch_compile and
bastile_compiled have `torch_compile=True`. Otherwise as steps.py. A step of GRPO's trainer is mostly generation: see benchmark_generate.py
for that, and `steps.py --loss grpo` for the rest.
"""

import contextlib
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

if not __package__:  # run as a file
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
    __package__ = Path(__file__).absolute().parent.name

from . import families, steps
from .benchmark_qwen3 import Qwen3StepBenchmark
from .memory import GiB
from .providers import is_ours, package, require_modules
from .step_results import Results
from .stepping import LOSSES, Recipe, child
from .trl_losses import PROMPT, WORDS, tokenizer

ROWS, ACCUMULATED = 4, 2  # of a forward pass, and passes of a step
MEAN, SHORTEST = 450, 30  # of the texts' lengths, which are distributed exponentially
PROFILED = 3  # steps after the timed ones, whose kernels are added up
AHEAD = 300  # more steps before the timed ones where lengths are captured as they come: a training has thousands
PROVIDERS = ("huggingface", "liger", "bastile")
COMPILED = ("torch_compile", "bastile_compiled")
KNOWN = (*PROVIDERS, *COMPILED, "huggingface_flex", "bastile_keep_attention", "bastile_recompute", "bastile_captured")
TRAINERS = ("sft", "dpo")


def texts(count: int, longest: int, vocab: int, seed: int = 0) -> dict[str, list[list[int]]]:
    """Return texts of random tokens, the same for every provider."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": [torch.randint(4, vocab, (n,), generator=generator).tolist() for n in lengths(count, longest, generator)]}


def lengths(count: int, longest: int, generator: torch.Generator) -> list[int]:
    """Return the lengths of texts, exponentially distributed."""
    found = torch.rand(count, generator=generator).mul(-1).log1p().mul(-MEAN).long()
    return found.clamp(min(SHORTEST, longest), longest).tolist()


def pairs(count: int, longest: int, seed: int = 0) -> dict[str, list[str]]:
    """Return prompts with two answers each, of random words; prompt and answer together are as long as a text."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [max(1, int(PROMPT * length)) for length in lengths(count, longest, generator)]
    answers = {name: lengths(count, longest, generator) for name in ("chosen", "rejected")}

    def words(number: int) -> str:
        return " ".join(WORDS[2 + i] for i in torch.randint(0, 2, (max(1, number),), generator=generator).tolist())

    found = {"prompt": [words(length) for length in prompts]}
    for name, of_answers in answers.items():
        found[name] = [" " + words(length - prompt) for length, prompt in zip(of_answers, prompts)]
    return found


def timed_by(stepper: "TrainerStepper"):
    """Return the class of a callback that notes when each step ends, the peak of the timed ones, and the device's time in the last ones."""
    from transformers import TrainerCallback

    class Noted(TrainerCallback):
        def __init__(self, warmup: int, steps: int):
            self.warmup, self.last = warmup, warmup + steps
            self.ends: list[Any] = []
            self.peak: float | None = None
            self.device_ms: float | None = None
            self.profiler: torch.profiler.profile | None = None

        def on_train_begin(self, args, state, control, **kwargs):
            self.ends.append(stepper.moment())

        def on_step_end(self, args, state, control, **kwargs):
            self.ends.append(stepper.moment())
            if state.global_step == self.warmup and stepper.cuda:
                torch.cuda.reset_peak_memory_stats()
            if state.global_step == self.last and stepper.cuda:
                torch.cuda.synchronize()  # so that the profile has no kernels of this step
                self.peak = torch.cuda.max_memory_allocated() / GiB
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self.profiler.start()

        def on_train_end(self, args, state, control, **kwargs):
            if self.profiler is not None:
                self.profiler.stop()
                found = sum(event.self_device_time_total for event in self.profiler.key_averages())
                self.device_ms = found / 1e3 / PROFILED

    return Noted


@dataclass
class TrainerStepper:
    """Measures a trainer, which it makes anew for each length. kind: one of TRAINERS; packing: whether TRL fills rows up with texts;
    compiled: whether transformers compiles the model; capture: the function that captures the trained model, where it is."""

    model: Any
    recipe: Recipe
    device: str
    liger: bool
    kind: str
    packing: bool
    compiled: bool
    vocab: int
    capture: Callable | None = None
    rank: int = 0

    @property
    def cuda(self) -> bool:
        """Tell whether there is a GPU to wait for."""
        return self.device.startswith("cuda")

    def moment(self) -> Any:
        """Mark this point in the device's work, or on a CPU in time. It does not wait for the device: training does not at a step's end."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms_between(self, moments: list) -> list[float]:
        """Return the milliseconds from each moment to the next."""
        if self.cuda:
            torch.cuda.synchronize()
        pairs = zip(moments, moments[1:])
        return [before.elapsed_time(after) if self.cuda else 1e3 * (after - before) for before, after in pairs]

    @property
    def examples(self) -> int:
        """Return those of a forward pass: texts, or pairs of answers."""
        return ROWS if self.kind == "sft" else ROWS // 2

    def data(self, steps: int, tokens: int, seed: int = 0) -> dict[str, list]:
        """Return the examples of so many steps, of at most so many tokens each."""
        count = steps * self.examples * ACCUMULATED
        if self.kind == "dpo":
            return pairs(count, tokens, seed)
        return texts(count * (tokens // MEAN + 1 if self.packing else 1), tokens, self.vocab, seed)

    def run(self, tokens: int, warmup: int, steps: int) -> dict:
        """Train over texts of at most this many tokens, and return what Stepper.run returns, and the tokens of texts of a step. The part
        "device" of a step is the time of all its kernels."""
        import trl
        from datasets import Dataset

        gc.collect()
        ahead = AHEAD if self.capture else 0
        count = warmup + steps + (PROFILED if self.cuda else 0)
        data = self.data(count, tokens)
        if ahead:
            data = {name: column + data[name] for name, column in self.data(ahead, tokens, seed=1).items()}
        warmup, count = warmup + ahead, count + ahead
        noted, seen, losses = timed_by(self)(warmup, steps), [], []

        create: Any = getattr(trl, f"{self.kind.upper()}Trainer")

        class Trainer(create):
            def _get_train_sampler(self, dataset: Any = None):  # so that the timed batches are the same for all
                return torch.utils.data.SequentialSampler(self.train_dataset if dataset is None else dataset)  # type: ignore[arg-type]

            def training_step(self, model, inputs, *args, **kwargs):
                mask = inputs.get("attention_mask")
                seen.append(inputs["input_ids"].numel() if mask is None else mask.sum())
                loss = super().training_step(model, inputs, *args, **kwargs)
                losses.append(loss)
                return loss

        with tempfile.TemporaryDirectory() as folder:
            config = getattr(trl, f"{self.kind.upper()}Config")(
                output_dir=folder, max_length=tokens, per_device_train_batch_size=self.examples, torch_compile=self.compiled,
                gradient_accumulation_steps=ACCUMULATED, max_steps=count, report_to=[], save_strategy="no",
                bf16=self.cuda, gradient_checkpointing=self.recipe.checkpointing, learning_rate=1e-4, use_liger_kernel=self.liger,
                use_cpu=not self.cuda, disable_tqdm=True, seed=0, data_seed=0, **({"packing": True} if self.packing else {}),
            )  # fmt: skip
            trainer = Trainer(
                model=self.model, args=config, train_dataset=Dataset.from_dict(data), processing_class=tokenizer(),
                callbacks=[noted], peft_config=self.recipe.peft_config(),
            )  # fmt: skip
            if self.capture:
                self.capture(trainer.model)
            with contextlib.redirect_stdout(sys.stderr):  # where the log of the steps goes otherwise, among the reports
                trainer.train()
        ms = self.ms_between(noted.ends)
        timed = [int(number) for number in seen[warmup * ACCUMULATED : (warmup + steps) * ACCUMULATED]]
        return {
            "tokens": tokens,
            "ms": ms[warmup : warmup + steps],
            "first_ms": ms[0],
            "peak_gib": noted.peak,
            "losses": torch.stack(losses).view(-1, ACCUMULATED).sum(1)[:LOSSES].tolist() if not ahead else [],  # of the same texts
            "parts": {} if noted.device_ms is None else {"device": noted.device_ms},
            "real": sum(timed) / steps,
        }


@dataclass
class TrainerResults(Results):
    """Results whose speed is in tokens of texts. real: of a step on average, by the longest text's tokens: every provider's batches."""

    real: dict[int, float] = field(default_factory=dict)

    def _add_steps(self, provider: str, report: dict) -> None:
        self.real.setdefault(report["tokens"], report["real"])
        super()._add_steps(provider, report)

    def rate(self, tokens: int, ms: float) -> float:
        """Return tokens of texts a second."""
        return self.real[tokens] / ms * 1e3


class Qwen3TrainerStepBenchmark(Qwen3StepBenchmark):
    """The step of a model with checkpoints, as TRL's trainers set them by default, for `kernels benchmark`."""

    def setup(self) -> None:
        super().setup()
        for model in (self.model, self.reference):
            model.gradient_checkpointing_enable()


def build(args) -> TrainerStepper:
    """Return what a measuring process steps."""
    require_modules("trl", "datasets")
    family = families.family_of(args.model)
    model = steps.new_model(args)
    capture = package(family.package).capture if args.child == "bastile_captured" else None
    liger, compiled = args.child == "liger", args.child in COMPILED
    recipe, vocab = steps.recipe_of(args), model.config.vocab_size
    return TrainerStepper(model, recipe, args.device, liger, args.trainer, args.packing, compiled, vocab, capture)


def main(arguments=None):
    """Measure the steps of a trainer, or do so in a measuring process."""
    p = steps.parser("Training steps of TRL's SFTTrainer or DPOTrainer.", (2048,), KNOWN)
    steps.add_recipe(p)
    p.add_argument("--trainer", choices=TRAINERS, default="sft", help="whose steps")
    p.add_argument("--packing", action="store_true", help="rows that are filled up with texts, instead of padded ones")
    p.set_defaults(model="1.7b", checkpointing=True, warmup=4, steps=10)
    args = p.parse_args(arguments)
    if args.packing and args.trainer != "sft":
        p.error(f"argument --packing: {args.trainer.upper()} has no packed rows; leave it out")
    steps.check_weights(p, args)
    family = families.family_of(args.model)
    if args.child:
        return child(args, build, lambda provider: family.prepare(provider) if is_ours(provider) else None)
    args.providers = args.providers or PROVIDERS
    name = f"{family.name}_{args.trainer}{steps.recipe_of(args).name}_{'packed' if args.packing else 'padded'}"
    return steps.run_all(name, __file__, args, collect=TrainerResults)


if __name__ == "__main__":
    main()
