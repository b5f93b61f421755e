"""Compiles the kernels of a package for every architecture: `python -m tools.compile`, a part of `make build`.

kernel_src -> Tile IR bytecode (cuda.tile, one for all architectures) -> cubins (tileiras, one for each architecture and host)
-> torch-ext/<name>/cubins: one file for each host and operation, with one compressed stream of images for each architecture, and
manifest.json.

Every cubin is kept under .cache/cubins by what went into it, so only what changed is compiled again, and a build that was
killed goes on where it stopped. One build is byte for byte the next one, wherever the sources lie.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import takewhile
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tools import compiler, machine_code
from tools.assemble import sources as files_of_build
from tools.build_checks import check_code, check_occupancy, check_reasons, check_resources, check_spills, spills_of
from tools.build_record import read_spills, record, record_spills
from tools.compiler import Job
from tools.elf import resources
from tools.kernel_package import Package, PackageError, package_folders, read_package, whole_package
from tools.kernel_sources import SourceError
from tools.pack import pack, write_folder
from tools.targets import (
    TARGETS,
    BuildError,
    Targets,
    operations,
    operations_of_all,
    parse_targets,
    read_variants,
    targets_here,
    targets_of,
    variants_of,
)

if TYPE_CHECKING:
    from tools.targets import Variants


def jobs_of(variants: "Variants", targets: Targets, progress: Progress) -> Iterator[Job]:
    """The jobs of all variants, each when its bytecode is there: the compiler works while the front end goes on."""
    task = progress.add_task("Tile IR", total=len(variants))
    for operation, variant in variants:
        if wanted := targets_of(variant, targets):
            bytecode = compiler.export(variant)
            for host, architecture in wanted:
                yield Job(operation, variant, bytecode, host, architecture)
        progress.advance(task)


def compile_all(
    jobs: Iterable[Job], progress: Progress, workers: int, total: int | None = None, at_home: bool = True
) -> dict[Job, bytes]:
    """The image of every job, on all cores; the first failure stops the rest. total: how many jobs there will be, where it is known;
    at_home: whether the variants are made for these GPUs, whose registers they then have to fit."""
    tileiras = compiler.find_tileiras()
    version = compiler.compiler_version(tileiras)
    task = progress.add_task("cubins", total=total)
    images: dict[Job, bytes] = {}
    failed = threading.Event()

    def work(job: Job) -> None:
        try:
            images[job] = compiler.compile_image(job, tileiras, version)
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
    if at_home:
        check_resources(images)
        check_occupancy(images)
    return images


def summary(variants: "Variants", images: dict[Job, bytes], files: dict[str, bytes], package: str = "") -> Table:
    """One row an operation: variants, architectures, bytes on disk, the most registers, spills."""
    table = Table(title="Prebuilt kernels" + (f" of {package}" if package else ""))
    for column in ("operation", "variants", "architectures", "KiB", "registers", "spills"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for operation in dict.fromkeys(name for name, _ in variants):
        mine = {job: resources(image) for job, image in images.items() if job.operation == operation}
        size = len(files.get(f"{operation}.cubins", b""))
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


def build(
    package: Package,
    targets: Targets,
    console: Console,
    workers: int = os.cpu_count() or 1,
    recording: bool = False,
    like: str = "",
    names: list[str] | None = None,
) -> dict[str, dict[str, int]]:
    """Compiles a package's kernels into torch-ext/<name>/cubins, and returns what they spill (`spills_of`). recording: whether they may
    spill more than is recorded; like: the architecture whose variants these are, each target's own by default; names: of the operations,
    by default those that its kernels.toml names. Raises BuildError."""
    start = time.monotonic()
    variants = read_variants(operations(package.folder) if names is None else names)
    if like:
        variants = variants_of(variants, like, targets)
    images = images_of(variants, targets, console, workers, at_home=not like)
    if recording:
        machine_code.record(images.items(), machine_code.all_operations())
    elif not like:
        check_spills(images, read_spills())
    files = pack(package, variants, targets, images)
    write_folder(package.sources / "cubins", files)
    console.print(summary(variants, images, files, package.name))
    console.print(f"{len(images)} cubins in {time.monotonic() - start:.0f} s")
    return spills_of(images)


def images_of(variants: "Variants", targets: Targets, console: Console, workers: int, at_home: bool = True) -> dict[Job, bytes]:
    """The image of every variant for its targets, with a bar that shows how far it is. at_home: as of `compile_all`. Raises BuildError."""
    total = sum(len(targets_of(variant, targets)) for _, variant in variants)
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        images = compile_all(jobs_of(variants, targets, progress), progress, workers, total, at_home)
    if targets == TARGETS:
        check_reasons(images)
    return images


def record_some(names: list[str], console: Console, workers: int) -> None:
    """Compiles some operations for every target, and records that, without a package. Raises BuildError."""
    variants = read_variants(names)
    images = images_of(variants, TARGETS, console, workers)
    mine = {variant.name for _, variant in variants}
    record(names, compiler.compiler_identity())
    machine_code.record(images.items(), machine_code.all_operations())
    record_spills({name: found for name, found in read_spills().items() if name not in mine} | spills_of(images))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.compile", description=__doc__.splitlines()[0])
    parser.add_argument("--package", help="the folder that holds build.toml and kernels.toml; default: every package of this repository")
    parser.add_argument("--wheel", action="store_true", help="for the package that pip installs, which has the kernels of all the others")
    parser.add_argument("--targets", help="only these, e.g. 'x86_64:sm_90,sm_100'; default: all")
    parser.add_argument("--here", action="store_true", help="only for this machine's GPU, and one Blackwell target")
    parser.add_argument("--like", default="", help="build the variants of this architecture, e.g. sm_120, to try them on another one's GPU")
    note = "note for the tests that these kernels compile for every target; with names, e.g. 'scale,rms_norm', of these operations alone"
    parser.add_argument("--record", nargs="?", const="all", metavar="OPERATIONS", help=note)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if options.record and (options.targets or options.here):
        parser.error("--record is for a build for every target")
    if options.like and not (options.targets or options.here):
        parser.error("--like wants --here or --targets: nobody is to get such a build")
    console = Console()
    try:
        if options.record not in (None, "all"):
            record_some(options.record.split(","), console, options.workers)
            return 0
        targets = targets_here() if options.here else parse_targets(options.targets)
        packages = [read_package(folder) for folder in package_folders(options.package)]
        spills: dict[str, dict[str, int]] = {} if options.package is None else read_spills()
        if options.wheel:
            names = operations_of_all([package.folder for package in packages])
            build(whole_package(), targets, console, options.workers, like=options.like, names=names)
            return 0
        for package in packages:
            spills |= build(package, targets, console, options.workers, bool(options.record), options.like)
        if options.record:
            for package in packages:
                files_of_build(package, "cuda")  # raises where a package has become larger than its users are to download
            record({operation for package in packages for operation in operations(package.folder)}, compiler.compiler_identity())
            record_spills(spills)
    except (BuildError, PackageError, SourceError) as error:
        console.print(f"[red]Build failed.[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
