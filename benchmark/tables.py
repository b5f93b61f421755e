"""Markdown tables from the results: `python -m benchmark.tables [--check | --write] README.md CARD.md docs/numbers.md`.

A document marks where a table stands by `<!-- table: NAME -->` and `<!-- /table -->`; the names are those of all_tables(). What they show:
operation_tables.py of a suite, step_tables.py of training steps, and `TABLES` in the file of a benchmark.
"""

import argparse
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

from . import operation_tables, records, registry, step_tables
from .markdown import NOT_MEASURED
from .records import Row

BLOCK = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


@functools.cache
def all_tables() -> dict[str, Callable[[list[Row]], str]]:
    """Return every table by name: a function of rows that returns Markdown, or "" where nothing was measured."""
    return operation_tables.suite_tables() | step_tables.TABLES | step_tables.titled_tables() | registry.tables()


def table(name: str, rows: list[Row]) -> str:
    """Return a table by its name. Raise ValueError for one that does not exist."""
    if name not in all_tables():
        raise ValueError(f"table is {name}, expected one of {', '.join(all_tables())}")
    return all_tables()[name](rows) or ("" if name in step_tables.titled_tables() else NOT_MEASURED)


def content(name: str, rows: list[Row]) -> str:
    """Return what stands between the marks of a document."""
    text = table(name, rows)
    return f"{text}\n" if text else ""


def filled(text: str, rows: list[Row]) -> str:
    """Return a document with all its tables made anew."""
    return BLOCK.sub(lambda block: f"{block[1]}{content(block[2], rows)}{block[4]}", text)


def stale(text: str, rows: list[Row]) -> list[str]:
    """Return the names of the tables of a document that are not what the results say."""
    return [name for _, name, found, _ in BLOCK.findall(text) if found != content(name, rows)]


def main(arguments=None) -> int:
    """Print, check or write tables; return the exit status."""
    p = argparse.ArgumentParser(description="Tables of the results in Markdown.")
    p.add_argument("documents", nargs="*", type=Path, help="without any, all tables are printed")
    p.add_argument("--gpu", default="nvidia-h200", help="folder under the results")
    p.add_argument("--results", type=Path, default=records.RESULTS)
    p.add_argument("--check", action="store_true", help="fail when a document's table is not what the results say")
    p.add_argument("--write", action="store_true", help="replace the documents' tables")
    args = p.parse_args(arguments)
    rows = records.read_all(args.results / args.gpu)
    if not args.documents:
        print("\n\n".join(f"## {name}\n\n{table(name, rows)}" for name in all_tables()))
    wrong = 0
    for document in args.documents:
        text = document.read_text()
        names = stale(text, rows)
        if args.write and names:
            document.write_text(filled(text, rows))
        if names:
            print(f"{document}: {'wrote' if args.write else 'not as the results say:'} {', '.join(names)}")
            wrong += not args.write
    if wrong and args.check:
        print("Run: python -m benchmark.tables --write " + " ".join(map(str, args.documents)))
    return 1 if wrong and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
