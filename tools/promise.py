"""What a version promises: public names, layers, architectures, operations and kernels, which every later upload to it offers too."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile

from tools.built import MANIFEST, PublishError, names_of, read_kernels
from tools.hub_client import REPO_TYPE, Plan
from tools.kernel_package import Package, PackageError, layer_names, layers_file, public_names
from tools.kernels_adapter import Metadata


@dataclass(frozen=True)
class Promise:
    """What a variant offers, and so what its version promises."""

    names: frozenset[str] = frozenset()
    layers: frozenset[str] = frozenset()
    archs: frozenset[str] = frozenset()
    kernels: frozenset[str] = frozenset()  # `x86_64 sm_90`: the host and architecture of a whole set of compiled kernels
    compiled: frozenset[str] = frozenset()  # `operation swiglu`, `kernel swiglu_forward`

    def missing_from(self, new: Promise) -> list[str]:
        """What `new` no longer offers, in words."""
        archs = self.archs.difference(*(covered(arch) for arch in new.archs))
        kinds = (
            ("public name", self.names - new.names),
            ("layer", self.layers - new.layers),
            ("architecture", archs),
            ("kernels for", self.kernels - new.kernels),
        )
        return [f"{kind} {item}" for kind, gone in kinds for item in sorted(gone)] + sorted(self.compiled - new.compiled, reverse=True)


def covered(arch: str) -> set[str]:
    """The architectures of metadata.json that `arch` stands for as well: "9.0a" is that GPU only, "9.0" its family, "9.0+PTX" all newer."""
    if arch.endswith("a"):
        return {arch}
    number = arch.removesuffix("+PTX").removesuffix("f")
    return {arch, number, f"{number}f", f"{number}a"}


def promise(folder: Path) -> Promise:
    """What the files of a variant offer; a file that is not there offers nothing."""
    init, layers, metadata = folder / "__init__.py", layers_file(folder), folder / "metadata.json"
    return Promise(
        frozenset(public_names(init.read_text(encoding="utf-8"), str(init)) if init.is_file() else ()),
        frozenset(layer_names(layers.read_text(encoding="utf-8"), str(layers)) if layers else ()),
        frozenset((Metadata.read_from_file(metadata).backend.archs or ()) if metadata.is_file() else ()),
        read_kernels(folder),
        read_kernels(folder, names_of),
    )


def published_promise(api: HfApi, repo_id: str, commit: str, variant: str, published: dict[str, RepoFile]) -> Promise | None:
    """What `variant` offers at `commit`; None if nothing that says so is there.

    Raises:
        PublishError: if it cannot be read, and what was promised is unknown.
    """
    described = ("__init__.py", "metadata.json", "layers.py", "layers/__init__.py", MANIFEST)
    names = [name for name in described if f"build/{variant}/{name}" in published]
    if not names:
        return None
    with tempfile.TemporaryDirectory() as cache:
        for name in names:
            filename = f"build/{variant}/{name}"
            api.hf_hub_download(repo_id, filename, repo_type=REPO_TYPE, revision=commit, local_dir=cache)
        try:
            return promise(Path(cache) / "build" / variant)
        except (PackageError, PublishError, ValueError) as error:
            raise PublishError(
                f"build/{variant} of {repo_id} at {commit} cannot be read, so what it promises is not known ({error}); "
                "raise `version` in build.toml and build again"
            ) from error


def check_promise(api: HfApi, package: Package, repo_id: str, variants: Iterable[Path], plan: Plan, published: dict[str, RepoFile]) -> None:
    """What the branch offers now, the new variants offer too.

    Raises:
        PublishError: naming every public name, layer, architecture, operation and kernel that would go.
    """
    broken = []
    for folder in variants:
        new = promise(folder)
        old = published_promise(api, repo_id, plan.parent, folder.name, published) if plan.parent else None
        broken += [f"{folder.name}: {gone}" for gone in (old.missing_from(new) if old else [])]
    if broken:
        raise PublishError(
            f"branch {plan.branch} of {repo_id} promises what this build drops: {'; '.join(broken)}. "
            f"Bring it back, or raise `version` in build.toml from {package.version} to {package.version + 1} and build again"
        )
