"""Markdown tables from the results: `python -m benchmark.tables [--check | --write] README.md CARD.md docs/numbers.md`.

A document marks where a table stands by `<!-- table: NAME -->` and `<!-- /table -->`; the names are those of all_tables(). What they show:
operation_tables.py of a suite, step_tables.py of training steps, and `TABLES` in the file of a benchmark. Numbers in its sentences are
marked as quoted.py says. --check fails, too, on a table that mixes commits without saying so, on a quantity that no row has, and on steps
whose tokens all went to a few experts.
"""

import argparse
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

from . import markdown, operation_tables, quoted, records, registry, routing, step_tables
from .markdown import NOT_MEASURED, select
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
    return all_tables()[name](rows) or NOT_MEASURED


def content(name: str, rows: list[Row]) -> str:
    """Return what stands between the marks of a document."""
    return f"{table(name, rows)}\n"


def filled(text: str, rows: list[Row]) -> str:
    """Return a document with all its tables and numbers made anew."""
    return quoted.filled(BLOCK.sub(lambda block: f"{block[1]}{content(block[2], rows)}{block[4]}", text), rows)


def stale(text: str, rows: list[Row]) -> list[str]:
    """Return the names of the tables and numbers of a document that are not what the results say."""
    return [name for _, name, found, _ in BLOCK.findall(text) if found != content(name, rows)] + quoted.stale(text, rows)


def unsaid(name: str, rows: list[Row]) -> list[str]:
    """Return the versions of Bastile whose rows a table shows without naming them."""
    markdown.SHOWN.clear()
    text = table(name, rows)
    return sorted({row.version for row in markdown.SHOWN if row.version not in text})


def collapsed(rows: list[Row]) -> list[str]:
    """Return the steps, as kernel, provider and tokens, whose tokens went to so few experts that their times say nothing."""
    found = [(row, dict(row.config["routing"])) for row in select(rows, metric_name="step_time") if row.config.get("routing")]
    wrong = [row for row, each in found if routing.collapsed(each.pop("kind"), routing.Routing(**each))]
    return [f"{row.kernel_name} of {row.kernel_provider} at {row.x_value} tokens" for row in wrong]


def complaints(text: str, rows: list[Row]) -> list[str]:
    """Return what is wrong with a document beside tables that are stale: tables that mix commits without saying so, sentences that do, and
    quantities that no row has."""
    found = [f"{name} does not name {', '.join(versions)}" for _, name, *_ in BLOCK.findall(text) if (versions := unsaid(name, rows))]
    found += [f"{spec} compares rows of several commits or hosts" for spec in quoted.apart(text, rows)]
    return found + [f"no row has {quantity!r}" for quantity in quoted.unsupported(BLOCK.sub("", text))]


def main(arguments=None) -> int:
    """Print, check or write tables; return the exit status."""
    p = argparse.ArgumentParser(description="Tables of the results in Markdown.")
    p.add_argument("documents", nargs="*", type=Path, help="without any, the repository's are checked or written, or all tables printed")
    p.add_argument("--gpu", default="nvidia-h200", help="folder under the results")
    p.add_argument("--results", type=Path, default=records.RESULTS)
    p.add_argument("--check", action="store_true", help="fail when a document is not what the results say, or these are not to be shown")
    p.add_argument("--write", action="store_true", help="replace the documents' tables and numbers")
    p.add_argument("--merge", type=Path, help="first add the rows of this folder of results, as `benchmark.all --results` writes one")
    args = p.parse_args(arguments)
    if args.merge:
        merged = records.merge(args.merge, args.results)
        if not merged:
            p.error(f"argument --merge: {args.merge} has no <gpu>/<name>.csv")
        made = sorted({getattr(row, "version", "") or row.config.get("bastile", "an unknown version") for row in merged})
        print(f"merged {len(merged)} rows of {', '.join(sorted({row.kernel_name for row in merged}))}, measured at {', '.join(made)}")
    rows = records.read_all(args.results / args.gpu)
    if not args.documents and not (args.check or args.write or args.merge):
        print("\n\n".join(f"## {name}\n\n{table(name, rows)}" for name in all_tables()))
    wrong, bad = 0, collapsed(rows)
    for document in args.documents or (documents() if args.check or args.write else ()):
        text = document.read_text()
        names = stale(text, rows)
        if args.write and names:
            text = filled(text, rows)
            document.write_text(text)
        if names:
            print(f"{document}: {'wrote' if args.write else 'not as the results say:'} {', '.join(names)}")
            wrong += not args.write
        bad += [f"{document}: {complaint}" for complaint in complaints(text, rows)] if args.check else []
    if wrong and args.check:
        print("Run: python -m benchmark.tables --write " + " ".join(map(str, args.documents)))
    if bad and args.check:
        print("\n".join(bad))
    return int(args.check and bool(wrong or bad))


def documents() -> list[Path]:
    """Return the documents of the repository that may show numbers."""
    return [*(records.ROOT / name for name in ("README.md", "CARD.md")), *sorted(records.ROOT.glob("docs/*.md")),
            *sorted(records.ROOT.glob("packages/*/CARD.md"))]


if __name__ == "__main__":
    sys.exit(main())
