"""Upload a built kernel package to the Hub.

    python -m tools.publish [--package DIR] [--repo-id ID] [--endpoint URL] [--token T] [--dry-run] [--allow-dirty] [--allow-partial]

`build/<variant>/**` goes to branch `v<version>` in one commit, and nothing else: `kernels download --all-variants` fetches `build/`
alone, and huggingface_hub then takes a branch that has more for half downloaded. The same and `benchmarks/*.py` go to branch
`v<version>-bench`, for `kernels benchmark --branch`, and `build/CARD.md` to `main` as README.md. Users of a branch see the old
package or the new one, never a mixture. A run that was killed is simply repeated: contents that arrived are not sent again, a branch
that is up to date gets no commit.

A version is a promise: what `v1` offers (public names, layers, GPU architectures, and compiled kernels by host and architecture)
every later upload to `v1` offers too. The first one offers kernels for every target of tools.compile.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha1, sha256
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tools.kernel_package import Package, PackageError, layer_names, layers_file, package_folders, public_names, read_package
from tools.kernels_adapter import Digest, DigestValidationError, Metadata
from tools.targets import TARGETS

REPO_TYPE = "kernel"
MAIN = "main"
MANIFEST = "cubins/manifest.json"
FILES_A_REQUEST = 32
NOT_IN_DIGEST = ("metadata.json", "metadata.json.sigstore")


class PublishError(Exception):
    """The package was not uploaded; the text says what was found, what was expected and what to do."""


@dataclass(frozen=True)
class Promise:
    """What a variant offers, and so what its version promises."""

    names: frozenset[str] = frozenset()
    layers: frozenset[str] = frozenset()
    archs: frozenset[str] = frozenset()
    kernels: frozenset[str] = frozenset()  # `x86_64 sm_90`: the host and architecture of a whole set of compiled kernels

    def missing_from(self, new: Promise) -> list[str]:
        """What `new` no longer offers, in words."""
        archs = self.archs.difference(*(covered(arch) for arch in new.archs))
        kinds = (
            ("public name", self.names - new.names),
            ("layer", self.layers - new.layers),
            ("architecture", archs),
            ("kernels for", self.kernels - new.kernels),
        )
        return [f"{kind} {item}" for kind, gone in kinds for item in sorted(gone)]


def covered(arch: str) -> set[str]:
    """The architectures of metadata.json that `arch` stands for as well: "9.0a" is that GPU only, "9.0" its family, "9.0+PTX" all newer."""
    if arch.endswith("a"):
        return {arch}
    number = arch.removesuffix("+PTX").removesuffix("f")
    return {arch, number, f"{number}f", f"{number}a"}


@dataclass(frozen=True)
class Plan:
    """What one branch needs to become what is on disk."""

    branch: str
    add: dict[str, Path]  # path in the repository -> file
    delete: list[str]
    same: list[str]
    kept: list[str]  # published variants that this build does not have; another machine may have built them
    parent: str | None  # the commit that was compared; None: the branch is not there yet

    @property
    def empty(self) -> bool:
        """A .gitattributes alone is no reason for a commit: a Hub may write it anew with each."""
        return not self.add and set(self.delete) <= {".gitattributes"}


@dataclass
class Report:
    """What `publish` did: the plan of each branch and the commits that were made ({branch: commit})."""

    repo_id: str
    plans: list[Plan]
    commits: dict[str, str] = field(default_factory=dict)


# The build on disk


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
            f"{path}: built from {tree}, so nobody could build it again; "
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


def read_kernels(folder: Path) -> frozenset[str]:
    """`kernels_of` of a variant's manifest; empty without one. Raises PublishError when it cannot be read."""
    path = folder / MANIFEST
    try:
        return kernels_of(json.loads(path.read_bytes())) if path.is_file() else frozenset()
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise PublishError(f"{path} cannot be read ({type(error).__name__}: {error}); build again") from error


def read_build(package: Package, allow_dirty: bool = False, allow_partial: bool = False) -> dict[Path, Metadata]:
    """The variants to upload.

    Raises:
        PublishError: if the build is incomplete, does not fit build.toml, is not of a clean commit (and `allow_dirty` is not set), or
            lacks kernels for an architecture (and `allow_partial` is not set).
    """
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

    A result, a plot or a subfolder is not a source: `kernels benchmark` reads the scripts beside each other only.
    """
    return {f"benchmarks/{path.name}": path for path in sorted((package.folder / "benchmarks").glob("*.py")) if path.is_file()}


def promise(folder: Path) -> Promise:
    """What the files of a variant offer; a file that is not there offers nothing."""
    init, layers, metadata = folder / "__init__.py", layers_file(folder), folder / "metadata.json"
    return Promise(
        frozenset(public_names(init.read_text(encoding="utf-8"), str(init)) if init.is_file() else ()),
        frozenset(layer_names(layers.read_text(encoding="utf-8"), str(layers)) if layers else ()),
        frozenset((Metadata.read_from_file(metadata).backend.archs or ()) if metadata.is_file() else ()),
        read_kernels(folder),
    )


# The Hub


@contextmanager
def hub_errors(doing: str) -> Iterator[None]:
    """Turn whatever the Hub's client raises into a PublishError (its HTTP library is not the same in every version)."""
    try:
        yield
    except (PublishError, PackageError):
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        hints = {
            401: "the token is not valid for this Hub; set HF_TOKEN or run `hf auth login`",
            403: "the token may not do that; it needs write permission there, and making a repository of type 'kernel' "
            "needs Hugging Face's approval of the account ('Request Kernels Creation')",
            409: "somebody else published in the meantime; run it again",
            412: "somebody else published in the meantime; run it again",
            413: "the Hub refuses requests of this size",
        }
        raise PublishError(f"{doing}: {hints.get(status, 'the Hub refused')} (HTTP {status}: {error})") from error
    except Exception as error:
        raise PublishError(f"{doing}: {type(error).__name__}: {error}; nothing half-done is visible there; run it again") from error


def hub_files(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    try:
        entries = api.list_repo_tree(repo_id, repo_type=REPO_TYPE, revision=revision, recursive=True)
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return {}


def hub_branches(api: HfApi, repo_id: str) -> dict[str, str] | None:
    """{branch: commit}; None if the repository is not there."""
    try:
        refs = api.list_repo_refs(repo_id, repo_type=REPO_TYPE)
    except RepositoryNotFoundError:
        return None
    return {branch.name: branch.target_commit for branch in refs.branches}


def is_same(path: Path, published: RepoFile) -> bool:
    data = path.read_bytes()
    if published.lfs is not None:
        return published.lfs.sha256 == sha256(data).hexdigest()
    return published.blob_id == sha1(b"blob %d\0" % len(data) + data).hexdigest()


def make_plan(branch: str, parent: str | None, files: dict[str, Path], published: dict[str, RepoFile]) -> Plan:
    """Compare `files` with what is `published`.

    On `main` nothing is stale. On other branches what is not in `files` is, but for variants that this build does not have.
    """
    owned = tuple({"/".join(path.split("/")[:2]) + "/" for path in files if path.startswith("build/")})
    same = [path for path in files if path in published and is_same(files[path], published[path])]
    add = {path: file for path, file in sorted(files.items()) if path not in same}
    stale = sorted(path for path in published if path not in files and (path.startswith(owned) or not path.startswith("build/")))
    stale = [] if branch == MAIN else stale
    kept = sorted(path for path in published if path.startswith("build/") and not path.startswith(owned))
    return Plan(branch, add, stale, same, kept, parent)


def published_promise(api: HfApi, repo_id: str, commit: str, variant: str, published: dict[str, RepoFile]) -> Promise | None:
    """What `variant` offers at `commit`; None if nothing that says so is there.

    Raises:
        PublishError: if it cannot be read, so that nobody knows what was promised.
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


def check_promise(
    api: HfApi, package: Package, repo_id: str, variants: Iterable[Path], plan: Plan, published: dict[str, RepoFile]
) -> None:
    """What the branch offers now, the new variants offer too.

    Raises:
        PublishError: naming every public name, layer and architecture that would go.
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


def is_newest(package: Package, branches: dict[str, str]) -> bool:
    """The page on `main` belongs to the newest version: an upload of an older one leaves it alone."""
    versions = [int(branch[1:]) for branch in branches if branch.startswith("v") and branch[1:].isdigit()]
    return package.version >= max(versions, default=0)


# The upload


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """Our bar in place of the client's own ones."""
    disabled = are_progress_bars_disabled()
    disable_progress_bars()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            yield progress
    finally:
        if not disabled:
            enable_progress_bars()


def upload(api: HfApi, repo_id: str, plan: Plan, message: str, progress: Progress) -> str:
    """Make `plan` true with one commit; its id."""
    additions = [CommitOperationAdd(path, file) for path, file in plan.add.items()]
    task = progress.add_task(f"{plan.branch}: {len(additions)} files", total=sum(item.upload_info.size for item in additions))
    for start in range(0, len(additions), FILES_A_REQUEST):
        part = additions[start : start + FILES_A_REQUEST]
        api.preupload_lfs_files(repo_id, part, repo_type=REPO_TYPE, revision=plan.branch, free_memory=False)
        progress.advance(task, sum(item.upload_info.size for item in part))
    operations: list[CommitOperationAdd | CommitOperationDelete] = [*additions, *(CommitOperationDelete(path) for path in plan.delete)]
    commit = api.create_commit(
        repo_id,
        operations,
        repo_type=REPO_TYPE,
        revision=plan.branch,
        commit_message=message,
        parent_commit=plan.parent,
    )
    return commit.oid


def prepare_branch(api: HfApi, repo_id: str, plan: Plan) -> Plan:
    """`plan` with the commit that its branch points to, made first where it is missing."""
    if plan.parent:
        return plan
    head = (hub_branches(api, repo_id) or {})[MAIN]
    if plan.branch == MAIN:
        return replace(plan, parent=head)
    api.create_branch(repo_id, branch=plan.branch, repo_type=REPO_TYPE, revision=head)
    inherited = sorted(path for path in hub_files(api, repo_id, head) if path not in plan.add)
    return replace(plan, parent=head, delete=inherited)


def require_token(token: str | None, endpoint: str) -> str:
    token = token or get_token()
    if not token:
        raise PublishError(f"no token for {endpoint}; set HF_TOKEN, run `hf auth login`, or pass --token")
    return token


def publish(
    folder: str | Path = ".",
    repo_id: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
    *,
    dry_run: bool = False,
    allow_dirty: bool = False,
    allow_partial: bool = False,
    console: Console | None = None,
) -> Report:
    """Upload the package in `folder`.

    Args:
        folder: holds build.toml and `build/`.
        repo_id: by default the one in build.toml.
        endpoint: by default HF_ENDPOINT, else the public Hub.
        token: by default HF_TOKEN or what `hf auth login` stored.
        dry_run: check everything and say what would be uploaded, but write nothing.
        allow_dirty: upload a build of uncommitted sources, or of sources outside any repository.
        allow_partial: upload a build that lacks kernels for some hosts or architectures.

    Raises:
        PublishError: if the build is incomplete, partial or dirty, breaks the version's promise, or the Hub refuses.
    """
    console = console or Console()
    try:
        package = read_package(folder)
        repo_id = repo_id or package.repo_id
        if not repo_id:
            raise PublishError(f"{package.folder / 'build.toml'} has no repo-id under [general.hub]; add it or pass --repo-id")
        variants = read_build(package, allow_dirty, allow_partial)
        api = HfApi(endpoint=endpoint, token=token)
        if not dry_run:
            api = HfApi(endpoint=endpoint, token=require_token(token, api.endpoint))
        with progress_bar(console) as progress:
            with hub_errors(f"reading {repo_id} at {api.endpoint}"):
                plans, fresh = compare(api, package, repo_id, variants)
            report = Report(repo_id, plans)
            if not dry_run:
                apply_plans(api, package, report, fresh, progress)
    except PackageError as error:
        raise PublishError(str(error)) from error
    show(report, api.endpoint, dry_run, console)
    return report


def compare(api: HfApi, package: Package, repo_id: str, variants: dict[Path, Metadata]) -> tuple[list[Plan], bool]:
    """The plan of each branch, and whether the repository has to be made."""
    branches = hub_branches(api, repo_id)
    known = branches or {}
    parent = known.get(package.branch)
    published = hub_files(api, repo_id, parent) if parent else {}
    files, benchmarks = files_to_upload(variants), benchmark_files(package)
    plan = make_plan(package.branch, parent, files, published)
    check_promise(api, package, repo_id, variants, plan, published)
    plans = [plan]
    others = {f"{package.branch}-bench": files | benchmarks} if benchmarks else {}
    if is_newest(package, known):
        others[MAIN] = {"README.md": package.build / "CARD.md"}
    for branch, wanted in others.items():
        head = known.get(branch)
        plans.append(make_plan(branch, head, wanted, hub_files(api, repo_id, head) if head else {}))
    return plans, branches is None


def apply_plans(api: HfApi, package: Package, report: Report, fresh: bool, progress: Progress) -> None:
    if fresh:
        with hub_errors(f"making the repository {report.repo_id}"):
            api.create_repo(report.repo_id, repo_type=REPO_TYPE, exist_ok=True)
    for plan in report.plans:
        if plan.empty:
            continue
        with hub_errors(f"uploading to {report.repo_id}, branch {plan.branch}"):
            ready = prepare_branch(api, report.repo_id, plan)
            report.commits[plan.branch] = upload(api, report.repo_id, ready, f"{package.name} {package.branch}", progress)


def show(report: Report, endpoint: str, dry_run: bool, console: Console) -> None:
    table = Table(title=f"{report.repo_id} at {urlsplit(endpoint).netloc}", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("branch", "folder", "uploaded", "bytes", "removed", "same", "commit"):
        table.add_column(column, justify="right" if column in ("uploaded", "bytes", "removed", "same") else "left", no_wrap=True)
    for plan in report.plans:
        commit = report.commits.get(plan.branch, "-")[:10]
        for folder in sorted({group(path) for path in [*plan.add, *plan.delete, *plan.same]}):
            added = [file for path, file in plan.add.items() if group(path) == folder]
            removed, same = (sum(group(path) == folder for path in paths) for paths in (plan.delete, plan.same))
            size = sum(file.stat().st_size for file in added)
            table.add_row(plan.branch, folder, str(len(added)), f"{size:,}", str(removed), str(same), commit)
    console.print(table)
    kept = sorted({group(path) for plan in report.plans for path in plan.kept})
    if kept:
        console.print(f"Left as published, not in this build: {', '.join(kept)}")
    if all(plan.empty for plan in report.plans):
        console.print("Nothing to do: this build is already published.")
    elif dry_run:
        console.print("Dry run: nothing was uploaded.")


def group(path: str) -> str:
    """`build/<variant>`, `benchmarks`, or the file itself at the top."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "build" else parts[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.publish", description="Upload a built kernel package to the Hub.")
    parser.add_argument("--package", help="folder with build.toml and build/; default: every package of this repository")
    parser.add_argument("--repo-id", help="default: the one in build.toml")
    parser.add_argument("--endpoint", help="default: HF_ENDPOINT, else the public Hub")
    parser.add_argument("--token", help="default: HF_TOKEN or what `hf auth login` stored")
    parser.add_argument("--dry-run", action="store_true", help="check and compare, but write nothing")
    parser.add_argument("--allow-dirty", action="store_true", help="upload a build of uncommitted sources, for a local trial")
    parser.add_argument("--allow-partial", action="store_true", help="upload a build without kernels for every target, for a local trial")
    options = parser.parse_args(arguments)
    try:
        folders = package_folders(options.package)
        if options.repo_id and len(folders) > 1:
            parser.error(f"--repo-id is for one package, and there are {len(folders)}; pass --package")
        for folder in folders:
            publish(
                folder,
                options.repo_id,
                options.endpoint,
                options.token,
                dry_run=options.dry_run,
                allow_dirty=options.allow_dirty,
                allow_partial=options.allow_partial,
            )
    except (PackageError, PublishError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
