"""The local Hub asked by several at the same time, killed, and started again."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from tests.hub_requests import REPO, ROOT, TOKEN, commit, ndjson, paths, signed_url
from tools.hub_server import HubServer
from tools.hub_store import Store


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
