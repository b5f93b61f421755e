"""The build of kernels: a second one is the first one, and only what changed is compiled again."""

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time

import pytest
from rich.progress import Progress

from tests.building import KERNELS, ONE, QUIET, ROOT, contents, cubins_folder, image_of, kept, variant_of, write
from tools import compile as compile_
from tools import compiler, pack, targets
from tools.compiler import Job
from tools.elf import resources
from tools.targets import TARGETS


def test_a_kernel_compiled_twice_gives_the_same_bytes(cache, tmp_path, monkeypatch):
    variants = variant_of("column_sum", "column_sum"), variant_of("rms_norm", "rms_norm_rows_forward")
    first = [image_of(variant) for variant in variants]
    monkeypatch.setattr(compiler, "CACHE", tmp_path / "other cache")
    assert [image_of(variant) for variant in variants] == first


def test_an_image_does_not_depend_on_where_the_sources_lie(cache, tmp_path, monkeypatch):
    images = []
    for folder in (tmp_path / "a", tmp_path / "somewhere" / "else"):
        folder.mkdir(parents=True)
        module = write(folder, monkeypatch, KERNELS)
        images.append(image_of(next(module.variants())))
        assert str(folder).encode() not in images[-1]
    assert images[0] == images[1]


def test_two_packs_of_the_same_images_are_the_same_bytes(package):
    variants = targets.read_variants(["tiny"])
    jobs = [Job(operation, v, b"", host, a) for operation, v in variants for host, names in TARGETS.items() for a in names]
    images = [(job, f"{job.variant.name} {job.host} {job.architecture}".encode()) for job in jobs]
    first = pack.pack(package, variants, TARGETS, dict(images))
    random.Random(0).shuffle(images)  # the order in which the compiler's threads end
    second = pack.pack(package, variants, TARGETS, dict(images))
    assert list(first.items()) == list(second.items())


def test_two_builds_are_the_same_bytes(cache, package):
    compile_.build(package, ONE, **QUIET)
    first = contents(cubins_folder(package))
    shutil.rmtree(cubins_folder(package))
    shutil.rmtree(cache)
    compile_.build(package, ONE, **QUIET)
    assert contents(cubins_folder(package)) == first
    assert set(first) == {"manifest.json", "tiny.cubins"}


def test_a_second_build_compiles_nothing(cache, called, package):
    compile_.build(package, ONE, **QUIET)
    assert len(called) == 4
    compile_.build(package, ONE, **QUIET)
    assert len(called) == 4


def test_some_operations_are_recorded_without_a_package(cache, called, package, monkeypatch):
    """They are compiled for every target, their machine code is read, and what others spill stays as it is recorded."""
    recorded = []
    monkeypatch.setattr(compile_.machine_code, "record", lambda images, names: recorded.append((len(images), "rms_norm" in names)))
    monkeypatch.setattr(compile_, "record", lambda names, identity: recorded.append(list(names)))
    monkeypatch.setattr(compile_, "record_spills", recorded.append)
    monkeypatch.setattr(compile_, "read_spills", lambda: {"another": {"sm_90": 8}})
    assert compile_.main(["--record", "tiny"]) == 0
    count = sum(len(names) for names in TARGETS.values())
    assert len(called) == count * len(targets.read_variants(["tiny"]))
    assert recorded == [["tiny"], (len(called), True), {"another": {"sm_90": 8}}] and not cubins_folder(package).exists()


def test_only_the_kernel_that_changed_is_compiled_again(cache, called, package, tmp_path, monkeypatch):
    compile_.build(package, ONE, **QUIET)
    before = contents(cubins_folder(package))
    called.clear()
    write(tmp_path, monkeypatch, KERNELS.replace("2.0", "3.0"))
    compile_.build(package, ONE, **QUIET)
    assert len(called) == 2
    assert contents(cubins_folder(package))["tiny.cubins"] != before["tiny.cubins"]


@pytest.mark.parametrize("change", ("another comment", "another place"))
def test_what_leaves_the_kernels_as_they_are_compiles_nothing_again(cache, called, package, tmp_path, monkeypatch, change):
    """Line numbers and paths are no part of a cubin, and so of no cubin's key."""
    compile_.build(package, ONE, **QUIET)
    before = contents(cubins_folder(package))
    called.clear()
    if change == "another comment":
        commented = KERNELS.replace("ct.scatter(", "ct.scatter(  # everywhere\n        ")
        write(tmp_path, monkeypatch, "# What these kernels are for.\n" + commented)
    else:
        (tmp_path / "moved").mkdir()
        write(tmp_path / "moved", monkeypatch, KERNELS)
    compile_.build(package, ONE, **QUIET)
    assert not called
    assert contents(cubins_folder(package)) == before


def test_another_flag_compiles_everything_again(cache, called, package, monkeypatch):
    compile_.build(package, ONE, **QUIET)
    called.clear()
    flags = Job.flags
    monkeypatch.setattr(Job, "flags", lambda job: [flag.replace("-O3", "-O2") for flag in flags(job)])
    compile_.build(package, ONE, **QUIET)
    assert len(called) == 4


def test_the_compiler_works_while_the_front_end_goes_on(cache, called, package, monkeypatch):
    """Each cubin is begun when its bytecode is there."""
    exported, export = [], compiler.export

    def slow(variant):
        if exported:
            deadline = time.monotonic() + 60
            while not called and time.monotonic() < deadline:
                time.sleep(0.005)
        exported.append(len(called))
        return export(variant)

    monkeypatch.setattr(compiler, "export", slow)
    compile_.build(package, ONE, **QUIET)
    assert exported[0] == 0 and all(exported[1:]) and len(called) == 4


def test_another_architecture_compiles_only_for_that_one(cache, called, package):
    compile_.build(package, ONE, **QUIET)
    called.clear()
    compile_.build(package, {"x86_64": ("sm_90", "sm_100")}, **QUIET)
    assert called == ["sm_100"] * 4


def test_another_compiler_compiles_everything_again(cache, called, package, monkeypatch):
    compile_.build(package, ONE, **QUIET)
    called.clear()
    monkeypatch.setattr(compiler, "compiler_version", lambda tileiras: "99.9")
    compile_.build(package, ONE, **QUIET)
    assert len(called) == 4


@pytest.mark.parametrize("changed", ("bin/tileiras", "bin/ptxas", "lib/libnvvm.so.4"))
def test_another_part_of_the_compiler_compiles_everything_again(cache, called, package, tmp_path, monkeypatch, changed):
    """tileiras calls ptxas and libnvvm, and each is a package of its own."""
    toolchain = tmp_path / "toolchain"
    for name in ("bin/ptxas", "lib/libnvvm.so.4"):
        (toolchain / name).parent.mkdir(parents=True, exist_ok=True)
        (toolchain / name).write_text("one")
    tileiras = toolchain / "bin" / "tileiras"
    tileiras.write_text(f'#!/bin/sh\nexec {compiler.find_tileiras()} "$@"\n')
    tileiras.chmod(0o755)
    monkeypatch.setattr(compiler, "find_tileiras", lambda: str(tileiras))
    compile_.build(package, ONE, **QUIET)
    first = json.loads(contents(cubins_folder(package))["manifest.json"])["compiler"]
    with (toolchain / changed).open("a") as file:
        file.write("# another\n")
    compiler.compiler_version.cache_clear()
    called.clear()
    compile_.build(package, ONE, **QUIET)
    assert len(called) == 4
    assert json.loads(contents(cubins_folder(package))["manifest.json"])["compiler"] != first


def test_the_key_names_the_programs_that_the_compiler_calls():
    names = {path.name for path in compiler.compiler_files(compiler.find_tileiras())}
    assert "tileiras" in names and "ptxas" in names and any("nvvm" in name for name in names)


def test_files_of_an_operation_that_is_gone_are_removed(cache, package):
    compile_.build(package, ONE, **QUIET)
    stale = cubins_folder(package) / "aarch64" / "gone.cubins"
    stale.parent.mkdir()
    stale.write_bytes(b"old")
    compile_.build(package, ONE, **QUIET)
    assert not stale.exists()


BUILD = """
import sys
from pathlib import Path
from rich.console import Console
from tools import compile as compile_
from tools import build_checks, compiler, pack, targets
compiler.CACHE = Path(sys.argv[1])
variants = targets.read_variants(["scale", "column_sum"])
from rich.progress import Progress
with Progress(disable=True) as progress:
    jobs = list(compile_.jobs_of(variants, {"x86_64": ("sm_90", "sm_100")}, progress))
    print(len(jobs), flush=True)
    compile_.compile_all(jobs, progress, 2)
"""


def test_a_killed_build_leaves_whole_cubins_and_the_next_one_makes_the_rest(cache, called):
    command = [sys.executable, "-c", BUILD, str(cache)]
    build = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    total = int(build.stdout.readline())
    deadline = time.monotonic() + 60
    while len(kept(cache)) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(build.pid, signal.SIGKILL)
    build.wait()
    build.stdout.close()
    left = kept(cache)
    assert 3 <= len(left) < total
    assert all(resources(image).registers for image in left.values())
    with Progress(disable=True) as progress:
        jobs = compile_.jobs_of(targets.read_variants(["scale", "column_sum"]), {"x86_64": ("sm_90", "sm_100")}, progress)
        compile_.compile_all(jobs, progress, 2)
    assert len(called) == total - len(left)
    assert left.items() <= kept(cache).items() and len(kept(cache)) == total


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "file.cubin"
    compiler.write_atomically(path, b"old")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        compiler.write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.glob("*.cubin")] == ["file.cubin"]


def test_what_is_written_can_be_read_by_everyone(tmp_path):
    """The folder may be shared: a file is made with the permissions that any other new file gets."""
    (tmp_path / "usual").write_bytes(b"")
    compiler.write_atomically(tmp_path / "file", b"data")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)
