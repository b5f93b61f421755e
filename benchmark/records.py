"""Rows of results: their columns, the CSV files they lie in, and what they were measured with.

Two schemas: `Row`, of our own measurements, and `LigerRow`, with the columns of Liger-Kernel's file of all its benchmarks.
What a run has in common stands once in the folder, in environments.json; each row's configuration names it under "environment".
"""

import contextlib
import csv
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import torch

# Links are not followed: in the Hub's cache every file is a link to a blob, which has no neighbours.
ROOT = Path(__file__).absolute().parents[1]
RESULTS = Path(__file__).absolute().parent / "results"
LIGER_FILE = Path("liger") / "all_benchmark_data.csv"  # in a GPU's folder
ENVIRONMENTS = "environments.json"  # beside the CSV files
DISTRIBUTIONS = {  # of the libraries that a number depends on, by their names in an environment
    **{name: name for name in ("triton", "transformers", "kernels", "peft", "trl", "unsloth", "unsloth_zoo", "bitsandbytes")},
    "liger": "liger-kernel",
    "cutlass_dsl": "nvidia-cutlass-dsl",
    "cuda_tile": "cuda-tile",
}
OF_A_RUN = {*DISTRIBUTIONS, "torch", "cuda", "driver", "processor", "cores", "python"}


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@functools.cache
def package_version() -> str:
    """Return the version of the packages and git commit, "1.0.0+0123abc"; ".dirty" is added when files differed from the commit, or the
    packages that are built here are of several."""
    project = ROOT / "pyproject.toml"
    number = tomllib.loads(project.read_text())["project"]["version"] if project.is_file() else "unknown"
    # What is measured, whatever has been checked out since: one of the packages.
    built = [path for folder in (ROOT, *ROOT.glob("packages/*")) for path in folder.glob("build/torch-cuda/metadata.json")]
    kernels = [json.loads(path.read_text()).get("provenance", {}).get("kernel", {}) for path in built]
    commits = list(dict.fromkeys(kernel.get("commit", "") for kernel in kernels))
    commit, dirty = "".join(commits[:1]), len(commits) > 1 or any(kernel.get("dirty", False) for kernel in kernels)
    if not commit:
        commit, dirty = _output("git", "rev-parse", "HEAD"), bool(_output("git", "status", "--porcelain", "--untracked-files=no"))
    return number + (f"+{commit[:7]}" if commit else "") + (".dirty" if commit and dirty else "")


@functools.cache
def processor() -> str:
    """Return the name of the host's processor, on which short calls depend, or the machine's architecture where the system has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((name for name in names if name), "") or platform.machine()


@functools.cache
def environment() -> dict[str, str]:
    """Return the host, and the versions of everything that a number depends on."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    found |= {"processor": processor(), "cores": str(os.cpu_count()), "python": platform.python_version()}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    return found


def now() -> str:
    """Return the time of a row."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@functools.cache
def _configuration(text: str) -> dict:
    """Return what a row says of its measurement; every caller gets the same object."""
    return json.loads(text)


@dataclass
class Measurement:
    """The columns that both schemas have: one number with its 20 % and 80 % quantiles, or no number and the reason under "error" in the
    configuration."""

    kernel_name: str
    kernel_provider: str
    kernel_operation_mode: str
    metric_name: str
    metric_unit: str
    x_name: str
    x_label: str
    x_value: str
    y_value_50: float | None = None
    y_value_20: float | None = None
    y_value_80: float | None = None
    extra_benchmark_config_str: str = "{}"
    gpu_name: str = ""
    timestamp: str = field(default_factory=now)

    @property
    def config(self) -> dict:
        return _configuration(self.extra_benchmark_config_str)

    @property
    def error(self) -> str:
        return self.config.get("error", "")

    @property
    def key(self) -> tuple:
        """What a newer measurement of the same thing has in common with this one."""
        config = self.config
        return (
            self.kernel_name,
            self.kernel_provider,
            self.kernel_operation_mode,
            self.metric_name,
            self.x_name,
            self.x_value,
            *(config.get(name) for name in ("model", "layers", "dtype", "tokens", "gpus", "timing", "shape", "window")),
        )


@dataclass
class Row(Measurement):
    """A measurement of ours. version: of Bastile, with its commit."""

    version: str = field(default_factory=package_version)


@dataclass
class LigerRow(Measurement):
    """A measurement by Liger-Kernel's conventions, in ms and MB. Bastile's version is in the configuration."""

    liger_version: str = field(default_factory=lambda: environment().get("liger", ""))


def columns(kind: type[Measurement]) -> tuple[str, ...]:
    """Return the columns of a schema."""
    return tuple(f.name for f in fields(kind))


NUMBERS = ("y_value_50", "y_value_20", "y_value_80")


def environments(folder: Path) -> dict[str, dict[str, str]]:
    """Return what the rows of a folder were measured with, by the name that they have for it."""
    path = folder / ENVIRONMENTS
    return json.loads(path.read_text()) if path.exists() else {}


def read(path: Path, kind: type[Measurement] = Row) -> list:
    """Return the rows of a CSV file, each with its environment. Raise ValueError when its columns are not those of the schema, or an
    environment is missing."""
    known = environments(path.parent)

    @functools.cache
    def whole(text: str) -> str:
        config = json.loads(text)
        name = config.pop("environment", None)
        if name is not None and name not in known:
            raise ValueError(f"{path} names the environment {name}, expected one of {path.parent / ENVIRONMENTS}: {', '.join(known)}")
        return json.dumps(config | known.get(name, {}), sort_keys=True)

    def parsed(name: str, text: str):
        if name == "extra_benchmark_config_str":
            return whole(text)
        return text if name not in NUMBERS else float(text) if text else None

    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != columns(kind):
            raise ValueError(f"{path} has the columns {reader.fieldnames}, expected {list(columns(kind))}")
        return [kind(**{name: parsed(name, text) for name, text in line.items()}) for line in reader]


def write(path: Path, rows: Iterable[Measurement]) -> None:
    """Add rows of one schema to a CSV file, and their environments to the folder's; a row of the same key is replaced. A run that is
    killed leaves whole files."""
    rows = list(rows)
    if not rows:
        return
    kind, new = type(rows[0]), {row.key for row in rows}
    rows = ([row for row in read(path, kind) if row.key not in new] if path.exists() else []) + rows
    known, lines = environments(path.parent), []
    for row in rows:
        config, numbers = dict(row.config), {name: getattr(row, name) for name in NUMBERS}
        environment = {name: config.pop(name) for name in sorted(OF_A_RUN & config.keys())}
        if environment:
            config["environment"] = hashlib.sha256(json.dumps(environment).encode()).hexdigest()[:8]
            known[config["environment"]] = environment
        written = {name: "" if value is None else f"{value:.6g}" for name, value in numbers.items()}
        lines.append(asdict(row) | written | {"extra_benchmark_config_str": json.dumps(config, sort_keys=True)})
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path.parent / ENVIRONMENTS) as file:
        file.write(json.dumps(known, indent=1, sort_keys=True) + "\n")
    with _replacing(path) as file:
        writer = csv.DictWriter(file, columns(kind), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[str]]:
    """Open a file that takes the place of `path` once it is whole."""
    part = path.with_suffix(".part")
    with open(part, "w", newline="") as file:
        yield file
    os.replace(part, path)


def merge(source: Path, into: Path) -> list[Measurement]:
    """Add the rows of a folder of results to those of another, file by file, and return them. Both have a folder a GPU."""
    found: list[Measurement] = []
    for path in sorted({*source.glob("*/*.csv"), *source.glob(f"*/{LIGER_FILE}")}):
        rows = read(path, LigerRow if path.name == LIGER_FILE.name else Row)
        write(into / path.relative_to(source), rows)
        found += rows
    return found


def read_all(folder: Path) -> list[Row]:
    """Return the rows of every CSV file of a GPU's folder, without those of Liger-Kernel's schema, which lie below it."""
    return [row for path in sorted(folder.glob("*.csv")) for row in read(path)]


def slug(gpu_name: str) -> str:
    """Return the name of a GPU's folder: "nvidia-h200" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")


def gpu_name(device: str) -> str:
    """Return the name of the GPU that runs have on `device`, or "CPU"."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
