"""Whole training steps: what benchmark_qwen3.py, benchmark_gpt_oss.py and benchmark_fsdp.py share.

Every provider runs in processes of its own, because each replaces parts of transformers. The parent starts them in turns and
never touches the GPU; a child prints one line of JSON for everything that it finds out.
"""

import argparse
import gc
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import models, records
from .harness import default_device, integers, message, say, some_of
from .providers import NotInstalled, need, package
from .records import Row
from .timing import Quantiles

MARK = "@result "
GiB = 2**30
PROVIDERS = ("huggingface", "liger", "bastile", "bastile_adamw")
ALL_PROVIDERS = ("huggingface", "torch_compile", "liger", "liger_cutedsl", "liger_cutile", "bastile", "bastile_adamw", "bastile_unpacked")
LOSSES = 5  # of the first steps, compared between providers


# ---------------------------------------------------------------- in a child


def prepare(provider: str) -> None:
    """Puts a provider's layers into transformers, before a model is made."""
    if provider in ("huggingface", "torch_compile"):
        return
    if provider.startswith("bastile"):
        package().apply()
        return
    need("liger_kernel", "triton")
    # Liger's default is Triton, but where CuTe DSL is installed its dispatcher takes that for some operations.
    implementations = {"liger": None, "liger_cutedsl": "cutedsl", "liger_cutile": "cutile"}
    implementation = implementations[provider]
    if implementation is None:
        os.environ["LIGER_KERNEL_IMPL_ROPE"] = "nvidia-triton"
    else:
        need({"cutedsl": "cutlass", "cutile": "cuda.tile"}[implementation])
        os.environ["LIGER_KERNEL_IMPL"] = implementation
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    apply_liger_kernel_to_qwen3()


def new_qwen3(name: str, layers: int | None, device: str, dtype: torch.dtype = torch.bfloat16):
    """A Qwen3ForCausalLM in training mode, to be filled."""
    from transformers import Qwen3ForCausalLM

    with torch.device(device):
        return Qwen3ForCausalLM._from_config(models.configuration(name, layers), dtype=dtype, attn_implementation="sdpa").train()


def make_model(name: str, layers: int | None, device: str, dtype: torch.dtype = torch.bfloat16):
    """A Qwen3ForCausalLM in training mode with random weights that depend on nothing but the parameters' names."""
    model = new_qwen3(name, layers, device, dtype)
    fill(model)
    return model


def fill(model) -> None:
    for name, parameter in model.named_parameters():
        fill_parameter(name, parameter)


@torch.no_grad()
def fill_parameter(name: str, parameter: torch.Tensor) -> None:
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
    if parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, 0.02, generator=generator)


def make_optimizer(model, device: str, provider: str, folder: str = "."):
    """PyTorch's fused AdamW for every provider but the one that is named after that of our package. folder: of its build.toml."""
    adamw = package(folder).AdamW if provider == "bastile_adamw" else torch.optim.AdamW
    return adamw(model.parameters(), lr=1e-5, fused=device.startswith("cuda"))


def training_step(model, optimizer, ids) -> torch.Tensor:
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
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def ids(self, tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.rank + tokens)
        return torch.randint(self.vocab, (1, tokens), generator=generator).to(self.device)

    def timed(self, ids) -> tuple[float, torch.Tensor]:
        """Milliseconds of one step from an idle device to an idle device, and its loss."""
        self.synchronize()
        start = time.perf_counter()
        loss = training_step(self.model, self.optimizer, ids)
        self.synchronize()
        return (time.perf_counter() - start) * 1e3, loss

    def run(self, tokens: int, warmup: int, steps: int) -> dict:
        """Steps at one length: milliseconds of each, those of the first, losses, peak memory in GiB."""
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
    print(MARK + json.dumps({"kind": kind, **content}), flush=True)


def measure(stepper: Stepper, args, started: float, report=emit) -> bool:
    """All lengths, shortest first, until one does not fit. started: when the process began to prepare its provider."""
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


def child(args, build, prepare=prepare) -> bool:
    """The life of a measuring process; was everything measured? prepare(provider) puts it into transformers, build(args) -> Stepper;
    what keeps that from being made is reported."""
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


def build_one(args) -> Stepper:
    model = make_model(args.model, args.layers, args.device)
    if args.child.startswith("bastile") and args.child != "bastile_unpacked":
        package().pack(model)
    optimizer = make_optimizer(model, args.device, args.child)
    if args.child == "torch_compile":
        model.model = torch.compile(model.model)
    return Stepper(model, optimizer, args.device, model.config.vocab_size)


# ---------------------------------------------------------------- in the parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Group:
    """The processes that run one provider, one a GPU. All end when one fails or the time is over."""

    def __init__(self, script: str, arguments: list[str], gpus: int):
        port = str(free_port())
        self.errors = [tempfile.TemporaryFile("w+") for _ in range(gpus)]
        self.processes = []
        for rank in range(gpus):
            environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(gpus), MASTER_ADDR="127.0.0.1")
            environment["MASTER_PORT"] = port
            # Without it the lengths of one process leave holes that the next length does not fit into.
            environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
            stdout = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            command = [sys.executable, script, *arguments]
            self.processes.append(subprocess.Popen(command, stdout=stdout, stderr=self.errors[rank], text=True, env=environment))
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.processes[0].stdout or ():
            if line.startswith(MARK):
                self.lines.put(json.loads(line.removeprefix(MARK)))
        self.lines.put(None)

    def reports(self, deadline: float) -> Iterator[dict]:
        """What the first process reports, then how the group ended where that is not its own report."""
        failed = False
        while True:
            try:
                report = self.lines.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() > deadline:
                    self.end()
                    yield {"kind": "late"}
                    return
                if self.failure():
                    break
                continue
            if report is None:
                break
            failed = failed or report["kind"] == "failed"
            yield report
        end = time.monotonic() + 30
        while any(p.poll() is None for p in self.processes) and not self.failure() and time.monotonic() < end:
            time.sleep(0.1)
        failure = self.failure()
        self.end()  # a process whose partner died waits for it for ever
        if failure and not failed:
            yield {"kind": "failed", "tokens": 0, "error": failure}

    def failure(self) -> str:
        """How the first process that failed did."""
        for rank, process in enumerate(self.processes):
            if process.poll():
                self.errors[rank].seek(0)
                lines = [line.strip() for line in self.errors[rank] if line.strip()]
                return f"process {rank} ended with {process.returncode}: {(lines or [''])[-1][:300]}"
        return ""

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@dataclass
class Measured:
    """What all rounds of a provider at one length found out."""

    ms: list[float] = field(default_factory=list)
    peak_gib: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    error: str = ""


@dataclass
class Results:
    """Of a whole run: by (provider, tokens), and by provider."""

    kernel: str
    args: argparse.Namespace
    gpus: int = 1
    gpu: str = ""
    environment: dict = field(default_factory=dict)
    steps: dict[tuple[str, int], Measured] = field(default_factory=dict)
    first_s: dict[str, list[float]] = field(default_factory=dict)
    ready_s: dict[str, list[float]] = field(default_factory=dict)

    def add(self, provider: str, report: dict) -> None:
        """Takes a child's report in, and prints it."""
        kind = report["kind"]
        if kind == "ready":
            self.gpu, self.environment = report["gpu"], report["environment"]
            self.ready_s.setdefault(provider, []).append(report["seconds"])
            say(f"  {provider}: a model on {self.gpu} after {report['seconds']:.1f} s")
        elif kind == "result":
            self._add_steps(provider, report)
        elif kind == "failed":
            self._add_failure(provider, report)
        elif kind == "absent":
            say(f"  {provider} is left out: {report['error']}")
        else:
            say(f"  {provider}: the rest is skipped, the time budget is spent")

    def _add_steps(self, provider: str, report: dict) -> None:
        tokens = report["tokens"]
        if tokens == min(self.args.tokens):
            self.first_s.setdefault(provider, []).append(report["first_ms"] / 1e3)
        found = self.steps.setdefault((provider, tokens), Measured())
        found.ms += report["ms"]
        found.losses = found.losses or report["losses"]
        if report["peak_gib"] is not None:
            found.peak_gib.append(report["peak_gib"])
        peak = f"{report['peak_gib']:.1f} GiB" if report["peak_gib"] is not None else ""
        ms = Quantiles.of(report["ms"]).median
        losses = " ".join(f"{loss:.4f}" for loss in report["losses"])
        say(f"  {provider}, {tokens} tokens: {ms:.1f} ms, {self.rate(tokens, ms):.0f} tokens/s, {peak}, losses {losses}")

    def _add_failure(self, provider: str, report: dict) -> None:
        """What does not fit at one length fits at none that is longer; another failure stands for all lengths without a result."""
        say(f"  {provider}, {report['tokens'] or 'all'} tokens: {report['error']}")
        for tokens in self.args.tokens:
            if tokens >= report["tokens"] and (provider, tokens) not in self.steps:
                self.steps[provider, tokens] = Measured(error=report["error"])

    def rate(self, tokens: int, ms: float) -> float:
        return tokens * self.gpus / ms * 1e3

    def rows(self) -> list[Row]:
        rows = []
        for (provider, tokens), found in self.steps.items():
            if found.error:
                rows.append(self._row(provider, tokens, "step_time", "ms", None, error=found.error))
                continue
            ms = Quantiles.of(found.ms)
            rows.append(self._row(provider, tokens, "step_time", "ms", ms))
            rate = Quantiles(*(self.rate(tokens, t) for t in (ms.median, ms.high, ms.low)))
            rows.append(self._row(provider, tokens, "throughput", "tokens/s", rate))
            if found.peak_gib:
                rows.append(self._row(provider, tokens, "memory", "GiB", Quantiles.of(found.peak_gib)))
            for step, loss in enumerate(found.losses, 1):
                rows.append(self._row(provider, tokens, "loss", "nats", Quantiles(loss, loss, loss), ("step", "step", str(step))))
        for metric, seconds in (("first_step", self.first_s), ("until_ready", self.ready_s)):
            for provider, found_s in seconds.items():
                rows.append(self._row(provider, min(self.args.tokens), metric, "s", Quantiles.of(found_s)))
        return rows

    def _row(self, provider, tokens, metric, unit, value: Quantiles | None, x=None, **config) -> Row:
        numbers = (value.median, value.low, value.high) if value else (None, None, None)
        x = x or ("tokens", "tokens in a sequence", str(tokens))
        known = {"model": models.full_name(self.args.model), "layers": self.args.layers, "tokens": tokens, "dtype": "bf16"}
        known |= {"gpus": self.gpus, "warmup": self.args.warmup, "steps": self.args.steps, "rounds": self.args.rounds}
        allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        known |= {"allocator": allocator} if allocator else {}
        extra = json.dumps(known | config | self.environment, sort_keys=True)
        return Row(self.kernel, provider, "full", metric, unit, *x, *numbers, extra, self.gpu)

    def save(self) -> None:
        if self.args.results and self.gpu:
            records.write(self.args.results / records.slug(self.gpu) / f"{self.kernel}.csv", self.rows())

    def print_table(self) -> None:
        """One line a length: milliseconds and GiB of each provider, Bastile against the best of the others; then the losses."""
        say(f"\n{models.full_name(self.args.model)}, training step on {self.gpus} x {self.gpu}, ms (GiB)")
        say(f"  {'tokens':>8}" + "".join(f"{p:>24}" for p in self.args.providers) + f"{'vs best peer':>15}{'memory':>9}")
        for tokens in sorted(self.args.tokens):
            found = {p: self.steps[p, tokens] for p in self.args.providers if (p, tokens) in self.steps}
            cells = "".join(f"{self._cell(found.get(p)):>24}" for p in self.args.providers)
            say(f"  {tokens:>8}{cells}{versus(found, 'ms'):>15}{versus(found, 'peak_gib'):>9}")
        for tokens in sorted(self.args.tokens):
            self._print_losses(tokens)

    def _cell(self, found: Measured | None) -> str:
        if found is None:
            return ""
        if found.error:
            return found.error[:22]
        memory = f" ({max(found.peak_gib):.1f})" if found.peak_gib else ""
        return f"{Quantiles.of(found.ms).median:.1f}{memory}"

    def _print_losses(self, tokens: int) -> None:
        """How far each provider's losses are from Hugging Face's."""
        measured = {p: self.steps[p, tokens] for p in self.args.providers if (p, tokens) in self.steps and not self.steps[p, tokens].error}
        base = next((p for p in measured if p.startswith("huggingface")), None)
        for provider, found in measured.items() if base else ():
            if provider != base:
                apart = max(abs(a - b) for a, b in zip(found.losses, measured[base].losses, strict=False))
                say(f"  {tokens:>8} tokens: {provider}'s first losses are within {apart:.4f} of {base}'s")


def versus(found: dict[str, Measured], what: str) -> str:
    """Bastile against the best other provider: how many times the speed, or the share of the memory."""
    values = {p: getattr(m, what) for p, m in found.items() if getattr(m, what)}
    peers = [Quantiles.of(v).median for p, v in values.items() if not p.startswith("bastile")]
    if "bastile" not in values or not peers:
        return ""
    mine = Quantiles.of(values["bastile"]).median
    return f"{min(peers) / mine:.2f} x" if what == "ms" else f"{mine / min(peers):.0%}"


def parser(description: str, tokens: tuple[int, ...], providers=PROVIDERS, known=ALL_PROVIDERS) -> argparse.ArgumentParser:
    """providers: those that take part unless told otherwise, of those that are known."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--model", default="8b", help=f"sizes: {', '.join(models.SIZES)}")
    p.add_argument("--layers", type=int, help="fewer layers than the model has")
    p.add_argument("--tokens", type=integers, default=tokens, help="lengths of the sequence, comma-separated")
    p.add_argument("--providers", type=some_of(*known), default=providers, help=f"of {', '.join(known)}")
    p.add_argument("--warmup", type=int, default=3, help="steps before the timed ones, at every length")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--rounds", type=int, default=1, help="turns that the providers take, each in a new process")
    p.add_argument("--device", default=default_device())
    p.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which everything ends")
    p.add_argument("--results", type=Path, help="folder for <gpu>/<name>.csv; on a CPU nothing is written without it")
    p.add_argument("--child", help=argparse.SUPPRESS)
    return p


def child_arguments(args, provider: str) -> list[str]:
    found = ["--child", provider, "--model", args.model, "--tokens", ",".join(map(str, args.tokens)), "--device", args.device]
    found += ["--warmup", str(args.warmup), "--steps", str(args.steps)]
    return found + ["--layers", str(args.layers or models.size(args.model).layers)]


def parent(kernel: str, script: str, args, gpus: int = 1) -> Results:
    """Runs all providers in turns, every second round backwards, and writes what they report as it comes."""
    if args.results is None and args.device.startswith("cuda"):
        args.results = records.RESULTS
    args.model = models.full_name(args.model)
    if args.layers == models.size(args.model).layers:
        args.layers = None  # as where nobody asked for fewer: the same rows of the results
    deadline = time.monotonic() + args.budget_s
    results = Results(kernel, args, gpus)
    for turn in range(args.rounds):
        for provider in args.providers[:: -1 if turn % 2 else 1]:
            if time.monotonic() > deadline:
                say(f"  {provider}: round {turn + 1} is skipped, the time budget is spent")
                continue
            say(f"{provider}, round {turn + 1}")
            group = Group(script, child_arguments(args, provider), gpus)
            try:
                for report in group.reports(deadline):
                    results.add(provider, report)
                    results.save()
            finally:
                group.end()
    results.print_table()
    return results
