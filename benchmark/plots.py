"""Pictures of the results: `python -m benchmark.plots` writes benchmark/results/<gpu>/plots/*.png. Needs matplotlib."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from . import models, records, registry
from .families import FAMILIES
from .markdown import in_order, select
from .operation import MODE_TITLES
from .providers import FLOOR, FLOOR_STYLE, PROVIDERS
from .records import Row
from .step_tables import step_groups
from .suites import Suite


def style(provider: str) -> dict:
    """Return how the line of a provider, or of the floor, is drawn."""
    return PROVIDERS[provider].style if provider in PROVIDERS else FLOOR_STYLE


def series(rows: Iterable[Row], scale: float = 1.0) -> dict[str, tuple[list, ...]]:
    """Return by provider: x, median, 20 % and 80 % quantiles, of what has a number."""
    found = {}
    for provider in (*PROVIDERS, FLOOR):
        mine = {r.x_value: r for r in rows if r.kernel_provider == provider and r.y_value_50 is not None}
        x = in_order(mine)
        if x:
            found[provider] = (x, *([getattr(mine[v], y) * scale for v in x] for y in ("y_value_50", "y_value_20", "y_value_80")))
    return found


def draw(axes, rows: list[Row], ylabel: str, floor: str = FLOOR, scale: float = 1.0, log: bool = True) -> None:
    """Draw one line a provider over the tokens, or over the models; a cross at the bottom where it fails."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    positions = {x: i for i, x in enumerate(in_order(r.x_value for r in rows))}
    crosses = dict.fromkeys(positions, 0)
    for row in rows:
        if row.error:
            crosses[row.x_value] += 1
            height = 0.05 * crosses[row.x_value]
            axes.plot(positions[row.x_value], height, "x", color=style(row.kernel_provider)["color"], transform=axes.get_xaxis_transform())
    for provider, (x, median, low, high) in series(rows, scale).items():
        at, label = [positions[v] for v in x], PROVIDERS[provider].title if provider in PROVIDERS else floor
        axes.plot(at, median, label=label, **style(provider))
        axes.fill_between(at, low, high, color=style(provider)["color"], alpha=0.15, linewidth=0)
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
    """Return the floor's time over each provider's, in percent."""
    floors = {r.x_value: r.y_value_50 for r in rows if r.kernel_provider == FLOOR}
    found = []
    for row in rows:
        floor = floors.get(row.x_value)
        if row.kernel_provider != FLOOR and row.y_value_50 and floor:
            numbers = {name: 100 * floor / getattr(row, name) for name in records.NUMBERS}
            found.append(Row(**{**vars(row), **numbers}))
    return found


def finish(figure, path: Path, title: str) -> Path:
    """Put title and legend on a figure, and write it."""
    import matplotlib.pyplot as plt

    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.suptitle(title)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def panels(count: int):
    """Return a figure and its axes side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, count, figsize=(5.5 * count, 4.4), layout="constrained", squeeze=False)


def plot_operation(rows: list[Row], folder: Path) -> list[Path]:
    """Draw a picture for each mode, and each model or shape that is not what x varies: time, share of the floor, and memory if it was
    measured."""
    made = []

    def of(r: Row) -> tuple:
        model = r.config["model"] if r.x_name == "tokens" else None
        return r.kernel_name, r.kernel_operation_mode, r.x_name, model, r.config.get("shape")

    for picture in dict.fromkeys(map(of, rows)):
        name, mode, x_name, model, shape = picture
        mine = [r for r in rows if of(r) == picture]
        speed, memory = select(mine, metric_name="speed"), select(mine, metric_name="memory")
        if not any(r.y_value_50 for r in speed):
            continue
        figure, ((time_axes, share_axes, *rest),) = panels(3 if memory else 2)
        operation = registry.operations()[name]
        unit, scale = ("ms", 1e-3) if operation.floor else ("µs", 1.0)
        draw(time_axes, speed, unit, operation.floor_title, scale)
        if percent := shares(speed):
            draw(share_axes, percent, f"% of the speed of {operation.floor_title}", log=False)
        if memory:
            draw(rest[0], memory, "peak memory of the call, MiB")
        what = f"{operation.title[0].upper()}{operation.title[1:]}, {MODE_TITLES.get(mode, mode)}"
        where = " - ".join([what, *([models.title(model)] if model else []), *([shape] if shape else [])])
        parts = [name, mode]
        if model is None:
            parts += ["by", x_name]
        elif len(shown_models(operation.suite)) > 1:
            parts.append(model)
        if shape:
            parts.append(records.slug(shape))
        made.append(finish(figure, folder / f"{'_'.join(parts)}.png", f"{where}, {speed[0].gpu_name}"))
    return made


def plot_steps(rows: list[Row], folder: Path, title: str) -> list[Path]:
    """Draw time, tokens a second and memory of training steps. rows: of one of the groups that can be compared."""
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


def shown_models(suite: Suite) -> tuple[str, ...]:
    """Return the models whose pictures over tokens are drawn: all of a suite that has two, else its own."""
    return suite.models if len(suite.models) <= 2 else (suite.model,)


def is_shown(row: Row, suite: Suite) -> bool:
    """Tell whether a row of an operation is in a picture."""
    return row.config["timing"] == suite.timing and (row.x_name != "tokens" or row.config["model"] in shown_models(suite))


def plot_all(folder: Path) -> list[Path]:
    """Draw every picture of one GPU's results."""
    rows = records.read_all(folder)
    plots, made = folder / "plots", []
    usual = [r for r in rows if r.config.get("dtype") == "bf16"]
    known = registry.operations()
    made += plot_operation([r for r in usual if r.kernel_name in known and is_shown(r, known[r.kernel_name].suite)], plots)
    for family in FAMILIES:
        for kind, what in (("step", "Training step"), ("fsdp", "FSDP2 training step")):
            for title, mine in step_groups(select(usual, kernel_name=f"{family}_{kind}")):
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
