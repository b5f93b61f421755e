"""A small package as a build leaves it, and what the tests of its upload share."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import CommitOperationDelete
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile, RepoFolder

from tools.card import fill_card
from tools.hub import HubError, Repositories, listing
from tools.kernel_package import read_package
from tools.kernels_adapter import hash_files

ROOT = Path(__file__).resolve().parents[1]

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


def manifest_of(kernels, dropped=()):
    """Returns a build of two operations: `add`, in two variants, one of which is for sm_90 alone, and `scale`, without `dropped`."""

    def entry(operation, images, targets=()):
        found = {host: {name: [0, 1] for name in names if not targets or name in targets} for host, names in images.items()}
        return {"operation": operation, "images": found, **({"targets": list(targets)} if targets else {})}

    add, scale = kernels if isinstance(kernels, tuple) else (kernels, kernels)
    found = {"add": [entry("add", add), entry("add", add, ("sm_90",))], "add_rows": [entry("add", add)], "scale": [entry("scale", scale)]}
    return {"kernels": {name: entries for name, entries in found.items() if name not in dropped}}


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

    def build(self, version=1, archs=("8.0", "9.0"), dirty=False, backends=("cpu",), variants=("cpu",), kernels=None, dropped=()):
        """kernels: the images of its two compiled operations, by host; None for a package without any. dropped: not built."""
        if kernels is not None:
            self.write({"cubins/manifest.json": json.dumps(manifest_of(kernels, dropped))})
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


def on_hub(hub, revision="v1"):
    """The files of a revision by path."""
    return dict(hub.repositories.resolve(REPO, revision).files)


def heads(hub):
    """The commit of each branch; nothing where the repository is not there."""
    return dict(hub.repositories.branches.get(REPO, {}))


def on_disk(package):
    """What the version branch has to hold."""
    return {f"{VARIANT}/{p.relative_to(package.variant)}": p.read_bytes() for p in package.variant.rglob("*") if p.is_file()}


def with_benchmarks(package):
    """What the branch of the benchmarks has to hold."""
    found = {name: package.folder / "benchmark" / name for name in ("benchmark_double.py", "common.py")}
    return on_disk(package) | {f"benchmarks/{name}": file.read_bytes() for name, file in found.items()}


def client_env(hub, tmp_path, **more):
    unset = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "LOCAL_KERNELS", "KERNELS_CACHE")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    return {**env, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), **more}


class FakeApi:
    """As much of huggingface_hub's HfApi as tools.publish calls, over the repositories of a `Hub` below."""

    def __init__(self, hub, token):
        self.hub, self.endpoint, self.token = hub, hub.endpoint, token

    def __getattribute__(self, name):
        """Notes each call, with its failure where the test planned one: before it is carried out, or after."""
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found

        def called(*arguments, **options):
            self.hub.calls.append(name)
            before, after = (self.hub.failures.get((name, when, self.hub.calls.count(name))) for when in ("before", "after"))
            if before:
                raise before
            done = found(*arguments, **options)
            if after:
                raise after
            return done

        return called

    def _answer(self, function, *arguments, write=False):
        try:
            if write and self.token != self.hub.token:
                raise HubError(401, "Invalid credentials in Authorization header")
            return function(*arguments)
        except HubError as error:
            kinds = {"RepoNotFound": RepositoryNotFoundError, "RevisionNotFound": RevisionNotFoundError}
            response = SimpleNamespace(status_code=error.status, headers={}, request=None)
            raise kinds.get(error.code, HfHubHTTPError)(str(error), response=response) from error

    def list_repo_refs(self, repo_id, repo_type):
        refs = self._answer(self.hub.repositories.refs, repo_id)
        return SimpleNamespace(branches=[SimpleNamespace(name=name, target_commit=commit) for name, commit in refs.items()])

    def list_repo_tree(self, repo_id, repo_type, revision, recursive):
        for entry in listing(self._answer(self.hub.repositories.resolve, repo_id, revision).files, "", recursive):
            kind = RepoFile if entry["type"] == "file" else RepoFolder
            yield kind(**{**entry, "lfs": self.hub.lfs_entry(entry["path"], repo_id, revision)} if kind is RepoFile else entry)

    def create_repo(self, repo_id, repo_type, exist_ok):
        self._answer(self.hub.repositories.create_repo, repo_id, write=True)

    def create_branch(self, repo_id, branch, repo_type, revision):
        self._answer(self.hub.repositories.create_branch, repo_id, branch, revision, write=True)

    def create_commit(self, repo_id, operations, repo_type, revision, commit_message, parent_commit=None):
        changes = {}
        for operation in operations:
            if isinstance(operation, CommitOperationDelete):
                changes[operation.path_in_repo] = None
                continue
            with operation.as_file() as file:
                changes[operation.path_in_repo] = file.read()
        arguments = (repo_id, revision, changes, parent_commit)
        return SimpleNamespace(oid=self._answer(self.hub.repositories.commit, *arguments, write=True))

    def hf_hub_download(self, repo_id, filename, repo_type, revision, local_dir):
        target = Path(local_dir) / filename
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self._answer(self.hub.repositories.resolve, repo_id, revision).files[filename])


class FakeHub:
    """A Hub without HTTP. failures: what a call raises, by (its name, "before" or "after" it is carried out, the how manieth of that name);
    lfs: the paths that are stored as large files."""

    endpoint, token = "http://fake.hub", TOKEN

    def __init__(self):
        self.repositories, self.calls, self.failures, self.lfs = Repositories(), [], {}, set()

    def lfs_entry(self, path, repo, revision):
        data = self.repositories.resolve(repo, revision).files[path]
        return {"size": len(data), "oid": hashlib.sha256(data).hexdigest(), "pointerSize": 120} if path in self.lfs else None

    def commit(self, changes, revision="v1"):
        """What somebody else publishes."""
        return self.repositories.commit(REPO, revision, changes)


def command(package, hub, tmp_path, *arguments, **env):
    return subprocess.Popen(
        [sys.executable, "-m", "tools.publish", "--package", str(package.folder), *arguments],
        cwd=ROOT,
        env=client_env(hub, tmp_path, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# The package has a variant for CPUs alone, and `kernels` goes by the build of PyTorch, which may be one for GPUs on a machine without any.
ON_A_CPU = "import torch; torch.version.cuda = None\n"
# The command `kernels`.
KERNELS = f"{ON_A_CPU}import sys; from kernels.cli import main; sys.argv[0] = 'kernels'; main()"
USE = f"""
{ON_A_CPU}
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
