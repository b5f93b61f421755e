"""Documents from their templates and the results: `python -m benchmark.tables [--check | --write] README.md docs/numbers.md ...`.

README.md is made of README.md.j2: the same text, with an expression of Jinja in << >> wherever a number or a table stands. It may call the
functions of sentences.py, table("NAME") with a name of all_tables(), and those of `MADE`. What tables show: operation_tables.py of a suite,
step_tables.py of training steps, and `TABLES` in the file of a benchmark. --check fails, too, on a sentence that compares several commits,
on a quantity that no row has, and on steps whose tokens all went to a few experts.
"""

import argparse
import functools
import importlib
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import jinja2

from . import operation_tables, records, registry, routing, sentences, step_tables
from .markdown import NOT_MEASURED, select
from .records import Row

WIDTH = 140  # of a line that is no table's
# Tables that are not of results: the module and the function that make each.
MADE = {
    "families": ("tools.family_table", "family_table"),
    "moe_families": ("tools.family_table", "moe_table"),
    "rivals": ("benchmark.rivals", "rivals"),
    "integrations": ("tests.integrations.table", "table"),
    "whole": ("tests.whole", "table"),
    "machine_code": ("tools.machine_code", "table"),
}
# Other marks than {{ }} and {% %}: a package's card is a template itself, which kernel-builder fills.
ENVIRONMENT = jinja2.Environment(
    variable_start_string="<<", variable_end_string=">>", block_start_string="<%", block_end_string="%>", comment_start_string="<#",
    comment_end_string="#>", trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
    loader=jinja2.FileSystemLoader(records.ROOT),
)  # fmt: skip
# A page of the Hub has no documents beside it.
ENVIRONMENT.filters["unlinked"] = lambda text: re.sub(r"; \[\w+\]\([^)]*\)(?= \|)|\[([^\]]*)\]\([^)]*\)", r"\1", text)


@functools.cache
def all_tables() -> dict[str, Callable[[list[Row]], str]]:
    """Return every table by name: a function of rows that returns Markdown, or "" where nothing was measured."""
    return operation_tables.suite_tables() | step_tables.TABLES | step_tables.titled_tables() | registry.tables()


def table(name: str, rows: list[Row]) -> str:
    """Return a table by its name, and what stands below it in lines of WIDTH. Raise ValueError for one that does not exist."""
    if name not in all_tables():
        raise ValueError(f"table is {name}, expected one of {', '.join(all_tables())}")
    fold = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False).fill
    lines = (all_tables()[name](rows) or NOT_MEASURED).splitlines()
    return "\n".join(line if line.startswith("|") else fold(line) for line in lines)


def template_of(document: Path) -> Path:
    """Return where a document's template is, if it has one."""
    return document.with_name(f"{document.name}.j2")


def rendered(template: str, rows: list[Row]) -> tuple[str, list[str]]:
    """Return the document that a template makes, and a complaint for each sentence that compares several commits or hosts."""
    complaints: list[str] = []
    made = {name: lambda place=place: getattr(importlib.import_module(place[0]), place[1])() for name, place in MADE.items()}
    functions = {"table": lambda name: table(name, rows), **made, **sentences.numbers(rows, complaints)}
    return ENVIRONMENT.from_string(template).render(functions), complaints


def collapsed(rows: list[Row]) -> list[str]:
    """Return the steps, as kernel, provider and tokens, whose tokens went to so few experts that their times say nothing."""
    found = [(row, dict(row.config["routing"])) for row in select(rows, metric_name="step_time") if row.config.get("routing")]
    wrong = [row for row, each in found if routing.collapsed(each.pop("kind"), routing.Routing(**each))]
    return [f"{row.kernel_name} of {row.kernel_provider} at {row.x_value} tokens" for row in wrong]


def main(arguments=None) -> int:
    """Print, check or write tables; return the exit status."""
    p = argparse.ArgumentParser(description="Tables of the results in Markdown.")
    p.add_argument("documents", nargs="*", type=Path, help="without any, the repository's are checked or written, or all tables printed")
    p.add_argument("--gpu", default="nvidia-h200", help="folder under the results")
    p.add_argument("--results", type=Path, default=records.RESULTS)
    p.add_argument("--check", action="store_true", help="fail when a document is not what its template makes of results that may be shown")
    p.add_argument("--write", action="store_true", help="make the documents from their templates")
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
    stale, bad = [], collapsed(rows)
    for document in args.documents or (documents() if args.check or args.write else ()):
        text = template = document.read_text() if document.exists() else ""
        if template_of(document).exists():
            template = template_of(document).read_text()
            new, complaints = rendered(template, rows)
            bad += [f"{document}: {complaint}" for complaint in complaints]
            if new != text and args.write:
                document.write_text(new)
                print(f"{document}: written")
            elif new != text:
                stale.append(str(document))
        bad += [f"{document}: no row has {quantity!r}" for quantity in sentences.unsupported(template)]
    if stale and args.check:
        print(f"{', '.join(stale)}: not what the template (.md.j2) and the results make; change the text there, not here.")
        print(f"Run: python -m benchmark.tables --write {' '.join(stale)}")
    if bad and args.check:
        print("\n".join(bad))
    return int(args.check and bool(stale or bad))


def documents() -> list[Path]:
    """Return the documents of the repository that may show numbers."""
    return [path for pattern in ("*.md", "docs/*.md", "packages/*/CARD.md", "tests/*.md") for path in sorted(records.ROOT.glob(pattern))]


if __name__ == "__main__":
    sys.exit(main())
