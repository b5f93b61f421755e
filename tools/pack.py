"""The folder `cubins` of a package: its compiled kernels in compressed streams, and the manifest that describes them."""

import hashlib
import json
import lzma
import os
import runpy
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tools.compiler import Job, compiler_identity, write_atomically
from tools.kernel_package import Package
from tools.kernel_sources import source_digest
from tools.targets import Targets

if TYPE_CHECKING:
    from tools.targets import Variants


# Of the streams: machine code has instructions of 16 bytes, in words of 8. Longer matches take a quarter more time and save 0.2 %; stronger
# presets take half as long again for 0.1 %.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 1, "lp": 3, "pb": 4, "nice_len": 273}]


def compress(data: bytes | bytearray) -> bytes:
    """An xz stream without a checksum of its own: the manifest has that of the file."""
    return lzma.compress(data, check=lzma.CHECK_NONE, filters=FILTERS)


# Architectures whose machine code is nearly that of an older one, and which are packed with it. Together with sm_80, sm_86 would take less
# room, and a GPU of it 8 ms instead of 2.5 to unpack 0.4 MB.
ALIKE = {"sm_89": "sm_86", "sm_103": "sm_100", "sm_121": "sm_120"}


class Part(NamedTuple):
    """The images of one file for an architecture and a host."""

    file: str
    architecture: str
    host: str

    def stream(self) -> tuple[str, int]:
        """Identifies the stream that this part is packed in: its file, and the oldest architecture in the stream."""
        return self.file, int(ALIKE.get(self.architecture, self.architecture)[3:])

    def order(self) -> tuple:
        """In a file: older GPUs first, and x86_64 before aarch64, for a part takes as long to unpack as what lies before it takes too."""
        return *self.stream(), int(self.architecture[3:]), self.host != "x86_64", self.host


def pack_parts(unpacked: Mapping[Part, bytes | bytearray]) -> tuple[dict[str, bytes], dict[str, dict[str, dict[str, list[int]]]]]:
    """(the files, what the manifest says of their streams: file -> host -> architecture -> where the stream starts in its file and how long
    it is, where the part starts in the unpacked stream and how long it is)."""
    files: dict[str, bytes] = {}
    places: dict[str, dict[str, dict[str, list[int]]]] = {}
    together = [list(parts) for _, parts in groupby(sorted(unpacked, key=Part.order), Part.stream)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        packed = pool.map(lambda parts: compress(b"".join(map(unpacked.__getitem__, parts))), together)
        for parts, data in zip(together, packed):
            name, offset = parts[0].file, 0
            stream = [len(files.get(name, b"")), len(data)]
            files[name] = files.get(name, b"") + data
            for part in parts:
                places.setdefault(name, {}).setdefault(part.host, {})[part.architecture] = [*stream, offset, len(unpacked[part])]
                offset += len(unpacked[part])
    return files, places


def pack(package: Package, variants: "Variants", targets: Targets, images: dict[Job, bytes]) -> dict[str, bytes]:
    """The files of the folder `cubins` by their names, the manifest among them."""
    by_place = {(job.variant.name, job.host, job.architecture): image for job, image in images.items()}
    unpacked: dict[Part, bytearray] = {}
    stored: dict[tuple[Part, bytes], list[int]] = {}  # variants that differ in their promises alone may share an image
    kernels: dict[str, list] = {}
    parameters: dict[str, int] = {}  # by what the manifest says of one: its place among those that variants share, most of what it says
    for operation, variant in variants:
        entry = {**variant.describe(), "operation": operation, "images": {}}
        described = [json.dumps(parameter, sort_keys=True) for parameter in entry["parameters"]]
        entry["parameters"] = [parameters.setdefault(text, len(parameters)) for text in described]
        if variant.targets:  # so that an image that is missing differs from one that is not wanted
            entry["targets"] = list(variant.targets)
        for host, architectures in targets.items():
            for architecture in architectures:
                image = by_place.get((variant.name, host, architecture))
                if image is None:
                    continue
                part = Part(f"{operation}.cubins", architecture, host)
                images_of_part = unpacked.setdefault(part, bytearray())
                if (part, image) not in stored:
                    stored[part, image] = [len(images_of_part), len(image)]
                    images_of_part += image
                entry["images"].setdefault(host, {})[architecture] = stored[part, image]
        kernels.setdefault(variant.kernel_name, []).append(entry)
    files, streams = pack_parts(unpacked)
    manifest = {
        "format": runpy.run_path(str(package.shared / "runtime/artifacts.py"))["FORMAT"],  # what the package reads
        "package": package.name,
        "compiler": compiler_identity(),
        "sources": {operation: source_digest(operation) for operation in sorted({name for name, _ in variants})},
        "architectures": {host: list(names) for host, names in targets.items()},
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())},
        "streams": streams,
        "parameters": [json.loads(text) for text in parameters],
        "kernels": kernels,
    }
    files["manifest.json"] = (json.dumps(manifest, separators=(",", ":"), sort_keys=True) + "\n").encode()
    return files


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Makes the folder hold these files and no others; a reader never sees half a file, and the manifest comes last."""
    for name in sorted(files, key=lambda name: name == "manifest.json"):
        path = folder / name
        if not path.exists() or path.read_bytes() != files[name]:
            write_atomically(path, files[name])
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).as_posix() not in files:
            path.unlink()
