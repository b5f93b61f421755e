"""Requests of the local Hub, by the real client and as they are written."""

import hashlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

ROOT = Path(__file__).resolve().parents[1]
REPO = "some-org/some-kernel"
TOKEN = "hf_test"
RESOLVE = f"/kernels/{REPO}/resolve"


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


def signed_url(hub, content):
    oid = hashlib.sha256(content).hexdigest()
    body = json.dumps({"operation": "upload", "objects": [{"oid": oid, "size": len(content)}]})
    answer, data = ask(hub, "POST", f"/kernels/{REPO}.git/info/lfs/objects/batch", body.encode())
    assert answer.status == 200
    return oid, json.loads(data)["objects"][0]["actions"]["upload"]["href"].removeprefix(hub.endpoint)
