"""The runtime without a GPU: files that are damaged, promises that are broken, and a driver that answers as a test wants."""

import contextlib
import ctypes
import importlib
import json
import platform
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
import types
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch

from interpreter.backend import InterpreterBackend
from tests.cpu.conftest import REPOSITORY, assemble_cpu, load
from tools import compile as compiler
from tools.kernel_package import read_package

OPERATIONS = ("column_sum", "rms_norm", "swiglu", "cross_entropy")
TARGETS = {"x86_64": ("sm_80", "sm_90"), "aarch64": ("sm_90",)}
CURE = "download it again"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """The modules of the runtime, of a build that no other test loads."""
    package = load(assemble_cpu(tmp_path_factory.mktemp("runtime"), "\n# without a driver\n"))
    names = ("artifacts", "driver", "launch", "device")
    return types.SimpleNamespace(**{name: importlib.import_module(f"{package.__name__}.shared.runtime.{name}") for name in names})


@pytest.fixture(autouse=True)
def an_x86_64_host(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A folder of cubins as the build writes it, each image the text of its own name."""
    folder = tmp_path_factory.mktemp("intact") / "cubins"
    variants = compiler.read_variants(OPERATIONS)
    jobs = [
        compiler.Job(operation, variant, b"", host, architecture)
        for operation, variant in variants
        for host, architectures in TARGETS.items()
        for architecture in architectures
    ]
    images = {job: image_text(job.variant, job.host, job.architecture) for job in jobs}
    compiler.write_folder(folder, compiler.pack(read_package(REPOSITORY), variants, TARGETS, images))
    return folder


def image_text(variant, host, architecture) -> bytes:
    return f"{variant.name} {host} {architecture}".encode()


@pytest.fixture
def cubins(intact, tmp_path):
    """A copy to damage."""
    return shutil.copytree(intact, tmp_path / "cubins")


# ---------------------------------------------------------------- the files
def first_variant(artifacts, kernel="column_sum"):
    return artifacts.variants(kernel)[0]


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


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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
    with pytest.raises(runtime.artifacts.ArtifactError, match="no kernel 'attention'; it has .*column_sum.*swiglu_forward"):
        runtime.artifacts.Artifacts(cubins).variants("attention")


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
    variants = compiler.read_variants(("column_sum", "scale"))
    variants = [next(v for v in variants if v[0] == operation) for operation in ("column_sum", "scale")]
    jobs = [compiler.Job(operation, v, b"", host, a) for operation, v in variants for host, names in TARGETS.items() for a in names]
    images = {job: 40 * image_text(job.variant, job.host, job.architecture) for job in jobs}
    compiler.write_folder(folder, compiler.pack(read_package(REPOSITORY), variants, TARGETS, images))
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


# ---------------------------------------------------------------- promises
PARAMETER = {
    "name": "x",
    "kind": "array",
    "dtype": "bfloat16",
    "align": 16,
    "shape": (None, 128),
    "shape_divisible": (4, 1),
    "shape_min": (8, 1),
    "stride": (None, 1),
    "stride_divisible": (8, 1),
}
KEPT = {"dtype": "bfloat16", "shape": (8, 128), "stride": (128, 1), "misalignment": 0}


def broken(runtime, found, promises=None):
    parameter = runtime.artifacts.Parameter(**{**PARAMETER, **(promises or {})})
    return runtime.launch.broken_promise(parameter, **{**KEPT, **found})


def test_an_array_that_keeps_every_promise_is_taken(runtime):
    assert broken(runtime, {}) == ""


@pytest.mark.parametrize(
    ("found", "promises", "reason"),
    (
        ({"dtype": "float16"}, {}, "has dtype float16, expected bfloat16"),
        ({"shape": (8, 1, 128), "stride": (128, 128, 1)}, {}, "has 3 dimensions, expected 2"),
        ({"misalignment": 8}, {}, "starts 8 bytes past a multiple of 16, expected a multiple of 16"),
        ({"misalignment": 1}, {"align": 2}, "starts 1 bytes past a multiple of 16, expected a multiple of 2"),
        ({"shape": (8, 64)}, {}, "has length 64 in dimension 1, expected 128"),
        ({"shape": (9, 128)}, {}, "has length 9 in dimension 0, expected a multiple of 4"),
        ({"shape": (4, 128)}, {}, "has length 4 in dimension 0, expected at least 8"),
        ({"shape": (0, 128)}, {"shape_min": (1, 1)}, "has length 0 in dimension 0, expected at least 1"),
        ({"shape": (12, 128)}, {"shape_max": (8, None)}, "has length 12 in dimension 0, expected at most 8"),
        ({"stride": (128, 2)}, {}, "has stride 2 in dimension 1, expected 1"),
        ({"stride": (132, 1)}, {}, "has stride 132 in dimension 0, expected a multiple of 8"),
        ({"stride": (0, 1)}, {}, "is expanded in dimension 0 (stride 0), expected elements of its own"),
        ({"shape": (2**31, 128)}, {}, f"has length {2**31} and stride 128 in dimension 0, expected both within 0 and 2^31 - 1"),
        ({"stride": (2**31, 1)}, {}, f"has length 8 and stride {2**31} in dimension 0, expected both within 0 and 2^31 - 1"),
        ({"stride": (-8, 1)}, {}, "has length 8 and stride -8 in dimension 0, expected both within 0 and 2^31 - 1"),
    ),
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_a_broken_promise_is_named(runtime, found, promises, reason):
    assert broken(runtime, found, promises) == reason


def test_a_misalignment_that_the_promise_allows_is_taken(runtime):
    assert broken(runtime, {"misalignment": 6}, {"align": 2}) == ""


@pytest.mark.parametrize("stride", ((7, 1), (0, 1)), ids=str)
def test_the_stride_of_a_single_element_is_never_used(runtime, stride):
    promises = {"shape_divisible": (1, 1), "shape_min": (1, 1)}
    assert broken(runtime, {"shape": (1, 128), "stride": stride}, promises) == ""


# ---------------------------------------------------------------- the choice of a variant
class Recorder:
    """A backend that launches nothing. prepared: (variant, grid, arrays, integers); launched: (variant, addresses, floats)."""

    runs_on_cpu = True

    def __init__(self, artifacts):
        self.artifacts = artifacts
        self.prepared, self.launched = [], []
        self.gpu = "sm_90"

    def architecture(self, device):
        return self.gpu

    def prepare(self, variant, device, grid, arrays, integers):
        self.prepared.append((variant.name, grid, arrays, integers))
        return lambda addresses, floats=(): self.launched.append((variant.name, list(addresses), list(floats)))


@pytest.fixture
def backend(runtime, monkeypatch):
    # The manifest's entries straight from kernel_src.
    artifacts = InterpreterBackend(runtime, OPERATIONS).artifacts
    monkeypatch.setattr(runtime.launch, "backend", Recorder(artifacts))
    return runtime.launch.backend


def test_a_variant_for_other_architectures_is_passed_over(runtime):
    """Also where it stands first; and the error says so when there is no other."""
    interpreter = InterpreterBackend(runtime, ("linear_cross_entropy",))
    kernel = runtime.launch.Kernel("linear_cross_entropy_statistics", grid=lambda c, *_: (1,))
    operands = [torch.zeros(n, 64, dtype=torch.bfloat16) for n in (3, 5)]
    tensors = (*operands, torch.zeros(3, 1), torch.zeros(3, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.launch, "backend", interpreter)
        for gpu, rows in (("sm_90", 128), ("sm_86", 64), ("sm_121", 64), ("sm_100", 128)):
            interpreter.gpu = gpu
            kernel.forget()
            assert kernel.takes(*tensors) and kernel.select(*tensors).constants["TILE_M"] == rows
        interpreter.gpu = "sm_75"
        kernel.forget()
        assert not kernel.takes(*tensors)
        with pytest.raises(runtime.launch.PromiseError, match="is not built for sm_75"):
            kernel.select(*tensors)


def norm_kernel(runtime):
    names = ("rms_norm_forward", "rms_norm_rows_forward", "rms_norm_any_forward")
    return runtime.launch.Kernel(*names, grid=lambda c, x, *_: (x.shape[0],))


def norm_arguments(rows=3, length=1024, dtype=torch.bfloat16, weight_dtype=None, x=None):
    x = torch.zeros(rows, length, dtype=dtype) if x is None else x
    weight = torch.zeros(length, dtype=weight_dtype or dtype)
    return (x, weight, torch.zeros(rows, length, dtype=weight.dtype), torch.zeros(rows)), 1e-6


def misaligned(tensor):
    """The same numbers one element behind a multiple of 16 bytes."""
    moved = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype)
    start = 1 + (-moved.data_ptr() % 16) // tensor.itemsize
    return moved[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize(
    ("length", "chosen"),
    ((1024, "rms_norm_forward"), (2560, "rms_norm_forward"), (128, "rms_norm_rows_forward"), (1000, "rms_norm_any_forward")),
)
def test_the_most_exact_variant_that_fits_is_chosen(runtime, backend, length, chosen, dtype):
    tensors, eps = norm_arguments(length=length, dtype=dtype)
    variant = norm_kernel(runtime).select(*tensors, eps)
    assert variant.symbol == f"bastile_{chosen}"
    assert variant.parameters[0].dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    "x",
    (
        lambda: misaligned(torch.zeros(3, 1024, dtype=torch.bfloat16)),
        lambda: torch.zeros(3, 1028, dtype=torch.bfloat16)[:, :1024],
    ),
    ids=("misaligned address", "misaligned rows"),
)
def test_an_array_that_is_not_aligned_goes_to_the_variant_for_any(runtime, backend, x):
    tensors, eps = norm_arguments(x=x())
    assert norm_kernel(runtime).select(*tensors, eps).symbol == "bastile_rms_norm_any_forward"


@pytest.mark.parametrize(("shape", "chosen"), (((2, 1024), "TILE1024"), ((3, 1536), "TILE512"), ((2048,), "any"), ((2057,), "any")))
def test_rows_go_to_the_variant_whose_pieces_divide_them_and_a_flat_array_to_the_one_for_any(runtime, backend, shape, chosen):
    kernel = runtime.launch.Kernel("swiglu_forward", "swiglu_any_forward", grid=lambda c, x, *_: (1,))
    tensors = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3)]
    assert chosen in kernel.select(*tensors).name


@pytest.mark.parametrize(("gpu", "count"), (("sm_90", 1), ("sm_100", 2), ("sm_120", 2)))
def test_a_variant_without_an_image_for_this_gpu_is_not_chosen(runtime, backend, gpu, count):
    backend.gpu = gpu
    tensors, eps = norm_arguments(length=4096)
    candidates = norm_kernel(runtime).candidates(*tensors, eps)
    assert len(candidates) == count and all(gpu in variant.images for variant in candidates)
    assert len({variant.parameters for variant in candidates}) == 1


def test_where_no_variant_has_an_image_the_error_says_so(runtime, backend):
    backend.gpu = "sm_75"
    tensors, eps = norm_arguments()
    with pytest.raises(runtime.launch.PromiseError, match="rms_norm_forward-.*: is not built for sm_75"):
        norm_kernel(runtime)(*tensors, eps)
    assert not norm_kernel(runtime).takes(*tensors, eps)


def test_the_error_names_each_variant_parameter_and_promise(runtime, backend):
    tensors, eps = norm_arguments(dtype=torch.float64)
    kernel = norm_kernel(runtime)
    with pytest.raises(runtime.launch.PromiseError, match="no variant of rms_norm_forward") as error:
        kernel(*tensors, eps)
    assert "rms_norm_any_forward-bf16u.bf16u.bf16u.f32-TILE1024: x has dtype torch.float64, expected bfloat16" in str(error.value)
    assert not kernel.takes(*tensors, eps) and kernel.takes(*norm_arguments()[0], eps)
    assert not backend.launched


def test_an_operand_of_another_dtype_is_named(runtime, backend):
    tensors, eps = norm_arguments(weight_dtype=torch.float16)
    with pytest.raises(runtime.launch.PromiseError, match="weight has dtype float16, expected bfloat16"):
        norm_kernel(runtime).select(*tensors, eps)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    (
        ((), "4 arguments, expected 5"),
        ((1,), "eps is 1, expected a number of float32"),
        ((1e-6, 1e-6), "6 arguments, expected 5"),
    ),
)
def test_a_wrong_number_is_named(runtime, backend, numbers, reason):
    with pytest.raises(runtime.launch.PromiseError, match=reason):
        norm_kernel(runtime).select(*norm_arguments()[0], *numbers)


def combine_arguments(tokens=2, classes=20):
    tensors = [torch.zeros(tokens, classes), torch.zeros(tokens, dtype=torch.int64)]
    tensors += [torch.zeros(tokens, 1), torch.zeros(tokens, 1), torch.zeros(tokens), torch.zeros(tokens)]
    return tensors


def test_an_integer_that_needs_more_than_32_bits_is_named(runtime, backend):
    kernel = runtime.launch.Kernel("cross_entropy_combine", grid=lambda c, logits, *_: (logits.shape[0],))
    with pytest.raises(runtime.launch.PromiseError, match=f"ignore_index is {2**31}, expected 32 bits"):
        kernel.select(*combine_arguments(), 2**31, 0.0)


@pytest.mark.parametrize("grid", ((2**24,), (0,), (1, 2**16), (1, 1, 2**16), (1, 1, 0)), ids=str)
def test_a_grid_that_no_gpu_takes_is_refused(runtime, backend, grid):
    kernel = runtime.launch.Kernel("column_sum", grid=lambda *_: grid)
    with pytest.raises(runtime.launch.PromiseError, match="column_sum needs a grid of .* expected 1 to .16777215, 65535, 65535. blocks"):
        kernel(torch.zeros(2, 4), torch.zeros(4))
    assert not backend.prepared


def test_the_largest_grid_is_taken(runtime, backend):
    runtime.launch.Kernel("column_sum", grid=lambda *_: (2**24 - 1, 65535, 65535))(torch.zeros(2, 4), torch.zeros(4))
    assert backend.prepared[0][1] == (2**24 - 1, 65535, 65535)


def test_tensors_on_two_devices_are_refused(runtime, backend):
    kernel = runtime.launch.Kernel("column_sum", grid=lambda *_: (1,))
    with pytest.raises(runtime.launch.PromiseError, match="column_sum got tensors on .*, expected one device") as error:
        kernel(torch.zeros(2, 4), torch.zeros(4, device="meta"))
    assert "cpu" in str(error.value) and "meta" in str(error.value)


# ---------------------------------------------------------------- what is remembered
def test_a_launch_is_prepared_once_for_each_kind_of_arguments(runtime, backend):
    kernel = norm_kernel(runtime)
    for rows in (3, 3, 4, 3, 4):
        kernel(*norm_arguments(rows)[0], 1e-6)
    assert [arrays[0][0] for _, _, arrays, _ in backend.prepared] == [(3, 1024), (4, 1024)]
    assert len(backend.launched) == 5


def test_a_launch_gets_the_addresses_and_the_floats_of_its_call(runtime, backend):
    kernel, seen = norm_kernel(runtime), []
    for eps in (0.5, 0.25):
        tensors, _ = norm_arguments()
        kernel(*tensors, eps)
        seen.append([[t.data_ptr() for t in tensors], [eps]])
    assert [[addresses, floats] for _, addresses, floats in backend.launched] == seen


def test_integers_are_part_of_what_a_launch_is_prepared_for(runtime, backend):
    kernel = runtime.launch.Kernel("cross_entropy_combine", grid=lambda c, logits, *_: (logits.shape[0],))
    for ignore_index in (-100, 0, -100):
        kernel(*combine_arguments(), ignore_index, 0.0)
    assert [integers for *_, integers in backend.prepared] == [[-100], [0]]


def test_another_alignment_is_prepared_anew(runtime, backend):
    kernel = norm_kernel(runtime)
    tensors, eps = norm_arguments()
    for x in (tensors[0], misaligned(tensors[0]), tensors[0]):
        kernel(x, *tensors[1:], eps)
    assert [name.split("-")[0] for name, *_ in backend.launched] == ["rms_norm_forward", "rms_norm_any_forward", "rms_norm_forward"]


def forward_of_rows(runtime, **options):
    """The norm's kernel on tensors of three dimensions, with a record of when views were made."""
    made = []

    def views(x, weight, y, rstd):
        made.append(tuple(x.shape))
        return x.reshape(-1, x.shape[-1]), weight, y.view(-1, y.shape[-1]), rstd

    names = ("rms_norm_forward", "rms_norm_rows_forward", "rms_norm_any_forward")
    return runtime.launch.Kernel(*names, grid=lambda c, x, *_: (x.shape[0],), views=views, **options), made


def three_dimensions():
    new = torch.zeros
    return [new(2, 3, 1024), new(1024), new(2, 3, 1024), new(6)]


def test_views_are_made_for_the_first_call_of_a_kind(runtime, backend):
    kernel, made = forward_of_rows(runtime)
    for _ in range(3):
        kernel(*three_dimensions(), 1e-6)
    assert made == [(2, 3, 1024)] and len(backend.prepared) == 1 and len(backend.launched) == 3
    assert backend.prepared[0][2][0] == ((6, 1024), (1024, 1))


# What a launch follows from of each of its tensors: another of it must not run what was prepared for the first.
CHANGES = {
    "shape": lambda x: torch.zeros(x.shape[0] + 1, *x.shape[1:], dtype=x.dtype),
    "strides": lambda x: torch.zeros(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype)[..., :-8],
    "dtype": lambda x: x.to(torch.float16 if x.dtype != torch.float16 else torch.bfloat16),
    "alignment": lambda x: misaligned(x),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("place", range(5))
def test_every_property_of_every_tensor_is_in_the_key(runtime, backend, monkeypatch, place, what):
    """A kernel that takes anything, so that only the key tells two launches apart."""
    kernel = runtime.launch.Kernel("swiglu_any_backward", grid=lambda *_: (1,))
    monkeypatch.setattr(kernel, "candidates", lambda *_: [backend.artifacts.variants("swiglu_any_backward")[0]])
    tensors = [torch.zeros(4, 64) for _ in range(5)]
    for wanted in (tensors, [*tensors[:place], CHANGES[what](tensors[place]), *tensors[place + 1 :]]):
        for _ in range(2):
            kernel(*wanted)
    assert len(backend.prepared) == 2 and len(backend.launched) == 4


@pytest.mark.parametrize("place", (0, 1))
def test_what_is_only_read_is_copied_where_no_variant_takes_it(runtime, backend, place):
    kernel, _ = forward_of_rows(runtime, reads=("x", "weight"))
    tensors = three_dimensions()
    tensors[place] = torch.zeros(*tensors[place].shape, 2)[..., 0]
    for _ in range(2):
        kernel(*tensors, 1e-6)
    given = [addresses[place] for _, addresses, _ in backend.launched]
    assert tensors[place].data_ptr() not in given and len(backend.prepared) == 2  # a copy has an address of its own each time
    assert backend.launched[0][0].startswith("rms_norm_forward")


def test_what_is_written_is_never_a_copy(runtime, backend):
    kernel, _ = forward_of_rows(runtime, reads=("x", "weight", "y"))
    kernel.reads = frozenset(("x", "weight"))
    tensors = three_dimensions()
    kernel.views = lambda x, weight, y, rstd: (x.view(-1, 1024), weight, y.view(-1, 1024).clone(), rstd)
    with pytest.raises(runtime.launch.PromiseError, match="rms_norm_forward would write y into a copy"):
        kernel(*tensors, 1e-6)
    assert not backend.launched


def test_a_split_launches_each_part_and_is_not_remembered(runtime, backend):
    kernel = runtime.launch.Kernel("column_sum", grid=lambda *_: (1,), split=lambda partial, out: None if len(partial) <= 2 else (
        (partial[i : i + 2], out) for i in range(0, len(partial), 2)
    ))  # fmt: skip
    partial, out = torch.zeros(6, 4), torch.zeros(4)
    for _ in range(2):
        kernel(partial, out)
    starts = [addresses[0] - partial.data_ptr() for _, addresses, _ in backend.launched]
    assert starts == [0, 32, 64] * 2 and len(backend.prepared) == 1


def test_where_restricts_the_variants(runtime, monkeypatch):
    monkeypatch.setattr(runtime.launch, "backend", InterpreterBackend(runtime, ("rotary",)))
    for backward in (0, 1):
        kernel = runtime.launch.Kernel("rotary", grid=lambda *_: (1,), where={"BACKWARD": backward})
        assert {variant.constants["BACKWARD"] for variant in kernel.variants()} == {backward}


def test_constants_come_from_the_manifest(runtime, backend):
    kernel = runtime.launch.Kernel("swiglu_forward", "swiglu_any_forward", grid=lambda *_: (1,))
    assert kernel.constants("TILE", "swiglu_forward") == (1024, 512) and set(kernel.constants("TILE")) == {1024, 512}
    with pytest.raises(runtime.launch.PromiseError, match="the constant TILE of swiglu_forward is .*, expected one value"):
        kernel.constant("TILE")
    with pytest.raises(runtime.launch.PromiseError, match="the constant ROWS of swiglu_forward is missing"):
        kernel.constant("ROWS")
    norm = runtime.launch.Kernel("add_rms_norm_forward", grid=lambda *_: (1,))
    assert norm.lengths("x", 1) == {1024, 2048, 2560, 4096, 5120}


def test_what_is_remembered_stays_bounded(runtime, backend, monkeypatch):
    monkeypatch.setattr(runtime.launch, "KEPT", 3)
    kernel = norm_kernel(runtime)
    for rows in range(1, 9):
        tensors, eps = norm_arguments(rows)
        kernel(*tensors, eps)
        kernel.takes(*tensors, eps)
        assert len(kernel._prepared) <= 3 and len(kernel._taken) <= 3


# ---------------------------------------------------------------- the driver
NAMES = {200: "CUDA_ERROR_INVALID_IMAGE", 201: "CUDA_ERROR_INVALID_CONTEXT", 209: "CUDA_ERROR_NO_BINARY_FOR_GPU"}


class FakeCuda:
    """libcuda. codes: for each entry point what its next calls return, 0 afterwards; calls: how often each was called.
    loaded: the images; launches: (kernel, fields of the configuration, words as 8 bytes each)."""

    def __init__(self, version=13000, **codes):
        self.driver_version = version
        self.codes = {name: list(found) for name, found in codes.items()}
        self.calls = Counter()
        self.loaded, self.launches = [], []
        self.on_launch = None

    def _code(self, name):
        self.calls[name] += 1
        waiting = self.codes.get(name)
        return waiting.pop(0) if waiting else 0

    def cuDriverGetVersion(self, version):
        version._obj.value = self.driver_version
        return self._code("cuDriverGetVersion")

    def cuGetErrorName(self, code, name):
        name._obj.value = NAMES.get(code, "CUDA_ERROR_UNKNOWN").encode()
        return 0

    def cuGetErrorString(self, code, text):
        text._obj.value = b"what the driver says"
        return 0

    def cuLibraryLoadData(self, library, image, *options):
        assert options == (None, None, 0, None, None, 0)
        time.sleep(0.001)  # another thread comes now
        self.loaded.append(image)
        library._obj.value = 1000 + len(self.loaded)
        return self._code("cuLibraryLoadData")

    def cuLibraryGetKernel(self, kernel, library, name):
        kernel._obj.value = 1000 + library.value
        self.symbol = name
        return self._code("cuLibraryGetKernel")

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = 40 + ordinal
        return self._code("cuDeviceGet")

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 1000 + device.value
        return self._code("cuDevicePrimaryCtxRetain")

    def cuCtxSetCurrent(self, context):
        self.context = context.value
        return self._code("cuCtxSetCurrent")

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        assert extra is None
        config = {name: getattr(config._obj, name) for name, _ in config._obj._fields_}
        words = []
        for address in parameters:
            words.append(ctypes.string_at(address, 8))
            if self.on_launch:
                self.on_launch()
        self.launches.append((function.value, config, words))
        return self._code("cuLaunchKernelEx")


def number(word: bytes) -> int:
    return struct.unpack("<q", word)[0]


def real(word: bytes) -> float:
    return struct.unpack("<f", word[:4])[0]


@pytest.fixture
def gpu(runtime, monkeypatch):
    """torch.cuda of a machine with H200s. switched: the devices that were made current."""
    found = types.SimpleNamespace(capability=(9, 0), current=0, switched=[], synchronized=[])

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            found.switched.append(self.index)
            self.before, found.current = found.current, self.index

        def __exit__(self, *_):
            found.current = self.before

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: found.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronized.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(runtime.driver, "current_device", lambda: found.current)
    monkeypatch.setattr(runtime.driver, "raw_stream", lambda device: 7000 + device)
    return found


def driver_with(runtime, cubins, **options):
    driver = runtime.driver.Driver(runtime.artifacts.Artifacts(cubins))
    driver._cuda = FakeCuda(**options)
    return driver


def prepare_norm(driver, device=0, grid=(5, 1, 1)):
    variant = first_variant(driver.artifacts, "rms_norm_forward")
    arrays = [((5, 1024), (2048, 1)), ((1024,), (1,)), ((5, 1024), (1024, 1)), ((5,), (1,))]
    return driver.prepare(variant, device, grid, arrays, [])


def test_the_launch_configuration_lies_in_memory_as_cuda_h_has_it(runtime):
    config = runtime.driver.LaunchConfig
    offsets = [getattr(config, name).offset for name, _ in config._fields_]
    assert offsets == [0, 4, 8, 12, 16, 20, 24, 32, 40, 48] and ctypes.sizeof(config) == 56


def test_a_launch_attribute_lies_in_memory_as_cuda_h_has_it(runtime):
    attribute = runtime.driver.LaunchAttribute
    assert (attribute.id.offset, attribute.value.offset, ctypes.sizeof(attribute)) == (0, 8, 72)
    assert (runtime.driver.EARLY.id, runtime.driver.EARLY.value) == (6, 1)


@pytest.mark.parametrize("waits", (False, True))
@pytest.mark.parametrize("capability", ((8, 0), (9, 0)))
def test_a_kernel_that_waits_by_itself_may_start_early(runtime, cubins, gpu, waits, capability):
    gpu.capability = capability
    driver = driver_with(runtime, cubins)
    driver.architecture = lambda device: f"sm_{capability[0]}{capability[1]}"
    driver.function = lambda variant, architecture: ctypes.c_void_p(2001)
    variant = first_variant(driver.artifacts, "rms_norm_forward")._replace(waits=waits)
    arrays = [((5, 1024), (1024, 1)), ((1024,), (1,)), ((5, 1024), (1024, 1)), ((5,), (1,))]
    driver.prepare(variant, 0, (5, 1, 1), arrays, [])([16] * 4, (0.5,))
    early = waits and capability == (9, 0)
    config = driver.cuda.launches[0][1]
    assert config["attributes"] == (ctypes.addressof(runtime.driver.EARLY) if early else None)
    assert config["attribute_count"] == int(early)


def test_parameters_are_addresses_lengths_strides_and_scalars_in_the_kernels_order(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    prepare_norm(driver)([0x7F0000000010, 0x20, 0x30, 0x40], (0.125,))
    kernel, config, words = driver.cuda.launches[0]
    assert [number(word) for word in words[:-1]] == [
        *(0x7F0000000010, 5, 1024, 2048, 1),
        *(0x20, 1024, 1),
        *(0x30, 5, 1024, 1024, 1),
        *(0x40, 5, 1),
    ]
    assert real(words[-1]) == 0.125
    assert driver.cuda.symbol == b"bastile_rms_norm_forward"
    assert kernel == 2001


def test_integers_and_floats_stand_where_the_kernel_has_them(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    variant = next(v for v in driver.artifacts.variants("cross_entropy_combine") if v.parameters[0].dtype == "float32")
    arrays = [((2, 20), (20, 1)), ((2,), (1,)), ((2, 1), (1, 1)), ((2, 1), (1, 1)), ((2,), (1,)), ((2,), (1,))]
    driver.prepare(variant, 0, (2, 1, 1), arrays, [-100])([16] * 6, (30.0,))
    words = driver.cuda.launches[0][2]
    assert len(words) == 5 + 3 + 5 + 5 + 3 + 3 + 2
    assert (number(words[-2]), real(words[-1])) == (-100, 30.0)


def test_the_grid_and_the_stream_of_the_device_are_passed(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    prepare_norm(driver, grid=(5, 6, 7))([16] * 4, (0.5,))
    assert driver.cuda.launches[0][1] == {
        **{"grid_x": 5, "grid_y": 6, "grid_z": 7, "block_x": 1, "block_y": 1, "block_z": 1},
        **{"shared_bytes": 0, "stream": 7000, "attributes": None, "attribute_count": 0},
    }


def test_the_stream_is_looked_up_at_each_launch(runtime, cubins, gpu, monkeypatch):
    launch = prepare_norm(driver := driver_with(runtime, cubins))
    launch([16] * 4, (0.5,))
    monkeypatch.setattr(runtime.driver, "raw_stream", lambda device: 1)
    launch([16] * 4, (0.5,))
    assert [config["stream"] for _, config, _ in driver.cuda.launches] == [7000, 1]


def test_a_device_that_is_not_current_is_made_so(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    for device in (0, 3):
        prepare_norm(driver, device)([16] * 4, (0.5,))
    assert gpu.switched == [3]
    assert [config["stream"] for _, config, _ in driver.cuda.launches] == [7000, 7003]


def test_an_image_is_loaded_once_for_all_launches_and_devices(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    for device in (0, 1, 0):
        for _ in range(3):
            prepare_norm(driver, device)([16] * 4, (0.5,))
    assert [image.decode().split()[1:] for image in driver.cuda.loaded] == [["x86_64", "sm_90"]]
    assert {kernel for kernel, _, _ in driver.cuda.launches} == {2001}


def in_threads(count, work):
    """Runs work(i) in `count` threads that start together; returns the results, raises the first error."""
    barrier = threading.Barrier(count)

    def run(i):
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(run, i) for i in range(count)]]


def test_an_image_is_loaded_once_for_all_threads(runtime, cubins, gpu, monkeypatch):
    gpu.current = -1  # the device of a CPU tensor
    driver = driver_with(runtime, cubins)
    monkeypatch.setattr(runtime.launch, "backend", driver)
    kernel = norm_kernel(runtime)
    in_threads(8, lambda _: kernel(*norm_arguments()[0], 1e-6))
    assert len(driver.cuda.loaded) == 1 and len(driver.cuda.launches) == 8


def test_threads_that_share_a_launch_do_not_mix_their_parameters(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    launch = prepare_norm(driver)
    driver.cuda.on_launch = lambda: time.sleep(0)
    in_threads(6, lambda i: [launch([16 * (i + 1)] * 4, (float(i + 1),)) for _ in range(40)])
    seen = [[number(words[at]) for at in (0, 5, 8, 13)] + [16 * real(words[-1])] for _, _, words in driver.cuda.launches]
    assert len(seen) == 240
    assert all(len(set(words)) == 1 for words in seen)


def together(runtime, driver, device=0):
    """Three launches of a norm, of two sizes, that are made together."""
    return runtime.driver.Together([prepare_norm(driver, device, grid=(rows, 1, 1)) for rows in (5, 6, 5)])


def test_launches_together_have_addresses_of_their_own_and_share_floats(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    launch = together(runtime, driver)
    for begin in (16, 32):
        launch(list(range(begin, begin + 12)), (float(begin),))
    assert [config["grid_x"] for _, config, _ in driver.cuda.launches] == [5, 6, 5] * 2
    assert {config["stream"] for _, config, _ in driver.cuda.launches} == {7000}
    for i, (_, _, words) in enumerate(driver.cuda.launches):
        begin = (16, 32)[i // 3]
        first = begin + 4 * (i % 3)
        assert [number(words[at]) for at in (0, 5, 8, 13)] == list(range(first, first + 4)) and real(words[-1]) == begin
        assert [number(word) for word in words[1:5]] == [5, 1024, 2048, 1]


def test_launches_together_leave_those_they_are_made_of_alone(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    alone = prepare_norm(driver)
    alone([16] * 4, (0.5,))
    runtime.driver.Together([alone, alone])([32] * 8, (1.5,))
    driver.cuda.launches.clear()
    alone([48] * 4, (float("inf"),))
    assert [number(driver.cuda.launches[0][2][at]) for at in (0, 5, 8, 13)] == [48] * 4


def test_launches_together_go_to_the_stream_and_device_of_the_moment(runtime, cubins, gpu, monkeypatch):
    driver = driver_with(runtime, cubins)
    launch = together(runtime, driver, device=3)
    launch([16] * 12, (0.5,))
    monkeypatch.setattr(runtime.driver, "raw_stream", lambda device: 1)
    launch([16] * 12, (0.5,))
    assert gpu.switched == [3, 3] and gpu.current == 0
    assert [config["stream"] for _, config, _ in driver.cuda.launches] == [7003] * 3 + [1] * 3


def test_floats_of_launches_together_may_be_beyond_the_largest(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    together(runtime, driver)([16] * 12, (1e300,))
    assert [real(words[-1]) for _, _, words in driver.cuda.launches] == [float("inf")] * 3


@pytest.mark.parametrize(("codes", "calls"), (([0, 201, 0, 0], 4), ([0, 0, 209], 3)), ids=("no context yet", "an error"))
def test_an_error_of_one_of_the_launches_together(runtime, cubins, gpu, codes, calls):
    driver = driver_with(runtime, cubins, cuLaunchKernelEx=codes)
    launch = together(runtime, driver)
    if 209 in codes:
        with pytest.raises(runtime.driver.DriverError, match="launching rms_norm_forward-.*: CUDA error 209"):
            launch([16] * 12, (0.5,))
    else:
        launch([16] * 12, (0.5,))
        assert driver.cuda.context == 1040 and not gpu.synchronized
    assert driver.cuda.calls["cuLaunchKernelEx"] == calls


def batch_of_norms(runtime, rows=(5, 6)):
    """Two norms, their tensors, and a batch of their launches."""
    kernel, found = norm_kernel(runtime), [norm_arguments(count)[0] for count in rows]
    calls = [(kernel(*tensors, 1e-6), [tensor.data_ptr() for tensor in tensors]) for tensors in found]
    return runtime.launch.Batch(calls), found


def test_a_batch_launches_again_at_other_addresses(runtime, backend):
    batch, found = batch_of_norms(runtime)
    for tensors in ([t for each in found for t in each], [t.clone() for each in found for t in each]):
        backend.launched.clear()
        addresses = [tensor.data_ptr() for tensor in tensors]
        assert batch(addresses, (0.25,))
        assert [(places, floats) for _, places, floats in backend.launched] == [(addresses[:4], [0.25]), (addresses[4:], [0.25])]


def test_a_batch_is_not_launched_where_an_address_is_aligned_in_another_way(runtime, backend):
    batch, found = batch_of_norms(runtime)
    addresses = [tensor.data_ptr() for each in found for tensor in each]
    backend.launched.clear()
    assert not batch([*addresses[:-1], addresses[-1] + 8], (0.25,)) and not backend.launched
    assert batch(addresses, (0.25,)) and len(backend.launched) == 2


def test_a_batch_is_not_launched_after_kernels_were_chosen_anew(runtime, backend):
    batch, found = batch_of_norms(runtime)
    addresses = [tensor.data_ptr() for each in found for tensor in each]
    runtime.launch.tuner._changed()
    assert not batch(addresses, (0.25,))


@pytest.mark.parametrize(
    ("capability", "expected"), (((8, 0), "sm_80"), ((8, 6), "sm_80"), ((9, 0), "sm_90"), ((10, 0), ""), ((7, 5), ""), ((12, 1), ""))
)
def test_only_images_of_8_0_run_on_a_sibling(runtime, cubins, gpu, capability, expected):
    gpu.capability = capability
    assert driver_with(runtime, cubins).architecture(0) == expected


@pytest.mark.parametrize(
    ("codes", "message"),
    (
        (
            {"cuLibraryLoadData": [200]},
            "loading rms_norm_forward-.* for sm_90: CUDA error 200 CUDA_ERROR_INVALID_IMAGE what the driver says",
        ),
        ({"cuLibraryGetKernel": [209]}, "finding bastile_rms_norm_forward in .* sm_90: CUDA error 209 CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ({"cuLaunchKernelEx": [209]}, "launching rms_norm_forward-.*: CUDA error 209 CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ({"cuLaunchKernelEx": [201, 201]}, "launching rms_norm_forward-.*: CUDA error 201 CUDA_ERROR_INVALID_CONTEXT"),
    ),
    ids=("load", "find", "launch", "context"),
)
def test_an_error_of_the_driver_has_its_code_and_name(runtime, cubins, gpu, codes, message):
    driver = driver_with(runtime, cubins, **codes)
    with pytest.raises(runtime.driver.DriverError, match=message) as error:
        prepare_norm(driver)([16] * 4, (0.5,))
    assert error.value.code in NAMES


@pytest.fixture
def emptied(monkeypatch):
    """Counts how often torch gives back memory that it does not use."""
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    return calls


def test_where_memory_is_short_torch_gives_back_what_it_does_not_use(runtime, cubins, gpu, emptied):
    driver = driver_with(runtime, cubins, cuLibraryLoadData=[2])
    prepare_norm(driver)([16] * 4, (0.5,))
    assert len(emptied) == 1 and len(driver.cuda.launches) == 1


@pytest.mark.parametrize("codes", ({"cuLibraryLoadData": [2, 2]}, {"cuLibraryGetKernel": [2]}, {"cuLaunchKernelEx": [2]}), ids=str)
def test_no_memory_for_a_kernel_is_torchs_own_error_and_the_next_call_works(runtime, cubins, gpu, emptied, codes):
    driver = driver_with(runtime, cubins, **codes)
    with pytest.raises(torch.OutOfMemoryError, match="rms_norm_forward-.*: CUDA error 2"):
        prepare_norm(driver)([16] * 4, (0.5,))
    prepare_norm(driver)([16] * 4, (0.5,))
    assert driver.cuda.launches


def test_a_thread_without_a_context_gets_one_and_launches(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins, cuLaunchKernelEx=[201])
    prepare_norm(driver)([16] * 4, (0.5,))
    assert driver.cuda.calls["cuLaunchKernelEx"] == 2
    assert driver.cuda.context == 1040 and not gpu.synchronized


def test_a_missing_driver_is_named_with_the_cure(runtime, cubins, monkeypatch):
    driver = runtime.driver.Driver(runtime.artifacts.Artifacts(cubins))
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.raises(runtime.driver.DriverError, match="cannot be loaded .*Install an NVIDIA driver, R580 or newer"):
        driver.version()


def no_library(name):
    raise OSError(f"{name}: cannot open shared object file")


# ---------------------------------------------------------------- whether the kernels run
class OnTheGPU:
    """As much of a CUDA tensor as is asked for."""

    is_cuda, is_meta = True, False

    def is_neg(self):
        return False

    def __init__(self, index=0):
        self.index = index

    def get_device(self):
        return self.index


class AddingCuda(FakeCuda):
    """Runs the one kernel of the first launch: out[j] = partial[0, j] + partial[1, j]."""

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        code = super().cuLaunchKernelEx(config, function, parameters, extra)
        words = [number(word) for word in self.launches[-1][2]]
        columns = words[2]
        partial = (ctypes.c_float * (2 * columns)).from_address(words[0])
        out = (ctypes.c_float * columns).from_address(words[5])
        out[:] = [partial[j] + partial[columns + j] for j in range(columns)]
        return code


@pytest.fixture
def device(runtime, cubins, gpu, monkeypatch):
    """The module, on a machine where all is well. Its tensors live on the CPU."""
    for name in ("ones", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, device=None, **k: make(*a, **k))
    gpu.current = -1
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: f"the stream of {index}")
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", int)
    driver = driver_with(runtime, cubins)
    driver._cuda = AddingCuda()
    monkeypatch.setattr(runtime.launch, "backend", driver)
    monkeypatch.setattr(runtime.device, "PLAIN", (*runtime.device.PLAIN, OnTheGPU))
    monkeypatch.delenv("BASTILE_STRICT", raising=False)
    runtime.device.forget()
    runtime.device._column_sum._prepared.clear()
    yield runtime.device
    join_the_thread_of(runtime.device)
    runtime.device.forget()
    runtime.device._column_sum._prepared.clear()


def join_the_thread_of(device):
    """Waits for what prepares a backward pass."""
    for thread in threading.enumerate():
        if thread.name == device.BACKWARD_THREAD:
            thread.join()


def answers(device, *tensors):
    """(what kernels_run_on says of each tensor, the warnings)"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [device.kernels_run_on(tensor) for tensor in tensors]
    return found, caught


def test_where_all_is_well_the_kernels_run_and_the_first_launch_is_made_once(device, runtime):
    assert answers(device, OnTheGPU(), OnTheGPU(), OnTheGPU()) == ([True] * 3, [])
    assert len(runtime.launch.backend.cuda.launches) == 1


def test_a_cpu_tensor_goes_to_pytorch_without_a_look_at_the_driver(device, runtime):
    assert answers(device, torch.zeros(2)) == ([False], [])
    assert not runtime.launch.backend.cuda.calls


def test_in_a_capture_nothing_is_launched_for_a_try(device, runtime, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert answers(device, OnTheGPU()) == ([True], [])
    assert not runtime.launch.backend.cuda.launches


@pytest.fixture
def handles(device, monkeypatch):
    """Called with a mode of autograd: what asks for handles of cuBLAS by itself at the first use of a device, as (thread, stream)."""
    found, streams = [], []

    @contextlib.contextmanager
    def stream(which):
        streams.append(which)
        yield
        streams.pop()

    def ask():
        found.append((threading.current_thread().name, *streams))

    def calls(mode):
        with mode:
            assert answers(device, OnTheGPU(), OnTheGPU()) == ([True, True], [])
        join_the_thread_of(device)
        return found

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", ask)
    return calls


def test_what_the_first_backward_pass_needs_of_pytorch_is_made_aside_once(device, handles):
    assert handles(torch.enable_grad()) == [(device.BACKWARD_THREAD, "the stream of 0")]


def test_it_is_made_where_a_device_is_first_seen_inside_of_an_autograd_function(device, handles, monkeypatch):
    """There gradients are switched off, as in inference."""
    common = importlib.import_module(device.__name__.replace("runtime.device", "ops.common"))
    made = handles(torch.no_grad())

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, number):
            return 2 * x

    class Elsewhere(torch.nn.Parameter):
        is_cuda = True

        def get_device(self):
            return 0

    monkeypatch.setattr(common, "PLAIN", (*common.PLAIN, Elsewhere))
    leaf = torch.nn.Parameter(torch.ones(2))
    for mode, tensor, expected in (
        (torch.no_grad, Elsewhere(leaf), 0),
        (torch.enable_grad, leaf, 0),
        (torch.enable_grad, Elsewhere(leaf), 1),
        (torch.enable_grad, Elsewhere(leaf), 1),
    ):
        with mode():
            common.apply_function(Double, tensor, 3)
        join_the_thread_of(device)
        assert len(made) == expected


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_nothing_is_made_for_a_backward_pass_that_does_not_come(handles, mode):
    assert handles(mode()) == []


def test_no_other_thread_begins_while_a_graph_is_captured(handles, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert handles(torch.enable_grad()) == []


def test_a_device_without_memory_for_the_backward_pass_says_so_when_it_is_used(handles, monkeypatch):
    def fails():
        raise torch.OutOfMemoryError("no memory for a workspace")

    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", fails)
    assert handles(torch.enable_grad()) == [] and failed == []


class World:
    """What `spoil` functions may change."""

    def __init__(self, monkeypatch, runtime, cubins, gpu):
        self.monkeypatch, self.runtime, self.cubins, self.gpu = monkeypatch, runtime, cubins, gpu

    @property
    def cuda(self):
        return self.runtime.launch.backend.cuda


def no_driver(world):
    world.runtime.launch.backend._cuda = None
    world.monkeypatch.setattr(ctypes, "CDLL", no_library)


def old_driver(world):
    world.cuda.driver_version = 12080


def torch_without_cuda(world):
    world.monkeypatch.setattr(torch.version, "cuda", None)


def old_gpu(world):
    world.gpu.capability = (7, 5)


def unknown_host(world):
    world.monkeypatch.setattr(platform, "machine", lambda: "riscv64")


def no_manifest(world):
    (world.cubins / "manifest.json").unlink()


def damaged_file(world):
    flip_a_bit(world.cubins / "x86_64" / "swiglu.cubins")


def first_launch_fails(world):
    world.cuda.codes["cuLaunchKernelEx"] = [209] * 9


def image_does_not_load(world):
    world.cuda.codes["cuLibraryLoadData"] = [221] * 9


def wrong_result(world):
    world.runtime.launch.backend._cuda = FakeCuda()


SPOILT = (
    (no_driver, "driver cannot be loaded", "Install an NVIDIA driver, R580 or newer"),
    (old_driver, "supports CUDA 12.8, expected 13.0", "Install driver R580 or newer"),
    (torch_without_cuda, "torch is not for CUDA", "Install one that is"),
    (old_gpu, "NVIDIA H200 has compute capability 7.5, and there are kernels for sm_80, sm_90", "newer version of this package"),
    (unknown_host, "no kernels for riscv64 hosts", "riscv64"),
    (no_manifest, "manifest.json is missing", "built without GPU kernels"),
    (damaged_file, "swiglu.cubins is damaged", CURE),
    (first_launch_fails, "launching column_sum", "CUDA_ERROR_NO_BINARY_FOR_GPU"),
    (image_does_not_load, "loading column_sum", "CUDA error 221"),
    (wrong_result, "wrong result", "first launch"),
)
spoilt = pytest.mark.parametrize(("spoil", "cause", "cure"), SPOILT, ids=[spoil.__name__ for spoil, *_ in SPOILT])


@spoilt
def test_what_keeps_the_kernels_from_running_is_said_once_with_its_cure(device, runtime, cubins, gpu, monkeypatch, spoil, cause, cure):
    spoil(World(monkeypatch, runtime, cubins, gpu))
    found, caught = answers(device, OnTheGPU(), OnTheGPU(), OnTheGPU())
    assert found == [False] * 3
    assert [warning.category for warning in caught] == [RuntimeWarning]
    text = str(caught[0].message)
    assert "do not run on cuda:0 and PyTorch's operations take their place" in text
    assert cause in text and cure in text


@spoilt
def test_strict_makes_it_an_error_at_every_call(device, runtime, cubins, gpu, monkeypatch, spoil, cause, cure):
    monkeypatch.setenv("BASTILE_STRICT", "1")
    spoil(World(monkeypatch, runtime, cubins, gpu))
    for _ in range(2):
        with pytest.raises(device.KernelsUnavailable) as error:
            device.kernels_run_on(OnTheGPU())
        assert cause in str(error.value) and cure in str(error.value) and "BASTILE_STRICT=1" in str(error.value)


def test_no_memory_for_the_first_launch_is_an_error_and_the_device_is_asked_again(device, runtime, gpu, emptied):
    """It says nothing about whether the kernels run there."""
    runtime.launch.backend.cuda.codes["cuLibraryLoadData"] = [2, 2]
    with pytest.raises(torch.OutOfMemoryError):
        device.kernels_run_on(OnTheGPU())
    assert answers(device, OnTheGPU()) == ([True], [])


@pytest.mark.parametrize("spoil", (no_manifest, damaged_file))
def test_the_driver_sees_no_image_before_every_file_has_the_right_digest(device, runtime, cubins, gpu, monkeypatch, spoil):
    spoil(World(monkeypatch, runtime, cubins, gpu))
    assert answers(device, OnTheGPU())[0] == [False]
    assert not runtime.launch.backend.cuda.loaded and not runtime.launch.backend.cuda.launches


def test_what_was_hashed_is_what_the_driver_gets(device, runtime, cubins, gpu):
    """A file that changes after it was verified is not read again, for a second GPU neither."""
    assert answers(device, OnTheGPU()) == ([True], [])
    for path in (cubins / "x86_64").iterdir():
        path.write_bytes(b"something else")
    driver = runtime.launch.backend
    driver.function(first_variant(driver.artifacts, "rms_norm_forward"), "sm_90")
    device.forget()
    assert answers(device, OnTheGPU()) == ([True], [])
    assert [image.split(b"-")[0] for image in driver.cuda.loaded] == [b"column_sum", b"rms_norm_forward"]


@pytest.mark.parametrize("value", ("", "0"))
def test_only_1_is_strict(device, runtime, cubins, gpu, monkeypatch, value):
    monkeypatch.setenv("BASTILE_STRICT", value)
    old_driver(World(monkeypatch, runtime, cubins, gpu))
    assert answers(device, OnTheGPU())[0] == [False]


def test_threads_that_ask_at_once_get_one_answer_and_one_warning(device, runtime, cubins, gpu, monkeypatch):
    wrong_result(World(monkeypatch, runtime, cubins, gpu))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert in_threads(6, lambda _: device.kernels_run_on(OnTheGPU())) == [False] * 6
    assert len(caught) == 1 and len(runtime.launch.backend.cuda.launches) == 1


def test_a_repaired_driver_is_seen_after_forget(device, runtime, cubins, gpu, monkeypatch):
    old_driver(World(monkeypatch, runtime, cubins, gpu))
    assert answers(device, OnTheGPU())[0] == [False]
    runtime.launch.backend.cuda.driver_version = 13000
    assert answers(device, OnTheGPU())[0] == [False]
    device.forget()
    assert answers(device, OnTheGPU()) == ([True], [])
