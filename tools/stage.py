"""Writes each package as one self-contained tree, as kernel-builder wants it: `python -m tools.stage`.

build/stage/<name>: build.toml, flake.nix, flake.lock, CARD.md, and torch-ext/<name> with the package's own files, what it imports of
torch-ext/shared, and its compiled kernels. kernel-builder copies the folder of its flake and nothing beside it, so what packages share must
lie inside. It builds what git knows of, and git ignores build/, so each tree is a repository of its own, with one commit.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.assemble import git, sources
from tools.card import IMAGE
from tools.kernel_package import ROOT, Package, PackageError, package_folders, read_package
from tools.kernel_sources import SourceError

AUTHOR = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in (("NAME", "Bastile"), ("EMAIL", "bastile"))}


def commit(folder: Path, package: Package) -> None:
    """Makes a tree a git repository with one commit, which names that of its sources; the same tree gives the same commit.

    Raises:
        PackageError: where git fails or is not installed.
    """
    source = git(package, "rev-parse", "HEAD")
    changed = " with uncommitted changes" if source and git(package, "status", "--porcelain") else ""
    date = git(package, "log", "-1", "--format=%cI") or "2000-01-01T00:00:00Z"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # of a hook that calls this
    environment |= AUTHOR | {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    message = f"{package.name} {package.branch}, staged from {source or 'sources outside of git'}{changed}"
    settings = ["-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q", "-b", "main"], ["add", "--all", "--force"], ["commit", "-q", "-m", message]):
        try:
            subprocess.run(["git", *settings, *words], cwd=folder, env=environment, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = str(getattr(error, "stderr", "") or error).strip()
            raise PackageError(f"{folder} cannot be made a git repository, and kernel-builder takes no other: {why}") from error


def stage(package: Package, root: Path = ROOT) -> Path:
    """Writes the tree of a package anew, commits it and returns its folder.

    Raises:
        PackageError: when its kernels are not compiled, it has no card, or git fails.
    """
    files = sources(package, "cuda")
    target = root / "build" / "stage" / package.name
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    for name, data in files.items():
        path = fresh / "torch-ext" / package.module / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for name in ("build.toml", "flake.nix", "flake.lock", "CARD.md"):
        if not (package.folder / name).is_file():
            raise PackageError(f"{package.folder / name} not found; kernel-builder wants one beside build.toml")
        shutil.copy(package.folder / name, fresh)
    card = fresh / "CARD.md"
    card.write_text(IMAGE.sub("", card.read_text(encoding="utf-8")), encoding="utf-8")  # kernel-builder uploads no images
    commit(fresh, package)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    return target


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.stage", description=__doc__.splitlines()[0])
    parser.add_argument("--package", help="the folder that holds build.toml; default: every package of this repository")
    options = parser.parse_args(arguments)
    try:
        for folder in package_folders(options.package):
            package = read_package(folder)
            print(f"staged {package.name}: {stage(package).relative_to(ROOT)}")
            if not package.upstream:
                print("  its build.toml names no `upstream`, so its page will not say where the sources are (docs/hub.md)")
    except (PackageError, SourceError) as error:
        print(f"Not staged. {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
