"""Training steps of Qwen3-8B at every length, on all GPUs that are there, a length each: `python -m benchmark.sweep`.

Each length is a `python -m benchmark.steps` of its own on the next free GPU, the longest first; what follows the options here are arguments
of that. A length is compared within its GPU, so no ratio mixes two. The rows go to the results when all lengths have ended.
"""

import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

from . import records
from .command_line import default_device, integers, new_parser
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
    p = new_parser("Training steps of Qwen3-8B at every length, a length on each GPU. Other arguments are those of benchmark.steps.")
    p.add_argument("--tokens", type=integers, default=QWEN3.tokens, help="lengths of the sequence, comma-separated")
    p.add_argument("--results", type=Path, help="folder for <gpu>/<name>.csv; on a CPU nothing is written without it")
    args, others = p.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        failed = sweep(list(args.tokens), others, Path(folder))
        into = args.results or (records.RESULTS if default_device().startswith("cuda") else None)
        for tokens in sorted(set(args.tokens) - set(failed)):
            if into is not None:
                records.merge(Path(folder) / str(tokens), into)
    if failed:
        log(f"failed: {', '.join(map(str, sorted(failed)))} tokens")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
