"""Compiles the kernels of a package for every architecture: `python -m tools.compile`, a part of `make build`.

kernel_src -> Tile IR bytecode (cuda.tile, one for all architectures) -> cubins (tileiras, one for each architecture and host)
-> torch-ext/<name>/cubins: one file for each host and operation, with one compressed stream of images for each architecture, and
manifest.json.

Every cubin is kept under .cache/cubins by what went into it, so only what changed is compiled again, and a build that was
killed goes on where it stopped. One build is byte for byte the next one, wherever the sources lie.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib
import io
import json
import lzma
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tools.build_record import record
from tools.elf import code_of, resources
from tools.kernel_package import Package, PackageError, package_folders, read_package
from tools.kernel_sources import SourceError, source_digest

if TYPE_CHECKING:
    from kernel_src.prebuild import Variant

    Variants = list[tuple[str, Variant]]  # with the operation of each

Targets = Mapping[str, tuple[str, ...]]  # the architectures to build for, by host

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "cubins"
# Of the streams: machine code has instructions of 16 bytes, and stronger presets take half as long again for 0.1 %.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 4}]

# What each host's GPUs are: GB200, GH200, Thor and DGX Spark have Arm hosts.
TARGETS = {
    "x86_64": ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"),
    "aarch64": ("sm_90", "sm_100", "sm_103", "sm_110", "sm_121"),
}
CUDA_MACHINE = 0xBE  # e_machine of a cubin and of the hosts' code in it, ELF's numbers
HOST_MACHINES = {"x86_64": 0x3E, "aarch64": 0xB7}


class BuildError(Exception):
    """The build failed; the text names the kernel, the architecture and the compiler's message."""


@dataclass(frozen=True, eq=False)
class Job:
    """One cubin to make."""

    operation: str
    variant: "Variant"
    bytecode: bytes
    host: str
    architecture: str

    def flags(self) -> list[str]:
        """What the compiler is told beside the bytecode."""
        return ["--gpu-name", self.architecture, "-O3", "--host-arch", self.host, "--host-os", "linux"]

    def key(self, compiler: str) -> str:
        parts = (compiler, *self.flags(), hashlib.sha256(self.bytecode).hexdigest())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def find_tileiras() -> str:
    """The compiler: from the package nvidia-cuda-tileiras, or on the PATH. Raises BuildError."""
    try:
        for file in metadata.files("nvidia-cuda-tileiras") or ():
            if file.name == "tileiras":
                return str(file.locate())
    except metadata.PackageNotFoundError:
        pass
    found = shutil.which("tileiras")
    if found is None:
        raise BuildError("the compiler tileiras was not found. Install it with: pip install 'cuda-tile[tileiras]'")
    return found


def compiler_files(tileiras: str) -> list[Path]:
    """The compiler, and the ptxas and the libnvvm that it calls: beside it, in CUDA_HOME or CUDA_PATH, or on the PATH."""
    folder = Path(tileiras).resolve().parent
    roots = [folder.parent, *(Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name))]
    libraries = ("lib/libnvvm.so.4", "nvvm/lib64/libnvvm.so", "nvvm/lib64/libnvvm.so.4")
    candidates = [Path(tileiras), *(root / name for root in roots for name in ("bin/ptxas", *libraries))]
    found = [path for path in (folder / "ptxas", *candidates) if path.is_file()]
    if not any(path.name == "ptxas" for path in found):
        found += [Path(path) for path in [shutil.which("ptxas")] if path]
    return list(dict.fromkeys(path.resolve() for path in found))


@functools.cache
def compiler_version(tileiras: str) -> str:
    """`13.4.92-8733d2ef6ae2` or the like, a part of every cubin's key: the version, and a digest of `compiler_files`.

    Each of them is a package of its own, and another ptxas makes other cubins of the same kernels.
    """
    text = subprocess.run([tileiras, "--version"], capture_output=True, text=True, check=True).stdout
    version = next((word.lstrip("V").rstrip(",") for word in text.split() if word.startswith("V") and word[1:2].isdigit()), text)
    content = hashlib.sha256()
    for path in compiler_files(tileiras):
        with path.open("rb") as file:
            content.update(hashlib.file_digest(file, "sha256").digest())
    return f"{version}-{content.hexdigest()[:12]}"


def compiler_identity() -> dict[str, str]:
    """What the manifest says of the front end and of the compiler. Raises BuildError."""
    return {"cuda-tile": metadata.version("cuda-tile"), "tileiras": compiler_version(find_tileiras())}


def operations(package: Package) -> list[str]:
    """The modules of kernel_src that kernels.toml beside build.toml names."""
    with (package.folder / "kernels.toml").open("rb") as file:
        return tomllib.load(file)["operations"]


def read_variants(names: list[str]) -> list[tuple[str, "Variant"]]:
    """(operation, variant) of every variant of the named modules. Raises BuildError when two have one name."""
    found = [(name, variant) for name in names for variant in importlib.import_module(f"kernel_src.{name}").variants()]
    seen: dict[str, str] = {}
    for operation, variant in found:
        if variant.name in seen:
            raise BuildError(f"two variants are called {variant.name} (in {seen[variant.name]} and {operation}); names must differ")
        seen[variant.name] = operation
    return found


@contextlib.contextmanager
def without_locations() -> Iterator[None]:
    """Bytecode without the paths and line numbers of the sources, so that a moved clone or another comment compiles nothing again.

    The front end can leave them out, but `export_kernel` has no option for it. The cubins are the same bytes with and without.
    """
    from cuda.tile import _compile

    original = _compile._get_bytecode
    _compile._get_bytecode = lambda *args, **options: original(*args, **{**options, "anonymize_debug_info": True})
    try:
        yield
    finally:
        _compile._get_bytecode = original


def export(variant: "Variant") -> bytes:
    """Tile IR bytecode of a variant, the same for all architectures. Raises BuildError with the front end's message."""
    from cuda.tile.compilation import export_kernel

    out = io.BytesIO()
    try:
        with without_locations():
            export_kernel(variant.hinted_kernel(), [variant.signature()], out, gpu_code=None, output_format="tileir_bytecode")
    except Exception as error:
        raise BuildError(f"{variant.name}: {error}") from error
    return out.getvalue()


def compile_image(job: Job, tileiras: str, compiler: str) -> bytes:
    """The cubin of a job, from the cache or from the compiler. Raises BuildError."""
    kept = CACHE / f"{job.key(compiler)}.cubin"
    if kept.exists():
        return kept.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "kernel.tileirbc", Path(folder) / "kernel.cubin"
        source.write_bytes(job.bytecode)
        done = subprocess.run([tileiras, source, "-o", output, *job.flags()], capture_output=True, text=True)
        if done.returncode or not output.exists():
            message = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
            raise BuildError(f"{job.variant.name} for {job.architecture} on {job.host}: {message}")
        image = output.read_bytes()
    write_atomically(kept, image)
    return image


def check_resources(images: dict[Job, bytes]) -> None:
    """Raises BuildError when kernels spill without a reason in their entries; names them all."""
    found = [(job, resources(image)) for job, image in images.items() if not job.variant.spills]
    spilling = [(job, report) for job, report in found if report.stack]
    if spilling:
        lines = [
            f"{job.variant.name} for {job.architecture} on {job.host}: {report.stack} bytes of stack, {report.registers} registers"
            for job, report in spilling
        ]
        raise BuildError(
            "kernels spill registers. Give them smaller tiles, more worker warps or less occupancy, or write the reason into the "
            "variant's `spills`:\n" + "\n".join(sorted(lines))
        )


def check_reasons(images: dict[Job, bytes]) -> None:
    """Raises BuildError when variants give a reason for spills and spill on none of the architectures."""
    spilling = {job.variant.name for job, image in images.items() if resources(image).stack}
    needless = {job.variant.name for job in images if job.variant.spills} - spilling
    if needless:
        raise BuildError("variants that spill nowhere give a reason for spills. Remove it:\n" + "\n".join(sorted(needless)))


def check_code(images: dict[Job, bytes]) -> None:
    """Raises BuildError when an image is code of another architecture or host: one would not load, the other would crash the process."""
    wrong = []
    for job, image in images.items():
        found = code_of(image)
        if (found.machine, found.architecture, found.host_machine) != (CUDA_MACHINE, job.architecture, HOST_MACHINES[job.host]):
            wrong.append(f"{job.variant.name} for {job.architecture} on {job.host}: {found}")
    if wrong:
        raise BuildError("the compiler made code for something else:\n" + "\n".join(sorted(wrong)))


def occupancy(variant: "Variant", architecture: str) -> int:
    """The hint of a variant, or of its kernel's decorator; 0 where there is none."""
    hint = variant.hints.get("occupancy")
    if hint is None:
        options = variant.hinted_kernel()._compiler_options.hints_by_target()
        return options.get(architecture, {}).get("occupancy") or options["default"].get("occupancy") or 0
    if isinstance(hint, int):
        return hint
    return hint.value if hint.architecture == architecture else hint.default


def check_occupancy(images: dict[Job, bytes]) -> None:
    """Raises BuildError when kernels have too many registers for the occupancy that they ask for; names them all."""
    missed = []
    for job, image in images.items():
        found, asked = resources(image), occupancy(job.variant, job.architecture)
        if not job.variant.spills and found.blocks_per_multiprocessor() < asked:
            missed.append(
                f"{job.variant.name} for {job.architecture} on {job.host}: {found.registers} registers, "
                f"{found.blocks_per_multiprocessor()} blocks, asked for {asked}"
            )
    if missed:
        raise BuildError("kernels have more registers than their occupancy allows:\n" + "\n".join(sorted(missed)))


UMASK = os.umask(0)  # can only be read by setting it, and threads write files later
os.umask(UMASK)


def write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o666 & ~UMASK)  # a temporary file is its maker's alone
    os.replace(file.name, path)


def parse_targets(text: str | None) -> dict[str, tuple[str, ...]]:
    """`x86_64:sm_90,sm_100 aarch64:sm_90` -> what to build for each host; None: everything. Raises BuildError."""
    if not text:
        return TARGETS
    chosen = {}
    for part in text.split():
        host, _, names = part.partition(":")
        wanted = tuple(names.split(","))
        unknown = [name for name in wanted if name not in TARGETS.get(host, ())]
        if host not in TARGETS or unknown:
            raise BuildError(f"no target {part!r}; there are " + ", ".join(f"{h}:{','.join(a)}" for h, a in TARGETS.items()))
        chosen[host] = wanted
    return chosen


def targets_here() -> dict[str, tuple[str, ...]]:
    """This machine's host and GPU (sm_90 where there is none), and sm_100: enough to try the package out."""
    import torch

    host = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if host not in TARGETS:
        raise BuildError(f"this machine is {host}; kernels are built for {' and '.join(TARGETS)}")
    own = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "sm_90"
    return {host: tuple(dict.fromkeys(name for name in (own, "sm_100") if name in TARGETS[host]))}


def targets_of(variant: "Variant", targets: Targets) -> list[tuple[str, str]]:
    """(host, architecture) of each cubin of a variant."""
    pairs = [(host, architecture) for host, architectures in targets.items() for architecture in architectures]
    return [(host, architecture) for host, architecture in pairs if not variant.targets or architecture in variant.targets]


def jobs_of(variants: "Variants", targets: Targets, progress: Progress) -> Iterator[Job]:
    """The jobs of all variants, each when its bytecode is there: the compiler works while the front end goes on."""
    task = progress.add_task("Tile IR", total=len(variants))
    for operation, variant in variants:
        bytecode = export(variant)
        for host, architecture in targets_of(variant, targets):
            yield Job(operation, variant, bytecode, host, architecture)
        progress.advance(task)


def compile_all(jobs: Iterable[Job], progress: Progress, workers: int, total: int | None = None) -> dict[Job, bytes]:
    """The image of every job, on all cores; the first failure stops the rest. total: how many jobs there will be, where it is known."""
    tileiras = find_tileiras()
    compiler = compiler_version(tileiras)
    task = progress.add_task("cubins", total=total)
    images: dict[Job, bytes] = {}
    failed = threading.Event()

    def work(job: Job) -> None:
        try:
            images[job] = compile_image(job, tileiras, compiler)
        except BaseException:
            failed.set()
            raise
        progress.advance(task)

    with ThreadPoolExecutor(workers) as pool:
        try:
            futures = [pool.submit(work, job) for job in takewhile(lambda _: not failed.is_set(), jobs)]
            for future in as_completed(futures):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
    check_code(images)
    check_resources(images)
    check_occupancy(images)
    return images


def compress(data: bytes | bytearray) -> bytes:
    """An xz stream without a checksum of its own: the manifest has that of the file."""
    return lzma.compress(data, check=lzma.CHECK_NONE, filters=FILTERS)


def pack(package: Package, variants: "Variants", targets: Targets, images: dict[Job, bytes]) -> dict[str, bytes]:
    """The files of the folder `cubins` by their names, the manifest among them."""
    by_place = {(job.variant.name, job.host, job.architecture): image for job, image in images.items()}
    unpacked: dict[tuple[str, str], bytearray] = {}  # the streams, by file and architecture
    stored: dict[tuple[str, str, bytes], list[int]] = {}  # variants that differ in their promises alone may share an image
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
                key = f"{host}/{operation}.cubins", architecture
                stream = unpacked.setdefault(key, bytearray())
                if (*key, image) not in stored:
                    stored[*key, image] = [len(stream), len(image)]
                    stream += image
                entry["images"].setdefault(host, {})[architecture] = stored[*key, image]
        kernels.setdefault(variant.kernel_name, []).append(entry)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        packed = dict(zip(sorted(unpacked), pool.map(lambda key: compress(unpacked[key]), sorted(unpacked))))
    files: dict[str, bytes] = {}
    streams: dict[str, dict[str, list[int]]] = {}
    for (name, architecture), data in packed.items():
        place = [len(files.get(name, b"")), len(data), len(unpacked[name, architecture])]
        streams.setdefault(name, {})[architecture] = place
        files[name] = files.get(name, b"") + data
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


def summary(variants: "Variants", images: dict[Job, bytes], files: dict[str, bytes], package: str = "") -> Table:
    """One row an operation: variants, architectures, bytes on disk, the most registers, spills."""
    table = Table(title="Prebuilt kernels" + (f" of {package}" if package else ""))
    for column in ("operation", "variants", "architectures", "KiB", "registers", "spills"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for operation in dict.fromkeys(name for name, _ in variants):
        mine = {job: resources(image) for job, image in images.items() if job.operation == operation}
        size = sum(len(data) for name, data in files.items() if name.endswith(f"/{operation}.cubins"))
        registers = [found.registers for found in mine.values()]
        spilling = {job.variant.name for job, found in mine.items() if found.stack}
        table.add_row(
            operation,
            str(sum(name == operation for name, _ in variants)),
            str(len({job.architecture for job in mine})),
            f"{size / 1024:.0f}",
            f"{min(registers)}-{max(registers)}",
            str(len(spilling)),
        )
    total = sum(map(len, files.values()))
    table.add_section()
    table.add_row("all", str(len(variants)), "", f"{total / 1024:.0f}", "", "")
    return table


def build(package: Package, targets: Targets, console: Console, workers: int = os.cpu_count() or 1) -> None:
    """Compiles a package's kernels into torch-ext/<name>/cubins. Raises BuildError."""
    start = time.monotonic()
    variants = read_variants(operations(package))
    total = sum(len(targets_of(variant, targets)) for _, variant in variants)
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        images = compile_all(jobs_of(variants, targets, progress), progress, workers, total)
    if targets == TARGETS:
        check_reasons(images)
    files = pack(package, variants, targets, images)
    write_folder(package.sources / "cubins", files)
    console.print(summary(variants, images, files, package.name))
    console.print(f"{total} cubins in {time.monotonic() - start:.0f} s")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.compile", description=__doc__.splitlines()[0])
    parser.add_argument("--package", help="the folder that holds build.toml and kernels.toml; default: every package of this repository")
    parser.add_argument("--targets", help="only these, e.g. 'x86_64:sm_90,sm_100'; default: all")
    parser.add_argument("--here", action="store_true", help="only for this machine's GPU, and one Blackwell target")
    parser.add_argument("--record", action="store_true", help="note for the tests that these kernels compile for every target")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if options.record and (options.targets or options.here):
        parser.error("--record is for a build for every target")
    console = Console()
    try:
        targets = targets_here() if options.here else parse_targets(options.targets)
        packages = [read_package(folder) for folder in package_folders(options.package)]
        for package in packages:
            build(package, targets, console, options.workers)
        if options.record:
            from tools import assemble  # which imports this module

            for package in packages:
                assemble.sources(package, "cuda")  # raises where a package has become larger than its users are to download
            record({operation for package in packages for operation in operations(package)}, compiler_identity())
    except (BuildError, PackageError, SourceError) as error:
        console.print(f"[red]Build failed.[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
