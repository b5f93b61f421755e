"""The results of training steps: what the measuring processes report, as rows and as a printed table."""

import argparse
import os
from dataclasses import dataclass, field

from . import compiled_peer, models, records, routing
from .providers import is_ours
from .records import Row
from .report import log
from .rows import Value, row, save
from .step_parts import METRIC
from .timing import Quantiles


@dataclass
class Measured:
    """What all rounds of a provider at one length found out. error: why there is nothing."""

    ms: list[float] = field(default_factory=list)
    peak_gib: list[float] = field(default_factory=list)
    compile_s: list[float] = field(default_factory=list)
    rounds: int = 0
    losses: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    error: str = ""


@dataclass
class Results:
    """The results of a whole run: by (provider, tokens), and by provider. kernel: the kernel_name of its rows."""

    kernel: str
    args: argparse.Namespace
    gpus: int = 1
    gpu: str = ""
    environment: dict = field(default_factory=records.environment)  # before anything is measured: asking for it takes the host's time
    steps: dict[tuple[str, int], Measured] = field(default_factory=dict)
    first_s: dict[str, list[float]] = field(default_factory=dict)
    ready_s: dict[str, list[float]] = field(default_factory=dict)
    routings: dict[int, dict] = field(default_factory=dict)  # by tokens: weights and tokens are every provider's
    late: bool = False  # was something skipped because the time was over?

    def add(self, provider: str, report: dict) -> None:
        """Take a child's report in, and print it."""
        kind = report["kind"]
        if kind == "ready":
            self.gpu = report["gpu"]
            self.ready_s.setdefault(provider, []).append(report["seconds"])
            log(f"  {provider}: a model on {self.gpu} after {report['seconds']:.1f} s")
        elif kind == "result":
            self._add_steps(provider, report)
        elif kind == "failed":
            self._add_failure(provider, report)
        elif kind == "absent":
            log(f"  {provider} is left out: {report['error']}")
        else:
            self.late = True
            log(f"  {provider}: the rest is skipped, the time budget is spent")

    @property
    def whole(self) -> bool:
        """Tell whether every round of every provider that is installed was measured, with tokens that went to all experts."""
        return bool(self.gpu) and not self.late and not any(map(self._collapsed, self.routings))

    def _collapsed(self, tokens: int) -> bool:
        return routing.collapsed(self._routing_kind, routing.Routing(**self.routings[tokens]))

    @property
    def _routing_kind(self) -> str:
        return getattr(self.args, "routing", routing.UNIFORM)  # FSDP's steps have no such argument

    def _add_steps(self, provider: str, report: dict) -> None:
        tokens = report["tokens"]
        if tokens == min(self.args.tokens):
            self.first_s.setdefault(provider, []).append(report["first_ms"] / 1e3)
        found = self.steps.setdefault((provider, tokens), Measured())
        found.ms += report["ms"]
        found.rounds += 1
        if report.get("routing") and tokens not in self.routings:
            self.routings[tokens] = report["routing"]
            if self._collapsed(tokens):
                log(f"  {tokens} tokens: {report['routing']} has collapsed to few experts, so no table can show these steps")
        if provider in compiled_peer.RECIPES:  # at every length
            found.compile_s.append((report["first_ms"] - Quantiles.of(report["ms"]).median) / 1e3)
        found.losses = found.losses or report["losses"]
        for part, part_ms in report.get("parts", {}).items():
            found.parts.setdefault(part, []).append(part_ms)
        if report["peak_gib"] is not None:
            found.peak_gib.append(report["peak_gib"])
        peak = f"{report['peak_gib']:.1f} GiB" if report["peak_gib"] is not None else ""
        ms = Quantiles.of(report["ms"]).median
        losses = " ".join(f"{loss:.4f}" for loss in report["losses"])
        log(f"  {provider}, {tokens} tokens: {ms:.1f} ms, {self.rate(tokens, ms):.0f} tokens/s, {peak}, losses {losses}")

    def _add_failure(self, provider: str, report: dict) -> None:
        """Note a failure: what does not fit at one length fits at none that is longer; another one stands for all without a result."""
        log(f"  {provider}, {report['tokens'] or 'all'} tokens: {report['error']}")
        for tokens in self.args.tokens:
            if tokens >= report["tokens"] and (provider, tokens) not in self.steps:
                self.steps[provider, tokens] = Measured(error=report["error"])

    def rate(self, tokens: int, ms: float) -> float:
        """Return tokens a second of all GPUs."""
        return tokens * self.gpus / ms * 1e3

    def rows(self) -> list[Row]:
        """Return everything that was found out."""
        rows = []
        for (provider, tokens), found in self.steps.items() if not self.args.fresh else ():
            if found.error:
                rows.append(self._row(provider, tokens, "step_time", "ms", None, error=found.error))
                continue
            ms = Quantiles.of(found.ms)
            rows.append(self._row(provider, tokens, "step_time", "ms", ms))
            rate = Quantiles(*(self.rate(tokens, t) for t in (ms.median, ms.high, ms.low)))
            rows.append(self._row(provider, tokens, "throughput", "tokens/s", rate))
            if found.peak_gib:
                rows.append(self._row(provider, tokens, "memory", "GiB", Quantiles.of(found.peak_gib)))
            if found.compile_s:  # later processes find some of it in a cache
                rows.append(self._row(provider, tokens, "compile_time", "s", max(found.compile_s)))
            for part, part_ms in found.parts.items():
                rows.append(self._row(provider, tokens, METRIC, "ms", Quantiles.of(part_ms), ("part", "part of a step", part)))
            for step, loss in enumerate(found.losses, 1):
                rows.append(self._row(provider, tokens, "loss", "nats", loss, ("step", "step", str(step))))
        for metric, seconds in (("first_step", self.first_s), ("until_ready", self.ready_s)) if self.args.fresh else ():
            for provider, found_s in seconds.items():
                rows.append(self._row(provider, min(self.args.tokens), metric, "s", Quantiles.of(found_s)))
        return rows

    def _row(
        self, provider: str, tokens: int, metric: str, unit: str, value: Value, x: tuple[str, str, str] | None = None, **config
    ) -> Row:
        x = x or ("tokens", "tokens in a sequence", str(tokens))
        known = {"model": models.full_name(self.args.model), "layers": self.args.layers, "tokens": tokens, "dtype": "bf16"}
        rounds = self.steps[provider, tokens].rounds if (provider, tokens) in self.steps else 0
        known |= {"gpus": self.gpus, "warmup": self.args.warmup, "steps": self.args.steps, "rounds": rounds}
        allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        known |= {"allocator": allocator} if allocator else {}
        if tokens in self.routings:
            known["routing"] = {"kind": self._routing_kind, **self.routings[tokens]}
        return row(Row, (self.kernel, provider, "full", metric, unit), x, value, self.gpu, known | config, self.environment)

    def save(self) -> None:
        """Write the rows, where there is a folder for them."""
        save(self.args.results, self.kernel, self.rows() if self.gpu else [])

    def print_table(self) -> None:
        """Print one line a length: milliseconds and GiB of each provider, Bastile against the best of the others; then the losses."""
        log(f"\n{models.full_name(self.args.model)}, training step on {self.gpus} x {self.gpu}, ms (GiB)")
        log(f"  {'tokens':>8}" + "".join(f"{p:>24}" for p in self.args.providers) + f"{'vs best peer':>15}{'memory':>9}")
        for tokens in sorted(self.args.tokens):
            found = {p: self.steps[p, tokens] for p in self.args.providers if (p, tokens) in self.steps}
            cells = "".join(f"{self._cell(found.get(p)):>24}" for p in self.args.providers)
            log(f"  {tokens:>8}{cells}{versus(found, 'ms'):>15}{versus(found, 'peak_gib'):>9}")
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
        """Print how far each provider's losses are from Hugging Face's."""
        measured = {p: self.steps[p, tokens] for p in self.args.providers if (p, tokens) in self.steps and not self.steps[p, tokens].error}
        base = next((p for p in measured if p.startswith("huggingface")), None)
        for provider, found in measured.items() if base else ():
            if provider != base and found.losses:
                apart = max(abs(a - b) for a, b in zip(found.losses, measured[base].losses, strict=False))
                log(f"  {tokens:>8} tokens: {provider}'s first losses are within {apart:.4f} of {base}'s")


def versus(found: dict[str, Measured], what: str) -> str:
    """Compare Bastile with the best peer: how many times the speed, or the share of the memory."""
    values = {p: getattr(m, what) for p, m in found.items() if getattr(m, what)}
    peers = [Quantiles.of(v).median for p, v in values.items() if not is_ours(p)]
    if "bastile" not in values or not peers:
        return ""
    mine = Quantiles.of(values["bastile"]).median
    return f"{min(peers) / mine:.2f} x" if what == "ms" else f"{mine / min(peers):.0%}"
