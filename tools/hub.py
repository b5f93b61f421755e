"""A Hub on this machine: as much of the Hub's HTTP API as `huggingface_hub` and `kernels` ask for `kernel` repositories.

    python -m tools.hub --port 8765
    HF_ENDPOINT=http://127.0.0.1:8765 python -c "from kernels import get_kernel; ..."

It listens on the loopback address and keeps what is uploaded in memory until it ends. Reading is public, writing needs the token.
Nothing in the clients is patched: HF_ENDPOINT is all they need.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import json
import re
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

HOST = "127.0.0.1"
# A new repository of the Hub has such a file, and so do the branches that are made of it.
GIT_ATTRIBUTES = b"*.bin filter=lfs diff=lfs merge=lfs -text\n"
NAME = re.compile(r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?", re.ASCII)


class HubError(Exception):
    """An answer that is not a success: the HTTP status, the text, and the Hub's own code in `X-Error-Code`."""

    def __init__(self, status: int, message: str, code: str | None = None, **body: str):
        super().__init__(message)
        self.status, self.code, self.body = status, code, {"error": message, **body}


@dataclass(frozen=True)
class Commit:
    """The files of a repository at one time, by path."""

    id: str
    files: dict[str, bytes]
    parent: str | None
    date: str


def git_oid(data: bytes) -> str:
    """The git hash of a file with these bytes, by which clients see whether a file changed."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repositories:
    """Repositories with branches and commits, in memory. A commit never changes, so those who read one need no lock."""

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, str]] = {}
        self.commits: dict[str, Commit] = {}
        self.lock = threading.Lock()

    def refs(self, repo: str) -> dict[str, str]:
        """{branch: commit}. Raises HubError: 404 RepoNotFound."""
        if repo not in self.branches:
            raise HubError(404, f"repository {repo} not found", "RepoNotFound")
        return dict(self.branches[repo])

    def resolve(self, repo: str, revision: str) -> Commit:
        """The commit that a branch, `refs/heads/<branch>` or its own id names. Raises HubError: 404 RepoNotFound or RevisionNotFound."""
        commit = self.commits.get(self.refs(repo).get(revision.removeprefix("refs/heads/"), revision))
        if commit is None:
            raise HubError(404, f"revision {revision!r} not found in {repo}", "RevisionNotFound")
        return commit

    def create_repo(self, repo: str) -> None:
        """Make `repo` with a `main`. Raises HubError: 400 for a name that the Hub refuses, 409 if it exists."""
        if not all(map(NAME.fullmatch, repo.split("/"))) or repo.count("/") != 1:
            raise HubError(400, f"{repo!r} is not owner/name of letters, digits, '-', '_' and '.'")
        with self.lock:
            if repo in self.branches:
                raise HubError(409, "You already created this repo")
            self.branches[repo] = {}
            self._add(repo, "main", {".gitattributes": GIT_ATTRIBUTES}, None)

    def create_branch(self, repo: str, branch: str, start: str = "main") -> None:
        """Make `branch` point where `start` does. Raises HubError: 409 if it exists."""
        commit = self.resolve(repo, start)
        with self.lock:
            if branch in self.branches[repo]:
                raise HubError(409, f"branch {branch!r} exists in {repo}")
            self.branches[repo][branch] = commit.id

    def commit(self, repo: str, branch: str, changes: dict[str, bytes | None], parent: str | None = None) -> str:
        """Write and delete (None) files of `branch` at once; the new commit, or the old one if nothing changes.

        Raises:
            HubError: 404 if the branch or a file to delete is not there, 412 if the branch is no longer at `parent`.
        """
        branch = branch.removeprefix("refs/heads/")
        with self.lock:
            head = self.resolve(repo, self.refs(repo).get(branch, branch))
            if parent not in (None, head.id):
                raise HubError(412, f"branch {branch!r} is at {head.id}, no longer at {parent}; read it again and retry")
            for path in changes:
                check_path(path)
                if changes[path] is None and path not in head.files:
                    raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            files = {path: data for path, data in {**head.files, **changes}.items() if data is not None}
            return head.id if files == head.files else self._add(repo, branch, files, head.id)

    def _add(self, repo: str, branch: str, files: dict[str, bytes], parent: str | None) -> str:
        date = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        commit = Commit(secrets.token_hex(20), files, parent, date)
        self.commits[commit.id] = commit
        self.branches[repo][branch] = commit.id
        return commit.id


def check_path(path: str) -> None:
    """Refuse what is no plain relative path: the clients write what they download under it. Raises HubError: 400."""
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..", ".git") for part in path.split("/")):
        raise HubError(400, f"path {path!r} is not allowed; expected a relative path without '..', '.git', '\\' and control characters")


def listing(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict]:
    """Lists the entries of `folder` ("" is the root) by path, in the form that the Hub returns."""
    prefix = f"{folder}/" if folder else ""
    found: dict[str, bytes | None] = {}
    for path in files:
        if path.startswith(prefix):
            parts = path.removeprefix(prefix).split("/")
            found.update({prefix + "/".join(parts[:depth]): None for depth in range(1, len(parts))}, **{path: files[path]})
    if folder and not found:
        raise HubError(404, f"folder {folder!r} not found", "EntryNotFound")
    return [described(path, found[path]) for path in sorted(found) if recursive or "/" not in path.removeprefix(prefix)]


def described(path: str, data: bytes | None) -> dict:
    """A file or (without `data`) a folder as the Hub shows it."""
    if data is None:
        return {"type": "directory", "oid": git_oid(path.encode()), "size": 0, "path": path}
    return {"type": "file", "oid": git_oid(data), "size": len(data), "path": path}


# `kernels benchmark` (0.17) names no kind of repository, so it asks for a model of that name.
REPO, REVISION = r"/api/(?:kernels|models)/(?P<repo>[^/]+/[^/]+)", r"/(?P<revision>[^/]+)"
ROUTES = [
    (method, re.compile(pattern), action)
    for method, pattern, action in (
        ("GET", r"/api/organizations/(?P<owner>[^/]+)/overview", "organization"),
        ("POST", r"/api/repos/create", "create_repo"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("GET", rf"{REPO}(?:/revision{REVISION})?", "info"),
        ("GET", rf"{REPO}/refs", "refs"),
        ("GET", rf"{REPO}/tree{REVISION}(?:/(?P<path>.+))?", "tree"),
        ("POST", rf"{REPO}/branch/(?P<branch>[^/]+)", "create_branch"),
        ("POST", rf"{REPO}/preupload{REVISION}", "preupload"),
        ("POST", rf"{REPO}/commit{REVISION}", "commit"),
        ("GET", rf"(?:/kernels)?/(?P<repo>[^/]+/[^/]+)/resolve{REVISION}/(?P<path>.+)", "download"),
    )
]


class Handler(BaseHTTPRequestHandler):
    """One request; a method for each action of `ROUTES`, which returns the JSON of the answer."""

    protocol_version = "HTTP/1.1"
    timeout = 120
    disable_nagle_algorithm = True  # headers and body are two writes; waiting for the ACK between them costs 40 ms
    server: _HTTPServer

    def do_GET(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # the client is gone; nothing was stored
            length = int(self.headers.get("Content-Length", 0))
            self.data = self.rfile.read(length)
            if len(self.data) == length:
                try:
                    self.answer()
                except HubError as error:
                    self.refuse(error)
                except (LookupError, ValueError, TypeError) as error:
                    self.refuse(HubError(400, f"malformed request: {type(error).__name__}: {error}"))
                return
        self.close_connection = True

    do_HEAD = do_POST = do_GET

    def answer(self) -> None:
        """Raises HubError for whatever is no request of a client that may ask it."""
        url = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        # A page in a browser must not reach this server under another name (DNS rebinding).
        if self.headers.get("Host") not in (f"{HOST}:{self.server.server_port}", f"localhost:{self.server.server_port}"):
            raise HubError(400, f"host {self.headers.get('Host')!r} refused: this server answers for the loopback address only")
        method = "GET" if self.command == "HEAD" else self.command
        for wanted, pattern, action in ROUTES:
            match = pattern.fullmatch(url.path)
            if match and wanted == method:
                if method == "POST" and not self.hub.allows(self.headers.get("Authorization", "")):
                    raise HubError(401, "Invalid credentials in Authorization header")
                found = getattr(self, action)(**{name: unquote(value) for name, value in match.groupdict().items() if value is not None})
                if found is not None:
                    self.send(200, json.dumps(found).encode())
                return
        raise HubError(404, f"{self.command} {url.path} is not part of this local Hub")

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    def log_message(self, *arguments: Any) -> None:
        """Requests are not printed."""

    def refuse(self, error: HubError) -> None:
        headers = {"X-Error-Code": error.code} if error.code else {}
        self.send(error.status, json.dumps(error.body).encode(), {"X-Error-Message": error.body["error"], **headers})

    def send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, re.sub(r"[^\x20-\x7e]", "?", value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def organization(self, owner: str) -> dict:
        if not any(repo.startswith(f"{owner}/") for repo in self.hub.repositories.branches):
            raise HubError(404, f"organization {owner!r} not found")
        return {"name": owner, "fullname": owner, "trustedKernelPublisher": owner in self.hub.trusted_publishers}

    def create_repo(self) -> dict:
        request = json.loads(self.data)
        if request.get("type") != "kernel" or request.get("private") or request.get("visibility", "public") != "public":
            raise HubError(400, "this local Hub has public 'kernel' repositories only")
        repo = f"{request.get('organization') or 'local'}/{request['name']}"
        url = {"url": f"{self.hub.endpoint}/kernels/{repo}", "name": repo}
        try:
            self.hub.repositories.create_repo(repo)
        except HubError as error:
            raise HubError(error.status, str(error), **url) from None
        return url

    def create_branch(self, repo: str, branch: str) -> dict:
        self.hub.repositories.create_branch(repo, branch, json.loads(self.data or b"{}").get("startingPoint") or "main")
        return {"name": branch}

    def validate_yaml(self) -> dict:
        return {"errors": [], "warnings": []}

    def info(self, repo: str, revision: str = "main") -> dict:
        commit = self.hub.repositories.resolve(repo, revision)
        state = {"private": False, "gated": False, "downloads": 0, "likes": 0, "tags": [], "lastModified": commit.date}
        return {"id": repo, "sha": commit.id, "siblings": [{"rfilename": path} for path in sorted(commit.files)], **state}

    def refs(self, repo: str) -> dict:
        branches = sorted(self.hub.repositories.refs(repo).items())
        found = [{"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": commit} for branch, commit in branches]
        return {"branches": found, "tags": [], "converts": [], "pullRequests": []}

    def tree(self, repo: str, revision: str, path: str = "") -> list[dict]:
        recursive = self.query.get("recursive", "").lower() in ("true", "1")
        return listing(self.hub.repositories.resolve(repo, revision).files, path, recursive)

    def preupload(self, repo: str, revision: str) -> dict:
        """Every file travels inside the commit: huggingface_hub sends others through Xet, and asks no server whether it speaks that."""
        self.hub.repositories.resolve(repo, revision)
        files = json.loads(self.data)["files"]
        return {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]}

    def commit(self, repo: str, revision: str) -> dict:
        header, *operations = map(json.loads, self.data.splitlines())
        changes: dict[str, bytes | None] = {}
        for operation in operations:
            value = operation["value"]
            if operation["key"] not in ("file", "deletedFile"):
                raise HubError(400, f"unknown operation {operation['key']!r}")
            changes[value["path"]] = base64.b64decode(value["content"]) if operation["key"] == "file" else None
        commit = self.hub.repositories.commit(repo, revision, changes, header["value"].get("parentCommit"))
        return {"success": True, "commitOid": commit, "commitUrl": f"{self.hub.endpoint}/kernels/{repo}/commit/{commit}", "hookOutput": ""}

    def download(self, repo: str, revision: str, path: str) -> None:
        commit = self.hub.repositories.resolve(repo, revision)
        if path not in commit.files:
            raise HubError(404, f"{path!r} not found in {repo} at {revision}", "EntryNotFound")
        data = commit.files[path]
        headers = {"X-Repo-Commit": commit.id, "Content-Type": "application/octet-stream", "ETag": f'"{git_oid(data)}"'}
        cut = re.fullmatch(r"bytes=(\d{1,20})-", self.headers.get("Range", ""))  # a download that goes on there
        begin = int(cut[1]) if cut and int(cut[1]) < len(data) else 0
        partly = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
        self.send(206 if begin else 200, data[begin:], headers | partly)


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    hub: HubServer

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's own one asks the DNS for the host's name, which may take seconds
        self.server_port = self.server_address[1]


class HubServer:
    """The server, as a context manager: `with HubServer() as hub: ... hub.endpoint ...`.

    Args:
        port: 0 takes a free one.
        token: what a writer must send; by default a new random one (`hub.token`).
        trusted_publishers: owners that `kernels` may load without `trust_remote_code`.

    Raises:
        OSError: if the port is taken.
    """

    def __init__(self, port: int = 0, token: str | None = None, trusted_publishers: tuple[str, ...] = ()):
        self.repositories = Repositories()
        self.token = token or f"hf_local_{secrets.token_hex(12)}"
        self.trusted_publishers = trusted_publishers
        self._server = _HTTPServer((HOST, port), Handler)
        self._server.hub = self
        self.endpoint = f"http://{HOST}:{self._server.server_port}"

    def allows(self, authorization: str) -> bool:
        """Whether a request with this header may write."""
        return hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode())

    def serve_forever(self) -> None:
        self._server.serve_forever(poll_interval=0.01)

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.hub", description="Serve a local Hub for kernel repositories.")
    parser.add_argument("--port", type=int, default=8765, help="0 takes a free one")
    parser.add_argument("--token", help="what a writer must send (default: a new random one, printed at the start)")
    options = parser.parse_args(arguments)
    try:
        hub = HubServer(options.port, options.token)
    except OSError as error:
        parser.error(f"port {options.port}: {error}; expected a free one")
    print(f"A Hub at {hub.endpoint} keeps what you upload until it ends. For its clients:", flush=True)
    print(f"HF_ENDPOINT={hub.endpoint}" + (f" HF_TOKEN={hub.token}" if options.token is None else ""), flush=True)
    with suppress(KeyboardInterrupt):
        hub.serve_forever()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
