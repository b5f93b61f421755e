"""What the local Hub refuses: addresses, names, paths, bodies and requests that no client sends."""

import json
import os
import socket
import subprocess
import sys
from urllib.parse import quote, unquote

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from tests.hub_requests import REPO, RESOLVE, ROOT, TOKEN, ask, commit, ndjson, paths
from tools.hub_api import Handler
from tools.hub_http import MIB
from tools.hub_server import HubServer


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
