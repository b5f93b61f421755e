"""The table of integrations, which `python -m benchmark.tables --write docs/integrations.md` writes.

Its rows come from the marks `integration("library: what", ..., on=device)` of the tests that each of the folders runs; the
versions are those that pyproject.toml installs for the tests. on: the only device where a test has something to test.
"""

import importlib
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
