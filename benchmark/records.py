"""Rows of results: what they say, where they lie, and what they were measured with."""

import csv
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Row:
    """One number with its 20 % and 80 % quantiles, or no number and the reason under "error" in the configuration."""

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
    timestamp: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    version: str = field(default_factory=lambda: package_version())

    @property
    def config(self) -> dict:
        return json.loads(self.extra_benchmark_config_str)

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
            *(config.get(name) for name in ("model", "layers", "dtype", "tokens", "gpus", "timing")),
        )


COLUMNS = tuple(f.name for f in fields(Row))
NUMBERS = ("y_value_50", "y_value_20", "y_value_80")


def read(path: Path) -> list[Row]:
    """The rows of a CSV file. Raises ValueError when its columns are not ours."""
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path} has the columns {reader.fieldnames}, expected {list(COLUMNS)}")
        return [Row(**{name: _parsed(name, text) for name, text in line.items()}) for line in reader]


def _parsed(name: str, text: str):
    if name not in NUMBERS:
        return text
    return float(text) if text else None


def write(path: Path, rows: Iterable[Row]) -> None:
    """Adds rows to a CSV file; a row of the same key is replaced. A run that is killed leaves a whole file."""
    rows = list(rows)
    new = {row.key for row in rows}
    kept = [row for row in read(path) if row.key not in new] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in kept + rows:
            writer.writerow({name: _written(name, value) for name, value in asdict(row).items()})
    os.replace(part, path)


def _written(name: str, value):
    if name not in NUMBERS:
        return value
    return "" if value is None else f"{value:.6g}"


def read_all(folder: Path) -> list[Row]:
    """The rows of every CSV file of a GPU's folder."""
    return [row for path in sorted(folder.glob("*.csv")) for row in read(path)]


def slug(gpu_name: str) -> str:
    """ "NVIDIA H200" -> "nvidia-h200": the name of a GPU's folder."""
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")


def gpu_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@functools.cache
def package_version() -> str:
    """Version of the package and git commit, "1.0.0+0123abc"; ".dirty" is added when files differed from the commit."""
    project = ROOT / "pyproject.toml"
    number = tomllib.loads(project.read_text())["project"]["version"] if project.is_file() else "unknown"
    commit, dirty = _output("git", "rev-parse", "HEAD"), bool(_output("git", "status", "--porcelain", "--untracked-files=no"))
    if not commit:
        built = ROOT / "build" / "torch-cuda" / "metadata.json"
        kernel = json.loads(built.read_text()).get("provenance", {}).get("kernel", {}) if built.is_file() else {}
        commit, dirty = kernel.get("commit", ""), kernel.get("dirty", False)
    return number + (f"+{commit[:7]}" if commit else "") + (".dirty" if commit and dirty else "")


@functools.cache
def environment() -> dict[str, str]:
    """Versions of everything that a number depends on."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    for name, distribution in (
        ("triton", "triton"),
        ("transformers", "transformers"),
        ("liger", "liger-kernel"),
        ("kernels", "kernels"),
        ("cutlass_dsl", "nvidia-cutlass-dsl"),
        ("cuda_tile", "cuda-tile"),
    ):
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    return found
