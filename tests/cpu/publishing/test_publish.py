"""The road from a build to a user: build/ -> tools.publish -> local Hub -> get_kernel, also killed on the way."""

import io
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from rich.console import Console

from tests.publishing import OPS, REPO, TOKEN, USE, VARIANT, client_env, command, content, on_disk, on_hub, tree, with_benchmarks
from tools import publish as publish_module
from tools.hub_api import GIT_ATTRIBUTES, Handler
from tools.hub_http import MIB
from tools.hub_server import HubServer
from tools.publish import PublishError, publish


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
    with pytest.raises(PublishError, match="another commit was published"):
        upload()
    assert f"{VARIANT}/other.py" in tree(hub)
    monkeypatch.setattr(publish_module, "upload", send)
    if first_upload:  # what the other one published is no variant of ours yet: no promise to keep
        upload()
        assert on_hub(hub) == on_disk(package)
