"""The manifest of the files of kernels, and what metadata.json says of it: one that is damaged is refused by name, with the cure."""

import base64
import hashlib
import json
import re
from random import Random

import pytest

from tests.cpu.conftest import REPOSITORY
from tests.fake_driver import CURE, TARGETS, change_manifest, image_text, manifest_error
from tools import compiler, pack, targets
from tools.kernel_package import read_package


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
    lambda text: text.replace("column_sum.cubins", "../../etc/passwd"),
    lambda text: text.replace("bastile_column_sum", "bastile\\ud800"),
)


@pytest.mark.parametrize("change", MANIFESTS)
def test_a_manifest_that_no_build_writes_is_refused_by_name_with_the_cure(runtime, cubins, change):
    path = cubins / "manifest.json"
    text = change(path.read_text())
    assert text != path.read_text()
    path.write_text(text)
    assert CURE in manifest_error(runtime, cubins)


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
