"""Every kernel compiles, is code for its target within its registers, and is found in what the build wrote."""

import fcntl
import hashlib
import importlib.util
import json
import lzma
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import pytest

from kernel_src.prebuild import UNMEASURED
from tests.building import ROOT
from tools import build_checks, compiler, pack, targets
from tools import compile as compile_
from tools.build_record import changed, read_record, read_spills, record
from tools.compiler import Job
from tools.elf import resources
from tools.kernel_package import package_folders, read_package
from tools.kernel_sources import source_digest
from tools.targets import TARGETS, BuildError

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
    found = {v.name: targets.targets_of(v, TEST_TARGETS) if operation in changed else [] for operation, v in variants}
    for host, architecture in sorted(pairs(TARGETS)):
        firsts = {operation: v for operation, v in reversed(variants) if not v.targets or architecture in v.targets}
        for operation, variant in firsts.items():
            wanted = operation in changed or (host, architecture) in pairs(GENERATIONS)
            if wanted and (host, architecture) not in found[variant.name]:
                found[variant.name].append((host, architecture))
    return found


def test_every_variant_of_what_changed_is_compiled_and_the_first_of_what_did_not():
    variants = targets.read_variants(["scale", "column_sum"])
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
            compile_.main(["--record", *options])
        assert "--record is for a build for every target" in capsys.readouterr().err


@pytest.mark.parametrize("most", (20 * 2**20, 1000))
def test_a_package_that_has_become_too_large_is_not_recorded(assembled, tmp_path, monkeypatch, most):
    recorded, spills = [], []
    monkeypatch.setattr(compile_, "build", lambda *args: {"a": {"sm_80": 8}})
    monkeypatch.setattr(compile_, "read_spills", lambda: {"b": {"sm_90": 16}})
    monkeypatch.setattr(compile_, "record", lambda *args: recorded.append(args))
    monkeypatch.setattr(compile_, "record_spills", spills.append)
    monkeypatch.setattr(importlib.import_module("tools.assemble"), "SIZE_LIMIT", most)
    shutil.copytree(assembled.folder, tmp_path / "copy", symlinks=True, ignore=shutil.ignore_patterns("build"))
    code = compile_.main(["--record", "--package", str(tmp_path / "copy")])
    assert (code, len(recorded)) == ((0, 1) if most > 1000 else (1, 0))
    assert spills == [{"a": {"sm_80": 8}, "b": {"sm_90": 16}}] * len(recorded)


class Compiled:
    """The images of a package, and what did not compile."""

    def __init__(self, folder):
        self.package = read_package(folder)
        self.variants = targets.read_variants(targets.operations(folder))
        self.changed = changed(targets.operations(folder), compiler.compiler_identity())
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
        self.files = pack.pack(self.package, self.variants, TARGETS, self.images)
        self.manifest = json.loads(self.files["manifest.json"])


CHANGED = changed({name for folder in package_folders(root=ROOT) for name in targets.operations(folder)}, compiler.compiler_identity())


def unless_recorded(operations):
    """Marks for `make test-all` alone, where kernel_src/compiled.json says that this compiler has compiled all of these operations."""
    return [pytest.mark.whole] if CHANGED.isdisjoint(operations) else []


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(folder, id=read_package(folder).name, marks=unless_recorded(targets.operations(folder)))
        for folder in package_folders(root=ROOT)
    ],
)
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
    for operation in targets.operations(compiled.package.folder):
        variants = [variant for name, variant in compiled.variants if name == operation]
        served = {pair for pair in pairs(TARGETS) if any(not variant.targets or pair[1] in variant.targets for variant in variants)}
        expected = pairs(TARGETS if operation in compiled.changed else GENERATIONS) & served
        assert expected and {(job.host, job.architecture) for job in compiled.images if job.operation == operation} == expected, operation


DELTA_RULES = ("gated_delta", "gated_delta_backward")
CHECKS = (build_checks.check_code, build_checks.check_resources, build_checks.check_occupancy)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_images_are_code_for_their_target_within_its_registers(compiled, check):
    check(compiled.images)


def test_what_spills_is_recorded_and_spills_no_more(compiled):
    """Every variant with a reason is in kernel_src/spills.json with the architectures that it is compiled for."""
    recorded, found = read_spills(), build_checks.spills_of(compiled.images)
    for _, variant in compiled.variants:
        names = {architecture for _, architecture in targets.targets_of(variant, TARGETS)} if variant.spills else set()
        assert set(recorded.get(variant.name, ())) == names, variant.name
        assert not names or max(recorded[variant.name].values()) > 0, "it has a reason, but nothing spills"
    build_checks.check_spills(compiled.images, recorded)
    for name, of_variant in found.items():
        assert of_variant.items() <= recorded[name].items(), "the record is of other code"
        for architecture, bytes_ in of_variant.items():
            if bytes_:
                with pytest.raises(BuildError, match=f"{architecture}: {bytes_} bytes, recorded {bytes_ - 1}"):
                    build_checks.check_spills(compiled.images, {name: {architecture: bytes_ - 1}})


@pytest.mark.parametrize("operations", [pytest.param(DELTA_RULES, id="", marks=unless_recorded(DELTA_RULES))])
def test_the_delta_rules_kernels_spill_what_is_recorded(operations):
    """What is faster with spills on an H200, and, on one architecture a generation, nothing of those whose sums are made in parts."""

    def is_in_parts(variant):
        return bool(variant.params.get("SPLIT")) or variant.kernel_name in ("delta_gates", "delta_keys")

    tileiras = compiler.find_tileiras()
    version, images = compiler.compiler_version(tileiras), {}
    for operation, variant in targets.read_variants(operations):
        chosen = bool(variant.spills) or is_in_parts(variant)
        bytecode = compiler.export(variant) if chosen else b""
        for host, architecture in targets.targets_of(variant, TEST_TARGETS) if chosen else ():
            job = Job(operation, variant, bytecode, host, architecture)
            images[job] = compiler.compile_image(job, tileiras, version)
    found = build_checks.spills_of(images)
    assert len(found) == 3 and {architecture for of_variant in found.values() for architecture in of_variant} == {"sm_90"}
    parts = {job: resources(image).stack for job, image in images.items() if is_in_parts(job.variant)}
    assert {job.architecture for job in parts} == {"sm_80", "sm_120"} and len(parts) == 10 and not any(parts.values())
    for name, of_variant in found.items():
        assert of_variant.items() <= read_spills()[name].items()


def test_what_was_not_measured_is_every_other_architecture():
    assert {"sm_90", *UNMEASURED} == {architecture for names in TARGETS.values() for architecture in names}


def test_the_manifest_names_every_file_with_its_digest(compiled):
    manifest = compiled.manifest
    assert (manifest["format"], manifest["package"]) == (4, compiled.package.name)
    assert manifest["architectures"] == {host: list(names) for host, names in TARGETS.items()}
    found = {name: hashlib.sha256(data).hexdigest() for name, data in compiled.files.items() if name != "manifest.json"}
    assert manifest["files"] == found
    names = targets.operations(compiled.package.folder)
    assert set(found) == {f"{operation}.cubins" for operation in names} == set(manifest["streams"])
    assert manifest["sources"] == {name: source_digest(name) for name in names}


def test_the_streams_fill_their_files_the_parts_their_streams_and_the_images_their_parts(compiled):
    by_place = {(job.variant.name, job.host, job.architecture): image for job, image in compiled.images.items()}
    unpacked, used = {}, {}
    for name, hosts in compiled.manifest["streams"].items():
        file, end = compiled.files[name], 0
        parts = [(place, (name, host, architecture)) for host, places in hosts.items() for architecture, place in places.items()]
        for (start, stored), together in groupby(sorted(parts), key=lambda part: part[0][:2]):
            assert start == end, name
            end, stream = start + stored, lzma.decompress(file[start : start + stored])
            filled = 0
            for (*_, offset, size), key in together:
                assert offset == filled, key
                filled += size
                unpacked[key] = stream[offset:filled]
            assert filled == len(stream), name
        assert end == len(file), name
    for entries in compiled.manifest["kernels"].values():
        for entry in entries:
            places = [(host, architecture) for host, images in entry["images"].items() for architecture in images]
            assert sorted(places) == sorted(compiled.targets[entry["name"]]), entry["name"]
            for host, architecture in places:
                key = f"{entry['operation']}.cubins", host, architecture
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
    pack.write_folder(tmp_path, compiled.files)
    found = artifacts.Artifacts(tmp_path)
    found.verify()
    assert {v.name for kernel in compiled.manifest["kernels"] for v in found.variants(kernel)} == names
