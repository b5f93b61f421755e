"""The only place that imports `kernels._rust`, the part of `kernels` that reads build.toml and metadata.json and hashes a variant.

It is private and may change with every version of `kernels`; there is no public one that does the same.
"""

from __future__ import annotations

import os
from importlib import metadata

TESTED = "kernels==0.17.2"


class KernelsError(ImportError):
    """`kernels` is absent or has changed; the text says what was found and what to install."""


def _installed() -> str:
    try:
        return f"kernels {metadata.version('kernels')} is installed"
    except metadata.PackageNotFoundError:
        return "kernels is not installed"


try:
    from kernels._rust import Build, Digest, DigestAlgorithm, DigestValidationError, Metadata
    from kernels.variants import parse_variant
except ImportError as error:
    raise KernelsError(
        f"these tools read packages with the private module kernels._rust, which cannot be used ({error}; {_installed()}). "
        f"Install the version that they were tested with: pip install '{TESTED}'"
    ) from error

__all__ = ["Build", "Digest", "DigestAlgorithm", "DigestValidationError", "KernelsError", "Metadata", "hash_files", "parse_variant"]


def hash_files(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The base64 sha256 of every file of a variant, as metadata.json has them, by name in alphabetical order."""
    return dict(sorted(Digest.hash_variant(DigestAlgorithm.SHA256, folder).files.items()))
