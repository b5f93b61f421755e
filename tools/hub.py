"""A Hub on this machine: as much of the Hub's HTTP API as `huggingface_hub` and `kernels` ask for `kernel` repositories.

    python -m tools.hub --port 8765
    HF_ENDPOINT=http://127.0.0.1:8765 python -c "from kernels import get_kernel; ..."

It listens on the loopback address and keeps what is uploaded in memory until it ends. Reading is public, writing needs the token.
Nothing in the clients is patched: HF_ENDPOINT is all they need.
"""

from __future__ import annotations

import argparse
import base64
import hmac
import json
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from tools.hub_client import git_oid

HOST = "127.0.0.1"
# A new repository of the Hub has such a file, and so do the branches that are made of it.
GIT_ATTRIBUTES = b"*.bin filter=lfs diff=lfs merge=lfs -text\n"


class HubError(Exception):
    """An answer that is not a success: the HTTP status, the text, and the Hub's own code in `X-Error-Code`."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Commit:
    """The files of a repository at one time, by path."""

    id: str
    files: dict[str, bytes]
    parent: str | None


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
        """Make `repo` with a `main`. Raises HubError: 409 if it exists."""
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
            HubError: 400 for a path out of the repository, 404 if the branch or a file to delete is not there, 412 if the branch is no
                longer at `parent`.
        """
        with self.lock:
            head = self.resolve(repo, branch)
            if parent not in (None, head.id):
                raise HubError(412, f"branch {branch!r} is at {head.id}, no longer at {parent}; read it again and retry")
            for path in changes:
                check_path(path)
            gone = [path for path, data in changes.items() if data is None and path not in head.files]
            if gone:
                raise HubError(404, f"A file with this name doesn't exist: {gone[0]}", "EntryNotFound")
            files = {path: data for path, data in {**head.files, **changes}.items() if data is not None}
            return head.id if files == head.files else self._add(repo, branch, files, head.id)

    def _add(self, repo: str, branch: str, files: dict[str, bytes], parent: str | None) -> str:
        commit = Commit(secrets.token_hex(20), files, parent)
        self.commits[commit.id] = commit
        self.branches[repo][branch] = commit.id
        return commit.id


def check_path(path: str) -> None:
    """Refuse what is no plain relative path: the clients write what they download under it. Raises HubError: 400."""
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..", ".git") for part in path.split("/")):
        raise HubError(400, f"path {path!r} is not allowed; expected a relative path without '..', '.git', '\\' and control characters")


def listing(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict]:
    """Lists the files and folders in `folder` ("" is the root) by path, in the form that the Hub returns. Raises HubError: 404."""
    prefix = f"{folder}/" if folder else ""
    found: dict[str, dict] = {}
    for path, data in files.items():
        if path.startswith(prefix):
            parts = path.removeprefix(prefix).split("/")
            for inner in (prefix + "/".join(parts[:depth]) for depth in range(1, len(parts))):
                found[inner] = {"type": "directory", "oid": git_oid(inner.encode()), "size": 0, "path": inner}
            found[path] = {"type": "file", "oid": git_oid(data), "size": len(data), "path": path}
    if folder and not found:
        raise HubError(404, f"folder {folder!r} not found", "EntryNotFound")
    return [found[path] for path in sorted(found) if recursive or "/" not in path.removeprefix(prefix)]


# `kernels benchmark` (0.17) names no kind of repository, so it asks for a model of that name.
REPO, REVISION = r"/api/(?:kernels|models)/(?P<repo>[^/]+/[^/]+)", r"/(?P<revision>[^/]+)"
ROUTES: list[tuple[str, re.Pattern, Callable[..., Any]]] = []


def route(method: str, pattern: str) -> Callable:
    """The decorated method of `Handler` answers such requests; its arguments are the named parts of the path."""

    def note(action: Callable) -> Callable:
        ROUTES.append((method, re.compile(pattern), action))
        return action

    return note


class Handler(BaseHTTPRequestHandler):
    """One request; a method for each path, which returns the JSON of the answer, or sends it and returns None."""

    protocol_version = "HTTP/1.1"
    timeout = 120
    disable_nagle_algorithm = True  # headers and body are two writes; waiting for the ACK between them costs 40 ms
    server: HubServer

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
        # A page in a browser must not reach this server under another name (DNS rebinding).
        if self.headers.get("Host") not in (f"{HOST}:{self.server.server_port}", f"localhost:{self.server.server_port}"):
            raise HubError(400, f"host {self.headers.get('Host')!r} refused: this server answers for the loopback address only")
        url = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        method = "GET" if self.command == "HEAD" else self.command
        for wanted, pattern, action in ROUTES:
            match = pattern.fullmatch(url.path)
            if match and wanted == method:
                token = self.headers.get("Authorization", "").encode()
                if method == "POST" and not hmac.compare_digest(token, f"Bearer {self.server.token}".encode()):
                    raise HubError(401, "Invalid credentials in Authorization header")
                found = action(self, **{name: unquote(value) for name, value in match.groupdict().items() if value is not None})
                if found is not None:
                    self.send(200, json.dumps(found).encode())
                return
        raise HubError(404, f"{self.command} {url.path} is not part of this local Hub")

    @property
    def repositories(self) -> Repositories:
        return self.server.repositories

    def log_message(self, *arguments: Any) -> None:
        """Requests are not printed."""

    def refuse(self, error: HubError) -> None:
        headers = {"X-Error-Code": error.code} if error.code else {}
        self.send(error.status, json.dumps({"error": str(error)}).encode(), {"X-Error-Message": str(error), **headers})

    def send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, re.sub(r"[^\x20-\x7e]", "?", value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @route("GET", r"/api/organizations/(?P<owner>[^/]+)/overview")
    def organization(self, owner: str) -> dict:
        if not any(repo.startswith(f"{owner}/") for repo in self.repositories.branches):
            raise HubError(404, f"organization {owner!r} not found")
        return {"name": owner, "fullname": owner, "trustedKernelPublisher": owner in self.server.trusted_publishers}

    @route("POST", "/api/repos/create")
    def create_repo(self) -> dict | None:
        request = json.loads(self.data)
        if request.get("type") != "kernel" or request.get("private") or request.get("visibility", "public") != "public":
            raise HubError(400, "this local Hub has public 'kernel' repositories only")
        repo = f"{request.get('organization') or 'local'}/{request['name']}"
        answer = {"url": f"{self.server.endpoint}/kernels/{repo}", "name": repo}
        try:
            self.repositories.create_repo(repo)
        except HubError as error:  # `exist_ok` of huggingface_hub takes it for a success and reads the rest
            self.send(error.status, json.dumps({"error": str(error), **answer}).encode())
            return None
        return answer

    @route("POST", rf"{REPO}/branch/(?P<branch>[^/]+)")
    def create_branch(self, repo: str, branch: str) -> dict:
        self.repositories.create_branch(repo, branch, json.loads(self.data or b"{}").get("startingPoint") or "main")
        return {"name": branch}

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self) -> dict:
        return {"errors": [], "warnings": []}

    @route("GET", rf"{REPO}(?:/revision{REVISION})?")
    def info(self, repo: str, revision: str = "main") -> dict:
        commit = self.repositories.resolve(repo, revision)
        return {"id": repo, "sha": commit.id, "siblings": [{"rfilename": path} for path in sorted(commit.files)], "tags": []}

    @route("GET", rf"{REPO}/refs")
    def refs(self, repo: str) -> dict:
        branches = sorted(self.repositories.refs(repo).items())
        found = [{"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": commit} for branch, commit in branches]
        return {"branches": found, "tags": [], "converts": [], "pullRequests": []}

    @route("GET", rf"{REPO}/tree{REVISION}(?:/(?P<path>.+))?")
    def tree(self, repo: str, revision: str, path: str = "") -> list[dict]:
        recursive = self.query.get("recursive", "").lower() in ("true", "1")
        return listing(self.repositories.resolve(repo, revision).files, path, recursive)

    @route("POST", rf"{REPO}/preupload{REVISION}")
    def preupload(self, repo: str, revision: str) -> dict:
        """Every file travels inside the commit: huggingface_hub sends others through Xet, and asks no server whether it speaks that."""
        self.repositories.resolve(repo, revision)
        files = json.loads(self.data)["files"]
        return {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]}

    @route("POST", rf"{REPO}/commit{REVISION}")
    def commit(self, repo: str, revision: str) -> dict:
        header, *operations = map(json.loads, self.data.splitlines())
        changes: dict[str, bytes | None] = {}
        for operation in operations:
            value = operation["value"]
            if operation["key"] not in ("file", "deletedFile"):
                raise HubError(400, f"unknown operation {operation['key']!r}")
            changes[value["path"]] = base64.b64decode(value["content"]) if operation["key"] == "file" else None
        commit = self.repositories.commit(repo, revision, changes, header["value"].get("parentCommit"))
        url = f"{self.server.endpoint}/kernels/{repo}/commit/{commit}"
        return {"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""}

    @route("GET", rf"(?:/kernels)?/(?P<repo>[^/]+/[^/]+)/resolve{REVISION}/(?P<path>.+)")
    def download(self, repo: str, revision: str, path: str) -> None:
        commit = self.repositories.resolve(repo, revision)
        if path not in commit.files:
            raise HubError(404, f"{path!r} not found in {repo} at {revision}", "EntryNotFound")
        data = commit.files[path]
        self.send(200, data, {"X-Repo-Commit": commit.id, "Content-Type": "application/octet-stream", "ETag": f'"{git_oid(data)}"'})


class HubServer(ThreadingHTTPServer):
    """The server, as a context manager: `with HubServer() as hub: ... hub.endpoint ...`.

    Args:
        port: 0 takes a free one.
        token: what a writer must send; by default a new random one (`hub.token`).
        trusted_publishers: owners that `kernels` may load without `trust_remote_code`.

    Raises:
        OSError: if the port is taken.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int = 0, token: str | None = None, trusted_publishers: tuple[str, ...] = ()):
        super().__init__((HOST, port), Handler)
        self.repositories = Repositories()
        self.token = token or f"hf_local_{secrets.token_hex(12)}"
        self.trusted_publishers = trusted_publishers
        self.endpoint = f"http://{HOST}:{self.server_port}"

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's own one asks the DNS for the host's name, which may take seconds
        self.server_port = self.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


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
