"""A build on disk, as it is uploaded: its variants, whole and of a clean commit, and their files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from tools.kernel_package import Package, leads_out
from tools.kernels_adapter import Digest, DigestValidationError, Metadata
from tools.targets import TARGETS

MANIFEST = "cubins/manifest.json"

NOT_IN_DIGEST = ("metadata.json", "metadata.json.sigstore")


class PublishError(Exception):
    """The package was not uploaded; the text says what was found, what was expected and what to do."""


def read_variant(folder: Path, package: Package, allow_dirty: bool) -> Metadata:
    """metadata.json of a variant that is complete and fits build.toml.

    Raises:
        PublishError: if anything about the variant is not as its metadata.json and build.toml say.
    """
    path = folder / "metadata.json"
    if not path.is_file():
        raise PublishError(f"{path} is missing: the build is incomplete; build again")
    try:
        metadata = Metadata.read_from_file(path)
    except ValueError as error:
        raise PublishError(f"{path} cannot be parsed by kernels: {error}; build again") from error
    found = (str(metadata.name), metadata.version, str(metadata.backend.backend_type))
    if found[:2] != (package.name, package.version) or found[2] not in package.backends:
        wanted = f"{package.name}, version {package.version}, one of {', '.join(package.backends)}"
        raise PublishError(f"{path} is for {found[0]}, version {found[1]}, {found[2]}; build.toml says {wanted}; build again")
    check_digest(folder, metadata)
    if not (folder / "__init__.py").is_file():
        raise PublishError(f"{folder / '__init__.py'} is missing; expected the module with the public names; build again")
    git = metadata.provenance and metadata.provenance.kernel
    if not allow_dirty and (git is None or metadata.provenance.dirty):
        tree = f"a tree with uncommitted changes (on top of {git.commit})" if git else "no git repository (it has no provenance)"
        raise PublishError(
            f"{path}: built from {tree}, so it could not be built again; "
            "commit, build and publish again, or pass --allow-dirty for a local trial"
        )
    return metadata


def kernels_of(manifest: dict) -> frozenset[str]:
    """`x86_64 sm_90` for every host and architecture of which a manifest has all images: those of each variant that is not for others
    only, and one of each operation at least."""
    entries = [entry for found in manifest["kernels"].values() for entry in found]
    pairs = {(host, name) for entry in entries for host, images in entry["images"].items() for name in images}
    built: dict[str, set[tuple[str, str]]] = {}
    for entry in entries:
        mine = {(host, name) for host, images in entry["images"].items() for name in images}
        built.setdefault(entry["operation"], set()).update(mine)
        targets = entry.get("targets")
        pairs -= {(host, name) for host, name in pairs - mine if not targets or name in targets}
    for found in built.values():
        pairs &= found
    return frozenset(f"{host} {name}" for host, name in pairs)


def names_of(manifest: dict) -> frozenset[str]:
    """`operation swiglu` for every operation that has compiled kernels, and `kernel swiglu_forward` for each of these."""
    built = {name: entries for name, entries in manifest["kernels"].items() if entries}
    operations = {entry["operation"] for entries in built.values() for entry in entries}
    return frozenset({f"operation {name}" for name in operations} | {f"kernel {name}" for name in built})


def check_links(paths: Iterable[Path], folder: Path) -> None:
    """Nothing of what is uploaded lies outside of `folder`.

    Raises:
        PublishError: naming the first link that leads out of it.
    """
    for path in sorted(paths):
        if leads_out(path, folder):
            raise PublishError(
                f"{path} is a link to {os.path.realpath(path)}, outside of {folder}; put the file itself there and build again"
            )


def check_complete(variant: Path, allow_partial: bool) -> None:
    """A variant with compiled kernels has them for every host and architecture.

    Raises:
        PublishError: naming those it lacks, unless a partial build is allowed.
    """
    wanted = {f"{host} {name}" for host, names in TARGETS.items() for name in names}
    lacking = sorted(wanted - read_kernels(variant)) if (variant / MANIFEST).is_file() and not allow_partial else []
    if lacking:
        raise PublishError(
            f"{variant} has not all kernels for {', '.join(lacking)}; build for all of them (make build), "
            "or pass --allow-partial for a trial of your own"
        )


def check_digest(folder: Path, metadata: Metadata) -> None:
    """Every file of the variant is in the digest of metadata.json with this content, and no other.

    Raises:
        PublishError: naming up to five files that are missing, changed or unknown.
    """
    if metadata.digest is None:
        raise PublishError(f"{folder / 'metadata.json'} has no digest; expected the sha256 of every file; build again")
    try:
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, folder))
    except DigestValidationError as error:
        problems = sorted(str(violation) for violation in error.violations)
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        text = "; ".join(problems[:5])
        raise PublishError(f"{folder} is not what its metadata.json describes: {text}{more}; build again") from error


def read_kernels(folder: Path, find: Callable[[dict], frozenset[str]] = kernels_of) -> frozenset[str]:
    """What `find` says of a variant's manifest; empty without one. Raises PublishError when it cannot be read."""
    path = folder / MANIFEST
    try:
        return find(json.loads(path.read_bytes())) if path.is_file() else frozenset()
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise PublishError(f"{path} cannot be read ({type(error).__name__}: {error}); build again") from error


def read_build(package: Package, allow_dirty: bool = False, allow_partial: bool = False) -> dict[Path, Metadata]:
    """The variants to upload.

    Raises:
        PublishError: if the build is incomplete, has a link to something outside of it, does not fit build.toml, is not of a clean commit
            (and `allow_dirty` is not set), or lacks kernels for an architecture (and `allow_partial` is not set).
    """
    check_links(package.build.rglob("*"), package.build)
    variants = {folder: read_variant(folder, package, allow_dirty) for folder in package.variants()}
    built = {str(metadata.backend.backend_type) for metadata in variants.values()}
    missing = [backend for backend in package.backends if backend not in built]
    if missing:
        raise PublishError(
            f"{package.build} has no variant for {', '.join(missing)}; build.toml names the backends "
            f"{', '.join(package.backends)}, and {', '.join(sorted(built)) or 'none'} are built; build the others"
        )
    if not (package.build / "CARD.md").is_file():
        raise PublishError(f"{package.build / 'CARD.md'} is missing; fill it with: python -m tools.card")
    for folder in variants:
        check_complete(folder, allow_partial)
    return variants


def files_to_upload(variants: dict[Path, Metadata]) -> dict[str, Path]:
    """{path in the repository: file} for the version branch."""
    files = {}
    for folder, metadata in variants.items():
        names = [*metadata.digest.files, *(name for name in NOT_IN_DIGEST if (folder / name).is_file())]
        files.update({f"build/{folder.name}/{name}": folder / name for name in names})
    return files


def benchmark_files(package: Package) -> dict[str, Path]:
    """{path in the repository: file} for the branch of the benchmarks, beside those of the version.

    A result, a plot or a subfolder is not a source: `kernels benchmark` reads the scripts beside each other only. It runs them all against
    this package, so those of operations that others ship, which are links beside the rest, stay out.
    """
    paths = sorted(path for path in (package.folder / "benchmarks").glob("*.py") if path.is_file())
    check_links(paths, package.folder)
    return {f"benchmarks/{path.name}": path for path in paths if not path.is_symlink()}
