"""A kernel package as it lies on disk: what build.toml says and what its built variants offer."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.kernels_adapter import Build, parse_variant

ROOT = Path(__file__).resolve().parent.parent


class PackageError(Exception):
    """The package cannot be used as it is; the text says what was found, what was expected and what to do."""


@dataclass(frozen=True)
class Package:
    """The folder that holds build.toml and `build/`. upstream, source: where the kernels come from, and where this form of them lies."""

    folder: Path
    name: str
    version: int
    license: str
    repo_id: str | None
    backends: tuple[str, ...]
    upstream: str | None = None
    source: str | None = None

    @property
    def module(self) -> str:
        """The name of its Python package."""
        return self.name.replace("-", "_")

    @property
    def sources(self) -> Path:
        return self.folder / "torch-ext" / self.module

    @property
    def shared(self) -> Path:
        """What all packages share: in its own torch-ext where it has a copy (a staged package), else in the repository's."""
        own = self.folder / "torch-ext" / "shared"
        return own if own.is_dir() else ROOT / "torch-ext" / "shared"

    @property
    def build(self) -> Path:
        return self.folder / "build"

    @property
    def branch(self) -> str:
        return f"v{self.version}"

    def variants(self) -> list[Path]:
        """The folders under `build/` that `kernels` takes for variants (`torch-cuda`, ...), sorted."""
        if not self.build.is_dir():
            return []
        return sorted(entry for entry in self.build.iterdir() if entry.is_dir() and is_variant(entry.name))


def is_variant(name: str) -> bool:
    if not re.fullmatch(r"[a-z0-9-]+", name):  # parse_variant takes "torch-cuda.new", a build that was killed, too
        return False
    try:
        parse_variant(name)
    except ValueError:
        return False
    return True


def package_folders(chosen: str | Path | None = None, root: str | Path = ".") -> list[Path]:
    """The chosen folder; without one every package of the repository: its root and the folders of packages/ that hold a build.toml.

    Raises:
        PackageError: if there is none.
    """
    if chosen is not None:
        return [Path(chosen)]
    found = [path.parent for path in (Path(root) / "build.toml", *sorted(Path(root).glob("packages/*/build.toml"))) if path.is_file()]
    if not found:
        raise PackageError(f"{Path(root).absolute()} holds no package: neither build.toml nor packages/*/build.toml")
    return found


def read_package(folder: str | Path = ".") -> Package:
    """Read `folder`/build.toml.

    Raises:
        PackageError: if it is missing or `kernels` rejects it.
    """
    folder = Path(folder).absolute()
    path = folder / "build.toml"
    if not path.is_file():
        raise PackageError(f"{path} not found; expected the folder of a kernel package (--package)")
    try:
        backends = tuple(str(backend) for backend in Build.open(folder).general.backends)
        general = tomllib.loads(path.read_text(encoding="utf-8"))["general"]
    except (ValueError, KeyError) as error:
        raise PackageError(f"{path} is not a valid build.toml: {error}") from error
    return Package(
        folder=folder,
        name=general["name"],
        version=general["version"],
        license=general["license"],
        repo_id=general.get("hub", {}).get("repo-id"),
        backends=backends,
        upstream=general.get("upstream"),
        source=general.get("source"),
    )


def whole_package(root: str | Path = ROOT) -> Package:
    """The package that pip installs: every family, with the kernels of all packages. It is not published on the Hub."""
    folder = Path(root).absolute()
    return dataclasses.replace(read_package(folder), name="bastile", repo_id=None)


def parse_python(source: str, where: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise PackageError(f"{where} is not valid Python: {error}") from error


def public_names(source: str, where: str) -> list[str]:
    """The names in the `__all__` of a package's `__init__.py`, without running it.

    Raises:
        PackageError: if there is no `__all__`, it is not a list of literals, or another line changes it (`where` names the file).
    """
    tree = parse_python(source, where)
    first = next((node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)) and _mentions_all(node)), None)
    if first is None or first.value is None:
        raise PackageError(f"{where} has no __all__; expected the list of public names, it is what the version promises")
    try:
        names = ast.literal_eval(first.value)
    except ValueError:
        names = None
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise PackageError(f"{where}: __all__ is not a literal list of names; write it out, it is what the version promises")
    if sum(map(_is_all, ast.walk(tree))) > 1 or (isinstance(first, ast.Assign) and len(first.targets) > 1):
        raise PackageError(
            f"{where}: __all__ is used again after line {first.lineno}, so it may have other names than these; write them out once, "
            "they are what the version promises"
        )
    return list(names)


def _is_all(node: ast.AST) -> bool:
    """Tells whether a node names `__all__`: as a variable, in a string as for `globals()`, in an import or in a `global`."""
    found = [getattr(node, name, None) for name in ("id", "value", "name", "asname")]
    return "__all__" in (*found, *(getattr(node, "names", ()) if isinstance(node, ast.Global) else ()))


def _mentions_all(node: ast.Assign | ast.AnnAssign) -> bool:
    """Tells whether an assignment is one to `__all__`."""
    return any(map(_is_all, node.targets if isinstance(node, ast.Assign) else [node.target]))


def leads_out(path: Path, folder: Path) -> bool:
    """Tells whether a path inside a folder is, or goes through, a link to something outside of it."""
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a circle of links
        return True


def layer_names(source: str, where: str) -> list[str]:
    """The public layers of a package's `layers.py`: the classes that it defines, and what it gives a name to."""
    body = parse_python(source, where).body
    classes = [node.name for node in body if isinstance(node, ast.ClassDef)]
    named = [target.id for node in body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in (*classes, *named) if not name.startswith("_")]


def layers_file(variant: Path) -> Path | None:
    """`layers.py` or `layers/__init__.py`, as `kernels` finds them; None if the variant has no layers."""
    return next((path for path in (variant / "layers.py", variant / "layers" / "__init__.py") if path.is_file()), None)


def variant_archs(variant: Path) -> list[str]:
    """The GPU architectures in the variant's metadata.json; empty if it names none.

    Raises:
        PackageError: if metadata.json is missing or not JSON.
    """
    path = variant / "metadata.json"
    try:
        return json.loads(path.read_bytes()).get("backend", {}).get("archs") or []
    except (OSError, ValueError, AttributeError) as error:
        raise PackageError(f"{path} cannot be read: {error}; build the package again") from error
