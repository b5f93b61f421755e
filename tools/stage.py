"""Writes each package as one self-contained tree, as kernel-builder wants it: `python -m tools.stage`.

build/stage/<name>: build.toml, flake.nix, and torch-ext/<name> with the package's own files, what it imports of torch-ext/shared, and its
compiled kernels. kernel-builder copies the folder of its flake and nothing beside it, so what packages share must lie inside.
"""

import argparse
import shutil
import sys
from pathlib import Path

from tools.assemble import sources
from tools.kernel_package import ROOT, Package, PackageError, package_folders, read_package
from tools.kernel_sources import SourceError


def stage(package: Package, root: Path = ROOT) -> Path:
    """Writes the tree of a package anew and returns its folder. Raises PackageError when its kernels are not compiled."""
    files = sources(package, "cuda")
    target = root / "build" / "stage" / package.name
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    for name, data in files.items():
        path = fresh / "torch-ext" / package.module / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for name in ("build.toml", "flake.nix"):
        shutil.copy(package.folder / name, fresh)
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
    except (PackageError, SourceError) as error:
        print(f"Not staged. {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
