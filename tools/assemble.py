"""Puts a package into the form that `kernels` loads: `python -m tools.assemble`, the second part of `make build`.

torch-ext/<name>, and of torch-ext/shared what it imports -> build/torch-<backend>, with `_ops.py` (the name space of the custom operators,
unique to this build) and metadata.json (what the package is, its architectures and the digests of its files). The cubins go into the CUDA
variant only.
"""

import argparse
import ast
import functools
import hashlib
import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path, PurePosixPath

from tools.card import fill_card
from tools.compiler import compiler_identity
from tools.kernel_package import Package, PackageError, leads_out, package_folders, parse_python, read_package
from tools.kernel_sources import SourceError, source_digest
from tools.kernels_adapter import hash_files
from tools.targets import BuildError, operations

SIZE_LIMIT = 20 * 2**20  # bytes of a variant, which every user downloads
SHARED = "shared"  # where a build has the files that packages share

OPS = '''"""The name space of this build's custom operators: unique, so that two builds live side by side in one process."""

import torch

NAMESPACE = "{namespace}"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """`name` -> `namespace::name`."""
    return f"{{NAMESPACE}}::{{op_name}}"
'''


@functools.cache
def imported(name: str, source: bytes) -> frozenset[str]:
    """The modules that a file imports relatively, anywhere in it, as paths without ending from the package's root.

    name: the file's path from there. `from .a import b` gives `a` and `a/b`: b may be a module.
    """
    found: set[str] = set()
    for node in ast.walk(parse_python(source.decode(), name)):
        if isinstance(node, ast.ImportFrom) and node.level:
            parents = PurePosixPath(name).parts[: -node.level]
            module = PurePosixPath(*parents, *(node.module or "").split("."))
            found |= {str(module), *(str(module / alias.name) for alias in node.names)}
    return frozenset(found)


def shared_sources(files: dict[str, bytes], folder: Path) -> dict[str, bytes]:
    """The files of `folder` that a package's own files import, directly or through others of them, by their names in the build; with a
    module the data beside it that has its name.

    So an edit of what a package does not use leaves its build, and its digest, as they were.
    """
    found: dict[str, bytes] = {}
    seen: set[str] = set()
    waiting = [(name, data) for name, data in files.items() if name.endswith(".py")]
    while waiting:
        modules = imported(*waiting.pop()) - seen
        seen |= modules
        for module in modules:
            parts = PurePosixPath(module).parts
            if parts[:1] != (SHARED,):
                continue
            # A package's own __init__ runs when a module of it is imported.
            names = ["/".join((*parts[:i], "__init__.py")) for i in range(1, len(parts) + 1)] + [f"{module}.py", f"{module}.json"]
            for name in names:
                path = folder.joinpath(*PurePosixPath(name).parts[1:])
                if name not in found and path.is_file():
                    found[name] = path.read_bytes()
                    waiting += [(name, found[name])] if name.endswith(".py") else []
    return found


def sources(package: Package, backend: str) -> dict[str, bytes]:
    """The files of a variant by their names. Raises PackageError when the CUDA variant has no kernels, or a file is not the package's."""
    folder = package.sources
    files = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and "__pycache__" not in name and (backend == "cuda" or not name.startswith("cubins/")):
            if leads_out(path, folder):
                raise PackageError(f"{path} is a link to {path.resolve()}, outside of the package, which everyone would get. Copy the file")
            files[name] = path.read_bytes()
    files = dict(sorted((files | shared_sources(files, package.shared)).items()))
    if backend == "cuda":
        check_kernels(package, files)
    size = sum(map(len, files.values()))
    if size > SIZE_LIMIT:
        raise PackageError(f"{folder} has {size / 2**20:.1f} MiB, expected at most {SIZE_LIMIT / 2**20:.0f}. Prebuild fewer variants")
    return files


def check_kernels(package: Package, files: dict[str, bytes]) -> None:
    """The compiled kernels are whole, and what kernels.toml, kernel_src and the compiler would give now.

    Raises:
        PackageError: if not; names the operations.
    """
    folder = package.sources / "cubins"
    again = f"compile the kernels first (make build, or python -m tools.compile --package {package.folder})"
    if "cubins/manifest.json" not in files:
        raise PackageError(f"{folder} has no manifest.json: {again}")
    try:
        manifest = json.loads(files["cubins/manifest.json"])
        listed, compiled = manifest["files"], manifest.get("sources", {})
        built = {entry["operation"] for entries in manifest["kernels"].values() for entry in entries}
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise PackageError(f"{folder / 'manifest.json'} is damaged ({type(error).__name__}: {error}); {again}") from None
    there = {name.removeprefix("cubins/"): hashlib.sha256(data).hexdigest() for name, data in files.items() if name.startswith("cubins/")}
    del there["manifest.json"]
    if there != listed:
        differing = sorted(name for name in there.keys() | listed.keys() if there.get(name) != listed.get(name))
        raise PackageError(f"{folder}: its manifest.json does not describe {', '.join(differing)}; {again}")
    wanted = set(operations(package.folder)) if (package.folder / "kernels.toml").is_file() else built
    if built != wanted:
        raise PackageError(f"{folder} and kernels.toml differ in {', '.join(sorted(built ^ wanted))}; {again}")
    stale = sorted(operation for operation in built if compiled.get(operation) != source_digest(operation))
    if stale:
        raise PackageError(f"{folder}: the source of {', '.join(stale)} in kernel_src has changed since; {again}")
    try:
        identity = compiler_identity()
    except (BuildError, PackageNotFoundError):
        return  # assembled where there is no compiler
    if built and manifest.get("compiler") != identity:
        raise PackageError(f"{folder} was compiled by {manifest.get('compiler')}, and {identity} is installed; {again}")


def architectures(files: dict[str, bytes]) -> list[str]:
    """The architectures of a build as `kernels` writes them: `8.0+PTX` (every newer GPU may load the package, which says itself what it
    lacks), then each architecture; the ones that only match exactly end in `a`."""
    built = json.loads(files["cubins/manifest.json"])["architectures"]
    numbers = sorted({int(name.removeprefix("sm_")) for names in built.values() for name in names})
    exact = [f"{n // 10}.{n % 10}" + ("a" if n >= 90 else "") for n in numbers]
    return ["8.0+PTX", *[arch for arch in exact if arch != "8.0"]]


def git(package: Package, *words: str) -> str | None:
    """What git prints in the package's folder; None when it fails or is not installed."""
    try:
        done = subprocess.run(["git", *words], cwd=package.folder, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def metadata(package: Package, backend: str, unique: str, files: dict[str, bytes]) -> dict:
    """The content of metadata.json, without the digest."""
    described: dict = {"type": backend}
    if backend == "cuda":
        described["archs"] = architectures(files)
    found = {
        "name": package.name,
        "id": unique,
        "version": package.version,
        "license": package.license,
        "python-depends": [],
        "backend": described,
    }
    found |= {name: url for name, url in (("upstream", package.upstream), ("source", package.source)) if url}
    commit = git(package, "rev-parse", "HEAD")
    if commit:
        # `kernels` wants the name of a builder; ours is these tools, of the package's own version.
        found["provenance"] = {
            "kernel-builder": {"version": f"bastile-{package.version}"},
            "kernel": {"commit": commit, "dirty": git(package, "status", "--porcelain") != ""},
        }
    return found


def assemble(package: Package, backend: str) -> Path:
    """Writes build/torch-<backend> anew and returns it. Raises PackageError."""
    files = sources(package, backend)
    content = hashlib.sha256()
    for name, data in files.items():
        content.update(f"{name}\0{len(data)}\0".encode() + data)
    unique = f"_{package.module}_{backend}_{content.hexdigest()[:7]}"
    files["_ops.py"] = OPS.format(namespace=unique).encode()
    target = package.build / f"torch-{backend}"
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    for name, data in files.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    described = metadata(package, backend, unique, files)
    described["digest"] = {"algorithm": "sha256", "files": hash_files(fresh)}
    (fresh / "metadata.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    return target


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.assemble", description=__doc__.splitlines()[0])
    parser.add_argument("--package", help="the folder that holds build.toml; default: every package of this repository")
    parser.add_argument("--backend", action="append", help="only these; default: all that build.toml names")
    options = parser.parse_args(arguments)
    try:
        for folder in package_folders(options.package):
            package = read_package(folder)
            for backend in options.backend or package.backends:
                print(f"assembled {package.name}: {assemble(package, backend).relative_to(package.folder)}")
            fill_card(package)
    except (PackageError, SourceError) as error:
        print(f"Not assembled. {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
