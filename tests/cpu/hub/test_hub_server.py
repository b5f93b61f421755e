"""The local Hub, asked by the real `huggingface_hub` client, and by raw HTTP where a client would not go: what it serves."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from tests.conftest import OFFLINE
from tests.hub_requests import REPO, RESOLVE, TOKEN, ask, commit, ndjson, paths, read
from tools.hub_server import HubServer


def test_what_is_uploaded_is_what_is_downloaded(api, tmp_path):
    files = {
        "build/torch-cpu/__init__.py": b"x = 1\n",
        "build/torch-cpu/empty": b"",
        "build/torch-cpu/data/\xfc \U0001f600.bin": bytes(range(256)),
    }
    done = commit(api, files)
    for path, data in files.items():
        assert read(api, path) == data
    folder = api.snapshot_download(REPO, repo_type="kernel", revision="v1", cache_dir=tmp_path / "cache")
    assert {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()} == files
    assert done.oid == api.repo_info(REPO, repo_type="kernel", revision="v1").sha == Path(folder).name
    assert {b.name: b.target_commit for b in api.list_repo_refs(REPO, repo_type="kernel").branches}["v1"] == done.oid


def test_download_names_the_commit_and_the_content(hub, api):
    oid = commit(api, {"a.txt": b"hello"}).oid
    for method in ("HEAD", "GET"):
        answer, data = ask(hub, method, f"{RESOLVE}/v1/a.txt", token=None)
        assert answer.status == 200
        assert answer.headers["X-Repo-Commit"] == oid
        assert answer.headers["ETag"] == f'"{hashlib.sha1(b"blob 5" + bytes(1) + b"hello").hexdigest()}"'
        assert answer.headers["Content-Length"] == "5"
        assert data == (b"hello" if method == "GET" else b"")


def test_tree_listing_by_folder_recursion_and_page(tmp_path):
    with HubServer(tmp_path, token=TOKEN, page_size=3) as hub:
        api = HfApi(endpoint=hub.endpoint, token=TOKEN)
        api.create_repo(REPO, repo_type="kernel")
        api.create_branch(REPO, branch="v1", repo_type="kernel")
        commit(api, {f"build/torch-cpu/{i}.py": b"%d" % i for i in range(7)} | {"README.md": b"---\nlicense: mit\n---\n"})
        options = {"repo_type": "kernel", "revision": "refs/heads/v1"}
        assert [entry.path for entry in api.list_repo_tree(REPO, **options)] == [".gitattributes", "README.md", "build"]
        assert [entry.path for entry in api.list_repo_tree(REPO, "build", **options)] == ["build/torch-cpu"]
        every = [entry.path for entry in api.list_repo_tree(REPO, recursive=True, expand=True, **options)]
        assert every == [".gitattributes", "README.md", "build", "build/torch-cpu", *(f"build/torch-cpu/{i}.py" for i in range(7))]
        with pytest.raises(RemoteEntryNotFoundError):
            list(api.list_repo_tree(REPO, "nothing", **options))


def test_paths_info_tells_files_folders_and_nothing(api):
    commit(api, {"build/a": b"12"})
    found = api.get_paths_info(REPO, ["build/a", "build", "none"], repo_type="kernel", revision="v1")
    assert [type(entry).__name__ for entry in found] == ["RepoFile", "RepoFolder"]
    assert found[0].size == 2


def test_what_is_not_there_raises_the_clients_own_error(api):
    with pytest.raises(RepositoryNotFoundError):
        api.list_repo_refs("some-org/other", repo_type="kernel")
    with pytest.raises(RevisionNotFoundError):
        api.repo_info(REPO, repo_type="kernel", revision="v9")
    with pytest.raises(RevisionNotFoundError):
        api.repo_info(REPO, repo_type="kernel", revision="0" * 40)
    with pytest.raises(RevisionNotFoundError):
        commit(api, {"a": b"1"}, revision="v9")
    with pytest.raises(RemoteEntryNotFoundError):
        read(api, "nothing")


def test_making_what_exists_is_accepted_only_when_asked(api):
    assert api.create_repo(REPO, repo_type="kernel", exist_ok=True).repo_id == REPO
    api.create_branch(REPO, branch="v1", repo_type="kernel", exist_ok=True)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(REPO, repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch(REPO, branch="v1", repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="'kernel' repositories only"):
        api.create_repo("some-org/model", repo_type="model")
    with pytest.raises(HfHubHTTPError, match="public repositories only"):
        api.create_repo("some-org/hidden", repo_type="kernel", private=True)


def test_a_commit_deletes_files_and_folders_and_keeps_the_rest(hub, api):
    commit(api, {"a": b"1", "b": b"2", "c/d": b"3", "c/e/f": b"4"})
    commit(api, {"a": None, "c/": None, "b": b"5"})
    assert paths(hub) == ["b"]
    assert read(api, "b") == b"5"
    with pytest.raises(RemoteEntryNotFoundError):
        commit(api, {"a": None})


def test_a_commit_never_changes(api):
    first = commit(api, {"a": b"old"}).oid
    second = commit(api, {"a": b"new"}).oid
    assert (read(api, "a", first), read(api, "a", second)) == (b"old", b"new")
    assert [entry.commit_id for entry in api.list_repo_commits(REPO, repo_type="kernel", revision="v1")][:2] == [second, first]


def test_a_commit_that_changes_nothing_is_none(hub):
    body = ndjson(("file", {"path": "a", "content": "MQ==", "encoding": "base64"}))
    answers = [json.loads(ask(hub, "POST", f"/api/kernels/{REPO}/commit/v1", body)[1])["commitOid"] for _ in range(2)]
    assert answers[0] == answers[1]


def test_a_path_is_not_file_and_folder_at_once(api):
    commit(api, {"a": b"1"})
    with pytest.raises(HfHubHTTPError, match="file and"):
        commit(api, {"a/b": b"2"})


def test_publisher_trust_is_told_as_the_hub_tells_it(tmp_path, hub, api):
    assert api.get_organization_overview("some-org").trustedKernelPublisher is False
    with pytest.raises(HfHubHTTPError, match="404"):
        api.get_organization_overview("nobody")
    with HubServer(tmp_path / "trusted", token=TOKEN, trusted_publishers=("some-org",)) as other:
        other.store.create_repo(REPO)
        assert HfApi(endpoint=other.endpoint).get_organization_overview("some-org").trustedKernelPublisher is True


def test_a_readme_without_closed_front_matter_is_refused(api):
    with pytest.raises(ValueError, match="not closed"):
        commit(api, {"README.md": b"---\nlicense: mit\n"})
    with pytest.warns(UserWarning, match="metadata"):
        commit(api, {"README.md": b"# no front matter\n"})


@pytest.mark.parametrize(
    ("header", "status", "begin", "end"),
    [
        ("bytes=0-9", 206, 0, 10),
        ("bytes=990-", 206, 990, 1000),
        ("bytes=-10", 206, 990, 1000),
        ("bytes=5-5", 206, 5, 6),
        ("bytes=995-5000", 206, 995, 1000),
        ("bytes=-5000", 206, 0, 1000),
        ("bytes=1000-", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
        ("bytes=9-5", 200, 0, 1000),
        ("bytes=0-1,5-6", 200, 0, 1000),
        ("lines=1-2", 200, 0, 1000),
    ],
)
def test_a_range_read_gives_those_bytes(hub, api, header, status, begin, end):
    content = os.urandom(1000)
    commit(api, {"a.bin": content})
    answer, data = ask(hub, "GET", f"{RESOLVE}/v1/a.bin", headers={"Range": header})
    assert answer.status == status
    if status == 416:
        assert answer.headers["Content-Range"] == "bytes */1000"
        return
    assert data == content[begin:end]
    assert answer.headers["Content-Range"] == (f"bytes {begin}-{end - 1}/1000" if status == 206 else None)


def test_a_new_repository_has_the_hubs_own_file_and_so_have_its_branches(hub, api):
    api.create_repo("some-org/new", repo_type="kernel")
    api.create_branch("some-org/new", branch="v1", repo_type="kernel")
    for revision in ("main", "v1"):
        assert list(hub.store.tree(hub.store.resolve("some-org/new", revision))) == [".gitattributes"]


def test_a_client_that_names_no_kind_of_repository_reads_it_too(api, tmp_path):
    """`kernels benchmark` is such a client."""
    commit(api, {"benchmarks/benchmark.py": b"1"})
    folder = api.snapshot_download(REPO, revision="v1", cache_dir=tmp_path)
    assert (Path(folder) / "benchmarks/benchmark.py").read_bytes() == b"1"


def test_what_a_machine_says_of_its_network_does_not_reach_the_tests():
    """huggingface_hub refuses the local Hub too where HF_HUB_OFFLINE is 1."""
    test = f"{__file__}::test_paths_info_tells_files_folders_and_nothing"
    environment = {**os.environ, **dict.fromkeys(OFFLINE, "1")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
