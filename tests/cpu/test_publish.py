"""Publishing a miniature package to a local Hub with the real clients, and reading it back with `kernels.get_kernel`."""

import ast
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from rich.console import Console

from tools import publish as publish_module
from tools.card import fill_card, render_card
from tools.hub_api import GIT_ATTRIBUTES, Handler
from tools.hub_http import MIB
from tools.hub_server import HubServer
from tools.kernel_package import PackageError, layer_names, public_names, read_package
from tools.kernels_adapter import hash_files
from tools.publish import PublishError, publish
from tools.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
REPO = "some-org/mini-kernel"
TOKEN = "hf_test"
VARIANT = "build/torch-cpu"

INIT = """from . import layers
from .ops import double

__all__ = ["double", "layers", "triple"]


def triple(x):
    return 3 * x
"""
LAYERS = """import torch
from torch import nn

from .ops import double


class Doubler(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return double(x)


class Quadrupler(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return double(double(x))
"""
OPS = """import json
from pathlib import Path

FACTOR = json.loads((Path(__file__).parent / "data" / "factor.json").read_text())


def double(x):
    return FACTOR * x
"""
BENCHMARK = """import sys
from pathlib import Path

import torch
from kernels.benchmark import Benchmark

sys.path.insert(0, str(Path(__file__).parent))
from common import SIZE


class DoubleBenchmark(Benchmark):
    def setup(self):
        self.x = torch.ones(SIZE)

    def benchmark_double(self):
        self.out = self.kernel.double(self.x)

    def verify_double(self):
        return 2 * self.x
"""
CARD = """---
license: {{ license }}
---
# {{ repo_id }} {{ version }}
{{ functions | join(" ") }}
{{ layers | join(" ") }}
{{ archs | join(" ") }}
"""


def manifest_of(kernels):
    """Of two operations: `add`, in two variants, one of which is for sm_90 alone, and `scale`."""

    def entry(operation, images, targets=()):
        found = {host: {name: [0, 1] for name in names if not targets or name in targets} for host, names in images.items()}
        return {"operation": operation, "images": found, **({"targets": list(targets)} if targets else {})}

    add, scale = kernels if isinstance(kernels, tuple) else (kernels, kernels)
    return {"kernels": {"add": [entry("add", add), entry("add", add, ("sm_90",))], "scale": [entry("scale", scale)]}}


class Mini:
    """A package with one CPU variant that a test changes and builds again."""

    def __init__(self, folder):
        self.folder = folder
        self.variant = folder / VARIANT
        (folder / "benchmark" / "results").mkdir(parents=True)
        (folder / "benchmark" / "benchmark_double.py").write_text(BENCHMARK)
        (folder / "benchmark" / "common.py").write_text("SIZE = 3\n")
        (folder / "benchmark" / "results" / "h200.py").write_text("# not a source\n")
        (folder / "benchmark" / "plot.png").write_bytes(b"png")
        (folder / "benchmarks").symlink_to("benchmark")
        (folder / "CARD.md").write_text(CARD)
        self.write({"__init__.py": INIT, "layers.py": LAYERS, "ops.py": OPS, "data/factor.json": "2"})
        self.build()

    def write(self, files):
        for name, text in files.items():
            path = self.variant / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def build(self, version=1, archs=("8.0", "9.0"), dirty=False, backends=("cpu",), variants=("cpu",), kernels=None):
        """kernels: the images of its two compiled operations, by host; None for a package without any."""
        if kernels is not None:
            self.write({"cubins/manifest.json": json.dumps(manifest_of(kernels))})
        hub = f'[general.hub]\nrepo-id = "{REPO}"\n'
        general = f'name = "mini-kernel"\nversion = {version}\nedition = 5\nlicense = "MIT"\nbackends = {json.dumps(list(backends))}\n'
        (self.folder / "build.toml").write_text(f"[general]\n{general}\n{hub}\n[torch-noarch]\n")
        for backend in variants:
            folder = self.folder / "build" / f"torch-{backend}"
            folder.mkdir(exist_ok=True)
            (folder / "metadata.json").write_text(json.dumps(self.metadata(folder, backend, version, archs, dirty)))
        fill_card(read_package(self.folder))

    def metadata(self, folder, backend, version, archs, dirty):
        files = hash_files(folder)
        return {
            "name": "mini-kernel",
            "id": f"_mini_kernel_{backend}_{hashlib.sha1(str(sorted(files.items())).encode()).hexdigest()[:7]}",
            "version": version,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend, "archs": list(archs)},
            "digest": {"algorithm": "sha256", "files": files},
            "provenance": {"kernel-builder": {"version": "0.17.2"}, "kernel": {"commit": "a" * 40, "dirty": dirty}},
        }


@pytest.fixture
def package(tmp_path):
    return Mini(tmp_path / "package")


@pytest.fixture
def hub(tmp_path):
    with HubServer(tmp_path / "hub", token=TOKEN) as server:
        yield server


@pytest.fixture
def upload(hub, package):
    """Publish the package; the report, with what was printed as `report.text`."""

    def run(**options):
        console = Console(file=io.StringIO(), width=200)
        options = {"endpoint": hub.endpoint, "token": TOKEN, **options}
        report = publish(package.folder, console=console, **options)
        report.text = console.file.getvalue()
        return report

    return run


def tree(hub, revision="v1"):
    return hub.store.tree(hub.store.resolve(REPO, revision))


def content(hub, path, revision="v1"):
    return hub.store.open_blob(tree(hub, revision)[path]["blob"]).read()


def on_disk(package):
    """What the version branch has to hold."""
    return {f"{VARIANT}/{p.relative_to(package.variant)}": p.read_bytes() for p in package.variant.rglob("*") if p.is_file()}


def with_benchmarks(package):
    """What the branch of the benchmarks has to hold."""
    found = {name: package.folder / "benchmark" / name for name in ("benchmark_double.py", "common.py")}
    return on_disk(package) | {f"benchmarks/{name}": file.read_bytes() for name, file in found.items()}


def on_hub(hub, revision="v1"):
    return {path: hub.store.open_blob(entry["blob"]).read() for path, entry in tree(hub, revision).items()}


def client_env(hub, tmp_path, **more):
    unset = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "LOCAL_KERNELS", "KERNELS_CACHE")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    return {**env, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), **more}


def command(package, hub, tmp_path, *arguments, **env):
    return subprocess.Popen(
        [sys.executable, "-m", "tools.publish", "--package", str(package.folder), *arguments],
        cwd=ROOT,
        env=client_env(hub, tmp_path, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# The road from a build to a user

USE = f"""
import torch
from kernels import Mode, get_kernel, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping, LayerRepository
mini = get_kernel("{REPO}", version=1, trust_remote_code=True)
assert mini.double(torch.ones(2)).tolist() == [2, 2], mini.double(torch.ones(2))
assert mini.triple(1) == 3

class Same(torch.nn.Module):
    def forward(self, x):
        return x

replace_kernel_forward_from_hub(Same, "Same")
repo = LayerRepository("{REPO}", layer_name="Doubler", version=1, trust_remote_code=True)
with use_kernel_mapping({{"Same": {{"cpu": repo}}}}, inherit_mapping=False):
    model = kernelize(Same(), mode=Mode.TRAINING, device="cpu", use_fallback=False)
assert model(torch.ones(2)).tolist() == [2, 2]
print("loaded")
"""


def test_a_published_package_loads_with_get_kernel(hub, package, upload, tmp_path):
    report = upload()
    assert on_hub(hub) == on_disk(package)
    assert on_hub(hub, "v1-bench") == with_benchmarks(package)
    assert on_hub(hub, "main") == {".gitattributes": GIT_ATTRIBUTES, "README.md": (package.folder / "build" / "CARD.md").read_bytes()}
    assert set(report.commits) == {"v1", "v1-bench", "main"}
    assert VARIANT in report.text
    result = subprocess.run(
        [sys.executable, "-c", USE], env=client_env(hub, tmp_path), check=False, capture_output=True, text=True, timeout=100
    )
    assert result.stdout == "loaded\n", result.stderr


def test_without_trust_the_kernel_is_refused(hub, upload, tmp_path):
    upload()
    script = f'from kernels import get_kernel; get_kernel("{REPO}", version=1)'
    result = subprocess.run(
        [sys.executable, "-c", script], env=client_env(hub, tmp_path), check=False, capture_output=True, text=True, timeout=100
    )
    assert "not from a trusted publisher" in result.stderr


def test_a_second_upload_of_the_same_build_is_a_no_op_and_says_so(hub, upload):
    upload()
    before = hub.store.refs(REPO)
    report = upload()
    assert hub.store.refs(REPO) == before
    assert report.commits == {}
    assert "already published" in report.text


def test_only_what_changed_is_uploaded(hub, package, upload):
    upload()
    package.write({"ops.py": OPS + "# new\n"})
    package.build()
    plan = upload().plans[0]
    assert sorted(plan.add) == [f"{VARIANT}/metadata.json", f"{VARIANT}/ops.py"]
    assert on_hub(hub) == on_disk(package)


def test_stale_files_go_in_the_same_commit(hub, package, upload):
    package.write({"old.py": "# old\n", "data/old.bin": b"\0"})
    (package.folder / "benchmark" / "benchmark_old.py").write_text("# old\n")
    package.build()
    upload()
    for stale in (package.variant / "old.py", package.variant / "data" / "old.bin", package.folder / "benchmark" / "benchmark_old.py"):
        stale.unlink()
    package.write({"new.py": "# new\n"})
    package.build()
    commits = len(list(hub.store.history(REPO, "v1")))
    report = upload()
    assert on_hub(hub) == on_disk(package)
    assert len(list(hub.store.history(REPO, "v1"))) == commits + 1
    assert on_hub(hub, "v1-bench") == with_benchmarks(package)
    assert report.plans[0].delete == [f"{VARIANT}/data/old.bin", f"{VARIANT}/old.py"]
    assert report.plans[1].delete == ["benchmarks/benchmark_old.py", f"{VARIANT}/data/old.bin", f"{VARIANT}/old.py"]


def test_a_variant_of_another_machine_stays(hub, upload):
    upload()
    api = HfApi(endpoint=hub.endpoint, token=TOKEN)
    other = CommitOperationAdd("build/torch-metal/__init__.py", b"# metal\n")
    api.create_commit(REPO, [other], repo_type="kernel", revision="v1", commit_message="metal")
    assert "Left as published, not in this build: build/torch-metal" in upload().text
    assert content(hub, "build/torch-metal/__init__.py") == b"# metal\n"


def test_results_and_plots_are_no_benchmark_sources(hub, upload):
    upload()
    found = sorted(path for path in tree(hub, "v1-bench") if "bench" in path)
    assert found == ["benchmarks/benchmark_double.py", "benchmarks/common.py"]


def test_what_a_killed_build_left_behind_is_not_uploaded(hub, package, upload):
    (package.folder / "build" / "torch-cpu.new").mkdir()
    (package.folder / "build" / "cache").mkdir()
    upload()
    assert on_hub(hub) == on_disk(package)


def test_bytecode_is_not_uploaded(hub, package, upload):
    package.write({"__pycache__/ops.cpython-311.pyc": b"\0"})
    upload()
    assert not any("pycache" in path for path in tree(hub))


def test_a_dry_run_writes_nothing_and_needs_no_token(hub, upload):
    assert "Dry run" in upload(dry_run=True, token=None).text
    assert not hub.store.exists(REPO)


def test_another_repository_can_be_named(hub, upload):
    upload(repo_id="some-org/elsewhere")
    assert hub.store.exists("some-org/elsewhere")
    assert not hub.store.exists(REPO)


# What is refused


def remove(path):
    return lambda package: (package.variant / path).unlink()


def edit_metadata(change):
    def edit(package):
        path = package.variant / "metadata.json"
        metadata = json.loads(path.read_text())
        change(metadata)
        path.write_text(json.dumps(metadata))

    return edit


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
        (lambda package: (package.write({"layers.py": "class :\n"}), refresh(package)), "not valid Python"),
    ],
)
def test_an_incomplete_or_dirty_build_is_refused_with_the_reason(hub, package, upload, spoil, reason):
    spoil(package)
    with pytest.raises(PublishError, match=re.escape(reason)):
        upload()
    assert not hub.store.exists(REPO)


def refresh(package):
    """A digest that fits again, without the card (which would already be refused)."""
    digest = {"algorithm": "sha256", "files": hash_files(package.variant)}
    edit_metadata(lambda metadata: metadata.update(digest=digest))(package)


def test_a_dirty_build_can_be_tried_on_purpose(hub, package, upload):
    package.build(dirty=True)
    upload(allow_dirty=True)
    assert on_hub(hub) == on_disk(package)


def test_without_a_token_the_command_says_how_to_give_one(hub, package, tmp_path):
    process = command(package, hub, tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "HF_TOKEN" in errors
    assert "hf auth login" in errors
    assert not hub.store.exists(REPO)


def test_the_command_takes_endpoint_and_token_from_the_environment(hub, package, tmp_path):
    process = command(package, hub, tmp_path, HF_TOKEN=TOKEN)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert VARIANT in output
    assert on_hub(hub) == on_disk(package)


def test_a_wrong_token_is_named_as_the_cause(hub, upload):
    with pytest.raises(PublishError, match="token is not valid"):
        upload(token="hf_wrong")
    assert not hub.store.exists(REPO)


# The promise of a version


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


@pytest.mark.parametrize(("drop", "dropped"), DROPS)
def test_an_upload_that_drops_something_is_refused_unless_the_version_is_raised(hub, package, upload, drop, dropped):
    upload()
    before, published = hub.store.refs(REPO), on_hub(hub)
    drop(package)
    for dry_run in (True, False):
        with pytest.raises(PublishError, match="raise `version` in build.toml from 1 to 2") as refusal:
            upload(dry_run=dry_run)
        assert all(f"torch-cpu: {item}" in str(refusal.value) for item in dropped)
    assert hub.store.refs(REPO) == before
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
    page = content(hub, "README.md", "main")
    package.build(version=1)
    package.write({"ops.py": OPS + "# repaired\n"})
    package.build(version=1)
    assert set(upload().commits) == {"v1", "v1-bench"}
    assert content(hub, "README.md", "main") == page
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
    assert not hub.store.exists(REPO)
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


def test_the_command_takes_the_two_flags_that_its_errors_name(hub, package, tmp_path):
    package.build(kernels={"x86_64": ("sm_90",)}, dirty=True)
    for flags, code in ((["--allow-dirty"], 1), (["--allow-partial"], 1), (["--allow-dirty", "--allow-partial"], 0)):
        process = command(package, hub, tmp_path, *flags, HF_TOKEN=TOKEN)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code, errors


@pytest.mark.parametrize("gone", ("metadata.json", "__init__.py", "layers.py"))
def test_a_published_variant_that_lost_a_file_keeps_the_rest_of_its_promise(hub, package, upload, gone):
    package.build(kernels=TARGETS)
    upload()
    api = HfApi(endpoint=hub.endpoint, token=TOKEN)
    api.create_commit(
        REPO, [CommitOperationDelete(f"{VARIANT}/{gone}")], repo_type="kernel", revision="v1", commit_message="lost", num_threads=1
    )
    drop_name(package) if gone != "__init__.py" else drop_layer(package)
    with pytest.raises(PublishError, match="public name triple" if gone != "__init__.py" else "layer Quadrupler"):
        upload(allow_partial=True)


@pytest.mark.parametrize("damaged", ("metadata.json", "__init__.py", "cubins/manifest.json"))
def test_a_published_variant_that_cannot_be_read_is_no_excuse(hub, package, upload, damaged):
    package.build(kernels=TARGETS)
    upload()
    api = HfApi(endpoint=hub.endpoint, token=TOKEN)
    broken = CommitOperationAdd(f"{VARIANT}/{damaged}", b"{ not what it was")
    api.create_commit(REPO, [broken], repo_type="kernel", revision="v1", commit_message="damage")
    with pytest.raises(PublishError, match="what it promises is not known .*raise `version`"):
        upload()


# What `kernels` offers beside get_kernel


KERNELS = "import sys; from kernels.cli import main; sys.argv[0] = 'kernels'; main()"
LOCKED = f"""
from pathlib import Path
from kernels import load_kernel
mini = load_kernel("{REPO}", lockfile=Path("project/kernels.lock"), backend="cpu")
assert mini.triple(1) == 3
print("loaded")
"""


@pytest.fixture
def kernels_command(tmp_path):
    """Runs a Python script, by default `kernels` with arguments, as a user of a Hub that trusts the publisher."""
    with HubServer(tmp_path / "trusting", token=TOKEN, trusted_publishers=("some-org",)) as hub:

        def run(*arguments, script=KERNELS, **env):
            env = client_env(hub, tmp_path, HF_HUB_DISABLE_PROGRESS_BARS="1", **env)
            done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        run.hub = hub
        yield run


@pytest.mark.parametrize("version", (1, 2))
def test_what_is_locked_and_downloaded_loads_without_a_network(kernels_command, package, tmp_path, version):
    """The second version's branch is made of a main that has a page, and the first one's had benchmarks once."""
    hub = kernels_command.hub
    options = {"endpoint": hub.endpoint, "token": TOKEN, "console": Console(file=io.StringIO())}
    publish(package.folder, **options)
    if version == 1:
        api = HfApi(endpoint=hub.endpoint, token=TOKEN)
        files = {"benchmarks/benchmark_double.py": b"# old\n", "README.md": b"---\nlicense: mit\n---\n"}
        old = [CommitOperationAdd(path, data) for path, data in files.items()]
        api.create_commit(REPO, old, repo_type="kernel", revision="v1", commit_message="as it was published before")
    package.build(version=version)
    publish(package.folder, **options)
    assert on_hub(hub, f"v{version}") == on_disk(package)
    (tmp_path / "project").mkdir()
    (tmp_path / "project/pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO}" = {version}\n')
    kernels_command("lock", "project")
    kernels_command("download", "project", "--all-variants")
    for offline in ("0", "1"):
        assert kernels_command(script=LOCKED, HF_HUB_OFFLINE=offline) == "loaded\n"


def test_a_whole_snapshot_serves_a_cluster_without_a_network(kernels_command, package):
    publish(package.folder, endpoint=kernels_command.hub.endpoint, token=TOKEN, console=Console(file=io.StringIO()))
    kernels_command(script=f'from huggingface_hub import snapshot_download; snapshot_download("{REPO}", repo_type="kernel", revision="v1")')
    assert kernels_command(script=USE, HF_HUB_OFFLINE="1") == "loaded\n"


def test_kernels_benchmark_runs_what_is_published(kernels_command, package):
    publish(package.folder, endpoint=kernels_command.hub.endpoint, token=TOKEN, console=Console(file=io.StringIO()))
    arguments = ("benchmark", REPO, "--branch", "v1-bench", "--iterations", "2", "--warmup", "1", "--json")
    assert "DoubleBenchmark.double" in kernels_command(*arguments)
    assert kernels_command("versions", REPO).startswith("Version 1:")


# Killed, and at the same time


@pytest.mark.parametrize("moment", ["create_repo", "create_branch", "preupload", "commit", "second commit", "lfs_put", "second lfs_put"])
def test_a_killed_upload_is_finished_by_running_it_again(hub, package, upload, tmp_path, monkeypatch, moment):
    """The publisher is killed when the server has received that request, before it is answered."""
    if "lfs" in moment:
        hub.inline_limit = MIB
        package.write({"data/one.bin": os.urandom(2 * MIB), "data/two.bin": os.urandom(2 * MIB)})
        package.build()
    wanted, seen, answered, process = moment.removeprefix("second "), [], threading.Event(), None
    original = getattr(Handler, wanted)

    def kill_then_go_on(self, **arguments):
        seen.append(1)
        if len(seen) < (2 if "second" in moment else 1):
            return original(self, **arguments)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        try:
            original(self, **arguments)  # what the server has received it carries out
        finally:
            answered.set()

    monkeypatch.setattr(Handler, wanted, kill_then_go_on)
    process = command(package, hub, tmp_path, HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert answered.wait(60)
    refs = hub.store.refs(REPO) if hub.store.exists(REPO) else {}
    if "v1" in refs:  # nothing, or everything
        assert on_hub(hub) in ({".gitattributes": GIT_ATTRIBUTES}, on_disk(package))
    monkeypatch.setattr(Handler, wanted, original)
    again = command(package, hub, tmp_path, HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1")
    _, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert on_hub(hub) == on_disk(package)
    assert content(hub, "README.md", "main") == (package.folder / "build" / "CARD.md").read_bytes()


def test_large_files_that_arrived_are_not_sent_again(hub, package, tmp_path, monkeypatch):
    hub.inline_limit = MIB
    package.write({f"data/{i}.bin": os.urandom(2 * MIB) for i in range(3)})
    package.build()
    put, arrived, process = Handler.lfs_put, [], None

    def kill_at_the_commit(self, **arguments):
        process.kill()
        process.wait()

    def count(self, **arguments):
        put(self, **arguments)
        arrived.append(arguments["oid"])

    commit = Handler.commit
    monkeypatch.setattr(Handler, "lfs_put", count)
    monkeypatch.setattr(Handler, "commit", kill_at_the_commit)
    process = command(package, hub, tmp_path, HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1")
    process.communicate(timeout=60)
    monkeypatch.setattr(Handler, "commit", commit)
    process = command(package, hub, tmp_path, HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(arrived) == len(set(arrived)) == 3
    assert on_hub(hub) == on_disk(package)
    assert tree(hub)[f"{VARIANT}/data/0.bin"]["lfs"]


@pytest.mark.parametrize("stored", [False, True], ids=["before it stored the commit", "after it stored the commit"])
def test_a_server_that_dies_in_a_commit_is_reported_and_the_rerun_is_right(hub, package, upload, monkeypatch, stored):
    commit = Handler.commit

    def die(self, **arguments):
        if stored:
            self.send_json = lambda value: None
            commit(self, **arguments)
        raise ConnectionAbortedError

    monkeypatch.setattr(Handler, "commit", die)
    with pytest.raises(PublishError, match="run it again"):
        upload()
    monkeypatch.setattr(Handler, "commit", commit)
    report = upload()
    assert ("v1" in report.commits) is not stored
    assert on_hub(hub) == on_disk(package)


def test_a_hub_that_is_not_there_is_reported(package, monkeypatch, tmp_path):
    with HubServer(tmp_path / "gone", token=TOKEN) as hub:
        endpoint = hub.endpoint
    with pytest.raises(PublishError, match=re.escape(endpoint)):
        publish(package.folder, endpoint=endpoint, token=TOKEN, console=Console(file=io.StringIO()))


@pytest.mark.parametrize("first_upload", [True, False])
def test_of_two_publishers_at_once_the_slower_is_refused(hub, package, upload, monkeypatch, first_upload):
    if not first_upload:
        upload()
        package.write({"ops.py": OPS + "# new\n"})
        package.build()
    api = HfApi(endpoint=hub.endpoint, token=TOKEN)
    send = publish_module.upload

    def somebody_else_first(*arguments):
        other = CommitOperationAdd(f"{VARIANT}/other.py", b"# other\n")
        api.create_commit(REPO, [other], repo_type="kernel", revision="v1", commit_message="other")
        return send(*arguments)

    monkeypatch.setattr(publish_module, "upload", somebody_else_first)
    with pytest.raises(PublishError, match="somebody else published"):
        upload()
    assert f"{VARIANT}/other.py" in tree(hub)
    monkeypatch.setattr(publish_module, "upload", send)
    if first_upload:  # what the other one published is no variant of ours yet: no promise to keep
        upload()
        assert on_hub(hub) == on_disk(package)


# The page


def test_the_card_names_what_the_build_offers(package):
    package.build(archs=("8.0+PTX", "9.0a", "12.0"))
    text = (package.folder / "build" / "CARD.md").read_text()
    assert text.splitlines()[1:] == ["license: mit", "---", f"# {REPO} 1", "double triple", "Doubler Quadrupler", "8.0 9.0 12.0"]


def test_a_card_that_cannot_be_filled_says_why(package):
    (package.folder / "CARD.md").write_text("{{ unknown }}")
    with pytest.raises(PackageError, match="unknown"):
        fill_card(read_package(package.folder))
    (package.folder / "CARD.md").unlink()
    with pytest.raises(PackageError, match="CARD.md not found"):
        fill_card(read_package(package.folder))


OURS = {
    "repo_id": "some-org/qwen",
    "version": 3,
    "license": "mit",
    "functions": ["apply", "reset"],
    "layers": ["RMSNorm", "Unknown"],
    "archs": ["8.0", "12.1", "99.0"],
    "has_benchmark": False,
    "upstream": None,
}
KERNEL_BUILDER = {key: value for key, value in OURS.items() if key not in ("version", "archs")}


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_our_card_has_valid_front_matter_and_code():
    text = render_card((ROOT / "CARD.md").read_text(), OURS)
    head = yaml.safe_load(text.split("---\n")[1])
    assert head == {"library_name": "kernels", "license": "mit", "tags": ["kernels", "cutile", "cuda"]}
    assert "{" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert len(blocks(text)) == 3
    for block in blocks(text):
        ast.parse(block)
        assert "some-org/qwen" in block
        assert re.search(r"version\W+3\b", block)
    for shown in ("`apply`, `reset`", "| `RMSNorm` |", "| `Unknown` |", "| 8.0 | A100", "| 99.0 |"):
        assert shown in text


def test_kernel_builder_fills_our_card_to_the_version_of_build_toml():
    """Its fill-card knows neither version nor architectures: the defaults in the template stand in."""
    version = read_package(ROOT).version
    text = render_card((ROOT / "CARD.md").read_text(), KERNEL_BUILDER)
    assert all(re.search(rf"version\W+{version}\b", block) for block in blocks(text))
    assert "8.0 to 12.1" in text


def test_our_card_uses_only_public_names_of_the_package():
    package = read_package(ROOT)
    source = ROOT / "torch-ext" / package.name.replace("-", "_") / "__init__.py"
    if not source.exists():
        pytest.skip("the package is not there yet")
    used = set(re.findall(r"\bqwen3\.(\w+)", "".join(blocks((ROOT / "CARD.md").read_text()))))
    assert used
    assert used <= set(public_names(source.read_text(), str(source)))


@pytest.mark.parametrize("source", ['__all__ = ["a", "b"]', '__all__: list[str] = ["a", "b"]', '__all__ = (\n    "a",\n    "b",\n)'])
def test_public_names_are_read_without_running_the_module(source):
    assert public_names(f"raise SystemExit\n{source}\n", "x") == ["a", "b"]


def test_layers_are_the_public_classes():
    source = "import x\nclass A(x.B): pass\nclass _C: pass\ndef D(): pass\nif 1:\n    class E: pass\n"
    assert layer_names(source, "x") == ["A"]
