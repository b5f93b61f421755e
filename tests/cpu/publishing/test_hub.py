"""The Hub on this machine, asked by the real client, and by raw HTTP where a client would not go."""

import http.client
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from tests.conftest import OFFLINE
from tests.publishing import REPO, TOKEN, heads, on_hub
from tools.hub import HubError

KIND = {"repo_type": "kernel", "revision": "v1"}


@pytest.fixture
def hub(served):
    served.repositories.create_repo(REPO)
    served.repositories.create_branch(REPO, "v1")
    return served


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token=TOKEN)


def commit(api, files, **options):
    return api.create_commit(REPO, [CommitOperationAdd(*file) for file in files.items()], commit_message="test", **KIND, **options)


def ask(hub, method, path, body=b"", **headers):
    """One request just as written: clients normalise paths and add headers. The status and the headers of the answer, and its body."""
    connection = http.client.HTTPConnection("127.0.0.1", int(hub.endpoint.rpartition(":")[2]), timeout=10)
    connection.request(method, path, body, {"Authorization": f"Bearer {TOKEN}", **headers})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, answer.headers, data


def test_what_is_uploaded_is_what_is_downloaded(api, tmp_path):
    files = {"build/torch-cpu/__init__.py": b"x = 1\n", "build/empty": b"", "build/data/\xfc \U0001f600.bin": bytes(range(256))}
    done = commit(api, files)
    for options in (KIND, {"revision": "v1"}):  # `kernels benchmark` names no kind of repository
        folder = Path(api.snapshot_download(REPO, cache_dir=tmp_path / str(len(options)), **options))
        assert {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}.items() > files.items()
    assert done.oid == api.repo_info(REPO, **KIND).sha == folder.name
    assert [entry.path for entry in api.list_repo_tree(REPO, "build", **KIND)] == ["build/data", "build/empty", "build/torch-cpu"]
    every = {entry.path for entry in api.list_repo_tree(REPO, recursive=True, **KIND)}
    assert every == {*files, ".gitattributes", "build", "build/data", "build/torch-cpu"}


def test_what_is_not_there_raises_the_clients_own_error(api):
    with pytest.raises(RepositoryNotFoundError):
        api.list_repo_refs("some-org/other", repo_type="kernel")
    for revision in ("v9", "0" * 40):
        with pytest.raises(RevisionNotFoundError):
            api.repo_info(REPO, repo_type="kernel", revision=revision)
    with pytest.raises(RemoteEntryNotFoundError):
        api.hf_hub_download(REPO, "nothing", **KIND)
    with pytest.raises(RemoteEntryNotFoundError):
        list(api.list_repo_tree(REPO, "nothing", **KIND))
    assert api.create_repo(REPO, repo_type="kernel", exist_ok=True).repo_id == REPO
    for options in ({"repo_type": "kernel"}, {"repo_type": "model"}, {"repo_type": "kernel", "private": True}):
        with pytest.raises(HfHubHTTPError, match="409|kernel"):
            api.create_repo(REPO if len(options) == 1 else "some-org/hidden", **options)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch(REPO, branch="v1", repo_type="kernel")


def test_of_commits_at_once_all_arrive_unless_they_name_a_parent(hub, api):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: commit(api, {f"file{i}": b"%d" % i}), range(16)))
    assert on_hub(hub) == {f"file{i}": b"%d" % i for i in range(16)} | on_hub(hub, "main")
    parent = heads(hub)["v1"]

    def attempt(i):
        try:
            return commit(api, {"a": b"%d" % i}, parent_commit=parent).oid
        except HfHubHTTPError as error:
            return error.response.status_code

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(attempt, range(6)))
    assert results.count(412) == 5 and heads(hub)["v1"] in results


BODY = b'{"key": "header", "value": {}}\n{"key": "file", "value": {"path": "a", "content": "MQ=="}}\n'
WRITES = {
    "/api/repos/create": b'{"name": "x", "organization": "some-org", "type": "kernel"}',
    f"/api/kernels/{REPO}/branch/v2": b"{}",
    f"/api/kernels/{REPO}/commit/v1": BODY,
}


@pytest.mark.parametrize("path", WRITES)
def test_every_write_needs_the_token_and_reading_none(hub, path):
    before = heads(hub)
    for token in ("", "Bearer wrong", f"Bearer {TOKEN}2", "Bearer \xfc"):
        assert ask(hub, "POST", path, WRITES[path], Authorization=token)[0] == 401
        assert ask(hub, "GET", f"/api/kernels/{REPO}", Authorization=token)[0] == 200
    assert heads(hub) == before and len(hub.repositories.branches) == 1
    assert ask(hub, "POST", path, WRITES[path])[0] == 200


def test_a_request_under_another_host_name_is_refused(hub):
    """Of a page in a browser, say."""
    port = hub.endpoint.rpartition(":")[2]
    for host, status in (("evil.example", 400), (f"evil.example:{port}", 400), (f"localhost:{port}", 200)):
        assert ask(hub, "GET", f"/api/kernels/{REPO}", Host=host)[0] == status


@pytest.mark.parametrize("path", ("../a", "a/../b", "/etc/passwd", "..\\a", "a\0b", "a//b", ".git/config", "a\nb", "a\ud800b"))
def test_a_path_out_of_the_repository_is_refused(hub, path):
    with pytest.raises(HubError, match="not allowed"):
        hub.repositories.commit(REPO, "v1", {path: b"1"})
    assert ask(hub, "GET", f"/kernels/{REPO}/resolve/v1/{quote(path, safe='', errors='surrogatepass')}")[0] == 404


@pytest.mark.parametrize("body", (b"", b"not json\n", b"[]\n", BODY.replace(b'"content"', b'"c"'), BODY.replace(b'"file"', b'"lfsFile"')))
def test_a_malformed_commit_changes_nothing(hub, body):
    before = heads(hub)
    assert ask(hub, "POST", f"/api/kernels/{REPO}/commit/v1", body)[0] == 400 and heads(hub) == before
    assert ask(hub, "GET", "/api/agent-harnesses")[0] == 404


def test_a_client_that_dies_in_its_upload_leaves_nothing(hub):
    before, address = heads(hub), ("127.0.0.1", int(hub.endpoint.rpartition(":")[2]))
    head = f"POST /api/kernels/{REPO}/commit/v1 HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\nAuthorization: Bearer {TOKEN}\r\n"
    with socket.create_connection(address) as connection:
        connection.sendall(f"{head}Content-Length: {len(BODY) + 1}\r\n\r\n".encode() + BODY)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert heads(hub) == before


def test_publisher_trust_is_told_as_the_hub_tells_it(hub, api):
    assert api.get_organization_overview("some-org").trustedKernelPublisher is False
    hub.trusted_publishers = ("some-org",)
    assert api.get_organization_overview("some-org").trustedKernelPublisher is True
    with pytest.raises(HfHubHTTPError, match="404"):
        api.get_organization_overview("nobody")


def test_the_command_says_how_to_use_it_or_what_is_wrong(hub):
    command = [sys.executable, "-m", "tools.hub", "--port", hub.endpoint.rpartition(":")[2]]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and "Address already in use" in done.stderr
    with subprocess.Popen([*command[:-1], "0"], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline() + process.stdout.readline()
        process.kill()
    endpoint, _, token = said.splitlines()[1].partition(" ")
    assert endpoint.startswith("HF_ENDPOINT=http://127.0.0.1:") and token.startswith("HF_TOKEN=hf_local_")


def test_what_a_machine_says_of_its_network_does_not_reach_the_tests():
    """huggingface_hub refuses the local Hub too where HF_HUB_OFFLINE is 1."""
    test = f"{__file__}::test_publisher_trust_is_told_as_the_hub_tells_it"
    environment = {**os.environ, **dict.fromkeys(OFFLINE, "1")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
