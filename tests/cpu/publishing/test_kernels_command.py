"""What the command `kernels` does with a published package: lock, download, snapshot, benchmark."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from tests.publishing import KERNELS, REPO, TOKEN, USE, client_env, on_disk, on_hub
from tools.hub import HubServer
from tools.publish import publish

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
    with HubServer(token=TOKEN, trusted_publishers=("some-org",)) as hub:

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
        old = {"benchmarks/benchmark_double.py": b"# old\n", "README.md": b"---\nlicense: mit\n---\n"}
        hub.repositories.commit(REPO, "v1", old)
    package.build(version=version)
    publish(package.folder, **options)
    assert on_hub(hub, f"v{version}") == on_disk(package)
    (tmp_path / "project").mkdir()
    (tmp_path / "project/pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO}" = {version}\n')
    kernels_command("lock", "project")
    kernels_command("download", "project", "--all-variants")
    for offline in ("0", "1") if version == 1 else ("1",):
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
