"""The files of images: damaged ones are refused by name, with the cure."""

import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_driver import CURE, TARGETS, change_manifest, first_variant, flip_a_bit, image_text, in_threads, manifest_error


@pytest.mark.parametrize("machine", TARGETS)
def test_an_image_is_one_of_this_host(runtime, cubins, monkeypatch, machine):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    artifacts = runtime.artifacts.Artifacts(cubins)
    artifacts.verify()
    assert artifacts.architectures() == list(TARGETS[machine])
    for kernel in artifacts.manifest["kernels"]:
        for variant in artifacts.variants(kernel):
            for architecture in artifacts.architectures():
                assert artifacts.image(variant, architecture) == image_text(variant, machine, architecture)


@pytest.mark.parametrize(
    ("machine", "expected"), (("AMD64", "x86_64"), ("arm64", "aarch64"), ("aarch64", "aarch64"), ("riscv64", "riscv64"))
)
def test_a_host_is_known_by_each_of_its_names(runtime, monkeypatch, machine, expected):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert runtime.artifacts.host() == expected


def test_a_host_without_kernels_has_no_architectures(runtime, cubins, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    artifacts = runtime.artifacts.Artifacts(cubins)
    assert artifacts.architectures() == []
    assert first_variant(artifacts).images == {}
    artifacts.verify()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def make_a_folder_of(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", (flip_a_bit, truncate, empty, lambda path: path.unlink(), make_a_folder_of))
def test_a_damaged_file_of_images_is_refused_by_name(runtime, cubins, damage):
    damage(cubins / "column_sum.cubins")
    artifacts = runtime.artifacts.Artifacts(cubins)
    for use in (artifacts.verify, lambda: artifacts.image(first_variant(artifacts), "sm_90")):
        with pytest.raises(runtime.artifacts.ArtifactError, match=CURE) as error:
            use()
        assert str(cubins / "column_sum.cubins") in str(error.value)


def test_a_damaged_file_of_another_operation_does_not_matter_to_an_image(runtime, cubins):
    flip_a_bit(cubins / "swiglu.cubins")
    artifacts = runtime.artifacts.Artifacts(cubins)
    assert artifacts.image(first_variant(artifacts), "sm_90")
    with pytest.raises(runtime.artifacts.ArtifactError, match="swiglu"):
        artifacts.verify()


def test_a_wrong_digest_is_named(runtime, cubins):
    change_manifest(cubins, lambda m: m["files"].update({"column_sum.cubins": "0" * 64}))
    with pytest.raises(runtime.artifacts.ArtifactError, match="sha256 .* expected 0000000000000000"):
        runtime.artifacts.Artifacts(cubins).verify()


def an_elf(**changes):
    """A small ELF file of two segments and three sections with one number changed."""
    fields = {"mark": b"\x7fELF", "segments": 64, "sections": 64 + 2 * 56, "segment_count": 2, "section_count": 3}
    places = {"segment": (368, 8), "section": (376, 4), "shared": (0, 2**40)}  # the last one is not in the file
    fields |= {name: value for name, value in changes.items() if name in fields}
    places |= {name: value for name, value in changes.items() if name in places}
    header = struct.pack("<4s28xQQ8xH2xH2x", *fields.values())
    segments = struct.pack("<8xQ16xQ16x", 0, 380) + struct.pack("<8xQ16xQ16x", *places["segment"])
    kinds = [struct.pack("<4xI16xQQ24x", kind, *place) for kind, place in ((0, (0, 0)), (1, places["section"]), (8, places["shared"]))]
    return header + segments + b"".join(kinds) + bytes(380 - 368)


WHOLE = (an_elf(), an_elf(segments=0, segment_count=0), an_elf(section=(380, 0)), an_elf() + b"more")

NOT_WHOLE = (
    b"",
    b"\x7fELF",
    b"MZ" + an_elf()[2:],
    an_elf(mark=b"\x7fELG"),
    an_elf()[:-1],
    an_elf()[:63],
    b"\0" + an_elf(),
    an_elf()[1:],
    an_elf(segments=380 - 111),
    an_elf(sections=380 - 191),
    an_elf(sections=2**63),
    an_elf(segment_count=300),
    an_elf(section_count=65535),
    an_elf(segment=(376, 5)),
    an_elf(section=(377, 4)),
    an_elf(section=(2**63, 2**63)),
)


@pytest.mark.parametrize("image", (*WHOLE, *NOT_WHOLE))
def test_the_driver_gets_whole_elf_files_alone(runtime, cubins, monkeypatch, image):
    """It is told no size, and reads as far as the headers say."""
    artifacts = runtime.artifacts.Artifacts(cubins)
    variant = first_variant(artifacts)
    name = f"{variant.operation}.cubins"
    monkeypatch.setattr(artifacts, "_stream", lambda *_: b"before" + image)
    variant = variant._replace(images={"sm_90": [6, len(image)]})
    if image in WHOLE:
        assert artifacts.image(variant, "sm_90") == image
        return
    with pytest.raises(runtime.artifacts.ArtifactError, match=f"no whole ELF file.*{CURE}") as error:
        artifacts.image(variant, "sm_90")
    assert str(cubins / name) in str(error.value) and variant.name in str(error.value)


@pytest.mark.parametrize("number", range(4), ids=("stream", "stored", "part", "size"))
@pytest.mark.parametrize("change", (-1, 1, -1000, 1000, 10**6))
@pytest.mark.parametrize("architecture", ("sm_80", "sm_90"))
def test_an_image_is_right_or_refused_whatever_the_manifest_says_of_its_stream(runtime, cubins, architecture, number, change):
    """A byte more or less of a stream whose end nobody reads does no harm."""

    def move(manifest):
        manifest["streams"]["column_sum.cubins"]["x86_64"][architecture][number] += change

    change_manifest(cubins, move)
    artifacts = runtime.artifacts.Artifacts(cubins)
    try:
        variant = first_variant(artifacts)
        assert artifacts.image(variant, architecture) == image_text(variant, "x86_64", architecture) and number in (1, 3)
    except runtime.artifacts.ArtifactError as error:
        assert CURE in str(error) and str(cubins) in str(error)


def test_an_image_beyond_the_end_of_its_stream_is_refused(runtime, cubins):
    def change(manifest):
        for entry in manifest["kernels"]["column_sum"]:
            entry["images"]["x86_64"]["sm_90"][0] += manifest["streams"]["column_sum.cubins"]["x86_64"]["sm_90"][3]

    change_manifest(cubins, change)
    assert "kernels.column_sum[0].images.x86_64.sm_90" in manifest_error(runtime, cubins)


def test_what_one_gpu_needs_is_read_once_and_little_of_it_stays_unpacked(runtime, cubins, monkeypatch):
    artifacts = runtime.artifacts.Artifacts(cubins)
    artifacts.verify("sm_90")
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"reads {path}"))
    artifacts.verify("sm_90")
    assert {architecture for _, architecture in artifacts._streams} == {"sm_90"}
    variants = {kernel: artifacts.variants(kernel) for kernel in artifacts.manifest["kernels"]}
    monkeypatch.setattr(runtime.artifacts, "UNPACKED", 6000)
    for found in (variants, dict(reversed(variants.items()))):
        for variant in (variant for kernel in found.values() for variant in kernel):
            assert artifacts.image(variant, "sm_90") == image_text(variant, "x86_64", "sm_90")
            assert len(artifacts._unpacked) == 1 or sum(map(len, artifacts._unpacked.values())) <= 6000


def test_a_stream_is_unpacked_once_for_the_images_that_are_asked_for_together(runtime, cubins, monkeypatch):
    artifacts = runtime.artifacts.Artifacts(cubins)
    calls, unpack = [], artifacts._unpack
    monkeypatch.setattr(artifacts, "_unpack", lambda *key: calls.append(key) or unpack(*key))
    for variant in artifacts.variants("column_sum"):
        artifacts.image(variant, "sm_90")
    in_threads(6, lambda _: artifacts.image(first_variant(artifacts), "sm_90"))
    assert calls == [("column_sum.cubins", "sm_90")]


def test_what_a_model_needs_is_unpacked_ahead(runtime, cubins, monkeypatch):
    """Once, whoever asks first; not where it would not all stay in memory; and what is wrong with it hears who asks."""
    artifacts = runtime.artifacts.Artifacts(cubins)
    calls, unpack = [], artifacts._unpack
    monkeypatch.setattr(artifacts, "_unpack", lambda *key: calls.append(key) or unpack(*key))
    streams = artifacts.manifest["streams"]
    artifacts.unpack_ahead("sm_90")
    for kernel in artifacts.manifest["kernels"]:
        for variant in artifacts.variants(kernel):
            assert artifacts.image(variant, "sm_90") == image_text(variant, "x86_64", "sm_90")
    in_threads(2, lambda _: artifacts.image(first_variant(artifacts), "sm_90"))
    assert sorted(calls) == sorted((name, "sm_90") for name in streams)
    monkeypatch.setattr(runtime.artifacts, "UNPACKED", 1)
    monkeypatch.setattr(runtime.artifacts, "ThreadPoolExecutor", lambda *args: pytest.fail("starts threads"))
    runtime.artifacts.Artifacts(cubins).unpack_ahead("sm_90")
    monkeypatch.undo()

    def change(manifest):
        for hosts in manifest["streams"].values():
            hosts["x86_64"]["sm_90"][2] += 1

    change_manifest(cubins, change)
    damaged = runtime.artifacts.Artifacts(cubins)
    damaged.unpack_ahead("sm_90")
    with pytest.raises(runtime.artifacts.ArtifactError, match=CURE):
        damaged.image(first_variant(damaged), "sm_90")


def test_a_python_without_lzma_is_named_with_the_cure(runtime, cubins, monkeypatch):
    monkeypatch.setattr(runtime.artifacts, "lzma", None)
    artifacts = runtime.artifacts.Artifacts(cubins)
    assert artifacts.architectures() == ["sm_80", "sm_90"]
    for use in (artifacts.verify, lambda: artifacts.image(first_variant(artifacts), "sm_90")):
        with pytest.raises(runtime.artifacts.ArtifactError, match="no module lzma.*liblzma-dev"):
            use()


def test_it_is_imported_by_a_python_without_lzma(runtime):
    script = "import sys; sys.modules['_lzma'] = None; import runpy; print(runpy.run_path(sys.argv[1])['lzma'])"
    done = subprocess.run([sys.executable, "-c", script, runtime.artifacts.__file__], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_an_unknown_kernel_is_answered_with_those_there_are(runtime, cubins):
    """And not with a cure that cannot help: another download has no more."""
    match = "no kernel 'attention'; it has .*column_sum.*swiglu_forward.*built without this one.*kernels.toml"
    with pytest.raises(runtime.artifacts.KernelMissing, match=match) as error:
        runtime.artifacts.Artifacts(cubins).variants("attention")
    assert CURE not in str(error.value)


def test_an_unlisted_file_of_kernels_is_refused(runtime, cubins):
    (cubins / "attention.cubins").write_bytes(b"from somewhere else")
    with pytest.raises(runtime.artifacts.ArtifactError, match=f"attention.cubins is not listed in .*manifest.json. .*{CURE}"):
        runtime.artifacts.Artifacts(cubins).verify()


@pytest.mark.parametrize("name", ("manifest.json", "swiglu.cubins"))
@pytest.mark.parametrize("as_file", (False, True), ids=("folder", "file"))
def test_a_file_in_place_of_a_folder_or_a_folder_in_place_of_a_file_is_refused(runtime, cubins, name, as_file):
    path = cubins / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.write_bytes(b"") if as_file else path.mkdir()
    with pytest.raises(runtime.artifacts.ArtifactError, match=CURE) as error:
        runtime.artifacts.Artifacts(cubins).verify()
    assert str(path) in str(error.value)
