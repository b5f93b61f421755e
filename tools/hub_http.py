"""A request to the local Hub over HTTP: its route, its body piece by piece, and its answer."""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import time
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from tools.hub_store import HubError, Store, check_path, check_repo_id

if TYPE_CHECKING:
    from tools.hub_server import HubServer, _HTTPServer

MIB = 1 << 20
CHUNK = 1 << 16
JSON_LIMIT = 16 * MIB

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


def positive(text: str | None, default: int) -> int:
    """The number; default where there is none. One of more digits than a size has is as good as infinite."""
    return int(text[:20]) if text and text.isascii() and text.isdigit() else default


class Request(BaseHTTPRequestHandler):
    """One request: its route, token and body, and how it is answered. A subclass has a method for each action of `routes`.

    routes: (method, pattern of the path, action); no_token: the actions that change nothing, or carry their own permission.
    """

    routes: list[tuple[str, re.Pattern[str], str]] = []
    no_token: frozenset[str] = frozenset()
    protocol_version = "HTTP/1.1"
    server_version = "BastileHub/1"
    timeout = 120
    disable_nagle_algorithm = True  # headers and body are two writes; waiting for the ACK between them costs 40 ms
    server: _HTTPServer  # of hub_server.py

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
        if self.command in ("POST", "PUT", "DELETE") and action not in self.no_token:
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
        for wanted, pattern, action in self.routes:
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
