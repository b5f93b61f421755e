"""The files of kernels: damaged ones are refused by name, with the cure."""

import base64
import hashlib
import json
import platform
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.cpu.conftest import REPOSITORY
from tests.fake_driver import CURE, TARGETS, first_variant, flip_a_bit, image_text, in_threads
from tools import compiler, pack, targets
from tools.kernel_package import read_package


def test_an_image_comes_from_the_folder_of_this_host(runtime, cubins):
    shutil.rmtree(cubins / "aarch64")
    artifacts = runtime.artifacts.Artifacts(cubins)
    artifacts.verify()
    assert artifacts.architectures() == ["sm_80", "sm_90"]
    for kernel in artifacts.manifest["kernels"]:
        for variant in artifacts.variants(kernel):
            for architecture in artifacts.architectures():
                assert artifacts.image(variant, architecture) == image_text(variant, "x86_64", architecture)


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
    damage(cubins / "x86_64" / "column_sum.cubins")
    artifacts = runtime.artifacts.Artifacts(cubins)
    for use in (artifacts.verify, lambda: artifacts.image(first_variant(artifacts), "sm_90")):
        with pytest.raises(runtime.artifacts.ArtifactError, match=CURE) as error:
            use()
        assert str(cubins / "x86_64" / "column_sum.cubins") in str(error.value)


def test_a_damaged_file_of_another_operation_does_not_matter_to_an_image(runtime, cubins):
    flip_a_bit(cubins / "x86_64" / "swiglu.cubins")
    artifacts = runtime.artifacts.Artifacts(cubins)
    assert artifacts.image(first_variant(artifacts), "sm_90")
    with pytest.raises(runtime.artifacts.ArtifactError, match="swiglu"):
        artifacts.verify()


def test_a_wrong_digest_is_named(runtime, cubins):
    change_manifest(cubins, lambda m: m["files"].update({"x86_64/column_sum.cubins": "0" * 64}))
    with pytest.raises(runtime.artifacts.ArtifactError, match="sha256 .* expected 0000000000000000"):
        runtime.artifacts.Artifacts(cubins).verify()


def change_manifest(cubins, change):
    path = cubins / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def manifest_error(runtime, cubins) -> str:
    artifacts = runtime.artifacts.Artifacts(cubins)
    with pytest.raises(runtime.artifacts.ArtifactError) as error:
        artifacts.architectures()
        artifacts.verify()
        artifacts.image(first_variant(artifacts), "sm_90")
    assert str(cubins / "manifest.json") in str(error.value)
    return str(error.value)


def test_which_kernels_wait_by_themselves_is_read_and_checked(runtime, cubins):
    def of(kernel):
        return {variant.waits for variant in runtime.artifacts.Artifacts(cubins).variants(kernel)}

    assert of("column_sum") == {True} and of("rms_norm_forward") == {False}
    change_manifest(cubins, lambda m: m["kernels"]["column_sum"][0].update(waits="yes"))
    assert "kernels.column_sum[0].waits" in manifest_error(runtime, cubins)


def test_a_missing_manifest_says_that_there_are_no_kernels(runtime, cubins):
    (cubins / "manifest.json").unlink()
    assert "built without GPU kernels" in manifest_error(runtime, cubins)


@pytest.mark.parametrize(
    "text",
    ("", '{"format": FORMAT', "[]", "7", '{"format": FORMAT}', "\0\1"),
    ids=("empty", "truncated", "list", "number", "no entries", "binary"),
)
def test_a_damaged_manifest_is_refused_by_name(runtime, cubins, text):
    (cubins / "manifest.json").write_text(text.replace("FORMAT", str(runtime.artifacts.FORMAT)))
    assert CURE in manifest_error(runtime, cubins)


def test_a_manifest_that_is_not_text_is_refused_by_name(runtime, cubins):
    (cubins / "manifest.json").write_bytes(b"\xff\xfe\x00")
    assert CURE in manifest_error(runtime, cubins)


def test_a_manifest_of_another_format_is_refused_with_both_numbers(runtime, cubins):
    change_manifest(cubins, lambda m: m.update(format=1))
    message = manifest_error(runtime, cubins)
    assert f"format 1, expected {runtime.artifacts.FORMAT}." in message
    assert CURE in message or "Install" in message


def described(cubins, algorithm="sha256"):
    """Writes the metadata.json that a build has beside its cubins, and returns its path."""
    digest = hashlib.new(algorithm, (cubins / "manifest.json").read_bytes()).digest()
    files = {"__init__.py": "0", "cubins/manifest.json": base64.b64encode(digest).decode()}
    path = cubins.parent / "metadata.json"
    path.write_text(json.dumps({"name": "qwen3", "digest": {"algorithm": algorithm, "files": files}}))
    return path


@pytest.mark.parametrize("name", ("cubins/manifest.json", "metadata.json"))
def test_no_single_flipped_bit_of_a_manifest_is_accepted(runtime, cubins, name):
    """Nor of what metadata.json says of it."""
    described(cubins)
    path, random = cubins.parent / name, Random(0)
    intact = path.read_bytes()
    first = 0 if name != "metadata.json" else intact.index(b'"cubins/manifest.json"')
    for _ in range(500):
        data, place = bytearray(intact), random.randrange(8 * first, 8 * len(intact))
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(runtime.artifacts.ArtifactError, match=CURE) as error:
            runtime.artifacts.Artifacts(cubins).architectures()
        assert str(path) in str(error.value)
    path.write_bytes(intact)
    assert runtime.artifacts.Artifacts(cubins).architectures()


@pytest.mark.parametrize("algorithm", ("sha256", "sha512"))
def test_the_manifest_of_another_build_is_refused(runtime, cubins, algorithm):
    """One that is whole: of a download that was interrupted and went on with another commit."""
    metadata = described(cubins, algorithm)
    assert runtime.artifacts.Artifacts(cubins).architectures()
    change_manifest(cubins, lambda m: m["architectures"]["x86_64"].append("sm_100"))
    assert f"{metadata} lists" in manifest_error(runtime, cubins)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda found: found.pop("digest"), "is damaged .KeyError: 'digest'"),
        (lambda found: found.update(digest=[]), "is damaged .TypeError"),
        (lambda found: found["digest"].update(files=None), "is damaged .AttributeError"),
        (lambda found: found["digest"].update(algorithm="crc"), "is damaged .ValueError.*crc"),
        (lambda found: found["digest"]["files"].pop("cubins/manifest.json"), "lists no such file, found "),
        (lambda found: found["digest"]["files"].update({"cubins/manifest.json": None}), "lists None, found "),
    ),
)
def test_metadata_that_does_not_say_what_the_manifest_is_is_refused(runtime, cubins, change, message):
    path = described(cubins)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(runtime.artifacts.ArtifactError, match=f"{path} {message}.*{CURE}"):
        runtime.artifacts.Artifacts(cubins).architectures()


def test_a_manifest_that_was_not_downloaded_is_no_build_without_kernels(runtime, cubins):
    path = described(cubins)
    (cubins / "manifest.json").unlink()
    assert f"{path} lists " in (text := manifest_error(runtime, cubins)) and CURE in text
    path.write_text('{"digest": {"algorithm": "sha256", "files": {}}}')  # a build for the CPU
    assert "built without GPU kernels" in manifest_error(runtime, cubins)


@pytest.mark.parametrize("key", ("format", "align", "column_sum"))
def test_a_key_that_stands_twice_is_refused(runtime, cubins, key):
    """Python takes the last one, and another reader the first."""
    path = cubins / "manifest.json"
    text = path.read_text()
    name = re.search(rf'"[^"]*{key}[^"]*":', text)
    path.write_text(text[: name.start()] + f"{name[0]}1," + text[name.start() :])
    assert "a key stands twice among" in (found := manifest_error(runtime, cubins)) and CURE in found


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
    name = f"x86_64/{variant.operation}.cubins"
    monkeypatch.setattr(artifacts, "_stream", lambda *_: b"before" + image)
    variant = variant._replace(images={"sm_90": [6, len(image)]})
    if image in WHOLE:
        assert artifacts.image(variant, "sm_90") == image
        return
    with pytest.raises(runtime.artifacts.ArtifactError, match=f"no whole ELF file.*{CURE}") as error:
        artifacts.image(variant, "sm_90")
    assert str(cubins / name) in str(error.value) and variant.name in str(error.value)


@pytest.mark.parametrize("number", (0, 1, 2), ids=("offset", "stored", "size"))
@pytest.mark.parametrize("change", (-1, 1))
def test_a_stream_that_is_not_what_the_manifest_says_is_refused(runtime, cubins, number, change):
    def move(manifest):
        manifest["streams"]["x86_64/column_sum.cubins"]["sm_90"][number] += change

    change_manifest(cubins, move)
    artifacts = runtime.artifacts.Artifacts(cubins)
    with pytest.raises(runtime.artifacts.ArtifactError, match=CURE) as error:
        artifacts.image(first_variant(artifacts), "sm_90")
    assert str(cubins) in str(error.value)


def test_an_image_beyond_the_end_of_its_stream_is_refused(runtime, cubins):
    def change(manifest):
        for entry in manifest["kernels"]["column_sum"]:
            entry["images"]["x86_64"]["sm_90"][0] += manifest["streams"]["x86_64/column_sum.cubins"]["sm_90"][2]

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
    assert calls == [("x86_64/column_sum.cubins", "sm_90")]


def test_what_a_model_needs_is_unpacked_ahead(runtime, cubins, monkeypatch):
    """Once, whoever asks first; not where it would not all stay in memory; and what is wrong with it hears who asks."""
    artifacts = runtime.artifacts.Artifacts(cubins)
    calls, unpack = [], artifacts._unpack
    monkeypatch.setattr(artifacts, "_unpack", lambda *key: calls.append(key) or unpack(*key))
    streams = {name for name in artifacts.manifest["streams"] if name.startswith("x86_64/")}
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
        for places in manifest["streams"].values():
            places["sm_90"][2] += 1

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
    (cubins / "x86_64" / "attention.cubins").write_bytes(b"from somewhere else")
    with pytest.raises(runtime.artifacts.ArtifactError, match=f"attention.cubins is not listed in .*manifest.json. .*{CURE}"):
        runtime.artifacts.Artifacts(cubins).verify()


def nested(depth):
    return "[" * depth + "]" * depth


def of_format(text, found):
    return re.sub(r'"format":\d+', f'"format":{found}', text)


MANIFESTS = (
    lambda text: text[: len(text) // 2],
    lambda text: nested(100_000),
    lambda text: text.replace('"kernels":{', '"kernels":' + nested(100_000) + ',"others":{'),
    lambda text: of_format(text, "9" * 400),
    lambda text: of_format(text, "9" * 5000),
    lambda text: of_format(text, "1e999"),
    lambda text: of_format(text, "true"),
    lambda text: text.replace('"align":4', '"align":' + "9" * 400),
    lambda text: text.replace('"align":4', '"align":0'),
    lambda text: text.replace('"parameters":[0', '"parameters":[-1'),
    lambda text: text.replace('"parameters":[0', '"parameters":[9999'),
    lambda text: text.replace('"parameters":[{', '"parameters":[[],{'),
    lambda text: text.replace("x86_64/column_sum", "../../etc/passwd"),
    lambda text: text.replace("bastile_column_sum", "bastile\\ud800"),
)


@pytest.mark.parametrize("change", MANIFESTS)
def test_a_manifest_that_no_build_writes_is_refused_by_name_with_the_cure(runtime, cubins, change):
    path = cubins / "manifest.json"
    text = change(path.read_text())
    assert text != path.read_text()
    path.write_text(text)
    assert CURE in manifest_error(runtime, cubins)


@pytest.mark.parametrize("name", ("manifest.json", "x86_64", "x86_64/swiglu.cubins"))
@pytest.mark.parametrize("as_file", (False, True), ids=("folder", "file"))
def test_a_file_in_place_of_a_folder_or_a_folder_in_place_of_a_file_is_refused(runtime, cubins, name, as_file):
    path = cubins / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.write_bytes(b"") if as_file else path.mkdir()
    with pytest.raises(runtime.artifacts.ArtifactError, match=CURE) as error:
        runtime.artifacts.Artifacts(cubins).verify()
    assert str(path) in str(error.value)


def parts(value, path=()):
    """The path of every part of a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from parts(value[key], (*path, key))


NUMBERS, TEXTS = (True, -1, 0, 7, 10**400, 1e999, 0.5), ("", "sm_90", "../x", "\ud800")

OTHERS = (None, *NUMBERS, *TEXTS, [], [None], [1, 2, 3], ["x"], {}, {"x": 1}, {"sm_90": [0, 1, 2]})


def mutated(manifest, random):
    """A copy with one part taken out, replaced, doubled, renamed or swapped with another."""
    manifest = json.loads(json.dumps(manifest))
    paths = list(parts(manifest))[1:]
    *above, key = random.choice(paths)
    parent = manifest
    for step in above:
        parent = parent[step]
    kind = random.choice(("delete", "replace", "replace", "rename", "swap"))
    if kind == "delete":
        del parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        parent[random.choice(("", "other", "sm_90", "x86_64", "../x"))] = parent.pop(key)
    elif kind == "swap":
        value = manifest
        for step in random.choice(paths):
            value = value[step]
        parent[key] = json.loads(json.dumps(value))
    else:
        parent[key] = random.choice(OTHERS)
    return manifest


def use_everything(runtime, cubins):
    """What a process does with the artifacts, from the first question to each image."""
    artifacts = runtime.artifacts.Artifacts(cubins)
    artifacts.architectures(), artifacts.operations(), artifacts.digest
    artifacts.verify()
    for kernel in artifacts.manifest["kernels"]:
        for variant in artifacts.variants(kernel):
            assert all(hash(parameter) for parameter in variant.parameters) and variant.symbol.encode()
            for architecture in variant.images:
                artifacts.image(variant, architecture)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_wrong_with_a_manifest_is_one_kind_of_error_that_names_file_and_cure(runtime, tmp_path, seed):
    """Mutations of a small real one: each is refused with an ArtifactError, or does no harm."""
    folder = tmp_path / "cubins"
    variants = targets.read_variants(("column_sum", "scale"))
    variants = [next(v for v in variants if v[0] == operation) for operation in ("column_sum", "scale")]
    jobs = [compiler.Job(operation, v, b"", host, a) for operation, v in variants for host, names in TARGETS.items() for a in names]
    images = {job: image_text(job.variant, job.host, job.architecture, 40) for job in jobs}
    pack.write_folder(folder, pack.pack(read_package(REPOSITORY), variants, TARGETS, images))
    use_everything(runtime, folder)
    manifest, random, refused = json.loads((folder / "manifest.json").read_text()), Random(seed), 0
    for _ in range(300):
        found = mutated(manifest, random)
        if random.random() < 0.2:
            found = mutated(found, random)
        (folder / "manifest.json").write_text(json.dumps(found))
        try:
            use_everything(runtime, folder)
        except runtime.artifacts.ArtifactError as error:
            assert str(folder) in str(error) and CURE in str(error) and len(str(error)) < 1000
            refused += 1
    assert 100 < refused < 300
