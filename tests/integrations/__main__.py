"""The table of integrations: `python -m tests.integrations [--check | --write] docs/integrations.md`.

Its rows come from the marks `integration("library: what", ..., on=device)` of the tests that each of the folders runs; the
versions are those that pyproject.toml installs for the tests. on: the only device where a test has something to test.
"""

import argparse
import importlib
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"cpu": "tests/cpu", "cuda": "tests/gpu", "two": "tests/multigpu"}  # by what they need
DISTRIBUTIONS = {
    "Trainer": "transformers",
    **dict.fromkeys(("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "DistillationTrainer"), "trl"),
    "PEFT": "peft",
    "bitsandbytes": "bitsandbytes",
    "PyTorch": "torch",
    "DDP": "torch",
    "FSDP1": "torch",
    "FSDP2": "torch",
    "DeepSpeed": "deepspeed",
    "transformers": "transformers",
    "generate": "transformers",
    "accelerate": "accelerate",
}
BLOCK = re.compile(r"(<!-- integrations -->\n)(.*?)(<!-- /integrations -->)", re.DOTALL)


def marks_of(function):
    """The marks of a test and of its parameters."""
    for mark in getattr(function, "pytestmark", ()):
        yield mark
        if mark.name == "parametrize":
            for value in mark.args[1]:
                yield from getattr(value, "marks", ())


def rows_of(folder: str) -> dict[str, None]:
    """The rows that a folder's tests stand for, in their order."""
    found: dict[str, None] = {}
    device = "cpu" if folder == FOLDERS["cpu"] else "cuda"
    for path in sorted((ROOT / folder).glob("test_*.py")):
        if "integration" not in path.read_text():
            continue
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name, thing in vars(module).items():
            for mark in marks_of(thing) if name.startswith("test_") else ():
                if mark.name == "integration" and mark.kwargs.get("on", device) == device:
                    found |= dict.fromkeys(mark.args)
    return found


def versions() -> dict[str, str]:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    return dict(line.split("==") for line in extra if "==" in line)


def table() -> str:
    """One line for everything of a library that is tested in the same places. Raises ValueError for a library without a version."""
    where = {need: rows_of(folder) for need, folder in FOLDERS.items()}
    pinned, lines = versions(), {}
    for row in dict.fromkeys(row for rows in where.values() for row in rows):
        library, _, what = row.partition(": ")
        version = pinned.get(DISTRIBUTIONS.get(library, ""))
        if version is None:
            raise ValueError(f"{row!r} begins with {library!r}, expected one of {', '.join(DISTRIBUTIONS)}, pinned in pyproject.toml")
        name = DISTRIBUTIONS[library]
        title = f"{library} {version}" if name == library.lower() else f"{library} ({name} {version})"
        gpus = "1" if row in where["cuda"] else "2" if row in where["two"] else ""
        lines.setdefault((title, "yes" if row in where["cpu"] else "", gpus), []).append(what)
    body = [f"| {title} | {'; '.join(what)} | {cpu} | {gpus} |" for (title, cpu, gpus), what in sorted(lines.items(), key=order)]
    return "\n".join(["| | what is tested | CPU | GPUs |", "|---|---|---|---|", *body])


def order(line) -> tuple:
    (title, cpu, gpus), _ = line
    return list(DISTRIBUTIONS).index(title.partition(" ")[0]), gpus, cpu != "yes"


def main(arguments=None) -> int:
    p = argparse.ArgumentParser(description="The table of integrations, from the marks of the tests.")
    p.add_argument("document", nargs="?", type=Path, help="without it, the table is printed")
    p.add_argument("--check", action="store_true", help="fail when the document's table is not this one")
    p.add_argument("--write", action="store_true", help="replace the document's table")
    args = p.parse_args(arguments)
    if not args.document:
        print(table())
        return 0
    text = args.document.read_text()
    new = BLOCK.sub(lambda block: f"{block[1]}{table()}\n{block[3]}", text)
    if args.write:
        args.document.write_text(new)
    elif new != text:
        print(f"{args.document} has another table. Run: python -m tests.integrations --write {args.document}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
