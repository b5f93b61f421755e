"""Pictures of the results: `python -m benchmark.plots` writes benchmark/results/<gpu>/plots/*.png. Needs matplotlib."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from . import models, records
from .records import Row
from .tables import EXPERTS, MODE_TITLES, MODEL, PROVIDERS, TITLES, in_order, select, step_groups

# Colours that colour-blind readers tell apart (Okabe and Ito); what is compared is grey or thin, Bastile is not.
STYLES: dict[str, dict] = {
    "huggingface": {"color": "#999999", "marker": "s"},
    "huggingface_flex": {"color": "#999999", "marker": "s", "linestyle": "--"},
    "torch": {"color": "#56B4E9", "marker": "D"},
    "torch_fused": {"color": "#56B4E9", "marker": "D", "linestyle": "--"},
    "torch_compile": {"color": "#CC79A7", "marker": "v"},
    "liger": {"color": "#E69F00", "marker": "^"},
    "liger_flex": {"color": "#E69F00", "marker": "^", "linestyle": "--"},
    "liger_cutedsl": {"color": "#009E73", "marker": "<"},
    "liger_cutile": {"color": "#0072B2", "marker": ">"},
    "bastile": {"color": "#D55E00", "marker": "o", "linewidth": 2.5, "zorder": 3},
    "bastile_adamw": {"color": "#D55E00", "marker": "o", "linewidth": 1.5, "zorder": 3, "linestyle": "--"},
    "floor": {"color": "black", "linestyle": ":", "linewidth": 1},
}
FLOOR = {"linear_cross_entropy": "bare cuBLAS GEMMs"} | dict.fromkeys(EXPERTS, "bare grouped GEMMs")
OPERATIONS = TITLES | {name: f"experts, {routing} routing" for name, routing in EXPERTS.items()}
STEPS = {
    "qwen3_step": "Training step",
    "qwen3_fsdp": "FSDP2 training step",
    "gpt_oss_step": "Training step",
    "gpt_oss_fsdp": "FSDP2 training step",
}


def series(rows: Iterable[Row], scale: float = 1.0) -> dict[str, tuple[list, ...]]:
    """By provider: x, median, 20 % and 80 % quantiles, of what has a number."""
    found = {}
    for provider in (*PROVIDERS, "floor"):
        mine = {r.x_value: r for r in rows if r.kernel_provider == provider and r.y_value_50 is not None}
        x = in_order(mine)
        if x:
            found[provider] = (x, *([getattr(mine[v], y) * scale for v in x] for y in ("y_value_50", "y_value_20", "y_value_80")))
    return found


def draw(axes, rows: list[Row], ylabel: str, floor: str = "copy_ of the same bytes", scale: float = 1.0, log: bool = True) -> None:
    """One line a provider over the tokens, or over the models; a cross at the bottom where it fails."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    positions = {x: i for i, x in enumerate(in_order(r.x_value for r in rows))}
    crosses = dict.fromkeys(positions, 0)
    for row in rows:
        if row.error:
            crosses[row.x_value] += 1
            height = 0.05 * crosses[row.x_value]
            axes.plot(positions[row.x_value], height, "x", color=STYLES[row.kernel_provider]["color"], transform=axes.get_xaxis_transform())
    for provider, (x, median, low, high) in series(rows, scale).items():
        at, label = [positions[v] for v in x], PROVIDERS.get(provider, floor)
        axes.plot(at, median, label=label, **STYLES[provider])
        axes.fill_between(at, low, high, color=STYLES[provider]["color"], alpha=0.15, linewidth=0)
    axes.set_xticks(list(positions.values()), list(positions), rotation=45 if len("".join(positions)) > 32 else 0)
    axes.set_xlabel(rows[0].x_label)
    axes.set_ylabel(ylabel)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter("")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(alpha=0.3)


def shares(rows: list[Row]) -> list[Row]:
    """The floor's time over each provider's, in percent."""
    floors = {r.x_value: r.y_value_50 for r in rows if r.kernel_provider == "floor"}
    found = []
    for row in rows:
        floor = floors.get(row.x_value)
        if row.kernel_provider != "floor" and row.y_value_50 and floor:
            numbers = {name: 100 * floor / getattr(row, name) for name in records.NUMBERS}
            found.append(Row(**{**vars(row), **numbers}))
    return found


def finish(figure, path: Path, title: str) -> Path:
    import matplotlib.pyplot as plt

    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.suptitle(title)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def panels(count: int):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, count, figsize=(5.5 * count, 4.4), layout="constrained", squeeze=False)


def plot_operation(rows: list[Row], folder: Path) -> list[Path]:
    """A picture for each mode, and each model that is not what x varies: time, share of the floor, and memory where it was measured."""
    made = []
    pictures = ((r.kernel_name, r.kernel_operation_mode, r.x_name, r.config["model"] if r.x_name == "tokens" else None) for r in rows)
    for name, mode, x_name, model in dict.fromkeys(pictures):
        mine = select(rows, kernel_name=name, kernel_operation_mode=mode, x_name=x_name, **({"model": model} if model else {}))
        speed, memory = select(mine, metric_name="speed"), select(mine, metric_name="memory")
        if not any(r.y_value_50 for r in speed):
            continue
        figure, ((time_axes, share_axes, *rest),) = panels(3 if memory else 2)
        floor = FLOOR.get(name, "copy_ of the same bytes")
        draw(time_axes, speed, "ms" if name in FLOOR else "µs", floor, 1e-3 if name in FLOOR else 1.0)
        if percent := shares(speed):
            draw(share_axes, percent, f"% of the speed of {floor}", log=False)
        if memory:
            draw(rest[0], memory, "peak memory of the call, MiB")
        what = f"{OPERATIONS[name][0].upper()}{OPERATIONS[name][1:]}, {MODE_TITLES.get(mode, mode)}"
        title = f"{what} - {models.title(model) if model else 'Qwen3'}, {speed[0].gpu_name}"
        suffix = f"_by_{x_name}" if model is None else "" if model == MODEL else f"_{model}"
        made.append(finish(figure, folder / f"{name}_{mode}{suffix}.png", title))
    return made


def plot_steps(rows: list[Row], folder: Path, title: str) -> list[Path]:
    """Time, tokens a second and memory of training steps. rows: of one of the groups that can be compared."""
    times = select(rows, metric_name="step_time")
    if not any(r.y_value_50 for r in times):
        return []
    memory = select(rows, metric_name="memory")
    figure, ((time_axes, rate_axes, *rest),) = panels(3 if memory else 2)
    draw(time_axes, times, "ms a step")
    draw(rate_axes, select(rows, metric_name="throughput"), "tokens a second", log=False)
    if memory:
        draw(rest[0], memory, "peak memory of a GPU, GiB", log=False)
    config = times[0].config
    part = f"_{config['layers']}_layers" if config["layers"] else ""
    gpus = f"_{config['gpus']}_gpus" if config["gpus"] > 1 else ""
    return [finish(figure, folder / f"{times[0].kernel_name}_{config['model']}{part}{gpus}.png", f"{title}, {times[0].gpu_name}")]


def plot_all(folder: Path) -> list[Path]:
    """Every picture of one GPU's results."""
    rows = records.read_all(folder)
    plots, made = folder / "plots", []
    usual = [r for r in rows if r.config.get("dtype") == "bf16" and r.config.get("timing") in (None, "device")]
    shown = (MODEL, *models.GPT_OSS)
    of_operations = [r for r in usual if r.kernel_name in OPERATIONS and (r.x_name != "tokens" or r.config["model"] in shown)]
    made += plot_operation(of_operations, plots)
    for kernel, what in STEPS.items():
        for title, mine in step_groups(select(usual, kernel_name=kernel)):
            made += plot_steps(mine, plots, f"{what} - {title}")
    return made


def main(arguments=None) -> list[Path]:
    p = argparse.ArgumentParser(description="Pictures of the results.")
    p.add_argument("--gpu", default="nvidia-h200", help="folder under the results")
    p.add_argument("--results", type=Path, default=records.RESULTS)
    args = p.parse_args(arguments)
    made = plot_all(args.results / args.gpu)
    for path in made:
        print(path)
    return made


if __name__ == "__main__":
    main()
