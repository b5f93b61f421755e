"""The command lines of the benchmarks, and where their results go."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from . import models, records
from .operation import MODES, SWEEPS, Case, Operation
from .providers import PROVIDERS
from .suites import QWEN3, Suite
from .timing import TIMINGS, Clock

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CONVENTIONS = ("alone", "liger")


def integers(text: str) -> tuple[int, ...]:
    """Parse numbers separated by commas."""
    return tuple(int(part) for part in text.split(",") if part)


def names(text: str) -> tuple[str, ...]:
    """Parse names separated by commas."""
    return tuple(part for part in text.split(",") if part)


def some_of(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    """Return the parser of an argument that lists names: a misspelt one must not cost a run."""

    def parse(text: str) -> tuple[str, ...]:
        found = names(text)
        if unknown := [name for name in found if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}, expected some of {', '.join(allowed)}")
        return found

    return parse


def default_device() -> str:
    """Return "cuda" where there is a GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def new_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser whose help shows the defaults."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)


def operation_parser(description: str, *operations: Operation) -> argparse.ArgumentParser:
    """Return the command line of operations."""
    sweeps = tuple(dict.fromkeys(name for operation in operations for name in operation.sweeps)) or tuple(SWEEPS)
    p = new_parser(description)
    p.add_argument("--model", help=f"whose sizes; without it, each operation's own. Of {', '.join(models.SIZES)}")
    p.add_argument("--models", type=names, help="of --sweep-mode model_config; without it, those of the operation's suite")
    p.add_argument("--sweep-mode", choices=sweeps, default=sweeps[0])
    p.add_argument("--tokens", type=integers, help="comma-separated; without it, each operation's own")
    p.add_argument("--bt", type=int, help="tokens of --sweep-mode model_config; without it, the last of --tokens")
    conventions = "alone: the operation with its floor; liger: as Liger-Kernel's scripts have it, where the operation says how"
    p.add_argument("--conventions", type=some_of(*CONVENTIONS), help=f"{conventions}. Without it, those of the operation's suite")
    p.add_argument("--dtype", choices=DTYPES, default="bf16")
    p.add_argument("--device", default=default_device())
    p.add_argument("--providers", type=some_of(*PROVIDERS), default=tuple(PROVIDERS))
    p.add_argument("--modes", type=some_of(*MODES), default=(), help="without it, all that an operation has")
    p.add_argument("--timing", choices=TIMINGS, help="see timing.py; without it, that of the operation's suite")
    p.add_argument("--ms", type=float, default=50.0, help="milliseconds of calls for each number")
    p.add_argument("--rounds", type=int, default=2, help="turns that the providers take")
    p.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    p.add_argument("--compile-tokens", type=integers, default=(8192,), help="token counts at which torch.compile takes part")
    p.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which nothing new is started")
    p.add_argument("--results", type=Path, help="folder for <gpu>/<operation>.csv; on a CPU nothing is written without it")
    return p


def layers_parser(description: str, csv_name: str, milliseconds: float) -> argparse.ArgumentParser:
    """Return the command line of a benchmark of few layers of a Qwen3. milliseconds: of calls for each number, unless told otherwise."""
    p = new_parser(description)
    p.add_argument("--model", default="qwen3_8b", help=f"sizes: {', '.join(models.QWEN3)}")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--device", default=default_device())
    p.add_argument("--ms", type=float, default=milliseconds, help="milliseconds of calls for each number")
    p.add_argument("--rounds", type=int, default=2, help="turns that the providers take")
    p.add_argument("--results", type=Path, help=f"folder for <gpu>/{csv_name}.csv; on a CPU nothing is written without it")
    return p


def results_folder(args) -> Path | None:
    """Return the folder that the command line names, or on a GPU the repository's."""
    return args.results or (records.RESULTS if args.device.startswith("cuda") else None)


class OutOfTime(Exception):
    """The run's time budget is spent."""


@dataclass
class Settings:
    """How operations are measured. modes, conventions: () for all of an operation's, or its suite's; deadline: of time.monotonic()."""

    device: str = "cpu"
    dtype_name: str = "bf16"
    timing: str = "device"
    milliseconds: float = 50.0
    rounds: int = 2
    providers: tuple[str, ...] = tuple(PROVIDERS)
    modes: tuple[str, ...] = ()
    conventions: tuple[str, ...] = ()
    compile: bool = True
    compile_tokens: tuple[int, ...] = ()
    results: Path | None = None
    deadline: float = float("inf")

    def __post_init__(self):
        self.clock = Clock(self.device, self.timing, self.milliseconds)

    @classmethod
    def of(cls, args, suite: Suite = QWEN3) -> "Settings":
        """Return what the command line of `operation_parser` says for the operations of a suite."""
        same = {name: getattr(args, name) for name in ("device", "rounds", "providers", "modes", "compile_tokens")}
        return cls(
            **same,
            dtype_name=args.dtype,
            timing=args.timing or suite.timing,
            milliseconds=args.ms,
            conventions=args.conventions or (),
            compile=not args.no_compile,
            results=results_folder(args),
            deadline=time.monotonic() + args.budget_s,
        )

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    def providers_of(self, operation: Operation, case: Case) -> list[str]:
        """Return the providers of a case. torch.compile takes seconds a shape, so of the numbers of tokens it has its own."""
        tokens = case.config.get("tokens")
        compiles = self.compile and (tokens is None or tokens in self.compile_tokens)
        return [p for p in operation.providers if p in self.providers and (p != "torch_compile" or compiles)]

    def modes_of(self, operation: Operation) -> list[str]:
        """Return the modes to time."""
        return [mode for mode in operation.modes if not self.modes or mode in self.modes]

    def conventions_of(self, operation: Operation) -> tuple[str, ...]:
        """Return how to measure an operation."""
        wanted = self.conventions or operation.suite.conventions
        return tuple(name for name in wanted if name != "liger" or operation.liger)

    def check_time(self) -> None:
        """Raise OutOfTime when the deadline has passed."""
        if time.monotonic() > self.deadline:
            raise OutOfTime
