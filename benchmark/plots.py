"""Charts of the results: `python -m benchmark.plots` writes benchmark/results/<gpu>/plots/*.png. Needs matplotlib.

A few, each for one page: `CHARTS`. Where an axis shows a gain it does not begin at zero: speed is in times the fastest peer, which is 1.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from . import models, providers, records, registry
from .families import QWEN3
from .markdown import by_provider, columns_of, in_order, peers_of, select, times_faster
from .operations_experts import SKEWED, UNIFORM
from .providers import FLOOR, PROVIDERS, is_ours
from .records import Row
from .step_tables import MASKED, defensible, parts_of, step_groups, trainer_rows
from .suites import GPT_OSS, LIGER
from .suites import QWEN3 as QWEN3_SUITE

MARK = "made of rows "
FASTEST = "speed, the fastest peer = 1"
PEER, OURS = "#999999", "#D55E00"


def digest(rows: Iterable[Row]) -> str:
    """Return what changes with the numbers that a chart shows."""
    parts = sorted(f"{r.kernel_name} {r.kernel_provider} {r.metric_name} {r.x_value} {r.y_value_50} {r.version}" for r in rows)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def figure_of(count: int, height: float = 3.6):
    """Return a figure and its axes side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(5.2 * count, height), layout="constrained", squeeze=False)
    return figure, axes[0]


def line(axes, tokens: list[str], values: dict[str, float], provider: str) -> None:
    """Draw a provider's values over the tokens that it has some at."""
    at = [i for i, n in enumerate(tokens) if n in values]
    axes.plot(at, [values[tokens[i]] for i in at], label=providers.title(provider), **PROVIDERS[provider].style)


def steps(rows: list[Row], title: str):
    """Draw the speed of training steps in times the fastest peer's, and their peak memory, by tokens; None without rows."""
    tokens = in_order(r.x_value for r in select(rows, metric_name="step_time") if r.y_value_50)
    names = columns_of(rows)
    if "bastile" not in names or len(tokens) < 2:
        return None
    figure, (speed, memory) = figure_of(2)
    parts = {n: parts_of(select(rows, x_value=n)) for n in tokens}
    for p in names:
        ratios = {n: ratio(times, p) for n, (times, _) in parts.items()}
        peaks = {n: gib[p].y_value_50 for n, (_, gib) in parts.items() if p in gib}
        line(speed, tokens, {n: value for n, value in ratios.items() if value}, p)
        line(memory, tokens, {n: value for n, value in peaks.items() if value}, p)
    speed.set_ylabel(FASTEST)
    memory.set_ylabel("peak memory, GiB")
    for axes in (speed, memory):
        axes.set_xticks(range(len(tokens)), [f"{int(n) // 1024}K" if int(n) % 1024 == 0 else n for n in tokens])
        axes.set_xlabel("tokens in a step")
        axes.grid(alpha=0.3)
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False, columnspacing=1.2)
    figure.suptitle(f"{title}; a line ends where memory does, or where it was not measured", fontsize=11)
    return figure


def bars(ratios: dict[str, float], title: str, label: str):
    """Draw a bar for each ratio on an axis of powers, from 1, which is level with the peer; None without any."""
    if not ratios:
        return None
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, (axes,) = figure_of(1, 1.2 + 0.26 * len(ratios))
    figure.set_size_inches(8, 1.2 + 0.26 * len(ratios))
    names = list(ratios)[::-1]
    values = [ratios[name] for name in names]
    axes.barh(names, [value - 1 for value in values], left=1.0, color=[OURS if value >= 1 else PEER for value in values])
    axes.set_xscale("log")
    wide = max(values) > 5
    known = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if wide else (0.25, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5)
    ends = [t for t in known if 0.8 * min(*values, 1) <= t <= 1.3 * max(*values, 1.25)]
    axes.set_xlim(min(*values, 1) * 0.93, max(*values, 1.25) * (1.5 if wide else 1.15))
    axes.set_xticks(ends)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} ×"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axvline(1.0, color="black", linewidth=1)
    for place, value in enumerate(values):
        axes.text(max(value, 1.0) * (1.03 if wide else 1.01), place, f"{value:.2f}", va="center", fontsize=8)
    axes.set_xlabel(label)
    axes.grid(alpha=0.3, axis="x")
    axes.set_title(title, fontsize=11)
    return figure


def ratio(found: dict[str, Row], provider: str = "bastile") -> float | None:
    """Return the fastest peer's time over a provider's."""
    peers, row = peers_of(found), found.get(provider)
    return min(peers.values()) / row.y_value_50 if peers and row and row.y_value_50 else None


class Chart(NamedTuple):
    """rows: that it shows; draw(): its figure, None where there is too little to show."""

    rows: list[Row]
    draw: Callable


def of_ratios(rows: list[Row], ratios: Mapping[str, float | None], title: str) -> Chart:
    """Return a chart of bars, of the known ratios."""
    return Chart(rows, partial(bars, {name: value for name, value in ratios.items() if value}, title, FASTEST))


def qwen3_step(rows: list[Row]) -> Chart:
    found = select(rows, kernel_name=f"{QWEN3.name}_step", model=QWEN3_SUITE.model, layers=None)
    mine = [r for r in found if r.metric_name in ("step_time", "memory")]
    return Chart(mine, partial(steps, mine, "A training step of Qwen3-8B"))


def trainers(rows: list[Row]) -> Chart:
    shown = trainer_rows(rows)
    mine = [r for found in shown.values() for r in found if r.metric_name in ("throughput", "step_time")]
    return Chart(mine, partial(draw_trainers, shown))


def draw_trainers(shown: dict[str, list[Row]]):
    """Draw the tokens a second of TRL's trainers: a group of bars for each way of training, a bar for each provider."""
    found = {what: by_provider(select(mine, metric_name="throughput")) for what, mine in shown.items()}
    names = columns_of(row for mine in found.values() for row in mine.values())
    if "bastile" not in names:
        return None
    figure, (axes,) = figure_of(1)
    figure.set_size_inches(8, 1.2 + 0.3 * len(names) * len(found))
    longest = max(row.y_value_50 or 0 for mine in found.values() for row in mine.values())
    height = 0.8 / len(names)
    measured = [[p for p in names if p in mine] for mine in found.values()]
    for p in names:
        places = [group + (present.index(p) - (len(present) - 1) / 2) * height for group, present in enumerate(measured) if p in present]
        rates = [mine[p].y_value_50 or 0 for mine in found.values() if p in mine]
        hatch = "///" if is_ours(p) and p != "bastile" else None  # the colour is that of all of ours
        look = {"color": PROVIDERS[p].style["color"], "edgecolor": "white", "linewidth": 0, "hatch": hatch}
        axes.barh(places, rates, height * 0.9, label=providers.title(p), **look)
        gains = [times_faster(parts_of(shown[what])[0], p) if is_ours(p) else "" for what, mine in found.items() if p in mine]
        for place, rate, gain in zip(places, rates, gains):
            axes.text(rate + longest * 0.01, place, f"{rate:,.0f}" + (f" ({gain})" if gain else ""), va="center", fontsize=8)
    axes.set_yticks(range(len(found)), [what.replace(", ", ",\n").replace(" (", "\n(") for what in found])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.25)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("tokens of texts a second")
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle("Qwen3-1.7B in TRL's trainers, on one H200 (×: beside the fastest peer)", fontsize=11)
    return figure


def masked(rows: list[Row]) -> Chart:
    kinds = {what: select(rows, kernel_name=f"{QWEN3.name}_step{kind}", metric_name="step_time") for what, kind in MASKED.items()}
    found = {what: by_provider(mine) for what, mine in kinds.items()}
    ratios = {f"{what}: {providers.title(p)}": ratio(mine, p) for what, mine in found.items() for p in mine if is_ours(p)}
    return of_ratios([r for mine in kinds.values() for r in mine], ratios, "A training step of packed and padded batches")


def gpt_oss(rows: list[Row]) -> Chart:
    wanted, found = {"kernel_operation_mode": "full", "x_value": str(GPT_OSS.tokens), "dtype": "bf16"}, {}
    layer = [r for each in (UNIFORM, SKEWED) for r in select(rows, kernel_name=each.name, metric_name="speed", timing="device", **wanted)]
    of_steps = [r for name in ("gpt_oss_step", "gpt_oss_fsdp") for r in select(rows, kernel_name=name, metric_name="step_time", **wanted)]
    for each in (UNIFORM, SKEWED):
        for model in in_order({r.config["model"] for r in select(layer, kernel_name=each.name)}):
            found[f"{models.size(model).experts} {each.title}"] = ratio(by_provider(select(layer, kernel_name=each.name, model=model)))
    for title, part in step_groups(defensible(of_steps)):
        found[f"step of {title}"] = ratio(by_provider(part))
    return of_ratios(layer + defensible(of_steps), found, "GPT-OSS, forward and backward, 8192 tokens")


def families(rows: list[Row], kinds: dict[str, str], title: str) -> Chart:
    """Show the gain in a step of 8192 tokens: a bar for each model and way of training. kinds: the benchmark of each of these."""
    mine, found = [], {}
    for what, name in kinds.items():
        of_kind = defensible(select(rows, kernel_name=name, metric_name="step_time", x_value="8192"))
        mine += of_kind
        for model, part in step_groups(of_kind):
            found[f"{model.removesuffix(' on one GPU')}: {what}"] = ratio(by_provider(part))
    return of_ratios(mine, found, title)


DENSE = {"all weights": "dense_step", "LoRA": "dense_step_lora_16"}
DELTA_NETS = {"all weights": "qwen3_5_step", "LoRA": "qwen3_5_step_lora_16"}


def liger_operations(rows: list[Row]) -> Chart:
    found: dict[str, float] = {}
    rows = select(rows, metric_name="speed", kernel_operation_mode="full", x_name="shape")
    of_ligers = {operation.name: operation for operation in registry.of_suite(LIGER)}
    mine = [r for r in rows if r.kernel_name in of_ligers and r.kernel_provider != FLOOR]
    for name, operation in of_ligers.items():
        shapes = [ratio(by_provider(select(mine, kernel_name=name, x_value=limit.title))) for limit in operation.limits]
        if known := [value for value in shapes if value]:
            found[operation.title] = geometric_mean(known)
    title = "Liger's operations, forward and backward, mean over their shapes"
    names = sorted(found, key=lambda name: -found[name])
    return of_ratios(mine, {name: found[name] for name in names}, title)


CHARTS: dict[str, Callable[[list[Row]], Chart]] = {  # by file
    "trainers": trainers,
    "qwen3_step": qwen3_step,
    "masked": masked,
    "gpt_oss": gpt_oss,
    "dense": partial(families, kinds=DENSE, title="A training step of dense decoders, 8192 tokens"),
    "qwen3_5": partial(families, kinds=DELTA_NETS, title="A training step of Qwen3.5, 8192 tokens"),
    "liger_operations": liger_operations,
}


def stale(folder: Path) -> list[str]:
    """Return the charts of a GPU's folder that are not of its results. A chart without rows has no file."""
    rows, found = records.read_all(folder), []
    for name, chart in CHARTS.items():
        path, mine = folder / "plots" / f"{name}.png", chart(rows).rows
        made = path.read_bytes() if path.is_file() else b""
        if bool(mine) != bool(made) or (mine and f"{MARK}{digest(mine)}".encode() not in made):
            found.append(name)
    return found


def write(folder: Path) -> list[Path]:
    """Draw every chart of one GPU's results."""
    rows, made = records.read_all(folder), []
    for name, make in CHARTS.items():
        chart, path = make(rows), folder / "plots" / f"{name}.png"
        figure = chart.draw()
        if figure is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Description": f"{MARK}{digest(chart.rows)}", "Software": None})
        made.append(path)
    return made


def main(arguments=None) -> int:
    p = argparse.ArgumentParser(description="Charts of the results.")
    p.add_argument("--gpu", default="nvidia-h200", help="folder under the results")
    p.add_argument("--results", type=Path, default=records.RESULTS)
    p.add_argument("--check", action="store_true", help="fail when a chart is not of the results, and write nothing")
    args = p.parse_args(arguments)
    folder = args.results / args.gpu
    if not args.check:
        for path in write(folder):
            print(path)
        return 0
    wrong = stale(folder)
    for name in wrong:
        print(f"{name}.png is not of the results: python -m benchmark.plots")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
