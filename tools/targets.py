"""What is built: the variants of a package's kernels, and the GPUs and hosts that they are compiled for."""

import dataclasses
import importlib
import platform
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel_src.prebuild import Variant

    Variants = list[tuple[str, Variant]]  # with the operation of each

Targets = Mapping[str, tuple[str, ...]]  # the architectures to build for, by host

# Each host's GPUs: GB200, GH200, Thor and DGX Spark have Arm hosts.
TARGETS = {
    "x86_64": ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"),
    "aarch64": ("sm_90", "sm_100", "sm_103", "sm_110", "sm_121"),
}


class BuildError(Exception):
    """The build failed; the text names the kernel, the architecture and the compiler's message."""


def operations(folder: Path) -> list[str]:
    """The modules of kernel_src that a package ships: kernels.toml, beside its build.toml in `folder`, names them."""
    with (folder / "kernels.toml").open("rb") as file:
        return tomllib.load(file)["operations"]


def operations_of_all(folders: list[Path]) -> list[str]:
    """Lists the operations of several packages, each once."""
    return list(dict.fromkeys(name for folder in folders for name in operations(folder)))


def read_variants(names: list[str]) -> list[tuple[str, "Variant"]]:
    """(operation, variant) of every variant of the named modules. Raises BuildError when two have one name."""
    found = [(name, variant) for name in names for variant in importlib.import_module(f"kernel_src.{name}").variants()]
    seen: dict[str, str] = {}
    for operation, variant in found:
        if variant.name in seen:
            raise BuildError(f"two variants are called {variant.name} (in {seen[variant.name]} and {operation}); names must differ")
        seen[variant.name] = operation
    return found


def parse_targets(text: str | None) -> dict[str, tuple[str, ...]]:
    """`x86_64:sm_90,sm_100 aarch64:sm_90` -> what to build for each host; None: everything. Raises BuildError."""
    if not text:
        return TARGETS
    chosen = {}
    for part in text.split():
        host, _, names = part.partition(":")
        wanted = tuple(names.split(","))
        unknown = [name for name in wanted if name not in TARGETS.get(host, ())]
        if host not in TARGETS or unknown:
            raise BuildError(f"no target {part!r}; there are " + ", ".join(f"{h}:{','.join(a)}" for h, a in TARGETS.items()))
        chosen[host] = wanted
    return chosen


def targets_here() -> dict[str, tuple[str, ...]]:
    """This machine's host and GPU (sm_90 where there is none), and sm_100: enough to try the package out."""
    import torch

    host = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if host not in TARGETS:
        raise BuildError(f"this machine is {host}; kernels are built for {' and '.join(TARGETS)}")
    own = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "sm_90"
    return {host: tuple(dict.fromkeys(name for name in (own, "sm_100") if name in TARGETS[host]))}


def targets_of(variant: "Variant", targets: Targets) -> list[tuple[str, str]]:
    """(host, architecture) of each cubin of a variant."""
    pairs = [(host, architecture) for host, architectures in targets.items() for architecture in architectures]
    return [(host, architecture) for host, architecture in pairs if not variant.targets or architecture in variant.targets]


def architectures(targets: Targets) -> tuple[str, ...]:
    """The architectures of all hosts, each once."""
    return tuple(dict.fromkeys(name for names in targets.values() for name in names))


def variants_of(variants: "Variants", other: str, targets: Targets) -> "Variants":
    """The variants for these targets as another GPU gets them: so that what it will run, its tiles and the ways that a launch takes, can be
    tried on the GPU that is here. Those that it does not get are for nobody here, and the manifest names them still, as its own does: a
    launch that asks for one is to find that it has no image, and takes another way. Raises BuildError."""
    every, here = architectures(TARGETS), architectures(targets)
    if other not in every:
        raise BuildError(f"no architecture {other!r}; there are {', '.join(every)}")
    elsewhere = tuple(name for name in every if name not in here)
    if not elsewhere:
        raise BuildError(f"a build like {other}'s is for the GPUs that are here, not for every target")
    return [(name, dataclasses.replace(v, targets=here if not v.targets or other in v.targets else elsewhere)) for name, v in variants]
