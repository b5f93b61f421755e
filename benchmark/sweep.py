"""Training steps of Qwen3-8B at every length, on all GPUs that are there, a length each: `python -m benchmark.sweep`.

Each length is a `python -m benchmark.steps` of its own on the next free GPU, the longest first; what follows the options here are arguments
of that. A length is compared within its GPU, so no ratio mixes two. The rows go to the results when all lengths have ended.
"""

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

from . import records, steps
from .command_line import results_folder
from .families import QWEN3
from .records import ROOT
from .report import log


def places() -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES is for each GPU that this process may use; one empty name without a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()] or [""]


def sweep(lengths: list[int], arguments: list[str], folder: Path) -> list[int]:
    """Measure each length into a folder of its own, and return those that failed."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    failed: list[int] = []
    for tokens in sorted(lengths, reverse=True):
        waiting.put(tokens)

    def work(place: str) -> None:
        while True:
            try:
                tokens = waiting.get_nowait()
            except queue.Empty:
                return
            log(f"{tokens} tokens on GPU {place}" if place else f"{tokens} tokens on the CPU")
            command = [sys.executable, "-m", "benchmark.steps", *arguments, "--tokens", str(tokens), "--results", str(folder / str(tokens))]
            if subprocess.run(command, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": place}).returncode:
                failed.append(tokens)

    workers = [threading.Thread(target=work, args=(place,)) for place in places()]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return failed


def main(arguments=None) -> int:
    p = steps.parser("Training steps of Qwen3-8B at every length, a length on each GPU.", QWEN3.tokens)
    steps.add_recipe(p)
    args = p.parse_args(arguments)
    apart = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # what each length has of its own
    apart.add_argument("--tokens")
    apart.add_argument("--results")
    _, others = apart.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        failed = sweep(list(args.tokens), others, Path(folder))
        into = results_folder(args)
        if into is not None:
            for tokens in sorted(set(args.tokens) - set(failed)):
                records.merge(Path(folder) / str(tokens), into)
    if failed:
        log(f"failed: {', '.join(map(str, sorted(failed)))} tokens")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
