"""The whole road on this machine: `python -m tools.demo`, the last part of `make demo`.

Starts a local Hub, uploads build/ to it, and fine-tunes the same small Qwen3 twice on the same text, each time in a process of
its own: as transformers has it, and with the package that `kernels.get_kernel` loads back from that Hub. Ends with the losses
of both runs side by side, and exits with 1 when they differ by more than 0.5 % anywhere.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tabulate import tabulate

from tools.demo_run import Result, Run
from tools.hub import HubServer
from tools.publish import PublishError, publish

LIMIT_PERCENT = 0.5
ROOT = Path(__file__).resolve().parents[1]
NAMES = {False: "PyTorch", True: "Bastile"}
# What would make the run read another copy of the package than the one on the local Hub.
IN_THE_WAY = ("HF_", "HUGGINGFACE_", "KERNELS_CACHE", "LOCAL_KERNELS", "DISABLE_KERNEL_MAPPING")


class DemoError(Exception):
    """A run failed; the text is what it said."""


def train(run: Run, endpoint: str, home: Path, progress: Progress) -> Result:
    """Trains in a new process that knows the local Hub and an empty cache only. Raises DemoError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(IN_THE_WAY)}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    bar = progress.add_task(f"{NAMES[run.kernelized]}: starting", total=run.steps)
    result = Result()
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "tools.demo_run", json.dumps(asdict(run))]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            for line in process.stdout:
                result = Result(**json.loads(line))
                loss = f"loss {result.losses[-1]:.4f}" if result.losses else "ready"
                progress.update(bar, completed=len(result.losses), description=f"{NAMES[run.kernelized]}: {loss}")
        if process.returncode or len(result.losses) != run.steps:
            errors.seek(0)
            raise DemoError(f"the {NAMES[run.kernelized]} run ended with {process.returncode}:\n{errors.read()[-4000:]}")
    return result


def differences(plain: Result, bastile: Result) -> list[float]:
    """In percent of the loss without Bastile; infinite where a loss is not a number."""
    found = [100 * abs(ours - theirs) / abs(theirs) for ours, theirs in zip(bastile.losses, plain.losses, strict=True)]
    return [value if value == value else float("inf") for value in found]


def show(plain: Result, bastile: Result, device: str) -> float:
    """Prints the tables; the largest difference in percent."""
    percents = differences(plain, bastile)
    columns = {"step": range(1, len(percents) + 1), NAMES[False]: plain.losses, NAMES[True]: bastile.losses, "difference in %": percents}
    print("Loss of each step", tabulate(columns, columns, floatfmt=".5f"), sep="\n")
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{torch.get_num_threads()} CPU cores"
    print(f"\n{plain.parameters / 1e6:.1f} million parameters, {plain.tokens} tokens a step, {where}")
    rows = [(NAMES[ours], result.tokens_per_second, result.peak_mib) for ours, result in ((False, plain), (True, bastile))]
    print(tabulate(rows, ("", "tokens/s", "peak MiB"), floatfmt=",.0f"))
    print(f"{NAMES[True]} ran as {bastile.kernel}, loaded from the local Hub.")
    return max(percents)


def demo(model: str | None, steps: int, device: str) -> int:
    """Returns the exit status. Raises DemoError or PublishError."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="bastile-demo-") as folder, HubServer() as hub:
        print(f"A local Hub listens on {hub.endpoint}")
        publish(ROOT, endpoint=hub.endpoint, token=hub.token, allow_dirty=True, allow_partial=True, console=console)
        columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            runs = [Run(kernelized, device, steps, model) for kernelized in NAMES]
            plain, bastile = (train(run, hub.endpoint, Path(folder) / "home", progress) for run in runs)
    worst = show(plain, bastile, device)
    print(f"Largest difference of the losses: {worst:.5f} % (limit {LIMIT_PERCENT} %)")
    return 0 if worst <= LIMIT_PERCENT else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="PATH", help="a local Qwen3 checkpoint with its tokenizer; default: a small new model")
    parser.add_argument("--steps", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: the best one present")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}, expected at least 1")
    if options.model is not None:
        if not (Path(options.model) / "config.json").is_file():
            parser.error(f"--model is {options.model}, expected a folder with a config.json")
        options.model = str(Path(options.model).resolve())
    try:
        return demo(options.model, options.steps, options.device)
    except (DemoError, PublishError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
