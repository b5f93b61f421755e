"""A local Hub: the part of the Hub's HTTP API that `huggingface_hub` and `kernels` use for `kernel` repositories.

    python -m tools.hub_server --root DIR --port 8765 --token T
    HF_ENDPOINT=http://127.0.0.1:8765 python -c "from kernels import get_kernel; ..."

It needs only the standard library, listens on the loopback address and keeps what is uploaded under DIR (one server a
folder). Reading is public, writing needs the token. Nothing in the clients is patched: HF_ENDPOINT is all they need.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import os
import secrets
import sys
import threading
from http.server import ThreadingHTTPServer
from socket import AF_INET6
from socketserver import TCPServer
from typing import Any, Self

from tools.hub_api import Handler
from tools.hub_http import MIB, is_loopback
from tools.hub_store import Store


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
