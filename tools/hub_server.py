"""A local Hub: the part of the Hub's HTTP API that `huggingface_hub` and `kernels` use for `kernel` repositories.

    python -m tools.hub_server --root DIR --port 8765 --token T
    HF_ENDPOINT=http://127.0.0.1:8765 python -c "from kernels import get_kernel; ..."

It needs only the standard library, listens on the loopback address and keeps what is uploaded under DIR (one server a
folder). Reading is public, writing needs the token. Nothing in the clients is patched: HF_ENDPOINT is all they need.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6
from socketserver import TCPServer
from typing import Any, BinaryIO, Self
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from tools.hub_store import (
    NAME,
    SHA256,
    HubError,
    Store,
    check_path,
    check_repo_id,
    describe,
    file_entry,
    lfs_entry,
    listing,
    parents_of,
    sha1_json,
)

MIB = 1 << 20
CHUNK = 1 << 16
JSON_LIMIT = 16 * MIB
SIGNATURE_SECONDS = 3600
# A new repository of the Hub has such a file, and so do the branches that are made of it.
GIT_ATTRIBUTES = b"*.bin filter=lfs diff=lfs merge=lfs -text\n"

HOST = re.compile(r"(?:\[([0-9A-Fa-f:]+)\]|([\w.-]+))(?::\d+)?", re.ASCII)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First and last byte of a single `bytes=` range; None for the whole file (RFC 9110: what is not understood is ignored).

    Raises:
        HubError: 416 if it lies outside the file.
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", (header or "").replace(" ", ""))
    if not match or match[0] == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        begin, end = max(0, size - int(last)), size - 1
    else:
        begin, end = int(first), min(int(last), size - 1) if last else size - 1
        if last and int(last) < begin:
            return None
    if begin >= size or begin > end:
        raise HubError(416, f"range {header} is outside the {size} bytes of the file", headers={"Content-Range": f"bytes */{size}"})
    return begin, end


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


REPO = r"/api/kernels/(?P<owner>[^/]+)/(?P<name>[^/]+)"
GIT = r"/kernels/(?P<owner>[^/]+)/(?P<name>[^/]+)\.git/info/lfs/objects"
REV = r"/(?P<revision>[^/]+)"
# `kernels benchmark` (0.17) names no kind of repository, so it asks for a model of that name.
MODEL = r"/api/models/(?P<owner>[^/]+)/(?P<name>[^/]+)"
ROUTES: list[tuple[str, re.Pattern[str], str]] = [
    (method, re.compile(pattern), action)
    for method, pattern, action in [
        ("GET", r"/api/whoami-v2", "whoami"),
        ("GET", r"/api/organizations/(?P<owner>[^/]+)/overview", "organization"),
        ("POST", r"/api/repos/create", "create_repo"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("GET", REPO, "info"),
        ("GET", rf"{REPO}/revision{REV}", "info"),
        ("GET", rf"{REPO}/refs", "refs"),
        ("GET", rf"{REPO}/commits{REV}", "commits"),
        ("GET", rf"{REPO}/tree{REV}(?:/(?P<path>.+))?", "tree"),
        ("POST", rf"{REPO}/paths-info{REV}", "paths_info"),
        ("POST", rf"{REPO}/branch/(?P<branch>[^/]+)", "create_branch"),
        ("POST", rf"{REPO}/preupload{REV}", "preupload"),
        ("POST", rf"{REPO}/commit{REV}", "commit"),
        ("POST", rf"{GIT}/batch", "lfs_batch"),
        ("POST", rf"{GIT}/verify", "lfs_verify"),
        ("PUT", rf"{GIT}/(?P<oid>[^/]+)", "lfs_put"),
        ("GET", rf"/kernels/(?P<owner>[^/]+)/(?P<name>[^/]+)/resolve{REV}/(?P<path>.+)", "download"),
        ("GET", MODEL, "info"),
        ("GET", rf"{MODEL}/revision{REV}", "info"),
        ("GET", rf"{MODEL}/refs", "refs"),
        ("GET", rf"{MODEL}/tree{REV}(?:/(?P<path>.+))?", "tree"),
        ("POST", rf"{MODEL}/paths-info{REV}", "paths_info"),
        ("GET", rf"/(?P<owner>[^/]+)/(?P<name>[^/]+)/resolve{REV}/(?P<path>.+)", "download"),
    ]
]
# These POSTs store nothing, and a signed URL carries its own permission (the clients send no token with it).
NO_TOKEN = {"validate_yaml", "paths_info", "lfs_put"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "BastileHub/1"
    timeout = 120
    disable_nagle_algorithm = True  # headers and body are two writes; waiting for the ACK between them costs 40 ms
    server: _HTTPServer

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    @property
    def store(self) -> Store:
        return self.server.hub.store

    def do_GET(self) -> None:
        self._unread, self._answered = self._body_length(), False
        try:
            try:
                self._answer()
            except HubError as error:
                self._send_error(error)
            except (ConnectionError, TimeoutError):
                raise
            except Exception as error:
                if self.hub.verbose:
                    traceback.print_exc()
                if self._answered:  # in the middle of a file: the client sees that it is too short
                    self.close_connection = True
                    return
                malformed = isinstance(error, (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError))
                what = "malformed request" if malformed else "this local Hub failed"
                self._send_error(HubError(400 if malformed else 500, f"{what}: {type(error).__name__}: {error}"))
            self._drop_body()
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client is gone; nothing was stored

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        if self.hub.verbose:
            super().log_message(format, *args)

    # Request

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self._check_host()
        action, arguments = self._route(url.path)
        if self.command in ("POST", "PUT", "DELETE") and action not in NO_TOKEN:
            self.require_token()
        getattr(self, action)(**arguments)

    def _check_host(self) -> None:
        """A page in a browser must not reach this server under another name (DNS rebinding)."""
        host = self.headers.get("Host", "")
        match = HOST.fullmatch(host)
        if not match or not is_loopback(match[1] or match[2]):
            raise HubError(400, f"host {host!r} refused: this server answers for the loopback address only")

    def _route(self, path: str) -> tuple[str, dict[str, str]]:
        method = "GET" if self.command == "HEAD" else self.command
        for wanted, pattern, action in ROUTES:
            match = pattern.fullmatch(path)
            if match and wanted == method:
                arguments = {key: unquote(value, errors="strict") for key, value in match.groupdict().items() if value is not None}
                if "path" in arguments:
                    check_path(arguments["path"])
                if "owner" in arguments and "name" in arguments:
                    arguments["repo"] = check_repo_id(arguments.pop("owner"), arguments.pop("name"))
                return action, arguments
        raise HubError(404, f"{self.command} {path} is not part of this local Hub")

    def has_token(self) -> bool:
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.hub.token}".encode())

    def require_token(self) -> None:
        if not self.has_token():
            # This text makes huggingface_hub report the token, and not a missing repository.
            raise HubError(401, "Invalid credentials in Authorization header", headers={"WWW-Authenticate": "Bearer"})

    def _body_length(self) -> int:
        """Bytes of the body still on the wire; -1 if it comes in chunks of unknown number."""
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            return -1
        return positive(self.headers.get("Content-Length"), 0)

    def body(self, limit: int) -> Iterator[bytes]:
        """The request's body, piece by piece.

        Raises:
            HubError: 413 if it has more than `limit` bytes.
            ConnectionError: if the client stops in the middle.
        """
        if self._unread == -1:
            yield from self._chunked_body(limit)
        elif self._unread > limit:
            raise HubError(413, f"body of {self._unread} bytes is over the limit of {limit}")
        while self._unread > 0:
            data = self.rfile.read1(min(CHUNK, self._unread))
            if not data:
                raise ConnectionError("the client stopped in the middle of its upload")
            self._unread -= len(data)
            yield data

    def _chunked_body(self, limit: int) -> Iterator[bytes]:
        total = 0
        while self._unread == -1:
            line = self.rfile.readline(32).partition(b";")[0].strip()
            if not re.fullmatch(rb"[0-9A-Fa-f]+", line):
                raise ConnectionError("the client stopped in the middle of its upload")
            size = int(line, 16)
            total += size
            if total > limit:
                raise HubError(413, f"body is over the limit of {limit} bytes")
            data = self.rfile.read(size + 2)
            if len(data) != size + 2:
                raise ConnectionError("the client stopped in the middle of its upload")
            if size == 0:
                self._unread = 0
            else:
                yield data[:-2]

    def json_body(self) -> dict:
        data = b"".join(self.body(min(JSON_LIMIT, self.hub.max_body))) or b"{}"
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise HubError(400, f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise HubError(400, f"the body is a JSON {type(value).__name__}; expected an object")
        return value

    def _drop_body(self) -> None:
        """Read what a refused request still sends: closing at once would reset the connection and lose the answer."""
        if self._unread == 0:
            return
        self.connection.settimeout(2)
        deadline = time.monotonic() + 20
        while self._unread != 0 and time.monotonic() < deadline:
            data = self.rfile.read1(CHUNK if self._unread < 0 else min(CHUNK, self._unread))
            if not data:
                return
            self._unread -= max(0, min(len(data), self._unread))

    # Answer

    @property
    def base(self) -> str:
        """The address the client used: it takes a URL for its Hub's only if that begins the same way."""
        return f"http://{self.headers['Host']}"

    def send_json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self._send_head(status, {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send_head(self, status: int, headers: dict[str, str]) -> None:
        self._answered = True
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if self._unread != 0:  # what is left of a refused body must not be read as the next request
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()

    def _send_error(self, error: HubError) -> None:
        text = re.sub(r"[^\x20-\x7e]", "?", error.message)  # what a header may hold
        self.send_json(error.body, error.status, {"X-Error-Message": text, **error.headers})

    # Accounts

    def whoami(self) -> None:
        self.require_token()
        access = {"displayName": "local", "role": "write"}
        self.send_json({"type": "user", "name": "local", "orgs": [], "auth": {"type": "access_token", "accessToken": access}})

    def organization(self, owner: str) -> None:
        if not NAME.fullmatch(owner) or not self.store.has_owner(owner):
            raise HubError(404, f"organization {owner!r} not found")
        self.send_json({"name": owner, "fullname": owner, "trustedKernelPublisher": owner in self.hub.trusted_publishers})

    # Repositories

    def create_repo(self) -> None:
        request = self.json_body()
        if request.get("type") != "kernel":
            raise HubError(400, f"type is {request.get('type')!r}; this local Hub has 'kernel' repositories only")
        if request.get("private") or request.get("visibility", "public") != "public":
            raise HubError(400, "this local Hub has public repositories only")
        repo = check_repo_id(request.get("organization") or "local", str(request.get("name")))
        url = {"url": f"{self.base}/kernels/{repo}", "name": repo}
        if not self.store.create_repo(repo, {".gitattributes": GIT_ATTRIBUTES}):
            raise HubError(409, "You already created this repo", body={"error": "You already created this repo", **url})
        self.send_json(url)

    def create_branch(self, repo: str, branch: str) -> None:
        start = self.json_body().get("startingPoint") or "main"
        if not self.store.create_branch(repo, branch, start):
            raise HubError(409, f"branch {branch!r} exists in {repo}")
        self.send_json({"name": branch}, 201)

    def info(self, repo: str, revision: str = "main") -> None:
        commit = self.store.resolve(repo, revision)
        self.send_json(
            {
                "_id": sha1_json(repo)[:24],
                "id": repo,
                "author": repo.partition("/")[0],
                "sha": commit["id"],
                "lastModified": commit["date"],
                "private": False,
                "gated": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": [{"rfilename": path} for path in sorted(self.store.tree(commit))],
            }
        )

    def refs(self, repo: str) -> None:
        branches = [
            {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": commit}
            for branch, commit in sorted(self.store.refs(repo).items())
        ]
        self.send_json({"branches": branches, "tags": [], "converts": [], "pullRequests": []})

    def commits(self, repo: str, revision: str) -> None:
        keys = ("id", "title", "message", "date")
        self.send_json([{**{key: commit[key] for key in keys}, "authors": []} for commit in self.store.history(repo, revision)])

    def tree(self, repo: str, revision: str, path: str = "") -> None:
        commit = self.store.resolve(repo, revision)
        recursive = self.query.get("recursive", "").lower() in ("true", "1")
        entries = listing(self.store.tree(commit), path, recursive)
        limit = max(1, min(positive(self.query.get("limit"), self.hub.page_size), self.hub.page_size))  # 0 would page for ever
        start = positive(self.query.get("cursor"), 0)
        if self.query.get("expand", "").lower() in ("true", "1"):
            last = {key: commit[key] for key in ("id", "title", "date")}
            entries = [{**entry, "lastCommit": last} for entry in entries]
        headers = {"X-Repo-Commit": commit["id"]}
        if start + limit < len(entries):
            # The next page names the commit: the branch may move between two pages.
            folder = f"/{quote(path, safe='')}" if path else ""
            query = urlencode({**self.query, "cursor": start + limit, "limit": limit})
            headers["Link"] = f'<{self.base}/api/kernels/{repo}/tree/{commit["id"]}{folder}?{query}>; rel="next"'
        self.send_json(entries[start : start + limit], headers=headers)

    def paths_info(self, repo: str, revision: str) -> None:
        data = b"".join(self.body(min(JSON_LIMIT, self.hub.max_body))).decode()
        paths = parse_qs(data).get("paths", [])
        tree = self.store.tree(self.store.resolve(repo, revision))
        folders = {parent for path in tree for parent in parents_of(path)}
        known = [path.rstrip("/") for path in paths if path.rstrip("/") in tree or path.rstrip("/") in folders]
        self.send_json([describe(path, tree.get(path), tree) for path in known])

    def download(self, repo: str, revision: str, path: str) -> None:
        commit = self.store.resolve(repo, revision)
        entry = self.store.tree(commit).get(path)
        if entry is None:
            raise HubError(404, f"{path!r} not found in {repo} at {revision}", "EntryNotFound", {"X-Repo-Commit": commit["id"]})
        span = parse_range(self.headers.get("Range"), entry["size"])
        begin, end = span or (0, entry["size"] - 1)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(end - begin + 1),
            "ETag": f'"{entry["blob"] if entry["lfs"] else entry["oid"]}"',
            "X-Repo-Commit": commit["id"],
            "Accept-Ranges": "bytes",
        }
        if span:
            headers["Content-Range"] = f"bytes {begin}-{end}/{entry['size']}"
        self._send_head(206 if span else 200, headers)
        if self.command == "HEAD":
            return
        with self.store.open_blob(entry["blob"]) as file:
            file.seek(begin)
            left = end - begin + 1
            while left:
                data = file.read(min(CHUNK, left))
                self.wfile.write(data)
                left -= len(data)

    # Uploads

    def validate_yaml(self) -> None:
        """Only that the front matter is there and closed: a YAML parser is not in the standard library."""
        content = str(self.json_body().get("content", ""))
        warnings = [] if content.startswith("---\n") else [{"message": "empty or missing yaml metadata in repo card"}]
        if not warnings and "\n---" not in content[3:]:
            raise HubError(400, "invalid metadata", body={"errors": [{"message": "the front matter is not closed by '---'"}]})
        self.send_json({"errors": [], "warnings": warnings})

    def preupload(self, repo: str, revision: str) -> None:
        """How to send each file.

        huggingface_hub 2 sends what is "lfs" through Xet wherever hf_xet is installed and asks no server whether it
        speaks Xet, so a file is "lfs" here only if it is too large for the commit itself. Such a file needs a client
        without hf_xet (or HF_HUB_DISABLE_XET=1).
        """
        tree = self.store.tree(self.store.resolve(repo, revision))
        answers = []
        for file in self.json_body().get("files", []):
            path = check_path(str(file.get("path")))
            mode = "regular" if int(file.get("size", 0)) <= self.hub.inline_limit else "lfs"
            answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if path in tree:
                answer["oid"] = tree[path]["oid" if mode == "regular" else "blob"]
            answers.append(answer)
        self.send_json({"files": answers})

    def lfs_batch(self, repo: str) -> None:
        self.store.refs(repo)
        request = self.json_body()
        if request.get("operation") != "upload":
            raise HubError(400, "only 'upload' is answered; download through resolve/")
        objects = [self._lfs_object(repo, item) for item in request.get("objects", [])]
        self.send_json({"transfer": "basic", "objects": objects})

    def _lfs_object(self, repo: str, item: dict) -> dict:
        oid, size = str(item.get("oid")), int(item.get("size", -1))
        answer: dict[str, Any] = {"oid": oid, "size": size}
        if not SHA256.fullmatch(oid) or not 0 <= size <= self.hub.max_body:
            message = f"expected a sha256 and 0 to {self.hub.max_body} bytes, found {oid!r} and {size}"
            return {**answer, "error": {"code": 422, "message": message}}
        if self.store.blob_size(oid) != size:
            url = f"{self.base}/kernels/{repo}.git/info/lfs/objects"
            expires = int(time.time()) + SIGNATURE_SECONDS
            query = urlencode({"size": size, "expires": expires, "signature": self.hub.sign(repo, oid, size, expires)})
            answer["actions"] = {"upload": {"href": f"{url}/{oid}?{query}"}, "verify": {"href": f"{url}/verify"}}
        return answer

    def lfs_put(self, repo: str, oid: str) -> None:
        size, expires = positive(self.query.get("size"), 0), positive(self.query.get("expires"), 0)
        signature = self.hub.sign(repo, oid, size, expires)
        if not hmac.compare_digest(signature, self.query.get("signature", "")) or expires < time.time():
            raise HubError(401, "Invalid credentials in the signed URL")
        self.store.add_blob(self.body(min(size, self.hub.max_body)), oid, size)
        self.send_json({})

    def lfs_verify(self, repo: str) -> None:
        request = self.json_body()
        oid = str(request.get("oid"))
        if not SHA256.fullmatch(oid) or self.store.blob_size(oid) != request.get("size"):
            raise HubError(404, f"LFS object {oid} of {request.get('size')} bytes is not stored", "EntryNotFound")
        self.send_json({})

    def commit(self, repo: str, revision: str) -> None:
        if self.query.get("create_pr"):
            raise HubError(400, "this local Hub has no pull requests")
        self.store.resolve(repo, revision)
        with tempfile.TemporaryFile(dir=self.store.tmp) as spool:
            for data in self.body(self.hub.max_body):
                spool.write(data)
            spool.seek(0)
            header, operations = self._parse_commit(spool)
        commit = self.store.commit(repo, revision, header, operations)
        url = f"{self.base}/kernels/{repo}/commit/{commit}"
        self.send_json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def _parse_commit(self, lines: BinaryIO) -> tuple[dict, list[tuple[str, str, dict | None]]]:
        header: dict = {}
        operations = []
        for line in lines:
            try:
                item = json.loads(line)
                key, value = item["key"], item["value"]
                if key == "header":
                    header = {**value, "summary": str(value["summary"])}
                else:
                    operations.append((key, check_path(value["path"].rstrip("/")), self._entry(key, value)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
                raise HubError(400, f"not a line of a commit: {type(error).__name__}: {error}") from None
        if not header:
            raise HubError(400, "the commit has no header line")
        return header, operations

    def _entry(self, key: str, value: dict) -> dict | None:
        if key in ("deletedFile", "deletedFolder"):
            return None
        if key == "file":
            content = value["content"]
            data = base64.b64decode(content, validate=True) if value.get("encoding") == "base64" else content.encode()
            return file_entry(data, self.store.add_blob([data]))
        if key == "lfsFile":
            oid = str(value["oid"])
            size = self.store.blob_size(oid) if SHA256.fullmatch(oid) else None
            if size is None or value.get("size", size) != size:
                raise HubError(400, f"LFS object {oid} of {value['path']!r} was not uploaded")
            return lfs_entry(oid, size)
        raise HubError(400, f"unknown operation {key!r}")


def positive(text: str | None, default: int) -> int:
    """The number; default where there is none. One of more digits than a size has is as good as infinite."""
    return int(text[:20]) if text and text.isascii() and text.isdigit() else default


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    hub: HubServer

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's own one asks the DNS for the host's name, which may take seconds

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that goes away is normal here; anything else is a fault of this server.
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _HTTPServer6(_HTTPServer):
    address_family = AF_INET6


class HubServer:
    """The server, as a context manager: `with HubServer(root, token="t") as hub: ... hub.endpoint ...`.

    Args:
        root: folder that keeps the repositories; made if missing.
        port: 0 takes a free one.
        token: what a writer must send; by default a new random one (`hub.token`).
        host: a loopback address.
        max_body: largest request body, in bytes.
        inline_limit: largest file that travels inside the commit, in bytes (see `Handler.preupload`).
        page_size: entries in a page of a tree listing.
        trusted_publishers: owners that `kernels` may load without `trust_remote_code`.
        verbose: print each request to stderr.

    Raises:
        ValueError: if `host` is not a loopback address.
        OSError: if the port is taken or `root` cannot be written.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        port: int = 0,
        token: str | None = None,
        host: str = "127.0.0.1",
        *,
        max_body: int = 512 * MIB,
        inline_limit: int = 64 * MIB,
        page_size: int = 1000,
        trusted_publishers: tuple[str, ...] = (),
        verbose: bool = False,
    ):
        if not is_loopback(host):
            raise ValueError(f"host is {host!r}; expected a loopback address such as 127.0.0.1: this server is for one machine only")
        self.token = token or f"hf_local_{secrets.token_hex(12)}"
        self.max_body, self.inline_limit, self.page_size = max_body, inline_limit, page_size
        self.trusted_publishers = trusted_publishers
        self.verbose = verbose
        self._key = secrets.token_bytes(32)
        # The port first: a second server on it must fail before it clears the temporary files of the one that runs.
        self._server = (_HTTPServer6 if ":" in host else _HTTPServer)((host, port), Handler)
        self._server.hub = self
        self.store = Store(root)
        self.port = self._server.server_address[1]
        self.endpoint = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def sign(self, repo: str, oid: str, size: int, expires: int) -> str:
        """Permission to upload one LFS object without a token, as the Hub's pre-signed URLs give it."""
        return hmac.new(self._key, f"{repo} {oid} {size} {expires}".encode(), hashlib.sha256).hexdigest()

    def serve_forever(self) -> None:
        self._server.serve_forever(poll_interval=0.01)

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.hub_server", description="Serve a local Hub for kernel repositories.")
    parser.add_argument("--root", required=True, help="folder that keeps the repositories")
    parser.add_argument("--port", type=int, default=8765, help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address")
    parser.add_argument("--token", help="what a writer must send (default: a new random one, printed at the start)")
    parser.add_argument("--verbose", action="store_true", help="print each request")
    options = parser.parse_args(arguments)
    try:
        hub = HubServer(options.root, options.port, options.token, options.host, verbose=options.verbose)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Hub at {hub.endpoint}, stored in {hub.store.root}", flush=True)
    if options.token is None:
        print(f"HF_ENDPOINT={hub.endpoint} HF_TOKEN={hub.token}", flush=True)
    try:
        hub.serve_forever()
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
