"""The prebuilt kernels on disk: the manifest, the files of compiled images, and their digests.

`cubins/manifest.json` says of every variant of every kernel which promises its arguments must keep, and where its image for
each host and architecture lies. An image file, `cubins/<host>/<operation>.cubins`, is a row of zlib streams; those of a variant after its first have the end
of the first image as their dictionary. An image holds machine code for the host's processor too, which the driver runs: an image of
another host would crash the process, so a host reads only the files of its own folder, and a file is hashed before the driver sees
a byte of it.
"""

import hashlib
import json
import platform
import sys
import threading
import zlib
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

FORMAT = 1
DICTIONARY = 2**15  # bytes of another architecture's image that an image may be packed with


def folder_of_package(module: str) -> Path:
    """Where a build puts the kernels of the package whose `shared` a module belongs to; packages may share this very file."""
    package = sys.modules[module.rpartition(".shared.")[0]]
    return Path(package.__path__[0]).absolute() / "cubins"


class ArtifactError(RuntimeError):
    """A file of the package is missing, damaged, or of another format."""


class Parameter(NamedTuple):
    """One launch parameter of a variant. For an array: lengths and strides in elements, `align` in bytes; None is any value."""

    name: str
    kind: str
    dtype: str
    align: int = 1
    shape: tuple = ()
    shape_divisible: tuple = ()
    shape_min: tuple = ()
    stride: tuple = ()
    stride_divisible: tuple = ()


class Variant(NamedTuple):
    """One compiled form of a kernel. images: architecture -> (offset, stored size, size) in this
    host's file of the operation, and where its dictionary is another image, that one's architecture."""

    name: str
    operation: str
    symbol: str
    parameters: tuple
    constants: dict
    images: dict


def host() -> str:
    """This machine's instruction set, as the folders of `cubins` name it."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def _tuples(value):
    return tuple(value) if isinstance(value, list) else value


class Artifacts:
    """The kernels in one folder. Thread-safe; nothing is read before it is asked for.

    Raises ArtifactError when the manifest is missing, is no manifest of this format, or disagrees with the files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = threading.Lock()
        self._manifest: Optional[dict] = None
        self._files: Dict[str, bytes] = {}
        self._variants: Dict[str, List[Variant]] = {}
        self._digest = ""
        self._operations: Optional[frozenset] = None

    @property
    def manifest(self) -> dict:
        if self._manifest is None:
            path = self.folder / "manifest.json"
            try:
                data = path.read_bytes()
                manifest = json.loads(data.decode("utf-8"))
            except FileNotFoundError:
                raise ArtifactError(f"{path} is missing: this copy of the package was built without GPU kernels") from None
            except ValueError as error:
                raise ArtifactError(f"{path} is damaged ({error}). Delete the package and download it again") from None
            if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
                found = manifest.get("format") if isinstance(manifest, dict) else manifest
                raise ArtifactError(f"{path} has format {found!r}, expected {FORMAT}. Delete the package and download it again")
            missing = [name for name in ("architectures", "files", "kernels") if not isinstance(manifest.get(name), dict)]
            if missing:
                raise ArtifactError(f"{path} is damaged (no {', '.join(missing)}). Delete the package and download it again")
            self._digest = hashlib.sha256(data).hexdigest()
            self._manifest = manifest
        return self._manifest

    @property
    def digest(self) -> str:
        """sha256 of the manifest, which holds those of all images: another build has another."""
        return self._digest if self.manifest else ""

    def architectures(self) -> List[str]:
        """What this host has images for, e.g. ['sm_80', 'sm_90']."""
        return list(self.manifest["architectures"].get(host(), ()))

    def operations(self) -> frozenset:
        """The operations whose kernels this package has."""
        if self._operations is None:
            self._operations = frozenset(entry["operation"] for entries in self.manifest["kernels"].values() for entry in entries)
        return self._operations

    def variants(self, kernel: str) -> List[Variant]:
        """The variants of a kernel, the preferred one first."""
        if kernel not in self._variants:
            self._variants[kernel] = self._read_variants(kernel)
        return self._variants[kernel]

    def _read_variants(self, kernel: str) -> List[Variant]:
        entries = self.manifest["kernels"].get(kernel)
        if entries is None:
            raise ArtifactError(f"the manifest has no kernel {kernel!r}; it has {', '.join(sorted(self.manifest['kernels']))}")
        return [
            Variant(
                name=entry["name"],
                operation=entry["operation"],
                symbol=entry["symbol"],
                parameters=tuple(Parameter(**{k: _tuples(v) for k, v in p.items()}) for p in entry["parameters"]),
                constants=entry["constants"],
                images=entry["images"].get(host(), {}),
            )
            for entry in entries
        ]

    def verify(self) -> None:
        """Reads this host's files and compares their digests with the manifest. Raises ArtifactError at the first that differs."""
        for name in self.manifest["files"]:
            if name.startswith(host() + "/"):
                self._file(name)

    def image(self, variant: Variant, architecture: str) -> bytes:
        """The cubin of a variant for one architecture, from a file whose digest was right."""
        offset, stored, size, *base = variant.images[architecture]
        unpacker = zlib.decompressobj(zdict=self.image(variant, base[0])[-DICTIONARY:]) if base else zlib.decompressobj()
        data = unpacker.decompress(self._file(f"{host()}/{variant.operation}.cubins")[offset : offset + stored])
        if len(data) != size:
            raise ArtifactError(f"the image of {variant.name} for {architecture} has {len(data)} bytes, expected {size}")
        return data

    def _file(self, name: str) -> bytes:
        with self._lock:
            if name not in self._files:
                path = self.folder / name
                try:
                    data = path.read_bytes()
                except OSError as error:
                    raise ArtifactError(f"{path} cannot be read ({error.strerror}). Delete the package and download it again") from None
                found, expected = hashlib.sha256(data).hexdigest(), self.manifest["files"][name]
                if found != expected:
                    raise ArtifactError(
                        f"{path} is damaged: sha256 {found[:16]}..., expected {expected[:16]}.... Delete the package and download it again"
                    )
                self._files[name] = data
            return self._files[name]
