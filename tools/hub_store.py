"""What the local Hub keeps on disk: repositories, commits, file contents. `tools.hub_server` speaks HTTP over it.

Every file appears by `os.replace`, so a killed upload leaves the old state, never half of the new one:

    blobs/ab/<sha256>                        file contents, by content
    trees/<sha1>.json                        {path: entry}, by content
    repos/<owner>/<name>/commits/<sha>.json  never rewritten
    repos/<owner>/<name>/refs.json           {branch: commit}, the only file that changes
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import unicodedata
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

NAME = re.compile(r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?", re.ASCII)
REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,254}", re.ASCII)
UNWRITABLE = ("Cc", "Cs", "Zl", "Zp")  # categories of Unicode: control characters, surrogates, separators of lines and paragraphs
SHA1 = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")


class HubError(Exception):
    """An answer that is not a success: the HTTP status, the text, and the Hub's own code in `X-Error-Code`."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None, body: Any = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = {**(headers or {}), **({"X-Error-Code": code} if code else {})}
        self.body = body if body is not None else {"error": message}


def check_path(path: str) -> str:
    """`path` if it is a plain relative path.

    The server never opens a file by such a name (contents are stored by digest), but the clients write what they
    download under it.

    Raises:
        HubError: 400 for an absolute path, an empty, `.`, `..` or `.git` component, a backslash, a control character (a line break, a
            NUL), or half of a surrogate pair, which no file system can write.
    """
    parts, unwritable = path.split("/"), any(unicodedata.category(character) in UNWRITABLE for character in path)
    if "\\" in path or unwritable or any(part in ("", ".", "..", ".git") for part in parts):
        expected = "a relative path without '..', '.git', '\\', control characters and lone surrogates"
        raise HubError(400, f"path {path!r} is not allowed; expected {expected}")
    return path


def check_repo_id(owner: str, name: str) -> str:
    for part in (owner, name):
        if not NAME.fullmatch(part) or ".." in part or "--" in part:
            raise HubError(400, f"{part!r} is not a name the Hub accepts: letters, digits, '-', '_', '.', at most 96")
    return f"{owner}/{name}"


def check_branch(branch: str) -> str:
    if not REVISION.fullmatch(branch) or ".." in branch or "//" in branch or SHA1.fullmatch(branch):
        raise HubError(400, f"{branch!r} is not a branch name")
    return branch


def sha1_json(value: Any) -> str:
    return hashlib.sha1(json.dumps(value, sort_keys=True).encode()).hexdigest()


def git_oid(data: bytes) -> str:
    """What git calls a file with these bytes; the clients compare it to see whether a file changed."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def parents_of(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


class Store:
    """Repositories, commits and blobs on disk. Safe to use from several threads of one process."""

    def __init__(self, root: str | os.PathLike[str]):
        self.root = Path(root).absolute()
        self.lock = threading.Lock()
        self.tmp = self.root / "tmp"
        shutil.rmtree(self.tmp, ignore_errors=True)  # what a killed server left behind
        self.tmp.mkdir(parents=True)

    # Files

    def _write(self, path: Path, data: bytes) -> None:
        self._move(self._spool([data])[0], path)

    def _spool(self, chunks: Iterator[bytes] | list[bytes]) -> tuple[Path, str, int]:
        """Write `chunks` to a temporary file; its path, sha256 and size."""
        digest, size = hashlib.sha256(), 0
        handle, name = tempfile.mkstemp(dir=self.tmp)
        try:
            with os.fdopen(handle, "wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    size += len(chunk)
                    file.write(chunk)
        except BaseException:
            os.unlink(name)
            raise
        return Path(name), digest.hexdigest(), size

    def _move(self, temporary: Path, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary, path)

    def _blob(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256[:2] / sha256

    def blob_size(self, sha256: str) -> int | None:
        """Bytes of a stored content; None if it is not here."""
        try:
            return self._blob(sha256).stat().st_size
        except FileNotFoundError:
            return None

    def open_blob(self, sha256: str) -> BinaryIO:
        return open(self._blob(sha256), "rb")

    def add_blob(self, chunks: Iterator[bytes] | list[bytes], sha256: str | None = None, size: int | None = None) -> str:
        """Store what `chunks` yields; its sha256.

        Raises:
            HubError: 400 if it has another sha256 or size than announced.
        """
        temporary, found, found_size = self._spool(chunks)
        if sha256 not in (None, found) or size not in (None, found_size):
            temporary.unlink()
            raise HubError(400, f"upload has sha256 {found} and {found_size} bytes; announced were {sha256} and {size}")
        self._move(temporary, self._blob(found))
        return found

    # Repositories

    def _repo(self, repo: str) -> Path:
        return self.root / "repos" / repo

    def exists(self, repo: str) -> bool:
        return (self._repo(repo) / "refs.json").is_file()

    def has_owner(self, owner: str) -> bool:
        return (self.root / "repos" / owner).is_dir()

    def refs(self, repo: str) -> dict[str, str]:
        """{branch: commit}.

        Raises:
            HubError: 404 RepoNotFound.
        """
        try:
            return json.loads((self._repo(repo) / "refs.json").read_bytes())
        except FileNotFoundError:
            raise HubError(404, f"repository {repo} not found", "RepoNotFound") from None

    def create_repo(self, repo: str, files: dict[str, bytes] | None = None) -> bool:
        """Make `repo` with a `main` that has these files; False if it exists."""
        tree = {path: file_entry(data, self.add_blob([data])) for path, data in (files or {}).items()}
        with self.lock:
            if self.exists(repo):
                return False
            self._set_ref(repo, {}, "main", self._add_commit(repo, tree, None, "initial commit", ""))
            return True

    def create_branch(self, repo: str, branch: str, start: str = "main") -> bool:
        """Make `branch` point where `start` does; False if it exists."""
        check_branch(branch)
        with self.lock:
            refs = self.refs(repo)
            if branch in refs:
                return False
            self._set_ref(repo, refs, branch, self.resolve(repo, start)["id"])
            return True

    def _set_ref(self, repo: str, refs: dict[str, str], branch: str, commit: str) -> None:
        self._write(self._repo(repo) / "refs.json", json.dumps({**refs, branch: commit}, sort_keys=True).encode())

    def resolve(self, repo: str, revision: str) -> dict:
        """The commit that `revision` (branch, `refs/heads/<branch>` or commit id) names.

        Raises:
            HubError: 404 RepoNotFound or RevisionNotFound.
        """
        commit = self.refs(repo).get(revision.removeprefix("refs/heads/"), revision)
        path = self._repo(repo) / "commits" / f"{commit}.json"
        if not SHA1.fullmatch(commit) or not path.is_file():
            raise HubError(404, f"revision {revision!r} not found in {repo}", "RevisionNotFound")
        return json.loads(path.read_bytes())

    def history(self, repo: str, revision: str) -> Iterator[dict]:
        """The commits that `revision` has, newest first."""
        commit = self.resolve(repo, revision)
        while True:
            yield commit
            if commit["parent"] is None:
                return
            commit = self.resolve(repo, commit["parent"])

    def tree(self, commit: dict) -> dict[str, dict]:
        return json.loads((self.root / "trees" / f"{commit['tree']}.json").read_bytes())

    def _add_commit(self, repo: str, tree: dict[str, dict], parent: str | None, title: str, message: str) -> str:
        tree_id = sha1_json(tree)
        self._write(self.root / "trees" / f"{tree_id}.json", json.dumps(tree, sort_keys=True).encode())
        date = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        commit = {"tree": tree_id, "parent": parent, "title": title, "message": message, "date": date}
        commit_id = sha1_json([commit, repo, secrets.token_hex(8)])
        content = json.dumps({**commit, "id": commit_id}, sort_keys=True)
        self._write(self._repo(repo) / "commits" / f"{commit_id}.json", content.encode())
        return commit_id

    def commit(self, repo: str, branch: str, header: dict, operations: list[tuple[str, str, dict | None]]) -> str:
        """Apply `operations` to `branch` at once; the new commit, or the old one if nothing changes.

        Raises:
            HubError: 404 if the branch or a file to delete is not there, 412 if the branch is no longer at
                `header["parentCommit"]`, 400 if a path would be file and folder at once.
        """
        branch = branch.removeprefix("refs/heads/")
        with self.lock:
            refs = self.refs(repo)
            if branch not in refs:
                raise HubError(404, f"branch {branch!r} not found in {repo}", "RevisionNotFound")
            head, expected = refs[branch], header.get("parentCommit")
            if expected not in (None, head):
                raise HubError(412, f"branch {branch!r} is at {head}, no longer at {expected}; read it again and retry")
            old = self.tree(self.resolve(repo, head))
            new = apply_operations(old, operations)
            if new == old:
                return head
            commit = self._add_commit(repo, new, head, header["summary"], header.get("description") or "")
            self._set_ref(repo, refs, branch, commit)
            return commit


def apply_operations(tree: dict[str, dict], operations: list[tuple[str, str, dict | None]]) -> dict[str, dict]:
    tree = dict(tree)
    for key, path, entry in operations:
        if entry is not None:
            tree[path] = entry
            continue
        gone = [name for name in tree if (name.startswith(f"{path}/") if key == "deletedFolder" else name == path)]
        if not gone:
            raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        for name in gone:
            del tree[name]
    for path in tree:
        clash = next((parent for parent in parents_of(path) if parent in tree), None)
        if clash:
            raise HubError(400, f"{clash!r} would be a file and, for {path!r}, a folder")
    return tree


def file_entry(data: bytes, sha256: str) -> dict:
    return {"blob": sha256, "size": len(data), "oid": git_oid(data), "lfs": False}


def lfs_entry(sha256: str, size: int) -> dict:
    return {"blob": sha256, "size": size, "oid": git_oid(lfs_pointer(sha256, size)), "lfs": True}


def describe(path: str, entry: dict | None, tree: dict[str, dict]) -> dict:
    """A file or (`entry` is None) a folder as the tree listing shows it."""
    if entry is None:
        below = {name: value for name, value in tree.items() if name.startswith(f"{path}/")}
        return {"type": "directory", "oid": sha1_json(below), "size": 0, "path": path}
    shown = {"type": "file", "oid": entry["oid"], "size": entry["size"], "path": path}
    if entry["lfs"]:
        pointer = lfs_pointer(entry["blob"], entry["size"])
        shown["lfs"] = {"oid": entry["blob"], "size": entry["size"], "pointerSize": len(pointer)}
    return shown


def listing(tree: dict[str, dict], folder: str, recursive: bool) -> list[dict]:
    """What `folder` ("" is the root) holds, sorted by path."""
    prefix = f"{folder}/" if folder else ""
    found: dict[str, dict | None] = {}
    for path, entry in tree.items():
        if path.startswith(prefix):
            folders = [parent for parent in parents_of(path) if parent.startswith(prefix)]
            found.update(dict.fromkeys(folders))
            found[path] = entry
    if folder and not found:
        raise HubError(404, f"folder {folder!r} not found", "EntryNotFound")
    shown = [path for path in sorted(found) if recursive or "/" not in path[len(prefix) :]]
    return [describe(path, found[path], tree) for path in shown]
