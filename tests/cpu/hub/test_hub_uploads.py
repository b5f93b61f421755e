"""Large files that the local Hub is sent: inside a commit, and through LFS."""

import hashlib
import os

import pytest

from tests.hub_requests import REPO, RESOLVE, ask, commit, ndjson, paths, read, run_client, signed_url
from tools.hub_http import MIB


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
