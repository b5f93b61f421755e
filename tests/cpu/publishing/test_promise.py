"""What is refused of an upload: a build that is incomplete or dirty, and one that breaks the promise of its version."""

import json
import re

import pytest

from tests.publishing import INIT, LAYERS, OPS, TOKEN, VARIANT, command, heads, on_disk, on_hub
from tools.kernels_adapter import hash_files
from tools.publish import PublishError, publish
from tools.targets import TARGETS


def remove(path):
    return lambda package: (package.variant / path).unlink()


def edit_metadata(change):
    def edit(package):
        path = package.variant / "metadata.json"
        metadata = json.loads(path.read_text())
        change(metadata)
        path.write_text(json.dumps(metadata))

    return edit


CHANGES = (
    '__all__ += ["more"]\n',
    '__all__.remove("triple")\n',
    '__all__ = ["double"]\n',
    "del __all__\n",
    'globals()["__all__"] = []\n',
    "from .ops import names as __all__\n",
    "if layers:\n    __all__ = []\n",
    "def reset():\n    global __all__\n",
    "names = __all__\nnames.clear()\n",
)
LINKS = ("build/CARD.md.png", "build/torch-cpu/hosts.py", "build/torch-cpu/data/hosts", "benchmarks/benchmark_hosts.py")


def linked(package):
    """Moves the variant out of the build, and leaves a link."""
    package.variant.rename(package.folder / "elsewhere")
    package.variant.symlink_to(package.folder / "elsewhere")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda package: package.build(backends=("cpu", "cuda")), "no variant for cuda"),
        (lambda package: [p.rename(package.folder / "elsewhere") for p in [package.folder / "build"]], "no variant for cpu"),
        (lambda package: (package.variant / "metadata.json").write_text("{"), "cannot be parsed"),
        (edit_metadata(lambda metadata: metadata.pop("license")), "missing field `license`"),
        (remove("metadata.json"), "metadata.json is missing"),
        (remove("data/factor.json"), "data/factor.json"),
        (lambda package: package.write({"ops.py": OPS + "#"}), "ops.py"),
        (lambda package: package.write({"extra.bin": b"1"}), "extra.bin"),
        (edit_metadata(lambda metadata: metadata.pop("digest")), "no digest"),
        (edit_metadata(lambda metadata: metadata.pop("provenance")), "no git repository (it has no provenance)"),
        (edit_metadata(lambda metadata: metadata["provenance"].pop("kernel")), "or pass --allow-dirty"),
        (lambda package: ((package.variant / "__init__.py").unlink(), refresh(package)), "__init__.py is missing"),
        (lambda package: (package.write({"cubins/manifest.json": "{}"}), refresh(package)), "manifest.json cannot be read"),
        (lambda package: (package.write({"cubins/manifest.json": "[" * 100_000}), refresh(package)), "manifest.json cannot be read"),
        (edit_metadata(lambda metadata: metadata.update(version=2)), "build.toml says mini-kernel, version 1"),
        (edit_metadata(lambda metadata: metadata.update(name="other")), "build.toml says mini-kernel, version 1"),
        (edit_metadata(lambda metadata: metadata["backend"].update(type="xpu")), "is for mini-kernel, version 1, xpu"),
        (lambda package: package.build(dirty=True), "uncommitted changes"),
        (lambda package: (package.folder / "build" / "CARD.md").unlink(), "tools.card"),
        (lambda package: (package.folder / "build.toml").unlink(), "build.toml not found"),
        (lambda package: (package.folder / "build.toml").write_text("[general]\n"), "not a valid build.toml"),
        (lambda package: (package.write({"__init__.py": "__all__ = [n for n in 'ab']\n"}), refresh(package)), "not a literal list"),
        (lambda package: (package.write({"__init__.py": "x = 1\n"}), refresh(package)), "has no __all__"),
        *(
            (lambda package, text=text: (package.write({"__init__.py": INIT + text}), refresh(package)), "__all__ is used again")
            for text in CHANGES
        ),
        *(
            (lambda package, place=place: (package.folder / place).symlink_to("/etc/hosts"), f"{place} is a link to /etc/hosts")
            for place in LINKS
        ),
        (lambda package: (package.variant / "data/etc").symlink_to("/etc"), "data/etc is a link to /etc, outside of"),
        (lambda package: (package.variant / "data/circle").symlink_to("circle"), "data/circle is a link to"),
        (linked, "torch-cpu is a link to"),
        (lambda package: (package.write({"layers.py": "class :\n"}), refresh(package)), "not valid Python"),
    ],
)
def test_an_incomplete_or_dirty_build_is_refused_with_the_reason(hub, package, upload, spoil, reason):
    spoil(package)
    with pytest.raises(PublishError, match=re.escape(reason)):
        upload()
    assert not heads(hub)


def refresh(package):
    """A digest that fits again, without the card (which would already be refused)."""
    digest = {"algorithm": "sha256", "files": hash_files(package.variant)}
    edit_metadata(lambda metadata: metadata.update(digest=digest))(package)


def test_a_dirty_build_can_be_tried_on_purpose(hub, package, upload):
    package.build(dirty=True)
    upload(allow_dirty=True)
    assert on_hub(hub) == on_disk(package)


def test_without_a_token_the_command_says_how_to_give_one(served, package, tmp_path):
    process = command(package, served, tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "HF_TOKEN" in errors
    assert "hf auth login" in errors
    assert not heads(served)


def test_the_command_takes_endpoint_and_token_from_the_environment(served, package, tmp_path):
    process = command(package, served, tmp_path, HF_TOKEN=TOKEN)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert VARIANT in output
    assert on_hub(served) == on_disk(package)


@pytest.mark.parametrize("dry_run", (False, True))
@pytest.mark.parametrize("token", ("hf_secret\nmore", "hf_secret\r", "hf_secret more", "hf_s\xe9cret", "hf_secret\0"))
def test_a_token_that_no_header_can_hold_is_refused_without_showing_it(upload, token, dry_run):
    with pytest.raises(PublishError, match=f"the token .{len(token)} characters. has a space, a line break or a character") as error:
        upload(token=token, dry_run=dry_run)
    seen = error.value
    while seen is not None:
        assert "secret" not in str(seen) and "cret" not in str(seen)
        seen = seen.__cause__ or seen.__context__


@pytest.mark.parametrize("way", ("hub", "served"))
def test_a_wrong_token_is_named_as_the_cause(request, way, package):
    hub = request.getfixturevalue(way)
    with pytest.raises(PublishError, match="token is not valid"):
        publish(package.folder, endpoint=hub.endpoint, token="hf_wrong")
    assert not heads(hub)


def drop_name(package):
    package.write({"__init__.py": INIT.replace(', "triple"', "")})
    package.build()


def drop_layer(package):
    package.write({"layers.py": LAYERS.replace("class Quadrupler", "class _Quadrupler")})
    package.build()


def drop_all_layers(package):
    (package.variant / "layers.py").unlink()
    package.write({"__init__.py": INIT.replace("from . import layers", "layers = None")})
    package.build()


DROPS = [
    (drop_name, ["public name triple"]),
    (drop_layer, ["layer Quadrupler"]),
    (drop_all_layers, ["layer Doubler", "layer Quadrupler"]),
    (lambda package: package.build(archs=("9.0",)), ["architecture 8.0"]),
    (lambda package: package.build(archs=()), ["architecture 8.0", "architecture 9.0"]),
    (lambda package: package.build(archs=("8.0", "9.0a")), ["architecture 9.0"]),
]


@pytest.mark.parametrize(
    ("dropped", "named"),
    (
        (("add_rows",), ["kernel add_rows"]),
        (("scale",), ["operation scale", "kernel scale"]),
        (("add", "add_rows"), ["operation add", "kernel add"]),
    ),
)
def test_a_kernel_or_an_operation_that_goes_breaks_the_promise(hub, package, upload, dropped, named):
    package.build(kernels=TARGETS)
    upload()
    package.build(kernels=TARGETS, dropped=dropped)
    with pytest.raises(PublishError, match="raise `version`") as refusal:
        upload()
    assert [item for item in named if f"torch-cpu: {item}" in str(refusal.value)] == named
    assert "kernels for" not in str(refusal.value)
    package.build(kernels=TARGETS)
    assert not upload().commits  # and one that comes is none that goes


@pytest.mark.parametrize(("drop", "dropped"), DROPS)
def test_an_upload_that_drops_something_is_refused_unless_the_version_is_raised(hub, package, upload, drop, dropped):
    upload()
    before, published = heads(hub), on_hub(hub)
    drop(package)
    for dry_run in (True, False):
        with pytest.raises(PublishError, match="raise `version` in build.toml from 1 to 2") as refusal:
            upload(dry_run=dry_run)
        assert all(f"torch-cpu: {item}" in str(refusal.value) for item in dropped)
    assert heads(hub) == before
    archs = json.loads((package.variant / "metadata.json").read_text())["backend"]["archs"]
    package.build(version=2, archs=archs)
    upload()
    assert on_hub(hub) == published
    assert on_hub(hub, "v2") == on_disk(package)


def test_an_upload_that_adds_keeps_the_promise(hub, package, upload):
    upload()
    package.write(
        {"__init__.py": INIT.replace('"triple"]', '"triple", "more"]'), "layers.py": LAYERS + "\n\nclass More(Doubler):\n    pass\n"}
    )
    package.build(archs=("8.0+PTX", "9.0f", "12.0a"))
    upload()
    assert on_hub(hub) == on_disk(package)


def test_an_older_version_does_not_take_the_page_of_a_newer_one(hub, package, upload):
    upload()
    package.build(version=2)
    upload()
    page = on_hub(hub, "main")["README.md"]
    package.build(version=1)
    package.write({"ops.py": OPS + "# repaired\n"})
    package.build(version=1)
    assert set(upload().commits) == {"v1", "v1-bench"}
    assert on_hub(hub, "main")["README.md"] == page
    assert b"mini-kernel 2" in page


def without(host, *names):
    return {**TARGETS, host: tuple(name for name in TARGETS[host] if name not in names)}


ALL = {f"{host} {name}" for host, names in TARGETS.items() for name in names}

PARTIAL = [
    (without("x86_64", "sm_80"), {"x86_64 sm_80"}),
    (TARGETS | {"aarch64": ("sm_110",)}, {"aarch64 sm_90", "aarch64 sm_100", "aarch64 sm_103", "aarch64 sm_121"}),
    ({"x86_64": TARGETS["x86_64"]}, {f"aarch64 {name}" for name in TARGETS["aarch64"]}),
    ({"x86_64": ("sm_90",)}, ALL - {"x86_64 sm_90"}),
    ((TARGETS, without("x86_64", "sm_120")), {"x86_64 sm_120"}),  # of one operation alone
    ({}, ALL),
]


@pytest.mark.parametrize(("kernels", "lacking"), PARTIAL)
def test_a_build_without_the_kernels_of_a_target_is_refused_unless_it_is_meant(hub, package, upload, kernels, lacking):
    """Whatever metadata.json says of architectures: by the images, for each host."""
    package.build(archs=("8.0+PTX", "9.0a"), kernels=kernels)
    for dry_run in (True, False):
        with pytest.raises(PublishError, match="or pass --allow-partial") as refusal:
            upload(dry_run=dry_run)
        assert set(re.findall(r"(?:x86_64|aarch64) sm_\d+", str(refusal.value))) == lacking
    assert not heads(hub)
    upload(allow_partial=True)
    assert on_hub(hub) == on_disk(package)


def test_kernels_for_one_target_less_break_the_promise_even_if_partial_is_meant(hub, package, upload):
    package.build(kernels=TARGETS)
    upload()
    for kernels in (without("aarch64", "sm_121"), (TARGETS, without("aarch64", "sm_121"))):
        package.build(kernels=kernels)
        with pytest.raises(PublishError, match="drops: torch-cpu: kernels for aarch64 sm_121. .*raise `version`"):
            upload(allow_partial=True)
    package.build(kernels=TARGETS)
    package.write({"ops.py": OPS + "# new\n"})
    package.build(kernels=TARGETS)
    upload()
    assert on_hub(hub) == on_disk(package)


def test_what_was_tried_for_one_gpu_may_grow(hub, package, upload):
    package.build(kernels={"x86_64": ("sm_90",)})
    upload(allow_partial=True)
    package.build(kernels=TARGETS)
    upload()
    assert on_hub(hub) == on_disk(package)


def test_the_command_takes_the_two_flags_that_its_errors_name(served, package, tmp_path):
    package.build(kernels={"x86_64": ("sm_90",)}, dirty=True)
    for flags, code in ((["--allow-dirty"], 1), (["--allow-partial"], 1), (["--allow-dirty", "--allow-partial"], 0)):
        process = command(package, served, tmp_path, *flags, HF_TOKEN=TOKEN)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code, errors


@pytest.mark.parametrize("gone", ("metadata.json", "__init__.py", "layers.py"))
def test_a_published_variant_that_lost_a_file_keeps_the_rest_of_its_promise(hub, package, upload, gone):
    package.build(kernels=TARGETS)
    upload()
    hub.commit({f"{VARIANT}/{gone}": None})
    drop_name(package) if gone != "__init__.py" else drop_layer(package)
    with pytest.raises(PublishError, match="public name triple" if gone != "__init__.py" else "layer Quadrupler"):
        upload(allow_partial=True)


@pytest.mark.parametrize("damaged", ("metadata.json", "__init__.py", "cubins/manifest.json"))
def test_a_published_variant_that_cannot_be_read_is_no_excuse(hub, package, upload, damaged):
    package.build(kernels=TARGETS)
    upload()
    hub.commit({f"{VARIANT}/{damaged}": b"{ not what it was"})
    with pytest.raises(PublishError, match="what it promises is not known .*raise `version`"):
        upload()
