"""The road from a build to a user: build/ -> tools.publish -> Hub -> get_kernel, also killed on the way."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from tests.publishing import OPS, REPO, TOKEN, USE, VARIANT, client_env, heads, on_disk, on_hub, with_benchmarks
from tools import publish as publish_module
from tools.hub import GIT_ATTRIBUTES, HubServer
from tools.publish import PublishError, publish


def test_a_published_package_loads_with_get_kernel(served, package, upload, tmp_path):
    hub, report = served, upload()
    assert on_hub(hub) == on_disk(package)
    assert on_hub(hub, "v1-bench") == with_benchmarks(package)
    assert on_hub(hub, "main") == {".gitattributes": GIT_ATTRIBUTES, "README.md": (package.folder / "build" / "CARD.md").read_bytes()}
    assert set(report.commits) == {"v1", "v1-bench", "main"}
    assert VARIANT in report.text
    result = subprocess.run(
        [sys.executable, "-c", USE], env=client_env(hub, tmp_path), check=False, capture_output=True, text=True, timeout=100
    )
    assert result.stdout == "loaded\n", result.stderr


def test_without_trust_the_kernel_is_refused(served, upload, tmp_path):
    upload()
    script = f'from kernels import get_kernel; get_kernel("{REPO}", version=1)'
    result = subprocess.run(
        [sys.executable, "-c", script], env=client_env(served, tmp_path), check=False, capture_output=True, text=True, timeout=100
    )
    assert "not from a trusted publisher" in result.stderr


def test_a_second_upload_of_the_same_build_is_a_no_op_and_says_so(hub, upload):
    upload()
    before = heads(hub)
    report = upload()
    assert before and heads(hub) == before
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
    before = heads(hub)
    report = upload()
    assert on_hub(hub) == on_disk(package)
    assert {hub.repositories.commits[heads(hub)[branch]].parent == before[branch] for branch in ("v1", "v1-bench")} == {True}
    assert on_hub(hub, "v1-bench") == with_benchmarks(package)
    assert report.plans[0].delete == [f"{VARIANT}/data/old.bin", f"{VARIANT}/old.py"]
    assert report.plans[1].delete == ["benchmarks/benchmark_old.py", f"{VARIANT}/data/old.bin", f"{VARIANT}/old.py"]


def test_a_variant_of_another_machine_stays(hub, upload):
    upload()
    hub.commit({"build/torch-metal/__init__.py": b"# metal\n"})
    assert "Left as published, not in this build: build/torch-metal" in upload().text
    assert on_hub(hub)["build/torch-metal/__init__.py"] == b"# metal\n"


def test_results_plots_and_links_are_no_benchmark_sources(hub, package, upload):
    """A link leads to what runs another package's operation."""
    (package.folder / "benchmark" / "benchmark_other.py").symlink_to("common.py")
    upload()
    found = sorted(path for path in on_hub(hub, "v1-bench") if "bench" in path)
    assert found == ["benchmarks/benchmark_double.py", "benchmarks/common.py"]


def test_what_a_killed_build_left_behind_is_not_uploaded(hub, package, upload):
    (package.folder / "build" / "torch-cpu.new").mkdir()
    (package.folder / "build" / "cache").mkdir()
    upload()
    assert on_hub(hub) == on_disk(package)


def test_bytecode_is_not_uploaded(hub, package, upload):
    package.write({"__pycache__/ops.cpython-311.pyc": b"\0"})
    upload()
    assert not any("pycache" in path for path in on_hub(hub))


def test_a_dry_run_writes_nothing_and_needs_no_token(hub, upload):
    assert "Dry run" in upload(dry_run=True, token=None).text
    assert not heads(hub)


def test_another_repository_can_be_named(hub, upload):
    upload(repo_id="some-org/elsewhere")
    assert list(hub.repositories.branches) == ["some-org/elsewhere"]


class Killed(BaseException):
    """As SIGKILL: nothing of the publisher handles it."""


MOMENTS = [("create_repo", 1), ("create_branch", 1), ("create_branch", 2), *(("create_commit", time) for time in (1, 2, 3))]


@pytest.mark.parametrize("when", ("before", "after"))
@pytest.mark.parametrize(("call", "which"), MOMENTS)
def test_a_killed_upload_is_finished_by_running_it_again(hub, package, upload, call, which, when):
    """The publisher is killed in that request, before the Hub carries it out or after."""
    hub.failures[call, when, which] = Killed()
    with pytest.raises(Killed):
        upload()
    if "v1" in heads(hub):  # nothing, or everything
        assert on_hub(hub) in ({".gitattributes": GIT_ATTRIBUTES}, on_disk(package))
    hub.failures.clear()
    upload()
    assert on_hub(hub) == on_disk(package) and on_hub(hub, "v1-bench") == with_benchmarks(package)
    assert on_hub(hub, "main")["README.md"] == (package.folder / "build" / "CARD.md").read_bytes()


def test_a_file_that_the_hub_keeps_with_the_large_ones_is_compared_by_what_it_keeps_of_it(hub, package, upload):
    package.write({f"data/{i}.bin": b"%d" % i for i in range(3)})
    package.build()
    upload()
    hub.lfs = {f"{VARIANT}/data/{i}.bin" for i in range(3)}
    assert upload().commits == {}
    package.write({"data/2.bin": b"8"})
    package.build()
    assert sorted(upload().plans[0].add) == [f"{VARIANT}/data/2.bin", f"{VARIANT}/metadata.json"]


@pytest.mark.parametrize("when", ("before", "after"), ids=["before it stored the commit", "after it stored the commit"])
def test_a_server_that_dies_in_a_commit_is_reported_and_the_rerun_is_right(hub, package, upload, when):
    hub.failures["create_commit", when, 1] = ConnectionAbortedError()
    with pytest.raises(PublishError, match="run it again"):
        upload()
    report = upload()
    assert ("v1" in report.commits) is (when == "before")
    assert on_hub(hub) == on_disk(package)


def test_a_hub_that_is_not_there_is_reported(package):
    with HubServer(token=TOKEN) as hub:
        endpoint = hub.endpoint
    with pytest.raises(PublishError, match=endpoint):
        publish(package.folder, endpoint=endpoint, token=TOKEN, console=Console(file=io.StringIO()))


@pytest.mark.parametrize("first_upload", [True, False])
def test_of_two_publishers_at_once_the_slower_is_refused(hub, package, upload, monkeypatch, first_upload):
    if not first_upload:
        upload()
        package.write({"ops.py": OPS + "# new\n"})
        package.build()
    send = publish_module.upload

    def somebody_else_first(*arguments):
        hub.commit({f"{VARIANT}/other.py": b"# other\n"})
        return send(*arguments)

    monkeypatch.setattr(publish_module, "upload", somebody_else_first)
    with pytest.raises(PublishError, match="another commit was published"):
        upload()
    assert f"{VARIANT}/other.py" in on_hub(hub)
    monkeypatch.setattr(publish_module, "upload", send)
    if first_upload:  # what the other one published is no variant of ours yet: no promise to keep
        upload()
        assert on_hub(hub) == on_disk(package)
