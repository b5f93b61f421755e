"""The longest row that trains in so much memory, and the speed of checkpoints in the host's memory beside plain ones.

LoRA of rank 16 on all projections of a Qwen3-8B with 12 of its layers, in bf16, every layer checkpointed.

    python -m benchmark.benchmark_fits [--caps 24,48] [--layers 36] [--lora 0] [--tokens 16384,32768] [--most 131072]

One process a provider, in turns, and in each all of its ways of checkpointing. A cap is in GB of 10^9 bytes, as torch's allocator counts
them (`set_per_process_memory_fraction`), so that a big card stands in for a small one. Two short rows say how the peak grows with the
tokens, which finds the row to try first; what is reported is a row that was trained, and how long that took.
"""

import gc
import statistics
import time
from collections.abc import Callable

import torch

if not __package__:  # a measuring process runs this as a file
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
    __package__ = Path(__file__).absolute().parent.name

from . import families, models, providers, records, rows, steps
from .benchmark_qwen3 import Qwen3StepBenchmark
from .command_line import integers, results_folder, some_of
from .markdown import Table, milliseconds, select
from .memory import peak_bytes
from .processes import Group
from .providers import NotInstalled, is_ours, package
from .records import Row
from .report import log, message
from .stepping import Stepper, emit
from .timing import Quantiles

KERNEL, GB, GRAIN, LESS = "fits", 10**9, 1024, 0.96  # GRAIN: of tokens; LESS: of a row that did not fit, for the next try
TRIES = 4
PROBES = 2048, 6144  # tokens
# By what it is called: the options of our `apply`, or of transformers' `gradient_checkpointing_enable`.
OURS: dict[str, dict] = {
    "checkpoints": {}, "keep_attention": {"keep_attention": True}, "offload": {"offload": True},
    "offload_keep_attention": {"offload": True, "keep_attention": True}, "offload_tiles": {"offload": True, "recompute_mlp": 4096},
}  # fmt: skip
THEIRS: dict[str, dict] = {"checkpoints": {}, "offload": {"offload": True}}


def ways_of(provider: str) -> dict[str, dict]:
    """Return a provider's ways of checkpointing, with their options."""
    return OURS if is_ours(provider) else THEIRS


TITLES = {
    "checkpoints": "checkpoints", "keep_attention": "checkpoints, attention kept", "offload": "in the host's memory",
    "offload_keep_attention": "in the host's memory, attention kept", "offload_tiles": "in the host's memory, MLPs in tiles of 4096",
}  # fmt: skip


def table(found: list[Row]) -> str:
    """Return the longest rows by memory and way of checkpointing, and the time of a step at a length that all have."""
    found = select(found, kernel_name=KERNEL)
    longest, speeds = select(found, metric_name="longest"), select(found, metric_name="speed")
    caps = list(dict.fromkeys(row.x_value for row in longest))
    tokens = list(dict.fromkeys(row.x_value for row in speeds))
    shown = Table("checkpoints", *(f"longest row in {cap} GB" for cap in caps), *(f"step of {length} tokens" for length in tokens))
    for provider, way in dict.fromkeys((row.kernel_provider, row.config["way"]) for row in found):
        mine = [row for row in found if (row.kernel_provider, row.config["way"]) == (provider, way)]
        by_cap = {row.x_value: f"{row.y_value_50:.0f} tokens{' or more' * row.config['bounded']}" for row in mine if row in longest}
        by_length = {row.x_value: milliseconds(row.y_value_50) for row in mine if row in speeds and row.y_value_50}
        title = f"{providers.title(provider)}: {TITLES[way]}"
        shown.add([title, *(by_cap.get(cap, "") for cap in caps), *(by_length.get(length, "") for length in tokens)], mine)
    return shown.text()


TABLES = {"fits": table}


class Qwen3OffloadedStepBenchmark(Qwen3StepBenchmark):
    """The step of a model whose checkpoints lie in the host's memory, for `kernels benchmark`."""

    def setup(self) -> None:
        super().setup()
        for model in (self.model, self.reference):
            model.gradient_checkpointing_enable()
        self.kernel.kernelize(self.model, offload=True)


def switch(model, provider: str, options: dict, folder: str) -> None:
    """Have a model train in one way."""
    if is_ours(provider):
        package(folder).apply(**options)
    else:
        causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        causal_lm.gradient_checkpointing_enable(**options)


def longest(fits: Callable[[int], bool], peak: Callable[[int], int | None], cap: int, most: int) -> tuple[int, bool]:
    """Return (the tokens of the longest row that was trained, whether it is no more than the search allows); 0 for none.

    fits(tokens): trains such a row; peak(tokens): the bytes that one needs; cap: in bytes; most: of tokens.
    """
    (short, long), needs = PROBES, [peak(tokens) for tokens in PROBES]
    if None in needs:
        return 0, False
    first, second = (need for need in needs if need is not None)
    a_token = max((second - first) / (long - short), 1.0)
    tokens = min(int(short + (cap - first) / a_token * 0.98), most) // GRAIN * GRAIN
    for _ in range(TRIES):
        if tokens < GRAIN:
            break
        if fits(tokens):
            return tokens, tokens == most // GRAIN * GRAIN
        tokens = int(tokens * LESS) // GRAIN * GRAIN
    return 0, False


class Trial:
    """The attempts of one process. milliseconds: of the last row that fitted."""

    def __init__(self, stepper: Stepper):
        self.stepper, self.milliseconds = stepper, 0.0

    def fits(self, tokens: int) -> bool:
        """Tell whether a step of a row fits into the memory."""
        self.clean()
        try:
            self.milliseconds, _ = self.stepper.timed(self.stepper.form.batch(self.stepper.ids(tokens)))
        except torch.OutOfMemoryError:
            return False
        finally:
            self.clean()
        return True

    def peak(self, tokens: int) -> int | None:
        """Return the bytes that one step of a row needs, with what was there before; None where they are not there."""
        found: list[bool] = []
        peak = peak_bytes(lambda: found.append(self.fits(tokens)), True, inputs_included=True)
        return peak if found == [True] else None

    def clean(self) -> None:
        self.stepper.optimizer.zero_grad(set_to_none=True)  # type: ignore[attr-defined]  # as in `Stepper`, of any class
        gc.collect()
        if self.stepper.device.startswith("cuda"):
            torch.cuda.empty_cache()


def speeds(stepper: Stepper, args, switch_to: Callable[[str], None]) -> None:
    """Report the milliseconds of each way's steps, which take turns, at each length."""
    for tokens in args.tokens:
        batch, failed = stepper.form.batch(stepper.ids(tokens)), {}
        found: dict[str, list[float]] = {way: [] for way in args.ways}
        for turn in range(args.warmup + args.steps):
            for way in (each for each in args.ways if each not in failed):
                switch_to(way)
                try:
                    milliseconds, loss = stepper.timed(batch)
                except torch.OutOfMemoryError as error:
                    failed[way] = message(error)
                    Trial(stepper).clean()
                    continue
                found[way] += [milliseconds] * (turn >= args.warmup)
        for way in args.ways:
            emit("speed", way=way, tokens=tokens, ms=found[way], error=failed.get(way, ""))


def child(args, family: families.Family) -> bool:
    """Measure one provider."""
    started = time.perf_counter()
    try:
        family.prepare(args.child)
        stepper = steps.build(args)
    except NotInstalled as error:
        emit("absent", error=str(error))
        return True

    def switch_to(way: str) -> None:
        switch(stepper.model, args.child, ways_of(args.child)[way], family.package)

    args.ways = [way for way in args.ways if way in ways_of(args.child)]
    emit("ready", gpu=records.gpu_name(args.device), seconds=time.perf_counter() - started)
    speeds(stepper, args, switch_to)
    if not args.device.startswith("cuda"):
        return True
    whole = torch.cuda.mem_get_info()[1]
    for cap in args.caps:
        if cap * GB > whole:
            continue
        torch.cuda.set_per_process_memory_fraction(cap * GB / whole)
        for way in args.ways:
            switch_to(way)
            trial = Trial(stepper)
            tokens, bounded = longest(trial.fits, trial.peak, cap * GB, args.most)
            emit("fits", way=way, cap=cap, tokens=tokens, bounded=bounded, ms=trial.milliseconds)
    return True


def row_of(args, provider: str, report: dict, gpu: str) -> Row:
    """Return the row of what a measuring process reports."""
    recipe = steps.recipe_of(args)
    known = {"model": args.model, "layers": args.layers, "lora": recipe.lora, "dtype": recipe.weights, "way": report["way"]}
    if report["kind"] == "speed":
        ms = [each * 1e3 for each in report["ms"]]
        value: rows.Value = RuntimeError(report["error"]) if report["error"] else Quantiles(statistics.median(ms), min(ms), max(ms))
        names, x = (KERNEL, provider, report["way"], "speed", "us"), ("tokens", "tokens", str(report["tokens"]))
        return rows.row(Row, names, x, value, gpu, known)
    value = float(report["tokens"]) if report["tokens"] else RuntimeError("no row fits")
    names, x = (KERNEL, provider, report["way"], "longest", "tokens"), ("cap", "GB of memory", str(report["cap"]))
    return rows.row(Row, names, x, value, gpu, {**known, "bounded": report["bounded"], "ms": report["ms"]})


def said_of(provider: str, report: dict) -> str:
    """Return the line that tells what was measured."""
    if report["kind"] == "speed":
        ms = report["ms"]
        return f"  {provider}, {report['way']}, {report['tokens']} tokens: " + (report["error"] or f"{statistics.median(ms):.1f} ms")
    more = "or more, " * report["bounded"]
    return f"  {provider}, {report['way']}, {report['cap']} GB: {report['tokens']} tokens {more}in {report['ms']:.0f} ms"


def main(arguments=None) -> list[Row] | bool:
    p = steps.parser(__doc__.partition("\n\n")[0], (16384,))
    steps.add_recipe(p, 16)
    p.add_argument("--caps", type=integers, default=(24,), help="in GB, comma-separated; those beyond the GPU's memory are left out")
    p.add_argument("--most", type=int, default=131072, help="the longest row that is tried")
    p.add_argument("--ways", type=some_of(*OURS), default=("checkpoints", "offload", "offload_tiles"), help="of checkpointing")
    args = p.parse_args(arguments)
    args.checkpointing, args.model, args.layers = True, models.full_name(args.model), args.layers or 12
    family = families.family_of(args.model)
    if args.child:
        return child(args, family)
    args.providers = args.providers or ("huggingface", "liger", "bastile")
    steps.check_providers(p, args, family)
    steps.check_weights(p, args)
    deadline, found = time.monotonic() + args.budget_s, []
    log(f"{models.title(args.model, args.layers)}, checkpointed, on {records.gpu_name(args.device)}")
    for provider in args.providers:
        group, gpu = Group(__file__, steps.child_arguments(args, provider), 1), ""
        try:
            for report in group.reports(deadline):
                gpu = report.get("gpu", gpu)
                if report["kind"] in ("speed", "fits"):
                    found.append(row_of(args, provider, report, gpu))
                    log(said_of(provider, report))
                elif report["kind"] != "ready":
                    log(f"  {provider}: {report.get('error', 'the time is over')}")
        finally:
            group.end()
        rows.save(results_folder(args), KERNEL, found)
    return found


if __name__ == "__main__":
    main()
