"""The local Hub, asked by the real `huggingface_hub` client, and by raw HTTP where a client would not go."""

import hashlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from tools.hub_api import Handler
from tools.hub_http import MIB
from tools.hub_server import HubServer
from tools.hub_store import Store

ROOT = Path(__file__).resolve().parents[2]
REPO = "some-org/some-kernel"
TOKEN = "hf_test"
RESOLVE = f"/kernels/{REPO}/resolve"


@pytest.fixture
def hub(tmp_path):
    with HubServer(tmp_path / "hub", token=TOKEN, max_body=40 * MIB, inline_limit=10 * MIB) as server:
        server.store.create_repo(REPO)
        server.store.create_branch(REPO, "v1")
        yield server


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token=TOKEN)


@pytest.fixture
def seen(monkeypatch):
    """The requests that arrive, as (action, arguments)."""
    requests = []
    route = Handler._route

    def spy(self, path):
        requests.append(route(self, path))
        return requests[-1]

    monkeypatch.setattr(Handler, "_route", spy)
    return requests


def commit(api, files, **options):
    operations = [CommitOperationAdd(path, data) if data is not None else CommitOperationDelete(path) for path, data in files.items()]
    options = {"revision": "v1", "commit_message": "test", **options}
    return api.create_commit(REPO, operations, repo_type="kernel", **options)


def read(api, path, revision="v1"):
    with tempfile.TemporaryDirectory() as cache:
        return Path(api.hf_hub_download(REPO, path, repo_type="kernel", revision=revision, cache_dir=cache)).read_bytes()


def paths(hub, revision="v1"):
    return sorted(hub.store.tree(hub.store.resolve(REPO, revision)))


def ask(hub, method, path, body=b"", token=TOKEN, headers=None):
    """One request just as written: clients normalise paths and add headers."""
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=10)
    auth = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request(method, path, body, {**auth, **(headers or {})})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer, data


def ndjson(*operations):
    lines = [{"key": "header", "value": {"summary": "test", "description": ""}}]
    lines += [{"key": key, "value": value} for key, value in operations]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def run_client(hub, tmp_path, script, **env):
    """`script` in a process of its own with the real client, which reads its settings when it is imported."""
    env = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home"), **env}
    result = subprocess.run([sys.executable, "-c", script], env=env, check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


# What it serves


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


# Large files


def test_a_client_with_xet_uploads_a_large_file_without_xet(hub, api, seen, tmp_path):
    """The server cannot tell such a client to use LFS, so it takes the file inside the commit."""
    large = tmp_path / "large.bin"
    large.write_bytes(os.urandom(10 * MIB))
    commit(api, {"large.bin": str(large)})
    assert hashlib.sha256(read(api, "large.bin")).digest() == hashlib.sha256(large.read_bytes()).digest()
    assert {action for action, _ in seen} >= {"preupload", "commit"}
    assert not any(action.startswith("lfs") for action, _ in seen)


UPLOAD = """
import sys
from huggingface_hub import CommitOperationAdd, HfApi
done = HfApi().create_commit({repo!r}, [CommitOperationAdd(path, path_or_fileobj=sys.argv[1]) for path in {paths!r}],
                             repo_type="kernel", revision="v1", commit_message="test")
print(done.oid)
"""


def test_a_file_over_the_inline_limit_goes_through_lfs_once(hub, api, seen, tmp_path):
    large = tmp_path / "large.bin"
    large.write_bytes(os.urandom(11 * MIB))
    digest = hashlib.sha256(large.read_bytes()).hexdigest()

    def upload(path):
        script = UPLOAD.format(repo=REPO, paths=[path]).replace("sys.argv[1]", repr(str(large)))
        run_client(hub, tmp_path, script, HF_HUB_DISABLE_XET="1")

    upload("build/large.bin")
    info = api.get_paths_info(REPO, "build/large.bin", repo_type="kernel", revision="v1")[0]
    assert (info.lfs.sha256, info.size) == (digest, 11 * MIB)
    assert hashlib.sha256(read(api, "build/large.bin")).hexdigest() == digest
    answer, data = ask(hub, "GET", f"{RESOLVE}/v1/build/large.bin", headers={"Range": "bytes=11000000-11000009"})
    assert (answer.status, answer.headers["ETag"], data) == (206, f'"{digest}"', large.read_bytes()[11000000:11000010])
    upload("build/again.bin")
    assert [action for action, _ in seen].count("lfs_put") == 1
    assert paths(hub) == ["build/again.bin", "build/large.bin"]


def signed_url(hub, content):
    oid = hashlib.sha256(content).hexdigest()
    body = json.dumps({"operation": "upload", "objects": [{"oid": oid, "size": len(content)}]})
    answer, data = ask(hub, "POST", f"/kernels/{REPO}.git/info/lfs/objects/batch", body.encode())
    assert answer.status == 200
    return oid, json.loads(data)["objects"][0]["actions"]["upload"]["href"].removeprefix(hub.endpoint)


@pytest.mark.parametrize("wrong", [b"other bytes", b"right byte", b""])
def test_lfs_content_that_is_not_the_announced_one_is_refused(hub, wrong):
    oid, url = signed_url(hub, b"right bytes")
    assert ask(hub, "PUT", url, wrong, token=None)[0].status == 400
    assert hub.store.blob_size(oid) is None
    operation = ("lfsFile", {"path": "a", "algo": "sha256", "oid": oid, "size": 11})
    assert ask(hub, "POST", f"/api/kernels/{REPO}/commit/v1", ndjson(operation))[0].status == 400
    assert ask(hub, "PUT", url, b"right bytes", token=None)[0].status == 200
    assert ask(hub, "POST", f"/api/kernels/{REPO}/commit/v1", ndjson(operation))[0].status == 200


def test_lfs_upload_needs_the_signature_that_the_server_gave(hub):
    oid, url = signed_url(hub, b"right bytes")
    for forged in (url.replace("signature=", "signature=0"), url.partition("?")[0], url.replace("size=11", "size=12")):
        assert ask(hub, "PUT", forged, b"right bytes")[0].status == 401
    assert ask(hub, "PUT", f"{url[:-1]}x", b"right bytes")[0].status == 401
    assert hub.store.blob_size(oid) is None


def test_a_chunked_upload_is_taken(hub):
    _, url = signed_url(hub, b"right bytes")
    assert ask(hub, "PUT", url, iter([b"right ", b"bytes"]), token=None)[0].status == 200


# What it refuses


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "example.com", "::"])
def test_only_the_loopback_address_is_served(tmp_path, host):
    with pytest.raises(ValueError, match="loopback"):
        HubServer(tmp_path, host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_every_loopback_address_is_served(tmp_path, host):
    try:
        hub = HubServer(tmp_path, host=host, token=TOKEN)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with hub:
        assert HfApi(endpoint=hub.endpoint, token=TOKEN).create_repo(REPO, repo_type="kernel").repo_id == REPO


def test_the_command_refuses_another_address_and_says_why(tmp_path):
    command = [sys.executable, "-m", "tools.hub_server", "--root", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=30)
    assert result.returncode == 1
    assert "loopback" in result.stderr


def test_a_request_under_another_host_name_is_refused(hub):
    assert ask(hub, "GET", f"{RESOLVE}/v1/a", headers={"Host": "evil.example"})[0].status == 400
    assert ask(hub, "GET", f"/api/kernels/{REPO}", headers={"Host": f"localhost:{hub.port}"})[0].status == 200


WRITES = [
    ("POST", "/api/repos/create", b'{"name": "x", "organization": "some-org", "type": "kernel"}'),
    ("POST", f"/api/kernels/{REPO}/branch/v2", b"{}"),
    ("POST", f"/api/kernels/{REPO}/preupload/v1", b'{"files": []}'),
    ("POST", f"/api/kernels/{REPO}/commit/v1", ndjson(("file", {"path": "a", "content": "MQ==", "encoding": "base64"}))),
    ("POST", f"/kernels/{REPO}.git/info/lfs/objects/batch", b'{"operation": "upload", "objects": []}'),
    ("GET", "/api/whoami-v2", b""),
]


@pytest.mark.parametrize(("method", "path", "body"), WRITES)
@pytest.mark.parametrize("token", [None, "wrong", "hf_test2", "\xfc"])
def test_every_write_needs_the_token(hub, method, path, body, token):
    answer, _ = ask(hub, method, path, body, token=token)
    assert answer.status == 401
    assert set(hub.store.refs(REPO)) == {"main", "v1"}
    assert paths(hub) == []
    assert ask(hub, method, path, body)[0].status < 300


def test_reading_is_public_even_with_a_foreign_token(hub, api, tmp_path):
    commit(api, {"a": b"1"})
    for token in (False, "hf_of_another_hub"):
        reader = HfApi(endpoint=hub.endpoint, token=token)
        assert reader.hf_hub_download(REPO, "a", repo_type="kernel", revision="v1", local_dir=tmp_path)


BAD_PATHS = ["../a", "a/../b", "/etc/passwd", "a\\b", "..\\a", "a\0b", ".", "a//b", "a/./b", ".git/config", "a/.git/hooks/x",
             "a\nb", "a\r", "\ta", "a\x7f", "a\u2028b", "a\ud800b", "\udfff"]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_path_out_of_the_repository_is_refused(hub, path):
    commit_url = f"/api/kernels/{REPO}/commit/v1"
    for operation in (
        ("file", {"path": path, "content": "MQ==", "encoding": "base64"}),
        ("deletedFile", {"path": path}),
        ("deletedFolder", {"path": path}),
    ):
        assert ask(hub, "POST", commit_url, ndjson(operation))[0].status == 400
    assert ask(hub, "GET", f"{RESOLVE}/v1/{quote(path, errors='surrogatepass')}")[0].status == 400
    assert ask(hub, "GET", f"{RESOLVE}/v1/{quote(path, safe='', errors='surrogatepass')}")[0].status == 400
    assert ask(hub, "GET", f"/api/kernels/{REPO}/tree/v1/{quote(path, safe='', errors='surrogatepass')}")[0].status == 400
    preupload = json.dumps({"files": [{"path": path, "size": 1, "sample": ""}]}).encode()
    assert ask(hub, "POST", f"/api/kernels/{REPO}/preupload/v1", preupload)[0].status == 400
    assert paths(hub) == []


@pytest.mark.parametrize("part", ["..", ".", "%2e%2e", "a%2Fb", "a%00", "-x", "a%20b", "%2Fetc"])
def test_a_repository_out_of_the_folder_is_refused(hub, tmp_path, part):
    assert ask(hub, "GET", f"/api/kernels/{part}/x/refs")[0].status == 400
    assert ask(hub, "GET", f"/api/kernels/x/{part}/refs")[0].status == 400
    body = json.dumps({"name": unquote(part), "organization": unquote(part), "type": "kernel"}).encode()
    assert ask(hub, "POST", "/api/repos/create", body)[0].status == 400
    assert ask(hub, "POST", f"/api/kernels/{REPO}/branch/{'%2e%2e%2f' + part}")[0].status == 400
    assert sorted(os.listdir(tmp_path)) == ["hub"]
    assert sorted(os.listdir(tmp_path / "hub" / "repos")) == ["some-org"]


def test_a_body_over_the_limit_is_refused(tmp_path):
    with HubServer(tmp_path, token=TOKEN, max_body=MIB, inline_limit=MIB) as hub:
        hub.store.create_repo(REPO)
        hub.store.create_branch(REPO, "v1")
        body = ndjson(("file", {"path": "a", "content": "A" * 2 * MIB, "encoding": "base64"}))
        url = f"/api/kernels/{REPO}/commit/v1"
        assert ask(hub, "POST", url, body)[0].status == 413
        assert ask(hub, "POST", url, iter([body[:MIB], body[MIB:]]))[0].status == 413
        with pytest.raises(HfHubHTTPError, match="413"):
            commit(HfApi(endpoint=hub.endpoint, token=TOKEN), {"a": b"1" * MIB, "b": b"2" * MIB})
        batch = {"operation": "upload", "objects": [{"oid": "0" * 64, "size": MIB + 1}]}
        _, data = ask(hub, "POST", f"/kernels/{REPO}.git/info/lfs/objects/batch", json.dumps(batch).encode())
        assert "error" in json.loads(data)["objects"][0]
        assert paths(hub) == []
        assert ask(hub, "GET", f"/api/kernels/{REPO}")[0].status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json\n",
        b"[]\n",
        ndjson(("file", {"path": "a"})),
        ndjson(("file", {"path": "a", "content": "!", "encoding": "base64"})),
        ndjson(("file", {"path": 1, "content": "MQ=="})),
        ndjson(("unknown", {"path": "a"})),
        ndjson(("lfsFile", {"path": "a", "oid": "../../x", "size": 1})),
        ndjson(("file", {"path": "a", "content": "MQ==", "encoding": "base64"})).split(b"\n", 1)[1],
    ],
)
def test_a_malformed_commit_changes_nothing(hub, body):
    before = hub.store.refs(REPO)
    answer, data = ask(hub, "POST", f"/api/kernels/{REPO}/commit/v1", body)
    assert answer.status == 400
    assert json.loads(data)["error"]
    assert hub.store.refs(REPO) == before


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"files": [1]}', b'{"files": [{"path": "a", "size": "x"}]}', b"\xff"])
def test_a_malformed_request_is_answered_400(hub, body):
    assert ask(hub, "POST", f"/api/kernels/{REPO}/preupload/v1", body)[0].status == 400
    assert ask(hub, "GET", f"/api/kernels/{REPO}/tree/v1/%ff")[0].status == 400
    assert ask(hub, "GET", f"/api/kernels/{REPO}/xet-write-token/v1")[0].status == 404
    assert ask(hub, "GET", "/api/agent-harnesses")[0].status == 404


DEEP = b"[" * 100_000 + b"]" * 100_000
HUGE = b'{"path": "a", "size": 1e999}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"/api/kernels/{REPO}/preupload/v1", b'{"files": [' + HUGE + b"]}"),
        (f"/api/kernels/{REPO}/preupload/v1", b'{"files": ' + DEEP + b"}"),
        (f"/api/kernels/{REPO}/preupload/v1", b'{"files": [{"path": "a", "size": ' + b"9" * 5000 + b"}]}"),
        (f"/api/kernels/{REPO}/preupload/v1", b'{"files": 7}'),
        (f"/api/kernels/{REPO}/commit/v1", DEEP + b"\n"),
        (f"/api/kernels/{REPO}/commit/v1", b'{"key": "header", "value": {"summary": ' + DEEP + b"}}\n"),
        (f"/api/kernels/{REPO}/branch/v2", DEEP),
        ("/api/repos/create", DEEP),
        ("/api/validate-yaml", DEEP),
        (f"/kernels/{REPO}.git/info/lfs/objects/batch", b'{"operation": "upload", "objects": [{"oid": "0", "size": 1e999}]}'),
        (f"/kernels/{REPO}.git/info/lfs/objects/batch", b'{"operation": "upload", "objects": [7]}'),
    ],
)
def test_what_no_client_sends_is_answered_400_and_not_by_silence(hub, path, body):
    answer, data = ask(hub, "POST", path, body)
    assert answer.status == 400 and json.loads(data)["error"]


@pytest.mark.parametrize("length", ["9" * 5000, "9" * 21])
def test_a_length_of_any_number_of_digits_is_answered(hub, length):
    head = f"POST /api/kernels/{REPO}/preupload/v1 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {length}"
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode())
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("limit", ["0", "1", "-1", "x", "9" * 5000])
def test_pages_of_any_size_come_to_an_end(hub, api, limit):
    commit(api, {f"file{i}": b"1" for i in range(3)})
    path, seen = f"/api/kernels/{REPO}/tree/v1?limit={limit}", []
    for _ in range(4):
        answer, data = ask(hub, "GET", path)
        seen += [entry["path"] for entry in json.loads(data)]
        if not answer.headers["Link"]:
            break
        path = answer.headers["Link"].split(">")[0].removeprefix(f"<{hub.endpoint}")
    assert seen == ["file0", "file1", "file2"]


def test_a_range_of_any_number_of_digits_is_answered(hub, api):
    commit(api, {"a.bin": b"12345"})
    for header in (f"bytes=0-{'9' * 5000}", f"bytes=-{'9' * 5000}", f"bytes={'9' * 5000}-"):
        assert ask(hub, "GET", f"{RESOLVE}/v1/a.bin", headers={"Range": header})[0].status in (206, 400, 416)


def test_a_fault_of_the_server_is_answered_500(hub, monkeypatch):
    def fail(self, repo):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Handler, "refs", fail)
    answer, data = ask(hub, "GET", f"/api/kernels/{REPO}/refs")
    assert answer.status == 500 and "No space left" in json.loads(data)["error"]


def test_a_new_repository_has_the_hubs_own_file_and_so_have_its_branches(hub, api):
    api.create_repo("some-org/new", repo_type="kernel")
    api.create_branch("some-org/new", branch="v1", repo_type="kernel")
    for revision in ("main", "v1"):
        assert list(hub.store.tree(hub.store.resolve("some-org/new", revision))) == [".gitattributes"]


def test_a_client_that_names_no_kind_of_repository_reads_it_too(api, tmp_path):
    """As `kernels benchmark` does."""
    commit(api, {"benchmarks/benchmark.py": b"1"})
    folder = api.snapshot_download(REPO, revision="v1", cache_dir=tmp_path)
    assert (Path(folder) / "benchmarks/benchmark.py").read_bytes() == b"1"


# At the same time, and killed


def test_concurrent_commits_all_arrive(hub, api):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: commit(api, {f"file{i}": b"%d" % i}), range(24)))
    assert paths(hub) == sorted(f"file{i}" for i in range(24))
    assert len(list(hub.store.history(REPO, "v1"))) == 25


def test_of_two_commits_on_one_parent_one_is_refused(hub, api):
    parent = hub.store.refs(REPO)["v1"]

    def attempt(i):
        try:
            return commit(api, {"a": b"%d" % i}, parent_commit=parent).oid
        except HfHubHTTPError as error:
            return error.response.status_code

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(attempt, range(6)))
    assert results.count(412) == 5
    assert hub.store.refs(REPO)["v1"] in results


def test_a_client_that_dies_in_its_upload_leaves_nothing(hub):
    body = ndjson(("file", {"path": "a", "content": "MQ==" * 5000, "encoding": "base64"}))
    before = hub.store.refs(REPO)
    head = f"POST /api/kernels/{REPO}/commit/v1 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
    _, put = signed_url(hub, b"right bytes")
    for request in (
        f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-10],
        f"{head}Transfer-Encoding: chunked\r\n\r\n5\r\nabc".encode(),
        f"PUT {put} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 11\r\n\r\nright".encode(),
    ):
        with socket.create_connection(("127.0.0.1", hub.port)) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
    assert hub.store.refs(REPO) == before
    assert list(hub.store.tmp.iterdir()) == []


DIE = """
import os, sys
from tools import hub_store
left = int(sys.argv[2])
replace = os.replace
def replace_or_die(*arguments):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    replace(*arguments)
os.replace = replace_or_die
store = hub_store.Store(sys.argv[1])
entries = [(name, hub_store.file_entry(b"new", store.add_blob([b"new"]))) for name in ("a", "b")]
store.commit("some-org/some-kernel", "v1", {"summary": "new"}, [("file", name, entry) for name, entry in entries])
"""


def test_a_server_killed_at_any_write_leaves_the_old_state_or_the_new_one(tmp_path):
    store = Store(tmp_path)
    store.create_repo(REPO)
    store.create_branch(REPO, "v1")
    old = store.add_blob([b"old"])
    store.commit(REPO, "v1", {"summary": "old"}, [("file", name, {"blob": old, "size": 3, "oid": old, "lfs": False}) for name in "ab"])
    killed = 0
    while True:
        code = subprocess.run([sys.executable, "-c", DIE, str(tmp_path), str(killed)], cwd=ROOT, timeout=30, check=False).returncode
        store = Store(tmp_path)  # a new server after the crash
        tree = store.tree(store.resolve(REPO, "v1"))
        contents = {name: store.open_blob(entry["blob"]).read() for name, entry in tree.items()}
        if code == 0:
            break
        assert code == 9
        assert contents == {"a": b"old", "b": b"old"}
        killed += 1
    assert killed >= 4
    assert contents == {"a": b"new", "b": b"new"}
    assert list(store.tmp.iterdir()) == []


def test_what_was_uploaded_is_there_after_a_restart(tmp_path):
    with HubServer(tmp_path, token=TOKEN) as hub:
        api = HfApi(endpoint=hub.endpoint, token=TOKEN)
        api.create_repo(REPO, repo_type="kernel")
        api.create_branch(REPO, branch="v1", repo_type="kernel")
        oid = commit(api, {"a": b"1"}).oid
    with HubServer(tmp_path) as hub:
        assert HfApi(endpoint=hub.endpoint).repo_info(REPO, repo_type="kernel", revision="v1").sha == oid
