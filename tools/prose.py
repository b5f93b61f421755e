"""Finds phrases that no native speaker would write, in sources and documents: `python -m tools.prose`. `make check` runs it.

Each was in this repository; beside it stands what to write.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHRASES = {
    r"for nothing\b(?! to)": "is ignored; for free; or None",
    r"\bhears who\b": "the first real use reports it",
    r"functions that are no Python": "in C",
    r"came not to its end": "interrupted",
    r"\bwould ask is known of\b": "these checks have been made already",
    r"Of any order of": "For either order of",
    r"another one after all": "does not match",
    r"\blies? behind (each other|one another)": "packed; side by side",
    r"^\W*The same of\b": "Computes the same ... from ...",
    r"\bbelongs? into\b": "belongs in",
    r"\bis looked at\b|\bare looked at\b": "is inspected, checked, viewed as",
    r"\bas ever\b": "as usual",
    r"behind `\w+`": "after `pack`",
    r"\bbeside that\b": "in addition",
    r"\bin the place of\b": "instead of; replaces",
    r"where nobody can tell": "where the result is the same",
    r"somebody listens": "they have hooks",
    r"[Ww]hat of (a|an|the|one|that|it|them|this|which)\b": "which parts of",
    r"\b(those|ones|\w+s) that there are\b(?! \w)": "known; not None; existing",
    r"(is|are|was|were) made again": "is recomputed",
    r"\bis none (whose|that|which)\b": "is not one that",
    r"only taken apart without": "must not be there",
    r"keeps its shape": "padding is not removed",
    r"is not on a GPU: ": "no GPU:",
}
WHERE = ("torch-ext", "kernel_src", "tools", "packages", "docs", "interpreter", "benchmark", "*.md", "*.md.j2")
KINDS = (".py", ".md", ".j2")


def files() -> list[Path]:
    """The tracked sources and documents, but for those that templates write."""
    listed = subprocess.run(["git", "ls-files", "-z", *WHERE], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    found = [ROOT / name for name in listed if name.endswith(KINDS) and not (ROOT / f"{name}.j2").exists()]
    return [path for path in found if path.is_file() and path != Path(__file__).resolve()]


def phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields (line, the phrase, what to write) of each one in a text."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, better in PHRASES.items():
            if match := re.search(pattern, line):
                yield number, match[0], better


def main() -> int:
    """Prints each place, and returns 1 if there is one."""
    found = [(path, *place) for path in files() for place in phrases(path.read_text(encoding="utf-8"))]
    for path, number, phrase, better in found:
        print(f"{path.relative_to(ROOT)}:{number}: {phrase!r}, write: {better}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
