"""The compiler driver and the assembly: what they make, what they refuse, and that a second build is the first one."""

import ast
import fcntl
import hashlib
import importlib.util
import json
import lzma
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from kernel_src.prebuild import UNMEASURED, PerArchitecture
from tools import compile as compiler
from tools.assemble import assemble, sources
from tools.build_record import changed, read_record, record
from tools.compile import TARGETS, BuildError, Job
from tools.elf import resources
from tools.kernel_package import PackageError, package_folders, read_package
from tools.kernel_sources import source_digest
from tools.kernels_adapter import Build, Digest, DigestAlgorithm, Metadata

ROOT = Path(__file__).resolve().parents[2]
ONE = {"x86_64": ("sm_90",)}
QUIET = {"console": Console(quiet=True), "workers": 2}

KERNELS = """
import cuda.tile as ct
from kernel_src.prebuild import Array, Variant

Const = ct.Constant[int]


@ct.kernel
def first(x, TILE: Const):
    ct.scatter(x, ct.arange(TILE, dtype=ct.int32), ct.full((TILE,), 1.0, dtype=ct.float32), check_bounds=True)


@ct.kernel
def second(x, TILE: Const):
    ct.scatter(x, ct.arange(TILE, dtype=ct.int32), ct.full((TILE,), 2.0, dtype=ct.float32), check_bounds=True)


def variants():
    x = Array("float32", (None,))
    for tile in (64, 128):
        yield Variant(first, {"x": x, "TILE": tile})
        yield Variant(second, {"x": x, "TILE": tile})
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of cubins."""
    monkeypatch.setattr(compiler, "CACHE", tmp_path / "cache")
    return compiler.CACHE


@pytest.fixture
def called(monkeypatch):
    """The architectures that `compile_image` calls the compiler for, as it happens. (cuda.tile calls it once a process, too, to see which
    bytecode it takes.)"""
    calls, run = [], subprocess.run

    def counting(command, **options):
        if "--host-arch" in command:
            calls.append(command[command.index("--gpu-name") + 1])
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counting)
    return calls


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of one operation, `tiny`, whose kernels `write` changes."""
    folder = tmp_path / "package"
    (folder / "torch-ext" / "qwen3").mkdir(parents=True)
    shutil.copy(ROOT / "build.toml", folder)
    (folder / "kernels.toml").write_text('operations = ["tiny"]\n')
    write(tmp_path, monkeypatch, KERNELS)
    return read_package(folder)


def write(tmp_path, monkeypatch, source):
    """Makes the source the module kernel_src.tiny."""
    path = tmp_path / "tiny.py"
    path.write_text(source)
    importlib.invalidate_caches()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    spec = importlib.util.spec_from_file_location("kernel_src.tiny", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernel_src.tiny", module)
    spec.loader.exec_module(module)
    return module


def variant_of(operation, name):
    """The first variant of an operation whose name starts so."""
    return next(variant for _, variant in compiler.read_variants([operation]) if variant.name.startswith(name))


def image_of(variant, host="x86_64", architecture="sm_90"):
    tileiras = compiler.find_tileiras()
    job = Job("any", variant, compiler.export(variant), host, architecture)
    return compiler.compile_image(job, tileiras, compiler.compiler_version(tileiras))


def cubins_folder(package):
    return package.folder / "torch-ext" / "qwen3" / "cubins"


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---------------------------------------------------------------- the same again
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
    variants = compiler.read_variants(["tiny"])
    jobs = [Job(operation, v, b"", host, a) for operation, v in variants for host, names in TARGETS.items() for a in names]
    images = [(job, f"{job.variant.name} {job.host} {job.architecture}".encode()) for job in jobs]
    first = compiler.pack(package, variants, TARGETS, dict(images))
    random.Random(0).shuffle(images)  # the order in which the compiler's threads end
    second = compiler.pack(package, variants, TARGETS, dict(images))
    assert list(first.items()) == list(second.items())


def test_two_builds_are_the_same_bytes(cache, package):
    compiler.build(package, ONE, **QUIET)
    first = contents(cubins_folder(package))
    shutil.rmtree(cubins_folder(package))
    shutil.rmtree(cache)
    compiler.build(package, ONE, **QUIET)
    assert contents(cubins_folder(package)) == first
    assert set(first) == {"manifest.json", "x86_64/tiny.cubins"}


# ---------------------------------------------------------------- what is compiled again
def test_a_second_build_compiles_nothing(cache, called, package):
    compiler.build(package, ONE, **QUIET)
    assert len(called) == 4
    compiler.build(package, ONE, **QUIET)
    assert len(called) == 4


def test_only_the_kernel_that_changed_is_compiled_again(cache, called, package, tmp_path, monkeypatch):
    compiler.build(package, ONE, **QUIET)
    before = contents(cubins_folder(package))
    called.clear()
    write(tmp_path, monkeypatch, KERNELS.replace("2.0", "3.0"))
    compiler.build(package, ONE, **QUIET)
    assert len(called) == 2
    assert contents(cubins_folder(package))["x86_64/tiny.cubins"] != before["x86_64/tiny.cubins"]


@pytest.mark.parametrize("change", ("another comment", "another place"))
def test_what_leaves_the_kernels_as_they_are_compiles_nothing_again(cache, called, package, tmp_path, monkeypatch, change):
    """Line numbers and paths are no part of a cubin, and so of no cubin's key."""
    compiler.build(package, ONE, **QUIET)
    before = contents(cubins_folder(package))
    called.clear()
    if change == "another comment":
        commented = KERNELS.replace("ct.scatter(", "ct.scatter(  # everywhere\n        ")
        write(tmp_path, monkeypatch, "# What these kernels are for.\n" + commented)
    else:
        (tmp_path / "moved").mkdir()
        write(tmp_path / "moved", monkeypatch, KERNELS)
    compiler.build(package, ONE, **QUIET)
    assert not called
    assert contents(cubins_folder(package)) == before


def test_another_flag_compiles_everything_again(cache, called, package, monkeypatch):
    compiler.build(package, ONE, **QUIET)
    called.clear()
    flags = Job.flags
    monkeypatch.setattr(Job, "flags", lambda job: [flag.replace("-O3", "-O2") for flag in flags(job)])
    compiler.build(package, ONE, **QUIET)
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
    compiler.build(package, ONE, **QUIET)
    assert exported[0] == 0 and all(exported[1:]) and len(called) == 4


def test_another_architecture_compiles_only_for_that_one(cache, called, package):
    compiler.build(package, ONE, **QUIET)
    called.clear()
    compiler.build(package, {"x86_64": ("sm_90", "sm_100")}, **QUIET)
    assert called == ["sm_100"] * 4


def test_another_compiler_compiles_everything_again(cache, called, package, monkeypatch):
    compiler.build(package, ONE, **QUIET)
    called.clear()
    monkeypatch.setattr(compiler, "compiler_version", lambda tileiras: "99.9")
    compiler.build(package, ONE, **QUIET)
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
    compiler.build(package, ONE, **QUIET)
    first = json.loads(contents(cubins_folder(package))["manifest.json"])["compiler"]
    with (toolchain / changed).open("a") as file:
        file.write("# another\n")
    compiler.compiler_version.cache_clear()
    called.clear()
    compiler.build(package, ONE, **QUIET)
    assert len(called) == 4
    assert json.loads(contents(cubins_folder(package))["manifest.json"])["compiler"] != first


def test_the_key_names_the_programs_that_the_compiler_calls():
    names = {path.name for path in compiler.compiler_files(compiler.find_tileiras())}
    assert "tileiras" in names and "ptxas" in names and any("nvvm" in name for name in names)


def test_files_of_an_operation_that_is_gone_are_removed(cache, package):
    compiler.build(package, ONE, **QUIET)
    stale = cubins_folder(package) / "aarch64" / "gone.cubins"
    stale.parent.mkdir()
    stale.write_bytes(b"old")
    compiler.build(package, ONE, **QUIET)
    assert not stale.exists()


# ---------------------------------------------------------------- a build that is killed
BUILD = """
import sys
from pathlib import Path
from rich.console import Console
from tools import compile as compiler
compiler.CACHE = Path(sys.argv[1])
variants = compiler.read_variants(["scale", "column_sum"])
from rich.progress import Progress
with Progress(disable=True) as progress:
    jobs = list(compiler.jobs_of(variants, {"x86_64": ("sm_90", "sm_100")}, progress))
    print(len(jobs), flush=True)
    compiler.compile_all(jobs, progress, 2)
"""


def kept(cache):
    return {path.name: path.read_bytes() for path in cache.glob("*.cubin")}


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
        jobs = compiler.jobs_of(compiler.read_variants(["scale", "column_sum"]), {"x86_64": ("sm_90", "sm_100")}, progress)
        compiler.compile_all(jobs, progress, 2)
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


# ---------------------------------------------------------------- what fails a build
def test_a_kernel_that_the_front_end_refuses_is_named_with_the_message(package, tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, KERNELS.replace("ct.full((TILE,), 2.0", "ct.full((TILE + 1,), 2.0"))
    with pytest.raises(BuildError, match="(?s)^second-f32-TILE64: .*65") as error:
        compiler.build(package, ONE, **QUIET)
    assert "power of two" in str(error.value).lower() or "tiny.py" in str(error.value)


def test_bytecode_that_the_compiler_refuses_names_kernel_architecture_host_and_message(cache):
    variant = variant_of("scale", "scale_in_place")
    tileiras = compiler.find_tileiras()
    with pytest.raises(BuildError) as error:
        compiler.compile_image(Job("scale", variant, b"no bytecode", "aarch64", "sm_110"), tileiras, "0")
    head, _, message = str(error.value).partition(": ")
    assert head == f"{variant.name} for sm_110 on aarch64" and message
    assert not kept(cache)


def failing_compiler(tmp_path, monkeypatch, message, status=1):
    """Puts the compiler aside for one that refuses sm_100."""
    path = tmp_path / "tileiras"
    refuse = f'case "$*" in *sm_100*) echo "{message}" >&2; exit {status};; esac'
    path.write_text(f'#!/bin/sh\n{refuse}\nexec {compiler.find_tileiras()} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setattr(compiler, "find_tileiras", lambda: str(path))


@pytest.mark.parametrize(("message", "status"), (("error: too many tiles", 1), ("error: no output", 0), ("", 3)))
def test_a_compiler_that_fails_on_one_architecture_fails_the_build(cache, package, tmp_path, monkeypatch, message, status):
    failing_compiler(tmp_path, monkeypatch, message, status)
    with pytest.raises(BuildError, match=rf"^(first|second)-f32-TILE\d+ for sm_100 on x86_64: {message or 'exit status 3'}"):
        compiler.build(package, {"x86_64": ("sm_90", "sm_100")}, **QUIET)
    assert not cubins_folder(package).exists()


def test_a_kernel_that_spills_without_a_reason_is_named_with_its_bytes():
    variant = spilling()
    image = image_of(variant)
    found = resources(image)
    assert found.stack > 0
    job = Job("rms_norm", variant, b"", "x86_64", "sm_90")
    expected = rf"{variant.name} for sm_90 on x86_64: {found.stack} bytes of stack, {found.registers} registers"
    with pytest.raises(BuildError, match=expected):
        compiler.check_resources({job: image})
    compiler.check_resources({Job("rms_norm", replace(variant, spills="measured"), b"", "x86_64", "sm_90"): image})


def test_a_reason_for_spills_that_is_not_needed_is_named(cache, package, tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, KERNELS.replace('Variant(second, {"x": x, "TILE": tile})',
                                                 'Variant(second, {"x": x, "TILE": tile}, spills="?")'))
    compiler.build(package, ONE, **QUIET)  # another architecture may need it
    monkeypatch.setattr(compiler, "TARGETS", ONE)
    with pytest.raises(BuildError, match="spill nowhere give a reason") as error:
        compiler.build(package, ONE, **QUIET)
    assert str(error.value).splitlines()[1:] == ["second-f32-TILE128", "second-f32-TILE64"]


@pytest.mark.parametrize("params", ('"TILE": tile, "x": x', '"x": x', '"x": x, "TILE": tile, "ROWS": 1'))
def test_parameters_that_are_not_the_kernels_in_its_order_are_named(tmp_path, monkeypatch, params):
    """Two constants that changed places would be compiled as each other."""
    module = write(tmp_path, monkeypatch, KERNELS.replace('"x": x, "TILE": tile', params))
    with pytest.raises(ValueError, match="params of first are .*, expected x, TILE, in this order"):
        next(module.variants())


def spilling():
    """A row of 5120 with as many blocks an SM as fit no registers."""
    return replace(
        variant_of("rms_norm", "rms_norm_backward-bf16.bf16.bf16.bf16.f32.f32-TILE4096-TAIL1024"), hints={"occupancy": 8}, spills=""
    )


def test_all_kernels_that_spill_are_named():
    variant = spilling()
    image = image_of(variant)
    jobs = [Job("rms_norm", variant, b"", "x86_64", a) for a in ("sm_90", "sm_100")]
    with pytest.raises(BuildError) as error:
        compiler.check_resources(dict.fromkeys(jobs, image))
    assert "for sm_90" in str(error.value) and "for sm_100" in str(error.value)


def test_code_for_another_architecture_or_host_is_named():
    variant = variant_of("scale", "scale_in_place")
    image = image_of(variant)
    compiler.check_code({Job("scale", variant, b"", "x86_64", "sm_90"): image})
    for host, architecture in (("x86_64", "sm_100"), ("aarch64", "sm_90")):
        with pytest.raises(BuildError, match=f"scale_in_place.* for {architecture} on {host}: .*sm_90"):
            compiler.check_code({Job("scale", variant, b"", host, architecture): image})


def test_more_registers_than_the_occupancy_allows_are_named():
    variant = variant_of("column_sum", "column_sum")
    image = image_of(variant)
    compiler.check_occupancy({Job("column_sum", variant, b"", "x86_64", "sm_90"): image})
    for hint in (32, PerArchitecture(1, "sm_90", 32)):
        asking = replace(variant, hints={"occupancy": hint})
        with pytest.raises(BuildError, match="registers, .* blocks, asked for 32"):
            compiler.check_occupancy({Job("column_sum", asking, b"", "x86_64", "sm_90"): image})
    assert [compiler.occupancy(asking, name) for name in ("sm_80", "sm_90")] == [1, 32]


def test_two_variants_of_one_name_are_refused(package, tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, KERNELS.replace("Variant(second", "Variant(first"))
    with pytest.raises(BuildError, match="two variants are called first-f32-TILE64 .*tiny and tiny"):
        compiler.build(package, ONE, **QUIET)


@pytest.mark.parametrize(
    "text", ("x86_64", "x86_64:", "x86_64:sm_91", "x86_64:sm_110", "mips:sm_90", "sm_90", "x86_64:sm_90,", "x86_64:sm_90 aarch64:sm_80")
)
def test_a_wrong_target_is_answered_with_the_possible_ones(text):
    with pytest.raises(BuildError, match="no target") as error:
        compiler.parse_targets(text)
    assert text.split()[-1] in str(error.value)
    for host, names in TARGETS.items():
        assert f"{host}:{','.join(names)}" in str(error.value)


def test_targets_are_read_as_they_are_written():
    assert compiler.parse_targets(None) == compiler.parse_targets("") == TARGETS
    assert compiler.parse_targets("x86_64:sm_90,sm_100 aarch64:sm_90") == {"x86_64": ("sm_90", "sm_100"), "aarch64": ("sm_90",)}


def test_a_missing_compiler_is_named_with_the_cure(monkeypatch):
    monkeypatch.setattr(compiler.metadata, "files", lambda name: [])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="tileiras was not found. Install it with: pip install"):
        compiler.find_tileiras()


def printed(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_the_command_prints_the_error_as_it_is_and_ends_with_1(cache, package, tmp_path, monkeypatch, capsys):
    """A compiler's message is full of brackets, which are no markup."""
    message = "error: [rows] of tile<4xf32> [/end] [red]"
    failing_compiler(tmp_path, monkeypatch, message)
    assert compiler.main(["--package", str(package.folder), "--targets", "x86_64:sm_100"]) == 1
    assert f"for sm_100 on x86_64: {message}" in printed(capsys)


def test_the_command_says_that_there_is_no_package(tmp_path, capsys):
    assert compiler.main(["--package", str(tmp_path)]) == 1
    assert "build.toml not found" in printed(capsys)


def test_the_command_prints_a_summary(cache, package, capsys):
    assert compiler.main(["--package", str(package.folder), "--targets", "x86_64:sm_90"]) == 0
    text = printed(capsys)
    assert "tiny" in text and "4 cubins in 0 s" in re.sub(r"in \d+ s", "in 0 s", text)


# ---------------------------------------------------------------- the assembly
@pytest.fixture(scope="module")
def assembled(tmp_path_factory):
    """A copy of the package, compiled for two architectures of each host from two operations, and both variants of it."""
    folder = tmp_path_factory.mktemp("assembled")
    copy_package(folder)
    package = read_package(folder)
    (folder / "kernels.toml").write_text('operations = ["scale", "column_sum"]\n')
    compiler.build(package, {"x86_64": ("sm_80", "sm_90"), "aarch64": ("sm_90", "sm_121")}, **QUIET)
    for backend in ("cuda", "cpu"):
        assemble(package, backend)
    return package


def copy_package(folder):
    shutil.copy(ROOT / "build.toml", folder)
    shutil.copytree(ROOT / "torch-ext", folder / "torch-ext", ignore=shutil.ignore_patterns("__pycache__", "cubins"))


backends = pytest.mark.parametrize("backend", ("cuda", "cpu"))


def test_build_toml_is_what_kernels_expects():
    assert {str(backend) for backend in Build.open(ROOT).general.backends} == {"cuda", "cpu"}


@backends
def test_kernels_reads_the_metadata(assembled, backend):
    folder = assembled.build / f"torch-{backend}"
    metadata = Metadata.read_from_file(folder / "metadata.json")
    assert (str(metadata.name), metadata.version, metadata.license) == ("qwen3", 1, "MIT")
    assert str(metadata.backend.backend_type).lower() == backend
    assert metadata.python_depends == [] and metadata.kernel_depends == []
    assert metadata.id.startswith(f"_qwen3_{backend}_") and metadata.id in (folder / "_ops.py").read_text()
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))


def test_the_architectures_are_those_that_were_built(assembled):
    archs = Metadata.read_from_file(assembled.build / "torch-cuda" / "metadata.json").backend.archs
    assert archs == ["8.0+PTX", "9.0a", "12.1a"]
    assert Metadata.read_from_file(assembled.build / "torch-cpu" / "metadata.json").backend.archs is None


def test_only_the_cuda_variant_has_kernels(assembled):
    cuda, cpu = (set(contents(assembled.build / f"torch-{backend}")) for backend in ("cuda", "cpu"))
    kernels = {"cubins/manifest.json"} | {f"cubins/{host}/{name}.cubins" for host in TARGETS for name in ("scale", "column_sum")}
    assert cuda - cpu == kernels and cpu < cuda


def test_every_file_has_an_extension_that_build_toml_names(assembled):
    allowed = {".py", ".json", ".cubins", ".typed"}
    for folder in package_folders(root=ROOT):
        pyext = tomllib.loads((folder / "build.toml").read_text())["torch-noarch"]["pyext"]
        assert {suffix[1:] for suffix in allowed} <= set(pyext)
    assert {Path(name).suffix for name in contents(assembled.build / "torch-cuda")} == allowed


@backends
def test_two_assemblies_are_the_same_bytes(assembled, tmp_path, backend):
    first = contents(assembled.build / f"torch-{backend}")
    shutil.copytree(assembled.folder, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("build"))
    again = assemble(read_package(tmp_path / "elsewhere"), backend)
    assert contents(again) == first
    assert contents(assemble(assembled, backend)) == first


def test_another_source_is_another_build(assembled, tmp_path):
    copy_package(tmp_path)
    ids = set()
    for text in ("", "# changed\n"):
        with (tmp_path / "torch-ext" / "qwen3" / "layers.py").open("a") as file:
            file.write(text)
        ids.add(Metadata.read_from_file(assemble(read_package(tmp_path), "cpu") / "metadata.json").id)
    assert len(ids) == 2


def test_a_cuda_variant_without_kernels_is_refused(tmp_path):
    copy_package(tmp_path)
    with pytest.raises(PackageError, match="has no manifest.json: compile the kernels first"):
        assemble(read_package(tmp_path), "cuda")


def test_kernels_older_than_their_source_are_not_assembled(cache, package, tmp_path, monkeypatch):
    """By what they are made of, not by the time of a file: a comment makes no kernel older."""
    compiler.build(package, ONE, **QUIET)
    ignored = shutil.ignore_patterns("__pycache__", "cubins")
    shutil.copytree(ROOT / "torch-ext" / "qwen3", package.sources, dirs_exist_ok=True, ignore=ignored)
    assemble(package, "cuda")
    write(tmp_path, monkeypatch, "# a comment\n" + KERNELS)
    assemble(package, "cuda")
    write(tmp_path, monkeypatch, KERNELS.replace("2.0", "3.0"))
    with pytest.raises(PackageError, match="source of tiny in kernel_src has changed since; compile the kernels first .make build"):
        assemble(package, "cuda")
    compiler.build(package, ONE, **QUIET)
    assemble(package, "cuda")
    with monkeypatch.context() as other:
        other.setattr(compiler, "compiler_version", lambda tileiras: "99.9")
        with pytest.raises(PackageError, match="was compiled by .*99.9.* is installed; compile"):
            assemble(package, "cuda")
    (package.folder / "kernels.toml").write_text('operations = ["tiny", "scale"]\n')
    with pytest.raises(PackageError, match="kernels.toml differ in scale; compile"):
        assemble(package, "cuda")


def test_a_change_of_what_a_kernel_imports_is_a_change_of_the_kernel(tmp_path, monkeypatch):
    """swiglu.sigmoid is a part of the experts' kernels, and nothing of the scale's."""
    operations = ("experts", "clamped_gate", "scale")
    before = {name: source_digest(name) for name in operations}
    (tmp_path / "swiglu.py").write_text((ROOT / "kernel_src" / "swiglu.py").read_text() + "\nOTHER = 1\n")
    spec = importlib.util.spec_from_file_location("kernel_src.swiglu", tmp_path / "swiglu.py")
    monkeypatch.setitem(sys.modules, "kernel_src.swiglu", importlib.util.module_from_spec(spec))
    assert [source_digest(name) == before[name] for name in operations] == [False, False, True]


@pytest.mark.parametrize("damage", ("another image", "a file more", "a file less", "no manifest", "half a manifest"))
def test_damaged_kernels_are_not_assembled(assembled, tmp_path, damage):
    shutil.copytree(assembled.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("build"))
    cubins = tmp_path / "copy/torch-ext/qwen3/cubins"
    image = cubins / "x86_64/scale.cubins"
    {
        "another image": lambda: image.write_bytes(b"?"),
        "a file more": lambda: (cubins / "x86_64/other.cubins").write_bytes(b"?"),
        "a file less": image.unlink,
        "no manifest": (cubins / "manifest.json").unlink,
        "half a manifest": lambda: (cubins / "manifest.json").write_text((cubins / "manifest.json").read_text()[:1000]),
    }[damage]()
    with pytest.raises(PackageError, match="compile the kernels first"):
        assemble(read_package(tmp_path / "copy"), "cuda")


def test_a_variant_of_more_than_20_mib_is_refused(assembled, tmp_path):
    shutil.copytree(assembled.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("build"))
    package = read_package(tmp_path / "copy")
    size = sum(map(len, sources(package, "cuda").values()))
    more = package.sources / "more.py"
    more.write_bytes(b"#" * (20 * 2**20 - size))
    assemble(package, "cuda")
    more.write_bytes(b"#" * (20 * 2**20 - size + 1))
    with pytest.raises(PackageError, match="has 20.0 MiB, expected at most 20. Prebuild fewer variants"):
        assemble(package, "cuda")


def test_what_a_former_assembly_left_is_removed(assembled, tmp_path):
    copy_package(tmp_path)
    package = read_package(tmp_path)
    stale = assemble(package, "cpu") / "stale.py"
    stale.write_text("")
    (tmp_path / "build" / "torch-cpu.new").mkdir()
    (tmp_path / "build" / "torch-cpu.new" / "half.py").write_text("")
    assert not (assemble(package, "cpu") / "stale.py").exists()
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["torch-cpu"]


def test_the_commit_and_whether_it_was_clean_are_recorded(tmp_path):
    copy_package(tmp_path)
    (tmp_path / ".gitignore").write_text("build/\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()
    package = read_package(tmp_path)
    for dirty in (False, True):
        kernel = Metadata.read_from_file(assemble(package, "cpu") / "metadata.json").provenance.kernel
        assert (kernel.commit, kernel.dirty) == (commit, dirty)
        (tmp_path / "torch-ext" / "qwen3" / "layers.py").write_text("# changed\n")


# ---------------------------------------------------------------- what ships
SHIPPED = sorted([*(ROOT / "torch-ext").rglob("*.py"), *ROOT.glob("packages/*/torch-ext/**/*.py")])
LATER = {"transformers", "kernels", "liger_kernel"}  # what patching, and the back end inside Liger, look for when they are called
shipped = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(ROOT).as_posix())


def imports(tree, inside=False):
    """(the names of modules that are not relative, whether inside a function) of every import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0], inside
        yield from imports(node, inside or isinstance(node, (ast.FunctionDef, ast.Lambda)))


@shipped
def test_at_import_it_needs_torch_and_the_standard_library_alone(path):
    allowed = set(sys.stdlib_module_names) | {"torch"}
    for name, inside in imports(ast.parse(path.read_text())):
        assert name in allowed or (inside and name in LATER), f"imports {name}"


@shipped
def test_it_is_python_3_9(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for annotation in filter(None, annotations):
            unions = [n for n in ast.walk(annotation) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.BitOr)]
            assert not unions, f"line {annotation.lineno}: X | Y is evaluated, and Python 3.9 cannot"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "zip":
            assert not node.keywords, f"line {node.lineno}: zip(strict=) is Python 3.10"
        assert not isinstance(node, ast.Match)


ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"transformers", "kernels", "cuda", "triton", "accelerate", "tools", "tests", "kernel_src"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
import importlib, torch
qwen3 = importlib.import_module("torch-cpu")
x = torch.ones(2, 8, requires_grad=True)
qwen3.rms_norm(x, torch.ones(8)).sum().backward()
assert qwen3.get_patched_ops() == []
try:
    qwen3.apply()
except ImportError as error:
    print(error)
"""


def test_it_works_where_nothing_else_can_be_imported(package_folder):
    done = subprocess.run([sys.executable, "-c", ALONE, str(package_folder / "build")], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout


# ---------------------------------------------------------------- the kernels: minutes where many changed, so it comes last
# Of an operation that has changed since it was last compiled whole (tools/build_record.py), every variant for one architecture a
# generation, and for all targets the first variant that it gets; of every other operation, that for one architecture a generation.
# `make build` compiles every variant for all of them, with the same checks.
TEST_TARGETS = {"x86_64": ("sm_80", "sm_90", "sm_100", "sm_120")}
GENERATIONS = {**TEST_TARGETS, "aarch64": ("sm_110",)}  # Thor has an Arm host, where it is compiled for


def test_a_generation_has_one_test_target():
    generations = {name[3:-1] for names in TARGETS.values() for name in names}
    assert sorted(name[3:-1] for names in GENERATIONS.values() for name in names) == sorted(generations)
    assert GENERATIONS.keys() == TARGETS.keys() and all(set(names) <= set(TARGETS[host]) for host, names in GENERATIONS.items())


def pairs(targets):
    return {(host, architecture) for host, names in targets.items() for architecture in names}


def targets_here(variants, changed):
    """variant -> its (host, architecture)s here. changed: the operations to compile every variant of."""
    found = {v.name: compiler.targets_of(v, TEST_TARGETS) if operation in changed else [] for operation, v in variants}
    for host, architecture in sorted(pairs(TARGETS)):
        firsts = {operation: v for operation, v in reversed(variants) if not v.targets or architecture in v.targets}
        for operation, variant in firsts.items():
            wanted = operation in changed or (host, architecture) in pairs(GENERATIONS)
            if wanted and (host, architecture) not in found[variant.name]:
                found[variant.name].append((host, architecture))
    return found


def test_every_variant_of_what_changed_is_compiled_and_the_first_of_what_did_not():
    variants = compiler.read_variants(["scale", "column_sum"])
    found = targets_here(variants, {"scale"})
    for operation, of_first, of_others in (("scale", TARGETS, TEST_TARGETS), ("column_sum", GENERATIONS, {})):
        first, *others = (set(found[v.name]) for name, v in variants if name == operation)
        assert first == pairs(of_first)
        assert others and all(targets == pairs(of_others) for targets in others)


def test_what_was_compiled_whole_is_known_by_its_source_and_the_compiler(tmp_path, monkeypatch):
    path, identity = tmp_path / "compiled.json", {"tileiras": "1"}
    assert changed({"scale", "adamw"}, identity, path) == {"scale", "adamw"}
    record(["scale"], identity, path)
    record(["adamw"], identity, path)
    assert changed({"scale", "adamw", "swiglu"}, identity, path) == {"swiglu"}
    assert changed({"scale"}, {"tileiras": "2"}, path) == {"scale"}
    (tmp_path / "scale.py").write_text((ROOT / "kernel_src" / "scale.py").read_text() + "\nOTHER = 1\n")
    spec = importlib.util.spec_from_file_location("kernel_src.scale", tmp_path / "scale.py")
    monkeypatch.setitem(sys.modules, "kernel_src.scale", importlib.util.module_from_spec(spec))
    assert changed({"scale", "adamw"}, identity, path) == {"scale"}
    record(["swiglu"], {"tileiras": "2"}, path)
    assert read_record(path) == {"compiler": {"tileiras": "2"}, "sources": {"swiglu": source_digest("swiglu")}}


def test_only_a_build_for_every_target_is_recorded(capsys):
    for options in (["--here"], ["--targets", "x86_64:sm_90"]):
        with pytest.raises(SystemExit):
            compiler.main(["--record", *options])
        assert "--record is for a build for every target" in capsys.readouterr().err


@pytest.mark.parametrize("most", (20 * 2**20, 1000))
def test_a_package_that_has_become_too_large_is_not_recorded(assembled, tmp_path, monkeypatch, most):
    recorded = []
    monkeypatch.setattr(compiler, "build", lambda *args: None)
    monkeypatch.setattr(compiler, "record", lambda *args: recorded.append(args))
    monkeypatch.setattr(importlib.import_module("tools.assemble"), "SIZE_LIMIT", most)
    shutil.copytree(assembled.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("build"))
    code = compiler.main(["--record", "--package", str(tmp_path / "copy")])
    assert (code, len(recorded)) == ((0, 1) if most > 1000 else (1, 0))


class Compiled:
    """The images of a package, and what did not compile."""

    def __init__(self, folder):
        self.package = read_package(folder)
        self.variants = compiler.read_variants(compiler.operations(self.package))
        self.changed = changed(compiler.operations(self.package), compiler.compiler_identity())
        self.targets = targets_here(self.variants, self.changed)
        tileiras = compiler.find_tileiras()
        version = compiler.compiler_version(tileiras)
        self.failures, self.images, jobs = [], {}, []
        for operation, variant in self.variants:
            if not self.targets[variant.name]:
                continue
            try:
                bytecode = compiler.export(variant)
            except BuildError as error:
                self.failures.append(str(error))
                continue
            jobs += [Job(operation, variant, bytecode, host, architecture) for host, architecture in self.targets[variant.name]]

        def work(job):
            try:
                self.images[job] = compiler.compile_image(job, tileiras, version)
            except BuildError as error:
                self.failures.append(str(error))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(work, jobs))
        self.files = compiler.pack(self.package, self.variants, TARGETS, self.images)
        self.manifest = json.loads(self.files["manifest.json"])


@pytest.fixture(scope="module", params=package_folders(root=ROOT), ids=lambda folder: read_package(folder).name)
def compiled(request):
    """One process compiles and the others find its images in the cache: tests that run on all cores need the images in several."""
    compiler.CACHE.mkdir(parents=True, exist_ok=True)
    with (compiler.CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return Compiled(request.param)


def test_every_operation_compiles_for_one_architecture_a_generation_and_what_changed_for_all(compiled):
    assert not compiled.failures, "\n".join(compiled.failures)
    for _, variant in compiled.variants:
        found = {(job.host, job.architecture) for job in compiled.images if job.variant is variant}
        assert found == set(compiled.targets[variant.name]), variant.name
    for operation in compiler.operations(compiled.package):
        expected = pairs(TARGETS if operation in compiled.changed else GENERATIONS)
        assert {(job.host, job.architecture) for job in compiled.images if job.operation == operation} == expected, operation


CHECKS = (compiler.check_code, compiler.check_resources, compiler.check_occupancy)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_images_are_code_for_their_target_within_its_registers(compiled, check):
    check(compiled.images)


def test_what_was_not_measured_is_every_other_architecture():
    assert {"sm_90", *UNMEASURED} == {architecture for names in TARGETS.values() for architecture in names}


def test_the_manifest_names_every_file_with_its_digest(compiled):
    manifest = compiled.manifest
    assert (manifest["format"], manifest["package"]) == (3, compiled.package.name)
    assert manifest["architectures"] == {host: list(names) for host, names in TARGETS.items()}
    found = {name: hashlib.sha256(data).hexdigest() for name, data in compiled.files.items() if name != "manifest.json"}
    assert manifest["files"] == found
    names = compiler.operations(compiled.package)
    assert set(found) == {f"{host}/{operation}.cubins" for host in TARGETS for operation in names} == set(manifest["streams"])
    assert manifest["sources"] == {name: source_digest(name) for name in names}


def test_the_streams_fill_their_files_and_the_images_their_streams(compiled):
    by_place = {(job.variant.name, job.host, job.architecture): image for job, image in compiled.images.items()}
    unpacked, used = {}, {}
    for name, streams in compiled.manifest["streams"].items():
        file, end = compiled.files[name], 0
        for architecture, (offset, stored, size) in sorted(streams.items(), key=lambda item: item[1]):
            assert offset == end, name
            end = offset + stored
            unpacked[name, architecture] = lzma.decompress(file[offset:end])
            assert len(unpacked[name, architecture]) == size, name
        assert end == len(file), name
    for entries in compiled.manifest["kernels"].values():
        for entry in entries:
            places = [(host, architecture) for host, images in entry["images"].items() for architecture in images]
            assert sorted(places) == sorted(compiled.targets[entry["name"]]), entry["name"]
            for host, architecture in places:
                key = f"{host}/{entry['operation']}.cubins", architecture
                offset, size = entry["images"][host][architecture]
                image = unpacked[key][offset : offset + size]
                assert image == by_place[entry["name"], host, architecture], (entry["name"], host, architecture)
                assert entry["symbol"].encode() in image, entry["name"]
                used.setdefault(key, set()).add((offset, size))
    for key, found in used.items():  # each image once, and nothing between them
        assert sum(size for _, size in found) == len(unpacked[key]), key
    assert used.keys() == unpacked.keys()


def test_the_runtime_reads_what_the_build_wrote(compiled, tmp_path):
    """Every promise of every variant has the name that the runtime checks, and every kernel that an operation calls is there."""
    assert set(compiled.manifest["kernels"]) == {variant.kernel_name for _, variant in compiled.variants}
    names = {entry["name"] for entries in compiled.manifest["kernels"].values() for entry in entries}
    assert names == {variant.name for _, variant in compiled.variants}
    spec = importlib.util.spec_from_file_location("artifacts_of_the_package", ROOT / "torch-ext" / "shared" / "runtime" / "artifacts.py")
    artifacts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(artifacts)
    compiler.write_folder(tmp_path, compiled.files)
    found = artifacts.Artifacts(tmp_path)
    found.verify()
    assert {v.name for kernel in compiled.manifest["kernels"] for v in found.variants(kernel)} == names
