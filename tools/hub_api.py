"""What the local Hub answers: accounts, repositories, downloads and uploads, as the Hub's API has them."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
import tempfile
import time
from typing import Any, BinaryIO
from urllib.parse import parse_qs, quote, urlencode

from tools.hub_http import CHUNK, JSON_LIMIT, Request, parse_range, positive
from tools.hub_store import (
    NAME,
    SHA256,
    HubError,
    check_path,
    check_repo_id,
    describe,
    file_entry,
    lfs_entry,
    listing,
    parents_of,
    sha1_json,
)

SIGNATURE_SECONDS = 3600
# A new repository of the Hub has such a file, and so do the branches that are made of it.
GIT_ATTRIBUTES = b"*.bin filter=lfs diff=lfs merge=lfs -text\n"

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
NO_TOKEN = frozenset(("validate_yaml", "paths_info", "lfs_put"))


class Handler(Request):
    """The actions of `ROUTES`."""

    routes = ROUTES
    no_token = NO_TOKEN

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
