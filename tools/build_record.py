"""Which kernels were compiled whole, for every architecture and with every check: `python -m tools.compile --record` writes it down.

The tests compile every variant of the operations that have changed since, and one variant of each other operation. The record is
committed with the kernels, so that a fresh clone compiles no more than that either.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.kernel_sources import source_digest

RECORD = Path(__file__).resolve().parent.parent / "kernel_src" / "compiled.json"
SPILLS = RECORD.with_name("spills.json")


def read_record(path: Path = RECORD) -> dict:
    """{"compiler": its identity, "sources": {operation: digest}}; empty where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"compiler": {}, "sources": {}}


def read_spills(path: Path = SPILLS) -> dict[str, dict[str, int]]:
    """{variant: {architecture: bytes}} of the variants that may spill; empty where there is no record."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def record_spills(found: Mapping[str, Mapping[str, int]], path: Path = SPILLS) -> None:
    """Writes down what a build of all packages for every target spills."""
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def changed(operations: Iterable[str], compiler: dict[str, str], path: Path = RECORD) -> set[str]:
    """The operations that this compiler has not compiled whole as their sources are now."""
    found = read_record(path)
    sources = found["sources"] if found["compiler"] == compiler else {}
    return {operation for operation in operations if sources.get(operation) != source_digest(operation)}


def record(operations: Iterable[str], compiler: dict[str, str], path: Path = RECORD) -> None:
    """Writes down that this compiler has compiled these operations whole. What another compiler did is forgotten, and so is what
    kernel_src no longer has."""
    found = read_record(path)
    kept = found["sources"] if found["compiler"] == compiler else {}
    kept = {operation: digest for operation, digest in kept.items() if (RECORD.parent / f"{operation}.py").exists()}
    sources = {**kept, **{operation: source_digest(operation) for operation in operations}}
    path.write_text(json.dumps({"compiler": compiler, "sources": sources}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
