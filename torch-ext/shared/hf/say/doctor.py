"""What one pastes into a bug report: the GPUs, the driver, which kernels serve them, and the versions that fit or do not."""

import argparse
import platform
from importlib import metadata
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ...runtime import launch
from ...runtime.artifacts import ArtifactError
from ...runtime.device import why_no_kernels
from ...runtime.driver import MIN_DRIVER, DriverError
from ...runtime.torch_version import TORCH_MIN, numbers_in
from ..parts.hub import KERNELS_EXPECTED, PAIR, TRANSFORMERS_EXPECTED
from . import self_check

__all__ = ["TORCH", "Finding", "Report", "main", "report"]

# By library: the versions that are taken, and what to run where another is found. None: any, or none at all.
Libraries = Sequence[Tuple[str, Optional[str], str]]
TORCH = ("torch", f">={TORCH_MIN[0]}.{TORCH_MIN[1]}", f"pip install 'torch>={TORCH_MIN[0]}.{TORCH_MIN[1]}'")
LIBRARIES: Libraries = (
    TORCH,
    ("transformers", TRANSFORMERS_EXPECTED, f"pip install {PAIR}"),
    ("kernels", KERNELS_EXPECTED, f"pip install {PAIR}"),
    ("accelerate", None, ""),
    ("peft", None, ""),
    ("trl", None, ""),
    ("bitsandbytes", None, ""),
    ("deepspeed", None, ""),
)


class Finding(NamedTuple):
    """name: of what was inspected; found: its version or state; fits: whether this package works with it; advice: one line."""

    name: str
    found: str
    fits: bool
    advice: str = ""


def _finding(name: str, found: str, fits: bool, advice: str) -> Finding:
    """Makes a `Finding`, whose advice is left out where what was found fits."""
    return Finding(name, found, fits, "" if fits else advice)


class Report(NamedTuple):
    """What `report` found: printed, a line for each."""

    findings: Tuple[Finding, ...]

    def __str__(self) -> str:
        width = max(len(finding.name) for finding in self.findings)
        lines = []
        for name, found, fits, advice in self.findings:
            lines.append(f"{'ok ' if fits else 'NO '} {name.ljust(width)}  {found}" + (f"  -> {advice}" if advice else ""))
        return "\n".join(lines)


def version_fits(version: str, expected: str) -> bool:
    """Tells whether a version is within `expected`, such as ">=0.16.2,<0.18"."""
    found = numbers_in(version, 3)
    limits = [(bound.startswith("<"), numbers_in(bound, 3)) for bound in expected.split(",")]
    return all(found[: len(limit)] < limit if below else found >= limit for below, limit in limits)


def _libraries(libraries: Libraries) -> List[Finding]:
    findings = []
    for name, expected, advice in libraries:
        try:
            version = torch.__version__ if name == "torch" else metadata.version(name)
        except metadata.PackageNotFoundError:
            findings.append(_finding(name, "not installed", expected is None, advice))
            continue
        findings.append(_finding(name, version, expected is None or version_fits(version, expected), f"expected {expected}: {advice}"))
    return findings


def _driver() -> Finding:
    expected = f"CUDA {MIN_DRIVER // 1000}.{MIN_DRIVER % 1000 // 10}"
    try:
        version = launch.backend.version()
    except DriverError as error:
        return Finding("driver", str(error), False, f"install driver R580 ({expected}) or newer")
    found = f"CUDA {version // 1000}.{version % 1000 // 10}"
    return _finding("driver", found, version >= MIN_DRIVER, f"expected {expected} or newer: install driver R580")


def _gpus() -> List[Finding]:
    if not torch.cuda.is_available():
        cuda = torch.version.cuda
        build = f"torch {torch.__version__} is built for CUDA {cuda}" if cuda else "this torch is not built for CUDA"
        return [Finding("GPU", f"none ({build})", False, "every operation runs in PyTorch")]
    findings = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        what = f"{properties.name}, compute capability {properties.major}.{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
        reason = why_no_kernels(torch.device("cuda", index))
        served = f"{what}: {reason}" if reason else f"{what}, kernels of {launch.backend.architecture(index)}"
        findings.append(_finding(f"cuda:{index}", served, not reason, "PyTorch's operations run there instead"))
    return findings


def _checks() -> List[Finding]:
    done = self_check.run()
    findings = [Finding(f"check {case.title}", str(case), not case.failures) for case in done.cases]
    used, known = done.kernels
    failed = sum(bool(case.failures) for case in done.cases)
    found = f"{len(done.cases) - failed} of {len(done.cases)} operations agree with float64 on {done.where}, {done.seconds:.0f} s"
    kernels = f"; {used} of {known} kernels ran" if known else ""
    return [*findings, _finding("checks", found + kernels, not failed, "paste this report into an issue")]


def main(report: Callable[..., Report], package: str) -> None:
    """Runs `python -m` with a package's name: prints its report, with --check that of every operation's results too. Ends the process with
    1 when one is wrong."""
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description="What this package finds on this machine.")
    parser.add_argument("--check", action="store_true", help="compare every operation with float64 on the CPU, in about a minute")
    found = report(check=parser.parse_args().check)
    print(found)
    if not all(finding.fits for finding in found.findings if finding.name.startswith("check")):
        raise SystemExit(1)


def report(package: str, libraries: Libraries = LIBRARIES, check: bool = False, more: Sequence[Finding] = ()) -> Report:
    """Looks at this machine; see `report` of a package. package: its name, as it was imported. libraries: whose versions matter to it.
    more: what else the package found."""
    try:
        architectures = ", ".join(launch.backend.artifacts.architectures()) or "none"
        kernels = _finding("prebuilt kernels", architectures, architectures != "none", "this build is for CPUs")
    except ArtifactError as error:
        kernels = Finding("prebuilt kernels", str(error), False, "install the package again")
    findings = [
        Finding("package", package, True),
        Finding("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}", platform.system() == "Linux"),
        *_libraries(libraries),
        *more,
        kernels,
    ]
    if torch.cuda.is_available():
        findings.append(_driver())
    return Report((*findings, *_gpus(), *(_checks() if check else ())))
