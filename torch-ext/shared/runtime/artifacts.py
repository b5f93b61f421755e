"""The prebuilt kernels on disk: the manifest, the files of compiled images, and their digests.

`cubins/manifest.json` lists every variant of every kernel, with the promises that its arguments must keep and the place of its image for
each host and architecture. An image file, `cubins/<operation>.cubins`, is a row of xz streams, one for each architecture or for two that
are alike (tools/pack.py). A stream has a part for each architecture and host: the images of all variants, a sixth of their size packed so.
A GPU needs one part, and unpacks the stream up to its end when the first image is asked for: on one core of a server 6 ms for each MB of
the part, and 1 ms for each MB before it, which is nearly the same. The driver runs an image's code for the host's processor, and another
host's would crash the process: only this host's parts are read, and a file is hashed first.

The manifest has the digests of these files; metadata.json, beside `cubins` in a build or an installed clone, has the manifest's. Sources
that run in place have no metadata.json: there a manifest is checked by its form alone.
"""

import base64
import hashlib
import json
import os
import platform
import re
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Tuple

__all__ = ["ArtifactError", "Artifacts", "BuiltVariant", "KernelMissing", "Parameter", "folder_of_package", "host"]

try:
    import lzma
except ImportError:  # torch runs on such a Python, so the package must be importable too
    lzma = None  # type: ignore[assignment]

FORMAT = 4
UNPACKED = 2**23  # bytes of unpacked streams that stay in memory: the kernels of a training step are loaded in its first pass
UNPACKERS = 4  # threads that unpack ahead
UNPACKER_MEMORY = 2**26  # bytes that unpacking a stream may take
LARGEST = 2**62  # no number of a manifest reaches it
DOWNLOAD = "Delete the package and download it again"
NO_LZMA = (
    "this Python has no module lzma, which unpacks the kernels: it was built where liblzma's headers were not. Install them (liblzma-dev "
    "or xz-devel) and build Python again, or take a Python that has it (conda's, uv's, a Linux distribution's)"
)
ELF = struct.Struct("<4s28xQQ8xH2xH2x")  # header: mark, places of the tables of segments and sections, lengths of the tables
SEGMENT, SECTION = struct.Struct("<8xQ16xQ16x"), struct.Struct("<4xI16xQQ24x")  # offset and size in the file; a section's kind before them
NO_BITS = 8  # kind of a section that takes no room in the file
FILE_NAME = re.compile(r"\w+\.cubins", re.ASCII)  # an operation


def folder_of_package(module: str) -> Path:
    """Returns where a build puts the kernels of the package whose `shared` a module belongs to; packages may share this very file."""
    package = sys.modules[module.rpartition(".shared.")[0]]
    return Path(package.__path__[0]).absolute() / "cubins"


class ArtifactError(RuntimeError):
    """A file of the package is missing, damaged, or of another format."""


class KernelMissing(ArtifactError):
    """The package ships no kernel of this name."""


class Parameter(NamedTuple):
    """One launch parameter of a variant. For an array: lengths and strides in elements, `align` in bytes; None is any value."""

    name: str
    kind: str
    dtype: str
    align: int = 1
    shape: Tuple[Optional[int], ...] = ()
    shape_divisible: Tuple[int, ...] = ()
    shape_min: Tuple[int, ...] = ()
    shape_max: Tuple[Optional[int], ...] = ()
    stride: Tuple[Optional[int], ...] = ()
    stride_divisible: Tuple[int, ...] = ()


class BuiltVariant(NamedTuple):
    """One compiled form of a kernel. images: architecture -> (offset, size) in the part of that architecture and this host, of the
    operation's file. waits: whether the kernel itself waits for the launch before it (kernel_src/prebuild.py)."""

    name: str
    operation: str
    symbol: str
    parameters: Tuple[Parameter, ...]
    constants: Dict[str, int]
    images: Dict[str, Any]
    waits: bool = False


def host() -> str:
    """This machine's instruction set, as the manifest names it."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def _contents(path: Path) -> Optional[bytes]:
    """The bytes of a file; None where there is none. Raises ArtifactError where it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}). {DOWNLOAD}") from None


class _Wrong(ValueError):
    """A part of the manifest is not as it should be; the text says which."""


def _expect(right: bool, where: str) -> None:
    if not right:
        raise _Wrong(where)


def _is_number(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < LARGEST


def _without_doubles(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    """Makes a JSON object of its pairs. Raises _Wrong where a key stands there twice: Python would take the last one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Wrong(f"a key stands twice among {', '.join(name for name, _ in pairs)[:100]!r}")
    return found


def _is_whole(image: bytes) -> bool:
    """Tells whether bytes are an ELF file that ends within them. The driver is told no size and reads as far as the headers say."""
    if len(image) < ELF.size:
        return False
    mark, segments, sections, segment_count, section_count = ELF.unpack_from(image)
    tables = image[segments : segments + SEGMENT.size * segment_count], image[sections : sections + SECTION.size * section_count]
    if mark != b"\x7fELF" or tuple(map(len, tables)) != (SEGMENT.size * segment_count, SECTION.size * section_count):
        return False
    parts = [*SEGMENT.iter_unpack(tables[0]), *(place for kind, *place in SECTION.iter_unpack(tables[1]) if kind != NO_BITS)]
    return all(offset + size <= len(image) for offset, size in parts)


def _check_parameter(parameter: Any, where: str) -> None:
    _expect(isinstance(parameter, dict) and set(parameter) <= set(Parameter._fields), where)
    _expect(all(isinstance(parameter.get(name), str) for name in ("name", "dtype")), where)
    _expect(parameter.get("kind") in ("array", "scalar"), f"{where}.kind")
    if parameter["kind"] == "scalar":
        return
    _expect(_is_number(parameter.get("align"), 1), f"{where}.align")
    lists: List[Any] = [parameter.get(name) for name in ("shape", "stride", "shape_divisible", "stride_divisible", "shape_min")]
    lists.append(parameter.get("shape_max") or parameter.get("shape"))
    _expect(all(isinstance(found, list) for found in lists) and len(set(map(len, lists))) == 1, f"{where}'s shapes and strides")
    for name in ("shape", "stride", "shape_max"):
        _expect(all(value is None or _is_number(value) for value in parameter.get(name) or ()), f"{where}.{name}")
    for name, least in (("shape_divisible", 1), ("stride_divisible", 1), ("shape_min", 0)):
        _expect(all(_is_number(value, least) for value in parameter[name]), f"{where}.{name}")


def _check_places(places: Any, numbers: int, where: str) -> Dict[str, List[int]]:
    """Expects by architecture a list of so many numbers, and returns it."""
    _expect(isinstance(places, dict) and bool(places), where)
    for architecture, place in places.items():
        _expect(isinstance(place, list) and len(place) == numbers and all(map(_is_number, place)), f"{where}.{architecture}")
    return places


def _check_manifest(manifest: Dict[str, Any]) -> None:
    """Raises _Wrong where anything that this module or the launcher reads is not there or of another kind."""
    for name in ("architectures", "files", "streams", "kernels"):
        _expect(isinstance(manifest.get(name), dict), name)
    for host_name, names in manifest["architectures"].items():
        _expect(isinstance(names, list) and all(isinstance(name, str) for name in names), f"architectures.{host_name}")
    for name, digest in manifest["files"].items():
        _expect(FILE_NAME.fullmatch(name) is not None and isinstance(digest, str), f"files.{name}")
        hosts = manifest["streams"].get(name)
        _expect(isinstance(hosts, dict) and bool(hosts), f"streams.{name}")
        for host_name, places in hosts.items():
            _check_places(places, 4, f"streams.{name}.{host_name}")
    parameters: Any = manifest.get("parameters")
    _expect(isinstance(parameters, list), "parameters")
    for i, parameter in enumerate(parameters):
        _check_parameter(parameter, f"parameters[{i}]")
    for kernel, entries in manifest["kernels"].items():
        _expect(isinstance(entries, list), f"kernels.{kernel}")
        for number, entry in enumerate(entries):
            where = f"kernels.{kernel}[{number}]"
            _expect(isinstance(entry, dict), where)
            _expect(all(isinstance(entry.get(name), str) for name in ("name", "operation", "symbol")), where)
            _expect(entry["symbol"].isascii() and entry["symbol"].isidentifier(), f"{where}.symbol")
            places = entry.get("parameters")
            _expect(isinstance(places, list) and all(_is_number(i) and i < len(parameters) for i in places), f"{where}.parameters")
            constants, images = entry.get("constants"), entry.get("images")
            _expect(isinstance(constants, dict), f"{where}.constants")
            _expect(all(isinstance(value, int) and abs(value) < LARGEST for value in constants.values()), f"{where}.constants")
            _expect(isinstance(images, dict), f"{where}.images")
            _expect(isinstance(entry.get("waits", False), bool), f"{where}.waits")
            for host_name, found in images.items():
                file, there = f"{entry['operation']}.cubins", f"{where}.images.{host_name}"
                _expect(file in manifest["files"], there)
                parts = manifest["streams"][file].get(host_name, {})
                for name, (offset, size) in _check_places(found, 2, there).items():
                    _expect(name in parts and offset + size <= parts[name][3], f"{there}.{name}")


def _variant(entry: Dict[str, Any], parameters: List[Dict[str, Any]]) -> BuiltVariant:
    """parameters: those that variants share, of which an entry has the places."""

    def values(parameter: Dict[str, Any]) -> Dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in parameter.items()}

    return BuiltVariant(
        **{name: entry[name] for name in ("name", "operation", "symbol", "constants")},
        parameters=tuple(Parameter(**values(parameters[place])) for place in entry["parameters"]),
        images=entry["images"].get(host(), {}),
        waits=entry.get("waits", False),
    )


class Artifacts:
    """The kernels in one folder. Thread-safe; nothing is read before it is asked for. Raises ArtifactError, which names the file and the
    cure, when the manifest is missing, is no manifest of this format, or disagrees with metadata.json or with the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._manifest: Optional[Dict[str, Any]] = None
        self._verified: set = set()
        self._streams: Dict[Tuple[str, str], bytes] = {}  # by file and architecture, packed, with what else the stream holds
        self._unpacked: Dict[Tuple[str, str], bytes] = {}  # the latest ones, the last used at the end
        self._unpacking: Dict[Tuple[str, str], threading.Lock] = {}  # held while a stream is unpacked
        self._variants: Dict[str, List[BuiltVariant]] = {}
        self._digest = ""
        self._operations: Optional[FrozenSet[str]] = None

    @property
    def _path(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def manifest(self) -> Dict[str, Any]:
        if self._manifest is None:
            self._manifest = self._read_manifest()
        return self._manifest

    def _compare(self, data: Optional[bytes]) -> None:
        """Raises ArtifactError unless these bytes, None for no file, are what metadata.json lists as the manifest, where there is one."""
        path = self.folder.parent / "metadata.json"
        described = _contents(path)
        if described is None:
            return
        try:
            digest = json.loads(described.decode("utf-8"), object_pairs_hook=_without_doubles)["digest"]
            expected = digest["files"].get("cubins/manifest.json", "no such file")
            found = "no such file" if data is None else base64.b64encode(hashlib.new(digest["algorithm"], data).digest()).decode()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ArtifactError(f"{path} is damaged ({type(error).__name__}: {str(error)[:200]}). {DOWNLOAD}") from None
        if found != expected:
            raise ArtifactError(f"{self._path} is damaged: {path} lists {str(expected)[:100]}, found {found}. {DOWNLOAD}")

    def _read_manifest(self) -> Dict[str, Any]:
        data = _contents(self._path)
        self._compare(data)
        if data is None:
            raise ArtifactError(f"{self._path} is missing: this copy of the package was built without GPU kernels")
        try:
            manifest = json.loads(data.decode("utf-8"), object_pairs_hook=_without_doubles)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{self._path} is damaged ({error}). {DOWNLOAD}") from None
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        if type(found) is not int or found != FORMAT:
            raise ArtifactError(f"{self._path} has format {str(found)[:80]}, expected {FORMAT}. {DOWNLOAD}")
        try:
            _check_manifest(manifest)
        except _Wrong as wrong:
            raise ArtifactError(f"{self._path} is damaged (at {str(wrong)[:200]}). {DOWNLOAD}") from None
        self._digest = hashlib.sha256(data).hexdigest()
        return manifest

    @property
    def digest(self) -> str:
        """sha256 of the manifest, which holds those of all images: another build has another."""
        return self._digest if self.manifest else ""

    def architectures(self) -> List[str]:
        """What this host has images for, e.g. ['sm_80', 'sm_90']."""
        return list(self.manifest["architectures"].get(host(), ()))

    def operations(self) -> FrozenSet[str]:
        """The operations whose kernels this package has."""
        if self._operations is None:
            self._operations = frozenset(entry["operation"] for found in self.manifest["kernels"].values() for entry in found)
        return self._operations

    def variants(self, kernel: str) -> List[BuiltVariant]:
        """The variants of a kernel, the preferred one first."""
        if kernel not in self._variants:
            entries = self.manifest["kernels"].get(kernel)
            if entries is None:
                known = ", ".join(sorted(self.manifest["kernels"]))
                raise KernelMissing(
                    f"{self._path} has no kernel {kernel!r}; it has {known}. The package is whole and was built without this one: "
                    "use one that ships it, or name its operation in kernels.toml and build again (make build)"
                )
            self._variants[kernel] = [_variant(entry, self.manifest["parameters"]) for entry in entries]
        return self._variants[kernel]

    def verify(self, architecture: str = "") -> None:
        """Reads all files, compares their digests with the manifest and the places of this host's streams with their lengths.

        architecture: whose images this process will ask for; they come from what is read here, and asking again reads nothing. Raises
        ArtifactError for a file that differs, for one that the manifest does not list, and where this Python cannot unpack them."""
        files = self.manifest["files"]
        if architecture and architecture in self._verified:
            return
        if lzma is None and files:
            raise ArtifactError(NO_LZMA)
        for name in files:
            data, parts = self._read(name), self._parts(name)
            streams = {found: self._cut(data, name, place) for found, place in parts.items()}
            if architecture in streams:
                self._streams[name, architecture] = streams[architecture]
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(".cubins") and name not in files:
                raise ArtifactError(f"{self.folder / name} is not listed in {self._path}. {DOWNLOAD}")
        self._verified.add(architecture)

    def image(self, variant: BuiltVariant, architecture: str) -> bytes:
        """The cubin of a variant for one architecture, from a file whose digest was right. Raises ArtifactError where it is none."""
        offset, size = variant.images[architecture]
        name = f"{variant.operation}.cubins"
        image = self._stream(name, architecture)[offset : offset + size]
        if not _is_whole(image):
            raise ArtifactError(f"{self.folder / name}: {variant.name}, {size} bytes by {self._path}, is no whole ELF file. {DOWNLOAD}")
        return image

    def _stream(self, name: str, architecture: str) -> bytes:
        """The images of an operation for one architecture, one after the other."""
        key = name, architecture
        with self._lock:
            unpacking = self._unpacking.setdefault(key, threading.Lock())
        with unpacking:  # whoever asks for another stream does not wait for this one
            with self._lock:
                data = self._unpacked.pop(key, None)
            if data is None:
                data = self._unpack(name, architecture)
            with self._lock:
                self._unpacked[key] = data
                while len(self._unpacked) > 1 and sum(map(len, self._unpacked.values())) > UNPACKED:
                    del self._unpacked[next(iter(self._unpacked))]
        return data

    def unpack_ahead(self, architecture: str) -> None:
        """Unpacks an architecture's streams on other threads: a model's take 50 ms one after the other, and its first step needs most of
        them. Does nothing for a package whose streams would not all stay in memory."""
        parts = {name: self._parts(name).get(architecture) for name in self.manifest["streams"]}
        sizes = {name: place[3] for name, place in parts.items() if place}
        if sum(sizes.values()) > UNPACKED:
            return
        pool = ThreadPoolExecutor(UNPACKERS, "bastile-unpack")
        for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
            pool.submit(self._stream, name, architecture)  # whoever asks for a stream gets its error
        pool.shutdown(wait=False)

    def _parts(self, name: str) -> Dict[str, List[int]]:
        """This host's parts of a file: architecture -> [start of the stream, its length, start of the part once unpacked, its length]."""
        return self.manifest["streams"][name].get(host(), {})

    def _unpack(self, name: str, architecture: str) -> bytes:
        if lzma is None:
            raise ArtifactError(NO_LZMA)
        place = self._parts(name)[architecture]
        packed, (start, size) = self._streams.get((name, architecture)), place[2:]
        if packed is None:
            packed = self._streams[name, architecture] = self._cut(self._read(name), name, place)
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, UNPACKER_MEMORY)
        try:
            data = unpacker.decompress(packed, start + size)[start:]
        except (lzma.LZMAError, EOFError) as error:
            raise ArtifactError(f"{self.folder / name}: the images for {architecture}: {error}. {DOWNLOAD}") from None
        if len(data) != size:
            raise ArtifactError(
                f"{self.folder / name}: the images for {architecture} have not the {size} bytes that {self._path} gives them. {DOWNLOAD}"
            )
        return data

    def _cut(self, data: bytes, name: str, place: List[int]) -> bytes:
        offset, stored = place[:2]
        if offset + stored > len(data):
            raise ArtifactError(f"{self._path} is damaged (the streams of {name}). {DOWNLOAD}")
        return data[offset : offset + stored]

    def _read(self, name: str) -> bytes:
        """A file of images. Raises ArtifactError unless its digest is the manifest's."""
        path = self.folder / name
        data = _contents(path)
        if data is None:
            raise ArtifactError(f"{path} is missing. {DOWNLOAD}")
        found, expected = hashlib.sha256(data).hexdigest(), self.manifest["files"][name]
        if found != expected:
            raise ArtifactError(f"{path} is damaged: sha256 {found[:16]}..., expected {expected[:16]}.... {DOWNLOAD}")
        return data
