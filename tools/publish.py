"""Upload a built kernel package to the Hub.

    python -m tools.publish [--package DIR] [--repo-id ID] [--endpoint URL] [--token T] [--dry-run] [--allow-dirty] [--allow-partial]

`build/<variant>/**` goes to branch `v<version>` in one commit, and nothing else: `kernels download --all-variants` fetches `build/`
alone, and huggingface_hub then takes a branch that has more for half downloaded. The same and `benchmarks/*.py` go to branch
`v<version>-bench`, for `kernels benchmark --branch`, and `build/CARD.md` with its images to `main` as README.md. Users of a branch see the
old package or the new one, never a mixture. A run that was killed is simply repeated: contents that arrived are not sent again, a branch
that is up to date gets no commit.

A version is a promise: what `v1` offers (public names, layers, GPU architectures, operations and their kernels, compiled for each host and
architecture) every later upload to `v1` offers too. The first one offers kernels for every target of tools.compile.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import HfApi
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tools.built import PublishError, benchmark_files, files_to_upload, read_build
from tools.hub_client import (
    MAIN,
    REPO_TYPE,
    Plan,
    checked_token,
    hub_branches,
    hub_errors,
    hub_files,
    make_plan,
    prepare_branch,
    upload,
)
from tools.kernel_package import Package, PackageError, package_folders, read_package
from tools.kernels_adapter import Metadata
from tools.promise import check_promise


@dataclass
class Report:
    """What `publish` did: the plan of each branch and the commits that were made ({branch: commit})."""

    repo_id: str
    plans: list[Plan]
    commits: dict[str, str] = field(default_factory=dict)


def is_newest(package: Package, branches: dict[str, str]) -> bool:
    """The page on `main` belongs to the newest version: an upload of an older one leaves it alone."""
    versions = [int(branch[1:]) for branch in branches if branch.startswith("v") and branch[1:].isdigit()]
    return package.version >= max(versions, default=0)


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
        api = HfApi(endpoint=endpoint, token=checked_token(token))
        if not dry_run and not api.token:
            raise PublishError(f"no token for {api.endpoint}; set HF_TOKEN, run `hf auth login`, or pass --token")
        with hub_errors(f"reading {repo_id} at {api.endpoint}"):
            plans, fresh = compare(api, package, repo_id, variants)
        report = Report(repo_id, plans)
        if not dry_run:
            apply_plans(api, package, report, fresh)
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
        others[MAIN] = {"README.md": package.build / "CARD.md", **{path.name: path for path in sorted(package.build.glob("*.png"))}}
    for branch, wanted in others.items():
        head = known.get(branch)
        plans.append(make_plan(branch, head, wanted, hub_files(api, repo_id, head) if head else {}))
    return plans, branches is None


def apply_plans(api: HfApi, package: Package, report: Report, fresh: bool) -> None:
    if fresh:
        with hub_errors(f"making the repository {report.repo_id}"):
            api.create_repo(report.repo_id, repo_type=REPO_TYPE, exist_ok=True)
    for plan in report.plans:
        if plan.empty:
            continue
        with hub_errors(f"uploading to {report.repo_id}, branch {plan.branch}"):
            ready = prepare_branch(api, report.repo_id, plan)
            report.commits[plan.branch] = upload(api, report.repo_id, ready, f"{package.name} {package.branch}")


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
