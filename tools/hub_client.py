"""A branch on the Hub: what is there, what it lacks, and the one commit that makes it what is on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha1, sha256
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from tools.built import PublishError
from tools.kernel_package import PackageError

REPO_TYPE = "kernel"

MAIN = "main"


@dataclass(frozen=True)
class Plan:
    """What one branch needs to become what is on disk."""

    branch: str
    add: dict[str, Path]  # path in the repository -> file
    delete: list[str]
    same: list[str]
    kept: list[str]  # published variants that this build does not have; another machine may have built them
    parent: str | None  # the commit that was compared; None: the branch is not there yet

    @property
    def empty(self) -> bool:
        """A .gitattributes alone is no reason for a commit: a Hub may write it anew with each."""
        return not self.add and set(self.delete) <= {".gitattributes"}


@contextmanager
def hub_errors(doing: str) -> Iterator[None]:
    """Turn whatever the Hub's client raises into a PublishError (its HTTP library is not the same in every version)."""
    try:
        yield
    except (PublishError, PackageError):
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        hints = {
            401: "the token is not valid for this Hub; set HF_TOKEN or run `hf auth login`",
            403: "the token may not do that; it needs write permission there, and making a repository of type 'kernel' "
            "needs Hugging Face's approval of the account ('Request Kernels Creation')",
            409: "another commit was published in the meantime; run it again",
            412: "another commit was published in the meantime; run it again",
            413: "the Hub refuses requests of this size",
        }
        raise PublishError(f"{doing}: {hints.get(status, 'the Hub refused')} (HTTP {status}: {error})") from error
    except Exception as error:
        raise PublishError(f"{doing}: {type(error).__name__}: {error}; nothing half-done is visible there; run it again") from error


def hub_files(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    try:
        entries = api.list_repo_tree(repo_id, repo_type=REPO_TYPE, revision=revision, recursive=True)
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return {}


def hub_branches(api: HfApi, repo_id: str) -> dict[str, str] | None:
    """{branch: commit}; None if the repository is not there."""
    try:
        refs = api.list_repo_refs(repo_id, repo_type=REPO_TYPE)
    except RepositoryNotFoundError:
        return None
    return {branch.name: branch.target_commit for branch in refs.branches}


def git_oid(data: bytes) -> str:
    """The git hash of a file with these bytes, by which the Hub and its clients see whether a file changed."""
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_same(path: Path, published: RepoFile) -> bool:
    data = path.read_bytes()
    if published.lfs is not None:
        return published.lfs.sha256 == sha256(data).hexdigest()
    return published.blob_id == git_oid(data)


def make_plan(branch: str, parent: str | None, files: dict[str, Path], published: dict[str, RepoFile]) -> Plan:
    """Compare `files` with what is `published`.

    On `main` nothing is stale. On other branches what is not in `files` is, but for variants that this build does not have.
    """
    owned = tuple({"/".join(path.split("/")[:2]) + "/" for path in files if path.startswith("build/")})
    same = [path for path in files if path in published and is_same(files[path], published[path])]
    add = {path: file for path, file in sorted(files.items()) if path not in same}
    stale = sorted(path for path in published if path not in files and (path.startswith(owned) or not path.startswith("build/")))
    stale = [] if branch == MAIN else stale
    kept = sorted(path for path in published if path.startswith("build/") and not path.startswith(owned))
    return Plan(branch, add, stale, same, kept, parent)


def upload(api: HfApi, repo_id: str, plan: Plan, message: str) -> str:
    """Make `plan` true with one commit; its id."""
    additions = [CommitOperationAdd(path, file) for path, file in plan.add.items()]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [*additions, *(CommitOperationDelete(path) for path in plan.delete)]
    commit = api.create_commit(
        repo_id,
        operations,
        repo_type=REPO_TYPE,
        revision=plan.branch,
        commit_message=message,
        parent_commit=plan.parent,
    )
    return commit.oid


def prepare_branch(api: HfApi, repo_id: str, plan: Plan) -> Plan:
    """`plan` with the commit that its branch points to, made first where it is missing."""
    if plan.parent:
        return plan
    head = (hub_branches(api, repo_id) or {})[MAIN]
    if plan.branch == MAIN:
        return replace(plan, parent=head)
    api.create_branch(repo_id, branch=plan.branch, repo_type=REPO_TYPE, revision=head)
    inherited = sorted(path for path in hub_files(api, repo_id, head) if path not in plan.add)
    return replace(plan, parent=head, delete=inherited)


def checked_token(token: str | None) -> str | None:
    """The token, by default the one of HF_TOKEN or `hf auth login`. Raises PublishError, which does not show it, where no HTTP header can
    hold it: the client would print it."""
    token = token or get_token()
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise PublishError(f"the token ({len(token)} characters) has a space, a line break or a character that is not ASCII; copy it again")
    return token
